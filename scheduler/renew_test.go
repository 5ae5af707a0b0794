package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// stale says that the driver of the slot is to be replaced, or is not after all.
func (f *fixture) stale(name string, yes bool) {
	f.t.Helper()
	f.reconfigure(func(c *Config) {
		for i := range c.Slots {
			if c.Slots[i].Name == name {
				c.Slots[i].Stale = yes
			}
		}
	})
}

func TestAStaleSlotEndsItsWorkIsUnloadedAndThenRenewedOnce(t *testing.T) {
	f := given(t, 16384, server("a", 8000, starts, wide(2)))
	f.warm("a", 8000)
	running := f.submit("a")
	f.stale("a", true)
	h := f.submit("a")
	f.requireWaiting(h)
	f.requireUnloads()
	f.release(running)
	f.requireUnloads("a")
	require.Empty(t, f.renews)
	f.evicted("a", 8000)
	require.Equal(t, []string{"a"}, f.renews)
	f.advance(time.Minute)
	f.sample()
	require.Equal(t, []string{"a"}, f.renews)
	f.requireLoads("a") // not before it is renewed
	f.requireWaiting(h)
	f.stale("a", false)
	f.requireLoads("a", "a")
	f.loaded("a")
	f.requireRunning(h)
	require.Equal(t, []string{"a"}, f.renews)
}

func TestAStaleSlotIsRenewedFromWhereverItIs(t *testing.T) {
	for name, c := range map[string]struct{ before, after func(f *fixture) }{
		"idle":       {func(*fixture) {}, func(*fixture) {}},
		"loading":    {func(f *fixture) { f.submit("a") }, func(f *fixture) { f.loaded("a"); f.evicted("a", 8000) }},
		"load fails": {func(f *fixture) { f.submit("a") }, func(f *fixture) { f.loadFails("a", "a bad day") }},
		"stopping":   {func(f *fixture) { f.warm("a", 8000); f.step(Unload{Slot: "a"}) }, func(f *fixture) { f.evicted("a", 8000) }},
		"dies":       {func(f *fixture) { f.warm("a", 0); f.submit("a") }, func(f *fixture) { f.step(Died{Slot: "a"}); f.releaseAs(f.lastJob("a"), ServerDied) }},
	} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 8000, starts))
			c.before(f)
			f.stale("a", true)
			c.after(f)
			require.Equal(t, []string{"a"}, f.renews)
			f.requireState("a", Idle)
		})
	}
}

func TestAStaleSlotOfWhichNothingIsKnownIsUnloadedFirst(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 8000, starts, func(c *SlotConfig) { c.Stale = true })}
	f := givenConfig(t, cfg, 16384)
	f.requireState("a", Stopping)
	require.Empty(t, f.renews)
	f.evicted("a", 0)
	require.Equal(t, []string{"a"}, f.renews)
}

func TestAStaleSlotWhoseWorkDoesNotEndIsTriedAgain(t *testing.T) {
	f := given(t, 16384, server("a", 8000, starts, wide(2)))
	f.warm("a", 8000)
	running := f.submit("a")
	f.stale("a", true)
	f.advance(f.cfg.DrainTimeout)
	require.Contains(t, f.decided("reopen", "a").Reason, "drain_timeout")
	f.requireUnloads()
	f.release(running)
	f.advance(10 * time.Minute)
	f.requireUnloads("a")
	f.evicted("a", 8000)
	require.Equal(t, []string{"a"}, f.renews)
}

// Its gate was closed for something else already as its settings changed.
func TestAStaleSlotLetsNobodyInAsItNeedNotMakeRoomAnyMore(t *testing.T) {
	for name, room := range map[string]func(f *fixture, other *handle){
		"who wanted its room has left": func(f *fixture, other *handle) { f.cancel(other) },
		"it fits without that":         func(f *fixture, _ *handle) { f.reconfigure(func(c *Config) { c.Slots[1].Claim = 1000 }); f.loaded("b") },
	} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 8000, starts, wide(2)), server("b", 10000))
			f.warm("a", 8000)
			running := f.submit("a")
			other := f.submit("b")
			f.advance(301 * time.Second)
			require.Equal(t, "b", f.decided("drain", "a").Target)
			f.stale("a", true)
			later := f.submit("a")
			room(f, other)
			f.requireWaiting(later)
			f.requireWaiting(f.submit("a"))
			f.release(running)
			f.requireUnloads("a")
			f.evicted("a", 8000)
			require.Equal(t, []string{"a"}, f.renews)
		})
	}
}

