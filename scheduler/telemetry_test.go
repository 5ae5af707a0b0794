package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestK6_AnUnknownTotalIsNeverAPermanentRefusal(t *testing.T) {
	for name, d := range map[string]Device{
		"nothing is told":           {UUID: "GPU-0", Reason: "the driver says [Unknown Error]"},
		"no reason either":          {UUID: "GPU-0"},
		"free memory without total": {UUID: "GPU-0", Free: gpu.GiB, Known: true},
		"the driver says lost":      {UUID: "GPU-0", Lost: true, Reason: "it needs a reset"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := defaults()
			cfg.Slots = []SlotConfig{server("a", 9000)}
			f := givenConfig(t, cfg)
			f.probe("a", No)
			f.cards = []Device{d}
			f.sample()
			r := f.requireRefused(f.submit("a"), GPULost)
			require.NotZero(t, r.RetryAfter)
			g := f.s.Snapshot(f.now).GPUs[0]
			require.True(t, g.Lost)
			require.NotEmpty(t, g.Reason)
			if d.Reason != "" {
				require.Contains(t, r.Message, d.Reason)
			}
			if !d.Lost {
				require.Contains(t, r.Message, "gpu auto { fallback 24GiB }")
			}

			f.cards[0] = Device{UUID: "GPU-0", Total: 16 * gpu.GiB, Free: 16 * gpu.GiB, Known: true}
			f.sample()
			f.submit("a")
			f.loaded("a")
			f.requireRunning(f.lastJob("a"))
			require.NotEmpty(t, f.said("gpu_back"))
		})
	}
}

func TestK6_ATotalThatWasReadOnceStaysKnown(t *testing.T) {
	f := given(t, 16384, server("a", 9000), server("b", 9000))
	f.warm("a", 9000)
	f.cards[0] = Device{UUID: "GPU-0", Reason: "insufficient permissions"}
	f.sample()
	require.Equal(t, "insufficient permissions", f.s.Snapshot(f.now).Degraded)
	require.Len(t, f.said("telemetry_lost"), 1)
	f.requireRunning(f.submit("a"))
	f.release(f.lastJob("a"))
	f.submit("b")
	f.advance(time.Minute) // configured sizes say that a must go
	f.requireUnloads("a")
	f.sample()
	require.Len(t, f.said("telemetry_lost"), 1, "it is recorded once")

	f.cards[0] = Device{UUID: "GPU-0", Total: 16 * gpu.GiB, Free: 16 * gpu.GiB, Known: true}
	f.sample()
	require.Empty(t, f.s.Snapshot(f.now).Degraded)
	require.Len(t, f.said("telemetry_back"), 1)
}

// blinded is a GPU of 16 GiB without telemetry, and free MiB of which are told again by sight.
func blinded(t *testing.T, slots ...SlotConfig) (f *fixture, sight func(free gpu.Bytes)) {
	f = given(t, 16384, slots...)
	f.cards[0] = Device{UUID: "GPU-0", Total: 16 * gpu.GiB, Reason: "insufficient permissions"}
	f.sample()
	return f, func(free gpu.Bytes) {
		f.cards[0] = Device{UUID: "GPU-0", Total: 16 * gpu.GiB, Free: free * gpu.MiB, Known: true}
		f.sample()
	}
}

func TestK6_WhatWasLoadedWithoutTelemetryIsNoOutsidersMemoryWhenItIsBack(t *testing.T) {
	t.Run("while it loads", func(t *testing.T) {
		f, sight := blinded(t, server("a", 9000), server("b", 9000))
		f.submit("a")
		sight(16384 - 5000)
		require.Zero(t, f.outsiders())
		b := f.submit("b")
		for range 12 {
			f.look(time.Second)
		}
		f.requireWaiting(b)
		f.use(4000)
		f.loaded("a")
		f.release(f.lastJob("a"))
		for range 5 { // its load took so long that it holds its place for a while
			f.look(time.Second)
		}
		f.evicted("a", 9000)
		f.loaded("b")
		f.requireRunning(b)
	})
	t.Run("its first job has not ended", func(t *testing.T) {
		f, sight := blinded(t, server("a", 9000))
		f.submit("a")
		f.loaded("a")
		sight(16384 - 9400)
		require.EqualValues(t, 400, f.outsiders())
	})
	t.Run("its first job ended after the look", func(t *testing.T) {
		f, _ := blinded(t, server("a", 9000), server("b", 9000))
		a := f.submit("a")
		f.loaded("a")
		seen := f.now
		f.advance(time.Second)
		f.release(a)
		f.cards[0] = Device{UUID: "GPU-0", Total: 16 * gpu.GiB, Free: 7384 * gpu.MiB, Known: true}
		f.step(Sampled{At: seen, Devices: f.cards})
		require.Zero(t, f.outsiders())
		b := f.submit("b")
		f.evicted("a", 9000)
		f.loaded("b")
		f.requireRunning(b)
	})
	t.Run("its load fails and leaves some behind", func(t *testing.T) {
		f, sight := blinded(t, server("a", 9000))
		a := f.submit("a")
		sight(16384 - 3000)
		f.loadFails("a", "exit status 1")
		f.requireRefused(a, LoadFailed)
		f.look(time.Second)
		require.Zero(t, f.outsiders())
		f.use(-3000)
		f.look(time.Second)
		require.Zero(t, f.slot("a").Holds[0].Residue)
	})
}

