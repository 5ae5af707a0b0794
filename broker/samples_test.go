package broker

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// slowGPU is a fakeGPU whose looks take their time.
type slowGPU struct {
	*fakeGPU
	takes map[gpu.Detail]time.Duration

	full atomic.Int64 // looks that brought everything
}

func (g *slowGPU) Open(context.Context, *zap.Logger) (gpu.Sampler, error) { return g, nil }
func (g *slowGPU) Sample(ctx context.Context, detail gpu.Detail) (gpu.Sample, error) {
	select {
	case <-ctx.Done():
		return gpu.Sample{}, ctx.Err()
	case <-time.After(g.takes[detail]):
	}
	if detail == gpu.Full {
		g.full.Add(1)
	}
	return g.fakeGPU.Sample(ctx, detail)
}

// sampled runs a sampler for a while against a broker that needs nothing of it.
func sampled(t *testing.T, s *slowGPU, d time.Duration, then func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		s.fakeGPU = w.gpu
		w.mu.Lock()
		w.startSampler(&Generation{Config: w.gen.Config, Sampler: s, SamplerKey: "slow", Logger: zap.NewNop()})
		w.mu.Unlock()
		pass(d)
		then(w)
	})
}

func TestK6_NoBoundButTheSamplersOwnHolds(t *testing.T) {
	s := &slowGPU{takes: map[gpu.Detail]time.Duration{gpu.Full: 50 * time.Second, gpu.Memory: 25 * time.Second}}
	sampled(t, s, 5*time.Minute, func(w *world) {
		require.Positive(t, s.full.Load())
		require.Empty(t, w.Status().Degraded, "a look of 50s is no lost telemetry, if the sampler's own time-out allows it")
	})
}

func TestSlowLooksAtEverythingLeaveRoomForLooksAtMemory(t *testing.T) {
	s := &slowGPU{takes: map[gpu.Detail]time.Duration{gpu.Full: 10 * time.Second, gpu.Memory: 5 * time.Second}}
	sampled(t, s, 10*time.Minute, func(*world) {
		require.Greater(t, s.looked()-int(s.full.Load()), 2*int(s.full.Load()))
		require.Positive(t, s.full.Load())
	})
}

func TestTelemetryThatFailsIsTakenUpAgainWhenItWorks(t *testing.T) {
	s := &slowGPU{}
	sampled(t, s, time.Minute, func(w *world) {
		w.gpu.mu.Lock()
		w.gpu.lost = errors.New("driver mismatch")
		w.gpu.mu.Unlock()
		pass(10 * time.Second)
		require.Contains(t, w.Status().Degraded, "driver mismatch")
		w.gpu.mu.Lock()
		w.gpu.lost = nil
		w.gpu.mu.Unlock()
		pass(10 * time.Second)
		require.Empty(t, w.Status().Degraded)
		var kinds []string
		for _, d := range w.Decisions() {
			kinds = append(kinds, d.Kind)
		}
		require.Contains(t, kinds, "telemetry_lost")
		require.Contains(t, kinds, "telemetry_back")
	})
}
