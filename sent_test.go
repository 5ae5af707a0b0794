package gpubroker

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/iotest"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/require"

	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// sends returns what sends a request through a route, and returns the consumer that serves it and the request that this one's server gets.
func sends(t *testing.T, ctx caddy.Context, route gpucaddyfile.Route) func(path, header, body string) (consumer string, got *http.Request, gotBody string) {
	t.Helper()
	h := &Handler{Route: route}
	require.NoError(t, h.Provision(ctx))
	return func(path, header, body string) (consumer string, got *http.Request, gotBody string) {
		t.Helper()
		w, r := post("POST", path, body)
		if header != "" {
			r.Header.Set("X-Model", header)
		}
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
			consumer, _ = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).GetString("http.gpu_broker.consumer")
			all, err := io.ReadAll(r.Body)
			require.NoError(t, err)
			require.EqualValues(t, len(all), r.ContentLength)
			got, gotBody = r, string(all)
			return nil
		})))
		require.Equal(t, http.StatusOK, w.Code, "%s", w.Body)
		return consumer, got, gotBody
	}
}

// newSending is an app whose consumers call their models by other names than clients do. Those that are off leave their requests to a fallback.
func newSending(t *testing.T) caddy.Context {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(srv.Close)
	off := func(name string, more map[string]any) map[string]any {
		more["name"], more["vram"], more["enabled"] = name, "1GiB", "off"
		return more
	}
	cloud := func(name string, more map[string]any) map[string]any {
		more["name"], more["cloud"], more["upstream"] = name, true, "127.0.0.1:9"
		return more
	}
	app, ctx := newApp(t,
		map[string]any{"name": "many", "vram": "1GiB", "upstream": srv.Listener.Addr().String(),
			"lifecycle": map[string]any{"protocol": "http", "unload": map[string]any{"path": "/unload/{model}"}},
			"models": []map[string]any{
				{"name": "m1", "alias": []string{"m1-alias", "m1-other", "like-m1-*"}},
				{"name": "m2", "alias": []string{"m2-alias"}, "send_as": "m2-tuned", "set": map[string]any{"a": 1}},
				{"name": "m3", "alias": []string{"m3-alias"}, "send_as": "client"},
			}},
		map[string]any{"name": "plain", "vram": "1GiB", "alias": []string{"plain-alias"}},
		map[string]any{"name": "sent", "vram": "1GiB", "alias": []string{"sent-alias"}, "send_as": "sent-tuned"},
		cloud("aliased", map[string]any{"alias": []string{"pattern-*", "first", "second"}}),
		cloud("nameless", map[string]any{}),
		cloud("renamed", map[string]any{"send_as": "renamed-tuned"}),
		off("to-aliased", map[string]any{"fallback": []string{"aliased"}, "alias": []string{"to-aliased-alias"}}),
		off("to-nameless", map[string]any{"fallback": []string{"nameless"}}),
		off("to-renamed", map[string]any{"fallback": []string{"renamed"}}),
		off("to-special", map[string]any{"fallback": []string{"aliased"}, "fallback_as": map[string]string{"aliased": "special"}}),
		off("to-itself", map[string]any{"fallback": []string{"renamed"}, "fallback_as": map[string]string{"renamed": "client"}}),
	)
	require.NoError(t, app.Start())
	return ctx
}

func TestAServerGetsTheNameThatItKnowsItsModelBy(t *testing.T) {
	ctx := newSending(t)
	send := sends(t, ctx, gpucaddyfile.Route{ModelFrom: inBody})
	for name, want := range map[string]struct{ consumer, name string }{
		"m1":               {"many", "m1"},
		"m1-alias":         {"many", "m1"},
		"like-m1-7":        {"many", "m1"},
		"m3-alias":         {"many", "m3-alias"},
		"plain":            {"plain", "plain"},
		"plain-alias":      {"plain", "plain-alias"},
		"sent":             {"sent", "sent-tuned"},
		"sent-alias":       {"sent", "sent-tuned"},
		"first":            {"aliased", "first"},
		"second":           {"aliased", "second"},
		"pattern-1":        {"aliased", "pattern-1"},
		"to-aliased":       {"aliased", "first"},
		"to-aliased-alias": {"aliased", "first"},
		"to-nameless":      {"nameless", "to-nameless"},
		"to-renamed":       {"renamed", "renamed-tuned"},
		"to-special":       {"aliased", "special"},
		"to-itself":        {"renamed", "to-itself"},
	} {
		consumer, _, got := send("/v1/chat/completions", "", `{"a":[1, 2],"model":"`+name+`","b":{}}`)
		require.Equal(t, want.consumer, consumer, name)
		require.Equal(t, `{"a":[1, 2],"model":"`+want.name+`","b":{}}`, got, name)
	}
	_, _, got := send("/v1/chat/completions", "", `{"model":"m2-alias"}`)
	require.Equal(t, `{"model":"m2-tuned","a":1}`, got, "and the fields that its configuration sets")
}

