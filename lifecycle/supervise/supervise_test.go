package supervise_test

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/lifecycletest"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

const (
	plain  = `{"health": {"path": "/health"}}`
	voice  = `{"health": {"path": "/health", "loaded": "$.loaded"}, "load": {"path": "/load"}, "unload": {"path": "/unload"}, "busy": {"path": "/busy", "busy": "$.busy"}}`
	lazy   = `{"health": {"path": "/health"}, "unload": {"path": "/free"}}`
	sleepy = `{"health": {"path": "/health"}, "load": {"path": "/wake"}, "unload": {"path": "/sleep"}, "remember": true}`
	models = `{"health": {"path": "/health"}, "residency": {"path": "/ps", "names": "$.models[*].name"}, "model_tag": "latest",
		"load": {"path": "/load/{model}"}, "unload": {"path": "/unload/{model}"}}`
)

var whole = lifecycle.Target{}

func TestTraitsAreTheMeansAndTheRoutes(t *testing.T) {
	d, _ := open(t, newServer(t), plain)
	require.Equal(t, lifecycle.Traits{Load: true, Unload: true, Health: true, Residency: true, Starts: true}, d.Traits())
	d, _ = open(t, newServer(t), models)
	require.Equal(t, lifecycle.Traits{Load: true, Unload: true, Health: true, Residency: true, Starts: true,
		Models: true, LoadModel: true, UnloadModel: true, Names: lifecycle.Names{Tag: "latest"}}, d.Traits())
	d, _ = open(t, newServer(t), voice)
	require.True(t, d.Traits().Busy)
}

func TestOneThatDoesNotRunIsWellAndNotLoaded(t *testing.T) {
	s := newServer(t)
	d, _ := open(t, s, models)
	require.Equal(t, lifecycle.Report{Outcome: lifecycle.Answered, Loaded: lifecycle.No, Resident: -1,
		Models: []lifecycle.Model{}, Detail: "it does not run", Stopped: true}, d.Probe(t.Context()))
	busy, err := d.Busy(t.Context(), whole)
	require.NoError(t, err)
	require.False(t, busy)
	require.Empty(t, s.was())
	require.False(t, d.Running())
	require.Empty(t, d.Upstream())
}

func TestLoadStartsAndWaitsUntilItIsReady(t *testing.T) {
	s := newServer(t)
	s.mute = true
	d, _ := open(t, s, plain)
	target := lifecycle.Target{GPUs: []lifecycle.Placed{{Index: 1, UUID: "GPU-1"}}}
	loaded := make(chan error, 1)
	go func() { loaded <- d.Load(within(t, patience), target) }()
	require.Eventually(t, d.Running, patience, time.Millisecond)
	select {
	case err := <-loaded:
		require.Fail(t, "it is loaded before it listens", "%v", err)
	case <-time.After(50 * time.Millisecond):
	}
	s.openPort()
	require.NoError(t, <-loaded)
	require.Equal(t, target, s.target)
	require.Equal(t, s.address, d.Upstream())
	require.Equal(t, s.address, d.State().Address)
	require.True(t, d.Owns(77))
	r := d.Probe(t.Context())
	require.Equal(t, lifecycle.Answered, r.Outcome)
	require.Equal(t, lifecycle.Yes, r.Loaded, "without a residency route it is loaded while it runs")

	require.NoError(t, d.Load(within(t, patience), target))
	require.Equal(t, 1, s.starts, "one that runs is not started again")
}

func TestTheConfiguredUpstreamWins(t *testing.T) {
	s := newServer(t)
	configured := s.address
	d, _ := open(t, s, plain, func(deps *lifecycle.Deps) { deps.Upstream = configured })
	require.Equal(t, configured, d.Upstream())
	require.NoError(t, d.Load(within(t, patience), whole))
	require.Equal(t, configured, d.Upstream())
}

