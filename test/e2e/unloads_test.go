package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// ejects are requests that give the memory of a model back.
var ejects = map[string]string{
	"/api/generate": `{"model":%q,"keep_alive":0}`,
	"/api/chat":     `{"model":%q,"messages":[],"keep_alive":"0s"}`, // as Open WebUI's eject
}

func TestK3_GivingBackWhatIsNotLoadedLoadsAndUnloadsNothing(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{
		shelf("ollama", modelserver.Ollama, "vram 9GiB\nmodel small\nmodel big", map[string]float64{"small": 9, "big": 9}),
		{Options: modelserver.Options{Name: "tts", VRAM: gib(12)}},
	}})
	require.Equal(t, 200, s.post("/tts/", "x").status)
	for path, body := range ejects {
		a := s.askJSON("/ollama"+path, fmt.Sprintf(body, "Small"))
		require.Equal(t, 200, a.status, string(a.body))
		var doc struct {
			Model      string
			Done       bool
			DoneReason string `json:"done_reason"`
		}
		require.NoError(t, json.Unmarshal(a.body, &doc))
		require.Equal(t, "Small", doc.Model)
		require.True(t, doc.Done)
		require.Equal(t, "unload", doc.DoneReason)
		require.Equal(t, 404, s.askJSON("/ollama"+path, fmt.Sprintf(body, "nope")).status, "nor is what the server does not have")
	}
	require.Equal(t, "READY", s.state("tts"))
	require.Zero(t, s.status().Scheduler.Evictions)
	require.Zero(t, s.servers["ollama"].Stats().Loads)
}

func TestK3_AnUnloadIsToldHoweverItsPathIsSpelt(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{
		shelf("ollama", modelserver.Ollama, "vram 9GiB\nmodel small\nmodel big", map[string]float64{"small": 9, "big": 9}),
		shelf("docker-model-runner", modelserver.DockerModelRunner, "vram 9GiB\nmodel ai/small", map[string]float64{"ai/small": 9}),
		{Options: modelserver.Options{Name: "tts", VRAM: gib(12)}},
	}})
	require.Equal(t, 200, s.post("/tts/", "x").status)
	for _, path := range []string{"//api/generate", "/api//generate", "/api/generate/", "/api/./generate", "/api/%2567enerate", "/api/generate;x"} {
		for consumer, model := range map[string]string{"ollama": "small", "docker-model-runner": "ai/small"} {
			a := s.askJSON("/"+consumer+path, fmt.Sprintf(`{"model":%q,"keep_alive":0}`, model))
			require.Equal(t, 200, a.status, "%s%s: %s", consumer, path, a.body)
		}
	}
	require.Equal(t, "READY", s.state("tts"))
	require.Zero(t, s.status().Scheduler.Evictions)
}

func TestK3_GivingBackWhatIsLoadedUnloadsItOnceItsWorkHasEnded(t *testing.T) {
	t.Parallel()
	for path, body := range ejects {
		t.Run(path[1:], func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Consumers: []consumer{shelf("ollama", modelserver.Ollama, "vram 5GiB\nmodel small\nmodel big", map[string]float64{"small": 5, "big": 5})}})
			require.Equal(t, 200, s.chat("ollama", "big").status)
			working := s.send("POST", "/ollama/api/generate?ms=400", `{"model":"small","prompt":"x","stream":false}`)
			s.until("it works", func() bool { return s.status().Consumers["ollama"].Active == 1 })
			began := time.Now()
			eject := s.askJSON("/ollama"+path, fmt.Sprintf(body, "library/small"))
			require.Equal(t, 200, eject.status, string(eject.body))
			require.Equal(t, "IDLE", s.slot("ollama", "small").State)
			work := s.await(working)
			require.Equal(t, 200, work.status, "its work was not cut")
			require.Greater(t, time.Since(began), 300*time.Millisecond, "the unload waited for it")
			require.Equal(t, "READY", s.slot("ollama", "big").State, "no other was asked to go")
			require.Zero(t, s.status().Scheduler.Evictions)
		})
	}
}

