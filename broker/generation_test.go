package broker

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// drivers makes a driver of its own at each opening, and keeps account of what becomes of it.
type drivers struct {
	server *fakeServer
	fail   error
	opened []*driver
}

type driver struct {
	*fakeServer
	used   atomic.Int32
	closed atomic.Int32
}

func (o *drivers) Open(lifecycle.Deps) (lifecycle.Driver, error) {
	if o.fail != nil {
		return nil, o.fail
	}
	d := &driver{fakeServer: o.server}
	o.opened = append(o.opened, d)
	return d, nil
}

func (d *driver) Close() error { d.closed.Add(1); return nil }
func (d *driver) Probe(ctx context.Context) lifecycle.Report {
	d.used.Add(1)
	return d.fakeServer.Probe(ctx)
}
func (d *driver) Load(ctx context.Context, t lifecycle.Target) error {
	d.used.Add(1)
	return d.fakeServer.Load(ctx, t)
}
func (d *driver) Unload(ctx context.Context, t lifecycle.Target) (bool, error) {
	d.used.Add(1)
	return d.fakeServer.Unload(ctx, t)
}
func (d *driver) Busy(ctx context.Context, t lifecycle.Target) (bool, error) {
	d.used.Add(1)
	return d.fakeServer.Busy(ctx, t)
}

// made is a generation whose drivers are accounted for. Each has a key: those of equal keys are the same.
func (w *world) made(t testing.TB, key string, edit func(*config.Broker), names ...string) (g *Generation, all map[string]*drivers) {
	t.Helper()
	var consumers []*config.Consumer
	for _, n := range names {
		consumers = append(consumers, server(n, 4*gpu.GiB))
	}
	g = w.generation(t, edit, consumers...)
	all = map[string]*drivers{}
	for _, n := range names {
		all[n] = &drivers{server: w.servers[n]}
		g.Lifecycles[n], g.Keys[n] = all[n], key
	}
	return g, all
}

func closedOnce(t testing.TB, ds ...*drivers) {
	t.Helper()
	for _, o := range ds {
		for _, d := range o.opened {
			require.EqualValues(t, 1, d.closed.Load(), "a driver is closed exactly once")
		}
	}
}

func (w *world) serves(t testing.TB, name string) {
	t.Helper()
	l, err := w.Acquire(context.Background(), Request{Consumer: name})
	require.NoError(t, err)
	l.Release(scheduler.Served)
}

func isDone(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestAPendingConfigurationHasNoEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		defer w.Close()
		a, old := w.made(t, "old", nil, "a", "b")
		require.NoError(t, w.Push(a))
		w.Pop(w.gen)
		require.True(t, isDone(a.Ruled()))
		w.serves(t, "a")
		running, err := w.Acquire(context.Background(), Request{Consumer: "b"})
		require.NoError(t, err)

		elsewhere := &fakeGPU{total: 1 * gpu.GiB}
		b, fresh := w.made(t, "new", func(b *config.Broker) { b.Scheduler, b.MaxQueue = config.Passthrough, 1 }, "a", "c")
		b.Sampler, b.SamplerKey = elsewhere, "elsewhere"
		pass(10 * time.Second)
		before := w.Status()
		require.NoError(t, w.Push(b))
		pass(time.Minute)
		require.Equal(t, []string{"a", "b"}, w.Names())
		require.False(t, w.Knows("c"))
		require.False(t, isDone(b.Ruled()))
		require.False(t, isDone(b.Undone()))
		require.Zero(t, elsewhere.looked())
		for _, n := range []string{"a", "c"} {
			require.Len(t, fresh[n].opened, 1, "opening starts nothing, and its faults are told in time")
			require.Zero(t, fresh[n].opened[0].used.Load())
			require.Zero(t, fresh[n].opened[0].closed.Load())
			if old[n] != nil {
				require.Zero(t, old[n].opened[0].closed.Load())
			}
		}
		_, err = w.Acquire(context.Background(), Request{Consumer: "c"})
		require.Error(t, err)
		after := w.Status()
		require.Equal(t, before.Consumers["a"].Slots, after.Consumers["a"].Slots)
		require.Equal(t, before.Total, after.Total)
		require.Equal(t, before.Scheduler.Loads, after.Scheduler.Loads)

		w.Pop(a)
		require.True(t, isDone(b.Ruled()))
		require.Equal(t, []string{"a", "c"}, w.Names())
		closedOnce(t, old["a"])
		w.serves(t, "c")
		pass(10 * time.Second)
		require.Positive(t, fresh["c"].opened[0].used.Load())
		require.Positive(t, elsewhere.looked())
		require.Positive(t, fresh["a"].opened[0].used.Load())
		running.Release(scheduler.Served)
		w.Close()
		closedOnce(t, old["a"], old["b"], fresh["a"], fresh["c"])
	})
}

func TestAConfigurationThatIsUndoneLeavesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		defer w.Close()
		a, old := w.made(t, "old", nil, "a")
		require.NoError(t, w.Push(a))
		w.Pop(w.gen)
		w.serves(t, "a")
		var all []*drivers
		for range 2 { // two that fail, one after the other
			b, fresh := w.made(t, "new", nil, "a", "c")
			require.NoError(t, w.Push(b))
			pass(time.Minute)
			w.Pop(b)
			w.Pop(b) // Caddy stops it, and cleans up
			require.True(t, isDone(b.Undone()))
			require.False(t, isDone(b.Ruled()))
			closedOnce(t, fresh["a"], fresh["c"])
			require.Zero(t, fresh["a"].opened[0].used.Load())
			require.Zero(t, old["a"].opened[0].closed.Load())
			all = append(all, fresh["a"], fresh["c"])
			w.serves(t, "a")
		}
		never, _ := w.made(t, "never", nil, "d")
		w.Pop(never) // failed before its start
		good, fresh := w.made(t, "new", nil, "a", "c")
		require.NoError(t, w.Push(good))
		w.Pop(a)
		require.True(t, isDone(good.Ruled()))
		w.serves(t, "a")
		w.serves(t, "c")
		require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].loads), "it stayed loaded all the while")
		w.Close()
		closedOnce(t, append(all, old["a"], fresh["a"], fresh["c"])...)
	})
}

func TestAConfigurationWhoseServerCannotBeOpenedIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		b, fresh := w.made(t, "new", nil, "b", "c", "d")
		fresh["c"].fail = errors.New("a socket that is none")
		require.ErrorContains(t, w.Push(b), `consumer "c": a socket that is none`)
		closedOnce(t, fresh["b"])
		w.Pop(b)
		require.Equal(t, []string{"a"}, w.Names())
		w.serves(t, "a")
		good := w.generation(t, nil, server("b", 4*gpu.GiB))
		require.NoError(t, w.Push(good))
		w.Pop(w.gen)
		w.serves(t, "b")
	})
}

func TestTheLastConfigurationRulesUntilAnotherComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		w.serves(t, "a")
		w.Pop(w.gen) // a Caddy that stops the old one first
		w.serves(t, "a")
		next := w.generation(t, nil, server("a", 4*gpu.GiB), server("b", 4*gpu.GiB))
		require.NoError(t, w.Push(next))
		require.True(t, isDone(next.Ruled()))
		w.serves(t, "b")
		require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].loads))
	})
}

