package broker

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func TestAServerIsStartedOnTheGPUThatIsThereNow(t *testing.T) {
	for _, change := range []string{"another sampler", "its UUID is known now"} {
		t.Run(change, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, _ := newSupervised(t)
				defer w.Close()
				pass(11 * time.Second)
				known := func(d *gpu.Device) { d.UUID = "GPU-X" }
				if change == "another sampler" {
					next, _ := w.supervisedAs(t, "one")
					next.Sampler, next.SamplerKey = &fakeGPU{total: 8 * gpu.GiB, tells: known}, "another"
					w.reload(t, next)
				} else { // auto { fallback … } until the driver answers
					w.gpu.mu.Lock()
					w.gpu.tells = known
					w.gpu.mu.Unlock()
				}
				pass(5 * time.Second)
				require.Len(t, w.Status().GPUs, 1)
				w.mu.Lock()
				defer w.mu.Unlock()
				for range 50 { // the order of a map is another each time
					require.Equal(t, "GPU-X", w.target(w.slots["a"]).GPUs[0].UUID)
				}
			})
		})
	}
}

func TestAnAnswerIsTrackedAtTheServerThatGaveItThoughItsConsumerHasAnotherNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB))
		defer w.Close()
		was, is := &tracker{fakeServer: newServer(w.gpu, gpu.GiB)}, &tracker{fakeServer: newServer(w.gpu, gpu.GiB)}
		was.traits.Busy, is.traits.Busy = true, true
		was.busy = true
		moved := func(to, key string, d *tracker) *Generation {
			c := server("a", gpu.GiB)
			c.Upstream = to
			g := w.generation(t, nil, c)
			g.Lifecycles["a"], g.Keys["a"] = d, key
			return g
		}
		w.reload(t, moved("one.test:1", "one", was))
		pass(10 * time.Second)
		l, err := w.Acquire(t.Context(), Request{Consumer: "a"})
		require.NoError(t, err)
		require.Equal(t, "one.test:1", l.Upstream)
		w.reload(t, moved("two.test:1", "two", is))
		idles := w.Idles(l)
		l.Track([]byte(`{"id": 7}`))
		l.Release(scheduler.Served)
		require.Equal(t, []int{1, 0}, []int{was.tracked, is.tracked})
		require.False(t, idles, "the server that has the job works")
	})
}

// held is a catalogServer whose loads end when they are let.
type held struct {
	*catalogServer
	loads chan error
}

func (d *held) Open(lifecycle.Deps) (lifecycle.Driver, error) { return d, nil }
func (d *held) Load(ctx context.Context, _ lifecycle.Target) error {
	select {
	case err := <-d.loads:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// automatics is a world whose models auto are at one server, a load of x is under way there, and the configuration with another.
func automatics(t *testing.T) (w *world, was, is *held) {
	w, m := automatic(t)
	was = &held{&catalogServer{modelServer: m, lists: []lifecycle.Model{{Name: "x"}}}, make(chan error)}
	w.gen.Lifecycles["m"] = was
	require.NoError(t, w.Push(w.gen))
	pass(time.Second)
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error)
	go func() { _, err := w.Acquire(ctx, Request{Consumer: "m", Model: "x"}); left <- err }()
	synctest.Wait()
	require.Equal(t, "LOADING", w.stateOf(t, "m/x"))
	leave()
	require.Error(t, <-left)

	c := server("m", 2*gpu.GiB)
	c.AutoModels, c.Upstream = true, "another.test:1"
	next := w.generation(t, nil, c)
	other := newServer(w.gpu, 2*gpu.GiB)
	other.traits = m.traits
	is = &held{&catalogServer{modelServer: &modelServer{fakeServer: other}, lists: []lifecycle.Model{{Name: "x"}}}, make(chan error)}
	is.tells()
	next.Lifecycles["m"], next.Keys["m"] = is, "another"
	w.reload(t, next)
	pass(30 * time.Second)
	return w, was, is
}

func TestWhatAReplacedServerLacksIsNotMissingAtTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		c := func(to string) *config.Consumer {
			c := server("m", 2*gpu.GiB)
			c.AutoModels, c.Upstream = true, to
			return c
		}
		traits := everything
		traits.LoadModel, traits.UnloadModel, traits.Models, traits.Catalog = true, true, true, true
		made := func(to string) (*Generation, *held) {
			g := w.generation(t, nil, c(to))
			s := newServer(w.gpu, 2*gpu.GiB)
			s.traits = traits
			d := &held{&catalogServer{modelServer: &modelServer{fakeServer: s}, lists: []lifecycle.Model{{Name: "x"}}}, make(chan error)}
			d.tells()
			g.Lifecycles["m"], g.Keys["m"] = d, to
			return g, d
		}
		var was *held
		w.gen, was = made("one.test:1")
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		pass(time.Second)
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan error)
		go func() { _, err := w.Acquire(ctx, Request{Consumer: "m", Model: "x"}); left <- err }()
		synctest.Wait()
		next, _ := made("two.test:1")
		w.reload(t, next)
		was.loads <- fmt.Errorf("404: %w", lifecycle.ErrNoModel)
		synctest.Wait()
		w.mu.Lock()
		misses := w.consumers["m"].misses(time.Now(), "x")
		w.mu.Unlock()
		leave()
		require.Error(t, <-left)
		require.False(t, misses)
	})
}

