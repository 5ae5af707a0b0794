// Package e2e drives the broker from end to end: a real Caddy process with the
// module, pretending model servers on a simulated GPU, and real HTTP clients.
package e2e

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

// patience bounds every wait of these tests: past it something hangs.
const patience = 30 * time.Second

// What all tests of a real Caddy share.
var (
	caddy     = caddytest.Binary
	freeAddr  = caddytest.FreeAddr
	portRange = caddytest.PortRange
)

func TestMain(m *testing.M) { caddytest.Exit(m.Run()) }

// consumer is one model server of a site.
type consumer struct {
	modelserver.Options        // Name, VRAM, times …; Manner decides on the lines below
	Lines               string // more lines of its consumer block; a "vram" line replaces the true one
	Route               string // more lines of its gpu_broker directive
	Proxy               string // lines instead of reverse_proxy {http.gpu_broker.upstream}
}

// layout is what a site is made of. In all lines UPSTREAM_OF_name stands for a server's address.
type layout struct {
	Total     string // of the simulated GPU; 16GiB
	GPU       string // the gpu line's block, one setting a line: `release_delay 800ms`
	Sampler   string // the gpu line, instead of one of a simulated GPU; {$SIM_DIR} stands for its folder
	NoGPU     bool   // no GPU is known at first
	Global    string // more lines of the global option gpu_broker
	Consumers []consumer
	Routes    string // more lines of the site
	Sites     string // more sites
	HTTPS     bool   // with Caddy's local CA; HTTP/2
}

// site is a running Caddy with its model servers.
type site struct {
	t       testing.TB
	url     string
	admin   string
	dir     string // of this site: config, data, log, simulated GPU
	sim     string
	cmd     *exec.Cmd
	servers map[string]*modelserver.Server
	client  *http.Client // HTTP/1.1, or HTTP/2 with HTTPS
	layout  layout
}

// start runs a site until the test ends.
func start(t testing.TB, l layout) *site {
	t.Helper()
	bin, err := caddy()
	require.NoError(t, err)
	s := &site{t: t, dir: t.TempDir(), servers: map[string]*modelserver.Server{}, layout: l}
	s.sim = filepath.Join(s.dir, "gpu")
	require.NoError(t, os.MkdirAll(s.sim, 0o755))
	total, err := gpu.ParseBytes(l.total())
	require.NoError(t, err)
	for _, c := range l.Consumers {
		o := c.Options
		o.SimDir, o.Total = s.sim, total
		srv, err := modelserver.Start(o)
		require.NoError(t, err)
		t.Cleanup(func() { _ = srv.Close() })
		s.servers[o.Name] = srv
	}
	s.admin = freeAddr(t)
	addr := freeAddr(t)
	scheme := "http"
	if l.HTTPS {
		scheme = "https"
	}
	_, port, _ := net.SplitHostPort(addr)
	s.url = scheme + "://localhost:" + port
	s.write(s.caddyfile(port))

	log, err := os.Create(filepath.Join(s.dir, "caddy.log"))
	require.NoError(t, err)
	defer log.Close()
	s.cmd = exec.Command(bin, "run", "--config", filepath.Join(s.dir, "Caddyfile"), "--adapter", "caddyfile")
	s.cmd.Env = append(os.Environ(), "HOME="+s.dir, "XDG_DATA_HOME="+filepath.Join(s.dir, "data"), "XDG_CONFIG_HOME="+filepath.Join(s.dir, "config"))
	s.cmd.Stdout, s.cmd.Stderr = log, log
	require.NoError(t, s.cmd.Start())
	t.Cleanup(s.stop)
	s.client = s.newClient()
	s.until("the site answers", func() bool {
		resp, err := s.client.Get(s.url + "/gpu/healthz")
		if err == nil {
			_ = resp.Body.Close()
		}
		return err == nil && resp.StatusCode == 200
	})
	s.until("the first probes and the first sample are in", func() bool {
		st := s.status()
		for _, c := range st.Consumers {
			if c.Enabled && c.Health == "unknown" {
				return false
			}
		}
		return len(st.GPUs) > 0 || l.NoGPU
	})
	return s
}

func (l layout) total() string {
	if l.Total == "" {
		return "16GiB"
	}
	return l.Total
}

