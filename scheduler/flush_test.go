package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// A lazy server that was loaded without the broker gives that memory back before its own first load (K0, accounting §3).

func TestK0_ALoadedLazyTargetIsFlushedAtOnceThenLoaded(t *testing.T) {
	for _, c := range []struct {
		name                      string
		total, free, claim, holds gpu.Bytes
		set                       []func(*SlotConfig)
	}{
		{name: "golden", total: 16384, free: 7168, claim: 9216, holds: 9000},
		{name: "with a busy route", total: 16384, free: 7168, claim: 9216, holds: 9000, set: []func(*SlotConfig){async}},
		{name: "a claim of the whole card", total: 24576, free: 2000, claim: 24000, holds: 22500},
		{name: "beside a desktop", total: 12288, free: 1288, claim: 8192, holds: 10000, set: []func(*SlotConfig){asksBusy}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := given(t, c.total, lazyServer("comfyui", c.claim, c.set...))
			f.free(c.free)
			began := f.now
			h := f.submit("comfyui")
			f.requireWaiting(h)
			f.requireUnloads("comfyui")
			require.Equal(t, began, f.now, "at once")
			f.requireState("comfyui", Idle)
			f.answered("comfyui")
			f.requireWaiting(h)
			require.True(t, f.s.FastSampling())
			f.look(time.Second)
			f.requireWaiting(h)
			f.use(-c.holds)
			f.requireRunning(h)
			f.requireUnloads("comfyui")
			require.Contains(t, f.decided("flushed", "comfyui").Reason, "without the broker")
			require.Zero(t, f.s.Snapshot(f.now).Counts.Evictions)
			f.release(h)
			f.requireRunning(f.submit("comfyui"))
			f.requireUnloads("comfyui")
		})
	}
}

func TestK0_ATargetOfTwoGPUsThatFillsOneOfThemIsFlushedBeforeAnotherIsEvicted(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{lazyServer("comfyui", 12000, on(0, 1)), server("v", 4000)}
	f := givenConfig(t, cfg, 16384, 16384)
	f.probe("comfyui", NotTold)
	f.probe("v", No)
	f.warm("v", 4000)
	f.use(9000) // which comfyui took on the first of its GPUs
	f.advance(time.Hour)
	h := f.submit("comfyui")
	f.requireUnloads("comfyui")
	f.answered("comfyui")
	f.use(-9000)
	f.requireRunning(h)
	f.requireUnloads("comfyui")
}

func TestK0_AQuarterOfTheClaimMoreThanBeforeMayBeTheTargetsOwn(t *testing.T) {
	for mib, flushed := range map[gpu.Bytes]bool{2000: true, 1999: false} {
		f := given(t, 10000, lazyServer("comfyui", 8000))
		f.warm("comfyui", 8000)
		f.step(Unload{Slot: "comfyui"})
		f.evicted("comfyui", 8000)
		f.use(mib) // somebody has loaded it since, or another program has come
		f.requireWaiting(f.submit("comfyui"))
		require.Equal(t, flushed, len(f.unloads) == 2, "%d MiB", mib)
	}
}

func TestK0_NothingIsFlushedForATargetThatFitsBesideItsOwnMemory(t *testing.T) {
	f := given(t, 24576, lazyServer("comfyui", 9216))
	f.free(15500)
	f.requireRunning(f.submit("comfyui"))
	f.requireUnloads()
}

func TestK0_WhatIsMeasuredOfTheTargetsProcessCountsForIt(t *testing.T) {
	f := given(t, 16384, lazyServer("comfyui", 9216))
	f.cards[0].Measured = map[string]gpu.Bytes{"comfyui": 9000 * gpu.MiB}
	f.free(7168)
	f.requireRunning(f.submit("comfyui"))
	f.requireUnloads()
}

