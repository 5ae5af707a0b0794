package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestFC11_OutOfMemoryAtLoadCostsOneMoreVictimAndOneMoreTry(t *testing.T) {
	f := given(t, 16384, server("t", 4000), server("v", 5000), server("w", 5000))
	f.warm("v", 5000)
	f.advance(time.Second)
	f.warm("w", 5000)
	f.advance(time.Minute)
	f.loads = nil
	h := f.submit("t") // it fits, so far as anybody knows
	f.requireLoads("t")
	f.loadRunsOut("t")
	f.requireUnloads("v")
	f.requireWaiting(h)
	f.evicted("v", 5000)
	f.requireLoads("t", "t")
	f.loaded("t")
	f.requireRunning(h)
	f.requireState("w", Ready)
	require.EqualValues(t, 1, f.s.Snapshot(f.now).Counts.Evictions)
}

func TestASecondOutOfMemoryIsAFailedLoad(t *testing.T) {
	f := given(t, 16384, server("t", 4000), server("v", 5000), server("w", 5000))
	f.warm("v", 5000)
	f.warm("w", 5000)
	f.advance(time.Minute)
	h := f.submit("t")
	f.loadRunsOut("t")
	f.evicted("v", 5000)
	f.loadRunsOut("t")
	r := f.requireRefused(h, LoadFailed)
	require.Equal(t, time.Second, r.RetryAfter)
	require.Contains(t, r.Message, "CUDA out of memory")
	f.requireUnloads("v")
	require.EqualValues(t, 2, f.s.Snapshot(f.now).Counts.LoadFailures)
}

func TestOutOfMemoryWithNobodyToGoIsAFailedLoad(t *testing.T) {
	f := given(t, 16384, server("t", 4000), server("v", 5000, noEvict))
	f.warm("v", 5000)
	f.advance(time.Minute)
	h := f.submit("t")
	f.loadRunsOut("t")
	f.requireRefused(h, LoadFailed)
	f.requireUnloads()
}

func TestOutOfMemoryWaitsForTheTurnOfItsVictim(t *testing.T) {
	f := given(t, 16384, server("t", 4000), server("v", 5000))
	f.warm("v", 5000)
	v := f.submit("v")
	f.advance(time.Second)
	h := f.submit("t")
	f.loadRunsOut("t")
	f.requireWaiting(h)
	f.advance(5 * time.Second)
	f.release(v)
	f.advance(time.Second)
	f.requireUnloads("v")
	f.evicted("v", 5000)
	f.loaded("t")
	f.requireRunning(h)
}

func TestWhatOneRequestTriedSaysNothingAboutTheNext(t *testing.T) {
	f := given(t, 16384, server("t", 4000), server("v", 5000))
	f.warm("v", 5000)
	v := f.submit("v")
	f.advance(time.Second)
	h := f.submit("t")
	f.loadRunsOut("t")
	f.cancel(h) // before v could go
	f.release(v)
	f.advance(time.Hour)
	f.loads = nil
	f.submit("t")
	f.requireLoads("t") // it is tried as it would have been the first time
	f.requireUnloads()
}

func TestAFailedLoadCoolsDownLongerEachTime(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	h := f.submit("a")
	for i, seconds := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		require.Len(t, f.loads, i+1)
		f.loadFails("a", "exit status 1")
		r := f.requireRefused(h, LoadFailed)
		require.Equal(t, seconds*time.Second, r.RetryAfter)
		require.Contains(t, r.Message, "exit status 1")
		f.requireState("a", Idle)
		require.Zero(t, f.booking("a"))
		h = f.submit("a")
		f.advance(seconds*time.Second - 1)
		f.requireWaiting(h)
		require.Len(t, f.loads, i+1)
		f.advance(1)
	}
	f.loaded("a")
	f.requireRunning(h)
	f.release(h)
	f.probe("a", No)
	f.sample()
	h = f.submit("a")
	f.loadFails("a", "exit status 1")
	require.Equal(t, time.Second, f.requireRefused(h, LoadFailed).RetryAfter, "a good load makes up for it")
}

func TestAFailedLoadLeavesNothingBooked(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.submit("a")
	f.use(4000)
	f.loadFails("a", "exit status 1")
	require.EqualValues(t, 4000, f.booking("a"), "what it took is its residue until it is seen free")
	b := f.submit("b")
	f.requireLoads("a", "b")
	_ = b
	f.free(16384)
	require.Zero(t, f.booking("a"))
}

