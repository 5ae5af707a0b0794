package modelserver

import (
	"context"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestServerThatLoadsAtItsStartOpensItsPortAfterThat(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := free.Addr().String()
	require.NoError(t, free.Close())
	dir := t.TempDir()
	started := make(chan *Server, 1)
	go func() {
		s, _ := Start(Options{Name: "m", Manner: TGI, SimDir: dir, Addr: addr, VRAM: gpu.GiB, LoadTime: 700 * time.Millisecond})
		started <- s
	}()
	require.Eventually(t, func() bool { return used(t, dir) == gpu.GiB }, 5*time.Second, time.Millisecond)
	_, err = net.Dial("tcp", addr)
	require.Error(t, err)
	s := <-started
	require.NotNil(t, s)
	defer s.Close()
	want(t, 200, getting("/health").to(t, s))
	for _, path := range []string{"/unload", "/sleep", "/models/unload"} {
		want(t, 404, posting(path, "{}").to(t, s))
	}
}

func TestLlamaServerSaysThatItLoadsAndSleepsUntilAnyTask(t *testing.T) {
	s := startLLM(t, Options{Manner: LlamaCpp, Faults: Faults{HangLoad: true}})
	require.Contains(t, string(want(t, 503, getting("/health").to(t, s)).body), "Loading model")
	want(t, 503, posting("/v1/chat/completions", chat).to(t, s))
	s.SetFaults(func(f *Faults) { f.HangLoad = false })
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Loaded }))
	want(t, 200, getting("/health").to(t, s))

	require.NoError(t, s.Unload(bound(t)))
	for _, harmless := range []string{"/health", "/props", "/models", "/metrics"} {
		want(t, 200, getting(harmless).to(t, s))
	}
	require.Equal(t, 1, s.Stats().Loads)
	require.Contains(t, string(want(t, 200, getting("/slots").to(t, s)).body), `"is_processing":false`)
	require.Equal(t, 1, s.Stats().WokenByProbe)
	require.True(t, s.Stats().Loaded)

	s.SetOptions(func(o *Options) { o.KeepAlive = time.Millisecond })
	want(t, 200, posting("/v1/chat/completions", chat).to(t, s))
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Unloads == 2 && !st.Loaded }))
}

func mustEnd(t *testing.T, died <-chan struct{}) {
	t.Helper()
	select {
	case <-died:
	case <-bound(t).Done():
		t.Fatal("the process still runs")
	}
}

func TestLlamaServerThatCannotLoadAtItsStartEnds(t *testing.T) {
	died := make(chan struct{})
	s := startLLM(t, Options{Manner: LlamaCpp, Faults: Faults{RefuseLoad: true}, OnDeath: func() { close(died) }})
	mustEnd(t, died)
	require.Equal(t, 1, s.Stats().Deaths)
}

func TestSlotsSayWhenNoneIsFree(t *testing.T) {
	s, work := busy(t, LlamaCpp, Options{Concurrency: 1})
	require.Contains(t, string(want(t, 200, getting("/slots").to(t, s)).body), `"is_processing":true`)
	want(t, 503, getting("/slots?fail_on_no_slot=1").to(t, s))
	letGo(s)
	want(t, 200, <-work)
}

func TestRouterLoadsWhateverIsAskedAboutAndKillsALoadingChild(t *testing.T) {
	s := startLLM(t, Options{Manner: LlamaCppRouter, Models: map[string]gpu.Bytes{"m": gpu.GiB, "other": gpu.GiB}})
	want(t, 200, getting("/props").to(t, s)) // the router's own
	want(t, 400, getting("/slots?model=m&autoload=false").to(t, s))
	want(t, 400, posting("/v1/chat/completions?autoload=false", chat).to(t, s))
	require.Zero(t, s.Stats().LoadsStarted)
	want(t, 200, getting("/slots?model=m").to(t, s))
	require.Equal(t, 1, s.Stats().WokenByProbe)
	require.Equal(t, gpu.GiB, used(t, s.dir))
	require.Contains(t, string(want(t, 400, posting("/models/load", `{"model":"m"}`).to(t, s)).body), "already running")
	want(t, 400, posting("/models/load", `{"model":"nope"}`).to(t, s))

	s.SetFaults(func(f *Faults) { f.HangLoad = true })
	want(t, 200, posting("/models/load", `{"model":"other"}`).to(t, s)) // at once
	require.NoError(t, s.WaitFor(bound(t), holds(2*gpu.GiB)))
	require.Contains(t, string(getting("/models").to(t, s).body), `"value":"loading"`)
	want(t, 200, posting("/models/unload", `{"model":"other"}`).to(t, s))
	require.NoError(t, s.WaitFor(bound(t), holds(gpu.GiB)))
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.LoadsFailed == 1 }))
	require.Contains(t, string(getting("/models").to(t, s).body), `"failed":true`)
}

