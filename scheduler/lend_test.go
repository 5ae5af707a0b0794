package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Lend (spec §9.5): the card is a person's or a program's for a while.

const lentFor = 31*time.Minute + 7*time.Second

// lend lends GPU 0.
func (f *fixture) lend() {
	f.t.Helper()
	f.step(Lend{GPU: 0, Until: f.now.Add(lentFor)})
}

func TestALentGPUIsEmptiedAtOnce(t *testing.T) {
	f := given(t, 16384, server("v", 5000, keepAlive(time.Hour), noEvict), server("w", 5000), server("other", 5000, on(1)))
	f.secondGPU(16384)
	for _, name := range []string{"v", "w", "other"} {
		f.warm(name, 0)
	}
	f.lend()
	require.Equal(t, f.now.Add(lentFor), f.s.Snapshot(f.now).GPUs[0].LentUntil)
	require.Zero(t, f.s.Snapshot(f.now).GPUs[1].LentUntil)
	require.Contains(t, f.decided("lent", "").Reason, "31m7s")
	f.requireUnloads("v")
	require.Equal(t, "its GPU is lent", f.decided("unload", "v").Reason)
	f.unloaded("v")
	f.sample()
	f.advance(10 * time.Second)
	f.requireUnloads("v", "w")
	f.unloaded("w")
	f.advance(10 * time.Second)
	f.requireState("w", Idle)
	f.requireState("other", Ready)
	f.requireRunning(f.submit("other"))
	f.advance(time.Hour)
	f.requireUnloads("v", "w")
	f.requireLoads("v", "w", "other")
}

func TestWhatRunsOnALentGPUDrains(t *testing.T) {
	f := given(t, 16384, server("v", 5000, wide(2)))
	f.warm("v", 5000)
	one, two := f.submit("v"), f.submit("v")
	f.lend()
	three := f.submit("v")
	f.advance(time.Minute)
	f.release(one)
	f.requireWaiting(three)
	f.requireUnloads()
	f.release(two)
	f.requireUnloads("v")
	f.evicted("v", 5000)
	f.requireWaiting(three)
	f.requireLoads("v")
}

func TestWhatLoadsOnALentGPUIsUnloadedOnceItIsLoaded(t *testing.T) {
	f := given(t, 16384, server("v", 5000))
	h := f.submit("v")
	f.lend()
	f.advance(time.Second)
	f.loaded("v")
	f.use(5000)
	f.requireWaiting(h)
	f.requireUnloads("v")
	f.evicted("v", 5000)
	f.advance(20 * time.Minute)
	f.requireLoads("v")
}

func TestWhatIsPinnedStaysOnALentGPUAndItsJobsWait(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 5000, pinned))
	f.warm("v", 5000)
	began := f.now
	f.lend()
	h := f.submit("v")
	require.Equal(t, NotNow, f.step(Submit{Slot: "v", Priority: 100, IfFree: true})[0].Kind)
	f.advance(lentFor - 1)
	f.requireWaiting(h)
	f.requireUnloads()
	f.advance(1)
	f.requireRunning(h)
	require.Equal(t, lentFor, f.now.Sub(began))
}

func TestJobsWaitForALentGPUAndRunAtTheTimeAtWhichItComesBack(t *testing.T) {
	f := given(t, 16384, server("v", 5000), lazyServer("lazy", 5000, lockNone), server("both", 5000, on(0, 1)))
	f.secondGPU(16384)
	f.lend()
	hs := []*handle{f.submit("v"), f.submit("lazy"), f.submit("both")}
	for _, name := range []string{"v", "lazy", "both"} {
		require.Contains(t, f.slot(name).Why, "its GPU is lent until 1970-01-12T14:17:47Z")
	}
	for _, w := range f.s.Snapshot(f.now).Queue {
		require.EqualValues(t, -1, w.Estimate)
	}
	f.advance(lentFor - 1)
	f.requireWaiting(hs...)
	f.requireLoads()
	f.advance(1)
	f.requireLoads("v")
	f.decided("returned", "")
	require.Zero(t, f.s.Snapshot(f.now).GPUs[0].LentUntil)
	f.loaded("v")
	f.requireRunning(hs[0])
}

func TestTheBudgetOfAJobEndsWhileTheGPUIsLent(t *testing.T) {
	f := given(t, 16384, server("v", 5000))
	f.lend()
	h := f.submitJob(Submit{Slot: "v", Priority: 100, Deadline: f.now.Add(time.Minute)})
	f.advance(time.Minute)
	require.Contains(t, f.requireRefused(h, BudgetExceeded).Message, "lent")
}

