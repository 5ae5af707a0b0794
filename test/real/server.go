//go:build linux

// Package real runs model servers that others wrote, on the CPU, in tests: llama.cpp's llama-server
// (one model, or the router over several), whisper.cpp's whisper-server and Docker's model runner.
// Their models are very small and have random weights. For ollama see test/ollama.
//
// Nothing is downloaded or built until one of the Start functions is called, or one of those that
// give a binary's path; what they build is kept in the user's cache folder (build.sh in each server's
// folder). Tests that call them carry the build tag real.
package real

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/test/scripts"
)

const (
	startTimeout = 60 * time.Second
	askTimeout   = 60 * time.Second
	// llama-server takes half a minute to stop when somebody still reads a stream.
	stopTimeout = 5 * time.Second
)

// A Server is one running model server.
type Server struct {
	// URL is where it listens, for example http://127.0.0.1:41234.
	URL string
	// PID is its process, the first of its group.
	PID int

	log    string
	client *http.Client
	exited chan struct{} // closed when the process has ended
	stop   sync.Once
}

// start starts a command that listens on the port and waits until path answers 200. The server is
// closed when the test ends.
func start(t testing.TB, command *exec.Cmd, port int, path string) *Server {
	t.Helper()
	if command.Dir == "" {
		command.Dir = t.TempDir()
	}
	s := &Server{
		URL:    "http://127.0.0.1:" + strconv.Itoa(port),
		log:    filepath.Join(t.TempDir(), "log"),
		client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
		exited: make(chan struct{}),
	}
	log, err := os.Create(s.log)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	command.Stdout, command.Stderr = log, log
	// A group of its own to end it by; and if the test's process is killed it ends in good order.
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := command.Start(); err != nil {
		t.Fatalf("starting %s: %v", command.Path, err)
	}
	s.PID = command.Process.Pid
	go func() {
		defer close(s.exited)
		_ = command.Wait() // ended by a signal, or how is in its log
	}()
	t.Cleanup(func() {
		s.Close()
		if t.Failed() {
			t.Logf("end of the log of %s:\n%s", filepath.Base(command.Path), s.logEnd())
		}
	})
	if err := s.waitUntilReady(path); err != nil {
		t.Fatalf("starting %s: %v", command.Path, err)
	}
	return s
}

func (s *Server) waitUntilReady(path string) error {
	deadline := time.NewTimer(startTimeout)
	defer deadline.Stop()
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	for {
		if status, _, err := s.Ask(context.Background(), http.MethodGet, path, nil); err == nil && status == http.StatusOK {
			return nil
		}
		select {
		case <-poll.C:
		case <-s.exited:
			return fmt.Errorf("it ended before it answered; its log:\n%s", s.logEnd())
		case <-deadline.C:
			return fmt.Errorf("no answer to GET %s after %v; its log:\n%s", path, startTimeout, s.logEnd())
		}
	}
}

// Exited is closed when the process has ended.
func (s *Server) Exited() <-chan struct{} { return s.exited }

// Close ends the server and what it has started. It may be called more than once.
func (s *Server) Close() {
	s.stop.Do(func() {
		_ = syscall.Kill(-s.PID, syscall.SIGTERM) // it may have ended by itself
		select {
		case <-s.exited:
		case <-time.After(stopTimeout):
		}
		_ = syscall.Kill(-s.PID, syscall.SIGKILL) // what outlived it
		<-s.exited
	})
}

// Ask sends one request and gives the answer's status and body. A body that is an io.Reader is sent
// as it is, any other but nil as JSON.
func (s *Server) Ask(ctx context.Context, method, path string, body any, header ...string) (int, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	response, err := s.Open(ctx, method, path, body, header...)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil {
		return response.StatusCode, answer, fmt.Errorf("%s %s: %w", method, path, err)
	}
	return response.StatusCode, answer, nil
}

// Open sends one request and gives the answer while its body comes. header alternates names and
// values.
func (s *Server) Open(ctx context.Context, method, path string, body any, header ...string) (*http.Response, error) {
	reader, ok := body.(io.Reader)
	if !ok && body != nil {
		encoded, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		reader = bytes.NewReader(encoded)
		header = append([]string{"Content-Type", "application/json"}, header...)
	}
	request, err := http.NewRequestWithContext(ctx, method, s.URL+path, reader)
	if err != nil {
		return nil, err
	}
	for i := 0; i+1 < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	return s.client.Do(request)
}

// logEnd gives the last of the server's log.
func (s *Server) logEnd() []byte {
	text, err := os.ReadFile(s.log)
	if err != nil {
		return []byte(err.Error())
	}
	return text[max(0, len(text)-8<<10):]
}

// FreePort gives a port of 127.0.0.1 that nobody listened on a moment ago.
func FreePort(t testing.TB) int {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port
}

// build runs a server's build.sh and gives the path of the binary.
func build(t testing.TB, name string) string {
	t.Helper()
	return scripts.Run(t, "test/real/"+name+"/build.sh")
}
