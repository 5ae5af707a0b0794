package scheduler

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestFC03_WhatCanNeverFitIsRefusedAtOnceAndNothingIsUnloaded(t *testing.T) {
	for _, c := range []struct {
		name    string
		claim   gpu.Bytes
		reserve gpu.Bytes
		pinned  gpu.Bytes
		fits    bool
	}{
		{"the whole card but for the cushion", 16384 - 256, 0, 0, true},
		{"one MiB more", 16384 - 256 + 1, 0, 0, false},
		{"a reserve", 16384 - 256 - 1024, 1024, 0, true},
		{"one MiB into the reserve", 16384 - 256 - 1024 + 1, 1024, 0, false},
		{"beside a pinned one", 16384 - 256 - 4000, 0, 4000, true},
		{"one MiB too much beside a pinned one", 16384 - 256 - 4000 + 1, 0, 4000, false},
		{"both", 16384 - 256 - 4000 - 1024 + 1, 1024, 4000, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			slots := []SlotConfig{server("big", c.claim), server("small", 2000)}
			if c.pinned > 0 {
				slots = append(slots, server("fixed", c.pinned, pinned))
			}
			f := given(t, 16384, slots...)
			f.reconfigure(func(cfg *Config) { cfg.Reserve = c.reserve * gpu.MiB })
			if c.pinned > 0 {
				f.warm("fixed", c.pinned)
			}
			f.warm("small", 2000)
			f.advance(time.Hour)
			h := f.submit("big")
			if c.fits {
				f.requireWaiting(h)
				f.requireUnloads("small")
				return
			}
			r := f.requireRefused(h, NeverFits)
			require.Zero(t, r.RetryAfter)
			require.Equal(t, (c.claim+256)*gpu.MiB, r.Detail.Need)
			require.Contains(t, r.Message, `"big" can never fit`)
			require.Equal(t, c.reserve > 0, strings.Contains(r.Message, fmt.Sprintf(", less %s reserve", c.reserve*gpu.MiB)), r.Message)
			require.Equal(t, c.pinned > 0, strings.Contains(r.Message, fmt.Sprintf(", less %s of pinned consumers", c.pinned*gpu.MiB)), r.Message)
			f.advance(time.Hour)
			f.requireUnloads()
			f.requireState("small", Ready)
		})
	}
}

// What a pinned one was seen to take may change, or have been another's.
func TestWhatWasLearntOfAPinnedOneMakesNothingImpossible(t *testing.T) {
	f := given(t, 16384, server("fixed", 4000, pinned), server("big", 10000))
	f.warm("fixed", 9000)
	f.advance(time.Minute)
	f.step(Unload{Slot: "fixed"})
	f.evicted("fixed", 9000)
	f.advance(time.Minute)
	f.unloads = nil
	f.warm("fixed", 9000)
	require.EqualValues(t, 9000, f.booking("fixed"))
	h := f.submit("big")
	f.requireWaiting(h)
	f.advance(time.Hour)
	f.requireUnloads()
	require.NotZero(t, f.requireRefused(h, VRAMExhausted).RetryAfter)
}

