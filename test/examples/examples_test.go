//go:build linux

package examples

import (
	"bytes"
	"fmt"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

const gib = gpu.GiB

func chat(model string) string {
	return fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"hello"}]}`, model)
}

// states are those of all slots, by their names.
func states(st broker.Status) map[string]string {
	out := map[string]string{}
	for name, c := range st.Consumers {
		for _, sl := range c.Slots {
			out[broker.SlotName(name, sl.Model)] = sl.State
		}
	}
	return out
}

func TestEveryPresetHasAnExample(t *testing.T) {
	for _, name := range presets.Names() {
		raw, err := os.ReadFile(filepath.Join(folder, "servers", name, "Caddyfile"))
		require.NoError(t, err)
		text := string(raw)
		p, _, err := presets.Find(name)
		require.NoError(t, err)
		require.Contains(t, text, "preset "+name+"\n")
		require.Contains(t, text, "caddy run --config examples/servers/"+name+"/Caddyfile\n")
		starts := regexp.MustCompile(`(?m)^\t\t\t(process|systemd|docker) `).FindStringSubmatch(text)
		if starts == nil || starts[1] != "process" {
			require.Contains(t, text, fmt.Sprintf("upstream 127.0.0.1:%d\n", p.About.Port), "it runs as it is against the server's default port")
		}
		require.Equal(t, p.About.NeedsProcess, starts != nil, "%s: who starts it?", name)
		require.NotRegexp(t, `localhost:`+fmt.Sprint(p.About.Port)+`\b`, text, "%s: Caddy would take the server's port", name)
	}
}

func TestHomelab(t *testing.T) {
	s := prepare(t, 16*gib)
	s.serve("OLLAMA", modelserver.Options{Name: "ollama", Manner: modelserver.Ollama, Models: map[string]gpu.Bytes{
		"llama3.1:8b": 7 * gib, "qwen3:0.6b": 1200 * gpu.MiB, "gemma3:12b": 8 * gib}})
	s.serve("COMFYUI", modelserver.Options{Name: "comfyui", Manner: modelserver.ComfyUI, VRAM: 12 * gib, Residue: gib / 2})
	s.serve("KOKORO", modelserver.Options{Name: "kokoro", Manner: modelserver.Kokoro, VRAM: gib * 3 / 2, Residue: gib / 2, AllowUnload: true})
	s.program("WHISPER_SERVER", "whispercpp", []string{"-m", "--inference-path /v1/audio/transcriptions"}, map[string][2]string{"ggml-large": {"whisper", "3GiB"}})
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, "Open WebUI") }))
	t.Cleanup(page.Close)
	local := "http://" + caddytest.FreeAddr(t)
	s.Env = append(s.Env, "WEBUI="+page.Listener.Addr().String(), "LOCAL="+local)
	s.start("homelab")

	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	part, err := w.CreateFormFile("file", "speech.wav")
	require.NoError(t, err)
	_, err = part.Write([]byte("RIFF"))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	hear := func() { s.ask("whisper", s.url+"/v1/audio/transcriptions", w.FormDataContentType(), form.String()) }
	draw := func() {
		s.json("comfyui", "/comfy/prompt", `{"prompt":{"1":{"class_type":"KSampler","inputs":{}}}}`)
	}
	pinned := func() { require.Equal(t, "READY", states(s.Status())["ollama/qwen3:0.6b"]) }

	s.json("ollama", "/v1/chat/completions", chat("llama3.1:8b"))
	s.ask("ollama", local+"/ollama/api/chat", "application/json", `{"model":"qwen3:0.6b","stream":false,"messages":[{"role":"user","content":"a title"}]}`)
	hear()
	s.json("kokoro", "/v1/audio/speech", `{"model":"kokoro","input":"hello","voice":"af_bella"}`)
	now := states(s.Status())
	require.Equal(t, "READY", now["ollama/llama3.1:8b"], "12.7 GiB fit together")
	require.Equal(t, "READY", now["whisper"])
	require.Zero(t, s.Status().Scheduler.Evictions)

	draw()
	require.Equal(t, "IDLE", states(s.Status())["ollama/llama3.1:8b"])
	require.False(t, s.Status().Consumers["whisper"].Process.Running)
	pinned()
	s.json("ollama", "/v1/chat/completions", chat("gemma3:12b")) // nobody has named it
	hear()
	draw()
	s.json("ollama", "/ollama/api/chat", `{"model":"llama3.1:8b","stream":false,"messages":[{"role":"user","content":"hello"}]}`)
	pinned()
	require.Equal(t, 2, s.Status().Consumers["whisper"].Process.Starts)
	s.well()

	resp, err := s.Client.Get(s.url + "/")
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Empty(t, resp.Header.Get("X-Gpu-Broker-Consumer"), "the page needs no GPU")
}

func TestCoding(t *testing.T) {
	s := prepare(t, 16*gib)
	s.program("LLAMA_SERVER", "llamacpp", []string{"-m", "--metrics", "-ngl 99"}, map[string][2]string{
		"coder-14b": {"coder", "11GiB"}, "chat-8b": {"chat", "9GiB"}, "quick-1.5b": {"quick", "2560MiB"}, "embedder": {"embedder", "1GiB"}})
	s.start("coding")

	s.json("embedder", "/v1/embeddings", `{"model":"text-embedding-3-small","input":["hello"]}`)
	s.json("coder", "/v1/chat/completions", chat("coder"))
	s.json("quick", "/infill", `{"input_prefix":"func main() {","input_suffix":"}"}`)
	require.Zero(t, s.Status().Scheduler.Evictions, "14.5 GiB fit together")
	s.json("chat", "/v1/chat/completions", chat("gpt-4o-mini"))
	require.Equal(t, map[string]string{"embedder": "READY", "coder": "IDLE", "quick": "READY", "chat": "READY"}, states(s.Status()))
	s.json("coder", "/v1/chat/completions", chat("gpt-4o"))
	s.json("embedder", "/v1/embeddings", `{"model":"embedder","input":["hello"]}`)
	st := s.Status()
	require.EqualValues(t, 2, st.Scheduler.Evictions)
	require.Equal(t, 2, st.Consumers["coder"].Process.Starts)
	require.Equal(t, 1, st.Consumers["embedder"].Process.Starts, "it is pinned")
	s.well()
}

func TestVLLMsSleepInTurn(t *testing.T) {
	s := prepare(t, 24*gib)
	s.program("VLLM", "vllm", []string{"serve", "--enable-sleep-mode", "--gpu-memory-utilization 0.7916"}, map[string][2]string{
		"Qwen3-8B": {"qwen", "19GiB"}, "Mistral-7B": {"mistral", "19GiB"}})
	s.start("vllm-sleep")

	for range 2 {
		s.json("qwen", "/v1/completions", `{"model":"Qwen/Qwen3-8B","prompt":"hello"}`)
		s.json("mistral", "/v1/completions", `{"model":"mistralai/Mistral-7B-Instruct-v0.3","prompt":"hello"}`)
	}
	st := s.Status()
	require.EqualValues(t, 3, st.Scheduler.Evictions)
	for _, name := range []string{"qwen", "mistral"} {
		require.Equal(t, 1, st.Consumers[name].Process.Starts, "%s sleeps and is not stopped", name)
		require.True(t, st.Consumers[name].Process.Running)
	}
	require.Equal(t, map[string]string{"qwen": "IDLE", "mistral": "READY"}, states(st))
	s.well()
}
