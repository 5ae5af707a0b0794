package e2e

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// byHand sends a POST to the broker's admin routes in the background.
func (s *site) byHand(path string) <-chan answer {
	out := make(chan answer, 1)
	go func() {
		began := time.Now()
		resp, err := http.Post("http://"+s.admin+"/gpu_broker/"+path, "", nil)
		if err != nil {
			out <- answer{err: err}
			return
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		out <- answer{status: resp.StatusCode, header: resp.Header, body: body, err: err, took: time.Since(began), at: time.Now()}
	}()
	return out
}

// doByHand is byHand of what must be done at once.
func (s *site) doByHand(path string) {
	s.t.Helper()
	a := s.await(s.byHand(path))
	require.NoError(s.t, a.err)
	require.Equal(s.t, 200, a.status, "%s", a.body)
}

// turnedAway says that an answer is a refusal because no more requests are taken.
func (s *site) turnedAway(a answer) errorDoc {
	s.t.Helper()
	doc := s.refusal(a)
	require.Equal(s.t, 503, a.status, "%s", a.body)
	require.Equal(s.t, "draining", doc.Code)
	require.NotEmpty(s.t, doc.Consumer)
	return doc
}

// beginsStream reports whether what came of a stream is what was sent.
func beginsStream(came []byte) bool {
	return bytes.HasPrefix(modelserver.StreamBytes(bytes.Count(came, []byte("\n\n"))+1), came)
}

// streams starts a stream of a consumer and waits until it runs.
func (s *site) streams(name, query string) <-chan answer {
	s.t.Helper()
	s.client.CloseIdleConnections() // cut on a kept one before its first byte, the client would try it again by itself
	working := s.servers[name].Stats().Working
	out := s.send("GET", "/"+name+"/stream?"+query, "")
	s.until(name+" streams", func() bool { return s.servers[name].Stats().Working > working })
	return out
}

func TestDrainedConsumerRefusesWhoWaitsAndWhoComesAndLetsThoseEndThatRun(t *testing.T) {
	t.Parallel()
	overBothVersions(t, func(t *testing.T, https bool) {
		a := plainModel("a", 4, "bypass GET /audio/*\ntouch GET /health")
		s := start(t, layout{HTTPS: https, Consumers: []consumer{a, plainModel("b", 4, "lock none")}})
		s.serve("a")
		end := s.holdWork("a")
		stream := s.streams("a", "events=60&ms=1")
		waits := []<-chan answer{s.send("POST", "/a/synthesize", "x"), s.send("POST", "/a/synthesize", "x")}
		s.waitQueued("a", 2)
		drain := s.byHand("consumers/a/drain")
		for _, w := range waits {
			doc := s.turnedAway(s.await(w))
			require.Equal(t, "a", doc.Consumer)
			require.Contains(t, doc.Message, "drained")
		}
		require.Equal(t, "a", s.turnedAway(s.post("/a/synthesize", "x")).Consumer)
		require.Equal(t, "a", s.turnedAway(s.post("/a/synthesize", strings.Repeat("x", 100<<10))).Consumer, "one with a body that is read ahead")
		st := s.status()
		require.True(t, st.Consumers["a"].Draining)
		require.False(t, st.Consumers["b"].Draining)
		require.False(t, st.Scheduler.Draining)
		require.Equal(t, 1, st.Consumers["a"].Active)
		s.serve("b") // others are unaffected
		require.Equal(t, 200, s.get("/a/audio/big?bytes=1000").status, "what needs no GPU passes")
		require.Equal(t, 200, s.get("/a/health").status)
		require.Equal(t, 200, s.do(t.Context(), "HEAD", "/a/synthesize", nil).status)
		require.Equal(t, 204, s.do(t.Context(), "OPTIONS", "/a/synthesize", nil).status)

		require.Zero(t, len(stream)+len(drain), "the stream runs, and the call waits for it")
		end()
		require.Equal(t, modelserver.StreamBytes(60), s.ok(stream).body)
		over := s.await(drain)
		require.NoError(t, over.err)
		require.Equal(t, 200, over.status, "%s", over.body)
		require.JSONEq(t, `{"consumer":"a","done":true}`, string(over.body))
		ends := times(s.servers["a"], modelserver.EventWorkEnd)
		require.Len(t, ends, 2)
		require.True(t, over.at.After(ends[1]), "it answers when the stream is over")
		require.Equal(t, 200, s.await(s.byHand("consumers/a/drain")).status, "again: nothing runs")
		require.Equal(t, "READY", s.state("a"), "it stays loaded")
		s.turnedAway(s.post("/a/synthesize", "x"))

		s.doByHand("consumers/a/resume")
		require.False(t, s.status().Consumers["a"].Draining)
		s.serve("a")
		require.Equal(t, 1, s.servers["a"].Stats().Loads)
		require.Zero(t, s.unloadCalls())
	})
}

func TestDrainOfAll(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9), plainModel("c", 2, "lock none")}})
	s.serve("a")
	end := s.holdWork("a")
	stream := s.streams("a", "events=50&ms=1")
	forMemory, forTurn := s.send("POST", "/b/synthesize", "x"), s.send("POST", "/a/synthesize", "x")
	s.waitQueued("b", 1)
	s.waitQueued("a", 1)
	drain := s.byHand("drain")
	require.Equal(t, "b", s.turnedAway(s.await(forMemory)).Consumer)
	require.Equal(t, "a", s.turnedAway(s.await(forTurn)).Consumer)
	for _, name := range []string{"a", "b", "c"} {
		s.turnedAway(s.post("/"+name+"/synthesize", "x"))
	}
	st := s.status()
	require.True(t, st.Scheduler.Draining)
	require.Zero(t, st.Scheduler.QueueDepth)
	require.Zero(t, len(stream)+len(drain))
	end()
	require.Equal(t, modelserver.StreamBytes(50), s.ok(stream).body)
	over := s.await(drain)
	require.Equal(t, 200, over.status, "%s", over.body)
	require.JSONEq(t, `{"done":true}`, string(over.body))
	require.Equal(t, "READY", s.state("a"))
	require.Zero(t, s.unloadCalls(), "the waiter for whom a would have gone is not there any more")

	// One of them apart from all: each is resumed by the name by which it was drained.
	s.doByHand("consumers/c/drain")
	s.doByHand("resume")
	require.False(t, s.status().Scheduler.Draining)
	s.serve("a")
	s.turnedAway(s.post("/c/synthesize", "x"))
	s.doByHand("consumers/c/resume")
	s.serve("c")
	s.serve("b")
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
}