func TestANameIsPutWhereTheClientsStood(t *testing.T) {
	ctx := newSending(t)
	header := config.ModelFrom{Source: config.FromHeader, Name: "X-Model"}
	send := sends(t, ctx, gpucaddyfile.Route{ModelFrom: []config.ModelFrom{{Source: config.FromBody}, header}})
	_, r, body := send("/v1/chat/completions", "m1-alias", `{"a":"m1-alias"}`)
	require.Equal(t, "m1", r.Header.Get("X-Model"))
	require.Equal(t, `{"a":"m1-alias"}`, body, "which names no model")
	_, r, body = send("/v1/chat/completions", "m1-alias", `{"model":"m1-alias"}`)
	require.Equal(t, "m1", r.Header.Get("X-Model"))
	require.Equal(t, `{"model":"m1"}`, body)
	_, r, body = send("/v1/chat/completions", "", `{"model":"m1-alias"}`)
	require.Empty(t, r.Header.Get("X-Model"))
	require.Equal(t, `{"model":"m1"}`, body)

	send = sends(t, ctx, gpucaddyfile.Route{ModelFrom: []config.ModelFrom{header}})
	_, r, body = send("/v1/chat/completions", "m2-alias", `{"b":2,"a":2,"model":"m2-alias"}`)
	require.Equal(t, "m2-tuned", r.Header.Get("X-Model"))
	require.Equal(t, `{"b":2,"a":1,"model":"m2-alias"}`, body, "the route's models are named in the header")
}

func TestEveryPlaceGetsTheNameThatTheServerKnows(t *testing.T) {
	ctx := newSending(t)
	from := []config.ModelFrom{{Source: config.FromHeader, Name: "X-Model"}, {Source: config.FromQuery}, {Source: config.FromBody}}
	send := sends(t, ctx, gpucaddyfile.Route{ModelFrom: from})
	for _, c := range []struct{ header, query, body, want string }{
		{"m1", "m1", "m1-alias", "m1"}, // the server knows what the first place says, and not the others
		{"m1", "m1-alias", "m1", "m1"},
		{"m1-alias", "m1-other", "m1", "m1"},
		{"m1-other", "m1", "m1-alias", "m1"},
		{"m2", "m2", "m2-alias", "m2-tuned"},
		{"sent", "unheard-of", "another", "sent-tuned"}, // a server without models would take any
		{"to-aliased", "to-nameless", "unheard-of", "first"},
		{"to-nameless", "unheard-of", "unheard-of", "to-nameless"},
	} {
		_, r, body := send("/v1/chat/completions?model="+c.query, c.header, `{"model":"`+c.body+`"}`)
		require.Equal(t, c.want, r.Header.Get("X-Model"), c)
		require.Equal(t, "model="+c.want, r.URL.RawQuery, c)
		require.Contains(t, body, `{"model":"`+c.want+`"`, c)
	}
	for _, two := range []string{"m1", "m1-alias"} { // the third place, behind an alias, is looked at, too
		w, r := post("POST", "/v1/chat/completions?model=m1-alias", `{"model":"m2"}`)
		r.Header.Set("X-Model", two)
		h := &Handler{Route: gpucaddyfile.Route{ModelFrom: from}}
		require.NoError(t, h.Provision(ctx))
		require.NoError(t, h.ServeHTTP(w, r, nil))
		require.Equal(t, http.StatusBadRequest, w.Code)
	}
	_, r, body := send("/v1/chat/completions?model=foo", "to-itself", `{"model":"bar"}`) // as client
	require.Equal(t, "model=foo", r.URL.RawQuery)
	require.JSONEq(t, `{"model":"bar"}`, body)
	_, r, body = send("/v1/chat/completions?model=m3", "m3-alias", `{"model":"m3-alias"}`) // send_as client
	require.Equal(t, "m3-alias", r.Header.Get("X-Model"))
	require.Equal(t, "model=m3", r.URL.RawQuery)
	require.JSONEq(t, `{"model":"m3-alias"}`, body)
}

