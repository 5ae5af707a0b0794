package scheduler

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// costs makes the switch to a lazy slot cost so much, and keepAlive protects it after its last job.
func costs(d time.Duration) func(*SlotConfig) { return func(c *SlotConfig) { c.SwitchCost = d } }
func keepAlive(d time.Duration) func(*SlotConfig) {
	return func(c *SlotConfig) { c.KeepAlive = d }
}
func budget(d time.Duration) func(*SlotConfig) { return func(c *SlotConfig) { c.Budget = d } }

// The three founding cases (issue: A2).

func TestAResidentTargetCausesNoUnload(t *testing.T) {
	f := given(t, 16384, server("mvoice", 2868), lazyServer("comfyui", 13312, async))
	f.warm("mvoice", 2868)
	f.free(100) // whatever else is there
	f.advance(time.Minute)
	h := f.submit("mvoice")
	f.requireRunning(h)
	f.requireUnloads()
}

func TestComfyUIMakesWayForMVoice(t *testing.T) {
	f := given(t, 16384, server("mvoice", 2868), lazyServer("comfyui", 13312, async))
	f.use(300)
	f.warm("comfyui", 13312)
	f.advance(time.Minute)
	h := f.submit("mvoice")
	f.requireUnloads("comfyui")
	f.evicted("comfyui", 13312)
	f.requireLoads("mvoice")
	f.loaded("mvoice")
	f.requireRunning(h)
	f.requireUnloads("comfyui")
	f.requireLoads("mvoice")
	require.EqualValues(t, 1, f.s.Snapshot(f.now).Counts.Evictions)
}

func TestCanCoexistWithKeepsOllamaThoughItIsLeastRecentlyUsed(t *testing.T) {
	for _, kept := range []bool{true, false} {
		t.Run(fmt.Sprint(kept), func(t *testing.T) {
			mvoice := server("mvoice", 2868)
			if kept {
				mvoice.Coexist = []string{"ollama", "whisper"}
			}
			f := given(t, 20480, mvoice, lazyServer("ollama", 6144, func(c *SlotConfig) { c.CanTell = true }), lazyServer("comfyui", 13312, async))
			f.warm("ollama", 6144)
			f.advance(time.Minute)
			f.warm("comfyui", 13312)
			f.advance(time.Minute)
			f.submit("mvoice")
			if kept {
				f.requireUnloads("comfyui")
				f.requireState("ollama", Ready)
			} else {
				f.requireUnloads("ollama")
				f.requireState("comfyui", Ready)
			}
		})
	}
}

// Rule 1.

func TestAWarmJobGoesBeforeAnOlderColdOne(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	a1 := f.submit("a")
	b := f.submit("b")
	f.advance(time.Minute)
	a2 := f.submit("a")
	f.release(a1)
	f.requireRunning(a2)
	f.requireWaiting(b)
}

func TestJobsOfASlotRunByPriorityThenAgeWithinItsConcurrency(t *testing.T) {
	f := given(t, 16384, server("a", 10000, wide(2)))
	f.warm("a", 10000)
	one, two := f.submit("a"), f.submit("a")
	f.requireRunning(one, two)
	late := f.submitJob(Submit{Slot: "a", Priority: 200})
	f.advance(time.Second)
	first, second := f.submit("a"), f.submit("a")
	f.advance(time.Second)
	urgent := f.submitJob(Submit{Slot: "a", Priority: 1})
	again := f.submitJob(Submit{Slot: "a", Priority: 100, Submitted: f.now.Add(-time.Hour)})
	f.requireWaiting(late, first, second, urgent, again)
	for _, next := range []*handle{urgent, again, first, second, late} {
		f.requireWaiting(next)
		f.release(one)
		f.requireRunning(next)
		one, two = two, next
	}
}

// Rule 2.

