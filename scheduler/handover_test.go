package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOneTransitionAtATimeOnAGPU(t *testing.T) {
	f := given(t, 24576, server("a", 2000), server("b", 2000), server("c", 2000), server("d", 2000))
	f.warm("c", 2000)
	f.warm("d", 2000)
	f.loads = nil
	f.submit("a")
	f.submit("b")
	f.step(Unload{Slot: "c"})
	f.step(Unload{Slot: "d"})
	f.advance(time.Second)
	f.requireLoads("a")
	f.requireUnloads()
	f.loaded("a")
	f.requireUnloads("c") // the unload calls by hand wait for their turn too
	f.requireLoads("a")
	f.evicted("c", 2000)
	f.requireUnloads("c", "d")
	f.requireLoads("a")
	f.evicted("d", 2000)
	f.requireLoads("a", "b")
	f.loaded("b")
	require.EqualValues(t, 2, f.s.Snapshot(f.now).Counts.ManualUnloads)
	require.Zero(t, f.s.Snapshot(f.now).Counts.Evictions)
}

func TestLoadsOnDifferentGPUsRunSideBySide(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 10000), server("b", 10000, on(1)), server("both", 4000, on(0, 1))}
	f := givenConfig(t, cfg, 16384, 16384)
	for _, c := range cfg.Slots {
		f.probe(c.Name, No)
	}
	f.submit("a")
	f.submit("b")
	f.submit("both")
	f.requireLoads("a", "b")
	f.loaded("a")
	f.requireLoads("a", "b") // its other GPU still has a transition
	f.loaded("b")
	f.requireLoads("a", "b", "both")
	require.EqualValues(t, 2200, f.booking("both"), "a claim on two GPUs is split, with a tenth more on each")
}

func TestVictimsGoOneAfterTheOtherWithANewPlanAfterEach(t *testing.T) {
	f := given(t, 24576, server("t", 13000), server("v", 5000), server("w", 5000), server("x", 5000))
	f.use(5000) // an outsider
	for _, v := range []string{"v", "w", "x"} {
		f.warm(v, 5000)
		f.advance(time.Minute)
	}
	f.submit("t") // two of the three must go
	f.requireUnloads("v")
	f.unloaded("v")
	f.use(-5000)
	f.requireUnloads("v", "w") // 9576 MiB are free, it needs 13256

	f = given(t, 24576, server("t", 13000), server("v", 5000), server("w", 5000), server("x", 5000))
	f.use(5000)
	for _, v := range []string{"v", "w", "x"} {
		f.warm(v, 5000)
		f.advance(time.Minute)
	}
	h := f.submit("t")
	f.unloaded("v")
	f.use(-10000) // now the outsider goes too
	f.requireUnloads("v")
	f.loaded("t")
	f.requireRunning(h)
	f.requireState("w", Ready)
}

func TestWarmJobsOfSlotsThatTakeNoPartAreNotDelayed(t *testing.T) {
	f := given(t, 24576, server("t", 12000, coexists("warm")), server("v", 12000), server("warm", 4000))
	f.warm("warm", 4000)
	f.warm("v", 12000)
	f.advance(time.Minute)
	f.submit("t")
	f.requireState("v", Stopping)
	h := f.submit("warm")
	f.requireRunning(h)
	f.release(h)
	f.evicted("v", 12000)
	f.requireState("t", Loading)
	h = f.submit("warm")
	f.requireRunning(h)
	f.release(h)
	f.loaded("t")
}

func TestAFailedUnloadIsNoEvictionAndTheNextCandidateIsTried(t *testing.T) {
	f := given(t, 16384, server("t", 8000), server("v", 7000), server("w", 7000))
	f.warm("v", 7000)
	f.advance(time.Second)
	f.warm("w", 7000)
	f.advance(time.Minute)
	h := f.submit("t")
	f.requireUnloads("v")
	f.unloadFails("v")
	f.requireState("v", Ready)
	require.True(t, f.slot("v").GateOpen)
	f.requireUnloads("v", "w")
	f.evicted("w", 7000)
	f.loaded("t")
	f.requireRunning(h)
	c := f.s.Snapshot(f.now).Counts
	require.EqualValues(t, 1, c.Evictions)
	require.EqualValues(t, 1, c.UnloadFailures)
	require.Contains(t, f.decided("unload_failed", "v").Reason, "500")
}

func TestASlotWhoseUnloadFailsIsTriedAgainWithBackOff(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	f.advance(time.Minute)
	h := f.submit("b")
	for i, wait := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		require.Len(t, f.unloads, i+1)
		f.unloadFails("a")
		f.advance(wait*time.Second - 1)
		require.Len(t, f.unloads, i+1)
		f.advance(1)
	}
	f.requireState("a", Stopping)
	f.evicted("a", 10000)
	f.loaded("b")
	f.requireRunning(h)
}

