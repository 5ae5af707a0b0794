package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// sky is a server that runs elsewhere. It answers with what it was sent.
type sky struct {
	*httptest.Server
	served atomic.Int64
	hold   sync.RWMutex // held: answers wait
	seen   chan *http.Request
}

func newSky(t *testing.T, tls bool) *sky {
	s := &sky{seen: make(chan *http.Request, 64)}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.served.Add(1)
		select {
		case s.seen <- r:
		default:
		}
		s.hold.RLock()
		defer s.hold.RUnlock()
		_, _ = io.Copy(w, r.Body)
	}))
	if tls {
		s.StartTLS()
	} else {
		s.Start()
	}
	t.Cleanup(s.Close)
	return s
}

func (s *sky) addr() string { return s.Listener.Addr().String() }

// cloudSite is a site whose large model has the sky for its fallback, with a model that needs the large one's room.
func cloudSite(t *testing.T, up *sky) *site {
	return start(t, layout{
		Global:    "consumer sky {\ncloud\nupstream " + up.addr() + "\n}",
		Consumers: []consumer{plainModel("large", 9, "fallback sky"), plainModel("other", 9)},
		Routes:    "handle_path /sky/* {\ngpu_broker sky\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
}

func TestTheCloudServesWhatWouldMakeAnotherModelGo(t *testing.T) {
	t.Parallel()
	up := newSky(t, false)
	s := cloudSite(t, up)
	s.servedBy("large", "/large/synthesize")
	s.serve("other")
	a := s.post("/large/synthesize", "hello")
	s.came("sky", a)
	require.Equal(t, "hello", string(a.body))
	require.EqualValues(t, 1, up.served.Load())
	require.Equal(t, "gpu-queue;dur=0, gpu-load;dur=0", a.header.Get("Server-Timing"))
	st := s.status()
	require.EqualValues(t, 1, st.Consumers["sky"].TotalRequests)
	require.True(t, st.Consumers["sky"].Cloud)
	require.False(t, st.Consumers["sky"].Loaded)
	require.Equal(t, "READY", s.state("other"))
	require.EqualValues(t, 1, s.metric(`run_seconds_count{consumer="sky"}`))
}

func TestTheCloudWaitsForNobody(t *testing.T) {
	t.Parallel()
	up := newSky(t, false)
	s := cloudSite(t, up)
	s.serve("large")
	_, end := s.works("large")
	waits := s.send("POST", "/other/synthesize", "x")
	s.waitQueued("other", 1)
	up.hold.Lock()
	var all []<-chan answer
	for range 8 { // at once, though its concurrency is one and others have waited for longer
		all = append(all, s.send("POST", "/sky/chat", "hi"))
	}
	s.until("all have come to it", func() bool { return up.served.Load() == 8 })
	require.Equal(t, 8, s.status().Consumers["sky"].Active)
	require.Equal(t, 1, s.status().Scheduler.QueueDepth)
	up.hold.Unlock()
	for _, ch := range all {
		s.came("sky", s.ok(ch))
	}
	end()
	s.ok(waits)
}

func TestACloudThatIsAwayIsRefusedByItsNameAndAskedAnewByTheNext(t *testing.T) {
	t.Parallel()
	up := newSky(t, false)
	gate := newRelay(t, freeAddr(t), up.addr())
	s := start(t, layout{Global: "probe_interval 50ms\nconsumer sky {\ncloud\nupstream " + gate.addr + "\n}",
		Consumers: []consumer{plainModel("large", 9, "fallback sky"), plainModel("other", 9)}})
	s.serve("large")
	s.serve("other")
	gate.close()
	a := s.post("/large/synthesize", "x")
	require.Equal(t, 503, a.status, "%s", a.body)
	require.Equal(t, "sky", s.refusal(a).Consumer)
	gate.open()
	s.came("sky", s.post("/large/synthesize", "x"))
	require.Equal(t, "healthy", s.status().Consumers["sky"].Health)
}

// flag reads the run-time configuration, and setFlag changes it.
func (s *site) flag() (allow bool, source string) {
	s.t.Helper()
	a := s.adminDo("GET", "/gpu_broker/config", "", "")
	require.Equal(s.t, 200, a.status, "%s", a.body)
	var doc map[string]any
	require.NoError(s.t, json.Unmarshal(a.body, &doc))
	require.Len(s.t, doc, 2)
	return doc["allowCloudFallback"].(bool), doc["source"].(string)
}

func (s *site) setFlag(allow bool) {
	s.t.Helper()
	a := s.adminDo("PUT", "/gpu_broker/config", "application/json", fmt.Sprintf(`{"allowCloudFallback": %v}`, allow))
	require.Equal(s.t, 200, a.status, "%s", a.body)
	require.JSONEq(s.t, fmt.Sprintf(`{"allowCloudFallback": %v, "source": "stored"}`, allow), string(a.body))
}

func (s *site) requireFlag(allow bool, source string) {
	s.t.Helper()
	gotAllow, gotSource := s.flag()
	require.Equal(s.t, fmt.Sprint(allow, source), fmt.Sprint(gotAllow, gotSource))
}

func TestTheGuardKeepsRequestsFromTheCloudAndOutlastsReloadsAndRestarts(t *testing.T) {
	t.Parallel()
	up := newSky(t, false)
	s := cloudSite(t, up)
	s.serve("large")
	s.serve("other")
	s.requireFlag(true, "default")
	s.came("sky", s.post("/large/synthesize", "x"))
	s.setFlag(false)
	s.servedBy("large", "/large/synthesize") // the other one made way
	s.servedBy("other", "/other/synthesize")
	s.came("sky", s.post("/sky/chat", "x")) // who names it gets it
	served := up.served.Load()

	s.reloaded(func(c string) string { return c + "\n# another line\n" })
	s.requireFlag(false, "stored")
	for _, stop := range []func(){s.halt, s.kill} {
		stop()
		s.again()
		s.requireFlag(false, "stored")
		s.servedBy("large", "/large/synthesize")
		s.servedBy("other", "/other/synthesize")
	}
	require.Equal(t, served, up.served.Load())

	s.setFlag(true)
	s.came("sky", s.post("/large/synthesize", "x"))
	s.cmd.Env = append(s.cmd.Env, "GPU_BROKER_ALLOW_CLOUD_FALLBACK=off")
	s.halt()
	s.again()
	s.requireFlag(true, "stored") // what was said by hand wins
}

func TestTheEnvironmentSeedsTheGuard(t *testing.T) {
	t.Parallel()
	up := newSky(t, false)
	s := cloudSite(t, up)
	s.cmd.Env = append(s.cmd.Env, "GPU_BROKER_ALLOW_CLOUD_FALLBACK=off")
	s.halt()
	s.again()
	s.requireFlag(false, "environment")
	s.serve("large")
	s.serve("other")
	s.servedBy("large", "/large/synthesize")
	require.Zero(t, up.served.Load())
	found, err := filepath.Glob(filepath.Join(s.dir, "data", "caddy", "gpu_broker", "*", "flags.json"))
	require.NoError(t, err)
	require.Empty(t, found, "a seed is not stored: it may be another the next time")
}

func TestASeedThatIsNonsenseIsAnErrorThatNamesItsVariable(t *testing.T) {
	t.Parallel()
	s := cloudSite(t, newSky(t, false))
	cmd := exec.Command(s.cmd.Path, "validate", "--config", filepath.Join(s.dir, "Caddyfile"), "--adapter", "caddyfile")
	cmd.Env = append(slices.Clone(s.cmd.Env), "GPU_BROKER_ALLOW_CLOUD_FALLBACK=perhaps")
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), `GPU_BROKER_ALLOW_CLOUD_FALLBACK is \"perhaps\"`)
}

