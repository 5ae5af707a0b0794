package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestAServerThatIsBackLoadedIsServedWhateverElseMovedMeanwhile(t *testing.T) {
	for name, set := range map[string]func(*SlotConfig){"probed": healthAlone, "not probed": unprobed} {
		t.Run("outsiders left, "+name, func(t *testing.T) {
			f := given(t, 16384, server("a", 10000, set, noRoutes))
			f.use(5500)
			f.warm("a", 10000)
			f.releaseAs(f.submit("a"), DialRefused)
			f.probeRefused("a")
			f.use(-10000)
			f.look(2 * time.Second)
			f.use(-5500)
			f.look(2 * time.Second)
			f.use(10000)
			f.look(2 * time.Second)
			f.probe("a", NotTold)
			h := f.submit("a")
			f.look(5 * time.Second)
			f.requireRunning(h)
		})
	}
	t.Run("its end was not seen", func(t *testing.T) {
		f := given(t, 16384, server("a", 10000, healthAlone, noRoutes))
		f.warm("a", 10000)
		f.releaseAs(f.submit("a"), DialRefused)
		f.probeRefused("a")
		f.look(2 * time.Second)
		f.probe("a", NotTold)
		f.requireRunning(f.submit("a"))
	})
	t.Run("nothing can be seen", func(t *testing.T) {
		f := given(t, 16384, server("a", 10000, healthAlone, noRoutes))
		f.warm("a", 10000)
		f.blind = "the driver hangs"
		f.sample()
		f.releaseAs(f.submit("a"), DialRefused)
		f.look(time.Second)
		f.requireState("a", Idle)
		f.probe("a", NotTold)
		f.requireState("a", Ready)
	})
	t.Run("another of its GPU loads", func(t *testing.T) {
		f := given(t, 24576, server("a", 6000, unprobed, noRoutes), server("c", 6000, pinned), server("b", 8000))
		f.warm("a", 6000)
		f.use(-6000)
		f.releaseAs(f.submit("a"), DialRefused)
		f.look(time.Second)
		c := f.submit("c")
		f.use(6000)
		f.look(time.Second)
		f.use(6000)
		f.look(time.Second)
		f.loaded("c")
		f.release(c)
		f.look(time.Second)
		f.requireState("a", Ready)
		h := f.submit("b")
		f.look(time.Minute)
		require.Nil(t, h.refusal, "12576 MiB are free")
	})
	t.Run("on two GPUs", func(t *testing.T) {
		cfg := defaults()
		cfg.Slots = []SlotConfig{server("a", 16000, healthAlone, noRoutes, on(0, 1))}
		f := givenConfig(t, cfg, 16384, 16384)
		takes := func(card, mibs int) { f.cards[card].Free -= gpu.Bytes(mibs) * mib }
		f.probe("a", NotTold)
		h := f.submit("a")
		takes(0, 8000)
		takes(1, 8000)
		f.sample()
		f.release(h)
		f.releaseAs(f.submit("a"), DialRefused)
		f.probeRefused("a")
		takes(0, -8000)
		takes(1, -8000)
		f.look(time.Second)
		f.probe("a", NotTold)
		takes(0, 8000)
		f.look(time.Second)
		f.requireState("a", Idle)
		takes(1, 8000)
		f.sample()
		f.requireState("a", Ready)
	})
}

// As whisper.cpp, which loads as it starts, after Caddy.
func TestAServerThatStartsAfterTheBrokerIsServedThoughNothingTellsThatItIsLoaded(t *testing.T) {
	f := given(t, 16384, server("a", 10000, healthAlone, noRoutes))
	f.use(6000) // outsiders
	f.probeRefused("a")
	f.look(time.Second)
	f.probe("a", NotTold)
	f.requireState("a", Idle)
	f.use(10000)
	h := f.submit("a")
	f.look(5 * time.Second)
	f.requireRunning(h)
}

