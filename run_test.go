package gpubroker

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func TestARequestThatLeavesWhileItWaitsForAFallbackCountsAsTheFallbacks(t *testing.T) {
	app, ctx := newApp(t,
		map[string]any{"name": "off", "vram": "1GiB", "enabled": "off", "fallback": []string{"b"}},
		map[string]any{"name": "b", "vram": "1GiB"})
	require.NoError(t, app.Start())
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "off"}}
	require.NoError(t, h.Provision(ctx))
	running, err := h.pool.broker.Acquire(t.Context(), broker.Request{Consumer: "b", Priority: broker.DefaultPriority})
	require.NoError(t, err)
	defer running.Release(scheduler.Served)

	w, r := request("GET", "/work")
	r, fields := ofServer(r, &caddyhttp.Server{Logs: &caddyhttp.ServerLogConfig{}})
	waiting, leave := context.WithCancel(r.Context())
	served := make(chan error, 1)
	go func() { served <- h.ServeHTTP(w, r.WithContext(waiting), nothing) }()
	require.Eventually(t, func() bool { return h.pool.broker.Status().Scheduler.QueueDepth == 1 }, 20*time.Second, time.Millisecond)
	leave()
	require.NoError(t, <-served)
	require.Equal(t, statusClientLeft, w.Code)
	require.Equal(t, "b", fields()["gpu_consumer"])
	consumer, _ := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).GetString("http.gpu_broker.consumer")
	require.Equal(t, "b", consumer)
}

// A context of its own costs a request a copy, which only those get that could not be cut without.
func TestARequestIsPassedOnAsItIsWhereItsConnectionCanBeCut(t *testing.T) {
	h := newHandler(t)
	w, r := request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, nothing)) // the one that loads its server goes on though its client leaves
	for _, c := range []struct {
		proto   int
		streams bool
		same    bool
	}{{1, false, true}, {2, false, true}, {3, false, false}, {1, true, false}} {
		h.StreamBody = c.streams
		w, r = request("GET", "/work")
		r.ProtoMajor = c.proto
		var inner *http.Request
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
			inner = r
			require.NoError(t, r.Context().Err())
			return nil
		})))
		require.Equal(t, c.same, inner == r, "%+v", c)
		require.Equal(t, !c.same, inner.Context().Err() != nil, "%+v: its context ends with it", c)
	}
	w, r = request("GET", "/work")
	require.Panics(t, func() {
		_ = h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			w.WriteHeader(http.StatusOK)
			h.pool.running.cut()
			require.Error(t, r.Context().Err(), "while its body is on its way nothing else ends it")
			return nil
		}))
	})
}

