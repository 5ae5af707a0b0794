package broker

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func TestRequestIsToldThatItWaitsAndMayAskWhereItStands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB), server("b", 4*gpu.GiB))
		defer w.Close()
		places := make(chan func() Place, 1)
		ask := Request{Consumer: "a", Waiting: func(place func() Place) { places <- place }}
		leases := make(chan Lease, 3)
		acquire := func(r Request) {
			go func() {
				l, err := w.Acquire(context.Background(), r)
				require.NoError(t, err)
				leases <- l
			}()
			synctest.Wait()
		}
		acquire(ask)
		place := <-places
		require.Equal(t, Place{Consumer: "a", Position: 1, Loading: true}, place())
		first := <-leases
		require.Equal(t, Place{}, place(), "it waits no more")

		acquire(Request{Consumer: "b", Priority: 5})
		acquire(Request{Consumer: "a"})
		acquire(ask)
		place = <-places
		require.Equal(t, Place{Consumer: "a", Position: 2}, place(), "the one of less urgency is behind it")
		first.Release(scheduler.Served)
		second := <-leases
		require.Equal(t, Place{Consumer: "a", Position: 1}, place())
		second.Release(scheduler.Served)
		(<-leases).Release(scheduler.Served)
		(<-leases).Release(scheduler.Served)

		l, err := w.Acquire(context.Background(), ask)
		require.NoError(t, err)
		l.Release(scheduler.Served)
		require.Empty(t, places, "a warm request does not wait")
	})
}

func TestClientsOfTheStatusAreCountedOncePerRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		l, err := w.Acquire(context.Background(), Request{Consumer: "a", Client: "me"})
		require.NoError(t, err)
		asked := l.Asked
		l.Release(scheduler.DialRefused)
		l, err = w.Acquire(context.Background(), Request{Consumer: "a", Client: "me", Submitted: asked}) // once more
		require.NoError(t, err)
		l.Release(scheduler.Served)
		l.Release(scheduler.Served) // does nothing
		warm, ok := w.TryAcquire(Request{Consumer: "a", Client: "me"})
		require.True(t, ok)
		_, ok = w.TryAcquire(Request{Consumer: "a", Client: "me"})
		require.False(t, ok)
		pass(3 * time.Second)
		warm.Release(scheduler.Served)
		clients := w.Status().Clients
		require.Len(t, clients, 1)
		require.Equal(t, "me", clients[0].Client)
		require.EqualValues(t, 2, clients[0].Requests)
		require.InDelta(t, 1000, clients[0].MeanRunMS, 1, "of three runs")
		require.Positive(t, clients[0].MeanWaitMS)
	})
}

func TestWorkThatOutlivesItsAnswerIsSharedOutWhenAllOfItIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		defer w.Close()
		s := newServer(w.gpu, 4*gpu.GiB)
		s.traits.Busy, s.busy = true, true
		w.servers["a"] = s
		c := server("a", 4*gpu.GiB)
		c.Async = true
		require.NoError(t, w.Push(w.generation(t, nil, c)))
		w.Pop(w.gen)
		served := make(chan time.Duration, 3)
		accept := func() {
			l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
			require.NoError(t, err)
			require.True(t, w.WhenDone("a", l.Began, func(service time.Duration) { served <- service }))
			l.Release(scheduler.Accepted)
		}
		accept()
		pass(4 * time.Second)
		accept()
		pass(4 * time.Second)
		require.Empty(t, served, "it still works")
		s.mu.Lock()
		s.busy = false
		s.mu.Unlock()
		for range 2 {
			require.InDelta(t, 4*time.Second, <-served, float64(300*time.Millisecond))
		}
		pass(time.Minute)
		require.Empty(t, served, "each is told once")
		s.mu.Lock()
		s.busy = true
		s.mu.Unlock()
		accept()
		pass(2 * time.Second)
		w.Close()
		require.InDelta(t, 2*time.Second, <-served, float64(300*time.Millisecond), "the broker ends before the work")
	})
}

func TestARequestWhoseClientLeavesTheQueueLeavesNothingBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		waiting := func() int {
			w.mu.Lock()
			defer w.mu.Unlock()
			return len(w.waiters)
		}
		running, err := w.Acquire(t.Context(), Request{Consumer: "a"})
		require.NoError(t, err)
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan error, 1)
		go func() {
			_, err := w.Acquire(ctx, Request{Consumer: "a"})
			left <- err
		}()
		synctest.Wait()
		require.Equal(t, 1, waiting())
		leave()
		require.ErrorIs(t, <-left, context.Canceled)
		require.Zero(t, waiting())
		running.Release(scheduler.Served)
	})
}
