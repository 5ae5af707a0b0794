package modelserver

import (
	"bufio"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func startOllama(t *testing.T, opts Options) *Server {
	t.Helper()
	opts.Name, opts.Manner = "ollama", Ollama
	if opts.Models == nil {
		opts.Models = map[string]gpu.Bytes{"tiny": gpu.GiB, "qwen:7b": 5 * gpu.GiB}
	}
	return start(t, opts)
}

func ps(t *testing.T, s *Server) map[string]running {
	t.Helper()
	type list struct{ Models []running }
	out := map[string]running{}
	for _, m := range decode[list](t, want(t, 200, call(bound(t), "GET", s.URL()+"/api/ps", "")).body).Models {
		out[m.Name] = m
	}
	return out
}

func generate(t *testing.T, s *Server, body string) map[string]any {
	t.Helper()
	return decode[map[string]any](t, want(t, 200, call(bound(t), "POST", s.URL()+"/api/generate", body)).body)
}

func TestOllamaLoadsOnAnEmptyPromptAndListsWhatIsLoaded(t *testing.T) {
	s := startOllama(t, Options{})
	require.Empty(t, ps(t, s))
	require.Equal(t, "load", generate(t, s, `{"model":"tiny"}`)["done_reason"])
	require.Equal(t, "load", generate(t, s, `{"model":"qwen:7b","keep_alive":-1}`)["done_reason"])
	loaded := ps(t, s)
	require.Len(t, loaded, 2)
	require.Equal(t, int64(5*gpu.GiB), loaded["qwen:7b"].SizeVRAM)
	require.Equal(t, int64(5*gpu.GiB), loaded["qwen:7b"].Size)
	require.Greater(t, loaded["qwen:7b"].ExpiresAt.Year(), 2300)
	require.WithinDuration(t, time.Now().Add(5*time.Minute), loaded["tiny"].ExpiresAt, 20*time.Second)
	require.Equal(t, 6*gpu.GiB, used(t, s.dir))
}

func TestOllamaListsAModelThatStillLoads(t *testing.T) {
	s := startOllama(t, Options{Faults: Faults{HangLoad: true}})
	loading := send(bound(t), "POST", s.URL()+"/api/generate", `{"model":"tiny"}`)
	require.NoError(t, s.WaitFor(bound(t), holds(gpu.GiB)))
	require.Contains(t, ps(t, s), "tiny")
	s.SetFaults(func(f *Faults) { f.HangLoad = false })
	want(t, 200, <-loading)
}

func TestOllamaUnloadAnswersAtOnceAndActsLater(t *testing.T) {
	s := startOllama(t, Options{Preloaded: true, Faults: Faults{HangUnload: true}})
	require.Equal(t, "unload", generate(t, s, `{"model":"tiny","keep_alive":0}`)["done_reason"])
	require.Contains(t, ps(t, s), "tiny")
	s.SetFaults(func(f *Faults) { f.HangUnload = false })
	require.NoError(t, s.WaitFor(bound(t), holds(5*gpu.GiB)))
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Unloads == 1 }))
	require.NotContains(t, ps(t, s), "tiny")
	require.Contains(t, ps(t, s), "qwen:7b", "there is no unload of all")

	chat := call(bound(t), "POST", s.URL()+"/api/chat", `{"model":"qwen:7b","messages":[],"keep_alive":"0"}`)
	require.Contains(t, string(want(t, 200, chat).body), `"done_reason":"unload"`)
	require.NoError(t, s.WaitFor(bound(t), holds(0)))
	require.Equal(t, "unload", generate(t, s, `{"model":"tiny","keep_alive":0}`)["done_reason"], "unloading what isn't loaded is fine")
	require.Equal(t, 3, s.Stats().UnloadCalls)
}

func TestOllamaUnloadWaitsForRequestsInFlight(t *testing.T) {
	s := startOllama(t, Options{Preloaded: true, Faults: Faults{HoldWork: true}})
	work := send(bound(t), "POST", s.URL()+"/api/generate", `{"model":"tiny","prompt":"hi"}`)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	generate(t, s, `{"model":"tiny","keep_alive":0}`)
	s.SetFaults(func(f *Faults) { f.HoldWork = false })
	require.Equal(t, 9, lines(want(t, 200, <-work).body), "eight words and the end")
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Unloads == 1 }))
	var order []string
	for _, e := range s.Events() {
		if e.Kind == EventWorkEnd || e.Kind == EventUnloadStart {
			order = append(order, e.Kind)
		}
	}
	require.Equal(t, []string{EventWorkEnd, EventUnloadStart}, order)
}

