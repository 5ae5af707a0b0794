package gpubroker

import (
	"net/http"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/require"

	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
)

// A list of models is for the server, which knows better what it has; one that is stopped is not there to be asked.
func TestAListOfModelsOfAServerThatIsStoppedIsRefused(t *testing.T) {
	app, ctx := newApp(t, map[string]any{"name": "m", "vram": "1GiB", "models": []map[string]any{{"name": "a"}},
		"lifecycle": map[string]any{"protocol": "process", "command": []string{"/bin/true", "{gpu_broker.port}"},
			"server": map[string]any{"unload": map[string]any{"path": "/unload/{model}"}}}})
	require.NoError(t, app.Start())
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "m"}}
	require.NoError(t, h.Provision(ctx))
	w, r := request("GET", "/v1/models")
	asked := false
	require.NoError(t, h.ServeHTTP(w, r, caddyhttpHandler(func() { asked = true })))
	require.False(t, asked)
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Contains(t, w.Body.String(), "not_running")
}

func caddyhttpHandler(f func()) caddyhttp.HandlerFunc {
	return func(http.ResponseWriter, *http.Request) error { f(); return nil }
}
