package scheduler

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// of sends a client's request.
func (f *fixture) of(client, slot string) *handle {
	f.t.Helper()
	return f.submitJob(Submit{Slot: slot, Priority: 100, Client: client})
}

// requireOrder ends one job after the other, and checks who is admitted then.
func (f *fixture) requireOrder(running *handle, next ...*handle) {
	f.t.Helper()
	for i, h := range next {
		f.requireWaiting(next[i:]...)
		f.release(running)
		f.requireRunning(h)
		running = h
	}
	f.release(running)
}

// oneAtATime is a world with a loaded slot that works on a job.
func oneAtATime(t *testing.T, more ...SlotConfig) (*fixture, *handle) {
	f := given(t, 16384, append([]SlotConfig{lazyServer("v", 10000)}, more...)...)
	f.warm("v", 10000)
	return f, f.of("nobody", "v")
}

// Turns (spec §4.4).

func TestClientsOfOnePriorityTakeTurns(t *testing.T) {
	f, running := oneAtATime(t)
	a1, a2, a3 := f.of("a", "v"), f.of("a", "v"), f.of("a", "v")
	f.advance(time.Second)
	b1, b2 := f.of("b", "v"), f.of("b", "v")
	c1 := f.of("c", "v")
	f.requireOrder(running, a1, b1, c1, a2, b2, a3)
}

func TestThoseWithoutANameAreOneClient(t *testing.T) {
	f, running := oneAtATime(t)
	x1, x2, x3 := f.of("", "v"), f.of("", "v"), f.of("", "v")
	a1, a2 := f.of("a", "v"), f.of("a", "v")
	f.requireOrder(running, x1, a1, x2, a2, x3)
}

func TestTurnsAreWithinAPriority(t *testing.T) {
	f, running := oneAtATime(t)
	low1 := f.submitJob(Submit{Slot: "v", Priority: 200, Client: "b"})
	low2 := f.submitJob(Submit{Slot: "v", Priority: 200, Client: "a"})
	a1, a2 := f.of("a", "v"), f.of("a", "v")
	b1 := f.of("b", "v")
	f.requireOrder(running, a1, b1, a2, low1, low2)
}

func TestAClientThatComesBackIsBehindTheOthersOnce(t *testing.T) {
	f, running := oneAtATime(t)
	a1 := f.of("a", "v")
	b1, b2, b3 := f.of("b", "v"), f.of("b", "v"), f.of("b", "v")
	f.release(running)
	f.requireRunning(a1)
	a2, a3 := f.of("a", "v"), f.of("a", "v") // at once again
	f.requireOrder(a1, b1, a2, b2, a3, b3)
}

func TestATurnThatIsTakenBackIsTheNextClients(t *testing.T) {
	f, running := oneAtATime(t)
	a1, a2 := f.of("a", "v"), f.of("a", "v")
	b1, b2 := f.of("b", "v"), f.of("b", "v")
	c1 := f.of("c", "v")
	f.cancel(a1) // a keeps its turn, by its next
	f.release(running)
	f.requireRunning(a2)
	f.cancel(b1)
	f.cancel(b2) // b leaves altogether: it is the turn of c
	b3 := f.of("b", "v")
	f.requireOrder(a2, c1, b3)
}

func TestAJobThatIsAdmittedOnceMoreKeepsItsPlace(t *testing.T) {
	for _, c := range []struct{ name, first, others string }{{"one client", "a", "a"}, {"several", "a", "b"}, {"nobody in particular", "", ""}} {
		t.Run(c.name, func(t *testing.T) {
			f := given(t, 16384, server("v", 10000))
			f.warm("v", 10000)
			came := f.now
			first := f.submitJob(Submit{Slot: "v", Priority: 100, Client: c.first})
			f.advance(time.Second)
			b1, b2 := f.of(c.others, "v"), f.of(c.others, "v")
			f.releaseAs(first, DialRefused) // its server comes back just now
			f.requireWaiting(b1, b2)
			again := f.submitJob(Submit{Slot: "v", Priority: 100, Client: c.first, Submitted: came})
			f.requireWaiting(again, b1, b2)
			f.probe("v", Yes)
			f.requireRunning(again)
			f.requireOrder(again, b1, b2)
		})
	}
}