func TestTheEndOfALoadOfAnEarlierServerIsNotThatOfALoadOfThisOne(t *testing.T) {
	for name, err := range map[string]error{"it succeeds": nil, "it fails": errors.New("it is gone")} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, was, is := automatics(t)
				defer w.Close()
				require.Empty(t, w.SlotNames("m"), "the other server does not have it")
				got := make(chan error, 1)
				go func() {
					l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "x"})
					l.Release(scheduler.Served)
					got <- err
				}()
				synctest.Wait()
				require.Equal(t, "LOADING", w.stateOf(t, "m/x"))
				was.loads <- err
				synctest.Wait()
				now := w.stateOf(t, "m/x")
				select {
				case is.loads <- nil:
				default:
				}
				synctest.Wait()
				require.Equal(t, "LOADING", now, "the load of this server goes on")
				require.NoError(t, <-got)
			})
		})
	}
}

func TestAClosedBrokerAdoptsNoModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _ := newModels(t)
		pass(time.Second)
		w.Close()
		n := len(w.slots)
		_, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "x"})
		require.Error(t, err)
		_, ok := w.TryAcquire(Request{Consumer: "m", Model: "y"})
		require.False(t, ok)
		require.Len(t, w.slots, n)
	})
}

func TestAFlagThatCouldNotBeReadAtFirstIsReadByTheNextConfiguration(t *testing.T) {
	store := &fakeStore{doc: []byte(`{"version":1,"allow_cloud_fallback":false}`), broken: errors.New("no such host")}
	w, _ := flagged(t, store, nil)
	require.Equal(t, Flags{true, FromDefault}, w.Flags())
	store.set(nil)
	next := w.generation(t, nil, server("a", 4*gpu.GiB))
	next.FlagStore = store
	w.reload(t, next)
	require.Equal(t, Flags{false, FromStore}, w.Flags())
}

func TestTheDeathOfAReplacedDriversServerIsNotThatOfTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, o := newSupervised(t)
		defer w.Close()
		w.serves(t, "a")
		s, old := w.servers["a"], o.opened[0]
		s.mu.Lock() // it ends; the news are on their way
		s.loaded = false
		s.mu.Unlock()
		w.gpu.move(-s.size)
		old.run.Store(false)
		next, o := w.supervisedAs(t, "two")
		w.reload(t, next)
		pass(5 * time.Second)
		w.serves(t, "a")
		require.True(t, o.opened[0].run.Load())
		old.deps.Died("exit status 1")
		require.Equal(t, "READY", w.stateOf(t, "a"))
	})
}

// slowStore takes its time to save.
type slowStore struct {
	*fakeStore
	takes time.Duration
}

func (s *slowStore) Save(context.Context, []byte) error {
	pass(s.takes)
	return nil
}

