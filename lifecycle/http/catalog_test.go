package httplife_test

import (
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

const withCatalog = `{"health":{"path":"/health"},"load_waits":true,"model_fold_case":true,"model_tag":"latest",
	"residency":{"path":"/ps","names":"$.models[*].name","digests":"$.models[*].digest"},
	"catalog":{"path":"/tags","names":"$.models[*].name","digests":"$.models[*].digest"},
	"load":{"path":"/load/{model}"},"unload":{"path":"/unload/{model}"},"model_elsewhere":["-cloud"]}`

// shop is a server whose load route answers at once, after which it lists what it is told.
func shop(t *testing.T, loads string) *fake {
	f := newFake(t)
	f.answer("GET /health", 200, "")
	var loaded atomic.Value
	loaded.Store(`{"models":[]}`)
	f.handle("GET /ps", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, loaded.Load()) })
	for _, name := range []string{"a", "b", "nope"} {
		f.handle("POST /load/"+name, func(http.ResponseWriter, *http.Request) { loaded.Store(loads) })
	}
	f.answer("GET /tags", 200, `{"models":[{"name":"A:latest","digest":"1"},{"name":"b","digest":"2"},{"name":"copy","digest":"1"}]}`)
	return f
}

func TestK1_ALoadIsBelievedByAnotherSpellingAndByTheDigest(t *testing.T) {
	for what, loads := range map[string]string{
		"spelling": `{"models":[{"name":"A:Latest","digest":"x"}]}`,
		"digest":   `{"models":[{"name":"other","digest":"9"},{"name":"copy","digest":"1"}]}`,
	} {
		f := shop(t, loads)
		require.NoError(t, open(t, withCatalog, f.addr).Load(t.Context(), lifecycle.Target{Model: "a"}), what)
	}
}

func TestK1_AnAcceptedLoadThatComesToNothingFailsSoonAndNamesWhatIsListed(t *testing.T) {
	for loads, listed := range map[string]string{
		`{"models":[{"name":"c","digest":"3"},{"name":"d","digest":"4"}]}`: "lists c, d:",
		`{"models":[]}`: "lists no model:",
	} {
		f := shop(t, loads)
		began := time.Now()
		err := open(t, withCatalog, f.addr).Load(t.Context(), lifecycle.Target{Model: "a"})
		require.ErrorContains(t, err, `the server accepted the load of "a", but `+listed)
		require.Less(t, time.Since(began), patience)
		require.Len(t, f.called("GET /tags"), 1, "asked once")
	}
}

func TestALoadThatComesToNothingIsToldWhateverTheServerCanTell(t *testing.T) {
	const routes = `{"health":{"path":"/health"},"load_waits":true,"residency":{"path":"/ps","names":"$.models[*].name"},"load":{"path":"/load/%s"}%s}`
	for name, c := range map[string]struct {
		config string
		target lifecycle.Target
		want   string
	}{
		"no catalog":            {fmt.Sprintf(routes, "{model}", ""), lifecycle.Target{Model: "a"}, `accepted the load of "a", but lists no model: does it know`},
		"one without digests":   {fmt.Sprintf(routes, "{model}", `,"catalog":{"path":"/tags","names":"$.models[*].name"}`), lifecycle.Target{Model: "a"}, `accepted the load of "a", but lists no model`},
		"the server as a whole": {fmt.Sprintf(routes, "a", ""), lifecycle.Target{}, "consumer mvoice: load: the server accepted the load, but says that it is not loaded"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := shop(t, `{"models":[]}`)
			require.ErrorContains(t, open(t, c.config, f.addr).Load(t.Context(), c.target), c.want)
			require.Empty(t, f.called("GET /tags"), "which tells nothing of it")
		})
	}
}

func TestK1_AModelThatIsStillBeingLoadedIsWaitedFor(t *testing.T) {
	f := newFake(t)
	f.answer("GET /health", 200, "")
	f.answer("POST /load/a", 200, "")
	f.answer("GET /tags", 200, `{"models":[{"name":"a","digest":"1"}]}`)
	ready := time.Now().Add(600 * time.Millisecond)
	f.handle("GET /ps", func(w http.ResponseWriter, _ *http.Request) {
		state := "loading"
		if time.Now().After(ready) {
			state = "loaded"
		}
		_, _ = fmt.Fprintf(w, `{"models":[{"name":"A","state":%q}]}`, state)
	})
	d := open(t, `{"health":{"path":"/health"},"load_waits":true,"model_fold_case":true,"load":{"path":"/load/{model}"},
		"catalog":{"path":"/tags","names":"$.models[*].name","digests":"$.models[*].digest"},
		"residency":{"path":"/ps","names":"$.models[?(@.state == \"loaded\")].name","loading":"$.models[?(@.state == \"loading\")].name"}}`, f.addr)
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{Model: "a"}))
	require.Empty(t, f.called("GET /tags"), "what the server is loading needs no other name")
}