func TestOllamaWarmRequestWipesOutTheMarkToUnload(t *testing.T) {
	s := startOllama(t, Options{Preloaded: true, Faults: Faults{HoldWork: true}})
	work := send(bound(t), "POST", s.URL()+"/api/generate", `{"model":"tiny","prompt":"hi"}`)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	generate(t, s, `{"model":"tiny","keep_alive":0}`)
	again := send(bound(t), "POST", s.URL()+"/api/generate", `{"model":"tiny","prompt":"again","stream":false}`)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 2 }), "it came before the mark took effect")
	s.SetFaults(func(f *Faults) { f.HoldWork = false })
	want(t, 200, <-again)
	want(t, 200, <-work)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 0 }))
	require.Zero(t, s.Stats().Unloads)
	require.Contains(t, ps(t, s), "tiny")
}

func TestOllamaKeepAliveOfZeroWithAPromptUnloadsAfterTheAnswer(t *testing.T) {
	s := startOllama(t, Options{})
	got := generate(t, s, `{"model":"tiny","prompt":"hi","stream":false,"keep_alive":0}`)
	require.Equal(t, "stop", got["done_reason"])
	require.NotEmpty(t, got["response"])
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Loads == 1 && st.Unloads == 1 }))
	require.Zero(t, s.Stats().UnloadCalls)
}

func TestOllamaUnloadsByItselfWhenItsKeepAliveEnds(t *testing.T) {
	s := startOllama(t, Options{KeepAlive: 20 * time.Millisecond})
	generate(t, s, `{"model":"tiny"}`)
	generate(t, s, `{"model":"qwen:7b","keep_alive":"1h"}`)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Unloads == 1 }))
	require.NotContains(t, ps(t, s), "tiny")
	require.Contains(t, ps(t, s), "qwen:7b")
}

func TestOllamaStreamsNDJSON(t *testing.T) {
	s := startOllama(t, Options{})
	got := want(t, 200, call(bound(t), "POST", s.URL()+"/api/chat", `{"model":"tiny","messages":[{"role":"user","content":"hi"}],"options":{"num_predict":3}}`))
	require.Equal(t, "application/x-ndjson", got.header.Get("Content-Type"))
	all := strings.Split(strings.TrimSpace(string(got.body)), "\n")
	require.Len(t, all, 4)
	for i, text := range all {
		chunk := decode[map[string]any](t, []byte(text))
		require.Equal(t, i == 3, chunk["done"])
		require.Contains(t, chunk, "message")
	}
}

func TestOllamaSpeaksOpenAIsForm(t *testing.T) {
	s := startOllama(t, Options{})
	ctx := bound(t)
	const ask = `{"model":"tiny","messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"max_tokens":2`
	plain := decode[map[string]any](t, want(t, 200, call(ctx, "POST", s.URL()+"/v1/chat/completions", ask+`}`)).body)
	require.Equal(t, "chat.completion", plain["object"])
	require.Equal(t, "assistant", plain["choices"].([]any)[0].(map[string]any)["message"].(map[string]any)["role"])

	stream := want(t, 200, call(ctx, "POST", s.URL()+"/v1/chat/completions", ask+`,"stream":true,"stream_options":{"include_usage":true}}`))
	require.Equal(t, "text/event-stream", stream.header.Get("Content-Type"))
	require.True(t, strings.HasSuffix(string(stream.body), "data: [DONE]\n\n"))
	count := 0
	for scanner := bufio.NewScanner(strings.NewReader(string(stream.body))); scanner.Scan(); {
		data, ok := strings.CutPrefix(scanner.Text(), "data: ")
		if ok && data != "[DONE]" {
			require.True(t, json.Valid([]byte(data)))
			count++
		}
	}
	require.Equal(t, 4, count, "two words, the end, the usage")

	for path, ask := range map[string]string{
		"/v1/completions": `{"model":"tiny","prompt":"hi"}`,
		"/v1/embeddings":  `{"model":"tiny","input":"hi"}`,
		"/api/embed":      `{"model":"tiny","input":["hi"]}`,
		"/api/show":       `{"model":"tiny"}`,
	} {
		want(t, 200, call(ctx, "POST", s.URL()+path, ask))
	}
	for _, path := range []string{"/", "/api/version", "/api/tags", "/v1/models"} {
		want(t, 200, call(ctx, "GET", s.URL()+path, ""))
	}
	require.Equal(t, 1, s.Stats().Loads)
}