// NEXT of the policy's rule 3 is the oldest, whoever's turn it is.
func TestTheOldestJobStandsForASlotWhoeversTurnItIs(t *testing.T) {
	f, x := oneAtATime(t, server("t", 10000))
	f.advance(time.Hour)
	f.of("t", "t")
	f.advance(10 * time.Second)
	a1, a2 := f.of("a", "v"), f.of("a", "v")
	f.advance(400 * time.Second)
	b1 := f.of("b", "v") // by itself it would let t in: 300 s after it
	f.release(x)
	f.requireRunning(a1)
	f.release(a1)
	f.requireRunning(b1)
	f.requireWaiting(a2)
	f.advance(time.Hour)
	require.True(t, f.slot("v").GateOpen, "the older job of a waits still")
	b2 := f.of("b", "v")
	f.release(b1)
	f.requireRunning(a2)
	require.False(t, f.slot("v").GateOpen, "the next came an hour after t")
	f.requireWaiting(b2)
}

// Rests (spec §4.4: client_cooldown).

func restful(c *Config) { c.ClientCooldown = 13 * time.Second }

func TestAClientStartsItsNextJobAfterItsCooldown(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, wide(3)))
	f.reconfigure(restful)
	f.warm("v", 10000) // nobody's: it rests nobody
	a1 := f.of("a", "v")
	f.requireRunning(a1)
	f.release(a1)
	a2, a3 := f.of("a", "v"), f.of("a", "v")
	b1 := f.of("b", "v")
	f.requireRunning(b1, f.of("", "v"))
	f.requireWaiting(a2, a3)
	f.advance(13*time.Second - 1)
	f.requireWaiting(a2, a3)
	f.advance(1)
	f.requireRunning(a2)
	f.advance(13*time.Second - 1)
	f.requireWaiting(a3)
	f.release(b1)
	f.requireWaiting(a3)
	f.advance(1)
	f.requireRunning(a3)
}

func TestH2_ACooldownCountsForItsConsumerOnly(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 5000, lockNone), lazyServer("w", 5000, lockNone), lazyServer("x", 5000, lockNone, of("c")))
	for _, name := range []string{"v", "w", "x"} {
		f.warm(name, 5000)
	}
	long := f.submitJob(Submit{Slot: "v", Priority: 100, Client: "a", Cooldown: 24 * time.Hour})
	f.requireRunning(long)
	f.release(long)
	f.requireRunning(f.of("a", "w"), f.of("a", "x"), f.of("b", "v"))
	rests := f.submitJob(Submit{Slot: "v", Priority: 100, Client: "a", Submitted: f.now, Deadline: f.now.Add(time.Minute)})
	f.requireWaiting(rests)
	queue := f.s.Snapshot(f.now).Queue
	require.Equal(t, coolingReason, queue[len(queue)-1].Why)
	f.advance(time.Minute)
	require.Contains(t, f.requireRefused(rests, BudgetExceeded).Message, "cooldown")
}

func TestACooldownCountsFromTheStartOnWhateverModelOfItsConsumer(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 5000, lockNone, of("c")), lazyServer("w", 5000, lockNone, of("c")))
	f.reconfigure(restful)
	f.warm("v", 5000)
	f.warm("w", 5000)
	v := f.of("a", "v")
	f.advance(12 * time.Second)
	f.release(v)
	w := f.of("a", "w")
	f.requireWaiting(w)
	f.requireRunning(f.of("b", "w"))
	f.release(f.lastJob("w"))
	f.advance(time.Second)
	f.requireRunning(w)
}

func TestTheHeadOfAQueueWhoseClientHasStartedElsewhereLetsOthersPass(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 5000, of("c")), lazyServer("w", 5000, lockNone, of("c")))
	f.reconfigure(restful)
	f.warm("v", 5000)
	f.warm("w", 5000)
	running := f.of("x", "v")
	a, b := f.of("a", "v"), f.of("b", "v")
	f.requireRunning(f.of("a", "w"))
	f.release(running)
	f.requireRunning(b)
	f.requireWaiting(a)
	f.advance(13 * time.Second)
	f.requireWaiting(a) // for the place
	f.release(b)
	f.requireRunning(a)
}

func TestAColdSlotIsNotLoadedForAClientThatRests(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 5000, of("c")), server("t", 5000, of("c")))
	f.reconfigure(restful)
	f.warm("v", 5000)
	f.release(f.of("a", "v"))
	h := f.of("a", "t")
	f.advance(13*time.Second - 1)
	f.requireLoads()
	f.advance(1)
	f.requireLoads("t")
	f.loaded("t")
	f.requireRunning(h)
}