// caddyfile writes the site's configuration. Times that real servers need are made short.
func (s *site) caddyfile(port string) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("{\nadmin %s\nlocal_certs\nskip_install_trust\nauto_https disable_redirects", s.admin)
	if line("gpu_broker {"); s.layout.Sampler != "" {
		line("%s", s.layout.Sampler)
	} else {
		line("gpu simulated %s {\ndir %s\n%s\n}", s.layout.total(), s.sim, s.layout.GPU)
	}
	for _, d := range []string{"hold 0", "probe_interval 500ms", "outsider_wait 2s"} {
		if word, _, _ := strings.Cut(d, " "); !strings.Contains(s.layout.Global, word+" ") {
			line("%s", d)
		}
	}
	line("%s", s.layout.Global)
	for _, c := range s.layout.Consumers {
		line("consumer %s {\nupstream %s", c.Name, s.servers[c.Name].Addr())
		if !strings.Contains(c.Lines, "vram ") {
			vram := c.VRAM
			for _, m := range c.Models {
				vram = max(vram, m)
			}
			line("vram %d", vram)
		}
		if !strings.Contains(c.Lines, "lifecycle_by_hand") {
			line("%s", manners[c.Manner])
		}
		line("%s\n}", strings.ReplaceAll(c.Lines, "lifecycle_by_hand", ""))
	}
	line("}\n}")
	if s.layout.HTTPS {
		line("https://localhost:%s {\ntls internal", port)
	} else {
		line("http://localhost:%s {", port)
	}
	for _, c := range s.layout.Consumers {
		proxy := c.Proxy
		if proxy == "" {
			proxy = "reverse_proxy {http.gpu_broker.upstream}"
		}
		line("handle_path /%s/* {\ngpu_broker %s {\n%s\n}\n%s\n}", c.Name, c.Name, c.Route, proxy)
	}
	line("%s\nhandle /gpu/* {\ngpu_broker_status\n}\n}\n%s", s.layout.Routes, s.layout.Sites)
	text := b.String()
	text = strings.ReplaceAll(text, "{$SIM_DIR}", s.sim)
	for name, srv := range s.servers {
		text = strings.ReplaceAll(text, "UPSTREAM_OF_"+name, srv.Addr())
	}
	return text
}

// manners are the lines that tell the broker how to treat a pretending server.
var manners = map[modelserver.Manner]string{
	"": `health /health {
		loaded $.loaded
		resident_mib $.gpu_resident_mib
	}
	load POST /api/admin/load
	unload POST /api/admin/unload`,
	modelserver.Plain: `health /health {
		loaded $.loaded
		resident_mib $.gpu_resident_mib
	}
	load POST /api/admin/load
	unload POST /api/admin/unload`,
	modelserver.Ollama:  "preset ollama",
	modelserver.ComfyUI: "preset comfyui",
}

func (s *site) write(caddyfile string) {
	require.NoError(s.t, os.WriteFile(filepath.Join(s.dir, "Caddyfile"), []byte(caddyfile), 0o644))
}

// newClient is a client with connections of its own. It trusts the site's CA.
func (s *site) newClient() *http.Client {
	tr := &http.Transport{MaxIdleConnsPerHost: 64}
	if s.layout.HTTPS {
		tr.TLSClientConfig = &tls.Config{RootCAs: caddytest.CA(s.t, s.dir)}
		tr.ForceAttemptHTTP2 = true
	}
	s.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 2 * patience}
}

func (s *site) stop() {
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	done := make(chan struct{})
	go func() { _ = s.cmd.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(patience):
		_ = s.cmd.Process.Kill()
		s.t.Errorf("caddy did not stop")
	}
	caddytest.CheckLog(s.t, filepath.Join(s.dir, "caddy.log"))
}

// overBothVersions runs a test over HTTP/1.1 and over HTTP/2.
func overBothVersions(t *testing.T, test func(t *testing.T, https bool)) {
	for name, https := range map[string]bool{"HTTP/1.1": false, "HTTP/2": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, https)
		})
	}
}

