package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// edges is accounting §2 written down a second time, apart from the code.
var edges = map[[2]SlotState]bool{
	{Unknown, Ready}: true, {Unknown, Idle}: true,
	{Unknown, Loading}: true, {Idle, Loading}: true,
	{Idle, Ready}:    true,
	{Loading, Ready}: true, {Loading, Idle}: true,
	{Loading, Stopping}: true,
	{Ready, Stopping}:   true,
	{Unknown, Stopping}: true,
	{Ready, Idle}:       true,
	{Stopping, Idle}:    true,
	{Stopping, Ready}:   true, {Stopping, Unknown}: true,
}

func TestOnlyTheEdgesOfTheContractAreLegal(t *testing.T) {
	for from := Unknown; from <= Stopping; from++ {
		for to := Unknown; to <= Stopping; to++ {
			require.Equal(t, edges[[2]SlotState{from, to}], legal[[2]SlotState{from, to}], "%s to %s", from, to)
		}
	}
}

func TestAnIllegalEdgeIsPutOnRecord(t *testing.T) {
	f := given(t, 24576, server("a", 1000))
	f.s.effects = nil
	f.s.to(f.now, f.s.slots[0], Stopping)
	require.Len(t, f.s.effects, 1)
	require.Equal(t, "bug", f.s.effects[0].Decision.Kind)
	require.Contains(t, f.s.effects[0].Decision.Reason, "IDLE to STOPPING")
}

// Stories that lead to a state, in a world in which a and b don't fit together.
func bothIdle(t *testing.T) *fixture {
	return given(t, 16384, server("a", 10000), server("b", 10000))
}

func nothingTold(t *testing.T) *fixture {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 10000), server("b", 10000)}
	return givenConfig(t, cfg, 16384)
}

// untold is a world in which a server can't tell whether it is loaded, though it answers.
func untold(t *testing.T) *fixture {
	f := given(t, 16384, server("a", 10000, func(c *SlotConfig) { c.CanTell = false }), server("b", 10000))
	f.requireState("a", Unknown)
	return f
}

func aLoading(t *testing.T) *fixture {
	f := bothIdle(t)
	f.submit("a")
	f.requireState("a", Loading)
	return f
}

func aReady(t *testing.T) *fixture {
	f := bothIdle(t)
	f.warm("a", 10000)
	f.advance(time.Minute)
	return f
}

func aStopping(t *testing.T) *fixture {
	f := aReady(t)
	f.submit("b")
	f.requireState("a", Stopping)
	return f
}

func aStoppingFromUnknown(t *testing.T) *fixture {
	f := untold(t)
	f.free(6384) // it is loaded
	f.submit("b")
	f.requireState("a", Stopping)
	return f
}

func aAbandoned(t *testing.T) *fixture {
	f, _ := aAbandonedFor(t)
	return f
}

// aAbandonedFor returns the job for which it is, too.
func aAbandonedFor(t *testing.T) (*fixture, *handle) {
	f := bothIdle(t)
	h := f.submit("a")
	b := f.submit("b")
	f.cancel(h)
	f.advance(10*time.Second - 1)
	f.requireState("a", Loading)
	return f, b
}

// The unload of an abandoned load failed: it may go on at the server, which says "not loaded" until it is.
func TestALoadThatCouldNotBeAbandonedMayGoOnAsLongAsLoadsTake(t *testing.T) {
	f, b := aAbandonedFor(t)
	f.advance(1)
	f.unloadFails("a")
	f.requireState("a", Unknown)
	f.cancel(b) // else its memory is asked for once more
	ends := f.s.named["a"].loadAt.Add(2 * f.s.named["a"].loadTime())
	require.True(t, ends.After(f.now))
	f.probe("a", No)
	f.requireState("a", Unknown)
	f.advance(ends.Sub(f.now) - 1)
	asked := f.now
	f.advance(1)
	f.step(Probed{Slot: "a", Sent: asked, Outcome: ProbeAnswered, Loaded: No, Resident: -1})
	f.requireState("a", Unknown)
	f.probe("a", No)
	f.requireState("a", Idle)
}

