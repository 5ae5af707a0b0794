package e2e

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// plainModel is a plain server that loads and unloads quickly.
func plainModel(name string, vram float64, lines ...string) consumer {
	return consumer{
		Options: modelserver.Options{Name: name, VRAM: gib(vram), LoadTime: 20 * time.Millisecond, UnloadTime: 10 * time.Millisecond},
		Lines:   strings.Join(lines, "\n"),
	}
}

// errorDoc is the broker's error document.
type errorDoc struct {
	Message    string
	Type       string
	Code       string
	Consumer   string
	RetryAfter int `json:"retry_after"`
	Detail     *struct {
		Need    int64
		Free    map[string]int64
		Holders []struct {
			Name, State, Protected string
			Bytes                  int64
		}
		Unloads []string
	}
}

// refusal is the error document of an answer, which must be one.
func (s *site) refusal(a answer) errorDoc {
	s.t.Helper()
	require.NoError(s.t, a.err)
	var doc struct{ Error errorDoc }
	require.NoError(s.t, json.Unmarshal(a.body, &doc), "%d %s", a.status, a.body)
	require.Equal(s.t, "gpu_broker_error", doc.Error.Type)
	require.Equal(s.t, "application/json", a.header.Get("Content-Type"))
	if a.status == http.StatusServiceUnavailable {
		require.Equal(s.t, strconv.Itoa(doc.Error.RetryAfter), a.header.Get("Retry-After"))
		require.GreaterOrEqual(s.t, doc.Error.RetryAfter, 1)
		require.LessOrEqual(s.t, doc.Error.RetryAfter, 60)
	}
	return doc.Error
}

// holder says how a holder in an error document is protected.
func (d errorDoc) protected(name string) string {
	for _, h := range d.Detail.Holders {
		if h.Name == name {
			return h.Protected
		}
	}
	return "(no such holder)"
}

// unloadCalls is how often any server of the site was asked to unload.
func (s *site) unloadCalls() (n int) {
	for _, srv := range s.servers {
		n += srv.Stats().UnloadCalls
	}
	return n
}

// serve sends a request that must be served.
func (s *site) serve(name string) answer {
	s.t.Helper()
	a := s.post("/"+name+"/synthesize", "hello")
	require.NoError(s.t, a.err)
	require.Equal(s.t, 200, a.status, "%s", a.body)
	return a
}

// ok is an answer that must be a good one.
func (s *site) ok(ch <-chan answer) answer {
	s.t.Helper()
	a := s.await(ch)
	require.NoError(s.t, a.err)
	require.Equal(s.t, 200, a.status, "%s", a.body)
	return a
}

// relay passes connections on to a server while it is open; closed, it refuses them.
type relay struct {
	t     testing.TB
	addr  string
	to    string
	mu    sync.Mutex
	l     net.Listener
	conns []net.Conn
	tasks sync.WaitGroup
}

func newRelay(t testing.TB, at, to string) *relay {
	r := &relay{t: t, addr: at, to: to}
	r.open()
	t.Cleanup(r.close)
	return r
}

func (r *relay) open() {
	l, err := net.Listen("tcp", r.addr)
	require.NoError(r.t, err)
	r.mu.Lock()
	r.l = l
	r.mu.Unlock()
	r.tasks.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", r.to)
			if err != nil {
				_ = in.Close()
				continue
			}
			r.mu.Lock()
			r.conns = append(r.conns, in, out)
			r.mu.Unlock()
			pass := func(to, from net.Conn) {
				_, _ = io.Copy(to, from)
				_ = to.Close()
				_ = from.Close()
			}
			r.tasks.Go(func() { pass(out, in) })
			r.tasks.Go(func() { pass(in, out) })
		}
	})
}

func (r *relay) close() {
	r.mu.Lock()
	_ = modelserver.StopListening(r.l)
	for _, c := range r.conns {
		_ = c.Close()
	}
	r.conns = nil
	r.mu.Unlock()
	r.tasks.Wait()
}