// A removed consumer goes when its work is done, which may be at any moment:
// before a configuration that has it again comes, before that rules, or never.
func TestAConsumerThatLeavesWhileItComesBackHasAnOpenDriver(t *testing.T) {
	for name, when := range map[string]struct{ drops, undone bool }{
		"it goes before that rules":           {drops: true},
		"it is there still when that rules":   {},
		"it goes, and that never rules":       {drops: true, undone: true},
		"it is there still, that never rules": {undone: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, nil)
				defer w.Close()
				first, one := w.made(t, "same", nil, "a", "b")
				require.NoError(t, w.Push(first))
				w.Pop(w.gen)
				running, err := w.Acquire(context.Background(), Request{Consumer: "b"})
				require.NoError(t, err)
				second, two := w.made(t, "same", nil, "a")
				require.NoError(t, w.Push(second))
				w.Pop(first)
				require.Empty(t, two["a"].opened, "it has not changed")
				require.True(t, w.Status().Consumers["b"].Removed)

				third, three := w.made(t, "same", nil, "a", "b")
				require.NoError(t, w.Push(third))
				if when.drops {
					running.Release(scheduler.Served)
					pass(10 * time.Second)
					require.False(t, w.Knows("b"))
					closedOnce(t, one["b"])
				}
				if when.undone {
					w.Pop(third)
					closedOnce(t, three["b"])
				} else {
					w.Pop(second)
					kept, gone := three["b"], one["b"]
					if !when.drops { // it has not changed either
						kept, gone = gone, kept
					}
					closedOnce(t, gone)
					require.Zero(t, kept.opened[0].closed.Load())
				}
				if !when.drops {
					running.Release(scheduler.Served)
				}
				if when.undone {
					pass(10 * time.Second)
					require.False(t, w.Knows("b"))
				} else {
					w.serves(t, "b")
					loads := 1
					if when.drops {
						loads = 2
					}
					require.Equal(t, loads, w.servers["b"].count(&w.servers["b"].loads))
					kept := one["b"]
					if when.drops {
						kept = three["b"]
					}
					before := kept.opened[0].used.Load()
					pass(10 * time.Second)
					require.Greater(t, kept.opened[0].used.Load(), before)
				}
				w.serves(t, "a")
				w.Close()
				closedOnce(t, one["a"], one["b"], two["a"], three["a"], three["b"])
			})
		})
	}
}

func TestCloseUndoesWhatIsPending(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		b, fresh := w.made(t, "new", nil, "a", "b")
		require.NoError(t, w.Push(b))
		w.Close()
		require.True(t, isDone(b.Undone()))
		closedOnce(t, fresh["a"], fresh["b"])
		w.Pop(b)
		require.Equal(t, w.servers["a"].count(&w.servers["a"].opened), w.servers["a"].count(&w.servers["a"].closed))
	})
}

// Whatever comes after whatever: the ruling configuration has open drivers of
// its own keys, and in the end each that was ever opened is closed exactly once.
func TestConfigurationsInAnyOrder(t *testing.T) {
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			w := newWorld(t, nil)
			defer w.Close()
			var all []*drivers
			next := func() *Generation {
				names := slices.DeleteFunc([]string{"a", "b", "c", "d"}, func(string) bool { return rng.IntN(3) == 0 })
				g, ds := w.made(t, "", nil, names...)
				for n, d := range ds {
					g.Keys[n] = strconv.Itoa(rng.IntN(2))
					all = append(all, d)
				}
				return g
			}
			started := []*Generation{w.gen}
			var leases []Lease
			for range 60 {
				switch rng.IntN(8) {
				case 0, 1, 2: // a reload
					g := next()
					require.NoError(t, w.Push(g))
					for _, old := range started {
						w.Pop(old)
					}
					started = []*Generation{g}
				case 3: // one that fails
					g := next()
					require.NoError(t, w.Push(g))
					pass(time.Duration(rng.IntN(3)) * time.Second)
					w.Pop(g)
				case 4: // one that takes its time, or several
					g := next()
					require.NoError(t, w.Push(g))
					started = append(started, g)
				case 5: // stopped, in any order
					if i := rng.IntN(len(started)); len(started) > 1 {
						w.Pop(started[i])
						started = slices.Delete(started, i, i+1)
					}
				case 6:
					if names := w.Names(); len(names) > 0 {
						l, err := w.Acquire(context.Background(), Request{Consumer: names[rng.IntN(len(names))], Budget: 20 * time.Second})
						if err == nil {
							leases = append(leases, l)
						}
					}
				default:
					for _, l := range leases {
						l.Release(scheduler.Served)
					}
					leases = nil
					pass(time.Duration(rng.IntN(5)) * time.Second)
				}
				g := w.current.Load()
				w.mu.Lock()
				for _, cc := range g.Config.Consumers {
					c := w.consumers[cc.Name]
					require.Equal(t, g.Keys[cc.Name], c.key)
					require.Zero(t, c.driver.(*driver).closed.Load(), "the driver of %s is closed", cc.Name)
				}
				w.mu.Unlock()
			}
			for _, l := range leases {
				l.Release(scheduler.Served)
			}
			w.Close()
			closedOnce(t, all...)
		})
	}
}

