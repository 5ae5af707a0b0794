package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// late is by how much an idle unload may be late on a machine that does much else. TestAlone has the real bound.
const late = 10 * time.Second

// nth is when a server's log had the n-th event of a kind; it is waited for.
func (s *site) nth(name, kind string, n int) time.Time {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	seen := 0
	e, err := s.servers[name].WaitForEvent(ctx, func(e modelserver.Event) bool {
		if e.Kind == kind {
			seen++
		}
		return seen == n
	})
	require.NoError(s.t, err)
	return e.At
}

// throughout says that something stays so for a time.
func (s *site) throughout(d time.Duration, what string, cond func() bool) {
	s.t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if !cond() {
			s.t.Fatalf("it did not stay so that %s", what)
		}
	}
}

// kinds are the decisions about a consumer, in a word each.
func (s *site) kinds(name string) (out []string) {
	s.t.Helper()
	for _, d := range s.decisions("") {
		if d.Consumer == name {
			out = append(out, d.Kind)
		}
	}
	return out
}

// unloadAt is when status says that a consumer will be unloaded; zero: it does not say.
func (s *site) unloadAt(name string) time.Time {
	s.t.Helper()
	text := s.status().Consumers[name].UnloadAt
	if text == "" {
		return time.Time{}
	}
	return stampOf(s.t, text)
}

func stampOf(t testing.TB, text string) time.Time {
	t.Helper()
	at, err := time.Parse(time.RFC3339Nano, text)
	require.NoError(t, err)
	return at
}

// log is what Caddy has logged so far.
func (s *site) log() string {
	s.t.Helper()
	text, err := os.ReadFile(filepath.Join(s.dir, "caddy.log"))
	require.NoError(s.t, err)
	return string(text)
}

// between says that a time is not before from, and not long after to.
func between(t testing.TB, from, at, to time.Time, what string) {
	t.Helper()
	require.False(t, at.Before(from), "%s: %s too early", what, from.Sub(at))
	require.Less(t, at.Sub(to), late, "%s: late", what)
}

func TestIdleUnloadComesATimeoutAfterTheLastByteOfTheLastJob(t *testing.T) {
	t.Parallel()
	const timeout = 700 * time.Millisecond
	s := start(t, layout{Global: "idle_timeout 700ms", Consumers: []consumer{plainModel("a", 9)}})
	s.serve("a")
	resp := s.open("GET", "/a/stream?events=40&ms=50") // its head is long gone when its last byte comes
	head := time.Now()
	require.Zero(t, s.unloadAt("a"), "it works")
	body := new(bytes.Buffer)
	_, err := body.ReadFrom(resp.Body)
	require.NoError(t, err)
	got := time.Now()
	require.Equal(t, modelserver.StreamBytes(40), body.Bytes())
	require.Greater(t, got.Sub(head), timeout, "the stream must be longer than the timeout")
	var said, used time.Time
	s.until("it is over", func() bool {
		c := s.status().Consumers["a"]
		if c.UnloadAt == "" {
			return false
		}
		said, used = stampOf(t, c.UnloadAt), stampOf(t, c.LastUsed)
		return true
	})
	require.Equal(t, timeout, said.Sub(used))

	called := s.nth("a", modelserver.EventUnloadCall, 1)
	last := times(s.servers["a"], modelserver.EventWorkEnd)[1]
	between(t, last.Add(timeout), called, got.Add(timeout), "the unload call")
	require.False(t, called.Before(said), "status said when")
	s.waitState("a", "IDLE")
	st := s.status()
	require.EqualValues(t, 1, st.Scheduler.IdleUnloads)
	require.Zero(t, st.Scheduler.Evictions+st.Scheduler.ManualUnloads+st.Scheduler.UnloadFailures, "it is counted apart")
	require.Empty(t, st.Consumers["a"].UnloadAt)
	require.Zero(t, st.Consumers["a"].Slots[0].Booking)
	require.Equal(t, 1.0, s.metric(`unloads_total{consumer="a",reason="idle"}`))
	require.Equal(t, 0.0, s.metric(`evictions_total{consumer="a",reason="evict"}`))
	require.Equal(t, 0.0, s.metric(`unloads_total{consumer="a",reason="manual"}`))
	require.Equal(t, 1.0, s.metric(`unload_seconds_count{consumer="a"}`))
	require.Equal(t, []string{"load", "loaded", "unload", "idle_unloaded"}, s.kinds("a"))
	require.Regexp(t, `^nobody has used it for 7\d\dms|^nobody has used it for \d`, s.decisions("unload")[0].Reason)
	require.Zero(t, s.servers["a"].Stats().UnloadsWhileBusy)
	s.serve("a")
	require.Equal(t, 2, s.servers["a"].Stats().Loads)
}

