package gpubroker

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/require"

	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// newShelf is an app with an ollama that has models which its configuration does not name, and one consumer of another kind.
func newShelf(t *testing.T, more map[string]any) caddy.Context {
	t.Helper()
	srv, err := modelserver.Start(modelserver.Options{Name: "shelf", Manner: modelserver.Ollama, SimDir: t.TempDir(),
		Models: map[string]gpu.Bytes{"named:latest": gpu.GiB, "like-7b:latest": gpu.GiB, "stranger:latest": gpu.GiB, "family:latest": gpu.GiB}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = srv.Close() })
	shelf := map[string]any{"name": "shelf", "preset": "ollama", "upstream": srv.Addr(), "vram": "2GiB",
		"models": []map[string]any{{"name": "named", "vram": "1GiB", "alias": []string{"pet"}}, {"name": "family", "vram": "1GiB", "alias": []string{"like-*"}}}}
	for word, value := range more {
		if shelf[word] = value; value == nil {
			delete(shelf, word)
		}
	}
	app, ctx := newApp(t, shelf, map[string]any{"name": "plain", "vram": "1GiB", "alias": []string{"like-plain"}})
	require.NoError(t, app.Start())
	require.Eventually(t, func() bool { return app.pool.broker.Status().Consumers["shelf"].Health == "healthy" }, 20*time.Second, time.Millisecond)
	return ctx
}

// serves sends a body through a route, and returns which consumer and which of its models it came to, or what it was refused with.
func serves(t *testing.T, h *Handler, method, path, body string) (consumer, sent string, refused errorBody) {
	t.Helper()
	w, r := post(method, path, body)
	require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
		consumer, _ = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).GetString("http.gpu_broker.consumer")
		all, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		sent = string(all)
		return nil
	})))
	if w.Code != http.StatusOK {
		refused = document(t, w)
	}
	return consumer, sent, refused
}

func TestAServersOwnNamesAreKnownAtItsOwnRoute(t *testing.T) {
	ctx := newShelf(t, nil)
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "shelf"}}
	require.NoError(t, h.Provision(ctx))
	for name, want := range map[string]string{
		"named":        "named",
		"named:latest": "named:latest",
		"pet":          "named",
		"like-7b":      "like-7b",
		"like-other":   "family",
		"stranger":     "stranger",
	} {
		consumer, sent, refused := serves(t, h, "POST", "/v1/chat/completions", `{"model":"`+name+`"}`)
		require.Equal(t, "shelf", consumer, "%s: %+v", name, refused)
		require.Equal(t, `{"model":"`+want+`"}`, sent)
	}
	_, _, refused := serves(t, h, "POST", "/v1/chat/completions", `{"model":"strangr:latest"}`)
	require.Equal(t, "unknown_model", refused.Code)
	require.Contains(t, refused.Message, `there is no model "strangr:latest" at consumer "shelf": did you mean "stranger:latest"`)
	_, _, refused = serves(t, h, "POST", "/v1/chat/completions", `{"model":"quite another"}`)
	require.Equal(t, `there is no model "quite another" at consumer "shelf": GET /v1/models lists all`, refused.Message)
}

func TestOnlyTheConfigurationsNamesAreKnownOfAConsumerWithoutAVRAMOfItsOwn(t *testing.T) {
	ctx := newShelf(t, map[string]any{"vram": nil})
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "shelf"}}
	require.NoError(t, h.Provision(ctx))
	for name, want := range map[string]string{"named": "named", "pet": "named", "like-7b": "family"} {
		_, sent, refused := serves(t, h, "POST", "/v1/chat/completions", `{"model":"`+name+`"}`)
		require.Equal(t, `{"model":"`+want+`"}`, sent, "%+v", refused)
	}
	_, _, refused := serves(t, h, "POST", "/v1/chat/completions", `{"model":"stranger"}`)
	require.Equal(t, "unknown_model", refused.Code)
}

func TestModelsThatAServerListsAreKnownAtARouteOfAllWithModelsAuto(t *testing.T) {
	ctx := newShelf(t, map[string]any{"auto_models": true})
	h := &Handler{Route: gpucaddyfile.Route{ModelFrom: inBody}}
	require.NoError(t, h.Provision(ctx))
	for name, want := range map[string]string{"named": "shelf", "pet": "shelf", "like-7b": "shelf", "like-other": "shelf", "stranger": "shelf", "plain": "plain", "like-plain": "plain"} {
		consumer, _, refused := serves(t, h, "POST", "/v1/chat/completions", `{"model":"`+name+`"}`)
		require.Equal(t, want, consumer, "%s: %+v", name, refused)
	}
	_, _, refused := serves(t, h, "POST", "/v1/chat/completions", `{"model":"strangr:latest"}`)
	require.Contains(t, refused.Message, `there is no model "strangr:latest": did you mean "stranger:latest"`)
}