func TestOllamaComputesNothingForNoInput(t *testing.T) {
	s := startOllama(t, Options{})
	got := want(t, 200, call(bound(t), "POST", s.URL()+"/api/embed", `{"model":"tiny"}`))
	require.JSONEq(t, `{"model":"tiny","embeddings":[]}`, string(got.body))
	require.Equal(t, 1, s.Stats().Loads)
	require.Zero(t, s.Stats().Worked)
}

func TestOllamaRefusesWhatItDoesNotKnow(t *testing.T) {
	s := startOllama(t, Options{})
	ctx := bound(t)
	want(t, 404, call(ctx, "POST", s.URL()+"/api/generate", `{"model":"nope","prompt":"x"}`))
	want(t, 404, call(ctx, "POST", s.URL()+"/v1/chat/completions", `{"model":"nope"}`))
	want(t, 400, call(ctx, "POST", s.URL()+"/api/chat", `{`))
	want(t, 400, call(ctx, "POST", s.URL()+"/api/chat", ``))
	want(t, 400, call(ctx, "POST", s.URL()+"/api/generate", `{"model":"tiny","keep_alive":"soon"}`))
	want(t, http.StatusMethodNotAllowed, call(ctx, "GET", s.URL()+"/api/generate", ""))
	require.Zero(t, s.Stats().LoadsStarted)
}

func TestOllamaWithoutRoomFailsOrSpills(t *testing.T) {
	s := startOllama(t, Options{Total: 4 * gpu.GiB})
	failed := want(t, 500, call(bound(t), "POST", s.URL()+"/api/generate", `{"model":"qwen:7b"}`))
	require.Contains(t, string(failed.body), "CUDA out of memory")
	require.Equal(t, 1, s.Stats().OOMs)

	s.SetOptions(func(o *Options) { o.Spill = true })
	generate(t, s, `{"model":"qwen:7b"}`)
	require.Equal(t, int64(4*gpu.GiB), ps(t, s)["qwen:7b"].SizeVRAM)
	require.Equal(t, int64(5*gpu.GiB), ps(t, s)["qwen:7b"].Size)
	require.Equal(t, 4*gpu.GiB, used(t, s.dir))
	generate(t, s, `{"model":"tiny"}`)
	require.Zero(t, ps(t, s)["tiny"].SizeVRAM)
	require.Equal(t, 2, s.Stats().Spills)
	require.Equal(t, 1, s.Stats().OOMs)
}

func TestOllamaOnTheCPUSaysSizeVRAMZero(t *testing.T) {
	s := startOllama(t, Options{OnCPU: true, Total: gpu.MiB})
	generate(t, s, `{"model":"tiny"}`)
	require.Zero(t, ps(t, s)["tiny"].SizeVRAM)
	require.NotZero(t, ps(t, s)["tiny"].Size)
	require.Zero(t, used(t, s.dir))
}

func TestOllamaBoundsItsInferenceAndStillAnswersItsProbes(t *testing.T) {
	s := startOllama(t, Options{Preloaded: true, Concurrency: 1, Faults: Faults{HoldWork: true}})
	first := send(bound(t), "POST", s.URL()+"/api/generate", `{"model":"tiny","prompt":"a"}`)
	second := send(bound(t), "POST", s.URL()+"/api/generate", `{"model":"tiny","prompt":"b"}`)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 && st.InFlight == 2 }))
	require.Len(t, ps(t, s), 2)
	s.SetFaults(func(f *Faults) { f.HoldWork = false })
	want(t, 200, <-first)
	want(t, 200, <-second)
	require.Equal(t, 1, s.Stats().MaxConcurrent)
}
