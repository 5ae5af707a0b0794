package httplife_test

import (
	"fmt"
	"net/http"
	"os"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// library is a server with models that are loaded and unloaded by their names.
const library = `{"health":{"path":"/health"},"model_tag":"latest",
	"residency":{"path":"/ps","names":"$.models[*].name","sizes_mib":"$.models[*].mib"},
	"load":{"path":"/load/{model}"},"unload":{"path":"/unload","body":"{\"model\":{model}}","accept":[200,404]}}`

func TestModelsAreListedLoadedAndUnloadedByTheirNames(t *testing.T) {
	f := newFake(t)
	f.answer("GET /health", 200, "")
	var loaded atomic.Value
	loaded.Store(`{"models":[{"name":"a:latest","mib":100}]}`)
	f.handle("GET /ps", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, loaded.Load()) })
	f.handle("POST /load/org/b c", func(http.ResponseWriter, *http.Request) {
		loaded.Store(`{"models":[{"name":"a:latest","mib":100},{"name":"org/b c","mib":50}]}`)
	})
	f.handle("POST /unload", func(http.ResponseWriter, *http.Request) { loaded.Store(`{"models":[{"name":"a:latest","mib":100}]}`) })
	d := open(t, library, f.addr)
	require.Equal(t, lifecycle.Traits{Health: true, Residency: true, Models: true, LoadModel: true, UnloadModel: true, Names: lifecycle.Names{Tag: "latest"}}, d.Traits())
	r := d.Probe(t.Context())
	require.Equal(t, []lifecycle.Model{{Name: "a:latest", Resident: 100 * gpu.MiB, Size: -1}}, r.Models)
	require.Equal(t, lifecycle.Yes, r.Loaded)
	require.Equal(t, 100*gpu.MiB, r.Resident)

	require.NoError(t, d.Load(t.Context(), lifecycle.Target{Model: "org/b c"}))
	require.Len(t, d.Probe(t.Context()).Models, 2)
	confirmed, err := d.Unload(t.Context(), lifecycle.Target{Model: "org/b c"})
	require.NoError(t, err)
	require.True(t, confirmed, "the other is loaded still, and that is no matter")
	_, err = d.Unload(t.Context(), lifecycle.Target{})
	require.ErrorContains(t, err, "no unload route", "which of them?")

	loaded.Store(`{"other":1}`)
	r = d.Probe(t.Context())
	require.Nil(t, r.Models, "a list that is missing says nothing")
	require.Equal(t, lifecycle.Unknown, r.Loaded)
}

func TestTheNameOfTheOneModelStandsForTheServer(t *testing.T) {
	f := newFake(t)
	f.answer("GET /health", 200, "")
	var said atomic.Value
	f.handle("POST /load", func(_ http.ResponseWriter, r *http.Request) { said.Store(r.URL.Query().Get("m")) })
	d := open(t, `{"health":{"path":"/health"},"load":{"path":"/load?m={model}"},"unload":{"path":"/unload"},"model_name":"my model"}`, f.addr)
	require.True(t, d.Traits().Load)
	require.True(t, d.Traits().Unload)
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	require.Equal(t, "my model", said.Load())
}

func TestAnAnswerThatSaysThatItFailedIsAFailure(t *testing.T) {
	f := newFake(t)
	f.answer("POST /unload", 200, `{"success":false}`)
	f.answer("POST /load", 200, `{"success":true}`)
	f.answer("GET /health", 200, "")
	d := open(t, `{"health":{"path":"/health"},"load":{"path":"/load","success":"$.success"},"unload":{"path":"/unload","success":"$.success"}}`, f.addr)
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	_, err := d.Unload(t.Context(), lifecycle.Target{})
	require.ErrorContains(t, err, "$.success is not true")
}

func TestAStatusMayMeanThatNothingIsLoaded(t *testing.T) {
	f := newFake(t)
	f.answer("GET /health", 200, "")
	f.answer("GET /model", 503, `{"detail":"none"}`)
	d := open(t, `{"health":{"path":"/health"},"residency":{"path":"/model","loaded":"$.id","unloaded_on":[503]}}`, f.addr)
	require.Equal(t, lifecycle.No, d.Probe(t.Context()).Loaded)
	f.answer("GET /model", 200, `{"id":"x"}`)
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	f.answer("GET /model", 500, "")
	require.Equal(t, lifecycle.Unknown, d.Probe(t.Context()).Loaded)
}