func TestDrainThatDoesNotWaitIsToldSoAndGoesOn(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 2), plainModel("b", 2)}})
	release := s.hold("a")
	for path, want := range map[string]string{"consumers/a/drain?wait=1ms": `{"consumer":"a","done":false}`, "drain?wait=0": `{"done":false}`} {
		got := s.await(s.byHand(path))
		require.Equal(t, 202, got.status, "%s: %s", path, got.body)
		require.JSONEq(t, want, string(got.body))
	}
	s.turnedAway(s.post("/a/synthesize", "x"))
	s.turnedAway(s.post("/b/synthesize", "x"))
	require.Equal(t, 200, release().status, "what runs goes on")
	s.doByHand("drain")
	s.doByHand("resume")
	s.doByHand("consumers/a/resume")
	s.serve("a")
}

func TestDrainWaitsForWorkThatOutlivesItsAnswer(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{comfyui()}})
	end := s.holdWork("comfyui")
	queuePrompt(t, s.url+"/comfyui/prompt", prompt)
	drain := s.byHand("consumers/comfyui/drain")
	s.until("it is drained", func() bool { return s.status().Consumers["comfyui"].Draining })
	require.Zero(t, len(drain), "the call waits for the work")
	end()
	over := s.await(drain)
	require.Equal(t, 200, over.status, "%s", over.body)
	ends := times(s.servers["comfyui"], modelserver.EventWorkEnd)
	require.Len(t, ends, 1)
	require.True(t, over.at.After(ends[0]))
	s.turnedAway(s.post("/comfyui/prompt", prompt))
	require.Equal(t, 200, s.get("/comfyui/queue").status)
}

func TestDrainRefusesWhoWaitsForALoadWhichGoesOn(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9)}})
	loaded := s.holdLoad("a")
	waits := s.send("POST", "/a/synthesize", "x")
	s.waitState("a", "LOADING")
	drain := s.byHand("consumers/a/drain")
	s.turnedAway(s.await(waits))
	require.Equal(t, "LOADING", s.state("a"))
	require.Equal(t, 200, s.await(drain).status, "no request of it runs")
	loaded()
	s.waitState("a", "READY")
	s.doByHand("consumers/a/resume")
	s.serve("a")
	require.Equal(t, 1, s.servers["a"].Stats().LoadsStarted)
}

