package e2e

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

func TestN3_AnAliasMayBeAPatternThatIsSentAsTheModelsOwnName(t *testing.T) {
	t.Parallel()
	rec := newRecorder(t)
	s := start(t, layout{
		Consumers: []consumer{
			shelf("ollama", modelserver.Ollama, `
				model llama3.2:3b {
					vram 3GiB
					alias claude-* claude-2
				}
				model qwen2.5:7b {
					vram 4GiB
					alias claude-3* *-mini
				}
				model claude-3-real {
					vram 2GiB
				}`, map[string]float64{"llama3.2:3b": 3, "qwen2.5:7b": 4, "claude-3-real": 2}),
			{Options: modelserver.Options{Name: "llama", VRAM: gib(2)}, Lines: "alias gpt-*"},
		},
		Routes: "handle /one/* {\ngpu_broker ollama\nreverse_proxy " + rec.addr + "\n}\n" +
			"handle {\ngpu_broker {\nmodel_from body\nmodel_from query\nmodel_from path /models/*/generate\n}\nreverse_proxy " + rec.addr + "\n}",
	})
	json := func() http.Header { return http.Header{"Content-Type": {"application/json"}} }
	for asked, want := range map[string]string{
		"claude-1": "llama3.2:3b", "claude-3-opus": "qwen2.5:7b", "Library/CLAUDE-3-opus:latest": "qwen2.5:7b", "gpt-4o-mini-mini": "",
		"o1-mini": "qwen2.5:7b", "claude-2": "llama3.2:3b", "claude-3-real": "claude-3-real",
	} {
		if want == "" { // the longer beginning is another consumer's, whose server gets the client's name
			s.askJSON("/x", `{"model":"`+asked+`"}`).servedBy(t, "llama")
			require.Equal(t, `{"model":"`+asked+`"}`, string(rec.next(t).body))
			continue
		}
		for _, path := range []string{"/v1/chat/completions", "/one/v1/chat/completions"} {
			require.Equal(t, `{"a" : 1.0,"model":"`+want+`"}`, string(rec.takes(t, s, path, json(), `{"a" : 1.0,"model":"`+asked+`"}`).body), asked)
		}
	}
	require.Equal(t, "/v1/completions?model=qwen2.5%3A7b&a=1", rec.takes(t, s, "/v1/completions?model=o1-mini&a=1", json(), `{}`).uri)
	require.Equal(t, "/models/llama3.2:3b/generate", rec.takes(t, s, "/models/claude-1/generate", json(), `{}`).uri)
	body, kind := speech(t, 1000, "claude-whisper")
	require.Equal(t, strings.Replace(string(body), "claude-whisper", "llama3.2:3b", 1), string(rec.takes(t, s, "/v1/audio", http.Header{"Content-Type": {kind}}, string(body)).body))
	s.askJSON("/x", `{"model":"clade-1"}`).refused(t, 404, "unknown_model")
	require.NotContains(t, string(s.get("/v1/models").body), "*")
	require.Contains(t, string(s.get("/v1/models").body), `"claude-2"`)

	for line, want := range map[string]string{
		"alias *":                 "default CONSUMER any",
		"alias gpt-*-*":           "more than one *",
		"alias gpt-*\nsend_as x*": "stands for many names",
		"alias claude-*":          `could mean consumer \"llama3.2:3b\" of \"ollama\" (Caddyfile:`,
	} {
		a := s.reload(func(c string) string { return strings.Replace(c, "alias gpt-*", line, 1) })
		require.Equal(t, 400, a.status, line)
		require.Contains(t, string(a.body), want)
		require.Contains(t, string(a.body), "Caddyfile:")
	}
}

func TestN3_AModelThatItsServerListsWinsOverAPattern(t *testing.T) {
	t.Parallel()
	rec := newRecorder(t)
	cloud := newRecorder(t)
	s := start(t, layout{
		Global: "consumer hosted {\ncloud\nupstream " + cloud.addr + "\nalias main *-b\n}",
		Consumers: []consumer{shelf("ollama", modelserver.Ollama, "vram 4GiB\nmodels auto\nmodel small {\nalias my-*\n}",
			map[string]float64{"small": 3, "my-own": 4, "my-b": 2, "x-b": 2})},
		Routes: "handle_path /one/* {\ngpu_broker ollama\nreverse_proxy " + rec.addr + "\n}\n" +
			"handle {\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	for asked, want := range map[string]string{"my-own": "my-own", "my-other": "small", "MY-OTHER": "small", "x-b": "x-b", "my-120b-cloud": "small"} {
		for _, path := range []string{"/one/v1/chat/completions", "/one/not/listed"} {
			s.askJSON(path, `{"model":"`+asked+`"}`).servedBy(t, "ollama")
			require.Equal(t, `{"model":"`+want+`"}`, string(rec.next(t).body), "%s at %s", asked, path)
		}
	}
	for asked, want := range map[string]string{"my-own": "ollama", "my-b": "ollama", "my-other": "ollama", "y-b": "hosted"} {
		require.Equal(t, want, s.askJSON("/v1/chat/completions", `{"model":"`+asked+`","messages":[{"role":"user","content":"a"}]}`).header.Get("X-Gpu-Broker-Consumer"), asked)
	}
	require.JSONEq(t, `{"model":"y-b","messages":[{"role":"user","content":"a"}]}`, string(cloud.next(t).body))

	// A pattern is served though a server with models auto is silent.
	s.servers["ollama"].Kill()
	s.askJSON("/v1/chat/completions", `{"model":"z-b"}`).servedBy(t, "hosted")
}

func TestN3_AnUnlistedModelIsServedAndInNoList(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Consumers: []consumer{
			shelf("ollama", modelserver.Ollama, "vram 2GiB\nmodels auto\nmodel hidden:7b {\nalias secret-name\nunlisted\n}", map[string]float64{"hidden:7b": 2, "shown": 2}),
			{Options: modelserver.Options{Name: "embedder", VRAM: gib(1)}, Lines: "alias bge\nunlisted"},
			{Options: modelserver.Options{Name: "tts", VRAM: gib(1)}},
		},
		Routes: "handle_path /all/* {\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	for _, model := range []string{"hidden:7b", "secret-name"} {
		s.askJSON("/all/v1/chat/completions", `{"model":"`+model+`","messages":[{"role":"user","content":"a"}]}`).servedBy(t, "ollama")
	}
	s.askJSON("/all/synthesize", `{"model":"bge"}`).servedBy(t, "embedder")
	s.askJSON("/all/synthesize", `{"model":"tts"}`).servedBy(t, "tts")
	for _, list := range []string{"/v1/models", "/models", "/api/tags", "/api/ps"} {
		body := string(s.get("/all" + list).body)
		for _, name := range []string{"hidden", "secret-name", "embedder", "bge"} {
			require.NotContains(t, body, name, list)
		}
		require.Contains(t, body, "tts", list)
	}
	require.Contains(t, string(s.get("/all/v1/models").body), "shown")
	require.Equal(t, 200, s.get("/all/v1/models/secret-name").status, "it is shown to those who name it")
	for _, near := range []string{"hidden:8b", "secret-nam", "embeder"} {
		require.NotContains(t, s.askJSON("/all/v1/chat/completions", `{"model":"`+near+`"}`).refused(t, 404, "unknown_model"), "did you mean")
	}
}
