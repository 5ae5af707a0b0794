package scheduler

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Explain (spec §9.2): what would happen if a request came now, and nothing happens.

// explained checks an explanation, and that nothing has happened.
func (f *fixture) explained(slot string, priority int, outcome, reason string) Explanation {
	f.t.Helper()
	before := f.dump()
	e := f.s.Explain(f.now, slot, priority)
	require.Equal(f.t, before, f.dump(), "to explain changes nothing")
	require.Equal(f.t, slot, e.Slot)
	require.Equal(f.t, priority, e.Priority)
	require.Equal(f.t, outcome, e.Outcome, "%+v", e)
	require.Contains(f.t, e.Reason, reason)
	require.Equal(f.t, outcome == "refused", e.Code != "", "%+v", e)
	return e
}

func TestExplainSaysWhatWouldRunLoadOrEvict(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, wide(2)), server("fits", 5000), server("t", 10000), inTheSky("sky"))
	e := f.explained("fits", 100, "loads", "it needs")
	require.Equal(t, 5256*gpu.MiB, e.Need)
	require.Equal(t, 16384*gpu.MiB, e.Avail)
	require.EqualValues(t, 20, e.Estimate)

	f.warm("v", 10000)
	require.Zero(t, f.explained("v", 100, "runs", "it is loaded").Estimate)
	require.Zero(t, f.explained("sky", 100, "runs", "").Estimate)
	require.Empty(t, f.explained("fits", 100, "loads", "").Victims)
	e = f.explained("t", 100, "waits", "until it may take the memory of v")
	require.Equal(t, []string{"v"}, e.Victims)
	require.EqualValues(t, 320, e.Estimate, "the bound, and the load")
	f.advance(5 * time.Second) // the hold is over
	e = f.explained("t", 100, "evicts", "v would make way at once")
	require.Equal(t, []string{"v"}, e.Victims)
	require.Equal(t, 6384*gpu.MiB, e.Avail)
	f.requireUnloads()
	f.requireLoads()
	f.submit("t")
	f.requireUnloads("v")
}

func TestExplainSaysWhyARequestWouldWait(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000), lazyServer("w", 5000), server("t", 10000))
	f.warm("v", 10000)
	f.warm("w", 5000)
	h := f.submit("v")
	f.explained("v", 100, "waits", "it runs 1 requests, and its concurrency is 1")
	f.explained("w", 100, "waits", "another computes on its GPU")
	f.submit("v")
	f.ask("v", 50)
	f.explained("v", 100, "waits", "2 requests for it are before this one")
	f.explained("v", 70, "waits", "1 requests for it are before this one")
	f.explained("v", 10, "waits", "its concurrency is 1")

	f.ask("t", 1)
	f.advance(301 * time.Second)
	require.False(t, f.slot("v").GateOpen)
	f.explained("v", 100, "waits", "it is about to be unloaded for t")
	f.release(h)
	f.requireState("v", Stopping)
	f.explained("v", 100, "waits", "it is being unloaded")
	f.explained("t", 100, "waits", "it waits for v to make room")
	f.evicted("v", 10000)
	f.requireState("t", Loading)
	f.explained("t", 100, "waits", "it is being loaded")
	f.explained("v", 100, "waits", "it waits for the load or unload of t")
	f.loadFails("t", "exit status 1")
	f.explained("t", 100, "waits", "it cools down after a failed load until")

	f.lend()
	f.explained("t", 100, "waits", "its GPU is lent until")
	f.explained("w", 100, "waits", "its GPU is lent until")
}

func TestExplainSaysWhyARequestWouldBeRefused(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, noEvict), server("t", 10000), server("huge", 20000), server("off", 1, func(c *SlotConfig) { c.Disabled = true }), server("lost", 1, on(1)), server("sick", 1))
	f.warm("v", 10000)
	f.step(Probed{Slot: "sick", Sent: f.now, Outcome: ProbeWrong, Detail: "status 500"})
	for _, c := range []struct {
		slot   string
		code   Code
		reason string
	}{
		{"nobody", UnknownConsumer, "there is no consumer"},
		{"off", NotRunning, "switched off"},
		{"huge", NeverFits, "can never fit"},
		{"lost", GPULost, "there is GPU 0 only"},
		{"sick", Unhealthy, "status 500"},
		{"t", VRAMExhausted, "v holds 9.77GiB and is protected by no_evict; it would be refused after 10s"},
	} {
		require.Equal(t, c.code, f.explained(c.slot, 100, "refused", c.reason).Code)
	}
	f.step(Drain{Slot: "v"})
	require.Equal(t, Draining, f.explained("v", 100, "refused", "it is drained").Code)
}

