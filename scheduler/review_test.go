package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestASlotThatMovesToALentGPUIsNotLoadedThere(t *testing.T) {
	f := given(t, 16384, server("v", 2000))
	f.secondGPU(16384)
	f.warm("v", 2000)
	f.step(Lend{GPU: 1, Until: f.now.Add(time.Hour)})
	f.reconfigure(func(c *Config) { c.Slots[0].GPUs = []int{1} }) // it stays where it is until it is unloaded
	f.step(Unload{Slot: "v"})
	h := f.submit("v")
	f.evicted("v", 2000)
	f.advance(time.Second)
	f.requireWaiting(h)
	f.requireLoads("v")
}

func TestALentGPUThatGetsAnotherIndexTakesNoJobsUnderIt(t *testing.T) {
	f := given(t, 16384, server("v", 2000), server("w", 2000, on(1)))
	f.secondGPU(16384)
	f.warm("w", 0)
	f.step(Lend{GPU: 0, Until: f.now.Add(time.Hour)})
	f.cards[0].Index, f.cards[1].Index = 1, 0
	f.sample()
	f.requireWaiting(f.submit("w"))
}

func TestARestoreComesWhenOutsidersGiveItsMemoryBack(t *testing.T) {
	f := madeWay(t)
	f.step(Unload{Slot: "guest"})
	f.unloaded("guest")
	f.use(0) // a game took what guest gave back
	f.advance(restoreAfter + time.Minute)
	f.requireLoads()
	f.use(-10000)
	f.advance(time.Second)
	f.requireLoads("main")
}

func TestWhoMadeWayForAClientThatLeftMeanwhileIsRestored(t *testing.T) {
	f := given(t, 16384, server("main", 10000), server("guest", 10000))
	f.reconfigure(restores("main"))
	f.warm("main", 10000)
	f.advance(time.Minute)
	h := f.submit("guest")
	f.requireUnloads("main")
	f.cancel(h)
	f.evicted("main", 10000)
	f.advance(restoreAfter)
	f.requireLoads("main", "main")
}

func TestNobodyRestsOnceTheSchedulerOnlyPassesThrough(t *testing.T) {
	f := given(t, 16384, server("v", 2000, wide(4)))
	f.reconfigure(restful)
	f.warm("v", 0)
	f.requireRunning(f.of("a", "v"))
	resting := f.of("a", "v")
	f.requireWaiting(resting)
	f.reconfigure(func(c *Config) { c.Mode = Passthrough })
	f.requireRunning(resting, f.of("a", "v"))
}

func TestRestingJobsOfAnUnhealthyServerAreRefusedAtOnce(t *testing.T) {
	f := given(t, 16384, server("v", 2000, wide(4)))
	f.reconfigure(restful)
	f.warm("v", 0)
	f.requireRunning(f.of("a", "v"))
	resting := f.of("a", "v")
	f.step(Probed{Slot: "v", Sent: f.now, Outcome: ProbeWrong, Detail: "it says 500"})
	f.requireRefused(resting, Unhealthy)
}

func TestAnOverdueTargetOfTwoGPUsKeepsOneWhileTheOtherIsInATransition(t *testing.T) {
	f := given(t, 16384, server("v", 10000), server("w", 3000), server("big", 24000, on(0, 1)), server("small", 6000, on(1)))
	f.secondGPU(16384)
	f.warm("v", 10000)
	f.advance(time.Minute)
	f.submit("v")
	f.submit("v")
	f.submit("big")
	f.advance(200 * time.Second)
	f.submit("w") // its load takes long
	f.requireLoads("v", "w")
	f.advance(200 * time.Second)
	require.Contains(t, f.slot("big").Why, "the load or unload of w")
	small := f.submit("small")
	f.requireLoads("v", "w")
	f.requireWaiting(small)
}

func TestItIsForetoldThatAVictimGoesThoughNobodyHasLookedAtTheMemorySince(t *testing.T) {
	f := given(t, 16384, server("v", 10000), server("t", 10000))
	f.warm("v", 10000)
	f.advance(time.Minute)
	f.now = f.now.Add(time.Second)
	f.s.doubt(f.now, f.s.named["v"]) // as after the first job of a lazy server
	x := f.s.Explain(f.now, "t", 100)
	f.submit("t")
	f.requireUnloads("v")
	require.Equal(t, "evicts", x.Outcome, x.Reason)
}
