package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Policy rule 6: the age of those who left stands for their slot. In these
// worlds t waits for v, which is kept for an hour unless t is overdue: after 15 · 20.1 s.
const (
	creditCost  = 20100 * time.Millisecond
	creditBound = 15 * creditCost
)

func creditWorld(t *testing.T, set ...func(*SlotConfig)) *fixture {
	f := given(t, 16384, lazyServer("v", 10000, keepAlive(10*time.Hour)), server("t", 10000, append([]func(*SlotConfig){costs(creditCost)}, set...)...))
	f.warm("v", 10000)
	f.advance(time.Minute)
	return f
}

// requireAge checks that t is overdue once its age, which began then, is bound.
func (f *fixture) requireAge(began time.Time, bound time.Duration) {
	f.t.Helper()
	f.advance(began.Add(bound - 1).Sub(f.now))
	f.requireUnloads()
	f.advance(1)
	f.requireUnloads("v")
}

func TestTheAgeOfAClientThatLeftStandsForItsSlot(t *testing.T) {
	f := creditWorld(t)
	began := f.now
	h := f.submit("t")
	f.advance(100 * time.Second)
	f.cancel(h)
	f.advance(50 * time.Second)
	f.requireWaiting(f.submit("t"))
	f.requireAge(began, creditBound)
}

func TestTheOldestOfThoseWhoLeftStandsThoughOthersLeftAfterIt(t *testing.T) {
	f := creditWorld(t)
	began := f.now
	first := f.submit("t")
	f.advance(20 * time.Second)
	second := f.submit("t")
	f.advance(20 * time.Second)
	f.cancel(first)
	f.advance(20 * time.Second)
	f.cancel(second)
	f.advance(20 * time.Second)
	f.submit("t")
	f.requireAge(began, creditBound)
}

func TestASlotWhoseClientsAllLeftEvictsNobody(t *testing.T) {
	f := creditWorld(t)
	f.cancel(f.submit("t"))
	f.advance(time.Hour)
	f.requireUnloads()
}

func TestWhoLeavesALoadedSlotGivesItNoCredit(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, keepAlive(10*time.Hour)), server("t", 5000, costs(creditCost)), server("big", 14000))
	f.warm("t", 5000)
	f.warm("v", 10000)
	v := f.submit("v")
	h := f.submit("t") // waits for the lock
	f.advance(time.Minute)
	f.cancel(h)
	f.step(Unload{Slot: "t"})
	f.evicted("t", 5000)
	f.use(5000) // a program that is none of ours: t does not fit beside v any more
	f.release(v)
	f.unloads = nil
	began := f.now
	f.submit("t")
	f.requireAge(began, 30*time.Second) // its load took a second, as was measured
}

func TestRefusalsGiveNoCredit(t *testing.T) {
	f := creditWorld(t)
	h := f.submitJob(Submit{Slot: "t", Priority: 100, Deadline: f.now.Add(101 * time.Second)})
	f.advance(101 * time.Second)
	f.requireRefused(h, BudgetExceeded)
	began := f.now
	f.submit("t")
	f.requireAge(began, creditBound)
}

func TestFailedLoadsGiveNoCredit(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, keepAlive(10*time.Hour)), server("t", 10000, costs(creditCost)))
	h := f.submit("t")
	f.loadFails("t", "exit status 1")
	f.requireRefused(h, LoadFailed)
	f.advance(2 * time.Second)
	f.warm("v", 10000)
	f.advance(time.Minute)
	began := f.now
	f.submit("t")
	f.requireAge(began, creditBound)
}

func TestAFailedLoadDoesNotClearTheCreditOfWhoLeftBefore(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, keepAlive(10*time.Hour)), server("t", 10000, costs(creditCost)))
	began := f.now
	h := f.submit("t")
	f.advance(time.Second)
	f.cancel(h) // LOADING is not READY
	f.advance(time.Second)
	f.loadFails("t", "exit status 1")
	f.sample()
	f.advance(2 * time.Second)
	f.warm("v", 10000)
	f.submit("t")
	f.requireAge(began, creditBound)
}

func TestACompletedLoadClearsTheCredit(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, keepAlive(10*time.Hour)), server("t", 10000))
	h := f.submit("t")
	f.advance(3 * time.Second)
	f.cancel(h)
	f.loaded("t") // nobody waits for it any more
	f.use(10000)
	f.step(Unload{Slot: "t"})
	f.evicted("t", 10000)
	f.warm("v", 10000)
	f.unloads = nil
	began := f.now
	f.submit("t")
	f.requireAge(began, 45*time.Second) // 15 · 3 s
}

