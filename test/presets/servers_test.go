package presets_test

import (
	"bytes"
	"encoding/json"
	"mime/multipart"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	httplife "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

// ask is a request; MODEL in its path and body stands for the model that it wants.
type ask struct{ method, path, kind, body string }

func post(path, body string) ask { return ask{"POST", path, "application/json", body} }

func (a ask) of(model string) ask {
	a.path, a.body = strings.ReplaceAll(a.path, "MODEL", model), strings.ReplaceAll(a.body, "MODEL", model)
	return a
}

// form is a form with a file, unless that is empty, and with fields by name and value in turn.
func form(path, file string, fields ...string) ask {
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	if file != "" {
		part, _ := w.CreateFormFile("file", "speech.wav") // a buffer takes all
		_, _ = part.Write([]byte(file))
	}
	for i := 0; i+1 < len(fields); i += 2 {
		_ = w.WriteField(fields[i], fields[i+1])
	}
	_ = w.Close()
	return ask{"POST", path, w.FormDataContentType(), b.String()}
}

var (
	chat    = post("/v1/chat/completions", `{"model":"MODEL","messages":[{"role":"user","content":"hello"}]}`)
	speak   = post("/v1/audio/speech", `{"model":"MODEL","input":"hello","voice":"x"}`)
	picture = post("/sdapi/v1/txt2img", `{"prompt":"a boat"}`)
)

// work is the main request for GPU work of each kind of server.
var work = map[string]ask{
	"ollama":              post("/api/chat", `{"model":"MODEL","stream":false,"messages":[{"role":"user","content":"hello"}]}`),
	"llamacpp":            chat,
	"llamacpp-router":     chat,
	"comfyui":             post("/prompt", `{"prompt":{"1":{"class_type":"KSampler","inputs":{}}}}`),
	"a1111":               picture,
	"forge":               picture,
	"sdnext":              picture,
	"vllm":                chat,
	"lmstudio":            chat,
	"immich-ml":           form("/predict", "", "entries", `{"clip":{"textual":{"modelName":"x"}}}`, "text", "a boat"),
	"textgen-webui":       chat,
	"whispercpp":          form("/inference", "RIFF"),
	"localai":             chat,
	"invokeai":            post("/api/v1/queue/default/enqueue_batch", `{"batch":{"graph":{"nodes":{}},"runs":1}}`),
	"koboldcpp":           chat,
	"speaches":            form("/v1/audio/transcriptions", "RIFF", "model", "MODEL"),
	"kokoro":              speak,
	"sglang":              chat,
	"llama-swap":          chat,
	"sdcpp":               post("/sdcpp/v1/img_gen", `{"prompt":"a boat"}`),
	"tei":                 post("/embed", `{"inputs":"hello"}`),
	"tgi":                 post("/generate", `{"inputs":"hello"}`),
	"infinity":            post("/embeddings", `{"model":"server","input":["hello"]}`),
	"tabbyapi":            chat,
	"docker-model-runner": post("/engines/v1/chat/completions", `{"model":"MODEL","messages":[{"role":"user","content":"hello"}]}`),
	"triton":              post("/v2/models/MODEL/generate", `{"text_input":"hello"}`),
	"xinference":          chat,
	"chatterbox":          post("/tts", `{"text":"hello"}`),
	"chatterbox-tts-api":  speak,
	"alltalk":             speak,
	"openedai-speech":     post("/v1/audio/speech", `{"model":"tts-1-hd","input":"hello","voice":"x"}`),
	"xtts":                post("/tts_to_audio/", `{"text":"hello","speaker_wav":"x","language":"en"}`),
}

// known is a preset, taken apart.
type known struct {
	presets.Preset
	consumer config.Consumer
	routes   httplife.Lifecycle
}

func preset(t *testing.T, name string) *known {
	t.Helper()
	p, _, err := presets.Find(name)
	require.NoError(t, err)
	k := &known{Preset: *p}
	require.NoError(t, json.Unmarshal(p.Consumer, &k.consumer))
	require.NoError(t, json.Unmarshal(k.consumer.LifecycleRaw, &k.routes))
	return k
}

// async reports whether its answers come before its work is done.
func (k *known) async() bool { return k.consumer.Async || len(k.consumer.AsyncRoutes) > 0 }

// The two models of a server that has several.
const one, two = "org/one", "two"

// layout is a site with the server; whole: its models are one to the broker, where that is possible.
func (k *known) layout(whole bool) layout {
	l := layout{options: modelserver.Options{Manner: modelserver.Manner(k.Name), VRAM: model, Residue: rest, AllowUnload: true}, process: k.About.NeedsProcess}
	lines := "switch_cost 1ms\npreset " + k.Name
	switch {
	case k.About.Models != "" && whole:
		l.options.Models = map[string]gpu.Bytes{k.first(): model}
		lines += "\nvram 6GiB"
	case k.About.Models != "":
		l.options.Models = map[string]gpu.Bytes{k.first(): model, two: model}
		l.options.Residue = 0
		lines += "\nmodel " + k.first() + " {\nvram 6GiB\n}\nmodel " + two + " {\nvram 6GiB\n}"
	default:
		lines += "\nvram 6GiB"
	}
	if k.About.NeedsName {
		lines += "\nmodel_name server"
	}
	l.lines = lines
	return l
}

// first is the name of its first model, or of its only one.
func (k *known) first() string {
	switch {
	case k.About.Models == "":
		return "server"
	case k.Name == "triton":
		return "one" // its names are those of folders
	default:
		return one
	}
}

// ask is a request for GPU work of one of its models.
func (k *known) ask(model string) ask { return work[k.Name].of(model) }

func TestEveryPresetHasAPretendingServer(t *testing.T) {
	for _, name := range presets.Names() {
		require.Contains(t, modelserver.Manners(), modelserver.Manner(name))
		require.Contains(t, work, name)
	}
	require.Len(t, work, len(presets.Names()))
}