func TestAnIdleSlotIsHeldForAPartOfItsSwitchCost(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, costs(40*time.Second)), server("t", 10000))
	f.warm("v", 10000)
	f.advance(time.Second)
	f.submit("t")
	f.advance(9*time.Second - 1)
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("v")
}

func TestTheSwitchCostIsTwentySecondsUntilItIsMeasured(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000), server("t", 10000))
	f.warm("v", 10000)
	f.submit("t")
	f.advance(5*time.Second - 1)
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("v")
}

func TestTheSwitchCostIsTheMeanOfLoadsPlusTheMeanOfUnloads(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	require.Equal(t, 20*time.Second, f.slot("a").Switch)
	for _, c := range []struct{ load, unload, want time.Duration }{
		{10 * time.Second, 2 * time.Second, 12 * time.Second},
		{20 * time.Second, 12 * time.Second, 18 * time.Second}, // 10 + 0.3·10, and 2 + 0.3·10
	} {
		h := f.submit("a")
		f.advance(c.load)
		f.loaded("a")
		f.use(10000)
		f.release(h)
		f.step(Unload{Slot: "a"})
		f.advance(c.unload)
		f.evicted("a", 10000)
		require.Equal(t, c.want, f.slot("a").Switch)
	}
}

func TestKeepAliveProtectsAnIdleSlotUntilTheTargetIsOverdue(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, keepAlive(30*time.Second)), server("t", 10000))
	f.warm("v", 10000)
	f.submit("t")
	f.advance(30*time.Second - 1)
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("v")

	f = given(t, 16384, lazyServer("v", 10000, keepAlive(time.Hour)), server("t", 10000))
	f.warm("v", 10000)
	f.submit("t")
	f.advance(300*time.Second - 1) // B = 15 · 20 s
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("v")
}

func TestTheBoundOfOvertakingIsClampedAndAtMostHalfTheBudget(t *testing.T) {
	for _, c := range []struct {
		name string
		t    SlotConfig
		want time.Duration
	}{
		{"15 S", lazyServer("t", 10000, costs(10*time.Second)), 150 * time.Second},
		{"at least overtake_min", lazyServer("t", 10000, costs(time.Second)), 30 * time.Second},
		{"at most overtake_max", lazyServer("t", 10000, costs(time.Minute)), 600 * time.Second},
		{"at most half the budget", lazyServer("t", 10000, costs(time.Minute), budget(100*time.Second)), 50 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := given(t, 16384, lazyServer("v", 10000, keepAlive(time.Hour)), c.t)
			f.warm("v", 10000)
			f.submit("t")
			f.advance(c.want - 1)
			f.requireUnloads()
			f.advance(1)
			f.requireUnloads("v")
		})
	}
}

func TestASlotIsIdleSinceTheLatestOfReadyItsLastJobAndItsLastClientsDeparture(t *testing.T) {
	idleSince := func(f *fixture) {
		t.Helper()
		f.submit("t")
		f.advance(10*time.Second - 1)
		f.requireUnloads()
		f.advance(1)
		f.requireUnloads("v")
	}
	slots := []SlotConfig{server("v", 10000, keepAlive(10*time.Second)), server("t", 10000), server("w", 1000)}

	f := given(t, 16384, slots...)
	h := f.submit("v")
	f.cancel(h)
	f.advance(time.Second)
	f.loaded("v") // READY, though nobody waits
	idleSince(f)

	f = given(t, 16384, slots...)
	f.warm("v", 10000)
	f.advance(time.Minute)
	f.release(f.submit("v"))
	idleSince(f)

	f = given(t, 16384, slots...)
	f.warm("w", 1000)
	f.warm("v", 10000)
	f.advance(time.Minute)
	f.submit("w") // it has the lock
	h = f.submit("v")
	f.advance(time.Minute)
	f.cancel(h)
	idleSince(f)
}

// Rule 5.