func TestASlotWhoseUnloadFailedServesOn(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	f.advance(time.Minute)
	f.submit("b")
	a := f.submit("a")
	f.requireWaiting(a)
	readyAt := f.slot("a").ReadyAt
	f.unloadFails("a")
	f.requireRunning(a)
	require.Equal(t, readyAt, f.slot("a").ReadyAt, "as if nothing had been")
	require.EqualValues(t, 10000, f.booking("a"))
}

func TestAnUnloadThatLiesIsFoundOut(t *testing.T) {
	f, h := swap(t)
	f.unloaded("a") // it says so, but it isn't
	f.look(10 * time.Second)
	f.requireState("a", Idle)
	f.probe("a", Yes)
	f.requireState("a", Ready)
	require.EqualValues(t, 13312, f.booking("a"))
	require.Zero(t, f.outsiders())
	f.requireWaiting(h)
	require.Contains(t, f.decided("evicted", "a").Reason, "gave back 0B of 13GiB")
}

func TestAnUnloadIsNotUndoneByATargetThatLeaves(t *testing.T) {
	f, h := swap(t)
	f.cancel(h)
	f.requireState("a", Stopping)
	a := f.submit("a")
	f.requireWaiting(a)
	f.evicted("a", 13312)
	f.requireState("a", Loading)
	f.loaded("a")
	f.requireRunning(a)
}

func TestATargetThatFitsMeanwhileLeavesItsVictimAlone(t *testing.T) {
	f := given(t, 16384, server("a", 4000), server("b", 10000))
	f.warm("a", 4000)
	a := f.submit("a")
	f.use(3000) // an outsider
	b := f.submit("b")
	f.advance(10 * time.Second / 2)
	f.advance(5 * time.Minute)
	require.False(t, f.slot("a").GateOpen)
	f.use(-3000) // it goes
	require.True(t, f.slot("a").GateOpen)
	f.requireState("b", Loading)
	f.release(a)
	f.loaded("b")
	f.requireRunning(b)
	f.requireUnloads()
}

func TestAnUnloadByHandIsDrainedFirst(t *testing.T) {
	f := given(t, 16384, server("a", 10000), lazyServer("l", 1000))
	f.warm("a", 10000)
	h := f.submit("a")
	f.step(Unload{Slot: "a"})
	f.requireUnloads()
	next := f.submit("a")
	f.requireWaiting(next)
	f.release(h)
	f.requireUnloads("a")
	f.evicted("a", 10000)
	f.loaded("a")
	f.requireRunning(next) // it waited, and so it is loaded again
	require.EqualValues(t, 1, f.s.Snapshot(f.now).Counts.ManualUnloads)
	f.step(Unload{Slot: "nobody"})
	f.requireUnloads("a")
	f.step(Unload{Slot: "l"}) // it may have been loaded before we came
	f.requireUnloads("a", "l")
	require.False(t, f.slot("l").GateOpen)
	f.answered("l")
	require.True(t, f.slot("l").GateOpen)
	f.step(Unload{Slot: "l"}) // not loaded: nothing to do
	f.requireUnloads("a", "l")
}

func TestAStoppingVictimStaysTheVictimThoughItsTargetFitsMeanwhile(t *testing.T) {
	f := given(t, 24576, server("a", 10000), server("b", 10000))
	f.use(8000) // an outsider
	f.warm("a", 10000)
	f.advance(time.Minute)
	h := f.submit("b")
	f.requireState("a", Stopping)
	f.use(-8000) // it goes
	require.False(t, f.slot("a").GateOpen)
	f.requireLoads("a")
	f.unloaded("a")
	f.sample()
	f.requireState("a", Idle)
	f.loaded("b")
	f.requireRunning(h)
}

func TestAnUnloadByHandWaitsForTheFirstJobOfALazySlot(t *testing.T) {
	f := given(t, 24576, lazyServer("l", 10000), server("a", 5000))
	f.warm("a", 5000)
	h := f.submit("l")
	f.step(Unload{Slot: "a"})
	f.advance(time.Minute)
	f.requireUnloads()
	f.release(h)
	f.requireUnloads("a")
}

func TestAServerThatDiesInItsAnswerIsProbed(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	f.warm("a", 10000)
	h := f.submit("a")
	f.advance(time.Second)
	f.releaseAs(h, ServerDied)
	require.Equal(t, []string{"a"}, f.probes)
	require.Equal(t, f.now, f.slot("a").LastUse)
	f.probeRefused("a")
	f.requireState("a", Idle)
}