func TestADamagedFlagIsSetAsideAndTheDefaultHolds(t *testing.T) {
	t.Parallel()
	s := cloudSite(t, newSky(t, false))
	s.setFlag(false)
	found, err := filepath.Glob(filepath.Join(s.dir, "data", "caddy", "gpu_broker", "*", "flags.json"))
	require.NoError(t, err)
	require.Len(t, found, 1)
	info, err := os.Stat(found[0])
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	s.halt()
	require.NoError(t, os.WriteFile(found[0], []byte(`{"version":1,"allow_cl`), 0o600))
	s.again()
	s.requireFlag(true, "default")
	aside, err := filepath.Glob(found[0] + ".damaged-*")
	require.NoError(t, err)
	require.Len(t, aside, 1)
	s.setFlag(false)
	s.requireFlag(false, "stored")
}

func TestTheRunTimeConfigurationTakesNothingButWhatThereIsToSet(t *testing.T) {
	t.Parallel()
	s := cloudSite(t, newSky(t, false))
	for body, say := range map[string]string{
		``:                                      "no JSON",
		`true`:                                  "no JSON object",
		`[]`:                                    "no JSON object",
		`null`:                                  "no JSON object",
		`{}`:                                    "missing",
		`{"allowCloudFallback": "true"}`:        "neither true nor false",
		`{"allowCloudFallback": 1}`:             "neither true nor false",
		`{"allowCloudFallback": null}`:          "neither true nor false",
		`{"allowCloudFallback": {}}`:            "neither true nor false",
		`{"allowcloudfallback": false}`:         "did you mean allowCloudFallback",
		`{"allowCloudFallback": false, "x": 1}`: `unknown setting \"x\"`,
		`{"allowCloudFallback": false, "source": "stored"}`:                         "unknown setting",
		`{"allowCloudFallback": false, "allowCloudFallback": true}`:                 "twice",
		`{"allowCloudFallback": false} {}`:                                          "something follows",
		`{"allowCloudFallback": false`:                                              "no JSON",
		`{"allowCloudFallback": false, "x": "` + strings.Repeat("y", 70_000) + `"}`: "too large",
	} {
		a := s.adminDo("PUT", "/gpu_broker/config", "application/json", body)
		require.Equal(t, 400, a.status, "%.60s: %s", body, a.body)
		require.Contains(t, string(a.body), say, "%.60s", body)
	}
	s.requireFlag(true, "default")
	for _, method := range []string{"POST", "DELETE", "PATCH"} {
		a := s.adminDo(method, "/gpu_broker/config", "", `{"allowCloudFallback": false}`)
		require.Equal(t, 405, a.status)
		require.Equal(t, "GET, PUT", a.header.Get("Allow"))
	}
	s.do(context.Background(), "PUT", "/gpu/config", strings.NewReader(`{"allowCloudFallback": false}`)) // the site changes nothing
	s.requireFlag(true, "default")
}