func TestARefusalSaysWhenToTryAgain(t *testing.T) {
	refused := func(change func(f *fixture), slot string) *Refusal {
		t.Helper()
		f := given(t, 16384, server("a", 1000), server("off", 1000, func(c *SlotConfig) { c.Disabled = true }), server("elsewhere", 1000, on(3)), server("large", 20000), server("full", 16000))
		change(f)
		h := f.submitJob(Submit{Slot: slot, Priority: 100, Deadline: f.now.Add(time.Minute)})
		f.advance(time.Minute)
		require.NotNil(t, h.refusal, slot)
		return h.refusal
	}
	as := func(*fixture) {}
	for _, c := range []struct {
		change func(f *fixture)
		slot   string
		code   Code
		want   time.Duration
	}{
		{as, "nobody", UnknownConsumer, 0},
		{as, "off", NotRunning, time.Minute},
		{as, "elsewhere", GPULost, 30 * time.Second},
		{as, "large", NeverFits, 0},
		{func(f *fixture) { f.step(Drain{}) }, "a", Draining, 5 * time.Second},
		{func(f *fixture) { f.step(Drain{Final: true}) }, "a", Draining, 5 * time.Second},
		{func(f *fixture) { f.step(Drain{Slot: "a"}) }, "a", Draining, 30 * time.Second},
		{func(f *fixture) { f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeWrong, Detail: "status 500"}) }, "a", Unhealthy, 5 * time.Second},
		{func(f *fixture) { f.cards[0].Lost = true; f.sample() }, "a", GPULost, 30 * time.Second},
		{func(f *fixture) { f.reconfigure(func(c *Config) { c.MaxQueue = 0 }) }, "a", QueueFull, 5 * time.Second},
		{func(f *fixture) { f.use(8000) }, "full", VRAMExhausted, 10 * time.Second},
		{as, "a", BudgetExceeded, 0}, // its load does not end
	} {
		r := refused(c.change, c.slot)
		require.Equal(t, c.code, r.Code, c.slot)
		require.Equal(t, c.want, r.RetryAfter, "%s of %s", c.code, c.slot)
	}
}

func TestAPinnedSlotThatIsNotLoadedLeavesRoom(t *testing.T) {
	f := given(t, 16384, server("big", 16000), server("fixed", 4000, pinned))
	f.submit("big")
	f.requireLoads("big")
}

func TestTheCushionIsLargerOnUnifiedMemoryAndCanBeSet(t *testing.T) {
	f := given(t, 16384, server("a", 12289))
	f.cards[0].Unified = true
	f.sample()
	f.requireRefused(f.submit("a"), NeverFits)
	f.reconfigure(func(c *Config) { c.Slots[0].Claim = 12288 * gpu.MiB })
	f.submit("a")
	f.requireLoads("a")

	f = given(t, 16384, server("a", 16384))
	none := gpu.Bytes(0)
	f.requireRefused(f.submit("a"), NeverFits)
	f.reconfigure(func(c *Config) { c.Cushion = &none })
	f.submit("a")
	f.requireLoads("a")
}

func TestWhatFitsOnceOthersAreGoneWaitsForItsTurn(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	a := f.submit("a")
	f.advance(time.Second)
	b := f.submit("b")
	f.requireWaiting(b)
	f.requireUnloads()
	f.advance(9 * time.Minute)
	f.requireWaiting(b) // whatever a does, it can go some day
	f.release(a)
	f.requireUnloads("a")
	f.evicted("a", 10000)
	f.loaded("b")
	f.requireRunning(b)
}

func TestFC18_MemoryOfOutsidersIsWaitedForAndThenNamed(t *testing.T) {
	f := given(t, 81920, server("a", 10000))
	f.cards[0].Outsiders = []string{"python3 (4711)"}
	f.free(2048)
	h := f.submit("a")
	f.advance(10*time.Second - 1)
	f.requireWaiting(h)
	f.requireLoads()
	f.advance(1)
	r := f.requireRefused(h, VRAMExhausted)
	require.Contains(t, r.Message, "python3 (4711)")
	require.Equal(t, 10256*gpu.MiB, r.Detail.Need)
	require.Equal(t, map[int]gpu.Bytes{0: 2048 * gpu.MiB}, r.Detail.Free)
	require.Equal(t, []Holder{{Name: "outsiders", Bytes: (81920 - 2048) * gpu.MiB, Protected: "python3 (4711)"}}, r.Detail.Holders)
	require.Positive(t, r.RetryAfter)
	f.requireLoads()
}

func TestOutsidersWhoGoInTimeCostNothingButTheWait(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	f.free(2000)
	h := f.submit("a")
	f.advance(9 * time.Second)
	f.free(16384)
	f.requireLoads("a")
	f.loaded("a")
	f.requireRunning(h)
}