// A server may read either of two names, and would load one that the broker has not made room for.
func TestARequestThatNamesTwoModelsIsRefused(t *testing.T) {
	h := &Handler{Route: gpucaddyfile.Route{ModelFrom: []config.ModelFrom{{Source: config.FromBody}, {Source: config.FromQuery}}}}
	require.NoError(t, h.Provision(newSending(t)))
	for query, want := range map[string]string{"m1": "", "m1-alias": "", "like-m1-9": "", "m2": "two models", "plain": "two models", "nobody's": "two models"} {
		consumer, _, refused := serves(t, h, "POST", "/v1/chat/completions?model="+query, `{"model":"like-m1-9"}`)
		if want == "" {
			require.Equal(t, "many", consumer, "%s: %+v", query, refused)
			continue
		}
		require.Empty(t, consumer, query)
		require.Equal(t, "bad_request", refused.Code, query)
		require.Contains(t, refused.Message, want, query)
	}
	consumer, _, _ := serves(t, h, "POST", "/v1/chat/completions?model=m1", `{"model":"plain"}`)
	require.Equal(t, "plain", consumer, "which has no models to mistake")
}

func TestANameIsTranslatedForARequestThatNeedsNoGPUToo(t *testing.T) {
	ctx := newShelf(t, nil)
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "shelf"}}
	require.NoError(t, h.Provision(ctx))
	padded := func(n int) string {
		return `{"model":"pet","x":"` + strings.Repeat("x", n-len(`{"model":"pet","x":""}`)) + `"}`
	}
	for body, want := range map[string]string{
		`{"model":"pet"}`:        `{"model":"named"}`,
		`{"model":"stranger"}`:   `{"model":"stranger"}`,
		`{"model":"nobody's"}`:   `{"model":"nobody's"}`,
		`{"a":1}`:                `{"a":1}`,
		`{"model":"pet"`:         `{"model":"pet"`, // which is its server's to judge
		padded(maxNamedBody):     strings.Replace(padded(maxNamedBody), "pet", "named", 1),
		padded(maxNamedBody + 1): padded(maxNamedBody + 1),
	} {
		consumer, sent, refused := serves(t, h, "POST", "/api/show", body)
		require.Equal(t, "shelf", consumer, "%.50s: %+v", body, refused)
		require.True(t, want == sent, "%.50s", sent)
	}
	h.StreamBody = true
	_, sent, _ := serves(t, h, "POST", "/api/show", `{"model":"pet"}`)
	require.Equal(t, `{"model":"pet"}`, sent, "its body is not read")

	_, ctx = newApp(t, map[string]any{"name": "sent", "vram": "1GiB", "send_as": "tuned", "free_routes": []string{"POST /show", "POST /free"}, "named_routes": []string{"POST /show"}})
	h = &Handler{Route: gpucaddyfile.Route{Consumer: "sent"}}
	require.NoError(t, h.Provision(ctx))
	for path, want := range map[string]string{"/show": "tuned", "/free": "any"} {
		_, sent, _ = serves(t, h, "POST", path, `{"model":"any"}`)
		require.Equal(t, `{"model":"`+want+`"}`, sent, path)
	}
}

func TestOfAConsumerWithOneModelNoRequestMustNameIt(t *testing.T) {
	for models, want := range map[int]string{1: "", 2: "names no model"} {
		all := []map[string]any{{"name": "m1"}, {"name": "m2"}}[:models]
		app, ctx := newApp(t, map[string]any{"name": "one", "vram": "1GiB", "models": all, "upstream": "127.0.0.1:9",
			"lifecycle": map[string]any{"protocol": "process", "command": []string{"/bin/true", "{gpu_broker.port}"}, "server": map[string]any{"unload": map[string]any{"path": "/unload/{model}"}}}})
		require.NoError(t, app.Start())
		h := &Handler{Route: gpucaddyfile.Route{Consumer: "one"}}
		require.NoError(t, h.Provision(ctx))
		_, r := post("POST", "/v1/chat/completions", `{}`)
		j := &job{handler: h, target: h.fixed}
		got, err := j.resolve(r)
		if want != "" {
			require.ErrorContains(t, err, want)
			continue
		}
		require.NoError(t, err)
		require.Same(t, h.fixed, got)
		require.Equal(t, "m1", j.model)
	}
}

func TestABodyThatCannotBeLookedIntoIsRefusedForItsReason(t *testing.T) {
	h := byModelHandler(t, gpucaddyfile.Route{ModelFrom: inBody})
	for coding, code := range map[string]string{"snappy": "unsupported_encoding", "gzip": "bad_request"} {
		w, r := post("POST", "/v1/chat/completions", `{"model":"plain"}`)
		r.Header.Set("Content-Encoding", coding)
		require.NoError(t, h.ServeHTTP(w, r, nothing))
		require.Equal(t, code, document(t, w).Code)
	}
}
