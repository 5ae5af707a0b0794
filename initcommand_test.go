package gpubroker

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/doctor"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

// written is the Caddyfile of a discovery, which can be used as it is.
func written(t *testing.T, d *doctor.Discovery, address string) string {
	t.Helper()
	text := d.Caddyfile(address, func(block string) error {
		return checkCaddyfile(t.Context(), "{\ngpu_broker {\n"+block+"\n}\n}\n")
	})
	assert.Equal(t, string(caddyfile.Format([]byte(text))), text, "caddy fmt would change it")
	require.NoError(t, checkCaddyfile(t.Context(), text), "%s", text)
	return text
}

// server is one of a kind, with two models that it lists.
func server(engine, address string) doctor.Server {
	return doctor.Server{Name: engine, Report: lifecycle.Report{Resident: -1}, Identity: doctor.Identity{
		Address: address, Open: true, HTTP: true, Engine: engine, Models: []doctor.ListedModel{{Name: engine + "/big:7b", File: 4 << 30}, {Name: engine + " with blanks"}},
	}}
}

func TestInitWritesAConsumerForEveryKindOfServer(t *testing.T) {
	whole := &doctor.Discovery{Sampler: "nvml", Why: "it works", Devices: []gpu.Device{{Name: "A card", Total: 24 * gpu.GiB}}}
	for _, name := range presets.Names() {
		s := server(name, "127.0.0.1:8080")
		whole.Servers = append(whole.Servers, s)
		text := written(t, &doctor.Discovery{Why: "none", Servers: []doctor.Server{s}}, "")
		assert.Contains(t, text, "\n\t\tconsumer "+name+" {\n\t\t\tpreset "+name+"\n\t\t\tupstream 127.0.0.1:8080\n", name)
		assert.Contains(t, text, "handle_path /"+name+"/* {", name)
		e, _ := doctor.EngineOf(name)
		assert.Equal(t, e.NeedsProcess, strings.Contains(text, "\t\t\tpin\n"), name)
		assert.Equal(t, e.LLM, strings.Contains(text, "handle /v1/* {"), name)
		if e.Models != "" && e.LLM {
			assert.Contains(t, text, "model "+name+"/big:7b {", name)
		}
	}
	text := written(t, whole, "ai.example.com")
	assert.Contains(t, text, "\t\tgpu auto\n")
	assert.Contains(t, text, "# GPU 0: A card, 24GiB.")
	assert.Contains(t, text, "\nai.example.com {\n")
	assert.NotContains(t, text, "bind")
}

func TestInitWritesWhatIsNotEnoughAsAComment(t *testing.T) {
	for _, name := range []string{"koboldcpp", "triton", "tabbyapi"} {
		s := server(name, "127.0.0.1:5001")
		s.Models = nil
		text := written(t, &doctor.Discovery{Why: "none", Servers: []doctor.Server{s}}, "")
		assert.Contains(t, text, "\t\t#\tconsumer "+name+" {\n\t\t#\t\tpreset "+name+"\n", name)
		assert.Contains(t, text, "Its consumer lacks something: preset "+name+":", name)
		assert.NotContains(t, text, "gpu_broker "+name, name)
	}
}

func TestInitSaysWhereEachClaimComesFrom(t *testing.T) {
	d := &doctor.Discovery{Sampler: "nvml", Devices: []gpu.Device{{Total: 16 * gpu.GiB}}}
	add := func(change func(*doctor.Server)) {
		s := server("comfyui", "127.0.0.1:8188")
		s.Models = nil
		change(&s)
		d.Servers = []doctor.Server{s}
	}
	for name, c := range map[string]struct {
		change func(*doctor.Server)
		why    string
		vram   string
	}{
		"nothing is known":             {func(*doctor.Server) {}, "A guess", "12GiB"},
		"it says it":                   {func(s *doctor.Server) { s.Report.Resident = 5*gpu.GiB + 1 }, "What it says that it holds now", "5.1GiB"},
		"measured while it is loaded":  {func(s *doctor.Server) { s.Measured, s.Report.Loaded = 3*gpu.GiB, lifecycle.Yes }, "Measured", "3GiB"},
		"measured, and more":           {func(s *doctor.Server) { s.Measured = 13 * gpu.GiB }, "Measured", "13GiB"},
		"measured, and perhaps not it": {func(s *doctor.Server) { s.Measured = 2 * gpu.GiB }, "its processes hold 2GiB now", "12GiB"},
		"more than fits":               {func(s *doctor.Server) { s.Measured = 15*gpu.GiB + 900*gpu.MiB }, "Measured", "15.7GiB"},
		"another card":                 {func(s *doctor.Server) { s.GPU = 1 }, "A guess", "12GiB"},
	} {
		add(c.change)
		text := written(t, d, "")
		found := regexp.MustCompile(`(?m)^\t\t\t# (.*)\n\t\t\tvram (\S+)$`).FindStringSubmatch(text)
		if assert.NotNil(t, found, "%s: %s", name, text) {
			assert.Contains(t, found[1], c.why, name)
			assert.Equal(t, c.vram, found[2], name)
		}
		assert.Equal(t, d.Servers[0].GPU == 1, strings.Contains(text, "\t\t\tgpu 1\n"), name)
	}
}

func TestInitNamesNoModelTwice(t *testing.T) {
	a, b := server("ollama", "127.0.0.1:11434"), server("lmstudio", "127.0.0.1:1234")
	a.Models = []doctor.ListedModel{{Name: "same"}, {Name: "same"}, {Name: "lmstudio"}, {Name: "{$HOME}"}, {Name: "has\"quote"}}
	b.Models = []doctor.ListedModel{{Name: "same"}, {Name: "other"}}
	a.Report.Models = []lifecycle.Model{{Name: "lmstudio:latest", Resident: 2 * gpu.GiB}}
	text := written(t, &doctor.Discovery{Why: "none", Servers: []doctor.Server{a, b}}, "")
	assert.Equal(t, 1, strings.Count(text, "model same {"), text)
	assert.Contains(t, text, "model other {")
	assert.Regexp(t, "(?s)model lmstudio .*model same ", text, "what it holds comes first")
	assert.Contains(t, text, "consumer lmstudio {", text)
}

func TestAFileThatIsThereIsKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "Caddyfile")
	require.NoError(t, writeNew(path, "one", false))
	assert.ErrorContains(t, writeNew(path, "two", false), "overwrite it with --force")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "one", string(text))
	require.NoError(t, writeNew(path, "2", true))
	text, err = os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "2", string(text))
}
