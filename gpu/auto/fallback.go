package auto

import (
	"context"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// retry is the least time between two tries to find a way to read the GPUs.
const retry = 10 * time.Second

// fallback reads the GPUs, and shows declared ones for as long as none can be read.
type fallback struct {
	auto   *Auto
	logger *zap.Logger
	ctx    context.Context // what is opened later lives on it, too

	real gpu.Sampler // nil: no way works
	why  string      // … and why none does
	next time.Time   // when a way is looked for again
}

func newFallback(ctx context.Context, a *Auto, logger *zap.Logger, found gpu.Sampler, err error) *fallback {
	f := &fallback{auto: a, logger: logger, ctx: ctx, real: found, next: time.Now().Add(retry)}
	if err != nil {
		f.real, f.why = nil, err.Error()
	}
	return f
}

// Name is that of the sampler that reads the GPUs, or fallback.
func (f *fallback) Name() string {
	if f.real != nil {
		return f.real.Name()
	}
	return "fallback"
}

func (f *fallback) Why() string {
	if f.real != nil {
		return f.real.Why()
	}
	return "the configured sizes of gpu auto count, since no GPU can be read: " + f.why
}

func (f *fallback) MinInterval() time.Duration {
	if f.real != nil {
		return f.real.MinInterval()
	}
	return time.Second
}

func (f *fallback) Close() error {
	if f.real != nil {
		return f.real.Close()
	}
	return nil
}

func (f *fallback) Sample(ctx context.Context, detail gpu.Detail) (gpu.Sample, error) {
	if f.real == nil && !time.Now().Before(f.next) {
		found, err := f.auto.choose(f.ctx, f.logger)
		if err == nil {
			f.real = found
		} else {
			f.why = err.Error()
		}
		f.next = time.Now().Add(retry)
	}
	if err := ctx.Err(); err != nil {
		return gpu.Sample{}, err
	}
	if f.real == nil {
		return f.declared(), nil
	}
	sample, err := f.real.Sample(ctx, detail)
	if err != nil {
		return sample, err
	}
	for i := range sample.Devices {
		d := &sample.Devices[i]
		if d.Total == 0 && d.Health != gpu.Lost && d.Index < len(f.auto.Fallback) {
			d.Total, d.MemoryKnown = f.auto.Fallback[d.Index], false
			d.Reason += "; the configuration declares its size"
		}
	}
	return sample, nil
}

// declared are the GPUs as the configuration declares them.
func (f *fallback) declared() gpu.Sample {
	sample := gpu.Sample{At: time.Now()}
	for i, total := range f.auto.Fallback {
		sample.Devices = append(sample.Devices, gpu.Device{
			Index: i, UUID: "GPU-declared-" + strconv.Itoa(i), Name: "Declared GPU", Health: gpu.Healthy, Reason: f.why,
			Total: total, Utilisation: -1, Temperature: -1, Power: -1,
		})
	}
	return sample
}

var _ gpu.Sampler = (*fallback)(nil)