// beside127 is the address with the same port at 127.0.1.1, which is the same server by config.ServerAddress: what a test can tell
// apart, the broker can't.
func beside127(addr string) string { return strings.Replace(addr, "127.0.0.1:", "127.0.1.1:", 1) }

// viaRelay is a consumer whose requests, but not its probes, go by a relay.
func viaRelay(t testing.TB, c consumer) (consumer, *relay) {
	c.Addr = freeAddr(t)
	r := newRelay(t, beside127(c.Addr), c.Addr)
	c.Proxy = "reverse_proxy " + r.addr + " {\ntransport http {\nkeepalive off\n}\n}"
	return c, r
}

func TestRefusedDialIsRetriedOnTheReloadedSlot(t *testing.T) {
	t.Parallel()
	c, r := viaRelay(t, plainModel("mvoice", 2.8))
	s := start(t, layout{Global: "probe_interval 10m\nprobe_timeout 20s", Consumers: []consumer{c}})
	srv := s.servers["mvoice"]
	s.serve("mvoice")

	// It dies and comes back while the broker has not noticed. Nothing listens yet where requests go,
	// and the probe that asks about it stays without an answer.
	r.close()
	srv.SetFaults(func(f *modelserver.Faults) { f.HangPaths = []string{"/health"} })
	require.NoError(t, srv.Restart())
	body := bytes.Repeat([]byte("every byte twice "), 20_000)
	waits := s.send("POST", "/mvoice/echo", string(body))
	s.waitQueued("mvoice", 1)
	require.Equal(t, "IDLE", s.state("mvoice"))
	r.open()
	srv.SetFaults(func(f *modelserver.Faults) { f.HangPaths = nil })

	a := s.ok(waits)
	require.True(t, bytes.Equal(body, a.body), "the body came whole")
	require.Equal(t, 2, srv.Stats().Loads)
	require.Equal(t, 1, srv.Stats().Requests["/echo"])
	s.nothingRuns()
}

func TestRefusedDialOfAServerThatIsGoneIsUnhealthy(t *testing.T) {
	t.Parallel()
	c := plainModel("mvoice", 2.8)
	c.Proxy = "reverse_proxy {http.gpu_broker.upstream} {\ntransport http {\nkeepalive off\n}\n}" // else it may find out on an old connection
	s := start(t, layout{Global: "probe_interval 10m", Consumers: []consumer{c, plainModel("whisper", 2)}})
	s.serve("mvoice")
	s.servers["mvoice"].Kill()
	doc := s.refusal(s.post("/mvoice/synthesize", "hello"))
	require.Equal(t, "unhealthy", doc.Code)
	require.Equal(t, "mvoice", doc.Consumer)
	st := s.nothingRuns()
	require.Equal(t, "unhealthy", st.Consumers["mvoice"].Health)
	require.False(t, st.Consumers["mvoice"].Loaded)
	s.serve("whisper")
}

func TestRefusedDialWhoseServerAnswersProbesGetsOneMoreTryOnly(t *testing.T) {
	t.Parallel()
	c, r := viaRelay(t, plainModel("mvoice", 2.8))
	s := start(t, layout{Consumers: []consumer{c}})
	s.serve("mvoice")
	r.close()
	doc := s.refusal(s.post("/mvoice/synthesize", "hello"))
	require.Equal(t, "unhealthy", doc.Code)
	require.EqualValues(t, 3, s.status().Scheduler.TotalJobs) // one served; one admitted twice
	s.nothingRuns()
	r.open()
	s.serve("mvoice")
}

func TestServerThatComesBackIsServedAgain(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "probe_interval 50ms", Consumers: []consumer{plainModel("mvoice", 2.8)}})
	s.serve("mvoice")
	s.servers["mvoice"].Kill()
	s.until("it is unhealthy", func() bool { return s.status().Consumers["mvoice"].Health == "unhealthy" })
	require.Equal(t, "unhealthy", s.refusal(s.post("/mvoice/synthesize", "hello")).Code)
	require.NoError(t, s.servers["mvoice"].Restart())
	s.until("it is healthy", func() bool { return s.status().Consumers["mvoice"].Health == "healthy" })
	s.serve("mvoice")
	require.Equal(t, 2, s.servers["mvoice"].Stats().Loads)
}