func TestAStartedJobClearsTheCredit(t *testing.T) {
	story := func(started bool) (f *fixture, first time.Time) {
		f = given(t, 16384, lazyServer("v", 10000, keepAlive(10*time.Hour)), server("t", 10000, costs(creditCost)))
		f.warm("v", 10000)
		f.advance(time.Minute)
		first = f.now
		f.cancel(f.submit("t"))
		f.step(Unload{Slot: "v"})
		f.evicted("v", 10000)
		f.use(10000)
		f.probe("t", Yes) // somebody else has loaded it
		if started {
			f.release(f.submit("t"))
		}
		f.step(Unload{Slot: "t"})
		f.evicted("t", 10000)
		f.warm("v", 10000)
		f.advance(time.Minute)
		f.unloads = nil
		f.submit("t")
		return f, first
	}
	f, _ := story(true)
	f.requireAge(f.now, creditBound)
	f, first := story(false)
	f.requireAge(first, creditBound)
}

func TestCreditLapsesBeforeARequestThatComesTooLongAfterTheLastDeparture(t *testing.T) {
	for _, c := range []struct {
		name  string
		knob  *time.Duration
		set   func(*SlotConfig)
		bound time.Duration
		ends  time.Duration // after which it has lapsed
	}{
		{name: "twice the bound", bound: creditBound, ends: 2 * creditBound, set: func(*SlotConfig) {}},
		{name: "at least a minute", bound: 20 * time.Second, ends: time.Minute, set: budget(40 * time.Second)},
		{name: "the knob", bound: creditBound, ends: 7 * time.Second, knob: ptr(7 * time.Second), set: func(*SlotConfig) {}},
	} {
		t.Run(c.name, func(t *testing.T) {
			story := func(gap time.Duration) (f *fixture, began time.Time) {
				f = creditWorld(t, c.set)
				f.reconfigure(func(cfg *Config) { cfg.Credit = c.knob })
				began = f.now
				h := f.submit("t")
				f.advance(time.Second)
				f.cancel(h)
				f.advance(gap)
				f.submit("t")
				return f, began
			}
			f, began := story(c.ends)
			if age := f.now.Sub(began); age >= c.bound {
				f.requireUnloads("v") // it counts still
			} else {
				f.requireAge(began, c.bound)
			}
			f, _ = story(c.ends + 1)
			f.requireUnloads()
			f.requireAge(f.now, c.bound)
		})
	}
}

func TestCreditDoesNotLapseWhileSomebodyWaits(t *testing.T) {
	f := creditWorld(t)
	f.reconfigure(func(c *Config) { c.Credit = ptr(7 * time.Second) })
	began := f.now
	first := f.submit("t")
	f.advance(10 * time.Second)
	f.submit("t")
	f.cancel(first)
	f.advance(10 * time.Second)
	f.submit("t") // not into an empty queue
	f.requireAge(began, creditBound)
}

func TestCreditOffCountsOnlyThoseWhoWait(t *testing.T) {
	for _, left := range []string{"before the next came", "after the next came", "in the instant in which the next came"} {
		t.Run(left, func(t *testing.T) {
			f := creditWorld(t)
			f.reconfigure(func(c *Config) { c.Credit = ptr(time.Duration(0)) })
			h := f.submit("t")
			f.advance(100 * time.Second)
			var began time.Time
			switch left {
			case "before the next came":
				f.cancel(h)
				f.advance(time.Second)
				began = f.now
				f.submit("t")
			case "after the next came":
				began = f.now
				f.submit("t")
				f.advance(time.Second)
				f.cancel(h)
			default:
				f.cancel(h)
				began = f.now
				f.submit("t")
			}
			f.requireAge(began, creditBound)
		})
	}
}

func TestCreditOrdersColdTargets(t *testing.T) {
	f := given(t, 16384, server("v", 10000, keepAlive(10*time.Hour)), server("a", 9000), server("b", 9000))
	f.warm("v", 10000)
	running := f.submit("v")
	h := f.submit("b")
	f.advance(10 * time.Second)
	f.cancel(h)
	f.submit("a") // before the other, whose client has come back
	f.advance(time.Second)
	f.submit("b")
	f.step(Unload{Slot: "v"})
	f.release(running)
	f.evicted("v", 10000)
	f.requireLoads("v", "b")
}

func ptr[T any](v T) *T { return &v }

// A client that gives up before the bound, and comes again and again, is served
// in the end; without credit it would starve.
func TestImpatientClientsOfARareModelAreServed(t *testing.T) {
	for _, c := range []struct {
		name   string
		credit *time.Duration
		served bool
	}{{"credit", nil, true}, {"no credit", ptr(time.Duration(0)), false}} {
		t.Run(c.name, func(t *testing.T) {
			f := given(t, 16384, server("hot", 10000), server("rare", 10000))
			f.reconfigure(func(cfg *Config) { cfg.Credit = c.credit })
			f.warm("hot", 10000)
			hot := f.submit("hot")
			f.advance(30 * time.Second)
			for range 20 { // each waits a minute, and hot is never without work
				h := f.submit("rare")
				for range 30 {
					f.advance(2 * time.Second)
					if hot.running {
						next := f.submit("hot")
						f.release(hot)
						hot = next
					}
				}
				if f.slot("hot").State != Ready {
					break
				}
				f.cancel(h)
				f.advance(5 * time.Second)
			}
			require.Equal(t, c.served, len(f.unloads) > 0)
		})
	}
}
