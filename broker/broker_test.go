package broker

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func TestFirstRequestLoadsAndNextOneIsWarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		require.InDelta(t, time.Second, l.Loading, float64(10*time.Millisecond))
		l.Release(scheduler.Served)
		began := time.Now()
		l, err = w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		require.Zero(t, time.Since(began))
		require.Zero(t, l.Queued+l.Loading)
		l.Release(scheduler.Served)
		l.Release(scheduler.Served) // does nothing
		require.Equal(t, 0, w.Status().Scheduler.InFlight)
		require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].loads))
	})
}

func TestASwapTakesTheServersOwnTimeAndNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 10*gpu.GiB), server("b", 10*gpu.GiB))
		defer w.Close()
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		l.Release(scheduler.Served)
		began := time.Now()
		l, err = w.Acquire(context.Background(), Request{Consumer: "b"})
		require.NoError(t, err)
		require.LessOrEqual(t, time.Since(began), 2*time.Second+fastInterval)
		l.Release(scheduler.Served)
		require.EqualValues(t, 1, w.Status().Scheduler.Evictions)
	})
}

func TestClientThatLeavesGivesItsPlaceBackAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		got := make(chan error)
		go func() {
			_, err := w.Acquire(ctx, Request{Consumer: "a"})
			got <- err
		}()
		synctest.Wait()
		require.Equal(t, 1, w.Status().Scheduler.QueueDepth)
		cancel()
		require.ErrorIs(t, <-got, context.Canceled)
		require.Equal(t, 0, w.Status().Scheduler.QueueDepth)
		l.Release(scheduler.Served)
		require.Equal(t, 0, w.Status().Scheduler.InFlight)
	})
}

// A cancel that loses the race against its grant must give the grant back.
func TestGrantThatMeetsACancelIsNotLost(t *testing.T) {
	w := newWorld(t, nil, server("a", 4*gpu.GiB))
	w.servers["a"].load = 0
	defer w.Close()
	var clients sync.WaitGroup
	for range 16 {
		clients.Go(func() {
			for range 300 {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.IntN(200))*time.Microsecond)
				l, err := w.Acquire(ctx, Request{Consumer: "a"})
				if err == nil {
					l.Release(scheduler.Served)
				}
				cancel()
			}
		})
	}
	clients.Wait()
	st := w.Status().Scheduler
	require.Zero(t, st.InFlight)
	require.Zero(t, st.QueueDepth)
	l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
	require.NoError(t, err)
	l.Release(scheduler.Served)
}

func TestBudgetEndsOnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		began := time.Now()
		_, err = w.Acquire(context.Background(), Request{Consumer: "a", Budget: 90 * time.Second})
		var r *Refused
		require.ErrorAs(t, err, &r)
		require.Equal(t, scheduler.BudgetExceeded, r.Code)
		require.Equal(t, 90*time.Second, time.Since(began))
		l.Release(scheduler.Served)
	})
}

func TestLoadThatTakesTooLongFailsAndCoolsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(b *config.Broker) { b.LoadTimeout = caddy.Duration(10 * time.Second) }, server("a", 4*gpu.GiB))
		defer w.Close()
		w.servers["a"].load = time.Hour
		began := time.Now()
		_, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		var r *Refused
		require.ErrorAs(t, err, &r)
		require.Equal(t, scheduler.LoadFailed, r.Code)
		require.Equal(t, 10*time.Second, time.Since(began))
		w.servers["a"].load = time.Second
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"}) // waits for the cool-down
		require.NoError(t, err)
		require.Equal(t, 12*time.Second, time.Since(began))
		l.Release(scheduler.Served)
	})
}

func TestOutOfMemoryIsToldToTheScheduler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB), server("b", 4*gpu.GiB))
		defer w.Close()
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		l.Release(scheduler.Served)
		w.servers["b"].fail = lifecycle.ErrOutOfMemory
		l, err = w.Acquire(context.Background(), Request{Consumer: "b"})
		require.NoError(t, err, "one more makes room, and the load is tried once more")
		l.Release(scheduler.Served)
		require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].unloads))
		require.Equal(t, 2, w.servers["b"].count(&w.servers["b"].loads))
	})
}

func TestReloadKeepsWhatIsUnchanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB), server("b", 4*gpu.GiB))
		defer w.Close()
		running, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		next := w.generation(t, nil, server("a", 4*gpu.GiB))
		require.NoError(t, w.Push(next))
		w.Pop(w.gen)
		require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].opened), "an unchanged driver lives on")
		require.Equal(t, 1, w.Status().Scheduler.InFlight)
		synctest.Wait()
		require.Equal(t, 1, w.servers["b"].count(&w.servers["b"].closed), "a removed one goes")
		running.Release(scheduler.Served)
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		l.Release(scheduler.Served)
		require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].loads))
	})
}

func TestFailedGenerationIsUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		bad := w.generation(t, nil, server("c", 4*gpu.GiB))
		require.NoError(t, w.Push(bad))
		w.Pop(bad) // another app failed to start
		require.Equal(t, []string{"a"}, w.Names())
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		l.Release(scheduler.Served)
	})
}

func TestCloseRefusesWhoWaitsAndEndsEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		w.servers["a"].load = time.Hour
		got := make(chan error)
		go func() {
			_, err := w.Acquire(context.Background(), Request{Consumer: "a"})
			got <- err
		}()
		synctest.Wait()
		w.Close()
		var r *Refused
		require.ErrorAs(t, <-got, &r)
		require.Equal(t, scheduler.Draining, r.Code)
		w.Close()
		_, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.Error(t, err)
	})
}

func TestRequestForWhatNoConfigurationHasIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New()
		defer b.Close()
		_, err := b.Acquire(context.Background(), Request{Consumer: "a"})
		var r *Refused
		require.ErrorAs(t, err, &r)
		require.Equal(t, scheduler.UnknownConsumer, r.Code)
	})
}

func TestUnloadByHandLetsRunningWorkFinish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pinned := server("p", 2*gpu.GiB)
		pinned.Pin = true
		w := newWorld(t, nil, server("a", 4*gpu.GiB), pinned)
		defer w.Close()
		require.ErrorIs(t, w.UnloadByHand(context.Background(), "nobody", false), ErrUnknownConsumer)
		require.NoError(t, w.LoadByHand(context.Background(), "p"))
		require.ErrorIs(t, w.UnloadByHand(context.Background(), "p", false), ErrPinned)
		require.NoError(t, w.UnloadByHand(context.Background(), "p", true))

		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		done := make(chan error)
		go func() { done <- w.UnloadByHand(context.Background(), "a", false) }()
		synctest.Wait()
		require.Zero(t, w.servers["a"].count(&w.servers["a"].unloads))
		l.Release(scheduler.Served)
		require.NoError(t, <-done)
		require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].unloads))
		require.EqualValues(t, 2, w.Status().Scheduler.ManualUnloads)
	})
}

func TestUnloadByHandOfWhatIsBeingLoadedUnloadsItThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		loading := make(chan error)
		go func() { loading <- w.LoadByHand(context.Background(), "a") }()
		synctest.Wait()
		require.NoError(t, w.UnloadByHand(context.Background(), "a", false))
		require.NoError(t, <-loading)
		require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].unloads))
	})
}

// A lazy server that somebody waits for is loaded again in the step in which its unload ends.
func TestUnloadByHandIsDoneThoughTheServerIsLoadedAgainAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		defer w.Close()
		w.servers["a"] = newServer(w.gpu, 4*gpu.GiB)
		w.servers["a"].traits = lifecycle.Traits{Unload: true, Health: true}
		require.NoError(t, w.Push(w.generation(t, nil, server("a", 4*gpu.GiB))))
		w.Pop(w.gen)
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		done, admitted := make(chan error), make(chan Lease)
		go func() { done <- w.UnloadByHand(context.Background(), "a", false) }()
		synctest.Wait()
		go func() {
			l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
			assert.NoError(t, err)
			admitted <- l
		}()
		synctest.Wait()
		l.Release(scheduler.Served)
		again := <-admitted
		select {
		case err := <-done:
			require.NoError(t, err)
		case <-time.After(time.Second): // of the bubble's clock
			t.Fatal("the unload is over, and nobody was told")
		}
		again.Release(scheduler.Served)
		require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].unloads))
	})
}

func TestAJobThatWaitedThroughAReloadGoesToTheServersNewAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		running, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		admitted := make(chan Lease)
		go func() {
			l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
			assert.NoError(t, err)
			admitted <- l
		}()
		synctest.Wait()
		moved := server("a", 4*gpu.GiB)
		moved.Upstream = "127.0.0.1:2"
		require.NoError(t, w.Push(w.generation(t, nil, moved)))
		w.Pop(w.gen)
		running.Release(scheduler.Served)
		l := <-admitted
		require.Equal(t, "127.0.0.1:2", l.Upstream)
		l.Release(scheduler.Served)
	})
}

func TestAGenerationThatComesTooLateOpensNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		late := w.generation(t, nil, server("a", 4*gpu.GiB), server("b", 4*gpu.GiB))
		w.Close()
		require.Error(t, w.Push(late))
		require.Zero(t, w.servers["b"].count(&w.servers["b"].opened), "nobody would close it")
	})
}

// faulty is an observer with a bug.
type faulty struct{}

func (faulty) Count(scheduler.Decision)      { panic("a bug") }
func (faulty) Resided(string, time.Duration) {}
func (faulty) Decided(scheduler.Decision)    {}

func TestAPanicInARequestLeavesTheBrokerUsable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		synctest.Wait()
		w.current.Load().Observer = faulty{}
		require.Panics(t, func() { _, _ = w.Acquire(context.Background(), Request{Consumer: "nobody"}) })
		require.True(t, w.mu.TryLock(), "the mutex is held for ever")
		w.mu.Unlock()
	})
}

func TestLostTelemetryDegradesAndComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		synctest.Wait()
		w.gpu.mu.Lock()
		w.gpu.lost = errors.New("driver mismatch")
		w.gpu.mu.Unlock()
		pass(3 * time.Second) // the next sample
		require.Equal(t, "driver mismatch", w.Status().Degraded)
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err, "book-keeping goes on")
		l.Release(scheduler.Served)
		w.gpu.mu.Lock()
		w.gpu.lost = nil
		w.gpu.mu.Unlock()
		pass(3 * time.Second) // the one after it
		require.Empty(t, w.Status().Degraded)
	})
}

func BenchmarkWarmAcquireRelease(b *testing.B) {
	w := newWorld(b, nil, server("a", 4*gpu.GiB))
	w.servers["a"].load = 0
	defer w.Close()
	ctx := context.Background()
	l, err := w.Acquire(ctx, Request{Consumer: "a"})
	require.NoError(b, err)
	l.Release(scheduler.Served)
	b.ReportAllocs()
	for b.Loop() {
		l, _ := w.Acquire(ctx, Request{Consumer: "a", Priority: DefaultPriority})
		l.Release(scheduler.Served)
	}
}
