package presets_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

// habit runs a test for each of these presets.
func habit(t *testing.T, names []string, test func(t *testing.T, k *known)) {
	t.Helper()
	t.Parallel()
	require.NotEmpty(t, names)
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, preset(t, name))
		})
	}
}

// of are the presets that a rule is for.
func of(t *testing.T, rule func(*known) bool) (names []string) {
	t.Helper()
	for _, name := range presets.Names() {
		if rule(preset(t, name)) {
			names = append(names, name)
		}
	}
	return names
}

func TestServersThatAnswerAnUnloadBeforeItIsDoneAreWaitedFor(t *testing.T) {
	habit(t, []string{"ollama", "comfyui", "llamacpp-router", "koboldcpp", "triton"}, func(t *testing.T, k *known) {
		s := start(t, k.layout(false))
		s.ask(k.ask(k.first())).good(t, "the first request")
		s.settled(k)
		s.server.SetOptions(func(o *modelserver.Options) {
			o.UnloadTime, o.ReleaseDelay = 150*time.Millisecond, 150*time.Millisecond
		})
		s.await("the rival's", s.sendRival())
		k.unharmed(t, s) // the card would have been overfilled

		unloaded, err := s.server.WaitForEvent(bound(t), func(e modelserver.Event) bool { return e.Kind == modelserver.EventMemory && e.Held <= rest })
		require.NoError(t, err)
		loads, err := s.rival.WaitForEvent(bound(t), func(e modelserver.Event) bool { return e.Kind == modelserver.EventLoadStart })
		require.NoError(t, err)
		require.True(t, loads.At.After(unloaded.At), "the rival was loaded before the memory was back")
	})
}

// TestWorkThatGoesPastTheBrokerIsNotCut is for all whose busy route tells of it.
func TestWorkThatGoesPastTheBrokerIsNotCut(t *testing.T) {
	tells := func(k *known) bool { return k.routes.Unload != nil && k.routes.Busy != nil }
	habit(t, of(t, tells), func(t *testing.T, k *known) {
		s := start(t, k.layout(false))
		s.ask(k.ask(k.first())).good(t, "the first request")
		s.settled(k)
		s.pretending().hold(true)
		past := s.send(s.server.URL(), k.ask(k.first()))
		require.NoError(t, s.server.WaitFor(bound(t), func(st modelserver.Stats) bool { return st.Working == 1 }))
		asked := s.server.Stats().Requests[bare(k.routes.Busy.Path)]
		waits := s.sendRival()
		require.NoError(t, s.server.WaitFor(bound(t), func(st modelserver.Stats) bool { return st.Requests[bare(k.routes.Busy.Path)] >= asked+2 }))
		st := s.server.Stats()
		require.Zero(t, st.UnloadCalls)
		require.Equal(t, 1, st.Working)
		s.pretending().hold(false)
		s.await("what went past the broker", past)
		s.await("the rival's", waits)
		k.unharmed(t, s)
	})
}

func TestASleepingServerIsNotWokenByProbes(t *testing.T) {
	habit(t, []string{"llamacpp"}, func(t *testing.T, k *known) {
		l := k.layout(false)
		l.process = false // it sleeps by its own flag
		s := start(t, l)
		s.ask(k.ask("")).good(t, "the first request")
		require.Equal(t, "READY", s.slot("").State)
		require.NoError(t, s.server.Unload(bound(t)))
		s.Until("the broker sees that it sleeps", func() bool { return s.slot("").State == "IDLE" })
		health := s.server.Stats().Requests["/health"]
		require.NoError(t, s.server.WaitFor(bound(t), func(st modelserver.Stats) bool { return st.Requests["/health"] >= health+3 }))
		require.Equal(t, 403, s.ask(ask{method: "GET", path: "/slots"}).status, "this would wake it")
		st := s.server.Stats()
		require.Zero(t, st.WokenByProbe)
		require.Equal(t, 1, st.Loads)
		s.ask(k.ask("")).good(t, "a request wakes it")
		require.Equal(t, 2, s.server.Stats().Loads)
	})
}