func TestAServerIsNotLoadedAgainBecause(t *testing.T) {
	down := func(t *testing.T, outsiders gpu.Bytes, options ...func(*SlotConfig)) *fixture {
		f := given(t, 16384, server("a", 10000, append([]func(*SlotConfig){healthAlone, noRoutes}, options...)...), server("b", 9000))
		f.use(outsiders)
		f.warm("a", 10000)
		f.look(time.Second)
		return f
	}
	stays := func(f *fixture) {
		f.look(2 * time.Second)
		f.requireState("a", Idle)
		h := f.submit("b")
		f.look(time.Minute)
		require.Nil(f.t, h.refusal)
	}
	for name, c := range map[string]struct {
		set     func(*SlotConfig)
		answers []Tri
	}{
		"its server tells that it is not":                     {func(c *SlotConfig) { c.CanTell = true }, []Tri{No}},
		"it can be unloaded to be sure":                       {func(c *SlotConfig) { c.CanUnload = true }, []Tri{NotTold}},
		"its memory is taken before it answers":               {func(*SlotConfig) {}, nil},
		"it was not known to be loaded, and has a load route": {func(c *SlotConfig) { c.CanLoad = true }, []Tri{NotTold}},
	} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 24576, server("a", 10000, healthAlone, noRoutes, c.set))
			if !f.s.named["a"].cfg.CanLoad {
				f.warm("a", 10000)
				f.releaseAs(f.submit("a"), DialRefused)
				f.use(-10000)
			}
			f.probeRefused("a")
			f.look(2 * time.Second)
			f.use(6000) // outsiders
			for _, loaded := range c.answers {
				f.probe("a", loaded)
			}
			f.look(2 * time.Second)
			f.requireState("a", Idle)
		})
	}
	t.Run("the last look is older than its end", func(t *testing.T) {
		f := down(t, 0)
		f.releaseAs(f.submit("a"), DialRefused)
		f.advance(300 * time.Millisecond)
		f.probe("a", NotTold)
		f.requireState("a", Idle)
		f.use(-10000)
		stays(f)
	})
	t.Run("its last process has not given everything back yet", func(t *testing.T) {
		f := down(t, 0)
		f.releaseAs(f.submit("a"), DialRefused)
		f.advance(50 * time.Millisecond)
		f.probe("a", NotTold)
		f.look(50 * time.Millisecond)
		f.requireState("a", Idle)
		f.use(-10000)
		stays(f)
	})
	t.Run("outsiders hold as much as it did, and its end was seen before", func(t *testing.T) {
		f := down(t, 5200)
		f.use(-10000)
		f.look(time.Second)
		f.releaseAs(f.submit("a"), DialRefused)
		f.probeRefused("a")
		f.look(2 * time.Second)
		f.probe("a", NotTold)
		stays(f)
	})
	t.Run("one look fails", func(t *testing.T) {
		f := down(t, 0)
		f.releaseAs(f.submit("a"), DialRefused)
		f.probeRefused("a")
		f.use(-10000)
		f.look(time.Second)
		f.probe("a", NotTold)
		f.look(time.Second)
		f.blind = "nvidia-smi took too long"
		f.sample()
		f.blind = ""
		stays(f)
	})
	t.Run("it is another's GPU now, where outsiders hold as much", func(t *testing.T) {
		cfg := defaults()
		cfg.Slots = []SlotConfig{server("a", 10000, healthAlone, noRoutes)}
		f := givenConfig(t, cfg, 16384, 16384)
		f.cards[1].Free -= 6000 * mib
		f.probe("a", NotTold)
		f.sample()
		f.warm("a", 10000)
		f.releaseAs(f.submit("a"), DialRefused)
		f.probeRefused("a")
		f.use(-10000)
		f.look(time.Second)
		f.reconfigure(func(c *Config) { c.Slots[0].GPUs = []int{1} })
		f.probe("a", NotTold)
		f.look(time.Second)
		f.requireState("a", Idle)
	})
}

// What outsiders took before the load of a server that is gone is none of its memory, and its next load can't use it again.
func TestTheNextProcessOfAServerNeedsAllItsMemory(t *testing.T) {
	for name, c := range map[string]struct {
		set     func(*SlotConfig)
		answers Tri
	}{
		"it tells":      {func(c *SlotConfig) { c.Residual = 2000 * mib }, No},
		"health alone":  {func(c *SlotConfig) { healthAlone(c); c.CanLoad, c.Residual = false, 2000*mib }, NotTold},
		"without probe": {func(c *SlotConfig) { unprobed(c); c.CanLoad, c.Residual = false, 2000*mib }, NotTold},
	} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 10000, c.set))
			f.use(5900)
			f.warm("a", 10000)
			f.use(-10000)
			f.look(time.Second)
			f.releaseAs(f.submit("a"), DialRefused)
			f.use(1500) // 8984 are free
			f.probe("a", c.answers)
			f.look(2 * time.Second)
			require.False(t, f.submit("a").running)
			f.look(2 * time.Second)
			require.NotEqual(t, Loading, f.slot("a").State)
		})
	}
}

