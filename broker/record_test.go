package broker

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func TestTheRecordKeepsTheLatestDecisionsInBothOrders(t *testing.T) {
	for _, n := range []int{0, 1, ringSize - 1, ringSize, ringSize + 1, 2*ringSize + 7} {
		var r ring
		for i := range n {
			r.add(scheduler.Decision{Reason: strconv.Itoa(i)})
		}
		kept := min(n, ringSize)
		list := r.list()
		require.Len(t, list, kept)
		back := 0
		for d := range r.latest {
			require.Equal(t, strconv.Itoa(n-1-back), d.Reason)
			require.Equal(t, list[kept-1-back], *d)
			back++
		}
		require.Equal(t, kept, back)
	}
}
