package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	httplife "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

// lazyWork is a request for GPU work of each server that loads inside it and can't report whether it is loaded.
var lazyWork = map[string]struct{ path, body string }{
	"comfyui":  {"/prompt", prompt},
	"forge":    {"/sdapi/v1/txt2img", `{"prompt":"a boat"}`},
	"invokeai": {"/api/v1/queue/default/enqueue_batch", `{"batch":{"graph":{"nodes":{}},"runs":1}}`},
	"kokoro":   {"/v1/audio/speech", `{"model":"kokoro","input":"hello","voice":"x"}`},
}

// lazyPresets are those with an unload route, no load route, and no way to tell residency.
func lazyPresets(t *testing.T) (lazy []string) {
	t.Helper()
	for _, name := range presets.Names() {
		p, _, err := presets.Find(name)
		require.NoError(t, err)
		var c config.Consumer
		require.NoError(t, json.Unmarshal(p.Consumer, &c))
		var l httplife.Lifecycle
		require.NoError(t, json.Unmarshal(c.LifecycleRaw, &l))
		tells := func(r *httplife.Route) bool { return r != nil && (r.Loaded != "" || r.Names != "") }
		if l.Unload != nil && l.Load == nil && !l.Remember && !tells(l.Health) && !tells(l.Residency) {
			lazy = append(lazy, name)
		}
	}
	return lazy
}

// Caddy starts beside a server that is loaded: at its first start, after a restart, and after kill -9.
func TestK0_ALoadedLazyServerIsServedAfterEachStartOfCaddy(t *testing.T) {
	t.Parallel()
	type form struct {
		preset    string
		processes bool
		holds     float64 // GiB of the card's 16
		flushed   bool    // it doesn't fit beside its own memory
	}
	forms := []form{
		{"comfyui", false, 7, false},
		{"comfyui", true, 9, false}, // what is measured of its process counts for it
		{"comfyui", true, 7, false},
	}
	for _, name := range lazyPresets(t) {
		require.Contains(t, lazyWork, name, "say how work is given to it")
		forms = append(forms, form{name, false, 9, true})
	}
	require.Greater(t, len(forms), 6)
	for _, c := range forms {
		t.Run(fmt.Sprintf("%s, %v GiB, processes %t", c.preset, c.holds, c.processes), func(t *testing.T) {
			t.Parallel()
			lines := "lifecycle_by_hand\npreset " + c.preset
			if c.processes {
				lines += "\nprocesses lazy"
			}
			s := start(t, layout{Consumers: []consumer{{
				Options: modelserver.Options{Name: "lazy", Manner: modelserver.Manner(c.preset), VRAM: gib(c.holds), LoadTime: 10 * time.Millisecond, Residue: 256 * gpu.MiB, Preloaded: true, AllowUnload: true},
				Lines:   lines,
			}}})
			work, calls := lazyWork[c.preset], 0
			for i, again := range []func(){func() {}, s.restart, s.killed} {
				again()
				s.until("it is probed, and its memory is seen", func() bool {
					st := s.status()
					return st.Consumers["lazy"].Health == "healthy" && len(st.GPUs) > 0 && st.GPUs[0].Used >= int64(gib(c.holds))
				})
				began := time.Now()
				a := s.post("/lazy"+work.path, work.body)
				require.NoError(t, a.err)
				require.Contains(t, []int{200, 201}, a.status, "start %d: %s", i+1, a.body)
				require.Less(t, time.Since(began), 8*time.Second, "it does not wait for outsider_wait")
				s.idle("lazy")
				if c.flushed {
					calls++
				}
				require.Equal(t, calls, s.servers["lazy"].Stats().UnloadCalls)
				require.Equal(t, i+1, s.servers["lazy"].Stats().Worked)
			}
			s.noOOM()
		})
	}
}

