//go:build linux && real

package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	realollama "github.com/gpu-broker/caddy-gpu-broker/test/ollama"
	"github.com/gpu-broker/caddy-gpu-broker/test/real"
)

// ollamaHas lists what a real ollama has loaded.
func ollamaHas(t *testing.T, srv *realollama.Server) func() []string {
	return func() (loaded []string) {
		models, err := srv.PS()
		require.NoError(t, err)
		for _, m := range models {
			loaded = append(loaded, strings.TrimSuffix(m.Name, ":latest"))
		}
		return loaded
	}
}

func TestRealOllamaMakesWayModelByModel(t *testing.T) {
	t.Parallel()
	srv := realollama.Start(t)
	has := ollamaHas(t, srv)
	s := realSite(t, "8GiB", realConsumer{name: "llm", preset: "ollama", server: srv.URL, lines: "vram 1GiB\n" + aModel(realollama.Tiny) + aModel(realollama.Tiny2)})
	asks := func(path, model string) {
		t.Helper()
		a := s.tellJSON(path, fmt.Sprintf(`{"model":%q,"prompt":"hello","messages":[{"role":"user","content":"hello"}],"stream":false,"max_tokens":8,"options":{"num_predict":8}}`, model))
		require.NoError(t, a.err)
		require.Equal(t, 200, a.status, "%s: %s", path, a.body)
	}
	// The broker's load is an embedding, and its models here chat.
	asks("/llm/api/chat", realollama.Tiny)
	s.holdsOnly(has, realollama.Tiny)
	asks("/llm/v1/chat/completions", realollama.Tiny2)
	s.holdsOnly(has, realollama.Tiny2)
	asks("/llm/api/generate", realollama.Tiny)
	s.holdsOnly(has, realollama.Tiny)
	asks("/llm/v1/completions", realollama.Tiny2+":latest")
	s.holdsOnly(has, realollama.Tiny2)
	require.EqualValues(t, 3, s.status().Scheduler.Evictions)
	s.doByHand("consumers/llm/tiny2/unload")
	s.holdsOnly(has)
	s.doByHand("consumers/llm/tiny2/load")
	s.holdsOnly(has, realollama.Tiny2)
	asks("/llm/api/chat", realollama.Tiny2)

	// A model that nobody named, loaded past the broker, is adopted.
	resp, err := http.Post(srv.URL+"/api/generate", "application/json", strings.NewReader(`{"model":"slow"}`))
	require.NoError(t, err)
	_ = resp.Body.Close()
	require.Equal(t, 200, resp.StatusCode)
	s.until("it is adopted", func() bool { return s.slot("llm", realollama.Slow+":latest").State == "READY" })
	require.True(t, s.slot("llm", realollama.Slow+":latest").Adopted)
	s.noneFailed()
}