func TestAlone_IdleUnloadIsPunctual(t *testing.T) {
	const timeout, rounds, bound = 300 * time.Millisecond, 10, 100 * time.Millisecond
	s := start(t, layout{Global: "idle_timeout 300ms", Consumers: []consumer{plainModel("a", 9)}})
	var worst time.Duration
	for i := range rounds {
		a := s.get("/a/stream?events=4&ms=20")
		require.Equal(t, 200, a.status)
		called := s.nth("a", modelserver.EventUnloadCall, i+1)
		last := times(s.servers["a"], modelserver.EventWorkEnd)[i]
		require.GreaterOrEqual(t, called.Sub(last), timeout)
		worst = max(worst, called.Sub(last)-timeout)
		s.waitState("a", "IDLE")
	}
	t.Logf("idle unloads came at most %s after idle_timeout", worst.Round(time.Microsecond))
	require.Less(t, worst, bound)
}

func TestIdleUnloadTakesThoseThatMayGoAndNoOthers(t *testing.T) {
	t.Parallel()
	const timeout = 500 * time.Millisecond
	names := map[string]string{ // who stays
		"pinned": "pin", "managed": "vram_managed", "never": "idle_timeout 0", "long": "idle_timeout 10m", "kept": "keep_alive 10m",
		"held": "", "pinnedown": "pin\nidle_timeout 100ms",
	}
	l := layout{Total: "64GiB", Global: "idle_timeout 500ms", Consumers: []consumer{
		plainModel("global", 2, "lock none"), plainModel("short", 2, "lock none\nidle_timeout 150ms"), plainModel("own", 2, "lock none\nvram_managed\nidle_timeout 500ms"),
	}}
	for name, lines := range names {
		l.Consumers = append(l.Consumers, plainModel(name, 2, "lock none", lines))
	}
	s := start(t, l)
	release := s.hold("held") // it works all the time
	for name := range names {
		if name != "held" {
			s.serve(name)
		}
	}
	for i := range 3 { // three times over, so that those that stay have had the time for it
		sent := time.Now()
		for _, name := range []string{"global", "short", "own"} {
			s.serve(name)
		}
		for name, after := range map[string]time.Duration{"global": timeout, "short": 150 * time.Millisecond, "own": timeout} {
			called := s.nth(name, modelserver.EventUnloadCall, i+1)
			between(t, times(s.servers[name], modelserver.EventWorkEnd)[i].Add(after), called, sent.Add(after), name)
			s.waitState(name, "IDLE")
		}
	}
	st := s.status()
	for name := range names {
		require.Zero(t, s.servers[name].Stats().UnloadCalls, name)
		require.Equal(t, "READY", st.Consumers[name].Slots[0].State, name)
		if name == "long" || name == "kept" {
			require.Equal(t, 10*time.Minute, stampOf(t, st.Consumers[name].UnloadAt).Sub(stampOf(t, st.Consumers[name].LastUsed)), name)
		} else {
			require.Empty(t, st.Consumers[name].UnloadAt, name)
		}
	}
	require.EqualValues(t, 9, st.Scheduler.IdleUnloads)
	require.Equal(t, 200, release().status)
	s.nth("held", modelserver.EventUnloadCall, 1)
}

func TestIdleTimeoutOfZeroIsNever(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "idle_timeout 0", Consumers: []consumer{plainModel("a", 2), plainModel("b", 2, "idle_timeout 200ms")}})
	s.serve("a")
	for i := range 3 {
		s.serve("b")
		s.nth("b", modelserver.EventUnloadCall, i+1)
		s.waitState("b", "IDLE")
	}
	require.Equal(t, "READY", s.state("a"))
	require.Zero(t, s.servers["a"].Stats().UnloadCalls)
	require.Zero(t, s.unloadAt("a"))
}

