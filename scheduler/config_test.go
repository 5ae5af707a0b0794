package scheduler

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestABudgetThatEndsIsA504WithItsReason(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	a := f.submit("a")
	b := f.submitJob(Submit{Slot: "b", Priority: 100, Deadline: f.now.Add(time.Minute)})
	later := f.submitJob(Submit{Slot: "b", Priority: 100, Deadline: f.now.Add(2 * time.Minute)})
	never := f.submit("b")
	f.advance(time.Minute - 1)
	f.requireWaiting(b)
	f.advance(1)
	r := f.requireRefused(b, BudgetExceeded)
	require.Contains(t, r.Message, "1m0s")
	require.Contains(t, r.Message, "memory of a")
	f.requireWaiting(later, never)
	f.advance(time.Minute)
	f.requireRefused(later, BudgetExceeded)
	f.requireWaiting(never)
	f.requireRunning(a) // running time is another matter
}

func TestABudgetCountsTheLoadToo(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	h := f.submitJob(Submit{Slot: "a", Priority: 100, Deadline: f.now.Add(time.Minute)})
	f.advance(time.Minute)
	f.requireRefused(h, BudgetExceeded)
	f.requireState("a", Loading) // it goes on, so that a retry is warm
	f.loaded("a")
	f.requireRunning(f.submit("a"))
}

func TestAnAdmittedJobHasNoDeadline(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	h := f.submitJob(Submit{Slot: "a", Priority: 100, Deadline: f.now.Add(time.Minute)})
	f.loaded("a")
	f.advance(time.Hour)
	f.requireRunning(h)
}

func TestUnknownAndDisabledConsumersAreRefused(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("off", 1000, func(c *SlotConfig) { c.Disabled = true }))
	f.requireRefused(f.submit("nobody"), UnknownConsumer)
	f.requireRefused(f.submit("off"), NotRunning)
	require.True(t, f.slot("off").Disabled)
}

func TestAJobThatWantsToRunAtOnceOrNotAtAllLeavesNoTrace(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	before := f.s.Snapshot(f.now)
	for _, name := range []string{"b", "nobody"} {
		effects := f.step(Submit{Slot: name, IfFree: true})
		require.Equal(t, []Effect{{Kind: NotNow, Slot: name}}, effects)
	}
	require.Equal(t, before, f.s.Snapshot(f.now))
	effects := f.step(Submit{Slot: "a", IfFree: true})
	require.Equal(t, Admit, effects[0].Kind)
	require.Equal(t, NotNow, f.step(Submit{Slot: "a", IfFree: true})[0].Kind)
}

func TestLockedModeQueuesAndLocksAndNeverLoads(t *testing.T) {
	cfg := defaults()
	cfg.Mode, cfg.Slots = Locked, []SlotConfig{server("a", 10000), server("b", 10000)}
	f := givenConfig(t, cfg, 16384)
	f.probe("a", No)
	f.probe("b", No)
	a, b := f.submit("a"), f.submit("b")
	f.requireRunning(a)
	f.requireWaiting(b)
	f.step(Unload{Slot: "b"})
	f.probe("a", No)
	f.advance(time.Hour)
	f.release(a)
	f.requireRunning(b)
	f.requireLoads()
	f.requireUnloads()
	f.probeRefused("a")
	f.requireRefused(f.submit("a"), Unhealthy)
}

func TestPassthroughAdmitsEverything(t *testing.T) {
	cfg := defaults()
	cfg.Mode, cfg.Slots = Passthrough, []SlotConfig{server("a", 10000), server("b", 99999)}
	f := givenConfig(t, cfg, 16384)
	f.probeRefused("a")
	for range 5 {
		f.requireRunning(f.submit("a"), f.submit("b"))
	}
	f.requireLoads()
	f.requireUnloads()
}

