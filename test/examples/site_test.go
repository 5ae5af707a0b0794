//go:build linux

// Package examples runs the examples with pretending servers in the place of the real ones.
package examples

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

const folder = "../../examples"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, goleak.Cleanup(caddytest.Exit)) }

// site is an example that runs, on a simulated GPU.
type site struct {
	*caddytest.Caddy
	t       *testing.T
	total   gpu.Bytes
	url     string // of its site, without a slash at the end
	admin   string
	servers map[string]*modelserver.Server // those that the broker does not start
}

// prepare makes what an example needs, on a card of total.
func prepare(t *testing.T, total gpu.Bytes) *site {
	s := &site{Caddy: caddytest.New(t, t.TempDir()), t: t, total: total, url: "http://" + caddytest.FreeAddr(t), admin: caddytest.FreeAddr(t), servers: map[string]*modelserver.Server{}}
	s.Broker = s.url + "/gpu"
	s.Env = []string{"ADMIN=" + s.admin, "SITE=" + s.url, fmt.Sprintf("GPU=simulated %d", total), "GPU_BROKER_SIM_DIR=" + s.Sim}
	return s
}

// serve starts a pretending server, whose address stands in a variable.
func (s *site) serve(variable string, o modelserver.Options) {
	s.t.Helper()
	o.Total, o.LoadTime, o.UnloadTime, o.RunTime = s.total, 20*time.Millisecond, 10*time.Millisecond, 5*time.Millisecond
	s.servers[o.Name] = s.Pretend(o)
	s.Env = append(s.Env, variable+"="+s.servers[o.Name].Addr())
}

// program makes a program for a variable: it takes the command line of the real server, of which the words wanted
// must be part, and becomes a pretending one. sizes are the names and sizes of its models, by a text in the command line.
func (s *site) program(variable, manner string, wanted []string, sizes map[string][2]string) {
	s.t.Helper()
	bin, err := caddytest.Modelserver()
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
		bin, manner, s.total, s.Sim)
	path := filepath.Join(s.Dir, manner+"-server")
	require.NoError(s.t, os.WriteFile(path, []byte(b.String()), 0o700))
	s.Env = append(s.Env, variable+"="+path)
}

// start runs an example until the test ends. Only the times for which the broker keeps idle models are left out.
func (s *site) start(example string) {
	s.t.Helper()
	s.run(s.adapted(example))
}

// run runs Caddy with what an example has become.
func (s *site) run(cfg object) {
	s.t.Helper()
	raw, err := json.Marshal(cfg)
	require.NoError(s.t, err)
	s.t.Cleanup(s.nothingOutlives)
	s.Run("caddy.json", string(raw))
}

// object is an object of JSON.
type object = map[string]any

// adapted is an example as JSON, in which idle models make way at once.
func (s *site) adapted(example string) (cfg object) {
	t := s.t
	t.Helper()
	raw, err := s.Command("adapt", "--config", filepath.Join(folder, example, "Caddyfile")).Output()
	require.NoError(t, err, example)
	require.NoError(t, json.Unmarshal(raw, &cfg))
	app := cfg["apps"].(object)["gpu_broker"].(object)
	app["hold"], app["probe_interval"] = 0, "200ms"
	for _, c := range app["consumers"].([]any) {
		delete(c.(object), "keep_alive")
	}
	return cfg
}

// nothingOutlives looks, when Caddy has ended, for the servers that it started.
func (s *site) nothingOutlives() {
	entries, err := os.ReadDir("/proc")
	require.NoError(s.t, err)
	for _, e := range entries {
		line, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline") // of those that are no processes, and have just ended, there is none
		if bytes.Contains(line, []byte(s.Sim)) {
			s.t.Errorf("a server outlives Caddy: %s", bytes.ReplaceAll(line, []byte{0}, []byte{' '}))
		}
	}
}

// ask sends a request to a URL and requires that a consumer serves it.
func (s *site) ask(consumer, url, kind, body string) {
	s.t.Helper()
	resp, err := s.Client.Post(url, kind, strings.NewReader(body))
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
	resp, err := s.Client.Get(s.Broker + "/decisions")
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
