package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Idle unload: spec §5.

// isIdle is a world with a server that has served a job just now, and that is unloaded after 10 s.
func isIdle(t *testing.T, set ...func(*SlotConfig)) *fixture {
	f := given(t, 16384, server("a", 4000, append([]func(*SlotConfig){idles(10 * time.Second)}, set...)...), server("b", 4000))
	f.warm("a", 4000)
	return f
}

func TestAnIdleSlotIsUnloadedAtTheExactTime(t *testing.T) {
	f := isIdle(t)
	last := f.now
	require.Equal(t, last.Add(10*time.Second), f.wake, "it asks to be woken at that time")
	require.Equal(t, f.wake, f.slot("a").UnloadAt)
	f.advance(10*time.Second - 1)
	f.step(Wake{})
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("a")
	require.Equal(t, "nobody has used it for 10s", f.decided("unload", "a").Reason)
	f.evicted("a", 4000)
	f.requireState("a", Idle)
	f.decided("idle_unloaded", "a")
	n := f.s.Snapshot(f.now).Counts
	require.EqualValues(t, 1, n.IdleUnloads)
	require.Zero(t, n.Evictions+n.ManualUnloads)
	require.Zero(t, f.booking("a"))
	require.Zero(t, f.slot("a").UnloadAt)
	require.Zero(t, f.wake, "nothing is left to be done")
	h := f.submit("a")
	f.loaded("a")
	f.requireRunning(h)
}

func TestIdleCountsFromReadyForOneThatWasNeverUsed(t *testing.T) {
	f := given(t, 16384, server("a", 4000, idles(10*time.Second)))
	h := f.submit("a")
	f.advance(5 * time.Second)
	f.cancel(h)
	f.advance(5 * time.Second)
	f.loaded("a")
	f.advance(10*time.Second - 1)
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("a")
}

func TestIdleCountsFromTheTimeAtWhichAServerWasFoundLoaded(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 4000, idles(10*time.Second))}
	f := givenConfig(t, cfg, 16384)
	f.advance(time.Minute)
	f.probe("a", Yes)
	f.advance(10*time.Second - 1)
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("a")
}

// A job that got no answer is no use of the model, but its slot was not idle (spec §3.5).
func TestIdleCountsFromTheEndOfAnyJob(t *testing.T) {
	for _, outcome := range []Outcome{Served, Accepted, NoAnswer, ServerDied} {
		f := isIdle(t)
		f.advance(9 * time.Second)
		h := f.submit("a")
		f.advance(9 * time.Second)
		f.releaseAs(h, outcome)
		f.advance(10*time.Second - 1)
		f.requireUnloads()
		f.advance(1)
		f.requireUnloads("a")
	}
}

func TestIdleCountsFromTheEndOfWorkThatOutlivedItsAnswer(t *testing.T) {
	f := given(t, 16384, server("a", 4000, idles(10*time.Second), async))
	f.works["a"] = true
	h := f.submit("a")
	f.loaded("a")
	f.releaseAs(h, Accepted)
	f.advance(time.Minute)
	f.requireUnloads()
	f.works["a"] = false
	f.advance(busyPoll)
	require.Zero(t, f.slot("a").Held)
	f.advance(10*time.Second - busyPoll)
	f.requireUnloads()
	f.advance(busyPoll)
	f.requireUnloads("a")
}

func TestKeepAlivePutsAnIdleUnloadOff(t *testing.T) {
	f := isIdle(t, keepsWarm(25*time.Second))
	require.Equal(t, f.now.Add(25*time.Second), f.slot("a").UnloadAt)
	f.advance(25*time.Second - 1)
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("a")
	f = isIdle(t, keepsWarm(5*time.Second))
	f.advance(10 * time.Second)
	f.requireUnloads("a")
}

func TestATouchPutsAnIdleUnloadOff(t *testing.T) {
	f := isIdle(t)
	f.advance(10*time.Second - 1)
	f.step(Touch{Slot: "a"})
	f.advance(10*time.Second - 1)
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("a")
}

