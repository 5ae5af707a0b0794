package modelserver

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// question is one request: method, path and body.
type question struct{ method, path, body string }

func getting(path string) *question       { return &question{"GET", path, ""} }
func posting(path, body string) *question { return &question{"POST", path, body} }

func (a *question) to(t *testing.T, s *Server) answer {
	t.Helper()
	return call(bound(t), a.method, s.URL()+a.path, a.body)
}

const (
	chat   = `{"model":"m","messages":[{"role":"user","content":"hello there"}]}`
	stream = `{"model":"m","stream":true,"messages":[{"role":"user","content":"hello there"}]}`
	said   = "m answers: hello there"
)

// An llm is how one manner is driven from empty to loaded to empty. Its model
// and its server are named m.
var llms = map[Manner]struct {
	health       *question
	state        *question
	loaded, gone string    // parts of the state's answer
	load, unload *question // nil: there is no such route
	answered     string    // part of the load's answer
	unloadStatus int       // of a second unload; 0: 200
	// More work than OpenAI's chat, which all but tei and infinity know, by what its answer holds.
	work map[string]*question
	chat string // where that isn't at /v1/chat/completions
}{
	LlamaCpp: {
		health: getting("/health"), state: getting("/props"), loaded: `"is_sleeping":false`, gone: `"is_sleeping":true`,
		work: map[string]*question{
			`"content":"m answers: hi"`: posting("/completion", `{"prompt":"hi"}`), `"stop":true`: posting("/completion", `{"prompt":"hi","stream":true}`),
			`"embedding":[`: posting("/v1/embeddings", `{"input":"x"}`), "relevance_score": posting("/rerank", `{"query":"q","documents":["a"]}`),
			"output_text": posting("/v1/responses", `{"input":"hi"}`), `"stop_reason"`: posting("/v1/messages", chat),
			"content_block_delta": posting("/v1/messages", stream), "response.completed": posting("/v1/responses", `{"input":"hi","stream":true}`),
		},
	},
	LlamaCppRouter: {
		health: getting("/health"), state: getting("/models"), loaded: `"value":"loaded"`, gone: `"value":"unloaded"`,
		load: posting("/models/load", `{"model":"m"}`), answered: `{"success":true}`, unload: posting("/models/unload", `{"model":"m"}`), unloadStatus: 400,
	},
	VLLM: {
		health: getting("/health"), state: getting("/is_sleeping"), loaded: "false", gone: "true",
		load: posting("/wake_up", ""), unload: posting("/sleep?level=1&mode=wait", ""),
		work: map[string]*question{`"embedding":[`: posting("/v1/embeddings", `{"input":"x"}`), "relevance_score": posting("/score", `{"documents":["a"]}`)},
	},
	SGLang: {
		health: getting("/get_model_info"), state: nil,
		load: posting("/resume_memory_occupation", "{}"), unload: posting("/release_memory_occupation", "{}"),
		work: map[string]*question{`"text":"m answers: hi"`: posting("/generate", `{"text":"hi"}`), "[DONE]": posting("/generate", `{"text":"hi","stream":true}`)},
	},
	TextgenWebUI: {
		health: getting("/v1/internal/health"), state: getting("/v1/internal/model/info"), loaded: `"model_name":"m"`, gone: `"model_name":"None"`,
		load: posting("/v1/internal/model/load", `{"model_name":"m"}`), answered: `"OK"`, unload: posting("/v1/internal/model/unload", ""),
	},
	LMStudio: {
		health: getting("/v1/models"), state: getting("/api/v1/models"), loaded: `"loaded_instances":[{`, gone: `"loaded_instances":[]`,
		load: posting("/api/v1/models/load", `{"model":"m"}`), answered: `"status":"loaded"`,
		unload: posting("/api/v1/models/unload", `{"instance_id":"m"}`), unloadStatus: 404,
		work: map[string]*question{`"output":[{"content":"m answers: hi"`: posting("/api/v1/chat", `{"model":"m","input":"hi"}`), "event: message.delta": posting("/api/v1/chat", `{"model":"m","input":"hi","stream":true}`)},
	},
	LocalAI: {
		health: getting("/readyz"), state: getting("/system"), loaded: `"loaded_models":[{`, gone: `"loaded_models":[]`,
		load: posting("/backend/load", `{"model":"m"}`), answered: `"loaded":["m"]`, unload: posting("/backend/shutdown", `{"model":"m"}`), unloadStatus: 404,
		work: map[string]*question{
			`"embeddings":[[`: posting("/api/embed", `{"model":"m","input":"x"}`), "RIFF": posting("/tts", `{"model":"m","input":"x"}`),
			`"done":true`: posting("/api/chat", chat), `"response":"m "`: posting("/api/generate", `{"model":"m","prompt":"hi"}`),
		},
	},
	KoboldCpp: {
		health: getting("/api/extra/version"), state: getting("/api/v1/model"), loaded: `"koboldcpp/m"`, gone: `"inactive"`,
		load: posting("/api/admin/reload_config", `{"filename":"m.kcpps"}`), answered: `"success":true`, unload: posting("/api/admin/reload_config", `{"filename":"unload_model"}`),
		work: map[string]*question{
			`"text":"m answers: hi"`: posting("/api/v1/generate", `{"prompt":"hi"}`), `{"finish_reason":null,"token":"m "}`: posting("/api/extra/generate/stream", `{"prompt":"hi"}`),
			`"images":["`: posting("/sdapi/v1/txt2img", `{"prompt":"boat"}`), `"prompt_id"`: posting("/prompt", `{"prompt":{"1":{}}}`),
		},
	},
	TabbyAPI: {
		health: getting("/.well-known/serviceinfo"), state: getting("/v1/model"), loaded: `"id":"m"`, gone: "No models are currently loaded",
		load: posting("/v1/model/load", `{"model_name":"m"}`), answered: `"status":"finished"`, unload: posting("/v1/model/unload", ""), unloadStatus: 503,
	},
	LlamaSwap: {
		health: getting("/health"), state: getting("/running"), loaded: `"state":"ready"`, gone: `"running":[]`,
		load: getting("/upstream/m/health"), unload: posting("/api/models/unload/m", ""),
		work: map[string]*question{`"content":"m answers: hi"`: posting("/upstream/m/completion", `{"prompt":"hi"}`)},
	},
	DockerModelRunner: {
		health: getting("/engines/status"), state: getting("/engines/ps"), loaded: `"model_name":"m"`, gone: "[]",
		unload: posting("/engines/unload", `{"all":true}`), chat: "/engines/v1/chat/completions",
		work: map[string]*question{`"embedding":[`: posting("/engines/llama.cpp/v1/embeddings", `{"model":"m","input":"x"}`)},
	},
	Triton: {
		health: getting("/v2/health/ready"), state: posting("/v2/repository/index", `{"ready":true}`), loaded: `"state":"READY"`, gone: "[]",
		load: posting("/v2/repository/models/m/load", ""), unload: posting("/v2/repository/models/m/unload", ""), chat: "-",
		work: map[string]*question{
			`"data":["m answers: "]`:        posting("/v2/models/m/infer", `{"inputs":[]}`),
			`"text_output":"m answers: hi"`: posting("/v2/models/m/generate", `{"text_input":"hi"}`),
			`"text_output":"answers: "`:     posting("/v2/models/m/versions/1/generate_stream", `{"text_input":"hi"}`),
		},
	},
	Xinference: {
		health: getting("/status"), state: getting("/v1/models"), loaded: `"id":"m"`, gone: `"data":[]`,
		load: posting("/v1/models", `{"model_name":"m","model_engine":"vllm"}`), answered: `"model_uid":"m"`,
		unload: &question{"DELETE", "/v1/models/m", ""}, unloadStatus: 400,
	},
	TGI: {
		health: getting("/health"),
		work:   map[string]*question{`"generated_text":"m answers: hi"`: posting("/generate", `{"inputs":"hi"}`), `"generated_text":null`: posting("/generate_stream", `{"inputs":"hi"}`)},
	},
	TEI: {
		health: getting("/health"), chat: "-",
		work: map[string]*question{"],[": posting("/embed", `{"inputs":["a","b"]}`), `"score"`: posting("/rerank", `{"query":"q","texts":["a"]}`), `"embedding":[`: posting("/v1/embeddings", `{"input":"x"}`)},
	},
	Infinity: {
		health: getting("/health"), chat: "-",
		work: map[string]*question{`"embedding":[`: posting("/embeddings", `{"model":"m","input":["x"]}`)},
	},
}

