package broker

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// heir is a driver of a server without one that the broker starts.
type heir struct {
	*fakeServer
	from lifecycle.Driver
}

func (h *heir) Open(lifecycle.Deps) (lifecycle.Driver, error) { return h, nil }
func (h *heir) Inherit(before lifecycle.Driver)               { h.from = before }

func TestADriverThatIsReplacedAtOnceLeavesWhatItKnows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB))
		defer w.Close()
		pass(time.Second)
		next := w.generation(t, nil, server("a", gpu.GiB))
		h := &heir{fakeServer: newServer(w.gpu, gpu.GiB)}
		next.Lifecycles["a"], next.Keys["a"] = h, "another"
		w.reload(t, next)
		require.Equal(t, lifecycle.Driver(w.servers["a"]), h.from)
	})
}
