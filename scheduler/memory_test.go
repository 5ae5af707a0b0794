package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

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
			require.EqualValues(t, 1, f.s.Snapshot(f.now).Counts.Evictions)
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

// A model that `models auto` serves is booked with its consumer's vram until its server has told its size.
func TestAModelThatWasBookedWithTooMuchIsNotWaitedForLongerThanItsOwnMemoryTakes(t *testing.T) {
	for back, early := range map[gpu.Bytes]bool{500: true, 499: false} {
		f, _ := swap(t)
		f.reconfigure(func(c *Config) { c.Slots[0].Claim = 1000 * gpu.MiB })
		f.unloaded("a")
		f.look(200 * time.Millisecond)
		f.use(-back)
		f.look(750*time.Millisecond - 1)
		f.requireState("a", Stopping)
		f.look(1)
		f.requireState("a", map[bool]SlotState{true: Idle, false: Stopping}[early])
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

// Until a look after its end, what a job took is not known: the rest of its claim may be what outsiders seem to hold.
func TestWhatAJobTookIsOnlySeenByALookAfterIt(t *testing.T) {
	f := given(t, 16384, server("a", 8000), server("b", 7000))
	f.free(13384) // 3000 are a desktop's
	h := f.submit("a")
	f.loaded("a")
	f.use(1000)
	f.advance(time.Second)
	f.release(h)
	require.EqualValues(t, 1000, f.slot("a").Holds[0].Seen.MiB())
	require.EqualValues(t, 3000, f.outsiders())
	f.submit("b") // beside 3000 and 8000 there is no room for it
	f.requireUnloads("a")
}

func TestOnlyALookFromAfterTheCallShowsThatMemoryIsBack(t *testing.T) {
	f, _ := swap(t)
	f.free(16384) // the sample comes before the call returns
	f.advance(time.Millisecond)
	f.unloaded("a")
	f.requireState("a", Stopping)
	f.advance(time.Millisecond)
	f.sample()
	f.requireState("a", Idle)
	f.requireState("b", Loading)
}

// A residue that is gone by the end of another's unload doesn't come back with the memory of what is loaded next.
func TestAResidueThatWentDuringAnUnloadIsGoneBeforeTheNextLoad(t *testing.T) {
	f := given(t, 24576, server("leaky", 2048), server("next", 2048), server("big", 14336), server("new", 9216), server("last", 14000))
	for _, name := range []string{"leaky", "next"} {
		f.warm(name, 2048)
	}
	f.warm("big", 14336)
	f.advance(time.Minute)
	f.step(Unload{Slot: "leaky"})
	f.unloaded("leaky")
	f.look(10 * time.Second)
	f.requireState("leaky", Idle)
	require.EqualValues(t, 2048, f.booking("leaky"))

	f.step(Unload{Slot: "next"})
	f.submit("new")
	f.unloaded("next")
	f.free(24576 - 14336) // both gave back theirs
	f.requireState("next", Idle)
	require.Zero(t, f.booking("leaky"))
	f.requireState("new", Loading)
	f.submit("last")
	f.loaded("new")
	f.requireState("big", Stopping)
	f.use(9216)
	require.Zero(t, f.booking("leaky"))
	require.EqualValues(t, 14336+9216, f.s.Snapshot(f.now).GPUs[0].Booked.MiB())
}
