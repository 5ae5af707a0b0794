package scheduler

import "testing"

// accounting §1: no decision of ours takes the bookings above T - R; an overcommitted GPU gets no load.
func TestADeadServerIsNotStartedAgainOnAnOvercommittedGPU(t *testing.T) {
	f := given(t, 16384, server("a", 12000, restarts(9)), server("b", 8000, starts))
	f.cards[0].Free = 0
	f.sample()
	f.probe("a", Yes) // loaded before we came, both of them
	f.probe("b", Yes)
	f.dies("a", 8000)
	f.requireState("a", Idle)
	f.requireLoads()
}

func TestAServerThatDiesWhileItIsUnloadedByHandStaysUnloaded(t *testing.T) {
	f := given(t, 16384, server("a", 8000, restarts(9)))
	f.warm("a", 8000)
	h := f.submit("a")
	f.step(Unload{Slot: "a"})
	f.step(Died{Slot: "a"})
	f.free(16384)
	f.releaseAs(h, ServerDied)
	f.requireState("a", Idle)
}
