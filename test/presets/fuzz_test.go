package presets_test

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

// `go test ./test/presets -run TestE2 -routes.time 10m -routes.seed 7` sends random requests for longer, or others.
var (
	fuzzTime = flag.Duration("routes.time", 50*time.Second, "for how long TestE2 sends random requests")
	fuzzSeed = flag.Uint64("routes.seed", 1, "what TestE2's requests are made from")
)

// fuzzed is a preset's server behind the site, and what it has.
type fuzzed struct {
	name   string
	routes []modelserver.Route
	front  *modelserver.Front
	server *modelserver.Server
}

// TestE2_RandomRequestsReachNothingThatTheyMust notices what random methods, paths, bodies and encodings, whole and half, do to a
// site with each preset before a server that matches paths as the real one does: nothing computes without a turn, nothing blocked is
// reached, no server is asked to compute while its model is not loaded, or by a body that never comes whole, and an upload that
// stalls delays no other consumer.
func TestE2_RandomRequestsReachNothingThatTheyMustNot(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("it takes a minute")
	}
	s := &site{Caddy: caddytest.New(t, t.TempDir()), t: t, url: "http://" + caddytest.FreeAddr(t)}
	s.Broker = s.url + "/gpu"
	all := fuzzSite(t, s)
	stalledUploads(t, s, all)

	var wg sync.WaitGroup
	tally := make([]fuzzTally, 4)
	end := time.Now().Add(*fuzzTime)
	for i := range tally {
		wg.Go(func() {
			c := &fuzzClient{addr: strings.TrimPrefix(s.url, "http://"), r: rand.New(rand.NewPCG(*fuzzSeed, uint64(i))), tally: &tally[i]}
			defer c.close()
			for n := 0; time.Now().Before(end); n++ {
				c.send(all[c.r.IntN(len(all))], fmt.Sprintf("%d-%d", i, n))
			}
		})
	}
	wg.Wait()
	var sum fuzzTally
	for _, one := range tally {
		sum.sent, sum.half, sum.answered, sum.turns = sum.sent+one.sent, sum.half+one.half, sum.answered+one.answered, sum.turns+one.turns
		assert.Empty(t, one.faults)
	}
	reached := map[string]int{}
	for _, f := range all {
		assert.Empty(t, f.front.Faults(), f.name)
		for _, kind := range []string{"", modelserver.KindFree, modelserver.KindTurn, modelserver.KindComputes} {
			reached[kind] += f.front.Count(kind)
		}
	}
	t.Logf("seed %d, %s: %d requests, %d of them half, %d answered, %d with a turn; reached: %d that compute, %d that may, %d free, %d unknown",
		*fuzzSeed, *fuzzTime, sum.sent, sum.half, sum.answered, sum.turns, reached[modelserver.KindComputes], reached[modelserver.KindTurn], reached[modelserver.KindFree], reached[""])
	require.Positive(t, reached[modelserver.KindComputes], "the requests are of some use")
	require.Positive(t, reached[modelserver.KindFree])
	s.Until("nothing runs or waits any more", func() bool {
		st := s.Status()
		return st.Scheduler.InFlight == 0 && st.Scheduler.QueueDepth == 0
	})
	for _, c := range s.Status().Consumers {
		assert.Zero(t, c.Active)
	}
}

// maxDelay bounds what a stalled upload may add to the time of another consumer's request.
const maxDelay = 200 * time.Millisecond

