package broker

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// worldOf is a broker whose servers all have these traits.
func worldOf(t *testing.T, edit func(*config.Broker), traits lifecycle.Traits, consumers ...*config.Consumer) *world {
	t.Helper()
	w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
	w.gen = w.generation(t, edit, consumers...)
	for _, s := range w.servers {
		s.traits = traits
	}
	require.NoError(t, w.Push(w.gen))
	return w
}

// ofModels are the traits of servers that load and unload each model by its name.
func ofModels() lifecycle.Traits {
	traits := everything
	traits.LoadModel, traits.UnloadModel, traits.Models = true, true, true
	return traits
}

// watching is an observer that keeps what it is told.
type watching struct {
	mu      sync.Mutex
	counted []string
	decided []string
	stayed  map[string]time.Duration
}

func (o *watching) Count(d scheduler.Decision) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.counted = append(o.counted, d.Kind)
}

func (o *watching) Decided(d scheduler.Decision) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.decided = append(o.decided, d.Kind)
}

func (o *watching) Resided(slot string, stayed time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stayed[slot] = stayed
}

func TestAnObserverIsToldOfEveryDecisionAndOfHowLongWhatIsUnloadedStayed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		w.gen = w.generation(t, nil, server("a", gpu.GiB))
		o := &watching{stayed: map[string]time.Duration{}}
		w.gen.Observer = o
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		w.serves(t, "a")
		pass(time.Minute)
		require.NoError(t, w.UnloadByHand(t.Context(), "a", false))
		synctest.Wait()
		var kinds []string
		for _, d := range w.Decisions() {
			kinds = append(kinds, d.Kind)
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		require.ElementsMatch(t, kinds, o.decided)
		require.ElementsMatch(t, kinds, o.counted)
		require.Contains(t, kinds, "unloaded")
		require.GreaterOrEqual(t, o.stayed["a"], time.Minute)
		require.Less(t, o.stayed["a"], 2*time.Minute)
	})
}

// hanging is a server whose list of models does not come.
type hanging struct{ *lister }

func (d *hanging) Open(deps lifecycle.Deps) (lifecycle.Driver, error) { d.deps = deps; return d, nil }
func (d *hanging) Catalog(ctx context.Context) ([]lifecycle.Model, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestWhoeverLeavesWhileAListIsAskedForLearnsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, d := listing(t, false)
		defer w.Close()
		next := w.generation(t, nil, w.gen.Config.Consumers[0])
		next.Lifecycles["m"], next.Keys["m"] = &hanging{d}, "hanging"
		w.reload(t, next)
		pass(time.Minute)
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		began := time.Now()
		require.Equal(t, Offer{}, w.Offer(ctx, "m", "y"))
		require.Equal(t, time.Millisecond, time.Since(began))
		offer := w.Offer(t.Context(), "m", "y")
		require.NotEmpty(t, offer.Silent, "who waits is told that it does not answer")
		require.Equal(t, Offer{}, w.Offer(t.Context(), "nobody", "y"))
		w.Close()
		pass(time.Minute)
		require.Equal(t, Offer{}, w.Offer(t.Context(), "m", "z"), "it asks nobody any more")
	})
}

func TestAnUnloadThatFailsIsToldToWhoeverAskedForItByHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB))
		defer w.Close()
		w.serves(t, "a")
		w.servers["a"].mu.Lock()
		w.servers["a"].refuse = errors.New("500: no")
		w.servers["a"].mu.Unlock()
		require.ErrorContains(t, w.UnloadByHand(t.Context(), "a", false), `"a" was not unloaded: 500: no`)
		require.Equal(t, "READY", w.stateOf(t, "a"))
	})
}

func TestAModelThatNobodyHasAskedForYetCanNotBeNamedByItsConsumerAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		auto := server("auto", gpu.GiB)
		auto.AutoModels = true
		w, d := listing(t, false)
		defer w.Close()
		next := w.generation(t, nil, auto)
		w.servers["auto"].traits = w.servers["m"].traits
		next.Lifecycles["auto"] = &lister{supervised: &supervised{fakeServer: w.servers["auto"]}}
		w.reload(t, next)
		require.Zero(t, d.asked.Load())
		pass(time.Minute)
		for _, err := range []error{w.LoadByHand(t.Context(), "auto"), w.Pin("auto", true)} {
			require.ErrorIs(t, err, ErrCannot)
			require.ErrorContains(t, err, `no model of "auto" has been asked for yet`)
		}
	})
}