// Whoever waits for its memory has it unloaded once more, which may fail, too.
func TestALoadThatCouldNotBeAbandonedTwiceMayStillGoOn(t *testing.T) {
	f, _ := aAbandonedFor(t)
	f.advance(1)
	f.unloadFails("a")
	f.requireState("a", Unknown)
	f.advance(time.Second)
	f.requireState("a", Stopping)
	f.unloadFails("a")
	f.probe("a", No)
	f.requireState("a", Unknown)
}

func TestALoadAtAnotherAddressIsNoLoadOfThisServer(t *testing.T) {
	f, b := aAbandonedFor(t)
	f.advance(1)
	f.unloadFails("a")
	f.cancel(b)
	f.reconfigure(func(c *Config) {
		for i := range c.Slots {
			if c.Slots[i].Name == "a" {
				c.Slots[i].Server = "another"
			}
		}
	})
	f.probe("a", No)
	f.requireState("a", Idle)
}

func TestALoadThatCouldNotBeAbandonedIsBelievedToHaveEnded(t *testing.T) {
	f := aAbandoned(t)
	f.advance(1)
	f.unloadFails("a")
	f.probe("a", Yes)
	f.requireState("a", Ready)
}

func TestEveryEdgeIsReached(t *testing.T) {
	reached := map[[2]SlotState]bool{}
	for _, c := range []struct {
		name     string
		from, to SlotState
		story    func(*testing.T) *fixture
		last     func(*fixture)
	}{
		{"a probe tells that it is loaded", Unknown, Ready, nothingTold, func(f *fixture) { f.probe("a", Yes) }},
		{"a probe tells that it is not loaded", Unknown, Idle, nothingTold, func(f *fixture) { f.probe("a", No) }},
		{"a probe is refused", Unknown, Idle, nothingTold, func(f *fixture) {
			f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeRefused, Detail: "connection refused"})
		}},
		{"a load of one that can't tell is decided", Unknown, Loading, untold, func(f *fixture) { f.submit("a") }},
		{"a load is decided", Idle, Loading, bothIdle, func(f *fixture) { f.submit("a") }},
		{"it is seen resident though we didn't load it", Idle, Ready, bothIdle, func(f *fixture) { f.probe("a", Yes) }},
		{"the load is done", Loading, Ready, aLoading, func(f *fixture) { f.loaded("a") }},
		{"the load failed", Loading, Idle, aLoading, func(f *fixture) { f.loadFails("a", "no such file") }},
		{"the load is abandoned", Loading, Stopping, aAbandoned, func(f *fixture) { f.advance(1) }},
		{"it is drained and the unload call goes out", Ready, Stopping, aReady, func(f *fixture) { f.submit("b") }},
		{"it is unloaded by hand", Ready, Stopping, aReady, func(f *fixture) { f.step(Unload{Slot: "a"}) }},
		{"one of unknown residency makes room", Unknown, Stopping, func(t *testing.T) *fixture { f := untold(t); f.free(6384); return f }, func(f *fixture) { f.submit("b") }},
		{"it crashed", Ready, Idle, aReady, func(f *fixture) {
			f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeRefused, Detail: "connection refused"})
		}},
		{"it unloaded by itself", Ready, Idle, aReady, func(f *fixture) { f.probe("a", No) }},
		{"it is gone and its memory is back", Stopping, Idle, aStopping, func(f *fixture) {
			f.cards[0].Free = 16384 * gpu.MiB
			f.unloaded("a")
			f.requireState("a", Stopping)
			f.sample()
		}},
		{"its unload failed", Stopping, Ready, aStopping, func(f *fixture) { f.unloadFails("a") }},
		{"its unload failed, and it came from UNKNOWN", Stopping, Unknown, aStoppingFromUnknown, func(f *fixture) { f.unloadFails("a") }},
		{"the unload of an abandoned load failed", Stopping, Unknown, func(t *testing.T) *fixture { f := aAbandoned(t); f.advance(1); return f }, func(f *fixture) { f.unloadFails("a") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := c.story(t)
			f.requireState("a", c.from)
			c.last(f)
			f.requireState("a", c.to)
		})
		reached[[2]SlotState{c.from, c.to}] = true
	}
	require.Equal(t, edges, reached)
}