func TestALoadRouteIsCalledOnceTheServerIsWell(t *testing.T) {
	s := newServer(t)
	var mu sync.Mutex
	looks, loaded := 0, "false"
	s.answers("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if looks++; looks < 3 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte(`{"loaded": ` + loaded + `}`))
	})
	s.answers("POST /load", func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if looks < 3 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		loaded = "true"
	})
	d, _ := open(t, s, voice)
	require.NoError(t, d.Load(within(t, patience), whole))
	require.Equal(t, []string{"start", "POST /load"}, s.did())
}

func TestALoadRouteIsNotCalledIfTheServerLoadsByItself(t *testing.T) {
	s := newServer(t)
	s.says("GET /health", http.StatusOK, `{"loaded": true}`)
	d, _ := open(t, s, voice)
	require.NoError(t, d.Load(within(t, patience), whole))
	require.Equal(t, []string{"start"}, s.did())
}

func TestAServerThatEndsInItsLoadFailsItAtOnce(t *testing.T) {
	s := newServer(t)
	s.mute = true
	d, told := open(t, s, plain)
	loaded := make(chan error, 1)
	go func() { loaded <- d.Load(within(t, patience), whole) }()
	require.Eventually(t, d.Running, patience, time.Millisecond)
	ended := time.Now()
	s.end("exit status 1: no such model")
	err := <-loaded
	require.EqualError(t, err, "consumer qwen: load: the server has ended before it was ready: exit status 1: no such model")
	require.NotErrorIs(t, err, lifecycle.ErrOutOfMemory)
	require.Less(t, time.Since(ended), prompt)
	require.Equal(t, "exit status 1: no such model", told.once(t))
	told.none(t)
	require.False(t, d.Running())
}

func TestAServerThatEndsForLackOfMemoryIsKnownByItsOutput(t *testing.T) {
	s := newServer(t)
	s.mute = true
	d, _ := open(t, s, plain)
	loaded := make(chan error, 1)
	go func() { loaded <- d.Load(within(t, patience), whole) }()
	require.Eventually(t, d.Running, patience, time.Millisecond)
	s.end("exit status 1: bye", "torch.OutOfMemoryError: CUDA out of memory.", "bye")
	require.ErrorIs(t, <-loaded, lifecycle.ErrOutOfMemory)
}

func TestFC15ALoadThatTakesTooLongStopsTheServerAndTheNextTriesAgain(t *testing.T) {
	s := newServer(t)
	s.says("GET /health", http.StatusServiceUnavailable, `loading`)
	d, told := open(t, s, plain)
	err := d.Load(within(t, 100*time.Millisecond), whole)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Contains(t, err.Error(), "loading")
	require.False(t, d.Running())
	require.Equal(t, []string{"start", "stop"}, s.did())

	s.says("GET /health", http.StatusOK, ``)
	require.NoError(t, d.Load(within(t, patience), whole))
	require.True(t, d.Running())
	told.none(t)
}

func TestAStartThatFailsIsToldAndLeavesNothing(t *testing.T) {
	s := newServer(t)
	s.failing.start = errBroken
	d, told := open(t, s, plain)
	require.EqualError(t, d.Load(within(t, patience), whole), "consumer qwen: load: the means is broken")
	require.Equal(t, []string{"start", "stop"}, s.was())
	told.none(t)
}

func TestUnloadStopsAServerWithoutARoute(t *testing.T) {
	s := newServer(t)
	d, told := open(t, s, plain)
	require.NoError(t, d.Load(within(t, patience), whole))
	confirmed, err := d.Unload(within(t, patience), whole)
	require.NoError(t, err)
	require.True(t, confirmed)
	require.False(t, d.Running())
	told.none(t)

	confirmed, err = d.Unload(within(t, patience), whole)
	require.NoError(t, err, "one that does not run is no error")
	require.True(t, confirmed)
}

