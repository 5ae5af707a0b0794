package broker

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// mover listens elsewhere after each start, and knows that before it is ready.
type mover struct {
	*supervised
	at string
}

func (d *mover) Upstream() string                                   { return d.at }
func (d *mover) Open(deps lifecycle.Deps) (lifecycle.Driver, error) { d.deps = deps; return d, nil }

func TestARequestThatNeedsNoGPUDoesNotGoWhereTheServerListenedBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		c := server("p", gpu.GiB)
		c.Upstream = ""
		w.gen = w.generation(t, nil, c)
		w.servers["p"].traits.Starts = true
		d := &mover{supervised: &supervised{fakeServer: w.servers["p"]}, at: "127.0.0.1:9100"}
		w.gen.Lifecycles["p"] = d
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		pass(time.Second)
		require.NoError(t, w.LoadByHand(t.Context(), "p"))
		d.run.Store(false)
		require.NoError(t, w.UnloadByHand(t.Context(), "p", false))
		d.run.Store(false)
		d.load = time.Minute
		d.at = "127.0.0.1:9101"
		go func() { _ = w.LoadByHand(t.Context(), "p") }()
		pass(10 * time.Second)
		at, runs := w.Address("p")
		require.True(t, runs)
		require.Equal(t, "127.0.0.1:9101", at)
		pass(2 * time.Minute)
	})
}

// starter is a supervised driver whose server takes long to start, as one of systemd with Type=notify.
type starter struct{ *supervised }

func (d *starter) Load(c context.Context, t lifecycle.Target) error {
	if !sleep(c, time.Minute) {
		return c.Err()
	}
	return d.supervised.Load(c, t)
}
func (d *starter) Open(deps lifecycle.Deps) (lifecycle.Driver, error) { d.deps = deps; return d, nil }

func TestAReloadWhileAServerIsBeingStartedWaitsForIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		w.gen = w.generation(t, nil, server("p", gpu.GiB))
		w.servers["p"].traits.Starts = true
		d := &starter{&supervised{fakeServer: w.servers["p"]}}
		w.gen.Lifecycles["p"] = d
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		pass(time.Second)
		go func() { _ = w.LoadByHand(t.Context(), "p") }()
		pass(10 * time.Second)
		require.Equal(t, "LOADING", w.stateOf(t, "p"))
		next := w.generation(t, nil, server("p", gpu.GiB))
		next.Keys["p"] = "another"
		next.Lifecycles["p"] = &starter{&supervised{fakeServer: newServer(w.gpu, gpu.GiB)}}
		require.NoError(t, w.Push(next))
		w.Pop(w.gen)
		pass(time.Second)
		require.Zero(t, d.closed.Load(), "its start is under way")
		pass(10 * time.Minute)
		require.EqualValues(t, 1, d.closed.Load())
	})
}

func TestAServerIsProbedAtOnceWhenThatIsAskedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		pass(10*time.Second + time.Millisecond)
		a := w.servers["a"]
		before := a.count(&a.probes)
		w.ProbeSoon("nobody")
		synctest.Wait()
		require.Equal(t, before, a.count(&a.probes))
		w.ProbeSoon("a")
		synctest.Wait()
		require.Equal(t, before+1, a.count(&a.probes))
		w.Close()
		w.ProbeSoon("a") // nobody is there to do it
	})
}
