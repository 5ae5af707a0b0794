package gpubroker

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/filestorage"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// TestMain keeps what Caddy writes about its instance out of the home folder.
func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "gpu-broker-test-")
	if err == nil {
		err = os.Setenv("XDG_DATA_HOME", dir)
	}
	if err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(dir)
		os.Exit(code)
	}))
}

// newApp provisions an app with these consumers, and does not start it.
func newApp(t testing.TB, consumers ...map[string]any) (*App, caddy.Context) {
	t.Helper()
	endRetiring() // of a test that has its app elsewhere
	raw, err := json.Marshal(map[string]any{
		"gpu":       map[string]any{"driver": "simulated", "totals": []string{"16GiB"}, "dir": t.TempDir()},
		"consumers": consumers,
	})
	require.NoError(t, err)
	storage, err := json.Marshal(map[string]any{"module": "file_system", "root": t.TempDir()})
	require.NoError(t, err)
	ctx, err := caddy.ProvisionContext(&caddy.Config{Admin: &caddy.AdminConfig{Disabled: true}, StorageRaw: storage, AppsRaw: caddy.ModuleMap{"gpu_broker": raw}})
	require.NoError(t, err)
	mod, err := ctx.App("gpu_broker")
	require.NoError(t, err)
	app := mod.(*App)
	t.Cleanup(func() {
		require.NoError(t, app.Stop())
		require.NoError(t, app.Cleanup())
		endRetiring()
	})
	return app, ctx
}

// endRetiring ends a broker that is left without a configuration, so that the next test has one of its own.
func endRetiring() {
	retiring.mu.Lock()
	if retiring.pooled == nil {
		retiring.mu.Unlock()
		return
	}
	retiring.cancel()
	done := retiring.done
	retiring.mu.Unlock()
	<-done
}

// newHandler is a handler of a started app with one consumer that needs nothing.
func newHandler(t testing.TB) *Handler {
	t.Helper()
	return newHandlerOf(t, gpucaddyfile.Route{Consumer: "a"})
}

// newHandlerOf is newHandler for another route.
func newHandlerOf(t testing.TB, route gpucaddyfile.Route) *Handler {
	t.Helper()
	h := &Handler{Route: route}
	app, ctx := newApp(t, map[string]any{"name": "a", "vram": "1GiB", "concurrency": 4})
	require.NoError(t, app.Start())
	require.NoError(t, h.Provision(ctx))
	return h
}

func request(method, path string) (*httptest.ResponseRecorder, *http.Request) {
	w := httptest.NewRecorder()
	r := httptest.NewRequest(method, path, nil)
	return w, caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)
}

var nothing = caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })

func (h *Handler) inFlight() int { return h.pool.broker.Status().Scheduler.InFlight }

// What was said when a Caddyfile was adapted is not said again by the load that follows, and every later load says it anew.
func TestTheDoubtsOfARouteAreToldByEachConfiguration(t *testing.T) {
	_, ctx := newApp(t, map[string]any{"name": "a", "vram": "1GiB"})
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "a", MaxBody: 5}} // bytes, which is hardly meant
	require.NoError(t, h.Provision(ctx))
	doubts := h.routeDoubts()
	require.Len(t, doubts, 1)
	known := func() bool {
		told.mu.Lock()
		defer told.mu.Unlock()
		return told.texts[strings.TrimSpace(doubts[0].Err.Error())]
	}
	require.False(t, known(), "the next configuration tells it")
	tell(zap.NewNop(), true, doubts)
	require.True(t, known())
	require.NoError(t, h.Provision(ctx))
	require.False(t, known())
}