func TestAnAdmittedRequestIsToldHowLongItWaited(t *testing.T) {
	h := newHandler(t)
	for _, c := range []struct {
		lease          broker.Lease
		timing         string
		wait, upstream any
	}{
		{broker.Lease{Consumer: "a", Upstream: h.fixed.upstream}, "gpu-queue;dur=0, gpu-load;dur=0", nil, nil},
		{broker.Lease{Consumer: "a", Upstream: h.fixed.upstream, Queued: 1500 * time.Millisecond, Loading: 250 * time.Millisecond}, "gpu-queue;dur=1500.0, gpu-load;dur=250.0", "1750", nil},
		{broker.Lease{Consumer: "a", Upstream: h.fixed.upstream, Loading: 1500 * time.Microsecond}, "gpu-queue;dur=0.0, gpu-load;dur=1.5", "1", nil},
		{broker.Lease{Consumer: "a", Upstream: h.fixed.upstream, Queued: 1500 * time.Microsecond}, "gpu-queue;dur=1.5, gpu-load;dur=0.0", "1", nil},
		{broker.Lease{Consumer: "a", Upstream: h.fixed.upstream, Queued: time.Hour + 100*time.Microsecond}, "gpu-queue;dur=3600000.1, gpu-load;dur=0.0", "3600000", nil},
		{broker.Lease{Consumer: "a", Upstream: "127.0.0.1:7"}, "gpu-queue;dur=0, gpu-load;dur=0", nil, "127.0.0.1:7"}, // a reload has moved it
	} {
		w, r := request("GET", "/work")
		r, fields := ofServer(r, &caddyhttp.Server{Logs: &caddyhttp.ServerLogConfig{}})
		repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
		before := observed(h.fixed.waited)
		(&job{handler: h, target: h.fixed, repl: repl, lease: c.lease}).tell(w, r)
		require.Equal(t, c.timing, w.Header().Get("Server-Timing"))
		require.Equal(t, "a", w.Header().Get("X-Gpu-Broker-Consumer"))
		wait, _ := repl.Get("http.gpu_broker.wait_ms")
		require.Equal(t, c.wait, wait)
		upstream, _ := repl.Get("http.gpu_broker.upstream")
		require.Equal(t, c.upstream, upstream)
		require.Equal(t, "a", fields()["gpu_consumer"])
		require.EqualValues(t, c.lease.Queued+c.lease.Loading, fields()["gpu_wait"])
		after := observed(h.fixed.waited)
		require.Equal(t, before.GetSampleCount()+1, after.GetSampleCount())
		require.InDelta(t, (c.lease.Queued + c.lease.Loading).Seconds(), after.GetSampleSum()-before.GetSampleSum(), 1e-9)
	}
	before := observed(h.fixed.ran).GetSampleCount()
	w, r := request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, nothing))
	require.Equal(t, before+1, observed(h.fixed.ran).GetSampleCount(), "so does its run")
}

// observed is what a histogram has taken in.
func observed(o prometheus.Observer) *dto.Histogram {
	var m dto.Metric
	if err := o.(prometheus.Metric).Write(&m); err != nil {
		panic(err)
	}
	return m.GetHistogram()
}

func TestTheRoomOfABodyIsGivenBackHoweverItsRequestEnds(t *testing.T) {
	h := newHandler(t)
	body := strings.Repeat("x", 200<<10)
	for name, end := range map[string]func(w http.ResponseWriter) error{
		"it is served":          func(http.ResponseWriter) error { return nil },
		"its server fails":      func(http.ResponseWriter) error { return caddyhttp.Error(http.StatusBadGateway, io.ErrUnexpectedEOF) },
		"in the middle":         func(w http.ResponseWriter) error { w.WriteHeader(http.StatusOK); return errors.New("broke") },
		"something goes astray": func(http.ResponseWriter) error { panic(http.ErrAbortHandler) },
	} {
		w, r := post("POST", "/work", body)
		func() {
			defer func() { _ = recover() }()
			_ = h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
				require.NotZero(t, h.pool.buffers.Held(), name)
				got, err := io.ReadAll(r.Body)
				require.NoError(t, err)
				require.Equal(t, len(body), len(got), name)
				return end(w)
			}))
		}()
		require.Zero(t, h.pool.buffers.Held(), name)
		require.Zero(t, h.inFlight(), name)
	}
}

// What a tunnel carries either way is how the watcher knows that it lives.
func TestWhatATunnelCarriesIsCounted(t *testing.T) {
	h := newHandler(t)
	for method, want := range map[string]int64{http.MethodConnect: 3 + 5, http.MethodPost: 3} { // of a body that was read ahead
		w, r := post(method, "/work", "abc")
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			_, err := io.ReadAll(r.Body)
			require.NoError(t, err)
			_, _ = w.Write([]byte("12345"))
			n := 0
			h.pool.running.each(func(j *job) {
				n++
				require.Equal(t, want, j.moved.Load(), method)
				require.EqualValues(t, 2, j.writes.Load(), "a write that has begun and ended")
			})
			require.Equal(t, 1, n)
			return nil
		})))
	}
}