// Without a GPU all of a model is on the CPU.
func TestRealOllamaThatComputesOnTheCPUIsNotServedWhereThatIsForbidden(t *testing.T) {
	t.Parallel()
	srv := realollama.Start(t)
	has := ollamaHas(t, srv)
	s := realSite(t, "8GiB", realConsumer{name: "llm", preset: "ollama", server: srv.URL, lines: "require_full_gpu\n" + aModel(realollama.Tiny)})
	a := s.tellJSON("/llm/api/chat", fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"hello"}],"stream":false}`, realollama.Tiny))
	require.NoError(t, a.err)
	require.Equal(t, 503, a.status, "%s", a.body)
	require.Regexp(t, `only 0B of the .* of tiny:latest came onto the GPU`, string(a.body))
	require.EqualValues(t, 3, s.status().Scheduler.LoadFailures)
	require.Empty(t, has())
}

func TestRealWhisperServerIsStartedAndStopped(t *testing.T) {
	t.Parallel()
	whisper, whisperMark := startedWhisper(t)
	llama, llamaMark := startedLlama(t, real.Tiny)
	s := realSite(t, "8GiB",
		realConsumer{name: "ear", preset: "whispercpp", starts: whisper, lines: "vram 6GiB"},
		realConsumer{name: "llm", preset: "llamacpp", starts: llama, lines: "vram 6GiB"})
	first := s.hears("/ear/inference")
	require.Empty(t, isTranscript(first))
	s.chats("/llm"+llamaChats, "any")
	require.Empty(t, alive(t, whisperMark), "it made way")
	again := s.hears("/ear/inference")
	require.Empty(t, isTranscript(again))
	require.Equal(t, string(first.body), string(again.body), "it hears the same")
	require.Empty(t, alive(t, llamaMark))
	require.Equal(t, 2, s.process("ear").Starts)
	s.noneFailed()
}

// runnerModel is an entry of a model runner's list of what is loaded.
type runnerModel struct {
	Model string `json:"model_name"`
	InUse bool   `json:"in_use"`
}

func TestRealModelRunnerMakesWayModelByModel(t *testing.T) {
	t.Parallel()
	runner := real.StartModelRunner(t)
	const chats = "/runner/engines/v1/chat/completions"
	has := func() (loaded []string) {
		for _, m := range askReal[[]runnerModel](t, runner.URL+"/engines/ps") {
			loaded = append(loaded, strings.TrimSuffix(m.Model, ":latest"))
		}
		return loaded
	}
	s := realSite(t, "8GiB", realConsumer{name: "runner", preset: "docker-model-runner", server: runner.URL,
		lines: "unload_timeout 2m\n" + aModel("ai/tiny") + aModel("ai/slow")}) // its llama-server may take 30 s to end
	s.chats(chats, "ai/tiny")
	s.holdsOnly(has, "ai/tiny")
	s.chats(chats, "ai/slow")
	s.holdsOnly(has, "ai/slow")
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)

	// It leaves a busy model loaded; the broker waits for the end of the chat, also of one past it.
	for _, past := range []bool{false, true} {
		at := *s
		path := chats
		if past {
			at.url, path = runner.URL, strings.TrimPrefix(chats, "/runner")
		}
		running := at.streamsChat(path, "ai/slow", 150)
		waits := s.sendJSON(chats, chatBody("ai/tiny", 8, false))
		s.until("a chat waits", func() bool { return s.status().Consumers["runner"].Waiting == 1 })
		require.Equal(t, []string{"ai/slow"}, has())
		s.whole(running)
		select {
		case a := <-waits:
			require.Empty(t, isChat(a))
		case <-time.After(3 * patience):
			t.Fatal("no answer")
		}
		s.holdsOnly(has, "ai/tiny")
		s.chats(chats, "ai/slow")
		s.holdsOnly(has, "ai/slow")
	}
	s.noneFailed()
}

// All kinds of servers on a card that holds two of them. (Ollama lists a file once, by one of its names:
// models that may be loaded side by side must be different ones.)
func TestRealServersShareACard(t *testing.T) {
	t.Parallel()
	ollama := realollama.Start(t)
	router := real.StartLlamaRouter(t, "--no-models-autoload")
	llama, llamaMark := startedLlama(t, real.Tiny)
	whisper, whisperMark := startedWhisper(t)
	s := realSite(t, "14GiB",
		realConsumer{name: "ollama", preset: "ollama", server: ollama.URL, lines: aModel(realollama.Tiny) + aModel(realollama.Slow)},
		realConsumer{name: "router", preset: "llamacpp-router", server: router.URL, lines: aModel(real.Tiny) + aModel(real.Tiny2)},
		realConsumer{name: "llama", preset: "llamacpp", starts: llama, lines: "vram 6GiB"},
		realConsumer{name: "ear", preset: "whispercpp", starts: whisper, lines: "vram 6GiB"})
	chat := func(path, model string) func() string {
		return func() string { return isChat(s.tellJSON(path, chatBody(model, 8, false))) }
	}
	kinds := []func() string{
		chat("/ollama"+llamaChats, realollama.Tiny), chat("/router"+llamaChats, real.Tiny), chat("/llama"+llamaChats, "any"),
		func() string { return isTranscript(s.hears("/ear/inference")) },
		chat("/router"+llamaChats, real.Tiny2), chat("/ollama"+llamaChats, realollama.Slow),
	}
	const clients, requests = 4, 30
	wrong := make([]string, requests)
	var all sync.WaitGroup
	for client := range clients {
		all.Go(func() {
			for i := client; i < requests; i += clients {
				wrong[i] = kinds[i%len(kinds)]()
			}
		})
	}
	all.Wait()
	for i, w := range wrong {
		require.Empty(t, w, "request %d", i)
	}
	st := s.status()
	require.NotZero(t, st.Scheduler.Evictions)
	require.LessOrEqual(t, st.GPUs[0].Booked, int64(gib(14)))
	s.noneFailed()

	// What is loaded is what the broker says; then nothing is left.
	for name, c := range st.Consumers {
		if c.Loaded {
			s.doByHand("consumers/" + name + "/unload")
		}
	}
	s.holdsOnly(ollamaHas(t, ollama))
	s.holdsOnly(routerHas(t, router.URL))
	require.Empty(t, append(alive(t, llamaMark), alive(t, whisperMark)...))
	s.halt()
}

// Clients can't unload what others use, past the broker's order.
func TestRealModelRunnersOwnUnloadIsNotForClients(t *testing.T) {
	t.Parallel()
	runner := real.StartModelRunner(t)
	s := realSite(t, "8GiB", realConsumer{name: "runner", preset: "docker-model-runner", server: runner.URL, lines: aModel("ai/tiny")})
	a := s.tellJSON("/runner/engines/unload", `{"all":true}`)
	require.Equal(t, http.StatusForbidden, a.status, "%s", a.body)
	require.True(t, json.Valid(a.body))
}