// A body that is passed on unread can't be changed.
func TestARouteThatStreamsBodiesChangesNone(t *testing.T) {
	models := []map[string]any{{"name": "m1", "set": map[string]any{"a": 1}}, {"name": "m2"}}
	served := map[string]any{"protocol": "http", "unload": map[string]any{"path": "/unload/{model}"}}
	_, ctx := newApp(t,
		map[string]any{"name": "sets", "vram": "1GiB", "upstream": "127.0.0.1:9", "models": models, "lifecycle": served, "model_from": []map[string]any{{"source": "header", "name": "X-Model"}}},
		map[string]any{"name": "leaves", "vram": "1GiB", "upstream": "127.0.0.1:10", "models": models[1:], "lifecycle": served, "model_from": []map[string]any{{"source": "header", "name": "X-Model"}}},
		map[string]any{"name": "renames", "vram": "1GiB", "send_as": "tuned"},
		map[string]any{"name": "plain", "vram": "1GiB"})
	for consumer, want := range map[string]string{
		"sets":    "stream_body passes bodies on unread, but set, default and strip of a model must change them",
		"leaves":  "",
		"renames": "stream_body passes bodies on unread, but send_as, or as of a fallback, must read them",
		"plain":   "",
	} {
		err := (&Handler{Route: gpucaddyfile.Route{Consumer: consumer, StreamBody: true}}).Provision(ctx)
		if want == "" {
			require.NoError(t, err, consumer)
		} else {
			require.ErrorContains(t, err, want, consumer)
		}
		require.NoError(t, (&Handler{Route: gpucaddyfile.Route{Consumer: consumer}}).Provision(ctx), consumer)
	}
}

// Caddy starts its apps in any order: the site may be there before the broker knows its newest consumer.
func TestARequestBeforeItsConfigurationRulesWaitsForIt(t *testing.T) {
	earlier := newHandler(t)
	app, ctx := newApp(t, map[string]any{"name": "b", "vram": "1GiB"})
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "b"}}
	require.NoError(t, h.Provision(ctx))

	w, r := request("GET", "/work")
	short, cancel := context.WithTimeout(r.Context(), 20*time.Millisecond)
	defer cancel()
	require.NoError(t, h.ServeHTTP(w, r.WithContext(short), nothing))
	require.Equal(t, statusClientLeft, w.Code, "it was refused, not kept waiting")

	require.NoError(t, app.Start())
	require.NoError(t, earlier.app.Stop())
	w, r = request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, nothing))
	require.Equal(t, http.StatusOK, w.Code)
}

// Before its configuration rules, and if that never comes to be, a request for
// a consumer that is there already is served as it was before.
func TestARequestBeforeItsConfigurationRulesIsServedIfItsConsumerIsThere(t *testing.T) {
	newHandler(t)
	_, ctx := newApp(t, map[string]any{"name": "a", "vram": "1GiB"})
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "a"}}
	require.NoError(t, h.Provision(ctx))
	w, r := request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, nothing))
	require.Equal(t, http.StatusOK, w.Code)
}

func TestARequestOfAConfigurationThatNeverCameToRuleIsRefusedAtOnce(t *testing.T) {
	newHandler(t)
	app, ctx := newApp(t, map[string]any{"name": "b", "vram": "1GiB"})
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "b"}}
	require.NoError(t, h.Provision(ctx))
	require.NoError(t, app.Start())
	require.NoError(t, app.Stop()) // another app failed
	w, r := request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, nothing))
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Contains(t, w.Body.String(), "not_running")
}

func TestARequestDoesNotWaitForItsConfigurationForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := broker.New()
		defer b.Close()
		a := &App{generation: &broker.Generation{}}
		began := time.Now()
		require.ErrorIs(t, a.waitRuled(t.Context(), b, "a"), errNotStarted)
		require.Equal(t, startWait, time.Since(began))
	})
}

// shaky is a writer that panics when it is first touched.
type shaky struct{ http.ResponseWriter }

func (shaky) Header() http.Header { panic("a bug") }

func TestAPanicBeforeTheServerIsReachedGivesThePlaceBack(t *testing.T) {
	h := newHandler(t)
	w, r := request("GET", "/work")
	require.Panics(t, func() { _ = h.ServeHTTP(shaky{w}, r, nothing) })
	require.Zero(t, h.inFlight())
}

