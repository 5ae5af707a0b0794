package e2e

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

func mvoice() consumer {
	return consumer{Options: modelserver.Options{Name: "mvoice", VRAM: gib(2.8), LoadTime: 50 * time.Millisecond, UnloadTime: 20 * time.Millisecond}}
}

func comfyui() consumer {
	return consumer{Options: modelserver.Options{Name: "comfyui", Manner: modelserver.ComfyUI, VRAM: gib(13), LoadTime: 50 * time.Millisecond}}
}

func ollama() consumer {
	return consumer{Options: modelserver.Options{Name: "ollama", Manner: modelserver.Ollama, VRAM: gib(6), LoadTime: 50 * time.Millisecond, UnloadTime: 20 * time.Millisecond}}
}

const prompt = `{"prompt":{"1":{"class_type":"KSampler","inputs":{}}}}`
const chat = `{"model":"ollama","messages":[{"role":"user","content":"hello"}]}`

// idle waits until an async server has done all its work.
func (s *site) idle(name string) {
	s.t.Helper()
	s.until(name+" has done its work", func() bool { return s.status().Consumers[name].Active == 0 })
}

func TestResidentTargetCausesNoUnload(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), comfyui()}})
	require.Equal(t, 200, s.post("/mvoice/synthesize", "one").status)
	require.Equal(t, 200, s.post("/mvoice/synthesize", "two").status)
	require.Equal(t, 1, s.servers["mvoice"].Stats().Loads)
	require.Equal(t, 0, s.servers["mvoice"].Stats().UnloadCalls)
	require.Equal(t, 0, s.servers["comfyui"].Stats().UnloadCalls)
	require.Zero(t, s.status().Scheduler.Evictions)
}

func TestFC12_LargeIdleServerMakesWayForASmallOne(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), comfyui()}})
	require.Equal(t, 200, s.post("/comfyui/prompt", prompt).status)
	s.idle("comfyui")
	require.Equal(t, 200, s.post("/mvoice/synthesize", "hello").status)
	require.Equal(t, 1, s.servers["comfyui"].Stats().Unloads)
	require.Equal(t, 1, s.servers["mvoice"].Stats().Loads)
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
	require.Zero(t, s.servers["mvoice"].Stats().OOMs)
}

func TestCoexistingServerIsKeptThoughLeastRecentlyUsed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, line, goes, stays string }{
		{"named in can_coexist_with", "can_coexist_with ollama", "comfyui", "ollama"},
		{"with that one line removed", "", "ollama", "comfyui"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			m := mvoice()
			m.Lines = c.line
			s := start(t, layout{Total: "20GiB", Consumers: []consumer{m, comfyui(), ollama()}})
			require.Equal(t, 200, s.post("/ollama/v1/chat/completions", chat).status)
			require.Equal(t, 200, s.post("/comfyui/prompt", prompt).status)
			s.idle("comfyui")
			require.Equal(t, 200, s.post("/mvoice/synthesize", "hello").status)
			require.Equal(t, 1, s.servers[c.goes].Stats().Unloads, "%s goes", c.goes)
			require.Zero(t, s.servers[c.stays].Stats().Unloads, "%s stays", c.stays)
			require.EqualValues(t, 1, s.status().Scheduler.Evictions)
		})
	}
}