func TestASlotStartsUnknownUnlessItIsLazy(t *testing.T) {
	for _, c := range []struct {
		name string
		slot SlotConfig
		want SlotState
	}{
		{"every route", server("a", 1000), Unknown},
		{"an unload route only", lazyServer("a", 1000), Idle},
		{"lazy, but it tells its residency", lazyServer("a", 1000, func(c *SlotConfig) { c.CanTell = true }), Unknown},
		{"no route at all", server("a", 1000, func(c *SlotConfig) { c.CanLoad, c.CanUnload, c.CanTell = false, false, false }), Unknown},
		{"load and unload, without a residency probe", server("a", 1000, func(c *SlotConfig) { c.CanTell = false }), Unknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := defaults()
			cfg.Slots = []SlotConfig{c.slot}
			f := givenConfig(t, cfg, 24576)
			f.requireState("a", c.want)
			f.reconfigure(func(cfg *Config) { cfg.Mode = Locked })
			f.requireState("a", Ready)
		})
	}
}

func TestALazySlotLoadsInTheStepThatAdmitsItsFirstJob(t *testing.T) {
	f := given(t, 24576, lazyServer("a", 13312, async), server("b", 2000), server("c", 2000))
	f.warm("c", 2000)
	h := f.submit("a")
	f.requireRunning(h)
	f.requireState("a", Ready)
	require.EqualValues(t, 13312, f.booking("a"))
	f.requireLoads("c")

	b, c := f.submit("b"), f.submitJob(Submit{Slot: "c", Priority: 1})
	f.requireState("b", Idle) // the first job is a transition
	f.requireWaiting(b, c)    // and it has the lock
	f.works["a"] = true
	f.releaseAs(h, Accepted)
	f.advance(time.Minute)
	f.requireState("b", Idle) // its work goes on at the server
	f.works["a"] = false
	f.advance(busyPoll)
	f.requireRunning(c)
	f.requireState("b", Idle) // what a took was not looked at yet
	f.sample()
	f.requireState("b", Loading)
}

func TestAGateClosedForATargetReopensWhenItsLastWaiterLeaves(t *testing.T) {
	f := bothIdle(t)
	f.warm("a", 10000)
	a1 := f.submit("a")
	f.advance(time.Second)
	b1, b2 := f.submit("b"), f.submit("b")
	f.advance(10 * time.Minute) // B of b is 300 s: a's next job stands for now
	require.False(t, f.slot("a").GateOpen)
	require.Equal(t, "b", f.slot("a").DrainFor)
	a2 := f.submit("a")
	f.requireWaiting(a2, b1, b2)
	f.cancel(b1)
	require.False(t, f.slot("a").GateOpen)
	f.cancel(b2)
	require.True(t, f.slot("a").GateOpen)
	f.release(a1)
	f.requireRunning(a2)
	f.requireUnloads()
}

func TestAGateReopensAfterDrainTimeout(t *testing.T) {
	f := bothIdle(t)
	f.warm("a", 10000)
	a1 := f.submit("a")
	f.advance(time.Second)
	b := f.submit("b")
	f.advance(300 * time.Second)
	require.False(t, f.slot("a").GateOpen)
	f.advance(10*time.Minute - 1)
	require.False(t, f.slot("a").GateOpen)
	f.advance(1)
	require.True(t, f.slot("a").GateOpen)
	f.requireWaiting(b)
	require.Contains(t, f.decided("reopen", "a").Reason, "drain_timeout")
	f.release(a1)
	a2 := f.submit("a")
	f.requireRunning(a2) // it serves again before it is asked to go once more
	f.advance(2 * time.Minute)
	f.release(a2)
	f.advance(time.Minute)
	f.requireUnloads("a")
}

func TestAGateClosedByHandReopensAfterDrainTimeoutToo(t *testing.T) {
	f := bothIdle(t)
	f.warm("a", 10000)
	f.submit("a")
	f.step(Unload{Slot: "a"})
	f.advance(10*time.Minute - 1)
	require.False(t, f.slot("a").GateOpen)
	f.advance(1)
	require.True(t, f.slot("a").GateOpen)
}

func TestTheServersWordThatItIsIdleEndsADrain(t *testing.T) {
	f := given(t, 16384, server("a", 10000, asksBusy), server("b", 10000))
	f.warm("a", 10000)
	f.advance(time.Minute)
	f.works["a"] = true // somebody works there past the broker
	f.submit("b")
	f.advance(30 * time.Second)
	f.requireUnloads()
	f.works["a"] = false
	f.advance(250 * time.Millisecond)
	f.requireUnloads("a")
}

