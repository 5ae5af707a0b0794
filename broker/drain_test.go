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
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// refused is the code that a request gets.
func (w *world) refused(t testing.TB, name string) scheduler.Code {
	t.Helper()
	_, err := w.Acquire(context.Background(), Request{Consumer: name})
	var r *Refused
	require.ErrorAs(t, err, &r)
	return r.Code
}

func TestADrainWaitsForRunningJobsAndRefusesOthers(t *testing.T) {
	for name, which := range map[string]string{"of one": "a", "of all": ""} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, nil, server("a", 4*gpu.GiB), server("b", 4*gpu.GiB))
				defer w.Close()
				l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
				require.NoError(t, err)
				waiting := make(chan error, 1)
				go func() {
					_, err := w.Acquire(context.Background(), Request{Consumer: "a"})
					waiting <- err
				}()
				synctest.Wait()
				drained := make(chan error, 1)
				go func() { drained <- w.Drain(context.Background(), which) }()
				synctest.Wait()
				var r *Refused
				require.ErrorAs(t, <-waiting, &r)
				require.Equal(t, scheduler.Draining, r.Code)
				require.Equal(t, scheduler.Draining, w.refused(t, "a"))
				require.Equal(t, which == "", w.Status().Scheduler.Draining)
				require.True(t, w.Status().Consumers["a"].Draining)
				pass(time.Hour)
				require.Empty(t, drained, "a job runs still")
				l.Release(scheduler.Served)
				require.NoError(t, <-drained)
				if which == "" {
					require.Equal(t, scheduler.Draining, w.refused(t, "b"))
				} else {
					w.serves(t, "b")
				}
				require.NoError(t, w.Drain(context.Background(), which), "nothing runs")

				next := w.generation(t, nil, server("a", 4*gpu.GiB), server("b", 4*gpu.GiB))
				require.NoError(t, w.Push(next))
				w.Pop(w.gen)
				require.Equal(t, scheduler.Draining, w.refused(t, "a"), "a reload does not end it")
				require.NoError(t, w.Resume(which))
				w.serves(t, "a")
				require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].loads))
			})
		})
	}
}

func TestADrainWaitsForWorkThatGoesOnAtTheServer(t *testing.T) {
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
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		l.Release(scheduler.Accepted)
		drained := make(chan error, 2)
		go func() { drained <- w.Drain(context.Background(), "a") }()
		go func() { drained <- w.Drain(context.Background(), "") }()
		pass(time.Minute)
		require.Empty(t, drained)
		s.mu.Lock()
		s.busy = false
		s.mu.Unlock()
		require.NoError(t, <-drained)
		require.NoError(t, <-drained)
	})
}

func TestADrainStopsWaitingWithItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		why := errors.New("the caller has gone")
		ctx, cancel := context.WithTimeoutCause(context.Background(), time.Minute, why)
		defer cancel()
		began := time.Now()
		require.ErrorIs(t, w.Drain(ctx, "a"), why)
		require.Equal(t, time.Minute, time.Since(began))
		require.Equal(t, scheduler.Draining, w.refused(t, "a"), "it is drained all the same")
		l.Release(scheduler.Served)
	})
}

func TestADrainEndsWithTheBroker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		_, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		drained := make(chan struct{})
		go func() {
			_ = w.Drain(context.Background(), "") // the job is over with the broker, or the wait is
			close(drained)
		}()
		synctest.Wait()
		w.Close()
		select {
		case <-drained:
		case <-time.After(time.Second): // of the bubble's clock
			t.Fatal("it waits for a broker that has ended")
		}
	})
}

func TestNobodyCanBeDrainedWhoIsNotThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		require.ErrorIs(t, w.Drain(context.Background(), "nobody"), ErrUnknownConsumer)
		require.ErrorIs(t, w.Resume("nobody"), ErrUnknownConsumer)
		w.serves(t, "a")
	})
}

func TestARetiredBrokerServesThoseThatWaitThenUnloadsAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB), server("b", 4*gpu.GiB))
		defer w.Close()
		w.serves(t, "b")
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		got := make(chan Lease, 1)
		go func() {
			l, _ := w.Acquire(context.Background(), Request{Consumer: "a"})
			got <- l
		}()
		synctest.Wait()
		w.Retire(context.Background()) // a configuration has it still: nothing is done
		require.Equal(t, []string{"a", "b"}, w.Names())
		w.Pop(w.gen)
		retired := make(chan struct{})
		go func() { w.Retire(context.Background()); close(retired) }()
		pass(time.Minute)
		l.Release(scheduler.Served)
		l = <-got
		require.NotZero(t, l, "who waited is served")
		require.False(t, isDone(retired))
		l.Release(scheduler.Served)
		<-retired
		for _, n := range []string{"a", "b"} {
			s := w.servers[n]
			require.Equal(t, 1, s.count(&s.unloads))
			require.Equal(t, 1, s.count(&s.closed))
		}
	})
}

func TestABrokerThatComesBackTakesUpWhatIsStillThere(t *testing.T) {
	for name, mode := range map[string]string{"as it was": config.Evicting, "as another kind of scheduler": config.Locked} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, nil, server("a", 4*gpu.GiB))
				defer w.Close()
				l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
				require.NoError(t, err)
				w.Pop(w.gen)
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				defer cancel()
				w.Retire(ctx)
				require.NoError(t, w.Push(w.generation(t, func(b *config.Broker) { b.Scheduler = mode }, server("a", 4*gpu.GiB))))
				l.Release(scheduler.Served)
				pass(time.Minute)
				w.serves(t, "a")
				require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].loads))
				require.Zero(t, w.servers["a"].count(&w.servers["a"].unloads))
			})
		})
	}
}

// brokenCall is an error of the network, which may be that of a time-out.
type brokenCall bool

func (e brokenCall) Error() string   { return "broken" }
func (e brokenCall) Timeout() bool   { return bool(e) }
func (e brokenCall) Temporary() bool { return false }

func TestOnlyACallThatTookTooLongHasTimedOut(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	for _, c := range []struct {
		ctx  context.Context
		err  error
		want bool
	}{
		{t.Context(), errors.New("500 Internal Server Error"), false},
		{t.Context(), fmt.Errorf("busy: %w", brokenCall(false)), false},
		{t.Context(), fmt.Errorf("busy: %w", brokenCall(true)), true},
		{t.Context(), fmt.Errorf("busy: %w", context.DeadlineExceeded), true},
		{ended, errors.New("connection reset"), true},
	} {
		require.Equal(t, c.want, timedOut(c.ctx, c.err), "%v", c.err)
	}
}
