package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// A cloud slot (spec §4.7).

func inTheSky(name string) SlotConfig {
	return SlotConfig{Name: name, Cloud: true, Concurrency: 1}
}

func TestACloudSlotRunsAtOnceWhateverWaits(t *testing.T) {
	f := given(t, 16384, server("v", 10000), server("t", 10000), inTheSky("sky"))
	f.reconfigure(func(c *Config) { c.MaxQueue = 2 })
	f.warm("v", 10000)
	f.ask("v", 1)
	f.ask("v", 1)
	f.ask("t", 1)
	require.Equal(t, 2, f.s.Snapshot(f.now).Waiting)
	one, two := f.ask("sky", 200), f.ask("sky", 200) // neither the queue nor concurrency
	f.requireRunning(one, two)
	require.Equal(t, Admit, f.step(Submit{Slot: "sky", Priority: 100, IfFree: true})[0].Kind)
	require.Equal(t, "v", f.s.Snapshot(f.now).GPUs[0].Owner, "it takes no lock")
	f.release(one)
	require.Equal(t, Ready, f.slot("sky").State)
	f.step(Lend{GPU: 0, Until: f.now.Add(time.Hour)})
	f.requireRunning(f.ask("sky", 100))
	f.cards[0].Lost, f.cards[0].Reason = true, "fell off the bus"
	f.sample()
	f.requireRunning(f.ask("sky", 100))
	f.advance(24 * time.Hour)
	f.requireUnloads()
}

func TestACloudSlotIsRefusedWhenItsServerIsUnhealthyOrDrained(t *testing.T) {
	f := given(t, 16384, SlotConfig{Name: "sky", Cloud: true, CanProbe: true}, inTheSky("other"))
	f.step(Probed{Slot: "sky", Sent: f.now, Outcome: ProbeWrong, Detail: "status 500"})
	f.requireRefused(f.ask("sky", 100), Unhealthy)
	f.step(Drain{Slot: "other"})
	f.requireRefused(f.ask("other", 100), Draining)
}

func TestTheRecordNamesNoGPUForACloudSlot(t *testing.T) {
	f := given(t, 16384, SlotConfig{Name: "sky", Cloud: true, CanProbe: true})
	f.step(Probed{Slot: "sky", Sent: f.now, Outcome: ProbeWrong, Detail: "status 500"})
	require.Equal(t, -1, f.decided("unhealthy", "sky").GPU)
}

func TestACloudSlotLetsNoClientRest(t *testing.T) {
	f := given(t, 16384, inTheSky("sky"), lazyServer("v", 10000))
	f.reconfigure(restful)
	f.requireRunning(f.of("a", "sky"), f.of("a", "sky"))
	h := f.of("a", "v") // nor does it count as a start elsewhere
	f.requireRunning(h)
	f.requireRunning(f.of("a", "sky"))
	f.release(h)
	f.requireWaiting(f.of("a", "v"))
	f.requireRunning(f.of("a", "sky"))
}

func TestACloudSlotNeedsNoTelemetry(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{inTheSky("sky")}
	f := &fixture{t: t, s: New(), now: time.Unix(1_000_000, 0), jobs: map[JobID]*handle{}, epochs: map[string]uint64{}}
	f.configure(cfg)
	f.requireRunning(f.ask("sky", 100))
	f.step(Sampled{At: f.now, Lost: "no driver"})
	f.requireRunning(f.ask("sky", 100))
	require.Equal(t, gpu.Bytes(0), f.slot("sky").Claim)
}

func TestACloudSlotIsGivenNoLockByAReload(t *testing.T) {
	f := given(t, 16384, lazyServer("v", 10000), inTheSky("sky"))
	f.warm("v", 10000)
	f.requireRunning(f.ask("sky", 100))
	f.reconfigure(func(c *Config) { c.LockGlobal = true })
	require.Empty(t, f.s.Snapshot(f.now).GPUs[0].Owner)
	f.requireRunning(f.ask("v", 100))
}
