package broker

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

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

func TestFreeMemoryIsStillUntilItMovesByMoreThanTheJitter(t *testing.T) {
	b := New()
	defer b.Close()
	at := time.Unix(1000, 0)
	look := func(free gpu.Bytes, change ...func(d *gpu.Device)) {
		at = at.Add(time.Second)
		d := gpu.Device{Index: 1, Free: free, MemoryKnown: true, Health: gpu.Healthy}
		for _, f := range change {
			f(&d)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.noteFree(d, at)
	}
	still := func(want time.Duration, why string) {
		t.Helper()
		got, known := b.still(1)
		require.True(t, known, why)
		require.Equal(t, want, got, why)
	}
	unknown := func(why string) {
		t.Helper()
		_, known := b.still(1)
		require.False(t, known, why)
	}
	unknown("nobody has looked")
	look(8 * gpu.GiB)
	still(0, "the first look")
	look(8*gpu.GiB + 64*gpu.MiB)
	look(8*gpu.GiB - 64*gpu.MiB)
	still(2*time.Second, "so much is no movement")
	look(8*gpu.GiB - 64*gpu.MiB - 1)
	still(0, "it was taken, since the beginning")
	look(8*gpu.GiB - 1)
	still(time.Second, "a jitter about what it is now")
	look(9 * gpu.GiB)
	still(0, "it came back")
	look(9 * gpu.GiB)
	still(time.Second, "")
	_, known := b.still(0)
	require.False(t, known, "another GPU")
	look(9*gpu.GiB, func(d *gpu.Device) { d.Health = gpu.Lost })
	unknown("it is lost")
	look(9 * gpu.GiB)
	still(0, "it is back")
	look(9*gpu.GiB, func(d *gpu.Device) { d.MemoryKnown = false })
	unknown("its memory is not read")
}

func TestAProcessIsTheConsumersThatOwnsItAndElseAnOutsiders(t *testing.T) {
	d := gpu.Device{Index: 1, UUID: "GPU-2", Total: 16, Free: 9, MemoryKnown: true, Health: gpu.Healthy}
	named := func(names ...string) func(gpu.Process) bool {
		return func(p gpu.Process) bool { return slices.Contains(names, p.Name) }
	}
	owners := []owner{{slot: "elsewhere", gpu: 0, owns: named("game")}, {slot: "a", gpu: 1, owns: named("a", "worker")}, {slot: "b", gpu: 1, owns: named("b")}, {slot: "none", gpu: 1, owns: named("none")}}
	require.Nil(t, device(d, owners).Measured, "the driver lists no processes")
	require.Nil(t, device(d, owners).Outsiders)
	d.ProcessesKnown = true
	d.Processes = []gpu.Process{{PID: 1, Name: "a", Used: 2 * gpu.GiB}, {PID: 2, Name: "worker", Used: gpu.GiB}, {PID: 3, Name: "b", Used: -1}, {PID: 4, Name: "none"}}
	for i := range 6 {
		d.Processes = append(d.Processes, gpu.Process{PID: 10 + i, Name: "/usr/bin/game", Used: gpu.Bytes(i) * gpu.GiB})
	}
	got := device(d, owners)
	require.Equal(t, map[string]gpu.Bytes{"a": 3 * gpu.GiB, "none": 0}, got.Measured, "how much b has is not told")
	require.Equal(t, []string{"PID 15 game", "PID 14 game", "PID 13 game", "PID 12 game", "PID 11 game"}, got.Outsiders, "the five largest")
	require.Equal(t, 1, got.Index)
	require.False(t, got.Lost)
	d.Health = gpu.Lost
	require.True(t, device(d, owners).Lost)
}

func TestGPUsThatAnotherSamplerDoesNotListAreGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zapcore.WarnLevel)
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		pass(10 * time.Second)
		require.Equal(t, 1, w.Status().GPUCount)
		next := w.generation(t, nil, server("a", 4*gpu.GiB))
		next.Logger = zap.New(core)
		next.Sampler = &fakeGPU{total: 8 * gpu.GiB, tells: func(d *gpu.Device) {
			d.UUID, d.Index, d.MemoryKnown, d.Reason = "GPU-X", 5, false, "not supported"
		}}
		next.SamplerKey = "another"
		w.reload(t, next)
		pass(time.Minute)
		require.Len(t, w.Status().GPUs, 1)
		require.Equal(t, "GPU-X", w.Status().GPUs[0].UUID)
		said := logs.FilterMessageSnippet("the memory of a GPU is not read").All()
		require.Len(t, said, 1, "once")
		require.Equal(t, "not supported", said[0].ContextMap()["reason"])
		require.EqualValues(t, 5, said[0].ContextMap()["gpu"])
	})
}

