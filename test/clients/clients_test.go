// Package clients runs the clients that people use, OpenAI's Node SDK and ollama's own, unchanged against
// the example with one URL: a real Caddy over HTTPS, and pretending servers that share a simulated GPU.
package clients

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(caddytest.Exit))
}

// served checks what the clients can't see: that no server ran out of memory, was unloaded under its work or left
// work undone, and that no two computed at once.
func (s *site) served() {
	s.t.Helper()
	var all []*modelserver.Server
	for name, server := range s.servers {
		stats := server.Stats()
		require.Zero(s.t, stats.OOMs, name)
		require.Zero(s.t, stats.LoadsFailed, name)
		require.Zero(s.t, stats.UnloadsWhileBusy, name)
		require.Zero(s.t, stats.Aborted, name)
		all = append(all, server)
	}
	require.Empty(s.t, modelserver.Overlap(all...))
}

func TestOpenAIsSDKWorksThroughOneURLAcrossSwaps(t *testing.T) {
	t.Parallel()
	s := start(t, settings{})
	s.node("webui.mjs")
	s.node("openai.mjs")
	s.served()
	require.Equal(t, 1, s.servers["whisper"].Stats().Loads, "it fits beside each other model")
	for _, name := range []string{"llm", "ollama", "sdxl"} {
		require.GreaterOrEqual(t, s.servers[name].Stats().Loads, 2, name)
		require.GreaterOrEqual(t, s.servers[name].Stats().Unloads, 1, name)
	}
}

func TestOllamasClientWorksThroughOneURLAcrossSwaps(t *testing.T) {
	t.Parallel()
	s := start(t, settings{})
	s.node("ollama.mjs")
	s.served()
	require.GreaterOrEqual(t, s.servers["llm"].Stats().Unloads, 2, "who is warm goes first: one switch a round is enough")
	require.Zero(t, s.servers["sdxl"].Stats().LoadsStarted)
}

func TestErrorsAreTheSDKsOwnWithOurMessage(t *testing.T) {
	t.Parallel()
	s := start(t, settings{
		card:    8 * gpu.GiB,
		servers: map[string]func(*modelserver.Options){"whisper": func(o *modelserver.Options) { o.LoadTime = time.Hour }},
		edits:   map[string]string{"vram 2.5GiB\n": "vram 2.5GiB\nbudget 1s\n"},
	})
	s.servers["ollama"].Kill()
	s.Until("the broker has seen that ollama is down", func() bool { return s.Status().Consumers["ollama"].Health == "unhealthy" })
	s.node("errors.mjs")
}

func TestTheSDKsRetriesWaitAsLongAsTheyAreTold(t *testing.T) {
	t.Parallel()
	s := start(t, settings{servers: map[string]func(*modelserver.Options){
		"llm": func(o *modelserver.Options) { o.Faults.OOMLoads = 2 },
	}})
	s.node("retries.mjs")
	var tries []time.Time
	for _, e := range s.servers["llm"].Events() {
		if e.Kind == modelserver.EventLoadStart {
			tries = append(tries, e.At)
		}
	}
	require.Len(t, tries, 3)
	require.Greater(t, tries[1].Sub(tries[0]), time.Second)
	require.Greater(t, tries[2].Sub(tries[1]), 2*time.Second)
	require.Equal(t, 1, s.servers["llm"].Stats().Worked)
}

func TestAStreamThatWaitsGetsSignsOfLifeAndErrorsAfterThem(t *testing.T) {
	t.Parallel()
	s := start(t, settings{
		servers: map[string]func(*modelserver.Options){
			"llm":     func(o *modelserver.Options) { o.LoadTime = time.Second },
			"whisper": func(o *modelserver.Options) { o.Faults.HangLoad = true },
		},
		edits: map[string]string{"heartbeat 15s": "heartbeat 100ms", "vram 2.5GiB\n": "vram 2.5GiB\nbudget 1s\n"},
	})
	s.node("heartbeat.mjs")
}
