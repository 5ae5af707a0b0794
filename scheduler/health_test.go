package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func (f *fixture) probeTimesOut(name string) {
	f.t.Helper()
	f.step(Probed{Slot: name, Sent: f.now, Outcome: ProbeTimedOut})
}

func (f *fixture) probeRefused(name string) {
	f.t.Helper()
	f.step(Probed{Slot: name, Sent: f.now, Outcome: ProbeRefused, Detail: "connection refused"})
}

func TestJobsWaitForTheFirstProbe(t *testing.T) {
	for _, mode := range []Mode{Evicting, Locked} {
		cfg := defaults()
		cfg.Mode, cfg.Slots = mode, []SlotConfig{server("a", 1000)}
		f := givenConfig(t, cfg, 16384)
		h := f.submit("a")
		f.advance(time.Minute)
		f.requireWaiting(h)
		f.probe("a", Yes)
		f.requireRunning(h)
	}
}

func TestASlotWithoutAHealthProbeNeedsNone(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 1000, func(c *SlotConfig) { c.CanProbe, c.CanTell = false, false })}
	f := givenConfig(t, cfg, 16384)
	f.requireState("a", Unknown)
	h := f.submit("a")
	f.loaded("a")
	f.requireRunning(h)
}

func TestAnUnknownTargetsMemoryCountsAsForeign(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 10000, func(c *SlotConfig) { c.CanProbe, c.CanTell = false, false })}
	f := givenConfig(t, cfg, 16384)
	f.free(10255)
	h := f.submit("a")
	f.requireLoads()
	f.free(10256)
	f.requireLoads("a")
	f.loaded("a")
	f.requireRunning(h)
}

// One of two servers whose residency can't be told may hold the GPU's memory: the one that is behind makes way.
func TestTwoUnknownSlotsThatAreWaitedForDoNotWaitForEachOther(t *testing.T) {
	cfg := defaults()
	for _, name := range []string{"a", "b"} {
		cfg.Slots = append(cfg.Slots, server(name, 9000, func(c *SlotConfig) { c.CanTell = false }))
	}
	f := givenConfig(t, cfg, 16384)
	f.free(2000) // one of them holds it
	first := f.submit("a")
	f.advance(time.Second)
	second := f.submit("b")
	f.probe("b", NotTold)
	f.probe("a", NotTold)
	f.requireUnloads("b")
	f.evicted("b", 14000)
	f.requireLoads("a")
	f.loaded("a")
	f.requireRunning(first)
	f.requireWaiting(second)
}

func TestAnUnhealthySlotIsRefusedAtOnceAndSoAreItsQueuedJobs(t *testing.T) {
	for _, c := range []struct {
		name string
		sick func(f *fixture)
	}{
		{"a refused connection", func(f *fixture) { f.probeRefused("a") }},
		{"a wrong answer", func(f *fixture) {
			f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeWrong, Detail: "connection refused by its back end"})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := given(t, 16384, server("a", 5000), server("b", 5000))
			f.warm("b", 5000)
			f.warm("a", 5000)
			b := f.submit("b")
			waits := f.submit("a")
			c.sick(f)
			r := f.requireRefused(waits, Unhealthy)
			require.Positive(t, r.RetryAfter)
			require.Contains(t, r.Message, "connection refused")
			f.requireRefused(f.submit("a"), Unhealthy)
			f.requireRunning(b)
			f.advance(time.Hour)
			f.requireRefused(f.submit("a"), Unhealthy) // until a probe is answered
			f.release(b)
			f.probe("a", Yes)
			f.requireRunning(f.submit("a"))
			require.NotEmpty(t, f.decided("healthy", "a"))
		})
	}
}

func TestThreeTimeOutsInARowMakeASlotUnhealthy(t *testing.T) {
	f := given(t, 16384, server("a", 5000))
	f.warm("a", 5000)
	for range 5 {
		f.advance(time.Second)
		f.probeTimesOut("a")
		f.probeTimesOut("a")
		f.probe("a", Yes) // not in a row
	}
	require.Equal(t, "healthy", f.slot("a").Health)
	f.probeTimesOut("a")
	f.probeTimesOut("a")
	f.release(f.submit("a"))
	f.probeTimesOut("a")
	f.requireRefused(f.submit("a"), Unhealthy)
}

func TestATimeOutOfAServerThatComputesLoadsOrStopsIsNoEvidence(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	manyTimeOuts := func() {
		t.Helper()
		for range 9 {
			f.advance(time.Second)
			f.probeTimesOut("a")
		}
		require.Equal(t, "healthy", f.slot("a").Health)
	}
	h := f.submit("a")
	manyTimeOuts() // loads
	f.loaded("a")
	manyTimeOuts() // computes
	sent := f.now
	f.advance(time.Second)
	f.release(h)
	for range 9 { // computed while it was asked
		f.step(Probed{Slot: "a", Sent: sent, Outcome: ProbeTimedOut})
	}
	require.Equal(t, "healthy", f.slot("a").Health)
	f.advance(time.Minute)
	f.submit("b")
	f.requireState("a", Stopping)
	manyTimeOuts()
}

