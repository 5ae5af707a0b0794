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

// slowClose takes its time to close.
type slowClose struct {
	*supervised
	takes time.Duration
}

func (d *slowClose) Open(deps lifecycle.Deps) (lifecycle.Driver, error) { d.deps = deps; return d, nil }
func (d *slowClose) Close() error {
	pass(d.takes)
	return d.supervised.Close()
}

// closing is a broker whose one consumer has a driver that is being closed for the next.
func closing(t *testing.T) (w *world, old *slowClose, next *supervisors) {
	t.Helper()
	w = &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
	g, _ := w.supervisedAs(t, "one")
	old = &slowClose{supervised: &supervised{fakeServer: w.servers["a"]}, takes: time.Minute}
	g.Lifecycles["a"], w.gen = old, g
	require.NoError(t, w.Push(g))
	w.serves(t, "a")
	g, next = w.supervisedAs(t, "two")
	w.reload(t, g)
	pass(10 * time.Second)
	require.False(t, old.run.Load())
	require.Zero(t, old.closed.Load())
	return w, old, next
}

func TestADriverThatIsBeingClosedIsClosedOnceWhateverHappensMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, old, next := closing(t)
		defer w.Close()
		for range 5 {
			again, unused := w.supervisedAs(t, "two")
			w.reload(t, again)
			require.Empty(t, unused.opened)
			w.mu.Lock()
			w.apply(time.Now(), scheduler.Wake{})
			w.renew(w.consumers["a"])
			w.mu.Unlock()
			pass(time.Second)
		}
		w.serves(t, "a") // once the other has come
		require.True(t, next.opened[0].run.Load())
		pass(time.Hour)
		require.EqualValues(t, 1, old.closed.Load())
		require.Zero(t, next.opened[0].closed.Load())
	})
}

func TestABrokerThatEndsWhileADriverIsClosedTakesNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, old, next := closing(t)
		w.Close()
		require.EqualValues(t, 1, old.closed.Load())
		require.EqualValues(t, 1, next.opened[0].closed.Load())
		require.False(t, next.opened[0].run.Load())
	})
}

func TestADriverWhoseConsumerGoesWhileItIsClosedIsFollowedByNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, old, next := closing(t)
		defer w.Close()
		w.reload(t, w.generation(t, nil, server("b", gpu.GiB)))
		pass(time.Hour)
		require.EqualValues(t, 1, old.closed.Load())
		require.EqualValues(t, 1, next.opened[0].closed.Load())
		w.serves(t, "b")
	})
}
