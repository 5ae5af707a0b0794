package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// soon is when a process that has nothing left to do is gone, on a machine that does much else.
const soon = 10 * time.Second

// ending is how a process ended.
type ending struct {
	code int
	at   time.Time
}

// ends tells when the site's Caddy ends.
func (s *site) ends() <-chan ending {
	s.t.Helper()
	cmd, out, done := s.cmd, make(chan ending, 1), make(chan struct{})
	go func() {
		defer close(done)
		_ = cmd.Wait() // what it says is in ProcessState
		out <- ending{cmd.ProcessState.ExitCode(), time.Now()}
	}()
	s.t.Cleanup(func() { // before the site's own, which waits for it in vain
		select {
		case <-done:
		case <-time.After(patience):
			_ = cmd.Process.Kill()
			<-done
			s.t.Errorf("caddy did not stop")
		}
	})
	return out
}

// stoppers are the ways in which Caddy is told to stop.
var stoppers = map[string]func(s *site){
	"SIGTERM": func(s *site) { require.NoError(s.t, s.cmd.Process.Signal(syscall.SIGTERM)) },
	"caddy stop": func(s *site) {
		out, err := exec.Command(s.cmd.Path, "stop", "--address", s.admin).CombinedOutput()
		require.NoError(s.t, err, "%s", out)
	},
}

func (s *site) ended(ends <-chan ending) ending {
	s.t.Helper()
	select {
	case e := <-ends:
		return e
	case <-time.After(patience):
		s.t.Fatal("caddy does not end")
		return ending{}
	}
}

// eachStop runs a test for each way to stop and each kind of connection, several
// times over: Caddy stops its apps in random order.
func eachStop(t *testing.T, times int, test func(t *testing.T, https bool, stop func(*site))) {
	for how, stop := range stoppers {
		for proto, https := range map[string]bool{"HTTP1": false, "HTTP2": true} {
			for i := range times {
				t.Run(fmt.Sprintf("%s_%s_%d", how, proto, i+1), func(t *testing.T) {
					t.Parallel()
					test(t, https, stop)
				})
			}
		}
	}
}

// busySite is a site in the middle of everything.
type busySite struct {
	*site
	stream, plain              <-chan answer // they run
	forTurn, forMemory, forAny <-chan answer // they wait: for a's turn, for a's memory, for the load of c
}

func newBusySite(t *testing.T, https bool) *busySite {
	c := plainModel("c", 2, "lock none")
	c.LoadTime = time.Minute
	s := &busySite{site: start(t, layout{HTTPS: https, Global: "stop_grace 20s",
		Consumers: []consumer{plainModel("a", 9), plainModel("b", 9), plainModel("d", 2, "lock none"), c}})}
	s.serve("d")
	s.serve("a")
	s.forAny = s.send("POST", "/c/synthesize", "x")
	s.waitState("c", "LOADING")
	s.holdWork("a")
	s.stream = s.streams("a", "events=60&ms=1")
	s.holdWork("d")
	s.plain = s.send("POST", "/d/synthesize", "hello")
	s.forTurn = s.send("POST", "/a/synthesize", strings.Repeat("x", 100<<10))
	s.waitQueued("a", 1)
	s.forMemory = s.send("POST", "/b/synthesize", "x")
	s.waitQueued("b", 1)
	s.working("d")
	return s
}

// stopsWell says that all who wait are told at once, all who run are served, and then it is over.
func (s *busySite) stopsWell(stop func(*site)) {
	t := s.t
	ends := s.ends()
	told := time.Now()
	stopped := make(chan struct{})
	go func() { defer close(stopped); stop(s.site) }()
	for what, w := range map[string]<-chan answer{"a turn": s.forTurn, "memory": s.forMemory, "a load": s.forAny} {
		a := s.await(w)
		require.NoError(t, a.err, what)
		s.turnedAway(a)
	}
	require.Zero(t, len(s.stream)+len(s.plain)+len(ends), "they were told before those were served that run")
	// Those that come now are told so, or find the door closed.
	if a := s.post("/d/synthesize", "x"); a.err == nil {
		s.turnedAway(a)
	}
	s.letWork("a")
	s.letWork("d")
	plain, stream := s.ok(s.plain), s.ok(s.stream)
	require.Equal(t, modelserver.SynthesizeBytes([]byte("hello")), plain.body)
	require.Equal(t, modelserver.StreamBytes(60), stream.body)
	over := s.ended(ends)
	<-stopped
	require.Zero(t, over.code)
	last := stream.at
	if plain.at.After(last) {
		last = plain.at
	}
	require.Less(t, over.at.Sub(last), soon, "nothing runs any more")
	require.Less(t, over.at.Sub(told), 20*time.Second, "it does not use the time of grace up")
	for name, srv := range s.servers {
		require.Zero(t, srv.Stats().UnloadCalls, "%s: models stay loaded", name)
		require.Zero(t, srv.Stats().Aborted, name)
	}
}

