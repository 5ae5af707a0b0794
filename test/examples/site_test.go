//go:build linux

// Package examples runs the examples with pretending servers in the place of the real ones.
package examples

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
	"go.uber.org/goleak"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// patience bounds every wait of these tests: past it something hangs.
const patience = 30 * time.Second

const folder = "../../examples"

// builtDir is the folder of what the tests have built.
var builtDir = filepath.Join(os.TempDir(), fmt.Sprintf("gpu-broker-examples-%d", os.Getpid()))

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(builtDir)
		os.Exit(code)
	}))
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

// site is an example that runs, on a simulated GPU.
type site struct {
	t       *testing.T
	total   gpu.Bytes
	dir     string
	sim     string
	url     string // of its site, without a slash at the end
	broker  string // where its status is
	env     map[string]string
	servers map[string]*modelserver.Server // those that the broker does not start
	cmd     *exec.Cmd
	client  *http.Client
}

// prepare makes what an example needs, on a card of total.
func prepare(t *testing.T, total gpu.Bytes) *site {
	s := &site{t: t, total: total, dir: t.TempDir(), servers: map[string]*modelserver.Server{}}
	s.sim = filepath.Join(s.dir, "gpu")
	require.NoError(t, os.Mkdir(s.sim, 0o755))
	addr := freeAddr(t)
	s.url = "http://" + addr
	s.broker = s.url + "/gpu"
	s.env = map[string]string{"ADMIN": freeAddr(t), "SITE": s.url, "GPU": fmt.Sprintf("simulated %d", total), "GPU_BROKER_SIM_DIR": s.sim,
		"HOME": s.dir, "XDG_DATA_HOME": filepath.Join(s.dir, "data"), "XDG_CONFIG_HOME": filepath.Join(s.dir, "config")}
	s.client = &http.Client{Transport: &http.Transport{}, Timeout: patience}
	t.Cleanup(s.client.CloseIdleConnections)
	return s
}

// serve starts a pretending server, whose address stands in a variable.
func (s *site) serve(variable string, o modelserver.Options) {
	s.t.Helper()
	o.SimDir, o.Total = s.sim, s.total
	o.LoadTime, o.UnloadTime, o.RunTime = 20*time.Millisecond, 10*time.Millisecond, 5*time.Millisecond
	server, err := modelserver.Start(o)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { require.NoError(s.t, server.Close()) })
	s.servers[o.Name] = server
	s.env[variable] = server.Addr()
}

// program makes a program for a variable: it takes the command line of the real server, of which the words wanted
// must be part, and becomes a pretending one. sizes are the names and sizes of its models, by a text in the command line.
func (s *site) program(variable, manner string, wanted []string, sizes map[string][2]string) {
	s.t.Helper()
	bin, err := pretender()
	require.NoError(s.t, err)
	var b strings.Builder
	b.WriteString("#!/bin/sh\nall=\" $* \"\n")
	for _, word := range wanted {
		fmt.Fprintf(&b, "case $all in *' %s '*) ;; *) echo 'without %s:' \"$*\" >&2; exit 2;; esac\n", word, word)
	}
	b.WriteString("case $all in\n")
	for text, is := range sizes {
		fmt.Fprintf(&b, "*%s*) name=%s vram=%s;;\n", text, is[0], is[1])
	}
	b.WriteString("*) echo 'no such model:' \"$*\" >&2; exit 2;;\nesac\n" +
		"while [ $# -gt 0 ]; do if [ \"$1\" = --port ]; then port=$2; fi; shift; done\n")
	fmt.Fprintf(&b, "exec %s -name $name -manner %s -preloaded=true -vram $vram -residue 512MiB -total %d -sim-dir %s -load 20ms -unload 10ms -run 5ms -addr 127.0.0.1:$port\n",
		bin, manner, s.total, s.sim)
	path := filepath.Join(s.dir, manner+"-server")
	require.NoError(s.t, os.WriteFile(path, []byte(b.String()), 0o700))
	s.env[variable] = path
}

// start runs an example until the test ends. Only the times for which the broker keeps idle models are left out.
func (s *site) start(example string) {
	s.t.Helper()
	s.run(s.adapted(example))
}

// run runs Caddy with what an example has become.
func (s *site) run(cfg object) {
	t := s.t
	t.Helper()
	bin, err := caddy()
	require.NoError(t, err)
	raw, err := json.Marshal(cfg)
	require.NoError(t, err)
	path := filepath.Join(s.dir, "caddy.json")
	require.NoError(t, os.WriteFile(path, raw, 0o600))

	log, err := os.Create(filepath.Join(s.dir, "caddy.log"))
	require.NoError(t, err)
	defer log.Close()
	s.cmd = exec.Command(bin, "run", "--config", path)
	s.cmd.Env = s.environ()
	s.cmd.Stdout, s.cmd.Stderr = log, log
	require.NoError(t, s.cmd.Start())
	t.Cleanup(s.stop)
	s.until("all servers were probed and the GPU is seen", func() bool {
		st, ok := s.look()
		for _, c := range st.Consumers {
			ok = ok && c.Health != "unknown"
		}
		return ok && len(st.GPUs) > 0
	})
}