func TestUnloadTakesTheServersOwnRouteFirst(t *testing.T) {
	s := newServer(t)
	d, _ := open(t, s, lazy)
	require.NoError(t, d.Load(within(t, patience), whole))
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	confirmed, err := d.Unload(within(t, patience), whole)
	require.NoError(t, err)
	require.False(t, confirmed, "the server can't tell")
	require.True(t, d.Running())
	require.Equal(t, lifecycle.No, d.Probe(t.Context()).Loaded, "nothing has loaded it since")
	require.NoError(t, d.Load(within(t, patience), whole))
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	require.Equal(t, []string{"start", "POST /free"}, s.did())
}

func TestAnUnloadRouteThatFailsIsFollowedByAStop(t *testing.T) {
	s := newServer(t)
	s.says("POST /free", http.StatusInternalServerError, "no")
	d, _ := open(t, s, lazy)
	require.NoError(t, d.Load(within(t, patience), whole))
	confirmed, err := d.Unload(within(t, patience), whole)
	require.NoError(t, err)
	require.True(t, confirmed)
	require.False(t, d.Running())
}

func TestFC13AnUnloadRouteThatHangsIsFollowedByAStop(t *testing.T) {
	s := newServer(t)
	s.answers("POST /free", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	d, _ := open(t, s, lazy, func(deps *lifecycle.Deps) { deps.Limits.Set(patience, 100*time.Millisecond) })
	require.NoError(t, d.Load(within(t, patience), whole))
	confirmed, err := d.Unload(within(t, 100*time.Millisecond), whole)
	require.NoError(t, err)
	require.True(t, confirmed)
	require.False(t, d.Running())
}

func TestAStopThatFailsIsNoUnload(t *testing.T) {
	s := newServer(t)
	d, told := open(t, s, plain)
	require.NoError(t, d.Load(within(t, patience), whole))
	s.fail(func() { s.failing.stop = errBroken })
	confirmed, err := d.Unload(within(t, patience), whole)
	require.ErrorIs(t, err, errBroken)
	require.False(t, confirmed)
	require.True(t, d.Running())

	s.end("exit status 3")
	require.Equal(t, "exit status 3", told.once(t), "it was not told to end after all")
}

func TestAModelIsLoadedAndUnloadedByItselfAndTheServerStays(t *testing.T) {
	s := newServer(t)
	var mu sync.Mutex
	held := `[]`
	s.answers("GET /ps", func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		_, _ = w.Write([]byte(`{"models": ` + held + `}`))
	})
	hold := func(what string) http.HandlerFunc {
		return func(http.ResponseWriter, *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			held = what
		}
	}
	s.answers("POST /load/a", hold(`[{"name": "a:latest"}]`))
	s.answers("POST /unload/a", hold(`[]`))
	s.says("POST /load/b", http.StatusNotFound, "no such model")
	d, told := open(t, s, models)
	a, b := lifecycle.Target{Model: "a"}, lifecycle.Target{Model: "b"}

	require.Error(t, d.Load(within(t, patience), b))
	require.False(t, d.Running(), "it was started for a load that failed")
	require.NoError(t, d.Load(within(t, patience), a))
	require.Error(t, d.Load(within(t, patience), b))
	require.True(t, d.Running(), "it serves another model")

	confirmed, err := d.Unload(within(t, patience), a)
	require.NoError(t, err)
	require.True(t, confirmed)
	require.True(t, d.Running(), "the last is not stopped")
	s.says("POST /unload/a", http.StatusInternalServerError, "no")
	_, err = d.Unload(within(t, patience), a)
	require.Error(t, err, "no stop in its place")
	require.True(t, d.Running())

	_, err = d.Unload(within(t, patience), whole)
	require.NoError(t, err)
	require.False(t, d.Running())
	confirmed, err = d.Unload(within(t, patience), a)
	require.NoError(t, err)
	require.True(t, confirmed)
	told.none(t)
}

