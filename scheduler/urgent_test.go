package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The priority clause of the policy. The bound of t is 301.5 s, a tenth of it 30.15 s.
const (
	urgentBound = 15 * 20100 * time.Millisecond
	urgentWait  = urgentBound / 10
)

func urgentTarget(set ...func(*SlotConfig)) SlotConfig {
	return server("t", 10000, append([]func(*SlotConfig){costs(20100 * time.Millisecond)}, set...)...)
}

// ask sends a request of some urgency.
func (f *fixture) ask(name string, priority int) *handle {
	f.t.Helper()
	return f.submitJob(Submit{Slot: name, Priority: priority})
}

// requireDrains checks that the gate of v closes at that time, and not before.
func (f *fixture) requireDrains(name string, at time.Time) {
	f.t.Helper()
	f.advance(at.Add(-1).Sub(f.now))
	require.True(f.t, f.slot(name).GateOpen, "%s drains too early", name)
	f.advance(1)
	require.False(f.t, f.slot(name).GateOpen, "%s does not drain: %s", name, f.slot("t").Why)
}

func TestAnUrgentJobWaitsForATenthOfTheBoundForASlotThatWasUsedAtALowerPriority(t *testing.T) {
	for _, c := range []struct {
		name       string
		last, mine int
		want       time.Duration
	}{
		{"more urgent", 100, 99, urgentWait},
		{"as urgent", 100, 100, urgentBound},
		{"less urgent", 100, 101, urgentBound},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := given(t, 16384, lazyServer("v", 10000, keepAlive(time.Hour)), urgentTarget())
			f.release(f.ask("v", c.last))
			f.use(10000)
			f.ask("t", c.mine)
			f.advance(c.want - 1)
			f.requireUnloads()
			f.advance(1)
			f.requireUnloads("v")
		})
	}
}

func TestASlotThatWasNeverUsedHasNoLastJobThatWasLessUrgent(t *testing.T) {
	f := given(t, 16384, server("v", 10000, keepAlive(time.Hour)), urgentTarget())
	f.use(10000)
	f.probe("v", Yes)
	f.ask("t", 1)
	f.requireDrains("v", f.now.Add(urgentBound))
}

func TestAnUrgentJobWaitsForATenthOfTheBoundForASlotThatWorks(t *testing.T) {
	story := func(queued ...int) *fixture {
		f := given(t, 16384, lazyServer("v", 10000, costs(time.Second)), urgentTarget())
		f.release(f.ask("v", 100))
		f.use(10000)
		f.advance(time.Hour)
		f.ask("v", 100) // runs all the time
		for _, p := range queued {
			f.ask("v", p)
		}
		f.advance(time.Second)
		return f
	}

	f := story()
	f.ask("t", 50)
	f.requireDrains("v", f.now.Add(urgentWait))

	f = story(100, 200) // all of them less urgent, and older
	f.ask("t", 50)
	f.requireDrains("v", f.now.Add(urgentWait))

	f = story(50, 100) // its next is as urgent, and older by a second
	f.ask("t", 50)
	f.advance(2 * urgentBound)
	require.True(t, f.slot("v").GateOpen)

	f = story(200) // its next is less urgent than its last, and than the target
	f.ask("t", 150)
	f.requireDrains("v", f.now.Add(urgentWait))
}

func TestOnlyWaitingJobsAsUrgentAsTheTargetAreNext(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, costs(time.Second)), urgentTarget())
	f.release(f.ask("v", 100))
	f.use(10000)
	f.advance(time.Hour)
	f.ask("v", 100)
	f.ask("v", 200) // waits for longer than the target, and is less urgent
	f.advance(time.Second)
	f.ask("t", 100)
	began := f.now
	f.advance(10 * time.Second)
	f.ask("v", 100)
	f.advance(urgentBound)
	require.True(t, f.slot("v").GateOpen, "its next came too early, with the clause for more urgent targets or without")
	require.True(t, f.now.Sub(began) > urgentBound)
}

func TestCreditDoesNotMakeAnUrgentJobOlder(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, keepAlive(time.Hour)), urgentTarget())
	f.release(f.ask("v", 100))
	f.use(10000)
	h := f.ask("t", 50)
	f.advance(20 * time.Second)
	f.cancel(h)
	f.advance(20 * time.Second)
	f.ask("t", 50)
	f.requireDrains("v", f.now.Add(urgentWait))
}

func TestTheAgeOfAnUrgentJobIsThatOfTheOldestAsUrgent(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, keepAlive(time.Hour)), urgentTarget())
	f.release(f.ask("v", 100))
	f.use(10000)
	f.ask("t", 100)
	f.advance(20 * time.Second)
	f.ask("t", 50)
	began := f.now
	f.advance(20 * time.Second)
	f.ask("t", 50)
	f.requireDrains("v", began.Add(urgentWait))
}

func TestTheBatchOfALoadedSlotDoesNotHoldAgainstAnUrgentJob(t *testing.T) {
	story := func(priority int) *fixture {
		f := given(t, 16384, server("v", 10000), urgentTarget())
		f.ask("v", 100)
		f.ask("v", 100)
		f.advance(10 * time.Second)
		f.loaded("v") // the first runs, the second is what is left of the batch
		f.use(10000)
		f.ask("t", priority)
		return f
	}
	f := story(50)
	f.requireDrains("v", f.now.Add(urgentWait))

	f = story(100)
	f.advance(2 * urgentBound)
	require.True(t, f.slot("v").GateOpen)
}

func TestTheMinimumResidencyHoldsAgainstAnUrgentJob(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, costs(71300*time.Millisecond)), urgentTarget())
	ready := f.now
	f.ask("v", 100)
	f.use(10000)
	f.ask("v", 100)
	f.advance(time.Second)
	f.ask("t", 50)
	f.requireDrains("v", ready.Add(71300*time.Millisecond))
}

func TestASlotThatHasStartedNothingIsNotTakenFromItsJobsForAnUrgentOne(t *testing.T) {
	f := given(t, 16384, server("x", 1000), server("v", 10000), urgentTarget())
	f.warm("x", 1000)
	f.ask("x", 10) // has the lock
	f.ask("v", 100)
	f.advance(time.Second)
	f.loaded("v")
	f.use(10000)
	f.ask("t", 50)
	f.advance(time.Hour)
	require.True(t, f.slot("v").GateOpen)
}

// Rule 5: an urgent target keeps others from the memory that it waits for.
func TestAnUrgentTargetReservesAfterATenthOfTheBound(t *testing.T) {
	for _, waited := range []time.Duration{urgentWait - 1, urgentWait} {
		t.Run(waited.String(), func(t *testing.T) {
			f := given(t, 16384, lazyServer("v", 10000, costs(71300*time.Millisecond)), urgentTarget(), server("small", 3000))
			f.release(f.ask("v", 100))
			f.use(10000)
			f.ask("v", 100)
			f.advance(time.Second)
			f.ask("t", 50)
			f.advance(waited) // v may not go before it has been there for 71.3 s
			f.ask("small", 100)
			if waited < urgentWait {
				f.requireLoads("small")
			} else {
				f.requireLoads()
				require.Contains(t, f.slot("small").Why, "behind t")
			}
		})
	}
}

func TestAnUrgentJobDoesNotCutShortTheHoldOfWhatWasUsedForOneAsUrgent(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000, costs(81300*time.Millisecond)), urgentTarget())
	f.release(f.ask("v", 50))
	f.use(10000)
	f.ask("t", 50)
	f.requireDrains("v", f.now.Add(81300*time.Millisecond/4)) // the hold
}
