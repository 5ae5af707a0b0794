package gpubroker

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
)

// stoppedServer is an app with a consumer whose server the broker starts, and which does not run.
func stoppedServer(t *testing.T) *Handler {
	t.Helper()
	app, ctx := newApp(t, map[string]any{"name": "m", "vram": "1GiB", "bypass": []string{"GET /"}, "touch": []string{"POST /touch"}, "blocked": []string{"POST /private"}, "start_on": []string{"GET /start"},
		"lifecycle": map[string]any{"protocol": "process", "command": []string{"/bin/false", "{gpu_broker.port}"}}})
	require.NoError(t, app.Start())
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "m"}}
	require.NoError(t, h.Provision(ctx))
	return h
}

func TestARequestThatNeedsNoGPUDoesNotStartAServer(t *testing.T) {
	h := stoppedServer(t)
	for _, c := range []struct{ method, path, code string }{
		{"GET", "/", "not_running"},
		{"POST", "/touch", "not_running"},
		{"POST", "/private", "blocked"},
		{"OPTIONS", "/", "not_running"},
	} {
		w, r := request(c.method, c.path)
		require.NoError(t, h.ServeHTTP(w, r, caddyhttpHandler(func() { t.Error(c.path + " is passed on") })))
		doc := document(t, w)
		require.Equal(t, c.code, doc.Code, c.path)
		if c.code == "blocked" {
			require.Equal(t, http.StatusForbidden, w.Code)
			require.Contains(t, doc.Message, "POST /private of consumer \"m\" is not for clients")
			continue
		}
		require.Equal(t, http.StatusServiceUnavailable, w.Code, c.path)
		require.Equal(t, "5", w.Header().Get("Retry-After"))
	}
	w, r := request("GET", "/start")
	require.NoError(t, h.ServeHTTP(w, r, nothing))
	require.Equal(t, "load_failed", document(t, w).Code, "it was started, and ended at once")
}

func TestARequestThatNeedsNoGPUGetsTheErrorOfItsProxy(t *testing.T) {
	h := newHandlerOf(t, gpucaddyfile.Route{Consumer: "a", Bypass: []string{"GET /free"}, Touch: []string{"GET /touch"}})
	for _, path := range []string{"/free", "/touch"} {
		refused := reverseproxy.NewDialError(errors.New("connection refused"))
		w, r := request("GET", path)
		require.Equal(t, refused, h.ServeHTTP(w, r, failing(refused)), path)
		require.Empty(t, w.Body.String())
		w, r = request("GET", path)
		other := errors.New("whatever")
		require.Equal(t, other, h.ServeHTTP(w, r, failing(other)), path)
		w, r = request("GET", path)
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
			r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Set("http.reverse_proxy.upstream.hostport", ":80")
			return refused
		})))
		require.Equal(t, "misrouted", document(t, w).Code, path)
	}
	require.Zero(t, h.pool.broker.Status().Scheduler.TotalJobs, "none of them took a place")
}

func TestATouchCountsAsUseAndABypassDoesNot(t *testing.T) {
	h := newHandlerOf(t, gpucaddyfile.Route{Consumer: "a", Bypass: []string{"GET /free"}, Touch: []string{"GET /touch"}})
	used := func() string { return h.pool.broker.Status().Consumers["a"].LastUsed }
	ask := func(path string) {
		t.Helper()
		w, r := request("GET", path)
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			w.WriteHeader(http.StatusOK)
			return nil
		})))
	}
	ask("/work")
	was := used()
	require.NotEmpty(t, was)
	require.Eventually(t, func() bool { ask("/touch"); return used() != was }, 20*time.Second, time.Millisecond)
	was = used()
	now := func() bool {
		at, err := time.Parse(time.RFC3339Nano, was)
		return err == nil && time.Since(at) > 5*time.Millisecond
	}
	require.Eventually(t, func() bool { ask("/free"); return now() }, 20*time.Second, time.Millisecond)
	require.Equal(t, was, used())
}

// What a tunnel carries shows that its client takes part, in both directions.
func TestATunnelsBytesAreCounted(t *testing.T) {
	client, server := net.Pipe()
	j := new(job)
	j.ResponseWriter = hijacked{httptest.NewRecorder(), server}
	conn, rest, err := j.Hijack()
	require.NoError(t, err)
	require.NotNil(t, rest)
	go func() {
		_, _ = client.Write([]byte("abc"))
		_, _ = io.CopyN(io.Discard, client, 5)
		_ = client.Close()
	}()
	_, err = io.ReadFull(conn, make([]byte, 3))
	require.NoError(t, err)
	require.EqualValues(t, 3, j.moved.Load())
	_, err = conn.Write([]byte("abcde"))
	require.NoError(t, err)
	require.EqualValues(t, 8, j.moved.Load())
	require.True(t, j.tunnel.Load())

	j = new(job)
	j.ResponseWriter = httptest.NewRecorder()
	_, _, err = j.Hijack()
	require.ErrorIs(t, err, http.ErrNotSupported)
	require.False(t, j.tunnel.Load())
}