func TestAPanicOfTheNextHandlerGivesThePlaceBack(t *testing.T) {
	h := newHandler(t)
	w, r := request("GET", "/work")
	require.Panics(t, func() {
		_ = h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { panic(http.ErrAbortHandler) }))
	})
	require.Zero(t, h.inFlight())
}

func TestAnAnswerThatHasBegunGetsNoErrorDocument(t *testing.T) {
	h := newHandler(t)
	w, r := request("GET", "/work")
	broke := caddyhttp.Error(http.StatusBadGateway, errors.New("the rest did not come"))
	err := h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		_, _ = w.Write([]byte("half"))
		return broke
	}))
	require.ErrorIs(t, err, broke)
	require.Equal(t, "half", w.Body.String())
}

func TestAnInformationalStatusIsNoAnswer(t *testing.T) {
	j := &job{}
	j.ResponseWriterWrapper.ResponseWriter = httptest.NewRecorder()
	j.WriteHeader(http.StatusEarlyHints)
	require.Zero(t, j.status)
	j.WriteHeader(http.StatusTeapot)
	require.Equal(t, http.StatusTeapot, j.status)
}

// A secret in a file may change while the configuration's text does not.
func TestAReloadTakesTheNewValueOfAPlaceholder(t *testing.T) {
	consumer := map[string]any{"name": "a", "vram": "1GiB", "upstream": "127.0.0.1:1", "lifecycle": map[string]any{
		"protocol": "http", "health": map[string]any{"path": "/health"}, "header": map[string]any{"Authorization": []string{"Bearer {env.GPU_BROKER_TEST_TOKEN}"}},
	}}
	t.Setenv("GPU_BROKER_TEST_TOKEN", "old")
	first, _ := newApp(t, consumer)
	same, _ := newApp(t, consumer)
	require.Equal(t, first.generation.Keys, same.generation.Keys, "an unchanged driver lives on")
	t.Setenv("GPU_BROKER_TEST_TOKEN", "new")
	changed, _ := newApp(t, consumer)
	require.NotEqual(t, first.generation.Keys, changed.generation.Keys)
}

// frozen shows the metrics of one status.
type frozen broker.Status

func (frozen) Describe(ch chan<- *prometheus.Desc)   { live{}.Describe(ch) }
func (f frozen) Collect(ch chan<- prometheus.Metric) { collect(broker.Status(f), 0, ch) }

// The driver may give the index of a lost GPU to another; a series that comes twice would fail the whole scrape.
func TestMetricsOfTwoGPUsWithOneIndexAreThoseOfTheHealthyOne(t *testing.T) {
	s := broker.Status{GPUs: []broker.GPU{
		{Index: 0, UUID: "GPU-lost", Total: 1, Health: "lost"}, {Index: 0, UUID: "GPU-well", Total: 2, Health: "healthy"}, {Index: 1, UUID: "GPU-other", Total: 3, Health: "lost"},
	}}
	r := prometheus.NewRegistry()
	require.NoError(t, r.Register(frozen(s)))
	families, err := r.Gather()
	require.NoError(t, err)
	totals := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if l := m.GetLabel(); len(l) == 2 && l[1].GetValue() == "total" {
				totals[l[0].GetValue()] = m.GetGauge().GetValue()
			}
		}
	}
	require.Equal(t, map[string]float64{"0": 2, "1": 3}, totals)
}

// handleWarm is one warm request through the handler.
func handleWarm(b *testing.B) {
	h := newHandler(b)
	w, r := request("GET", "/work")
	require.NoError(b, h.ServeHTTP(w, r, nothing))
	b.ReportAllocs()
	for b.Loop() {
		_ = h.ServeHTTP(w, r, nothing)
	}
}

func BenchmarkHandlerWithEmptyNext(b *testing.B) { handleWarm(b) }

func TestAlone_HandlerWithEmptyNextTakesAtMost5Microseconds(t *testing.T) {
	r := testing.Benchmark(handleWarm)
	t.Logf("%s %s", r, r.MemString())
	require.LessOrEqual(t, r.NsPerOp(), int64(5000))
}

