package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// library is an ollama with three models, of which only one fits beside nothing else.
func library(lines string) consumer {
	return consumer{
		Options: modelserver.Options{Name: "ollama", Manner: modelserver.Ollama, LoadTime: 30 * time.Millisecond, UnloadTime: 10 * time.Millisecond,
			Models: map[string]gpu.Bytes{"small:latest": gib(9), "large": gib(10), "stranger": gib(3)}},
		Lines: lines,
	}
}

const twoModels = `
	model small {
		vram 9GiB
	}
	model large {
		vram 10GiB
		alias big
	}
`

// wants asks for a model, and fails unless it is served.
func (s *site) wants(path, model string) {
	s.t.Helper()
	a := s.askJSON(path, fmt.Sprintf(`{"model":%q,"prompt":"hello","stream":false}`, model))
	require.Equal(s.t, 200, a.status, string(a.body))
}

func (s *site) slot(consumer, model string) (out broker.Slot) {
	for _, sl := range s.status().Consumers[consumer].Slots {
		if sl.Model == model {
			return sl
		}
	}
	return out
}

func TestModelsOfOneServerAreSlotsOfTheirOwn(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Total: "12GiB", Consumers: []consumer{library(twoModels)}})
	s.wants("/ollama/api/generate", "small")
	require.Equal(t, "READY", s.slot("ollama", "small").State)
	require.Equal(t, "IDLE", s.slot("ollama", "large").State)

	s.wants("/ollama/api/generate", "large")
	require.Equal(t, "IDLE", s.slot("ollama", "small").State)
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
	require.Zero(t, s.servers["ollama"].Stats().OOMs)

	a := s.askJSON("/ollama/v1/completions", `{"model":"smal","prompt":"hello"}`)
	require.Equal(t, 404, a.status)
	require.Contains(t, string(a.body), "unknown_model")
	require.Contains(t, string(a.body), `did you mean \"small\"`)
	a = s.askJSON("/ollama/v1/completions", `{"prompt":"hello"}`)
	require.Equal(t, 400, a.status)
}

func TestAModelThatNobodyNamedIsAdoptedWithItsSize(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Total: "12GiB", Consumers: []consumer{library(twoModels)}})
	resp, err := http.Post(s.servers["ollama"].URL()+"/api/generate", "application/json", strings.NewReader(`{"model":"stranger"}`)) // past the broker
	require.NoError(t, err)
	require.Equal(t, 200, resp.StatusCode)
	_ = resp.Body.Close()
	s.until("it is adopted", func() bool { return s.slot("ollama", "stranger").State == "READY" })
	stranger := s.slot("ollama", "stranger")
	require.True(t, stranger.Adopted)
	require.EqualValues(t, gib(3), stranger.Booking)
	s.wants("/ollama/api/generate", "stranger")
	require.Zero(t, s.status().Scheduler.Evictions)

	s.wants("/ollama/api/generate", "large")
	s.until("it is gone once it was unloaded", func() bool { return s.slot("ollama", "stranger").State != "READY" })
	s.wants("/ollama/api/generate", "small")
	s.until("it is forgotten", func() bool { return s.slot("ollama", "stranger").Model == "" })
}

func TestAConsumersVRAMIsWhatAModelTakesThatIsNotNamed(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Total: "12GiB", Consumers: []consumer{library("vram 4GiB" + twoModels)}})
	s.wants("/ollama/api/generate", "large")
	s.wants("/ollama/api/generate", "stranger") // 10 + 4 do not fit
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
	// Its slot shows what the server says it takes, as soon as that is known; what it was loaded by is in the decision.
	loads := s.decisions("load")
	require.Len(t, loads, 2)
	require.Contains(t, loads[1].Reason, "it needs 4.25GiB", "4 and the reserve")
	require.Zero(t, s.servers["ollama"].Stats().OOMs)
}

func TestAdminNamesModelsAndConsumers(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Total: "24GiB", Consumers: []consumer{library(twoModels)}})
	post := func(path string) int {
		resp, err := http.Post("http://"+s.admin+"/gpu_broker/consumers/"+path, "", nil)
		require.NoError(t, err)
		defer resp.Body.Close()
		return resp.StatusCode
	}
	require.Equal(t, 200, post("ollama/small/load"))
	require.Equal(t, 200, post("ollama/large/load"))
	require.Equal(t, 409, post("ollama/load"), "which of its models?")
	require.Equal(t, 404, post("ollama/none/load"))
	require.Equal(t, "READY", s.slot("ollama", "small").State)
	require.Equal(t, 200, post("ollama/small/unload"))
	require.Equal(t, "IDLE", s.slot("ollama", "small").State)
	require.Equal(t, "READY", s.slot("ollama", "large").State)
	require.Equal(t, 200, post("ollama/unload"))
	require.Equal(t, "IDLE", s.slot("ollama", "large").State)
}