func TestK3_APinnedModelIsNotGivenBack(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{
		shelf("ollama", modelserver.Ollama, "vram 5GiB\nmodel small {\npin\n}", map[string]float64{"small": 5}),
		{Options: modelserver.Options{Name: "whole", Manner: modelserver.Ollama, VRAM: gib(3)}, Lines: "pin"},
	}})
	require.Equal(t, 200, s.chat("ollama", "small").status)
	require.Equal(t, 200, s.chat("whole", "whole").status)
	for path, body := range ejects {
		for consumer, model := range map[string]string{"ollama": "small", "whole": "whole"} {
			a := s.askJSON("/"+consumer+path, fmt.Sprintf(body, model))
			require.Equal(t, 403, a.status, string(a.body))
			require.Contains(t, string(a.body), "is pinned")
		}
	}
	require.Equal(t, "READY", s.slot("ollama", "small").State)
	require.Zero(t, s.servers["whole"].Stats().Unloads)
}

func TestK3_AServerWithoutModelsIsNotLoadedToBeUnloadedAndUnloadsItself(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{{Options: modelserver.Options{Name: "whole", Manner: modelserver.Ollama, VRAM: gib(3)}}}})
	for path, body := range ejects {
		require.Equal(t, 200, s.askJSON("/whole"+path, fmt.Sprintf(body, "whole")).status)
		require.Equal(t, "IDLE", s.state("whole"))
	}
	require.Zero(t, s.servers["whole"].Stats().Loads)
	for path, body := range ejects {
		require.Equal(t, 200, s.chat("whole", "whole").status)
		require.Equal(t, 200, s.askJSON("/whole"+path, fmt.Sprintf(body, "whole")).status)
		s.until("the broker has noticed", func() bool { return s.state("whole") == "IDLE" })
	}
}

func TestK3_AnUnloadBehindWorkIsNoticedAndKeptAliveIsNoUnload(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{shelf("ollama", modelserver.Ollama, "vram 5GiB\nmodel small", map[string]float64{"small": 5})}})
	for _, keep := range []string{"-1", `"-1m"`, `"5m"`} {
		a := s.askJSON("/ollama/api/generate", `{"model":"small","keep_alive":`+keep+`}`)
		require.Equal(t, 200, a.status, string(a.body))
		require.Equal(t, "READY", s.slot("ollama", "small").State, keep)
	}
	began := time.Now()
	require.Equal(t, 200, s.askJSON("/ollama/api/generate", `{"model":"small","prompt":"x","stream":false,"keep_alive":0}`).status)
	s.until("the broker has noticed", func() bool { return s.slot("ollama", "small").State == "IDLE" })
	require.Less(t, time.Since(began), 5*time.Second)
}

// K3: an unload is told however it is written, and however its body is sent.
func TestK3_AnUnloadIsToldHoweverItIsWritten(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{
		shelf("ollama", modelserver.Ollama, "vram 5GiB\nmodel small", map[string]float64{"small": 5}),
		{Options: modelserver.Options{Name: "whole", Manner: modelserver.Ollama, VRAM: gib(5)}},
		{Options: modelserver.Options{Name: "tts", VRAM: gib(12)}},
	}})
	require.Equal(t, 200, s.post("/tts/", "x").status)
	for name, model := range map[string]string{"ollama": "small", "whole": "whole"} {
		for _, body := range []string{`{"model":%q,"keep_alive":0}`, `{"model":%q,"keep\u005falive":0}`, `{"model":%q,"Keep_\u0041live":"0s","prompt":""}`} {
			text := fmt.Sprintf(body, model)
			for _, length := range []int64{int64(len(text)), -1} {
				req, err := http.NewRequest("POST", s.url+"/"+name+"/api/generate", strings.NewReader(text))
				require.NoError(t, err)
				req.ContentLength = length
				req.Header.Set("Content-Type", "application/json")
				resp, err := s.client.Do(req)
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
				require.Equal(t, 200, resp.StatusCode)
				require.Equal(t, "READY", s.state("tts"), "%s of length %d", text, length)
			}
		}
	}
	require.Zero(t, s.status().Scheduler.Evictions)
}

// uis are servers that are freed as a whole, with these lines in their blocks.
func uis(lines string) layout {
	return layout{Consumers: []consumer{
		{Options: modelserver.Options{Name: "comfyui", Manner: modelserver.ComfyUI, VRAM: gib(5)}, Lines: lines},
		{Options: modelserver.Options{Name: "invokeai", Manner: modelserver.InvokeAI, VRAM: gib(3)}, Lines: "lifecycle_by_hand\npreset invokeai\n" + lines},
		{Options: modelserver.Options{Name: "tts", VRAM: gib(3)}},
	}}
}