func TestAServerThatDiesIsToldOnce(t *testing.T) {
	s := newServer(t)
	var d lifecycle.Supervisor
	running := make(chan bool, 1)
	d, _ = open(t, s, plain, func(deps *lifecycle.Deps) {
		deps.Died = func(string) { running <- d.Running() }
	})
	require.NoError(t, d.Load(within(t, patience), whole))
	s.end("killed by signal 9")
	select {
	case r := <-running:
		require.False(t, r, "when its death is told it is known to be dead")
	case <-time.After(patience):
		require.Fail(t, "not told")
	}
	require.Equal(t, lifecycle.No, d.Probe(t.Context()).Loaded)
	require.NoError(t, d.Load(within(t, patience), whole))
	require.Equal(t, 2, s.starts)
	require.Empty(t, running)
}

func TestAMeansThatCantWatchIsFoundOutByAProbe(t *testing.T) {
	s := newServer(t)
	s.blind = true
	d, told := open(t, s, plain)
	require.NoError(t, d.Load(within(t, patience), whole))
	require.NoError(t, d.Load(within(t, patience), whole))
	d.Probe(t.Context())
	told.none(t)
	s.end("gone")
	d.Probe(t.Context())
	require.Equal(t, "gone", told.once(t))
	d.Probe(t.Context())
	told.none(t)
	require.False(t, d.Running())
}

func TestAMeansThatCanWatchAgainDoes(t *testing.T) {
	s := newServer(t)
	s.blind = true
	d, told := open(t, s, plain)
	require.NoError(t, d.Load(within(t, patience), whole))
	s.fail(func() { s.blind = false })
	d.Probe(t.Context())
	s.fail(func() { s.blind = true })
	d.Probe(t.Context())
	told.none(t)
	s.end("gone")
	require.Equal(t, "gone", told.once(t))
	d.Probe(t.Context())
	told.none(t)
}

func TestAServerThatSomebodyElseStartedAnewHasDied(t *testing.T) {
	s := newServer(t)
	d, told := open(t, s, plain)
	require.NoError(t, d.Load(within(t, patience), whole))
	s.fail(func() { s.ended, s.why = make(chan struct{}), "replaced" })
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	require.Equal(t, "replaced", told.once(t))
	require.True(t, d.Running())
	s.end("gone")
	require.Equal(t, "gone", told.once(t))
}

func TestAServerThatIsStartedAnewElsewhereWhileItIsLookedAtHasNotDied(t *testing.T) {
	s := newServer(t)
	d, told := open(t, s, plain)
	require.NoError(t, d.Load(within(t, patience), whole))
	s.looked = func() {
		_, err := d.Unload(within(t, patience), whole)
		require.NoError(t, err)
		s.address = lifecycletest.FreeAddress(t)
		require.NoError(t, d.Load(within(t, patience), whole))
	}
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	require.Equal(t, s.address, d.Upstream())
	told.none(t)
}

func TestOneThatRunsAlreadyIsFoundAndWatched(t *testing.T) {
	s := newServer(t)
	require.NoError(t, s.Start(t.Context(), whole))
	d, told := open(t, s, plain)
	require.False(t, d.Running(), "nobody has asked yet")
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	require.True(t, d.Running())
	s.end("exit status 0")
	require.Equal(t, "exit status 0", told.once(t))
}

func TestAMeansThatDoesNotAnswerIsToldAsAFault(t *testing.T) {
	s := newServer(t)
	s.failing.running = errBroken
	d, _ := open(t, s, plain)
	r := d.Probe(t.Context())
	require.Equal(t, lifecycle.Wrong, r.Outcome)
	require.Equal(t, errBroken.Error(), r.Detail)
	require.Equal(t, lifecycle.Unknown, r.Loaded)
	require.ErrorIs(t, d.Load(within(t, patience), whole), errBroken)
	_, err := d.Unload(within(t, patience), whole)
	require.ErrorIs(t, err, errBroken)
	_, err = d.Busy(within(t, patience), whole)
	require.ErrorIs(t, err, errBroken)
	require.NotContains(t, s.was(), "start")
}