func TestWrongHealthAnswerIsUnhealthyForThoseWhoWaitToo(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "probe_interval 50ms", Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("a")
	runs, end := s.works("a")
	waits := s.send("POST", "/b/synthesize", "x")
	s.waitQueued("b", 1)
	s.servers["b"].SetFaults(func(f *modelserver.Faults) { f.HealthStatus = 500 })
	doc := s.refusal(s.await(waits))
	require.Equal(t, "unhealthy", doc.Code)
	require.Contains(t, doc.Message, "500")
	end()
	s.ok(runs)
	require.Zero(t, s.unloadCalls())
}

func TestAlone_UnhealthyIsRefusedInUnder10ms(t *testing.T) {
	s := start(t, layout{Consumers: []consumer{plainModel("mvoice", 2.8)}})
	s.servers["mvoice"].Kill()
	s.until("it is unhealthy", func() bool { return s.status().Consumers["mvoice"].Health == "unhealthy" })
	var took []time.Duration
	for range 100 {
		a := s.post("/mvoice/synthesize", "hello")
		require.Equal(t, "unhealthy", s.refusal(a).Code)
		took = append(took, a.took)
	}
	slices.Sort(took)
	require.Less(t, took[98], 10*time.Millisecond, "p99; the fastest %s, the slowest %s", took[0], took[99])
}

func TestBusySingleThreadedServerThatAnswersNoProbeIsNotUnhealthy(t *testing.T) {
	t.Parallel()
	c := plainModel("mvoice", 2.8)
	c.Concurrency = 1 // single-threaded: while it works it answers nothing
	// A busy machine may keep it from answering once while it is idle.
	s := start(t, layout{Global: "probe_interval 50ms\nprobe_timeout 600ms", Consumers: []consumer{c}})
	s.serve("mvoice")
	first, end := s.works("mvoice")
	second := s.send("POST", "/mvoice/synthesize?ms=200", "two")
	probes := func() int { return s.servers["mvoice"].Stats().Requests["/health"] }
	before := probes()
	s.until("five probes in a row got no answer", func() bool {
		require.Equal(t, "healthy", s.status().Consumers["mvoice"].Health)
		return probes() > before+5
	})
	end()
	s.ok(first)
	s.ok(second)
	require.Empty(t, s.decisions("unhealthy"))
}

func TestSilentIdleServerIsUnhealthyAfterThreeTimeOuts(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "probe_interval 50ms\nprobe_timeout 100ms", Consumers: []consumer{plainModel("mvoice", 2.8)}})
	s.servers["mvoice"].SetFaults(func(f *modelserver.Faults) { f.HangHealth = true })
	s.until("it is unhealthy", func() bool { return s.status().Consumers["mvoice"].Health == "unhealthy" })
	require.Equal(t, "unhealthy", s.refusal(s.post("/mvoice/synthesize", "hello")).Code)
	require.Contains(t, s.decisions("unhealthy")[0].Reason, "3 probes in a row")
}

func TestBudgetThatEndsIs504AndStartsNothing(t *testing.T) {
	t.Parallel()
	c := plainModel("a", 9)
	c.Route = "budget 300ms"
	s := start(t, layout{Consumers: []consumer{c, plainModel("b", 9)}})
	s.serve("b")
	runs, end := s.works("b")
	a := s.post("/a/synthesize", "hello")
	require.Equal(t, 504, a.status)
	require.Equal(t, "budget_exceeded", s.refusal(a).Code)
	require.GreaterOrEqual(t, a.took, 290*time.Millisecond)
	require.Zero(t, len(runs), "the other one still runs")
	end()
	s.ok(runs)
	require.Zero(t, s.servers["a"].Stats().LoadsStarted)
	require.Zero(t, s.unloadCalls())
	s.until("nothing is left of it", func() bool { return s.post("/a/synthesize", "hello").status == 200 }) // the budget may end before the load
}

