package e2e

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// shelf is a server with models of these sizes in GiB, which it lists by these names only.
func shelf(name string, manner modelserver.Manner, lines string, models map[string]float64) consumer {
	o := modelserver.Options{Name: name, Manner: manner, LoadTime: 20 * time.Millisecond, UnloadTime: 5 * time.Millisecond, Models: map[string]gpu.Bytes{}}
	for model, size := range models {
		o.Models[model] = gib(size)
	}
	if manner != modelserver.Ollama { // which the site knows
		lines = "preset " + string(manner) + "\n" + lines
	}
	return consumer{Options: o, Lines: lines}
}

func (s *site) chat(consumer, model string) answer {
	return s.askJSON("/"+consumer+"/v1/chat/completions", fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"hello"}]}`, model))
}

func TestK1_ASpellingOfAModelsNameFindsItsSlot(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{shelf("ollama", modelserver.Ollama, `
		vram 2GiB
		model llama3.1:8b {
			vram 9GiB
		}
		model hf.co/org/name:Q4 {
			vram 4GiB
		}`, map[string]float64{"llama3.1:8b": 9, "hf.co/org/name:Q4": 4, "mistral:latest": 2})}})
	for _, name := range []string{"llama3.1:8b", "Llama3.1:8b", "library/llama3.1:8b", "registry.ollama.ai/library/llama3.1:8b", "HTTPS://registry.OLLAMA.ai/library/llama3.1:8B",
		"hf.co/org/name:Q4", "HF.co/Org/Name:q4", "mistral", "Library/Mistral:latest"} {
		require.Equal(t, 200, s.chat("ollama", name).status, name)
	}
	var slots []string
	for _, sl := range s.status().Consumers["ollama"].Slots {
		slots = append(slots, sl.Model)
		require.Equal(t, "READY", sl.State, sl.Model)
	}
	require.ElementsMatch(t, []string{"llama3.1:8b", "hf.co/org/name:Q4", "mistral:latest"}, slots)
	require.Zero(t, s.status().Scheduler.Evictions)
	require.Equal(t, 3, s.servers["ollama"].Stats().Loads)

	// Names that ollama itself tells apart stay apart.
	s.chat("ollama", "mike/llama3.1:8b").refused(t, 404, "unknown_model")
	s.chat("ollama", "hf.co/library/llama3.1:8b").refused(t, 404, "unknown_model")
}

func TestK1_ACopyOfAModelIsThatModelByItsDigest(t *testing.T) {
	t.Parallel()
	ollama := shelf("ollama", modelserver.Ollama, "vram 9GiB\nmodel llama3.1:8b", map[string]float64{"llama3.1:8b": 9})
	ollama.Aliases = map[string]string{"gpt-4o:latest": "llama3.1:8b"} // ollama cp
	s := start(t, layout{Consumers: []consumer{ollama}})
	one := func() {
		t.Helper()
		slots := s.status().Consumers["ollama"].Slots
		require.Len(t, slots, 1)
		require.Equal(t, "llama3.1:8b", slots[0].Model)
		require.Equal(t, "READY", slots[0].State)
	}
	require.Equal(t, 200, s.chat("ollama", "GPT-4o").status)
	one()
	require.Equal(t, 200, s.adminDo("POST", "/gpu_broker/consumers/ollama/llama3.1:8b/unload", "", "").status)

	// Loaded past the broker by its other name, which is the one that ollama lists.
	resp, err := http.Post(s.servers["ollama"].URL()+"/api/generate", "application/json", strings.NewReader(`{"model":"gpt-4o"}`))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	s.until("it is seen", func() bool { return s.slot("ollama", "llama3.1:8b").State == "READY" })
	require.Equal(t, 200, s.chat("ollama", "llama3.1:8b").status)
	one()
	require.Equal(t, 2, s.servers["ollama"].Stats().Loads)
	require.Equal(t, 200, s.adminDo("POST", "/gpu_broker/consumers/ollama/llama3.1:8b/unload", "", "").status)
	s.until("its memory is back", func() bool { return s.status().GPUs[0].Free == int64(gib(16)) })
}

func TestK1_ALoadThatComesToNothingFailsSoonAndHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	for _, manner := range []modelserver.Manner{modelserver.LocalAI, modelserver.LMStudio} {
		t.Run(string(manner), func(t *testing.T) {
			t.Parallel()
			server := shelf("llm", manner, "vram 5GiB\nmodel gpt-4o", map[string]float64{"qwen": 5})
			server.Aliases = map[string]string{"gpt-4o": "qwen"} // which it does not tell
			s := start(t, layout{Consumers: []consumer{server, {Options: modelserver.Options{Name: "tts", VRAM: gib(8)}}}})
			failing, began := s.send("POST", "/llm/v1/chat/completions", `{"model":"gpt-4o","messages":[{"role":"user","content":"a"}]}`), time.Now()
			s.until("it is being loaded", func() bool { return len(s.decisions("load")) > 0 })
			tts := s.post("/tts/", "x")
			require.Equal(t, 200, tts.status)
			require.Less(t, tts.took, 2*time.Second, "not held up by it")
			message := s.await(failing).refused(t, 503, "load_failed")
			require.Contains(t, message, `the server accepted the load of "gpt-4o", but lists qwen`)
			require.Less(t, time.Since(began), 3*time.Second)

			// What it took is booked once, whoever has it.
			s.until("the memory in use is accounted for once", func() bool {
				var booked int64
				for _, c := range s.status().Consumers {
					for _, sl := range c.Slots {
						booked += sl.Booking + sl.Residue
					}
				}
				return booked == int64(gib(13)) && s.status().GPUs[0].Free == int64(gib(3))
			})
		})
	}
}

func TestH7_AWrongNameUnloadsNothing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		manner modelserver.Manner
		list   string
		loads  string
	}{
		{modelserver.Ollama, "/api/tags", "/api/embed"},
		{modelserver.LlamaCppRouter, "/models", "/models/load"},
		{modelserver.LocalAI, "/v1/models", "/backend/load"},
		{modelserver.LMStudio, "/api/v1/models", "/api/v1/models/load"},
	} {
		t.Run(string(c.manner), func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Consumers: []consumer{
				shelf("llm", c.manner, "vram 6GiB\nmodel small", map[string]float64{"small": 6, "extra": 5}),
				{Options: modelserver.Options{Name: "tts", VRAM: gib(9)}},
			}})
			require.Equal(t, 200, s.chat("llm", "small").status)
			require.Equal(t, 200, s.post("/tts/", "x").status)
			server := s.servers["llm"]
			loads, lists := server.Stats().Requests[c.loads], server.Stats().Requests[c.list]
			for i := range 40 {
				message := s.chat("llm", fmt.Sprintf("nope-%d", i)).refused(t, 404, "unknown_model")
				require.NotContains(t, message, "never")
			}
			require.Contains(t, s.chat("llm", "extr").refused(t, 404, "unknown_model"), `did you mean "extra"`, "what the server lists is proposed")
			require.Zero(t, s.status().Scheduler.Evictions)
			require.Equal(t, "READY", s.slot("llm", "small").State)
			require.Equal(t, "READY", s.state("tts"))
			require.Equal(t, loads, server.Stats().Requests[c.loads])
			if c.list != "/models" && c.list != "/api/v1/models" { // else the probes ask it, too
				require.LessOrEqual(t, server.Stats().Requests[c.list]-lists, 3, "asked once in a few seconds at most")
			}
			require.Len(t, s.status().Consumers["llm"].Slots, 1, "no slot is made of a wrong name")

			require.Equal(t, 200, s.chat("llm", "extra").status, "what it has is served without being named")
			require.EqualValues(t, 1, s.status().Scheduler.Evictions)
		})
	}
}

func TestH7_ANameWhoseLoadWasNotFoundIsRememberedWhereTheServerHasNoCatalog(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{
		shelf("llm", modelserver.LocalAI, "catalog off\nvram 6GiB\nmodel small", map[string]float64{"small": 6}),
		{Options: modelserver.Options{Name: "tts", VRAM: gib(9)}},
	}})
	require.Equal(t, 200, s.chat("llm", "small").status)
	require.Equal(t, 200, s.post("/tts/", "x").status)
	s.chat("llm", "nope").refused(t, 503, "load_failed") // it had to be tried
	evictions := s.status().Scheduler.Evictions
	require.Equal(t, 200, s.chat("llm", "small").status)
	require.Equal(t, 200, s.post("/tts/", "x").status)
	loads := s.servers["llm"].Stats().Requests["/backend/load"]
	for range 5 {
		s.chat("llm", "nope").refused(t, 404, "unknown_model")
	}
	require.Equal(t, loads, s.servers["llm"].Stats().Requests["/backend/load"])
	require.LessOrEqual(t, s.status().Scheduler.Evictions-evictions, uint64(1), "only small's own load may have needed room")
}

func TestH8_NamesThatAreFoldersAreRefused(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{
		shelf("swap", modelserver.LlamaSwap, "catalog off\nvram 6GiB\nmodel small\nmodel_from path /m/*/chat\nmodel_from body", map[string]float64{"small": 6}),
	}})
	for _, name := range []string{".", ".."} {
		s.chat("swap", name).refused(t, 404, "unknown_model")
	}
	for _, path := range []string{"/swap/m/%2e%2e/chat", "/swap/m/%2E/chat"} {
		a := s.do(context.Background(), "POST", path, strings.NewReader("{}"))
		require.Contains(t, []int{400, 404}, a.status, "%s: %s", path, a.body)
	}
	for path := range s.servers["swap"].Stats().Requests {
		require.NotContains(t, path, "..")
		require.NotContains(t, path, "upstream", "nothing was loaded")
	}
}

// A client holds up nobody by the name that it asks for, neither by a wrong one nor by another spelling (E4).
func TestK1_NoNameDelaysAnotherConsumersModel(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{
		shelf("ollama", modelserver.Ollama, "vram 9GiB\nmodel llama3.1:8b", map[string]float64{"llama3.1:8b": 9}),
		{Options: modelserver.Options{Name: "tts", VRAM: gib(4)}},
	}})
	require.Equal(t, 200, s.post("/tts/", "x").status)
	for _, name := range []string{"nope", "Llama3.1:8b", "library/nope:8b"} {
		other := s.send("POST", "/ollama/api/generate", fmt.Sprintf(`{"model":%q,"prompt":"x"}`, name))
		for range 10 {
			a := s.post("/tts/", "x")
			require.Equal(t, 200, a.status)
			require.Less(t, a.took, 3*time.Second, "while %s is asked for", name)
		}
		s.await(other)
		require.Equal(t, 200, s.adminDo("POST", "/gpu_broker/consumers/ollama/unload", "", "").status)
	}
}

// H7: a name by which a server may have a model elsewhere, so that its list tells nothing, evicts nothing either.
func TestH7_ANameOfAModelThatMayBeElsewhereUnloadsNothing(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Consumers: []consumer{
			shelf("ollama", modelserver.Ollama, "vram 9GiB\nmodel small", map[string]float64{"small": 9, "my-cloud": 9}),
			{Options: modelserver.Options{Name: "tts", VRAM: gib(12)}},
		},
	})
	require.Equal(t, 200, s.post("/tts/", "x").status)
	for _, name := range []string{"nope-cloud", "nope:120b-cloud", "me/nope:cloud"} {
		a := s.chat("ollama", name)
		require.Equal(t, 404, a.status, "%s: %s", name, a.body)
		require.Empty(t, a.code(), "it is the server's own answer")
	}
	require.Equal(t, "READY", s.state("tts"))
	require.Zero(t, s.status().Scheduler.Evictions)
	require.Len(t, s.status().Consumers["ollama"].Slots, 1, "no slot is made of such a name")
	require.Equal(t, 200, s.chat("ollama", "my-cloud").status)
	require.Equal(t, "READY", s.slot("ollama", "my-cloud").State, "what the server lists it may load")

	s.reloaded(func(c string) string { return strings.Replace(c, "vram 9GiB", "vram 9GiB\nmodels auto", 1) })
	require.Equal(t, 404, s.chat("ollama", "nope-cloud").status)
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
}

func TestN3_AVersionOfAModelIsNoPartOfItsName(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{shelf("triton", modelserver.Triton, "vram 3GiB\nmodel resnet {\nalias eyes\n}\nmodel bert", map[string]float64{"resnet": 3, "bert": 3})},
		Routes: "handle_path /one/* {\ngpu_broker {\nmodel_from path /v2/models/*/versions/*/generate\nmodel_from path /v2/models/*/generate\n}\nreverse_proxy {http.gpu_broker.upstream}\n}"})
	for _, path := range []string{"/triton/v2/models/%s/generate", "/triton/v2/models/%s/versions/1/infer", "/triton/v2/models/%s/versions/1/generate", "/triton/v2/models/%s/versions/1/generate_stream",
		"/one/v2/models/%s/versions/1/generate"} {
		for _, model := range []string{"resnet", "eyes", "bert"} {
			a := s.askJSON(fmt.Sprintf(path, model), `{"text_input":"hello"}`)
			require.Equal(t, 200, a.status, "%s of %s: %s", path, model, a.body)
		}
	}
	require.Equal(t, "READY", s.slot("triton", "resnet").State)
	require.Equal(t, 404, s.askJSON("/triton/v2/models/nope/versions/1/infer", `{}`).status)
}

func TestN3_LocalAIsEnginesNameTheirModelInThePath(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{shelf("localai", modelserver.LocalAI, "vram 3GiB\nmodel small {\nalias mine\n}\nmodel big", map[string]float64{"small": 3, "big": 3})}})
	for _, name := range []string{"small", "mine"} {
		a := s.askJSON("/localai/v1/engines/"+name+"/completions", `{"prompt":"hello"}`)
		require.Equal(t, 200, a.status, string(a.body))
		a = s.askJSON("/localai/v1/engines/"+name+"/embeddings", `{"input":"hello"}`)
		require.Equal(t, 200, a.status, string(a.body))
	}
	require.Equal(t, "READY", s.slot("localai", "small").State)
	require.Equal(t, "IDLE", s.slot("localai", "big").State)
	a := s.askJSON("/localai/v1/engines/small/completions", `{"model":"big","prompt":"hello"}`)
	require.Equal(t, 400, a.status, "its server takes the one in the body: %s", a.body)
}
