package gpubroker

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
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