func TestExplainKnowsThatUnloadsDidNotHelp(t *testing.T) {
	cfg := defaults()
	cfg.MaxEvictions = 1
	cfg.Slots = []SlotConfig{server("v1", 5000), server("v2", 5000), server("v3", 5000), server("t", 5000), lazyServer("w", 1000)}
	f := givenConfig(t, cfg, 16384)
	for _, v := range cfg.Slots[:4] {
		f.probe(v.Name, No)
	}
	f.probe("w", NotTold)
	for _, v := range []string{"v1", "v2", "v3"} {
		f.warm(v, 5000)
	}
	f.advance(time.Minute)
	h := f.submit("t")
	for _, v := range []string{"v1", "v2"} { // both keep what they hold
		f.requireState(v, Stopping)
		f.unloaded(v)
		for f.slot(v).State == Stopping {
			f.look(time.Second)
		}
	}
	f.unloaded("w") // it is asked, too, and held nothing
	f.look(time.Second)
	f.requireWaiting(h)
	f.explained("t", 100, "waits", "unloads did not bring the memory back")
	f.requireState("v3", Ready)
	f.submit("t")
	f.requireState("v3", Ready)
}

func TestAnUnloadThatBringsBackLessThanHalfIsNamedInTheRefusal(t *testing.T) {
	for back, named := range map[gpu.Bytes]bool{4000: false, 3999: true} {
		f := given(t, 16384, server("v", 8000), server("t", 14000))
		f.warm("v", 8000)
		f.advance(time.Minute)
		h := f.submit("t")
		f.evicted("v", back)
		for f.slot("v").State == Stopping {
			f.look(time.Second)
		}
		for range 30 {
			f.look(time.Second)
		}
		unloads := f.requireRefused(h, VRAMExhausted).Detail.Unloads
		require.Equal(t, named, len(unloads) > 0, "%d came back: %v", back, unloads)
	}
}

func TestTheQueueShowsThoseWhoCameAtTheSameTimeInTheOrderOfTheConfiguration(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000), server("a", 10000), server("b", 10000))
	f.warm("v", 10000)
	f.submit("v")
	f.submit("b")
	f.submit("a")
	var names []string
	for _, w := range f.s.Snapshot(f.now).Queue {
		names = append(names, w.Slot)
	}
	require.Equal(t, []string{"a", "b"}, names)
}

func TestExplainKnowsTheCapOfTheQueue(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000), lazyServer("free", 4000, lockNone))
	f.warm("v", 10000)
	f.warm("free", 4000)
	f.reconfigure(func(c *Config) { c.MaxQueue, c.ReservedPlaces, c.ReservedBelow = 2, 1, 100 })
	f.submit("v")
	f.explained("v", 100, "waits", "")
	f.submit("v")
	require.Equal(t, QueueFull, f.explained("v", 100, "refused", "1 requests of no urgency wait already").Code)
	f.explained("v", 99, "waits", "")
	f.ask("v", 99)
	require.Equal(t, QueueFull, f.explained("v", 100, "refused", "2 requests wait already").Code)
	require.Equal(t, QueueFull, f.explained("v", 99, "refused", "2 requests wait already").Code)
	f.explained("free", 100, "runs", "") // it need not wait
}

func TestExplainKnowsTheReservedPlacesOfASlot(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, wide(2), func(c *SlotConfig) { c.Reserved = 1 }))
	f.reconfigure(func(c *Config) { c.ReservedBelow = 100 })
	f.warm("v", 10000)
	f.submit("v")
	f.explained("v", 100, "waits", "")
	f.explained("v", 99, "runs", "")
}

func TestExplainKnowsWhoComesBefore(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 5000, wide(2)), lazyServer("w", 5000))
	f.warm("v", 5000)
	f.warm("w", 5000)
	f.submit("v")
	f.submit("w")
	f.advance(30 * time.Second)
	f.explained("v", 100, "waits", "") // the other's is older by more than lock_overtake
	f.requireWaiting(f.submit("v"))

	f = given(t, 16384, server("v", 10000), server("big", 14000), server("small", 2000))
	f.warm("v", 10000)
	f.advance(time.Minute)
	f.submit("v")
	f.submit("v")
	f.submit("big")
	f.advance(301 * time.Second)
	f.explained("small", 100, "waits", "big") // it is overdue
	h := f.submit("small")
	f.requireWaiting(h)
	f.cancel(h)
	f.use(3000)
	f.explained("small", 100, "loads", "") // no room that others make would be enough for it
	f.submit("small")
	f.requireState("small", Loading)
}

