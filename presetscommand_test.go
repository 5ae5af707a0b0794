package gpubroker

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

func TestPresetsAreListedWithWhatFreesTheirMemory(t *testing.T) {
	out, err := command(t, "presets")
	require.NoError(t, err)
	rows := map[string]string{}
	for line := range strings.Lines(out) {
		if name, rest, ok := strings.Cut(line, " "); ok {
			rows[name] = strings.Join(strings.Fields(rest), " ")
		}
	}
	for _, name := range presets.Names() {
		about, _ := presets.Describe(name)
		assert.Contains(t, rows[name], about.Title)
	}
	assert.Equal(t, "8000 no vLLM: POST /sleep?level=1: the weights move to host RAM, the KV cache is dropped.", rows["vllm"])
	assert.Contains(t, rows["whispercpp"], "8080 yes whisper.cpp")
	assert.NotContains(t, out, "`")

	out, err = command(t, "presets", "--json")
	require.NoError(t, err)
	var all []presetEntry
	require.NoError(t, json.Unmarshal([]byte(out), &all))
	require.Len(t, all, len(presets.Names()))
	assert.Equal(t, "a1111", all[0].Name)
	assert.Equal(t, 7860, all[0].About.Port)
}

func TestOnePresetIsExplained(t *testing.T) {
	for name, want := range map[string][]string{
		"vllm": {
			"vllm: vLLM", "costs               1 to 5 s to wake up", "- VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode", "unload              POST /sleep?level=1&mode=wait",
			"refused with 403    /sleep, /wake_up, /collective_rpc,", "consumer vllm {\n\tpreset vllm\n\tupstream 127.0.0.1:8000\n\tvram 6GiB\n}", "process vllm serve",
		},
		"whispercpp": {"unload              the end of its process", "Without process, systemd or docker it is never unloaded", "\tprocess whisper-server -m /models/ggml-large-v3.bin --port {gpu_broker.port}\n"},
		"alltalk":    {"\tsystemd alltalk\n"},
		"tabbyapi":   {"\tmodel_name Qwen3-8B-exl3\n", "503 means that nothing is loaded"},
		"triton":     {"names its model in  path /v2/models/*/versions/*/infer", "\tmodel resnet50 {\n\t\tvram 1GiB\n\t}\n"},
		"sdcpp":      {"each job, by its $.id, is asked for at GET /sdcpp/v1/jobs/{item}", "The answer to POST /sdcpp/v1/img_gen and"},
		"comfyui":    {"residency           can't be told", "load                none: it loads inside its first request", "counts as use       POST /upload/*"},
		"ollama":     {"for each of $.models[*].name in GET /api/ps", "(404 is no fault)", "their sizes at $.models[*].size_vram"},
		"a1111":      {"what it was asked last is remembered"},
	} {
		out, err := command(t, "presets", name)
		require.NoError(t, err, name)
		for _, text := range want {
			assert.Contains(t, strings.Join(strings.Fields(out), " "), strings.Join(strings.Fields(text), " "), name)
		}
		for line := range strings.Lines(out) {
			assert.LessOrEqual(t, len(line), 150, "%s: %s", name, line)
		}
	}
	out, err := command(t, "presets", "vllm", "--json")
	require.NoError(t, err)
	var one presetEntry
	require.NoError(t, json.Unmarshal([]byte(out), &one))
	assert.Contains(t, string(one.Consumer), "/wake_up")
	assert.NotEmpty(t, one.Explained)
	assert.True(t, strings.HasPrefix(one.Caddyfile, "consumer vllm {"))
}

func TestAPresetOfOnesOwnIsExplained(t *testing.T) {
	own := file(t, "engine.json", `{"extends":"vllm","about":{"title":"Our engine","port":8001},"residual":"2GiB"}`)
	out, err := command(t, "presets", own)
	require.NoError(t, err)
	for _, text := range []string{"Our engine", "2GiB: its process keeps", "GET /is_sleeping", "consumer server {\n\tpreset " + own + "\n\tupstream 127.0.0.1:8001"} {
		assert.Contains(t, out, text)
	}
	_, err = command(t, "presets", file(t, "bad.json", "{"))
	require.ErrorContains(t, err, "bad.json: line 1: unexpected end of JSON input")
}

func TestAPresetThatThereIsNotIsNamedWithItsNearest(t *testing.T) {
	_, err := command(t, "presets", "comfyiu")
	require.ErrorContains(t, err, `unknown preset "comfyiu": did you mean comfyui?`)
	_, err = command(t, "presets", "a", "b")
	require.ErrorContains(t, err, "accepts at most 1 arg")
}
