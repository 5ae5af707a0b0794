package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// hang makes requests of a path hang at all servers of the site until it is told to let them go.
func (s *site) hang() (let func()) {
	set := func(paths []string) {
		for _, srv := range s.servers {
			srv.SetFaults(func(f *modelserver.Faults) { f.HangPaths = paths })
		}
	}
	set([]string{"/hang"})
	let = func() { set(nil) }
	s.t.Cleanup(let) // else a test that fails meanwhile would wait for it
	return let
}

// hangs sends a request that hangs at a consumer, and waits until it does.
func (s *site) hangs(name string) <-chan answer {
	s.t.Helper()
	before := s.servers[name].Stats().Requests["/hang"]
	out := s.send("GET", "/"+name+"/hang", "") // without a body, which a server that hangs would not read: it would not hear that the client left
	s.until(name+" hangs", func() bool { return s.servers[name].Stats().Requests["/hang"] > before })
	return out
}

func TestMaxRunEndsARequestThatHasNoAnswer(t *testing.T) {
	t.Parallel()
	beside := func(name, lines, route string) consumer {
		c := plainModel(name, 2, "lock none", lines)
		c.Route = route
		return c
	}
	for name, https := range map[string]bool{"HTTP1": false, "HTTP2": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Total: "64GiB", HTTPS: https, Global: "max_run 1800ms", Consumers: []consumer{
				beside("brokers", "", ""), beside("own", "max_run 1200ms", ""), beside("longer", "max_run 2400ms", ""), beside("routes", "max_run 10m", "max_run 1500ms"),
				beside("none", "max_run 0", ""), beside("routesnone", "max_run 100ms", "max_run 0"),
			}})
			for name := range s.servers {
				s.serve(name)
			}
			let := s.hang()
			bounded := map[string]time.Duration{"brokers": 1800 * time.Millisecond, "own": 1200 * time.Millisecond, "longer": 2400 * time.Millisecond, "routes": 1500 * time.Millisecond}
			jobs := map[string]<-chan answer{}
			for name := range s.servers {
				jobs[name] = s.hangs(name)
			}
			for name, limit := range bounded {
				a := s.await(jobs[name])
				require.Equal(t, 504, a.status, "%s: %s", name, a.body)
				doc := s.refusal(a)
				require.Equal(t, "budget_exceeded", doc.Code)
				require.Equal(t, name, doc.Consumer)
				require.Contains(t, doc.Message, "max_run")
				require.Contains(t, doc.Message, limit.String())
				require.GreaterOrEqual(t, a.took, limit, name)
				require.Less(t, a.took, limit+late, name)
				s.until("the server hears of it", func() bool { return s.servers[name].Stats().InFlight == 0 })
				s.serve(name) // the place is free
			}
			for _, name := range []string{"none", "routesnone"} {
				require.Zero(t, len(jobs[name]), name)
				require.Equal(t, 1, s.status().Consumers[name].Active, name)
			}
			let()
			for _, name := range []string{"none", "routesnone"} {
				s.ok(jobs[name])
			}
			st := s.nothingRuns()
			require.EqualValues(t, 6+6+4, st.Scheduler.TotalJobs)
			for name, c := range st.Consumers {
				require.Zero(t, c.Active, name)
				require.Equal(t, "healthy", c.Health, name)
				require.Equal(t, "READY", c.Slots[0].State, name)
				require.Equal(t, 1, s.servers[name].Stats().Loads, name)
			}
		})
	}
}

func TestMaxRunCutsAStreamAndFreesItsPlaceAndTheLock(t *testing.T) {
	t.Parallel()
	for name, https := range map[string]bool{"HTTP1": false, "HTTP2": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const limit = 700 * time.Millisecond
			a := plainModel("a", 4)
			a.Route = "max_run 700ms"
			unbounded := "handle_path /unbounded/* {\ngpu_broker a {\nmax_run 0\n}\nreverse_proxy {http.gpu_broker.upstream}\n}"
			s := start(t, layout{HTTPS: https, Routes: unbounded, Consumers: []consumer{a, plainModel("b", 4), plainModel("c", 13)}})
			require.Equal(t, 200, s.post("/unbounded/synthesize", "x").status)
			s.serve("b")
			for round := range 3 {
				began := time.Now()
				stream := s.streams("a", "events=100000&ms=20")
				turn, lock := s.send("POST", "/unbounded/synthesize", "x"), s.send("POST", "/b/synthesize", "x")
				s.until("both wait, or it is over", func() bool { return s.status().Scheduler.QueueDepth == 2 || len(stream) > 0 })
				a := s.await(stream)
				cut(t, a)
				require.Equal(t, 200, a.status)
				require.NotEmpty(t, a.body)
				require.True(t, beginsStream(a.body), "what came is what was sent")
				require.GreaterOrEqual(t, a.at.Sub(began), limit)
				require.Less(t, a.at.Sub(began), limit+late)
				s.ok(turn)
				s.ok(lock)
				s.until("the server's work is broken off", func() bool { return s.servers["a"].Stats().Aborted == round+1 })
				st := s.nothingRuns()
				require.Zero(t, st.Scheduler.QueueDepth)
				require.Empty(t, st.GPUs[0].Lock)
			}
			s.serve("c") // nothing is held: both make way
			require.EqualValues(t, 2, s.status().Scheduler.Evictions)
			require.Zero(t, s.servers["a"].Stats().UnloadsWhileBusy)
			require.EqualValues(t, 2+3*3+1, s.status().Scheduler.TotalJobs)
			require.EqualValues(t, 2+3*3+1, s.metric(`run_seconds_count{consumer="a"}`)+s.metric(`run_seconds_count{consumer="b"}`)+s.metric(`run_seconds_count{consumer="c"}`), "each ran once")
		})
	}
}

