package gpubroker

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
)

func TestTheLimitsOfAConfigurationThatFailedLaterAreNotInForce(t *testing.T) {
	one, _ := newApp(t, map[string]any{"name": "a", "vram": "1GiB"})
	require.NoError(t, one.Start())
	was := *one.pool.watcher.limits.Load()
	pool := one.pool
	two, _ := newApp(t, map[string]any{"name": "a", "vram": "1GiB"})
	require.Same(t, pool, two.pool)
	minute := caddy.Duration(77 * time.Second)
	two.UploadIdle = &minute
	require.NoError(t, two.Start())
	require.NoError(t, two.Stop()) // another app of it did not start
	require.Equal(t, was, *pool.watcher.limits.Load())
}

func TestATunnelStaysIfNobodyWaitsAnyMoreOnceItsServerHasAnswered(t *testing.T) {
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/busy" {
			leave()
			<-left
			_, _ = w.Write([]byte(`{"busy": false}`))
		}
	}))
	defer srv.Close()
	app, _ := newApp(t,
		map[string]any{"name": "a", "vram": "1GiB", "upstream": strings.TrimPrefix(srv.URL, "http://"), "lifecycle": map[string]any{"protocol": "http", "busy": map[string]any{"path": "/busy", "busy": "$.busy"}}},
		map[string]any{"name": "b", "vram": "1GiB"})
	require.NoError(t, app.Start())
	p := app.pool
	l, err := p.broker.Acquire(t.Context(), broker.Request{Consumer: "a"})
	require.NoError(t, err)
	defer l.Release(0)
	go func() {
		other, err := p.broker.Acquire(ctx, broker.Request{Consumer: "b"})
		if err == nil {
			other.Release(0)
		}
		close(left)
	}()
	require.Eventually(t, func() bool { return p.broker.Contended(l) }, 10*time.Second, time.Millisecond)
	j := &job{lease: l, target: &target{name: "a"}}
	j.ResponseWriter = httptest.NewRecorder()
	j.tunnel.Store(true)
	p.running.add(j, answering)
	defer p.running.remove(j)
	now := time.Now()
	p.look(now, limits{tunnel: time.Second})
	p.look(now.Add(2*time.Second), limits{tunnel: time.Second})
	require.False(t, p.broker.Contended(l))
	require.Empty(t, j.stalled)
}