func TestStopRefusesWhoWaitsAtOnceAndServesWhoRuns(t *testing.T) {
	t.Parallel()
	eachStop(t, 3, func(t *testing.T, https bool, stop func(*site)) { newBusySite(t, https).stopsWell(stop) })
}

func TestStopServesRequestsOfAnEarlierConfigurationToo(t *testing.T) {
	t.Parallel()
	eachStop(t, 2, func(t *testing.T, https bool, stop func(*site)) {
		s := newBusySite(t, https)
		s.reloaded(func(c string) string { return insert(c, "budget 3m") })
		s.reloaded(func(c string) string { return strings.Replace(c, "budget 3m", "budget 4m", 1) })
		require.Equal(t, 1, s.status().Consumers["b"].Waiting)
		require.Zero(t, len(s.stream)+len(s.plain), "they still run")
		s.stopsWell(stop)
	})
}

// cut says that a request's connection was cut, in the middle of its answer or before it.
func cut(t testing.TB, a answer) {
	t.Helper()
	require.Error(t, a.err)
	require.False(t, errors.Is(a.err, context.DeadlineExceeded) || errors.Is(a.err, context.Canceled), "%v", a.err)
}

func TestStopCutsThoseThatRunBeyondTheTimeOfGrace(t *testing.T) {
	t.Parallel()
	const grace = 500 * time.Millisecond
	beside := func(name, route string) consumer {
		c := plainModel(name, 2, "lock none")
		c.Route = route
		return c
	}
	eachStop(t, 2, func(t *testing.T, https bool, stop func(*site)) {
		s := start(t, layout{Total: "64GiB", HTTPS: https, Global: "stop_grace 500ms", Consumers: []consumer{
			beside("streams", ""), beside("hung", ""), beside("silent", ""), beside("unread", ""), beside("uploads", "stream_body"),
		}})
		for name := range s.servers {
			s.serve(name)
		}
		s.hang()
		stream := s.streams("streams", "events=100000&ms=20")
		silent := s.streams("silent", "events=2&ms=600000") // its next event would come in ten minutes
		hung := s.hangs("hung")                             // it has no answer
		unread := s.open("GET", "/unread/audio/big?bytes=1000000000")
		upload := s.upload("/uploads/hang") // its server reads nothing of it
		s.until("all run", func() bool { return s.status().Scheduler.InFlight == 5 && s.servers["uploads"].Stats().InFlight == 1 })
		ends := s.ends()
		told := time.Now()
		stop(s)
		began := s.await(stream)
		cut(t, began)
		require.Equal(t, 200, began.status)
		require.NotEmpty(t, began.body)
		require.True(t, beginsStream(began.body), "what came is what was sent")
		require.GreaterOrEqual(t, began.at.Sub(told), grace)
		cut(t, s.await(silent))
		cut(t, s.await(hung))
		cut(t, s.await(upload))
		over := s.ended(ends)
		require.Less(t, over.at.Sub(told), grace+soon)
		require.GreaterOrEqual(t, over.at.Sub(told), grace)
		require.Zero(t, over.code)
		_, err := io.Copy(io.Discard, unread.Body)
		require.Error(t, err)
		require.Contains(t, s.log(), `"msg":"stop_grace is over: connections of running requests were closed","requests":5`)
		for _, name := range []string{"streams", "silent", "hung"} {
			s.until("the work of "+name+" is broken off", func() bool { return s.servers[name].Stats().InFlight == 0 })
		}
	})
}

// upload sends a body that has no end.
func (s *site) upload(path string) <-chan answer {
	out := make(chan answer, 1)
	body, more := io.Pipe()
	s.t.Cleanup(func() { _ = more.Close() })
	go func() {
		chunk := make([]byte, 32<<10)
		for err := error(nil); err == nil; {
			_, err = more.Write(chunk)
		}
	}()
	go func() {
		defer body.Close()
		out <- s.do(context.Background(), "POST", path, body)
	}()
	return out
}

func TestStopCutsRequestsOfAnEarlierConfigurationToo(t *testing.T) {
	t.Parallel()
	eachStop(t, 1, func(t *testing.T, https bool, stop func(*site)) {
		s := start(t, layout{HTTPS: https, Global: "stop_grace 500ms", Consumers: []consumer{plainModel("a", 2)}})
		s.serve("a")
		stream := s.streams("a", "events=100000&ms=20")
		s.reloaded(func(c string) string { return insert(c, "budget 3m") })
		require.Zero(t, len(stream))
		ends := s.ends()
		told := time.Now()
		stop(s)
		cut(t, s.await(stream))
		over := s.ended(ends)
		require.Less(t, over.at.Sub(told), 500*time.Millisecond+soon)
		require.GreaterOrEqual(t, over.at.Sub(told), 500*time.Millisecond)
		require.Zero(t, over.code)
	})
}

