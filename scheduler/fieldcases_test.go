package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestFC01_AWarmRequestDoesNotUndoAnEviction(t *testing.T) {
	f := given(t, 16384, server("m1", 10000), server("m2", 10000))
	f.warm("m1", 10000)
	m1 := f.submit("m1")
	f.advance(time.Second)
	m2 := f.submit("m2")
	f.advance(301 * time.Second) // m2 is overdue: m1 is to go
	require.False(t, f.slot("m1").GateOpen)
	var more []*handle
	for range 5 {
		more = append(more, f.submit("m1"))
	}
	f.requireWaiting(more...)
	f.release(m1)
	f.requireState("m1", Stopping)
	more = append(more, f.submit("m1"))
	f.requireState("m1", Stopping)
	f.evicted("m1", 10000)
	f.requireState("m2", Loading)
	f.loaded("m2")
	f.requireRunning(m2)
	f.requireWaiting(more...)
}

func TestFC02_ABusySlotDrainsWithinTheBound(t *testing.T) {
	const job, unload, load = time.Second, time.Second, 5 * time.Second
	f := given(t, 16384, server("m1", 10000), server("m2", 10000))
	f.warm("m1", 10000)
	clients := make([]*handle, 8) // that never pause
	for i := range clients {
		clients[i] = f.submit("m1")
	}
	f.advance(time.Minute)
	began := f.now
	m2 := f.submit("m2")
	bound := 15*20*time.Second + 8*job + job + unload + load // B, the wait of m1's next job, a drain, the switch
	for f.slot("m1").State == Ready {
		require.Less(t, f.now.Sub(began), bound)
		f.advance(job)
		for i, h := range clients {
			if h.running {
				f.release(h)
				clients[i] = f.submit("m1")
			}
		}
	}
	require.GreaterOrEqual(t, f.now.Sub(began), 300*time.Second, "m1 may overtake so far")
	f.advance(unload)
	f.evicted("m1", 10000)
	f.advance(load)
	f.loaded("m2")
	f.requireRunning(m2)
	require.LessOrEqual(t, f.now.Sub(began), bound)
}

// serve plays honest servers until nobody waits: loads take 3 s, unloads 1 s, jobs 2 s.
func (f *fixture) serve(sizes map[string]gpu.Bytes) {
	f.t.Helper()
	for range 1000 {
		worked := false
		for name, size := range sizes {
			switch f.slot(name).State {
			case Loading:
				f.advance(3 * time.Second)
				f.use(size)
				f.loaded(name)
				worked = true
			case Stopping:
				f.advance(time.Second)
				f.evicted(name, size)
				worked = true
			}
		}
		for _, h := range f.jobs {
			if h.running {
				f.advance(2 * time.Second)
				f.release(h)
				worked = true
			}
		}
		if worked {
			continue
		}
		if f.s.Snapshot(f.now).Waiting == 0 {
			return
		}
		f.advance(time.Second)
	}
	f.t.Fatal("somebody waits for ever")
}

func TestFC06_TwoColdOnesAtOnceAreServedOneAfterTheOther(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	a, b := f.submit("a"), f.submit("b")
	f.requireLoads("a")
	f.serve(map[string]gpu.Bytes{"a": 10000, "b": 10000})
	require.Nil(t, a.refusal)
	require.Nil(t, b.refusal)
	f.requireLoads("a", "b")
	f.requireUnloads("a")
	require.EqualValues(t, 2, f.s.Snapshot(f.now).Counts.Ended)
}

func TestFC10_TwoWaitersForTheSameVictimBothFinish(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000), server("c", 10000))
	f.warm("a", 10000)
	f.advance(time.Minute)
	b, c := f.submit("b"), f.submit("c")
	f.requireUnloads("a")
	f.serve(map[string]gpu.Bytes{"a": 10000, "b": 10000, "c": 10000})
	require.Nil(t, b.refusal)
	require.Nil(t, c.refusal)
	f.requireUnloads("a", "b")
	f.requireLoads("a", "b", "c")
}

func TestFC25_TheQueueCapCountsEveryWaiter(t *testing.T) {
	f := given(t, 16384, server("warm", 10000), server("cold", 10000), server("idle", 5000))
	f.reconfigure(func(c *Config) { c.MaxQueue = 4 })
	f.warm("idle", 5000)
	f.advance(time.Second)
	f.warm("warm", 10000)
	running := f.submit("warm")
	waiters := []*handle{f.submit("warm"), f.submit("warm"), f.submit("cold"), f.submit("cold")}
	f.requireWaiting(waiters...)
	for _, name := range []string{"warm", "cold"} {
		r := f.requireRefused(f.submit(name), QueueFull)
		require.Positive(t, r.RetryAfter)
	}
	f.cancel(waiters[3])
	f.requireWaiting(f.submit("warm")) // its place is free at once
	f.requireRefused(f.submit("warm"), QueueFull)
	f.release(running)
	f.requireRunning(waiters[0])
}

func TestFC25_AFullQueueDoesNotKeepOutWhoNeedNotWait(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 4000, wide(2), lockNone))
	f.reconfigure(func(c *Config) { c.MaxQueue = 1 })
	f.warm("a", 10000)
	f.warm("b", 4000)
	f.submit("a")
	f.requireWaiting(f.submit("a"))
	f.requireRunning(f.submit("b"))
	f.requireRefused(f.submit("a"), QueueFull)
}