func TestThePathsNameCountsAlone(t *testing.T) {
	ctx := newSending(t)
	from := []config.ModelFrom{{Source: config.FromPath, Name: "/m/*/infer"}, {Source: config.FromBody}}
	send := sends(t, ctx, gpucaddyfile.Route{ModelFrom: from})
	for _, c := range []struct{ path, body, wantPath, want string }{
		{"m1-alias", "m2", "m1", "m2"},
		{"m1", "m2", "m1", "m2"},
		{"m1-alias", "m1-alias", "m1", "m1"},
		{"to-aliased", "m2", "first", "first"},
	} {
		_, r, body := send("/m/"+c.path+"/infer", "", `{"model":"`+c.body+`"}`)
		require.Equal(t, "/m/"+c.wantPath+"/infer", r.URL.Path, c)
		require.Equal(t, `{"model":"`+c.want+`"}`, body, c)
	}
}

// A server with one model serves requests that name none, and a service elsewhere would refuse them.
func TestAFallbackGetsANameWhereTheClientGaveNone(t *testing.T) {
	ctx := newSending(t)
	header := config.ModelFrom{Source: config.FromHeader, Name: "X-Model"}
	for _, c := range []struct {
		route          gpucaddyfile.Route
		consumer, want string
	}{
		{gpucaddyfile.Route{ModelFrom: inBody, Default: "to-aliased"}, "aliased", `{"a":1,"model":"first"}`},
		{gpucaddyfile.Route{ModelFrom: inBody, Default: "to-special"}, "aliased", `{"a":1,"model":"special"}`},
		{gpucaddyfile.Route{ModelFrom: inBody, Default: "to-nameless"}, "nameless", `{"a":1}`},
		{gpucaddyfile.Route{ModelFrom: inBody, Default: "plain"}, "plain", `{"a":1}`},
		{gpucaddyfile.Route{ModelFrom: inBody, Default: "sent"}, "sent", `{"a":1}`},
		{gpucaddyfile.Route{ModelFrom: []config.ModelFrom{header}, Default: "to-special"}, "aliased", `{"a":1}`}, // its body holds no name
		{gpucaddyfile.Route{Consumer: "to-special"}, "aliased", `{"a":1,"model":"special"}`},
		{gpucaddyfile.Route{Consumer: "to-renamed"}, "renamed", `{"a":1,"model":"renamed-tuned"}`},
		{gpucaddyfile.Route{Consumer: "to-nameless"}, "nameless", `{"a":1}`},
		{gpucaddyfile.Route{Consumer: "sent"}, "sent", `{"a":1}`},
	} {
		consumer, _, got := sends(t, ctx, c.route)("/v1/chat/completions", "", `{"a":1}`)
		require.Equal(t, c.consumer, consumer, "%+v", c.route)
		require.Equal(t, c.want, got, "%+v", c.route)
	}
}