func TestFollowersFromAnotherProcessBeginAtTheFirstDecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB))
		w.serves(t, "a")
		all, err := w.Follow(t.Context(), 0, time.Minute)
		require.NoError(t, err)
		require.NotEmpty(t, all.Decisions)
		again, err := w.Follow(t.Context(), math.MaxUint64, time.Minute)
		require.NoError(t, err)
		require.Equal(t, all, again)
		none, err := w.Follow(t.Context(), all.Last, time.Minute)
		require.NoError(t, err)
		require.Empty(t, none.Decisions)
		gone := errors.New("gone")
		ctx, why := context.WithCancelCause(t.Context())
		why(gone)
		_, err = w.Follow(ctx, all.Last, time.Minute)
		require.ErrorIs(t, err, gone)
		ended := make(chan error)
		go func() {
			_, err := w.Follow(context.Background(), all.Last+1000, time.Hour)
			for err == nil {
				_, err = w.Follow(context.Background(), w.Recorded(), time.Hour)
			}
			ended <- err
		}()
		synctest.Wait()
		w.Close()
		require.ErrorIs(t, <-ended, errStopping)
	})
}

func TestWhereAConsumerIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB))
		defer w.Close()
		for name, want := range map[string]string{"a": "a.test:1", "nobody": ""} {
			at, runs := w.Address(name)
			require.Equal(t, want, at)
			require.Equal(t, want != "", runs)
		}
	})
}

func TestWhoHoldsAModelThatNoConfigurationNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		defer w.Close()
		m.tells(lifecycle.Model{Name: "x", Resident: gpu.GiB}, lifecycle.Model{Name: "b", Resident: gpu.GiB})
		pass(10 * time.Second)
		for _, c := range []struct{ consumer, model, name, as string }{
			{"", "x", "m", "x"}, {"m", "x", "m", "x"}, {"other", "x", "", ""}, {"", "y", "", ""}, {"m", "b", "", ""},
		} {
			name, as := w.Holder(c.consumer, c.model)
			require.Equal(t, c.name, name, c)
			require.Equal(t, c.as, as, c)
		}
		w.mu.Lock()
		w.gen.Config.Consumers[0].Enabled = config.Off
		w.mu.Unlock()
		name, _ := w.Holder("", "x")
		require.Empty(t, name, "it is switched off")
	})
}

func TestAJobThatIsCutIsRecordedWithTheReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB), server("b", gpu.GiB))
		defer w.Close()
		l, err := w.Acquire(t.Context(), Request{Consumer: "a"})
		require.NoError(t, err)
		require.False(t, w.Contended(l))
		go func() {
			if other, err := w.Acquire(context.Background(), Request{Consumer: "b"}); err == nil {
				other.Release(scheduler.Served)
			}
		}()
		pass(time.Minute)
		require.True(t, w.Contended(l), "b waits for the lock")
		require.False(t, w.Contended(Lease{}))
		w.Cut(l, scheduler.BudgetExceeded, "it took too long")
		all := w.Decisions()
		d := all[slices.IndexFunc(all, func(d scheduler.Decision) bool { return d.Kind == "cut" })]
		require.Equal(t, scheduler.Decision{At: d.At, Kind: "cut", Slot: "a", GPU: -1, Code: scheduler.BudgetExceeded, Reason: "it took too long"}, d)
		l.Release(scheduler.Served)
		w.Close()
		require.False(t, w.Contended(l))
	})
}

func TestWhoseProcessesAreWhose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		named, plain, several := server("named", gpu.GiB), server("plain", gpu.GiB), server("several", gpu.GiB)
		named.Processes = []string{"comfy", "/opt/x/worker"}
		several.Models = []*config.Model{{Name: "a"}}
		several.Processes = []string{"never"}
		w := worldOf(t, nil, ofModels(), named, plain, several)
		defer w.Close()
		all := w.owners()
		require.Len(t, all, 1, "of the others nothing tells")
		require.Equal(t, "named", all[0].slot)
		for name, owned := range map[string]bool{"comfy": true, "/usr/bin/comfy": true, "/opt/x/worker": true, "worker": false, "/opt/y/worker": false, "comfy2": false, "": false} {
			require.Equal(t, owned, all[0].owns(gpu.Process{Name: name}), name)
		}
	})
}

// lateGPU opens only at its third try.
type lateGPU struct {
	*fakeGPU
	tries atomic.Int32
}

func (g *lateGPU) Open(context.Context, *zap.Logger) (gpu.Sampler, error) {
	if g.tries.Add(1) < 3 {
		return nil, errors.New("no driver")
	}
	return g.fakeGPU, nil
}

func TestTelemetryThatDoesNotOpenIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		w.gen = w.generation(t, nil, server("a", gpu.GiB))
		late := &lateGPU{fakeGPU: w.gpu}
		w.gen.Sampler = late
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		synctest.Wait()
		require.EqualValues(t, 1, late.tries.Load())
		require.Contains(t, w.Status().Degraded, "no driver")
		pass(10*time.Second - 1)
		require.EqualValues(t, 1, late.tries.Load())
		pass(10*time.Second + 1)
		synctest.Wait()
		require.EqualValues(t, 3, late.tries.Load())
		pass(time.Second)
		require.Empty(t, w.Status().Degraded)
		w.serves(t, "a")
	})
}

func TestALostGPUIsShownAsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB))
		defer w.Close()
		tells := func(d gpu.Device) {
			w.gpu.mu.Lock()
			defer w.gpu.mu.Unlock()
			w.gpu.tells = func(out *gpu.Device) {
				out.Health, out.Utilisation, out.Temperature, out.Power = d.Health, d.Utilisation, d.Temperature, d.Power
			}
		}
		tells(gpu.Device{Health: gpu.Healthy})
		pass(time.Minute)
		g := w.Status().GPUs[0]
		require.Equal(t, string(gpu.Healthy), g.Health)
		require.Zero(t, *g.Utilisation)
		require.Zero(t, *g.Temperature)
		require.Zero(t, *g.Power)
		tells(gpu.Device{Health: gpu.Lost})
		pass(time.Minute)
		g = w.Status().GPUs[0]
		require.Equal(t, string(gpu.Lost), g.Health)
		require.Nil(t, g.Utilisation)
		tells(gpu.Device{Health: gpu.Healthy, Utilisation: -1, Temperature: -1, Power: -1})
		pass(time.Minute)
		g = w.Status().GPUs[0]
		require.Nil(t, g.Utilisation)
		require.Nil(t, g.Temperature)
		require.Nil(t, g.Power)
	})
}

func TestAConsumerMayShareAServerAndHaveItsOwnByTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		whole := func() *config.Consumer { return server("whole", 2*gpu.GiB) }
		part := func() *config.Consumer {
			c := server("part", gpu.GiB)
			c.Shares, c.Upstream = "whole", "whole.test:1"
			return c
		}
		w := newWorld(t, nil, whole(), part())
		defer w.Close()
		for range 2 {
			w.serves(t, "part")
			at, _ := w.Address("part")
			require.Equal(t, "whole.test:1", at)
			require.Equal(t, "whole", w.Status().Consumers["part"].Shares)
			w.reload(t, w.generation(t, nil, whole(), server("part", gpu.GiB)))
			w.serves(t, "part")
			at, _ = w.Address("part")
			require.Equal(t, "part.test:1", at)
			require.Empty(t, w.Status().Consumers["part"].Shares)
			w.reload(t, w.generation(t, nil, whole(), part()))
			pass(time.Hour)
		}
		w.serves(t, "part")
		w.reload(t, w.generation(t, nil, whole()))
		pass(time.Hour)
		require.NotContains(t, w.Status().Consumers, "part")
		_, err := w.Acquire(t.Context(), Request{Consumer: "part"})
		require.ErrorContains(t, err, `there is no consumer "part"`)
	})
}

func TestWhatSharesAServerGoesWithTheLastConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		part := server("part", gpu.GiB)
		part.Shares, part.Upstream = "whole", "whole.test:1"
		w := newWorld(t, nil, server("whole", 2*gpu.GiB), part)
		defer w.Close()
		w.serves(t, "part")
		w.Pop(w.gen)
		w.Retire(t.Context())
		require.Empty(t, w.Status().Consumers)
		require.Equal(t, 1, w.servers["whole"].count(&w.servers["whole"].unloads))
		part = server("part", gpu.GiB)
		part.Shares, part.Upstream = "whole", "whole.test:1"
		require.NoError(t, w.Push(w.generation(t, nil, server("whole", 2*gpu.GiB), part)))
		w.serves(t, "part")
	})
}

