package httplife_test

import (
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
