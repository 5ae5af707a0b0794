package e2e

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// rivals is a site of 20 GiB on which a (9 GiB, least recently used) and c (6 GiB) are
// loaded; b (9 GiB) fits once one of them has gone.
func rivals(t *testing.T, global string) *site {
	s := start(t, layout{Total: "20GiB", Global: global, Consumers: []consumer{plainModel("a", 9), plainModel("c", 6), plainModel("b", 9)}})
	s.serve("a")
	s.serve("c")
	return s
}

func TestUnloadThatFailsIsNoEvictionAndTheNextCandidateGoes(t *testing.T) {
	t.Parallel()
	s := rivals(t, "")
	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.FailUnload = true })
	s.serve("b")
	require.Equal(t, 1, s.servers["a"].Stats().UnloadCalls)
	require.Zero(t, s.servers["a"].Stats().Unloads)
	require.Equal(t, 1, s.servers["c"].Stats().Unloads)
	st := s.status()
	require.EqualValues(t, 1, st.Scheduler.Evictions)
	require.EqualValues(t, 1, st.Scheduler.UnloadFailures)
	require.Equal(t, "READY", st.Consumers["a"].Slots[0].State)
	require.Equal(t, "open", st.Consumers["a"].Slots[0].Gate)
	s.serve("a")
	require.Equal(t, 1, s.servers["a"].Stats().Loads, "it was never unloaded")
	failed := s.decisions("unload_failed")
	require.Len(t, failed, 1)
	require.Contains(t, failed[0].Reason, "500")
	s.noOOM()
}

func TestUnloadThatNeverEndsFailsAfterItsTimeOut(t *testing.T) {
	t.Parallel()
	s := rivals(t, "unload_timeout 400ms")
	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.HangUnload = true })
	s.serve("b")
	require.Equal(t, 1, s.servers["c"].Stats().Unloads)
	require.EqualValues(t, 1, s.status().Scheduler.UnloadFailures)
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
	s.noOOM()
}

func TestServerThatSaysItIsStillLoadedAfterItsUnloadIsNotEvicted(t *testing.T) {
	t.Parallel()
	s := rivals(t, "unload_timeout 400ms")
	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.LieStillLoaded = true })
	s.serve("b")
	require.Equal(t, 1, s.servers["c"].Stats().Unloads)
	st := s.status()
	require.EqualValues(t, 1, st.Scheduler.UnloadFailures)
	require.EqualValues(t, 1, st.Scheduler.Evictions)
	require.Contains(t, s.decisions("unload_failed")[0].Reason, "still says loaded")
	s.serve("a")
	s.noOOM()
}

func TestServerThatLiesAboutBeingUnloadedIsFoundOutByTheMemory(t *testing.T) {
	t.Parallel()
	s := rivals(t, "evict_wait 500ms")
	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.LieUnloaded = true })
	s.serve("b")
	require.Equal(t, 1, s.servers["c"].Stats().Unloads)
	s.until("what it kept is booked to it", func() bool { return s.status().Consumers["a"].Slots[0].Residue == int64(gib(9)) })
	require.Zero(t, s.status().GPUs[0].Outsiders)
	require.Zero(t, s.servers["b"].Stats().LoadsFailed, "nothing was loaded into memory that was not there")
	s.noOOM()
}

func TestFC06_TwoColdModelsCalledAtOnceBothFinishOneAfterTheOther(t *testing.T) {
	t.Parallel()
	a, b := plainModel("a", 9), plainModel("b", 9)
	a.RunTime, b.RunTime = 200*time.Millisecond, 200*time.Millisecond
	s := start(t, layout{Consumers: []consumer{a, b}})
	x, y := s.send("POST", "/a/synthesize", "x"), s.send("POST", "/b/synthesize", "y")
	s.ok(x)
	s.ok(y)
	require.Empty(t, modelserver.Overlap(s.servers["a"], s.servers["b"]))
	for _, srv := range s.servers {
		st := srv.Stats()
		require.Equal(t, 1, st.Loads)
		require.Zero(t, st.LoadsFailed)
		require.Zero(t, st.UnloadsWhileBusy)
		require.Zero(t, st.Aborted)
	}
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
	s.noOOM()
}

func TestAlone_WarmConsumerIsNotSlowedByAnothersUnload(t *testing.T) {
	a := plainModel("a", 9)
	a.UnloadTime = 4 * time.Second
	s := start(t, layout{Consumers: []consumer{plainModel("warm", 2, "no_evict"), a, plainModel("b", 9)}})
	s.serve("warm")
	s.serve("a")
	p99 := func(more func(n int) bool) time.Duration {
		var took []time.Duration
		for more(len(took)) {
			took = append(took, s.serve("warm").took)
		}
		slices.Sort(took)
		return took[len(took)*99/100]
	}
	normal := p99(func(n int) bool { return n < 500 })
	waits := s.send("POST", "/b/synthesize", "x")
	s.waitState("a", "STOPPING")
	served := 0
	during := p99(func(n int) bool { served = n; return len(waits) == 0 })
	s.ok(waits)
	require.Greater(t, served, 500)
	require.LessOrEqual(t, during, normal+10*time.Millisecond, "normally %s", normal)
}
