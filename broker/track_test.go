package broker

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// tracker is a server whose answers name jobs.
type tracker struct {
	*fakeServer
	tracked int
}

func (d *tracker) Open(lifecycle.Deps) (lifecycle.Driver, error) { return d, nil }
func (d *tracker) Track([]byte) bool                             { d.tracked++; return true }

func TestAnAnswerIsTrackedAtTheServerThatGaveItThoughASharerHasItsNameNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		gen := w.generation(t, nil, server("a", gpu.GiB), server("b", gpu.GiB))
		a, b := &tracker{fakeServer: w.servers["a"]}, &tracker{fakeServer: w.servers["b"]}
		gen.Lifecycles["a"], gen.Lifecycles["b"] = a, b
		w.gen = gen
		require.NoError(t, w.Push(gen))
		defer w.Close()
		pass(10 * time.Second)
		l, err := w.Acquire(t.Context(), Request{Consumer: "a"})
		require.NoError(t, err)
		sharer := server("a", gpu.GiB)
		sharer.Shares = "b"
		next := w.generation(t, nil, sharer, server("b", gpu.GiB))
		next.Lifecycles["b"] = b
		w.reload(t, next)
		l.Track([]byte(`{"id": 7}`))
		l.Release(scheduler.Served)
		require.Equal(t, []int{1, 0}, []int{a.tracked, b.tracked})
	})
}