func TestFC04_ALoadGoesOnThoughTheFirstWaiterLeaves(t *testing.T) {
	f := given(t, 16384, server("a", 10000, wide(8)))
	var hs []*handle
	for range 5 {
		hs = append(hs, f.submit("a"))
	}
	f.advance(time.Second)
	f.cancel(hs[0])
	f.advance(time.Second)
	f.loaded("a")
	f.requireRunning(hs[1:]...)
	require.False(t, hs[0].running)
	f.requireLoads("a")
	require.EqualValues(t, 1, f.s.Snapshot(f.now).Counts.Cancelled)
}

func TestFC05_ALoadThatADepartedClientAskedForGoesOn(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	h := f.submit("a")
	f.advance(15 * time.Second)
	f.cancel(h)
	f.advance(5 * time.Second)
	f.requireState("a", Loading)
	f.loaded("a")
	f.requireState("a", Ready)
	f.requireRunning(f.submit("a")) // the retry is warm
	f.requireLoads("a")
}

func TestFC08_ALoadingSlotIsNoVictimWhileAnybodyWaitsForIt(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	a := f.submit("a")
	f.use(3000) // only a part of it shows yet
	b := f.submit("b")
	require.EqualValues(t, 10000, f.booking("a"))
	f.advance(20 * time.Minute)
	f.requireState("a", Loading)
	f.requireState("b", Idle)
	f.requireUnloads()
	f.loaded("a")
	f.requireRunning(a)
	f.requireWaiting(b)
}

func TestALoadThatNobodyWaitsForIsAbandonedOnlyIfItsRoomIsNeeded(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000), server("small", 2000))
	h := f.submit("a")
	f.cancel(h)
	f.advance(time.Minute)
	s := f.submit("small") // fits beside it, and waits for the transition to end
	f.advance(time.Minute)
	f.requireState("a", Loading)
	f.requireWaiting(s)
	b := f.submit("b")
	f.requireState("a", Stopping)
	f.requireWaiting(b)
}

func TestALoadIsNotAbandonedIfSomebodyComesBackForIt(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	h := f.submit("a")
	f.submit("b")
	f.cancel(h)
	f.advance(9 * time.Second)
	h = f.submit("a")
	f.advance(time.Minute)
	f.requireState("a", Loading)
	f.cancel(h) // the ten seconds begin anew
	f.advance(10*time.Second - 1)
	f.requireState("a", Loading)
	f.advance(1)
	f.requireState("a", Stopping)
}

func TestAbandonAfterIsAKnob(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.reconfigure(func(c *Config) { c.AbandonAfter = time.Minute })
	h := f.submit("a")
	f.submit("b")
	f.cancel(h)
	f.advance(time.Minute - 1)
	f.requireState("a", Loading)
	f.advance(1)
	f.requireState("a", Stopping)
}

func TestFC15_ALoadThatTimedOutIsTriedAgainAfterTheCoolDown(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	h := f.submit("a")
	f.advance(5 * time.Minute)
	f.loadFails("a", "not ready within load_timeout 5m0s")
	require.Contains(t, f.requireRefused(h, LoadFailed).Message, "load_timeout")
	f.requireState("a", Idle)
	h = f.submit("a")
	f.advance(time.Second)
	f.requireLoads("a", "a")
	f.loaded("a")
	f.requireRunning(h)
}

func TestFC09_TheFirstJobIsTiedToTheSlotInTheStepThatMakesItReady(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	a := f.submit("a")
	b := f.submitJob(Submit{Slot: "b", Priority: 1})
	f.advance(time.Hour) // b is overdue, and more urgent
	f.loaded("a")
	f.requireRunning(a)
	f.requireUnloads()
	require.Equal(t, 1, f.slot("a").Active)
	f.requireWaiting(b)
}

func TestFC09_ALoadedSlotThatMustWaitForTheLockIsNotEvictedMeanwhile(t *testing.T) {
	f := given(t, 16384, server("a", 5000), server("b", 14000), server("c", 5000))
	f.warm("c", 5000)
	c := f.submit("c")
	a := f.submit("a")
	f.submit("b")
	f.loaded("a")
	f.requireWaiting(a) // c computes
	f.advance(10 * time.Minute)
	f.requireState("a", Ready)
	f.release(c)
	f.requireRunning(a)
}