func TestWaitingJobKeepsItsModelFromIdleUnload(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "idle_timeout 300ms", Consumers: []consumer{plainModel("a", 2), plainModel("b", 2)}})
	s.serve("a")
	release := s.hold("b")
	s.nth("a", modelserver.EventUnloadCall, 1) // whoever nobody waits for goes
	require.Equal(t, 200, release().status)
	s.serve("a")
	release = s.hold("b")
	waits := s.send("POST", "/a/synthesize", "x")
	s.waitQueued("a", 1)
	s.waitState("a", "READY") // it may have gone just before
	loads := s.servers["a"].Stats().Loads
	s.throughout(time.Second, "a is not unloaded under one that waits", func() bool { return s.state("a") == "READY" })
	require.Equal(t, 200, release().status)
	s.ok(waits)
	require.Equal(t, loads, s.servers["a"].Stats().Loads)
	require.Zero(t, s.servers["a"].Stats().UnloadsWhileBusy)
}

func TestJobThatComesAtTheInstantOfAnIdleUnloadIsServedAndNeverUnloadedUnder(t *testing.T) {
	t.Parallel()
	const timeout, rounds, servers = 60 * time.Millisecond, 60, 3 // one GPU: their loads and unloads go one after the other
	l := layout{Total: "64GiB", Global: "idle_timeout 60ms"}
	for i := range servers {
		c := plainModel(fmt.Sprintf("m%d", i), 2, "lock none")
		c.LoadTime, c.UnloadTime = time.Millisecond, time.Millisecond
		l.Consumers = append(l.Consumers, c)
	}
	s := start(t, l)
	var warm, cold atomic.Int64
	var clients sync.WaitGroup
	for name, srv := range s.servers {
		clients.Go(func() {
			client := s.newClient()
			wait, step, last := timeout, 16*time.Millisecond, false // homes in on the instant: longer after it was still there, shorter after it was not
			for i := range rounds {
				body := fmt.Sprintf("round %d", i)
				loads := srv.Stats().Loads
				a := s.doWith(client, context.Background(), "POST", "/"+name+"/echo?ms=4", strings.NewReader(body))
				if a.err != nil || a.status != 200 || string(a.body) != body {
					t.Errorf("%s: %d %v %s", name, a.status, a.err, a.body)
				}
				loaded := srv.Stats().Loads > loads
				if i > 1 && loaded != last {
					step = max(4*time.Millisecond, step/2)
				}
				last = loaded
				switch {
				case i == 0: // nothing was there
				case loaded:
					cold.Add(1)
					wait -= step
				default:
					warm.Add(1)
					wait += step
				}
				<-time.After(max(0, wait)) // the instant is what this is about
			}
		})
	}
	clients.Wait()
	t.Logf("%d came before the unload, %d after it", warm.Load(), cold.Load())
	require.Greater(t, warm.Load(), int64(rounds*servers/20), "the instant was hit from before")
	require.Greater(t, cold.Load(), int64(rounds*servers/20), "the instant was hit from behind")
	for name, srv := range s.servers {
		s.waitState(name, "IDLE")
		st := srv.Stats()
		require.Zero(t, st.UnloadsWhileBusy, name)
		require.Zero(t, st.Aborted, name)
		require.Equal(t, rounds, st.Worked, name)
		require.Equal(t, st.Loads, st.Unloads, "%s: one unload for each load", name)
		require.Equal(t, st.Unloads, st.UnloadCalls, name)
	}
	require.Zero(t, s.status().Scheduler.UnloadFailures)
	require.Empty(t, s.decisions("bug"))
}