// What loads it past the broker is the same to us as a start of Caddy beside it.
func TestK0_AComfyUIThatWasLoadedPastTheBrokerIsFlushedAndServed(t *testing.T) {
	t.Parallel()
	c := comfyui()
	s := start(t, layout{Global: "outsider_wait 20s", Consumers: []consumer{c, mvoice()}})
	comfy := s.servers["comfyui"]
	require.Equal(t, 200, s.post("/comfyui/prompt", prompt).status)
	s.idle("comfyui")
	s.serve("mvoice") // evicts it
	s.until("its memory is free", func() bool { return s.status().GPUs[0].Outsiders == 0 })
	require.Equal(t, 200, s.adminDo("POST", "/gpu_broker/consumers/mvoice/unload", "", "").status)
	s.waitState("mvoice", "IDLE")
	queuePrompt(t, comfy.URL()+"/prompt", prompt)
	s.until("it is loaded again", func() bool { return s.status().GPUs[0].Outsiders >= int64(gib(12)) })
	require.Equal(t, 200, s.post("/comfyui/prompt", prompt).status)
	s.idle("comfyui")
	require.Equal(t, 2, comfy.Stats().UnloadCalls)
	s.noOOM()
}

func TestK0_ARefusalNamesTheServerThatDoesNotUnload(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "outsider_wait 500ms", Consumers: []consumer{{
		Options: modelserver.Options{Name: "lazy", Manner: modelserver.Kokoro, VRAM: gib(9), Preloaded: true}, // without ALLOW_DEV_UNLOAD
		Lines:   "lifecycle_by_hand\npreset kokoro",
	}}})
	s.until("its memory is seen", func() bool { return len(s.status().GPUs) > 0 && s.status().GPUs[0].Used > 0 })
	work := lazyWork["kokoro"]
	a := s.post("/lazy"+work.path, work.body)
	require.Equal(t, 503, a.status)
	require.Contains(t, string(a.body), "the server of lazy may hold some of that, and does not unload: ")
	require.Contains(t, string(a.body), "ALLOW_DEV_UNLOAD")
}

// What a server was asked before the machine was started anew says nothing of the one that runs now: it has loaded at its start.
func TestK0_AServerThatWasUnloadedBeforeTheMachineWentDownIsServedAfterwards(t *testing.T) {
	t.Parallel()
	for preset, work := range map[string][2]string{"a1111": {"/sdapi/v1/txt2img", `{"prompt":"a boat"}`}, "sglang": {"/v1/chat/completions", `{"messages":[]}`}} {
		t.Run(preset, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Global: "outsider_wait 2s", Consumers: []consumer{{
				Options: modelserver.Options{Name: "one", Manner: modelserver.Manner(preset), VRAM: gib(9), LoadTime: 10 * time.Millisecond, Preloaded: true},
				Lines:   "lifecycle_by_hand\npreset " + preset + "\nvram 9GiB",
			}}})
			s.waitState("one", "READY")
			require.Equal(t, 200, s.post("/one"+work[0], work[1]).status)
			s.doByHand("consumers/one/unload")
			s.waitState("one", "IDLE")
			require.NoError(t, s.cmd.Process.Kill())
			_ = s.cmd.Wait()
			files, err := filepath.Glob(filepath.Join(s.dir, "data", "caddy", "gpu_broker", "*", "*.unloaded"))
			require.NoError(t, err)
			require.Len(t, files, 1)
			text, err := os.ReadFile(files[0])
			require.NoError(t, err)
			address, boot, _ := strings.Cut(string(text), "\n")
			require.NotEmpty(t, boot)
			require.NoError(t, os.WriteFile(files[0], []byte(address+"\nof another start"), 0o600))
			require.NoError(t, s.servers["one"].Restart())
			s.startAgain()
			s.waitState("one", "READY")
			a := s.post("/one"+work[0], work[1])
			require.Equal(t, 200, a.status, "%s", a.body)
			s.noOOM()
		})
	}
}