func startLLM(t *testing.T, opts Options) *Server {
	t.Helper()
	opts.Name = "m"
	if opts.VRAM == 0 {
		opts.VRAM = 2 * gpu.GiB
	}
	return start(t, opts)
}

// TestEachServerLoadsWorksAndUnloadsByItsOwnRoutes drives the kinds once round.
func TestEachServerLoadsWorksAndUnloadsByItsOwnRoutes(t *testing.T) {
	for manner, llm := range llms {
		t.Run(string(manner), func(t *testing.T) {
			s := startLLM(t, Options{Manner: manner})
			atStart := manners[manner].atStart
			says := func(part string) {
				t.Helper()
				if llm.state == nil {
					return
				}
				got := llm.state.to(t, s)
				require.NoError(t, got.err)
				require.Contains(t, string(got.body), part)
			}
			if !atStart {
				want(t, 200, llm.health.to(t, s))
				require.Zero(t, s.Stats().LoadsStarted, "health and state load nothing")
				says(llm.gone)
			}
			if atStart {
				require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Loads == 1 }))
			} else if llm.load != nil {
				require.Contains(t, string(want(t, 200, llm.load.to(t, s)).body), llm.answered)
				require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Alive && st.Loaded }))
			}
			answers := func() { // a moment later, where a port opens anew
				t.Helper()
				require.Eventually(t, func() bool { return llm.health.to(t, s).status == 200 }, 5*time.Second, time.Millisecond)
			}
			answers()
			if llm.chat == "" {
				llm.chat = "/v1/chat/completions"
			}
			if llm.chat != "-" {
				require.Contains(t, string(want(t, 200, posting(llm.chat, chat).to(t, s)).body), said)
				got := want(t, 200, posting(llm.chat, stream).to(t, s))
				require.Equal(t, "text/event-stream", got.header.Get("Content-Type"))
				require.Equal(t, 6, strings.Count(string(got.body), "data: "), "%s", got.body)
			}
			for part, work := range llm.work {
				require.Contains(t, string(want(t, 200, work.to(t, s)).body), part)
			}
			says(llm.loaded)
			require.Equal(t, 2*gpu.GiB, used(t, s.dir))
			require.Equal(t, 1, s.Stats().Loads)

			if llm.unload == nil {
				return
			}
			require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 0 }))
			want(t, 200, llm.unload.to(t, s))
			require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Alive && st.Held == 0 && !st.Loaded }))
			require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Unloads == 1 }))
			if manner == KoboldCpp { // its old process answers until it ends
				started(t, s, 3)
			}
			answers()
			says(llm.gone)
			if manner == KoboldCpp {
				return // it starts anew for every call
			}
			want(t, max(200, llm.unloadStatus), llm.unload.to(t, s))
			require.Equal(t, 2, s.Stats().UnloadCalls)

			// A fault of the unload shows by each one's route.
			s.SetFaults(func(f *Faults) { f.FailUnload = true })
			want(t, 500, llm.unload.to(t, s))
		})
	}
}

