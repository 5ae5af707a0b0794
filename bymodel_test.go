package gpubroker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/require"

	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
)

var inBody = []config.ModelFrom{{Source: config.FromBody}}

// byModelHandler is a handler of a route whose requests name their model, with consumers with and without models.
func byModelHandler(t *testing.T, route gpucaddyfile.Route) *Handler {
	t.Helper()
	app, ctx := newApp(t,
		map[string]any{"name": "plain", "vram": "1GiB", "alias": []string{"plain-1", "any-*"}},
		map[string]any{"name": "folds", "vram": "1GiB", "fold_keys": true},
		map[string]any{"name": "off", "vram": "1GiB", "enabled": "off"},
		map[string]any{"name": "many", "vram": "1GiB", "models": []map[string]any{{"name": "m1", "alias": []string{"m1-alias", "like-m1-*"}}, {"name": "m2"}},
			"upstream": "127.0.0.1:9", "lifecycle": map[string]any{"protocol": "http", "unload": map[string]any{"path": "/unload/{model}"}}},
		map[string]any{"name": "single", "vram": "1GiB", "models": []map[string]any{{"name": "s1", "alias": []string{"s1-alias"}}},
			"upstream": "127.0.0.1:10", "lifecycle": map[string]any{"protocol": "http", "unload": map[string]any{"path": "/unload/{model}"}}},
	)
	require.NoError(t, app.Start())
	h := &Handler{Route: route}
	require.NoError(t, h.Provision(ctx))
	return h
}

// post is a request with a body.
func post(method, path, body string) (*httptest.ResponseRecorder, *http.Request) {
	w := httptest.NewRecorder()
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	return w, caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)
}

func TestARequestOfARouteByModelGoesToTheModelItNamesOrIsRefused(t *testing.T) {
	h := byModelHandler(t, gpucaddyfile.Route{ModelFrom: inBody, Bypass: []string{"POST /free"}})
	for _, c := range []struct {
		method, path, body string
		status             int
		want               string // of the answer's body
		consumer           string // that serves it
	}{
		{"POST", "/v1/chat/completions", `{"model":"plain"}`, 200, "", "plain"},
		{"POST", "/v1/chat/completions", `{"model":"plain-1"}`, 200, "", "plain"},
		{"POST", "/v1/chat/completions", `{"model":"any-thing"}`, 200, "", "plain"},
		{"POST", "/v1/chat/completions", `{"model":"folds"}`, 200, "", "folds"},
		{"POST", "/v1/chat/completions", `{"Model":"folds","model":"plain"}`, 200, "", "plain"},
		{"POST", "/v1/chat/completions", `{"Model":"folds","model":"folds"}`, 200, "", "folds"},
		{"POST", "/v1/chat/completions", `{"Model":"plain","model":"folds"}`, 400, "in another case", ""},
		{"POST", "/v1/chat/completions", `{"model":"plein"}`, 404, `did you mean \"plain\"`, ""},
		{"POST", "/v1/chat/completions", `{"model":"something else"}`, 404, `there is no model \"something else\": GET /v1/models lists all`, ""},
		{"POST", "/v1/chat/completions", `{}`, 400, "names no model", ""},
		{"POST", "/v1/chat/completions", `{"model":1}`, 400, "bad_request", ""},
		{"POST", "/v1/chat/completions", `{"model":"plain`, 400, "bad_request", ""},
		{"POST", "/free", `{}`, 404, "names no model, so no server is known", ""},
		{"GET", "/v1/nothing", ``, 404, "names no model, so no server is known", ""},
		{"DELETE", "/v1/nothing", ``, 400, "names no model", ""},
		{"OPTIONS", "/v1/chat/completions", ``, 404, "names no model", ""},
		{"OPTIONS", "/v1/chat/completions", `{"model":"plain"}`, 404, "names no model", ""},
		{"GET", "/v1/models", ``, 200, `"id":"m1-alias"`, ""},
		{"GET", "/v1/models/plain", ``, 200, `"id":"plain"`, ""},
		{"GET", "/v1/models/plein", ``, 404, `did you mean \"plain\"`, ""},
		{"GET", "/", ``, 200, "The GPU broker is running.\n", ""},
		{"GET", "/health", ``, 200, `{"status":"ok"}`, ""},
		{"GET", "/health/", ``, 200, `{"status":"ok"}`, ""},
		{"POST", "/health", ``, 400, "names no model", ""},
		{"GET", "/api/version", ``, 200, `"version"`, ""},
		{"GET", "/api/ps", ``, 200, `"models"`, ""},
	} {
		name := c.method + " " + c.path + " " + c.body
		w, r := post(c.method, c.path, c.body)
		if c.body == "" {
			w, r = request(c.method, c.path)
		}
		served := ""
		err := h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
			served, _ = repl.GetString("http.gpu_broker.consumer")
			sent, err := io.ReadAll(r.Body)
			require.NoError(t, err, name)
			require.Equal(t, c.body, string(sent), name)
			w.WriteHeader(http.StatusOK)
			return nil
		}))
		require.NoError(t, err, name)
		require.Equal(t, c.status, w.Code, "%s: %s", name, w.Body)
		require.Contains(t, w.Body.String(), c.want, name)
		require.Equal(t, c.consumer, served, name)
	}
	w, r := request("GET", "/v1/models")
	require.NoError(t, h.ServeHTTP(w, r, nothing))
	require.NotContains(t, w.Body.String(), `"off"`, "a consumer that is switched off")
	require.NotContains(t, w.Body.String(), "any-", "a pattern is no name")
	require.Zero(t, h.inFlight())
}