// frees are requests by which a client has such a server free its memory, and work that loads it.
var frees = []struct{ consumer, work, workBody, free, freeBody string }{
	{"comfyui", "/prompt", prompt, "/free", `{"unload_models":true,"free_memory":true}`},
	{"comfyui", "/prompt", prompt, "/api/free", `{"unload_models":true}`},
	{"comfyui", "/prompt", prompt, "//free", `{"free_memory":1}`},
	{"comfyui", "/prompt", prompt, "/free", `{"unload_models":true,"more":"` + strings.Repeat("x", 8<<10) + `"}`},
	{"invokeai", "/api/v1/queue/default/enqueue_batch", `{"batch":{"graph":{"nodes":{}},"runs":1}}`, "/api/v2/models/empty_model_cache", ""},
}

func TestK3_APinnedServerIsNotFreedByAClient(t *testing.T) {
	t.Parallel()
	s := start(t, uis("pin"))
	for _, f := range frees {
		require.Less(t, s.askJSON("/"+f.consumer+f.work, f.workBody).status, 300)
		s.nothingRuns()
		a := s.askJSON("/"+f.consumer+f.free, f.freeBody)
		require.Equal(t, 403, a.status, "%s%s: %s", f.consumer, f.free, a.body)
		require.Contains(t, string(a.body), "is pinned")
		require.Equal(t, "READY", s.state(f.consumer))
		require.Zero(t, s.servers[f.consumer].Stats().Unloads)
	}
}

func TestK3_WhatBypassNamesIsPassedOnThoughItMayUnload(t *testing.T) {
	t.Parallel()
	s := start(t, uis("pin\nbypass POST /free"))
	require.Less(t, s.askJSON("/comfyui/prompt", frees[0].workBody).status, 300)
	s.nothingRuns()
	require.Equal(t, 200, s.askJSON("/comfyui/free", frees[0].freeBody).status)
	s.until("it is free, as it does by and by what it has answered", func() bool { return s.servers["comfyui"].Stats().Unloads == 1 })
}

// Whose route it is does not matter, nor who has pinned the server.
func TestK3_WorkDoesNotUnloadAPinnedServer(t *testing.T) {
	t.Parallel()
	whole := func(lines string) consumer {
		return consumer{Options: modelserver.Options{Name: "whole", Manner: modelserver.Ollama, VRAM: gib(3)}, Lines: lines}
	}
	twin := "handle_path /twin/* {\ngpu_broker twin\nreverse_proxy {http.gpu_broker.upstream}\n}\n"
	for name, c := range map[string]struct {
		layout layout
		byHand bool
		routes []string
	}{
		"by hand": {layout{Consumers: []consumer{whole("")}}, true, []string{"whole"}},
		"two consumers of one server": {layout{Consumers: []consumer{whole("pin")}, Routes: twin,
			Global: "consumer twin {\nupstream UPSTREAM_OF_whole\nvram 3GiB\npreset ollama\n}\n"}, false, []string{"whole", "twin"}},
		"one that shares it": {layout{Consumers: []consumer{whole("pin")}, Routes: twin,
			Global: "consumer twin {\nshares whole\nvram 1GiB\ngpu_routes /api/*\npinned_set keep_alive -1\n}\n"}, false, []string{"whole", "twin"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, c.layout)
			require.Equal(t, 200, s.chat("whole", "whole").status)
			if c.byHand {
				s.doByHand("consumers/whole/pin")
			}
			for _, route := range c.routes {
				a := s.askJSON("/"+route+"/api/generate", `{"model":"whole","prompt":"x","stream":false,"keep_alive":0}`)
				require.Equal(t, 200, a.status, "%s", a.body)
				s.looked()
				require.Zero(t, s.servers["whole"].Stats().UnloadCalls, route)
				require.Zero(t, s.servers["whole"].Stats().Unloads, route)
			}
		})
	}
}