func TestAJobMayAskForALongerCooldownOfItsClient(t *testing.T) {
	for _, c := range []struct {
		own, want time.Duration
		config    func(*Config)
	}{
		{7 * time.Second, 7 * time.Second, func(*Config) {}},
		{7 * time.Second, 13 * time.Second, restful},
		{17 * time.Second, 17 * time.Second, restful},
	} {
		f := given(t, 16384, lazyServer("v", 10000, wide(3)))
		f.reconfigure(c.config)
		f.warm("v", 10000)
		f.requireRunning(f.submitJob(Submit{Slot: "v", Priority: 100, Client: "a", Cooldown: c.own}))
		h := f.of("a", "v")
		f.advance(c.want - 1)
		f.requireWaiting(h)
		f.advance(1)
		f.requireRunning(h)
	}
}

// resting is a client that has just started a job, and one of its that waits for its rest to end.
func resting(t *testing.T, set ...func(*Config)) (*fixture, *handle) {
	f := given(t, 16384, lazyServer("v", 10000, wide(9)), server("w", 5000))
	f.reconfigure(restful)
	for _, c := range set {
		f.reconfigure(c)
	}
	f.warm("v", 10000)
	f.release(f.of("a", "v"))
	h := f.of("a", "v")
	f.requireWaiting(h)
	return f, h
}

func TestARestingJobIsAWaiter(t *testing.T) {
	f, h := resting(t)
	s := f.s.Snapshot(f.now)
	require.Equal(t, 1, s.Waiting)
	require.Len(t, s.Queue, 1)
	require.Equal(t, h.id, s.Queue[0].Job)
	require.Equal(t, "a", s.Queue[0].Client)
	require.Equal(t, "v", s.Queue[0].Slot)
	require.Contains(t, s.Queue[0].Why, "its client")

	f.cancel(h)
	require.Zero(t, f.s.Snapshot(f.now).Waiting)
	require.EqualValues(t, 1, f.s.Snapshot(f.now).Counts.Cancelled)
	f.advance(time.Minute)
	f.requireWaiting(h) // it never runs
	f.requireRunning(f.of("a", "v"))
}

func TestTheBudgetOfARestingJobEnds(t *testing.T) {
	f, _ := resting(t)
	late := f.submitJob(Submit{Slot: "v", Priority: 100, Client: "a", Deadline: f.now.Add(7 * time.Second)})
	f.advance(7*time.Second - 1)
	f.requireWaiting(late)
	f.advance(1)
	f.requireRefused(late, BudgetExceeded)
	require.Equal(t, 1, f.s.Snapshot(f.now).Waiting)
}

func TestADrainSendsRestingJobsAway(t *testing.T) {
	for _, e := range []Drain{{Slot: "v"}, {}, {Final: true}} {
		f, h := resting(t)
		f.step(e)
		f.requireRefused(h, Draining)
		require.Zero(t, f.s.Snapshot(f.now).Waiting)
	}
	f, h := resting(t)
	f.step(Drain{Slot: "w"})
	f.requireWaiting(h)
}

func TestAReloadKeepsRestingJobs(t *testing.T) {
	f, h := resting(t)
	f.advance(5 * time.Second)
	f.reconfigure(func(c *Config) { c.MaxQueue++ })
	f.requireWaiting(h)
	f.advance(8*time.Second - 1)
	f.requireWaiting(h)
	f.advance(1)
	f.requireRunning(h)
}

func TestARemovedSlotServesRestingJobsBeforeItGoes(t *testing.T) {
	f, h := resting(t)
	f.reconfigure(func(c *Config) { c.Slots = c.Slots[1:] })
	f.advance(13*time.Second - 1)
	f.requireWaiting(h)
	f.requireUnloads()
	f.advance(1)
	f.requireRunning(h)
	f.release(h)
	f.requireUnloads("v")
	f.evicted("v", 10000)
	require.Equal(t, []string{"v"}, f.dropped)
}

func TestARemovedSlotGoesWhenItsLastRestingJobIsTakenBack(t *testing.T) {
	f, h := resting(t)
	f.reconfigure(func(c *Config) { c.Slots = c.Slots[1:] })
	f.cancel(h)
	f.advance(5 * time.Second)
	f.requireUnloads("v")
}

func TestTheQueueCapCountsRestingJobs(t *testing.T) {
	f, h := resting(t, func(c *Config) { c.MaxQueue = 2 })
	f.requireWaiting(f.of("a", "v"))
	f.requireRefused(f.of("a", "v"), QueueFull)
	f.requireRunning(f.of("b", "v"))
	f.cancel(h)
	f.requireWaiting(f.of("a", "v"))
}

