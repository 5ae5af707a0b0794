package clients

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/textproto"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

// named is a site at which clients and servers call the models by different names. Taps note what the servers were asked for.
type named struct {
	*site
	taps map[string]*tap
}

// startNamed runs that site until the test ends.
func startNamed(t *testing.T) *named {
	t.Helper()
	s := &named{site: newSite(t, 24*gpu.GiB), taps: map[string]*tap{}}
	for _, o := range []modelserver.Options{
		{Name: "llm", VRAM: 6 * gpu.GiB},
		{Name: "ollama", Manner: modelserver.Ollama, Models: map[string]gpu.Bytes{"llama3.2:3b": 3 * gpu.GiB, "qwen2.5:7b": 5 * gpu.GiB, "hf.co/org/vectors:Q8": gpu.GiB}},
		{Name: "speech", Manner: modelserver.Speaches, Models: map[string]gpu.Bytes{"Systran/faster-whisper-small": 2 * gpu.GiB}},
		{Name: "sdxl", VRAM: 23*gpu.GiB + gpu.GiB/2},
	} {
		s.taps[o.Name] = newTap(t, s.serve(o))
		s.Env = append(s.Env, strings.ToUpper(o.Name)+"="+s.taps[o.Name].addr())
	}
	hosted, err := modelserver.Start(modelserver.Options{Name: "hosted", Manner: modelserver.LocalAI, SimDir: t.TempDir(),
		Models: map[string]gpu.Bytes{"cloud-small": 0, "cloud-large": 0, "cloud-whisper": 0, "cloud-vectors": 0},
		Faults: modelserver.Faults{FailPaths: map[string]int{"/v1/completions": http.StatusTooManyRequests}}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, hosted.Close()) })
	cloud, ca := newCloud(t, hosted)
	s.taps["hosted"] = cloud
	s.Env = append(s.Env, "HOSTED="+cloud.addr(), "HOSTED_CA="+ca, "HOSTED_API_KEY="+cloudKey)
	config, err := os.ReadFile("testdata/names.Caddyfile")
	require.NoError(t, err)
	s.Run("Caddyfile", string(config))
	return s
}

// askedByTheirOwnNames requires that no server was asked for a model by a name that it does not know.
func (s *named) askedByTheirOwnNames() {
	s.t.Helper()
	for server, known := range map[string][]string{
		"llm":    {"tuned-7b"},
		"ollama": {"hf.co/org/vectors:Q8", "llama3.2:3b", "qwen2.5:7b", "Library/Qwen2.5:7B"}, // to ollama the last two are one
		"speech": {"Systran/faster-whisper-small"},
		"sdxl":   {"dall-e-3"}, // an alias of a consumer is sent as it is
		"hosted": {"cloud-large", "cloud-small", "cloud-vectors", "cloud-whisper"},
	} {
		assert.Subset(s.t, known, s.taps[server].names(), server)
	}
}

func TestE5_OpenAIsSDKGetsEachModelByTheNameThatItsServerKnows(t *testing.T) {
	t.Parallel()
	s := startNamed(t)
	s.node("names-openai.mjs")
	s.served()
	s.askedByTheirOwnNames()
	cloud := s.taps["hosted"]
	require.Equal(t, []string{"cloud-large", "cloud-small"}, cloud.asked("POST /v1/chat/completions"))
	require.Equal(t, []string{"cloud-whisper"}, cloud.asked("POST /v1/audio/transcriptions"))
	require.Equal(t, []string{"cloud-vectors"}, cloud.asked("POST /v1/embeddings"))
	require.Equal(t, []string{"tuned-7b"}, s.taps["llm"].asked("POST /v1/chat/completions"))
	require.Equal(t, []string{"Systran/faster-whisper-small"}, s.taps["speech"].asked("POST /v1/audio/transcriptions"))
}

func TestE5_OllamasClientGetsEachModelByTheNameThatItsServerKnows(t *testing.T) {
	t.Parallel()
	s := startNamed(t)
	s.node("names-ollama.mjs")
	s.served()
	s.askedByTheirOwnNames()
	cloud := s.taps["hosted"]
	for _, route := range []string{"POST /api/chat", "POST /api/generate"} {
		require.Equal(t, []string{"cloud-small"}, cloud.asked(route), route)
	}
	require.Equal(t, []string{"cloud-vectors"}, cloud.asked("POST /api/embed"))
}

// reply is what curl got.
type reply struct {
	status  int
	version string // of HTTP
	header  http.Header
	body    string
}