func TestALentGPUIsGivenBackByHand(t *testing.T) {
	f := given(t, 16384, server("v", 5000))
	f.lend()
	h := f.submit("v")
	f.advance(time.Minute)
	f.step(Lend{GPU: 0})
	f.decided("returned", "")
	f.requireLoads("v")
	f.loaded("v")
	f.requireRunning(h)
	f.advance(time.Hour)
	f.requireUnloads()
}

func TestADrainForALentGPUEndsWhenItIsGivenBack(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 5000, wide(2)))
	f.warm("v", 5000)
	one := f.submit("v")
	f.lend()
	two := f.submit("v")
	f.requireWaiting(two)
	f.advance(time.Minute)
	f.step(Lend{GPU: 0})
	f.requireRunning(two)
	f.release(one)
	f.release(two)
	f.requireUnloads()
}

func TestLendingAgainChangesTheTime(t *testing.T) {
	f := given(t, 16384, server("v", 5000))
	f.lend()
	h := f.submit("v")
	f.advance(time.Minute)
	f.lend()
	f.advance(lentFor - 1)
	f.requireWaiting(h)
	f.requireLoads()
	f.advance(1)
	f.requireLoads("v")

	f = given(t, 16384, server("v", 5000))
	f.lend()
	f.submit("v")
	f.step(Lend{GPU: 0, Until: f.now.Add(13 * time.Second)}) // shorter
	f.advance(13*time.Second - 1)
	f.requireLoads()
	f.advance(1)
	f.requireLoads("v")
}

func TestAReloadKeepsAGPULent(t *testing.T) {
	f := given(t, 16384, server("v", 5000))
	f.lend()
	h := f.submit("v")
	f.reconfigure(func(c *Config) { c.Slots = append(c.Slots, server("new", 1000)) })
	f.probe("new", Yes) // loaded before it was configured
	f.requireUnloads("new")
	f.unloaded("new")
	f.sample()
	f.advance(lentFor - 1)
	f.requireWaiting(h, f.submit("new"))
	f.requireLoads()
	f.advance(1)
	f.requireLoads("v")
}

func TestLendingOrReturningAGPUThatIsNotThereDoesNothing(t *testing.T) {
	f := given(t, 16384, server("v", 5000))
	f.warm("v", 5000)
	n := len(f.decisions)
	f.step(Lend{GPU: 3, Until: f.now.Add(time.Hour)})
	f.step(Lend{GPU: 3})
	f.step(Lend{GPU: 0})
	f.step(Lend{GPU: 0, Until: f.now})
	require.Len(t, f.decisions, n)
	f.requireRunning(f.submit("v"))
	f.requireUnloads()
}

func TestASlotThatCannotBeUnloadedStaysOnALentGPUAndItsJobsWait(t *testing.T) {
	f := given(t, 16384, server("v", 5000, func(c *SlotConfig) { c.CanUnload = false }))
	f.warm("v", 5000)
	f.lend()
	h := f.submit("v")
	f.advance(lentFor - 1)
	f.requireWaiting(h)
	f.advance(1)
	f.requireRunning(h)
}

func TestAWorkThatDoesNotEndOnALentGPUIsDrainedAgain(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 5000, wide(2)))
	f.warm("v", 5000)
	one := f.submit("v")
	f.lend()
	f.advance(15 * time.Minute) // longer than drain_timeout
	two := f.submit("v")
	f.requireWaiting(two)
	f.release(one)
	f.advance(time.Minute)
	f.requireUnloads("v")
}

func TestAFailedUnloadOnALentGPUIsTriedAgain(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 5000))
	f.warm("v", 5000)
	f.lend()
	f.requireUnloads("v")
	f.unloadFails("v")
	f.requireWaiting(f.submit("v"))
	f.advance(time.Second)
	f.requireUnloads("v", "v")
}

func TestNobodyIsUnloadedForAJobThatWaitsForALentGPU(t *testing.T) {
	f := given(t, 16384, server("v", 10000, on(1)), server("both", 12000, on(0, 1)))
	f.secondGPU(12000)
	f.warm("v", 0)
	f.cards[1].Free -= 10000 << 20
	f.sample()
	f.advance(time.Hour)
	f.lend()
	h := f.submit("both")
	f.advance(time.Minute)
	f.requireUnloads()
	f.requireWaiting(h)
	f.step(Lend{GPU: 0})
	f.requireUnloads("v")
}

