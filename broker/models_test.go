package broker

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// modelServer is a server of several models, that tells which it holds.
type modelServer struct {
	*fakeServer
	mu       sync.Mutex
	holds    []lifecycle.Model
	unloaded []string
}

func (m *modelServer) Open(lifecycle.Deps) (lifecycle.Driver, error) { return m, nil }

func (m *modelServer) tells(models ...lifecycle.Model) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.holds = models
}

func (m *modelServer) Probe(context.Context) lifecycle.Report {
	m.mu.Lock()
	defer m.mu.Unlock()
	return lifecycle.Report{Loaded: lifecycle.TriOf(len(m.holds) > 0), Resident: -1, Models: append([]lifecycle.Model{}, m.holds...)}
}

func (m *modelServer) Load(_ context.Context, t lifecycle.Target) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.holds = append(m.holds, lifecycle.Model{Name: t.Model, Resident: -1})
	return nil
}

func (m *modelServer) Unload(_ context.Context, t lifecycle.Target) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unloaded = append(m.unloaded, t.Model)
	var left []lifecycle.Model
	for _, h := range m.holds {
		if h.Name != t.Model {
			left = append(left, h)
		}
	}
	m.holds = left
	return true, nil
}

// newModels is a broker with one server of the models a and b.
func newModels(t testing.TB) (*world, *modelServer) {
	w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
	c := server("m", 2*gpu.GiB)
	c.Models = []*config.Model{{Name: "a"}, {Name: "b"}}
	w.gen = w.generation(t, nil, c)
	traits := everything
	traits.LoadModel, traits.UnloadModel, traits.Models = true, true, true
	w.servers["m"].traits = traits
	m := &modelServer{fakeServer: w.servers["m"]}
	w.gen.Lifecycles["m"] = m
	require.NoError(t, w.Push(w.gen))
	return w, m
}

func (w *world) stateOf(t testing.TB, slot string) string {
	t.Helper()
	v, ok := w.slot(slot)
	require.True(t, ok, "there is no slot %s", slot)
	return v.State.String()
}

func TestOneProbeTellsOfAllModelsOfAConsumer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		defer w.Close()
		m.tells(lifecycle.Model{Name: "b", Resident: gpu.GiB})
		pass(10 * time.Second)
		require.Equal(t, "IDLE", w.stateOf(t, "m/a"))
		require.Equal(t, "READY", w.stateOf(t, "m/b"))
		require.Equal(t, []string{"m/a", "m/b"}, w.SlotNames("m"))
		require.Equal(t, []string{"m/b"}, w.SlotNames("m/b"))
		require.Empty(t, w.SlotNames("m/c"))
	})
}

func TestAModelThatNobodyNamedIsCountedAsItGrowsAndForgottenWhenItHasGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		defer w.Close()
		m.tells(lifecycle.Model{Name: "x", Resident: 3 * gpu.GiB})
		pass(10 * time.Second)
		require.Equal(t, "READY", w.stateOf(t, "m/x"))
		v, _ := w.slot("m/x")
		require.Equal(t, 3*gpu.GiB, v.Holds[0].Booking)
		name, as := w.Holder("", "x")
		require.Equal(t, []string{"m", "x"}, []string{name, as})
		m.tells(lifecycle.Model{Name: "x", Resident: 5 * gpu.GiB})
		pass(10 * time.Second)
		v, _ = w.slot("m/x")
		require.Equal(t, 5*gpu.GiB, v.Holds[0].Booking)
		m.tells()
		pass(20 * time.Second)
		require.Equal(t, []string{"m/a", "m/b"}, w.SlotNames("m"))
		name, _ = w.Holder("", "x")
		require.Empty(t, name)
		l, err := w.Acquire(t.Context(), Request{Consumer: "m", Turn: true})
		require.NoError(t, err)
		defer l.Release(scheduler.Served)
		require.Equal(t, "m/", l.slot.name, "who needs none of its models has a turn yet")
	})
}

func TestOnlySoManyModelsAreAdopted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		defer w.Close()
		var many []lifecycle.Model
		for i := range maxAdopted + 10 {
			many = append(many, lifecycle.Model{Name: fmt.Sprint("x", i), Resident: gpu.MiB})
		}
		m.tells(many...)
		pass(10 * time.Second)
		require.Len(t, w.SlotNames("m"), maxAdopted+2)
	})
}

func TestOneModelIsLoadedAndUnloadedByHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		defer w.Close()
		require.ErrorIs(t, w.LoadByHand(t.Context(), "m"), ErrCannot)
		require.ErrorIs(t, w.LoadByHand(t.Context(), "m/c"), ErrUnknownConsumer)
		require.NoError(t, w.LoadByHand(t.Context(), "m/a"))
		require.NoError(t, w.LoadByHand(t.Context(), "m/b"))
		require.NoError(t, w.UnloadByHand(t.Context(), "m/a", false))
		require.Equal(t, []string{"a"}, m.unloaded)
		require.Equal(t, "READY", w.stateOf(t, "m/b"))
		l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "x"}) // nobody named it
		require.NoError(t, err)
		l.Release(scheduler.Served)
		v, _ := w.slot("m/x")
		require.Equal(t, 2*gpu.GiB, v.Holds[0].Booking) // the consumer's vram
	})
}

