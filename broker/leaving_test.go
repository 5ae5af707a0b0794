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

func TestCloseClosesAServerWhoseNameWasTakenByASharer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB), server("b", gpu.GiB))
		pass(10 * time.Second)
		_, err := w.Acquire(t.Context(), Request{Consumer: "a"})
		require.NoError(t, err)
		old := w.servers["a"]
		a := server("a", gpu.GiB)
		a.Shares = "b"
		next := w.generation(t, nil, a, server("b", gpu.GiB))
		require.NoError(t, w.Push(next))
		w.Pop(w.gen)
		pass(time.Second)
		w.Close()
		require.Equal(t, 1, old.count(&old.closed))
	})
}

func TestADriverIsNotReplacedUnderTheWorkOfAModelThatWasRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		models := func(names ...string) *config.Consumer {
			c := server("m", gpu.GiB)
			for _, n := range names {
				c.Models = append(c.Models, &config.Model{Name: n})
			}
			return c
		}
		w.gen = w.generation(t, nil, models("a", "b"))
		traits := lifecycle.Traits{Load: true, Unload: true, Health: true, Residency: true, LoadModel: true, UnloadModel: true, Models: true, Starts: true}
		w.servers["m"].traits = traits
		d := &supervisedModels{&modelServer{fakeServer: w.servers["m"]}, new(supervised)}
		d.run.Store(true)
		w.gen.Lifecycles["m"] = d
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		pass(time.Second)
		l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "b"})
		require.NoError(t, err)
		w.servers["m"].traits = traits
		first := w.generation(t, nil, models("a"))
		first.Lifecycles["m"] = d
		w.reload(t, first)
		next := w.generation(t, nil, models("a"))
		next.Keys["m"] = "another"
		n := newServer(w.gpu, gpu.GiB)
		n.traits = traits
		next.Lifecycles["m"] = &supervisedModels{&modelServer{fakeServer: n}, new(supervised)}
		w.reload(t, next)
		pass(time.Minute)
		require.Zero(t, d.closed.Load(), "it works")
		l.Release(scheduler.Served)
		pass(5 * time.Minute)
		require.EqualValues(t, 1, d.closed.Load())
	})
}

type supervisedModels struct {
	*modelServer
	*supervised
}

func (d *supervisedModels) Open(lifecycle.Deps) (lifecycle.Driver, error) { return d, nil }
func (d *supervisedModels) Traits() lifecycle.Traits                      { return d.modelServer.Traits() }
func (d *supervisedModels) Close() error                                  { return d.supervised.Close() }
func (d *supervisedModels) Probe(c context.Context) lifecycle.Report      { return d.modelServer.Probe(c) }
func (d *supervisedModels) Load(c context.Context, t lifecycle.Target) error {
	return d.modelServer.Load(c, t)
}
func (d *supervisedModels) Unload(c context.Context, t lifecycle.Target) (bool, error) {
	return d.modelServer.Unload(c, t)
}
func (d *supervisedModels) Busy(c context.Context, t lifecycle.Target) (bool, error) {
	return d.modelServer.Busy(c, t)
}
