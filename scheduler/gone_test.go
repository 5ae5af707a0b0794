package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The probe that a refused connection asks for is refused too, as a rule, before the server is back.
func TestAServerWhoseProbeTellsOnlyHealthCountsAsLoadedWhenItAnswersAgain(t *testing.T) {
	for name, set := range map[string]func(*SlotConfig){"no route": noRoutes, "load alone": func(c *SlotConfig) { c.CanUnload = false }, "load and unload": func(*SlotConfig) {}} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 10000, healthAlone, set), server("b", 10000))
			f.warm("a", 10000)
			f.releaseAs(f.submit("a"), DialRefused)
			require.Contains(t, f.probes, "a")
			f.advance(5 * time.Millisecond)
			f.probeRefused("a")
			f.use(-10000)
			f.look(2 * time.Second)
			f.requireState("a", Idle) // others may have its room meanwhile
			f.use(10000)
			f.look(5 * time.Second)
			f.probe("a", NotTold)
			f.requireState("a", Ready)
			f.requireRunning(f.submit("a"))
			f.look(time.Minute)
			f.requireState("b", Idle)
		})
	}
}

// Requests that name no model take turns there, and load nothing.
func TestTheTurnsAtAServerThatRefusedAConnectionStay(t *testing.T) {
	turns := SlotConfig{Name: "m/", Consumer: "m", Server: "one", TurnOnly: true, GPUs: []int{0}, Concurrency: 1, CanProbe: true} // as broker.turnsOf makes it
	f := given(t, 16384, server("m/a", 10000, at("one"), func(c *SlotConfig) { c.Consumer = "m" }), turns)
	f.warm("m/a", 10000)
	f.probe("m/", NotTold)
	f.releaseAs(f.submit("m/"), DialRefused)
	f.requireState("m/a", Idle)
	f.probeRefused("m/")
	f.probe("m/", NotTold)
	f.requireState("m/", Ready)
	f.requireRunning(f.submit("m/"))
}

// It came back without its model, and another has its room by then.
func TestAServerWhoseMemoryIsNotTakenAgainIsNotLoadedWhenItAnswersAgain(t *testing.T) {
	f := given(t, 16384, server("a", 10000, healthAlone), server("b", 10000))
	f.warm("a", 10000)
	f.releaseAs(f.submit("a"), DialRefused)
	f.use(-10000)
	f.look(2 * time.Second)
	f.submit("b")
	f.requireState("b", Loading)
	f.probe("a", NotTold)
	f.use(10000)
	f.loaded("b")
	f.look(5 * time.Second)
	f.requireState("a", Idle)
}

func TestAServerThatWasNotLoadedWhenItsProcessEndedIsNotWhenItAnswersAgain(t *testing.T) {
	f := given(t, 16384, server("a", 10000, healthAlone), server("b", 10000))
	f.warm("a", 10000)
	f.step(Unload{Slot: "a"})
	f.evicted("a", 10000)
	f.probeRefused("a")
	f.probe("a", NotTold)
	f.requireState("a", Idle)
}

// Its memory tells that it is back, even if its end was not seen.
func TestAServerThatIsNotProbedCountsOnceWhenItIsBack(t *testing.T) {
	t.Run("its end is seen after its refusal", func(t *testing.T) {
		f := given(t, 24576, server("a", 10000, unprobed, noRoutes), server("b", 12000))
		f.warm("a", 10000)
		f.advance(time.Second)
		f.releaseAs(f.submit("a"), DialRefused)
		f.use(-10000)
		f.look(2 * time.Second)
		f.use(10000)
		f.look(2 * time.Second)
		h := f.submit("b")
		f.look(time.Minute)
		require.Nil(t, h.refusal, "14576 MiB are free")
		f.requireState("b", Loading)
	})
	t.Run("another loads meanwhile", func(t *testing.T) {
		f := given(t, 24576, server("a", 6000, unprobed, noRoutes), server("b", 8000, pinned), server("c", 6000))
		f.warm("a", 6000)
		f.use(-6000)
		f.look(time.Second)
		f.releaseAs(f.submit("a"), DialRefused)
		f.look(time.Second)
		f.warm("b", 8000)
		f.look(time.Second)
		f.use(6000)
		f.look(time.Second)
		h := f.submit("c")
		f.look(time.Minute)
		require.Nil(t, h.refusal, "10576 MiB are free")
		f.requireState("c", Loading)
	})
}

func TestWorkThatGoesOnEndsWithTheProcessThatRefusesConnections(t *testing.T) {
	t.Run("not probed", func(t *testing.T) {
		f := given(t, 24576, server("a", 10000, unprobed, noRoutes, worksOn), server("next", 4000))
		f.warm("next", 4000)
		f.warm("a", 10000)
		f.leaves(f.submit("a"), NoAnswer)
		n := f.submit("next")
		f.requireWaiting(n)
		f.releaseAs(f.submit("a"), DialRefused)
		f.requireRunning(n)
	})
	t.Run("the first job of all", func(t *testing.T) {
		f := given(t, 24576, server("a", 10000, unprobed, noRoutes, worksOn), server("next", 4000, lockNone))
		h := f.submit("a")
		f.requireRunning(h)
		f.use(3000)
		f.leaves(h, NoAnswer)
		f.requireWaiting(f.submit("next"))
		f.releaseAs(f.submit("a"), DialRefused)
		f.use(-3000)
		f.look(time.Minute)
		f.requireState("next", Loading)
	})
	t.Run("locked mode", func(t *testing.T) {
		cfg := defaults()
		cfg.Mode = Locked
		cfg.Slots = []SlotConfig{server("a", 10000, worksOn), server("next", 4000)}
		f := givenConfig(t, cfg, 24576)
		f.probe("a", Yes)
		f.probe("next", Yes)
		f.leaves(f.submit("a"), NoAnswer)
		n := f.submit("next")
		f.requireWaiting(n)
		f.releaseAs(f.submit("a"), DialRefused)
		f.requireRunning(n)
	})
}

