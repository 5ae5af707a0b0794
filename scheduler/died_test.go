package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// starts is a server that its driver starts and stops.
func starts(c *SlotConfig) { c.Starts = true }

// restarts is started again by itself, so often in a row; 0: any number.
func restarts(most int) func(*SlotConfig) {
	return func(c *SlotConfig) { c.Starts, c.Restart, c.MaxRestarts = true, true, most }
}

// dies is the end of a server that nobody asked for; its memory is free at once.
func (f *fixture) dies(name string, mib gpu.Bytes) {
	f.t.Helper()
	f.cards[0].Free += mib * gpu.MiB
	f.step(Died{Slot: name, Detail: "exit status 1"})
	f.sample()
}

// silent is a probe, sent just now, of a server that the driver starts, without a good answer.
func (f *fixture) silent(name string, o ProbeOutcome) {
	f.t.Helper()
	f.step(Probed{Slot: name, Sent: f.now, Outcome: o, Detail: "no good answer", Resident: -1})
}

func TestTheBookingOfADeadServerIsFreeAtOnce(t *testing.T) {
	f := given(t, 16384, server("a", 13312, starts), server("b", 10000, starts))
	f.warm("a", 13312)
	h := f.submit("b")
	f.requireWaiting(h)
	f.advance(time.Millisecond)
	f.dies("a", 13312)
	f.requireState("a", Idle)
	require.Zero(t, f.booking("a"))
	f.requireState("b", Loading)
	f.requireUnloads()
	f.loaded("b")
	f.requireRunning(h)
	require.Contains(t, f.decided("gone", "a").Reason, "exit status 1")
}

func TestADeadServerTakesNoJobBeforeTheLastOfItsJobsHasEnded(t *testing.T) {
	f := given(t, 16384, server("a", 8000, starts, wide(3)))
	f.warm("a", 8000)
	one, two := f.submit("a"), f.submit("a")
	f.requireRunning(one, two)
	f.step(Died{Slot: "a", Detail: "killed"})
	f.step(Died{Slot: "a", Detail: "killed"}) // said twice, it is one death
	f.requireState("a", Ready)
	h := f.submit("a")
	f.requireWaiting(h)
	require.Equal(t, NotNow, f.step(Submit{Slot: "a", Priority: 100, IfFree: true})[0].Kind)
	f.releaseAs(one, ServerDied)
	f.requireWaiting(h)
	f.requireState("a", Ready)
	f.free(16384)
	f.releaseAs(two, NoAnswer)
	f.requireState("a", Loading) // its own job waits
	f.requireLoads("a", "a")
	f.loaded("a")
	f.requireRunning(h)
}

func TestHeldWorkEndsWithItsServer(t *testing.T) {
	f := given(t, 16384, server("a", 8000, starts, async), server("b", 4000, starts))
	f.works["a"] = true
	h := f.submit("a")
	f.loaded("a")
	f.releaseAs(h, Accepted)
	other := f.submit("b")
	f.loaded("b")
	f.requireWaiting(other) // the lock is a's
	f.dies("a", 0)
	f.requireState("a", Idle)
	f.requireRunning(other)
}

func TestDeathOfAServerThatIsNotLoadedChangesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(f *fixture)
		want    SlotState
	}{
		"idle":       {func(*fixture) {}, Idle},
		"being load": {func(f *fixture) { f.submit("a") }, Loading},
		"stopping":   {func(f *fixture) { f.warm("a", 0); f.step(Unload{Slot: "a"}) }, Stopping},
	} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 8000, restarts(9)))
			c.prepare(f)
			f.requireState("a", c.want)
			loads := len(f.loads)
			f.step(Died{Slot: "a"})
			f.step(Died{Slot: "nobody"})
			f.requireState("a", c.want)
			require.Len(t, f.loads, loads)
		})
	}
}

func TestDeathOfAnUnknownServerMakesItIdle(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 8000, starts)}
	f := givenConfig(t, cfg, 16384)
	f.requireState("a", Unknown)
	f.step(Died{Slot: "a"})
	f.requireState("a", Idle)
}