func TestSlotsThatAreToStayAreNeverIdleUnloaded(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"pinned":                            func(c *Config) { c.Slots[0].Pin = true },
		"manages its memory itself":         func(c *Config) { c.Slots[0].VRAMManaged = true },
		"no unload route":                   func(c *Config) { c.Slots[0].CanUnload = false },
		"no timeout":                        func(c *Config) { c.Slots[0].IdleTimeout = 0 },
		"no timeout of its own":             func(c *Config) { c.Slots[0].IdleTimeout, c.Slots[0].OwnIdle = 0, true },
		"idle_unload off":                   func(c *Config) { c.IdleUnload = IdleOff },
		"idle_unload observe":               func(c *Config) { c.IdleUnload = IdleObserve },
		"a scheduler that only locks":       func(c *Config) { c.Mode = Locked },
		"a scheduler that does nothing":     func(c *Config) { c.Mode = Passthrough },
		"pinned, with a timeout of its own": func(c *Config) { c.Slots[0].Pin, c.Slots[0].OwnIdle = true, true },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := defaults()
			cfg.Slots = []SlotConfig{server("a", 4000, idles(10*time.Second))}
			change(&cfg)
			f := givenConfig(t, cfg, 16384)
			f.probe("a", Yes)
			require.Zero(t, f.slot("a").UnloadAt)
			f.release(f.submit("a"))
			require.Zero(t, f.slot("a").UnloadAt)
			f.advance(24 * time.Hour)
			f.requireUnloads()
			require.True(t, f.slot("a").GateOpen)
		})
	}
}

func TestAServerThatManagesItsMemoryItselfGoesAfterATimeoutOfItsOwn(t *testing.T) {
	f := isIdle(t, vramManaged, func(c *SlotConfig) { c.OwnIdle = true })
	f.advance(10 * time.Second)
	f.requireUnloads("a")
}

func TestASlotWithJobsIsNotIdle(t *testing.T) {
	f := isIdle(t)
	h := f.submit("a")
	f.advance(time.Hour) // active
	f.requireUnloads()
	f.release(h)
	b := f.submit("b")
	f.loaded("b")
	h = f.submit("a")
	f.requireWaiting(h) // for the lock
	f.advance(time.Hour)
	f.requireUnloads()
	f.release(b)
	f.requireRunning(h)
}

// FC-14: looking keeps nothing warm.
func TestFC14_LookingAtASlotDoesNotPutItsIdleUnloadOff(t *testing.T) {
	f := isIdle(t)
	for range 9 {
		f.advance(time.Second)
		f.probe("a", Yes)
		f.sample()
		f.step(Wake{})
		f.s.Snapshot(f.now)
		f.s.Slot("a")
		f.s.Learnt()
		f.step(Submit{Slot: "nobody"})
		f.step(Touch{Slot: "b"})
	}
	f.requireUnloads()
	f.advance(time.Second)
	f.requireUnloads("a")
}

func TestAJobThatComesAtTheVeryInstantIsServed(t *testing.T) {
	t.Run("before the wake", func(t *testing.T) {
		f := isIdle(t)
		f.now = f.now.Add(10 * time.Second)
		h := f.submit("a")
		f.requireRunning(h)
		f.step(Wake{})
		f.requireUnloads()
		f.release(h)
		f.step(Wake{})
		f.requireUnloads()
	})
	t.Run("with the busy route asked", func(t *testing.T) {
		f := isIdle(t, asksBusy)
		f.slow["a"] = true
		f.advance(10 * time.Second)
		asked := f.now
		require.Equal(t, 1, f.asked)
		require.False(t, f.slot("a").GateOpen)
		h := f.submit("a")
		f.requireRunning(h)
		f.decided("reopen", "a")
		f.tell("a", asked, false) // not busy, it said, before the job came
		f.requireUnloads()
		f.advance(time.Second)
		f.release(h)
		f.advance(10*time.Second - 1)
		f.requireUnloads()
		f.advance(1)
		f.tell("a", f.now, false)
		f.requireUnloads("a")
	})
	t.Run("and its queue is full", func(t *testing.T) {
		f := isIdle(t, asksBusy, lockNone)
		f.reconfigure(func(c *Config) { c.MaxQueue = 1 })
		running := f.submit("b")
		f.loaded("b")
		waiting := f.submit("b")
		f.requireWaiting(waiting)
		f.slow["a"] = true
		f.advance(10 * time.Second)
		require.False(t, f.slot("a").GateOpen)
		f.requireRunning(f.submit("a"), running)
	})
	t.Run("with the unload call out", func(t *testing.T) {
		f := isIdle(t)
		f.advance(10 * time.Second)
		f.requireUnloads("a")
		h := f.submit("a")
		f.requireWaiting(h)
		f.requireState("a", Stopping)
		f.evicted("a", 4000)
		f.requireLoads("a", "a")
		f.loaded("a")
		f.requireRunning(h)
	})
	t.Run("with the unload call out, which fails", func(t *testing.T) {
		f := isIdle(t)
		f.advance(10 * time.Second)
		h := f.submit("a")
		f.unloadFails("a")
		f.requireRunning(h)
		f.requireLoads("a")
	})
	t.Run("a touch with the busy route asked", func(t *testing.T) {
		f := isIdle(t, asksBusy)
		f.slow["a"] = true
		f.advance(10 * time.Second)
		f.advance(time.Millisecond)
		f.step(Touch{Slot: "a"})
		f.advance(time.Millisecond)
		f.tell("a", f.now, false)
		f.requireUnloads()
		require.True(t, f.slot("a").GateOpen)
		require.Equal(t, f.now.Add(10*time.Second-time.Millisecond), f.wake)
	})
}