func TestTheWaitForOutsidersRunsOnEnd(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 8000))
	f.warm("b", 8000)
	b := f.submit("b")
	f.free(2000) // 6384 are held by outsiders
	h := f.submit("a")
	f.advance(9 * time.Second)
	f.free(8384) // they go: b alone is in the way, and it is busy
	f.advance(9 * time.Second)
	f.free(2000) // they come back
	f.advance(10*time.Second - 1)
	f.requireWaiting(h)
	f.advance(1)
	f.requireRefused(h, VRAMExhausted)
	f.requireRunning(b)
}

func TestTheNextRequestForABlockedSlotGetsAWaitOfItsOwn(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	f.free(2000)
	h := f.submit("a")
	f.advance(5 * time.Second)
	f.cancel(h)
	f.advance(time.Hour)
	h = f.submit("a")
	f.advance(10*time.Second - 1)
	f.requireWaiting(h)
	f.advance(1)
	f.requireRefused(h, VRAMExhausted)
}

func TestProtectedSlotsAreWaitedForAndThenTheirProtectionIsNamed(t *testing.T) {
	for _, c := range []struct {
		name   string
		a, b   func(*SlotConfig)
		naming string
	}{
		{"can_coexist_with", coexists("b"), func(*SlotConfig) {}, "can_coexist_with of a"},
		{"vram_managed", func(*SlotConfig) {}, vramManaged, "vram_managed"},
		{"no_evict", func(*SlotConfig) {}, noEvict, "no_evict"},
		{"no unload route", func(*SlotConfig) {}, func(c *SlotConfig) { c.CanUnload = false }, "no unload route"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := given(t, 16384, server("a", 10000, c.a), server("b", 10000, c.b))
			f.warm("b", 10000)
			f.advance(time.Hour)
			h := f.submit("a")
			f.advance(10*time.Second - 1)
			f.requireWaiting(h)
			f.advance(1)
			r := f.requireRefused(h, VRAMExhausted)
			require.Contains(t, r.Message, "b holds 9.77GiB and is protected by "+c.naming)
			require.Equal(t, []Holder{{Name: "b", State: "READY", Bytes: 10000 * gpu.MiB, Protected: c.naming}}, r.Detail.Holders)
			f.requireUnloads()
			f.requireState("b", Ready)
		})
	}
}

func TestCanCoexistWithIsDirectional(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000, coexists("a")))
	f.warm("b", 10000)
	f.advance(time.Hour)
	f.submit("a")
	f.requireUnloads("b")
}

// full is a card that eight idle slots of 2000 MiB fill, so that t needs one of them gone.
func full(t *testing.T, set ...func(*SlotConfig)) *fixture {
	slots := []SlotConfig{server("t", 1500, set...)}
	for i := range 8 {
		slots = append(slots, server(fmt.Sprint("v", i), 2000))
	}
	f := given(t, 16384, slots...)
	for i := range 8 {
		f.warm(fmt.Sprint("v", i), 2000)
		f.advance(time.Second)
	}
	return f
}

func TestUnloadsThatBringNothingBackEndInARefusalThatTellsOfEach(t *testing.T) {
	f := full(t)
	h := f.submit("t")
	for i := range 6 { // the plan's one, and max_evictions 5 beyond it
		v := fmt.Sprint("v", i)
		f.requireWaiting(h)
		f.requireState(v, Stopping)
		f.unloaded(v)
		f.advance(10 * time.Second)
		f.requireState(v, Idle)
		require.EqualValues(t, 2000, f.booking(v), "what doesn't come back stays booked to %s", v)
	}
	r := f.requireRefused(h, VRAMExhausted)
	require.Len(t, r.Detail.Unloads, 6)
	for i, line := range r.Detail.Unloads {
		require.Equal(t, fmt.Sprintf("v%d: gave back 0B of 1.95GiB", i), line)
		require.Contains(t, r.Message, line)
	}
	f.requireState("v6", Ready)
	f.requireState("v7", Ready)
	require.Zero(t, f.s.Snapshot(f.now).GPUs[0].Outsiders)
	require.EqualValues(t, 6, f.s.Snapshot(f.now).Counts.Evictions)
}

