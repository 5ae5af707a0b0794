package gpubroker

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/require"

	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
)

// newHandler is a handler of a started app with one consumer that needs nothing.
func newHandler(t testing.TB) *Handler {
	t.Helper()
	raw, err := json.Marshal(map[string]any{
		"gpu":       map[string]any{"driver": "simulated", "totals": []string{"16GiB"}, "dir": t.TempDir()},
		"consumers": []map[string]any{{"name": "a", "vram": "1GiB", "concurrency": 4}},
	})
	require.NoError(t, err)
	ctx, err := caddy.ProvisionContext(&caddy.Config{Admin: &caddy.AdminConfig{Disabled: true}, AppsRaw: caddy.ModuleMap{"gpu_broker": raw}})
	require.NoError(t, err)
	mod, err := ctx.App("gpu_broker")
	require.NoError(t, err)
	app := mod.(*App)
	require.NoError(t, app.Start())
	t.Cleanup(func() {
		require.NoError(t, app.Stop())
		require.NoError(t, app.Cleanup())
	})
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "a"}}
	require.NoError(t, h.Provision(ctx))
	return h
}

func request(method, path string) (*httptest.ResponseRecorder, *http.Request) {
	w := httptest.NewRecorder()
	r := httptest.NewRequest(method, path, nil)
	return w, caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)
}

var nothing = caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })

// handleWarm is one warm request through the handler.
func handleWarm(b *testing.B) {
	h := newHandler(b)
	w, r := request("GET", "/work")
	require.NoError(b, h.ServeHTTP(w, r, nothing))
	b.ReportAllocs()
	for b.Loop() {
		_ = h.ServeHTTP(w, r, nothing)
	}
}

func BenchmarkHandlerWithEmptyNext(b *testing.B) { handleWarm(b) }

func TestAlone_HandlerWithEmptyNextTakesAtMost5Microseconds(t *testing.T) {
	if os.Getenv("GPU_BROKER_RACE") != "" {
		t.Skip("bounds on time are not checked under the race detector")
	}
	r := testing.Benchmark(handleWarm)
	t.Logf("%s %s", r, r.MemString())
	require.LessOrEqual(t, r.NsPerOp(), int64(5000))
}