// TestProbesNeitherGenerateNorLoad looks at what a server was asked while it was not loaded.
func TestProbesNeitherGenerateNorLoad(t *testing.T) {
	for name, never := range map[string][]string{
		"sglang":          {"/health", "/health_generate"},
		"llamacpp-router": {"/slots", "/props", "/metrics"},
		"llama-swap":      {"/upstream/org/one/health", "/upstream/two/health"},
		"tabbyapi":        {"/health"}, // says unhealthy for ever after an error
		"koboldcpp":       {"/api/ps", "/api/tags", "/system_stats"},
		"localai":         {"/api/ps"},
		"triton":          {"/v2/health/ready"}, // not while a model loads
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := preset(t, name)
			s := start(t, k.layout(false))
			if k.routes.Remember {
				s.ask(k.ask(k.first())).good(t, "the first request")
				s.await("the rival's", s.sendRival()) // so that it is unloaded
			}
			worked := s.server.Stats().Worked
			probed := s.server.Stats().Requests[k.routes.Health.Path]
			require.NoError(t, s.server.WaitFor(bound(t), func(st modelserver.Stats) bool { return st.Requests[k.routes.Health.Path] >= probed+4 }))
			st := s.server.Stats()
			for _, path := range never {
				require.Zero(t, st.Requests[path], path)
			}
			require.Equal(t, worked, st.Worked)
			require.Zero(t, st.Held-min(st.Held, rest), "it is not loaded")
			require.Zero(t, st.Deaths)
			require.Equal(t, "healthy", s.Status().Consumers["server"].Health)
		})
	}
}

func TestAServerThatReportsNoMemoryIsBookedAsItIsConfigured(t *testing.T) {
	habit(t, []string{"ollama"}, func(t *testing.T, k *known) {
		l := k.layout(false)
		l.options.OnCPU = true // size_vram is 0
		s := start(t, l)
		s.ask(k.ask(k.first())).good(t, "the first request")
		probed := s.server.Stats().Requests["/api/ps"]
		require.NoError(t, s.server.WaitFor(bound(t), func(st modelserver.Stats) bool { return st.Requests["/api/ps"] >= probed+3 }))
		require.Equal(t, "READY", s.slot(k.first()).State)
		require.EqualValues(t, model, s.slot(k.first()).Booking)
	})
}

// TestWhatIsNotLoadedAnyMoreIsUnloadedWithSuccess is about the answers of unload routes to a call that comes too late.
func TestWhatIsNotLoadedAnyMoreIsUnloadedWithSuccess(t *testing.T) {
	byName := func(k *known) bool { return k.About.Models != "" || k.Name == "tabbyapi" }
	habit(t, of(t, byName), func(t *testing.T, k *known) {
		l := k.layout(false)
		l.global = "probe_interval 1h"
		s := start(t, l)
		s.ask(k.ask(k.first())).good(t, "the first request")
		require.NoError(t, s.server.Unload(bound(t))) // by itself, and nobody is told
		s.await("the rival's", s.sendRival())
		require.Equal(t, 1, s.server.Stats().UnloadCalls)
		require.Empty(t, s.failures())
		require.EqualValues(t, 1, s.Status().Scheduler.Evictions)
		s.ask(k.ask(k.first())).good(t, "a request once the rival is done")
		k.unharmed(t, s)
	})
}

func TestARequestThatComesWhileKoboldCppStartsAnewWaits(t *testing.T) {
	habit(t, []string{"koboldcpp"}, func(t *testing.T, k *known) {
		s := start(t, k.layout(false))
		s.ask(k.ask("")).good(t, "the first request")
		rival := s.sendRival()
		require.NoError(t, s.server.WaitFor(bound(t), func(st modelserver.Stats) bool { return st.UnloadCalls == 1 }))
		waits := s.send(s.url+"/server", k.ask(""))
		require.NoError(t, s.server.WaitFor(bound(t), func(st modelserver.Stats) bool { return !st.Alive })) // its port is closed
		more := s.send(s.url+"/server", k.ask(""))
		s.await("the rival's", rival)
		s.await("the one that came first", waits)
		s.await("the one that came while its port was closed", more)
		k.unharmed(t, s)
	})
}