func TestVictimsGoInTheOrderOfTheContract(t *testing.T) {
	type slot struct {
		size     gpu.Bytes
		priority int // of its last job; 0: never used, but seen loaded
		busy     bool
	}
	for _, c := range []struct {
		name  string
		slots []slot // in the order of their last use
		need  gpu.Bytes
		want  []string
	}{
		{"the least recently used", []slot{{5000, 100, false}, {5000, 100, false}, {5000, 100, false}}, 4000, []string{"v0"}},
		{"only as many as needed", []slot{{5000, 100, false}, {5000, 100, false}, {5000, 100, false}}, 9000, []string{"v0", "v1"}},
		{"never used goes first", []slot{{5000, 100, false}, {5000, 100, false}, {5000, 0, false}}, 4000, []string{"v2"}},
		{"then the lowest priority", []slot{{5000, 100, false}, {5000, 300, false}, {5000, 200, false}}, 4000, []string{"v1"}},
		{"those that turn out not to be needed are dropped", []slot{{1500, 100, false}, {6000, 100, false}, {6000, 100, false}}, 6200, []string{"v1"}},
		{"idle goes before busy", []slot{{5000, 300, true}, {5000, 100, false}, {5000, 100, false}}, 4000, []string{"v1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			slots := []SlotConfig{server("t", c.need)}
			for i, v := range c.slots {
				slots = append(slots, server(fmt.Sprint("v", i), v.size, lockNone))
			}
			f := given(t, 16384, slots...)
			var busy []string
			for i, v := range c.slots {
				name := fmt.Sprint("v", i)
				f.advance(time.Minute)
				if v.priority == 0 {
					f.use(v.size)
					f.probe(name, Yes)
					continue
				}
				h := f.submitJob(Submit{Slot: name, Priority: v.priority})
				f.loaded(name)
				f.use(v.size)
				f.release(h)
				if v.busy {
					busy = append(busy, name)
				}
			}
			f.advance(time.Hour)
			for _, name := range busy {
				f.submit(name)
			}
			h := f.submit("t")
			f.advance(0)
			for i, name := range c.want {
				require.Len(t, f.unloads, i+1)
				f.evicted(name, c.slots[name[1]-'0'].size)
			}
			f.requireUnloads(c.want...)
			f.loaded("t")
			f.requireRunning(h)
		})
	}
}

func TestOnlyRealWorkIsUse(t *testing.T) {
	f := given(t, 16384, server("t", 4000), server("v", 5000), server("w", 5000), server("x", 5000))
	for _, v := range []string{"v", "w", "x"} {
		f.warm(v, 5000)
		f.advance(time.Minute)
	}
	used := f.slot("v").LastUse
	for range 10 {
		f.probe("v", Yes)
		f.sample()
		f.advance(time.Minute)
	}
	f.releaseAs(f.submit("v"), NoAnswer) // no response came: the idle clock moves, the order doesn't
	require.Equal(t, used, f.slot("v").LastUse)
	require.Equal(t, f.now, f.slot("v").IdleAt)
	f.advance(time.Hour)
	f.submit("t")
	f.requireUnloads("v")
}

func TestLastUseIsTheEndOfTheWork(t *testing.T) {
	f := given(t, 16384, server("t", 7000), server("v", 5000, lockNone), server("w", 5000, lockNone))
	f.warm("v", 5000)
	f.warm("w", 5000)
	v := f.submit("v")
	f.advance(time.Minute)
	w := f.submit("w")
	f.advance(time.Minute)
	f.release(w)
	f.advance(time.Minute)
	f.release(v) // began first, ended last
	f.advance(time.Hour)
	f.submit("t")
	f.requireUnloads("w")
}

