package gpubroker

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// subscriber is an event handler as a user's site may have one.
type subscriber chan caddy.Event

func (s subscriber) Handle(_ context.Context, e caddy.Event) error {
	s <- e
	return nil
}

// next waits for an event of a name and skips others.
func (s subscriber) next(t *testing.T, name string) map[string]any {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		select {
		case e := <-s:
			if e.Name() == name {
				require.EqualValues(t, "gpu_broker", e.Origin().CaddyModule().ID)
				return e.Data
			}
		case <-deadline:
			t.Fatalf("no event %s", name)
		}
	}
}

func TestCaddyEventsTellOfLoadsUnloadsFailuresOverloadAndALostGPU(t *testing.T) {
	dir := t.TempDir()
	consumers := []map[string]any{}
	servers := map[string]*modelserver.Server{}
	for _, name := range []string{"a", "b"} {
		srv, err := modelserver.Start(modelserver.Options{Name: name, VRAM: 9 * gpu.GiB, SimDir: dir, Total: 16 * gpu.GiB})
		require.NoError(t, err)
		t.Cleanup(func() { _ = srv.Close() })
		servers[name] = srv
		consumers = append(consumers, map[string]any{"name": name, "vram": "9GiB", "upstream": srv.Addr(), "lifecycle": map[string]any{
			"protocol": "http", "health": map[string]any{"path": "/health", "loaded": "$.loaded"},
			"load": map[string]any{"path": "/api/admin/load"}, "unload": map[string]any{"path": "/api/admin/unload"},
		}})
	}
	raw, err := json.Marshal(map[string]any{
		"gpu":  map[string]any{"driver": "simulated", "totals": []string{"16GiB"}, "dir": dir},
		"hold": 0, "max_queue": 1, "consumers": consumers,
	})
	require.NoError(t, err)
	ctx, err := caddy.ProvisionContext(&caddy.Config{Admin: &caddy.AdminConfig{Disabled: true}, AppsRaw: caddy.ModuleMap{"gpu_broker": raw}})
	require.NoError(t, err)
	mod, err := ctx.App("events")
	require.NoError(t, err)
	events := mod.(*caddyevents.App)
	told := make(subscriber, 100)
	require.NoError(t, events.Subscribe(&caddyevents.Subscription{Modules: []caddy.ModuleID{"gpu_broker"}, Handlers: []caddyevents.Handler{told}}))
	require.NoError(t, events.Start())
	mod, err = ctx.App("gpu_broker")
	require.NoError(t, err)
	app := mod.(*App)
	require.NoError(t, app.Start())
	t.Cleanup(func() {
		require.NoError(t, app.Stop())
		require.NoError(t, app.Cleanup())
	})
	b := app.pool.broker

	require.NoError(t, b.LoadByHand(t.Context(), "a"))
	require.Equal(t, "a", told.next(t, "loaded")["consumer"])
	require.NoError(t, b.LoadByHand(t.Context(), "b"))
	evicted := told.next(t, "evicted")
	require.Equal(t, "a", evicted["consumer"])
	require.Equal(t, "b", evicted["for"])
	require.Equal(t, "b", told.next(t, "loaded")["consumer"])
	require.NoError(t, b.UnloadByHand(t.Context(), "b", false))
	require.Equal(t, "b", told.next(t, "unloaded")["consumer"])

	servers["a"].SetFaults(func(f *modelserver.Faults) { f.RefuseLoad = true })
	require.Error(t, b.LoadByHand(t.Context(), "a"))
	failed := told.next(t, "load_failed")
	require.Equal(t, "a", failed["consumer"])
	require.NotEmpty(t, failed["reason"])

	running, err := b.Acquire(t.Context(), broker.Request{Consumer: "b", Priority: broker.DefaultPriority})
	require.NoError(t, err)
	waiting, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := b.Acquire(waiting, broker.Request{Consumer: "b", Priority: broker.DefaultPriority})
		left <- err
	}()
	require.Eventually(t, func() bool { return b.Status().Scheduler.QueueDepth == 1 }, 20*time.Second, time.Millisecond)
	_, err = b.Acquire(t.Context(), broker.Request{Consumer: "b", Priority: broker.DefaultPriority})
	require.Error(t, err)
	require.Equal(t, "b", told.next(t, "queue_full")["consumer"])
	leave()
	require.ErrorIs(t, <-left, context.Canceled)
	running.Release(scheduler.Served)

	require.NoError(t, simulated.WriteState(dir, "lost 0"))
	lost := told.next(t, "gpu_unhealthy")
	require.Equal(t, 0, lost["gpu"])
	require.NotEmpty(t, lost["reason"])
}