func TestErrorDocumentIsOpenAIsAndReadableForAPageOfAnotherOrigin(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 17)}})
	req, err := http.NewRequest("POST", s.url+"/a/v1/audio/speech", strings.NewReader("x"))
	require.NoError(t, err)
	req.Header.Set("Origin", "https://app.example")
	resp, err := s.client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, 422, resp.StatusCode)
	require.Equal(t, "https://app.example", resp.Header.Get("Access-Control-Allow-Origin"))
	require.Contains(t, resp.Header.Get("Access-Control-Expose-Headers"), "Retry-After")
	require.Contains(t, resp.Header.Values("Vary"), "Origin")
	require.Equal(t, "a", resp.Header.Get("X-Gpu-Broker-Consumer"))

	var doc map[string]map[string]any
	require.NoError(t, json.Unmarshal(body, &doc))
	e := doc["error"]
	require.NotEmpty(t, e["message"])
	require.Equal(t, "gpu_broker_error", e["type"])
	require.Equal(t, "never_fits", e["code"])
	require.Equal(t, "a", e["consumer"])
	require.NotContains(t, e, "retry_after", "trying again is of no use")
	detail := e["detail"].(map[string]any)
	require.EqualValues(t, gib(17.25), detail["need"])
	require.Contains(t, detail["free"], "0")

	// Without an origin there is nothing to allow.
	require.Empty(t, s.post("/a/x", "x").header.Get("Access-Control-Allow-Origin"))
}

func TestErrorRoutesOfTheSiteWinOverTheErrorDocument(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 17)},
		Routes: "handle_errors {\nrespond \"sorry: {http.gpu_broker.reason}\" {err.status_code}\n}"})
	a := s.post("/a/synthesize", "x")
	require.Equal(t, 422, a.status)
	require.Equal(t, "sorry: never_fits", string(a.body))
}

func TestConsumerThatIsSwitchedOffIsShownAndRefused(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 2), plainModel("b", 2)}})
	s.serve("a")
	s.reloaded(func(c string) string { return strings.Replace(c, "consumer a {", "consumer a {\nenabled off", 1) })
	doc := s.refusal(s.post("/a/synthesize", "x"))
	require.Equal(t, "not_running", doc.Code)
	require.False(t, s.status().Consumers["a"].Enabled)
	s.serve("b")
	s.reloaded(func(c string) string { return strings.Replace(c, "\nenabled off", "", 1) })
	s.serve("a")
}

func TestConsumerWithoutLockComputesBesideAnother(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("big", 4), plainModel("embed", 1, "lock none"), plainModel("other", 1)}})
	s.serve("big")
	s.serve("embed")
	s.serve("other")
	runs, end := s.works("big")
	waits := s.send("POST", "/other/synthesize", "x")
	s.waitQueued("other", 1)
	s.serve("embed")
	require.Equal(t, 1, s.servers["big"].Stats().Working, "embed was served beside it")
	end()
	s.ok(runs)
	s.ok(waits)
	require.Empty(t, modelserver.Overlap(s.servers["big"], s.servers["other"]))
	require.NotEmpty(t, modelserver.Overlap(s.servers["big"], s.servers["embed"]))
}

func TestSchedulerLockedQueuesAndLocksButNeverLoadsOrEvicts(t *testing.T) {
	t.Parallel()
	a, b := plainModel("a", 9), plainModel("b", 9)
	a.Lazy, b.Lazy, a.RunTime, b.RunTime = true, true, 50*time.Millisecond, 50*time.Millisecond
	s := start(t, layout{Total: "32GiB", Global: "scheduler locked", Consumers: []consumer{a, b}})
	var all []<-chan answer
	for range 4 {
		all = append(all, s.send("POST", "/a/synthesize", "x"), s.send("POST", "/b/synthesize", "x"))
	}
	for _, ch := range all {
		s.ok(ch)
	}
	require.Empty(t, modelserver.Overlap(s.servers["a"], s.servers["b"]))
	require.Equal(t, 1, s.servers["a"].Stats().MaxConcurrent)
	require.Zero(t, s.unloadCalls())
	require.Zero(t, s.status().Scheduler.Loads)
}