func TestAServerThatDiesWhileItIsToMakeRoomHasMadeIt(t *testing.T) {
	f := given(t, 16384, server("a", 13312, starts), server("b", 10000, starts))
	f.warm("a", 13312)
	running := f.submit("a")
	h := f.submit("b")
	f.advance(6 * time.Minute)
	require.False(t, f.slot("a").GateOpen)
	f.step(Died{Slot: "a"})
	f.free(16384)
	f.releaseAs(running, ServerDied)
	f.requireState("a", Idle)
	f.requireState("b", Loading)
	f.loaded("b")
	f.requireRunning(h)
	f.requireUnloads()
}

func TestADeadServerThatWasRemovedIsGone(t *testing.T) {
	f := given(t, 16384, server("a", 8000, restarts(9)), server("b", 100))
	f.warm("a", 8000)
	h := f.submit("a")
	f.reconfigure(func(c *Config) { c.Slots = c.Slots[1:] })
	f.step(Died{Slot: "a"})
	f.releaseAs(h, ServerDied)
	require.Equal(t, []string{"a"}, f.dropped)
	f.requireLoads("a")
}

func TestAServerThatKeepsDyingBacksOffUntilItHasLivedForAMinute(t *testing.T) {
	f := given(t, 16384, server("a", 8000, starts))
	f.warm("a", 0)
	f.dies("a", 0)
	for _, cool := range []int{0, 1, 2, 4, 8, 16, 32, 60, 60} {
		h := f.submit("a")
		if cool > 0 {
			f.requireWaiting(h)
			f.advance(time.Duration(cool)*time.Second - time.Millisecond)
			f.requireState("a", Idle)
			f.advance(time.Millisecond)
		}
		f.requireState("a", Loading)
		f.loaded("a")
		f.requireRunning(h)
		f.release(h)
		f.dies("a", 0)
	}
	h := f.submit("a")
	f.advance(time.Minute)
	f.loaded("a")
	f.release(h)
	f.advance(time.Minute)
	f.dies("a", 0)
	h = f.submit("a")
	f.requireState("a", Loading) // at once: it had lived
	f.requireWaiting(h)
}

func TestWhoWaitsForAServerThatKeepsDyingIsTold(t *testing.T) {
	f := given(t, 16384, server("a", 8000, starts))
	f.warm("a", 0)
	f.dies("a", 0)
	one := f.submit("a")
	f.loaded("a")
	two := f.submit("a")
	f.step(Died{Slot: "a", Detail: "exit status 3"})
	f.requireWaiting(two)
	f.releaseAs(one, ServerDied)
	r := f.requireRefused(two, LoadFailed)
	require.Equal(t, time.Second, r.RetryAfter)
	for _, part := range []string{`"a"`, "2 times in a row", "exit status 3", "1s"} {
		require.Contains(t, r.Message, part)
	}
}

func TestADeadServerIsStartedAgainAndKeepsItsMemoryFromOthers(t *testing.T) {
	f := given(t, 16384, server("a", 13312, restarts(9)), server("b", 10000, starts))
	f.warm("a", 13312)
	h := f.submit("b")
	f.requireWaiting(h)
	f.dies("a", 13312)
	f.requireState("a", Loading)
	require.EqualValues(t, 13312, f.booking("a"))
	f.requireWaiting(h)
	f.requireLoads("a", "a")
}

func TestADeadServerIsStartedAgainOnlySoOften(t *testing.T) {
	f := given(t, 16384, server("a", 8000, restarts(2)))
	f.warm("a", 0)
	f.dies("a", 0)
	f.requireState("a", Loading)
	f.loaded("a")
	f.dies("a", 0)
	f.requireState("a", Idle)
	f.advance(time.Second)
	f.requireState("a", Loading)
	f.loaded("a")
	f.dies("a", 0)
	f.advance(10 * time.Minute)
	f.requireState("a", Idle)
	f.requireLoads("a", "a", "a")
}