func TestIdleUnloadThatFailsIsTriedAgain(t *testing.T) {
	t.Parallel()
	const timeout = 200 * time.Millisecond
	s := start(t, layout{Global: "idle_timeout 200ms", Consumers: []consumer{plainModel("a", 9)}})
	srv := s.servers["a"]
	srv.SetFaults(func(f *modelserver.Faults) { f.FailUnload = true })
	s.serve("a")
	first, second := s.nth("a", modelserver.EventUnloadCall, 1), s.nth("a", modelserver.EventUnloadCall, 2)
	require.GreaterOrEqual(t, first.Sub(times(srv, modelserver.EventWorkEnd)[0]), timeout)
	require.GreaterOrEqual(t, second.Sub(first), time.Second, "it is left in peace for a moment")
	s.until("both failures are known", func() bool { return s.status().Scheduler.UnloadFailures == 2 })
	require.Equal(t, "READY", s.state("a"))
	require.Equal(t, "open", s.status().Consumers["a"].Slots[0].Gate)
	s.serve("a") // it is there, and serves
	require.Equal(t, 1, srv.Stats().Loads)
	srv.SetFaults(func(f *modelserver.Faults) { f.FailUnload = false })
	s.waitState("a", "IDLE")
	require.Equal(t, 1, srv.Stats().Unloads)
	require.Zero(t, srv.Stats().UnloadsWhileBusy)
	kinds := s.kinds("a")
	require.Equal(t, []string{"load", "loaded", "unload", "unload_failed", "unload", "unload_failed"}, kinds[:6])
	require.Equal(t, []string{"unload", "idle_unloaded"}, kinds[len(kinds)-2:])
	failed := s.decisions("unload_failed")
	require.Contains(t, failed[0].Reason, "500")
	require.Empty(t, failed[0].Target, "it went for nobody")
	require.EqualValues(t, 1, s.status().Scheduler.IdleUnloads)
	s.until("the log tells of both", func() bool {
		log := s.log()
		return strings.Contains(log, `"msg":"unload_failed","consumer":"a"`) && strings.Contains(log, `"msg":"idle_unloaded","consumer":"a"`)
	})
	s.serve("a")
}

// beat does something every so often until stop is called, which returns when it has ended.
func beat(every time.Duration, do func()) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			do()
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	return func() { cancel(); <-done }
}

func TestFC14_ScrapesAndCheapRoutesNeitherPutAnIdleUnloadOffNorLoad(t *testing.T) {
	t.Parallel()
	const timeout = 700 * time.Millisecond
	a := plainModel("a", 9)
	a.Route = "bypass GET /health /metrics"
	s := start(t, layout{Global: "idle_timeout 700ms", Routes: "metrics /metrics", Consumers: []consumer{a}})
	scrapers := map[string]func(*http.Client) (*http.Response, error){}
	add := func(what, method, url string) {
		scrapers[what] = func(c *http.Client) (*http.Response, error) {
			req, err := http.NewRequest(method, url, nil)
			if err != nil {
				return nil, err
			}
			return c.Do(req)
		}
	}
	add("the broker's status", "GET", s.url+"/gpu/status")
	add("its decisions", "GET", s.url+"/gpu/decisions")
	add("its healthz", "GET", s.url+"/gpu/healthz")
	add("the site's metrics", "GET", s.url+"/metrics")
	add("status by the admin endpoint", "GET", "http://"+s.admin+"/gpu_broker/status")
	add("metrics of the admin endpoint", "GET", "http://"+s.admin+"/metrics")
	add("the server's own metrics", "GET", s.url+"/a/health")
	add("HEAD", "HEAD", s.url+"/a/synthesize")
	add("OPTIONS", "OPTIONS", s.url+"/a/synthesize")
	s.serve("a")
	client := s.newClient()
	var rounds atomic.Int64
	stop := beat(100*time.Millisecond, func() {
		for what, ask := range scrapers {
			resp, err := ask(client)
			if err != nil {
				t.Errorf("%s: %v", what, err)
				continue
			}
			_ = resp.Body.Close()
			if resp.StatusCode >= 300 {
				t.Errorf("%s: %d", what, resp.StatusCode)
			}
		}
		rounds.Add(1)
	})
	defer stop()
	used := s.status().Consumers["a"].LastUsed
	called := s.nth("a", modelserver.EventUnloadCall, 1)
	worked := times(s.servers["a"], modelserver.EventWorkEnd)[0]
	between(t, worked.Add(timeout), called, worked.Add(timeout), "the unload call")
	require.GreaterOrEqual(t, rounds.Load(), int64(2), "it was scraped meanwhile")
	s.waitState("a", "IDLE")
	before := rounds.Load()
	s.until("it is scraped five times more", func() bool { return rounds.Load() > before+5 })
	st := s.status()
	require.Equal(t, "IDLE", st.Consumers["a"].Slots[0].State)
	require.Equal(t, used, st.Consumers["a"].LastUsed)
	require.EqualValues(t, 1, st.Scheduler.TotalJobs)
	require.Equal(t, 1, s.servers["a"].Stats().LoadsStarted, "a scrape loads nothing")
	require.Equal(t, 1, s.servers["a"].Stats().UnloadCalls)
}

