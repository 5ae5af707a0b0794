package e2e

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

func TestN5_UnknownNamesGoToTheDefaultUnderANameThatItsServerKnows(t *testing.T) {
	t.Parallel()
	rec := newRecorder(t)
	route := func(path, lines string) string {
		return "handle /to-" + path + "/* {\ngpu_broker {\nmodel_from body\nmodel_from query\nmodel_from path /to-" + path + "/models/*/infer\n" + lines + "\n}\nreverse_proxy " + rec.addr + "\n}\n"
	}
	s := start(t, layout{
		Consumers: []consumer{
			{Options: modelserver.Options{Name: "llama", VRAM: gib(4)}, Lines: "alias llama3.1:8b gpt-4"},
			{Options: modelserver.Options{Name: "tuned", VRAM: gib(4)}, Lines: "alias other\nsend_as my-finetune"},
			{Options: modelserver.Options{Name: "bare", VRAM: gib(4)}},
			{Options: modelserver.Options{Name: "raw", VRAM: gib(2)}, Lines: "alias something\nsend_as client"},
		},
		Routes: route("llama", "default llama any") + route("tuned", "default tuned any") + route("bare", "default bare any") + route("raw", "default raw any") + route("none", "default llama"),
	})
	for path, want := range map[string]string{"llama": "llama3.1:8b", "tuned": "my-finetune", "bare": "gpt-9", "raw": "gpt-9"} {
		a := s.askJSON("/to-"+path+"/v1/chat/completions", `{"a" : 1.0,"model":"gpt-9"}`)
		a.servedBy(t, path)
		require.Equal(t, `{"a" : 1.0,"model":"`+want+`"}`, string(rec.next(t).body), path)
		s.askJSON("/to-"+path+"/v1/chat/completions", `{"a":1}`).servedBy(t, path)
		require.Equal(t, `{"a":1}`, string(rec.next(t).body), "without a name there is nothing to translate")
	}
	for asked, want := range map[string]string{
		"/to-llama/x?model=gpt-9":      "/to-llama/x?model=llama3.1%3A8b",
		"/to-llama/models/gpt-9/infer": "/to-llama/models/llama3.1:8b/infer",
	} {
		s.askJSON(asked, "{}").servedBy(t, "llama")
		require.Equal(t, want, rec.next(t).uri)
	}
	body, kind := speech(t, 1000, "whisper-9")
	s.ask("POST", "/to-tuned/v1/audio/transcriptions", kind, body).servedBy(t, "tuned")
	require.Equal(t, strings.Replace(string(body), "whisper-9", "my-finetune", 1), string(rec.next(t).body))

	// A known name goes where it belongs, as it was written.
	s.askJSON("/to-tuned/x", `{"model":"gpt-4"}`).servedBy(t, "llama")
	require.Equal(t, `{"model":"gpt-4"}`, string(rec.next(t).body))

	// Without the word nothing has changed.
	s.askJSON("/to-none/x", `{"model":"gpt-9"}`).refused(t, 404, "unknown_model")
	s.askJSON("/to-none/x", `{"a":1}`).servedBy(t, "llama")
	rec.next(t)
}

func TestN5_UnknownNamesGoToTheDefaultsFallbackAndNotPastWhatServersList(t *testing.T) {
	t.Parallel()
	cloud := newRecorder(t)
	s := start(t, layout{
		Total:  "12GiB",
		Global: "consumer hosted {\ncloud\nupstream " + cloud.addr + "\nalias gpt-4o\n}",
		Consumers: []consumer{
			{Options: modelserver.Options{Name: "llama", VRAM: gib(10)}, Lines: "alias llama3.1:8b\nfallback hosted {\nas gpt-4o-mini\n}"},
			shelf("ollama", modelserver.Ollama, "vram 11GiB\nmodels auto", map[string]float64{"qwen:7b": 11}),
		},
		Routes: "handle {\ngpu_broker {\nmodel_from body\ndefault llama any\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	a := s.askJSON("/v1/chat/completions", `{"model":"gpt-9","messages":[]}`)
	a.servedBy(t, "llama")
	require.Equal(t, 200, s.chat("ollama", "qwen:7b").status, "what a server lists is known")
	s.askJSON("/v1/chat/completions", `{"model":"qwen:7b","messages":[{"role":"user","content":"a"}]}`).servedBy(t, "ollama")

	s.askJSON("/v1/chat/completions", `{"model":"gpt-9","b":2}`).servedBy(t, "hosted")
	require.Equal(t, `{"model":"gpt-4o-mini","b":2}`, string(cloud.next(t).body))
	taken := s.decisions("fallback")
	require.Len(t, taken, 1)
	require.Equal(t, "llama hosted", taken[0].Consumer+" "+taken[0].Target)
}

// Its list is not known, so any name may be one of its models.
func TestN5_AnUnknownNameWaitsForASilentServerWithModelsAuto(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Consumers: []consumer{
			{Options: modelserver.Options{Name: "llama", VRAM: gib(4)}},
			shelf("ollama", modelserver.Ollama, "vram 11GiB\nmodels auto", map[string]float64{"qwen:7b": 11}),
		},
		Routes: "handle {\ngpu_broker {\nmodel_from body\ndefault llama any\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	s.servers["ollama"].Kill()
	s.askJSON("/v1/chat/completions", `{"model":"gpt-9"}`).refused(t, 503, "unhealthy")
	s.askJSON("/v1/chat/completions", `{"a":1}`).servedBy(t, "llama")
}

func TestN5_ADefaultForUnknownNamesIsCheckedWhenTheSiteIsLoaded(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{}, "model_from body\ndefault llama")
	for line, want := range map[string]string{
		"default llama all":                "write default CONSUMER, or default CONSUMER any",
		"default lama any":                 `did you mean llama?`,
		"default llama any\ndefault llama": "default is set twice, to llama any and to llama",
	} {
		a := s.reload(func(c string) string { return strings.Replace(c, "default llama", line, 1) })
		require.Equal(t, 400, a.status, line)
		require.Contains(t, string(a.body), want)
		require.Contains(t, string(a.body), "Caddyfile:")
	}
}
