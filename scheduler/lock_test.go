package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// residents is a world in which all that fits is loaded and idle.
func residents(t *testing.T, slots ...SlotConfig) *fixture {
	f := given(t, 81920, slots...)
	for _, c := range slots {
		f.warm(c.Name, c.Claim/(1<<20))
	}
	f.advance(time.Minute)
	return f
}

func TestOneSlotComputesAtATime(t *testing.T) {
	f := residents(t, server("a", 1000, wide(4)), server("b", 1000, wide(4)))
	a1, a2 := f.submit("a"), f.submit("a")
	f.requireRunning(a1, a2) // side by side
	b := f.submit("b")
	f.requireWaiting(b)
	require.Equal(t, "a", f.s.Snapshot(f.now).GPUs[0].Owner)
	f.release(a1)
	f.requireWaiting(b)
	f.release(a2)
	f.requireRunning(b)
	require.Equal(t, "b", f.s.Snapshot(f.now).GPUs[0].Owner)
	f.release(b)
	require.Empty(t, f.s.Snapshot(f.now).GPUs[0].Owner)
}

func TestTheOwnerAddsJobsWhileTheOldestOtherIsNotMuchOlder(t *testing.T) {
	f := residents(t, server("a", 1000, wide(8)), server("b", 1000))
	a := f.submit("a")
	b := f.submit("b")
	f.advance(20 * time.Second)
	in := f.submit("a")
	f.requireRunning(in) // lock_overtake 20 s
	f.advance(1)
	out := f.submit("a")
	f.requireWaiting(out, b)
	f.release(a)
	f.requireWaiting(out, b) // the owner drains
	f.release(in)
	f.requireRunning(b)
	f.requireWaiting(out)
	f.release(b)
	f.requireRunning(out)
}

func TestLockOvertakeIsAKnob(t *testing.T) {
	f := residents(t, server("a", 1000, wide(8)), server("b", 1000))
	f.reconfigure(func(c *Config) { c.LockOvertake = 0 })
	f.submit("a")
	f.submit("b")
	f.requireRunning(f.submit("a"))
	f.advance(1)
	f.requireWaiting(f.submit("a"))
}

func TestAMoreUrgentJobElsewhereIsNotOvertaken(t *testing.T) {
	f := residents(t, server("a", 1000, wide(8)), server("b", 1000))
	a := f.submit("a")
	b := f.submitJob(Submit{Slot: "b", Priority: 1})
	f.requireWaiting(f.submit("a"), b)
	urgent := f.submitJob(Submit{Slot: "a", Priority: 0})
	f.requireRunning(urgent) // it is the first of all
	f.release(a)
	f.release(urgent)
	f.requireRunning(b)
}

func TestTheLockPassesByPriorityThenAge(t *testing.T) {
	f := residents(t, server("a", 1000), server("b", 1000), server("c", 1000), server("d", 1000))
	running := f.submit("a")
	b := f.submit("b")
	f.advance(time.Second)
	c := f.submit("c")
	d := f.submitJob(Submit{Slot: "d", Priority: 1})
	for _, next := range []*handle{d, b, c} {
		f.requireWaiting(next)
		f.release(running)
		f.requireRunning(next)
		running = next
	}
}

func TestAFullSlotDoesNotKeepTheLockFromOthers(t *testing.T) {
	f := residents(t, server("a", 1000, lockNone), server("b", 1000), server("c", 1000, wide(2)))
	f.submit("a")
	f.requireWaiting(f.submit("a")) // it has no free place: it isn't b of rule 7
	f.requireRunning(f.submit("c"))
	f.requireRunning(f.submit("c"))
}

func TestASlotWithoutALockRunsBesideAnybody(t *testing.T) {
	f := residents(t, server("a", 1000), server("embedder", 1000, lockNone), server("b", 1000))
	a := f.submit("a")
	f.requireRunning(f.submit("embedder"))
	f.requireWaiting(f.submit("embedder")) // its own concurrency counts
	b := f.submit("b")
	f.requireWaiting(b)
	f.release(a)
	f.requireRunning(b)
}