func TestADeadServerThatNobodyMayUseIsNotStartedAgain(t *testing.T) {
	for name, prepare := range map[string]func(f *fixture){
		"disabled": func(f *fixture) { f.reconfigure(func(c *Config) { c.Slots[0].Disabled = true }) },
		"draining": func(f *fixture) { f.step(Drain{Slot: "a"}) },
		"ending":   func(f *fixture) { f.step(Drain{Final: true}) },
		"lent":     func(f *fixture) { f.step(Lend{GPU: 0, Until: f.now.Add(time.Hour)}) },
		"stale":    func(f *fixture) { f.reconfigure(func(c *Config) { c.Slots[0].Stale = true }) },
	} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 8000, restarts(9)))
			f.warm("a", 0)
			running := f.submit("a")
			prepare(f)
			f.step(Died{Slot: "a"})
			f.releaseAs(running, ServerDied)
			f.advance(time.Minute)
			f.requireState("a", Idle)
			f.requireLoads("a")
		})
	}
}

func TestADeadServerWaitsForTheLoadOfAnotherBeforeItIsStartedAgain(t *testing.T) {
	f := given(t, 16384, server("a", 4000, restarts(9)), server("b", 4000, starts))
	f.warm("a", 4000)
	f.submit("b")
	f.requireState("b", Loading)
	f.dies("a", 4000)
	f.requireState("a", Idle)
	f.loaded("b")
	f.use(4000)
	f.advance(time.Second)
	f.requireState("a", Loading)
}

func TestADeadServerIsNotStartedAgainOnceItsLoadHasBegun(t *testing.T) {
	for name, load := range map[string]func(f *fixture){
		"it fails": func(f *fixture) {
			f.advance(time.Second)
			f.requireState("a", Loading)
			f.loadFails("a", "exit status 1")
		},
		"a request makes room for it, and it is unloaded by hand": func(f *fixture) {
			f.warm("b", 10000)
			f.advance(2 * time.Second)
			f.requireState("a", Idle)
			h := f.submit("a")
			f.evicted("b", 10000)
			f.loaded("a")
			f.release(h)
			f.step(Unload{Slot: "a"})
			f.unloaded("a")
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 8000, restarts(9)), server("b", 10000))
			f.warm("a", 0)
			f.dies("a", 0)
			f.loaded("a")
			f.dies("a", 0)
			f.requireState("a", Idle) // it died twice
			load(f)
			f.requireState("a", Idle)
			f.advance(time.Hour)
			f.requireState("a", Idle)
		})
	}
}

func TestASuspectServerTakesNoJobBeforeAProbeHasAnswered(t *testing.T) {
	for name, o := range map[string]Outcome{"its answer broke off": ServerDied, "it refused a connection": DialRefused} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 8000, starts))
			f.warm("a", 8000)
			h := f.submit("a")
			f.advance(time.Millisecond)
			f.releaseAs(h, o)
			require.Equal(t, []string{"a"}, f.probes)
			next := f.submit("a")
			f.requireWaiting(next)
			f.step(Probed{Slot: "a", Sent: f.now.Add(-time.Nanosecond), Outcome: ProbeAnswered, Loaded: Yes, Resident: -1})
			f.requireWaiting(next) // the question was sent before: the server may have died since
			f.probe("a", Yes)
			f.requireRunning(next)
		})
	}
}

func TestAStoppedServerIsGoneByItsProbe(t *testing.T) {
	f := given(t, 16384, server("a", 8000, restarts(9)))
	f.warm("a", 0)
	f.advance(time.Millisecond)
	f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeAnswered, Stopped: true, Loaded: No, Resident: -1})
	f.requireState("a", Loading)
	require.Contains(t, f.decided("gone", "a").Reason, "its server died")
}

func TestAStartedServerThatDoesNotAnswerIsStoppedAndRefusesNobody(t *testing.T) {
	for o, most := range map[ProbeOutcome]int{ProbeTimedOut: 3, ProbeRefused: 2, ProbeWrong: 2} {
		f := given(t, 16384, server("a", 8000, starts))
		f.warm("a", 8000)
		busy := f.submit("a")
		for range 5 {
			f.advance(time.Second)
			f.silent("a", o) // it computes: no evidence
		}
		f.requireState("a", Ready)
		f.release(busy)
		for i := range most {
			f.requireState("a", Ready)
			require.True(t, f.slot("a").GateOpen, "after %d", i)
			f.advance(time.Second)
			f.silent("a", o)
		}
		f.requireState("a", Stopping)
		h := f.submit("a")
		f.requireWaiting(h)
		f.evicted("a", 8000)
		f.requireState("a", Loading)
		f.loaded("a")
		f.requireRunning(h)
	}
}