func TestHeldWorkIsComputingToo(t *testing.T) {
	f := residents(t, lazyServer("a", 1000, async))
	f.works["a"] = true
	f.releaseAs(f.submit("a"), Accepted)
	for range 9 {
		f.advance(time.Second)
		f.probeTimesOut("a")
	}
	require.Equal(t, "healthy", f.slot("a").Health)
}

func TestARunningJobIsNotTouchedByABadProbe(t *testing.T) {
	f := given(t, 16384, server("a", 5000))
	f.warm("a", 5000)
	h := f.submit("a")
	f.probeRefused("a")
	f.requireRunning(h)
	f.requireState("a", Ready)
	f.release(h)
	f.probeRefused("a")
	f.requireState("a", Idle)
}

func TestACrashedSlotIsLoadedAgainByTheNextJob(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	f.warm("a", 10000)
	f.probeRefused("a")
	require.EqualValues(t, 10000, f.booking("a"), "until its memory is seen free")
	f.free(16384)
	require.Zero(t, f.booking("a"))
	f.probe("a", No)
	h := f.submit("a")
	f.loaded("a")
	f.requireRunning(h)
}

func TestACrashIsSeenToHaveFreedWhatASampleShowedBefore(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 5000), server("c", 7000))
	f.warm("a", 10000)
	f.warm("b", 5000)
	f.advance(time.Minute)
	f.free(11384) // a's process is gone, and the sample comes before the probe
	f.probeRefused("a")
	f.submit("c")
	f.requireUnloads()
	f.requireLoads("a", "b", "c")
}

// A dial that was refused with nothing sent (spec §1.11): the driver releases the job, and submits it once more as of its old time.

func refusedDial(t *testing.T) (f *fixture, again *handle) {
	f = given(t, 16384, server("a", 10000))
	f.warm("a", 10000)
	f.advance(time.Minute)
	h := f.submit("a")
	came := f.now
	f.advance(time.Second)
	old := f.now
	f.advance(time.Second)
	f.releaseAs(h, DialRefused)
	require.Equal(t, []string{"a"}, f.probes)
	f.requireState("a", Idle)
	younger := f.submit("a")
	again = f.submitJob(Submit{Slot: "a", Priority: 100, Submitted: came})
	f.requireWaiting(younger, again) // nothing is known before the probe answers
	f.step(Probed{Slot: "a", Sent: old, Outcome: ProbeAnswered, Loaded: Yes})
	f.requireWaiting(younger, again) // nor by one that was sent before
	return f, again
}

func TestAfterARefusedDialTheSlotIsLoadedAnewIfItsServerIsThereAgain(t *testing.T) {
	f, again := refusedDial(t)
	f.free(16384)
	f.probe("a", No)
	f.requireState("a", Loading)
	f.loaded("a")
	f.requireRunning(again) // it keeps its place
	require.Equal(t, 1, f.slot("a").Waiting)
}

func TestAfterARefusedDialTheSlotServesOnIfItsServerIsLoaded(t *testing.T) {
	f, again := refusedDial(t)
	f.probe("a", Yes)
	f.requireRunning(again)
	f.requireLoads("a")
}

func TestAfterARefusedDialTheJobIsRefusedIfItsServerIsGone(t *testing.T) {
	f, again := refusedDial(t)
	f.probeRefused("a")
	f.requireRefused(again, Unhealthy)
	require.Zero(t, f.s.Snapshot(f.now).Waiting)
}

func TestARefusedDialOfAServerThatServesOthersTouchesThemNot(t *testing.T) {
	f := given(t, 16384, server("a", 10000, wide(4)))
	f.warm("a", 10000)
	one, two := f.submit("a"), f.submit("a")
	f.releaseAs(one, DialRefused)
	f.requireState("a", Ready)
	f.requireRunning(two)
	again := f.submit("a")
	f.requireWaiting(again)
	f.probe("a", Yes)
	f.requireRunning(again)
}

func TestARefusedDialIsProbedInLockedModeToo(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	f.reconfigure(func(c *Config) { c.Mode = Locked })
	f.probe("a", NotTold)
	f.releaseAs(f.submit("a"), DialRefused)
	require.Equal(t, []string{"a"}, f.probes)
	again := f.submit("a")
	f.requireWaiting(again)
	f.probe("a", NotTold)
	f.requireRunning(again)
}

// GPUs.

func TestJobsWaitForTheFirstLookAtTheGPUs(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 1000)}
	f := givenConfig(t, cfg, 16384)
	f.s = New()
	f.configure(cfg)
	f.probe("a", No)
	h := f.submit("a")
	f.advance(time.Minute)
	f.requireWaiting(h)
	f.sample()
	f.requireLoads("a")
}