// handleNamed is one warm request whose body names its model. What follows reads it, as a proxy does.
func handleNamed(b *testing.B) {
	h := newHandlerOf(b, gpucaddyfile.Route{ModelFrom: []config.ModelFrom{{Source: config.FromBody, Name: "model"}}})
	chat := `{"model":"a","temperature":0.7,"messages":[{"role":"system","content":"You are a helpful assistant. Answer briefly."},` +
		`{"role":"user","content":"` + strings.Repeat("What is the capital of France, and why is it not Lyon? ", 8) + `"}],"stream":false}`
	w, r := request("POST", "/v1/chat/completions")
	r.Header.Set("Content-Type", "application/json")
	from := strings.NewReader(chat)
	body := io.NopCloser(from)
	read := make([]byte, 1<<10)
	next := caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) (err error) {
		for err == nil {
			_, err = r.Body.Read(read)
		}
		return nil
	})
	serve := func() {
		from.Reset(chat)
		r.Body, r.ContentLength = body, int64(len(chat))
		_ = h.ServeHTTP(w, r, next)
	}
	serve()
	require.Equal(b, 200, w.Code, w.Body)
	b.ReportAllocs()
	for b.Loop() {
		serve()
	}
}

func BenchmarkHandlerByModel(b *testing.B) { handleNamed(b) }

func TestARouteThatContradictsItselfIsNotTaken(t *testing.T) {
	_, ctx := newApp(t, map[string]any{"name": "a", "upstream": "127.0.0.1:1", "vram": "1GiB"}, map[string]any{"name": "b", "upstream": "127.0.0.1:2", "vram": "1GiB"})
	for want, route := range map[string]gpucaddyfile.Route{
		"fallback names a, the consumer itself": {Consumer: "a", Fallback: []string{"a"}},
		"there is no model_from":                {Default: "a"},
		"max_body is -1 bytes":                  {Consumer: "a", MaxBody: -1},
		"did you mean":                          {Consumer: "a", Fallback: []string{"bb"}},
	} {
		route.Source = "Caddyfile:7"
		err := (&Handler{Route: route}).Provision(ctx)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "Caddyfile:7", "where it stands")
	}
}

// The model's name is in a header, and yet its server gets another body than the client sends.
func TestARouteThatMustChangeBodiesCannotStreamThem(t *testing.T) {
	for _, change := range []map[string]any{{"set": map[string]any{"a": 1}}, {"default": map[string]any{"a": 1}}, {"strip": []string{"a"}}, nil} {
		model := map[string]any{"name": "m", "vram": "1GiB"}
		for word, value := range change {
			model[word] = value
		}
		_, ctx := newApp(t, map[string]any{"name": "a", "upstream": "127.0.0.1:1", "models": []any{model}, "lifecycle": map[string]any{"protocol": "http", "unload": map[string]any{"path": "/unload/{model}"}}, "model_from": []any{map[string]any{"source": "header", "name": "X-Model"}}})
		for _, route := range []gpucaddyfile.Route{
			{Consumer: "a", StreamBody: true},
			{StreamBody: true, ModelFrom: []config.ModelFrom{{Source: config.FromHeader, Name: "X-Model"}}},
		} {
			err := (&Handler{Route: route}).Provision(ctx)
			if change == nil {
				require.NoError(t, err)
				continue
			}
			require.ErrorContains(t, err, "stream_body passes bodies on unread, but set, default and strip")
		}
	}
}

func TestTheRoutesHeadersWinOverTheBrokers(t *testing.T) {
	for _, c := range []struct {
		broker, route string
		want          bool
	}{{"", "", true}, {"off", "", false}, {"off", "on", true}, {"", "off", false}, {"on", "", true}} {
		app, ctx := newApp(t, map[string]any{"name": "a", "vram": "1GiB"})
		app.Headers = c.broker
		require.NoError(t, app.Start())
		h := &Handler{Route: gpucaddyfile.Route{Consumer: "a", Headers: c.route}}
		require.NoError(t, h.Provision(ctx))
		w, r := request("GET", "/work")
		require.NoError(t, h.ServeHTTP(w, r, nothing))
		require.Equal(t, c.want, w.Header().Get("X-Gpu-Broker-Consumer") == "a", "%+v", c)
		require.Equal(t, c.want, w.Header().Get("Server-Timing") != "", "%+v", c)
	}
}

