package httplife_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/lifecycletest"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

func TestWithoutHealthRouteAnOpenPortIsHealthy(t *testing.T) {
	f := newFake(t)
	d := open(t, `{}`, f.addr)
	assert.Equal(t, lifecycle.Traits{Health: true}, d.Traits())
	assert.Equal(t, lifecycle.Report{Outcome: lifecycle.Answered, Resident: -1}, d.Probe(t.Context()))

	report := open(t, `{}`, lifecycletest.FreeAddress(t)).Probe(t.Context())
	assert.Equal(t, lifecycle.Refused, report.Outcome)
	assert.Contains(t, report.Detail, "connection refused")
}

func TestWithoutUpstreamNothingIsProbed(t *testing.T) {
	d := open(t, `{}`, "")
	assert.Equal(t, lifecycle.Traits{}, d.Traits())
	assert.Equal(t, int64(-1), int64(d.Probe(t.Context()).Resident))
}

func TestTraitsFollowTheRoutes(t *testing.T) {
	d := open(t, `{"health":{"path":"/h","loaded":"$.loaded"},"load":{"path":"/l"},"unload":{"path":"/u"},"busy":{"path":"/b","busy":"$.n"}}`, "127.0.0.1:1")
	assert.Equal(t, lifecycle.Traits{Load: true, Unload: true, Health: true, Residency: true, Busy: true}, d.Traits())
	d = open(t, `{"health":{"path":"/h"}}`, "127.0.0.1:1")
	assert.Equal(t, lifecycle.Traits{Health: true}, d.Traits())
}

func TestHealthOutcomes(t *testing.T) {
	cutOff := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100")
		_, _ = io.WriteString(w, `{"loaded":`)
		panic(http.ErrAbortHandler)
	}
	dies := func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		route   string
		want    lifecycle.Outcome
		detail  string
	}{
		"accepted by default":         {says(204, ""), `{"path":"/health"}`, lifecycle.Answered, ""},
		"accepted by list":            {says(503, ""), `{"path":"/health","accept":[200,503]}`, lifecycle.Answered, ""},
		"not in the list":             {says(204, ""), `{"path":"/health","accept":[200]}`, lifecycle.Wrong, "answered 204, wanted 200"},
		"loading":                     {says(503, "Loading\n model"), `{"path":"/health"}`, lifecycle.Wrong, "health route GET /health answered 503, wanted 2xx: Loading model"},
		"redirect is not followed":    {http.RedirectHandler("/elsewhere", http.StatusFound).ServeHTTP, `{"path":"/health"}`, lifecycle.Wrong, "answered 302"},
		"connection dies":             {dies, `{"path":"/health"}`, lifecycle.Wrong, "the connection broke"},
		"connection dies in the body": {cutOff, `{"path":"/health","loaded":"$.loaded"}`, lifecycle.Wrong, "the connection broke"},
		"hangs":                       {hangs(nil), `{"path":"/health"}`, lifecycle.TimedOut, "did not answer within"},
		"not JSON is still healthy":   {says(200, "fine"), `{"path":"/health","loaded":"$.loaded"}`, lifecycle.Answered, "the answer is not JSON"},
		"JSON without the key":        {says(200, "{}"), `{"path":"/health","loaded":"$.loaded"}`, lifecycle.Answered, "the answer has no $.loaded"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			f.handle("GET /health", c.handler)
			limit := patience
			if c.want == lifecycle.TimedOut {
				limit = 50 * time.Millisecond
			}
			report := open(t, `{"health":`+c.route+`}`, f.addr, probeTimeout(limit)).Probe(t.Context())
			assert.Equal(t, c.want, report.Outcome, report.Detail)
			assert.Equal(t, lifecycle.Unknown, report.Loaded)
			if c.detail == "" {
				assert.Empty(t, report.Detail)
			}
			assert.Contains(t, report.Detail, c.detail)
		})
	}
}