// supervised is a driver that has its server running from its first load to its unload.
type supervised struct {
	*fakeServer
	deps   lifecycle.Deps
	run    atomic.Bool
	closed atomic.Int32
}

func (d *supervised) Upstream() string           { return "127.0.0.1:7" }
func (d *supervised) Running() bool              { return d.run.Load() }
func (d *supervised) Owns(int) bool              { return false }
func (d *supervised) State() (s lifecycle.State) { return s }
func (d *supervised) Close() error               { d.closed.Add(1); return nil }
func (d *supervised) Load(c context.Context, t lifecycle.Target) error {
	d.run.Store(true)
	return d.fakeServer.Load(c, t)
}
func (d *supervised) Unload(c context.Context, t lifecycle.Target) (bool, error) {
	defer d.run.Store(false)
	return d.fakeServer.Unload(c, t)
}

// supervisors makes a supervised driver at each opening.
type supervisors struct {
	server *fakeServer
	opened []*supervised
}

func (o *supervisors) Open(deps lifecycle.Deps) (lifecycle.Driver, error) {
	d := &supervised{fakeServer: o.server, deps: deps}
	o.opened = append(o.opened, d)
	return d, nil
}

// supervisedAs is a generation whose consumer a has a driver of this key.
func (w *world) supervisedAs(t testing.TB, key string) (*Generation, *supervisors) {
	t.Helper()
	g := w.generation(t, nil, server("a", 4*gpu.GiB))
	traits := everything
	traits.Starts = true
	w.servers["a"].traits = traits
	o := &supervisors{server: w.servers["a"]}
	g.Lifecycles["a"], g.Keys["a"] = o, key
	return g, o
}

// reload replaces the generation that rules.
func (w *world) reload(t testing.TB, g *Generation) {
	t.Helper()
	require.NoError(t, w.Push(g))
	w.Pop(w.gen)
	w.gen = g
}

func newSupervised(t testing.TB) (*world, *supervisors) {
	t.Helper()
	w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
	var o *supervisors
	w.gen, o = w.supervisedAs(t, "one")
	require.NoError(t, w.Push(w.gen))
	return w, o
}

func TestARunningServerIsReplacedOnceItsWorkHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, one := newSupervised(t)
		defer w.Close()
		l, err := w.Acquire(t.Context(), Request{Consumer: "a"})
		require.NoError(t, err)
		upstream, runs := w.Address("a")
		require.Equal(t, "127.0.0.1:7", upstream)
		require.True(t, runs)
		same, unused := w.supervisedAs(t, "one")
		w.reload(t, same)
		require.Empty(t, unused.opened) // as it was
		changed, two := w.supervisedAs(t, "two")
		w.reload(t, changed)
		pass(time.Minute)
		require.Zero(t, one.opened[0].closed.Load()) // its work goes on
		l.Release(scheduler.Served)
		pass(time.Minute)
		require.EqualValues(t, 1, one.opened[0].closed.Load())
		require.Zero(t, two.opened[0].closed.Load())
		w.serves(t, "a")
		require.True(t, two.opened[0].run.Load())
		w.Close()
		require.EqualValues(t, 1, one.opened[0].closed.Load())
		require.EqualValues(t, 1, two.opened[0].closed.Load())
	})
}

func TestCloseClosesBothTheOldDriverAndTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, one := newSupervised(t)
		l, err := w.Acquire(t.Context(), Request{Consumer: "a"})
		require.NoError(t, err)
		changed, two := w.supervisedAs(t, "two")
		w.reload(t, changed)
		l.Release(scheduler.ServerDied)
		w.Close()
		require.EqualValues(t, 1, one.opened[0].closed.Load())
		require.EqualValues(t, 1, two.opened[0].closed.Load())
	})
}

func TestADeathThatADriverTellsOfFreesTheSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, one := newSupervised(t)
		defer w.Close()
		w.serves(t, "a")
		one.opened[0].run.Store(false)
		one.server.mu.Lock()
		one.server.loaded = false
		one.server.mu.Unlock()
		one.opened[0].deps.Died("exit status 1")
		require.Equal(t, "IDLE", w.stateOf(t, "a"))
		_, runs := w.Address("a")
		require.False(t, runs)
	})
}

func TestAModelThatIsLoadedByItsAliasIsLoaded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		c := server("m", 2*gpu.GiB)
		c.Models = []*config.Model{{Name: "a", Alias: []string{"gpt"}}}
		w.gen = w.generation(t, nil, c)
		traits := everything
		traits.LoadModel, traits.UnloadModel, traits.Models, traits.Names = true, true, true, lifecycle.Names{Tag: "latest"}
		w.servers["m"].traits = traits
		m := &modelServer{fakeServer: w.servers["m"]}
		w.gen.Lifecycles["m"] = m
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		m.tells(lifecycle.Model{Name: "gpt:latest", Resident: gpu.GiB})
		pass(10 * time.Second)
		require.Equal(t, []string{"m/a"}, w.SlotNames("m"))
		require.Equal(t, "READY", w.stateOf(t, "m/a"))
	})
}