func TestVLLMHoldsRequestsWhileItSleeps(t *testing.T) {
	s := startLLM(t, Options{Manner: VLLM})
	want(t, 200, posting("/sleep?level=1&mode=wait", "").to(t, s))
	held := send(bound(t), "POST", s.URL()+"/v1/chat/completions", chat)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 1 }))
	want(t, 200, getting("/health").to(t, s)) // healthy all the same
	require.Eventually(t, func() bool {
		return strings.Contains(string(getting("/metrics").to(t, s).body), `num_requests_waiting{engine="0",model_name="m"} 1`)
	}, 5*time.Second, time.Millisecond)
	require.Zero(t, used(t, s.dir))
	want(t, 200, posting("/wake_up", "").to(t, s))
	want(t, 200, <-held)

	want(t, 200, posting("/sleep?level=0", "").to(t, s)) // pauses only
	require.Equal(t, 2*gpu.GiB, used(t, s.dir))
	held = send(bound(t), "POST", s.URL()+"/v1/chat/completions", chat)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 1 }))
	require.Zero(t, s.Stats().Working)
	want(t, 200, posting("/wake_up", "").to(t, s))
	want(t, 200, <-held)
	want(t, 400, posting("/sleep?mode=maybe", "").to(t, s))
}

func TestSGLangsEngineDies(t *testing.T) {
	for how, kill := range map[string]func(t *testing.T, s *Server){
		"release under work": func(t *testing.T, s *Server) {
			s.SetFaults(func(f *Faults) { f.HoldWork = true })
			work := send(bound(t), "POST", s.URL()+"/generate", `{"text":"hi"}`)
			require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
			require.Error(t, posting("/release_memory_occupation", "{}").to(t, s).err)
			require.Error(t, (<-work).err)
			require.Equal(t, 1, s.Stats().UnloadsWhileBusy)
		},
		"release under a health probe": func(t *testing.T, s *Server) {
			s.SetFaults(func(f *Faults) { f.HoldWork = true })
			probe := send(bound(t), "GET", s.URL()+"/health", "")
			require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
			require.Error(t, posting("/release_memory_occupation", "{}").to(t, s).err)
			require.Error(t, (<-probe).err)
		},
		"resume of what was not released": func(t *testing.T, s *Server) {
			require.Error(t, posting("/resume_memory_occupation", "{}").to(t, s).err)
		},
		"health while released": func(t *testing.T, s *Server) {
			want(t, 200, posting("/release_memory_occupation", "{}").to(t, s))
			want(t, 200, getting("/get_model_info").to(t, s)) // harmless
			require.Error(t, getting("/health").to(t, s).err)
			require.Equal(t, 1, s.Stats().WokenByProbe)
		},
	} {
		t.Run(how, func(t *testing.T) {
			died := make(chan struct{})
			s := startLLM(t, Options{Manner: SGLang, OnDeath: func() { close(died) }})
			want(t, 200, getting("/health").to(t, s))
			require.Equal(t, 1, s.Stats().Worked, "a health probe is work")
			want(t, 422, posting("/release_memory_occupation", "").to(t, s)) // it insists on a body
			kill(t, s)
			mustEnd(t, died)
			require.Equal(t, 1, s.Stats().Deaths)
			require.Zero(t, used(t, s.dir))
		})
	}
}

func TestTextgenNamesAModelThatItHasDroppedByItself(t *testing.T) {
	s := startLLM(t, Options{Manner: TextgenWebUI})
	want(t, 500, posting("/v1/chat/completions", chat).to(t, s)) // none was loaded
	want(t, 200, llms[TextgenWebUI].load.to(t, s))
	want(t, 200, posting("/v1/chat/completions", chat).to(t, s))
	require.NoError(t, s.Unload(bound(t)))
	require.Zero(t, used(t, s.dir))
	require.Contains(t, string(getting("/v1/internal/model/info").to(t, s).body), `"m"`)
	want(t, 200, posting("/v1/chat/completions", chat).to(t, s)) // and loads it again
	require.Equal(t, 2, s.Stats().Loads)
	want(t, 200, llms[TextgenWebUI].load.to(t, s)) // unloads and loads, be it the same
	require.Equal(t, 3, s.Stats().Loads)
}