func TestGPUsHaveLocksOfTheirOwnUnlessThereIsOneForAll(t *testing.T) {
	for _, global := range []bool{false, true} {
		cfg := defaults()
		cfg.LockGlobal = global
		cfg.Slots = []SlotConfig{server("a", 1000), server("b", 1000, on(1)), server("both", 2000, on(0, 1))}
		f := givenConfig(t, cfg, 16384, 16384)
		for _, c := range cfg.Slots {
			f.probe(c.Name, Yes)
		}
		a, b := f.submit("a"), f.submit("b")
		f.requireRunning(a)
		if global {
			f.requireWaiting(b)
			f.release(a)
			f.requireRunning(b)
			continue
		}
		f.requireRunning(b)
		both := f.submit("both") // all its locks or none
		f.advance(time.Minute)
		f.requireWaiting(both)
		f.release(a)
		f.requireWaiting(both)
		next := f.submit("a")
		f.requireWaiting(next) // both is older
		f.release(b)
		f.requireRunning(both)
		f.requireWaiting(next)
		f.release(both)
		f.requireRunning(next)
	}
}

func TestTheLockHoldsBeforeAnyGPUWasSeen(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 1000), server("b", 1000)}
	f := givenConfig(t, cfg) // no GPU is listed
	f.blind = "nvidia-smi: not found"
	f.reconfigure(func(c *Config) { c.Mode = Locked })
	f.probe("a", Yes)
	f.probe("b", Yes)
	a, b := f.submit("a"), f.submit("b")
	f.requireRunning(a)
	f.requireWaiting(b)
	f.release(a)
	f.requireRunning(b)
}

func TestALazySlotsFirstJobTakesTheLockInItsTurn(t *testing.T) {
	f := given(t, 81920, server("a", 1000), lazyServer("l", 1000), server("b", 1000))
	f.warm("a", 1000)
	f.warm("b", 1000)
	a := f.submit("a")
	f.advance(time.Second)
	l := f.submit("l")
	f.advance(time.Second)
	b := f.submit("b")
	f.requireWaiting(l, b)
	f.requireState("l", Idle)
	f.release(a)
	f.requireRunning(l)
	f.requireWaiting(b)
	f.release(l)
	f.requireRunning(b)
}

// Async servers (spec §12.3).

func TestTheWorkOfAnAsyncServerHoldsSlotAndLockUntilItIsDone(t *testing.T) {
	f := residents(t, lazyServer("comfyui", 13312, async), server("b", 1000))
	f.works["comfyui"] = true
	one := f.submit("comfyui")
	two := f.submit("comfyui")
	f.requireRunning(one, two) // putting work into its queue is not bounded by concurrency
	b := f.submit("b")
	f.releaseAs(one, Accepted)
	f.releaseAs(two, Accepted)
	require.Equal(t, 2, f.slot("comfyui").Held)
	f.advance(10 * time.Minute) // a third one came past the broker
	f.requireWaiting(b)
	used := f.now
	f.works["comfyui"] = false
	f.advance(250 * time.Millisecond)
	f.requireRunning(b)
	require.Zero(t, f.slot("comfyui").Held)
	require.False(t, f.slot("comfyui").LastUse.Before(used), "last use is the end of the work")
	require.Zero(t, f.s.Snapshot(f.now).Running-1)
}

func TestOnlyAnAnswerSentAfterTheLastAcceptanceEndsTheHold(t *testing.T) {
	f := residents(t, lazyServer("comfyui", 13312, async), server("b", 1000))
	f.works["comfyui"] = true
	one, two := f.submit("comfyui"), f.submit("comfyui")
	b := f.submit("b")
	f.releaseAs(one, Accepted)
	sent := f.now
	f.advance(time.Second)
	f.releaseAs(two, Accepted)
	f.step(BusyAnswer{Slot: "comfyui", Sent: sent}) // from before the second one was there
	f.requireWaiting(b)
	f.step(BusyAnswer{Slot: "comfyui", Sent: f.now})
	f.requireRunning(b)
}

func TestAnAsyncJobThatWasNotAcceptedReleasesAtOnce(t *testing.T) {
	f := residents(t, lazyServer("comfyui", 13312, async), server("b", 1000))
	f.works["comfyui"] = true
	h := f.submit("comfyui")
	b := f.submit("b")
	f.releaseAs(h, Served) // its validation failed
	f.requireRunning(b)
}

