package e2e

import (
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
	require.Equal(t, -1.0, s.metric(`residency_seconds_count{consumer="a"}`), "it is there still")
	asked := time.Now()
	s.serve("b")
	ended := time.Now()
	require.Equal(t, 1.0, s.metric(`residency_seconds_count{consumer="a"}`))
	stayed := s.metric(`residency_seconds_sum{consumer="a"}`)
	require.Greater(t, stayed, asked.Sub(served).Seconds())
	require.Less(t, stayed, ended.Sub(began).Seconds())
	require.Equal(t, -1.0, s.metric(`residency_seconds_count{consumer="b"}`))

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
	require.Equal(t, -1.0, s.metric(`load_failures_total{consumer="b"}`))
	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.FailUnload = false })
	a := s.post("/b/synthesize", "x")
	require.Equal(t, "load_failed", a.code(), "%s", a.body)
	require.Equal(t, 1.0, s.metric(`load_failures_total{consumer="b"}`))
	require.EqualValues(t, 1, s.status().Scheduler.LoadFailures)
	require.Equal(t, -1.0, s.metric(`load_failures_total{consumer="a"}`))
	require.Equal(t, -1.0, s.metric(`unload_failures_total{consumer="b"}`))
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