func TestMetricsTellWhetherItWorks(t *testing.T) {
	f := newFake(t)
	d := open(t, `{"busy":{"path":"/metrics","busy_metrics":["v:running","v:waiting"]}}`, f.addr)
	for text, want := range map[string]bool{
		"v:running 0\nv:waiting 0\nother 5\n":                             false,
		"# TYPE v:running gauge\nv:running{model=\"a\"} 0\nv:waiting 2\n": true,
		"v:running{a=\"1\"} 0\nv:running{a=\"2\"} 1\n":                    true,
	} {
		f.answer("GET /metrics", 200, text)
		busy, err := d.Busy(t.Context(), lifecycle.Target{})
		require.NoError(t, err, text)
		require.Equal(t, want, busy, text)
	}
	for _, bad := range []string{"other 1\n", "<html>"} {
		f.answer("GET /metrics", 200, bad)
		_, err := d.Busy(t.Context(), lifecycle.Target{})
		require.Error(t, err, bad)
	}
}

func TestServerWithoutItsBusyRouteCannotTell(t *testing.T) {
	f := newFake(t)
	d := open(t, `{"busy":{"path":"/metrics","busy_metrics":["x"]}}`, f.addr)
	for _, status := range []int{404, 405, 501} {
		f.answer("GET /metrics", status, "")
		busy, err := d.Busy(t.Context(), lifecycle.Target{})
		require.NoError(t, err, status)
		require.False(t, busy)
	}
	f.answer("GET /metrics", 503, "")
	_, err := d.Busy(t.Context(), lifecycle.Target{})
	require.Error(t, err, "it has the route, and does not say")
}

func TestJobsThatAnswersNameAreWorkUntilTheyAreOver(t *testing.T) {
	f := newFake(t)
	d := open(t, `{"jobs":{"path":"/jobs/{item}","id":"$.id","done":"$.status == \"done\""}}`, f.addr)
	busy := func() bool {
		is, err := d.Busy(t.Context(), lifecycle.Target{})
		require.NoError(t, err)
		return is
	}
	require.True(t, d.Traits().Busy)
	require.False(t, busy())
	jobs := d.(lifecycle.Jobs)
	require.True(t, jobs.Track([]byte(`{"id":"a/1","status":"queued"}`)))
	require.True(t, jobs.Track([]byte(`{"id":7}`)))
	require.False(t, jobs.Track([]byte(`{"error":"full"}`)))
	require.False(t, jobs.Track([]byte(`<html>`)))
	f.answer("GET /jobs/a/1", 200, `{"status":"running"}`)
	f.answer("GET /jobs/7", 200, `{"status":"queued"}`)
	require.True(t, busy())
	f.answer("GET /jobs/a/1", 200, `{"status":"done"}`)
	require.True(t, busy(), "the other is not over")
	f.answer("GET /jobs/7", 410, "")
	require.False(t, busy(), "it is over for so long that it is forgotten")
	f.answer("GET /jobs/7", 500, "")
	require.False(t, busy(), "it is not asked for again")
}

func TestWhatAServerWasAskedLastIsRememberedWhereItCannotTell(t *testing.T) {
	f := newFake(t)
	var loads, unloads atomic.Int32
	f.answer("GET /health", 200, "")
	f.handle("POST /load", func(http.ResponseWriter, *http.Request) { loads.Add(1) })
	f.handle("POST /unload", func(http.ResponseWriter, *http.Request) { unloads.Add(1) })
	dir := t.TempDir()
	const config = `{"health":{"path":"/health"},"load":{"path":"/load"},"unload":{"path":"/unload"},"remember":true}`
	again := func() lifecycle.Driver { return open(t, config, f.addr, func(d *lifecycle.Deps) { d.Dir = dir }) }
	d := again()
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded, "it starts loaded")
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	require.Zero(t, loads.Load(), "it must not be asked to load what is loaded")
	for range 2 {
		_, err := d.Unload(t.Context(), lifecycle.Target{})
		require.NoError(t, err)
	}
	require.EqualValues(t, 1, unloads.Load())
	other := newFake(t)
	other.answer("GET /health", 200, "")
	d = open(t, config, other.addr, func(d *lifecycle.Deps) { d.Dir = dir })
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded, "that is another server")
	d = again() // Caddy has restarted
	require.Equal(t, lifecycle.No, d.Probe(t.Context()).Loaded)
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	require.EqualValues(t, 1, loads.Load())
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)

	_, err = d.Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	f.Close()
	require.Equal(t, lifecycle.Refused, d.Probe(t.Context()).Outcome)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries, "it has ended: it starts loaded")
}

