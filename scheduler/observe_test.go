package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// eviction observe: spec §5.4.

func (f *fixture) said(kind string) (slots []string) {
	for _, d := range f.decisions {
		if d.Kind == kind {
			slots = append(slots, d.Slot)
		}
	}
	return slots
}

func onlyObserves(c *Config) { c.ObserveEvictions = true }

func TestObservedEvictionsAreSaidOnceForThoseWhoWaitAndNotDone(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.reconfigure(onlyObserves)
	f.warm("a", 10000)
	f.advance(time.Minute)
	first, second := f.submit("b"), f.submit("b")
	for range 9 {
		f.advance(time.Second)
		f.sample()
	}
	require.Equal(t, []string{"a"}, f.said("would_evict"))
	require.Equal(t, "b", f.decided("would_evict", "a").Target)
	f.requireWaiting(first, second)
	require.True(t, f.slot("a").GateOpen)
	f.advance(time.Second)
	for _, h := range []*handle{first, second} {
		r := f.requireRefused(h, VRAMExhausted)
		require.Contains(t, r.Message, "eviction observe")
		require.Equal(t, "eviction observe", r.Detail.Holders[0].Protected)
	}
	f.submit("b")
	require.Equal(t, []string{"a", "a"}, f.said("would_evict"), "others wait now")
	f.requireUnloads()
	require.Zero(t, f.s.Snapshot(f.now).Counts.Evictions)
}

func TestWithObservedEvictionsATargetThatFitsIsLoaded(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.reconfigure(onlyObserves)
	f.warm("a", 10000)
	f.advance(time.Minute)
	h := f.submit("b")
	f.step(Unload{Slot: "a"}) // by hand is another thing
	f.evicted("a", 10000)
	f.loaded("b")
	f.requireRunning(h)
}

func TestObservedEvictionsDoNotFlush(t *testing.T) {
	f := given(t, 16384, lazyServer("a", 10000), server("b", 10000))
	f.reconfigure(onlyObserves)
	f.free(2000) // a was loaded before we came
	h := f.submit("b")
	f.advance(10 * time.Second)
	f.requireRefused(h, VRAMExhausted)
	f.requireUnloads()
}

func TestAFlushIsTakenBackByAConfigurationThatOnlyObserves(t *testing.T) {
	f := given(t, 16384, lazyServer("a", 10000, asksBusy), server("b", 10000))
	f.free(2000)
	f.slow["a"] = true
	f.submit("b")
	require.Equal(t, 1, f.asked)
	f.reconfigure(onlyObserves)
	f.advance(time.Millisecond)
	f.tell("a", f.now, false)
	f.requireUnloads()
}

func TestObservedEvictionsAbandonNoLoad(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.reconfigure(onlyObserves)
	f.cancel(f.submit("a"))
	h := f.submit("b")
	f.advance(time.Minute)
	f.requireState("a", Loading)
	f.requireUnloads()
	f.loaded("a")
	f.use(10000)
	f.advance(10 * time.Second)
	require.Contains(t, f.requireRefused(h, VRAMExhausted).Message, "eviction observe")
	f.requireUnloads()
}

func TestWithObservedEvictionsALoadThatRunsOutOfMemoryHasFailed(t *testing.T) {
	f := given(t, 16384, server("a", 4000), server("b", 4000))
	f.reconfigure(onlyObserves)
	f.warm("a", 4000)
	h := f.submit("b")
	f.loadRunsOut("b")
	f.requireRefused(h, LoadFailed)
	f.requireUnloads()
}

func TestADrainIsTakenBackByAConfigurationThatOnlyObserves(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	f.warm("a", 10000)
	running := f.submit("a")
	h := f.submit("b")
	f.advance(11 * time.Minute)
	require.False(t, f.slot("a").GateOpen)
	f.reconfigure(onlyObserves)
	require.True(t, f.slot("a").GateOpen)
	require.Contains(t, f.decided("reopen", "a").Reason, "eviction observe")
	f.release(running)
	f.requireUnloads()
	f.advance(10 * time.Second)
	f.requireRefused(h, VRAMExhausted)
}

func TestObservedEvictionsLeaveIdleUnloadsAlone(t *testing.T) {
	f := given(t, 16384, server("a", 10000, idles(10*time.Second)), server("b", 10000))
	f.reconfigure(onlyObserves)
	f.warm("a", 10000)
	f.advance(5 * time.Second)
	h := f.submit("b")
	f.advance(5 * time.Second)
	f.requireUnloads("a")
	f.evicted("a", 10000)
	f.loaded("b")
	f.requireRunning(h)
	require.EqualValues(t, 1, f.s.Snapshot(f.now).Counts.IdleUnloads)
}