func TestAStartedServerThatDoesNotRunIsNoFault(t *testing.T) {
	f := given(t, 16384, server("a", 8000, starts))
	for range 5 {
		f.advance(time.Second)
		f.silent("a", ProbeRefused)
	}
	h := f.submit("a")
	f.requireState("a", Loading)
	f.loaded("a")
	f.requireRunning(h)
}

func TestAServerThatHasNotFailedOrMayNotIsNotStartedAgainUnasked(t *testing.T) {
	for name, c := range map[string]struct {
		most  int
		clean bool
		works bool // while it ends
	}{"ended well": {9, true, false}, "ended well under work": {9, true, true}, "may never": {0, false, false}} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 8000, restarts(c.most)))
			f.warm("a", 8000)
			var h *handle
			if c.works {
				h = f.submit("a")
			}
			f.step(Died{Slot: "a", Detail: "exit status 0", Clean: c.clean})
			if c.works {
				f.releaseAs(h, ServerDied)
			}
			f.requireState("a", Idle)
			f.use(-8000)
			f.advance(time.Hour)
			f.requireState("a", Idle)
			f.submit("a")
			f.requireState("a", Loading)
		})
	}
}

// A look at the very moment of the death may come too early.
func TestTheMemoryOfADeadServerIsLookedForUntilItIsBack(t *testing.T) {
	f := given(t, 16384, server("a", 9000, starts), server("b", 9000))
	f.warm("a", 9000)
	a := f.submit("a")
	h := f.submit("b")
	f.step(Died{Slot: "a", Detail: "killed"})
	f.releaseAs(a, ServerDied)
	f.requireState("a", Idle)
	f.sample() // nothing is back yet
	f.requireWaiting(h)
	require.True(t, f.s.FastSampling())
	f.look(50 * time.Millisecond)
	require.True(t, f.s.FastSampling())
	f.use(-9000)
	f.requireState("b", Loading)
	f.look(time.Second)
	require.False(t, f.s.FastSampling())
}

// It would only be unloaded again.
func TestNothingIsStartedAgainInTheRoomThatIsMadeForAnother(t *testing.T) {
	f := given(t, 16384, server("a", 5000, restarts(3)), server("c", 15000), server("d", 6000, asksBusy))
	f.warm("d", 6000)
	f.warm("a", 5000)
	f.dies("a", 5000)
	f.look(time.Second)
	f.loaded("a")
	f.use(5000)
	f.dies("a", 5000)  // and cools down
	f.slow["d"] = true // it answers later whether its work is done
	h := f.submit("c")
	f.look(30 * time.Second)
	f.requireWaiting(h)
	require.Equal(t, "waits for d to make room", f.slot("c").Why)
	f.requireState("a", Idle)
}

// The process is gone, its last job has not broken off yet, and its end is not told yet: what its driver says already must let nobody in.
func TestAProbeThatFindsItStoppedIsNoWordThatItLives(t *testing.T) {
	f := given(t, 16384, server("a", 8000, restarts(3), wide(2)))
	f.warm("a", 8000)
	f.advance(2 * time.Minute)
	runs := f.submit("a")
	f.releaseAs(f.submit("a"), DialRefused)
	again := f.submit("a") // nothing was sent: it is admitted once more
	f.requireWaiting(again)
	f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeAnswered, Stopped: true, Loaded: No, Resident: -1})
	f.requireWaiting(again)
	f.releaseAs(runs, ServerDied)
	f.dies("a", 8000)
	f.requireLoads("a", "a")
	f.loaded("a")
	f.requireRunning(again)
}

// Nothing unloads or starts it there: a request that waited for that would wait for ever.
func TestAStartedServerThatRefusesConnectionsKeepsNobodyWaitingInLockedMode(t *testing.T) {
	cfg := defaults()
	cfg.Mode = Locked
	cfg.Slots = []SlotConfig{server("a", 8000, restarts(3))}
	f := givenConfig(t, cfg, 16384)
	f.probe("a", Yes)
	f.releaseAs(f.submit("a"), DialRefused)
	f.requireRunning(f.submit("a")) // it is refused again, and its client is told
}