// object is an object of JSON.
type object = map[string]any

// adapted is an example as JSON, in which idle models make way at once.
func (s *site) adapted(example string) (cfg object) {
	t := s.t
	t.Helper()
	bin, err := caddy()
	require.NoError(t, err)
	adapt := exec.Command(bin, "adapt", "--config", filepath.Join(folder, example, "Caddyfile"), "--adapter", "caddyfile")
	adapt.Env = s.environ()
	raw, err := adapt.Output()
	require.NoError(t, err, example)
	require.NoError(t, json.Unmarshal(raw, &cfg))
	app := cfg["apps"].(object)["gpu_broker"].(object)
	app["hold"], app["probe_interval"] = 0, "200ms"
	for _, c := range app["consumers"].([]any) {
		delete(c.(object), "keep_alive")
	}
	return cfg
}

func (s *site) environ() []string {
	env := os.Environ()
	for name, value := range s.env {
		env = append(env, name+"="+value)
	}
	return env
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
		if bytes.Contains(log, []byte(bad)) {
			s.t.Errorf("caddy's log says %s", bad)
		}
	}
	if s.t.Failed() {
		s.t.Logf("caddy's log:\n%s", log[max(0, len(log)-20_000):])
	}
	entries, err := os.ReadDir("/proc")
	require.NoError(s.t, err)
	for _, e := range entries {
		line, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline") // of those that are no processes, and have just ended, there is none
		if bytes.Contains(line, []byte(s.sim)) {
			s.t.Errorf("a server outlives Caddy: %s", bytes.ReplaceAll(line, []byte{0}, []byte{' '}))
		}
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

func (s *site) look() (st broker.Status, ok bool) {
	resp, err := s.client.Get(s.broker + "/status")
	if err != nil {
		return st, false
	}
	defer resp.Body.Close()
	return st, json.NewDecoder(resp.Body).Decode(&st) == nil
}

func (s *site) status() broker.Status {
	s.t.Helper()
	st, ok := s.look()
	require.True(s.t, ok, "there is no status")
	return st
}

// ask sends a request to a URL and requires that a consumer serves it.
func (s *site) ask(consumer, url, kind, body string) {
	s.t.Helper()
	resp, err := s.client.Post(url, kind, strings.NewReader(body))
	require.NoError(s.t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(s.t, err)
	require.Equal(s.t, http.StatusOK, resp.StatusCode, "%s of %s: %.500s", url, consumer, text)
	require.Equal(s.t, consumer, resp.Header.Get("X-Gpu-Broker-Consumer"), url)
}

// json is ask with a body of JSON, for a path of the site.
func (s *site) json(consumer, path, body string) {
	s.t.Helper()
	s.ask(consumer, s.url+path, "application/json", body)
}

// well requires that the broker has never failed to load or unload, has refused nobody, and that nothing ran out of memory.
func (s *site) well() {
	s.t.Helper()
	resp, err := s.client.Get(s.broker + "/decisions")
	require.NoError(s.t, err)
	defer resp.Body.Close()
	var doc struct {
		Decisions []struct{ Kind, Consumer, Reason string }
	}
	require.NoError(s.t, json.NewDecoder(resp.Body).Decode(&doc))
	require.NotEmpty(s.t, doc.Decisions)
	for _, d := range doc.Decisions {
		require.NotContains(s.t, []string{"load_failed", "unload_failed", "unhealthy", "refuse", "busy_unknown", "reopen"}, d.Kind, "%s: %s", d.Consumer, d.Reason)
		require.NotContains(s.t, d.Reason, "died", d.Consumer)
	}
	for name, server := range s.servers {
		require.Zero(s.t, server.Stats().OOMs, name)
	}
}

// ports are handed out once, and from below those that the system gives to sockets by itself.
var ports atomic.Int64

func freeAddr(t *testing.T) string {
	t.Helper()
	const first, count = 10_000, 20_000
	for range count {
		addr := fmt.Sprintf("127.0.0.1:%d", first+int(int64(os.Getpid())*59+ports.Add(1))%count)
		if l, err := net.Listen("tcp", addr); err == nil {
			require.NoError(t, l.Close())
			return addr
		}
	}
	t.Fatal("no free port")
	return ""
}