func TestTouchRoutesPutAnIdleUnloadOff(t *testing.T) {
	t.Parallel()
	const timeout = time.Second
	a := plainModel("a", 9)
	a.Route = "touch GET /health"
	s := start(t, layout{Global: "idle_timeout 1s", Consumers: []consumer{a}})
	s.serve("a")
	var sent, answered []time.Time
	client := s.newClient()
	for began := time.Now(); time.Since(began) < 2*timeout; time.Sleep(20 * time.Millisecond) {
		at := time.Now()
		got := s.doWith(client, context.Background(), "GET", "/a/health", nil)
		require.Equal(t, 200, got.status)
		sent, answered = append(sent, at), append(answered, time.Now())
	}
	called := s.nth("a", modelserver.EventUnloadCall, 1)
	before := 0
	for i := range sent {
		if answered[i].Before(called) {
			require.GreaterOrEqual(t, called.Sub(sent[i]), timeout, "each touch counts as use")
			before++
		}
	}
	require.Greater(t, before, 1)
	require.Less(t, called.Sub(answered[len(answered)-1]), timeout+late)
	s.waitState("a", "IDLE")
	require.Equal(t, 200, s.get("/a/health").status)
	require.Equal(t, 1, s.servers["a"].Stats().LoadsStarted, "a touch loads nothing")
	require.EqualValues(t, 1, s.status().Scheduler.TotalJobs)
}

func TestReloadKeepsTheIdleClockAndTakesANewTimeoutAtOnce(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "idle_timeout 4s", Consumers: []consumer{plainModel("a", 2), plainModel("b", 2, "idle_timeout 4s")}})
	s.serve("b")
	s.serve("a")
	before := s.status().Consumers["a"]
	s.reloaded(func(c string) string { return c + "\n# another line\n" })
	after := s.status().Consumers["a"]
	require.NotEmpty(t, before.UnloadAt)
	require.Equal(t, before.UnloadAt, after.UnloadAt)
	require.Equal(t, before.LastUsed, after.LastUsed)

	// A longer one.
	s.reloaded(func(c string) string { return strings.Replace(c, "\nidle_timeout 4s", "\nidle_timeout 10m", 1) })
	after = s.status().Consumers["a"]
	require.Equal(t, before.LastUsed, after.LastUsed)
	require.Equal(t, 10*time.Minute, stampOf(t, after.UnloadAt).Sub(stampOf(t, after.LastUsed)))
	used := stampOf(t, s.status().Consumers["b"].LastUsed)
	between(t, used.Add(4*time.Second), s.nth("b", modelserver.EventUnloadCall, 1), used.Add(4*time.Second), "b, whose clock no reload has moved")
	require.Equal(t, "READY", s.state("a"))

	// A shorter one, which is over already.
	reload := time.Now()
	s.reloaded(func(c string) string { return strings.Replace(c, "\nidle_timeout 10m", "\nidle_timeout 100ms", 1) })
	require.Less(t, s.nth("a", modelserver.EventUnloadCall, 1).Sub(reload), late)
	s.waitState("a", "IDLE")
	require.EqualValues(t, 2, s.status().Scheduler.IdleUnloads)
}

func TestFreedMemoryOfAnIdleUnloadIsThereForOthersWithoutAnEviction(t *testing.T) {
	t.Parallel()
	a := plainModel("a", 9)
	a.ReleaseDelay = 100 * time.Millisecond
	s := start(t, layout{Global: "idle_timeout 300ms", Consumers: []consumer{a, plainModel("b", 9)}})
	s.serve("a")
	s.waitState("a", "STOPPING")
	s.serve("b") // it comes in the middle of it, and waits for the memory
	st := s.status().Scheduler
	require.EqualValues(t, 1, st.IdleUnloads)
	require.Zero(t, st.Evictions)
	require.Equal(t, 1, s.servers["a"].Stats().UnloadCalls)
	s.noOOM()
}