// The way to servers that want TLS and a key of their own, as the docs have it.
func TestACloudThatWantsTLSAndAKeyIsReachedByARouteOfItsOwn(t *testing.T) {
	t.Parallel()
	up := newSky(t, true)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: up.Certificate().Raw}), 0o600))
	large := plainModel("large", 9, "fallback hosted")
	large.Proxy = `@hosted vars {http.gpu_broker.consumer} hosted
	reverse_proxy @hosted https://` + up.addr() + ` {
		header_up Host api.example.com
		header_up Authorization "Bearer {env.HOSTED_KEY}"
		header_up -X-Forwarded-For
		transport http {
			tls_trust_pool file ` + ca + `
			tls_server_name example.com
		}
	}
	reverse_proxy {http.gpu_broker.upstream}`
	s := start(t, layout{Global: "consumer hosted {\ncloud\n}", Consumers: []consumer{large, plainModel("other", 9)}})
	s.cmd.Env = append(s.cmd.Env, "HOSTED_KEY=secret-key")
	s.halt()
	s.again()
	s.servedBy("large", "/large/synthesize")
	s.serve("other")
	s.came("hosted", s.post("/large/synthesize", "hello"))
	r := <-up.seen
	require.Equal(t, "api.example.com", r.Host)
	require.Equal(t, "Bearer secret-key", r.Header.Get("Authorization"))
	require.Empty(t, r.Header.Get("X-Forwarded-For"))
	require.NotNil(t, r.TLS)
	s.setFlag(false)
	s.servedBy("large", "/large/synthesize")
}

func TestALentGPUServesNobodyUntilItIsBack(t *testing.T) {
	t.Parallel()
	up := newSky(t, false)
	s := cloudSite(t, up)
	s.serve("large")
	lend := func(query string) answer { return s.adminDo("POST", "/gpu_broker/lend?"+query, "", "") }
	a := lend("for=30m")
	require.Equal(t, 200, a.status, "%s", a.body)
	var doc struct {
		GPU   *int
		Until time.Time `json:"lent_until"`
	}
	require.NoError(t, json.Unmarshal(a.body, &doc))
	require.NotNil(t, doc.GPU)
	require.WithinDuration(t, time.Now().Add(30*time.Minute), doc.Until, time.Minute)
	s.waitState("large", "IDLE")
	require.NotEmpty(t, s.status().GPUs[0].LentUntil)
	waits := s.send("POST", "/other/synthesize", "x")
	s.waitQueued("other", 1)
	require.Contains(t, s.status().Consumers["other"].Slots[0].Why, "lent")
	s.came("sky", s.post("/large/synthesize", "x")) // a ladder leads to who is not on it
	require.Equal(t, 200, lend("for=0&gpu=0").status)
	s.ok(waits)
	require.Empty(t, s.status().GPUs[0].LentUntil)

	for query, want := range map[string]int{"": 400, "for=soon": 400, "for=-1m": 400, "for=31d": 400, "for=1m&gpu=x": 400, "for=1m&gpu=-1": 400, "for=1m&gpu=7": 404} {
		require.Equal(t, want, lend(query).status, query)
	}
	require.Equal(t, 405, s.adminDo("GET", "/gpu_broker/lend?for=1m", "", "").status)
}