func TestABodyAboveItsBoundIsRefusedUnread(t *testing.T) {
	for _, c := range []struct {
		broker, route gpu.Bytes
		status        int
	}{{10, 0, 200}, {9, 0, 413}, {9, 10, 200}, {99, 9, 413}} {
		app, ctx := newApp(t, map[string]any{"name": "a", "vram": "1GiB"})
		app.MaxBody = c.broker
		require.NoError(t, app.Start())
		h := &Handler{Route: gpucaddyfile.Route{Consumer: "a", MaxBody: c.route}}
		require.NoError(t, h.Provision(ctx))
		w, r := post("POST", "/work", "0123456789")
		if c.status != 200 {
			r.Body = bodyFunc(func() error {
				t.Error("it is read")
				return nil
			})
		}
		require.NoError(t, h.ServeHTTP(w, r, nothing))
		require.Equal(t, c.status, w.Code, "%+v", c)
		if c.status == 413 {
			require.Contains(t, w.Body.String(), "body_too_large")
		}
		w, r = post("POST", "/work", "0123456789") // of unknown length
		r.ContentLength = -1
		require.NoError(t, h.ServeHTTP(w, r, nothing))
		require.Equal(t, c.status, w.Code, "%+v", c)
	}
}

// A trailer that frames the message comes too late to be one, and no server may get it.
func TestABodyWhoseTrailersAreNoneIsRefused(t *testing.T) {
	h := newHandler(t)
	w, r := post("POST", "/work", "abc")
	r.Trailer = http.Header{"Content-Length": nil}
	require.NoError(t, h.ServeHTTP(w, r, caddyhttpHandler(func() { t.Error("its server gets it") })))
	require.Equal(t, http.StatusBadRequest, w.Code)
	w, r = post("POST", "/work", "abc")
	r.Trailer = http.Header{"X-Checksum": nil}
	require.NoError(t, h.ServeHTTP(w, r, nothing))
	require.Equal(t, http.StatusOK, w.Code)

	h.StreamBody = true // then they are known once it was passed on
	for _, failed := range []error{nil, caddyhttp.Error(http.StatusBadGateway, errors.New("invalid trailer"))} {
		w, r = post("POST", "/work", "abc")
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, inner *http.Request) error {
			inner.Trailer = http.Header{"Content-Length": nil}
			r.Trailer = inner.Trailer
			return failed
		})))
		require.Equal(t, failed != nil, w.Code == http.StatusBadRequest, "%d of %v", w.Code, failed)
	}
	w, r = post("POST", "/work", "abc")
	broke := errors.New("the rest did not come")
	require.ErrorIs(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		w.WriteHeader(http.StatusOK)
		r.Trailer = http.Header{"Content-Length": nil}
		return broke
	})), broke, "an answer has begun")
}

func TestAMaxRunOfTheRouteBoundsTheRun(t *testing.T) {
	for _, bound := range []time.Duration{time.Hour, 0} { // in which the consumer's does not count
		app, ctx := newApp(t, map[string]any{"name": "a", "vram": "1GiB", "max_run": "1m"})
		require.NoError(t, app.Start())
		d := caddy.Duration(bound)
		h := &Handler{Route: gpucaddyfile.Route{Consumer: "a", MaxRun: &d}}
		require.NoError(t, h.Provision(ctx))
		w, r := request("GET", "/work")
		require.NoError(t, h.ServeHTTP(w, r, nothing)) // the one that loads has a deadline of its own
		w, r = request("GET", "/work")
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
			at, bounded := r.Context().Deadline()
			require.Equal(t, bound > 0, bounded)
			require.True(t, !bounded || time.Until(at) > time.Minute)
			return nil
		})))
		require.Equal(t, http.StatusOK, w.Code)
	}
}