func TestAnIdleSlotWhoseServerWorksForSomebodyElseStays(t *testing.T) {
	f := isIdle(t, asksBusy)
	f.works["a"] = true
	f.advance(10 * time.Second)
	f.requireUnloads()
	require.Equal(t, "its server works for somebody else", f.decided("reopen", "a").Reason)
	require.True(t, f.slot("a").GateOpen)
	require.Equal(t, f.now.Add(10*time.Second), f.slot("a").UnloadAt, "the clock begins anew")
	f.advance(10*time.Second - 1)
	f.works["a"] = false
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("a")
}

func TestAnIdleSlotWhoseBusyRouteFailsIsAskedAgainLaterAndLater(t *testing.T) {
	f := isIdle(t, asksBusy)
	f.deaf["a"] = true
	f.advance(10 * time.Second)
	for _, pause := range []time.Duration{1, 2, 4, 8} {
		require.Equal(t, "its server can't be asked whether it works", f.decided("reopen", "a").Reason)
		before := len(f.decisions)
		f.advance(pause*time.Second - 1)
		require.Len(t, f.decisions, before)
		f.advance(1)
		require.Len(t, f.decisions, before+1)
	}
	f.requireUnloads()
	h := f.submit("a") // it serves all the while
	f.requireRunning(h)
	f.release(h)
	f.deaf["a"] = false
	f.advance(16 * time.Second)
	f.requireUnloads("a")
}

func TestAFailingIdleUnloadIsTriedAgain(t *testing.T) {
	f := isIdle(t)
	f.advance(10 * time.Second)
	for n, pause := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		require.Len(t, f.unloads, n+1)
		before := f.slot("a")
		f.unloadFails("a")
		f.requireState("a", Ready)
		after := f.slot("a")
		require.Equal(t, before.IdleAt, after.IdleAt)
		require.Equal(t, before.LastUse, after.LastUse)
		require.True(t, after.GateOpen)
		require.EqualValues(t, 4000, f.booking("a"))
		f.advance(pause*time.Second - 1)
		require.Len(t, f.unloads, n+1)
		f.advance(1)
	}
	require.EqualValues(t, 8, f.s.Snapshot(f.now).Counts.UnloadFailures)
	f.evicted("a", 4000)
	require.EqualValues(t, 1, f.s.Snapshot(f.now).Counts.IdleUnloads)
}

func TestAnIdleUnloadWaitsForTheTransitionOfAnotherOnItsGPU(t *testing.T) {
	f := isIdle(t)
	b := f.submit("b")
	f.requireState("b", Loading)
	f.advance(time.Minute)
	f.requireUnloads()
	require.True(t, f.slot("a").GateOpen, "it serves meanwhile")
	f.release(func() *handle { h := f.submit("a"); f.requireRunning(h); return h }())
	f.advance(time.Minute)
	f.requireUnloads()
	f.loaded("b")
	f.requireUnloads("a")
	f.requireRunning(b)
}

func TestAnIdleUnloadDoesNotWaitForTransitionsOnOtherGPUs(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 4000, idles(10*time.Second)), server("b", 4000, on(1))}
	f := givenConfig(t, cfg, 16384, 16384)
	f.probe("a", Yes)
	f.probe("b", No)
	f.submit("b")
	f.requireState("b", Loading)
	f.advance(10 * time.Second)
	f.requireUnloads("a")
}

func TestAnIdleSlotWhoseServerDoesNotAnswerIsLeftAlone(t *testing.T) {
	f := isIdle(t)
	f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeWrong, Detail: "status 500", Resident: -1})
	f.advance(time.Hour)
	f.requireUnloads()
	f.probe("a", Yes)
	f.requireUnloads("a")
}

