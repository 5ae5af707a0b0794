package scheduler

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestExplainTellsWhatIsUnderWay(t *testing.T) {
	f := given(t, 16384, server("a", 8000, starts, wide(2)))
	f.warm("a", 8000)
	h := f.submit("a")
	f.step(Died{Slot: "a"})
	f.explained("a", 100, "waits", "its server has just died, or may have")
	f.releaseAs(h, ServerDied)

	f = given(t, 16384, server("a", 8000, starts))
	f.reconfigure(func(c *Config) { c.Slots[0].Stale = true })
	f.explained("a", 100, "waits", "the settings of its server have changed: it is stopped first")

	f = given(t, 16384, server("a", 8000, asksBusy, func(c *SlotConfig) { c.CanTell = false }))
	f.slow["a"] = true
	f.step(Unload{Slot: "a"})
	f.requireState("a", Unknown)
	f.explained("a", 100, "waits", "it is about to be unloaded, and would be loaded again")
}

// What runs on a server beside its models holds no memory, whatever becomes of the server.
func TestASlotThatOnlyTakesTurnsIsNeverResident(t *testing.T) {
	turns := SlotConfig{Name: "m", TurnOnly: true, GPUs: []int{0}, Concurrency: 1, CanProbe: true, CanTell: true}
	f := given(t, 16384, turns, server("b", 8000, func(c *SlotConfig) { c.Conflicts = []string{"m"} }))
	h := f.submit("b")
	f.requireState("b", Loading) // nothing conflicts with it
	f.loaded("b")
	f.requireRunning(h)
	f.requireWaiting(f.submit("m"))
	f.release(h)
	f.requireRunning(f.lastJob("m"))
	f.release(f.lastJob("m"))
	f.step(Probed{Slot: "m", Sent: f.now, Outcome: ProbeRefused, Detail: "connection refused"})
	f.requireRefused(f.submit("m"), Unhealthy)
	f.probe("m", No)
	f.requireRunning(f.submit("m"))
	for _, d := range f.decisions {
		require.NotEqual(t, "gone", d.Kind)
	}
	require.Empty(t, f.slot("b").Why)
}

func TestTheEndOfTheProcessIsTold(t *testing.T) {
	f := given(t, 16384, server("a", 8000))
	f.step(Drain{})
	require.Nil(t, f.s.Ending(), "which a drain is not")
	f.step(Drain{Final: true})
	require.Equal(t, Draining, f.s.Ending().Code)
	f.step(Drain{Off: true})
	require.Equal(t, Draining, f.s.Ending().Code, "and is never taken back")
}

func TestASlotIsShownIfItIsThere(t *testing.T) {
	f := given(t, 16384, server("a", 8000))
	v, ok := f.s.Slot("a")
	require.True(t, ok)
	require.Equal(t, "a", v.Name)
	text, err := json.Marshal(v.State)
	require.NoError(t, err)
	require.JSONEq(t, `"IDLE"`, string(text))
	_, ok = f.s.Slot("b")
	require.False(t, ok)
}

// Another sampler lists other GPUs than the one before.
func TestGPUsThatANewSamplerDoesNotListAreNotThereAnyMore(t *testing.T) {
	for name, c := range map[string]struct {
		look Sampled
		gone bool
	}{
		"a new one":               {Sampled{First: true}, true},
		"the same":                {Sampled{}, false},
		"a new one that is blind": {Sampled{First: true, Lost: "no driver"}, false},
	} {
		cfg := defaults()
		cfg.Slots = []SlotConfig{server("a", 8000, on(1))}
		f := givenConfig(t, cfg, 16384, 16384)
		f.probe("a", No)
		c.look.At = f.now
		if c.look.Lost == "" {
			c.look.Devices = f.cards[:1]
		}
		f.step(c.look)
		h := f.submit("a")
		if !c.gone {
			require.Nil(t, h.refusal, name)
			continue
		}
		require.Contains(t, f.requireRefused(h, GPULost).Message, "there is GPU 0 only", name)
	}
}

// The one that was to make room says that it holds nothing. Whoever waits for it must not wait for ever.
func TestAVictimThatTurnsOutToBeUnloadedIsNotWaitedFor(t *testing.T) {
	f := given(t, 16384, server("a", 10000, asksBusy), server("b", 10000))
	f.reconfigure(func(c *Config) { c.Slots[0].Server = "x:1" })
	f.probe("a", NotTold)
	f.requireState("a", Unknown)
	f.slow["a"] = true
	f.free(6384)
	h := f.submit("b")
	require.Equal(t, "waits for a to make room", f.slot("b").Why)
	f.probe("a", No)
	f.requireState("a", Idle)
	f.free(16384)
	f.requireState("b", Loading)
	f.loaded("b")
	f.requireRunning(h)
	f.requireUnloads()
}

func TestWhoRanOutOfMemoryIsRefusedOnceNobodyMayMakeRoomAnyMore(t *testing.T) {
	f := given(t, 16384, server("v", 2000), server("t", 8000))
	f.warm("v", 2000)
	works := f.submit("v")
	h := f.submit("t")
	f.loadRunsOut("t")
	f.requireWaiting(h)
	f.step(SetPin{Slot: "v", On: true})
	require.Contains(t, f.requireRefused(h, LoadFailed).Message, "it ran out of memory, and nothing may be unloaded for it")
	f.requireRunning(works)
}

func TestALadderDoesNotWaitForOneThatIsBeingUnloaded(t *testing.T) {
	f := given(t, 16384, server("a", 10000), inTheSky("sky"))
	f.warm("a", 10000)
	require.Equal(t, "a", f.s.Choose(f.now, []string{"a", "sky"}, false))
	f.step(Unload{Slot: "a"})
	f.requireState("a", Stopping)
	require.Equal(t, "sky", f.s.Choose(f.now, []string{"a", "sky"}, false))
	f.advance(time.Second)
	f.evicted("a", 10000)
	require.Equal(t, "a", f.s.Choose(f.now, []string{"a", "sky"}, false), "which can be loaded again")
}
