package clients

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
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
const patience = 60 * time.Second

// example is the configuration that the clients are to work with.
const example = "../../examples/one-url/Caddyfile"

// site is the example with pretending servers behind it.
type site struct {
	t       *testing.T
	url     string
	dir     string
	cmd     *exec.Cmd
	servers map[string]*modelserver.Server
	client  *http.Client
}

// settings is what a test wants to be otherwise than usual.
type settings struct {
	card    gpu.Bytes                               // 16 GiB if 0
	servers map[string]func(o *modelserver.Options) // by consumer
	edits   map[string]string                       // of the example: what stands there once, and what is to stand there
}

// builtDir is the folder of the Caddy that the tests have built.
var builtDir = filepath.Join(os.TempDir(), fmt.Sprintf("gpu-broker-clients-%d", os.Getpid()))

// caddy builds the binary once for all tests; $GPU_BROKER_CADDY names one that is built already.
var caddy = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("GPU_BROKER_CADDY"); path != "" {
		return path, nil
	}
	path := filepath.Join(builtDir, "caddy")
	out, err := exec.Command("go", "build", "-o", path, "github.com/gpu-broker/caddy-gpu-broker/cmd/caddy").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("building caddy: %w\n%s", err, out)
	}
	return path, nil
})

// modules installs the clients' packages, if they are not cached, and gives their node_modules.
var modules = sync.OnceValues(func() (string, error) {
	var said strings.Builder
	cmd := exec.Command("./setup.sh")
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("setup.sh: %w\n%s", err, said.String())
	}
	return strings.TrimSpace(string(out)), nil
})

// start runs the example until the test ends.
func start(t *testing.T, set settings) *site {
	t.Helper()
	bin, err := caddy()
	require.NoError(t, err)
	s := &site{t: t, dir: t.TempDir(), servers: map[string]*modelserver.Server{}}
	sim := filepath.Join(s.dir, "gpu")
	require.NoError(t, os.Mkdir(sim, 0o755))
	if set.card == 0 {
		set.card = 16 * gpu.GiB
	}
	data := filepath.Join(s.dir, "data")
	s.url = "https://" + freeAddr(t)
	env := append(os.Environ(), "SITE="+s.url, "ADMIN="+freeAddr(t), fmt.Sprintf("GPU=simulated %d", set.card),
		"GPU_BROKER_SIM_DIR="+sim, "HOME="+s.dir, "XDG_DATA_HOME="+data, "XDG_CONFIG_HOME="+filepath.Join(s.dir, "config"))
	for _, o := range []modelserver.Options{
		{Name: "llm", VRAM: 10 * gpu.GiB},
		{Name: "ollama", Manner: modelserver.Ollama, Models: map[string]gpu.Bytes{"llama3.2": 2 * gpu.GiB, "qwen2.5:7b": 3 * gpu.GiB, "nomic-embed-text": gpu.GiB}},
		{Name: "whisper", VRAM: 2560 * gpu.MiB},
		{Name: "sdxl", VRAM: 12 * gpu.GiB},
	} {
		o.SimDir, o.Total = sim, set.card
		o.LoadTime, o.UnloadTime, o.RunTime = 100*time.Millisecond, 20*time.Millisecond, 10*time.Millisecond
		if change := set.servers[o.Name]; change != nil {
			change(&o)
		}
		server, err := modelserver.Start(o)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, server.Close()) })
		s.servers[o.Name] = server
		env = append(env, strings.ToUpper(o.Name)+"="+server.Addr())
	}

	config := filepath.Join(s.dir, "Caddyfile")
	require.NoError(t, os.WriteFile(config, []byte(edited(t, set.edits)), 0o644))
	log, err := os.Create(filepath.Join(s.dir, "caddy.log"))
	require.NoError(t, err)
	defer log.Close()
	s.cmd = exec.Command(bin, "run", "--config", config, "--adapter", "caddyfile")
	s.cmd.Env = env
	s.cmd.Stdout, s.cmd.Stderr = log, log
	require.NoError(t, s.cmd.Start())
	t.Cleanup(s.stop)

	pool := x509.NewCertPool()
	s.until("Caddy has made its local CA", func() bool {
		pem, err := os.ReadFile(s.ca())
		return err == nil && pool.AppendCertsFromPEM(pem)
	})
	s.client = &http.Client{Timeout: patience, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	t.Cleanup(s.client.CloseIdleConnections)
	s.until("every server was probed and the GPU is seen", func() bool {
		status, err := s.status()
		if err != nil || len(status.GPUs) == 0 {
			return false
		}
		for _, c := range status.Consumers {
			if c.Health == "unknown" {
				return false
			}
		}
		return true
	})
	return s
}

