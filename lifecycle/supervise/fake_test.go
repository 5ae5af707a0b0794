package supervise_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gpu-broker/caddy-gpu-broker/internal/lifecycletest"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	httplife "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/supervise"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is far longer than anything here takes; prompt is what counts as at once.
const (
	patience = 20 * time.Second
	prompt   = 2 * time.Second
)

// server is a means whose server is a listener of the test's own, with answers by "METHOD /path".
type server struct {
	address string

	mu      sync.Mutex
	on      map[string]http.HandlerFunc
	asked   []string // routes asked for, and "start" and "stop"
	http    *httptest.Server
	ended   chan struct{}
	blind   bool // Ended can't tell
	runs    bool
	starts  int
	target  lifecycle.Target
	why     string
	output  []string
	failing struct{ start, stop, running error }
	mute    bool // it starts but does not listen
	closed  bool
	// starting is called in a start, once.
	starting func()
	// looked is called once Running knows its answer, once.
	looked func()
}

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{address: lifecycletest.FreeAddress(t), on: map[string]http.HandlerFunc{}}
	t.Cleanup(func() { s.end("the test is over") })
	return s
}

func (s *server) Start(_ context.Context, t lifecycle.Target) error {
	if f := s.starting; f != nil {
		s.starting = nil
		f()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.runs {
		return nil
	}
	s.asked = append(s.asked, "start")
	if s.failing.start != nil {
		return s.failing.start
	}
	s.starts++
	s.runs, s.ended, s.target = true, make(chan struct{}), t
	if !s.mute {
		s.listen()
	}
	return nil
}

// listen opens the port. The caller holds mu.
func (s *server) listen() {
	l, err := net.Listen("tcp", s.address)
	if err != nil {
		panic(err)
	}
	s.http = &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(s.serve)}}
	s.http.Start()
}

func (s *server) openPort() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listen()
}

func (s *server) serve(w http.ResponseWriter, r *http.Request) {
	route := r.Method + " " + r.URL.Path
	s.mu.Lock()
	s.asked = append(s.asked, route)
	answer := s.on[route]
	s.mu.Unlock()
	if answer != nil {
		answer(w, r)
	}
}

func (s *server) Stop(context.Context) error {
	s.mu.Lock()
	s.asked = append(s.asked, "stop")
	err := s.failing.stop
	s.mu.Unlock()
	if err == nil {
		s.end("it was stopped")
	}
	return err
}

// end ends the server.
func (s *server) end(why string, output ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.runs {
		return
	}
	s.runs, s.why, s.output = false, why, output
	close(s.ended)
	if s.http != nil {
		s.http.CloseClientConnections()
		_ = s.http.Listener.Close()
		go s.http.Close()
		s.http = nil
	}
}

func (s *server) Running(context.Context) (bool, error) {
	s.mu.Lock()
	runs, err := s.runs, s.failing.running
	s.mu.Unlock()
	if f := s.looked; f != nil {
		s.looked = nil
		f()
	}
	return runs, err
}

func (s *server) Latest() (<-chan struct{}, string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.blind {
		return nil, s.address
	}
	return s.ended, s.address
}

func (s *server) Why() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.why
}

func (s *server) Owns(pid int) bool { return pid == 77 }

func (s *server) State() lifecycle.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return lifecycle.State{Running: s.runs, Starts: s.starts, Output: s.output}
}

func (s *server) Close() error {
	s.end("closed")
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return nil
}

// says sets the answer of a route.
func (s *server) says(route string, status int, body string) {
	s.answers(route, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	})
}

func (s *server) answers(route string, f http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.on[route] = f
}

func (s *server) was() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.asked)
}

func (s *server) fail(set func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	set()
}

// died collects what Died was told.
type died chan string

func (d died) none(t *testing.T) {
	t.Helper()
	select {
	case how := <-d:
		require.Fail(t, "Died was told", how)
	default:
	}
}

func (d died) once(t *testing.T) string {
	t.Helper()
	select {
	case how := <-d:
		return how
	case <-time.After(patience):
		require.Fail(t, "Died was not told")
		return ""
	}
}

// open makes a supervisor of s with the routes that config tells.
func open(t *testing.T, s supervise.Means, config string, adjust ...func(*lifecycle.Deps)) (lifecycle.Supervisor, died) {
	t.Helper()
	l, err := lifecycletest.Provision(t, new(httplife.Lifecycle), config)
	require.NoError(t, err)
	told := make(died, 10)
	deps := lifecycle.Deps{Consumer: "qwen", Limits: lifecycle.NewLimits(patience, patience), Died: func(how string) { told <- how }}
	for _, f := range adjust {
		f(&deps)
	}
	d, err := supervise.New(s, l, deps)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d, told
}

func within(t *testing.T, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// routes is was without what only looks.
func (s *server) did() []string {
	return slices.DeleteFunc(s.was(), func(w string) bool { return strings.HasPrefix(w, "GET ") })
}

var errBroken = errors.New("the means is broken")