func TestAPinByHandKeepsAModelThroughReloads(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "outsider_wait 50ms", Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("a")
	post := func(path string) answer { return s.adminDo("POST", "/gpu_broker/consumers/"+path, "", "") }
	require.Equal(t, 200, post("a/pin").status)
	require.True(t, s.status().Consumers["a"].Pinned)
	require.Equal(t, 409, post("a/unload").status)
	s.reloaded(func(c string) string { return c + "\n# another line\n" })
	a := s.post("/b/synthesize", "x")
	require.NotEqual(t, 200, a.status, "nothing may go for it")
	require.Equal(t, "READY", s.state("a"))
	require.Equal(t, 200, post("a/unpin").status)
	require.False(t, s.status().Consumers["a"].Pinned)
	s.serve("b")
	require.Equal(t, "IDLE", s.state("a"))
	for path, want := range map[string]int{"nobody/pin": 404, "nobody/unpin": 404} {
		require.Equal(t, want, post(path).status, path)
	}
	require.Contains(t, string(s.adminDo("POST", "/gpu_broker/consumers/c/pin", "", "").body), "allowed: a, b")
	require.Equal(t, 405, s.adminDo("GET", "/gpu_broker/consumers/a/pin", "", "").status)
}

// follower reads an event stream of decisions.
type follower struct {
	t     *testing.T
	lines *bufio.Scanner
	id    string // of the last event
	end   func()
}

func (s *site) follow(t *testing.T, url, after string) *follower {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	require.NoError(t, err)
	if after != "" {
		req.Header.Set("Last-Event-ID", after)
	}
	resp, err := s.client.Do(req)
	require.NoError(t, err)
	require.Equal(t, 200, resp.StatusCode)
	require.Equal(t, "text/event-stream", resp.Header.Get("Content-Type"))
	end := func() { cancel(); _ = resp.Body.Close() }
	t.Cleanup(end)
	f := &follower{t: t, lines: bufio.NewScanner(resp.Body), end: end}
	require.True(t, f.lines.Scan())
	require.Equal(t, ": decisions", f.lines.Text())
	return f
}

// next is the next decision.
func (f *follower) next() decision {
	f.t.Helper()
	var d decision
	for f.lines.Scan() {
		line := f.lines.Text()
		if id, ok := strings.CutPrefix(line, "id: "); ok {
			f.id = id
		}
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			require.NoError(f.t, json.Unmarshal([]byte(data), &d))
			return d
		}
	}
	f.t.Fatalf("the stream ends: %v", f.lines.Err())
	return d
}

func TestDecisionsCanBeFollowedAsTheyAreMade(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("giant", 17)}})
	var all []*follower
	for _, base := range []string{"http://" + s.admin + "/gpu_broker", s.url + "/gpu"} {
		all = append(all, s.follow(t, base+"/decisions?follow=true", ""))
	}
	s.serve("a")
	for _, f := range all {
		require.Equal(t, "load a", fmt.Sprintf("%s %s", f.next().Kind, "a"))
		require.Equal(t, "loaded", f.next().Kind)
	}
	all[0].end()
	require.Equal(t, 422, s.post("/giant/synthesize", "x").status)
	require.Equal(t, "refuse", all[1].next().Kind)
	back := s.follow(t, "http://"+s.admin+"/gpu_broker/decisions?follow=1", all[0].id) // what it missed comes first
	require.Equal(t, "refuse", back.next().Kind)
	require.Equal(t, all[1].id, back.id)
	stranger := s.follow(t, s.url+"/gpu/decisions?follow=1", "1a2b.3") // of another process: all that there is
	require.Equal(t, "load", stranger.next().Kind)

	// The end of the process waits for no follower.
	began := time.Now()
	s.halt()
	require.Less(t, time.Since(began), 8*time.Second)
	for back.lines.Scan() {
		require.NotContains(t, back.lines.Text(), "data: ")
	}
}