func TestHealthRouteRefusedByNobody(t *testing.T) {
	report := open(t, `{"health":{"path":"/health"}}`, lifecycletest.FreeAddress(t)).Probe(t.Context())
	assert.Equal(t, lifecycle.Refused, report.Outcome)
	assert.Contains(t, report.Detail, "does the server run at 127.0.0.1:")
}

func TestAStatusOnlyHealthRouteDoesNotWaitForABody(t *testing.T) {
	f := newFake(t)
	f.handle("GET /events", func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	assert.Equal(t, lifecycle.Answered, open(t, `{"health":{"path":"/events"}}`, f.addr).Probe(t.Context()).Outcome)
}

func TestAnErrorWhoseBodyHangsIsStillWrongAndNotATimeOut(t *testing.T) {
	f := newFake(t)
	f.handle("POST /load", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(500)
		_, _ = io.WriteString(w, "no such model")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	err := open(t, `{"load":{"path":"/load"}}`, f.addr, probeTimeout(50*time.Millisecond)).Load(t.Context(), lifecycle.Target{})
	assert.ErrorContains(t, err, "load route POST /load answered 500, wanted 2xx: no such model")
}

func TestLoadedIsReadFromManyShapes(t *testing.T) {
	for _, c := range []struct {
		expression, body string
		want             lifecycle.Tri
	}{
		{"$.x", `{"x":true}`, lifecycle.Yes},
		{"$.x", `{"x":false}`, lifecycle.No},
		{"$.x", `{"x":1}`, lifecycle.Yes},
		{"$.x", `{"x":0}`, lifecycle.No},
		{"$.x", `{"x":-1}`, lifecycle.No},
		{"$.x", `{"x":"llama3"}`, lifecycle.Yes},
		{"$.x", `{"x":""}`, lifecycle.No},
		{"$.x", `{"x":"None"}`, lifecycle.No},
		{"$.x", `{"x":" unloaded "}`, lifecycle.No},
		{"$.x", `{"x":"null"}`, lifecycle.No},
		{"$.x", `{"x":"False"}`, lifecycle.No},
		{"$.x", `{"x":null}`, lifecycle.No},
		{"$.x", `{"x":[]}`, lifecycle.No},
		{"$.x", `{"x":[0]}`, lifecycle.Yes},
		{"$.x", `{"x":{}}`, lifecycle.No},
		{"$.x", `{"x":{"a":0}}`, lifecycle.Yes},
		{"$.x", `{}`, lifecycle.Unknown},
		{"$.x", `[]`, lifecycle.Unknown},
		{"$.x", `{"x":true`, lifecycle.Unknown},
		{"$.x[*]", `{}`, lifecycle.No}, // documented: a wildcard hides a missing key
		{"!$.is_sleeping", `{"is_sleeping":true}`, lifecycle.No},
		{"!$.is_sleeping", `{"is_sleeping":false}`, lifecycle.Yes},
		{`$.status == "loaded"`, `{"status":"loading"}`, lifecycle.No},
		{`$.data[?(@.status.value == "loaded")]`, `{"data":[{"status":{"value":"unloaded"}},{"status":{"value":"loaded"}}]}`, lifecycle.Yes},
		{`$.data[?(@.status.value == "loaded")]`, `{"data":[{"status":{"value":"unloaded"}}]}`, lifecycle.No},
		{"$.used > 1000", `{"used":999}`, lifecycle.No},
	} {
		f := newFake(t)
		f.answer("GET /state", 200, c.body)
		d := open(t, `{"residency":{"path":"/state","loaded":`+quote(c.expression)+`}}`, f.addr)
		report := d.Probe(t.Context())
		assert.Equal(t, lifecycle.Answered, report.Outcome)
		assert.Equal(t, c.want, report.Loaded, "%s of %s", c.expression, c.body)
		assert.Equal(t, c.want == lifecycle.Unknown, report.Detail != "", "detail %q", report.Detail)
	}
}

func TestResidentMemoryIsSummedInItsUnit(t *testing.T) {
	for _, c := range []struct {
		field, expression, body string
		want                    gpu.Bytes
	}{
		{"resident_mib", "$.mem", `{"loaded":true,"mem":2868}`, 2868 * gpu.MiB},
		{"resident_mib", "$.mem", `{"loaded":true,"mem":0.5}`, gpu.MiB / 2},
		{"resident_bytes", "$.mem", `{"loaded":true,"mem":5000}`, 5000},
		{"resident_bytes", "$.m[*].v", `{"loaded":true,"m":[{"v":1000},{"v":24}]}`, 1024},
		{"resident_bytes", "$.m[*].v", `{"loaded":false,"m":[]}`, 0},
		{"resident_bytes", "$.m[*].v", `{}`, -1},
		{"resident_bytes", "$.mem", `{"loaded":true}`, -1},
		{"resident_bytes", "$.mem", `{"loaded":true,"mem":-5}`, -1},
		{"resident_bytes", "$.mem", `{"loaded":true,"mem":"12"}`, -1},
		{"resident_mib", "$.mem", `{"loaded":true,"mem":1e300}`, -1},
	} {
		f := newFake(t)
		f.answer("GET /health", 200, c.body)
		d := open(t, `{"health":{"path":"/health","loaded":"$.loaded","`+c.field+`":`+quote(c.expression)+`}}`, f.addr)
		assert.Equal(t, c.want, d.Probe(t.Context()).Resident, "%s %s of %s", c.field, c.expression, c.body)
	}
}

// What else is read of the answer has units of its own, or none.
func TestResidentMemoryKeepsItsUnitBesideModels(t *testing.T) {
	f := newFake(t)
	f.answer("GET /health", 200, `{"mem":3,"models":[{"name":"a","digest":"1","size":5}]}`)
	report := open(t, `{"health":{"path":"/health","resident_mib":"$.mem","names":"$.models[*].name","digests":"$.models[*].digest","sizes_bytes":"$.models[*].size"}}`, f.addr).Probe(t.Context())
	assert.Equal(t, []lifecycle.Model{{Name: "a", Digest: "1", Resident: 5, Size: -1}}, report.Models)
	assert.Equal(t, 3*gpu.MiB, report.Resident)
}

func TestHealthWithLoadedIsAskedOnceForBoth(t *testing.T) {
	f := newFake(t)
	f.answer("GET /health", 200, `{"loaded":true,"gpu_resident_mib":2868}`)
	d := open(t, `{"health":{"path":"/health","loaded":"$.loaded","resident_mib":"$.gpu_resident_mib"}}`, f.addr)
	assert.Equal(t, lifecycle.Report{Loaded: lifecycle.Yes, Resident: 2868 * gpu.MiB}, d.Probe(t.Context()))
	assert.Len(t, f.called("GET /health"), 1)
}

func TestAResidencyRouteThatFailsLeavesAHealthyServerUnknown(t *testing.T) {
	const config = `{"health":{"path":"/health"},"residency":{"path":"/state","loaded":"$.loaded"}}`
	for name, handler := range map[string]http.HandlerFunc{"wrong": says(500, "boom"), "hangs": hangs(nil), "not JSON": says(200, "hm")} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			f.answer("GET /health", 200, "")
			f.handle("GET /state", handler)
			report := open(t, config, f.addr, probeTimeout(200*time.Millisecond)).Probe(t.Context())
			assert.Equal(t, lifecycle.Answered, report.Outcome)
			assert.Equal(t, lifecycle.Unknown, report.Loaded)
			assert.Contains(t, report.Detail, "residency route GET /state")
		})
	}
	t.Run("no list", func(t *testing.T) {
		f := newFake(t)
		f.answer("GET /health", 200, "")
		f.answer("GET /state", 200, `{"models":[{"name":{}}]}`)
		report := open(t, `{"health":{"path":"/health"},"residency":{"path":"/state","names":"$.models[*].name"}}`, f.addr).Probe(t.Context())
		assert.Equal(t, lifecycle.Answered, report.Outcome)
		assert.Equal(t, lifecycle.Unknown, report.Loaded)
		assert.Contains(t, report.Detail, "residency route GET /state")
	})
	t.Run("not asked where health is bad", func(t *testing.T) {
		f := newFake(t)
		f.answer("GET /health", 503, "")
		assert.Equal(t, lifecycle.Wrong, open(t, config, f.addr).Probe(t.Context()).Outcome)
		assert.Empty(t, f.called("GET /state"))
	})
}