// What waits only for the load of another takes nothing from those who come after it.
func TestExplainNamesTheLoadThatIsUnderWayAndNotWhoWaitsForItToo(t *testing.T) {
	f := given(t, 16384, server("x", 5000, starts), server("old", 5000, starts), server("t", 5000, starts))
	f.submit("x")
	f.requireState("x", Loading)
	f.submit("old")
	f.advance(601 * time.Second)
	f.requireState("x", Loading)
	f.explained("t", 100, "waits", "x")
}

func TestExplainKnowsThatALazySlotLoadsInsideItsFirstJob(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 5000), lazyServer("t", 5000))
	f.warm("v", 5000)
	f.submit("v")
	f.explained("t", 100, "waits", "")
	f.requireWaiting(f.submit("t"))
}

func TestExplainWhileEvictionsAreOnlyObserved(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000), server("t", 10000))
	f.warm("v", 10000)
	f.reconfigure(func(c *Config) { c.ObserveEvictions = true })
	f.advance(time.Minute)
	e := f.explained("t", 100, "refused", "only observed")
	require.Equal(t, VRAMExhausted, e.Code)
	require.Equal(t, []string{"v"}, e.Victims)
}

func TestExplainBeforeAnythingIsKnown(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("v", 5000)}
	f := givenConfig(t, cfg, 16384)
	f.explained("v", 100, "waits", "nothing is known")
}

func TestExplainInAnotherKindOfScheduler(t *testing.T) {
	cfg := defaults()
	cfg.Mode = Passthrough
	cfg.Slots = []SlotConfig{server("v", 50000)}
	f := givenConfig(t, cfg, 16384)
	f.explained("v", 100, "runs", "")

	cfg.Mode = Locked
	f = givenConfig(t, cfg, 16384)
	f.probe("v", NotTold)
	f.explained("v", 100, "runs", "")
	f.submit("v")
	f.explained("v", 100, "waits", "")
}

func TestExplainCountsTheCreditOfWhoLeft(t *testing.T) {
	f := creditWorld(t)
	f.cancel(f.submit("t"))
	f.advance(creditBound - 1)
	f.explained("t", 100, "waits", "")
	f.advance(1)
	f.explained("t", 100, "evicts", "")
	f.advance(creditBound)
	f.explained("t", 100, "evicts", "")
	f.advance(1) // the credit has lapsed
	f.explained("t", 100, "waits", "")
}

func TestExplainChangesNothing(t *testing.T) {
	story := func(ask bool) (all []string) {
		f := given(t, 16384, lazyServer("v", 10000, wide(2)), server("t", 10000), server("fits", 3000))
		step := func(e Event) {
			if ask {
				for _, name := range []string{"v", "t", "fits"} {
					f.s.Explain(f.now, name, 1)
					f.s.Explain(f.now, name, 200)
				}
			}
			all = append(all, fmt.Sprintf("%T at %s: %s", e, f.now.Sub(time.Unix(1_000_000, 0)), tell(f.step(e))))
		}
		for i := range 60 {
			name := []string{"v", "t", "fits"}[i%3]
			step(Submit{Slot: name, Priority: 100 + i%2, Client: string(rune('a' + i%4))})
			switch f.slot(name).State {
			case Loading:
				step(LoadDone{Slot: name, Epoch: f.epochs[name]})
			case Stopping:
				step(UnloadDone{Slot: name, Epoch: f.epochs[name], Confirmed: true})
			case Unknown, Idle, Ready:
			}
			for _, id := range slices.Sorted(maps.Keys(f.jobs)) {
				if h := f.jobs[id]; h.running && h.slot == name {
					h.running = false
					step(Release{Job: id})
					break
				}
			}
			f.advance(7 * time.Second)
		}
		return all
	}
	quiet, asked := story(false), story(true)
	require.Len(t, asked, len(quiet))
	for i := range quiet {
		require.Equal(t, quiet[i], asked[i])
	}
}

// Positions and estimates (spec §9.1).

