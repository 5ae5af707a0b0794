package gpubroker

import (
	"testing"

	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

func TestWaitAndRunAreSpansOfTheRequestsTrace(t *testing.T) {
	h := newHandler(t)
	recorder := tracetest.NewSpanRecorder()
	tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)).Tracer("test")
	w, r := request("GET", "/work")
	ctx, parent := tracer.Start(r.Context(), "request")
	require.NoError(t, h.ServeHTTP(w, r.WithContext(ctx), nothing))
	parent.End()
	var names []string
	for _, s := range recorder.Ended() {
		names = append(names, s.Name())
		require.Equal(t, parent.SpanContext().TraceID(), s.SpanContext().TraceID())
		require.False(t, s.EndTime().Before(s.StartTime()))
	}
	require.Contains(t, names, "gpu_broker.run")
	require.Contains(t, names, "gpu_broker.wait", "the first request waits for its place")
}