// curl sends a request with curl, its arguments as a person writes them.
func (s *named) curl(path string, args ...string) reply {
	s.t.Helper()
	r, err := s.tryCurl(path, args...)
	require.NoError(s.t, err)
	return r
}

func (s *named) tryCurl(path string, args ...string) (r reply, err error) {
	headers := filepath.Join(s.t.TempDir(), "headers")
	cmd := exec.CommandContext(s.t.Context(), "curl", append([]string{"-sS", "--max-time", "60", "--cacert", caddytest.CAFile(s.Dir),
		s.url + path, "-D", headers, "-w", "%{stderr}%{http_code} %{http_version}"}, args...)...)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err == nil {
		_, err = fmt.Sscan(said.String(), &r.status, &r.version)
	}
	if err == nil {
		r.header, err = lastHeader(headers)
	}
	if err != nil {
		return r, fmt.Errorf("curl %s %q: %w\n%s", path, args, err, said.String())
	}
	r.body = string(out)
	return r, nil
}

// lastHeader reads the header of an answer, before which others may stand, such as that of a 100 Continue.
func lastHeader(file string) (http.Header, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	all := strings.Split(strings.TrimSuffix(string(text), "\r\n\r\n"), "\r\n\r\n")
	_, lines, _ := strings.Cut(all[len(all)-1], "\r\n")
	h, err := textproto.NewReader(bufio.NewReader(strings.NewReader(lines + "\r\n\r\n"))).ReadMIMEHeader()
	return http.Header(h), err
}

// came requires that a consumer has served, by its own word and by the broker's.
func (r reply) came(t *testing.T, consumer string) reply {
	t.Helper()
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Equal(t, []string{consumer}, r.header["X-Gpu-Broker-Consumer"], r.body)
	require.Equal(t, []string{consumer}, r.header["X-Modelserver"], r.body)
	require.Len(t, r.header["Server-Timing"], 1)
	return r
}

// model is the model that a whole answer names.
func (r reply) model(t *testing.T) string {
	t.Helper()
	require.Equal(t, []string{fmt.Sprint(len(r.body))}, r.header["Content-Length"])
	return r.doc(t)["model"].(string)
}

func (r reply) doc(t *testing.T) (doc map[string]any) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(r.body), &doc), r.body)
	return doc
}

// streamed are the models and the text of a stream of chat completions.
func (r reply) streamed(t *testing.T) (models []string, text string) {
	t.Helper()
	require.Equal(t, []string{"text/event-stream"}, r.header["Content-Type"])
	seen := map[string]bool{}
	events := strings.Split(strings.TrimSuffix(r.body, "\n\n"), "\n\n")
	require.Equal(t, "data: [DONE]", events[len(events)-1])
	for _, event := range events[:len(events)-1] {
		var chunk struct {
			Model   string
			Choices []struct{ Delta struct{ Content string } }
		}
		require.NoError(t, json.Unmarshal([]byte(strings.TrimPrefix(event, "data: ")), &chunk), event)
		seen[chunk.Model] = true
		text += chunk.Choices[0].Delta.Content
	}
	return slices.Sorted(maps.Keys(seen)), text
}

// chatBy is a chat's request as JSON.
func chatBy(model, more string) string {
	return fmt.Sprintf(`{"model": %q, "messages": [{"role": "user", "content": "Hello, GPU."}]%s}`, model, more)
}

