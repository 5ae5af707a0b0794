package presets_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// patience bounds every wait of these tests: past it something hangs.
const patience = 30 * time.Second

// builtDir is the folder of what the tests have built.
var builtDir = filepath.Join(os.TempDir(), fmt.Sprintf("gpu-broker-presets-%d", os.Getpid()))

func TestMain(m *testing.M) {
	code := m.Run()
	_ = os.RemoveAll(builtDir)
	os.Exit(code)
}

func built(name string) (string, error) {
	path := filepath.Join(builtDir, name)
	out, err := exec.Command("go", "build", "-o", path, "github.com/gpu-broker/caddy-gpu-broker/cmd/"+name).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("building %s: %w\n%s", name, err, out)
	}
	return path, nil
}

// caddy builds the binary once for all tests; $GPU_BROKER_CADDY names one that is built already.
var caddy = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("GPU_BROKER_CADDY"); path != "" {
		return path, nil
	}
	return built("caddy")
})

// pretender builds the pretending server, as a program that the broker can start.
var pretender = sync.OnceValues(func() (string, error) { return built("modelserver") })

// The card holds one of its two consumers' models, and no second.
const (
	card  = 10 * gpu.GiB
	model = 6 * gpu.GiB
	rest  = 512 * gpu.MiB // stays of a server while its process lives
)

// layout is what a site is made of.
type layout struct {
	options modelserver.Options // of the server; its name is server
	lines   string              // of its consumer's block
	global  string              // more lines of the global option
	process bool                // the broker starts it
}

// site is a running Caddy with a server and its rival for the card.
type site struct {
	t      *testing.T
	url    string
	dir    string
	sim    string
	cmd    *exec.Cmd
	server *modelserver.Server // nil if the broker starts it
	rival  *modelserver.Server
	client *http.Client
}

// start runs a site until the test ends.
func start(t *testing.T, l layout) *site {
	t.Helper()
	bin, err := caddy()
	require.NoError(t, err)
	s := &site{t: t, dir: t.TempDir()}
	s.sim = filepath.Join(s.dir, "gpu")
	require.NoError(t, os.Mkdir(s.sim, 0o755))

	run := func(o modelserver.Options) *modelserver.Server {
		o.SimDir, o.Total = s.sim, card
		o.LoadTime, o.UnloadTime, o.RunTime = 20*time.Millisecond, 10*time.Millisecond, 5*time.Millisecond
		server, err := modelserver.Start(o)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, server.Close()) })
		return server
	}
	s.rival = run(modelserver.Options{Name: "rival", VRAM: model})
	lines := l.lines
	if l.process {
		lines += s.process(l.options)
	} else {
		l.options.Name = "server"
		s.server = run(l.options)
		lines += "\nupstream " + s.server.Addr()
	}
	port := fmt.Sprint(freePort(t))
	text := fmt.Sprintf(`{
	admin off
	gpu_broker {
		gpu simulated %d {
			dir %s
		}
		%s
		consumer server {
			%s
		}
		consumer rival {
			upstream %s
			vram %d
			health /health {
				loaded $.loaded
			}
			load POST /api/admin/load
			unload POST /api/admin/unload
		}
	}
}
http://127.0.0.1:%s {
	handle_path /server/* {
		gpu_broker server
		reverse_proxy {http.gpu_broker.upstream}
	}
	handle_path /rival/* {
		gpu_broker rival
		reverse_proxy {http.gpu_broker.upstream}
	}
	handle /gpu/* {
		gpu_broker_status
	}
}
`, card, s.sim, settings(l.global), lines, s.rival.Addr(), model, port)
	require.NoError(t, os.WriteFile(filepath.Join(s.dir, "Caddyfile"), []byte(text), 0o600))
	s.url = "http://127.0.0.1:" + port

	log, err := os.Create(filepath.Join(s.dir, "caddy.log"))
	require.NoError(t, err)
	defer log.Close()
	s.cmd = exec.Command(bin, "run", "--config", filepath.Join(s.dir, "Caddyfile"), "--adapter", "caddyfile")
	s.cmd.Env = append(os.Environ(), "HOME="+s.dir, "XDG_DATA_HOME="+filepath.Join(s.dir, "data"), "XDG_CONFIG_HOME="+filepath.Join(s.dir, "config"))
	s.cmd.Stdout, s.cmd.Stderr = log, log
	require.NoError(t, s.cmd.Start())
	t.Cleanup(s.stop)
	s.client = &http.Client{Transport: &http.Transport{}, Timeout: patience}
	t.Cleanup(s.client.CloseIdleConnections)
	s.until("both servers were probed and the GPU is seen", func() bool {
		resp, err := s.client.Get(s.url + "/gpu/status")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		var st broker.Status
		if json.NewDecoder(resp.Body).Decode(&st) != nil || len(st.GPUs) == 0 {
			return false
		}
		for _, c := range st.Consumers {
			if c.Health == "unknown" {
				return false
			}
		}
		return true
	})
	return s
}

