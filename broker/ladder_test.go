package broker

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func cloud(name string) *config.Consumer {
	return &config.Consumer{Name: name, Cloud: true, Upstream: "127.0.0.1:2", Budget: caddy.Duration(time.Hour)}
}

func ladder(names ...string) Request { return Request{Consumer: names[0], Candidates: names} }

func TestBothWaysInServeALadderByItsWarmFallback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sky := cloud("sky")
		w := newWorld(t, nil, server("a", 14*gpu.GiB), server("b", 4*gpu.GiB), sky)
		defer w.Close()
		w.serves(t, "b")
		loads := w.servers["a"].count(&w.servers["a"].loads)

		l, ok := w.TryAcquire(ladder("a", "b"))
		require.True(t, ok)
		require.Equal(t, "b", l.Consumer)
		require.Equal(t, "b.test:1", l.Upstream)
		_, ok = w.TryAcquire(ladder("a", "b"))
		require.False(t, ok, "b works: it is warm all the same, and has no place at once")
		for range 3 { // … while one that runs elsewhere always has
			l, ok := w.TryAcquire(ladder("a", "sky", "b"))
			require.True(t, ok)
			require.Equal(t, "sky", l.Consumer)
			require.Equal(t, "127.0.0.1:2", l.Upstream)
			defer l.Release(scheduler.Served)
		}
		got := make(chan Lease)
		go func() {
			l, err := w.Acquire(context.Background(), ladder("a", "b"))
			require.NoError(t, err)
			got <- l
		}()
		synctest.Wait()
		require.Equal(t, 1, w.Status().Consumers["b"].Waiting)
		l.Release(scheduler.Served)
		l = <-got
		require.Equal(t, "b", l.Consumer)
		l.Release(scheduler.Served)

		st := w.Status().Consumers
		require.EqualValues(t, 3, st["b"].TotalRequests, "they are counted for whom they came to")
		require.EqualValues(t, 3, st["sky"].TotalRequests)
		require.Zero(t, st["a"].TotalRequests)
		require.Equal(t, loads, w.servers["a"].count(&w.servers["a"].loads))
		require.True(t, st["sky"].Cloud)
		require.False(t, st["sky"].Loaded, "nothing of it is here")
		require.Zero(t, w.servers["sky"].count(&w.servers["sky"].probes), "it is not ours to watch")
	})
}

func TestTheBudgetOfALadderIsThatOfWhomItLeadsTo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := server("b", 4*gpu.GiB)
		b.Budget = caddy.Duration(time.Minute)
		w := newWorld(t, nil, server("a", 14*gpu.GiB), b)
		defer w.Close()
		w.serves(t, "b")
		l, err := w.Acquire(context.Background(), Request{Consumer: "b"})
		require.NoError(t, err)
		defer l.Release(scheduler.Served)
		began := time.Now()
		_, err = w.Acquire(context.Background(), ladder("a", "b"))
		var r *Refused
		require.ErrorAs(t, err, &r)
		require.Equal(t, scheduler.BudgetExceeded, r.Code)
		require.Equal(t, "b", r.Consumer)
		require.Equal(t, time.Minute, time.Since(began))
	})
}

func TestPinPrimaryHoldsByTheRequestOrByTheFirstCandidatesOwnSetting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pinned := server("p", 14*gpu.GiB)
		pinned.PinPrimary = true
		w := newWorld(t, nil, server("a", 14*gpu.GiB), pinned, server("b", 4*gpu.GiB))
		defer w.Close()
		w.serves(t, "b")
		serves := func(want string, r Request) {
			t.Helper()
			l, err := w.Acquire(context.Background(), r)
			require.NoError(t, err)
			require.Equal(t, want, l.Consumer)
			l.Release(scheduler.Served)
		}
		serves("b", ladder("a", "b"))
		serves("b", ladder("a", "p", "b")) // that of a later candidate says nothing
		r := ladder("a", "b")
		r.PinPrimary = true
		serves("a", r)
		serves("b", Request{Consumer: "b"})
		serves("p", ladder("p", "b"))
		require.EqualValues(t, 3, w.Status().Scheduler.Evictions)
	})
}

func TestWithoutLeaveALadderLeadsToNoCloudButTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 14*gpu.GiB), server("b", 4*gpu.GiB), cloud("sky"), cloud("moon"))
		defer w.Close()
		w.serves(t, "b")
		leads := func(want string, names ...string) {
			t.Helper()
			l, ok := w.TryAcquire(ladder(names...))
			if want == "" {
				require.False(t, ok)
				return
			}
			require.True(t, ok)
			require.Equal(t, want, l.Consumer)
			l.Release(scheduler.Served)
		}
		leads("sky", "a", "sky", "moon", "b")
		f, err := w.AllowCloudFallback(t.Context(), false)
		require.NoError(t, err)
		require.Equal(t, Flags{AllowCloudFallback: false, Source: FromStore}, f)
		leads("b", "a", "sky", "moon", "b")
		leads("b", "a", "b", "sky")
		leads("", "a", "sky", "moon") // to a, which is cold
		leads("sky", "sky", "b", "moon")
		leads("sky", "sky")
		f, err = w.AllowCloudFallback(t.Context(), true)
		require.NoError(t, err)
		require.True(t, f.AllowCloudFallback)
		leads("sky", "a", "sky", "b")
	})
}

func TestACloudConsumerIsServedWhateverBecomesOfItsAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 14*gpu.GiB), cloud("sky"))
		defer w.Close()
		w.serves(t, "a")
		running, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		defer running.Release(scheduler.Served)
		for _, outcome := range []scheduler.Outcome{scheduler.DialRefused, scheduler.ServerDied, scheduler.NoAnswer, scheduler.Served} {
			_, ok := w.TryAcquire(ladder("a", "sky"))
			require.False(t, ok, "a is warm, and works")
			l, ok := w.TryAcquire(Request{Consumer: "sky"})
			require.True(t, ok)
			l.Release(outcome)
		}
		// A reload brings it home, and away again.
		next := w.generation(t, nil, server("a", 14*gpu.GiB), server("sky", 4*gpu.GiB))
		require.NoError(t, w.Push(next))
		w.Pop(w.gen)
		pass(11 * time.Second)
		_, ok := w.TryAcquire(Request{Consumer: "sky"})
		require.False(t, ok, "it must be loaded first, and there is no room")
		require.Positive(t, w.servers["sky"].count(&w.servers["sky"].probes))
		last := w.generation(t, nil, server("a", 14*gpu.GiB), cloud("sky"))
		require.NoError(t, w.Push(last))
		w.Pop(next)
		l, ok := w.TryAcquire(Request{Consumer: "sky"})
		require.True(t, ok)
		l.Release(scheduler.Served)
		synctest.Wait()
		probes := w.servers["sky"].count(&w.servers["sky"].probes)
		pass(time.Minute)
		require.Equal(t, probes, w.servers["sky"].count(&w.servers["sky"].probes))
	})
}

func TestALadderOfOneCostsNoAllocation(t *testing.T) {
	w := newWorld(t, nil, server("a", 4*gpu.GiB), server("b", 4*gpu.GiB))
	w.servers["a"].load = 0
	defer w.Close()
	w.serves(t, "a")
	for name, r := range map[string]Request{"none": {Consumer: "a"}, "one": ladder("a"), "two": ladder("a", "b")} {
		require.Zero(t, testing.AllocsPerRun(200, func() {
			l, ok := w.TryAcquire(r)
			require.True(t, ok)
			l.Release(scheduler.Served)
		}), name)
	}
}
