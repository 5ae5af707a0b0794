package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

func TestIdleUnloadCanBeOff(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "idle_timeout 100ms\nidle_unload off", Consumers: []consumer{plainModel("a", 2)}})
	s.serve("a")
	s.throughout(time.Second, "a is loaded", func() bool { return s.state("a") == "READY" && s.unloadAt("a").IsZero() })
	require.Zero(t, s.unloadCalls())
	require.Equal(t, []string{"load", "loaded"}, s.kinds("a"))
	s.reloaded(func(c string) string { return strings.Replace(c, "idle_unload off", "", 1) })
	s.nth("a", modelserver.EventUnloadCall, 1)
}

func TestIdleUnloadThatIsObservedSaysSoOnceAndDoesNothing(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "idle_timeout 100ms\nidle_unload observe", Consumers: []consumer{plainModel("a", 2), plainModel("p", 2, "pin")}})
	s.serve("p")
	for n := range 2 { // anew after each use
		s.serve("a")
		s.until("it is said", func() bool { return len(s.decisions("would_unload")) == n+1 })
		s.throughout(700*time.Millisecond, "a is loaded", func() bool { return s.state("a") == "READY" })
		said := s.decisions("would_unload")
		require.Len(t, said, n+1, "once")
		require.Equal(t, "a", said[n].Consumer)
		require.Regexp(t, `nobody has used it for .*observed`, said[n].Reason)
	}
	require.Zero(t, s.unloadCalls())
	st := s.status()
	require.Zero(t, st.Scheduler.IdleUnloads)
	require.Empty(t, st.Consumers["a"].UnloadAt, "it will not be unloaded")
	require.Equal(t, 0.0, s.metric(`unloads_total{consumer="a",reason="idle"}`))
	require.Equal(t, 1, s.servers["a"].Stats().Loads)
	s.reloaded(func(c string) string { return strings.Replace(c, "idle_unload observe", "idle_unload on", 1) })
	s.nth("a", modelserver.EventUnloadCall, 1)
}

func TestEvictionThatIsObservedSaysSoAndUnloadsNothing(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "eviction observe\noutsider_wait 300ms", Consumers: []consumer{plainModel("a", 9), plainModel("b", 9), plainModel("c", 2)}})
	s.serve("a")
	s.serve("c") // it fits beside a
	for n := range 2 {
		got := s.post("/b/synthesize", "x")
		require.Equal(t, 503, got.status)
		doc := s.refusal(got)
		require.Equal(t, "vram_exhausted", doc.Code)
		require.Regexp(t, `\ba\b.*eviction observe`, doc.Message)
		require.Contains(t, doc.protected("a"), "observe")
		would := s.decisions("would_evict")
		require.Len(t, would, n+1, "once for each that waited")
		require.Equal(t, "a", would[n].Consumer)
		require.Equal(t, "b", would[n].Target)
		require.Contains(t, would[n].Reason, "observed")
	}
	require.Zero(t, s.unloadCalls())
	require.Zero(t, s.servers["b"].Stats().LoadsStarted)
	st := s.status()
	require.Zero(t, st.Scheduler.Evictions)
	require.Equal(t, "READY", st.Consumers["a"].Slots[0].State)
	s.serve("a")
	require.Equal(t, 1, s.servers["a"].Stats().Loads)
	require.Equal(t, 200, s.adminDo("POST", "/gpu_broker/consumers/c/unload", "", "").status, "by hand it still goes")
	s.reloaded(func(c string) string { return strings.Replace(c, "eviction observe", "eviction on", 1) })
	s.serve("b")
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
}

