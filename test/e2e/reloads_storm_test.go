package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// tally is what became of the requests of one kind.
type tally struct {
	mu     sync.Mutex
	sent   int
	good   int
	unread []string // URIs of those whose connection ended before any answer
	bad    []string // what should not be
}

// note takes the answer to a request in. wrong says what is wrong with a body; empty: nothing.
func (y *tally) note(uri string, a answer, wrong string) {
	y.mu.Lock()
	defer y.mu.Unlock()
	y.sent++
	var network net.Error
	switch {
	case a.err == nil && a.status == 200 && wrong == "":
		y.good++
	case a.err != nil && a.status == 0 && (!errors.As(a.err, &network) || !network.Timeout()):
		y.unread = append(y.unread, uri)
	default:
		y.bad = append(y.bad, fmt.Sprintf("%s: %d %v %s %.200s", uri, a.status, a.err, wrong, a.body))
	}
}

func (y *tally) counts() (sent, good int, unread, bad []string) {
	y.mu.Lock()
	defer y.mu.Unlock()
	return y.sent, y.good, slices.Clone(y.unread), slices.Clone(y.bad)
}

// storm is 16 clients and what they got, of the broker's routes and of a plain reverse_proxy beside them.
type storm struct {
	*site
	control        *modelserver.Server
	ours, plain    tally
	perConsumer    sync.Map // name → *atomic.Int64: requests that were answered well
	clients        sync.WaitGroup
	stop           chan struct{}
	once           sync.Once // closes stop
	longStreams    context.Context
	endLongStreams func()
	next           atomic.Int64
}

// end ends all clients.
func (k *storm) end() {
	k.once.Do(func() { close(k.stop) })
	k.endLongStreams()
	k.clients.Wait()
}

func (k *storm) stopped() bool {
	select {
	case <-k.stop:
		return true
	default:
		return false
	}
}

// ask sends one request and checks its answer. name is a consumer, or "control" for the plain route.
func (k *storm) ask(c *http.Client, ctx context.Context, name, method, path, body string, want []byte) {
	sep := "?"
	if strings.Contains(path, "?") {
		sep = "&"
	}
	uri := fmt.Sprintf("/%s%s%sn=%d", name, path, sep, k.next.Add(1))
	var reader io.Reader
	if body != "" {
		reader = strings.NewReader(body)
	}
	a := k.doWith(c, ctx, method, uri, reader)
	wrong := ""
	if a.status == 200 && !bytes.Equal(a.body, want) {
		wrong = fmt.Sprintf("(%d bytes, not the %d it should be)", len(a.body), len(want))
	}
	if name == "control" {
		k.plain.note(uri, a, wrong)
		return
	}
	k.ours.note(uri, a, wrong)
	if a.err == nil && a.status == 200 {
		n, _ := k.perConsumer.LoadOrStore(name, new(atomic.Int64))
		n.(*atomic.Int64).Add(1)
	}
}

// pair is a client that sends the same to a consumer and to the plain route, in turns.
func (k *storm) pair(c *http.Client, name, method, path, body string, want []byte) {
	k.clients.Go(func() {
		for !k.stopped() {
			k.ask(c, context.Background(), name, method, path, body, want)
			k.ask(c, context.Background(), "control", method, path, body, want)
		}
	})
}

// long is a stream that runs as long as the storm. It must never be cut.
func (k *storm) long(name string, y *tally) {
	k.clients.Go(func() {
		uri := "/" + name + "/stream?events=100000&ms=20"
		c := k.newClient()
		c.Timeout = 0 // under the race detector the storm may take longer than any one request
		a := k.doWith(c, k.longStreams, "GET", uri, nil)
		whole := beginsStream(a.body) && len(a.body) > 100
		if !errors.Is(a.err, context.Canceled) || a.status != 200 || !whole {
			y.mu.Lock()
			y.bad = append(y.bad, fmt.Sprintf("%s: %d %v, %d bytes", uri, a.status, a.err, len(a.body)))
			y.mu.Unlock()
		}
	})
}

