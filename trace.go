package gpubroker

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

// spans tells OpenTelemetry, after the fact, how long a request waited for its
// turn, for its load, and ran. Without Caddy's directive `tracing` before the
// handler nothing is recorded and nothing is spent.
func (j *job) spans(ctx context.Context, admitted, ended time.Time) {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return
	}
	tracer := parent.TracerProvider().Tracer("gpu_broker")
	consumer := trace.WithAttributes(attribute.String("gpu_broker.consumer", j.target.name))
	span := func(name string, from, to time.Time) {
		_, s := tracer.Start(ctx, name, trace.WithTimestamp(from), consumer)
		s.End(trace.WithTimestamp(to))
	}
	if wait := j.lease.Queued + j.lease.Loading; wait > 0 {
		loading := admitted.Add(-j.lease.Loading)
		span("gpu_broker.wait", admitted.Add(-wait), loading)
		if j.lease.Loading > 0 {
			span("gpu_broker.load", loading, admitted)
		}
	}
	span("gpu_broker.run", admitted, ended)
}
