package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Restore (spec §4.6): who made way for others is loaded again when the card has been idle for a while.

const restoreAfter = 2*time.Minute + 700*time.Millisecond

func restores(names ...string) func(*Config) {
	return func(c *Config) {
		c.Restore = nil
		for _, name := range names {
			c.Restore = append(c.Restore, Restore{Slot: name, After: restoreAfter})
		}
	}
}

// madeWay is a world in which main has made way for guest, whose last job has just ended.
func madeWay(t *testing.T, more ...SlotConfig) *fixture {
	f := given(t, 16384, append([]SlotConfig{server("main", 10000), server("guest", 10000)}, more...)...)
	f.reconfigure(restores("main"))
	f.warm("main", 10000)
	f.advance(time.Minute)
	h := f.submit("guest")
	f.evicted("main", 10000)
	f.advance(time.Second)
	f.loaded("guest")
	f.use(10000)
	f.advance(time.Second)
	f.release(h)
	f.loads, f.unloads = nil, nil
	return f
}

func TestWhoMadeWayIsLoadedAgainWhenTheGPUHasBeenIdle(t *testing.T) {
	f := madeWay(t)
	f.advance(restoreAfter - 1)
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("guest")
	require.Equal(t, "its GPU has been idle for 2m1s", f.decided("restore", "main").Reason)
	f.evicted("guest", 10000)
	f.requireLoads("main")
	f.advance(time.Second)
	f.loaded("main")
	f.use(10000)
	f.requireState("main", Ready)
	require.Zero(t, f.s.Snapshot(f.now).Waiting)
	require.Zero(t, f.s.Running())
	f.requireRunning(f.submit("main"))
	f.release(f.lastJob("main"))
	f.advance(24 * time.Hour)
	f.requireLoads("main")
	f.requireUnloads("guest")
	n := f.s.Snapshot(f.now).Counts
	require.Equal(t, n.Jobs, n.Ended, "it counts as nobody's job")
	said := 0
	for _, d := range f.decisions {
		if d.Kind == "restore" {
			said++
		}
	}
	require.Equal(t, 1, said, "though it took two steps")
}

func TestWhoMadeWayIsLoadedAgainIntoFreeMemory(t *testing.T) {
	f := madeWay(t)
	f.step(Unload{Slot: "guest"})
	f.evicted("guest", 10000)
	f.advance(restoreAfter - 1)
	f.requireLoads()
	f.advance(1)
	f.requireLoads("main")
}

func TestARestoreThatWasPutOffIsOnRecordAgain(t *testing.T) {
	f := madeWay(t)
	f.reconfigure(func(c *Config) { c.Slots[1].CanBusy = true })
	f.slow["guest"] = true // whether it works is not known yet
	said := func() (n int) {
		for _, d := range f.decisions {
			if d.Kind == "restore" {
				n++
			}
		}
		return n
	}
	f.advance(restoreAfter)
	require.Equal(t, 1, said())
	h := f.submit("guest")
	f.requireRunning(h)
	f.release(h)
	f.advance(restoreAfter)
	require.Equal(t, 2, said())
	f.requireUnloads()
}

func TestAnyUseOfTheGPUPutsTheRestoreOff(t *testing.T) {
	f := madeWay(t, server("other", 3000), server("elsewhere", 3000, on(1)))
	f.secondGPU(16384)
	f.advance(time.Minute)
	h := f.submit("other")
	f.loaded("other")
	f.use(3000)
	f.advance(time.Hour)
	f.release(h)
	last := f.now
	f.advance(restoreAfter / 2)
	f.submit("elsewhere") // on another GPU
	f.loaded("elsewhere")
	f.advance(last.Add(restoreAfter - 1).Sub(f.now))
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("guest")
	f.evicted("guest", 10000)
	f.requireLoads("other", "elsewhere", "main")
}

func TestADepartureIsUseAsWell(t *testing.T) {
	f := madeWay(t)
	f.submit("guest")
	h := f.submit("guest")
	f.release(f.lastJob("guest"))
	f.requireRunning(h)
	f.advance(time.Minute)
	f.cancel(h)
	f.advance(restoreAfter - 1)
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("guest")
}

func TestWhatWasUnloadedAsIdleIsNotRestored(t *testing.T) {
	f := given(t, 16384, server("main", 10000, idles(time.Minute)), server("guest", 3000))
	f.reconfigure(restores("main"))
	f.warm("main", 10000)
	f.advance(time.Minute)
	f.evicted("main", 10000)
	f.warm("guest", 3000)
	f.advance(time.Hour)
	f.requireLoads("main", "guest")
}

func TestWhatWasUnloadedByHandIsNotRestored(t *testing.T) {
	f := given(t, 16384, server("main", 10000), server("guest", 3000))
	f.reconfigure(restores("main"))
	f.warm("main", 10000)
	f.step(Unload{Slot: "main"})
	f.evicted("main", 10000)
	f.warm("guest", 3000)
	f.advance(time.Hour)
	f.requireLoads("main", "guest")
}