func TestAnAsyncServerThatCannotTellWhetherItWorksIsNotHeld(t *testing.T) {
	f := residents(t, lazyServer("x", 1000, func(c *SlotConfig) { c.Async = true }), server("b", 1000))
	h := f.submit("x")
	b := f.submit("b")
	f.releaseAs(h, Accepted)
	f.requireRunning(b)
}

func TestAServerThatGoesTakesItsHeldWorkWithIt(t *testing.T) {
	f := residents(t, lazyServer("comfyui", 13312, async), server("b", 1000))
	f.works["comfyui"] = true
	f.releaseAs(f.submit("comfyui"), Accepted)
	b := f.submit("b")
	f.step(Probed{Slot: "comfyui", Sent: f.now, Outcome: ProbeRefused, Detail: "connection refused"})
	f.requireState("comfyui", Idle)
	f.requireRunning(b)
	require.Equal(t, 1, f.s.Snapshot(f.now).Running)
}

func TestASecondReleaseDoesNothing(t *testing.T) {
	f := residents(t, server("a", 1000, wide(2)))
	one := f.submit("a")
	two := f.submit("a")
	f.release(one)
	f.step(Release{Job: one.id})
	f.step(Cancel{Job: one.id})
	require.Equal(t, 1, f.slot("a").Active)
	three := f.submit("a") // uses the place of the first again
	f.step(Release{Job: one.id})
	f.step(Release{Job: 0})
	require.Equal(t, 2, f.slot("a").Active)
	f.requireRunning(two, three)
}

func TestACancelThatLostTheRaceEndsTheJob(t *testing.T) {
	f := residents(t, server("a", 1000))
	h := f.submit("a")
	next := f.submit("a")
	f.cancel(h)
	f.requireRunning(next)
	require.Equal(t, 1, f.s.Snapshot(f.now).Running)
}

func TestWhatIsDecidedForAnotherTargetDoesNotCostALazySlotItsTurn(t *testing.T) {
	f := given(t, 16384, server("a", 1000, wide(8)), lazyServer("l", 1000), server("huge", 99999))
	f.warm("a", 1000)
	a := f.submit("a")
	l := f.submit("l")
	f.advance(25 * time.Second)
	late := f.submit("a")
	f.requireWaiting(l, late) // it is too young to go before l
	f.requireRefused(f.submitJob(Submit{Slot: "huge", Priority: 1}), NeverFits)
	f.requireWaiting(l, late)
	f.release(a)
	f.requireRunning(l)
}

func TestALazySlotWaitsBehindAnOlderJobThatNeedsItsGPU(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("far", 1000, on(1)), server("both", 2000, on(0, 1)), lazyServer("l", 1000), server("next", 1000, on(1))}
	start := func() (f *fixture, far *handle) {
		f = givenConfig(t, cfg, 16384, 16384)
		for _, name := range []string{"far", "both", "next"} {
			f.probe(name, Yes)
		}
		f.probe("l", NotTold)
		far = f.submit("far")
		f.requireRunning(far)
		return f, far
	}

	f, far := start()
	both := f.submit("both")
	f.requireWaiting(both) // for the other GPU: nothing computes on the first one
	f.advance(time.Second)
	l := f.submit("l")
	f.requireWaiting(l)
	f.requireState("l", Idle)
	require.Equal(t, "waits for the lock of its GPU", f.slot("l").Why)
	f.explained("l", 100, "waits", "waits for the lock of its GPU")
	f.release(far)
	f.requireRunning(both)
	f.requireWaiting(l)
	f.release(both)
	f.requireRunning(l)

	f, _ = start()
	both = f.submit("both")
	f.advance(time.Second)
	f.requireRunning(f.submitJob(Submit{Slot: "l", Priority: 1})) // more urgent
	f.requireWaiting(both)

	f, _ = start()
	next := f.submit("next") // older, but on the other GPU alone
	f.advance(time.Second)
	f.requireRunning(f.submit("l"))
	f.requireWaiting(next)

	f, _ = start()
	both = f.submit("both")
	l = f.submit("l") // neither is older
	f.requireRunning(l)
	f.requireWaiting(both)
}
