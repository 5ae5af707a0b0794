package gpubroker

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
)

// ofCatalog is a handler for a consumer with models whose server tells by status and list which it could load.
func ofCatalog(t *testing.T, status int, list string, more map[string]any) *Handler {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/catalog" {
			return
		}
		w.WriteHeader(status)
		_, _ = w.Write([]byte(list))
	}))
	t.Cleanup(srv.Close)
	lifecycle := map[string]any{"protocol": "http", "load": map[string]any{"path": "/load/{model}"}, "unload": map[string]any{"path": "/unload/{model}"}}
	if list != "" {
		lifecycle["catalog"], lifecycle["model_elsewhere"] = map[string]any{"path": "/catalog", "names": "$.models"}, []string{"-cloud"}
	}
	consumer := map[string]any{"name": "m", "vram": "1GiB", "upstream": srv.Listener.Addr().String(), "lifecycle": lifecycle,
		"models": []map[string]any{{"name": "a", "alias": []string{"a-1", "like-*"}}, {"name": "quiet", "unlisted": true}}}
	for word, value := range more {
		consumer[word] = value
	}
	app, ctx := newApp(t, consumer, map[string]any{"name": "sky", "cloud": true, "upstream": "127.0.0.1:9"})
	require.NoError(t, app.Start())
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "m"}}
	require.NoError(t, h.Provision(ctx))
	return h
}

func TestANameThatOnlyTheServerMayKnowLoadsAModelOnlyIfTheServerHasIt(t *testing.T) {
	const lists, silent = `{"models":["a","b","like-b"]}`, `{"error":"busy"}`
	fallback := map[string]any{"fallback": []string{"sky"}}
	for _, c := range []struct {
		name   string
		status int
		list   string
		more   map[string]any
		model  string // that it means
		turn   bool   // the server may have it elsewhere, which loads nothing
		asked  string // is kept, as a server may get another name
		code   int    // of a refusal
		says   string
	}{
		{name: "a", status: 200, list: lists, model: "a"},
		{name: "a-1", status: 200, list: lists, model: "a", asked: "a-1"},
		{name: "b", status: 200, list: lists, model: "b"},
		{name: "like-b", status: 200, list: lists, model: "like-b"},
		{name: "like-c", status: 200, list: lists, model: "a", asked: "like-c"},
		{name: "bb", status: 200, list: lists, code: 404, says: `there is no model "bb" at consumer "m"`},
		{name: "like-bb", status: 200, list: lists, model: "a", asked: "like-bb"},
		{name: "c-cloud", status: 200, list: lists, turn: true},
		{name: "cloud", status: 200, list: lists, code: 404, says: `there is no model "cloud"`},

		{name: "a", status: 500, list: silent, model: "a"},
		{name: "like-c", status: 500, list: silent, model: "a", asked: "like-c"},
		{name: "b", status: 500, list: silent, code: 503, says: "its server does not list its models now: "},
		{name: "b-cloud", status: 500, list: silent, code: 503, says: "its server does not list its models now: "},
		{name: "b", status: 500, list: silent, more: fallback, model: "b", asked: "b"}, // which may serve it

		{name: "b", model: "b"}, // nothing tells what the server has
		{name: "b-cloud", model: "b-cloud"},
		{name: "b", more: fallback, model: "b", asked: "b"},
	} {
		t.Run(fmt.Sprint(c.name, " ", c.status, " ", len(c.more)), func(t *testing.T) {
			h := ofCatalog(t, c.status, c.list, c.more)
			_, r := request("POST", "/v1/chat/completions")
			j := &job{handler: h, target: h.fixed}
			got, err := j.named(r, c.name)
			if c.code != 0 {
				var f *failure
				require.ErrorAs(t, err, &f)
				require.Equal(t, c.code, f.status)
				require.Contains(t, f.message, c.says)
				require.Nil(t, got)
				return
			}
			require.NoError(t, err)
			require.Same(t, h.fixed, got)
			require.Equal(t, c.model, j.model)
			require.Equal(t, c.turn, j.turn)
			require.Equal(t, c.asked, j.asked)
		})
	}
}

// The server knows best what a name means that a pattern of the configuration fits, too.
func TestANameOfTheServersOwnIsNotTakenForOneThatAPatternFits(t *testing.T) {
	h := ofCatalog(t, 200, `{"models":["a","like-b"]}`, nil)
	for name, want := range map[string]string{"a-1": "a", "like-c": "a", "like-b": "", "other": ""} {
		_, r := request("POST", "/odd")
		j := &job{handler: h, target: h.fixed, turn: true}
		got, err := j.mayName(r, name)
		require.NoError(t, err, name)
		require.Same(t, h.fixed, got, name)
		require.Equal(t, want, j.model, name)
	}
}

func TestAWrongNameIsMetWithNamesThatTheRouteShows(t *testing.T) {
	h := ofCatalog(t, 200, `{"models":["quiet","beta"]}`, nil)
	for name, want := range map[string]string{"betta": `did you mean "beta"?`, "quite": "GET /v1/models lists all"} {
		_, r := request("POST", "/v1/chat/completions")
		_, err := (&job{handler: h, target: h.fixed}).named(r, name)
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), `"quiet"`)
	}
}
