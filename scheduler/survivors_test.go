package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What a configuration let run at once keeps the one lock of all GPUs until the last of it ends.
func TestTheLockOfAllGPUsIsRebuiltFromAllWhoCompute(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 1000), server("b", 1000, on(1)), server("c", 1000)}
	f := givenConfig(t, cfg, 16384, 16384)
	for _, c := range cfg.Slots {
		f.probe(c.Name, Yes)
	}
	a, b := f.submit("a"), f.submit("b")
	f.requireRunning(a, b)
	f.reconfigure(func(c *Config) { c.LockGlobal = true })
	c := f.submit("c")
	f.release(a)
	f.requireWaiting(c) // b computes on another GPU, and there is one lock
	require.Equal(t, "b", f.s.Snapshot(f.now).GPUs[0].Owner)
	f.release(b)
	f.requireRunning(c)
}

func TestTheLocksOfSingleGPUsAreRebuiltFromThoseWhoComputeThere(t *testing.T) {
	f := residents(t, server("a", 1000), server("b", 1000, lockNone), server("c", 1000))
	a, b := f.submit("a"), f.submit("b")
	f.requireRunning(a, b)
	f.reconfigure(func(c *Config) { c.Slots[1].LockNone = false })
	c := f.submit("c")
	f.release(a)
	f.requireWaiting(c) // b computes on this GPU, under the lock by now
	f.release(b)
	f.requireRunning(c)
}

func TestWhoIsHeldUpByALoadInsideAJobSaysSo(t *testing.T) {
	f := given(t, 24576, lazyServer("a", 8000), server("b", 8000))
	f.requireRunning(f.submit("a"))
	f.requireWaiting(f.submit("b"))
	require.Equal(t, "waits for the first job of a, inside which it loads", f.slot("b").Why)
}

func TestTheNamesOfOutsidersStayBetweenFullLooks(t *testing.T) {
	f := given(t, 16384, server("a", 1000))
	names := func() []string { return f.s.Snapshot(f.now).GPUs[0].Device.Outsiders }
	f.cards[0].Outsiders = []string{"PID 7 game"}
	f.use(9000)
	f.cards[0].Outsiders = nil // a look at the memory alone
	f.advance(50 * time.Millisecond)
	f.sample()
	require.Equal(t, []string{"PID 7 game"}, names())
	f.cards[0].Outsiders = []string{}
	f.sample()
	require.Empty(t, names())
}