func TestACrashedServerHasNothingToBeUnloaded(t *testing.T) {
	f := isIdle(t)
	f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeRefused, Detail: "connection refused", Resident: -1})
	f.requireState("a", Idle)
	f.advance(time.Hour)
	f.requireUnloads()
}

func TestANewConfigurationTakesAnIdleUnloadBack(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"pinned":              func(c *Config) { c.Slots[0].Pin = true },
		"a longer timeout":    func(c *Config) { c.Slots[0].IdleTimeout = time.Minute },
		"no timeout":          func(c *Config) { c.Slots[0].IdleTimeout = 0 },
		"a longer keep_alive": func(c *Config) { c.Slots[0].KeepAlive = time.Minute },
		"vram_managed":        func(c *Config) { c.Slots[0].VRAMManaged = true },
		"idle_unload off":     func(c *Config) { c.IdleUnload = IdleOff },
		"idle_unload observe": func(c *Config) { c.IdleUnload = IdleObserve },
	} {
		t.Run(name, func(t *testing.T) {
			f := isIdle(t, asksBusy)
			f.slow["a"] = true
			f.advance(10 * time.Second)
			require.False(t, f.slot("a").GateOpen)
			used := f.slot("a")
			f.reconfigure(change)
			require.True(t, f.slot("a").GateOpen)
			f.decided("reopen", "a")
			require.Equal(t, used.LastUse, f.slot("a").LastUse, "times stay")
			require.Equal(t, used.IdleAt, f.slot("a").IdleAt)
			f.tell("a", f.now, false)
			f.requireUnloads()
		})
	}
}

func TestANewIdleTimeoutCountsFromTheOldUse(t *testing.T) {
	f := isIdle(t)
	used := f.now
	f.advance(4 * time.Second)
	f.reconfigure(func(c *Config) { c.Slots[0].IdleTimeout = 7 * time.Second })
	require.Equal(t, used, f.slot("a").LastUse)
	require.Equal(t, used.Add(7*time.Second), f.wake)
	f.advance(3 * time.Second)
	f.requireUnloads("a")
}

func TestAnUnloadByHandOfASlotThatIsAboutToGoCountsAsThat(t *testing.T) {
	f := isIdle(t, asksBusy)
	f.slow["a"] = true
	f.advance(10 * time.Second)
	f.step(Unload{Slot: "a"})
	h := f.submit("a")
	f.requireWaiting(h) // what was asked for by hand is not taken back
	f.tell("a", f.now, false)
	f.requireUnloads("a")
	f.evicted("a", 4000)
	require.EqualValues(t, 1, f.s.Snapshot(f.now).Counts.ManualUnloads)
	require.Zero(t, f.s.Snapshot(f.now).Counts.IdleUnloads)
}

func TestObservedIdleUnloadsAreSaidOnceForEachTime(t *testing.T) {
	f := isIdle(t)
	f.reconfigure(func(c *Config) { c.IdleUnload = IdleObserve })
	require.Zero(t, f.slot("a").UnloadAt)
	said := func() (n int) {
		for _, d := range f.decisions {
			if d.Kind == "would_unload" {
				n++
			}
		}
		return n
	}
	f.advance(10*time.Second - 1)
	require.Zero(t, said())
	f.advance(1)
	require.Equal(t, 1, said())
	require.Contains(t, f.decided("would_unload", "a").Reason, "10s")
	require.Zero(t, f.wake)
	f.step(Wake{})
	f.sample()
	f.probe("a", Yes)
	f.advance(time.Hour)
	require.Equal(t, 1, said())
	f.release(f.submit("a"))
	f.advance(10 * time.Second)
	require.Equal(t, 2, said(), "it was used, and is idle once more")
	f.requireUnloads()
	require.True(t, f.slot("a").GateOpen)
	f.reconfigure(func(c *Config) { c.IdleUnload = IdleOn })
	f.requireUnloads("a")
}

// Each time that Step names another time the driver sets its timer anew.
func TestTheWarmPathDoesNotMoveTheWakeUpTime(t *testing.T) {
	f := isIdle(t)
	first := f.wake
	require.NotZero(t, first)
	for range 1000 {
		f.now = f.now.Add(time.Millisecond)
		h := f.submit("a")
		require.Equal(t, first, f.wake)
		f.now = f.now.Add(time.Millisecond)
		f.release(h)
		require.Equal(t, first, f.wake)
	}
	f.advance(10*time.Second - 1)
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("a")
}