// started waits until the server has begun its life number n.
func started(t *testing.T, s *Server, n int) {
	t.Helper()
	_, err := s.WaitForEvent(bound(t), func(e Event) bool {
		if e.Kind == EventStart {
			n--
		}
		return n == 0
	})
	require.NoError(t, err)
}

func workPath(manner Manner) string {
	switch path := llms[manner].chat; path {
	case "":
		return "/v1/chat/completions"
	case "-":
		return "/v2/models/m/generate"
	default:
		return path
	}
}

// busy starts a server that is loaded and works until the test ends or it is broken.
func busy(t *testing.T, manner Manner, opts Options) (*Server, <-chan answer) {
	t.Helper()
	opts.Manner, opts.Preloaded = manner, true
	s := startLLM(t, opts)
	s.SetFaults(func(f *Faults) { f.HoldWork = true })
	work := send(bound(t), "POST", s.URL()+workPath(manner), chat)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	return s, work
}

func letGo(s *Server) { s.SetFaults(func(f *Faults) { f.HoldWork = false }) }

func TestUnloadUnderWorkBreaksTheWork(t *testing.T) {
	for manner, unload := range map[Manner]*question{
		LlamaCppRouter: llms[LlamaCppRouter].unload,
		VLLM:           posting("/sleep", ""), // abort is the default
		TextgenWebUI:   llms[TextgenWebUI].unload,
		LMStudio:       llms[LMStudio].unload,
		KoboldCpp:      llms[KoboldCpp].unload,
		TabbyAPI:       llms[TabbyAPI].unload,
		LlamaSwap:      llms[LlamaSwap].unload,
		Xinference:     llms[Xinference].unload,
	} {
		t.Run(string(manner), func(t *testing.T) {
			s, work := busy(t, manner, Options{Grace: time.Millisecond})
			want(t, 200, unload.to(t, s))
			require.Error(t, (<-work).err)
			require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Alive && st.Aborted == 1 && st.Held == 0 }))
			require.Equal(t, 1, s.Stats().UnloadsWhileBusy)
			require.Zero(t, s.Stats().Deaths)
		})
	}
}

