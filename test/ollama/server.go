//go:build linux

// Package ollama runs a real ollama on the CPU in tests, with very small models of random weights,
// and talks to it, or to whatever stands before it, with OpenAI's own Node SDK.
//
// Nothing of it is downloaded or built until [Start] or [NewClient] is called; what they build is
// kept in the user's cache folder (build.sh, setup.sh). Tests that call them carry the build tag
// real.
package ollama

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/internal/tinygguf"
	"github.com/gpu-broker/caddy-gpu-broker/test/scripts"
)

// The models that every [Server] has. /api/ps lists them with ":latest" behind the name.
const (
	Tiny  = "tiny"  // answers at once
	Tiny2 = "tiny2" // the same file under another name
	Slow  = "slow"  // takes some milliseconds for each token, so that a long answer streams for seconds
)

const (
	startTimeout = 60 * time.Second
	stopTimeout  = 10 * time.Second
)

// One thread for each model: several would wait for each other by spinning after every operation,
// and where other tests want the processor too an answer of one second would take a minute.
const modelfileText = "FROM ./model.gguf\nPARAMETER num_thread 1\n"

// A Server is one running ollama with its own empty home.
type Server struct {
	// URL is where it listens, for example http://127.0.0.1:41234.
	URL string

	binary  string
	folder  string
	command *exec.Cmd
	client  *http.Client
	exited  chan struct{} // closed when the process has ended
	stop    sync.Once
}

// A Model is an entry of /api/ps: a model that is loaded.
type Model struct {
	Name     string `json:"name"`
	Size     int64  `json:"size"`      // bytes
	SizeVRAM int64  `json:"size_vram"` // bytes; 0 on the CPU
}

// Start builds ollama if it is not cached, starts it on a free port of 127.0.0.1 and creates the
// models. environment entries ("OLLAMA_NUM_PARALLEL=4") are added to the server's environment.
// The server is closed when the test ends.
func Start(t testing.TB, environment ...string) *Server {
	t.Helper()
	s := &Server{
		binary: scripts.Run(t, "test/ollama/build.sh"),
		folder: t.TempDir(),
		client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
		exited: make(chan struct{}),
	}
	if err := s.start(environment); err != nil {
		t.Fatalf("starting ollama: %v", err)
	}
	t.Cleanup(func() {
		s.Close()
		if t.Failed() {
			t.Logf("end of ollama's log:\n%s", s.logEnd(8<<10))
		}
	})
	if err := s.waitUntilListening(); err != nil {
		t.Fatalf("starting ollama: %v", err)
	}
	for _, model := range []struct {
		name string
		size tinygguf.Size
	}{{Tiny, tinygguf.Tiny()}, {Tiny2, tinygguf.Tiny()}, {Slow, tinygguf.Slow()}} {
		if err := s.create(model.name, model.size); err != nil {
			t.Fatalf("creating model %s: %v", model.name, err)
		}
	}
	return s
}

// PS gives the loaded models, as /api/ps lists them.
func (s *Server) PS() ([]Model, error) {
	var answer struct {
		Models []Model `json:"models"`
	}
	if err := s.exchange(http.MethodGet, "/api/ps", nil, &answer); err != nil {
		return nil, err
	}
	return answer.Models, nil
}

// Unload tells ollama to unload the model, past any broker. The model is gone from PS soon after.
func (s *Server) Unload(model string) error {
	var answer struct {
		DoneReason string `json:"done_reason"`
	}
	body := map[string]any{"model": model, "keep_alive": 0, "stream": false}
	if err := s.exchange(http.MethodPost, "/api/generate", body, &answer); err != nil {
		return err
	}
	if answer.DoneReason != "unload" {
		return fmt.Errorf("unloading %s: want done_reason unload, found %q", model, answer.DoneReason)
	}
	return nil
}