// elsewhere is a generation like w's whose sampler knows another GPU.
func (w *world) elsewhere(t *testing.T) (*Generation, *fakeGPU) {
	t.Helper()
	other := &fakeGPU{total: 8 * gpu.GiB, tells: func(d *gpu.Device) { d.UUID, d.Index = "GPU-X", 5 }}
	next := w.generation(t, nil, server("a", 4*gpu.GiB))
	next.Sampler, next.SamplerKey = other, "another"
	return next, other
}

func TestGPUsAreGoneThoughTheNewSamplerFailsAtFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		pass(11 * time.Second)
		next, other := w.elsewhere(t)
		other.fail(errors.New("not yet"))
		w.reload(t, next)
		pass(10 * time.Second)
		require.Contains(t, w.Status().Degraded, "not yet")
		other.fail(nil)
		pass(10 * time.Second)
		require.Len(t, w.Status().GPUs, 1)
		require.Equal(t, "GPU-X", w.Status().GPUs[0].UUID)
	})
}

// The old sampler's look is taken in while the new one has looked already: here it is held up where it logs.
func TestALookOfAReplacedSamplerIsNotTakenIn(t *testing.T) {
	for name, c := range map[string]struct{ logs, fault string }{
		"that sees GPUs": {logs: "GPU telemetry works again"},
		"that fails":     {logs: "GPU telemetry fails", fault: "it is gone"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, nil, server("a", 4*gpu.GiB))
				defer w.Close()
				pass(11 * time.Second)
				next, _ := w.elsewhere(t)
				var once sync.Once
				held := make(chan struct{})
				here := w.generation(t, nil, server("a", 4*gpu.GiB))
				here.Logger = zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(io.Discard), zapcore.DebugLevel), zap.Hooks(func(e zapcore.Entry) error {
					if strings.HasPrefix(e.Message, c.logs) {
						once.Do(func() {
							w.reload(t, next)
							pass(time.Millisecond) // the new sampler looks
							close(held)
						})
					}
					return nil
				}))
				w.reload(t, here)
				w.gpu.fail(errors.New("it is gone"))
				if c.fault == "" {
					pass(10 * time.Second)
					w.gpu.fail(nil)
				}
				<-held
				synctest.Wait()
				status := w.Status()
				require.Empty(t, status.Degraded)
				require.Len(t, status.GPUs, 1)
				require.Equal(t, "GPU-X", status.GPUs[0].UUID)
			})
		})
	}
}

func TestADriverIsToldForHowLongTheFreeMemoryHasNotMoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", gpu.GiB))
		defer w.Close()
		pass(time.Minute)
		w.mu.Lock()
		still := w.target(w.slots["a"]).Still
		w.mu.Unlock()
		d, known := still()
		require.True(t, known)
		require.GreaterOrEqual(t, d, 50*time.Second)
		w.gpu.move(gpu.GiB)
		pass(10 * time.Second)
		d, known = still()
		require.True(t, known)
		require.LessOrEqual(t, d, 10*time.Second)
	})
}