func TestMaxEvictionsIsAKnob(t *testing.T) {
	f := full(t)
	f.reconfigure(func(c *Config) { c.MaxEvictions = 0 })
	h := f.submit("t")
	f.unloaded("v0")
	f.advance(10 * time.Second)
	f.requireRefused(h, VRAMExhausted)
	f.requireUnloads("v0")
}

func TestTheAttemptsCountBeyondThePlan(t *testing.T) {
	f := full(t)
	f.reconfigure(func(c *Config) { c.MaxEvictions, c.Slots[0].Claim = 1, 5500*gpu.MiB }) // it needs three of them gone
	h := f.submit("t")
	for i := range 4 {
		f.requireWaiting(h)
		f.unloaded(fmt.Sprint("v", i))
		f.advance(10 * time.Second)
	}
	f.requireRefused(h, VRAMExhausted)
	f.requireUnloads("v0", "v1", "v2", "v3")
}

func TestAVictimThatGaveNothingIsBelievedNoMore(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	f.advance(time.Minute)
	h := f.submit("b")
	f.unloaded("a")
	f.advance(10 * time.Second)
	f.requireState("a", Idle)
	f.advance(10 * time.Second)
	r := f.requireRefused(h, VRAMExhausted)
	require.Contains(t, r.Message, "a has not given back 9.77GiB")
	f.requireUnloads("a")
	f.requireLoads("a")
}

// haunted is a card on which a lazy server, taken for IDLE, holds 13000 MiB from before the broker came.
func haunted(t *testing.T, set ...func(*SlotConfig)) *fixture {
	f := given(t, 16384, lazyServer("comfyui", 13312, set...), server("mvoice", 2868), server("tiny", 500))
	f.free(2772)
	f.requireState("comfyui", Idle)
	return f
}

func TestALazySlotThatWasNeverCalledIsUnloadedOnceBeforeARefusal(t *testing.T) {
	f := haunted(t)
	h := f.submit("mvoice")
	f.requireUnloads("comfyui")
	f.requireState("comfyui", Idle)
	require.NotContains(t, f.decided("unload", "comfyui").Reason, "by hand")
	c := f.submit("tiny")
	f.requireWaiting(c, h) // the call is a transition
	f.requireLoads()
	f.cancel(c)
	f.answered("comfyui")
	f.advance(5 * time.Second)
	f.requireWaiting(h)
	f.free(16084) // its memory comes back
	f.loaded("mvoice")
	f.requireRunning(h)
	require.Zero(t, f.s.Snapshot(f.now).Counts.Evictions)
}

func TestALazySlotThatWorksForSomebodyElseIsNotUnloadedBeforeItIsDone(t *testing.T) {
	f := haunted(t, asksBusy)
	f.works["comfyui"] = true
	h := f.submit("mvoice")
	f.advance(5 * time.Second)
	f.requireUnloads()
	f.works["comfyui"] = false
	f.advance(busyPoll)
	f.requireUnloads("comfyui")
	f.answered("comfyui")
	f.free(16084)
	f.loaded("mvoice")
	f.requireRunning(h)
}

func TestALazySlotThatIsWantedItselfAndFitsIsNotUnloaded(t *testing.T) {
	f := haunted(t, asksBusy, func(c *SlotConfig) { c.Claim = 2000 * gpu.MiB })
	f.works["comfyui"] = true
	h := f.submit("mvoice")
	f.advance(time.Second)
	require.False(t, f.slot("comfyui").GateOpen)
	f.requireRunning(f.submit("comfyui"))
	f.requireUnloads()
	f.cancel(h)
}

func TestK0_ALazySlotThatIsWantedItselfIsFlushedForItself(t *testing.T) {
	f := haunted(t, asksBusy)
	f.works["comfyui"] = true
	f.submit("mvoice")
	f.advance(time.Second)
	own := f.submit("comfyui")
	require.False(t, f.slot("comfyui").GateOpen)
	f.works["comfyui"] = false
	f.advance(busyPoll)
	f.requireUnloads("comfyui")
	f.answered("comfyui")
	f.free(15772)
	f.loaded("mvoice") // it came first
	f.release(f.lastJob("mvoice"))
	f.advance(time.Minute)
	f.evicted("mvoice", 0)
	f.requireRunning(own)
}

