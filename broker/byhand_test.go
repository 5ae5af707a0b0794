package broker

import (
	"context"
	"errors"
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

func TestWhatCanNotBeDoneByHandIsRefusedWithTheReason(t *testing.T) {
	locked := func(c *config.Broker) { c.Scheduler = config.Locked }
	for name, c := range map[string]struct {
		edit   func(*config.Broker)
		traits lifecycle.Traits
		do     func(w *world) error
		is     error
		says   string
	}{
		"load of nobody":             {traits: everything, do: func(w *world) error { return w.LoadByHand(t.Context(), "nobody") }, says: "nobody"},
		"unload of nobody":           {traits: everything, do: func(w *world) error { return w.UnloadByHand(t.Context(), "nobody", true) }, says: "nobody"},
		"load without a route":       {traits: lifecycle.Traits{Unload: true, Health: true}, do: func(w *world) error { return w.LoadByHand(t.Context(), "a") }, is: ErrCannot, says: "no load route"},
		"unload without a route":     {traits: lifecycle.Traits{Load: true, Health: true}, do: func(w *world) error { return w.UnloadByHand(t.Context(), "a", true) }, is: ErrCannot, says: "no unload route"},
		"unload where nothing is":    {edit: locked, traits: everything, do: func(w *world) error { return w.UnloadByHand(t.Context(), "a", true) }, is: ErrCannot, says: "unloads nothing"},
		"pin of nobody":              {traits: everything, do: func(w *world) error { return w.Pin("nobody", true) }, says: "nobody"},
		"lending a GPU that is not":  {traits: everything, do: func(w *world) error { _, err := w.Lend(1, time.Minute); return err }, is: ErrUnknownGPU, says: "1; there are [0]"},
		"a GPU's return that is not": {traits: everything, do: func(w *world) error { _, err := w.Lend(-1, 0); return err }, is: ErrUnknownGPU},
		"lending as the broker ends": {traits: everything, do: func(w *world) error { w.Close(); _, err := w.Lend(0, time.Minute); return err }, is: errStopping},
		"a load as the broker ends":  {traits: everything, do: func(w *world) error { w.Close(); return w.LoadByHand(t.Context(), "a") }, says: "stopping"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := worldOf(t, c.edit, c.traits, server("a", gpu.GiB))
				defer w.Close()
				pass(time.Minute)
				err := c.do(w)
				require.Error(t, err)
				if c.is != nil {
					require.ErrorIs(t, err, c.is)
				}
				require.ErrorContains(t, err, c.says)
				require.Zero(t, w.servers["a"].count(&w.servers["a"].loads))
			})
		})
	}
}

func TestALoadByHandOfWhatIsLoadedDoesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB))
		defer w.Close()
		require.NoError(t, w.LoadByHand(t.Context(), "a"))
		requests := w.Status().Consumers["a"].TotalRequests
		require.NoError(t, w.LoadByHand(t.Context(), "a"))
		require.Equal(t, requests, w.Status().Consumers["a"].TotalRequests)
		require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].loads))
	})
}

func TestWhoeverAskedByHandMayLeaveAndItIsDoneAllTheSame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB))
		defer w.Close()
		pass(time.Minute)
		gone := errors.New("the client has gone")
		leaving := func(do func(context.Context) error) {
			ctx, why := context.WithCancelCause(t.Context())
			done := make(chan error)
			go func() { done <- do(ctx) }()
			pass(time.Second / 2)
			why(gone)
			require.ErrorIs(t, <-done, gone)
		}
		leaving(func(ctx context.Context) error { return w.LoadByHand(ctx, "a") })
		pass(time.Second)
		require.Equal(t, "READY", w.stateOf(t, "a"))
		leaving(func(ctx context.Context) error { return w.UnloadByHand(ctx, "a", false) })
		pass(10 * time.Second)
		require.Equal(t, "IDLE", w.stateOf(t, "a"))
	})
}

func TestAPinnedServerIsUnloadedByHandOnlyByForce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB))
		defer w.Close()
		w.serves(t, "a")
		require.NoError(t, w.Pin("a", true))
		require.ErrorIs(t, w.UnloadByHand(t.Context(), "a", false), ErrPinned)
		require.Equal(t, "READY", w.stateOf(t, "a"))
		require.NoError(t, w.UnloadByHand(t.Context(), "a", true))
		require.Equal(t, "IDLE", w.stateOf(t, "a"))
	})
}

func TestALentGPUComesBackAtOnceWhenThatIsAskedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB))
		defer w.Close()
		pass(time.Minute)
		lent, err := w.Lend(0, time.Hour)
		require.NoError(t, err)
		require.WithinDuration(t, time.Now().Add(time.Hour), lent.Until, 0)
		lent, err = w.Lend(0, 0)
		require.NoError(t, err)
		require.Zero(t, lent)
		w.serves(t, "a")
	})
}

func TestWhatIsLoadedIsWhatServesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		off := server("off", gpu.GiB)
		w := newWorld(t, nil, server("a", gpu.GiB), cloud("sky"), off)
		defer w.Close()
		require.False(t, w.Loaded("nobody"))
		require.False(t, w.Loaded("a"))
		require.True(t, w.Loaded("sky"), "elsewhere")
		l, err := w.Acquire(t.Context(), Request{Consumer: "a"})
		require.NoError(t, err)
		require.True(t, w.Loaded("a"))
		require.False(t, w.Loaded("off"))
		go func() { _ = w.UnloadByHand(context.Background(), "a", false) }()
		synctest.Wait()
		require.Equal(t, "READY", w.stateOf(t, "a"))
		require.False(t, w.Loaded("a"), "it goes as soon as its work has ended")
		l.Release(scheduler.Served)
	})
	for _, mode := range []string{config.Locked, config.Passthrough} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, func(c *config.Broker) { c.Scheduler = mode }, server("a", gpu.GiB))
			defer w.Close()
			require.True(t, w.Loaded("a"), "its server sees to that itself")
			require.False(t, w.Loaded("nobody"))
		})
	}
}

func TestARouteIsRecordedWithoutWhatLooksLikeAnID(t *testing.T) {
	long := make([]byte, 2*maxUnlistedRoute)
	for i := range long {
		long[i] = 'x'
	}
	for path, want := range map[string]string{
		"/v1/jobs/17":                    "POST /v1/jobs/*",
		"/v1/jobs/0/9":                   "POST /v1/jobs/*/*",
		"/v1/2a/b3":                      "POST /v1/2a/b3",
		"/jobs/ab12cd34":                 "POST /jobs/*",
		"/jobs/abcde123":                 "POST /jobs/abcde123",
		"/jobs/ab1234c":                  "POST /jobs/ab1234c",
		"/":                              "POST /",
		"/\xff/x":                        "POST //x",
		"/" + string(long):               "POST /" + string(long[1:maxUnlistedRoute]),
		"/" + string(long[:10]) + "/:/;": "POST /xxxxxxxxxx/:/;",
	} {
		require.Equal(t, want, unlistedRoute("POST", path), path)
	}
	require.Equal(t, "xxxxxxxxxxxxxxxx /", unlistedRoute(string(long), "/"))
}

func TestARequestThatLoadsNothingTakesItsModelsTurnOnlyIfThatIsLoaded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		defer w.Close()
		m.tells(lifecycle.Model{Name: "b", Resident: gpu.GiB})
		pass(10 * time.Second)
		turn := func(model string) string {
			w.mu.Lock()
			defer w.mu.Unlock()
			_, sl := w.choose(time.Now(), &Request{Consumer: "m", Model: model, Turn: true})
			return sl.name
		}
		require.Equal(t, "m/b", turn("b"))
		require.Equal(t, "m/", turn("a"))
		require.Equal(t, "m/", turn("unheard of"))
		require.Equal(t, "m/", turn(""))
		l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "b"})
		require.NoError(t, err)
		go func() { _ = w.UnloadByHand(context.Background(), "m/b", false) }()
		synctest.Wait()
		require.Equal(t, "m/", turn("b"), "it is about to go")
		l.Release(scheduler.Served)
	})
}

// jobsServer follows the jobs that its answers name.
type jobsServer struct {
	*fakeServer
	tracked atomic.Value
}

func (d *jobsServer) Open(lifecycle.Deps) (lifecycle.Driver, error) { return d, nil }
func (d *jobsServer) Track(body []byte) bool                        { d.tracked.Store(string(body)); return true }

func TestAnAnswerThatNamesAJobIsHandedToItsServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		w.gen = w.generation(t, nil, server("a", gpu.GiB), server("b", gpu.GiB))
		d := &jobsServer{fakeServer: w.servers["a"]}
		w.gen.Lifecycles["a"] = d
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		for _, name := range []string{"a", "b"} {
			l, err := w.Acquire(t.Context(), Request{Consumer: name})
			require.NoError(t, err)
			l.Track([]byte(name + "'s"))
			l.Release(scheduler.Served)
		}
		require.Equal(t, "a's", d.tracked.Load())
	})
}

func TestWhyARequestHasNobodyToServeIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _ := newModels(t)
		defer w.Close()
		pass(10 * time.Second)
		for _, c := range []struct {
			consumer, model string
			says            string
		}{
			{"nobody", "", `there is no consumer "nobody"`},
			{"m", "", `"m" has several models, and the request names none`},
			{"m", "a\nb", `"m" has no model "a\nb": name it in the configuration`},
		} {
			_, err := w.Acquire(t.Context(), Request{Consumer: c.consumer, Model: c.model})
			var r *Refused
			require.ErrorAs(t, err, &r)
			require.Equal(t, scheduler.UnknownConsumer, r.Code)
			require.Contains(t, r.Message, c.says)
		}
		w.Close()
		_, err := w.Acquire(t.Context(), Request{Consumer: "nobody"})
		require.ErrorContains(t, err, "the broker is stopping")
	})
}
