package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Configurations that come while jobs run, and in the middle of a hand-over.
// The random histories found what these tests hold.

func TestJobsThatAnEarlierConfigurationLetRunAtOnceKeepTheLockUntilTheLastEnds(t *testing.T) {
	for name, set := range map[string][2]func(*Config){
		"passthrough before": {func(c *Config) { c.Mode = Passthrough }, func(c *Config) { c.Mode = Locked }},
		"lock none before": {
			func(c *Config) { c.Mode, c.Slots[0].LockNone, c.Slots[1].LockNone = Locked, true, true },
			func(c *Config) { c.Slots[0].LockNone, c.Slots[1].LockNone = false, false },
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 4000), server("b", 4000), server("c", 4000))
			f.reconfigure(set[0])
			for _, s := range []string{"a", "b", "c"} {
				f.probe(s, Yes)
			}
			a, b := f.submit("a"), f.submit("b")
			f.requireRunning(a, b)
			f.reconfigure(set[1])
			f.probe("c", Yes)
			c := f.submit("c")
			f.requireWaiting(c)
			f.release(b)
			f.requireWaiting(c)
			f.release(a)
			f.requireRunning(c)
			f.release(c)
			require.Nil(t, f.s.owner(0))
		})
	}
}

func TestAnUnloadByHandIsTakenBackByASchedulerThatUnloadsNothing(t *testing.T) {
	f := given(t, 16384, server("a", 4000))
	f.warm("a", 4000)
	h := f.submit("a")
	f.step(Unload{Slot: "a"})
	f.reconfigure(func(c *Config) { c.Mode = Locked })
	next := f.submit("a")
	f.release(h)
	f.requireUnloads()
	f.requireRunning(next) // it would never be loaded again
}

func TestARemovedSlotThatSomebodyWaitsForIsServedByAnotherKindOfScheduler(t *testing.T) {
	f := given(t, 16384, server("a", 4000), server("b", 4000))
	h := f.submit("a")
	f.requireState("a", Loading)
	f.reconfigure(func(c *Config) { c.Slots = c.Slots[1:] })
	f.loadFails("a", "out of date")
	f.requireRefused(h, LoadFailed)
	f.reconfigure(func(c *Config) { c.Slots = []SlotConfig{server("a", 4000), server("b", 4000)} })
	h = f.submit("a") // cools down
	f.requireWaiting(h)
	f.reconfigure(func(c *Config) { c.Mode, c.Slots = Locked, c.Slots[1:] })
	f.probe("a", NotTold)
	f.requireRunning(h)
	f.release(h)
	f.advance(time.Second)
	require.Contains(t, f.dropped, "a")
}

func TestASlotThatIsMovedToAGPUThatIsNotThereRefusesWhoWaits(t *testing.T) {
	f := given(t, 16384, server("a", 4000))
	f.warm("a", 4000)
	f.step(Unload{Slot: "a"})
	h := f.submit("a")
	f.reconfigure(func(c *Config) { c.Slots[0].GPUs = []int{7} })
	f.requireWaiting(h)
	f.evicted("a", 4000)
	f.requireRefused(h, GPULost)
}

// The room that a server was to make is not waited for any more once a reload has put another in its place.
func TestAVictimWhoseServerIsReplacedMakesNobodyWait(t *testing.T) {
	f := given(t, 16384, server("v", 10000), server("a", 10000))
	f.warm("v", 10000)
	f.advance(10 * time.Minute)
	a := f.submit("a")
	f.requireState("v", Stopping)
	f.reconfigure(func(c *Config) { c.Slots[0].Server = "another:1" })
	f.requireState("v", Unknown)
	f.probe("v", No)
	f.advance(time.Second)
	f.free(16384)
	f.requireState("a", Loading)
	f.loaded("a")
	f.requireRunning(a)
}
