package docker_test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gpu-broker/caddy-gpu-broker/internal/lifecycletest"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/docker"
	_ "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	name = "llama"
	id   = "3627531dc0a473e82f36031602882b2b2f0316c83ac9108c371e9afb7144c07f"
)

// engine answers as a Docker Engine with one container does.
type engine struct {
	*httptest.Server
	host    string // as a configuration names it
	address string // where the container's server listens once it runs

	mu      sync.Mutex
	version string
	state   map[string]any // .State of the container
	server  net.Listener
	starts  int
	calls   []string // METHOD path?query, without the version
	spoken  string   // the version of the latest call
	answers map[string]http.HandlerFunc
	events  map[chan string]bool
}

func newEngine(t *testing.T) *engine {
	t.Helper()
	e := &engine{version: "1.47", answers: map[string]http.HandlerFunc{}, events: map[chan string]bool{}}
	e.state = map[string]any{"Status": "created", "Running": false, "Paused": false, "Restarting": false, "OOMKilled": false, "Dead": false,
		"Pid": 0, "ExitCode": 0, "Error": "", "StartedAt": "0001-01-01T00:00:00Z", "FinishedAt": "0001-01-01T00:00:00Z"}
	e.address = lifecycletest.FreeAddress(t)
	e.serve(t, filepath.Join(t.TempDir(), "docker.sock"))
	t.Cleanup(func() {
		e.Close()
		e.die(0, nil)
	})
	return e
}

// serve listens at path.
func (e *engine) serve(t *testing.T, path string) {
	t.Helper()
	listener, err := net.Listen("unix", path)
	require.NoError(t, err)
	e.Server = httptest.NewUnstartedServer(http.HandlerFunc(e.answer))
	e.Listener.Close()
	e.Listener = listener
	e.Start()
	e.host = "unix://" + path
}

var versioned = regexp.MustCompile(`^/v1\.\d+`)

func (e *engine) answer(w http.ResponseWriter, r *http.Request) {
	route := r.Method + " " + versioned.ReplaceAllString(r.URL.Path, "")
	e.mu.Lock()
	e.calls = append(e.calls, route+"?"+r.URL.RawQuery)
	if version := versioned.FindString(r.URL.Path); version != "" {
		e.spoken = version
	}
	special := e.answers[route]
	w.Header().Set("Api-Version", e.version)
	e.mu.Unlock()
	if special != nil {
		special(w, r)
		return
	}
	switch route {
	case "HEAD /_ping", "GET /_ping":
	case "GET /events":
		e.stream(w, r)
	case "GET /containers/" + name + "/json":
		e.mu.Lock()
		defer e.mu.Unlock()
		_ = json.NewEncoder(w).Encode(map[string]any{"Id": id, "Name": "/" + name, "State": e.state})
	case "POST /containers/" + name + "/start":
		w.WriteHeader(e.start())
	case "POST /containers/" + name + "/stop":
		w.WriteHeader(e.stop())
	default:
		fail(http.StatusNotFound, "page not found")(w, r)
	}
}

// fail is an answer with an error as Docker writes it.
func fail(status int, message string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(map[string]string{"message": message})
	}
}

// on replaces the answer to a route.
func (e *engine) on(route string, h http.HandlerFunc) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.answers[route] = h
}

func (e *engine) start() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.state["Running"] == true {
		return http.StatusNotModified
	}
	listener, err := net.Listen("tcp", e.address)
	if err != nil {
		return http.StatusInternalServerError
	}
	e.server = listener
	e.starts++
	e.state["Status"], e.state["Running"], e.state["Pid"] = "running", true, 4711
	e.state["StartedAt"] = time.Now().UTC().Format(time.RFC3339Nano)
	e.tell("start")
	return http.StatusNoContent
}

func (e *engine) stop() int {
	if !e.die(0, nil) {
		return http.StatusNotModified
	}
	return http.StatusNoContent
}

// die ends the container's server; with says what else its state tells.
func (e *engine) die(code int, with map[string]any) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.state["Running"] != true {
		return false
	}
	e.server.Close()
	e.state["Status"], e.state["Running"], e.state["Pid"], e.state["Paused"] = "exited", false, 0, false
	e.state["ExitCode"] = code
	for k, v := range with {
		e.state[k] = v
	}
	e.tell("die")
	return true
}

// pause is somebody's.
func (e *engine) pause() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.state["Status"], e.state["Paused"] = "paused", true
	e.tell("pause")
}

// tell tells all who listen. The caller holds mu.
func (e *engine) tell(action string) {
	now := time.Now()
	for listener := range e.events {
		listener <- fmt.Sprintf(`{"status":%q,"id":%q,"from":"gb:latest","Type":"container","Action":%q,"Actor":{"ID":%q,"Attributes":{"exitCode":"0","image":"gb:latest","name":%q}},"scope":"local","time":%d,"timeNano":%d}`+"\n",
			action, id, action, id, name, now.Unix(), now.UnixNano())
	}
}

// stream sends events until who asked goes away.
func (e *engine) stream(w http.ResponseWriter, r *http.Request) {
	mine := make(chan string, 64)
	e.mu.Lock()
	e.events[mine] = true
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		delete(e.events, mine)
		e.mu.Unlock()
	}()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w)
	_ = flush.Flush()
	for {
		select {
		case event := <-mine:
			if _, err := w.Write([]byte(event)); err != nil {
				return
			}
			_ = flush.Flush()
		case <-r.Context().Done():
			return
		}
	}
}

// called returns the calls of a route, with their queries.
func (e *engine) called(route string) (calls []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, call := range e.calls {
		if len(call) > len(route) && call[:len(route)+1] == route+"?" {
			calls = append(calls, call[len(route)+1:])
		}
	}
	return calls
}

func (e *engine) listeners() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.events)
}

// heard waits until somebody listens to the events.
func (e *engine) heard(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool { return e.listeners() > 0 }, lifecycletest.Patience, time.Millisecond)
}

// open makes a driver of the engine's container with further fields of JSON.
func (e *engine) open(t *testing.T, fields string) (lifecycle.Supervisor, chan string) {
	t.Helper()
	return open(t, fmt.Sprintf(`{"container": %q, "host": %q%s}`, name, e.host, fields), e.address)
}

func open(t *testing.T, config, address string) (lifecycle.Supervisor, chan string) {
	t.Helper()
	return lifecycletest.Open(t, new(docker.Lifecycle), config, address)
}

func provision(t *testing.T, config string) (*docker.Lifecycle, error) {
	t.Helper()
	return lifecycletest.Provision(t, new(docker.Lifecycle), config)
}
