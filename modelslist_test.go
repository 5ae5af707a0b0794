package gpubroker

import (
	"errors"
	"net/http"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/require"

	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
)

// serverList is a handler that answers like a server that keeps its list of models in a file.
func serverList(t *testing.T, list string, err error) caddyhttp.Handler {
	return caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
		for _, name := range []string{"Range", "If-Range", "If-None-Match", "If-Modified-Since"} {
			require.Empty(t, r.Header.Get(name), "the server is asked for all of it")
		}
		for name, value := range map[string]string{
			"Content-Type": "application/json", "Content-Length": "999", "Etag": `"1"`, "Last-Modified": "Sun, 29 Nov 2026 07:00:00 GMT",
			"Accept-Ranges": "bytes", "Repr-Digest": "sha-256=:AA==:",
		} {
			w.Header().Set(name, value)
		}
		w.WriteHeader(http.StatusOK)
		w.WriteHeader(http.StatusBadGateway) // which net/http ignores, too
		if r.Method != http.MethodHead {
			_, _ = w.Write([]byte(list))
		}
		return err
	})
}

func TestN3_AListIsAskedForWholeAndCarriesNothingThatIsTrueOfAnother(t *testing.T) {
	h := byModelHandler(t, gpucaddyfile.Route{Consumer: "many"})
	for _, method := range []string{"GET", "HEAD"} {
		w, r := post(method, "/v1/models", "")
		for name, value := range map[string]string{"Range": "bytes=0-9", "If-Range": `"1"`, "If-None-Match": `"1"`, "If-Modified-Since": "Sun, 29 Nov 2026 07:00:00 GMT"} {
			r.Header.Set(name, value)
		}
		require.NoError(t, h.ServeHTTP(w, r, serverList(t, `{"data":[{"id":"m1","note":"<|im_start|>"},{"id":"stranger"}]}`, nil)))
		require.Equal(t, 200, w.Code)
		for _, name := range []string{"Etag", "Last-Modified", "Accept-Ranges", "Repr-Digest"} {
			require.Empty(t, w.Header().Get(name), "%s %s", method, name)
		}
		if method == "HEAD" {
			require.Empty(t, w.Header().Get("Content-Length"))
			continue
		}
		require.JSONEq(t, `{"data":[{"id":"m1","note":"<|im_start|>"},{"id":"m1-alias","note":"<|im_start|>"},{"id":"stranger"}]}`, w.Body.String())
	}
	for _, method := range []string{"GET", "HEAD"} { // its server knows no such name
		w, r := post(method, "/v1/models/m1-alias", "")
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return errors.New("it was asked") })))
		require.Equal(t, 200, w.Code)
	}
}

func TestAListThatBreaksOffIsNotPassedOffAsWhole(t *testing.T) {
	h := byModelHandler(t, gpucaddyfile.Route{Consumer: "many"})
	w, r := post("GET", "/v1/models", "")
	broken := errors.New("it broke off")
	require.ErrorIs(t, h.ServeHTTP(w, r, serverList(t, `{"data":[{"id":"m1"}`, broken)), broken)
	require.Empty(t, w.Body.String())
}

// A name by which a model is served is one by which it is shown.
func TestN3_AnEntryOfAListIsFoundByAnyNameOfItsModel(t *testing.T) {
	h := byModelHandler(t, gpucaddyfile.Route{ModelFrom: inBody})
	for name, want := range map[string]string{"m1": "m1", "many/m1": "m1", "m1-alias": "m1-alias", "plain:latest": "plain", "m1:latest": "m1", "like-m1-x": "m1"} {
		w, r := post("GET", "/v1/models/"+name, "")
		require.NoError(t, h.ServeHTTP(w, r, nil))
		require.Equal(t, 200, w.Code, name)
		require.Contains(t, w.Body.String(), `"id":"`+want+`"`, name)
	}
	for _, name := range []string{"m3", "many", "off"} {
		w, r := post("GET", "/v1/models/"+name, "")
		require.NoError(t, h.ServeHTTP(w, r, nil))
		require.Equal(t, 404, w.Code, name)
	}
}

// A consumer without lists of routes has lists of models all the same: they load nothing, at whatever path they are asked for.
func TestN3_AShortListOfOneConsumerIsAListAndNoWork(t *testing.T) {
	for route, model := range map[string]string{"many": "m1", "single": "s1"} {
		h := byModelHandler(t, gpucaddyfile.Route{Consumer: route})
		for _, path := range []string{"/models", "/models/", "/v1/models"} {
			w, r := post("GET", path, "")
			require.NoError(t, h.ServeHTTP(w, r, serverList(t, `{"data":[{"id":"`+model+`"}]}`, nil)))
			require.Equal(t, 200, w.Code, path)
			require.JSONEq(t, `{"data":[{"id":"`+model+`"},{"id":"`+model+`-alias"}]}`, w.Body.String(), path)
			require.Empty(t, w.Header().Get("X-Gpu-Broker-Consumer"), path)
		}
	}
	h := byModelHandler(t, gpucaddyfile.Route{Consumer: "many"})
	w, r := post("GET", "/metrics", "")
	require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return errors.New("it was asked") })))
	require.Equal(t, 404, w.Code)
	require.Contains(t, w.Body.String(), "add its route to bypass")
}