func TestServersThatLoadInsideTheirFirstRequestAreIdleUnloadedToo(t *testing.T) {
	t.Parallel()
	const timeout = 400 * time.Millisecond
	lazy := plainModel("lazy", 2, "lifecycle_by_hand\nhealth /health\nunload POST /api/admin/unload")
	lazy.Lazy = true
	sometimes := plainModel("telling", 2, `lifecycle_by_hand
		health /health {
			loaded $.loaded
		}
		unload POST /api/admin/unload`)
	sometimes.Lazy = true
	s := start(t, layout{Total: "64GiB", Global: "idle_timeout 400ms", Consumers: []consumer{lazy, sometimes, ollama(), comfyui()}})
	for i := range 2 {
		for name, ask := range map[string]func() answer{
			"lazy":    func() answer { return s.post("/lazy/synthesize", "x") },
			"telling": func() answer { return s.post("/telling/synthesize", "x") },
			"ollama":  func() answer { return s.post("/ollama/v1/chat/completions", chat) },
			"comfyui": func() answer { return s.post("/comfyui/prompt", prompt) },
		} {
			got := ask()
			require.Equal(t, 200, got.status, "%s: %s", name, got.body)
			called := s.nth(name, modelserver.EventUnloadCall, i+1)
			ends := times(s.servers[name], modelserver.EventWorkEnd)
			require.Len(t, ends, i+1, name)
			between(t, ends[i].Add(timeout), called, ends[i].Add(timeout), name)
			s.waitState(name, "IDLE")
			s.until(name+" is unloaded", func() bool { return s.servers[name].Stats().Unloads == i+1 })
		}
	}
	require.EqualValues(t, 8, s.status().Scheduler.IdleUnloads)
	for name, srv := range s.servers {
		require.Zero(t, srv.Stats().UnloadsWhileBusy, name)
		require.Equal(t, 2, srv.Stats().Loads, name)
	}
}

func TestComfyUIIsIdleOnlyOnceItsLastPromptIsDone(t *testing.T) {
	t.Parallel()
	const timeout = 300 * time.Millisecond
	s := start(t, layout{Global: "idle_timeout 300ms", Consumers: []consumer{comfyui()}})
	comfy := s.servers["comfyui"]
	queuePrompt(t, s.url+"/comfyui/prompt", longPrompt("700")) // its answer comes at once
	queuePrompt(t, s.url+"/comfyui/prompt", longPrompt("700"))
	called := s.nth("comfyui", modelserver.EventUnloadCall, 1)
	ends := times(comfy, modelserver.EventWorkEnd)
	require.Len(t, ends, 2)
	between(t, ends[1].Add(timeout), called, ends[1].Add(timeout), "the unload call")
	require.Zero(t, comfy.Stats().Aborted)
	s.waitState("comfyui", "IDLE")
	require.EqualValues(t, 1, s.status().Scheduler.IdleUnloads)
}

func TestServerThatWorksForSomebodyElseIsLeftAloneUntilThatIsDone(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "idle_timeout 500ms", Consumers: []consumer{comfyui(), plainModel("v", 2)}})
	comfy := s.servers["comfyui"]
	queuePrompt(t, s.url+"/comfyui/prompt", prompt)
	s.idle("comfyui")
	end := s.holdWork("comfyui")
	queuePrompt(t, comfy.URL()+"/prompt", prompt) // past the broker, while it is loaded
	require.Zero(t, comfy.Stats().UnloadCalls)
	s.until("it was asked, and let be", func() bool { return len(s.decisions("reopen")) >= 2 })
	require.Contains(t, s.decisions("reopen")[0].Reason, "works for somebody else")
	require.Equal(t, "READY", s.state("comfyui"))
	end()
	called := s.nth("comfyui", modelserver.EventUnloadCall, 1)
	ends := times(comfy, modelserver.EventWorkEnd)
	require.Len(t, ends, 2)
	between(t, ends[1], called, ends[1], "the unload call")
	require.Zero(t, comfy.Stats().Aborted)
	s.waitState("comfyui", "IDLE")
	require.EqualValues(t, 1, s.status().Scheduler.IdleUnloads)
	require.Zero(t, s.status().Scheduler.UnloadFailures)
}