// Whoever finds out that a server has no process, it counts the same.
func TestARefusedProbeCountsAsARefusedConnection(t *testing.T) {
	t.Run("once its jobs have broken off", func(t *testing.T) {
		f := given(t, 16384, server("a", 10000, healthAlone, noRoutes), server("b", 10000))
		f.warm("a", 10000)
		h := f.submit("a")
		f.advance(time.Second)
		f.probeRefused("a")
		f.use(-10000)
		f.advance(time.Millisecond)
		f.releaseAs(h, ServerDied)
		f.look(2 * time.Second)
		f.probe("a", NotTold)
		b := f.submit("b")
		f.look(time.Minute)
		require.Nil(t, b.refusal)
		f.requireState("a", Idle)
	})
	t.Run("for the other consumers of its address", func(t *testing.T) {
		f := given(t, 24576, server("x", 8000, at("one")), server("y", 8000, at("one"), unprobed, worksOn), server("next", 4000))
		f.warm("next", 4000)
		f.warm("x", 8000)
		f.look(time.Second)
		f.warm("y", 8000)
		f.leaves(f.submit("y"), NoAnswer)
		n := f.submit("next")
		f.requireWaiting(n)
		f.advance(time.Millisecond)
		f.probeRefused("x")
		f.requireRunning(n)
	})
	t.Run("in locked mode", func(t *testing.T) {
		f := lockedWork(t)
		n := f.submit("next")
		f.requireWaiting(n)
		f.advance(time.Second)
		f.probeRefused("a")
		f.requireRunning(n)
	})
}

// lockedWork is a locked scheduler with work of a that goes on though its client has left.
func lockedWork(t *testing.T, options ...func(*SlotConfig)) *fixture {
	cfg := defaults()
	cfg.Mode = Locked
	cfg.Slots = []SlotConfig{server("a", 10000, append(options, worksOn)...), server("next", 4000)}
	f := givenConfig(t, cfg, 24576)
	f.probe("a", Yes)
	f.probe("next", Yes)
	f.leaves(f.submit("a"), NoAnswer)
	return f
}

func TestTheHeldWorkOfAStartedServerEndsWithIt(t *testing.T) {
	t.Run("it dies, in locked mode", func(t *testing.T) {
		f := lockedWork(t, starts)
		n := f.submit("next")
		f.requireWaiting(n)
		f.step(Died{Slot: "a", Detail: "killed"})
		f.requireRunning(n)
	})
	t.Run("its process runs and does not listen", func(t *testing.T) {
		f := given(t, 24576, server("a", 10000, starts, worksOn), server("next", 4000))
		f.warm("next", 4000)
		f.warm("a", 10000)
		f.leaves(f.submit("a"), NoAnswer)
		n := f.submit("next")
		f.requireWaiting(n)
		f.advance(time.Second)
		f.silent("a", ProbeTimedOut)
		f.requireWaiting(n)
		f.silent("a", ProbeRefused)
		f.requireRunning(n)
	})
}

func TestARefusedUnloadCountsAsARefusedConnection(t *testing.T) {
	refused := func(f *fixture, name string) {
		f.step(UnloadDone{Slot: name, Epoch: f.epochs[name], Err: "connection refused", Refused: true})
	}
	t.Run("for its other models, too", func(t *testing.T) {
		f := given(t, 24576, lazyServer("m/a", 8000, unprobed, at("one")), lazyServer("m/b", 8000, unprobed, at("one"), worksOn))
		f.warm("m/a", 8000)
		f.look(time.Second)
		f.warm("m/b", 8000)
		f.leaves(f.submit("m/b"), NoAnswer)
		f.step(Unload{Slot: "m/a"})
		f.requireState("m/a", Stopping)
		refused(f, "m/a")
		f.requireState("m/a", Idle)
		f.requireState("m/b", Idle)
	})
	t.Run("who waits for it waits for its probe", func(t *testing.T) {
		f := given(t, 16384, server("a", 10000))
		f.warm("a", 10000)
		f.step(Unload{Slot: "a"})
		h := f.submit("a")
		refused(f, "a")
		f.use(-10000)
		f.look(time.Second)
		f.requireState("a", Idle)
		f.probe("a", No)
		f.loaded("a")
		f.requireRunning(h)
	})
	for name, set := range map[string]func(*SlotConfig){"has routes": func(*SlotConfig) {}, "idles": idles(time.Minute)} {
		t.Run("once, of one that is not probed and "+name, func(t *testing.T) {
			f := given(t, 16384, server("a", 10000, unprobed, set), server("b", 10000))
			f.warm("a", 10000)
			f.use(-10000)
			f.look(time.Second)
			b := f.submit("b")
			for range 120 {
				if f.slot("a").State == Stopping {
					refused(f, "a")
				}
				f.look(time.Second)
			}
			f.loaded("b")
			f.requireRunning(b)
			require.Len(t, f.unloads, 1)
		})
	}
	t.Run("of one that is removed", func(t *testing.T) {
		f := given(t, 16384, server("a", 10000, unprobed), server("b", 10000))
		f.warm("a", 10000)
		f.reconfigure(func(c *Config) { c.Slots = c.Slots[1:] })
		refused(f, "a")
		require.Equal(t, []string{"a"}, f.dropped)
	})
}

