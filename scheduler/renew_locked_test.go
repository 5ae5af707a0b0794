package scheduler

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAStaleSlotIsRenewedByASchedulerThatUnloadsNothing(t *testing.T) {
	f := given(t, 16384, server("a", 8000, starts))
	f.warm("a", 8000)
	f.reconfigure(func(c *Config) { c.Mode = Locked; c.Slots[0].Stale = true })
	f.look(60e9)
	require.True(t, f.slot("a").GateOpen, "%s", f.decisions[len(f.decisions)-1].Reason)
	require.Less(t, len(f.decisions), 20)
}
