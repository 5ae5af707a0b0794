package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// slowLoad is a plain server whose load takes so long.
func slowLoad(name string, vram float64, load time.Duration, lines ...string) consumer {
	c := plainModel(name, vram, lines...)
	c.LoadTime, c.LoadSteps = load, 4
	return c
}

// impatient sends a request and leaves after so long, if there is no answer yet.
func (s *site) impatient(patience time.Duration, path, body string) <-chan answer {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	s.t.Cleanup(cancel)
	return s.goCtx(ctx, "POST", path, body)
}

// gaveUp checks that a client left without an answer.
func (s *site) gaveUp(ch <-chan answer) {
	s.t.Helper()
	require.ErrorIs(s.t, s.await(ch).err, context.DeadlineExceeded)
}

// warm sends a request that must be served without a load and without a wait.
func (s *site) warm(path, body string) {
	s.t.Helper()
	a := s.post(path, body)
	require.NoError(s.t, a.err)
	require.Equal(s.t, 200, a.status, "%s", a.body)
	require.Contains(s.t, a.header.Get("Server-Timing"), "gpu-load;dur=0")
	require.Less(s.t, a.took, time.Second)
}

func TestFC05_ClientThatGivesUpFiveTimesCausesOneLoadAndTheSixthRequestIsWarm(t *testing.T) {
	t.Parallel()
	const load = 1200 * time.Millisecond
	for _, c := range []struct {
		name  string
		https bool
		other bool // must be unloaded first, which counts as load time for the client
	}{{name: "HTTP/1.1"}, {name: "HTTP/2", https: true}, {name: "another makes way first", other: true}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			l := layout{HTTPS: c.https, Consumers: []consumer{slowLoad("m", 9, load), plainModel("other", 9)}}
			s := start(t, l)
			if c.other {
				s.serve("other")
			}
			for i := range 5 {
				// The work takes so long that whoever is admitted gives up too.
				try := s.impatient(load*3/4, "/m/synthesize?ms=60000", "x")
				if i == 0 {
					s.waitState("m", "LOADING")
				}
				s.gaveUp(try)
				require.Contains(t, []string{"LOADING", "READY"}, s.state("m"), "try %d", i)
			}
			s.waitState("m", "READY")
			s.idle("m")
			s.warm("/m/synthesize", "x")
			st := s.servers["m"].Stats()
			require.Equal(t, 1, st.LoadsStarted)
			require.Equal(t, 1, st.Loads)
			require.Equal(t, 1, st.Worked)
			require.Zero(t, st.UnloadCalls)
			require.EqualValues(t, 1, s.status().Scheduler.Loads-uint64(s.servers["other"].Stats().Loads))
			s.nothingRuns()
			s.noOOM()
		})
	}
}

func TestFC05_RetryOfAClientThatGaveUpIsServedByTheLoadThatItBegan(t *testing.T) {
	t.Parallel()
	const load = 1600 * time.Millisecond
	s := start(t, layout{Consumers: []consumer{slowLoad("m", 9, load)}})
	s.gaveUp(s.impatient(load*3/4, "/m/synthesize", "x"))
	require.Equal(t, "LOADING", s.state("m"), "it goes on without anybody")
	s.serve("m")
	require.Equal(t, 1, s.servers["m"].Stats().LoadsStarted)
}

