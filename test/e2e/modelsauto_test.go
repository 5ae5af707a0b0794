package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

func TestModelsAutoServesWhatTheServerListsWithoutItsBeingNamed(t *testing.T) {
	t.Parallel()
	for _, manner := range []modelserver.Manner{modelserver.Ollama, modelserver.LlamaCppRouter} {
		t.Run(string(manner), func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Consumers: []consumer{
				shelf("llm", manner, "vram 6GiB\nmodels auto", map[string]float64{"small:latest": 3, "org/big:7b": 5}),
				{Options: modelserver.Options{Name: "tts", VRAM: gib(9)}},
			}, Routes: "handle_path /all/* {\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}"})
			require.Equal(t, 200, s.post("/tts/", "x").status)
			before := s.status().Consumers["llm"]
			require.Empty(t, before.Slots, "no slot before it is asked for")
			require.Equal(t, "healthy", before.Health)
			require.True(t, before.Enabled)
			require.False(t, before.Removed || before.Draining || before.Pinned, "%+v", before)
			for _, list := range []string{"/all/v1/models", "/all/api/tags"} {
				body := string(s.get(list).body)
				for _, name := range []string{`"small:latest"`, `"org/big:7b"`, `"tts"`} {
					require.Contains(t, body, name, list)
				}
				require.NotContains(t, body, `"llm"`, list)
			}
			require.Equal(t, 200, s.get("/all/v1/models/org%2Fbig:7b").status)

			s.askJSON("/all/v1/chat/completions", `{"model":"nope","messages":[{"role":"user","content":"a"}]}`).refused(t, 404, "unknown_model")
			s.chat("llm", "nope").refused(t, 404, "unknown_model")
			require.Zero(t, s.status().Scheduler.Evictions, "a name that is not listed evicts nothing")

			for i, path := range []string{"all", "llm"} {
				require.Equal(t, 200, s.chat(path, []string{"small:latest", "org/big:7b"}[i]).status)
			}
			if manner == modelserver.Ollama {
				require.Equal(t, 200, s.chat("all", "Library/Small").status)
			}
			require.Len(t, s.status().Consumers["llm"].Slots, 2)
		})
	}
}

func TestModelsAutoSizesAModelByWhatWasSeen(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{shelf("ollama", modelserver.Ollama, "vram 9GiB\nmodels auto", map[string]float64{"a": 3, "b": 4})}})
	for name, size := range map[string]float64{"a": 3, "b": 4} {
		require.Equal(t, 200, s.chat("ollama", name).status)
		s.until("it is sized by what its server says", func() bool { return s.slot("ollama", name).Claim == int64(gib(size)) })
	}
	require.Equal(t, 200, s.adminDo("POST", "/gpu_broker/consumers/ollama/unload", "", "").status)
	s.until("they are forgotten", func() bool { return len(s.status().Consumers["ollama"].Slots) == 0 })
	evictions := s.status().Scheduler.Evictions
	for _, name := range []string{"a", "b"} { // 9 GiB each would not fit together
		require.Equal(t, 200, s.chat("ollama", name).status)
	}
	require.Equal(t, evictions, s.status().Scheduler.Evictions)
	require.Equal(t, "READY", s.slot("ollama", "a").State)
}

func TestModelsAutoNeedsACatalogAndASize(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{shelf("ollama", modelserver.Ollama, "vram 9GiB\nmodels auto", map[string]float64{"a": 3})}})
	for from, want := range map[string]string{"models auto": "models auto\ncatalog off", "vram 9GiB": ""} {
		a := s.reload(func(c string) string { return strings.Replace(c, from, want, 1) })
		require.NotEqual(t, 200, a.status, fmt.Sprintf("%s became %s", from, want))
		require.Contains(t, string(a.body), "models auto")
	}
}

