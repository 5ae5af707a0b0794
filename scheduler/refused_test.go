package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func healthAlone(c *SlotConfig) { c.CanTell = false } // whispercpp, tei, tgi, kokoro: a probe that tells nothing of residency
func noRoutes(c *SlotConfig)    { c.CanLoad, c.CanUnload = false, false }

// flushes answers every unload call, with which so many MiB come back.
func (f *fixture) flushes(name string, mib gpu.Bytes, d time.Duration) {
	for end := f.now.Add(d); f.now.Before(end); f.look(time.Second) {
		if st := f.s.named[name].stop; !st.began.IsZero() && !st.called {
			f.answered(name)
			f.use(-mib)
		}
		for _, v := range f.s.Snapshot(f.now).Slots {
			if v.State == Loading {
				f.loaded(v.Name)
			}
		}
	}
}

// Its death follows, and starts it anew. The turn of a request that names no model isn't started by itself.
func TestARefusedConnectionTakesNoStartedServerForGone(t *testing.T) {
	turns := SlotConfig{Name: "m/", Consumer: "m", Server: "one", TurnOnly: true, GPUs: []int{0}, Concurrency: 1, CanLoad: true} // as broker.turnsOf makes it
	f := given(t, 16384, server("m/a", 10000, restarts(3), at("one"), func(c *SlotConfig) { c.Consumer = "m" }), turns)
	f.warm("m/a", 10000)
	f.advance(2 * time.Minute)
	f.releaseAs(f.submit("m/"), DialRefused)
	f.dies("m/a", 10000)
	f.look(10 * time.Minute)
	f.requireLoads("m/a", "m/a") // restart on-failure
}

// A new process may have loaded past the broker.
func TestALazyServerThatRefusedAConnectionIsFlushedOnceBeforeItsNextLoad(t *testing.T) {
	for name, set := range map[string]func(*SlotConfig){"probed": healthAlone, "not probed": unprobed} {
		t.Run("itself, "+name, func(t *testing.T) { // it loads before it listens
			f := given(t, 16384, lazyServer("a", 10000, set))
			f.warm("a", 10000)
			f.releaseAs(f.submit("a"), DialRefused)
			f.look(time.Second)
			f.probe("a", NotTold)
			h := f.submit("a")
			f.flushes("a", 10000, time.Minute)
			f.requireRunning(h)
		})
		t.Run("another, "+name, func(t *testing.T) { // it is seen to go, and comes back loaded
			f := given(t, 16384, lazyServer("a", 10000, set), server("b", 10000))
			f.warm("a", 10000)
			f.releaseAs(f.submit("a"), DialRefused)
			f.use(-10000)
			f.look(5 * time.Second)
			f.use(10000)
			f.look(5 * time.Second)
			f.probe("a", NotTold)
			h := f.submit("b")
			f.flushes("a", 10000, time.Minute)
			f.requireRunning(h)
		})
	}
}

func TestAServerWhoseProbeTellsOnlyHealthIsServedWhenItComesBackLoaded(t *testing.T) {
	for name, set := range map[string]func(*SlotConfig){"no route": noRoutes, "load alone": func(c *SlotConfig) { c.CanUnload = false }, "load and unload": func(*SlotConfig) {}} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 10000, healthAlone, set))
			f.warm("a", 10000)
			f.releaseAs(f.submit("a"), DialRefused)
			f.use(-10000)
			f.look(2 * time.Second)
			f.use(10000)
			f.probe("a", NotTold) // the first that finds it listening
			h := f.submit("a")
			f.look(time.Minute)
			f.requireRunning(h)
		})
	}
}

func TestAllWhoWaitForAServerThatRefusedAConnectionWaitForItsProbe(t *testing.T) {
	f := given(t, 24576, server("m/a", 8000, at("one")), server("m/b", 8000, at("one")))
	f.warm("m/a", 8000)
	f.warm("m/b", 8000)
	a, b := f.submit("m/a"), f.submit("m/b")
	f.cards[0].Free += 16000 * gpu.MiB
	f.sample()
	f.releaseAs(a, DialRefused)
	if f.slot("m/b").State == Loading {
		f.loadFails("m/b", "connection refused") // at once: its load route is called
	}
	f.advance(100 * time.Millisecond) // it is up again
	f.probe("m/a", No)
	f.probe("m/b", No)
	f.requireWaiting(b)
	f.loaded("m/b")
	f.requireRunning(b)
}