func TestWhatWasNeverLoadedIsNotRestored(t *testing.T) {
	f := given(t, 16384, server("main", 10000), server("guest", 3000))
	f.reconfigure(restores("main"))
	f.warm("guest", 3000)
	f.advance(time.Hour)
	f.requireLoads("guest")
}

func TestWhatMadeWayForALentGPUIsRestored(t *testing.T) {
	f := given(t, 16384, server("main", 10000))
	f.reconfigure(restores("main"))
	f.warm("main", 10000)
	f.lend()
	f.evicted("main", 10000)
	f.advance(lentFor - 1)
	f.requireLoads("main")
	f.advance(restoreAfter + 1)
	f.requireLoads("main", "main")
}

func TestARestoreGivesWayToRealRequests(t *testing.T) {
	t.Run("before the unload has begun", func(t *testing.T) {
		f := madeWay(t)
		f.reconfigure(func(c *Config) { c.Slots[1].CanBusy = true })
		f.works["guest"] = true // for somebody else
		f.advance(restoreAfter)
		require.False(t, f.slot("guest").GateOpen)
		h := f.submit("guest")
		f.requireRunning(h)
		require.True(t, f.slot("guest").GateOpen)
		f.works["guest"] = false
		f.release(h)
		f.advance(time.Second)
		f.requireUnloads()
		require.Zero(t, f.s.Snapshot(f.now).Waiting)
	})
	t.Run("while the other is unloaded", func(t *testing.T) {
		f := madeWay(t)
		f.advance(restoreAfter)
		f.requireUnloads("guest")
		h := f.submit("guest")
		f.evicted("guest", 10000)
		f.requireLoads("guest")
		f.loaded("guest")
		f.requireRunning(h)
	})
	t.Run("while it loads", func(t *testing.T) {
		f := madeWay(t)
		f.advance(restoreAfter)
		f.evicted("guest", 10000)
		f.requireLoads("main")
		h := f.submit("guest")
		f.advance(10*time.Second - 1)
		f.requireUnloads("guest")
		f.advance(1) // a load that nobody waits for is abandoned
		f.requireUnloads("guest", "main")
		f.evicted("main", 0)
		f.loaded("guest")
		f.requireRunning(h)
	})
	t.Run("for itself", func(t *testing.T) {
		f := madeWay(t)
		f.advance(restoreAfter)
		h := f.submit("main")
		f.evicted("guest", 10000)
		f.loaded("main")
		f.requireRunning(h)
		require.Zero(t, f.s.Snapshot(f.now).Waiting)
	})
}

func TestARestoreTakesNoPlaceInTheQueue(t *testing.T) {
	f := madeWay(t, server("small", 3000))
	f.reconfigure(func(c *Config) { c.MaxQueue = 1 })
	f.advance(restoreAfter)
	f.requireUnloads("guest")
	s := f.s.Snapshot(f.now)
	require.Zero(t, s.Waiting, "nobody waits")
	require.Empty(t, s.Queue)
	require.Zero(t, f.slot("main").Waiting)
	f.requireWaiting(f.submit("small"))
	f.requireRefused(f.submit("small"), QueueFull)
}

func TestARestoreKeepsNobodyFromRunningAtOnce(t *testing.T) {
	f := madeWay(t, server("small", 3000), server("elsewhere", 3000, on(1)))
	f.secondGPU(16384)
	f.warm("elsewhere", 0)
	f.advance(restoreAfter)
	f.requireUnloads("guest")
	require.Equal(t, Admit, f.step(Submit{Slot: "elsewhere", Priority: 100, IfFree: true})[0].Kind)
}

func TestTwoRestoresDoNotFight(t *testing.T) {
	f := given(t, 16384, server("a", 6000), server("b", 7000), server("guest", 14000))
	f.reconfigure(restores("a", "b"))
	f.warm("a", 6000)
	f.warm("b", 7000)
	f.advance(time.Minute)
	h := f.submit("guest")
	f.evicted("a", 6000)
	f.evicted("b", 7000)
	f.loaded("guest")
	f.use(14000)
	f.release(h)
	f.loads, f.unloads = nil, nil
	f.advance(restoreAfter)
	f.evicted("guest", 14000)
	f.requireLoads("a") // one after the other
	f.loaded("a")
	f.use(6000)
	f.advance(restoreAfter)
	f.requireLoads("a", "b")
	f.loaded("b")
	f.use(7000)
	f.advance(24 * time.Hour)
	f.requireLoads("a", "b")
	f.requireUnloads("guest")
}