func TestARouteWithADefaultTakesRequestsThatNameNoModel(t *testing.T) {
	h := byModelHandler(t, gpucaddyfile.Route{ModelFrom: inBody, Default: "plain"})
	serve := func(body string) (int, string) {
		w, r := post("POST", "/v1/chat/completions", body)
		served := ""
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
			served, _ = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).GetString("http.gpu_broker.consumer")
			return nil
		})))
		return w.Code, served
	}
	code, served := serve(`{}`)
	require.Equal(t, 200, code)
	require.Equal(t, "plain", served)
	code, served = serve(`{"model":"unheard of"}`)
	require.Equal(t, 404, code)
	require.Empty(t, served)
	h.DefaultAny = true
	code, served = serve(`{"model":"unheard of"}`)
	require.Equal(t, 200, code)
	require.Equal(t, "plain", served)

	w, r := request("GET", "/health")
	passed := false
	require.NoError(t, h.ServeHTTP(w, r, caddyhttpHandler(func() { passed = true })))
	require.True(t, passed, "the default's server answers for its health")
}

func TestABodyThatCannotBeReadIsRefusedForItsReason(t *testing.T) {
	_, r := request("POST", "/")
	for _, c := range []struct {
		err     error
		status  int
		code    string
		retry   time.Duration
		nothing bool // the client has left
	}{
		{err: fmt.Errorf("%w: 5 bytes", routing.ErrTooLarge), status: 413, code: "body_too_large"},
		{err: fmt.Errorf("read: %w", &http.MaxBytesError{Limit: 3}), status: 413, code: "body_too_large"},
		{err: routing.ErrEncoding, status: 415, code: "unsupported_encoding"},
		{err: routing.ErrNoRoom, status: 503, code: "queue_full", retry: 5 * time.Second},
		{err: routing.ErrSpill, status: 503, code: "storage_full", retry: 30 * time.Second},
		{err: io.ErrUnexpectedEOF, nothing: true},
		{err: &net.OpError{Op: "read", Err: errors.New("connection reset by peer")}, nothing: true},
		{err: &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}, status: 400, code: "bad_request"},
		{err: errors.New("malformed chunk"), status: 400, code: "bad_request"},
	} {
		got := bodyError(r, c.err)
		if c.nothing {
			require.ErrorIs(t, got, context.Canceled, "%v", c.err)
			continue
		}
		var f *failure
		require.ErrorAs(t, got, &f, "%v", c.err)
		require.Equal(t, c.status, f.status, "%v", c.err)
		require.Equal(t, c.code, f.code, "%v", c.err)
		require.Equal(t, c.retry, f.retryAfter, "%v", c.err)
	}
	why := errors.New("why it ended")
	ctx, cancel := context.WithCancelCause(r.Context())
	cancel(why)
	require.ErrorIs(t, bodyError(r.WithContext(ctx), routing.ErrTooLarge), why)
}

func TestASenderIsAnAddressOrAnIPv6Network(t *testing.T) {
	for address, want := range map[string]string{
		"10.0.0.7":             "10.0.0.7",
		"2001:db8:1:2:3:4:5:6": "2001:db8:1:2::/64",
		"::ffff:10.0.0.7":      "::ffff:10.0.0.7",
		"@":                    "@",
		"":                     "",
	} {
		_, r := request("POST", "/")
		caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, address)
		require.Equal(t, want, sender(r), address)
	}
}

// What no list names may name its model, by whatever word its server knows.
func TestARequestThatNoListNamesMayNameItsModel(t *testing.T) {
	h := byModelHandler(t, gpucaddyfile.Route{Consumer: "many"})
	for name, want := range map[string]string{"m1": "m1", "m1-alias": "m1", "like-m1-7": "m1", "m2": "m2", "the server's own": "", "": ""} {
		_, r := request("POST", "/odd")
		j := &job{handler: h, target: h.fixed, turn: true}
		got, err := j.mayName(r, name)
		require.NoError(t, err, name)
		require.Same(t, h.fixed, got, name)
		require.Equal(t, want, j.model, name)
	}
}

func TestTheModelsThatAreLoadedAreListedAsOllamaListsThem(t *testing.T) {
	app, ctx := newApp(t,
		map[string]any{"name": "a", "vram": "1GiB", "models": []map[string]any{{"name": "m1"}, {"name": "m2"}, {"name": "quiet", "unlisted": true}},
			"upstream": "127.0.0.1:9", "lifecycle": map[string]any{"protocol": "http", "unload": map[string]any{"path": "/unload/{model}"}}},
		map[string]any{"name": "sky", "cloud": true, "upstream": "127.0.0.1:9"},
		map[string]any{"name": "hidden", "vram": "1GiB", "unlisted": true},
		map[string]any{"name": "plain", "vram": "1GiB"},
		map[string]any{"name": "cold", "vram": "1GiB"})
	require.NoError(t, app.Start())
	h := &Handler{Route: gpucaddyfile.Route{ModelFrom: inBody}}
	require.NoError(t, h.Provision(ctx))
	list := func() string {
		t.Helper()
		w, r := request("GET", "/api/ps")
		require.NoError(t, h.ServeHTTP(w, r, nothing))
		return w.Body.String()
	}
	require.JSONEq(t, `{"models":[]}`, list())
	for _, name := range []string{"sky", "hidden", "plain"} {
		w, r := post("POST", "/v1/chat/completions", `{"model":"`+name+`"}`)
		require.NoError(t, h.ServeHTTP(w, r, nothing))
		require.Equal(t, 200, w.Code, "%s", w.Body)
	}
	require.Contains(t, list(), `"plain"`)
	for _, name := range []string{"sky", "hidden", "cold", "m1", "quiet"} {
		require.NotContains(t, list(), `"`+name+`"`)
	}
}
