package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Rules 3 and 4.

func TestABusySlotGoesOnceItsNextJobIsYoungEnough(t *testing.T) {
	f := given(t, 16384, server("v", 10000), server("t", 10000))
	f.warm("v", 10000)
	f.advance(time.Minute)
	j0 := f.submit("v")
	f.submit("t") // B = 300 s
	f.advance(299 * time.Second)
	j1 := f.submit("v")
	f.advance(2 * time.Second)
	j2 := f.submit("v")
	f.advance(time.Minute)
	require.True(t, f.slot("v").GateOpen, "j1 came less than B after t")
	f.release(j0)
	f.requireRunning(j1)
	require.False(t, f.slot("v").GateOpen, "j2 came more than B after t")
	f.requireWaiting(j2)
	require.Equal(t, "t", f.decided("drain", "v").Target)
	f.release(j1)
	f.requireUnloads("v")
}

func TestNowStandsForTheNextJobOfASlotThatNobodyWaitsFor(t *testing.T) {
	f := given(t, 16384, server("v", 10000), server("t", 10000))
	f.warm("v", 10000)
	f.submit("v")
	f.submit("t")
	f.advance(300*time.Second - 1)
	require.True(t, f.slot("v").GateOpen)
	f.advance(1)
	require.False(t, f.slot("v").GateOpen)
}

func TestLessUrgentJobsDoNotKeepASlotFromGoing(t *testing.T) {
	f := given(t, 16384, server("v", 10000), server("t", 10000))
	f.warm("v", 10000)
	f.advance(time.Minute)
	f.submit("v")
	f.submitJob(Submit{Slot: "v", Priority: 200})
	f.submitJob(Submit{Slot: "t", Priority: 100})
	f.advance(300 * time.Second)
	require.False(t, f.slot("v").GateOpen)
}

// overdue is a world in which t is overdue when v is loaded at last, in 400 s.
// Two of the three jobs that wait for v then are young enough to make way for t.
func overdue(t *testing.T) (f *fixture, batch []*handle) {
	f = given(t, 16384, server("v", 10000), server("t", 10000))
	batch = append(batch, f.submit("v"))
	f.submit("t")
	f.advance(350 * time.Second)
	batch = append(batch, f.submit("v"), f.submit("v"))
	f.advance(50 * time.Second)
	f.loaded("v")
	f.requireRunning(batch[0])
	return f, batch
}

func TestABusySlotIsLeftAloneForItsSwitchCost(t *testing.T) {
	f, batch := overdue(t)
	for i := range batch {
		f.advance(time.Second)
		if i < 2 {
			f.release(batch[i])
		}
	}
	f.advance(397*time.Second - 1)
	require.True(t, f.slot("v").GateOpen)
	f.advance(1)
	require.False(t, f.slot("v").GateOpen)
}

func TestABusySlotServesTheBatchThatWaitedWhenItBecameReady(t *testing.T) {
	f, batch := overdue(t)
	f.advance(500 * time.Second)
	f.release(batch[0])
	f.requireRunning(batch[1])
	f.submit("v") // it came later: it is no part of the batch
	require.True(t, f.slot("v").GateOpen)
	f.release(batch[1])
	f.requireRunning(batch[2])
	require.False(t, f.slot("v").GateOpen)
}

func TestTheBatchProtectsNoLongerThanOvertakeMax(t *testing.T) {
	f, _ := overdue(t)
	f.advance(600*time.Second - 1)
	require.True(t, f.slot("v").GateOpen)
	f.advance(1)
	require.False(t, f.slot("v").GateOpen)
}

func TestASlotThatHasServedNobodySinceItBecameReadyStays(t *testing.T) {
	f := given(t, 16384, server("v", 10000), server("t", 10000), server("w", 1000))
	f.warm("w", 1000)
	w := f.submit("w")
	v := f.submit("v")
	f.submit("t")
	f.loaded("v")
	f.advance(8 * time.Minute)
	f.requireWaiting(v) // w has the lock
	require.True(t, f.slot("v").GateOpen)
	f.release(w)
	f.requireRunning(v)
}

func TestASlotThatServedNobodySinceItBecameReadyStaysThoughItsJobsAreYoung(t *testing.T) {
	f := given(t, 16384, server("v", 10000), server("t", 10000), server("w", 1000))
	f.warm("w", 1000)
	w := f.submit("w") // has the lock
	v1 := f.submit("v")
	f.submit("t")
	f.advance(time.Second)
	f.loaded("v")
	f.advance(302 * time.Second)
	v2 := f.submit("v") // younger than t by more than B, and no part of the batch
	f.cancel(v1)
	require.True(t, f.slot("v").GateOpen)
	f.release(w)
	f.requireRunning(v2)
	f.submit("v")
	f.advance(5 * time.Second)
	require.False(t, f.slot("v").GateOpen)
}

func TestBusyRouteThatNeverWorksDoesNotHoldTheGPUForEver(t *testing.T) {
	f := given(t, 16384, lazyServer("comfyui", 10000, async), server("mvoice", 2868))
	f.deaf["comfyui"] = true
	f.releaseAs(f.submit("comfyui"), Accepted)
	h := f.submit("mvoice")
	f.advance(defaults().DrainTimeout - time.Second)
	require.Equal(t, 1, f.slot("comfyui").Held)
	f.requireWaiting(h)
	f.advance(2 * time.Second)
	require.Zero(t, f.slot("comfyui").Held)
	require.Equal(t, "comfyui", f.decided("busy_unknown", "comfyui").Slot)
}