func TestWhoRestsDoesNotRunAtOnce(t *testing.T) {
	f, h := resting(t)
	f.cancel(h)
	at := Submit{Slot: "v", Priority: 100, Client: "a", IfFree: true}
	require.Equal(t, NotNow, f.step(at)[0].Kind)
	f.advance(13 * time.Second)
	require.Equal(t, Admit, f.step(at)[0].Kind)
}

func TestARestingJobKeepsItsSlotFromNobody(t *testing.T) {
	f, h := resting(t)
	f.advance(6 * time.Second) // the hold is over
	w := f.of("b", "w")
	f.requireLoads("w")
	f.loaded("w")
	f.requireRunning(w)
	f.requireWaiting(h)
}

func TestARestingJobThatLeavesGivesNoCredit(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, keepAlive(time.Hour), lockNone, of("c")), server("t", 10000, costs(creditCost), of("c")))
	f.reconfigure(restful)
	f.warm("v", 10000)
	f.release(f.of("a", "v"))
	h := f.of("a", "t")
	f.advance(10 * time.Second)
	f.cancel(h)
	began := f.now
	f.of("b", "t")
	f.requireAge(began, creditBound)
}

func TestTheJobsOfARestedClientAreInTheOrderInWhichTheyCame(t *testing.T) {
	f, h := resting(t)
	f.reconfigure(func(c *Config) { c.ClientCooldown = 0 })
	second := f.of("a", "v")
	f.reconfigure(func(c *Config) { c.Slots[0].Concurrency = 1 })
	b := f.of("b", "v")
	f.advance(13 * time.Second)
	third := f.of("a", "v")
	f.requireOrder(b, h, second, third)
}

// Reserved places (spec §4.4).

func TestPlacesOfTheQueueAreKeptForUrgentJobs(t *testing.T) {
	f, _ := oneAtATime(t, server("cold", 10000))
	f.reconfigure(func(c *Config) { c.MaxQueue, c.ReservedPlaces, c.ReservedBelow = 5, 2, 100 })
	bulk := []*handle{f.ask("v", 100), f.ask("cold", 200), f.ask("v", 150)}
	f.requireWaiting(bulk...)
	r := f.requireRefused(f.ask("v", 100), QueueFull)
	require.Contains(t, r.Message, "3 requests of no urgency wait already, and 2 places are kept for priorities below 100")
	require.Positive(t, r.RetryAfter)
	f.requireRefused(f.ask("cold", 100), QueueFull)
	urgent := []*handle{f.ask("v", 99), f.ask("cold", 10)}
	f.requireWaiting(urgent...)
	r = f.requireRefused(f.ask("v", 1), QueueFull)
	require.Contains(t, r.Message, "5 requests wait already")

	f.cancel(bulk[0])
	f.requireWaiting(f.ask("v", 100))
	f.cancel(urgent[0])
	f.requireRefused(f.ask("v", 100), QueueFull)
	f.requireWaiting(f.ask("v", 99))
}

func TestUrgentJobsMayTakeMoreThanTheReservedPlaces(t *testing.T) {
	f, _ := oneAtATime(t)
	f.reconfigure(func(c *Config) { c.MaxQueue, c.ReservedPlaces, c.ReservedBelow = 3, 1, 100 })
	f.requireWaiting(f.ask("v", 99), f.ask("v", 99))
	f.requireWaiting(f.ask("v", 100))
	f.requireRefused(f.ask("v", 100), QueueFull)
	f.requireRefused(f.ask("v", 99), QueueFull)
}

func TestABulkJobThatNeedNotWaitTakesNoPlace(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000), lazyServer("w", 4000, lockNone))
	f.warm("v", 10000)
	f.warm("w", 4000)
	f.reconfigure(func(c *Config) { c.MaxQueue, c.ReservedPlaces, c.ReservedBelow = 1, 1, 100 })
	f.ask("v", 100)
	f.requireRefused(f.ask("v", 100), QueueFull)
	f.requireWaiting(f.ask("v", 99))
	f.requireRunning(f.ask("w", 100))
}

// The queue is full, and what runs at once all the same is less urgent than what waits: its slot makes way.
func TestAJobThatFindsTheQueueFullLetsTheUrgentTakeWhatItUses(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, wide(4)), lazyServer("w", 10000))
	f.reconfigure(func(c *Config) { c.MaxQueue = 1 })
	f.warm("v", 10000)
	f.requireRunning(f.ask("v", 10))
	f.requireWaiting(f.ask("w", 50))
	f.advance(f.s.bound(f.s.named["w"]) / 2)
	require.True(t, f.slot("v").GateOpen)
	f.requireRunning(f.ask("v", 90))
	require.False(t, f.slot("v").GateOpen)
}

