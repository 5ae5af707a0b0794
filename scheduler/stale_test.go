package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What an unload is measured against may be older than the load itself: looks are rare while nothing is handed over.
func TestUnloadDecidedOnALookFromBeforeTheLoadWaitsForTheMemoryAllTheSame(t *testing.T) {
	for name, early := range map[string]bool{"seen during the call": true, "seen only after the call": false} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 13312), server("b", 10000))
			f.advance(time.Millisecond)
			h := f.submit("a")
			f.loaded("a")
			f.release(h)
			f.advance(time.Minute) // nobody has looked
			h = f.submit("b")
			f.requireState("a", Stopping)
			f.advance(time.Millisecond)
			if early {
				f.free(3072)
			}
			f.unloaded("a")
			f.advance(time.Millisecond)
			f.free(3072)
			f.requireState("a", Stopping)
			f.advance(time.Second)
			f.free(3072)
			f.requireState("a", Stopping)
			f.free(16384)
			f.requireState("a", Idle)
			require.Zero(t, f.booking("a"))
			f.loaded("b")
			f.requireRunning(h)
			require.Equal(t, "gave back 13GiB of 13GiB", f.decisions[len(f.decisions)-3].Reason)
		})
	}
}

func TestResidueIsNotTakenForWhatAnotherGivesBack(t *testing.T) {
	f := given(t, 20480, server("a", 9216), server("c", 5120), server("b", 9216))
	f.warm("a", 9216)
	f.advance(time.Minute)
	f.warm("c", 5120)
	f.advance(time.Minute)
	h := f.submit("b")
	f.unloaded("a")
	for range 12 { // its memory never comes back
		f.advance(time.Second)
		f.sample()
	}
	f.requireState("a", Idle)
	require.EqualValues(t, 9216, f.booking("a"))
	f.requireState("c", Stopping)
	f.advance(time.Millisecond)
	f.free(11264) // what c gives back
	f.unloaded("c")
	f.advance(time.Millisecond)
	f.sample()
	f.requireState("c", Idle)
	f.loaded("b")
	f.requireRunning(h)
	f.use(9216)
	require.EqualValues(t, 9216, f.booking("a"), "it is still there, and still booked to a")
	require.Zero(t, f.s.Snapshot(f.now).GPUs[0].Outsiders)
}