func TestStopWithNothingToDoIsAtOnce(t *testing.T) {
	t.Parallel()
	eachStop(t, 1, func(t *testing.T, https bool, stop func(*site)) {
		s := start(t, layout{HTTPS: https, Global: "stop_grace 10m", Consumers: []consumer{plainModel("a", 2), comfyui()}})
		s.serve("a")
		idle := s.open("GET", "/gpu/healthz") // a connection that nobody uses
		_, err := io.Copy(io.Discard, idle.Body)
		require.NoError(t, err)
		ends := s.ends()
		told := time.Now()
		stop(s)
		over := s.ended(ends)
		require.Less(t, over.at.Sub(told), soon)
		require.Zero(t, over.code)
		require.Zero(t, s.unloadCalls())
		_, err = http.Get(s.url)
		require.Error(t, err)
	})
}

func TestStopDoesNotWaitForWorkThatNeedsNoConnection(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "stop_grace 10m", Consumers: []consumer{comfyui(), mvoice()}})
	queuePrompt(t, s.url+"/comfyui/prompt", longPrompt("600000")) // it goes on at the server, whoever is there
	waits := s.send("POST", "/mvoice/synthesize", "x")
	s.waitQueued("mvoice", 1)
	s.until("the prompt runs", func() bool { return s.servers["comfyui"].Stats().Working == 1 })
	ends := s.ends()
	told := time.Now()
	stoppers["SIGTERM"](s)
	s.turnedAway(s.await(waits))
	over := s.ended(ends)
	require.Less(t, over.at.Sub(told), soon)
	require.Zero(t, over.code)
	require.Equal(t, 1, s.servers["comfyui"].Stats().Working)
	require.Zero(t, s.unloadCalls())
}

func TestStopEndsADrainThatWaits(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "stop_grace 500ms", Consumers: []consumer{plainModel("a", 2)}})
	release := s.hold("a")
	drain := s.byHand("consumers/a/drain?wait=10m")
	s.until("it drains", func() bool { return s.status().Consumers["a"].Draining })
	ends := s.ends()
	told := time.Now()
	stoppers["SIGTERM"](s)
	over := s.ended(ends)
	require.Less(t, over.at.Sub(told), 500*time.Millisecond+soon)
	require.Zero(t, over.code)
	release()
	s.await(drain) // an answer or the end of its connection
}

func TestStopOfASiteWhoseBrokerHasJustLeftTheConfigurationIsBoundedToo(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "stop_grace 1s", Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("a")
	stream := s.streams("a", "events=100000&ms=20")
	waits := s.send("POST", "/b/synthesize", "x")
	s.waitQueued("b", 1)
	s.brokerGone()
	require.Zero(t, len(stream)+len(waits), "both go on")
	ends := s.ends()
	told := time.Now()
	stoppers["SIGTERM"](s)
	s.turnedAway(s.await(waits))
	cut(t, s.await(stream))
	over := s.ended(ends)
	require.GreaterOrEqual(t, over.at.Sub(told), time.Second)
	require.Less(t, over.at.Sub(told), time.Second+soon)
	require.Zero(t, over.code)
}

func TestStopWithoutATimeOfGraceCutsAtOnce(t *testing.T) {
	t.Parallel()
	eachStop(t, 1, func(t *testing.T, https bool, stop func(*site)) {
		s := start(t, layout{HTTPS: https, Global: "stop_grace 0", Consumers: []consumer{plainModel("a", 2)}})
		s.serve("a")
		silent := s.streams("a", "events=2&ms=600000")
		ends := s.ends()
		told := time.Now()
		stop(s)
		cut(t, s.await(silent))
		over := s.ended(ends)
		require.Less(t, over.at.Sub(told), soon)
		require.Zero(t, over.code)
	})
}

func TestShorterGracePeriodOfCaddyWins(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "stop_grace 10m", Consumers: []consumer{plainModel("a", 2)}})
	s.reloaded(func(c string) string { return strings.Replace(c, "local_certs", "local_certs\ngrace_period 700ms", 1) })
	s.serve("a")
	stream := s.streams("a", "events=100000&ms=20")
	ends := s.ends()
	told := time.Now()
	stoppers["SIGTERM"](s)
	cut(t, s.await(stream))
	over := s.ended(ends)
	require.GreaterOrEqual(t, over.at.Sub(told), 700*time.Millisecond)
	require.Less(t, over.at.Sub(told), 700*time.Millisecond+soon)
	require.Zero(t, over.code)
}