// N3: a fallback gets a name of its own, too, in place of one that only the list of the first server has.
func TestN3_AModelThatOnlyItsServersListNamesGoesToAFallbackByTheFallbacksName(t *testing.T) {
	t.Parallel()
	for lines, routes := range map[string][]string{
		"models auto": {"all", "ollama"},
		"model small": {"ollama"}, // the consumer's own route serves what nobody has named
	} {
		t.Run(lines, func(t *testing.T) {
			t.Parallel()
			cloud := newRecorder(t)
			s := start(t, layout{
				Global: "consumer hosted {\ncloud\nupstream " + cloud.addr + "\nalias gpt-4o-mini\n}",
				Consumers: []consumer{
					shelf("ollama", modelserver.Ollama, "vram 6GiB\nfallback hosted\n"+lines, map[string]float64{"small": 3, "org/big:7b": 5}),
					plainModel("tts", 15),
				},
				Routes: "handle_path /all/* {\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
			})
			s.serve("tts")
			for _, route := range routes {
				for _, name := range []string{"org/big:7b", "Org/Big:7B"} {
					s.chat(route, name).servedBy(t, "hosted")
					require.Contains(t, string(cloud.next(t).body), `{"model":"gpt-4o-mini",`, "%s by %s", name, route)
				}
			}
			s.doByHand("consumers/tts/unload")
			for _, route := range routes {
				s.chat(route, "Org/Big:7B").servedBy(t, "ollama")
			}
			require.Contains(t, string(s.chat(routes[0], "org/big:7b").body), `"model":"org/big:7b"`, "its own server gets what the client wrote")
		})
	}
}

func TestModelsAutoProposesWhatTheServerLists(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Consumers: []consumer{
			shelf("ollama", modelserver.Ollama, "vram 6GiB\nmodels auto", map[string]float64{"qwen2.5:7b": 3}),
			shelf("private", modelserver.Ollama, "vram 6GiB\nmodels auto\nunlisted", map[string]float64{"qwen2.5:14x": 3}),
		},
		Routes: "handle_path /all/* {\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	require.Contains(t, s.chat("all", "qwen2.5:14b").refused(t, 404, "unknown_model"), `did you mean "qwen2.5:7b"?`)
	require.NotContains(t, s.chat("private", "qwen2.5:14b").refused(t, 404, "unknown_model"), "14x", "it is unlisted")
	require.Equal(t, 200, s.chat("all", "qwen2.5:14x").status, "and served")
}

func TestAConsumerWithModelsAutoIsKnownBeforeItsFirstRequest(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{shelf("ollama", modelserver.Ollama, "vram 6GiB\nmodels auto", map[string]float64{"small": 3})}})
	do := func(want int, action string) string {
		t.Helper()
		a := s.adminDo("POST", "/gpu_broker/consumers/ollama/"+action, "", "")
		require.Equal(t, want, a.status, "%s: %s", action, a.body)
		return string(a.body)
	}
	do(200, "unload") // nothing is loaded
	require.Contains(t, do(409, "load"), "has been asked for yet")
	require.Contains(t, do(409, "pin"), "has been asked for yet")
	require.Equal(t, 409, s.adminDo("GET", "/gpu_broker/explain?consumer=ollama", "", "").status)
	do(200, "drain")
	require.True(t, s.status().Consumers["ollama"].Draining)
	s.chat("ollama", "small").refused(t, 503, "draining")
	do(200, "resume")
	require.False(t, s.status().Consumers["ollama"].Draining)
	require.Equal(t, 200, s.chat("ollama", "small").status)
	s.servers["ollama"].Kill()
	s.until("it is told to be down", func() bool {
		return len(s.decisions("unhealthy")) > 0 && s.status().Consumers["ollama"].Health == "unhealthy"
	})
	for _, d := range s.decisions("unhealthy") {
		require.Contains(t, []string{"ollama", "ollama/small"}, d.Consumer)
	}
}

// startedRouter is a global option with a llama.cpp router that the broker starts, with more lines of its consumer.
func startedRouter(t *testing.T, lines string) string {
	bin, err := caddytest.Modelserver()
	require.NoError(t, err)
	return fmt.Sprintf("consumer llm {\nvram 6GiB\npreset llamacpp-router\n%s\nprocess %s -name llm -manner llamacpp-router -models small:3GiB+org/big:5GiB -addr 127.0.0.1:{gpu_broker.port} -sim-dir {$SIM_DIR} {\nports %s\ngrace 2s\n}\n}", lines, bin, portRange(t))
}

// startingSlowly makes a server that the broker starts take a while before it listens.
func startingSlowly(global string) string {
	return strings.Replace(global, "process ", "process sh -c \"sleep .4; exec \\\"$@\\\"\" sh ", 1)
}

const allAndLLM = "handle_path /all/* {\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}\n" +
	"handle_path /llm/* {\ngpu_broker llm\nreverse_proxy {http.gpu_broker.upstream}\n}"

