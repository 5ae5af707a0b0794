package scheduler

import (
	"testing"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestSmoke(t *testing.T) {
	s := New()
	now := time.Unix(1000, 0)
	s.Step(now, Configure{Config{MaxQueue: 10, MaxEvictions: 5, EvictWait: 10 * time.Second, DrainTimeout: time.Minute, OutsiderWait: 10 * time.Second, AbandonAfter: 10 * time.Second,
		Overtake: 15, OvertakeMin: 30 * time.Second, OvertakeMax: 600 * time.Second, LockOvertake: 20 * time.Second,
		Slots: []SlotConfig{
			{Name: "mvoice", GPUs: []int{0}, Claim: 2868 * gpu.MiB, Concurrency: 1, CanLoad: true, CanUnload: true, CanProbe: true, CanTell: true},
			{Name: "comfyui", GPUs: []int{0}, Claim: 13312 * gpu.MiB, Concurrency: 1, CanUnload: true, CanProbe: true, CanBusy: true, Async: true},
		}}})
	dump := func(what string, ef []Effect, w time.Time) {
		t.Log(what, "wake", w.Sub(now))
		for _, e := range ef {
			if e.Decision != nil {
				t.Log("   decided", e.Decision.Kind, e.Slot, e.Decision.Reason)
			} else {
				t.Log("  ", e.Kind, e.Slot, e.Job, e.Epoch, e.Refusal)
			}
		}
	}
	step := func(e Event) []Effect {
		ef, w := s.Step(now, e)
		dump("", ef, w)
		return ef
	}
	free := gpu.Bytes(16084)
	sample := func() {
		step(Sampled{At: now, Devices: []Device{{UUID: "a", Total: 16384 * gpu.MiB, Free: free * gpu.MiB, Known: true}}})
	}
	sample()
	step(Probed{Slot: "mvoice", Sent: now, Loaded: No, Resident: -1})
	step(Probed{Slot: "comfyui", Sent: now, Resident: -1})
	now = now.Add(time.Second)
	j := step(Submit{Slot: "comfyui"})[0].Job
	now = now.Add(time.Second)
	free = 2772
	sample()
	step(Submit{Slot: "mvoice"})
	now = now.Add(time.Second)
	step(Release{Job: j, Outcome: Accepted})
	step(BusyAnswer{Slot: "comfyui", Sent: now})
	step(BusyAnswer{Slot: "comfyui", Sent: now})
	step(UnloadDone{Slot: "comfyui", Epoch: 1})
	now = now.Add(time.Second)
	sample()
	free = 16000
	now = now.Add(time.Second)
	sample()
	now = now.Add(time.Second)
	step(LoadDone{Slot: "mvoice", Epoch: 1})
	t.Logf("%+v", s.Snapshot())
}

func BenchmarkWarm(b *testing.B) {
	s := New()
	now := time.Unix(1000, 0)
	s.Step(now, Configure{Config{MaxQueue: 10, Mode: Locked, Slots: []SlotConfig{{Name: "a", GPUs: []int{0}, Concurrency: 1}}}})
	s.Step(now, Sampled{At: now, Devices: []Device{{UUID: "a", Total: 16384 * gpu.MiB, Free: 16384 * gpu.MiB, Known: true}}})
	b.ReportAllocs()
	for b.Loop() {
		ef, _ := s.Step(now, Submit{Slot: "a", Priority: 100})
		s.Step(now, Release{Job: ef[0].Job})
	}
}