func TestPlacesOfTheConcurrencyAreKeptForUrgentJobs(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, wide(3), func(c *SlotConfig) { c.Reserved = 1 }))
	f.reconfigure(func(c *Config) { c.ReservedBelow = 100 })
	f.warm("v", 10000)
	one, two := f.ask("v", 100), f.ask("v", 200)
	f.requireRunning(one, two)
	three := f.ask("v", 100)
	f.requireWaiting(three)
	urgent := f.ask("v", 99)
	f.requireRunning(urgent)
	more := f.ask("v", 99)
	f.requireWaiting(more, three)
	f.release(urgent)
	f.requireRunning(more) // the place of an urgent one is for urgent ones
	f.release(more)
	f.requireWaiting(three)
	require.Equal(t, NotNow, f.step(Submit{Slot: "v", Priority: 100, IfFree: true})[0].Kind)
	f.release(two)
	f.requireRunning(three)
	f.release(one)
	f.release(three)
	f.requireRunning(f.ask("v", 99), f.ask("v", 99), f.ask("v", 99)) // they may use all
}

func TestAReloadThatReservesMoreStopsNobodyAndAdmitsNoMore(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, wide(3)))
	f.reconfigure(func(c *Config) { c.ReservedBelow = 100 })
	f.warm("v", 10000)
	one, two := f.ask("v", 100), f.ask("v", 100)
	f.reconfigure(func(c *Config) { c.Slots[0].Reserved = 2 })
	f.requireRunning(one, two)
	three := f.ask("v", 100)
	f.release(one)
	f.requireWaiting(three)
	f.release(two)
	f.requireRunning(three)
}

func TestWhenTheOldestLeavesWhoseTurnItIsNotTheNextOldestStandsAtOnce(t *testing.T) {
	f, x := oneAtATime(t, server("t", 10000))
	f.advance(time.Hour)
	f.of("t", "t")
	f.advance(10 * time.Second)
	a1, a2 := f.of("a", "v"), f.of("a", "v")
	f.advance(400 * time.Second)
	b1 := f.of("b", "v")
	f.release(x)
	f.requireRunning(a1)
	f.requireWaiting(a2, b1) // it is b's turn, a2 is older
	f.advance(time.Second)
	require.True(t, f.slot("v").GateOpen)
	f.cancel(a2)
	require.False(t, f.slot("v").GateOpen, "the next came long after t was overdue")
}

func TestTheClientsThatRestAreBoundedAndThoseThatHaveRestedMakeRoom(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000))
	f.warm("v", 10000)
	serve := func(from, to int) {
		for i := from; i < to; i++ {
			f.release(f.submitJob(Submit{Slot: "v", Priority: 100, Client: fmt.Sprint(i), Cooldown: time.Hour}))
		}
	}
	serve(0, 2*maxRests)
	require.Len(t, f.s.resting.until, maxRests)
	resting := f.submitJob(Submit{Slot: "v", Priority: 100, Client: "7"})
	f.requireWaiting(resting)
	f.cancel(resting)
	f.requireRunning(f.submitJob(Submit{Slot: "v", Priority: 100, Client: fmt.Sprint(2*maxRests - 1)}))
	f.release(f.lastJob("v"))
	f.advance(2 * time.Hour)
	serve(3*maxRests, 3*maxRests+10)
	require.LessOrEqual(t, len(f.s.resting.until), 12)
}

// Looking through all of them takes its time, and nobody is to pay for it with each start.
func TestTheClientsThatRestAreLookedThroughOnceASecondAtMost(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000))
	f.warm("v", 10000)
	start := func(client string) {
		f.release(f.submitJob(Submit{Slot: "v", Priority: 100, Client: client, Cooldown: time.Second / 2}))
	}
	rests := func(client string) bool {
		h := f.submitJob(Submit{Slot: "v", Priority: 100, Client: client, Cooldown: time.Second / 2})
		defer func() {
			if h.running {
				f.release(h)
				return
			}
			f.cancel(h)
		}()
		return !h.running
	}
	for i := range maxRests {
		start(fmt.Sprint(i))
	}
	start("one too many")
	require.False(t, rests("one too many"))
	f.advance(time.Second - 1) // by now all have rested
	start("another")
	require.False(t, rests("another"))
	f.advance(1)
	start("a third")
	require.True(t, rests("a third"))
}