func TestTwoRestoresThatDoNotFitTogetherAreNoLoop(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000), server("guest", 10000))
	f.reconfigure(restores("a", "b"))
	f.warm("a", 10000)
	for _, next := range []struct{ name, before string }{{"b", "a"}, {"guest", "b"}} {
		f.advance(time.Minute)
		h := f.submit(next.name)
		f.evicted(next.before, 10000)
		f.loaded(next.name)
		f.use(10000)
		f.release(h)
	}
	f.loads, f.unloads = nil, nil
	for range 24 * 60 {
		for _, name := range []string{"a", "b", "guest"} {
			switch f.slot(name).State {
			case Stopping:
				f.evicted(name, 10000)
			case Loading:
				f.loaded(name)
				f.use(10000)
			}
		}
		f.advance(time.Minute)
	}
	f.requireLoads("a")
}

func TestARestoreThatCannotBeDoneIsNotTriedWithoutEnd(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(f *fixture)
	}{
		{"outsiders hold the memory", func(f *fixture) { f.free(0); f.step(Unload{Slot: "guest"}); f.unloaded("guest"); f.sample() }},
		{"the other is protected", func(f *fixture) { f.reconfigure(func(c *Config) { c.Slots[1].NoEvict = true }) }},
		{"victim_priority lower", func(f *fixture) { f.reconfigure(func(c *Config) { c.VictimLower = true }) }},
		{"evictions are only observed", func(f *fixture) { f.reconfigure(func(c *Config) { c.ObserveEvictions = true }) }},
		{"the other is pinned", func(f *fixture) { f.step(SetPin{Slot: "guest", On: true}) }},
		{"it never fits", func(f *fixture) { f.reconfigure(func(c *Config) { c.Slots[0].Claim *= 2 }) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := madeWay(t, server("small", 100))
			c.change(f)
			f.decisions = nil
			for range 1800 { // an hour of samples
				f.advance(2 * time.Second)
				f.sample()
				f.step(Wake{})
			}
			require.LessOrEqual(t, len(f.decisions), 130, "at most two lines a minute: %+v", f.decisions[max(0, len(f.decisions)-4):])
			require.Zero(t, f.s.Snapshot(f.now).Counts.Refused)
		})
	}
}

func TestWhatCannotBeServedIsNotRestored(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(f *fixture)
	}{
		{"it is switched off", func(f *fixture) { f.reconfigure(func(c *Config) { c.Slots[0].Disabled = true }) }},
		{"it is drained", func(f *fixture) { f.step(Drain{Slot: "main"}) }},
		{"all is drained", func(f *fixture) { f.step(Drain{}) }},
		{"the process ends", func(f *fixture) { f.step(Drain{Final: true}) }},
		{"it is unhealthy", func(f *fixture) {
			f.step(Probed{Slot: "main", Sent: f.now, Outcome: ProbeWrong, Detail: "status 500"})
		}},
		{"its GPU is lent", func(f *fixture) { f.step(Lend{GPU: 0, Until: f.now.Add(24 * time.Hour)}) }},
		{"it is restored no more", func(f *fixture) { f.reconfigure(func(c *Config) { c.Restore = nil }) }},
		{"another kind of scheduler", func(f *fixture) { f.reconfigure(func(c *Config) { c.Mode = Locked }) }},
		{"it is not there any more", func(f *fixture) { f.reconfigure(func(c *Config) { c.Slots = c.Slots[1:] }) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := madeWay(t)
			c.change(f)
			f.advance(time.Hour)
			f.requireLoads()
			require.Zero(t, f.s.Snapshot(f.now).Waiting)
		})
	}
}

func TestARestoreUnderWayEndsWithADrain(t *testing.T) {
	f := madeWay(t)
	f.advance(restoreAfter)
	f.requireUnloads("guest")
	f.step(Drain{Final: true})
	f.evicted("guest", 10000)
	f.advance(time.Hour)
	f.requireLoads()
	require.Zero(t, f.s.Snapshot(f.now).Waiting)
	require.Zero(t, f.s.Snapshot(f.now).Counts.Refused)
}

func TestARestoreEvictsOnlyByTheRulesForIdleSlots(t *testing.T) {
	f := madeWay(t)
	f.reconfigure(func(c *Config) { c.Slots[1].KeepAlive = 3 * time.Minute })
	f.advance(restoreAfter)
	f.requireUnloads()
	f.advance(3*time.Minute - restoreAfter - 1)
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("guest")
}

func TestARestoredLoadThatFailsIsLeftToTheNextRequest(t *testing.T) {
	f := madeWay(t)
	f.step(Unload{Slot: "guest"})
	f.evicted("guest", 10000)
	f.advance(restoreAfter)
	f.requireLoads("main")
	f.loadFails("main", "exit status 1")
	f.sample()
	f.advance(time.Hour)
	f.requireLoads("main")
	require.Zero(t, f.s.Snapshot(f.now).Counts.Refused)
	h := f.submit("main")
	f.requireLoads("main", "main")
	f.loaded("main")
	f.requireRunning(h)
}