// edited is the example with the times that real servers need made short, and a test's own edits.
func edited(t *testing.T, edits map[string]string) string {
	t.Helper()
	raw, err := os.ReadFile(example)
	require.NoError(t, err)
	text := string(raw)
	replace := func(old, by string) {
		require.Equal(t, 1, strings.Count(text, old), "%q in %s", old, example)
		text = strings.Replace(text, old, by, 1)
	}
	replace("\tgpu_broker {\n\t\t# nvml", "\tgpu_broker {\nhold 0\nprobe_interval 500ms\noutsider_wait 2s\n\t\t# nvml")
	for old, by := range edits {
		replace(old, by)
	}
	return text
}

// ca is the certificate of Caddy's local authority.
func (s *site) ca() string {
	return filepath.Join(s.dir, "data", "caddy", "pki", "authorities", "local", "root.crt")
}

// node runs one of the scripts against the site, to its end.
func (s *site) node(script string) {
	s.t.Helper()
	installed, err := modules()
	require.NoError(s.t, err)
	// Node looks for packages beside the script.
	dir := s.t.TempDir()
	require.NoError(s.t, os.CopyFS(dir, os.DirFS("scripts")))
	require.NoError(s.t, os.Symlink(installed, filepath.Join(dir, "node_modules")))
	cmd := exec.CommandContext(s.t.Context(), "node", "--test-reporter=spec", filepath.Join(dir, script))
	cmd.Env = append(os.Environ(), "SITE="+s.url, "NODE_EXTRA_CA_CERTS="+s.ca())
	out, err := cmd.CombinedOutput()
	require.NoError(s.t, err, "node %s\n%s", script, out)
	s.t.Logf("node %s\n%s", script, out)
}

func (s *site) status() (broker.Status, error) {
	var status broker.Status
	response, err := s.client.Get(s.url + "/gpu/status")
	if err != nil {
		return status, err
	}
	defer response.Body.Close()
	return status, json.NewDecoder(response.Body).Decode(&status)
}

// until polls a condition that has no signal of its own.
func (s *site) until(what string, cond func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(patience); !cond(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatalf("waited %s in vain until %s", patience, what)
		}
	}
}

// stop ends Caddy in good order; its log is shown if the test has failed.
func (s *site) stop() {
	_ = s.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
	ended := make(chan struct{})
	go func() { _ = s.cmd.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(patience):
		_ = s.cmd.Process.Kill()
		<-ended
		s.t.Error("caddy did not stop")
	}
	log, err := os.ReadFile(filepath.Join(s.dir, "caddy.log"))
	require.NoError(s.t, err)
	for _, bad := range []string{"panic:", `"msg":"bug"`} {
		require.NotContains(s.t, string(log), bad)
	}
	if s.t.Failed() {
		s.t.Logf("the end of caddy's log:\n%s", log[max(0, len(log)-20_000):])
	}
}

// ports are handed out once, from below those that the system gives to sockets
// by itself and beside those of the other end-to-end tests: Caddy shares a port with whoever else has it.
var ports atomic.Int64

func freeAddr(t *testing.T) string {
	const first, count = 30_000, 2_700
	for range count {
		addr := fmt.Sprintf("localhost:%d", first+(int64(os.Getpid())*37+ports.Add(1))%count)
		if l, err := net.Listen("tcp", addr); err == nil {
			require.NoError(t, l.Close())
			return addr
		}
	}
	t.Fatal("no free port")
	return ""
}