// Nobody can be asked before it runs, and only a request starts it.
func TestModelsAutoServesAServerThatTheBrokerStarts(t *testing.T) {
	t.Parallel()
	for _, route := range []string{"all", "llm"} {
		t.Run(route, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Global: startedRouter(t, "models auto"), Consumers: []consumer{{Options: modelserver.Options{Name: "tts", VRAM: gib(9)}}}, Routes: allAndLLM})
			s.chat(route, "small").servedBy(t, "llm")
			require.Equal(t, []string{"org/big", "small", "tts"}, s.listed("/all/v1/models"))
			s.chat(route, "nope").refused(t, 404, "unknown_model")
			s.chat(route, "org/big").servedBy(t, "llm")
			s.serve("tts")
			evictions := s.status().Scheduler.Evictions
			s.chat(route, "nope").refused(t, 404, "unknown_model")
			require.Equal(t, evictions, s.status().Scheduler.Evictions)
		})
	}
}

// Whether it has a model is not known before it listens.
func TestModelsAutoLetsRequestsWaitForAServerThatStarts(t *testing.T) {
	t.Parallel()
	for _, route := range []string{"all", "llm"} {
		t.Run(route, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Global: startingSlowly(startedRouter(t, "models auto")), Routes: allAndLLM})
			chat := func(name string) <-chan answer {
				return s.goCtx(t.Context(), "POST", "/"+route+"/v1/chat/completions", fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"a"}]}`, name))
			}
			first := chat("small")
			s.until("its process runs", func() bool { p := s.status().Consumers["llm"].Process; return p != nil && p.Running })
			second := chat("org/big")
			for _, a := range []answer{s.await(first), s.await(second)} {
				require.Equal(t, 200, a.status, "%s", a.body)
			}
		})
	}
}

// Of several that were never asked, one that can't be started does not stand before the others for good.
func TestModelsAutoReachesAServerBehindOneThatDoesNotStart(t *testing.T) {
	t.Parallel()
	broken := strings.ReplaceAll(startedRouter(t, "models auto"), "consumer llm", "consumer broken")
	broken = strings.Replace(broken, "process ", "process false ", 1)
	s := start(t, layout{Global: broken + "\n" + startedRouter(t, "models auto"), Routes: allAndLLM})
	s.chat("all", "small").refused(t, 503, "load_failed")
	s.chat("all", "small").servedBy(t, "llm")
	s.chat("all", "org/big").servedBy(t, "llm")
}

// The first request for a server that was never asked may have to unload others, whatever it names. What the server lists while it tries is known then.
func TestModelsAutoLearnsTheListOfAServerWhoseLoadFails(t *testing.T) {
	t.Parallel()
	for _, lines := range []string{"models auto", "model small"} {
		t.Run(lines, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Global: startedRouter(t, lines), Consumers: []consumer{{Options: modelserver.Options{Name: "tts", VRAM: gib(12)}}}, Routes: allAndLLM +
				"\nhandle_path /any/* {\ngpu_broker {\nmodel_from body\ndefault tts any\n}\nreverse_proxy {http.gpu_broker.upstream}\n}"})
			s.serve("tts")
			s.chat("llm", "nope").refused(t, 503, "load_failed")
			s.serve("tts")
			evictions := s.status().Scheduler.Evictions
			for _, name := range []string{"nope", "nope-2", "nope-3"} {
				require.Contains(t, s.chat("llm", name).refused(t, 404, "unknown_model"), "there is no model")
			}
			s.askJSON("/any/synthesize", `{"model":"nope-4"}`).servedBy(t, "tts")
			require.Equal(t, evictions, s.status().Scheduler.Evictions)
			s.chat("llm", "org/big").servedBy(t, "llm")
		})
	}
}

// H7: a server whose list can't be had now is not tried with any name: that would unload others.
func TestH7_ANameUnloadsNothingWhileTheServersListCannotBeHad(t *testing.T) {
	t.Parallel()
	for what, fault := range map[string]func(f *modelserver.Faults){
		"hangs": func(f *modelserver.Faults) { f.HangPaths = []string{"/api/tags"} },
		"fails": func(f *modelserver.Faults) { f.FailPaths = map[string]int{"/api/tags": 500} },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			cloud := newRecorder(t)
			s := start(t, layout{Global: "probe_timeout 300ms\nconsumer hosted {\ncloud\nupstream " + cloud.addr + "\n}", Consumers: []consumer{
				shelf("ollama", modelserver.Ollama, "vram 6GiB\nmodel small", map[string]float64{"small": 3, "other": 3}),
				shelf("helped", modelserver.Ollama, "vram 6GiB\nmodel small\nfallback hosted", map[string]float64{"small": 3}),
				{Options: modelserver.Options{Name: "tts", VRAM: gib(12)}},
			}})
			for _, name := range []string{"ollama", "helped"} {
				s.servers[name].SetFaults(fault)
			}
			s.serve("tts")
			require.Contains(t, s.chat("ollama", "nope").refused(t, 503, "unhealthy"), "/api/tags")
			s.chat("helped", "nope").servedBy(t, "hosted")
			require.Zero(t, s.status().Scheduler.Evictions)
			s.chat("ollama", "small").servedBy(t, "ollama")
			s.servers["ollama"].SetFaults(func(f *modelserver.Faults) { *f = modelserver.Faults{} })
			s.until("it is asked again", func() bool { return s.chat("ollama", "other").status == 200 })
		})
	}
}

// A model that is loaded at a server without models auto is served there, whatever is unknown of other servers.
func TestH7_AModelThatIsHeldElsewhereNeedsNoListOfAnotherServer(t *testing.T) {
	t.Parallel()
	for what, started := range map[string]bool{"its list can't be had": false, "it was never started": true} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			l := layout{Consumers: []consumer{shelf("vlm", modelserver.Ollama, "vram 6GiB\nmodel small", map[string]float64{"small": 3, "other": 3})}, Routes: allAndLLM}
			if started {
				l.Global = startedRouter(t, "models auto")
			} else {
				l.Consumers = append(l.Consumers, shelf("llm", modelserver.LlamaCppRouter, "vram 6GiB\nmodels auto", map[string]float64{"big": 5}))
				l.Routes = strings.SplitAfter(allAndLLM, "}\n}")[0]
			}
			s := start(t, l)
			if !started {
				s.servers["llm"].SetFaults(func(f *modelserver.Faults) { f.FailPaths = map[string]int{"/models": 500, "/v1/models": 500} })
			}
			s.chat("vlm", "other").servedBy(t, "vlm")
			s.chat("all", "other").servedBy(t, "vlm")
			require.Equal(t, 503, s.chat("all", "nope").status)
		})
	}
}

// Nor for a client that leaves while the server is asked.
func TestH7_ANameUnloadsNothingForAClientThatHasLeft(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{
		shelf("ollama", modelserver.Ollama, "vram 6GiB\nmodel small", map[string]float64{"small": 3}),
		{Options: modelserver.Options{Name: "tts", VRAM: gib(12)}},
	}})
	s.servers["ollama"].SetFaults(func(f *modelserver.Faults) { f.HangPaths = []string{"/api/tags"} })
	s.serve("tts")
	ctx, leave := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer leave()
	s.await(s.goCtx(ctx, "POST", "/ollama/v1/chat/completions", `{"model":"nope","messages":[{"role":"user","content":"a"}]}`))
	s.until("its request is over", func() bool {
		return strings.Contains(string(s.adminDo("GET", "/metrics", "", "").body), `code="client_left"`)
	})
	require.Equal(t, "READY", s.slot("tts", "").State)
	require.Zero(t, s.status().Scheduler.Evictions)
}

// A scheduler that unloads nothing needs no sizes.
func TestModelsAutoServesWithoutASizeWhereNothingIsUnloaded(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"locked", "passthrough"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Global: "scheduler " + kind, Consumers: []consumer{
				shelf("llm", modelserver.Ollama, "models auto # no vram \n", map[string]float64{"small:latest": 3, "org/big:7b": 5}),
			}, Routes: "handle_path /all/* {\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}"})
			for _, route := range []string{"all", "llm"} {
				require.Equal(t, []string{"org/big:7b", "small:latest"}, s.listed("/"+route+"/v1/models"))
				for _, name := range []string{"small", "org/big:7b"} {
					s.chat(route, name).servedBy(t, "llm")
				}
				s.chat(route, "nope").refused(t, 404, "unknown_model")
			}
		})
	}
}
