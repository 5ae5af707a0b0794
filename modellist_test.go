package gpubroker

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/require"

	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
)

// A list of models is the server's, which knows better what it has. One that is stopped is not there to be asked, and serves what the configuration names.
func TestAListOfModelsOfAServerThatIsStoppedIsTheBrokers(t *testing.T) {
	app, ctx := newApp(t, map[string]any{"name": "m", "vram": "1GiB", "models": []map[string]any{{"name": "a", "alias": []string{"b", "c-*"}}, {"name": "d", "unlisted": true}},
		"lifecycle": map[string]any{"protocol": "process", "command": []string{"/bin/true", "{gpu_broker.port}"},
			"server": map[string]any{"unload": map[string]any{"path": "/unload/{model}"}}}})
	require.NoError(t, app.Start())
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "m"}}
	require.NoError(t, h.Provision(ctx))
	for path, want := range map[string]int{"/v1/models": http.StatusOK, "/v1/models/b": http.StatusOK, "/v1/models/c-1": http.StatusOK, "/v1/models/d": http.StatusOK, "/v1/models/x": http.StatusServiceUnavailable} {
		w, r := request("GET", path)
		require.NoError(t, h.ServeHTTP(w, r, caddyhttpHandler(func() { t.Error("the server is asked") })))
		require.Equal(t, want, w.Code, path)
		if path == "/v1/models" {
			require.Contains(t, w.Body.String(), `"a"`)
			require.Contains(t, w.Body.String(), `"b"`)
			require.NotContains(t, w.Body.String(), `"d"`)
			require.NotContains(t, w.Body.String(), "*")
		} else if want != http.StatusOK {
			require.Contains(t, w.Body.String(), "not_running")
		}
	}
}

// A list that can't be changed is passed on as it comes.
func TestAServersListIsChangedOnlyIfItIsOne(t *testing.T) {
	app, ctx := newApp(t, map[string]any{"name": "m", "upstream": "127.0.0.1:1", "vram": "1GiB", "models": []map[string]any{{"name": "a", "alias": []string{"b"}}},
		"lifecycle": map[string]any{"protocol": "http", "health": map[string]any{"path": "/health"}, "unload": map[string]any{"path": "/unload/{model}"}}})
	require.NoError(t, app.Start())
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "m"}}
	require.NoError(t, h.Provision(ctx))
	list := `{"data":[{"id":"a"}]}`
	padded := func(size int) string {
		const around = `{"data":[{"id":"a"}],"x":""}`
		return strings.Replace(around, `""`, `"`+strings.Repeat("x", size-len(around))+`"`, 1)
	}
	for _, c := range []struct {
		name, body, kind, coding string
		status                   int
		changed                  bool
	}{
		{"a list", list, "application/json; charset=utf-8", "", 200, true},
		{"a page", list, "text/html", "", 200, false},
		{"compressed", list, "application/json", "gzip", 200, false},
		{"an error", list, "application/json", "", 404, false},
		{"as large as is read", padded(4 << 20), "application/json", "", 200, true},
		{"too large", padded(4<<20 + 1), "application/json", "", 200, false},
		{"no list", `{"a":1}`, "application/json", "", 200, false},
	} {
		w, r := request("GET", "/v1/models")
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			w.Header().Set("Content-Type", c.kind)
			w.Header().Set("Content-Encoding", c.coding)
			w.WriteHeader(c.status)
			for half := range slices.Chunk([]byte(c.body), len(c.body)/2+1) {
				_, err := w.Write(half)
				require.NoError(t, err)
				require.NoError(t, http.NewResponseController(w).Flush())
			}
			return nil
		})))
		require.Equal(t, c.status, w.Code, c.name)
		require.Equal(t, c.changed, strings.Contains(w.Body.String(), `{"id":"b"}`), c.name)
		require.True(t, c.changed || w.Body.String() == c.body, c.name)
	}
	broke := errors.New("broke")
	w, r := request("GET", "/v1/models")
	require.ErrorIs(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return broke })), broke)
	require.Empty(t, w.Body.String())
}

func caddyhttpHandler(f func()) caddyhttp.HandlerFunc {
	return func(http.ResponseWriter, *http.Request) error { f(); return nil }
}
