package e2e

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A body that can't be kept is refused in the broker's form, and is served again once there is room.
func TestK10_ABodyThatCanNotBeKeptIsRefusedInOurForm(t *testing.T) {
	t.Parallel()
	folder := func(t *testing.T, bodies string) func() {
		require.NoError(t, os.RemoveAll(bodies))
		require.NoError(t, os.MkdirAll(filepath.Dir(bodies), 0o755))
		return func() { require.NoError(t, os.RemoveAll(bodies)) }
	}
	for name, spoil := range map[string]func(t *testing.T, bodies string) (repair func()){
		"the disk is full": func(t *testing.T, bodies string) func() {
			folder(t, bodies)
			require.NoError(t, os.Mkdir(bodies, 0o755))
			if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", bodies).CombinedOutput(); err != nil {
				t.Skipf("no file system can be mounted here: %s", out)
			}
			unmount := func() { _ = exec.Command("umount", bodies).Run() }
			t.Cleanup(unmount)
			return unmount
		},
		"a file stands in the folder's place": func(t *testing.T, bodies string) func() {
			repair := folder(t, bodies)
			require.NoError(t, os.WriteFile(bodies, nil, 0o644))
			return repair
		},
		"the folder takes no files": func(t *testing.T, bodies string) func() {
			repair := folder(t, bodies)
			require.NoError(t, os.Symlink("/proc", bodies)) // not even from root
			return repair
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := oneURL(t, layout{}, "model_from body")
			repair := spoil(t, filepath.Join(s.dir, "data", "caddy", "gpu_broker", "bodies"))
			// The first MiB stays in memory, and what is left unread is little enough for the client to get the answer.
			const size = 1<<20 + 200<<10
			large := every(size)
			chunked := func() answer {
				return s.doWith(s.client, t.Context(), "POST", "/llama/echo", io.MultiReader(bytes.NewReader(large)))
			}
			for kind, a := range map[string]answer{
				"by its model": s.askJSON("/echo", `{"model":"llama","input":"`+strings.Repeat("a", size)+`"}`),
				"chunked":      chunked(),
			} {
				message := a.refused(t, http.StatusServiceUnavailable, "storage_full")
				require.Contains(t, message, "make room", kind)
				require.NotContains(t, message, s.dir, "no client is told where Caddy keeps its data")
				require.Equal(t, "30", a.header.Get("Retry-After"), kind)
			}
			require.Equal(t, 200, s.post("/llama/work", "a small body needs no disk").status)
			require.EqualValues(t, 2, s.metric(`errors_total{code="storage_full",consumer="llama"}`)+s.metric(`errors_total{code="storage_full",consumer=""}`))
			require.Zero(t, s.metric("buffered_bytes"))
			require.Equal(t, "healthy", s.status().Consumers["llama"].Health)

			repair()
			a := chunked()
			require.Equal(t, 200, a.status, "%.300s", a.body)
			require.True(t, bytes.Equal(large, a.body))
		})
	}
}

// The clients of audio and of Ollama read it in their own form.
func TestK10_UploadsThatCanNotBeKeptAreRefusedInTheFormOfTheirClients(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{}, "model_from body")
	bodies := filepath.Join(s.dir, "data", "caddy", "gpu_broker", "bodies")
	require.NoError(t, os.RemoveAll(bodies))
	require.NoError(t, os.MkdirAll(filepath.Dir(bodies), 0o755))
	require.NoError(t, os.WriteFile(bodies, nil, 0o644))
	const size = 1<<20 + 200<<10

	body, contentType := speech(t, size, "whisper-1")
	a := s.ask("POST", "/v1/audio/transcriptions", contentType, body)
	require.Contains(t, a.refused(t, http.StatusServiceUnavailable, "storage_full"), "make room")
	require.Zero(t, s.status().Scheduler.Loads, "nothing is loaded for it")

	a = s.askJSON("/api/chat", `{"model":"llama","messages":[{"role":"user","content":"`+strings.Repeat("a", size)+`"}]}`)
	require.Equal(t, http.StatusServiceUnavailable, a.status)
	var doc struct{ Error, Code string }
	require.NoError(t, json.Unmarshal(a.body, &doc), "%.300s", a.body)
	require.Equal(t, "storage_full", doc.Code)
	require.Contains(t, doc.Error, "make room")
}
