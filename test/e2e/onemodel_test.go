package e2e

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// sending sends a body with headers to the site.
func (s *site) sending(method, path string, header http.Header, body []byte) answer {
	s.t.Helper()
	req, err := http.NewRequest(method, s.url+path, bytes.NewReader(body))
	require.NoError(s.t, err)
	req.Header = header
	resp, err := s.client.Do(req)
	require.NoError(s.t, err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	require.NoError(s.t, err)
	return answer{status: resp.StatusCode, header: resp.Header, body: data}
}

// ollamaAndWhisper are two servers behind one URL, of which ollama takes fields in any case.
func ollamaAndWhisper(t *testing.T, lines string) *site {
	return start(t, layout{
		Consumers: []consumer{
			{Options: modelserver.Options{Name: "ollama", Manner: modelserver.Ollama, Models: map[string]gpu.Bytes{"llama3.2:3b": gib(3), "qwen3:4b": gib(4)}},
				Lines: "model llama3.2:3b {\nvram 3GiB\n}\nmodel qwen3:4b {\nvram 4GiB\n}"},
			{Options: modelserver.Options{Name: "whisper", VRAM: gib(2)}},
		},
		Routes: "handle {\ngpu_broker {\n" + lines + "\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
}

func TestH4_ARequestThatNamesTwoModelsIsRefusedBeforeAnythingIsLoaded(t *testing.T) {
	t.Parallel()
	s := ollamaAndWhisper(t, "model_from body\nmodel_from query\nmodel_from header X-Model\ndefault whisper")
	json := http.Header{"Content-Type": {"application/json"}}
	form := http.Header{"Content-Type": {"application/x-www-form-urlencoded"}}
	for _, c := range []struct {
		path   string
		header http.Header
		body   string
	}{
		{"/v1/chat/completions", json, `{"model":"whisper","model":"llama3.2:3b"}`},
		{"/v1/chat/completions", json, `{"model":"llama3.2:3b","Model":"qwen3:4b"}`}, // as the field case has it
		{"/v1/chat/completions", json, `{"MODEL":"qwen3:4b","model":"llama3.2:3b"}`},
		{"/v1/chat/completions", json, `{"M\u006fDEL":"qwen3:4b","model":"llama3.2:3b"}`},
		{"/v1/chat/completions", json, `{"model":"llama3.2:3b","model":null}`},
		{"/x", form, "model=whisper&model=llama3.2:3b"},
		{"/x", form, "model=whisper;model=llama3.2:3b"},
		{"/x?model=whisper&model=llama3.2:3b", json, `{}`},
		{"/x?model=whisper;model=llama3.2:3b", json, `{}`},
		{"/x", http.Header{"Content-Type": {"application/json"}, "X-Model": {"whisper", "llama3.2:3b"}}, `{}`},
	} {
		require.Contains(t, s.sending("POST", c.path, c.header.Clone(), []byte(c.body)).refused(t, 400, "bad_request"), "odel", c.body)
	}
	body, kind := speech(t, 100, "whisper")
	body = bytes.Replace(body, []byte("\r\n--"), []byte("\r\n--"+strings.TrimPrefix(kind, "multipart/form-data; boundary=")+"\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nllama3.2:3b\r\n--"), 1)
	s.ask("POST", "/v1/audio/transcriptions", kind, body).refused(t, 400, "bad_request")
	require.Empty(t, s.decisions("load"))

	// Alike, or in another case where nobody reads it so: it is served.
	s.askJSON("/x", `{"model":"whisper","model":"whisper"}`).servedBy(t, "whisper")
	s.askJSON("/x", `{"model":"whisper","Model":"llama3.2:3b"}`).servedBy(t, "whisper")
	s.askJSON("/api/generate", `{"model":"llama3.2:3b","Model":"llama3.2:3b","prompt":"x","stream":false}`).servedBy(t, "ollama")
}

func TestK4_EncodedBodiesAreReadAndNeverFallToTheDefault(t *testing.T) {
	t.Parallel()
	rec := newRecorder(t)
	s := start(t, layout{
		Consumers: []consumer{{Options: modelserver.Options{Name: "llama", VRAM: gib(10)}}, whisper()},
		Routes: "handle {\ngpu_broker {\nmodel_from body\ndefault llama\nmax_body 3MiB\n}\nreverse_proxy " + rec.addr + "\n}\n" +
			"handle /fixed {\ngpu_broker whisper\nreverse_proxy " + rec.addr + "\n}",
	})
	pack := func(w io.WriteCloser, text string) {
		_, err := io.WriteString(w, text)
		require.NoError(t, err)
		require.NoError(t, w.Close())
	}
	zip := func(text string) []byte { var b bytes.Buffer; pack(gzip.NewWriter(&b), text); return b.Bytes() }
	zst := func(text string) []byte {
		var b bytes.Buffer
		w, err := zstd.NewWriter(&b)
		require.NoError(t, err)
		pack(w, text)
		return b.Bytes()
	}
	br := func(text string) []byte { var b bytes.Buffer; pack(brotli.NewWriter(&b), text); return b.Bytes() }
	header := func(coding string) http.Header {
		return http.Header{"Content-Type": {"application/json"}, "Content-Encoding": {coding}}
	}
	const text = `{"model":"whisper","input":"some words, some words, some words"}`
	for coding, body := range map[string][]byte{"zstd": zst(text), "gzip": zip(text), "br": br(text), "GZIP , zstd": zst(string(zip(text)))} {
		s.sending("POST", "/", header(coding), body).servedBy(t, "whisper")
		got := rec.next(t)
		require.True(t, bytes.Equal(body, got.body), coding)
		require.Equal(t, coding, got.header.Get("Content-Encoding"))
	}
	s.sending("POST", "/", header("zstd"), zst(`{"x_priority":5,"model":"whisper","input":"a"}`)).servedBy(t, "whisper")
	got := rec.next(t)
	require.Equal(t, `{"model":"whisper","input":"a"}`, string(got.body))
	require.Empty(t, got.header.Get("Content-Encoding"))
	require.EqualValues(t, len(got.body), got.length)

	s.sending("POST", "/", header("compress"), []byte(text)).refused(t, 415, "unsupported_encoding")
	s.sending("POST", "/", header("gzip, lz4"), zip(text)).refused(t, 415, "unsupported_encoding")
	s.sending("POST", "/", header("gzip"), []byte(text)).refused(t, 400, "bad_request")
	s.sending("POST", "/", header("zstd"), zst(text)[:20]).refused(t, 400, "bad_request")
	s.sending("POST", "/", header("br"), append(br(text), text...)).refused(t, 400, "bad_request")
	s.sending("POST", "/", header("gzip"), zip(`{"model":"whisper","x":"`+strings.Repeat("a", 4<<20)+`"}`)).refused(t, 413, "body_too_large")
	s.sending("POST", "/", header("gzip"), zip(`{"model":"whisper","x":"`+strings.Repeat("a", 2<<20)+`"}`)).refused(t, 413, "body_too_large")
	require.Zero(t, s.servers["llama"].Stats().LoadsStarted, "nothing came to the default")

	s.sending("POST", "/fixed", header("compress"), []byte("anything")).servedBy(t, "whisper")
	got = rec.next(t)
	require.Equal(t, "anything", string(got.body))
	require.Equal(t, "compress", got.header.Get("Content-Encoding"))
}

// H4: of two places that name a model, the server may read the other: llama.cpp's router reads the query of a GET and the body of a POST.
func TestH4_TwoPlacesMayNotNameTwoModels(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Consumers: []consumer{
			shelf("router", modelserver.LlamaCppRouter, "vram 9GiB\nmodel small {\nalias nick\n}\nmodel other", map[string]float64{"small": 9, "other": 9}),
			shelf("ollama", modelserver.Ollama, "vram 9GiB\nmodel_from header X-Model\nmodel_from body\nmodel one\nmodel two {\nalias gpt-*\n}", map[string]float64{"one": 9, "two": 9}),
		},
		Routes: "handle {\ngpu_broker {\nmodel_from query\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	send := func(method, path, body, header string) answer {
		req, err := http.NewRequest(method, s.url+path, strings.NewReader(body))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		if header != "" {
			req.Header.Set("X-Model", header)
		}
		resp, err := s.client.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return answer{status: resp.StatusCode, header: resp.Header, body: text}
	}
	for _, c := range []struct{ method, path, body, header string }{
		{"GET", "/router/props?model=other", `{"model":"small"}`, ""},
		{"POST", "/router/v1/chat/completions?model=small", `{"model":"other"}`, ""},
		{"POST", "/v1/chat/completions?model=one", `{"model":"two"}`, ""},
		{"POST", "/v1/chat/completions?model=one", `{"model":"other"}`, ""},
		{"POST", "/ollama/v1/chat/completions", `{"model":"two"}`, "one"},
		{"POST", "/ollama/v1/chat/completions", `{"model":"gpt-oss:20b"}`, "two"}, // which its alias fits, and the server may have
	} {
		require.Contains(t, send(c.method, c.path, c.body, c.header).refused(t, 400, "bad_request"), "two models", c.path)
	}
	send("GET", "/router/props?model=other&model=small", `{"model":"small"}`, "").refused(t, 400, "bad_request")
	require.Zero(t, s.servers["router"].Stats().LoadsStarted+s.servers["ollama"].Stats().LoadsStarted)
	chat := `{"model":%q,"messages":[]}`
	require.Equal(t, 200, send("POST", "/router/v1/chat/completions?model=nick", fmt.Sprintf(chat, "small"), "").status, "an alias and its model are one")
	require.Equal(t, 200, send("POST", "/ollama/v1/chat/completions", fmt.Sprintf(chat, "One:latest"), "one").status, "so are two spellings")
}
