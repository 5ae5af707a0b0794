package e2e

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

func TestMetricsTellHowLongAModelStayed(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	began := time.Now()
	s.serve("a")
	served := time.Now()
	require.Equal(t, 0.0, s.metric(`residency_seconds_count{consumer="a"}`), "it is there still")
	asked := time.Now()
	s.serve("b")
	ended := time.Now()
	require.Equal(t, 1.0, s.metric(`residency_seconds_count{consumer="a"}`))
	stayed := s.metric(`residency_seconds_sum{consumer="a"}`)
	require.Greater(t, stayed, asked.Sub(served).Seconds())
	require.Less(t, stayed, ended.Sub(began).Seconds())
	require.Equal(t, 0.0, s.metric(`residency_seconds_count{consumer="b"}`))

	s.servers["b"].Kill()
	s.waitState("b", "IDLE")
	require.Equal(t, 1.0, s.metric(`residency_seconds_count{consumer="b"}`), "one that crashes is gone, too")
	s.reloaded(func(c string) string { return c + "\n# another line\n" })
	require.Equal(t, stayed, s.metric(`residency_seconds_sum{consumer="a"}`))
}

func TestMetricsTellOfLoadsAndUnloadsThatFailed(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("a")
	s.servers["b"].SetFaults(func(f *modelserver.Faults) { f.RefuseLoad = true })
	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.FailUnload = true })
	require.Equal(t, 200, s.get("/gpu/healthz").status)
	require.NotEqual(t, 200, s.adminDo("POST", "/gpu_broker/consumers/a/unload", "", "").status)
	require.EqualValues(t, s.status().Scheduler.UnloadFailures, s.metric(`unload_failures_total{consumer="a"}`))
	require.Equal(t, 1.0, s.metric(`unload_failures_total{consumer="a"}`))
	require.Equal(t, 0.0, s.metric(`load_failures_total{consumer="b"}`))
	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.FailUnload = false })
	a := s.post("/b/synthesize", "x")
	require.Equal(t, "load_failed", a.code(), "%s", a.body)
	require.Equal(t, 1.0, s.metric(`load_failures_total{consumer="b"}`))
	require.EqualValues(t, 1, s.status().Scheduler.LoadFailures)
	require.Equal(t, 0.0, s.metric(`load_failures_total{consumer="a"}`))
	require.Equal(t, 0.0, s.metric(`unload_failures_total{consumer="b"}`))
}

func TestMetricsTellOfBodiesThatAreHeld(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9)}})
	s.serve("a")
	require.Zero(t, s.metric("buffered_bytes"))
	runs, end := s.works("a")
	const size = 100_000
	waits := s.send("POST", "/a/synthesize", strings.Repeat("x", size))
	s.waitQueued("a", 1)
	require.GreaterOrEqual(t, s.metric("buffered_bytes"), float64(size))
	require.Less(t, s.metric("buffered_bytes"), float64(size)+1000, "what runs has a small body")
	end()
	s.ok(runs)
	s.ok(waits)
	s.until("the bodies are given back", func() bool { return s.metric("buffered_bytes") == 0 })
}

// series are all series of a counter, with their values.
func (s *site) series(counter string) map[string]float64 {
	s.t.Helper()
	a := s.adminDo("GET", "/metrics", "", "")
	require.Equal(s.t, 200, a.status)
	out := map[string]float64{}
	for line := range strings.Lines(string(a.body)) {
		labels, value, ok := strings.Cut(strings.TrimSpace(line), "} ")
		if labels, is := strings.CutPrefix(labels, "caddy_gpu_broker_"+counter+"{"); ok && is {
			v, err := strconv.ParseFloat(value, 64)
			require.NoError(s.t, err)
			out[labels] = v
		}
	}
	return out
}

func TestN2_EveryCounterExistsBeforeItsFirstEvent(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("giant", 17)}})
	for _, name := range []string{"a", "giant"} {
		for _, counter := range []string{"loads_total", "load_failures_total", "unload_failures_total", "passed_total", "wait_seconds_count", "run_seconds_count",
			"load_seconds_count", "unload_seconds_count", "residency_seconds_count"} {
			require.Zero(t, s.metric(fmt.Sprintf("%s{consumer=%q}", counter, name)), "%s of %s", counter, name)
		}
		require.Zero(t, s.metric(fmt.Sprintf("evictions_total{consumer=%q,reason=%q}", name, "evict")))
		for _, reason := range []string{"evict", "idle", "manual"} {
			require.Zero(t, s.metric(fmt.Sprintf("unloads_total{consumer=%q,reason=%q}", name, reason)), reason)
		}
		for _, code := range []string{"never_fits", "gpu_lost", "load_failed", "client_left", "server_died", "bad_request"} {
			require.Zero(t, s.metric(fmt.Sprintf("errors_total{code=%q,consumer=%q}", code, name)), code)
		}
	}
	require.Equal(t, 422, s.post("/giant/synthesize", "x").status)
	require.Equal(t, 1.0, s.metric(`errors_total{code="never_fits",consumer="giant"}`))
}

func TestN2_AReloadAddsTheSeriesOfNewConsumersAndLosesNone(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("a")
	s.serve("b")
	before := s.series("loads_total")
	require.Equal(t, map[string]float64{`consumer="a"`: 1, `consumer="b"`: 1}, before)
	s.reloaded(func(c string) string {
		return strings.Replace(c, "consumer a {", "consumer later {\n upstream 127.0.0.1:9\n vram 1GiB\n}\nconsumer a {", 1)
	})
	require.Equal(t, map[string]float64{`consumer="a"`: 1, `consumer="b"`: 1, `consumer="later"`: 0}, s.series("loads_total"))
	require.Zero(t, s.metric(`errors_total{code="unhealthy",consumer="later"}`))
}

func TestN2_OnlyUnloadsMadeForRoomAreEvictions(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("a")
	s.serve("b") // evicts a
	require.Equal(t, 200, s.adminDo("POST", "/gpu_broker/consumers/b/unload", "", "").status)
	require.Equal(t, map[string]float64{`consumer="a",reason="evict"`: 1, `consumer="b",reason="evict"`: 0}, s.series("evictions_total"))
	require.Equal(t, map[string]float64{
		`consumer="a",reason="evict"`: 1, `consumer="a",reason="idle"`: 0, `consumer="a",reason="manual"`: 0,
		`consumer="b",reason="evict"`: 0, `consumer="b",reason="idle"`: 0, `consumer="b",reason="manual"`: 1,
	}, s.series("unloads_total"))
}