// newStorm starts a site where everything fits, its control, and 16 clients.
func newStorm(t *testing.T, https bool) *storm {
	control, err := modelserver.Start(modelserver.Options{Name: "control", SimDir: t.TempDir(), VRAM: gib(1), Preloaded: true})
	require.NoError(t, err)
	t.Cleanup(func() { _ = control.Close() })
	beside := func(name string) consumer {
		c := plainModel(name, 2, "lock none\nconcurrency 8")
		return c
	}
	l := layout{Total: "64GiB", HTTPS: https, Global: "stop_grace 5s", Consumers: []consumer{plainModel("turns", 2), plainModel("others", 2), beside("embed"), beside("speech")}}
	for i := range 4 {
		c := beside("cold" + strconv.Itoa(i))
		c.LoadTime = 1500 * time.Millisecond
		l.Consumers = append(l.Consumers, c)
	}
	ui := comfyui()
	ui.Name = "ui"
	ui.VRAM = gib(2)
	ui.Lines = "lifecycle_by_hand\nhealth /system_stats\nlock none\nconcurrency 8"
	ui.Proxy = "reverse_proxy {http.gpu_broker.upstream} {\nstream_close_delay 10m\n}"
	l.Consumers = append(l.Consumers, ui)
	l.Routes = "log {\noutput file {env.XDG_DATA_HOME}/access.log\n}\nhandle /hello {\nrespond 0\n}\nhandle_path /control/* {\nreverse_proxy " + control.Addr() + "\n}"
	k := &storm{site: start(t, l), control: control, stop: make(chan struct{})}
	k.longStreams, k.endLongStreams = context.WithCancel(context.Background())
	t.Cleanup(k.end)

	for _, name := range []string{"turns", "others", "embed", "speech"} {
		k.ask(k.client, context.Background(), name, "POST", "/synthesize", "x", modelserver.SynthesizeBytes([]byte("x")))
	}
	// The first job of a server that loads inside it counts as its load until it ends: it must not be the websocket.
	require.Equal(t, 200, k.get("/ui/queue").status)
	text := strings.Repeat("what is to be said ", 200)
	spoken := modelserver.SynthesizeBytes([]byte(text))
	short := modelserver.StreamBytes(20)
	k.pair(k.newClient(), "turns", "POST", "/synthesize?ms=2", text, spoken)
	k.pair(k.newClient(), "others", "POST", "/synthesize?ms=2", text, spoken)
	k.pair(k.newClient(), "embed", "POST", "/synthesize?ms=5", text, spoken)
	k.pair(k.newClient(), "embed", "GET", "/echo?ms=5", "", nil)
	large := strings.Repeat(text, 50) // more than is taken along without being read ahead
	k.pair(k.newClient(), "turns", "POST", "/echo?ms=2", large, []byte(large))
	for range 2 { // a connection for each request
		c := k.newClient()
		c.Transport.(*http.Transport).DisableKeepAlives = true
		k.pair(c, "embed", "POST", "/synthesize?ms=5", text, spoken)
	}
	for range 3 {
		k.pair(k.newClient(), "speech", "GET", "/stream?events=20&ms=10", "", short)
	}
	k.long("speech", &k.ours)
	k.long("control", &k.plain)
	return k // and four for the cold ones, and a websocket, which come later
}

// chill has a client wait for a cold consumer, over as many reloads as its load takes.
func (k *storm) chill(i int) {
	c := k.newClient()
	name := "cold" + strconv.Itoa(i)
	k.clients.Go(func() {
		for !k.stopped() { // again if its connection ended before it was read
			k.ask(c, context.Background(), name, "POST", "/synthesize", "x", modelserver.SynthesizeBytes([]byte("x")))
			if _, served := k.perConsumer.Load(name); served {
				return
			}
		}
	})
}

// watch looks at the status all the time: some of its figures only grow.
func (k *storm) watch() {
	c := k.newClient()
	k.clients.Go(func() {
		last := broker.Status{}
		for !k.stopped() {
			a := k.doWith(c, context.Background(), "GET", "/gpu/status", nil)
			var now broker.Status
			if a.err != nil || a.status != 200 || json.Unmarshal(a.body, &now) != nil {
				if a.status != 0 {
					k.complain("status: %d %v %.200s", a.status, a.err, a.body)
				}
				continue
			}
			for name, was := range last.Consumers {
				is, there := now.Consumers[name]
				switch {
				case !there && name != "extra":
					k.complain("%s is gone from the status", name)
				case there && name != "extra" && (is.LastUsed < was.LastUsed || is.TotalRequests < was.TotalRequests || was.Loaded && !is.Loaded || is.Health != "healthy"):
					k.complain("%s was %+v and is %+v", name, was, is)
				}
			}
			if now.Scheduler.TotalJobs < last.Scheduler.TotalJobs || now.Scheduler.Loads < last.Scheduler.Loads || now.Scheduler.Evictions > 0 || now.Scheduler.ManualUnloads > 0 || now.Scheduler.Refused > 0 {
				k.complain("the scheduler was %+v and is %+v", last.Scheduler, now.Scheduler)
			}
			last = now
			time.Sleep(10 * time.Millisecond) // it is one client among others
		}
	})
}