// SlotNames are the slots of a consumer.
func (b *Broker) SlotNames(consumer string) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.slotNames(consumer)
}

func TestAReplacementThatIsItselfReplacedIsClosedAndTheLastComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, one := newSupervised(t)
		defer w.Close()
		l, err := w.Acquire(t.Context(), Request{Consumer: "a"})
		require.NoError(t, err)
		changed, two := w.supervisedAs(t, "two")
		w.reload(t, changed)
		again, three := w.supervisedAs(t, "three")
		w.reload(t, again)
		pass(time.Minute)
		require.Zero(t, one.opened[0].closed.Load(), "it works")
		require.EqualValues(t, 1, two.opened[0].closed.Load(), "its turn will never come")
		l.Release(scheduler.Served)
		pass(time.Minute)
		require.EqualValues(t, 1, one.opened[0].closed.Load())
		w.serves(t, "a")
		require.True(t, three.opened[0].run.Load())

		last, four := w.supervisedAs(t, "four") // it can be replaced as the first one was
		w.reload(t, last)
		pass(time.Minute)
		w.serves(t, "a")
		require.EqualValues(t, 1, three.opened[0].closed.Load())
		require.True(t, four.opened[0].run.Load())
		probes := four.server.count(&four.server.probes)
		pass(10 * time.Minute)
		require.Greater(t, four.server.count(&four.server.probes), probes+1, "it is probed from now on, too")
		require.EqualValues(t, 1, one.opened[0].closed.Load())
		require.EqualValues(t, 1, two.opened[0].closed.Load())
	})
}

func TestHeldTellsOfOneModelOrOfAConsumerWithoutModels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		m.tells(lifecycle.Model{Name: "b", Resident: gpu.GiB})
		pass(10 * time.Second)
		require.Equal(t, Held{Slot: "m/b", Loaded: true}, w.Held("m", "b"))
		require.Equal(t, Held{Slot: "m/a"}, w.Held("m", "a"))
		require.Equal(t, Held{}, w.Held("m", "unheard of"))
		require.Equal(t, Held{}, w.Held("m", ""), "which of them?")
		require.Error(t, w.Held("nobody", "").Refused)
		w.Close()
		require.Error(t, w.Held("m", "b").Refused)

		w = newWorld(t, nil, server("a", gpu.GiB))
		defer w.Close()
		w.serves(t, "a")
		require.Equal(t, Held{Slot: "a", Loaded: true}, w.Held("a", ""))
		require.NoError(t, w.Pin("a", true))
		require.Equal(t, Held{Slot: "a", Loaded: true, Pinned: true}, w.Held("a", ""))
	})
}

func TestAModelThatNobodyNamedClaimsWhatTheServerSaysElseWhatTheConsumerSays(t *testing.T) {
	for _, auto := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w, m := newModels(t)
			defer w.Close()
			w.mu.Lock()
			w.gen.Config.Consumers[0].AutoModels = auto
			w.mu.Unlock()
			m.tells(lifecycle.Model{Name: "told", Resident: 3 * gpu.GiB}, lifecycle.Model{Name: "untold", Resident: -1})
			pass(10 * time.Second)
			slots := map[string]Slot{}
			for _, sl := range w.Status().Consumers["m"].Slots {
				slots[sl.Model] = sl
			}
			require.EqualValues(t, 3*gpu.GiB, slots["told"].Claim)
			require.Equal(t, "server", slots["told"].ClaimSource)
			require.True(t, slots["told"].Adopted)
			require.EqualValues(t, 2*gpu.GiB, slots["untold"].Claim)
			require.Equal(t, "config", slots["untold"].ClaimSource)
			require.True(t, slots["untold"].Adopted)
			require.False(t, slots["a"].Adopted)
		})
	}
}

func TestOnlyAListOfAConsumersModelsIsLearntOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		defer w.Close()
		m.tells(lifecycle.Model{Name: "x", Resident: gpu.GiB})
		pass(11 * time.Second)
		require.Contains(t, w.SlotNames("m"), "m/x")
		learns := func(change func(*config.Consumer), loaded []lifecycle.Model) []string {
			w.mu.Lock()
			c := w.consumers["m"]
			was, cfg := c.cfg, *c.cfg
			change(&cfg)
			c.cfg = &cfg
			w.learnOf(time.Now(), c, loaded)
			c.cfg = was
			w.mu.Unlock()
			return w.SlotNames("m")
		}
		require.Contains(t, learns(func(*config.Consumer) {}, nil), "m/x", "it was not listed")
		require.NotContains(t, learns(func(c *config.Consumer) { c.Models = nil }, []lifecycle.Model{{Name: "y", Resident: gpu.GiB}}), "m/y", "a consumer without models is its one slot")
	})
}