func TestDrainSurvivesReloadsAndNotARestart(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 2), plainModel("b", 2)}})
	s.doByHand("consumers/a/drain")
	s.reloaded(func(c string) string { return insert(c, "budget 3m") })
	s.turnedAway(s.post("/a/synthesize", "x"))
	s.serve("b")
	s.doByHand("drain")
	s.reloaded(func(c string) string { return strings.Replace(c, "budget 3m", "budget 4m", 1) })
	s.turnedAway(s.post("/b/synthesize", "x"))
	s.doByHand("resume")
	s.serve("b")
	require.True(t, s.status().Consumers["a"].Draining)
	s.halt()
	s.again()
	require.False(t, s.status().Consumers["a"].Draining)
	s.serve("a")
}

func TestDrainedModelMayBeUnloadedForOthersAndWhenIdle(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9, "idle_timeout 300ms")}})
	s.serve("a")
	s.doByHand("consumers/a/drain")
	s.serve("b")
	require.Equal(t, 1, s.servers["a"].Stats().Unloads)
	s.doByHand("drain")
	s.nth("b", modelserver.EventUnloadCall, 1)
	s.waitState("b", "IDLE")
	require.EqualValues(t, 1, s.status().Scheduler.IdleUnloads)
}

func TestDrainByHandIsRefusedWhereItIsWrong(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 2)}})
	for _, c := range []struct {
		method, path string
		want         int
		says         string
	}{
		{"POST", "consumers/nobody/drain", 404, "nobody"},
		{"POST", "consumers/nobody/resume", 404, "nobody"},
		{"GET", "consumers/a/drain", 405, "POST"},
		{"PUT", "drain", 405, "POST"},
		{"GET", "resume", 405, "POST"},
		{"DELETE", "consumers/a/resume", 405, "POST"},
		{"POST", "consumers/a/drain?wait=soon", 400, "soon"},
		{"POST", "drain?wait=-1s", 400, "-1s"},
		{"POST", "consumers/drain", 404, "no such route"},
		{"POST", "consumers//drain", 404, "no such route"},
		{"POST", "unload", 404, "no such route"},
		{"POST", "load", 404, "no such route"},
	} {
		got := s.adminDo(c.method, "/gpu_broker/"+c.path, "", "")
		require.Equal(t, c.want, got.status, "%s %s: %s", c.method, c.path, got.body)
		var doc struct{ Error string }
		require.NoError(t, json.Unmarshal(got.body, &doc), "%s", got.body)
		require.Contains(t, doc.Error, c.says, "%s %s", c.method, c.path)
		if c.want == 405 {
			require.Equal(t, "POST", got.header.Get("Allow"))
		}
	}
	require.False(t, s.status().Scheduler.Draining)
	s.serve("a")
}

// sendPatiently is send without the clients' usual bound.
func (s *site) sendPatiently(method, path, body string) <-chan answer {
	client := s.newClient()
	client.Timeout = 0
	out := make(chan answer, 1)
	go func() { out <- s.doWith(client, s.t.Context(), method, path, strings.NewReader(body)) }()
	return out
}

func TestVictimsWorkIsCancelledByMaxRunAndTheEvictionGoesOn(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "drain_timeout 200ms\nmax_run 1500ms\novertake 0\novertake_min 0", Consumers: []consumer{plainModel("a", 9, "switch_cost 1ms"), plainModel("b", 9)}})
	s.serve("a")
	a := s.servers["a"]
	a.SetFaults(func(f *modelserver.Faults) { f.HangPaths = []string{"/hang"} })
	hangs := s.send("POST", "/a/hang", "x")
	s.until("a hangs", func() bool { return a.Stats().Requests["/hang"] == 1 })
	wants := s.send("POST", "/b/synthesize", "x")
	got := s.await(hangs)
	require.Equal(t, 504, got.status, "%s", got.body)
	require.Equal(t, "budget_exceeded", got.code())
	require.GreaterOrEqual(t, got.took, 1500*time.Millisecond)
	s.ok(wants)
	require.Equal(t, 1, a.Stats().Unloads)
	require.Zero(t, a.Stats().UnloadsWhileBusy)
	require.Empty(t, s.decisions("reopen"), "the drain goes on past drain_timeout: its end is known")
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
}