func TestAnAnswerAboveOneMebibyteIsNotRead(t *testing.T) {
	f := newFake(t)
	f.handle("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"loaded":true,"pad":"`+strings.Repeat("x", 1<<20)+`"}`)
	})
	report := open(t, `{"health":{"path":"/health","loaded":"$.loaded"}}`, f.addr).Probe(t.Context())
	assert.Equal(t, lifecycle.Wrong, report.Outcome)
	assert.Contains(t, report.Detail, "larger than 1048576 bytes")
}

func TestAnEndlessAnswerEndsWithTheProbe(t *testing.T) {
	f := newFake(t)
	f.handle("GET /health", func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, "{"); err != nil {
				return
			}
			w.(http.Flusher).Flush()
		}
	})
	report := open(t, `{"health":{"path":"/health","loaded":"$.loaded"}}`, f.addr, probeTimeout(100*time.Millisecond)).Probe(t.Context())
	assert.NotEqual(t, lifecycle.Answered, report.Outcome)
}

func TestHealthAndResidencyShareOneTimeOut(t *testing.T) {
	f := newFake(t)
	f.handle("GET /health", func(_ http.ResponseWriter, r *http.Request) {
		select { // a slow server
		case <-time.After(500 * time.Millisecond):
		case <-r.Context().Done():
		}
	})
	left := make(chan time.Duration, 1)
	f.handle("GET /state", func(_ http.ResponseWriter, r *http.Request) {
		begun := time.Now()
		<-r.Context().Done()
		left <- time.Since(begun)
	})
	d := open(t, `{"health":{"path":"/health"},"residency":{"path":"/state","loaded":"$.x"}}`, f.addr, probeTimeout(700*time.Millisecond))
	assert.Equal(t, lifecycle.Answered, d.Probe(t.Context()).Outcome)
	assert.Less(t, <-left, 500*time.Millisecond, "residency had more than what health left of the 700 ms")
}