// stalledUploads begins an upload at each server in turn, which stalls, and asks another one meanwhile. A delay that comes from the
// upload comes each time; what comes from a busy machine does not.
func stalledUploads(t *testing.T, s *site, all []fuzzed) {
	t.Helper()
	r := rand.New(rand.NewPCG(*fuzzSeed, 99))
	addr := strings.TrimPrefix(s.url, "http://")
	ask := func(f fuzzed, route modelserver.Route) time.Duration {
		began := time.Now()
		req, err := http.NewRequest(route.Method, s.url+route.Path, strings.NewReader(`{"model":"`+two+`"}`))
		require.NoError(t, err)
		req.Header.Set("X-Site", f.name)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set(modelserver.FrontHeader, "beside a stalled upload")
		resp, err := s.Client.Do(req)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		return time.Since(began)
	}
	computes := func(f fuzzed) (list []modelserver.Route) {
		for _, route := range f.routes {
			if route.Kind == modelserver.KindComputes && route.Method == http.MethodPost && !strings.ContainsAny(route.Path, "*{<: ") {
				list = append(list, route)
			}
		}
		return list
	}
	tried := 0
	for i, f := range all {
		other := all[(i+1+r.IntN(len(all)-1))%len(all)]
		uploads, asked := computes(f), computes(other)
		if len(uploads) == 0 || len(asked) == 0 {
			continue
		}
		tried++
		upload, route := uploads[r.IntN(len(uploads))], asked[r.IntN(len(asked))]
		least := caddytest.Patience
		for range 3 {
			plain := ask(other, route) // and it is warm now
			conn, err := net.DialTimeout("tcp", addr, caddytest.Patience)
			require.NoError(t, err)
			size := []int{10, 1000, 60_000, 90_000, 2_000_000}[r.IntN(5)]
			length := []string{fmt.Sprintf("Content-Length: %d\r\n\r\n", size), fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n", size)}[r.IntN(2)]
			_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nX-Site: %s\r\nContent-Type: application/json\r\n%s: %sstalled\r\n%s{\"model\":", upload.Path, addr, f.name, modelserver.FrontHeader, modelserver.FrontHalf, length)
			require.NoError(t, err)
			time.Sleep(20 * time.Millisecond) // the site has its head by then
			least = min(least, ask(other, route)-plain)
			require.NoError(t, conn.Close())
			if least <= maxDelay {
				break
			}
		}
		assert.LessOrEqual(t, least, maxDelay, "%s %s stalls at %s, and delays %s of %s", upload.Method, upload.Path, f.name, route.Path, other.name)
	}
	require.Greater(t, tried, len(all)/2, "most presets have a route that computes")
}

// fuzzSite runs a Caddy with each preset. Half of the servers have two models by name, where they can. They are unloaded soon after use.
func fuzzSite(t *testing.T, s *site) (all []fuzzed) {
	t.Helper()
	var consumers, routes strings.Builder
	for _, name := range presets.Names() {
		k := preset(t, name)
		o := modelserver.Options{Name: name, Manner: modelserver.Manner(name), VRAM: gpu.GiB, AllowUnload: true, Quiet: true, Preloaded: k.routes.Remember,
			LoadTime: 2 * time.Millisecond, UnloadTime: time.Millisecond, RunTime: time.Millisecond}
		lines := ""
		if k.About.Models != "" {
			o.Models = map[string]gpu.Bytes{k.first(): gpu.GiB, two: gpu.GiB}
			lines = "model " + k.first() + " {\nvram 1GiB\n}\nmodel " + two + " {\nvram 1GiB\n}"
		}
		if k.About.NeedsName {
			lines += "\nmodel_name " + name
		}
		server := s.Pretend(o)
		table := fuzzRoutes(t, k)
		front, err := modelserver.NewFront(server, table, k.routes.Load != nil && name != "koboldcpp" && name != "chatterbox-tts-api")
		require.NoError(t, err)
		t.Cleanup(func() { _ = front.Close() })
		all = append(all, fuzzed{name, table, front, server})
		fmt.Fprintf(&consumers, "consumer %s {\npreset %s\nupstream %s\nvram 1GiB\nswitch_cost 1ms\nconcurrency 4\nidle_timeout 1s\nbudget 20s\n%s\n}\n", name, name, front.Addr(), lines)
		fmt.Fprintf(&routes, "@%s header X-Site %s\nhandle @%s {\ngpu_broker %s\nreverse_proxy {http.gpu_broker.upstream}\n}\n", name, name, name, name)
	}
	s.Run("Caddyfile", fmt.Sprintf("{\nadmin off\ngpu_broker {\ngpu simulated 80GiB {\ndir %s\n}\nhold 0\nevict_wait 100ms\noutsider_wait 100ms\nlock_overtake 0\nprobe_interval 500ms\nprobe_timeout 5s\n%s}\n}\n%s {\n%shandle /gpu/* {\ngpu_broker_status\n}\n}\n",
		s.Sim, consumers.String(), s.url, routes.String()))
	return all
}

// fuzzRoutes is what a preset's server has: its table, or what the preset itself names.
func fuzzRoutes(t *testing.T, k *known) []modelserver.Route {
	t.Helper()
	f, err := os.Open("../../lifecycle/presets/testdata/routes/" + k.Name + ".txt")
	if err == nil {
		defer f.Close()
		table, err := modelserver.ReadRoutes(f)
		require.NoError(t, err)
		return table
	}
	var out []modelserver.Route
	for kind, list := range map[string][]string{modelserver.KindComputes: k.consumer.GPURoutes, modelserver.KindBlocked: k.consumer.Blocked, modelserver.KindFree: k.consumer.FreeRoutes} {
		for _, text := range list {
			method, path, both := strings.Cut(text, " ")
			if !both {
				method, path = http.MethodPost, text
			}
			out = append(out, modelserver.Route{Method: method, Path: strings.Replace(path, "*", "x", 1), Kind: kind})
		}
	}
	return out
}

type fuzzTally struct {
	sent, half, answered, turns int
	faults                      []string
}

// fuzzClient sends requests over a connection of its own, byte by byte as it made them.
type fuzzClient struct {
	addr  string
	r     *rand.Rand
	tally *fuzzTally
	conn  net.Conn
	in    *bufio.Reader
}

func (c *fuzzClient) close() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

func (c *fuzzClient) one(of ...string) string { return of[c.r.IntN(len(of))] }

// send sends one request, and judges its answer.
func (c *fuzzClient) send(f fuzzed, id string) {
	if c.conn == nil {
		conn, err := net.DialTimeout("tcp", c.addr, caddytest.Patience)
		if err != nil {
			c.tally.faults = append(c.tally.faults, err.Error())
			return
		}
		c.conn, c.in = conn, bufio.NewReader(conn)
	}
	route := f.routes[c.r.IntN(len(f.routes))]
	method, target, headers := c.spell(route)
	body := c.body()
	half := c.r.IntN(20) == 0 && len(body) > 1 && !strings.Contains(headers, "Upgrade:")
	if half {
		id = modelserver.FrontHalf + id
	}
	text := fmt.Sprintf("%s %s HTTP/1.1\r\nHost: %s\r\nX-Site: %s\r\n%s: %s\r\n%s", method, target, c.addr, f.name, modelserver.FrontHeader, id, headers)
	switch chunked := c.r.IntN(4) == 0; {
	case strings.Contains(headers, "Upgrade:"):
		text += "\r\n"
	case chunked && half:
		text += fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s", len(body), body[:len(body)/2])
	case chunked:
		text += fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(body), body)
		if body == "" {
			text = strings.TrimSuffix(text, "0\r\n\r\n0\r\n\r\n") + "0\r\n\r\n"
		}
	case half:
		text += fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(body), body[:len(body)/2])
	default:
		text += fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(body), body)
	}
	c.tally.sent++
	_ = c.conn.SetDeadline(time.Now().Add(caddytest.Patience))
	if _, err := io.WriteString(c.conn, text); err != nil || half {
		if half {
			c.tally.half++
		}
		c.close()
		return
	}
	resp, err := http.ReadResponse(c.in, &http.Request{Method: strings.ToUpper(method)})
	if err != nil {
		c.close()
		return
	}
	_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20))
	c.tally.answered++
	turn := resp.Header.Get("X-Gpu-Broker-Consumer") != "" && resp.StatusCode < 400 || resp.Header.Get("Server-Timing") != ""
	if turn {
		c.tally.turns++
	}
	if kind := resp.Header.Get(modelserver.FrontKind); (kind == modelserver.KindComputes || kind == modelserver.KindTurn && !strings.HasPrefix(headers, "Connection: Upgrade")) && !turn && len(c.tally.faults) < 20 {
		c.tally.faults = append(c.tally.faults, fmt.Sprintf("%s: %s %s (%q) has reached what is %q without a turn", f.name, method, target, headers, kind))
	}
	if err != nil || resp.Close || resp.StatusCode == http.StatusSwitchingProtocols {
		c.close()
	}
}