func TestOnlyTheEvictingSchedulerHasGPUsToLend(t *testing.T) {
	cfg := defaults()
	cfg.Mode = Locked
	cfg.Slots = []SlotConfig{server("v", 5000, func(c *SlotConfig) { c.CanProbe = false })}
	f := givenConfig(t, cfg, 16384)
	f.lend()
	f.requireRunning(f.submit("v"))
}

// Pins by hand (spec §9.5).

func TestAPinByHandKeepsASlotUntilItIsTakenBack(t *testing.T) {
	f := given(t, 16384, server("v", 10000, idles(time.Minute)), server("t", 7000))
	f.warm("v", 10000)
	f.step(SetPin{Slot: "v", On: true})
	require.True(t, f.slot("v").Pinned)
	require.Zero(t, f.slot("v").UnloadAt)
	f.advance(time.Hour)
	f.requireUnloads()
	h := f.submit("t")
	f.advance(time.Hour)
	f.requireUnloads()
	f.requireRefused(h, NeverFits)

	f.step(SetPin{Slot: "v", On: false})
	require.False(t, f.slot("v").Pinned)
	f.requireUnloads("v") // it has been idle for long
}

func TestAPinByHandGoesBeforeTheConfigurations(t *testing.T) {
	f := given(t, 16384, server("v", 10000, pinned), server("t", 10000))
	f.warm("v", 10000)
	f.advance(time.Hour)
	f.step(SetPin{Slot: "v", On: false})
	require.False(t, f.slot("v").Pinned)
	f.reconfigure(func(c *Config) { c.MaxQueue++ })
	require.False(t, f.slot("v").Pinned, "it lasts until the process ends")
	f.submit("t")
	f.requireUnloads("v")
}

func TestAPinByHandEndsADrainUnderWay(t *testing.T) {
	f := given(t, 16384, server("v", 6000), server("w", 6000, noEvict), server("t", 7000))
	f.warm("w", 6000)
	f.warm("v", 6000)
	f.advance(time.Hour)
	f.submit("v")
	f.submit("t")
	f.advance(300 * time.Second)
	require.False(t, f.slot("v").GateOpen)
	f.step(SetPin{Slot: "v", On: true})
	require.True(t, f.slot("v").GateOpen)
	require.Contains(t, f.decided("reopen", "v").Reason, "pin")
}

func TestAPinByHandDoesNotKeepWhatIsUnloadedByHand(t *testing.T) {
	f := given(t, 16384, server("v", 10000))
	f.warm("v", 10000)
	f.step(SetPin{Slot: "v", On: true})
	f.step(Unload{Slot: "v"})
	f.requireUnloads("v")
}

func TestAPinByHandHoldsThroughADrainForALentGPU(t *testing.T) {
	f := given(t, 16384, server("v", 10000, wide(2)))
	f.warm("v", 10000)
	h := f.submit("v")
	f.lend()
	f.step(SetPin{Slot: "v", On: true})
	f.release(h)
	f.advance(time.Minute)
	f.requireUnloads()
	f.requireState("v", Ready)
	f.requireWaiting(f.submit("v"))
}

func TestAPinOfNobodyDoesNothing(t *testing.T) {
	f := given(t, 16384, server("v", 10000))
	f.step(SetPin{Slot: "nobody", On: true})
	f.warm("v", 10000)
	f.step(Unload{Slot: "v"})
	f.requireUnloads("v")
}

func TestWhatStaysOnALentGPUBecauseItWorkedTooLongGoesWhenItsWorkEnds(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 5000))
	f.warm("v", 5000)
	h := f.submit("v")
	f.lend()
	f.advance(15 * time.Minute) // longer than drain_timeout: its gate opens, and nobody waits
	f.release(h)
	f.advance(time.Minute)
	f.requireUnloads("v")
}

func TestAVictimWhoseTargetLeftGoesAllTheSameFromALentGPU(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000), server("t", 10000))
	f.warm("v", 10000)
	f.advance(time.Minute)
	v := f.submit("v")
	h := f.submit("t")
	f.advance(301 * time.Second)
	require.False(t, f.slot("v").GateOpen)
	f.lend()
	f.cancel(h)
	f.release(v)
	f.advance(time.Second)
	f.requireUnloads("v")
}