func TestRequestsThatRunAreOnTheListUntilTheyEndInWhateverOrder(t *testing.T) {
	for _, order := range [][3]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
		var l runs
		all := [3]*job{}
		for i := range all {
			all[i] = &job{}
			all[i].ResponseWriter = httptest.NewRecorder()
			all[i].since = time.Now() // of a stage before
			l.add(all[i], answering)
			require.Equal(t, answering, all[i].stage)
			require.Zero(t, all[i].since)
		}
		for ended, i := range order {
			l.remove(all[i])
			require.Nil(t, all[i].next)
			require.Nil(t, all[i].prev)
			on := map[*job]bool{}
			l.each(func(j *job) { on[j] = true })
			require.Len(t, on, 2-ended, "%v", order)
			for _, still := range order[ended+1:] {
				require.True(t, on[all[still]], "%v", order)
			}
		}
		l.add(all[0], uploading)
		require.Equal(t, 1, l.cut())
		require.True(t, all[0].isCut.Load())
		require.False(t, all[1].isCut.Load())
	}
}

func TestAPageOfAnotherOriginMayReadAnAnswerOfTheBroker(t *testing.T) {
	for _, c := range []struct{ origin, allowed, want, exposed string }{
		{"", "", "", ""},
		{"https://x.example", "", "https://x.example", "Retry-After, X-GPU-Broker-Consumer"},
		{"https://x.example", "*", "*", ""}, // the site has its own word
	} {
		_, r := request("GET", "/work")
		header := http.Header{}
		if c.origin != "" {
			r.Header.Set("Origin", c.origin)
		}
		if c.allowed != "" {
			header.Set("Access-Control-Allow-Origin", c.allowed)
		}
		allowOrigin(header, r)
		require.Equal(t, c.want, header.Get("Access-Control-Allow-Origin"))
		require.Equal(t, c.exposed, header.Get("Access-Control-Expose-Headers"))
		require.Equal(t, c.exposed != "", header.Get("Vary") == "Origin")
	}
}

func TestARequestThatIsNotServedIsCountedByItsConsumerAndReason(t *testing.T) {
	h := newHandler(t)
	count := func(code string) float64 {
		var m dto.Metric
		require.NoError(t, metrics.errors.WithLabelValues("a", code).Write(&m))
		return m.GetCounter().GetValue()
	}
	for _, c := range []struct {
		err    error
		status int
		code   string
		retry  string
	}{
		{caddyhttp.Error(http.StatusBadGateway, io.ErrUnexpectedEOF), http.StatusBadGateway, "server_died", ""},
		{context.Canceled, statusClientLeft, codeLeft, ""},
		{errNotStarted, http.StatusServiceUnavailable, "not_running", "1"},
		{&broker.Refused{Consumer: "a", Refusal: scheduler.Refusal{Code: scheduler.NeverFits, Message: "too large"}}, http.StatusUnprocessableEntity, "never_fits", ""},
		{&broker.Refused{Consumer: "a", Refusal: scheduler.Refusal{Code: scheduler.QueueFull, Message: "full"}}, http.StatusServiceUnavailable, "queue_full", "1"},
		{&broker.Refused{Consumer: "a", Refusal: scheduler.Refusal{Code: scheduler.QueueFull, Message: "full", RetryAfter: 7 * time.Second}}, http.StatusServiceUnavailable, "queue_full", "7"},
		{&failure{status: http.StatusRequestTimeout, code: "upload_stalled", message: "stalled"}, http.StatusRequestTimeout, "upload_stalled", ""},
	} {
		w, r := request("GET", "/work")
		before := count(c.code)
		require.NoError(t, h.ServeHTTP(w, r, failing(c.err)))
		require.Equal(t, before+1, count(c.code), c.code)
		require.Equal(t, c.status, w.Code, c.code)
		require.Equal(t, c.retry, w.Header().Get("Retry-After"), c.code)
		if c.status == statusClientLeft {
			continue
		}
		require.Equal(t, c.code, document(t, w).Code)
		require.Equal(t, "a", w.Header().Get("X-Gpu-Broker-Consumer"))
		require.Empty(t, w.Header().Get("Server-Timing"), "it is no measure of a request that was not served")
		reason, _ := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).GetString("http.gpu_broker.reason")
		require.Equal(t, c.code, reason)
	}
}