func TestFC12_AnIdleSlotMakesWayForANewOne(t *testing.T) {
	f := given(t, 16384, lazyServer("image", 13312), server("speech", 2868))
	f.warm("image", 13312)
	f.use(300)
	f.advance(time.Minute)
	h := f.submit("speech")
	f.requireUnloads("image")
	f.evicted("image", 13312)
	f.loaded("speech")
	f.requireRunning(h)
	f.requireUnloads("image")
	f.requireLoads("speech")
	require.EqualValues(t, 1, f.s.Snapshot(f.now).Counts.Evictions)
}

func TestFC32_ADeclaredSizeThatIsTooSmallIsRaisedToWhatIsMeasured(t *testing.T) {
	f := given(t, 24576, lazyServer("a", 8192), server("b", 15000))
	f.warm("a", 9300)
	f.cards[0].Measured = map[string]gpu.Bytes{"a": 9000 * gpu.MiB}
	f.sample()
	require.EqualValues(t, 9000, f.booking("a"))
	require.EqualValues(t, 300, f.outsiders())
	f.cards[0].Measured["a"] = 5000 * gpu.MiB
	f.sample()
	require.EqualValues(t, 9000, f.booking("a"), "a booking is never lowered while it is loaded")
}

func TestAServersOwnWordRaisesABookingAndNeverLowersIt(t *testing.T) {
	f := given(t, 24576, server("ollama", 6000))
	f.warm("ollama", 6000)
	tell := func(resident gpu.Bytes) {
		f.step(Probed{Slot: "ollama", Sent: f.now, Outcome: ProbeAnswered, Loaded: Yes, Resident: resident})
	}
	tell(7000 * gpu.MiB)
	require.EqualValues(t, 7000, f.booking("ollama"))
	tell(0) // it runs on the CPU
	require.EqualValues(t, 7000, f.booking("ollama"))
	tell(3000 * gpu.MiB)
	require.EqualValues(t, 7000, f.booking("ollama"))
	tell(-1)
	require.EqualValues(t, 7000, f.booking("ollama"))
}

func TestAResidentSlotIsBookedNeverRefused(t *testing.T) {
	f := given(t, 24576, server("a", 14336), server("b", 14336), server("c", 100))
	f.free(4576)
	f.probe("a", Yes)
	f.probe("b", Yes)
	require.EqualValues(t, 14336, f.booking("a"))
	require.EqualValues(t, 14336, f.booking("b"))
	require.True(t, f.s.Snapshot(f.now).GPUs[0].Overcommitted)
	f.requireRunning(f.submit("a"))
	c := f.submit("c")
	f.requireWaiting(c)
	f.requireLoads() // nothing is loaded there until it isn't overcommitted
}

func TestATargetsOwnResidueCountsForItWhileItsProcessLives(t *testing.T) {
	context := func(c *SlotConfig) { c.Residual = 512 * gpu.MiB }
	f := given(t, 16384, server("a", 10000, context), server("b", 8000))
	f.warm("a", 10000)
	f.step(Unload{Slot: "a"})
	f.unloaded("a")
	f.free(16384 - 512)
	require.EqualValues(t, 512, f.booking("a"))
	f.free(16384 - 512 - 6128) // 9744 are free: 10000 - 512 + 256 = 9744
	f.submit("a")
	f.requireLoads("a", "a")
}

func TestAModelThatCameOnlyPartlyOntoTheGPUGetsAnotherVictimAndHasThreeTries(t *testing.T) {
	f := given(t, 16384, server("t", 4000), server("v", 5000))
	f.warm("v", 5000)
	f.advance(time.Minute)
	h := f.submit("t")
	f.loadPartly("t")
	f.requireUnloads("v")
	f.evicted("v", 5000)
	f.loadPartly("t")
	f.requireWaiting(h)
	f.sample() // nobody is left to go: perhaps it was a passing lack
	f.requireState("t", Loading)
	f.loadPartly("t")
	r := f.requireRefused(h, LoadFailed)
	require.Contains(t, r.Message, "only 3GiB")
	require.EqualValues(t, 3, f.s.Snapshot(f.now).Counts.LoadFailures)

	f.advance(r.RetryAfter)
	f.sample()
	h = f.submit("t")
	f.loadPartly("t")
	f.sample()
	f.loaded("t")
	f.requireRunning(h)
}
