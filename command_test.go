package gpubroker

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/gpu-broker/caddy-gpu-broker/simulate"
)

const simulatedSite = `{
	gpu_broker {
		gpu simulated 16GiB
		consumer chat {
			alias llama3:8b
			preset ollama
			upstream 127.0.0.1:11434
			vram 9GiB
			switch_cost 10s
		}
		consumer images {
			preset comfyui
			upstream 127.0.0.1:8188
			vram 13GiB
		}
	}
}
`

// command runs `caddy gpu-broker` with these arguments.
func command(t *testing.T, args ...string) (output string, err error) {
	t.Helper()
	cmd := &cobra.Command{Use: "gpu-broker"}
	caddycmd.Commands()["gpu-broker"].CobraFunc(cmd)
	var out bytes.Buffer
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&bytes.Buffer{})
	err = cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestSimulatePlaysTheRequestLogThroughTheCaddyfilesConsumers(t *testing.T) {
	site := file(t, "Caddyfile", simulatedSite)
	log := logEntry{at: time.Date(2026, 3, 1, 8, 0, 0, 0, time.UTC), consumer: "chat", service: 2 * time.Second, priority: 100, patience: -1}
	var rows bytes.Buffer
	for range 3 {
		f := logFile{}
		path := filepath.Join(t.TempDir(), "log.csv")
		log.path = path
		require.NoError(t, f.put(log))
		require.NoError(t, f.flush())
		f.close()
		doc, err := os.ReadFile(path)
		require.NoError(t, err)
		rows.Write(doc) // each with its header
		log.at = log.at.Add(100 * time.Second)
		log.consumer, log.service = "images", 3*time.Second
	}
	trace := file(t, "requests.csv", rows.String())

	out, err := command(t, "simulate", "--config", site, "--trace", trace, "--json", "--limit-time", "0", "--unload", "images=1s", "--load", "images=5s")
	require.NoError(t, err)
	var c simulate.Comparison
	require.NoError(t, json.Unmarshal([]byte(out), &c))
	assert.Equal(t, 3, c.Requests)
	assert.InDelta(t, 200, c.Seconds, 1e-9)
	require.Len(t, c.Results, 3)
	for _, r := range c.Results {
		assert.Equal(t, 3, r.All.Served, "%s", r.Policy)
		assert.Equal(t, 2, r.Loads, "%s", r.Policy)
		assert.InDelta(t, 9, r.All.Wait.Max, 1e-9, "%s: nine tenths of the switch cost", r.Policy)
		assert.InDelta(t, 5+9+1, r.All.Wait.Mean*3, 1e-9, "%s: an unload of a second, a load of five", r.Policy)
	}
}

func TestSimulateShowsThePoliciesSideBySide(t *testing.T) {
	site := file(t, "Caddyfile", simulatedSite)
	out, err := command(t, "simulate", "-c", site, "--rate", "llama3:8b=60:4", "--rate", "images=6:25", "--hours", "2")
	require.NoError(t, err)
	assert.Regexp(t, `(?m)^ +bounded +collate +fifo$`, out)
	assert.Contains(t, out, "chat 9GiB, loads in 9.00 s, unloads in 1.00 s; images 13GiB, loads in 18.0 s, unloads in 2.00 s")
	assert.Contains(t, out, "sustains, times the load")
	again, err := command(t, "simulate", "-c", site, "--rate", "llama3:8b=60:4", "--rate", "images=6:25", "--hours", "2")
	require.NoError(t, err)
	assert.Equal(t, out, again)

	out, err = command(t, "simulate", "--mix", "hot", "--u", ".5", "--policy", "collate", "--limit-time", "0")
	require.NoError(t, err)
	assert.Regexp(t, `(?m)^ +collate$`, out)
	assert.NotContains(t, out, "sustains")
}

func TestSimulateSaysWhatIsWrong(t *testing.T) {
	site := file(t, "Caddyfile", simulatedSite)
	trace := file(t, "requests.csv", "0,chatt,1\n0,chatt,1\n")
	none := file(t, "none.caddyfile", "localhost {\n}\n")
	for _, c := range []struct {
		want string
		args []string
	}{
		{"there are no requests to simulate", []string{"-c", site}},
		{"--trace and --rate are given", []string{"-c", site, "--trace", trace, "--rate", "chat=1:1"}},
		{"leave --config out", []string{"-c", site, "--mix", "hot"}},
		{`unknown policy "fif": did you mean fifo?`, []string{"--mix", "hot", "--policy", "fif"}},
		{`requests.csv holds no request of a consumer of this configuration: unknown consumer "chatt": did you mean chat?`, []string{"-c", site, "--trace", trace}},
		{"reading the trace", []string{"-c", site, "--trace", trace + ".not"}},
		{"reading the configuration", []string{"-c", site + ".not", "--trace", trace}},
		{"has no app gpu_broker", []string{"-c", none, "--trace", trace}},
		{"adapting", []string{"-c", file(t, "Caddyfile", "{\n\tgpu_broker {\n\t\tgpuu auto\n\t}\n}\n"), "--trace", trace}},
		{"invalid character", []string{"-c", file(t, "site.json", "apps"), "--trace", trace}},
		{`unknown field "chat"`, []string{"-c", file(t, "site.json", `{"apps":{"gpu_broker":{"chat":1}}}`), "--trace", trace}},
		{"consumer number 1: it has no name", []string{"-c", file(t, "site.json", `{"apps":{"gpu_broker":{"consumers":[{}]}}}`), "--trace", trace}},
		{`--rate "chat=1" is not of the form CONSUMER=PER_HOUR:SERVICE_SECONDS`, []string{"-c", site, "--rate", "chat=1"}},
		{`--rate: unknown consumer "x"`, []string{"-c", site, "--rate", "x=1:1"}},
		{`--load "chat" is not of the form CONSUMER=TIME`, []string{"-c", site, "--rate", "chat=1:1", "--load", "chat"}},
		{`--unload: unknown consumer "x"`, []string{"-c", site, "--rate", "chat=1:1", "--unload", "x=1s"}},
		{"--gpu: size", []string{"-c", site, "--rate", "chat=1:1", "--gpu", "big"}},
		{"a GPU without memory", []string{"-c", site, "--rate", "chat=1:1", "--gpu", "0"}},
		{"--speed is 0", []string{"-c", site, "--rate", "chat=1:1", "--speed", "0"}},
		{"--hours is -1", []string{"-c", site, "--rate", "chat=1:1", "--hours", "-1"}},
		{"--tries is 0", []string{"-c", site, "--rate", "chat=1:1", "--tries", "0"}},
		{"must not be negative", []string{"-c", site, "--rate", "chat=1:1", "--patience", "-1s"}},
		{"--retry-chance is 2", []string{"-c", site, "--rate", "chat=1:1", "--retry-chance", "2"}},
	} {
		_, err := command(t, append([]string{"simulate"}, c.args...)...)
		assert.ErrorContains(t, err, c.want, "%v", c.args)
	}
}
