//go:build linux && real

package real

import (
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// hear gives the text of a sound.
func hear(t *testing.T, s *Server) string {
	t.Helper()
	form, contentType := Form(Sound(2), "response_format", "text", "temperature_inc", "0")
	return string(ask(t, s, http.MethodPost, "/inference", form, 200, "Content-Type", contentType))
}

// load makes it take another model and gives the answer's status.
func load(t *testing.T, s *Server, path string) (int, error) {
	t.Helper()
	form, contentType := Form(nil, "model", path)
	status, _, err := s.Ask(t.Context(), http.MethodPost, "/load", form, "Content-Type", contentType)
	return status, err
}

func TestWhisperServerHearsAndTakesAnotherModel(t *testing.T) {
	s := StartWhisper(t)
	require.JSONEq(t, `{"status":"ok"}`, string(ask(t, s, http.MethodGet, "/health", nil, 200)))
	first := hear(t, s)
	require.Regexp(t, "^[ a-z\n]{20,}$", first)
	require.Equal(t, first, hear(t, s), "the same model hears the same")

	status, err := load(t, s, WhisperModel(t, t.TempDir(), 2))
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status)
	require.NotEqual(t, first, hear(t, s), "another model hears something else")

	status, err = load(t, s, filepath.Join(t.TempDir(), "absent"))
	require.NoError(t, err)
	require.Equal(t, http.StatusBadRequest, status)

	// It believes itself loading from then on, and tells that with 404 instead of 503; but it hears.
	require.Equal(t, "File Not Found (/health)", string(ask(t, s, http.MethodGet, "/health", nil, http.StatusNotFound)))
	hear(t, s)
	status, err = load(t, s, WhisperModel(t, t.TempDir(), 1))
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status)
	require.JSONEq(t, `{"status":"ok"}`, string(ask(t, s, http.MethodGet, "/health", nil, 200)))
	require.Equal(t, first, hear(t, s))
}

func TestWhisperServerEndsWhenItIsGivenAModelThatIsNone(t *testing.T) {
	s := StartWhisper(t)
	none := filepath.Join(t.TempDir(), "none")
	require.NoError(t, os.WriteFile(none, Sound(0.1), 0o644))
	_, err := load(t, s, none)
	require.Error(t, err)
	select {
	case <-s.Exited():
	case <-time.After(patience):
		t.Fatal("want it ended, found it running")
	}
}