func TestALazySlotIsUnloadedOnceOnly(t *testing.T) {
	f := haunted(t)
	h := f.submit("mvoice")
	f.advance(3 * time.Second)
	f.answered("comfyui")
	f.advance(10*time.Second - 1)
	f.requireWaiting(h)
	f.advance(1)
	f.requireRefused(h, VRAMExhausted)
	h = f.submit("mvoice")
	f.advance(10 * time.Second)
	f.requireRefused(h, VRAMExhausted)
	f.requireUnloads("comfyui")
}

func TestAFlushThatFailsIsNoReasonToWaitForEver(t *testing.T) {
	f := haunted(t)
	h := f.submit("mvoice")
	f.unloadFails("comfyui")
	f.requireState("comfyui", Idle)
	f.advance(10 * time.Second)
	f.requireRefused(h, VRAMExhausted)
	f.requireUnloads("comfyui")
}

func TestNoLazySlotIsFlushedThatIsProtectedOrWasServedByUs(t *testing.T) {
	f := haunted(t, pinned)
	h := f.submit("mvoice")
	f.advance(10 * time.Second)
	f.requireRefused(h, VRAMExhausted)
	f.requireUnloads()

	f = given(t, 16384, lazyServer("comfyui", 13312), server("mvoice", 2868))
	f.warm("comfyui", 13312)
	f.advance(time.Minute)
	h = f.submit("mvoice")
	f.evicted("comfyui", 13312)
	f.free(2772) // now somebody else is there
	f.loadRunsOut("mvoice")
	f.requireRefused(h, LoadFailed)
	f.advance(time.Minute)
	h = f.submit("mvoice")
	f.advance(10 * time.Second)
	f.requireRefused(h, VRAMExhausted)
	f.requireUnloads("comfyui")
}

func TestLazySlotsAreFlushedBeforeUnloadsAreGivenUp(t *testing.T) {
	f := given(t, 16384, server("t", 1500), server("v", 2000), server("w", 2000), lazyServer("comfyui", 4000))
	f.reconfigure(func(c *Config) { c.MaxEvictions = 0 })
	f.warm("v", 2000)
	f.warm("w", 2000)
	f.free(200) // comfyui holds the rest
	f.advance(time.Minute)
	h := f.submit("t")
	f.requireUnloads("v")
	f.unloaded("v")
	f.advance(10 * time.Second)
	f.requireUnloads("v", "comfyui")
	f.answered("comfyui")
	f.free(4200)
	f.loaded("t")
	f.requireRunning(h)
}

func TestNothingIsUnloadedIfAllTogetherAreNotEnough(t *testing.T) {
	f := given(t, 16384, server("t", 12000), server("v", 3000), server("w", 3000))
	f.warm("v", 3000)
	f.warm("w", 3000)
	f.use(6000) // an outsider
	f.advance(time.Minute)
	h := f.submit("t")
	f.requireUnloads()
	f.advance(10 * time.Second)
	f.requireRefused(h, VRAMExhausted)
	f.requireUnloads()
	f.requireState("v", Ready)
	f.requireState("w", Ready)
}

func TestARefusalByOneSlotsMemoryDoesNotTouchOthers(t *testing.T) {
	f := given(t, 16384, server("t", 12000), server("v", 3000))
	f.free(8000)
	h := f.submit("t")
	v := f.submit("v")
	f.requireLoads("v")
	f.loaded("v")
	f.requireRunning(v)
	f.advance(10 * time.Second)
	f.requireRefused(h, VRAMExhausted)
	f.requireRunning(v)
}

func TestReasonsForWaitingNameWhoIsInTheWay(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	f.submit("a")
	f.submit("b")
	require.Contains(t, f.slot("b").Why, "memory of a")
	q := f.s.Snapshot(f.now).Queue
	require.Equal(t, "b", q[0].Slot)
	require.True(t, slices.ContainsFunc(q, func(w WaiterView) bool { return strings.Contains(w.Why, "memory of a") }))
}
