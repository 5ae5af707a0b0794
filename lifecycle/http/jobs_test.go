package httplife_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

func TestJobsGoOnOverAReloadThatReplacesTheDriver(t *testing.T) {
	f, other := newFake(t), newFake(t)
	const routes = `{"jobs":{"path":"/jobs/{item}","id":"$.id","done":"$.done"}}`
	before := open(t, routes, f.addr)
	require.True(t, before.(lifecycle.Jobs).Track([]byte(`{"id":7}`)))
	f.answer("GET /jobs/7", 200, `{"done":false}`)
	busy := func(d lifecycle.Driver) bool {
		is, err := d.Busy(t.Context(), lifecycle.Target{})
		require.NoError(t, err)
		return is
	}
	after, elsewhere := open(t, routes, f.addr), open(t, routes, other.addr)
	after.(lifecycle.Heir).Inherit(before)
	elsewhere.(lifecycle.Heir).Inherit(before)
	require.NoError(t, before.Close())
	require.True(t, busy(after))
	require.False(t, busy(elsewhere), "it is another server")
	require.True(t, before.(lifecycle.Jobs).Track([]byte(`{"id":8}`))) // an answer that came meanwhile
	f.answer("GET /jobs/7", 200, `{"done":true}`)
	f.answer("GET /jobs/8", 200, `{"done":false}`)
	require.True(t, busy(after))
}

func TestAServerIsBusyWhileAnyJobOfItsIsNotOver(t *testing.T) {
	f := newFake(t)
	d := open(t, `{"jobs":{"path":"/jobs/{item}","id":"$.id","done":"$.done"}}`, f.addr)
	busy := func() (bool, error) { return d.Busy(t.Context(), lifecycle.Target{}) }
	for _, body := range []string{``, `{`, `{}`, `{"id":null}`, `{"id":true}`, `{"id":[1]}`} {
		require.False(t, d.(lifecycle.Jobs).Track([]byte(body)), body)
	}
	is, err := busy()
	require.NoError(t, err)
	require.False(t, is)
	for _, body := range []string{`{"id":7}`, `{"id":"x y"}`} {
		require.True(t, d.(lifecycle.Jobs).Track([]byte(body)), body)
	}
	f.answer("GET /jobs/7", 500, `{}`)
	_, err = busy()
	require.ErrorContains(t, err, "answered 500", "what can't be told is not idle")
	f.answer("GET /jobs/7", 200, `{}`)
	_, err = busy()
	require.ErrorContains(t, err, "the answer has no $.done")
	f.answer("GET /jobs/7", 410, ``) // it was forgotten
	f.answer("GET /jobs/x y", 200, `{"done":false}`)
	is, err = busy()
	require.NoError(t, err)
	require.True(t, is)
	f.answer("GET /jobs/x y", 200, `{"done":true}`)
	is, err = busy()
	require.NoError(t, err)
	require.False(t, is)
	asked := len(f.called("GET /jobs/x y"))
	_, err = busy()
	require.NoError(t, err)
	require.Len(t, f.called("GET /jobs/x y"), asked, "one that is over is not asked for again")
}

func TestJobsThatAreNotAskedForYetKeepAServerBusy(t *testing.T) {
	f := newFake(t)
	d := open(t, `{"jobs":{"path":"/jobs/{item}","id":"$.id","done":"$.done"}}`, f.addr)
	for i := range 17 { // one more than are asked for at once
		f.answer(fmt.Sprintf("GET /jobs/%d", i), 200, `{"done":true}`)
		require.True(t, d.(lifecycle.Jobs).Track(fmt.Appendf(nil, `{"id":%d}`, i)))
	}
	for _, want := range []bool{true, false} {
		is, err := d.Busy(t.Context(), lifecycle.Target{})
		require.NoError(t, err)
		require.Equal(t, want, is)
	}
}

func TestAServerThatIsStartedAnewHasNoJobs(t *testing.T) {
	f := newFake(t)
	d := open(t, `{"jobs":{"path":"/jobs/{item}","id":"$.id","done":"$.done"}}`, f.addr)
	require.True(t, d.(lifecycle.Jobs).Track([]byte(`{"id":7}`)))
	d.(interface{ Restarted() }).Restarted()
	is, err := d.Busy(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	require.False(t, is)
	require.Empty(t, f.called("GET /jobs/7"))
}

func TestWhileAServerHasNoJobsItsBusyRouteTells(t *testing.T) {
	f := newFake(t)
	d := open(t, `{"jobs":{"path":"/jobs/{item}","id":"$.id","done":"$.done"},"busy":{"path":"/busy","busy_metrics":["running"]}}`, f.addr)
	for metric, want := range map[string]bool{"running 0\n": false, "running 2\n": true, "# TYPE running counter\nrunning 1\n": true, "# TYPE running gauge\nrunning 1\n": true, "# TYPE running gauge\nrunning{a=\"1\"} 0\nrunning{a=\"2\"} 1\n": true, "other 1\nrunning 0\n": false} {
		f.answer("GET /busy", 200, metric)
		is, err := d.Busy(t.Context(), lifecycle.Target{})
		require.NoError(t, err, metric)
		require.Equal(t, want, is, metric)
	}
	f.answer("GET /busy", 200, "other 1\n")
	_, err := d.Busy(t.Context(), lifecycle.Target{})
	require.ErrorContains(t, err, `none of the metrics ["running"]`)
}