func TestAListThatNamesAConsumerMeansAllItsModels(t *testing.T) {
	of := func(c *SlotConfig) { c.Consumer = "m" }
	t.Run("coexist", func(t *testing.T) {
		f := given(t, 16384, server("m/a", 5000, of), server("m/b", 5000, of), server("b", 10000, coexists("m")))
		f.warm("m/a", 5000)
		f.warm("m/b", 5000)
		h := f.submit("b")
		f.advance(time.Minute)
		f.requireRefused(h, VRAMExhausted)
		f.requireUnloads()
	})
	t.Run("conflict", func(t *testing.T) {
		f := given(t, 16384, server("m/a", 1000, of), server("m/b", 1000, of), server("b", 1000, func(c *SlotConfig) { c.Conflicts = []string{"m"} }))
		f.warm("m/a", 1000)
		f.warm("m/b", 1000)
		h := f.submit("b")
		f.advance(time.Minute)
		f.evicted("m/a", 1000)
		f.advance(time.Minute)
		f.evicted("m/b", 1000)
		f.loaded("b")
		f.requireRunning(h)
	})
}

// A driver that could not be replaced at once, as another model of its server worked, must be offered again.
func TestAStaleSlotThatIsLoadedAgainBeforeItsDriverIsReplacedIsRenewedOnceMore(t *testing.T) {
	of := func(c *SlotConfig) { c.Consumer = "m" }
	f := given(t, 16384, server("m/a", 4000, starts, of), server("m/b", 4000, starts, of))
	f.warm("m/b", 4000)
	f.reconfigure(func(c *Config) { c.Slots[0].Stale, c.Slots[1].Stale = true, true })
	require.Equal(t, []string{"m/a"}, f.renews, "b is not unloaded yet")
	f.requireState("m/b", Stopping)
	f.use(4000)
	f.probe("m/a", Yes) // somebody has loaded it past us
	f.evicted("m/b", 4000)
	require.Equal(t, []string{"m/a", "m/b"}, f.renews)
	f.evicted("m/a", 4000)
	require.Equal(t, []string{"m/a", "m/b", "m/a"}, f.renews)
}

func TestADriverWhoseSettingsChangeAgainIsOfferedAgain(t *testing.T) {
	stale := func(is bool) func(*Config) { return func(c *Config) { c.Slots[0].Stale = is } }
	f := given(t, 16384, server("a", 8000, starts))
	f.reconfigure(stale(true))
	f.reconfigure(stale(true))
	require.Equal(t, []string{"a"}, f.renews, "once for each change")
	f.reconfigure(stale(false))
	f.reconfigure(stale(true))
	require.Equal(t, []string{"a", "a"}, f.renews)
}

// Whether a server lives that the driver starts is told by its driver; of another that is not known, and probes tell.
func TestAServerThatIsNoLongerStartedIsNoLongerSuspect(t *testing.T) {
	f := given(t, 16384, server("a", 8000, starts))
	f.warm("a", 8000)
	f.releaseAs(f.submit("a"), ServerDied)
	f.reconfigure(func(*Config) {})
	f.requireWaiting(f.submit("a"))
	f.reconfigure(func(c *Config) { c.Slots[0].Starts = false })
	f.requireRunning(f.lastJob("a"))
}

func TestTheFirstJobAfterAServersReplacementIsItsLoadAgain(t *testing.T) {
	f := given(t, 24576, lazyServer("a", 8000), server("b", 8000))
	f.release(f.submit("a"))
	f.reconfigure(func(c *Config) { c.Slots[0].Server = "another" })
	f.probe("a", No)
	first := f.submit("a")
	f.submit("b")
	f.requireState("b", Idle)
	f.release(first)
	f.requireState("b", Loading)
}