func TestAnOverdueTargetKeepsOthersFromTheMemoryItNeeds(t *testing.T) {
	story := func(wait time.Duration) (*fixture, *handle, *handle) {
		f := given(t, 16384, server("v", 10000), server("big", 12000), server("small", 3000), server("other", 3000, on(1)))
		f.cards = append(f.cards, Device{Index: 1, UUID: "GPU-1", Total: 8192 * gpu.MiB, Free: 8192 * gpu.MiB, Known: true})
		f.sample()
		f.warm("v", 10000)
		f.advance(time.Minute)
		j0 := f.submit("v")
		f.submit("v")
		f.submit("big")
		f.loads = nil
		f.advance(wait)
		return f, j0, f.submit("small")
	}
	f, _, _ := story(299 * time.Second)
	f.requireLoads("small") // big isn't overdue

	f, j0, small := story(301 * time.Second)
	f.requireLoads()
	f.requireWaiting(small)
	require.Contains(t, f.slot("small").Why, "behind big")
	f.submit("other")
	f.requireLoads("other") // on its own GPU nobody is overdue
	f.release(j0)
	require.False(t, f.slot("v").GateOpen)
	f.requireLoads("other")
	f.release(f.lastJob("v"))
	f.loaded("other")
	f.evicted("v", 10000)
	f.requireLoads("other", "big")
	f.loaded("big")
	f.use(12000)
	f.requireLoads("other", "big", "small")
}

func TestColdTargetsAreServedByPriorityThenAge(t *testing.T) {
	f := given(t, 24576, server("x", 1000), server("a", 1000), server("b", 1000), server("c", 1000))
	f.submit("x")
	f.submit("b")
	f.advance(time.Second)
	f.submit("a")
	f.submitJob(Submit{Slot: "c", Priority: 1})
	for _, name := range []string{"x", "c", "b", "a"} {
		require.Equal(t, name, f.loads[len(f.loads)-1])
		f.advance(time.Millisecond)
		f.loaded(name)
		require.Equal(t, name, f.loads[len(f.loads)-1], "the next waits for a look that is newer than this load")
		f.sample()
	}
}

func TestATargetThatCoolsDownReservesNothing(t *testing.T) {
	f := given(t, 16384, server("big", 14000), server("small", 3000))
	f.submit("big")
	f.loadFails("big", "exit status 1")
	big := f.submit("big")
	f.submit("small")
	f.requireLoads("big", "small")
	f.requireWaiting(big)
}

func TestIdleVictimsGoBeforeBusyOnes(t *testing.T) {
	f := given(t, 16384, server("t", 7000), server("busy", 6000, lockNone), server("idle", 6000, keepAlive(time.Hour)))
	h := f.submitJob(Submit{Slot: "busy", Priority: 300}) // by all else it would be the first to go
	f.loaded("busy")
	f.use(6000)
	f.release(h)
	f.warm("idle", 6000)
	f.submit("busy")
	f.submit("t")
	f.advance(300 * time.Second) // both may go now
	f.requireUnloads("idle")
	require.True(t, f.slot("busy").GateOpen)
}

func TestAnUnknownTargetWhoseGateIsClosedClaimsNothing(t *testing.T) {
	f := given(t, 16384, server("a", 3000, asksBusy, func(c *SlotConfig) { c.CanTell = false }))
	f.free(9000) // it would fit once more, for all that is known
	f.works["a"] = true
	f.step(Unload{Slot: "a"})
	a := f.submit("a")
	f.advance(time.Minute)
	f.requireState("a", Unknown)
	f.requireLoads()
	f.works["a"] = false
	f.advance(time.Second)
	f.evicted("a", 3000)
	f.loaded("a")
	f.requireRunning(a)
}

func TestAVictimIsNotUnloadedIfItsResidueWouldKeepTheTargetOutAnyway(t *testing.T) {
	f := given(t, 16384, server("a", 10000, func(c *SlotConfig) { c.Residual = 600 * gpu.MiB }), server("b", 15800))
	f.warm("a", 10000)
	f.advance(time.Hour)
	h := f.submit("b")
	f.advance(10 * time.Second)
	f.requireRefused(h, VRAMExhausted)
	f.requireUnloads()
}