func TestLocalAIGivesUpOnABusyModelAndHidesItsMemory(t *testing.T) {
	s, work := busy(t, LocalAI, Options{Grace: 10 * time.Millisecond})
	require.Contains(t, string(want(t, 500, llms[LocalAI].unload.to(t, s)).body), "busy")
	require.Equal(t, 2*gpu.GiB, used(t, s.dir))
	require.Contains(t, string(getting("/api/ps").to(t, s).body), `"size_vram":0`)
	letGo(s)
	want(t, 200, <-work)
	require.Zero(t, s.Stats().Unloads)
}

func TestModelsUnloadByThemselvesAfterTheirTime(t *testing.T) {
	s := startLLM(t, Options{Manner: LMStudio, KeepAlive: time.Millisecond})
	want(t, 200, posting("/v1/chat/completions", chat).to(t, s))
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Unloads == 1 && st.Held == 0 }))
	require.Zero(t, s.Stats().UnloadCalls)
}

func TestKoboldReloadsByStartingAnew(t *testing.T) {
	s, work := busy(t, KoboldCpp, Options{})
	begun := func() (n int) {
		for _, e := range s.Events() {
			if e.Kind == EventStart {
				n++
			}
		}
		return n
	}
	s.SetFaults(func(f *Faults) { f.HoldStart = true })
	require.Contains(t, string(want(t, 200, llms[KoboldCpp].unload.to(t, s)).body), "true")
	require.Equal(t, 2*gpu.GiB, used(t, s.dir), "it has only said so")
	require.Error(t, (<-work).err)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return !st.Alive }))
	_, err := net.Dial("tcp", s.Addr())
	require.Error(t, err, "its port is closed until it has started")
	s.SetFaults(func(f *Faults) { f.HoldStart = false })
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Alive }))
	require.Equal(t, 2, begun())
	letGo(s)
	require.Eventually(t, func() bool { return getting("/ping").to(t, s).err == nil }, 5*time.Second, time.Millisecond)
	want(t, 503, posting("/v1/chat/completions", chat).to(t, s))
	require.Contains(t, string(want(t, 200, posting("/api/admin/reload_config", `{"filename":"nope.kcpps"}`).to(t, s)).body), `"success":false`)
	for _, impostor := range []string{"/api/ps", "/api/tags", "/system_stats", "/object_info", "/history"} {
		want(t, 200, getting(impostor).to(t, s))
	}
	require.Contains(t, string(getting("/api/ps").to(t, s).body), "394998579")

	// A load that fails falls back to what it was started with: the model.
	s.SetFaults(func(f *Faults) { f.OOMLoads = 1 })
	want(t, 200, llms[KoboldCpp].load.to(t, s))
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.LoadsFailed == 1 }))
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Alive && st.Loads == 2 }))
}

func TestTabbyTellsAFailedLoadInTheStreamAndStaysUnhealthy(t *testing.T) {
	s := startLLM(t, Options{Manner: TabbyAPI})
	want(t, 200, getting("/health").to(t, s))
	want(t, 503, posting("/v1/chat/completions", chat).to(t, s))
	want(t, 503, posting("/v1/token/encode", "{}").to(t, s))
	s.SetFaults(func(f *Faults) { f.OOMLoads = 1 })
	require.Contains(t, string(want(t, 200, llms[TabbyAPI].load.to(t, s)).body), `{"error":`)
	want(t, 200, llms[TabbyAPI].load.to(t, s))
	require.True(t, s.Stats().Loaded)
	want(t, 503, getting("/health").to(t, s))
	require.Contains(t, string(want(t, 200, llms[TabbyAPI].load.to(t, s)).body), "already loaded")
	require.NoError(t, s.Restart())
	want(t, 200, getting("/health").to(t, s))
}

func TestTabbyLoadsOnThoughItsClientHasLeft(t *testing.T) {
	s := startLLM(t, Options{Manner: TabbyAPI, Faults: Faults{HangLoad: true}})
	ctx, leave := context.WithCancel(bound(t))
	load := send(ctx, "POST", s.URL()+"/v1/model/load", `{"model_name":"m"}`)
	require.NoError(t, s.WaitFor(bound(t), holds(2*gpu.GiB)))
	leave()
	require.Error(t, (<-load).err)
	s.SetFaults(func(f *Faults) { f.HangLoad = false })
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Loads == 1 }))
}

