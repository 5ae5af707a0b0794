package e2e

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// metric is the value of one series of the admin endpoint, of which the common prefix is left out; -1: it is not there.
func (s *site) metric(series string) float64 {
	s.t.Helper()
	a := s.adminDo("GET", "/metrics", "", "")
	require.Equal(s.t, 200, a.status)
	for line := range strings.Lines(string(a.body)) {
		if text, ok := strings.CutPrefix(line, "caddy_gpu_broker_"+series+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
			require.NoError(s.t, err)
			return v
		}
	}
	return -1
}

func TestMetricsTellWhatASwapDidAndSurviveAReload(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9), plainModel("giant", 17)}})
	s.serve("a")
	s.serve("b")
	require.Equal(t, 422, s.post("/giant/synthesize", "x").status)
	check := func() {
		t.Helper()
		for name, want := range map[string]float64{
			`loads_total{consumer="a"}`: 1, `loads_total{consumer="b"}`: 1,
			`evictions_total{consumer="a",reason="evict"}`: 1,
			`load_seconds_count{consumer="b"}`:             1, `unload_seconds_count{consumer="a"}`: 1,
			`wait_seconds_count{consumer="b"}`: 1, `run_seconds_count{consumer="b"}`: 1,
			`errors_total{code="never_fits",consumer="giant"}`: 1,
			`queue_depth`: 0, `active{consumer="b"}`: 0, `waiting{consumer="b"}`: 0,
			`loaded{consumer="a"}`: 0, `loaded{consumer="b"}`: 1, `healthy{consumer="a"}`: 1,
			`slot_memory_bytes{consumer="b",gpu="0"}`: float64(gib(9)), `slot_memory_bytes{consumer="a",gpu="0"}`: 0,
			`gpu_memory_bytes{gpu="0",kind="total"}`: float64(gib(16)), `gpu_memory_bytes{gpu="0",kind="booked"}`: float64(gib(9)),
			`gpu_healthy{gpu="0"}`: 1,
		} {
			require.Equal(t, want, s.metric(name), name)
		}
	}
	check()
	s.reloaded(func(c string) string { return c + "\n# another line\n" })
	check()
	s.serve("b")
	require.Equal(t, 2.0, s.metric(`run_seconds_count{consumer="b"}`))
	s.serve("a")
	require.Equal(t, 1.0, s.metric(`evictions_total{consumer="b",reason="evict"}`))
}

func TestDecisionsTellWhatWasDoneInItsOrderAndWhy(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9), plainModel("giant", 17)}})
	s.serve("a")
	s.serve("b")
	require.Equal(t, 422, s.post("/giant/synthesize", "x").status)
	var got []string
	for _, d := range s.decisions("") {
		require.NotEmpty(t, d.Reason, d.Kind)
		require.False(t, d.At.IsZero())
		got = append(got, strings.TrimSpace(d.Kind+" "+d.Consumer+" "+d.Target+" "+d.Code))
	}
	require.Equal(t, []string{"load a", "loaded a", "unload a b", "evicted a b", "load b", "loaded b", "refuse giant  never_fits"}, got)
	var admin struct{ Decisions []decision }
	require.NoError(t, json.Unmarshal(s.adminDo("GET", "/gpu_broker/decisions", "", "").body, &admin))
	require.Equal(t, s.decisions(""), admin.Decisions)
}

func TestOnlyTheLastThousandDecisionsAreKept(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("giant", 17)}})
	s.serve("a")
	for range 1000 {
		require.Equal(t, 422, s.post("/giant/synthesize", "").status)
	}
	got := s.decisions("")
	require.Len(t, got, 1000)
	require.Equal(t, "refuse", got[0].Kind, "the oldest went")
}