func TestE5_CurlGetsEachModelByTheNameThatItsServerKnows(t *testing.T) {
	t.Parallel()
	s := startNamed(t)
	const isJSON = "Content-Type: application/json"
	folder := t.TempDir()
	sound := bytes.Repeat([]byte("sound\r\n--"), 400_000) // curl asks whether it may send so much over HTTP/1.1 (Expect)
	recording := filepath.Join(folder, "a.wav")
	require.NoError(t, os.WriteFile(recording, sound, 0o600))
	asked := filepath.Join(folder, "chat.json")

	// asks sends the same requests however a person may write them.
	asks := func(ollama, llm, speech string, as map[string]string) {
		t.Helper()
		for _, how := range [][]string{{"-H", isJSON}, {}, {"-H", isJSON, "--http1.1"}, {"-H", isJSON, "--http1.1", "-H", "Transfer-Encoding: chunked"}, {"-H", isJSON, "--compressed"}} {
			r := s.curl("/v1/chat/completions", append(how, "-d", chatBy("gpt-4o-mini", ""))...).came(t, ollama)
			require.Equal(t, as["gpt-4o-mini"], r.model(t), how)
		}
		require.Equal(t, as["gpt-4o"], s.curl("/v1/chat/completions", "-H", isJSON, "-d", chatBy("gpt-4o", "")).came(t, llm).model(t))

		// An answer as a stream, to a request from a file that is longer than what is kept in memory.
		require.NoError(t, os.WriteFile(asked, []byte(chatBy("qwen2.5:7b", `, "stream": true, "user": "`+strings.Repeat("x", 2<<20)+`"`)), 0o600))
		for _, version := range []string{"--http1.1", "--http2"} {
			r := s.curl("/v1/chat/completions", "-N", version, "-H", isJSON, "--data-binary", "@"+asked).came(t, ollama)
			models, text := r.streamed(t)
			require.Equal(t, []string{as["qwen2.5:7b"]}, models)
			require.Contains(t, text, ollama)
			require.Equal(t, strings.TrimPrefix(version, "--http"), r.version)

			for _, form := range [][]string{{"-F", "model=whisper-1", "-F", "file=@" + recording}, {"-F", "file=@" + recording, "-F", "model=whisper-1"}} {
				r := s.curl("/v1/audio/transcriptions", append(form, version)...).came(t, speech)
				require.Equal(t, modelserver.Transcript(speech, sound), r.doc(t)["text"])
			}
			r = s.curl("/v1/audio/transcriptions", "-N", version, "-F", "stream=true", "-F", "file=@"+recording, "-F", "model=whisper-1").came(t, speech)
			require.Contains(t, r.body, fmt.Sprintf(`"text":%q`, modelserver.Transcript(speech, sound)))
		}
	}

	own := map[string]string{"gpt-4o-mini": "llama3.2:3b", "qwen2.5:7b": "qwen2.5:7b", "gpt-4o": "tuned-7b"}
	asks("ollama", "llm", "speech", own)
	fallbacks := func() int { return s.decisions("fallback") }
	require.Zero(t, fallbacks(), "all of them fit")

	// A picture that is being drawn: the others go to the cloud at once.
	s.servers["sdxl"].SetFaults(func(f *modelserver.Faults) { f.HoldWork = true })
	drawn := make(chan reply, 1)
	go func() {
		r, err := s.tryCurl("/v1/images/generations", "-H", isJSON, "-d", `{"model":"dall-e-3","prompt":"a boat"}`)
		assert.NoError(t, err)
		drawn <- r
	}()
	s.Until("the picture is being drawn", func() bool { return s.servers["sdxl"].Stats().Working == 1 })
	evictions := s.Status().Scheduler.Evictions
	asks("hosted", "hosted", "hosted", map[string]string{"gpt-4o-mini": "cloud-small", "qwen2.5:7b": "cloud-small", "gpt-4o": "cloud-large"})
	require.Equal(t, 5+1+2+6, fallbacks())
	for _, how := range [][]string{{"-H", isJSON, "-d", chatBy("qwen2.5:14b", "")}, {"-H", isJSON, "-d", chatBy("qwen2.5:14b", `,"stream":true`)}} {
		r := s.curl("/v1/chat/completions", how...)
		require.Equal(t, http.StatusNotFound, r.status, r.body)
		require.Equal(t, "unknown_model", r.doc(t)["error"].(map[string]any)["code"])
	}
	require.Equal(t, http.StatusNotFound, s.curl("/v1/audio/transcriptions", "-F", "file=@"+recording, "-F", "model=whisper-2").status)
	require.Equal(t, evictions, s.Status().Scheduler.Evictions)
	require.Equal(t, 1, s.servers["sdxl"].Stats().Working)
	s.servers["sdxl"].SetFaults(func(f *modelserver.Faults) { f.HoldWork = false })
	select {
	case r := <-drawn:
		r.came(t, "sdxl")
	case <-time.After(caddytest.Patience):
		t.Fatal("the picture is never drawn")
	}
	s.served()
	s.askedByTheirOwnNames()
	require.Equal(t, []string{"cloud-large", "cloud-small"}, s.taps["hosted"].asked("POST /v1/chat/completions"))
	require.Equal(t, []string{"cloud-whisper"}, s.taps["hosted"].asked("POST /v1/audio/transcriptions"))
}

// decisions counts the broker's decisions of a kind.
func (s *named) decisions(kind string) (n int) {
	s.t.Helper()
	resp, err := s.Client.Get(s.Broker + "/decisions")
	require.NoError(s.t, err)
	defer func() { require.NoError(s.t, resp.Body.Close()) }()
	var doc struct{ Decisions []struct{ Kind string } }
	require.NoError(s.t, json.NewDecoder(resp.Body).Decode(&doc))
	for _, d := range doc.Decisions {
		if d.Kind == kind {
			n++
		}
	}
	return n
}
