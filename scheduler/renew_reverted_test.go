package scheduler

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAStaleSlotThatIsNoneAfterAllGoesOn(t *testing.T) {
	f := given(t, 16384, server("a", 8000, starts, wide(2)))
	f.warm("a", 8000)
	running := f.submit("a")
	f.stale("a", true)
	h := f.submit("a")
	f.requireWaiting(h)
	f.stale("a", false)
	f.requireRunning(h)
	f.release(running)
	f.release(h)
	f.requireState("a", Ready)
	require.Empty(t, f.renews)
	f.requireUnloads()
}