func TestTheQueueIsShownInItsOrder(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000), server("t", 10000))
	f.warm("v", 10000)
	f.submit("v")
	var want []JobID
	late := f.submitJob(Submit{Slot: "v", Priority: 200, Client: "low"})
	f.advance(time.Second)
	want = append(want, f.of("a", "t").id)
	f.advance(time.Second)
	want = append(want, f.of("b", "v").id)
	urgent := f.submitJob(Submit{Slot: "t", Priority: 1, Client: "urgent"})
	want = append(append([]JobID{urgent.id}, want...), late.id)
	s := f.s.Snapshot(f.now)
	require.Len(t, s.Queue, 4)
	for i, id := range want {
		require.Equal(t, id, s.Queue[i].Job)
		require.Equal(t, i+1, s.Queue[i].Position)
		require.Equal(t, i+1, f.s.Position(id))
		require.NotEmpty(t, s.Queue[i].Client)
	}
	require.Zero(t, f.s.Position(f.lastJob("v").id), "it runs")
	f.cancel(urgent)
	require.Zero(t, f.s.Position(urgent.id))
	require.Equal(t, 1, f.s.Position(want[1]))
}

func TestTheShownQueueIsBoundedAndSoIsThePosition(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000))
	f.reconfigure(func(c *Config) { c.MaxQueue = 2000 })
	f.warm("v", 10000)
	f.submit("v")
	var last *handle
	for range 1500 {
		last = f.submit("v")
	}
	s := f.s.Snapshot(f.now)
	require.Equal(t, 1500, s.Waiting)
	require.Len(t, s.Queue, 100)
	require.Equal(t, 1000, f.s.Position(last.id))
}

func TestTheEstimateOfALoadedSlotsQueue(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, wide(2)))
	f.warm("v", 10000) // its job took no time
	run := func(d time.Duration) {
		h := f.submit("v")
		f.advance(d)
		f.release(h)
	}
	estimates := func() (all []time.Duration) {
		for _, w := range f.s.Snapshot(f.now).Queue {
			all = append(all, w.Estimate)
		}
		return all
	}
	run(10 * time.Second) // 0.3 · 10 s
	f.submit("v")
	f.submit("v")
	for range 3 {
		f.submit("v")
	}
	require.Equal(t, []time.Duration{3 * time.Second, 3 * time.Second, 6 * time.Second}, estimates(), "two at a time")
}

func TestTheEstimateIsNotKnownBeforeAnythingWasMeasured(t *testing.T) {
	f := given(t, 16384, server("v", 10000))
	f.submit("v")
	f.loaded("v")
	f.submit("v")
	require.EqualValues(t, -1, f.s.Snapshot(f.now).Queue[0].Estimate)
}

func TestTheEstimateOfALoadIsWhatIsLeftOfIt(t *testing.T) {
	f := given(t, 16384, server("v", 10000))
	h := f.submit("v")
	f.advance(8 * time.Second)
	f.loaded("v")
	f.release(h)
	f.step(Unload{Slot: "v"})
	f.unloaded("v")
	f.sample()
	f.submit("v")
	f.requireState("v", Loading)
	f.advance(3 * time.Second)
	require.Equal(t, 5*time.Second, f.s.Snapshot(f.now).Queue[0].Estimate)
	f.advance(10 * time.Second) // it takes longer than before
	require.Zero(t, f.s.Snapshot(f.now).Queue[0].Estimate)
}

func TestWhoWaitsForALoadedModelIsToldWhatForAndNotOfItsLoad(t *testing.T) {
	f := given(t, 16384, server("a", 4000), server("b", 4000))
	first := f.submit("a")
	require.Equal(t, "is being loaded", f.slot("a").Why)
	f.loaded("a")
	require.Empty(t, f.slot("a").Why, "nobody waits")
	second := f.submitJob(Submit{Slot: "a", Deadline: f.now.Add(time.Minute)})
	require.Equal(t, "runs 1 requests, as many as its concurrency allows", f.slot("a").Why)
	f.submit("b")
	f.loaded("b")
	require.Equal(t, "waits for the lock of its GPU", f.slot("b").Why)
	f.advance(time.Minute)
	r := f.requireRefused(second, BudgetExceeded)
	require.Contains(t, r.Message, "as many as its concurrency allows")
	f.release(first)
}

func TestWhoWaitsUnderLockedIsToldOfTheLock(t *testing.T) {
	cfg := defaults()
	cfg.Mode = Locked
	cfg.Slots = []SlotConfig{server("a", 4000), server("b", 4000)}
	f := givenConfig(t, cfg, 16384)
	a := f.submit("a")
	require.Equal(t, "waits for the first probe", f.slot("a").Why)
	f.probe("a", No)
	f.probe("b", No)
	f.requireRunning(a)
	f.requireWaiting(f.submit("b"))
	require.Equal(t, "waits for the lock of its GPU", f.slot("b").Why)
}