// Close ends the server and the runners it has started. It may be called more than once.
func (s *Server) Close() {
	s.stop.Do(func() {
		group := -s.command.Process.Pid
		_ = syscall.Kill(group, syscall.SIGTERM) // it may have ended by itself
		select {
		case <-s.exited:
		case <-time.After(stopTimeout):
		}
		_ = syscall.Kill(group, syscall.SIGKILL) // a runner that outlived it
		<-s.exited
	})
}

func (s *Server) start(environment []string) error {
	log, err := os.Create(s.logFile())
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	s.command = exec.Command(s.binary, "serve")
	s.command.Dir = s.folder
	// Port 0: ollama takes a free one and writes it to its log.
	s.command.Env = append(append(os.Environ(), s.home()...), append(environment, "OLLAMA_HOST=127.0.0.1:0")...)
	s.command.Stdout, s.command.Stderr = log, log
	// A group of its own to end it by; and if the test's process is killed it ends in good order.
	s.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := s.command.Start(); err != nil {
		return err
	}
	go func() {
		defer close(s.exited)
		_ = s.command.Wait() // ended by a signal
	}()
	return nil
}

var listening = regexp.MustCompile(`Listening on (127\.0\.0\.1:\d+)`)

func (s *Server) waitUntilListening() error {
	deadline := time.NewTimer(startTimeout)
	defer deadline.Stop()
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	for {
		if found := listening.FindSubmatch(s.logEnd(64 << 10)); found != nil {
			s.URL = "http://" + string(found[1])
			if err := s.exchange(http.MethodGet, "/api/version", nil, nil); err == nil {
				return nil
			}
		}
		select {
		case <-poll.C:
		case <-s.exited:
			return fmt.Errorf("it ended before it listened; its log:\n%s", s.logEnd(8<<10))
		case <-deadline.C:
			return fmt.Errorf("no answer after %v; its log:\n%s", startTimeout, s.logEnd(8<<10))
		}
	}
}

func (s *Server) create(name string, size tinygguf.Size) error {
	folder := filepath.Join(s.folder, name)
	if err := os.Mkdir(folder, 0o755); err != nil {
		return err
	}
	if err := writeModel(filepath.Join(folder, "model.gguf"), size); err != nil {
		return err
	}
	modelfile := filepath.Join(folder, "Modelfile")
	if err := os.WriteFile(modelfile, []byte(modelfileText), 0o644); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	command := exec.CommandContext(ctx, s.binary, "create", name, "-f", modelfile)
	command.Dir = folder
	command.Env = append(append(os.Environ(), s.home()...), "OLLAMA_HOST="+s.URL)
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("ollama create: %w\n%s", err, output)
	}
	return nil
}

func writeModel(path string, size tinygguf.Size) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(tinygguf.Write(file, size, 1), file.Close())
}

func (s *Server) exchange(method, path string, body, answer any) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	encoded, err := json.Marshal(body)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, method, s.URL+path, bytes.NewReader(encoded))
	if err != nil {
		return err
	}
	response, err := s.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: want status 200, found %s: %s", method, path, response.Status, text)
	}
	if answer == nil {
		return nil
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("%s %s: %w in %s", method, path, err, text)
	}
	return nil
}

func (s *Server) home() []string {
	return []string{"HOME=" + s.folder, "OLLAMA_MODELS=" + filepath.Join(s.folder, "models")}
}

func (s *Server) logFile() string { return filepath.Join(s.folder, "ollama.log") }

// logEnd gives at most the last length bytes of the server's log.
func (s *Server) logEnd(length int64) []byte {
	file, err := os.Open(s.logFile())
	if err != nil {
		return []byte(err.Error())
	}
	defer func() { _ = file.Close() }()
	if info, err := file.Stat(); err == nil && info.Size() > length {
		if _, err := file.Seek(-length, io.SeekEnd); err != nil {
			return []byte(err.Error())
		}
	}
	text, err := io.ReadAll(io.LimitReader(file, length))
	if err != nil {
		return []byte(err.Error())
	}
	return text
}
