package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// look lets time go by with a look at the GPUs every 50 ms, as NVML does in a hand-over.
func (f *fixture) look(d time.Duration) {
	f.t.Helper()
	for end := f.now.Add(d); f.now.Before(end); {
		f.advance(min(50*time.Millisecond, end.Sub(f.now)))
		f.sample()
	}
}

// outsiders is what programs that are none of ours hold of GPU 0, in MiB.
func (f *fixture) outsiders() int64 { return f.s.Snapshot().GPUs[0].Outsiders.MiB() }

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
	require.EqualValues(t, 2, f.s.Snapshot().Counts.ManualUnloads)
	require.Zero(t, f.s.Snapshot().Counts.Evictions)
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

// swap is a world in which b waits for the 13312 MiB of a, whose unload call is out. 3072 MiB are free, b needs 10256.
func swap(t *testing.T, set ...func(*SlotConfig)) (*fixture, *handle) {
	f := given(t, 16384, server("a", 13312, set...), server("b", 10000))
	f.warm("a", 13312)
	f.advance(time.Minute)
	h := f.submit("b")
	f.requireState("a", Stopping)
	f.advance(time.Second)
	return f, h
}

func TestFC23_MemoryThatComesBackLateIsWaitedFor(t *testing.T) {
	for _, after := range []time.Duration{0, 800 * time.Millisecond, 3 * time.Second} {
		t.Run(after.String(), func(t *testing.T) {
			f, h := swap(t)
			f.unloaded("a")
			require.True(t, f.s.FastSampling())
			f.look(after)
			f.requireState("a", Stopping)
			f.requireState("b", Idle)
			f.free(16384)
			f.requireState("a", Idle)
			f.requireState("b", Loading)
			require.Zero(t, f.booking("a"))
			f.loaded("b")
			f.requireRunning(h)
			require.False(t, f.s.FastSampling())
			require.EqualValues(t, 1, f.s.Snapshot().Counts.Evictions)
		})
	}
}

func TestFC23_MemoryThatNeverComesBackIsWaitedForUntilEvictWait(t *testing.T) {
	f, h := swap(t)
	f.unloaded("a")
	f.look(10*time.Second - 1)
	f.requireState("a", Stopping)
	f.look(1)
	f.requireState("a", Idle)
	require.EqualValues(t, 13312, f.booking("a"))
	require.Zero(t, f.outsiders(), "it is booked to the victim, it is no outsider")
	f.requireWaiting(h)
	f.look(10 * time.Second)
	f.requireRefused(h, VRAMExhausted)
	f.requireLoads("a")
	f.requireUnloads("a")
}

func TestFC30_AnUnloadIsOverWhenTheMemoryIsBackNotWhenItAnswers(t *testing.T) {
	f, h := swap(t)
	f.answered("a")
	f.look(5 * time.Second)
	f.requireState("a", Stopping)
	f.requireWaiting(h)
	f.free(16384)
	f.requireState("b", Loading)
}

func TestEvictWaitIsAKnob(t *testing.T) {
	f, _ := swap(t)
	f.reconfigure(func(c *Config) { c.EvictWait = 2 * time.Second })
	f.unloaded("a")
	f.look(2*time.Second - 1)
	f.requireState("a", Stopping)
	f.look(1)
	f.requireState("a", Idle)
}

func TestTheMemoryIsBackAsSoonAsTheTargetFits(t *testing.T) {
	f, h := swap(t)
	f.answered("a")
	f.free(10255)
	f.requireState("a", Stopping)
	f.free(10256)
	f.requireState("a", Idle)
	f.requireState("b", Loading)
	require.EqualValues(t, 13312-(10256-3072), f.booking("a"), "the rest is booked until it is seen free")
	f.loaded("b")
	f.requireRunning(h)
}