func (k *storm) complain(format string, args ...any) {
	k.ours.mu.Lock()
	defer k.ours.mu.Unlock()
	if len(k.ours.bad) < 100 {
		k.ours.bad = append(k.ours.bad, fmt.Sprintf(format, args...))
	}
}

// chat keeps a websocket in use. It must not be cut.
func (k *storm) chat() {
	conn := k.dialSocket("/ui/ws?clientId=storm")
	k.clients.Go(func() {
		defer func() { _ = conn.CloseNow() }()
		for !k.stopped() {
			resp, err := http.Post(k.servers["ui"].URL()+"/queue", "application/json", strings.NewReader(`{"clear":true}`)) // which is told to all websockets
			if err == nil {
				_ = resp.Body.Close()
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				_, _, err = conn.Read(ctx)
				cancel()
			}
			if err != nil {
				k.complain("websocket: %v", err)
				return
			}
		}
	})
}

// dialSocket opens a websocket, over HTTP/1.1 whatever the site speaks.
func (s *site) dialSocket(path string) *websocket.Conn {
	s.t.Helper()
	c := s.newClient()
	tr := c.Transport.(*http.Transport)
	tr.ForceAttemptHTTP2 = false
	tr.TLSNextProto = nil
	if tr.TLSClientConfig != nil {
		tr.TLSClientConfig.NextProtos = []string{"http/1.1"}
	}
	c.Timeout = 0
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, _, err := websocket.Dial(ctx, s.url+path, &websocket.DialOptions{HTTPClient: c})
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = conn.CloseNow() })
	return conn
}

// nth is the good configuration of the nth reload: each has something new.
func nth(base string, i int, extra string) string {
	c := strings.Replace(base, "respond 0", "respond "+strconv.Itoa(i), 1)
	c = insert(c, fmt.Sprintf("idle_timeout %dm\nmax_queue %d", 10+i, 400+i))
	c = strings.Replace(c, "consumer turns {", fmt.Sprintf("consumer turns {\nidle_timeout 0\nkeep_alive %ds", i), 1)
	if i%2 == 0 {
		c = insert(c, fmt.Sprintf("consumer extra {\nupstream %s\nvram 1GiB\n%s\n}", extra, manners[""]))
	}
	return c
}