func TestAConsumerOfWhichNoModelIsKnownYetIsShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _ := listing(t, false)
		defer w.Close()
		auto := server("auto", gpu.GiB)
		auto.AutoModels = true
		next := w.generation(t, nil, auto)
		w.servers["auto"].traits = w.servers["m"].traits
		next.Lifecycles["auto"] = &lister{supervised: &supervised{fakeServer: w.servers["auto"]}}
		w.reload(t, next)
		pass(time.Minute)
		st := w.Status().Consumers["auto"]
		require.True(t, st.Enabled)
		require.Equal(t, "healthy", st.Health)
		require.False(t, st.Pinned)
		require.False(t, st.Draining)
		require.False(t, st.Removed)
		require.Empty(t, st.Slots)
		require.NotNil(t, st.Process)
		require.NoError(t, w.Drain(t.Context(), "auto"))
		require.True(t, w.Status().Consumers["auto"].Draining)
		w.reload(t, w.generation(t, nil, server("b", gpu.GiB)))
		pass(time.Hour)
		require.NotContains(t, w.Status().Consumers, "auto")
	})
}

func TestAServerThatDoesNotSayWhetherItWorksIsTakenToWork(t *testing.T) {
	for name, c := range map[string]struct {
		err      error
		unloaded bool
	}{
		"an error":   {err: errors.New("500")},
		"no answer":  {err: context.DeadlineExceeded},
		"it is gone": {err: lifecycle.ErrRefused, unloaded: true},
		"no way":     {err: lifecycle.ErrUnreachable},
		"it is idle": {unloaded: true},
		"no word":    {err: errors.New("the answer has no $.busy")},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
				w.gen = w.generation(t, nil, server("a", 10*gpu.GiB), server("b", 10*gpu.GiB))
				w.servers["a"].traits.Busy = true
				w.gen.Lifecycles["a"] = &busyServer{fakeServer: w.servers["a"], err: c.err}
				require.NoError(t, w.Push(w.gen))
				defer w.Close()
				w.serves(t, "a")
				pass(time.Minute)
				go func() {
					if l, err := w.Acquire(context.Background(), Request{Consumer: "b"}); err == nil {
						l.Release(scheduler.Served)
					}
				}()
				pass(20 * time.Second)
				require.Equal(t, c.unloaded, w.servers["a"].count(&w.servers["a"].unloads) == 1)
			})
		})
	}
}

// probedServer is a fake server whose probes come to what is set.
type probedServer struct {
	*fakeServer
	outcome atomic.Int32
}

func (p *probedServer) Open(lifecycle.Deps) (lifecycle.Driver, error) { return p, nil }

func (p *probedServer) Probe(ctx context.Context) lifecycle.Report {
	r := p.fakeServer.Probe(ctx)
	r.Outcome = lifecycle.Outcome(p.outcome.Load())
	return r
}

// A name server that fails, or a route that is lost, says nothing of the model in a GPU's memory.
func TestAServerThatCannotBeReachedIsUnhealthyAndIdleOnceItsMemoryIsFree(t *testing.T) {
	states := map[lifecycle.Outcome]string{lifecycle.Unreachable: "READY", lifecycle.Wrong: "READY", lifecycle.Refused: "IDLE"}
	for outcome, state := range states {
		synctest.Test(t, func(t *testing.T) {
			w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
			w.gen = w.generation(t, nil, server("a", 10*gpu.GiB))
			probed := &probedServer{fakeServer: w.servers["a"]}
			w.gen.Lifecycles["a"] = probed
			require.NoError(t, w.Push(w.gen))
			defer w.Close()
			w.serves(t, "a")
			pass(time.Minute)
			probed.outcome.Store(int32(outcome))
			pass(time.Minute)
			a := w.Status().Consumers["a"]
			require.Equal(t, "unhealthy", a.Health, outcome)
			require.Equal(t, state, a.Slots[0].State, outcome)
			w.gpu.move(-10 * gpu.GiB)
			pass(time.Minute)
			require.Equal(t, "IDLE", w.Status().Consumers["a"].Slots[0].State, outcome)
		})
	}
}

func TestTheLoadOfARequestThatWaitedIsCountedWithoutItsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 10*gpu.GiB), server("b", 10*gpu.GiB))
		defer w.Close()
		work, err := w.Acquire(t.Context(), Request{Consumer: "a"})
		require.NoError(t, err)
		time.AfterFunc(time.Minute, func() { work.Release(scheduler.Served) })
		asked := time.Now()
		l, err := w.Acquire(t.Context(), Request{Consumer: "b"})
		require.NoError(t, err)
		defer l.Release(scheduler.Served)
		require.Greater(t, time.Since(asked), time.Minute)
		w.mu.Lock()
		defer w.mu.Unlock()
		require.Equal(t, time.Second, w.slots["b"].loadedSince(asked))
		require.Zero(t, w.slots["b"].loadedSince(time.Now()))
	})
}