// limited is a server that keeps what its driver was given.
type limited struct {
	*fakeServer
	limits *lifecycle.Limits
}

func (d *limited) Open(deps lifecycle.Deps) (lifecycle.Driver, error) {
	d.limits = deps.Limits
	return d, nil
}

func TestADriverThatStaysGetsNewTimeOuts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		w.gen = w.generation(t, nil, server("a", gpu.GiB))
		d := &limited{fakeServer: w.servers["a"]}
		w.gen.Lifecycles["a"] = d
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		limits := d.limits
		require.Equal(t, 2*time.Second, limits.Probe())
		c := server("a", gpu.GiB)
		c.UnloadTimeout = caddy.Duration(9 * time.Second)
		next := w.generation(t, func(cfg *config.Broker) { cfg.ProbeTimeout = caddy.Duration(5 * time.Second) }, c)
		next.Lifecycles["a"] = d
		require.NoError(t, w.Push(next))
		require.Equal(t, 2*time.Second, limits.Probe(), "it does not rule yet")
		w.Pop(w.gen)
		require.Same(t, limits, d.limits, "no other driver was opened")
		require.Equal(t, []time.Duration{5 * time.Second, 9 * time.Second}, []time.Duration{limits.Probe(), limits.Unload()})
	})
}

func TestCheckNamesEveryConsumerWhoseLifecycleFallsShort(t *testing.T) {
	g := &Generation{Config: &config.Broker{}, Lifecycles: map[string]lifecycle.Guest{}}
	servers := map[string]*fakeServer{}
	for _, name := range []string{"good", "bad", "worse", "sharer", "shut"} {
		c := server(name, gpu.GiB)
		if name != "good" {
			c.Models = []*config.Model{{Name: "x"}}
		}
		servers[name] = newServer(nil, gpu.GiB)
		g.Config.Consumers, g.Lifecycles[name] = append(g.Config.Consumers, c), servers[name]
	}
	g.Config.Consumers[3].Shares = "good"
	g.Lifecycles["shut"] = &drivers{fail: errors.New("permission denied")}
	err := g.Check()
	require.ErrorContains(t, err, `consumer "bad"`)
	require.ErrorContains(t, err, `consumer "worse"`)
	for _, name := range []string{"good", "sharer", "shut"} {
		require.NotContains(t, err.Error(), name)
	}
	for name, s := range servers {
		require.Equal(t, s.opened, s.closed, name)
	}
	require.Equal(t, 1, servers["good"].opened)
	g.Config.Consumers = g.Config.Consumers[:1]
	require.NoError(t, g.Check())
}

func TestWhatBecomesOfAGenerationCanBeWaitedForBeforeItIsPushed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB))
		defer w.Close()
		next := w.generation(t, nil, server("a", gpu.GiB))
		ruled, undone := next.Ruled(), next.Undone()
		require.False(t, isDone(ruled))
		w.reload(t, next)
		require.True(t, isDone(ruled))
		require.False(t, isDone(undone))

		next = w.generation(t, nil, server("a", gpu.GiB))
		undone, ruled = next.Undone(), next.Ruled()
		require.NoError(t, w.Push(next))
		w.Pop(next)
		require.True(t, isDone(undone))
		require.False(t, isDone(ruled))
	})
}
