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
		require.Contains(t, r.Message, "v holds 10000 MiB and is protected by victim_priority lower")
		f.requireUnloads()
	}
}

func TestVictimPriorityLowerSparesASlotForWhichSomebodyAsUrgentWaits(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, costs(time.Second)), server("t", 10000))
	f.reconfigure(func(c *Config) { c.VictimLower = true })
	f.release(f.ask("v", 200))
	f.use(10000)
	f.advance(time.Hour)
	f.ask("v", 200)
	urgent := f.ask("v", 100)
	h := f.ask("t", 100)
	f.advance(9 * time.Second)
	require.True(t, f.slot("v").GateOpen)
	f.cancel(urgent)
	f.advance(21 * time.Second)
	require.False(t, f.slot("v").GateOpen, "a tenth of the bound is over")
	f.requireWaiting(h)
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

// Keep-alive and stay warm, as a job asks for them (spec §4.5).

func TestAJobKeepsItsSlotForAsLongAsItAsked(t *testing.T) {
	for _, c := range []struct {
		name      string
		own       time.Duration // the slot's
		jobs      []time.Duration
		want      time.Duration // after the last job
		untilNext time.Duration // from job to job
	}{
		{"the slot's own", 17 * time.Second, []time.Duration{0}, 17 * time.Second, 0},
		{"longer than the slot's", 17 * time.Second, []time.Duration{23 * time.Second}, 23 * time.Second, 0},
		{"never shorter than the slot's", 17 * time.Second, []time.Duration{8 * time.Second}, 17 * time.Second, 0},
		{"never shorter than the hold", 0, []time.Duration{3 * time.Second}, 5025 * time.Millisecond, 0},
		{"of an earlier job", 0, []time.Duration{23 * time.Second, 0}, 23*time.Second - time.Second, time.Second},
		{"of the longest", 0, []time.Duration{8 * time.Second, 23 * time.Second, 9 * time.Second}, 23*time.Second - time.Second, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := given(t, 16384, lazyServer("v", 10000, costs(20100*time.Millisecond), keepAlive(c.own)), server("t", 10000))
			for i, d := range c.jobs {
				if i > 0 {
					f.advance(c.untilNext)
				}
				f.release(f.submitJob(Submit{Slot: "v", Priority: 100, KeepAlive: d}))
				if i == 0 {
					f.use(10000)
				}
			}
			f.submit("t")
			f.advance(c.want - 1)
			f.requireUnloads()
			f.advance(1)
			f.requireUnloads("v")
		})
	}
}

func TestWhatAJobKeepsYieldsToOneThatIsOverdueOrMoreUrgent(t *testing.T) {
	story := func(priority int) *fixture {
		f := given(t, 16384, lazyServer("v", 10000), urgentTarget())
		f.release(f.submitJob(Submit{Slot: "v", Priority: 100, KeepAlive: 10 * time.Hour}))
		f.use(10000)
		f.ask("t", priority)
		return f
	}
	f := story(100)
	f.requireDrains("v", f.now.Add(urgentBound))
	f = story(50)
	f.requireDrains("v", f.now.Add(urgentWait))
}

func TestWhatAJobKeepsIsNotUnloadedAsIdle(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, idles(10*time.Second)))
	f.release(f.submitJob(Submit{Slot: "v", Priority: 100, KeepAlive: 33 * time.Second}))
	f.use(10000)
	require.Equal(t, f.now.Add(33*time.Second), f.slot("v").UnloadAt)
	require.Equal(t, f.slot("v").UnloadAt, f.wake)
	f.advance(33*time.Second - 1)
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("v")
}

func TestTheLastJobSaysHowLongItsSlotStaysWarm(t *testing.T) {
	for _, c := range []struct {
		name string
		jobs []time.Duration
		want time.Duration
	}{
		{"nothing said", []time.Duration{0}, 10 * time.Second},
		{"longer", []time.Duration{33 * time.Second}, 33 * time.Second},
		{"shorter", []time.Duration{2 * time.Second}, 2 * time.Second},
		{"the last says nothing", []time.Duration{33 * time.Second, 0}, 10 * time.Second},
		{"the last says less", []time.Duration{33 * time.Second, 3 * time.Second}, 3 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := given(t, 16384, lazyServer("v", 10000, idles(10*time.Second)))
			for i, d := range c.jobs {
				f.release(f.submitJob(Submit{Slot: "v", Priority: 100, StayWarm: d}))
				if i == 0 {
					f.use(10000)
				}
			}
			require.Equal(t, f.now.Add(c.want), f.slot("v").UnloadAt)
			f.advance(c.want - 1)
			f.requireUnloads()
			f.advance(1)
			f.requireUnloads("v")
		})
	}
}

func TestStayWarmIsNoProtection(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, idles(10*time.Second)), server("t", 10000))
	f.release(f.submitJob(Submit{Slot: "v", Priority: 100, StayWarm: time.Hour}))
	f.use(10000)
	f.submit("t")
	f.advance(5 * time.Second)
	f.requireUnloads("v")
}