func TestAServerThatGoesAwayBetweenHealthAndResidencyIsRefused(t *testing.T) {
	f := newFake(t)
	f.handle("GET /health", func(http.ResponseWriter, *http.Request) { _ = f.Listener.Close() })
	report := open(t, `{"health":{"path":"/health"},"residency":{"path":"/state","loaded":"$.x"}}`, f.addr).Probe(t.Context())
	assert.Equal(t, lifecycle.Refused, report.Outcome)
	assert.Equal(t, lifecycle.Unknown, report.Loaded)
}

func TestARoutesOwnTimeOutWins(t *testing.T) {
	f := newFake(t)
	f.handle("GET /health", hangs(nil))
	report := open(t, `{"health":{"path":"/health","timeout":"50ms"}}`, f.addr).Probe(t.Context())
	assert.Equal(t, lifecycle.TimedOut, report.Outcome)
}

func TestProbeEndsWithItsContext(t *testing.T) {
	f := newFake(t)
	arrived := make(chan struct{}, 1)
	f.handle("GET /health", hangs(arrived))
	d := open(t, `{"health":{"path":"/health"}}`, f.addr)
	endsWithContext(t, arrived, func(ctx context.Context) error {
		report := d.Probe(ctx)
		if report.Outcome != lifecycle.TimedOut {
			return errors.New(report.Detail)
		}
		return ctx.Err()
	})
}