func TestARouteWithOneConsumerSendsAnotherNameToo(t *testing.T) {
	ctx := newSending(t)
	for consumer, want := range map[string]string{"sent": "sent-tuned", "to-renamed": "renamed-tuned", "to-special": "special", "plain": "whatever", "to-nameless": "whatever"} {
		_, _, got := sends(t, ctx, gpucaddyfile.Route{Consumer: consumer})("/v1/chat/completions", "", `{"model":"whatever"}`)
		require.Equal(t, `{"model":"`+want+`"}`, got, consumer)
	}
	_, _, got := sends(t, ctx, gpucaddyfile.Route{Consumer: "to-aliased"})("/v1/chat/completions", "", `{"model":"second"}`)
	require.Equal(t, `{"model":"second"}`, got, "the fallback knows it")
	w, r := post("POST", "/v1/audio/transcriptions?model=other", "model=whatever&a=1")
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "sent"}}
	require.NoError(t, h.Provision(ctx))
	require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
		all, err := io.ReadAll(r.Body)
		require.Equal(t, "model=sent-tuned&a=1", string(all), "whatever the query holds")
		return err
	})))
	fallback := gpucaddyfile.Route{Consumer: "to-special", Fallback: []string{"aliased"}, FallbackAs: map[string]string{"aliased": "the route's"}}
	_, _, got = sends(t, ctx, fallback)("/v1/chat/completions", "", `{"model":"whatever"}`)
	require.Equal(t, `{"model":"the route's"}`, got)
	fallback.FallbackAs = nil
	_, _, got = sends(t, ctx, fallback)("/v1/chat/completions", "", `{"model":"whatever"}`)
	require.Equal(t, `{"model":"whatever"}`, got, "the consumer's own word is for its own fallbacks")
}

func TestANameInAHeaderIsTranslatedBesideABodyThatNobodyLooksInto(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(srv.Close)
	app, ctx := newApp(t, map[string]any{"name": "many", "vram": "1GiB", "upstream": srv.Listener.Addr().String(), "models": []map[string]any{{"name": "m1", "alias": []string{"m1-alias"}}},
		"lifecycle": map[string]any{"protocol": "http", "unload": map[string]any{"path": "/unload/{model}"}}})
	require.NoError(t, app.Start())
	send := sends(t, ctx, gpucaddyfile.Route{ModelFrom: []config.ModelFrom{{Source: config.FromHeader, Name: "X-Model"}}})
	_, r, body := send("/v1/chat/completions", "m1-alias", `{"model":"m1-alias"`)
	require.Equal(t, "m1", r.Header.Get("X-Model"))
	require.Equal(t, `{"model":"m1-alias"`, body)
}

// namedRoutes is the handler of a consumer with models that translates names at a route that needs no GPU.
func namedRoutes(t *testing.T) *Handler {
	t.Helper()
	app, ctx := newApp(t, map[string]any{"name": "many", "vram": "1GiB", "upstream": "127.0.0.1:9", "named_routes": []string{"POST /api/show"}, "models": []map[string]any{{"name": "m1"}},
		"lifecycle": map[string]any{"protocol": "http", "unload": map[string]any{"path": "/unload/{model}"}}})
	require.NoError(t, app.Start())
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "many"}}
	require.NoError(t, h.Provision(ctx))
	return h
}

func TestABodyIsReadForItsModelsNameAloneOnlyIfItIsSmallAndWhole(t *testing.T) {
	h := namedRoutes(t)
	for _, c := range []struct {
		path    string
		length  int64
		most    int64 // max_body
		streams bool
		want    bool
	}{
		{"/api/show", 1, 1 << 20, false, true},
		{"/api/show", 64 << 10, 1 << 20, false, true},
		{"/api/show", 64<<10 + 1, 1 << 20, false, false},
		{"/api/show", 10, 10, false, true},
		{"/api/show", 11, 10, false, false},
		{"/api/show", -1, 1 << 20, false, false},
		{"/api/show", 0, 1 << 20, false, false},
		{"/api/show", 1, 1 << 20, true, false},
		{"/api/other", 1, 1 << 20, false, false},
	} {
		_, r := post("POST", c.path, "x")
		r.ContentLength, h.maxBody, h.StreamBody = c.length, c.most, c.streams
		require.Equal(t, c.want, h.looksForName(h.fixed, r), "%+v", c)
	}
}

func TestARequestWhoseBodyBreaksOffBeforeItsNameIsReadIsNotPassedOn(t *testing.T) {
	h := namedRoutes(t)
	w, r := post("POST", "/api/show", `{"model":"m1"}`)
	r.Body = io.NopCloser(iotest.ErrReader(io.ErrUnexpectedEOF))
	r.ContentLength = 14
	j := &job{handler: h, target: h.fixed}
	j.ResponseWriter = w
	require.Error(t, j.readName(r))
}