func TestFC25_NothingIsUnloadedForARequestThatFindsTheQueueFull(t *testing.T) {
	f := given(t, 16384, server("a", 5000), server("idle", 8000), server("cold", 10000))
	f.reconfigure(func(c *Config) { c.MaxQueue = 1 })
	f.warm("idle", 8000)
	f.warm("a", 5000)
	f.advance(time.Hour)
	f.submit("a")
	f.submit("a")
	f.requireRefused(f.submit("cold"), QueueFull)
	f.requireUnloads()
	require.True(t, f.slot("idle").GateOpen)
}

func TestFC31_AFloorThatRisesWithEachExitMakesNoEvictionLoop(t *testing.T) {
	f := given(t, 16384, server("a", 9000), server("b", 9000))
	f.warm("a", 9000)
	now, next := "a", "b"
	for i := range 20 {
		f.advance(5 * time.Minute)
		h := f.submit(next)
		f.requireState(now, Stopping)
		f.unloaded(now)
		f.use(-9000 + 50) // 50 MiB stay behind for ever
		f.look(time.Second)
		f.requireState(now, Idle)
		require.EqualValues(t, 50*(i/2+1), f.booking(now), "what its exits left is booked to it")
		f.loaded(next)
		f.requireRunning(h)
		f.use(9000)
		f.release(h)
		require.Len(t, f.unloads, i+1)
		require.Len(t, f.loads, i+2)
		now, next = next, now
	}
	require.Zero(t, f.s.Snapshot(f.now).Counts.Refused)
}

// What stayed of one load is no outsider once the model is loaded and unloaded again.
func TestFC31_WhatALeakLeftStaysResidueOverTheNextLoads(t *testing.T) {
	for name, set := range map[string]func(*SlotConfig){"loaded by its route": func(*SlotConfig) {}, "loaded by its first job": func(c *SlotConfig) { c.CanLoad, c.CanTell = false, false }} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 9000, set))
			f.use(300) // a desktop
			for i := range gpu.Bytes(6) {
				h := f.submit("a")
				if f.slot("a").State == Loading {
					f.loaded("a")
				}
				f.use(9000)
				f.release(h)
				f.sample()
				require.EqualValues(t, 9000+50*i, f.booking("a"))
				require.EqualValues(t, 300, f.outsiders())
				f.advance(time.Minute)
				f.step(Unload{Slot: "a"})
				f.unloaded("a")
				f.use(-9000 + 50)
				f.look(time.Second)
				f.requireState("a", Idle)
				require.EqualValues(t, 50*(i+1), f.booking("a"))
				require.EqualValues(t, 300, f.outsiders())
				f.reconfigure(func(c *Config) { c.Reserve += gpu.MiB }) // a reload of the configuration changes nothing of it
				require.EqualValues(t, 50*(i+1), f.booking("a"))
			}
		})
	}
}

func TestFC31_AContextThatIsUsedAgainIsNoLeak(t *testing.T) {
	f := given(t, 16384, server("a", 9000))
	f.use(300)
	f.warm("a", 9000)
	for range 3 {
		f.step(Unload{Slot: "a"})
		f.unloaded("a")
		f.use(-8400)
		f.look(time.Second)
		require.EqualValues(t, 600, f.booking("a"))
		f.warm("a", 8400)
		f.sample()
		require.EqualValues(t, 9000, f.booking("a"))
		require.EqualValues(t, 300, f.outsiders())
	}
}

func TestFC26_ALoadOfAHundredSilentSecondsIsWaitedForAndServesAllWhoCame(t *testing.T) {
	f := given(t, 16384, server("a", 9000, wide(4)), server("b", 9000))
	first := f.submit("a")
	var rest []*handle
	for range 10 {
		f.advance(10 * time.Second)
		f.probe("b", No)
		f.sample()
		if len(rest) < 3 {
			rest = append(rest, f.submit("a"))
		}
		f.requireState("a", Loading)
		f.requireWaiting(first)
	}
	other := f.submit("b")
	f.loaded("a")
	f.requireRunning(append(rest, first)...)
	f.requireWaiting(other)
	f.requireLoads("a")
	require.Equal(t, "ready after 1m40s", f.decided("loaded", "a").Reason)
	require.Zero(t, f.s.Snapshot(f.now).Counts.Refused)
}

// So it is for a load that is unloaded before anybody has looked at the GPU since its first job.
func TestFC31_WhatALeakLeftIsTheSlotsOwnAlsoInAnUnloadAtOnce(t *testing.T) {
	f := given(t, 16384, server("a", 9000))
	f.use(300) // a desktop
	f.warm("a", 9000)
	f.step(Unload{Slot: "a"})
	f.evicted("a", 9000-50)
	f.look(10 * time.Second)
	f.requireState("a", Idle)
	require.EqualValues(t, 50, f.booking("a"))
	h := f.submit("a")
	f.loaded("a")
	f.use(9000)
	f.release(h)
	f.step(Unload{Slot: "a"})
	f.requireState("a", Stopping)
	require.EqualValues(t, 9050, f.booking("a"))
	require.EqualValues(t, 300, f.outsiders())
	f.evicted("a", 9000)
	f.look(10 * time.Second)
	require.EqualValues(t, 50, f.booking("a"))
	require.EqualValues(t, 300, f.outsiders())
}
