//go:build linux

// Package demo runs the demo as its user does and tries each line that it prints.
package demo

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// patience bounds every wait of these tests: past it something hangs.
const patience = 60 * time.Second

const root = "../.."

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(built)
		os.Exit(code)
	}))
}

// built is the folder of the programs that the tests have built.
var built = filepath.Join(os.TempDir(), fmt.Sprintf("gpu-broker-demo-%d", os.Getpid()))

// command builds the demo and what it runs, once, and gives the command line that starts it.
var command = sync.OnceValues(func() ([]string, error) {
	caddy := os.Getenv("GPU_BROKER_CADDY") // the Makefile builds it once for all tests
	build := []string{"demo", "modelserver"}
	if caddy == "" {
		caddy = filepath.Join(built, "caddy")
		build = append(build, "caddy")
	}
	for _, name := range build {
		out, err := exec.Command("go", "build", "-o", filepath.Join(built, name), root+"/cmd/"+name).CombinedOutput()
		if err != nil {
			return nil, fmt.Errorf("building %s: %w\n%s", name, err, out)
		}
	}
	return []string{filepath.Join(built, "demo"), "-caddy", caddy, "-modelserver", filepath.Join(built, "modelserver")}, nil
})

// session is a running demo.
type session struct {
	cmd    *exec.Cmd
	lines  []string // what it has printed up to its guide's end
	rest   chan string
	ended  chan error
	errors strings.Builder
}

// run starts a demo with its data in dir and waits for its guide.
func run(t *testing.T, dir string) *session {
	t.Helper()
	line, err := command()
	require.NoError(t, err)
	s := &session{cmd: exec.Command(line[0], append(line[1:], "-dir", dir)...), rest: make(chan string, 1), ended: make(chan error, 1)}
	s.cmd.Dir = root
	s.cmd.Stderr = &s.errors
	out, err := s.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, s.cmd.Start())
	ready := make(chan struct{})
	go func() {
		reader := bufio.NewReader(out)
		for {
			line, err := reader.ReadString('\n')
			s.lines = append(s.lines, strings.TrimSuffix(line, "\n"))
			if err != nil || line == "What the broker decides:\n" {
				break
			}
		}
		close(ready)
		rest, _ := io.ReadAll(reader) // ends with the process
		s.rest <- string(rest)
		s.ended <- s.cmd.Wait()
	}()
	t.Cleanup(func() { _ = s.cmd.Process.Kill() })
	select {
	case <-ready:
	case <-time.After(2 * patience):
		require.Fail(t, "the demo prints no guide")
	}
	return s
}

// stop ends the demo as Ctrl-C does and gives what it has printed after its guide.
func (s *session) stop(t *testing.T) string {
	t.Helper()
	require.NoError(t, s.cmd.Process.Signal(os.Interrupt))
	select {
	case rest := <-s.rest:
		require.NoError(t, <-s.ended, s.errors.String())
		return rest
	case <-time.After(patience):
		require.Fail(t, "the demo does not stop")
		return ""
	}
}

// curls are the lines of the guide that begin with curl.
func (s *session) curls() (lines []string) {
	for _, line := range s.lines {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "curl ") {
			lines = append(lines, line)
		}
	}
	return lines
}

// children are the PIDs of the demo's child processes.
func (s *session) children(t *testing.T) (pids []int) {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(t, err)
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has just ended
		}
		// PID (NAME) STATE PPID …, where NAME may hold anything.
		fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		if fields[1] == strconv.Itoa(s.cmd.Process.Pid) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			require.NoError(t, err)
			pids = append(pids, pid)
		}
	}
	return pids
}

// shell runs a line as it stands; an answer of 400 or above fails it.
func shell(t *testing.T, line string) string {
	t.Helper()
	home := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(home, ".curlrc"), []byte("fail-with-body\nmax-time = 60\n"), 0o644))
	cmd := exec.Command("sh", "-c", line)
	cmd.Env = append(os.Environ(), "CURL_HOME="+home)
	var faults strings.Builder
	cmd.Stderr = &faults
	out, err := cmd.Output()
	require.NoError(t, err, "%s\n%s%s", line, out, faults.String())
	return string(out)
}

var sitePath = regexp.MustCompile(`https://localhost:\d+(/[\w/]*)`)

func TestEachCurlLineOfTheDemoWorksAsPrinted(t *testing.T) {
	_, err := exec.LookPath("curl")
	require.NoError(t, err, "install curl")
	// A blank and a quote in the path: the lines must be right for a shell.
	dir := filepath.Join(t.TempDir(), "a user's cache")
	s := run(t, dir)

	curls := s.curls()
	require.Len(t, curls, 8, "%s\n%s", strings.Join(s.lines, "\n"), s.errors.String())
	answers := map[string]string{}
	for _, line := range curls {
		path := sitePath.FindStringSubmatch(line)[1]
		answers[path] = shell(t, line) // the second speech, after the image, replaces the first
	}
	require.Contains(t, answers["/v1/tts"], "HTTP/2 200")
	require.Contains(t, answers["/v1/tts"], "server-timing: gpu-queue;dur=")
	require.Contains(t, answers["/v1/stt"], " bytes of sound")
	require.Contains(t, answers["/v1/llm"], "data: [DONE]")
	require.Greater(t, strings.Count(answers["/v1/llm"], "data: {"), 3, "the chat is streamed")
	require.Contains(t, answers["/v1/image"], "prompt_id")
	require.Contains(t, answers["/audio/big"], "10000000 bytes")

	var status struct {
		Scheduler struct{ Evictions int }
		Consumers map[string]struct{ Loaded bool }
	}
	require.NoError(t, json.Unmarshal([]byte(answers["/v1/status"]), &status))
	require.Equal(t, 4, status.Scheduler.Evictions, "three made way for the image, then comfyui for the speech")
	require.True(t, status.Consumers["mvoice"].Loaded)
	require.False(t, status.Consumers["comfyui"].Loaded)
	require.Contains(t, answers["/v1/decisions"], `"evicted"`)

	children := s.children(t)
	require.Len(t, children, 2, "Caddy and the model servers")
	rest := s.stop(t)
	require.Regexp(t, `evicted +comfyui`, rest, "the demo shows what is decided")
	for _, pid := range children {
		require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH, "process %d outlives the demo", pid)
	}
}

func TestASecondDemoSaysThatOneRuns(t *testing.T) {
	dir := t.TempDir()
	s := run(t, dir)
	require.NotEmpty(t, s.curls(), s.errors.String())
	out, err := exec.Command(filepath.Join(built, "demo"), "-dir", dir).CombinedOutput()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Contains(t, string(out), "runs already")

	// Another in a folder of its own finds other ports, and goes down with its Caddy.
	other := run(t, t.TempDir())
	require.NotEmpty(t, other.curls(), other.errors.String())
	require.NotEqual(t, s.curls(), other.curls())
	other.stop(t)
	s.stop(t)
}
