package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// conflicts_with (spec §3.2): never resident together, though they would fit.

func conflictsWith(names ...string) func(*SlotConfig) {
	return func(c *SlotConfig) { c.Conflicts = names }
}

// secondGPU adds a GPU of so many MiB.
func (f *fixture) secondGPU(total gpu.Bytes) {
	f.t.Helper()
	f.cards = append(f.cards, Device{Index: 1, UUID: "GPU-1", Total: total * gpu.MiB, Free: total * gpu.MiB, Known: true})
	f.sample()
}

func TestConflictingSlotsAreNeverResidentTogether(t *testing.T) {
	for _, c := range []struct {
		name   string
		slots  []SlotConfig
		second bool
	}{
		{"named by the target", []SlotConfig{server("v", 2000), server("t", 2000, conflictsWith("v"))}, false},
		{"named by the victim", []SlotConfig{server("v", 2000, conflictsWith("x", "t")), server("t", 2000)}, false},
		{"on different GPUs, named by the target", []SlotConfig{server("v", 2000), server("t", 2000, on(1), conflictsWith("v"))}, true},
		{"on different GPUs, named by the victim", []SlotConfig{server("v", 2000, on(1), conflictsWith("t")), server("t", 2000)}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := given(t, 16384, c.slots...)
			if c.second {
				f.secondGPU(16384)
			}
			f.warm("v", 0)
			h := f.submit("t")
			f.requireLoads("v")
			f.advance(250*time.Millisecond - 1) // the hold: a quarter of the switch, which took a second
			f.requireUnloads()
			f.advance(1)
			f.requireUnloads("v")
			f.requireLoads("v")
			f.unloaded("v")
			f.sample()
			f.advance(10 * time.Second)
			f.requireLoads("v", "t")
			f.loaded("t")
			f.requireRunning(h)
			f.requireState("v", Idle)
		})
	}
}

func TestAConflictIsWithThoseThatLoadOrStopOrMayBeLoadedToo(t *testing.T) {
	f := given(t, 16384, server("v", 2000), server("t", 2000, on(1), conflictsWith("v")))
	f.secondGPU(16384)
	v := f.submit("v")
	tt := f.submit("t")
	f.advance(10 * time.Second)
	f.requireLoads("v")
	f.loaded("v")
	f.requireRunning(v)
	f.release(v)
	f.step(Unload{Slot: "v"})
	f.requireState("v", Stopping)
	f.advance(time.Second)
	f.requireLoads("v")
	f.unloaded("v")
	f.sample()
	f.requireLoads("v", "t")
	f.loaded("t")
	f.requireRunning(tt)

	cfg := defaults()
	cfg.Slots = []SlotConfig{server("v", 2000), server("t", 2000, conflictsWith("v"))}
	f = givenConfig(t, cfg, 16384)
	f.probe("t", No)
	f.submit("t")
	f.advance(time.Second)
	f.requireLoads() // v has not been probed yet
	f.probe("v", No)
	f.requireLoads("t")
}

func TestEveryConflictingSlotMakesWay(t *testing.T) {
	f := given(t, 16384, server("v", 2000), server("w", 2000, conflictsWith("t")), server("other", 2000), server("t", 2000, conflictsWith("v")))
	for _, name := range []string{"v", "w", "other"} {
		f.warm(name, 2000)
	}
	f.advance(time.Minute)
	h := f.submit("t")
	f.evicted("v", 2000)
	f.evicted("w", 2000)
	f.loaded("t")
	f.requireRunning(h)
	f.requireUnloads("v", "w")
	require.EqualValues(t, 2, f.s.Snapshot(f.now).Counts.Evictions)
}

func TestAConflictingSlotThatWorksIsPassedOnlyWithinTheBound(t *testing.T) {
	f := given(t, 16384, server("v", 2000), server("t", 2000, conflictsWith("v"), costs(20100*time.Millisecond)))
	f.warm("v", 2000)
	f.advance(time.Minute)
	f.submit("v")
	f.submit("t")
	f.requireDrains("v", f.now.Add(urgentBound))
}

func TestAPinnedSlotBlocksWhoConflictsWithItAndIsNamed(t *testing.T) {
	for _, gpus := range [][]int{{0}, {1}} {
		f := given(t, 16384, server("v", 2000, pinned), server("t", 2000, on(gpus...), conflictsWith("v")))
		f.secondGPU(16384)
		f.warm("v", 2000)
		f.advance(time.Hour)
		h := f.submit("t")
		f.requireWaiting(h)
		f.advance(10*time.Second - 1)
		f.requireWaiting(h)
		f.advance(1)
		r := f.requireRefused(h, VRAMExhausted)
		require.Contains(t, r.Message, "v conflicts with it and is protected by pin")
		f.requireUnloads()
	}
}