func TestMaxRunEndsAnAnswerOfWhichTheClientTakesNothing(t *testing.T) {
	t.Parallel()
	versions(t, func(t *testing.T, https bool, client func(s *site) *http.Client) {
		s := start(t, layout{HTTPS: https, Global: "max_run 1s\nstall_timeout 0", Consumers: []consumer{plainModel("hog", 10), plainModel("other", 10)}})
		resp := s.unread(client(s), "/hog/audio/big?bytes=200000000")
		require.Equal(t, 200, resp.StatusCode)
		began := time.Now()
		require.Equal(t, 200, s.post("/other/work", "mine").status)
		require.Less(t, time.Since(began), 1*time.Second+late)
		_, err := io.Copy(io.Discard, resp.Body)
		require.Error(t, err, "what is cut must not look whole")
	})
}

func TestMaxRunCountsNeitherTheQueueNorTheLoad(t *testing.T) {
	t.Parallel()
	slow := plainModel("slow", 2, "max_run 1200ms")
	slow.LoadTime = 1500 * time.Millisecond
	s := start(t, layout{Consumers: []consumer{plainModel("a", 2), plainModel("b", 2, "max_run 1200ms"), slow}})
	require.Greater(t, s.serve("slow").took, slow.LoadTime)
	s.serve("b")
	release := s.hold("a")
	waits := s.send("POST", "/b/synthesize", "x")
	s.waitQueued("b", 1)
	s.throughout(1500*time.Millisecond, "it waits", func() bool { return s.status().Consumers["b"].Waiting == 1 })
	require.Equal(t, 200, release().status)
	require.Greater(t, s.ok(waits).took, 1500*time.Millisecond)
}

func TestMaxRunTakesANewValueAtAReload(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "max_run 10m", Consumers: []consumer{plainModel("a", 2, "lock none\nconcurrency 4")}})
	s.serve("a")
	let := s.hang()
	old := s.hangs("a")
	s.reloaded(func(c string) string { return strings.Replace(c, "max_run 10m", "max_run 300ms", 1) })
	require.Equal(t, 504, s.await(s.hangs("a")).status)
	require.Zero(t, len(old), "one that runs keeps what it was admitted with")
	let()
	s.ok(old)
}

func TestMaxRunEndsASocket(t *testing.T) {
	t.Parallel()
	ui := comfyui()
	ui.Lines = "lifecycle_by_hand\nhealth /system_stats\nlock none\nmax_run 700ms"
	s := start(t, layout{Consumers: []consumer{ui}})
	began := time.Now()
	conn := s.socket("/comfyui/ws")
	require.Equal(t, 1, s.status().Scheduler.InFlight)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for err := error(nil); err == nil; {
		_, _, err = conn.Read(ctx)
	}
	require.NoError(t, ctx.Err())
	require.GreaterOrEqual(t, time.Since(began), 700*time.Millisecond)
	s.until("its place is free", func() bool { return s.status().Scheduler.InFlight == 0 })
	s.until("the server hears of it", func() bool { return s.servers["comfyui"].Stats().Sockets == 0 })
}

// FC-13: one server hangs in the middle of a request. Others are unaffected, and with max_run it is over some time.
func TestFC13_HungRequestHoldsNobodyElseUpAndEnds(t *testing.T) {
	t.Parallel()
	const limit = 2 * time.Second
	s := start(t, layout{Global: "overtake 0\novertake_min 0", Consumers: []consumer{
		plainModel("hung", 9, "max_run 2s\nswitch_cost 1ms"), plainModel("beside", 2, "lock none\nconcurrency 4"), plainModel("other", 2), plainModel("big", 9),
	}})
	for _, name := range []string{"beside", "other", "hung"} {
		s.serve(name)
	}
	s.hang()
	job := s.hangs("hung")
	next := s.send("POST", "/hung/synthesize", "x")
	other, big := s.send("POST", "/other/synthesize", "x"), s.send("POST", "/big/synthesize", "x")
	s.until("three wait, or it is over", func() bool { return s.status().Scheduler.QueueDepth == 3 || len(job) > 0 })
	beside := 0
	for len(job) == 0 {
		s.serve("beside")
		beside++
		s.status()
		s.adminDo("GET", "/metrics", "", "")
	}
	require.Greater(t, beside, 5, "the neighbour is served meanwhile, status too")
	a := s.await(job)
	require.Equal(t, 504, a.status, "%s", a.body)
	require.Equal(t, "budget_exceeded", a.code())
	require.GreaterOrEqual(t, a.took, limit)
	for what, ch := range map[string]<-chan answer{"who waited for the lock": other, "who waited for its memory": big, "who waited for it": next} {
		got := s.await(ch)
		require.NoError(t, got.err, what)
		require.Equal(t, 200, got.status, "%s: %s", what, got.body)
	}
	require.Zero(t, s.servers["hung"].Stats().UnloadsWhileBusy)
	s.nothingRuns()
	require.Zero(t, s.status().Scheduler.UnloadFailures)
	require.Empty(t, s.decisions("bug"), fmt.Sprint(s.decisions("")))
}
