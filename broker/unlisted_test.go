package broker

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

func (w *world) unlistedDecisions() (reasons []string) {
	for _, d := range w.Decisions() {
		if d.Kind == "unlisted" {
			reasons = append(reasons, d.Reason)
		}
	}
	return reasons
}

func TestARouteThatNoListNamesIsToldOfOnceAndNoMoreThanSoMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB))
		defer w.Close()
		for range 3 {
			w.Unlisted("a", "POST", "/x", true)
			w.Unlisted("nobody", "POST", "/x", true)
		}
		require.Len(t, w.unlistedDecisions(), 1)
		require.Equal(t, "POST /x is in none of its lists: it was passed on without a turn; name it in gpu_routes if it needs the GPU, or in bypass if it does not", w.unlistedDecisions()[0])
		for i := range 2 * maxUnlisted {
			w.Unlisted("a", "POST", "/"+strings.Repeat("y", i+1), false)
		}
		told := w.unlistedDecisions()
		require.Equal(t, "POST /y is in none of its lists: it takes a turn; name it in bypass if it needs no GPU, or in gpu_routes if it does", told[1])
		require.Len(t, told, maxUnlisted)
		require.Contains(t, told[maxUnlisted-1], "further routes of this consumer are not recorded")
	})
}

func TestADriverThatStartsItsServerIsToldOfTheGPUThatIsThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {

		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		w.servers["a"] = newServer(w.gpu, 3*gpu.GiB)
		w.servers["a"].traits.Starts = true
		w.gen = w.generation(t, nil, server("a", 3*gpu.GiB))
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		pass(time.Second)
		w.mu.Lock()
		defer w.mu.Unlock()
		require.Equal(t, []lifecycle.Placed{{UUID: "GPU-1", Total: 16 * gpu.GiB, Claim: 3 * gpu.GiB}}, w.target(w.slots["a"]).GPUs)
	})
}