// TestServersThatMustBeToldToLoadAreToldOnce counts the calls of their load routes.
func TestServersThatMustBeToldToLoadAreToldOnce(t *testing.T) {
	for name, path := range map[string]string{
		"a1111": "/sdapi/v1/reload-checkpoint", "sglang": "/resume_memory_occupation", "chatterbox": "/restart_server", "vllm": "/wake_up",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := preset(t, name)
			s := start(t, k.layout(false))
			s.ask(k.ask("")).good(t, "the first request")
			before := s.server.Stats().Requests[path]
			s.await("the rival's", s.sendRival())
			require.Equal(t, before, s.server.Stats().Requests[path])
			s.ask(k.ask("")).good(t, "a request once the rival is done")
			s.ask(k.ask("")).good(t, "one more")
			require.Equal(t, before+1, s.server.Stats().Requests[path])
			k.unharmed(t, s)
		})
	}
}

// TestAServerThatTheBrokerStartsIsUnloadedByItsRouteWhileItLives is about the order of means: its own route, then its end.
func TestAServerThatTheBrokerStartsIsUnloadedByItsRouteWhileItLives(t *testing.T) {
	habit(t, []string{"vllm", "sglang", "koboldcpp"}, func(t *testing.T, k *known) {
		l := k.layout(false)
		l.process = true
		s := start(t, l)
		s.ask(k.ask("")).good(t, "the first request")
		pid := s.Status().Consumers["server"].Process.PID
		s.await("the rival's", s.sendRival())
		require.Equal(t, pid, s.Status().Consumers["server"].Process.PID)
		require.Equal(t, "IDLE", s.slot("").State)
		st := s.pretending().stats()
		require.Equal(t, 1, st.UnloadCalls)
		require.False(t, st.Loaded)
		s.ask(k.ask("")).good(t, "a request once the rival is done")
		require.Equal(t, 1, s.Status().Consumers["server"].Process.Starts)
		k.unharmed(t, s)
	})
}

// TestSpeachesThatIsBusyPastTheBrokerIsTakenAtItsMemorysWord is about a 409 after which its list leaves out what is still loaded.
func TestSpeachesThatIsBusyPastTheBrokerIsTakenAtItsMemorysWord(t *testing.T) {
	habit(t, []string{"speaches"}, func(t *testing.T, k *known) {
		l := k.layout(false)
		l.global = "outsider_wait 500ms"
		l.options.KeepAlive = 300 * time.Millisecond // its TTL
		s := start(t, l)
		s.ask(k.ask(k.first())).good(t, "the first request")
		s.pretending().hold(true)
		past := s.send(s.server.URL(), k.ask(k.first()))
		require.NoError(t, s.server.WaitFor(bound(t), func(st modelserver.Stats) bool { return st.Working == 1 }))
		a := <-s.sendRival()
		require.Equal(t, 503, a.status, "%s", a.body)
		require.Contains(t, string(a.body), "vram_exhausted", "what its list says is not believed against the card")
		require.Contains(t, string(a.body), "server/"+one)
		require.Zero(t, s.rival.Stats().LoadsStarted)
		s.pretending().hold(false)
		s.await("what went past the broker", past)

		require.NoError(t, s.server.WaitFor(bound(t), func(st modelserver.Stats) bool { return st.Held == 0 }), "its TTL is over")
		s.Until("the broker sees that its memory is back", func() bool { return s.slot(k.first()).Residue == 0 })
		s.await("the rival's", s.sendRival())
		for _, server := range []*modelserver.Server{s.server, s.rival} {
			require.Zero(t, server.Stats().Aborted)
			require.Zero(t, server.Stats().OOMs)
		}
	})
}

func TestModelsThatAreNotNamedAreTakenInWithTheConsumersVRAM(t *testing.T) {
	habit(t, []string{"ollama"}, func(t *testing.T, k *known) {
		l := k.layout(false)
		l.options.Models = map[string]gpu.Bytes{"named": 2 * gpu.GiB, "other": 3 * gpu.GiB}
		l.lines = "preset ollama\nvram 6GiB\nmodel named {\nvram 2GiB\n}"
		s := start(t, l)
		s.ask(k.ask("other")).good(t, "a model that is not in the configuration")
		s.ask(k.ask("named")).good(t, "one that is")
		require.Equal(t, "READY", s.slot("other").State)
		require.Equal(t, 2, s.server.Stats().Loads)
	})
}