func TestSchedulerPassthroughNeitherLocksNorQueues(t *testing.T) {
	t.Parallel()
	a, b := plainModel("a", 9), plainModel("b", 9)
	a.Lazy, b.Lazy = true, true
	s := start(t, layout{Total: "32GiB", Global: "scheduler passthrough", Consumers: []consumer{a, b}})
	s.serve("a")
	s.serve("b")
	ends := []func(){s.holdWork("a"), s.holdWork("b")}
	var all []<-chan answer
	for range 3 {
		all = append(all, s.send("POST", "/a/synthesize", "x"), s.send("POST", "/b/synthesize", "x"))
	}
	s.until("all run at once", func() bool {
		return s.servers["a"].Stats().Working == 3 && s.servers["b"].Stats().Working == 3
	})
	for _, end := range ends {
		end()
	}
	for _, ch := range all {
		s.ok(ch)
	}
	require.Zero(t, s.unloadCalls())
	require.Zero(t, s.status().Scheduler.Loads)
}

func TestWithoutTelemetryTheBrokerWorksByItsBooks(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9), plainModel("c", 3)}})
	s.reloaded(func(c string) string {
		before, rest, _ := strings.Cut(c, "gpu simulated")
		_, after, _ := strings.Cut(rest, "}")
		return before + "gpu static 16GiB" + after
	})
	s.until("the other sampler rules", func() bool { return s.status().Sampler == "static" && s.status().Degraded != "" })
	s.serve("a")
	s.serve("c")
	require.Zero(t, s.unloadCalls())
	s.serve("b")
	require.Equal(t, 1, s.servers["a"].Stats().Unloads)
	st := s.status()
	require.EqualValues(t, 1, st.Scheduler.Evictions)
	require.Len(t, st.GPUs, 1)
	require.EqualValues(t, gib(12), st.GPUs[0].Booked)
	require.EqualValues(t, gib(4), st.GPUs[0].Free)
	require.NotEmpty(t, st.Degraded)
	for _, srv := range s.servers {
		require.Zero(t, srv.Stats().OOMs)
	}
}

func TestLostTelemetryGoesOnAndComesBack(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("a")
	require.NoError(t, simulated.WriteState(s.sim, "telemetry lost"))
	s.until("it is noticed", func() bool { return s.status().Degraded != "" })
	require.Equal(t, "healthy", s.status().GPUs[0].Health)
	s.serve("a")
	s.serve("b")
	require.Equal(t, 1, s.servers["a"].Stats().Unloads)
	require.Empty(t, s.decisions("gpu_lost"))
	require.NotEmpty(t, s.decisions("telemetry_lost"))
	require.NoError(t, simulated.WriteState(s.sim))
	s.until("it is back", func() bool { return s.status().Degraded == "" })
	s.serve("a")
	require.EqualValues(t, 2, s.status().Scheduler.Evictions)
}

func TestLostGPURefusesAtOnceEvenThoseWhoWait(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("a")
	runs, end := s.works("a")
	waits := s.send("POST", "/b/synthesize", "x")
	s.waitQueued("b", 1)
	require.NoError(t, simulated.WriteState(s.sim, "lost 0"))
	require.Equal(t, "gpu_lost", s.refusal(s.await(waits)).Code)
	require.Equal(t, "lost", s.status().GPUs[0].Health)
	require.Empty(t, s.status().Degraded, "a lost GPU is not lost telemetry")
	require.Equal(t, "gpu_lost", s.refusal(s.post("/a/synthesize", "x")).Code)
	end()
	s.ok(runs)
	require.NoError(t, simulated.WriteState(s.sim))
	s.until("it is back", func() bool { return s.status().GPUs[0].Health == "healthy" })
	s.serve("b")
}
