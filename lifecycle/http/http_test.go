package httplife_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gpu-broker/caddy-gpu-broker/internal/lifecycletest"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	httplife "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is far longer than anything here takes; prompt is what counts as at once.
const (
	patience = 20 * time.Second
	prompt   = 2 * time.Second
)

func provision(t *testing.T, config string) (*httplife.Lifecycle, error) {
	t.Helper()
	return lifecycletest.Provision(t, new(httplife.Lifecycle), config)
}

// open makes a driver of config for upstream; adjust may change what it gets.
func open(t *testing.T, config, upstream string, adjust ...func(*lifecycle.Deps)) lifecycle.Driver {
	t.Helper()
	l, err := provision(t, config)
	require.NoError(t, err)
	deps := lifecycle.Deps{Consumer: "mvoice", Upstream: upstream, Limits: lifecycle.NewLimits(patience, patience)}
	for _, f := range adjust {
		f(&deps)
	}
	d, err := l.Open(deps)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

func probeTimeout(d time.Duration) func(*lifecycle.Deps) {
	return func(deps *lifecycle.Deps) { deps.Limits.Set(d, deps.Limits.Unload()) }
}

func unloadTimeout(d time.Duration) func(*lifecycle.Deps) {
	return func(deps *lifecycle.Deps) { deps.Limits.Set(deps.Limits.Probe(), d) }
}

// fake is a server whose answers a test sets by "METHOD /path"; it remembers what it was asked.
type fake struct {
	addr string
	*httptest.Server

	mu    sync.Mutex
	on    map[string]http.HandlerFunc
	calls []call
}

type call struct {
	route, uri, body string
	header           http.Header
}

func newFake(t *testing.T) *fake {
	t.Helper()
	f := &fake{on: map[string]http.HandlerFunc{}}
	f.Server = httptest.NewServer(http.HandlerFunc(f.serve))
	f.addr = f.Listener.Addr().String()
	t.Cleanup(f.Close)
	return f
}

func (f *fake) serve(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	route := r.Method + " " + r.URL.Path
	f.mu.Lock()
	f.calls = append(f.calls, call{route, r.RequestURI, string(body), r.Header.Clone()})
	handler := f.on[route]
	f.mu.Unlock()
	if handler == nil {
		http.NotFound(w, r)
		return
	}
	r.Body = io.NopCloser(strings.NewReader(string(body)))
	handler(w, r)
}

func (f *fake) handle(route string, h http.HandlerFunc) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.on[route] = h
}

func (f *fake) answer(route string, status int, body string) { f.handle(route, says(status, body)) }

func (f *fake) called(route string) []call {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []call
	for _, c := range f.calls {
		if c.route == route {
			out = append(out, c)
		}
	}
	return out
}

func says(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// hangs never answers; arrived, if not nil, is told when it is called.
func hangs(arrived chan<- struct{}) http.HandlerFunc {
	return func(_ http.ResponseWriter, r *http.Request) {
		if arrived != nil {
			arrived <- struct{}{}
		}
		<-r.Context().Done()
	}
}

// inTurn answers with each body once, and with the last one from then on.
func inTurn(bodies ...string) http.HandlerFunc {
	var mu sync.Mutex
	return func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		body := bodies[0]
		if len(bodies) > 1 {
			bodies = bodies[1:]
		}
		mu.Unlock()
		_, _ = io.WriteString(w, body)
	}
}

// endsWithContext runs do, ends its context once the server has been reached, and wants it back at once.
func endsWithContext(t *testing.T, arrived <-chan struct{}, do func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- do(ctx) }()
	select {
	case <-arrived:
	case <-time.After(patience):
		t.Fatal("the server was not called")
	}
	cancel()
	select {
	case err := <-done:
		require.ErrorIs(t, err, context.Canceled)
	case <-time.After(prompt):
		t.Fatal("it did not return when its context ended")
	}
}

func quote(s string) string {
	out, _ := json.Marshal(s)
	return string(out)
}