func TestK0_NoOtherIsEvictedWhileTheTargetsOwnMemoryMayComeBack(t *testing.T) {
	f := given(t, 24576, lazyServer("comfyui", 9216), server("llm", 10000))
	f.free(15576) // comfyui holds 9000
	f.warm("llm", 10000)
	f.advance(time.Hour)
	h := f.submit("comfyui")
	f.requireUnloads("comfyui")
	f.answered("comfyui")
	f.look(flushWait - time.Millisecond)
	f.requireWaiting(h)
	f.use(-9000)
	f.requireRunning(h)
	f.requireUnloads("comfyui")
	f.requireState("llm", Ready)
}

func TestK0_OthersAreEvictedSoonIfTheTargetHeldNothing(t *testing.T) {
	f := given(t, 24576, lazyServer("comfyui", 9216), server("llm", 10000))
	f.free(15576) // a game
	f.warm("llm", 10000)
	f.advance(time.Hour)
	h := f.submit("comfyui")
	f.answered("comfyui")
	f.look(flushWait)
	f.requireUnloads("comfyui", "llm")
	f.evicted("llm", 10000)
	f.requireRunning(h)
}

func TestK0_BothAreUnloadedIfOnlyBothMakeRoom(t *testing.T) {
	f := given(t, 24576, lazyServer("comfyui", 20000), server("llm", 10000))
	f.free(15576)
	f.warm("llm", 10000)
	f.advance(time.Hour)
	h := f.submit("comfyui")
	f.requireUnloads("comfyui")
	f.answered("comfyui")
	f.use(-9000)
	f.requireUnloads("comfyui", "llm")
	f.evicted("llm", 10000)
	f.requireRunning(h)
}

func TestK0_WorkFromBeforeTheRestartIsWaitedFor(t *testing.T) {
	f := given(t, 16384, lazyServer("comfyui", 9216, async))
	f.free(7168)
	f.works["comfyui"] = true
	h := f.submit("comfyui")
	f.advance(30 * time.Second)
	f.requireUnloads()
	f.requireWaiting(h)
	f.works["comfyui"] = false
	f.advance(busyPoll)
	f.requireUnloads("comfyui")
	f.answered("comfyui")
	f.use(-9000)
	f.requireRunning(h)
}

func TestK0_AFlushIsTakenBackWhenNobodyWaitsAnyMore(t *testing.T) {
	f := given(t, 16384, lazyServer("comfyui", 9216, async))
	f.free(7168)
	f.works["comfyui"] = true
	h := f.submit("comfyui")
	require.False(t, f.slot("comfyui").GateOpen)
	f.cancel(h)
	f.advance(time.Second)
	require.True(t, f.slot("comfyui").GateOpen)
	f.requireUnloads()
}

func TestK0_AFlushThatFailsIsTriedAgain(t *testing.T) {
	f := given(t, 16384, lazyServer("comfyui", 9216))
	f.free(7168)
	h := f.submit("comfyui")
	f.unloadFails("comfyui")
	f.requireUnloads("comfyui")
	f.requireWaiting(h)
	f.advance(time.Second)
	f.requireUnloads("comfyui", "comfyui")
	f.answered("comfyui")
	f.use(-9000)
	f.requireRunning(h)
}

func TestK0_AFlushThatNeverSucceedsRefusesInTime(t *testing.T) {
	f := given(t, 16384, lazyServer("comfyui", 9216))
	f.free(7168)
	h := f.submit("comfyui")
	for range 60 {
		if f.s.named["comfyui"].stop.flush {
			f.unloadFails("comfyui")
		}
		f.advance(time.Second)
	}
	r := f.requireRefused(h, VRAMExhausted)
	require.Contains(t, r.Message, "the server of comfyui may hold some of that, and does not unload: ")
	require.LessOrEqual(t, len(f.unloads), 5)
}

func TestK0_ATargetThatHeldNothingIsFlushedOnceAndRefusedAfterOutsiderWait(t *testing.T) {
	f := given(t, 16384, lazyServer("comfyui", 9216))
	f.free(7168) // somebody else's
	for range 3 {
		h := f.submit("comfyui")
		if len(f.unloads) == 1 && f.s.named["comfyui"].stop.flush {
			f.answered("comfyui")
		}
		f.look(10 * time.Second)
		f.requireRefused(h, VRAMExhausted)
	}
	f.requireUnloads("comfyui")
}

