package e2e

import (
	"bytes"
	"compress/gzip"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

func TestN3_AModelIsSentAsConfiguredAndItsFieldsAreChanged(t *testing.T) {
	t.Parallel()
	rec := newRecorder(t)
	route := "gpu_broker {\nmodel_from body\n}\nreverse_proxy " + rec.addr
	s := start(t, layout{
		Consumers: []consumer{{Options: modelserver.Options{Name: "ollama", Manner: modelserver.Ollama,
			Models: map[string]gpu.Bytes{"llama3.2:3b": gib(3), "qwen2.5:7b": gib(4)}},
			Lines: "model llama3.2:3b {\nvram 3GiB\nalias gpt-4o-mini\nsend_as llama3.2:tuned\nset temperature 0.7\nset user \"me too\"\ndefault max_tokens 1024\nstrip seed logit_bias\n}\n" +
				"model qwen2.5:7b {\nvram 4GiB\nalias qwen\nsend_as client\n}"}},
		Routes: "handle /one/* {\ngpu_broker ollama\nreverse_proxy " + rec.addr + "\n}\nhandle {\n" + route + "\n}",
	})
	send := func(path string, header http.Header, body string) received {
		t.Helper()
		return rec.takes(t, s, path, header, body)
	}
	json := http.Header{"Content-Type": {"application/json"}}
	for sent, want := range map[string]string{
		`{"seed":1, "model":"gpt-4o-mini","temperature": 2,"x" : 1.0}`:   `{"model":"llama3.2:tuned","temperature": 0.7,"x" : 1.0,"user":"me too","max_tokens":1024}`,
		`{"model":"llama3.2:3b","max_tokens":5,"logit_bias":{"seed":1}}`: `{"model":"llama3.2:tuned","max_tokens":5,"temperature":0.7,"user":"me too"}`,
		`{"model":"qwen","seed":1}`:                                      `{"model":"qwen","seed":1}`,
	} {
		require.Equal(t, want, string(send("/v1/chat/completions", json.Clone(), sent).body))
		require.Equal(t, want, string(send("/one/v1/chat/completions", json.Clone(), sent).body), "on a route of its own")
	}

	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err := w.Write([]byte(`{"model":"gpt-4o-mini","temperature":1,"user":"a","max_tokens":1,"seed":2}`))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	got := send("/v1/chat/completions", http.Header{"Content-Type": {"application/json"}, "Content-Encoding": {"gzip"}}, packed.String())
	require.Empty(t, got.header.Get("Content-Encoding"))
	require.Equal(t, `{"model":"llama3.2:tuned","temperature":0.7,"user":"me too","max_tokens":1}`, string(got.body))

	body, kind := speech(t, 1000, "gpt-4o-mini")
	got = send("/v1/audio/transcriptions", http.Header{"Content-Type": {kind}}, string(body))
	require.Equal(t, string(bytes.Replace(body, []byte("\r\n\r\ngpt-4o-mini\r\n"), []byte("\r\n\r\nllama3.2:tuned\r\n"), 1)), string(got.body))
}

func TestN3_AFallbackIsAskedByTheNameThatItsConsumerGivesIt(t *testing.T) {
	t.Parallel()
	cloud := newRecorder(t)
	s := start(t, layout{
		Total: "12GiB",
		Global: "consumer hosted {\ncloud\nupstream " + cloud.addr + "\nalias gpt-4o\n}\n" +
			"consumer other {\ncloud\nupstream " + cloud.addr + "\nsend_as claude\n}",
		Consumers: []consumer{
			{Options: modelserver.Options{Name: "llama", VRAM: gib(10)}, Lines: "alias llama3.1:8b\nfallback hosted {\nas gpt-4o-mini\n}"},
			{Options: modelserver.Options{Name: "sdxl", VRAM: gib(10)}},
		},
		Routes: "handle /fixed {\ngpu_broker llama\nreverse_proxy {http.gpu_broker.upstream}\n}\n" +
			"handle /other {\ngpu_broker {\nmodel_from body\nfallback other\n}\nreverse_proxy {http.gpu_broker.upstream}\n}\n" +
			"handle /two {\ngpu_broker {\nmodel_from header X-Model\nmodel_from body\nfallback other\n}\nreverse_proxy {http.gpu_broker.upstream}\n}\n" +
			"handle {\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	s.askJSON("/x", `{"model":"sdxl"}`).servedBy(t, "sdxl")
	named := http.Header{"Content-Type": {"application/json"}, "X-Model": {"llama3.1:8b"}}
	for body, want := range map[string]string{
		`{"a":1,"model":"of-its-own"}`:  `{"a":1,"model":"claude"}`,
		`{"a":1,"model":"llama3.1:8b"}`: `{"a":1,"model":"claude"}`,
		`{"a":1}`:                       `{"a":1,"model":"claude"}`,
	} {
		s.sending("POST", "/two", named, []byte(body)).servedBy(t, "other")
		require.Equal(t, want, string(cloud.next(t).body), body)
	}
	for path, want := range map[string]string{"/x": "gpt-4o-mini", "/fixed": "gpt-4o-mini", "/other": "claude"} {
		s.askJSON(path, `{"a":1,"model":"llama3.1:8b"}`)
		require.Equal(t, `{"a":1,"model":"`+want+`"}`, string(cloud.next(t).body), path)
	}
	s.askJSON("/x", `{"model":"other"}`).servedBy(t, "other")
	require.Equal(t, `{"model":"claude"}`, string(cloud.next(t).body), "asked for by its own name")
}

func TestN3_ARouteThatMustReadBodiesToRenameAModelCannotStreamThem(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Consumers: []consumer{{Options: modelserver.Options{Name: "llama", VRAM: gib(4)}, Lines: "alias gpt"}},
		Routes:    "handle /fixed {\ngpu_broker llama {\nstream_body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	a := s.reload(func(c string) string { return strings.Replace(c, "alias gpt\n", "alias gpt\nsend_as tuned\n", 1) })
	require.Equal(t, 400, a.status)
	require.Contains(t, string(a.body), "stream_body passes bodies on unread, but send_as")
}

func TestN5_NamesAndAliasesMayHoldSpaces(t *testing.T) {
	t.Parallel()
	rec := newRecorder(t)
	s := start(t, layout{
		Consumers: []consumer{{Options: modelserver.Options{Name: "ollama", Manner: modelserver.Ollama,
			Models: map[string]gpu.Bytes{"Llama 3.2 (small)": gib(3)}},
			Lines: "model \"Llama 3.2 (small)\" {\nvram 3GiB\nalias \"My model\" tiny\n}"}},
		Routes: "handle {\ngpu_broker {\nmodel_from body\nmodel_from path /models/*/infer\n}\nreverse_proxy " + rec.addr + "\n}",
	})
	for _, name := range []string{"My model", "Llama 3.2 (small)", "tiny"} {
		s.askJSON("/v1/chat/completions", `{"model":"`+name+`"}`).servedBy(t, "ollama")
		require.Equal(t, `{"model":"Llama 3.2 (small)"}`, string(rec.next(t).body))
	}
	s.sending("POST", "/models/My%20model/infer", nil, []byte("x")).servedBy(t, "ollama")
	rec.next(t)
	require.Contains(t, string(s.get("/v1/models").body), `"Llama 3.2 (small)"`)
}

func TestN4_TwoNamesForOneFallbackAreAnErrorThatNamesBothPlaces(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Global:    "consumer hosted {\ncloud\nupstream 127.0.0.1:9\n}",
		Consumers: []consumer{{Options: modelserver.Options{Name: "llama", VRAM: gib(4)}, Lines: "alias gpt"}},
		Routes:    "handle /fixed {\ngpu_broker llama {\nheartbeat 1s\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	twice := "fallback hosted {\nas x\n}\nfallback hosted {\nas y\n}"
	for _, line := range []string{"alias gpt\n", "heartbeat 1s\n"} { // of the consumer, and of the route
		a := s.reload(func(c string) string { return strings.Replace(c, line, line+twice+"\n", 1) })
		require.Equal(t, 400, a.status)
		require.Regexp(t, `fallback hosted: as is set twice, to x \(Caddyfile:\d+\) and to y: leave one of them out, at Caddyfile:\d+`, string(a.body))
	}
	require.Equal(t, 200, s.reload(func(c string) string {
		return strings.Replace(c, "alias gpt\n", "alias gpt\nfallback hosted\nfallback hosted {\nas x\n}\n", 1)
	}).status)
}

// A server with one model serves requests that name none. A service elsewhere, which has many, would refuse them.
func TestN3_AFallbackGetsANameThoughTheClientGaveNone(t *testing.T) {
	t.Parallel()
	cloud := newRecorder(t)
	const proxy = "\nreverse_proxy {http.gpu_broker.upstream}\n}\n"
	s := start(t, layout{
		Total:  "12GiB",
		Global: "consumer hosted {\ncloud\nupstream " + cloud.addr + "\nalias gpt-4o\n}",
		Consumers: []consumer{
			{Options: modelserver.Options{Name: "llama", VRAM: gib(10)}, Lines: "fallback hosted {\nas gpt-4o-mini\n}"},
			shelf("ollama", modelserver.Ollama, "fallback hosted\nmodel one {\nvram 10GiB\n}", map[string]float64{"one": 10}),
			plainModel("plain", 10, "fallback hosted"),
			plainModel("sdxl", 10),
		},
		Routes: "handle /default/* {\ngpu_broker {\nmodel_from body\ndefault llama\n}" + proxy +
			"handle /only/* {\nuri strip_prefix /only\ngpu_broker ollama" + proxy +
			"handle /untold/* {\ngpu_broker plain" + proxy +
			"handle {\ngpu_broker llama" + proxy,
	})
	json := func(path, body string) string {
		t.Helper()
		s.askJSON(path, body).servedBy(t, "hosted")
		got := cloud.next(t)
		require.EqualValues(t, len(got.body), got.length)
		return string(got.body)
	}
	s.serve("sdxl")
	for path, want := range map[string]string{"/default/chat": "gpt-4o-mini", "/fixed/chat": "gpt-4o-mini", "/only/v1/chat/completions": "gpt-4o"} {
		require.Equal(t, `{"a":1,"model":"`+want+`"}`, json(path, `{"a":1}`), path)
	}
	require.Equal(t, `{"a":1}`, json("/untold/chat", `{"a":1}`), "whose names nobody has told")
	body, kind := speech(t, 2<<20, "")
	s.sending("POST", "/default/audio", http.Header{"Content-Type": {kind}}, body).servedBy(t, "hosted")
	require.True(t, bytes.Equal(bytes.Replace(body, []byte("name=\"model\"\r\n\r\n"), []byte("name=\"model\"\r\n\r\ngpt-4o-mini"), 1), cloud.next(t).body))

	s.doByHand("consumers/sdxl/unload")
	home := s.askJSON("/default/echo", `{"a":1}`)
	home.servedBy(t, "llama")
	require.Equal(t, `{"a":1}`, string(home.body), "at home nothing is added")
}