func TestAConfigKeepsWhatIsKnownOfSlotsByTheirName(t *testing.T) {
	f := given(t, 32768, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	f.warm("b", 10000)
	running := f.submit("a")
	waits := f.submit("b")
	before := f.slot("a")
	f.advance(time.Minute)
	f.reconfigure(func(c *Config) {
		slices.Reverse(c.Slots)
		c.Slots[1].Concurrency = 2
	})
	after := f.slot("a")
	require.Equal(t, before, after)
	f.requireRunning(running)
	f.requireWaiting(waits)
	more := f.submit("a") // its new setting holds at once, but b is older by more than lock_overtake
	f.requireWaiting(more)
	f.release(running)
	f.requireRunning(waits)
	f.release(waits)
	f.requireRunning(more, f.submit("a"))
	require.Empty(t, f.dropped)
}

func TestTheClaimOfAnUnknownSlotFollowsTheConfig(t *testing.T) {
	f := untold(t)
	require.EqualValues(t, 10000, f.booking("a"))
	f.reconfigure(func(c *Config) { c.Slots[0].Claim = 4000 * gpu.MiB })
	require.EqualValues(t, 4000, f.booking("a"))
}

func TestARemovedSlotServesWhoWaitsThenUnloadsThenIsDropped(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	running := f.submit("a")
	waits := f.submit("a")
	f.reconfigure(func(c *Config) { c.Slots = c.Slots[1:] })
	require.True(t, f.slot("a").Gone)
	f.release(running)
	f.requireRunning(waits)
	f.requireUnloads()
	f.release(waits)
	f.requireUnloads("a")
	require.Contains(t, f.decided("unload", "a").Reason, "configuration")
	require.Empty(t, f.dropped)
	f.evicted("a", 10000)
	require.Equal(t, []string{"a"}, f.dropped)
	f.requireRefused(f.submit("a"), UnknownConsumer)
	require.Len(t, f.s.Snapshot(f.now).Slots, 1)
}

func TestARemovedSlotThatIsNotLoadedIsDroppedAtOnce(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.reconfigure(func(c *Config) { c.Slots = c.Slots[1:] })
	require.Equal(t, []string{"a"}, f.dropped)
}

func TestARemovedSlotThatCanNotBeUnloadedIsDroppedOnceNobodyUsesIt(t *testing.T) {
	f := given(t, 16384, server("a", 10000, func(c *SlotConfig) { c.CanUnload = false }), server("b", 10000))
	f.warm("a", 10000)
	h := f.submit("a")
	f.reconfigure(func(c *Config) { c.Slots = c.Slots[1:] })
	require.Empty(t, f.dropped)
	f.release(h)
	require.Equal(t, []string{"a"}, f.dropped)
}

func TestARemovedSlotThatLoadsEndsItsLoadFirst(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	h := f.submit("a")
	f.reconfigure(func(c *Config) { c.Slots = c.Slots[1:] })
	f.requireState("a", Loading)
	f.loaded("a")
	f.requireRunning(h)
	f.release(h)
	f.evicted("a", 10000)
	require.Equal(t, []string{"a"}, f.dropped)
}

func TestAReloadTakesNoUnloadBackThatIsAskedForByHand(t *testing.T) {
	f := given(t, 16384, server("a", 8000))
	f.warm("a", 8000)
	h := f.submit("a")
	f.step(Unload{Slot: "a"})
	f.reconfigure(func(c *Config) { c.Slots[0].Concurrency = 2 })
	require.False(t, f.slot("a").GateOpen)
	f.release(h)
	f.requireState("a", Stopping)
}

func TestASlotThatComesBackBeforeItWasUnloadedServesOn(t *testing.T) {
	f := given(t, 16384, server("a", 10000, asksBusy), server("b", 1000))
	f.warm("a", 10000)
	f.works["a"] = true
	all := f.cfg
	f.reconfigure(func(c *Config) { c.Slots = c.Slots[1:] })
	require.False(t, f.slot("a").GateOpen)
	f.configure(all) // the new configuration failed: the old one is back
	require.True(t, f.slot("a").GateOpen)
	f.requireRunning(f.submit("a"))
	f.requireUnloads()
}

func TestASlotThatIsMovedToAnotherGPUWhileItIsLoadedGoesThereWithItsNextLoad(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 10000), server("b", 10000, on(1))}
	f := givenConfig(t, cfg, 16384, 16384)
	f.probe("a", No)
	f.probe("b", No)
	f.warm("a", 10000)
	f.reconfigure(func(c *Config) { c.Slots[0].GPUs = []int{1} })
	require.Equal(t, 0, f.slot("a").Holds[0].GPU, "its memory is where it was loaded")
	f.step(Unload{Slot: "a"})
	f.evicted("a", 10000)
	f.requireState("a", Idle)
	f.submit("a")
	f.requireState("a", Loading)
	require.Equal(t, 1, f.slot("a").Holds[0].GPU)
	b := f.submit("b") // they share a GPU now
	f.requireWaiting(b)
	f.loaded("a")
	f.requireWaiting(b)
}

func TestAChangeOfModeAndBackFindsTheWorldAnew(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	a := f.submit("a")
	b := f.submit("b")
	f.requireWaiting(b)
	f.reconfigure(func(c *Config) { c.Mode = Locked })
	f.probe("a", Yes)
	f.probe("b", Yes)
	f.release(a)
	f.requireRunning(b) // it is taken for loaded
	f.release(b)
	f.reconfigure(func(c *Config) { c.Mode = Evicting })
	f.requireState("a", Unknown)
	f.probe("a", Yes)
	f.probe("b", No)
	f.requireState("a", Ready)
	require.EqualValues(t, 10000, f.booking("a"))
	f.requireRunning(f.submit("a"))
}

func TestTheQueueIsListedByPriorityThenAge(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	f.submit("a")
	f.submit("b")
	f.advance(time.Second)
	f.submit("a")
	f.submitJob(Submit{Slot: "a", Priority: 1})
	var order []string
	for _, w := range f.s.Snapshot(f.now).Queue {
		order = append(order, w.Slot)
	}
	require.Equal(t, []string{"a", "b", "a"}, order)
	require.Equal(t, 1, f.s.Snapshot(f.now).Queue[0].Priority)
	require.Equal(t, 3, f.s.Snapshot(f.now).Waiting)
}