func TestFiftyReloadsUnderLoadLoseNothing(t *testing.T) {
	t.Parallel()
	overBothVersions(t, func(t *testing.T, https bool) {
		k := newStorm(t, https)
		extra, err := modelserver.Start(modelserver.Options{Name: "extra", SimDir: k.sim, VRAM: gib(1)})
		require.NoError(t, err)
		t.Cleanup(func() { _ = extra.Close() })
		k.chat()
		k.watch()
		base := k.caddyfileNow()
		kinds := spoilers(occupied(t))
		fresh := k.newClient()
		fresh.Transport.(*http.Transport).DisableKeepAlives = true

		ruling, failed := 0, 0
		began := time.Now()
		for i := 1; i <= 50; i++ {
			if i%10 == 4 && i < 40 {
				k.chill(i / 10)
			}
			text := nth(base, i, extra.Addr())
			if i%5 == 3 { // ten of them
				way := kinds[failed%len(kinds)]
				failed++
				a := k.adminDo("POST", "/load", "text/caddyfile", way.spoil(text))
				require.Equal(t, 400, a.status, "%s: %s", way.name, a.body)
				require.Contains(t, string(a.body), way.want, way.name)
			} else {
				a := k.adminDo("POST", "/load", "text/caddyfile", text)
				require.Equal(t, 200, a.status, "%s", a.body)
				ruling = i
			}
			k.until(fmt.Sprintf("configuration %d rules", ruling), func() bool {
				a := k.doWith(fresh, context.Background(), "GET", "/hello", nil)
				return a.err == nil && string(a.body) == strconv.Itoa(ruling)
			})
			require.EqualValues(t, ruling, k.statusWith(fresh).Consumers["turns"].StayWarmS, "reload %d", i)
		}
		took := time.Since(began)
		require.Equal(t, 10, failed)
		defer func() {
			if t.Failed() {
				k.lament()
			}
		}()
		k.until("the cold ones are served", func() bool {
			for i := range 4 {
				if _, ok := k.perConsumer.Load("cold" + strconv.Itoa(i)); !ok {
					return false
				}
			}
			return true
		})
		k.end()

		sent, good, unread, bad := k.ours.counts()
		plainSent, plainGood, plainUnread, plainBad := k.plain.counts()
		t.Logf("50 reloads in %s; broker: %d requests, %d good, %d that Caddy never read; plain reverse_proxy: %d, %d, %d",
			took.Round(time.Millisecond), sent, good, len(unread), plainSent, plainGood, len(plainUnread))
		require.Empty(t, bad)
		require.Empty(t, plainBad)
		require.Greater(t, good, 200, "there was load")
		// A connection that ends while its next request is on the way is a race of HTTP itself. It is none
		// if Caddy has read the request: then it is in the access log.
		read := k.urisRead()
		for _, uri := range unread {
			require.NotContains(t, read, uri, "it was read, and got no answer")
		}
		require.LessOrEqual(t, len(unread), 2*len(plainUnread)+10, "by chance they differ, but not by so much: %v against %v", unread, plainUnread)

		k.until("all is over", func() bool {
			st := k.statusWith(fresh)
			return st.Scheduler.InFlight == 0 && st.Scheduler.QueueDepth == 0
		})
		st := k.statusWith(fresh)
		require.EqualValues(t, len(k.servers), st.Scheduler.Loads, "each once; ui's is its first job")
		require.Zero(t, st.Scheduler.Evictions+st.Scheduler.LoadFailures+st.Scheduler.UnloadFailures+st.Scheduler.Refused)
		for name, srv := range k.servers {
			now := srv.Stats()
			require.Zero(t, now.UnloadCalls, name)
			require.Zero(t, st.Consumers[name].Active, name)
			if name == "ui" {
				continue
			}
			require.Equal(t, 1, now.LoadsStarted, name)
			n, ok := k.perConsumer.Load(name)
			require.True(t, ok, name)
			require.EqualValues(t, n.(*atomic.Int64).Load(), now.Worked, "%s: each request was worked on once", name)
		}
		require.Zero(t, extra.Stats().UnloadCalls+extra.Stats().LoadsStarted)
		k.watchEnded()
	})
}

// lament tells what is known of a storm that went wrong.
func (k *storm) lament() {
	sent, good, unread, bad := k.ours.counts()
	k.t.Logf("broker: %d sent, %d good, %d unread, bad: %q", sent, good, len(unread), bad)
	sent, good, unread, bad = k.plain.counts()
	k.t.Logf("plain: %d sent, %d good, %d unread, bad: %q", sent, good, len(unread), bad)
	text, err := json.MarshalIndent(k.status(), "", " ")
	k.t.Logf("%s %v", text, err)
}

// statusWith is status by another client.
func (s *site) statusWith(c *http.Client) (st broker.Status) {
	s.t.Helper()
	s.until("the status answers", func() bool {
		a := s.doWith(c, context.Background(), "GET", "/gpu/status", nil)
		return a.err == nil && a.status == 200 && json.Unmarshal(a.body, &st) == nil
	})
	return st
}

// watchEnded checks that streams were ended by their clients alone.
func (k *storm) watchEnded() {
	k.t.Helper()
	require.Equal(k.t, 1, k.servers["speech"].Stats().Aborted, "the long one, by its client")
	require.Zero(k.t, k.servers["embed"].Stats().Aborted+k.servers["turns"].Stats().Aborted+k.servers["others"].Stats().Aborted)
}

// urisRead are those of the access log.
func (s *site) urisRead() map[string]int {
	s.t.Helper()
	text, err := os.ReadFile(filepath.Join(s.dir, "data", "access.log"))
	require.NoError(s.t, err)
	out := map[string]int{}
	for line := range bytes.Lines(text) {
		var e entry
		require.NoError(s.t, json.Unmarshal(line, &e))
		out[e.Request.URI]++
	}
	return out
}