// What still runs there breaks off later.
func TestARefusedConnectionCountsOnceTheServersOtherJobsHaveEnded(t *testing.T) {
	t.Run("itself", func(t *testing.T) {
		f := given(t, 16384, lazyServer("a", 10000, unprobed, wide(2)))
		f.warm("a", 10000)
		one := f.submit("a")
		f.releaseAs(f.submit("a"), DialRefused)
		f.requireState("a", Ready)
		f.releaseAs(one, ServerDied)
		f.requireState("a", Idle)
	})
	t.Run("another model of it", func(t *testing.T) {
		f := given(t, 24576, lazyServer("m/a", 8000, unprobed, at("one"), lockNone), lazyServer("m/b", 8000, unprobed, at("one"), lockNone))
		f.warm("m/a", 8000)
		f.look(2 * time.Second)
		f.warm("m/b", 8000)
		b := f.submit("m/b")
		f.releaseAs(f.submit("m/a"), DialRefused)
		f.releaseAs(b, ServerDied)
		f.requireState("m/b", Idle)
	})
	t.Run("a job of the old address", func(t *testing.T) {
		f := given(t, 16384, lazyServer("a", 8000, unprobed, wide(3), at("old")))
		f.warm("a", 8000)
		old := f.submit("a")
		f.reconfigure(func(c *Config) { c.Slots[0].Server = "new" })
		f.use(-8000)
		f.warm("a", 8000)
		f.releaseAs(f.submit("a"), DialRefused)
		f.releaseAs(old, Served)
		f.requireState("a", Idle)
	})
	t.Run("unless it has served one since", func(t *testing.T) {
		f := given(t, 16384, lazyServer("a", 8000, unprobed, wide(3)))
		f.warm("a", 8000)
		one := f.submit("a")
		f.releaseAs(f.submit("a"), DialRefused)
		f.advance(time.Second)
		f.releaseAs(f.submit("a"), Served)
		f.releaseAs(one, NoAnswer)
		f.requireState("a", Ready)
	})
}

func TestAnUnloadThatIsRefusedByNobodyTakesTheServerForGone(t *testing.T) {
	for name, set := range map[string]func(*SlotConfig){"lazy, not probed": func(c *SlotConfig) { c.CanLoad, c.CanTell, c.CanProbe = false, false, false }, "tells": func(*SlotConfig) {}} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 10000, set), server("b", 10000))
			f.warm("a", 10000)
			f.use(-10000)
			f.submit("b")
			f.look(time.Minute)
			f.requireState("a", Stopping)
			f.step(UnloadDone{Slot: "a", Epoch: f.epochs["a"], Err: "connection refused", Refused: true})
			f.requireState("a", Idle)
			f.look(time.Second)
			f.requireState("b", Loading)
		})
	}
}

func TestAProcessIsAskedToUnloadWhateverTheOneBeforeAnswered(t *testing.T) {
	f := given(t, 16384, lazyServer("a", 10000, unprobed), server("b", 10000))
	f.warm("a", 10000)
	f.step(Unload{Slot: "a"})
	f.unloadFails("a") // it hangs, and is killed
	f.look(time.Second)
	f.releaseAs(f.submit("a"), DialRefused)
	f.use(-10000)
	f.look(2 * time.Minute)
	f.use(10000) // a new process, used past the broker
	f.look(time.Second)
	h := f.submit("b")
	f.flushes("a", 10000, time.Minute)
	f.requireRunning(h)
}

func TestAServerThatComputesAndTakesNoConnectionInTimeServesOthersAllTheSame(t *testing.T) {
	f := given(t, 16384, server("a", 10000, wide(4)))
	f.warm("a", 10000)
	f.requireRunning(f.submit("a"))
	f.releaseAs(f.submit("a"), Unreached)
	f.requireRunning(f.submit("a"))
}

func TestAnotherModelOfAServerThatRefusedAConnectionWaitsForItsProbeToo(t *testing.T) {
	f := given(t, 24576, server("m/a", 8000, healthAlone, noRoutes, at("one")), server("m/b", 8000, healthAlone, noRoutes, at("one")))
	f.warm("m/a", 8000)
	f.look(2 * time.Second)
	f.warm("m/b", 8000)
	a, b := f.submit("m/a"), f.submit("m/b")
	f.requireWaiting(b)
	f.releaseAs(a, DialRefused)
	f.requireWaiting(b)
	f.probe("m/a", NotTold)
	f.probe("m/b", NotTold)
	f.requireRunning(b)
}