func TestUnloadThatWaitsForTheWork(t *testing.T) {
	for manner, unload := range map[Manner]*question{
		VLLM:           posting("/sleep?level=1&mode=wait", ""),
		LocalAI:        llms[LocalAI].unload,
		Triton:         llms[Triton].unload,
		LlamaCppRouter: llms[LlamaCppRouter].unload,
	} {
		t.Run(string(manner), func(t *testing.T) {
			s, work := busy(t, manner, Options{})
			call := send(bound(t), unload.method, s.URL()+unload.path, unload.body)
			require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.UnloadCalls == 1 }))
			if manner == Triton || manner == LlamaCppRouter {
				want(t, 200, <-call) // accepted, not done
			}
			require.Equal(t, 2*gpu.GiB, used(t, s.dir))
			letGo(s)
			want(t, 200, <-work)
			require.NoError(t, s.WaitFor(bound(t), holds(0)))
			require.Zero(t, s.Stats().Aborted)
			if manner == VLLM || manner == LocalAI {
				want(t, 200, <-call)
			}
		})
	}
}

func TestBusyProbesTellWhatRunsAndWhatWaits(t *testing.T) {
	for manner, probe := range map[Manner]struct {
		ask                 *question
		idle, running, more string
	}{
		LlamaCpp:          {getting("/metrics"), "llamacpp:requests_processing 0\n", "llamacpp:requests_processing 1\n", "llamacpp:requests_deferred 1\n"},
		VLLM:              {getting("/metrics"), `vllm:num_requests_running{engine="0",model_name="m"} 0`, `vllm:num_requests_running{engine="0",model_name="m"} 1`, `vllm:num_requests_waiting{engine="0",model_name="m"} 1`},
		SGLang:            {getting("/get_load"), `"num_reqs":0`, `"num_reqs":1`, `"num_reqs":2`},
		KoboldCpp:         {getting("/api/extra/perf"), `"idle":1`, `"idle":0`, `"queue":1`},
		DockerModelRunner: {getting("/engines/ps"), `"in_use":false`, `"in_use":true`, `"in_use":true`},
		Triton:            {getting("/metrics"), `version="1"} 0`, `version="1"} 0`, `version="1"} 1`}, // what runs isn't pending
		TGI:               {getting("/metrics"), "tgi_batch_current_size 0", "tgi_batch_current_size 1", "tgi_queue_size 1"},
	} {
		t.Run(string(manner), func(t *testing.T) {
			s, work := busy(t, manner, Options{Concurrency: 1})
			require.Contains(t, string(want(t, 200, probe.ask.to(t, s)).body), probe.running)
			second := send(bound(t), "POST", s.URL()+workPath(manner), chat)
			shows := func(part string) {
				t.Helper()
				require.Eventually(t, func() bool {
					return strings.Contains(string(probe.ask.to(t, s).body), part)
				}, 5*time.Second, time.Millisecond, part)
			}
			shows(probe.more)
			letGo(s)
			want(t, 200, <-work)
			want(t, 200, <-second)
			shows(probe.idle)
		})
	}
}