func TestTheMemoryIsBackWhenAllButTheKnownResidueIs(t *testing.T) {
	f, _ := swap(t, func(c *SlotConfig) { c.Residual = 512 * gpu.MiB })
	f.reconfigure(func(c *Config) { c.Slots[1].Claim = 15800 * gpu.MiB }) // b will need more than there is
	f.answered("a")
	f.free(16384 - 513)
	f.requireState("a", Stopping)
	f.free(16384 - 512)
	f.requireState("a", Idle)
	require.EqualValues(t, 512, f.booking("a"))
}

func TestAWaitForMemoryIsGivenUpEarlyOnlyForGoodReasons(t *testing.T) {
	for _, c := range []struct {
		name      string
		confirmed bool
		back      gpu.Bytes
		early     bool
	}{
		{"confirmed, half of it came back", true, 6656, true},
		{"not confirmed", false, 6656, false},
		{"confirmed, less than half came back", true, 6655, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, _ := swap(t)
			f.step(UnloadDone{Slot: "a", Epoch: f.epochs["a"], Confirmed: c.confirmed})
			f.look(200 * time.Millisecond)
			f.use(-c.back)
			f.look(750*time.Millisecond - 1)
			f.requireState("a", Stopping)
			f.look(1)
			if c.early {
				f.requireState("a", Idle)
				require.EqualValues(t, 13312-c.back, f.booking("a"))
				return
			}
			f.requireState("a", Stopping)
			f.look(10*time.Second - 951*time.Millisecond)
			f.requireState("a", Stopping)
			f.look(time.Millisecond)
			f.requireState("a", Idle)
		})
	}
}

func TestAWaitIsNotGivenUpWhileMemoryStillRises(t *testing.T) {
	f, _ := swap(t)
	f.unloaded("a")
	f.use(-7000)
	for range 5 {
		f.look(700 * time.Millisecond)
		f.use(-1)
	}
	f.requireState("a", Stopping)
	f.look(750 * time.Millisecond)
	f.requireState("a", Idle)
}

func TestOnlyALookCanTellThatNothingRisesAnyMore(t *testing.T) {
	f, _ := swap(t)
	f.unloaded("a")
	f.use(-7000)
	f.advance(2 * time.Second) // the sampler is slow
	f.step(Wake{})
	f.requireState("a", Stopping)
	f.use(-6312)
	f.requireState("a", Idle)
	require.Zero(t, f.booking("a"))
	f.requireState("b", Loading)
}

func TestWithoutTelemetryMemoryIsWaitedForOneSecond(t *testing.T) {
	f := given(t, 16384, server("a", 13312), server("b", 10000))
	f.blind = "nvidia-smi: not found"
	f.sample()
	h := f.submit("a")
	f.loaded("a")
	f.release(h)
	f.advance(time.Minute)
	h = f.submit("b")
	f.unloaded("a")
	f.advance(time.Second - 1)
	f.requireState("a", Stopping)
	f.advance(1)
	f.requireState("a", Idle)
	require.Zero(t, f.booking("a"))
	f.loaded("b")
	f.requireRunning(h)
}

func TestACrashWithoutTelemetryFreesTheBooking(t *testing.T) {
	f := given(t, 16384, server("a", 13312), server("b", 10000))
	f.blind = "nvidia-smi: not found"
	f.sample()
	h := f.submit("a")
	f.loaded("a")
	f.release(h)
	f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeRefused, Detail: "connection refused"})
	require.Zero(t, f.booking("a"))
	f.submit("b")
	f.requireLoads("a", "b")
}

func TestAResidueIsCappedAnewAtEachSample(t *testing.T) {
	f, h := swap(t)
	f.cancel(h)
	f.unloaded("a")
	f.look(10 * time.Second)
	require.EqualValues(t, 13312, f.booking("a"))
	f.use(-12000) // it comes back late
	require.EqualValues(t, 1312, f.booking("a"))
	f.use(5000) // an outsider comes
	require.EqualValues(t, 1312, f.booking("a"), "a residue never grows")
	require.EqualValues(t, 5000, f.outsiders())
	f.free(16384)
	require.Zero(t, f.booking("a"))
	require.Zero(t, f.outsiders())
}