func TestOrphanedWorkEndsWithTheProcessThatRefusesConnections(t *testing.T) {
	f := besideNext(t, "swama", worksOn)
	f.leaves(f.submit("swama"), NoAnswer)
	h := f.submit("next")
	f.requireWaiting(h)
	f.releaseAs(f.submit("swama"), DialRefused)
	f.probe("swama", No) // it is up again, and holds nothing
	f.probe("next", Yes)
	f.advance(9 * time.Minute)
	f.requireRunning(h)
}

func TestADriverMayBeReplacedOnceItsServerRefusesConnections(t *testing.T) {
	for stale, name := range []string{"itself", "another"} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("m/a", 8000, at("one")), server("m/b", 4000, asksBusy, at("one")))
			f.warm("m/a", 8000)
			f.warm("m/b", 4000)
			f.slow["m/b"] = true
			h := f.submit("m/a")
			f.reconfigure(func(c *Config) { c.Slots[stale].Stale = true })
			f.releaseAs(h, DialRefused)
			f.look(time.Minute)
			require.Equal(t, []string{f.cfg.Slots[stale].Name}, f.renews)
		})
	}
}

func TestWhatAnUnknownSlotHoldsIsNotLeftBehindByAnother(t *testing.T) {
	f := given(t, 24576, lazyServer("x", 8000), server("u", 6000, healthAlone, noRoutes), server("b", 12500))
	f.use(6000) // u was there before us
	f.warm("x", 8000)
	f.use(-8000) // x's process ends
	f.releaseAs(f.submit("x"), DialRefused)
	f.look(time.Minute)
	h := f.submit("b")
	f.look(time.Minute)
	require.Nil(t, h.refusal, "18576 MiB are free")
	f.requireLoads("b")
}

func TestARefusedConnectionToAnOldAddressSaysNothingOfTheNewOne(t *testing.T) {
	f := given(t, 16384, server("a", 8000, wide(2), at("old")))
	f.warm("a", 8000)
	old := f.submit("a")
	f.reconfigure(func(c *Config) { c.Slots[0].Server = "new" })
	f.use(-8000)
	f.probe("a", No)
	f.warm("a", 8000)
	f.releaseAs(old, DialRefused)
	f.requireState("a", Ready)
}

// It may hang, loaded as it is: nothing is known before a probe tells, and its memory is not counted as free.
func TestAConnectionThatTookTooLongTakesNothingForGone(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	f.releaseAs(f.submit("a"), Unreached)
	f.requireState("a", Ready)
	h := f.submit("a")
	f.requireWaiting(h)
	f.probe("a", Yes)
	f.requireRunning(h)
}

// Others may have its room until it is back, and what they hold is not its own.
func TestAServerThatIsNotProbedIsLoadedAgainOnceItsMemoryIsTaken(t *testing.T) {
	f := given(t, 24576, server("a", 6000, unprobed, noRoutes), server("b", 8000), server("c", 18000))
	f.use(3000) // outsiders
	f.warm("a", 6000)
	f.releaseAs(f.submit("a"), Served)
	f.use(-6000) // its process has ended
	f.look(5 * time.Second)
	f.releaseAs(f.submit("a"), DialRefused)
	f.look(5 * time.Second)
	f.requireState("a", Idle)
	f.warm("b", 8000)
	f.use(-1500) // others give some back as it returns
	f.use(6000)
	f.look(5 * time.Second)
	f.requireState("a", Ready)
	f.requireRunning(f.submit("a"))
	h := f.submit("c")
	f.look(time.Minute)
	require.Contains(t, f.requireRefused(h, VRAMExhausted).Message, "a holds 5.86GiB")
}
