//go:build linux && real

package real

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const chats = "/v1/chat/completions"

func TestLlamaServerTellsWhetherItComputes(t *testing.T) {
	s := StartLlamaServer(t, Slow, "--metrics")
	computes := func() bool {
		slots := askJSON[[]struct {
			IsProcessing bool `json:"is_processing"`
		}](t, s, http.MethodGet, "/slots", nil)
		require.Len(t, slots, 1)
		return slots[0].IsProcessing
	}
	require.JSONEq(t, `{"status":"ok"}`, string(ask(t, s, http.MethodGet, "/health", nil, 200)))
	require.False(t, computes())
	wantChat(t, s, chats, Slow)

	running := startStream(t, s, chats, Slow, 1500)
	require.True(t, computes())
	ask(t, s, http.MethodGet, "/slots?fail_on_no_slot=1", nil, http.StatusServiceUnavailable)
	require.Contains(t, string(ask(t, s, http.MethodGet, "/metrics", nil, 200)), "\nllamacpp:requests_processing 1\n")

	// It gives up an answer that nobody reads any more.
	running.leave()
	running.rest()
	eventually(t, false, computes)
	ask(t, s, http.MethodGet, "/slots?fail_on_no_slot=1", nil, http.StatusOK)
	require.Contains(t, string(ask(t, s, http.MethodGet, "/metrics", nil, 200)), "\nllamacpp:requests_processing 0\n")
}

func TestLlamaServerFallsAsleepAndAskingForItsSlotsWakesIt(t *testing.T) {
	s := StartLlamaServer(t, Tiny, "--sleep-idle-seconds", "2", "--metrics")
	sleeps := func() bool {
		return askJSON[struct {
			IsSleeping bool `json:"is_sleeping"`
		}](t, s, http.MethodGet, "/props", nil).IsSleeping
	}
	eventually(t, true, sleeps)
	for _, path := range []string{"/health", "/models", "/v1/models", "/metrics", "/props"} {
		ask(t, s, http.MethodGet, path, nil, 200)
		require.True(t, sleeps(), "GET %s leaves it asleep", path)
	}
	ask(t, s, http.MethodGet, "/slots", nil, 200)
	require.False(t, sleeps())
	eventually(t, true, sleeps)
	wantChat(t, s, chats, Tiny)
	require.False(t, sleeps())
}

// routerModels gives the state of each of a router's models.
func routerModels(t *testing.T, s *Server) map[string]string {
	t.Helper()
	answer := askJSON[struct {
		Data []struct {
			ID     string
			Status struct{ Value string }
		}
	}](t, s, http.MethodGet, "/models", nil)
	states := map[string]string{}
	for _, model := range answer.Data {
		states[model.ID] = model.Status.Value
	}
	return states
}

func wantRouterModels(t *testing.T, s *Server, loaded ...string) {
	t.Helper()
	want := map[string]string{Tiny: "unloaded", Tiny2: "unloaded", Slow: "unloaded"}
	for _, name := range loaded {
		want[name] = "loaded"
	}
	eventually(t, want, func() map[string]string { return routerModels(t, s) })
}

func model(name string) map[string]any { return map[string]any{"model": name} }

func TestLlamaRouterLoadsAndUnloadsWhatItIsTold(t *testing.T) {
	s := StartLlamaRouter(t, "--no-models-autoload")
	wantRouterModels(t, s)
	ask(t, s, http.MethodPost, chats, chat(Tiny, 8, false), http.StatusBadRequest)

	// Accepted at once, done later.
	require.JSONEq(t, `{"success":true}`, string(ask(t, s, http.MethodPost, "/models/load", model(Tiny), 200)))
	require.NotEqual(t, "unloaded", routerModels(t, s)[Tiny])
	wantRouterModels(t, s, Tiny)
	wantChat(t, s, chats, Tiny)
	require.Contains(t, string(ask(t, s, http.MethodPost, "/models/load", model(Tiny), 400)), "model is already running")
	ask(t, s, http.MethodPost, "/models/load", model(Tiny2), 200)
	wantRouterModels(t, s, Tiny, Tiny2)
	ask(t, s, http.MethodGet, "/slots?autoload=false&model="+Tiny, nil, 200)
	ask(t, s, http.MethodGet, "/slots?autoload=false&model="+Slow, nil, 400)

	require.JSONEq(t, `{"success":true}`, string(ask(t, s, http.MethodPost, "/models/unload", model(Tiny), 200)))
	wantRouterModels(t, s, Tiny2)
	require.Contains(t, string(ask(t, s, http.MethodPost, "/models/unload", model(Tiny), 400)), "model is not running")
	require.Contains(t, string(ask(t, s, http.MethodPost, "/models/unload", model("absent"), 400)), "model is not found")
	ask(t, s, http.MethodPost, "/models/load", model("absent"), http.StatusNotFound)
}

func TestLlamaRouterLoadsWhatIsAskedForAndEvictsTheOther(t *testing.T) {
	s := StartLlamaRouter(t, "--models-max", "1")
	ask(t, s, http.MethodPost, chats+"?autoload=false", chat(Tiny, 8, false), http.StatusBadRequest)
	wantRouterModels(t, s)
	wantChat(t, s, chats, Tiny)
	wantRouterModels(t, s, Tiny)
	wantChat(t, s, chats, Tiny2)
	wantRouterModels(t, s, Tiny2)

	// A mere question loads a model too.
	ask(t, s, http.MethodGet, "/props?model="+Tiny, nil, 200)
	wantRouterModels(t, s, Tiny)
}

func TestLlamaRouterCutsTheStreamOfAModelThatItUnloads(t *testing.T) {
	s := StartLlamaRouter(t)
	running := startStream(t, s, chats, Slow, 1500) // ten seconds and more
	require.JSONEq(t, `{"success":true}`, string(ask(t, s, http.MethodPost, "/models/unload", model(Slow), 200)))
	require.NotContains(t, string(running.rest()), "[DONE]")
	wantRouterModels(t, s)
}

func TestLlamaRouterTellsOfEachChange(t *testing.T) {
	s := StartLlamaRouter(t)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	response, err := s.Open(ctx, http.MethodGet, "/models/sse", nil)
	require.NoError(t, err)
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	wantEvent := func(state string) {
		t.Helper()
		for lines.Scan() {
			text, isData := strings.CutPrefix(lines.Text(), "data: ")
			if !isData {
				continue
			}
			var event struct {
				Model string
				Data  struct{ Status string }
			}
			require.NoError(t, json.Unmarshal([]byte(text), &event), text)
			if event.Model == Tiny && event.Data.Status == state {
				return
			}
		}
		t.Fatalf("want an event that tells that %s is %s, found the end: %v", Tiny, state, lines.Err())
	}
	ask(t, s, http.MethodPost, "/models/load", model(Tiny), 200)
	wantEvent("loading")
	wantEvent("loaded")
	ask(t, s, http.MethodPost, "/models/unload", model(Tiny), 200)
	wantEvent("unloaded")
}