type hijacked struct {
	*httptest.ResponseRecorder
	conn net.Conn
}

func (h hijacked) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return h.conn, bufio.NewReadWriter(bufio.NewReader(h.conn), bufio.NewWriter(h.conn)), nil
}

func counted(t *testing.T, c prometheus.Counter) float64 {
	t.Helper()
	var m dto.Metric
	require.NoError(t, c.Write(&m))
	return m.GetCounter().GetValue()
}

func TestErrorsAreCountedByTheirCode(t *testing.T) {
	h := byModelHandler(t, gpucaddyfile.Route{ModelFrom: inBody})
	left := metrics.errors.WithLabelValues("plain", codeLeft)
	off := metrics.errors.WithLabelValues("off", "not_running")
	for _, c := range []struct {
		count prometheus.Counter
		body  string
		next  caddyhttp.Handler
	}{
		{left, `{"model":"plain"}`, failing(io.EOF)},           // whose client leaves meanwhile
		{left, `{"model":"plain"}`, failing(context.Canceled)}, // as the proxy tells
		{off, `{"model":"off"}`, nothing},
	} {
		was := counted(t, c.count)
		w, r := post("POST", "/v1/chat/completions", c.body)
		ctx, leave := context.WithCancel(r.Context())
		r = r.WithContext(ctx)
		_ = h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			err := c.next.ServeHTTP(w, r)
			if errors.Is(err, io.EOF) {
				leave()
			}
			return err
		}))
		leave()
		require.InDelta(t, was+1, counted(t, c.count), 0)
	}
}

func TestAStreamAfterHeartbeatsIsToldHowLongItWaited(t *testing.T) {
	for headers, want := range map[string]bool{"on": true, "off": false} {
		h, free := beating(t)
		h.headers = headers == "on"
		w, r := request("GET", "/stream")
		r.Header.Set("Accept", "text/event-stream")
		r.Header.Set("Accept-Encoding", "br")
		first := &seen{ResponseRecorder: w, first: make(chan struct{})}
		began := first.first
		served := make(chan error, 1)
		go func() {
			served <- h.ServeHTTP(first, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
				if r.Header.Get("Accept-Encoding") != "identity" {
					return errors.New("a compressed stream can't follow comments")
				}
				w.Header().Set("Content-Type", "text/event-stream")
				_, err := w.Write([]byte("data: 1\n\n"))
				return errors.Join(err, errors.New("it broke off")) // after its beginning nothing can be told
			}))
		}()
		<-began
		free()
		require.NoError(t, <-served)
		require.True(t, strings.HasSuffix(w.Body.String(), "data: 1\n\n"), w.Body)
		require.Equal(t, want, strings.Contains(w.Body.String(), ": gpu-queue;dur="), w.Body)
		require.Equal(t, want, w.Header().Get("X-Gpu-Broker-Consumer") == "a")
	}
}

func TestAHeartbeatTellsWhatIsWaitedFor(t *testing.T) {
	require.Equal(t, ": waiting for the answer\n\n", saying(broker.Place{Consumer: "a", Loading: true}))
	require.Equal(t, ": waiting for a, position 3\n\n", saying(broker.Place{Consumer: "a", Position: 3}))
	require.Equal(t, ": waiting for a, which is being loaded, position 1\n\n", saying(broker.Place{Consumer: "a", Position: 1, Loading: true}))
}

func TestAFullDiskIsToldWithoutTheNamesOfFiles(t *testing.T) {
	err := storageFull(&os.PathError{Op: "write", Path: "/secret/path", Err: errors.New("no space left on device")})
	require.NotContains(t, err.Error(), "/secret")
	require.Contains(t, err.Error(), "no space left on device: make room")
	var f *failure
	require.ErrorAs(t, err, &f)
	require.Equal(t, 30*time.Second, f.retryAfter)
}

// With lists, what none of them names takes a turn: of a consumer with models it loads nothing.
func TestARequestThatNoListNamesTakesATurn(t *testing.T) {
	_, ctx := newApp(t, map[string]any{"name": "a", "vram": "1GiB", "gpu_routes": []string{"POST /work"}, "unlisted_requests": "gpu"})
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "a"}}
	require.NoError(t, h.Provision(ctx))
	require.NoError(t, h.app.Start())
	byModel := &Handler{Route: gpucaddyfile.Route{ModelFrom: inBody, Default: "a"}}
	require.NoError(t, byModel.Provision(ctx))
	for i, h := range []*Handler{h, byModel} {
		before := h.pool.broker.Status().Scheduler.TotalJobs
		for _, c := range []struct {
			method, path string
			turn         bool
		}{{"POST", "/odd", true}, {"GET", "/odd", false}, {"POST", "/work", true}} {
			w, r := post(c.method, c.path, `{"a":1}`)
			running := -1
			require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
				running = h.inFlight()
				return nil
			})))
			want := 0
			if c.turn {
				want, before = 1, before+1
			}
			require.Equal(t, want, running, "%s %s of route %d", c.method, c.path, i)
		}
		require.Equal(t, before, h.pool.broker.Status().Scheduler.TotalJobs)
	}
}