func TestAnAdoptedConflictServesBoth(t *testing.T) {
	f := given(t, 16384, server("v", 2000), server("t", 2000, conflictsWith("v")))
	f.warm("v", 2000)
	f.use(2000)
	f.probe("t", Yes) // somebody else has loaded it
	f.requireRunning(f.submit("t"))
	f.release(f.lastJob("t"))
	f.requireRunning(f.submit("v"))
	f.advance(time.Hour)
	f.requireUnloads()
}

func TestAConflictThatAReloadEndsLetsBothIn(t *testing.T) {
	f := given(t, 16384, server("v", 2000, pinned), server("t", 2000, conflictsWith("v")))
	f.warm("v", 2000)
	h := f.submit("t")
	f.requireWaiting(h)
	f.reconfigure(func(c *Config) { c.Slots[1].Conflicts = nil })
	f.requireLoads("v", "t")
	f.loaded("t")
	f.requireRunning(h)
}

// victim_priority lower (spec §3.3).

func TestVictimPriorityLowerSparesWhatWasUsedForSomethingAsUrgent(t *testing.T) {
	story := func(last, mine int) (*fixture, *handle) {
		f := given(t, 16384, lazyServer("v", 10000), server("t", 10000))
		f.reconfigure(func(c *Config) { c.VictimLower = true })
		f.release(f.ask("v", last))
		f.use(10000)
		f.advance(time.Hour)
		return f, f.ask("t", mine)
	}
	f, _ := story(101, 100)
	f.requireUnloads("v")

	for _, last := range []int{100, 99} {
		f, h := story(last, 100)
		f.advance(10*time.Second - 1)
		f.requireWaiting(h)
		f.advance(1)
		r := f.requireRefused(h, VRAMExhausted)
		require.Contains(t, r.Message, "v holds 9.77GiB and is protected by victim_priority lower")
		f.requireUnloads()
	}
}

func TestVictimPriorityLowerSparesASlotForWhichSomebodyAsUrgentWaits(t *testing.T) {
	story := func() (f *fixture, urgent, target *handle) {
		f = given(t, 16384, lazyServer("v", 10000, costs(time.Second)), server("t", 10000))
		f.reconfigure(func(c *Config) { c.VictimLower = true })
		f.release(f.ask("v", 200))
		f.use(10000)
		f.advance(time.Hour)
		f.ask("v", 200)
		urgent = f.ask("v", 100)
		return f, urgent, f.ask("t", 100)
	}
	f, urgent, target := story()
	f.advance(9 * time.Second)
	f.cancel(urgent)
	f.advance(21 * time.Second)
	f.requireWaiting(target)
	require.False(t, f.slot("v").GateOpen, "a tenth of the bound is over")

	f, _, target = story()
	f.advance(10 * time.Second)
	require.Contains(t, f.requireRefused(target, VRAMExhausted).Message, "victim_priority lower")
}

func TestVictimPriorityLowerSparesNobodyWhoWasNeverUsed(t *testing.T) {
	f := given(t, 16384, server("v", 10000), server("t", 10000))
	f.reconfigure(func(c *Config) { c.VictimLower = true })
	f.use(10000)
	f.probe("v", Yes)
	f.advance(time.Hour)
	f.ask("t", 1000)
	f.requireUnloads("v")
}

func TestVictimPriorityAnySparesNobodyForItsPriority(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000), server("t", 10000))
	f.release(f.ask("v", 1))
	f.use(10000)
	f.advance(time.Hour)
	f.ask("t", 1000)
	f.requireUnloads("v")
}

func TestAConflictWithARemovedSlotHoldsUntilItIsGone(t *testing.T) {
	f := given(t, 16384, server("v", 2000, conflictsWith("t")), server("t", 2000))
	f.warm("v", 2000)
	v := f.submit("v")
	f.reconfigure(func(c *Config) { c.Slots = c.Slots[1:] })
	h := f.submit("t")
	f.advance(time.Minute)
	f.requireLoads("v")
	f.release(v)
	f.evicted("v", 2000)
	f.loaded("t")
	f.requireRunning(h)
}

func TestWhoConflictsWithAnOverdueTargetWaitsBehindItThoughOnAnotherGPU(t *testing.T) {
	f := given(t, 16384, server("v", 10000), server("t", 10000, func(c *SlotConfig) { c.Conflicts = []string{"c"} }), server("c", 3000, on(1)))
	f.secondGPU(16384)
	f.warm("v", 10000)
	f.submit("v")
	f.submit("t")
	f.advance(400 * time.Second)
	require.Equal(t, "waits for v to make room", f.slot("t").Why)
	f.requireWaiting(f.submit("c"))
	require.Equal(t, "waits behind t, which is overdue and conflicts with it", f.slot("c").Why)
	f.requireState("c", Idle)
}
