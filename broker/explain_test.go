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

func TestExplainSaysWhatWouldHappenAndDoesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seven, a := 7, server("a", 14*gpu.GiB)
		a.Priority, a.Fallback = &seven, []string{"b"}
		w := newWorld(t, nil, a, server("b", 4*gpu.GiB))
		defer w.Close()
		says := func(name string, priority *int, outcome, fallback string) Explained {
			t.Helper()
			synctest.Wait() // the memory is looked at after a load
			before := w.Status()
			x, err := w.Explain(name, priority)
			require.NoError(t, err)
			require.Equal(t, before, w.Status())
			require.Equal(t, name, x.Slot)
			require.Equal(t, outcome, x.Outcome, x.Reason)
			require.Equal(t, fallback, x.Fallback)
			require.NotEmpty(t, x.Reason)
			if said := "; but b is warm, and serves it instead, where the route has no other fallback"; fallback == "" {
				require.NotContains(t, x.Reason, "instead")
			} else {
				require.Contains(t, x.Reason, said)
			}
			return x
		}
		pass(time.Second)
		require.Equal(t, 7, says("a", nil, "loads", "").Priority)
		w.serves(t, "b")
		require.Equal(t, []string{"b"}, says("a", nil, "evicts", "b").Victims)
		require.Equal(t, 50, says("a", new(50), "evicts", "b").Priority)
		require.Equal(t, DefaultPriority, says("b", nil, "runs", "").Priority)
		_, err := w.Explain("nobody", nil)
		require.ErrorIs(t, err, ErrUnknownConsumer)
		require.EqualValues(t, 1, w.Status().Scheduler.TotalJobs)
	})
}

func TestALentGPUIsEmptiedAndItsRequestsWaitUntilItIsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		w.serves(t, "a")
		_, err := w.Lend(3, time.Hour)
		require.ErrorIs(t, err, ErrUnknownGPU)
		lent, err := w.Lend(0, time.Hour)
		require.NoError(t, err)
		require.Zero(t, lent.GPU)
		require.WithinDuration(t, time.Now().Add(time.Hour), lent.Until, time.Second)
		pass(time.Minute)
		require.False(t, w.Status().Consumers["a"].Loaded)
		began, got := time.Now(), make(chan time.Time)
		ask := func() {
			l, err := w.Acquire(context.Background(), Request{Consumer: "a", Budget: 2 * time.Hour})
			require.NoError(t, err)
			got <- time.Now()
			l.Release(scheduler.Served)
		}
		go ask()
		require.InDelta(t, 59*time.Minute+time.Second, (<-got).Sub(began), float64(5*time.Second))
		_, err = w.Lend(0, time.Hour)
		require.NoError(t, err)
		pass(time.Minute)
		go ask()
		synctest.Wait()
		began = time.Now()
		lent, err = w.Lend(0, 0)
		require.NoError(t, err)
		require.True(t, lent.Until.IsZero())
		require.InDelta(t, time.Second, (<-got).Sub(began), float64(2*time.Second))
	})
}

func TestAPinByHandHoldsThroughReloadsAndOverTheConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		w.serves(t, "a")
		require.ErrorIs(t, w.Pin("nobody", true), ErrUnknownConsumer)
		require.NoError(t, w.Pin("a", true))
		require.ErrorIs(t, w.UnloadByHand(t.Context(), "a", false), ErrPinned)
		next := w.generation(t, nil, server("a", 4*gpu.GiB))
		require.NoError(t, w.Push(next))
		w.Pop(w.gen)
		require.True(t, w.Status().Consumers["a"].Pinned)
		require.NoError(t, w.Pin("a", false))
		require.False(t, w.Status().Consumers["a"].Pinned)
		require.NoError(t, w.UnloadByHand(t.Context(), "a", false))
	})
}

func TestOneWhoFollowsGetsEveryDecisionOnceAndIsLetGoAtTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB), server("giant", 17*gpu.GiB))
		defer w.Close()
		f, err := w.Follow(t.Context(), w.Recorded(), time.Minute)
		require.NoError(t, err)
		require.Empty(t, f.Decisions, "nothing happened in that time")

		got := make(chan Followed, 1)
		follow := func(ctx context.Context, after uint64) chan error {
			done := make(chan error, 1)
			go func() {
				f, err := w.Follow(ctx, after, time.Hour)
				got <- f
				done <- err
			}()
			synctest.Wait()
			return done
		}
		done := follow(t.Context(), f.Last)
		w.serves(t, "a")
		first := <-got
		require.NoError(t, <-done)
		require.Equal(t, "load", first.Decisions[0].Kind)
		rest, err := w.Follow(t.Context(), first.Last, time.Hour)
		require.NoError(t, err)
		require.Equal(t, "loaded", rest.Decisions[0].Kind)
		require.Equal(t, w.Decisions(), append(first.Decisions, rest.Decisions...))
		require.Zero(t, rest.Missed)

		for range ringSize + 5 {
			_, err := w.Acquire(t.Context(), Request{Consumer: "giant"})
			require.Error(t, err)
		}
		late, err := w.Follow(t.Context(), rest.Last, time.Hour)
		require.NoError(t, err)
		require.Len(t, late.Decisions, ringSize)
		require.EqualValues(t, 5, late.Missed)
		require.Equal(t, w.Recorded(), late.Last)

		ctx, leave := context.WithCancel(t.Context())
		done = follow(ctx, late.Last)
		leave()
		<-got
		require.ErrorIs(t, <-done, context.Canceled)
		done = follow(t.Context(), late.Last)
		w.StopAdmitting()
		<-got
		require.ErrorIs(t, <-done, errStopping)
	})
}