// until polls a condition that has no signal of its own.
func (s *site) until(what string, cond func() bool) {
	s.t.Helper()
	deadline := time.Now().Add(patience)
	for !cond() {
		if time.Now().After(deadline) {
			s.t.Fatalf("waited %s in vain until %s", patience, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// answer is what a request got.
type answer struct {
	status int
	header http.Header
	body   []byte
	err    error
	took   time.Duration
	at     time.Time // when the last byte was there
}

// code is the code of the broker's error document; empty: it is none.
func (a answer) code() string {
	doc, ok := refusalOf(a.body)
	if !ok {
		return ""
	}
	return doc.Code
}

// do sends a request to a path of the site and reads the whole answer.
func (s *site) do(ctx context.Context, method, path string, body io.Reader) answer {
	return s.doWith(s.client, ctx, method, path, body)
}

func (s *site) doWith(c *http.Client, ctx context.Context, method, path string, body io.Reader) answer {
	began := time.Now()
	req, err := http.NewRequestWithContext(ctx, method, s.url+path, body)
	require.NoError(s.t, err)
	resp, err := c.Do(req)
	if err != nil {
		return answer{err: err, took: time.Since(began), at: time.Now()}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return answer{status: resp.StatusCode, header: resp.Header, body: data, err: err, took: time.Since(began), at: time.Now()}
}

// get and post are do without a context.
func (s *site) get(path string) answer { return s.do(context.Background(), "GET", path, nil) }
func (s *site) post(path, body string) answer {
	return s.do(context.Background(), "POST", path, strings.NewReader(body))
}

// send sends a request in the background.
func (s *site) send(method, path, body string) <-chan answer {
	return s.goCtx(context.Background(), method, path, body)
}

func (s *site) goCtx(ctx context.Context, method, path, body string) <-chan answer {
	out := make(chan answer, 1)
	go func() { out <- s.do(ctx, method, path, strings.NewReader(body)) }()
	return out
}

// await takes an answer that must come.
func (s *site) await(ch <-chan answer) answer {
	s.t.Helper()
	select {
	case a := <-ch:
		return a
	case <-time.After(patience):
		s.t.Fatal("no answer")
		return answer{}
	}
}

// status is the broker's status, read through the site.
func (s *site) status() broker.Status {
	s.t.Helper()
	var st broker.Status
	s.json("/gpu/status", &st)
	return st
}

// nothingRuns waits until no job runs any more: a client has its answer a moment before its place is free.
func (s *site) nothingRuns() (st broker.Status) {
	s.t.Helper()
	s.until("nothing runs any more", func() bool {
		st = s.status()
		return st.Scheduler.InFlight == 0
	})
	return st
}

// decisions are those of a kind, oldest first; all if kind is empty.
func (s *site) decisions(kind string) (out []decision) {
	s.t.Helper()
	var doc struct{ Decisions []decision }
	s.json("/gpu/decisions", &doc)
	for _, d := range doc.Decisions {
		if kind == "" || d.Kind == kind {
			out = append(out, d)
		}
	}
	return out
}

type decision struct {
	At       time.Time
	Kind     string
	Consumer string
	Target   string
	Code     string
	Reason   string
}

func (s *site) json(path string, into any) {
	s.t.Helper()
	a := s.get(path)
	require.NoError(s.t, a.err)
	require.Equal(s.t, 200, a.status)
	require.NoError(s.t, json.Unmarshal(a.body, into))
}

// adminDo sends a request to the admin endpoint. Each load starts that anew: a connection made just then is reset or closed, and
// the request can be sent again. A load that was done all the same changes nothing the second time.
func (s *site) adminDo(method, path, contentType, body string) answer {
	s.t.Helper()
	for range 3 {
		if a := s.adminTry(method, path, contentType, body); !errors.Is(a.err, syscall.ECONNRESET) && !errors.Is(a.err, io.EOF) {
			require.NoError(s.t, a.err)
			return a
		}
	}
	s.t.Fatalf("%s %s: the admin endpoint closes every connection", method, path)
	return answer{}
}

func (s *site) adminTry(method, path, contentType, body string) answer {
	s.t.Helper()
	req, err := http.NewRequest(method, "http://"+s.admin+path, strings.NewReader(body))
	require.NoError(s.t, err)
	req.Close = true
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return answer{status: resp.StatusCode, header: resp.Header, body: data, err: err}
}

// reload gives Caddy its Caddyfile anew, changed by edit.
func (s *site) reload(edit func(caddyfile string) string) answer {
	s.t.Helper()
	old, err := os.ReadFile(filepath.Join(s.dir, "Caddyfile"))
	require.NoError(s.t, err)
	return s.adminDo("POST", "/load", "text/caddyfile", edit(string(old)))
}

// state is the state of a consumer's slot; empty while it has none.
func (s *site) state(name string) string {
	s.t.Helper()
	slots := s.status().Consumers[name].Slots
	if len(slots) == 0 {
		return ""
	}
	return slots[0].State
}

// waitState waits until a consumer's slot is in a state.
func (s *site) waitState(name, state string) {
	s.t.Helper()
	s.until(name+" is "+state, func() bool { return s.state(name) == state })
}

// waitQueued waits until so many requests wait for a consumer.
func (s *site) waitQueued(name string, n int) {
	s.t.Helper()
	s.until(fmt.Sprintf("%d requests wait for %s", n, name), func() bool { return s.status().Consumers[name].Waiting == n })
}

// outsider takes memory of the GPU as a program that is none of ours.
func (s *site) outsider(name string, amount gpu.Bytes) {
	s.t.Helper()
	h, err := simulated.NewOutsider(s.sim, name)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = h.Close() })
	require.NoError(s.t, h.Set(0, amount))
}

// gib makes amounts of memory readable.
func gib(n float64) gpu.Bytes { return gpu.Bytes(n * float64(gpu.GiB)) }