func TestTheEndOfAFullReasonIsTheEndOfACharacter(t *testing.T) {
	text := strings.Repeat("x", maxReason-1) + "üx"
	require.Equal(t, text[:maxReason-1]+"…", keptReason(text))
	for _, c := range []struct {
		text  string
		bound int
		want  int
	}{{"", 0, 0}, {"ab", 2, 2}, {"ab", 3, 2}, {"ab", 1, 1}, {"üb", 2, 2}, {"üb", 1, 0}, {"aüb", 2, 1}, {"a€b", 3, 1}, {"\x80\x80\x80", 2, 0}} {
		require.Equal(t, c.want, cutAt(c.text, c.bound), "%q at %d", c.text, c.bound)
	}
}

// The work of such a request outlives its answer, which names the job that does it.
func TestTheJobThatAnAnswerNamesIsFollowed(t *testing.T) {
	asked := make(chan string, 100)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/jobs/") {
			select {
			case asked <- r.URL.Path:
			default:
			}
		}
		_, _ = w.Write([]byte(`{"done":true}`))
	}))
	t.Cleanup(srv.Close)
	app, ctx := newApp(t, map[string]any{"name": "a", "vram": "1GiB", "upstream": srv.Listener.Addr().String(), "async": true, "async_routes": []string{"POST /prompt"},
		"lifecycle": map[string]any{"protocol": "http", "jobs": map[string]any{"path": "/jobs/{item}", "id": "$.id", "done": "$.done"}, "unload": map[string]any{"path": "/unload"}}})
	require.NoError(t, app.Start())
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "a"}}
	require.NoError(t, h.Provision(ctx))
	for _, c := range []struct {
		path   string
		status int
		answer string
		job    string // that is followed then
	}{
		{"/prompt", 200, `{"id":7}`, "/jobs/7"},
		{"/prompt", 400, `{"id":8}`, ""}, // it was refused
		{"/other", 200, `{"id":9}`, ""},
		{"/prompt", 202, `{"id":10}`, "/jobs/10"},
	} {
		w, r := post("POST", c.path, "{}")
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			w.WriteHeader(c.status)
			for _, part := range strings.SplitAfter(c.answer, ":") {
				_, _ = w.Write([]byte(part))
			}
			return nil
		})))
		require.Equal(t, c.answer, w.Body.String())
		if c.job == "" {
			continue // that none of them is asked for is seen by the next
		}
		select {
		case path := <-asked:
			require.Equal(t, c.job, path)
		case <-time.After(20 * time.Second):
			t.Fatal("nobody asks for " + c.job)
		}
	}
}

// A server that breaks off has worked on the request, and nobody else has ended that.
func TestARequestThatItsServerBreaksOffCountsAsUse(t *testing.T) {
	h := newHandler(t)
	for _, c := range []struct {
		err  error
		used bool
	}{{nil, false}, {io.ErrUnexpectedEOF, true}} {
		w, r := request("GET", "/work")
		_ = h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return c.err }))
		require.Equal(t, c.used, h.pool.broker.Status().Consumers["a"].LastUsed != "", "%v", c.err)
	}
}

// What a body took is the next request's, so who keeps its reader must not read on.
func TestTheBodyOfAServedRequestIsReadNoMore(t *testing.T) {
	h := newHandler(t)
	for _, served := range []bool{true, false} {
		w, r := request("POST", "/work")
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader("hello")), 5
		var kept io.Reader
		_ = h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
			kept = r.Body
			if !served {
				return caddyhttp.Error(http.StatusBadGateway, errors.New("no answer"))
			}
			return nil
		}))
		text, err := io.ReadAll(kept)
		if served {
			require.ErrorContains(t, err, "the request is over")
		} else {
			require.NoError(t, err)
			require.Equal(t, "hello", string(text), "an error route may pass it elsewhere")
		}
	}
}
