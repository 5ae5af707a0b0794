package broker

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// automatic is a world that has not begun, of a consumer m with models auto and of others. The server of m comes into the generation's lifecycles.
func automatic(t *testing.T, others ...*config.Consumer) (*world, *modelServer) {
	w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
	c := server("m", 2*gpu.GiB)
	c.AutoModels = true
	w.gen = w.generation(t, nil, append([]*config.Consumer{c}, others...)...)
	traits := everything
	traits.LoadModel, traits.UnloadModel, traits.Models, traits.Catalog = true, true, true, true
	w.servers["m"].traits = traits
	return w, &modelServer{fakeServer: w.servers["m"]}
}

// A consumer whose server says what models it has may have no slot: it stays while it is configured, and goes when it is not.
func TestAConsumerWithoutSlotsStaysWhileItIsConfigured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := automatic(t, server("a", gpu.GiB))
		defer w.Close()
		w.gen.Lifecycles["m"] = m
		require.NoError(t, w.Push(w.gen))
		pass(time.Second)
		require.True(t, w.Knows("m"))
		require.Empty(t, w.SlotNames("m"))

		m.tells(lifecycle.Model{Name: "x", Resident: gpu.GiB})
		pass(10 * time.Second)
		require.Equal(t, []string{"m/x"}, w.SlotNames("m"), "seen loaded")
		m.tells()
		pass(20 * time.Second)
		require.Empty(t, w.SlotNames("m"), "gone, and forgotten")
		require.True(t, w.Knows("m"))
		m.tells(lifecycle.Model{Name: "y", Resident: gpu.GiB})
		pass(10 * time.Second)
		require.Equal(t, []string{"m/y"}, w.SlotNames("m"), "it is still probed")
		m.tells()
		pass(20 * time.Second)

		w.reload(t, w.generation(t, nil, server("a", gpu.GiB)))
		pass(time.Second)
		require.False(t, w.Knows("m"), "it is not in the configuration any more")
		require.True(t, w.Knows("a"))
	})
}

// catalogServer is a modelServer that lists what it could load, unless it is down.
type catalogServer struct {
	*modelServer
	lists []lifecycle.Model
	down  bool
}

func (c *catalogServer) Open(lifecycle.Deps) (lifecycle.Driver, error) { return c, nil }
func (c *catalogServer) Elsewhere(string) bool                         { return false }
func (c *catalogServer) Catalog(context.Context) ([]lifecycle.Model, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.down {
		return nil, errors.New("connection refused")
	}
	return c.lists, nil
}

// What a server has listed is known while it does not answer, so that a request for it can start it, or go to a fallback.
func TestWhatAServerListedIsKnownWhileItIsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, server := automatic(t)
		defer w.Close()
		m := &catalogServer{modelServer: server, lists: []lifecycle.Model{{Name: "x"}, {Name: "y"}}}
		w.gen.Lifecycles["m"] = m
		require.NoError(t, w.Push(w.gen))
		offers := func(model string) Offer { return w.Offer(t.Context(), "m", model) }
		require.Equal(t, Offer{Known: lifecycle.Yes, As: "x"}, offers("x"))
		require.Equal(t, lifecycle.No, offers("z").Known)

		m.mu.Lock()
		m.down = true
		m.mu.Unlock()
		pass(catalogRest)
		require.Equal(t, Offer{Silent: "connection refused"}, offers("z"), "it may have come meanwhile")
		require.Equal(t, Offer{Known: lifecycle.Yes, As: "y"}, offers("y"))
		require.Equal(t, m.lists, w.Catalogs(t.Context(), []string{"m"})[0])

		m.mu.Lock()
		m.down, m.lists = false, m.lists[:1]
		m.mu.Unlock()
		pass(catalogRest)
		require.Equal(t, m.lists, w.Catalogs(t.Context(), []string{"m"})[0])
		require.Equal(t, lifecycle.No, offers("y").Known)

		w.mu.Lock() // x was deleted since, and a load has just shown it
		w.consumers["m"].miss(time.Now(), "x")
		w.mu.Unlock()
		require.Equal(t, lifecycle.No, offers("x").Known, "the list is older")
		pass(missingFor)
		require.Equal(t, lifecycle.Yes, offers("x").Known, "it is asked anew")
	})
}

// failingServer is a catalogServer whose loads fail.
type failingServer struct {
	*catalogServer
	err error
}

func (f *failingServer) Open(lifecycle.Deps) (lifecycle.Driver, error) { return f, nil }
func (f *failingServer) Load(context.Context, lifecycle.Target) error  { return f.err }