func TestAdminLoadsAndUnloads(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	post := func(path string) answer { return s.adminDo("POST", "/gpu_broker/consumers/"+path, "", "") }
	a := post("a/load")
	require.Equal(t, 200, a.status, "%s", a.body)
	require.JSONEq(t, `{"consumer":"a","done":true}`, string(a.body))
	require.Equal(t, "READY", s.state("a"))
	require.Equal(t, 1, s.servers["a"].Stats().Loads)
	require.Equal(t, 200, post("a/load").status)
	require.Equal(t, 1, s.servers["a"].Stats().Loads, "it was there")

	require.Equal(t, 200, post("b/load").status) // a makes way, as for a request
	require.Equal(t, "IDLE", s.state("a"))
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
	require.Equal(t, 200, post("b/unload").status)
	require.Equal(t, "IDLE", s.state("b"))
	require.Equal(t, 200, post("b/unload").status, "it is unloaded already")
	st := s.status().Scheduler
	require.EqualValues(t, 1, st.ManualUnloads)
	require.EqualValues(t, 1, st.Evictions, "one by hand is no eviction")
	require.Equal(t, 1.0, s.metric(`unloads_total{consumer="b",reason="manual"}`))

	for path, want := range map[string]int{"nobody/load": 404, "nobody/unload": 404, "a/shake": 404, "a/load?wait=soon": 400} {
		require.Equal(t, want, post(path).status, path)
	}
	require.Equal(t, 405, s.adminDo("GET", "/gpu_broker/consumers/a/load", "", "").status)
	require.Equal(t, 404, s.adminDo("GET", "/gpu_broker/nothing", "", "").status)
}

func TestAdminUnloadLetsRunningWorkFinish(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9)}})
	s.serve("a")
	runs, end := s.works("a")
	unload := s.byHand("consumers/a/unload")
	s.until("a takes no more jobs", func() bool { return s.status().Consumers["a"].Slots[0].Gate == "closed" })
	require.Zero(t, len(unload), "the call waits for the work")
	end()
	a := s.await(unload)
	require.NoError(t, a.err)
	require.Equal(t, 200, a.status, "%s", a.body)
	require.Equal(t, 1, s.servers["a"].Stats().Worked-1, "the work was done before it")
	s.ok(runs)
	require.Zero(t, s.servers["a"].Stats().UnloadsWhileBusy)
	s.serve("a")
}

func TestAdminUnloadsAPinnedConsumerOnlyByForce(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9, "pin")}})
	s.serve("a")
	a := s.adminDo("POST", "/gpu_broker/consumers/a/unload", "", "")
	require.Equal(t, 409, a.status)
	require.Contains(t, string(a.body), "force")
	require.Zero(t, s.unloadCalls())
	require.Equal(t, 200, s.adminDo("POST", "/gpu_broker/consumers/a/unload?force=true", "", "").status)
	require.Equal(t, "IDLE", s.state("a"))
}

func TestAdminThatDoesNotWaitIsToldSoAndTheWorkGoesOn(t *testing.T) {
	t.Parallel()
	a, b := plainModel("a", 9), plainModel("b", 9)
	a.LoadTime, a.UnloadTime = 300*time.Millisecond, 300*time.Millisecond
	s := start(t, layout{Consumers: []consumer{a, b}})
	for _, c := range []struct{ action, state string }{{"load", "READY"}, {"unload", "IDLE"}} {
		got := s.adminDo("POST", "/gpu_broker/consumers/a/"+c.action+"?wait=1ms", "", "")
		require.Equal(t, 202, got.status)
		require.JSONEq(t, `{"consumer":"a","done":false}`, string(got.body))
		s.waitState("a", c.state)
	}
	// Also one that has to wait for its turn first.
	s.serve("b")
	runs, end := s.works("b")
	require.Equal(t, 202, s.adminDo("POST", "/gpu_broker/consumers/a/load?wait=1ms", "", "").status)
	end()
	s.ok(runs)
	s.waitState("a", "READY")
}

func TestAdminTellsAFailedUnload(t *testing.T) {
	t.Parallel()
	l := plainModel("lazy", 2, "lifecycle_by_hand\nhealth /health\nunload POST /api/admin/unload")
	l.Lazy = true
	a := plainModel("a", 9)
	a.Faults.FailUnload = true
	s := start(t, layout{Consumers: []consumer{a, l}})
	s.serve("a")
	got := s.adminDo("POST", "/gpu_broker/consumers/a/unload", "", "")
	require.Equal(t, 500, got.status)
	require.Contains(t, string(got.body), "was not unloaded")
	require.Equal(t, "READY", s.state("a"))
	s.serve("a")
	got = s.adminDo("POST", "/gpu_broker/consumers/lazy/load", "", "")
	require.Equal(t, 409, got.status, "it has no load route")
	require.Contains(t, string(got.body), "first request")
	require.EqualValues(t, 1, s.status().Scheduler.UnloadFailures)
}