// settings are the site's, with times that real servers need made short, unless a test wants them otherwise.
func settings(own string) string {
	lines := []string{own}
	for _, line := range []string{"hold 0", "overtake 0", "overtake_min 0", "probe_interval 100ms", "probe_timeout 5s", "outsider_wait 5s"} {
		if word, _, _ := strings.Cut(line, " "); !strings.Contains(own, word+" ") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "\n")
}

// process is the line by which the broker starts the server.
func (s *site) process(o modelserver.Options) string {
	bin, err := pretender()
	require.NoError(s.t, err)
	return fmt.Sprintf("\nprocess %s -name server -manner %s -vram %d -addr 127.0.0.1:{gpu_broker.port} -sim-dir %s -total %d -load 20ms -unload 10ms -run 5ms {\nports %s\ngrace 2s\n}",
		bin, o.Manner, model, s.sim, card, portRange(s.t))
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
	log, _ := os.ReadFile(filepath.Join(s.dir, "caddy.log"))
	for _, bad := range []string{"panic:", `"msg":"bug"`, "DATA RACE"} {
		if at := bytes.Index(log, []byte(bad)); at >= 0 {
			s.t.Errorf("caddy's log says %s:\n%s", bad, log[at:min(len(log), at+8000)])
		}
	}
	if s.t.Failed() {
		var ours []string
		for line := range strings.Lines(string(log)) {
			if strings.Contains(line, "gpu_broker") || !strings.Contains(line, `"level":"info"`) {
				ours = append(ours, line)
			}
		}
		s.t.Logf("caddy's log:\n%s", strings.Join(ours[max(0, len(ours)-60):], ""))
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
	body   []byte
	err    error
}

// to sends a request to a consumer, or, as somebody would who gets past the broker, to base.
func (s *site) to(base string, a ask) answer {
	req, err := http.NewRequest(a.method, base+a.path, strings.NewReader(a.body))
	if err != nil {
		return answer{err: err}
	}
	if a.body != "" {
		req.Header.Set("Content-Type", a.kind)
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, body, err}
}

func (s *site) ask(a ask) answer { return s.to(s.url+"/server", a) }

// send is to in the background.
func (s *site) send(base string, a ask) <-chan answer {
	out := make(chan answer, 1)
	go func() { out <- s.to(base, a) }()
	return out
}

func (s *site) sendRival() <-chan answer { return s.send(s.url+"/rival", synthesize) }

var synthesize = ask{"POST", "/synthesize", "text/plain", "hello"}

// await takes an answer that must come, and be good.
func (s *site) await(what string, ch <-chan answer) answer {
	s.t.Helper()
	select {
	case a := <-ch:
		a.good(s.t, what)
		return a
	case <-time.After(patience):
		s.t.Fatalf("%s: no answer", what)
		return answer{}
	}
}

// good requires an answer of a server, whole.
func (a answer) good(t *testing.T, what string) {
	t.Helper()
	require.NoError(t, a.err, what)
	require.Contains(t, []int{200, 201, 202}, a.status, "%s: %.500s", what, a.body)
}

func (s *site) status() (st broker.Status) {
	s.t.Helper()
	a := s.to(s.url, ask{method: "GET", path: "/gpu/status"})
	require.NoError(s.t, a.err)
	require.NoError(s.t, json.Unmarshal(a.body, &st))
	return st
}

// slot is the slot of the server, or of one of its models.
func (s *site) slot(model string) broker.Slot {
	s.t.Helper()
	for _, slot := range s.status().Consumers["server"].Slots {
		if slot.Model == model {
			return slot
		}
	}
	s.t.Fatalf("there is no slot of %q", model)
	return broker.Slot{}
}

// failures are the decisions that say that something did not go as it should.
func (s *site) failures() (found []string) {
	s.t.Helper()
	var doc struct {
		Decisions []struct{ Kind, Consumer, Code, Reason string }
	}
	a := s.to(s.url, ask{method: "GET", path: "/gpu/decisions"})
	require.NoError(s.t, a.err)
	require.NoError(s.t, json.Unmarshal(a.body, &doc))
	for _, d := range doc.Decisions {
		switch d.Kind {
		case "unload_failed", "load_failed", "unhealthy", "refuse", "busy_unknown", "reopen":
			found = append(found, fmt.Sprintf("%s of %s: %s %s", d.Kind, d.Consumer, d.Code, d.Reason))
		}
	}
	return found
}

// ports are handed out once, and from below those that the system gives to sockets by itself.
var ports atomic.Int64

func freePort(t *testing.T) int {
	const first, count = 10_000, 20_000
	for range count {
		port := first + int(int64(os.Getpid())*53+ports.Add(1))%count
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			require.NoError(t, l.Close())
			return port
		}
	}
	t.Fatal("no free port")
	return 0
}

// portRange is a range of two ports that no other test of this process has.
func portRange(t *testing.T) string {
	for {
		if first, second := freePort(t), freePort(t); second == first+1 {
			return fmt.Sprintf("%d-%d", first, second)
		}
	}
}