func TestARetirementThatWasTakenBackTakesNothingAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		w.gen.Store = &slowStore{&fakeStore{}, 2 * time.Second}
		defer w.Close()
		w.serves(t, "a")
		w.Pop(w.gen)
		ctx, cancel := context.WithCancel(t.Context())
		over := make(chan struct{})
		go func() { w.Retire(ctx); close(over) }()
		synctest.Wait()
		cancel() // the next configuration is being provisioned
		<-over
		pass(30 * time.Second)
		v, known := w.slot("a")
		require.True(t, known)
		require.False(t, v.Gone)
		require.Equal(t, "READY", v.State.String())
	})
}

func TestALoopThatHasEndedLeavesTheNextItsProbes(t *testing.T) {
	lost := 0
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, nil, server("a", 4*gpu.GiB))
			defer w.Close()
			d := &slowProbe{newServer(w.gpu, 4*gpu.GiB)}
			next := w.generation(t, nil, server("a", 4*gpu.GiB))
			next.Lifecycles["a"], next.Keys["a"] = d, "slow"
			w.reload(t, next)
			pass(time.Second)
			again := w.generation(t, nil, server("a", 4*gpu.GiB))
			again.Lifecycles["a"], again.Keys["a"] = d, "slow"
			w.reload(t, again)
			pass(500 * time.Millisecond) // both loops probe
			w.ProbeSoon("a")
			pass(3 * time.Second) // both have ended; the probe that was asked for runs
			if d.count(&d.probes) < 3 {
				lost++
			}
		})
	}
	require.Zero(t, lost)
}

// slowProbe answers after two seconds, whatever becomes of the question.
type slowProbe struct{ *fakeServer }

func (d *slowProbe) Open(lifecycle.Deps) (lifecycle.Driver, error) { return d, nil }
func (d *slowProbe) Probe(ctx context.Context) lifecycle.Report {
	if ctx.Err() == nil {
		d.mu.Lock()
		d.probes++
		d.mu.Unlock()
	}
	pass(2 * time.Second)
	return lifecycle.Report{Loaded: lifecycle.No, Resident: -1}
}

func TestTheMemoryOfAnotherSamplersGPUHasNotBeenStill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		pass(11 * time.Second)
		next := w.generation(t, nil, server("a", 4*gpu.GiB))
		next.Sampler, next.SamplerKey = &fakeGPU{total: 16 * gpu.GiB, tells: func(d *gpu.Device) { d.UUID = "GPU-X" }}, "another"
		w.reload(t, next)
		pass(time.Millisecond)
		still, _ := w.still(0)
		require.Less(t, still, time.Second)
	})
}

// startsLate is a driver that has its server running only once a load has ended.
type startsLate struct{ *supervised }

func (d *startsLate) Open(lifecycle.Deps) (lifecycle.Driver, error) { return d, nil }
func (d *startsLate) Load(ctx context.Context, t lifecycle.Target) error {
	defer d.run.Store(true)
	return d.fakeServer.Load(ctx, t)
}

func TestADriverStaysWhileItStartsItsServerForAModelThatWasRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		traits := lifecycle.Traits{Load: true, Unload: true, Health: true, Residency: true, LoadModel: true, UnloadModel: true, Starts: true}
		made := func(key string, names ...string) (*Generation, *startsLate) {
			c := server("m", gpu.GiB)
			for _, n := range names {
				c.Models = append(c.Models, &config.Model{Name: n})
			}
			g := w.generation(t, nil, c)
			s := newServer(w.gpu, gpu.GiB)
			s.traits, s.load = traits, 20*time.Second
			d := &startsLate{&supervised{fakeServer: s}}
			g.Lifecycles["m"], g.Keys["m"] = d, key
			return g, d
		}
		var old *startsLate
		w.gen, old = made("one", "a", "b")
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		pass(time.Second)
		got := make(chan error, 1)
		go func() {
			l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "b"})
			l.Release(scheduler.Served)
			got <- err
		}()
		synctest.Wait()
		next, _ := made("one", "a")
		w.reload(t, next)
		require.Equal(t, "LOADING", w.stateOf(t, "m/b"))
		next, _ = made("two", "a")
		w.reload(t, next)
		synctest.Wait()
		require.Zero(t, old.closed.Load(), "it starts its server")
		pass(time.Minute)
		require.NoError(t, <-got)
	})
}