func TestModelsOfARouteForAllAreFoundByTheirNames(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Total: "12GiB", Consumers: []consumer{library(twoModels), {Options: modelserver.Options{Name: "tts", VRAM: gib(1)}}}, Routes: `
	handle_path /all/* {
		gpu_broker {
			model_from body
		}
		reverse_proxy {http.gpu_broker.upstream}
	}`})
	for _, model := range []string{"small", "large", "small:latest", "ollama/large"} {
		a := s.askJSON("/all/api/generate", fmt.Sprintf(`{"model":%q,"prompt":"hello","stream":false}`, model))
		require.Equal(t, 200, a.status, "%s: %s", model, a.body) // ollama is asked by its own names
	}
	list := s.ask("GET", "/all/v1/models", "", nil)
	require.Contains(t, string(list.body), `"id":"small"`)
	require.NotContains(t, string(list.body), `"id":"ollama"`)
}

func TestConsumersThatShareAProcessAreLoadedAndUnloadedTogether(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Total: "12GiB", Consumers: []consumer{
		{Options: modelserver.Options{Name: "stt", VRAM: gib(6), LoadTime: 20 * time.Millisecond}, Lines: "vram 4GiB"},
		{Options: modelserver.Options{Name: "llm", VRAM: gib(8), LoadTime: 20 * time.Millisecond}},
	}, Global: `
	consumer tts {
		shares stt
		vram 2GiB
	}`, Routes: `
	handle_path /tts/* {
		gpu_broker tts
		reverse_proxy {http.gpu_broker.upstream}
	}`})
	s.serve("tts")
	st := s.status()
	require.True(t, st.Consumers["stt"].Loaded)
	require.True(t, st.Consumers["tts"].Loaded)
	require.EqualValues(t, gib(6), st.Consumers["stt"].Slots[0].Claim)
	require.EqualValues(t, 4096, st.Consumers["stt"].ResidentMiB)
	require.EqualValues(t, 2048, st.Consumers["tts"].ResidentMiB)
	require.Equal(t, "stt", st.Consumers["tts"].Shares)
	s.serve("stt")
	require.EqualValues(t, 1, s.servers["stt"].Stats().Loads)
	s.serve("llm")
	st = s.status()
	require.False(t, st.Consumers["stt"].Loaded)
	require.False(t, st.Consumers["tts"].Loaded)
	require.EqualValues(t, 1, st.Scheduler.Evictions)
}

func TestAConsumerThatGetsModelsKeepsWhatItHasLoaded(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Total: "24GiB", Consumers: []consumer{library("vram 10GiB")}})
	s.wants("/ollama/api/generate", "small")
	unloads := s.servers["ollama"].Stats().Unloads
	s.reloaded(func(text string) string { return strings.Replace(text, "vram 10GiB", twoModels, 1) })
	s.until("its model has a slot of its own", func() bool { return s.slot("ollama", "small").State == "READY" })
	s.wants("/ollama/api/generate", "small")
	require.Equal(t, unloads, s.servers["ollama"].Stats().Unloads)
	require.EqualValues(t, gib(9), s.status().GPUs[0].Booked)
	s.reloaded(func(text string) string { return strings.Replace(text, twoModels, "vram 10GiB", 1) })
	s.until("it is one slot again", func() bool {
		slots := s.status().Consumers["ollama"].Slots
		return len(slots) == 1 && slots[0].Model == "" && slots[0].State == "READY"
	})
	require.Equal(t, unloads, s.servers["ollama"].Stats().Unloads)
}

func TestAModelThatDoesNotComeWhollyOntoTheGPUIsNotServedFromTheCPU(t *testing.T) {
	t.Parallel()
	c := library(`
		require_full_gpu
		model small {
			vram 4GiB
		}
		model large {
			vram 7GiB
		}
		model huge {
			vram 10GiB
		}
	`)
	c.Spill, c.Models = true, map[string]gpu.Bytes{"small": gib(4), "large": gib(9), "huge": gib(13)} // two take more than anybody said
	s := start(t, layout{Total: "12GiB", Consumers: []consumer{c}})
	s.wants("/ollama/api/generate", "small")
	s.wants("/ollama/api/generate", "large") // beside the small one a part of it stays outside
	require.Equal(t, 1, s.servers["ollama"].Stats().Spills)
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
	require.EqualValues(t, 1, s.status().Scheduler.LoadFailures)
	require.Equal(t, "READY", s.slot("ollama", "large").State)
	s.until("it is booked with what it says", func() bool { return s.slot("ollama", "large").Booking == int64(gib(9)) })

	a := s.askJSON("/ollama/api/generate", `{"model":"huge","prompt":"hello"}`)
	require.Equal(t, 503, a.status)
	require.Contains(t, string(a.body), "load_failed")
	require.Contains(t, string(a.body), "only 12GiB of the 13GiB of huge came onto the GPU")
	require.Equal(t, 4, s.servers["ollama"].Stats().Spills, "it had three tries")
	require.Equal(t, "IDLE", s.slot("ollama", "huge").State)
	s.wants("/ollama/api/generate", "small")
}

func TestRequireFullGPUNeedsModelsThatTheBrokerLoads(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Total: "12GiB", Consumers: []consumer{library(twoModels)}})
	bad := strings.Replace(s.caddyfileNow(), twoModels, "vram 9GiB\nrequire_full_gpu\n", 1)
	a := s.adminDo("POST", "/load", "text/caddyfile", bad)
	require.Equal(t, 400, a.status)
	require.Contains(t, string(a.body), "require_full_gpu, but its load route can't load it as a whole")
}