// Its next process may be loaded past the broker, as one from before it.
func TestTheNextProcessOfALazyServerIsFlushedForOthers(t *testing.T) {
	for name, ends := range map[string]func(f *fixture){
		"it was unloaded": func(f *fixture) {
			f.warm("a", 10000)
			f.step(Unload{Slot: "a"})
			f.evicted("a", 10000)
			f.look(time.Second)
		},
		"its process ended before it could be flushed": func(f *fixture) {
			f.use(8000)
			b := f.submit("b")
			f.look(time.Minute)
			f.probes = nil
			f.step(UnloadDone{Slot: "a", Epoch: f.epochs["a"], Err: "connection refused", Refused: true})
			require.Contains(t, f.probes, "a")
			f.probeRefused("a")
			f.look(time.Minute)
			f.requireRefused(b, VRAMExhausted)
			f.use(-8000)
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, lazyServer("a", 10000, healthAlone), server("b", 10000))
			ends(f)
			f.probeRefused("a")
			f.look(time.Minute)
			f.use(10000)
			f.probe("a", NotTold)
			f.look(time.Minute)
			h := f.submit("b")
			f.flushes("a", 10000, time.Minute)
			f.requireRunning(h)
		})
	}
}

func TestAllConsumersOfAnAddressAreProbedThatRefusesConnections(t *testing.T) {
	f := given(t, 24576, server("x", 8000, at("one")), server("y", 8000, at("one")))
	f.warm("x", 8000)
	f.look(time.Second)
	f.warm("y", 8000)
	f.releaseAs(f.submit("x"), DialRefused)
	require.Contains(t, f.probes, "y")
}

func TestAProbeFromBeforeARefusedConnectionLetsNoTurnIn(t *testing.T) {
	turns := SlotConfig{Name: "m/", Consumer: "m", Server: "one", TurnOnly: true, GPUs: []int{0}, Concurrency: 1, CanProbe: true}
	f := given(t, 16384, server("m/a", 10000, at("one"), func(c *SlotConfig) { c.Consumer = "m" }), turns)
	f.warm("m/a", 10000)
	f.probe("m/", NotTold)
	sent := f.now
	f.advance(time.Second)
	f.releaseAs(f.submit("m/a"), DialRefused)
	f.step(Probed{Slot: "m/", Sent: sent, Outcome: ProbeAnswered, Resident: -1})
	h := f.submit("m/")
	f.requireWaiting(h)
	f.probe("m/", NotTold)
	f.requireRunning(h)
}

// Its client has left too, but it is not the process that refused.
func TestWorkOfTheNextProcessGoesOnAsThatOfTheLastBreaksOff(t *testing.T) {
	f := given(t, 16384, server("a", 8000, unprobed, wide(3), worksOn), server("next", 4000))
	f.warm("next", 4000)
	f.look(time.Second)
	f.warm("a", 8000)
	old := f.submit("a")
	f.releaseAs(f.submit("a"), DialRefused)
	f.advance(time.Second)
	f.leaves(f.submit("a"), NoAnswer)
	f.releaseAs(old, ServerDied)
	f.requireWaiting(f.submit("next"))
}

// Nothing tells when a server is back that is not probed.
func TestAFlushThatIsRefusedIsNotRepeatedAtAServerThatIsNotProbed(t *testing.T) {
	f := given(t, 16384, lazyServer("a", 10000, unprobed), server("b", 10000))
	f.use(8000)
	b := f.submit("b")
	for range 300 {
		if !f.s.named["a"].stop.began.IsZero() {
			f.step(UnloadDone{Slot: "a", Epoch: f.epochs["a"], Err: "connection refused", Refused: true})
		}
		f.look(200 * time.Millisecond)
	}
	f.requireRefused(b, VRAMExhausted)
	require.Len(t, f.unloads, 1)
}

func TestAStartedServerThatIsNotProbedIsNotSuspected(t *testing.T) {
	f := given(t, 16384, server("a", 10000, starts, unprobed))
	f.warm("a", 10000)
	f.releaseAs(f.submit("a"), DialRefused)
	f.requireRunning(f.submit("a"))
}
