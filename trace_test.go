package gpubroker

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func TestWaitAndRunAreSpansOfTheRequestsTrace(t *testing.T) {
	h := newHandler(t)
	recorder := tracetest.NewSpanRecorder()
	tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)).Tracer("test")
	w, r := request("GET", "/work")
	ctx, parent := tracer.Start(r.Context(), "request")
	var running []broker.Lease
	for range h.app.consumer("a").Concurrency {
		l, err := h.pool.broker.Acquire(t.Context(), broker.Request{Consumer: h.Consumer, Priority: broker.DefaultPriority})
		require.NoError(t, err)
		running = append(running, l)
	}
	served := make(chan error, 1)
	go func() { served <- h.ServeHTTP(w, r.WithContext(ctx), nothing) }()
	require.Eventually(t, func() bool { return h.pool.broker.Status().Scheduler.QueueDepth == 1 }, 20*time.Second, time.Millisecond)
	for _, l := range running {
		l.Release(scheduler.Served)
	}
	require.NoError(t, <-served)
	parent.End()
	var names []string
	for _, s := range recorder.Ended() {
		names = append(names, s.Name())
		require.Equal(t, parent.SpanContext().TraceID(), s.SpanContext().TraceID())
		require.False(t, s.EndTime().Before(s.StartTime()))
	}
	require.Contains(t, names, "gpu_broker.run")
	require.Contains(t, names, "gpu_broker.wait", "it waits for its place")
}

func TestALoadIsASpanBetweenTheWaitAndTheRun(t *testing.T) {
	srv, err := modelserver.Start(modelserver.Options{Name: "a", VRAM: gpu.GiB, SimDir: t.TempDir(), LoadTime: 50 * time.Millisecond})
	require.NoError(t, err)
	t.Cleanup(func() { _ = srv.Close() })
	app, ctx := newApp(t, map[string]any{"name": "a", "vram": "1GiB", "upstream": srv.Addr(), "lifecycle": map[string]any{
		"protocol": "http", "health": map[string]any{"path": "/health", "loaded": "$.loaded"},
		"load": map[string]any{"path": "/api/admin/load"}, "unload": map[string]any{"path": "/api/admin/unload"},
	}})
	require.NoError(t, app.Start())
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "a"}}
	require.NoError(t, h.Provision(ctx))
	recorder := tracetest.NewSpanRecorder()
	tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)).Tracer("test")
	serve := func() map[string]sdktrace.ReadOnlySpan {
		t.Helper()
		recorder.Reset()
		w, r := request("POST", "/synthesize")
		traced, parent := tracer.Start(r.Context(), "request")
		require.NoError(t, h.ServeHTTP(w, r.WithContext(traced), nothing))
		require.Equal(t, 200, w.Code, "%s", w.Body)
		parent.End()
		spans := map[string]sdktrace.ReadOnlySpan{}
		for _, s := range recorder.Ended() {
			require.Equal(t, parent.SpanContext().TraceID(), s.SpanContext().TraceID())
			spans[s.Name()] = s
		}
		return spans
	}
	cold := serve()
	load := cold["gpu_broker.load"]
	require.NotNil(t, load)
	require.GreaterOrEqual(t, load.EndTime().Sub(load.StartTime()), 50*time.Millisecond)
	require.Equal(t, cold["gpu_broker.wait"].EndTime(), load.StartTime())
	require.Equal(t, load.EndTime(), cold["gpu_broker.run"].StartTime())
	require.Contains(t, load.Attributes(), attribute.String("gpu_broker.consumer", "a"))
	warm := serve()
	require.Contains(t, warm, "gpu_broker.run")
	require.NotContains(t, warm, "gpu_broker.load")
	require.NotContains(t, warm, "gpu_broker.wait")
}