func TestK0_AServerAtAnotherAddressIsFlushedAnew(t *testing.T) {
	f := given(t, 16384, lazyServer("comfyui", 9216))
	f.warm("comfyui", 9000)
	f.step(Unload{Slot: "comfyui"})
	f.evicted("comfyui", 9000)
	f.reconfigure(func(c *Config) { c.Slots[0].Server = "elsewhere:8188" })
	f.probe("comfyui", NotTold)
	f.free(7168)
	f.submit("comfyui")
	f.requireUnloads("comfyui", "comfyui")
}

// Somebody who asks the server past the broker loads it as well as a start of Caddy beside it does.
func TestK0_AServerThatWasLoadedPastTheBrokerIsFlushedAgain(t *testing.T) {
	f := given(t, 16384, lazyServer("comfyui", 9216))
	f.use(500) // a desktop
	f.warm("comfyui", 9000)
	f.step(Unload{Slot: "comfyui"})
	f.evicted("comfyui", 9000)
	f.requireUnloads("comfyui")
	f.advance(time.Minute)
	f.use(8800) // by a client of its own port
	h := f.submit("comfyui")
	f.requireUnloads("comfyui", "comfyui")
	f.answered("comfyui")
	f.use(-8800)
	f.requireRunning(h)
}

func TestK0_EvictionObserveFlushesTheTargetAlone(t *testing.T) {
	f := given(t, 16384, lazyServer("comfyui", 9216), lazyServer("forge", 4000))
	f.reconfigure(func(c *Config) { c.ObserveEvictions = true })
	f.free(7168)
	h := f.submit("comfyui")
	f.requireUnloads("comfyui")
	f.answered("comfyui")
	f.look(time.Second)
	f.requireUnloads("comfyui")
	f.use(-9000)
	f.requireRunning(h)
}

func TestK0_ExplainSaysThatTheServersOwnMemoryComesFirst(t *testing.T) {
	f := given(t, 16384, lazyServer("comfyui", 9216), server("other", 1000))
	f.free(7168)
	e := f.s.Explain(f.now, "comfyui", 100)
	require.Equal(t, "waits", e.Outcome)
	require.Contains(t, e.Reason, "its own server may hold the rest")
	require.Equal(t, "comfyui", f.s.Choose(f.now, []string{"comfyui", "other"}, false))
	f.requireUnloads()
}

func TestK0_AnotherServerThatRefusesToUnloadIsNamed(t *testing.T) {
	f := given(t, 16384, lazyServer("forge", 9216), server("llm", 10000))
	f.free(7168)
	h := f.submit("llm")
	f.requireUnloads("forge")
	f.unloadFails("forge")
	f.look(10 * time.Second)
	require.Contains(t, f.requireRefused(h, VRAMExhausted).Message, "the server of forge may hold some of that, and does not unload: 500")
}

func TestK0_WhatWasFlushedHasTimeToComeBackAfterUnloadsThatBroughtNothing(t *testing.T) {
	f := given(t, 16384, lazyServer("forge", 9216), server("v", 7000), server("llm", 10000))
	f.reconfigure(func(c *Config) { c.MaxEvictions = 0 })
	f.warm("v", 7000)
	f.use(6000) // forge's, or somebody else's
	f.advance(time.Hour)
	h := f.submit("llm")
	f.requireUnloads("v")
	f.unloaded("v") // and keeps all its memory
	f.look(10 * time.Second)
	f.requireUnloads("v", "forge")
	f.answered("forge")
	f.look(f.cfg.OutsiderWait - time.Second)
	f.requireWaiting(h)
	f.look(2 * time.Second)
	require.Contains(t, f.requireRefused(h, VRAMExhausted).Message, "unloads did not bring the memory back")
}