func TestK6_AGPUThatIsIdentifiedLaterTakesThePlaceOfItsStandIn(t *testing.T) {
	for name, standIn := range map[string]Device{
		"it did not answer at first": {UUID: "index-0", Lost: true, Reason: "GPU is lost"},
		"its size was declared":      {UUID: "GPU-declared-0", Total: 16 * gpu.GiB, Reason: "declared"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := defaults()
			cfg.Slots = []SlotConfig{server("a", 9000)}
			f := givenConfig(t, cfg)
			f.probe("a", No)
			f.cards = []Device{standIn}
			f.sample()
			f.cards = []Device{{UUID: "GPU-real", Total: 16 * gpu.GiB, Free: 16 * gpu.GiB, Known: true}}
			f.sample()
			gpus := f.s.Snapshot(f.now).GPUs
			require.Len(t, gpus, 1)
			require.Equal(t, "GPU-real", gpus[0].UUID)
			require.False(t, gpus[0].Lost)
			f.submit("a")
			f.loaded("a")
			f.requireRunning(f.lastJob("a"))
		})
	}
}

func TestK6_ALostGPUDoesNotHideTheOneThatGotItsIndex(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 9000)}
	f := givenConfig(t, cfg)
	f.probe("a", No)
	f.cards = []Device{
		{UUID: "GPU-gone", Lost: true, Total: 16 * gpu.GiB, Reason: "the driver no longer lists it"},
		{UUID: "GPU-there", Total: 16 * gpu.GiB, Free: 16 * gpu.GiB, Known: true},
	}
	f.sample()
	f.submit("a")
	f.loaded("a")
	f.requireRunning(f.lastJob("a"))
}

func TestN5_ARefusalListsTheGPUsThatThereAre(t *testing.T) {
	for want, totals := range map[string][]gpu.Bytes{
		"wants GPU 3, and there is GPU 0 only":                 {16384},
		"wants GPU 3, and there are GPU 0 and GPU 1 only":      {16384, 16384},
		"wants GPU 3, and there are GPU 0, GPU 1 and GPU 2 on": {1, 2, 3},
		"no GPU is known: the driver lists none; to serve by":  {},
	} {
		cfg := defaults()
		cfg.Slots = []SlotConfig{server("a", 9000, on(3))}
		f := givenConfig(t, cfg, totals...)
		f.probe("a", No)
		r := f.requireRefused(f.submit("a"), GPULost)
		require.Contains(t, r.Message, want)
		require.NotZero(t, r.RetryAfter)
	}
}

func TestN5_WithoutAnyTelemetryTheRefusalSaysWhyAndWhatToWrite(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 9000)}
	f := givenConfig(t, cfg)
	f.probe("a", No)
	f.blind = "nvidia-smi is not found"
	f.sample()
	r := f.requireRefused(f.submit("a"), GPULost)
	require.Contains(t, r.Message, "nvidia-smi is not found")
	require.Contains(t, r.Message, "gpu auto { fallback 24GiB }")
}

// That nothing can be read any more is no reason for the loss of a GPU.
func TestWhyAGPUIsLostIsNotForgottenWhileNothingCanBeRead(t *testing.T) {
	f := given(t, 16384, server("a", 1000))
	f.cards[0].Lost, f.cards[0].Reason = true, "it needs a reset"
	f.sample()
	f.blind = "the driver does not answer"
	f.sample()
	require.Contains(t, f.requireRefused(f.submit("a"), GPULost).Message, `GPU 0 of consumer "a" is lost: it needs a reset`)
	f.blind, f.cards[0].Lost, f.cards[0].Reason = "", false, ""
	f.sample()
	f.submit("a")
	f.requireState("a", Loading)
}
