package scheduler

import (
	"testing"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// BenchmarkSubmitAndCancelAmongTenThousand is the way of a client that gives up in a long queue.
func BenchmarkSubmitAndCancelAmongTenThousand(b *testing.B) {
	s := New()
	now := time.Unix(1000, 0)
	s.Step(now, Configure{Config{MaxQueue: 20_000, Mode: Locked, Slots: []SlotConfig{{Name: "a", GPUs: []int{0}, Concurrency: 1}}}})
	for range 10_001 {
		s.Step(now, Submit{Slot: "a", Priority: 100, Deadline: now.Add(time.Hour)})
	}
	b.ReportAllocs()
	for b.Loop() {
		ef, _ := s.Step(now, Submit{Slot: "a", Priority: 100, Deadline: now.Add(2 * time.Hour)})
		s.Step(now, Cancel{Job: ef[0].Job})
	}
}

// BenchmarkWarm is the warm path: the slot is loaded, and nobody waits.
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
