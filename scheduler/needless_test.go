package scheduler

import (
	"testing"
	"time"
)

func TestADrainedVictimStaysIfTheUnloadBeforeItsOwnMadeEnoughRoom(t *testing.T) {
	f := given(t, 16384, server("a", 8500), server("v", 7000, asksBusy), server("t", 6000))
	f.warm("v", 7000)
	f.warm("a", 8500)
	f.advance(time.Minute)
	h := f.submit("a")
	f.step(Unload{Slot: "a"}) // drains
	f.works["v"] = true       // on something that nobody told us of
	f.submit("t")
	f.requireUnloads()
	f.release(h)
	f.requireUnloads("a")
	f.works["v"] = false
	f.advance(time.Second) // v is ready to go, and waits for the transition of a
	f.unloaded("a")
	f.use(-8500) // t fits by this alone
	f.requireUnloads("a")
	f.requireState("v", Ready)
	f.requireState("t", Loading)
}

func TestALoadWaitsForALookAtTheMemoryThatAFailedOneMayStillHold(t *testing.T) {
	f := given(t, 16384, server("a", 9000), server("b", 8000))
	f.submit("a")
	f.advance(3 * time.Second) // it takes memory that no sample has seen yet
	f.submit("b")
	f.loadFails("a", "it crashed")
	f.requireLoads("a")
	f.free(9000)
	f.requireLoads("a", "b")
}

func TestWhatAJobTookIsNotTakenForSeenBeforeALookAtIt(t *testing.T) {
	f := given(t, 16384, lazyServer("a", 5000), server("b", 6500))
	f.free(7000) // outsiders hold the rest
	h := f.submit("a")
	f.advance(time.Second)
	f.release(h) // a has taken 5000; the last sample says 7000 free still
	f.submit("b")
	f.requireLoads()
}