func TestARestartForgetsThatItWasAsleep(t *testing.T) {
	s := newServer(t)
	d, _ := open(t, s, sleepy, func(deps *lifecycle.Deps) { deps.Dir = t.TempDir() })
	require.NoError(t, d.Load(within(t, patience), whole))
	_, err := d.Unload(within(t, patience), whole)
	require.NoError(t, err)
	require.Equal(t, lifecycle.No, d.Probe(t.Context()).Loaded)
	s.end("exit status 1")
	require.NoError(t, d.Load(within(t, patience), whole))
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	require.Equal(t, []string{"start", "POST /sleep", "start"}, s.did(), "a new server is awake")
}

func TestAnUnloadEndsALoadThatWasAbandoned(t *testing.T) {
	s := newServer(t)
	s.mute = true
	d, told := open(t, s, plain)
	ctx, cancel := context.WithCancel(t.Context())
	loaded := make(chan error, 1)
	go func() { loaded <- d.Load(ctx, whole) }()
	require.Eventually(t, d.Running, patience, time.Millisecond)
	cancel()
	confirmed, err := d.Unload(within(t, patience), whole)
	require.NoError(t, err)
	require.True(t, confirmed)
	require.Error(t, <-loaded)
	require.False(t, d.Running())
	told.none(t)
}

func TestCloseStopsTheServerAndEndsALoad(t *testing.T) {
	s := newServer(t)
	s.mute = true
	d, told := open(t, s, plain)
	loaded := make(chan error, 1)
	go func() { loaded <- d.Load(within(t, patience), whole) }()
	require.Eventually(t, d.Running, patience, time.Millisecond)
	require.NoError(t, d.Close())
	require.Error(t, <-loaded)
	require.True(t, s.closed)
	require.False(t, d.Running())
	told.none(t)
	require.ErrorContains(t, d.Load(within(t, patience), whole), "configuration that it belongs to is gone")
	require.Equal(t, 1, s.starts)
	require.Equal(t, lifecycle.No, d.Probe(t.Context()).Loaded)
}

func TestCloseInAStartStopsWhatItStarts(t *testing.T) {
	s := newServer(t)
	d, told := open(t, s, plain)
	closing := make(chan error, 1)
	s.starting = func() {
		go func() { closing <- d.Close() }()
		require.Eventually(t, func() bool { // it is closed, and waits
			err := d.Load(within(t, time.Millisecond), whole)
			return err != nil && strings.Contains(err.Error(), "is gone")
		}, patience, time.Millisecond)
	}
	require.Error(t, d.Load(within(t, patience), whole))
	require.NoError(t, <-closing)
	require.False(t, d.Running())
	require.False(t, d.State().Running)
	told.none(t)
}

func TestNobodySaysWhereItListens(t *testing.T) {
	s := newServer(t)
	s.address = ""
	s.mute = true
	d, _ := open(t, s, plain)
	require.ErrorContains(t, d.Load(within(t, patience), whole), "give the consumer `upstream host:port`")
	require.False(t, d.State().Running)
}

func TestJobsAreTracked(t *testing.T) {
	s := newServer(t)
	s.says("GET /jobs/7", http.StatusOK, `{"done": false}`)
	d, _ := open(t, s, `{"jobs": {"id": "$.id", "path": "/jobs/{item}", "done": "$.done"}}`)
	jobs := d.(lifecycle.Jobs)
	require.False(t, jobs.Track([]byte(`{"id": "7"}`)), "it does not run")
	require.NoError(t, d.Load(within(t, patience), whole))
	require.True(t, jobs.Track([]byte(`{"id": "7"}`)))
	busy, err := d.Busy(within(t, patience), whole)
	require.NoError(t, err)
	require.True(t, busy)
}
