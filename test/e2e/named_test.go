package e2e

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

func TestN3_AnAliasIsTranslatedInRequestsThatNeedNoGPU(t *testing.T) {
	t.Parallel()
	rec := newRecorder(t)
	s := start(t, layout{
		Consumers: []consumer{
			shelf("ollama", modelserver.Ollama, "model llama3.2:3b {\nvram 3GiB\nalias gpt-4o-mini claude-*\nset temperature 1\n}\nmodel qwen {\nvram 2GiB\nalias q\nsend_as qwen2.5:7b\n}", map[string]float64{"llama3.2:3b": 3}),
			{Options: modelserver.Options{Name: "llama", VRAM: gib(2)}, Lines: "alias x\nsend_as tuned\nbypass POST /tokenize\nnamed_routes POST /tokenize"},
		},
		Routes: "handle_path /one/* {\ngpu_broker ollama\nreverse_proxy " + rec.addr + "\n}\n" +
			"handle_path /two/* {\ngpu_broker llama\nreverse_proxy " + rec.addr + "\n}\n" +
			"handle_path /three/* {\ngpu_broker ollama {\nmax_body 1000B\n}\nreverse_proxy " + rec.addr + "\n}",
	})
	get := func(path, kind, body string) string {
		t.Helper()
		a := s.ask("POST", path, kind, []byte(body))
		require.Equal(t, 200, a.status)
		require.Empty(t, a.header.Get("X-Gpu-Broker-Consumer"), "it takes no turn")
		got := rec.next(t)
		require.EqualValues(t, len(got.body), got.length)
		return string(got.body)
	}
	large := strings.Repeat("b", 64<<10)
	for sent, want := range map[string]string{
		`{"model":"gpt-4o-mini","verbose" : true}`: `{"model":"llama3.2:3b","verbose" : true}`,
		`{"model":"claude-3"}`:                     `{"model":"llama3.2:3b"}`,
		`{"model":"q"}`:                            `{"model":"qwen2.5:7b"}`,
		`{"model":"llama3.2:3b"}`:                  `{"model":"llama3.2:3b"}`,
		`{"model":"nobody's"}`:                     `{"model":"nobody's"}`,
		`{"a":"` + large + `","model":"q"}`:        `{"a":"` + large + `","model":"q"}`, // too large to be read
	} {
		require.True(t, want == get("/one/api/show", "application/json", sent), "%.80s", sent)
	}
	require.Equal(t, `{"model":"llama3.2:3b"}`, get("/one/api/show", "application/x-www-form-urlencoded", `{"model":"gpt-4o-mini"}`), "as curl -d sends it")
	require.Equal(t, `{"model":"tuned","content":"a"}`, get("/two/tokenize", "application/json", `{"model":"x","content":"a"}`))

	// Nor is one that is larger than what the route takes where it reads.
	require.Equal(t, `{"model":"gpt-4o-mini","a":"`+large[:1000]+`"}`, get("/three/api/show", "application/json", `{"model":"gpt-4o-mini","a":"`+large[:1000]+`"}`))
	require.Equal(t, `{"model":"llama3.2:3b"}`, get("/three/api/show", "application/json", `{"model":"gpt-4o-mini"}`))

	// What can't be read is its server's to judge.
	for _, sent := range []string{`{"model":"gpt-4o-mini"`, `{"model":"gpt-4o-mini","model":"q"}`, "\x00{"} {
		require.Equal(t, sent, get("/one/api/show", "application/json", sent))
	}
	strange := s.sending("POST", "/one/api/show", http.Header{"Content-Encoding": {"aws-chunked"}, "Content-Type": {"application/json"}}, []byte(`{"model":"q"}`))
	require.Equal(t, 200, strange.status, "%s", strange.body)
	require.Equal(t, `{"model":"q"}`, string(rec.next(t).body))

	// Uploads pass as they are, whatever they hold.
	for _, path := range []string{"/one/api/blobs/sha256:0", "/one/api/create"} {
		blob := `{"x_priority":1,"model":"gpt-4o-mini"}`
		require.Equal(t, blob, get(path, "application/json", blob))
	}
	require.Zero(t, s.status().Scheduler.Loads, "nothing was loaded")
}

func TestN3_AnAliasIsShownByOllamaItself(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{shelf("ollama", modelserver.Ollama, "model llama3.2:3b {\nvram 3GiB\nalias gpt-4o-mini\n}", map[string]float64{"llama3.2:3b": 3})}})
	own := s.askJSON("/ollama/api/show", `{"model":"llama3.2:3b"}`)
	alias := s.sending("POST", "/ollama/api/show", http.Header{}, []byte(`{"model":"gpt-4o-mini"}`))
	require.Equal(t, own.status, alias.status)
	require.Equal(t, string(own.body), string(alias.body))
	require.Equal(t, 200, own.status)
}