func TestAnEarlierOutsiderIsNeverTakenForAResidue(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.free(14384) // an outsider holds 2000
	f.warm("a", 10000)
	f.advance(time.Minute)
	f.submit("b")
	f.unloaded("a")
	f.use(-9000)
	f.look(time.Second)
	f.requireState("a", Idle)
	require.EqualValues(t, 1000, f.booking("a"))
	require.EqualValues(t, 2000, f.outsiders())
}

func TestAVictimWhoseMemoryCameBackAfterAllIsBelievedAgain(t *testing.T) {
	f, h := swap(t)
	f.unloaded("a")
	f.look(20 * time.Second)
	f.requireRefused(h, VRAMExhausted)
	f.use(-13312)
	f.warm("a", 13312)
	f.advance(time.Minute)
	h = f.submit("b")
	f.evicted("a", 13312)
	f.loaded("b")
	f.requireRunning(h)
}

func TestTheResidueOfTheLastUnloadIsKnownAtTheNext(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	f.warm("a", 10000)
	f.step(Unload{Slot: "a"})
	f.unloaded("a")
	f.use(-9400) // it keeps its context, which nobody knew
	f.requireState("a", Stopping)
	f.look(750 * time.Millisecond)
	f.requireState("a", Idle)
	require.EqualValues(t, 600, f.booking("a"))

	f.warm("a", 9400)
	f.step(Unload{Slot: "a"})
	f.answered("a")
	f.use(-9399)
	f.requireState("a", Stopping)
	f.use(-1)
	f.requireState("a", Idle)
	require.EqualValues(t, 600, f.booking("a"))
}

func TestWhatIsMeasuredByProcessGoesBeforeGuesses(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 8000))
	f.warm("a", 6000)
	f.cards[0].Measured = map[string]gpu.Bytes{"a": 6000 * gpu.MiB}
	f.sample()
	require.EqualValues(t, 6000, f.slot("a").Holds[0].Seen.MiB())
	f.advance(time.Minute)
	f.submit("b")
	f.unloaded("a")
	f.cards[0].Measured = nil // a cheap look
	f.free(16384 - 100)
	f.requireState("b", Loading)
	require.EqualValues(t, 100, f.booking("a"))
	f.sample()
	require.EqualValues(t, 100, f.slot("a").Holds[0].Seen.MiB())
	require.EqualValues(t, 100, f.booking("a"), "what was measured before the unload is of no use after it")
	f.cards[0].Measured = map[string]gpu.Bytes{"a": 70 * gpu.MiB}
	f.sample()
	require.EqualValues(t, 70, f.booking("a"))
	f.cards[0].Measured = map[string]gpu.Bytes{}
	f.sample()
	require.LessOrEqual(t, f.booking("a"), int64(100))
}

func TestTheDropOfOneSlotEndsWhereAnothersTransitionBegins(t *testing.T) {
	f := given(t, 24576, lazyServer("a", 13312), server("b", 4000), server("c", 1000))
	h := f.submit("a")
	f.use(2000)
	require.EqualValues(t, 2000, f.slot("a").Holds[0].Seen.MiB())
	f.releaseAs(h, NoAnswer) // nothing was served: it has not settled
	f.submit("b")
	f.requireLoads("b")
	f.use(3000)
	require.EqualValues(t, 2000, f.slot("a").Holds[0].Seen.MiB())
	require.EqualValues(t, 3000, f.slot("b").Holds[0].Seen.MiB())
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
	c := f.s.Snapshot().Counts
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
	require.EqualValues(t, 1, f.s.Snapshot().Counts.ManualUnloads)
	f.step(Unload{Slot: "l"}) // not loaded: nothing to do
	f.step(Unload{Slot: "nobody"})
	f.requireUnloads("a")
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