func TestAModelThatIsOnlyPartlyOnTheGPUIsUnloadedAgainWhereThatIsRequired(t *testing.T) {
	const routes = `{"health":{"path":"/health"},"model_tag":"latest","require_full_gpu":%t,
		"residency":{"path":"/ps","names":"$.models[*].name","sizes_mib":"$.models[*].gpu","full_sizes_mib":"$.models[*].all"},
		"load":{"path":"/load/{model}"},"unload":{"path":"/unload/{model}"}}`
	f := newFake(t)
	f.answer("GET /health", 200, "")
	var loaded atomic.Value
	none := func() { loaded.Store(`{"models":[{"name":"other","gpu":1,"all":9}]}`) }
	none()
	part := "100"
	f.handle("GET /ps", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, loaded.Load()) })
	f.handle("POST /load/m", func(http.ResponseWriter, *http.Request) {
		loaded.Store(`{"models":[{"name":"other","gpu":1,"all":9},{"name":"m:latest","gpu":` + part + `,"all":128}]}`)
	})
	f.handle("POST /unload/m", func(http.ResponseWriter, *http.Request) { none() })

	d := open(t, fmt.Sprintf(routes, false), f.addr)
	require.False(t, d.Traits().FullGPUModel)
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{Model: "m"}))
	m := d.Probe(t.Context()).Models[1]
	require.Equal(t, lifecycle.Model{Name: "m:latest", Resident: 100 * gpu.MiB, Size: 128 * gpu.MiB}, m)
	require.True(t, m.Partly())

	d = open(t, fmt.Sprintf(routes, true), f.addr)
	require.True(t, d.Traits().FullGPUModel)
	require.False(t, d.Traits().FullGPU, "it can't be loaded as a whole")
	err := d.Load(t.Context(), lifecycle.Target{Model: "m"})
	require.ErrorIs(t, err, lifecycle.ErrPartly)
	require.ErrorContains(t, err, "only 100MiB of the 128MiB of m:latest came onto the GPU")
	require.Len(t, d.Probe(t.Context()).Models, 1, "it was unloaded again")
	part = "128"
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{Model: "m"}), "what the other is, is no matter")

	part = "0"
	f.answer("POST /unload/m", 500, "no")
	require.ErrorContains(t, d.Load(t.Context(), lifecycle.Target{Model: "m"}), "it is loaded still: ")
}

func TestRequireFullGPUNeedsARouteThatTells(t *testing.T) {
	for _, config := range []string{
		`{"require_full_gpu":true,"load":{"path":"/l"},"residency":{"path":"/ps","names":"$.m[*].n","sizes_mib":"$.m[*].g"}}`,
		`{"require_full_gpu":true,"residency":{"path":"/ps","names":"$.m[*].n","sizes_mib":"$.m[*].g","full_sizes_mib":"$.m[*].a"}}`,
	} {
		_, err := provision(t, config)
		require.ErrorContains(t, err, "require_full_gpu needs a load route, and a residency route with")
	}
	_, err := provision(t, `{"residency":{"path":"/ps","names":"$.m[*].n","full_sizes_mib":"$.m[*].a"}}`)
	require.ErrorContains(t, err, "residency: full sizes without sizes")
	_, err = provision(t, `{"residency":{"path":"/ps","names":"$.m[*].n","sizes_mib":"$.g","full_sizes_mib":"$.a","full_sizes_bytes":"$.a"}}`)
	require.ErrorContains(t, err, "full_sizes_mib and full_sizes_bytes are both given")
	_, err = provision(t, `{"residency":{"path":"/ps","names":"$.m[*].n","sizes_mib":"$.g","sizes_bytes":"$.g"}}`)
	require.ErrorContains(t, err, "residency: sizes_mib and sizes_bytes are both given: keep one")
	for _, one := range []string{"sizes_mib", "sizes_bytes"} {
		_, err = provision(t, `{"residency":{"path":"/ps","names":"$.m[*].n","`+one+`":"$.m[*].g"}}`)
		require.NoError(t, err, one)
	}
}
