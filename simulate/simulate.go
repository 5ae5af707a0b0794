// Package simulate runs the scheduler's rules over a trace of requests, in no
// time: it is the second driver of the reducer scheduler.State, with an agenda in
// place of timers, a virtual clock, and model servers that only take the time
// that theirs would. There are no goroutines, and equal seeds give equal results.
//
// What it leaves out: probes and samples are instant and exact, loads never fail,
// and a job of a server takes as long beside others as it does alone.
package simulate

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Policy is an order of service.
type Policy string

// The policies. Those beside Bounded exist here only, to be compared with it.
const (
	// Bounded is what the broker does: warm models first, within bounds.
	Bounded Policy = "bounded"
	// Collate lets warm models overtake without bound; what is idle may go, least recently used first.
	Collate Policy = "collate"
	// FIFO serves in the order of submission, whatever is loaded; the least recently used model goes.
	FIFO Policy = "fifo"
)

// Policies are all of them, in the order in which people compare them.
var Policies = []Policy{Bounded, Collate, FIFO}

// World is what the requests meet: GPUs, model servers and the broker's settings.
type World struct {
	GPUs      []gpu.Bytes      // total memory of each, by index
	Settings  scheduler.Config // its Slots are those of the consumers, and left empty
	Consumers []Consumer
}

// Consumer is a model server.
type Consumer struct {
	Slot   scheduler.SlotConfig // CanProbe, CanTell, CanBusy and Async are ignored: pretended servers answer at once
	Load   Times                // what a load takes
	Unload Times                // what an unload takes
}

// Times draws one time after the other. It must draw from r alone.
type Times func(r *rand.Rand) time.Duration

// Constant is the same time always.
func Constant(d time.Duration) Times { return func(*rand.Rand) time.Duration { return d } }

// Request is one request of a trace, or the first of several that a client sends one after the other.
type Request struct {
	At       time.Duration // when it comes, from the beginning of the trace
	Consumer string
	Client   string        // who sends it; clients of equal priority take turns
	Service  time.Duration // how long it runs, once its model is loaded
	Priority int           // lower is more urgent
	Patience time.Duration // its client leaves if it has not begun by then; 0: never
	Then     []FollowUp    // what the same client sends afterwards, whether it was served or not
}

// FollowUp is a request that its client sends after the end of the one before.
type FollowUp struct {
	Think   time.Duration // how long the client waits before
	Service time.Duration
}

// Options say how a trace is run.
type Options struct {
	Policy Policy
	Seed   uint64  // of load and unload times, and of who tries again
	Speed  float64 // the trace comes so many times as fast; 0: 1

	IgnorePriorities bool // all are treated alike, and still told apart in the result

	Tries       int           // how often a client that left, or was refused, sends a request in all; 0: once
	RetryAfter  time.Duration // how long after that it sends it again …
	RetryChance float64       // … if it does

	// How long after the last arrival the run may go on, in the trace's time; then what is left counts as
	// unfinished. 0: until all is done.
	StopAfter time.Duration
}

// Run runs a trace through a world. The requests may be in any order; they are not changed.
// It fails if a request names no consumer of the world, and when ctx ends.
func Run(ctx context.Context, w *World, requests []Request, o Options) (*Result, error) {
	r, err := newRun(w, requests, o)
	if err != nil {
		return nil, err
	}
	if err := r.run(ctx); err != nil {
		return nil, err
	}
	return r.result(), nil
}

// Check says what is wrong with a world.
func (w *World) Check() error {
	if len(w.GPUs) == 0 {
		return errors.New("there is no GPU")
	}
	seen := map[string]bool{}
	for _, c := range w.Consumers {
		if seen[c.Slot.Name] {
			return fmt.Errorf("there are two consumers named %q", c.Slot.Name)
		}
		seen[c.Slot.Name] = true
		if c.Load == nil || c.Unload == nil {
			return fmt.Errorf("consumer %q has no load and unload times", c.Slot.Name)
		}
		for _, i := range c.Slot.GPUs {
			if i < 0 || i >= len(w.GPUs) {
				return fmt.Errorf("consumer %q is on GPU %d, and there are %d", c.Slot.Name, i, len(w.GPUs))
			}
		}
	}
	return nil
}

// config is what the policy makes of the world's settings.
func (w *World) config(p Policy) scheduler.Config {
	c := w.Settings
	c.Slots = nil
	for _, consumer := range w.Consumers {
		slot := consumer.Slot
		slot.CanProbe, slot.CanTell, slot.CanBusy, slot.Async = true, true, false, false
		c.Slots = append(c.Slots, slot)
	}
	if p == Collate {
		collate(&c)
	}
	return c
}

// never is a time that no simulation reaches, and that can be doubled.
const never = 100 * 365 * 24 * time.Hour

// collate turns the bounds of the rules off: warm models overtake for ever, and
// what is idle goes at once. What is left is unbounded collation.
func collate(c *scheduler.Config) {
	none := time.Duration(0)
	c.Overtake, c.OvertakeMin, c.OvertakeMax, c.Hold, c.Credit = 0, never, never, 0, &none
	c.Slots = slices.Clone(c.Slots)
	for i := range c.Slots {
		c.Slots[i].KeepAlive, c.Slots[i].Budget = 0, 0
	}
}
