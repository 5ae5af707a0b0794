package e2e

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// preflight asks, as a browser does, whether a page of an origin may POST JSON.
func (s *site) preflight(path, origin string) answer {
	s.t.Helper()
	req, err := http.NewRequest(http.MethodOptions, s.url+path, nil)
	require.NoError(s.t, err)
	req.Header.Set("Origin", origin)
	req.Header.Set("Access-Control-Request-Method", "POST")
	req.Header.Set("Access-Control-Request-Headers", "authorization, content-type")
	resp, err := s.client.Do(req)
	require.NoError(s.t, err)
	require.NoError(s.t, resp.Body.Close())
	return answer{status: resp.StatusCode, header: resp.Header}
}

func TestK5_APreflightWithoutAKnownServerIsAnsweredForAllowedOrigins(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{Routes: "handle /set/* {\nheader Access-Control-Allow-Origin https://own.example\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}"}, "model_from body")
	for _, origin := range []string{"http://localhost:3000", "http://127.0.0.1:8080", "https://[::1]", "http://app.localhost"} {
		a := s.preflight("/v1/chat/completions", origin)
		require.Equal(t, 204, a.status, origin)
		require.Equal(t, []string{origin}, a.header.Values("Access-Control-Allow-Origin"))
		require.Equal(t, "authorization, content-type", a.header.Get("Access-Control-Allow-Headers"))
		require.Contains(t, a.header.Get("Access-Control-Allow-Methods"), "POST")
	}
	for _, origin := range []string{"https://evil.example", "null", "http://localhost.evil.example", "garbage"} {
		require.Equal(t, 404, s.preflight("/v1/chat/completions", origin).status, origin)
	}
	a := s.preflight("/set/v1/chat/completions", "http://localhost:3000")
	require.Equal(t, []string{"https://own.example"}, a.header.Values("Access-Control-Allow-Origin"), "the site's own word stays")
	require.Empty(t, a.header.Get("Access-Control-Allow-Headers"))
	require.Zero(t, s.servers["llama"].Stats().LoadsStarted)
}

// A page that may send requests can read what the broker answers in a server's place; no other page can.
func TestK5_PagesOfAllowedOriginsReadTheBrokersOwnAnswers(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{Consumers: []consumer{{Options: modelserver.Options{Name: "ollama", Manner: modelserver.Ollama,
		Models: map[string]gpu.Bytes{"llama3.2:3b": gib(3)}}, Lines: "model llama3.2:3b {\nvram 3GiB\n}"}}}, "model_from body")
	for path, body := range map[string]string{"/v1/models": "", "/api/version": "", "/api/ps": "", "/health": "", "/api/generate": `{"model":"llama3.2:3b","keep_alive":0}`} {
		for origin, want := range map[string]string{"http://localhost:3000": "http://localhost:3000", "https://evil.example": ""} {
			method := "GET"
			if body != "" {
				method = "POST"
			}
			a := s.sending(method, path, http.Header{"Origin": {origin}, "Content-Type": {"application/json"}}, []byte(body))
			require.Equal(t, 200, a.status, "%s %s", path, a.body)
			require.Equal(t, want, a.header.Get("Access-Control-Allow-Origin"), path)
		}
	}
	require.Zero(t, s.servers["ollama"].Stats().LoadsStarted)
}

func TestK5_OriginsCanBeConfigured(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{Global: "cors_origins https://app.example"}, "model_from body")
	require.Equal(t, 204, s.preflight("/v1/embeddings", "https://app.example").status)
	require.Equal(t, 404, s.preflight("/v1/embeddings", "http://localhost:3000").status)
}

func TestK5_APreflightForAStoppedServerIsAnsweredAndARunningOneAnswersItself(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "a", vram: "2GiB"})
	a := s.preflight("/a/v1/chat/completions", "http://localhost:3000")
	require.Equal(t, 204, a.status)
	require.Equal(t, 503, s.preflight("/a/v1/chat/completions", "https://elsewhere.example").status)
	require.False(t, s.process("a").Running, "a preflight starts nothing")

	require.Equal(t, 200, s.post("/a/synthesize", "x").status)
	a = s.preflight("/a/synthesize", "https://elsewhere.example")
	require.NotEqual(t, 503, a.status, "the running server answers")
	require.NotEmpty(t, a.header.Get("X-Modelserver"))
}

func TestK5_ListsAndLivenessOfAOneURLRouteComeFromTheBroker(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{}, "model_from body")
	for path, want := range map[string]string{"/models": "qwen2.5:7b", "/models/": "llama", "/v1/models": "llama", "/v1/models/": "llama", "/v1/models/whisper-1": `"id":"whisper-1"`, "/api/tags": "whisper",
		"/": "running", "/health": "ok", "/api/version": "version", "/api/ps": `"models":[]`} {
		a := s.get(path)
		require.Equal(t, 200, a.status, path)
		require.Contains(t, string(a.body), want, path)
		require.Equal(t, 200, s.do(t.Context(), http.MethodHead, path, nil).status, "HEAD %s", path)
	}
	for _, path := range []string{"/favicon.ico", "/metrics", "/healthz/x", "/v1/models/none", "/api/show"} {
		require.Equal(t, 404, s.get(path).status, path)
		require.Equal(t, 404, s.do(t.Context(), http.MethodHead, path, nil).status, "HEAD %s", path)
	}
	require.Zero(t, s.servers["llama"].Stats().LoadsStarted)
	s.askJSON("/echo", `{"model":"llama"}`).servedBy(t, "llama")
	var loaded struct {
		Models []struct {
			Name     string
			SizeVRAM int64 `json:"size_vram"`
		}
	}
	require.NoError(t, json.Unmarshal(s.get("/api/ps").body, &loaded))
	require.Len(t, loaded.Models, 1)
	require.True(t, strings.HasPrefix(loaded.Models[0].Name, "llama"))
	require.Positive(t, loaded.Models[0].SizeVRAM)
}