func TestAnAnswerFromBeforeTheDrainDoesNotEndIt(t *testing.T) {
	f := given(t, 16384, server("a", 10000, asksBusy), server("b", 10000))
	f.warm("a", 10000)
	f.advance(time.Minute)
	sent := f.now
	f.advance(time.Second)
	f.works["a"] = true
	f.submit("b")
	f.step(BusyAnswer{Slot: "a", Sent: sent})
	f.requireUnloads()
}

func TestAProbeSentBeforeTheLastChangeOfStateIsIgnored(t *testing.T) {
	f := aLoading(t)
	sent := f.now
	f.advance(5 * time.Second)
	f.probe("a", No) // while it loads, nothing that it says counts
	f.requireState("a", Loading)
	f.loaded("a")
	f.step(Probed{Slot: "a", Sent: sent, Outcome: ProbeAnswered, Loaded: No})
	f.step(Probed{Slot: "a", Sent: sent, Outcome: ProbeRefused, Detail: "connection refused"})
	f.requireState("a", Ready)
	require.Equal(t, "healthy", f.slot("a").Health)

	f = aStopping(t)
	sent = f.now
	f.advance(time.Second)
	f.probe("a", Yes)
	f.evicted("a", 10000)
	f.step(Probed{Slot: "a", Sent: sent, Outcome: ProbeAnswered, Loaded: Yes})
	f.requireState("a", Idle)
	f.probe("a", Yes)
	f.requireState("a", Ready) // but the newer word wins
}

func TestANotLoadedFromBeforeTheLastJobEndedIsIgnored(t *testing.T) {
	f := aReady(t)
	sent := f.now // it had unloaded itself …
	h := f.submit("a")
	f.advance(time.Second)
	f.release(h) // … and this job has loaded it again
	f.step(Probed{Slot: "a", Sent: sent, Outcome: ProbeAnswered, Loaded: No})
	f.requireState("a", Ready)
}

func TestTheWordOfALazyServerDuringItsFirstJobIsIgnored(t *testing.T) {
	f := given(t, 24576, lazyServer("a", 10000, func(c *SlotConfig) { c.CanTell = true }))
	h := f.submit("a")
	f.advance(time.Second)
	f.probe("a", No) // it is still loading
	f.requireState("a", Ready)
	sent := f.now
	f.advance(time.Second)
	f.release(h)
	f.step(Probed{Slot: "a", Sent: sent, Outcome: ProbeAnswered, Loaded: No})
	f.requireState("a", Ready)
	f.probe("a", No)
	f.requireState("a", Idle)
}

func TestAStaleLoadDoneIsIgnored(t *testing.T) {
	f := aAbandoned(t)
	old := f.epochs["a"]
	f.advance(1)
	f.requireState("a", Stopping)
	f.step(LoadDone{Slot: "a", Epoch: old})
	f.requireState("a", Stopping)
	f.unloaded("a")
	f.sample()
	f.requireState("a", Idle)
	f.requireState("b", Loading)
	f.step(LoadDone{Slot: "a", Epoch: old})
	f.requireState("a", Idle)

	f = aLoading(t)
	old = f.epochs["a"]
	f.loadFails("a", "no such file")
	again := f.submit("a")
	f.advance(time.Second)
	f.requireState("a", Loading)
	f.step(LoadDone{Slot: "a", Epoch: old})
	f.requireState("a", Loading)
	f.requireWaiting(again)
}

func TestAStaleUnloadDoneIsIgnored(t *testing.T) {
	f := aStopping(t)
	old := f.epochs["a"]
	f.unloadFails("a")
	f.requireState("a", Ready)
	f.step(UnloadDone{Slot: "a", Epoch: old, Confirmed: true})
	f.requireState("a", Ready)
	f.advance(2 * time.Second) // it is tried again
	f.requireState("a", Stopping)
	f.step(UnloadDone{Slot: "a", Epoch: old, Confirmed: true})
	f.free(16384)
	f.requireState("a", Stopping)
	f.unloaded("a")
	f.requireState("a", Idle)
}
