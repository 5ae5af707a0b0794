package clients

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
	"github.com/gpu-broker/caddy-gpu-broker/test/scripts"
)

// example is the configuration that the clients are to work with.
const example = "../../examples/one-url/Caddyfile"

// site is the example with pretending servers behind it.
type site struct {
	*caddytest.Caddy
	t       *testing.T
	card    gpu.Bytes
	url     string
	admin   string
	servers map[string]*modelserver.Server
}

// settings is what a test wants to be otherwise than usual.
type settings struct {
	card    gpu.Bytes                               // 16 GiB if 0
	servers map[string]func(o *modelserver.Options) // by consumer
	edits   map[string]string                       // of the example: what stands there once, and what is to stand there
}

// start runs the example until the test ends.
func start(t *testing.T, set settings) *site {
	t.Helper()
	if set.card == 0 {
		set.card = 16 * gpu.GiB
	}
	s := newSite(t, set.card)
	for _, o := range []modelserver.Options{
		{Name: "llm", VRAM: 10 * gpu.GiB},
		{Name: "ollama", Manner: modelserver.Ollama, Models: map[string]gpu.Bytes{"llama3.2": 2 * gpu.GiB, "qwen2.5:7b": 3 * gpu.GiB, "nomic-embed-text": gpu.GiB}},
		{Name: "whisper", VRAM: 2560 * gpu.MiB},
		{Name: "sdxl", VRAM: 12 * gpu.GiB},
	} {
		if change := set.servers[o.Name]; change != nil {
			change(&o)
		}
		s.serve(o)
		s.Env = append(s.Env, strings.ToUpper(o.Name)+"="+s.servers[o.Name].Addr())
	}
	s.Run("Caddyfile", edited(t, set.edits))
	return s
}

// newSite prepares a site with a card and no servers.
func newSite(t *testing.T, card gpu.Bytes) *site {
	t.Helper()
	s := &site{Caddy: caddytest.New(t, t.TempDir()), t: t, card: card, servers: map[string]*modelserver.Server{}, admin: caddytest.FreeAddr(t)}
	s.url = fmt.Sprintf("https://localhost:%d", caddytest.FreePort(t))
	s.Broker = s.url + "/gpu"
	s.Env = []string{"SITE=" + s.url, "ADMIN=" + s.admin, fmt.Sprintf("GPU=simulated %d", card), "GPU_BROKER_SIM_DIR=" + s.Sim}
	return s
}

// serve runs a pretending server on the card, with times that are short unless they are set.
func (s *site) serve(o modelserver.Options) *modelserver.Server {
	s.t.Helper()
	o.Total = s.card
	o.LoadTime = cmp.Or(o.LoadTime, 100*time.Millisecond)
	o.UnloadTime, o.RunTime = 20*time.Millisecond, 10*time.Millisecond
	s.servers[o.Name] = s.Pretend(o)
	return s.servers[o.Name]
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

// node runs one of the scripts against the site, to its end.
func (s *site) node(script string) {
	s.t.Helper()
	// Node looks for packages beside the script.
	dir := s.t.TempDir()
	require.NoError(s.t, os.CopyFS(dir, os.DirFS("scripts")))
	require.NoError(s.t, os.Symlink(scripts.Run(s.t, "test/clients/setup.sh"), filepath.Join(dir, "node_modules")))
	cmd := exec.CommandContext(s.t.Context(), "node", "--test-reporter=spec", filepath.Join(dir, script))
	cmd.Env = append(os.Environ(), "SITE="+s.url, "ADMIN=http://"+s.admin, "NODE_EXTRA_CA_CERTS="+caddytest.CAFile(s.Dir))
	out, err := cmd.CombinedOutput()
	require.NoError(s.t, err, "node %s\n%s", script, out)
	s.t.Logf("node %s\n%s", script, out)
}