func TestALostGPUIsNotLostTelemetry(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 10000), server("b", 10000), server("other", 1000, on(1))}
	start := func() *fixture {
		f := givenConfig(t, cfg, 16384, 16384)
		for _, c := range cfg.Slots {
			f.probe(c.Name, No)
		}
		f.warm("a", 10000)
		return f
	}

	f := start()
	running := f.submit("a")
	waits := f.submit("a")
	f.cards[0].Lost, f.cards[0].Reason = true, "fell off the bus"
	f.sample()
	r := f.requireRefused(waits, GPULost)
	require.Contains(t, r.Message, "fell off the bus")
	require.Positive(t, r.RetryAfter)
	f.requireRefused(f.submit("b"), GPULost)
	f.requireRunning(running)
	f.submit("other")
	f.requireLoads("a", "other") // the others go on
	f.release(running)
	f.cards[0].Lost = false
	f.sample()
	f.requireRunning(f.submit("a"))

	f = start()
	running = f.submit("a")
	waits = f.submit("a")
	f.blind = "nvidia-smi: time-out"
	f.sample()
	f.requireRunning(running)
	f.requireWaiting(waits)
	f.release(running)
	f.requireRunning(waits)
	f.release(waits)
	require.Equal(t, "nvidia-smi: time-out", f.s.Snapshot(f.now).Degraded)
	f.advance(time.Minute)
	b := f.submit("b") // book-keeping goes on
	f.requireUnloads("a")
	f.unloaded("a")
	f.advance(time.Second)
	f.loaded("b")
	f.requireRunning(b)
	f.blind, f.cards[0].Free = "", 6384*gpu.MiB
	f.sample()
	require.Empty(t, f.s.Snapshot(f.now).Degraded)
}

func TestAGPUThatIsNotThereIsNamed(t *testing.T) {
	f := given(t, 16384, server("a", 1000, on(7)))
	require.Contains(t, f.requireRefused(f.submit("a"), GPULost).Message, "GPU 7")
}

// Nobody listens, so its process has ended, and what that held is free. Counted on, it hid what others had left behind.
func TestARefusedConnectionTellsThatAServerWithoutAProbeIsGone(t *testing.T) {
	f := given(t, 16384, lazyServer("a", 1000, unprobed, wide(2)), server("b", 13000))
	f.warm("a", 1000)
	one, two := f.submit("a"), f.submit("a")
	f.cards[0].Free += 1000 * gpu.MiB
	f.sample()
	f.releaseAs(one, DialRefused)
	f.requireState("a", Ready) // another still computes there, as far as is known
	f.releaseAs(two, DialRefused)
	f.requireState("a", Idle)
	require.Contains(t, f.decided("gone", "a").Reason, "refused")
	require.Equal(t, "healthy", f.slot("a").Health)

	f.sample()
	f.submit("b")
	f.requireState("b", Loading)
	third := f.submit("a")
	f.requireWaiting(third) // it needs room again
}

func unprobed(c *SlotConfig) { c.CanProbe, c.CanTell = false, false }

// It may load at its start, with nobody who could tell that or unload it: taken for gone, it would be refused for its own memory.
func TestAServerThatCanNeitherTellNorBeUnloadedIsServedWhenItComesBackLoaded(t *testing.T) {
	for name, set := range map[string]func(*SlotConfig){
		"no route":         func(c *SlotConfig) { c.CanLoad, c.CanUnload = false, false },
		"load alone":       func(c *SlotConfig) { c.CanUnload = false },
		"load and unload":  func(*SlotConfig) {},
		"no route, pinned": func(c *SlotConfig) { c.CanLoad, c.CanUnload, c.Pin = false, false, true },
	} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 10000, unprobed, set))
			f.warm("a", 10000)
			f.releaseAs(f.submit("a"), DialRefused)
			f.use(-10000)
			f.look(5 * time.Second)
			f.use(10000)
			f.look(2 * time.Minute)
			f.requireRunning(f.submit("a"))
		})
	}
}

func TestARefusedConnectionTellsThatAllModelsOfAServerAreGone(t *testing.T) {
	at := func(address string) func(c *SlotConfig) {
		return func(c *SlotConfig) { unprobed(c); c.Server = address }
	}
	f := given(t, 16384, lazyServer("m/a", 1000, at("one")), lazyServer("m/b", 1000, at("one")), lazyServer("m/c", 1000, at("one"), lockNone), lazyServer("n", 1000, at("another")))
	for _, name := range []string{"m/a", "m/b", "m/c", "n"} {
		f.warm(name, 1000)
	}
	c := f.submit("m/c")
	f.requireRunning(c)
	f.releaseAs(f.submit("m/a"), DialRefused)
	for name, want := range map[string]SlotState{"m/a": Idle, "m/b": Idle, "m/c": Ready, "n": Ready} {
		f.requireState(name, want) // c works, as far as is known
	}
}

// A provider's refusal says nothing of this machine's memory.
func TestACloudThatRefusesAConnectionStaysReady(t *testing.T) {
	f := given(t, 16384, server("a", 1000, cloud))
	f.releaseAs(f.submit("a"), DialRefused)
	f.requireState("a", Ready)
	f.requireRunning(f.submit("a"))
}