// spell is a request line for a route, in one of many spellings, with headers.
func (c *fuzzClient) spell(route modelserver.Route) (method, target, headers string) {
	method, target = route.Method, route.Path
	if method == "WS" {
		method, headers = "GET", "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
	}
	for range c.r.IntN(3) {
		i := c.r.IntN(len(target) + 1)
		switch c.r.IntN(14) {
		case 0:
			target = strings.Replace(target, "/", "//", 1+c.r.IntN(2))
		case 1:
			target = c.one("/x", "/./", "/x/..", "/v1", "/a/b", "/%2e", "/api", "/lcpp") + target
		case 2:
			target += c.one("/", "//", "/.", "/..", "/x/..", ";x", "%20", "%00", "?", "?a=b", "/%2e%2e", "%2f", "%3f")
		case 3:
			if i < len(target) && target[i] != '/' && target[i] != '?' {
				target = target[:i] + fmt.Sprintf("%%%02x", target[i]) + target[i+1:]
			}
		case 4:
			target = strings.Replace(target, "/", c.one("/x/../", "/%2e/", "/y/%2e%2e/", "/./", "/;/"), 1)
		case 5:
			if last := strings.LastIndex(target, "/"); last > 0 {
				target = target[:last] + c.one("%2f", "%2F", "%5c", "%252f") + target[last+1:]
			}
		case 6:
			target = strings.ToUpper(target[:i]) + target[i:]
		case 7:
			method = c.one("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY", "BREW", strings.ToLower(method))
		case 8:
			target = "/api/blobs/.." + target
		case 9:
			target = "/x?y=" + target
		case 10:
			if !strings.Contains(target, "?") {
				target += "?model=" + c.one("one", "two", "none")
			}
		case 11:
			headers += "X-Forwarded-Prefix: " + c.one("/x", "/a", "/api", "/v1", "/api/auth") + "\r\n"
		case 12:
			headers += c.one("Content-Type: application/json\r\n", "Content-Type: multipart/form-data; boundary=b\r\n", "Accept: text/event-stream\r\n", "X-HTTP-Method-Override: POST\r\n")
		case 13:
			target = target[:i] + string(rune('!'+c.r.IntN(90))) + target[i:]
		}
	}
	if strings.ContainsAny(target, " \"<>^`{}|\\#") || !strings.HasPrefix(target, "/") {
		target = "/" + strings.Map(func(r rune) rune {
			if strings.ContainsRune(" \"<>^`{}|\\#", r) {
				return 'x'
			}
			return r
		}, strings.TrimLeft(target, "/"))
	}
	return method, target, headers
}

// body is what a request carries.
func (c *fuzzClient) body() string {
	switch c.r.IntN(8) {
	case 0:
		return ""
	case 1:
		return `{"model":"` + c.one("nope", "NOPE:latest", "../x", "*") + `"}`
	case 2:
		return c.one("{", "[]", "null", "\x1f\x8b\x08", `{"model":1}`, "--b\r\n", `{"model":"one","model":"two"}`)
	case 3:
		return strings.Repeat("x", c.r.IntN(100_000))
	default:
		return `{"model":"` + c.one(one, two, "one", "server") + `","messages":[]}`
	}
}
