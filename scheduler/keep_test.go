package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

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