func TestHeadersOfAllRoutesAndOfOne(t *testing.T) {
	t.Setenv("HTTPLIFE_TEST_TOKEN", "s3cret-token")
	f := newFake(t)
	f.answer("GET /health", 200, "{}")
	d := open(t, `{
		"header":{"authorization":["Bearer {env.HTTPLIFE_TEST_TOKEN}"],"X-Kind":["all"]},
		"health":{"path":"/health?v=1","header":{"X-Kind":["one","two"]}}}`, f.addr)
	require.Equal(t, lifecycle.Answered, d.Probe(t.Context()).Outcome)
	got := f.called("GET /health")[0]
	assert.Equal(t, "/health?v=1", got.uri)
	assert.Equal(t, "Bearer s3cret-token", got.header.Get("Authorization"))
	assert.Equal(t, []string{"one", "two"}, got.header.Values("X-Kind"))
}

func TestTheHostHeaderCanBeSet(t *testing.T) {
	f := newFake(t)
	host := make(chan string, 1)
	f.handle("GET /health", func(_ http.ResponseWriter, r *http.Request) { host <- r.Host })
	open(t, `{"header":{"host":["gpu.example"]},"health":{"path":"/health"}}`, f.addr).Probe(t.Context())
	assert.Equal(t, "gpu.example", <-host)
}

func TestNoConnectionIsKept(t *testing.T) {
	f := newFake(t)
	f.answer("GET /health", 200, "{}")
	open(t, `{"health":{"path":"/health"}}`, f.addr).Probe(t.Context())
	assert.Equal(t, "close", f.called("GET /health")[0].header.Get("Connection"))
}

func TestBusy(t *testing.T) {
	for _, c := range []struct {
		expression, body string
		want             bool
		err              string
	}{
		{"$.exec_info.queue_remaining", `{"exec_info":{"queue_remaining":2}}`, true, ""},
		{"$.exec_info.queue_remaining", `{"exec_info":{"queue_remaining":0}}`, false, ""},
		{`$.status != "idle"`, `{"status":"running"}`, true, ""},
		{`$.status != "idle"`, `{"status":"idle"}`, false, ""},
		{"$[?(@.is_processing)]", `[{"is_processing":false},{"is_processing":true}]`, true, ""},
		{"$[?(@.is_processing)]", `[{"is_processing":false}]`, false, ""},
		{"$.n", `{}`, false, "consumer mvoice: busy: busy route GET /busy: the answer has no $.n"},
		{"$.n", `<html>`, false, "the answer is not JSON: <html>"},
	} {
		f := newFake(t)
		f.answer("GET /busy", 200, c.body)
		got, err := open(t, `{"busy":{"path":"/busy","busy":`+quote(c.expression)+`}}`, f.addr).Busy(t.Context(), lifecycle.Target{})
		if c.err != "" {
			assert.ErrorContains(t, err, c.err)
			continue
		}
		assert.NoError(t, err)
		assert.Equal(t, c.want, got, "%s of %s", c.expression, c.body)
	}
	t.Run("hangs", func(t *testing.T) {
		f := newFake(t)
		f.handle("GET /busy", hangs(nil))
		_, err := open(t, `{"busy":{"path":"/busy","busy":"$.n"}}`, f.addr, probeTimeout(50*time.Millisecond)).Busy(t.Context(), lifecycle.Target{})
		assert.ErrorIs(t, err, context.DeadlineExceeded)
	})
	t.Run("not configured", func(t *testing.T) {
		_, err := open(t, `{}`, "127.0.0.1:1").Busy(t.Context(), lifecycle.Target{})
		assert.ErrorContains(t, err, "no busy route")
	})
}

func TestRequestsSayWhoAsksUnlessTheConfigurationDoes(t *testing.T) {
	for header, want := range map[string]string{``: "caddy-gpu-broker", `,"header":{"User-Agent":["mine"]}`: "mine"} {
		f := newFake(t)
		f.answer("GET /health", 200, ``)
		require.Equal(t, lifecycle.Answered, open(t, `{"health":{"path":"/health"`+header+`}}`, f.addr).Probe(t.Context()).Outcome)
		require.Equal(t, want, f.called("GET /health")[0].header.Get("User-Agent"))
	}
}
