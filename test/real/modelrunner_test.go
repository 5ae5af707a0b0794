//go:build linux && real

package real

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
)

const engineChats = "/engines/v1/chat/completions"

type runner struct {
	Backend string `json:"backend_name"`
	Model   string `json:"model_name"`
	Mode    string `json:"mode"`
	InUse   bool   `json:"in_use"`
	Loading bool   `json:"loading"`
}

func runners(t *testing.T, s *Server) []runner {
	t.Helper()
	return askJSON[[]runner](t, s, http.MethodGet, "/engines/ps", nil)
}

// unload gives how many runners it has ended.
func unload(t *testing.T, s *Server, which map[string]any) int {
	t.Helper()
	return askJSON[struct {
		Unloaded int `json:"unloaded_runners"`
	}](t, s, http.MethodPost, "/engines/unload", which).Unloaded
}

func TestModelRunnerLoadsAndUnloads(t *testing.T) {
	s := StartModelRunner(t)
	ask(t, s, http.MethodGet, "/engines/status", nil, 200)
	require.Empty(t, runners(t, s))

	// Loaded without an answer, and when the reply comes.
	require.Empty(t, ask(t, s, http.MethodPost, engineChats, chat("ai/tiny", 8, false), 200, "X-Preload-Only", "true"))
	tiny := runner{Backend: "llama.cpp", Model: "ai/tiny", Mode: "completion"}
	require.Equal(t, []runner{tiny}, runners(t, s))
	wantChat(t, s, engineChats, "ai/tiny")
	wantChat(t, s, engineChats, "ai/tiny2")
	require.Len(t, runners(t, s), 2)

	// Unloaded when the reply comes.
	require.Equal(t, 1, unload(t, s, map[string]any{"backend": "llama.cpp", "models": []string{"ai/tiny2"}}))
	require.Equal(t, []runner{tiny}, runners(t, s))
	require.Equal(t, 1, unload(t, s, map[string]any{"all": true}))
	require.Empty(t, runners(t, s))
	require.Zero(t, unload(t, s, map[string]any{"all": true}))
	ask(t, s, http.MethodPost, engineChats, chat("ai/absent", 8, false), http.StatusNotFound)
}

func TestModelRunnerSkipsABusyModelAndSaysNoWord(t *testing.T) {
	s := StartModelRunner(t)
	running := startStream(t, s, engineChats, "ai/slow", 200)
	found := runners(t, s)
	require.Len(t, found, 1)
	require.True(t, found[0].InUse)
	require.Zero(t, unload(t, s, map[string]any{"all": true}))
	require.Contains(t, string(running.rest()), "[DONE]", "the answer came to its own end")
	eventually(t, false, func() bool { return runners(t, s)[0].InUse })
	require.Equal(t, 1, unload(t, s, map[string]any{"all": true}))
	require.Empty(t, runners(t, s))
}