func TestFC05_LazyServerIsWarmForTheRetry(t *testing.T) {
	t.Parallel()
	const load = 4 * time.Second // a quarter of it is room for a busy machine
	plain := slowLoad("m", 9, load)
	plain.Lazy = true
	plain.Lines = "lifecycle_by_hand\nhealth /health {\nloaded $.loaded\nresident_mib $.gpu_resident_mib\n}\nunload POST /api/admin/unload"
	lama := slowLoad("m", 9, load)
	lama.Manner = modelserver.Ollama
	for _, c := range []struct {
		name       string
		consumer   consumer
		path, body string
	}{
		{"plain", plain, "/m/synthesize", "x"},
		{"ollama", lama, "/m/api/generate", `{"model":"m","prompt":"x","stream":false}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Consumers: []consumer{c.consumer}})
			s.gaveUp(s.impatient(load*3/4, c.path, c.body))
			require.Less(t, s.ok(s.impatient(load*3/4, c.path, c.body)).took, load*3/4, "it joined the load that went on")
			for range 3 {
				s.ok(s.impatient(load*3/4, c.path, c.body))
			}
			s.idle("m")
			a := s.post(c.path, c.body)
			require.Equal(t, 200, a.status, "%s", a.body)
			require.Less(t, a.took, load/4, "it was warm")
			require.Equal(t, 1, s.servers["m"].Stats().LoadsStarted)
			require.Zero(t, s.servers["m"].Stats().UnloadCalls)
		})
	}
}

// fickle is a lazy server whose load ends with the request that asked for it, as ollama's does
// (ollama/ollama#4427): a load that is broken off begins from nothing at the next request.
type fickle struct {
	load time.Duration

	mu     sync.Mutex
	loaded bool
	begun  int // loads
	broken int // loads that were broken off
}

func (f *fickle) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	loaded := f.loaded
	f.mu.Unlock()
	switch r.URL.Path {
	case "/health":
		_ = json.NewEncoder(w).Encode(map[string]any{"loaded": loaded})
		return
	case "/unload":
		f.mu.Lock()
		f.loaded = false
		f.mu.Unlock()
		return
	}
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return
	}
	if !loaded {
		f.mu.Lock()
		f.begun++
		f.mu.Unlock()
		timer := time.NewTimer(f.load)
		defer timer.Stop()
		select {
		case <-timer.C:
			f.mu.Lock()
			f.loaded = true
			f.mu.Unlock()
		case <-r.Context().Done():
			f.mu.Lock()
			f.broken++
			f.mu.Unlock()
			return
		}
	}
	_, _ = io.WriteString(w, "done") // the client may be gone
}

func (f *fickle) counts() (begun, broken int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.begun, f.broken
}

// serveOn serves a handler until the test ends, and returns its address.
func serveOn(t testing.TB, h http.Handler) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	srv := &http.Server{Handler: h, ReadHeaderTimeout: patience}
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(l) }() // it ends with ErrServerClosed
	t.Cleanup(func() { _ = srv.Close(); <-done })
	return l.Addr().String()
}

func TestFC05_LazyServerThatBreaksOffItsLoadWithTheRequestIsWarmForTheRetry(t *testing.T) {
	t.Parallel()
	const load = 3200 * time.Millisecond
	f := &fickle{load: load}
	addr := serveOn(t, f)
	s := start(t, layout{
		Global: fmt.Sprintf("consumer f {\nupstream %s\nvram 9GiB\nhealth /health {\nloaded $.loaded\n}\nunload POST /unload\n}", addr),
		Routes: "handle_path /f/* {\ngpu_broker f\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	s.gaveUp(s.impatient(load*3/4, "/f/synthesize", "x"))
	for range 3 { // who comes next joins the load that goes on, or finds the model loaded
		s.await(s.impatient(load*3/4, "/f/synthesize", "x"))
	}
	s.until("nobody works", func() bool { return s.status().Consumers["f"].Active == 0 && s.status().Scheduler.QueueDepth == 0 })
	a := s.post("/f/synthesize", "x")
	require.Equal(t, 200, a.status)
	require.Less(t, a.took, load/4, "it was warm")
	begun, broken := f.counts()
	require.Equal(t, 1, begun)
	require.Zero(t, broken)
}

func TestFC04_FiveWaitersOfWhichTheFirstLeavesGetFourAnswersFromOneLoad(t *testing.T) {
	t.Parallel()
	for _, leavers := range []int{1, 4} {
		t.Run(fmt.Sprintf("%d leave", leavers), func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Consumers: []consumer{plainModel("m", 9), plainModel("other", 9)}})
			s.serve("other")
			m := s.servers["m"]
			m.SetFaults(func(f *modelserver.Faults) { f.HangLoad = true }) // its load lasts until all are there and have left
			ctx, leave := context.WithCancel(context.Background())
			defer leave()
			var left, stay []<-chan answer
			for i := range 5 {
				if i < leavers {
					left = append(left, s.goCtx(ctx, "POST", "/m/synthesize", "x"))
				} else {
					stay = append(stay, s.send("POST", "/m/synthesize", "x"))
				}
				s.waitQueued("m", i+1)
			}
			s.waitState("m", "LOADING")
			leave()
			for _, ch := range left {
				require.ErrorIs(t, s.await(ch).err, context.Canceled)
			}
			s.waitQueued("m", len(stay))
			require.Equal(t, "LOADING", s.state("m"))
			m.SetFaults(func(f *modelserver.Faults) { f.HangLoad = false })
			for _, ch := range stay {
				s.ok(ch)
			}
			require.Equal(t, 1, s.servers["m"].Stats().LoadsStarted)
			require.Equal(t, len(stay), s.servers["m"].Stats().Worked)
			require.Equal(t, 1, s.servers["other"].Stats().UnloadCalls)
			require.EqualValues(t, leavers, s.status().Scheduler.Cancelled)
			s.nothingRuns()
			s.noOOM()
		})
	}
}

// leavesLoadBehind is a client that leaves while a is loaded for it, and a request that wants a's room for b.
func (s *site) leavesLoadBehind() (wants <-chan answer, left time.Time) {
	s.t.Helper()
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	first := s.goCtx(ctx, "POST", "/a/synthesize", "x")
	s.waitState("a", "LOADING")
	wants = s.send("POST", "/b/synthesize", "x")
	s.waitQueued("b", 1)
	leave()
	left = time.Now()
	require.ErrorIs(s.t, s.await(first).err, context.Canceled)
	return wants, left
}

func TestLoadThatNobodyWaitsForGivesWayAndLeavesNothingBooked(t *testing.T) {
	t.Parallel()
	const abandon = 300 * time.Millisecond
	s := start(t, layout{Global: "abandon_after " + abandon.String(), Consumers: []consumer{slowLoad("a", 9, 8*time.Second), plainModel("b", 9)}})
	wants, left := s.leavesLoadBehind()
	s.waitState("a", "STOPPING")
	require.GreaterOrEqual(t, time.Since(left), abandon-50*time.Millisecond, "not before")
	require.Less(t, time.Since(left), abandon+4*time.Second, "nor much later")
	s.ok(wants)
	st := s.status()
	a := st.Consumers["a"].Slots[0]
	require.Equal(t, "IDLE", a.State)
	require.Zero(t, a.Booking)
	require.Zero(t, a.Residue)
	require.EqualValues(t, st.Consumers["b"].Slots[0].Booking, st.GPUs[0].Booked)
	require.Equal(t, 1, s.servers["a"].Stats().LoadsStarted)
	require.Equal(t, 1, s.servers["a"].Stats().UnloadCalls)
	require.Zero(t, s.servers["a"].Stats().Worked)
	s.noOOM()
	s.serve("a") // and nothing of it is left over: the next one loads as ever
	require.Equal(t, 2, s.servers["a"].Stats().Loads)
}

func TestLoadThatNobodyWaitsForGoesOnWhereNobodyElseWantsItsRoom(t *testing.T) {
	t.Parallel()
	const load = 1500 * time.Millisecond
	s := start(t, layout{Global: "abandon_after 100ms", Consumers: []consumer{slowLoad("a", 9, load), plainModel("warm", 2)}})
	s.serve("warm")
	s.gaveUp(s.impatient(load/4, "/a/synthesize", "x"))
	require.Equal(t, "LOADING", s.state("a"))
	for s.state("a") == "LOADING" {
		s.serve("warm") // needs no room of its own
	}
	s.warm("/a/synthesize", "x")
	require.Equal(t, 1, s.servers["a"].Stats().LoadsStarted)
	require.Zero(t, s.unloadCalls())
}

func TestLoadThatIsJoinedAgainInTimeGoesOn(t *testing.T) {
	t.Parallel()
	const abandon = 700 * time.Millisecond
	s := start(t, layout{Global: "abandon_after " + abandon.String(), Consumers: []consumer{slowLoad("a", 9, 2500*time.Millisecond), plainModel("b", 9)}})
	wants, left := s.leavesLoadBehind()
	joins := s.send("POST", "/a/synthesize", "x")
	s.waitQueued("a", 1)
	require.Less(t, time.Since(left), abandon, "in time")
	s.until("it would have been given up", func() bool { return time.Since(left) > abandon+300*time.Millisecond })
	require.Equal(t, "LOADING", s.state("a"))
	one, two := s.ok(joins), s.ok(wants)
	require.True(t, two.at.After(one.at))
	st := s.servers["a"].Stats()
	require.Equal(t, 1, st.LoadsStarted)
	require.Equal(t, 1, st.Worked)
	require.Equal(t, 1, st.Unloads, "for b, when its work was done")
	s.noOOM()
}

func TestFC15_WaitersOfALoadThatFailsAreToldOnceAndTheNextRequestAfterTheCoolDownLoads(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("m", 9), plainModel("other", 9)}})
	s.serve("other")
	refuse := func(on bool) { s.servers["m"].SetFaults(func(f *modelserver.Faults) { f.RefuseLoad = on }) }
	refuse(true)
	runs, end := s.works("other")
	var waits []<-chan answer
	for range 4 {
		waits = append(waits, s.send("POST", "/m/synthesize", "x"))
	}
	s.waitQueued("m", 4)
	end()
	s.ok(runs)
	for _, ch := range waits {
		a := s.await(ch)
		require.Equal(t, 503, a.status)
		doc := s.refusal(a) // which looks at Retry-After too
		require.Equal(t, "load_failed", doc.Code)
		require.Equal(t, "m", doc.Consumer)
	}
	require.Equal(t, 1, s.servers["m"].Stats().LoadsStarted, "one load for all of them, and none tried behind their backs")
	slot := s.status().Consumers["m"].Slots[0]
	require.NotEmpty(t, slot.CoolsUntil)
	cools, err := time.Parse(time.RFC3339Nano, slot.CoolsUntil)
	require.NoError(t, err)
	require.InDelta(t, 1, time.Until(cools).Seconds(), 1)

	refuse(false)
	a := s.serve("m") // waits for the end of the cool-down
	require.False(t, a.at.Before(cools))
	require.EqualValues(t, 1, s.status().Scheduler.LoadFailures)
}

func TestFC15_CoolDownGrowsWithEachFailureAndIsForgottenAfterASuccess(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("m", 9)}})
	refuse := func(on bool) {
		s.servers["m"].SetFaults(func(f *modelserver.Faults) { f.RefuseLoad = on })
	}
	fail := func() time.Duration {
		t.Helper()
		a := s.post("/m/synthesize", "x")
		require.Equal(t, "load_failed", s.refusal(a).Code)
		cools, err := time.Parse(time.RFC3339Nano, s.status().Consumers["m"].Slots[0].CoolsUntil)
		require.NoError(t, err)
		return cools.Sub(a.at)
	}
	refuse(true)
	require.InDelta(t, 1, fail().Seconds(), 0.5)
	require.InDelta(t, 2, fail().Seconds(), 0.5)
	refuse(false)
	s.serve("m")
	require.Equal(t, 200, s.adminDo("POST", "/gpu_broker/consumers/m/unload", "", "").status)
	refuse(true)
	require.InDelta(t, 1, fail().Seconds(), 0.5)
}

func TestFC11_AllWaitersOfALoadThatRanOutOfMemoryAreServedAfterOneMoreVictimAndOneMoreTry(t *testing.T) {
	t.Parallel()
	b := slowLoad("b", 6, 400*time.Millisecond)
	s := start(t, layout{Consumers: []consumer{plainModel("a", 6), plainModel("c", 2), b}})
	s.serve("a")
	s.serve("c")
	// What it takes is more than it says, and more than is free: 6 + 2 + 9 GiB of 16 GiB.
	s.servers["b"].SetOptions(func(o *modelserver.Options) { o.VRAM = gib(9) })
	var waits []<-chan answer
	for range 3 {
		waits = append(waits, s.send("POST", "/b/synthesize", "x"))
	}
	for _, ch := range waits {
		s.ok(ch)
	}
	require.Equal(t, 2, s.servers["b"].Stats().LoadsStarted)
	require.Equal(t, 1, s.servers["b"].Stats().OOMs)
	require.Equal(t, 3, s.servers["b"].Stats().Worked)
	require.Equal(t, 1, s.servers["a"].Stats().Unloads, "the one that was used least lately")
	require.Zero(t, s.servers["c"].Stats().UnloadCalls)
	st := s.status()
	require.EqualValues(t, 1, st.Scheduler.Evictions)
	require.EqualValues(t, 1, st.Scheduler.LoadFailures)
	require.Zero(t, st.Scheduler.Refused)
}

func TestLoadThatEndsAfterItsServerDiedAndCameBackIsNotBelieved(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{slowLoad("m", 9, 700*time.Millisecond), plainModel("other", 9)}})
	srv := s.servers["m"]
	waits := s.send("POST", "/m/synthesize", "x")
	require.NoError(t, srv.WaitFor(t.Context(), func(now modelserver.Stats) bool { return now.LoadsStarted == 1 }))
	require.NoError(t, srv.Restart())
	s.honest(s.await(waits))
	s.serve("m")
	require.Equal(t, 1, srv.Stats().Loads)
	require.Equal(t, 2, srv.Stats().LoadsStarted)
	s.serve("other")
	s.noOOM()
}
