package broker

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// A model of a server that is to be replaced is loaded past us while another is unloaded.
func TestAConsumerIsRenewedThoughAModelWasLoadedPastUsMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		models := func() *config.Consumer {
			c := server("m", gpu.GiB)
			c.Models = []*config.Model{{Name: "a"}, {Name: "b"}}
			return c
		}
		w.gen = w.generation(t, nil, models())
		traits := lifecycle.Traits{Load: true, Unload: true, Health: true, Residency: true, Busy: true, LoadModel: true, UnloadModel: true, Models: true, Starts: true}
		w.servers["m"].traits = traits
		d := &supervisedModels{&modelServer{fakeServer: w.servers["m"]}, new(supervised)}
		d.run.Store(true)
		w.gen.Lifecycles["m"] = &slowModels{d}
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		pass(time.Second)
		l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "b"})
		require.NoError(t, err)
		next := w.generation(t, nil, models())
		next.Keys["m"] = "another"
		n := newServer(w.gpu, gpu.GiB)
		n.traits = traits
		next.Lifecycles["m"] = &supervisedModels{&modelServer{fakeServer: n}, new(supervised)}
		w.reload(t, next)
		pass(time.Minute)
		l.Release(scheduler.Served) // b is unloaded, which takes a while
		pass(time.Second)
		d.modelServer.tells(lifecycle.Model{Name: "a", Resident: -1})
		pass(10 * time.Minute)
		require.EqualValues(t, 1, d.closed.Load())
		_, err = w.Acquire(t.Context(), Request{Consumer: "m", Model: "a"})
		require.NoError(t, err)
	})
}

// slowModels takes its time to unload.
type slowModels struct{ *supervisedModels }

func (d *slowModels) Open(lifecycle.Deps) (lifecycle.Driver, error) { return d, nil }
func (d *slowModels) Unload(c context.Context, t lifecycle.Target) (bool, error) {
	sleep(c, 8*time.Second)
	return d.supervisedModels.Unload(c, t)
}