// The route's consumer knows nothing of /free, and its fallback is a ComfyUI.
func TestK3_AFallbackIsNotFreedThroughAnothersRoute(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "probe_interval 1m", Consumers: []consumer{plainModel("large", 9, "fallback comfyui"),
		{Options: modelserver.Options{Name: "comfyui", Manner: modelserver.ComfyUI, VRAM: gib(5)}, Lines: "pin"}, plainModel("other", 9)}})
	s.serve("large")
	require.Less(t, s.askJSON("/comfyui/prompt", prompt).status, 300)
	s.nothingRuns()
	s.serve("other") // large would have to be loaded
	a := s.askJSON("/large/prompt", prompt)
	require.Equal(t, "comfyui", a.header.Get("X-GPU-Broker-Consumer"), "%s", a.body)
	s.nothingRuns()
	a = s.askJSON("/large/free", `{"unload_models":true,"free_memory":true}`)
	require.NotEqual(t, "comfyui", a.header.Get("X-GPU-Broker-Consumer"), "%s", a.body)
	require.Zero(t, s.servers["comfyui"].Stats().UnloadCalls)
}

func TestK3_AServerThatAClientFreesGivesItsBookingBack(t *testing.T) {
	t.Parallel()
	s := start(t, uis(""))
	require.Equal(t, 200, s.post("/tts/", "x").status)
	for i, f := range frees {
		before := s.servers[f.consumer].Stats().Unloads
		require.Less(t, s.askJSON("/"+f.consumer+f.work, f.workBody).status, 300)
		a := s.askJSON("/"+f.consumer+f.free, f.freeBody)
		require.Equal(t, 200, a.status, "%s%s: %s", f.consumer, f.free, a.body)
		require.Equal(t, "IDLE", s.state(f.consumer), "%d", i)
		require.Zero(t, s.status().Consumers[f.consumer].Slots[0].Booking)
		s.until("it is free", func() bool { return s.servers[f.consumer].Stats().Unloads == before+1 })
		require.Zero(t, s.servers[f.consumer].Stats().Aborted)
	}
	require.Equal(t, "READY", s.state("tts"), "no other was asked to go")
	require.Zero(t, s.status().Scheduler.Evictions)
}

func TestK3_AFreeThatFreesNothingIsPassedOn(t *testing.T) {
	t.Parallel()
	s := start(t, uis("pin"))
	for _, body := range []string{`{}`, `{"unload_models":false,"free_memory":false}`} {
		require.Equal(t, 200, s.askJSON("/comfyui/free", body).status)
	}
	require.Equal(t, "IDLE", s.state("comfyui"), "nor is it loaded for it")
	require.Zero(t, s.servers["comfyui"].Stats().Loads)
}

func TestK3_AServerThatCanNotTellIsFreedAlsoWhereItIsTakenForNotLoaded(t *testing.T) {
	t.Parallel()
	s := start(t, uis(""))
	server := s.servers["comfyui"]
	queuePrompt(t, server.URL()+"/prompt", prompt) // past the broker
	s.until("it holds its model", func() bool { return server.Stats().Loads == 1 && len(times(server, modelserver.EventWorkEnd)) == 1 })
	require.Equal(t, 200, s.askJSON("/comfyui/free", `{"unload_models":true}`).status)
	s.until("it is free", func() bool { return server.Stats().Unloads == 1 })
}

func TestK3_WorkAtAPinnedModelDoesNotUnloadIt(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{
		shelf("ollama", modelserver.Ollama, "vram 5GiB\nmodel small {\npin\n}\nmodel other", map[string]float64{"small": 5, "other": 5}),
		{Options: modelserver.Options{Name: "whole", Manner: modelserver.Ollama, VRAM: gib(3)}, Lines: "pin"},
	}})
	for _, keep := range []string{`"keep_alive":0`, `"Keep_Alive":"0s"`, `"keep_alive":"1ms"`, `"keep\u005falive":0`} {
		for path, body := range map[string]string{
			"/api/generate": `{"model":%q,"prompt":"x","stream":false,%s}`,
			"/api/chat":     `{"model":%q,"messages":[{"role":"user","content":"x"}],"stream":false,%s}`,
			"/api/embed":    `{"model":%q,"input":"x",%s}`,
		} {
			for consumer, model := range map[string]string{"ollama": "small", "whole": "whole"} {
				a := s.askJSON("/"+consumer+path, fmt.Sprintf(body, model, keep))
				require.Equal(t, 200, a.status, string(a.body))
			}
		}
	}
	require.Equal(t, 200, s.chat("ollama", "other").status)
	require.Equal(t, "READY", s.slot("ollama", "small").State)
	require.Equal(t, "READY", s.state("whole"))
	for _, name := range []string{"ollama", "whole"} {
		require.Zero(t, s.servers[name].Stats().Unloads)
	}
	require.Equal(t, 1, s.servers["whole"].Stats().Loads)
}
