package presets_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

// inFolder writes files into a folder that is the working directory until the test ends.
func inFolder(t *testing.T, files map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	t.Chdir(dir)
}

// used is a consumer that names a preset, resolved.
func used(t *testing.T, name string) (*config.Consumer, error) {
	t.Helper()
	b := &config.Broker{Consumers: []*config.Consumer{{Name: "a", Preset: name, VRAM: gpu.GiB}}}
	err := config.Resolve(b, presets.Load)
	return b.Consumers[0], err
}

func TestAFileIsExplainedWithWhatItLeavesToTheDefaults(t *testing.T) {
	inFolder(t, map[string]string{"mine.json": `{"lifecycle":{"health":{"path":"/h"},"load":{"path":"/l","header":{"B":["2"],"A":["1"]}}}}`})
	p, _, err := presets.Find("./mine.json")
	require.NoError(t, err)
	for range 20 { // a map has many orders
		rows, err := p.Explain()
		require.NoError(t, err)
		assert.Contains(t, rows, presets.Row{Label: "health", Lines: []string{"`GET /h`"}})
		assert.Contains(t, rows, presets.Row{Label: "load", Lines: []string{"`POST /l` and `A: 1` and `B: 2`"}})
	}
}

func TestAFileIsAPreset(t *testing.T) {
	inFolder(t, map[string]string{
		"mine.json":      `{"about":{"title":"Mine","port":9000},"gpu_routes":["POST /x"],"lifecycle":{"unload":{"path":"/u"}}}`,
		"servers/it.txt": `{"gpu_routes":["POST /y"]}`,
	})
	c, err := used(t, "./mine.json")
	require.NoError(t, err)
	assert.Equal(t, []string{"POST /x"}, c.GPURoutes)
	assert.JSONEq(t, `{"protocol":"http","unload":{"path":"/u"}}`, string(c.LifecycleRaw))

	c, err = used(t, "servers/it.txt")
	require.NoError(t, err)
	assert.Equal(t, []string{"POST /y"}, c.GPURoutes)
	wd, err := os.Getwd()
	require.NoError(t, err)
	_, err = used(t, filepath.Join(wd, "mine.json"))
	require.NoError(t, err)
}

func TestAFileBuildsUponAPresetOrAnotherFile(t *testing.T) {
	inFolder(t, map[string]string{
		"mine.json":        `{"extends":"shared/base.json","residual":"2GiB"}`,
		"shared/base.json": `{"extends":"vllm","gpu_routes":["POST /mine"],"lifecycle":{"health":{"timeout":"1s"},"busy":{"path":"/busy","busy":"$.n"}}}`,
	})
	c, err := used(t, "mine.json")
	require.NoError(t, err)
	assert.Equal(t, 2*gpu.GiB, c.Residual)
	assert.Equal(t, []string{"POST /mine"}, c.GPURoutes, "lists are replaced")
	assert.Contains(t, c.Blocked, "/collective_rpc", "from vllm")
	var l struct{ Health, Busy, Unload map[string]any }
	require.NoError(t, json.Unmarshal(c.LifecycleRaw, &l))
	assert.Equal(t, map[string]any{"method": "GET", "path": "/health", "timeout": "1s"}, l.Health, "objects are merged")
	assert.Equal(t, map[string]any{"path": "/busy", "busy": "$.n"}, l.Busy, "a route of another path is another")
	assert.NotEmpty(t, l.Unload)
}

func TestWhatIsWrongWithAFileIsSaidWithItsName(t *testing.T) {
	files := map[string]string{
		"syntax.json": "{\n\"gpu_routes\": [\n}", "array.json": "[]", "null.json": "null",
		"unknown.json": `{"gpu_route":["POST /x"]}`, "about.json": `{"about":{"cost":"much"}}`, "inner.json": `{"extends":7}`,
		"name.json": `{"name":"x"}`, "preset.json": `{"preset":"ollama"}`, "none.json": `{"extends":"olama"}`,
		"a.json": `{"extends":"./b.json"}`, "b.json": `{"extends":"a.json"}`, "lost.json": `{"extends":"gone.json"}`,
		"large.json": `{"gpu_routes":["POST /` + strings.Repeat("x", 1<<20) + `"]}`, "folder/x.json": "{}", "bad.json": `{"gpu_routes":["x"]}`,
		"deep0.json": `{"gpu_routes":["POST /x"]}`,
	}
	for i := range 9 {
		files["deep"+string(rune('1'+i))+".json"] = `{"extends":"deep` + string(rune('0'+i)) + `.json"}`
	}
	inFolder(t, files)
	for name, want := range map[string]string{
		"syntax.json":  `consumer "a": preset syntax.json: file syntax.json: line 3: invalid character '}'`,
		"array.json":   "file array.json: json: cannot unmarshal array",
		"null.json":    "file null.json: it is null",
		"unknown.json": `file unknown.json: a consumer: unknown field "gpu_route": did you mean gpu_routes?`,
		"about.json":   `file about.json: about: json: unknown field "cost"`,
		"inner.json":   "file inner.json: extends: json: cannot unmarshal number",
		"name.json":    "file name.json: name is the consumer's own",
		"preset.json":  "to build upon another write extends",
		"none.json":    `file none.json: extends: unknown preset "olama": did you mean ollama?`,
		"a.json":       "the file builds upon itself: a.json, which extends b.json extends a.json",
		"lost.json":    "file lost.json: extends gone.json: reading it: open",
		"gone.json":    "preset gone.json: reading it: ",
		"large.json":   "large.json is larger than 1048576 bytes",
		"./folder":     "folder is no file but a folder",
		"bad.json":     `gpu_routes: route "x": the path must begin with a slash`,
		"deep9.json":   "more than 8 files extend each other",
		"olama":        `unknown preset "olama": did you mean ollama? allowed: a1111,`,
	} {
		_, err := used(t, name)
		if assert.Error(t, err, name) {
			assert.Contains(t, strings.ReplaceAll(err.Error(), "stat gone", "open gone"), want, name)
			assert.Less(t, len(err.Error()), 2000)
		}
	}
	_, err := used(t, "deep7.json")
	assert.NoError(t, err, "eight files are not too many")
}