func TestOnlyTheServersWordThatThereIsNoSuchModelMakesOneMissing(t *testing.T) {
	for _, c := range []struct {
		err  error
		want lifecycle.Tri
	}{{errors.New("500 Internal Server Error"), lifecycle.Yes}, {fmt.Errorf("404: %w", lifecycle.ErrNoModel), lifecycle.No}} {
		synctest.Test(t, func(t *testing.T) {
			w, server := automatic(t)
			defer w.Close()
			w.gen.Lifecycles["m"] = &failingServer{&catalogServer{modelServer: server, lists: []lifecycle.Model{{Name: "x"}}}, c.err}
			require.NoError(t, w.Push(w.gen))
			require.Equal(t, lifecycle.Yes, w.Offer(t.Context(), "m", "x").Known)
			_, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "x"})
			require.Error(t, err)
			pass(time.Minute)
			require.Equal(t, c.want, w.Offer(t.Context(), "m", "x").Known)
		})
	}
}

// stuckServer is a catalogServer that answers after a while, if at all.
type stuckServer struct {
	*catalogServer
	after time.Duration
}

func (s *stuckServer) Open(lifecycle.Deps) (lifecycle.Driver, error) { return s, nil }
func (s *stuckServer) Catalog(ctx context.Context) ([]lifecycle.Model, error) {
	select {
	case <-time.After(s.after):
		return s.lists, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// One that hangs delays a name that nobody is known to have, once, and no other name.
func TestServersAreAskedForTheirModelsSideBySide(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		other := server("n", gpu.GiB)
		other.AutoModels = true
		w, first := automatic(t, other)
		defer w.Close()
		w.servers["n"].traits = w.servers["m"].traits
		w.gen.Lifecycles["m"] = &stuckServer{&catalogServer{modelServer: first}, time.Hour}
		w.gen.Lifecycles["n"] = &stuckServer{&catalogServer{modelServer: &modelServer{fakeServer: w.servers["n"]}, lists: []lifecycle.Model{{Name: "x"}}}, time.Second}
		require.NoError(t, w.Push(w.gen))
		limit := w.consumers["m"].probeTimeout
		require.Greater(t, limit, time.Second)
		takes := func(want time.Duration, do func()) {
			t.Helper()
			began := time.Now()
			do()
			require.Equal(t, want, time.Since(began))
		}
		both := []string{"m", "n"}
		known := func(model string) (known []lifecycle.Tri) {
			for _, offer := range w.Offers(t.Context(), both, model) {
				known = append(known, offer.Known)
			}
			return known
		}
		has := []lifecycle.Tri{lifecycle.Unknown, lifecycle.Yes}
		takes(limit, func() { require.Equal(t, has, known("x")) })
		takes(0, func() { require.Equal(t, has, known("x")) })
		pass(catalogRest)
		takes(0, func() { require.Equal(t, has, known("x")) })
		takes(limit, func() { require.Equal(t, []lifecycle.Tri{lifecycle.Unknown, lifecycle.No}, known("y")) })
		pass(catalogRest)
		takes(limit, func() { require.Equal(t, [][]lifecycle.Model{nil, {{Name: "x"}}}, w.Catalogs(t.Context(), both)) })
	})
}

func TestModelsAutoNeedsACatalog(t *testing.T) {
	traits := everything
	traits.UnloadModel, traits.LoadModel = true, true
	cc := &config.Consumer{Name: "m", AutoModels: true, VRAM: gpu.GiB}
	require.ErrorContains(t, checkTraits(&config.Broker{}, cc, traits), "has no catalog")
	traits.Catalog = true
	require.NoError(t, checkTraits(&config.Broker{}, cc, traits))
}

// What its clients ask for may be anything: what is known of missing models is bounded, and the oldest goes first.
func TestWhatAServerDoesNotHaveIsRememberedForAWhileWithinBounds(t *testing.T) {
	c := &consumer{}
	at := time.Now()
	name := func(i int) string { return "m" + strconv.Itoa(i) }
	for i := range maxMissing {
		c.miss(at.Add(time.Duration(i)*time.Millisecond), name(i))
	}
	later := at.Add(time.Second)
	require.Len(t, c.catalog.missing, maxMissing)
	require.True(t, c.misses(later, name(0)), "none goes before there are too many")
	c.miss(later, name(1)) // one that is known takes nobody's place
	require.True(t, c.misses(later, name(0)))
	c.miss(later, name(maxMissing))
	require.Len(t, c.catalog.missing, maxMissing)
	require.False(t, c.misses(later, name(0)), "the oldest has gone")
	require.True(t, c.misses(later, name(1)))
	require.True(t, c.misses(later, name(maxMissing)))
	require.True(t, c.misses(later.Add(5*time.Minute-1), name(1)))
	require.False(t, c.misses(later.Add(5*time.Minute), name(1)))
}
