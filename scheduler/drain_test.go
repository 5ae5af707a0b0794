package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestADrainedSlotTakesNoMoreJobsAndEndsThoseThatRun(t *testing.T) {
	f := given(t, 16384, server("a", 4000), server("b", 4000, lockNone))
	f.warm("a", 4000)
	running, waiting := f.submit("a"), f.submit("a")
	f.requireWaiting(waiting)
	f.step(Drain{Slot: "a"})
	r := f.requireRefused(waiting, Draining)
	require.Positive(t, r.RetryAfter)
	require.Contains(t, r.Message, `"a"`)
	f.requireRefused(f.submit("a"), Draining)
	require.Equal(t, NotNow, f.step(Submit{Slot: "a", IfFree: true})[0].Kind)
	f.requireRunning(running)
	require.True(t, f.slot("a").Draining)
	require.False(t, f.slot("b").Draining)
	require.False(t, f.s.Snapshot(f.now).Draining)
	h := f.submit("b")
	f.loaded("b")
	f.requireRunning(h)
	f.release(running)
	f.requireRefused(f.submit("a"), Draining)
	f.step(Drain{Slot: "a", Off: true})
	f.requireRunning(f.submit("a"))
}

func TestADrainOfAllRefusesWhoeverWaitsAndComes(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000), server("c", 1000))
	f.warm("a", 10000)
	running, b := f.submit("a"), f.submit("b")
	c := f.submit("c")
	f.requireState("c", Loading)
	f.step(Drain{})
	f.requireRefused(b, Draining)
	f.requireRefused(c, Draining)
	f.loaded("c") // goes on, for nobody
	f.requireState("c", Ready)
	f.requireRefused(f.submit("c"), Draining)
	require.True(t, f.s.Snapshot(f.now).Draining)
	require.True(t, f.slot("c").Draining)
	f.step(Drain{Slot: "a", Off: true})
	f.requireRefused(f.submit("a"), Draining)
	f.release(running)
	require.Zero(t, f.s.Running())
	f.step(Drain{Off: true})
	f.requireRunning(f.submit("c"))
	require.Zero(t, f.s.Snapshot(f.now).Waiting)
}

func TestADrainedSlotStaysSoWhenAllAreLetInAgain(t *testing.T) {
	f := given(t, 16384, server("a", 4000), server("b", 4000))
	f.step(Drain{Slot: "a"})
	f.step(Drain{})
	f.step(Drain{Off: true})
	f.requireRefused(f.submit("a"), Draining)
	f.submit("b")
	f.requireLoads("b")
}

func TestADrainOutlivesANewConfiguration(t *testing.T) {
	f := given(t, 16384, server("a", 4000), server("b", 4000))
	f.step(Drain{Slot: "a"})
	for _, mode := range []Mode{Evicting, Locked, Passthrough, Evicting} {
		f.reconfigure(func(c *Config) { c.Mode, c.Slots[0].Concurrency = mode, 2 })
		f.requireRefused(f.submit("a"), Draining)
	}
	f.step(Drain{})
	f.reconfigure(func(c *Config) { c.MaxQueue = 7 })
	f.requireRefused(f.submit("b"), Draining)
}

func TestADrainHoldsInEveryKindOfScheduler(t *testing.T) {
	for _, mode := range []Mode{Locked, Passthrough} {
		cfg := defaults()
		cfg.Mode, cfg.Slots = mode, []SlotConfig{server("a", 4000)}
		f := givenConfig(t, cfg, 16384)
		f.probe("a", Yes)
		h := f.submit("a")
		f.requireRunning(h)
		f.step(Drain{Slot: "a"})
		f.requireRefused(f.submit("a"), Draining)
		f.step(Drain{Slot: "a", Off: true})
		f.step(Drain{})
		f.requireRefused(f.submit("a"), Draining)
		f.release(h)
		f.step(Drain{Off: true})
		f.requireRunning(f.submit("a"))
	}
}

func TestADrainOfNobodyDoesNothing(t *testing.T) {
	f := given(t, 16384, server("a", 4000))
	f.step(Drain{Slot: "nobody"})
	f.submit("a")
	f.requireLoads("a")
}

func TestADrainedSlotGoesWhenItIsIdle(t *testing.T) {
	f := given(t, 16384, server("a", 4000, idles(10*time.Second)))
	f.warm("a", 4000)
	f.step(Drain{Slot: "a"})
	f.advance(10 * time.Second)
	f.requireUnloads("a")
}

// With max_run its jobs are over by then, and none is cut for an eviction.
func TestMaxRunLengthensTheDrain(t *testing.T) {
	for name, longest := range map[string]time.Duration{"shorter than drain_timeout": time.Minute, "longer": time.Hour} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 10000, func(c *SlotConfig) { c.MaxRun = longest }), server("b", 10000))
			f.warm("a", 10000)
			f.submit("a")
			f.submit("b")
			f.advance(11 * time.Minute)
			require.False(t, f.slot("a").GateOpen)
			end := f.decided("drain", "a").At.Add(max(longest+cutWait, f.cfg.DrainTimeout))
			f.advance(end.Sub(f.now) - 1)
			require.Empty(t, f.said("reopen"))
			f.advance(1)
			require.Equal(t, []string{"a"}, f.said("reopen"))
		})
	}
}