func TestK1_AnUnloadIsConfirmedByTheDigestToo(t *testing.T) {
	f := shop(t, "")
	var asked atomic.Int32
	f.handle("GET /ps", func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) < 3 {
			_, _ = fmt.Fprint(w, `{"models":[{"name":"copy","digest":"1"}]}`)
			return
		}
		_, _ = fmt.Fprint(w, `{"models":[{"name":"b","digest":"2"}]}`)
	})
	f.answer("POST /unload/a", 200, "")
	confirmed, err := open(t, withCatalog, f.addr).Unload(t.Context(), lifecycle.Target{Model: "a", Digest: "1"})
	require.NoError(t, err)
	require.True(t, confirmed)
	require.EqualValues(t, 3, asked.Load(), "it was there under another name")
}

func TestH7_ACatalogTellsWhatTheServerHas(t *testing.T) {
	f := shop(t, "")
	d := open(t, withCatalog, f.addr).(lifecycle.Cataloguer)
	models, err := d.Catalog(t.Context())
	require.NoError(t, err)
	require.Equal(t, []lifecycle.Model{{Name: "A:latest", Digest: "1", Resident: -1, Size: -1}, {Name: "b", Digest: "2", Resident: -1, Size: -1}, {Name: "copy", Digest: "1", Resident: -1, Size: -1}}, models)
	require.True(t, d.Elsewhere("gpt-oss:120b-cloud"))
	require.False(t, d.Elsewhere("b"))
	for _, bad := range []string{`{"other":1}`, `<html>`, `{"models":3}`} {
		f.answer("GET /tags", 200, bad)
		_, err = d.Catalog(t.Context())
		require.Error(t, err, bad)
	}
}

func TestH7_ALoadThatIsNotFoundSaysSo(t *testing.T) {
	f := shop(t, "")
	f.answer("POST /load/nope", 404, "no such model")
	d := open(t, withCatalog, f.addr)
	require.ErrorIs(t, d.Load(t.Context(), lifecycle.Target{Model: "nope"}), lifecycle.ErrNoModel)
	f.answer("POST /load/nope", 500, "broken")
	require.NotErrorIs(t, d.Load(t.Context(), lifecycle.Target{Model: "nope"}), lifecycle.ErrNoModel)
}

func TestH8_ANameThatIsAFolderNeverStandsInAPath(t *testing.T) {
	f := newFake(t)
	f.answer("GET /health", 200, "")
	d := open(t, `{"health":{"path":"/health"},"load":{"path":"/models/{model}/load"},"unload":{"path":"/models/{model}/unload"}}`, f.addr)
	for _, name := range []string{".", ".."} {
		require.ErrorContains(t, d.Load(t.Context(), lifecycle.Target{Model: name}), "can't stand in a path")
		_, err := d.Unload(t.Context(), lifecycle.Target{Model: name})
		require.ErrorContains(t, err, "can't stand in a path")
	}
	f.handle("POST /models/a/../b c?d/load", func(http.ResponseWriter, *http.Request) {})
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{Model: "a/../b c?d"}), "it is escaped")
}

func TestCatalogsAndNamesAreChecked(t *testing.T) {
	for config, want := range map[string]string{
		`{"catalog":{"path":"/tags"}}`:                                "catalog: names is missing",
		`{"catalog":{"path":"/tags","names":"$.a","loaded":"$.b"}}`:   "catalog: loaded is only for health and residency",
		`{"residency":{"path":"/ps","loaded":"$.a","digests":"$.b"}}`: "residency: digests or loading without names",
		`{"busy":{"path":"/b","busy":"$.b","names":"$.a"}}`:           "busy: names is only for health, residency and catalog",
		`{"load_waits":true}`:                                         "load_waits needs load",
		`{"model_prefix":"library"}`:                                  `model_prefix "library" must end with a slash`,
		`{"catalog":{"path":"/tags/{model}","names":"$.a"}}`:          "has {model}, which is known only in",
	} {
		_, err := provision(t, config)
		require.ErrorContains(t, err, want, config)
	}
}