func TestAnyCallToAnUpstreamOfLlamaSwapLoadsIt(t *testing.T) {
	s := startLLM(t, Options{Manner: LlamaSwap, Models: map[string]gpu.Bytes{"a/b": gpu.GiB, "m": gpu.GiB}})
	want(t, 200, getting("/upstream/a/b/props").to(t, s))
	want(t, 404, getting("/upstream/nope/health").to(t, s))
	require.Contains(t, string(getting("/running").to(t, s).body), `"model":"a/b"`)
	require.Contains(t, string(want(t, 200, posting("/upstream/a/b/v1/chat/completions", `{"prompt":"hi"}`).to(t, s)).body), "m/a/b answers: hi")
	want(t, 200, llms[LlamaSwap].load.to(t, s))
	require.Equal(t, 2*gpu.GiB, used(t, s.dir))
	want(t, 200, posting("/api/models/unload/a/b", "").to(t, s))
	require.Equal(t, gpu.GiB, used(t, s.dir), "its answer means done")
	want(t, 404, posting("/api/models/unload/nope", "").to(t, s))
	require.Contains(t, string(want(t, 200, posting("/api/models/unload", "").to(t, s)).body), "ok")
	require.Zero(t, used(t, s.dir))
}

func TestDockerSkipsBusyRunnersSilently(t *testing.T) {
	s, work := busy(t, DockerModelRunner, Options{})
	require.JSONEq(t, `{"unloaded_runners":0}`, string(want(t, 200, llms[DockerModelRunner].unload.to(t, s)).body))
	require.Equal(t, 2*gpu.GiB, used(t, s.dir))
	letGo(s)
	want(t, 200, <-work)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 0 }))
	require.JSONEq(t, `{"unloaded_runners":1}`, string(want(t, 200, posting("/engines/unload", `{"backend":"llama.cpp","models":["m"]}`).to(t, s)).body))
	require.Zero(t, used(t, s.dir))
}

func TestDockerLoadsWithoutWorkingWhereTheHeaderSaysSo(t *testing.T) {
	s := startLLM(t, Options{Manner: DockerModelRunner})
	r, err := http.NewRequestWithContext(bound(t), "POST", s.URL()+"/engines/v1/chat/completions", strings.NewReader(`{"model":"m"}`))
	require.NoError(t, err)
	r.Close = true
	r.Header.Set("X-Preload-Only", "true")
	response, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	response.Body.Close()
	require.Equal(t, 200, response.StatusCode)
	require.Equal(t, 1, s.Stats().Loads)
	require.Zero(t, s.Stats().Worked)
}

func TestTritonRefusesNewWorkWhileTheOldEnds(t *testing.T) {
	s, work := busy(t, Triton, Options{})
	want(t, 200, llms[Triton].unload.to(t, s))
	require.JSONEq(t, "[]", string(llms[Triton].state.to(t, s).body), "it says so before the memory is free")
	require.Contains(t, string(posting("/v2/repository/index", "").to(t, s).body), "UNLOADING")
	require.Equal(t, 2*gpu.GiB, used(t, s.dir))
	want(t, 400, getting("/v2/models/m/ready").to(t, s))
	want(t, 400, posting("/v2/models/m/generate", `{"text_input":"hi"}`).to(t, s))
	again := send(bound(t), "POST", s.URL()+"/v2/repository/models/m/load", "")
	letGo(s)
	want(t, 200, <-work)
	want(t, 200, <-again)
	want(t, 200, getting("/v2/models/m/ready").to(t, s))
	require.Equal(t, 2, s.Stats().Loads)
}

func TestXinferenceWantsASpec(t *testing.T) {
	s := startLLM(t, Options{Manner: Xinference})
	want(t, 400, posting("/v1/models", `{"model_uid":"m"}`).to(t, s))
	want(t, 400, posting("/v1/chat/completions", chat).to(t, s))
	want(t, 200, posting("/v1/models", `{"model_name":"qwen","model_engine":"vllm","model_uid":"m"}`).to(t, s))
	want(t, 400, posting("/v1/models", `{"model_name":"qwen","model_engine":"vllm","model_uid":"m"}`).to(t, s))
	want(t, 400, (&question{"DELETE", "/v1/models/nope", ""}).to(t, s))
}
