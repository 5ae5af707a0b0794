package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// stays are the residencies that a step ends.
func stays(effects []Effect) (out []time.Duration) {
	for _, e := range effects {
		if e.Kind == Resided {
			out = append(out, e.Stayed)
		}
	}
	return out
}

func TestAResidencyEndsWhenTheMemoryIsBackAndNotWithAFailedUnload(t *testing.T) {
	f := given(t, 16384, server("a", 8000))
	f.warm("a", 8000)
	f.advance(time.Minute)
	f.step(Unload{Slot: "a"})
	f.advance(time.Second)
	require.Empty(t, stays(f.step(UnloadDone{Slot: "a", Epoch: f.epochs["a"], Err: "500"})), "it stayed")
	f.requireState("a", Ready)
	f.advance(time.Hour)
	require.Empty(t, stays(f.step(Unload{Slot: "a"})))
	f.advance(2 * time.Second)
	require.Empty(t, stays(f.step(UnloadDone{Slot: "a", Epoch: f.epochs["a"], Confirmed: true})), "its memory is not back yet")
	f.advance(time.Second)
	f.cards[0].Free = 16384 * gpu.MiB
	require.Equal(t, []time.Duration{time.Hour + time.Minute + 4*time.Second}, stays(f.step(Sampled{At: f.now, Devices: f.cards})))
	f.requireState("a", Idle)
}

func TestAResidencyThatWasFoundCountsFromThenAndEndsWithTheServer(t *testing.T) {
	f := given(t, 16384, server("a", 8000))
	f.probe("a", Yes)
	f.requireState("a", Ready)
	f.advance(5 * time.Minute)
	require.Equal(t, []time.Duration{5 * time.Minute}, stays(f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeRefused, Detail: "connection refused"})))
	f.requireState("a", Idle)
	f.probe("a", Yes)
	f.advance(time.Second)
	require.Equal(t, []time.Duration{time.Second}, stays(f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeAnswered, Loaded: No, Resident: -1})), "the next is counted anew")
}

func TestALoadThatFailsOrIsGivenUpIsNoResidency(t *testing.T) {
	f := given(t, 16384, server("a", 8000))
	f.submit("a")
	f.advance(time.Second)
	require.Empty(t, stays(f.step(LoadDone{Slot: "a", Epoch: f.epochs["a"], Err: "no such file"})))
	f.requireState("a", Idle)
}

func TestTheOldestThatWaitsMayRestForItsClient(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000))
	f.reconfigure(restful)
	f.warm("v", 10000)
	require.Zero(t, f.s.Snapshot(f.now).Oldest)
	running := f.of("a", "v")
	f.advance(time.Second)
	came := f.now
	f.of("a", "v")
	f.advance(time.Second)
	f.of("b", "v")
	require.Equal(t, came, f.s.Snapshot(f.now).Oldest)
	f.release(running)
	require.Equal(t, came, f.s.Snapshot(f.now).Oldest, "b was let in, and a rests")
}

func TestPriorityZeroIsRecalledAsOneOfARequest(t *testing.T) {
	f := given(t, 16384, server("a", 8000), server("b", 4000))
	require.False(t, f.slot("a").HasPrio)
	h := f.submitJob(Submit{Slot: "a", Priority: 0})
	f.loaded("a")
	f.release(h)
	require.True(t, f.slot("a").HasPrio)
	f = restarted(t, f.s.Learnt(), server("a", 8000), server("b", 4000))
	require.True(t, f.slot("a").HasPrio)
	require.Zero(t, f.slot("a").LastPrio)
	require.False(t, f.slot("b").HasPrio)
}

func TestABudgetBelowTheLoadIsSaidOnceForEachSetting(t *testing.T) {
	f := given(t, 16384, server("a", 8000, func(c *SlotConfig) { c.Budget = 10 * time.Second }))
	said := func() (n int) {
		for _, d := range f.decisions {
			if d.Kind == "short_budget" {
				n++
			}
		}
		return n
	}
	cycle := func(load time.Duration) {
		t.Helper()
		f.submit("a")
		f.advance(load)
		f.loaded("a")
		f.release(f.lastJob("a"))
		f.step(Unload{Slot: "a"})
		f.unloaded("a")
		f.sample()
		f.advance(time.Minute)
		f.requireState("a", Idle)
	}
	cycle(9 * time.Second)
	require.Zero(t, said(), "it is long enough")
	budget := func(d time.Duration) { f.reconfigure(func(c *Config) { c.Slots[0].Budget = d }) }
	budget(8 * time.Second)
	require.Equal(t, 1, said())
	d := f.decided("short_budget", "a")
	require.Equal(t, 9.0, d.Took)
	require.Contains(t, d.Reason, "a load takes 9s and its budget is 8s")
	cycle(9 * time.Second)
	budget(8 * time.Second)
	require.Equal(t, 1, said(), "it was said")
	budget(7 * time.Second)
	require.Equal(t, 2, said())
	budget(time.Minute)
	require.Equal(t, 2, said())
}

func TestAnotherServerOfTheSameNameTakesNoResidencyOver(t *testing.T) {
	f := given(t, 16384, server("a", 8000))
	f.warm("a", 8000)
	f.advance(time.Hour)
	f.reconfigure(func(c *Config) { c.Slots[0].Server = "127.0.0.1:2" })
	f.probe("a", Yes)
	f.advance(time.Second)
	require.Equal(t, []time.Duration{time.Second}, stays(f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeAnswered, Loaded: No, Resident: -1})))
}
