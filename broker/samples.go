package broker

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Rates of sampling (spec §7.7).
const (
	sampleInterval = 2 * time.Second
	fastInterval   = 50 * time.Millisecond
	openRetry      = 10 * time.Second
	// fullShare bounds the share of time that full looks may take: one in so many.
	fullShare = 4
)

// samplerLoop is the goroutine that looks at the GPUs, and how to talk to it.
type samplerLoop struct {
	key    string
	cancel context.CancelFunc
	fast   chan struct{} // cap 1: look at once
	name   string        // guarded by the broker's mutex
	why    string        // guarded by the broker's mutex

	// Of its goroutine.
	first   bool // no look has ended yet
	failing bool // the last look failed
}

func (l *samplerLoop) hurry() {
	select {
	case l.fast <- struct{}{}:
	default:
	}
}

// startSampler starts the loop of a generation's sampler, unless it runs already. It holds mu.
func (b *Broker) startSampler(g *Generation) {
	if b.sampler != nil {
		if b.sampler.key == g.SamplerKey {
			return
		}
		b.sampler.cancel()
	}
	ctx, cancel := context.WithCancel(b.ctx)
	l := &samplerLoop{key: g.SamplerKey, cancel: cancel, fast: make(chan struct{}, 1)}
	b.sampler = l
	b.tasks.Go(func() { b.sample(ctx, l, g) })
}

// sample opens the sampler and looks at the GPUs until ctx ends.
func (b *Broker) sample(ctx context.Context, l *samplerLoop, g *Generation) {
	var s gpu.Sampler
	for s == nil {
		opened, err := g.Sampler.Open(ctx, g.Logger)
		if err == nil {
			s = opened
			break
		}
		if ctx.Err() != nil {
			return
		}
		b.logger().Error("no GPU telemetry: trying again", zap.Error(err), zap.Duration("in", openRetry))
		b.takeIn(ctx, l, scheduler.Sampled{At: time.Now(), Lost: err.Error()}, nil)
		if !sleep(ctx, openRetry) {
			return
		}
	}
	defer func() { _ = s.Close() }()
	b.logger().Info("GPU telemetry", zap.String("sampler", s.Name()), zap.String("why", s.Why()))
	b.mu.Lock()
	l.name, l.why = s.Name(), s.Why()
	b.mu.Unlock()

	full := time.Time{} // when the next full look is due
	l.first = true
	for {
		detail, began := gpu.Memory, time.Now()
		if !began.Before(full) {
			detail = gpu.Full
		}
		b.look(ctx, l, s, detail)
		if detail == gpu.Full { // where looks are slow, those at the memory alone come between
			full = began.Add(max(sampleInterval, fullShare*time.Since(began)))
		}
		wait := sampleInterval
		if b.hurried() {
			wait = max(fastInterval, s.MinInterval())
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-l.fast:
			t.Stop()
		case <-t.C:
		}
	}
}

func (b *Broker) hurried() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state.FastSampling()
}

// look takes one sample into the state. How long it may take is the sampler's own affair.
func (b *Broker) look(ctx context.Context, l *samplerLoop, s gpu.Sampler, detail gpu.Detail) {
	sample, err := s.Sample(ctx, detail)
	if ctx.Err() != nil {
		return
	}
	b.tellTelemetry(l, sample.Devices, err)
	if err != nil {
		b.takeIn(ctx, l, scheduler.Sampled{At: time.Now(), Lost: err.Error()}, nil)
		return
	}
	e := scheduler.Sampled{At: sample.At}
	owners := b.owners()
	for _, d := range sample.Devices {
		e.Devices = append(e.Devices, device(d, owners))
	}
	b.takeIn(ctx, l, e, func() {
		l.name, l.why = s.Name(), s.Why() // auto may have found another way
		for _, d := range sample.Devices {
			b.noteFree(d, sample.At)
			maps.DeleteFunc(b.devices, func(uuid string, was gpu.Device) bool { return was.Index == d.Index && uuid != d.UUID })
			if detail == gpu.Full {
				b.devices[d.UUID] = d
			}
		}
	})
}

// takeIn takes a look of a sampler into the state, unless another has taken the sampler's place meanwhile: GPUs that only the old one
// lists would be there again for good. note, which may be nil, runs with it and holds mu.
func (b *Broker) takeIn(ctx context.Context, l *samplerLoop, e scheduler.Sampled, note func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || ctx.Err() != nil {
		return
	}
	if e.Lost == "" {
		if e.First, l.first = l.first, false; e.First { // of GPUs of another sampler
			clear(b.devices)
			clear(b.stillness)
		}
	}
	if note != nil {
		note()
	}
	b.apply(time.Now(), e)
	b.ended()
}

// jitter is by how much free memory may differ from one look to the next and still count as not moving.
const jitter = 64 * gpu.MiB

// stillness is since when the free memory of a GPU has not moved.
type stillness struct {
	free  gpu.Bytes // at the beginning
	since time.Time
	last  time.Time // of the latest look
}

// noteFree takes in a reading of a GPU. It holds mu.
func (b *Broker) noteFree(d gpu.Device, at time.Time) {
	s := b.stillness[d.Index]
	switch moved := d.Free - s.free; {
	case !d.MemoryKnown || d.Health == gpu.Lost:
		delete(b.stillness, d.Index)
		return
	case s.since.IsZero() || moved > jitter || moved < -jitter:
		s.free, s.since = d.Free, at
	}
	s.last = at
	b.stillness[d.Index] = s
}

// still reports for how long the free memory of a GPU has not moved, as far as looks tell; false: it is not known.
func (b *Broker) still(index int) (time.Duration, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s, known := b.stillness[index]
	return s.last.Sub(s.since), known
}

// tellTelemetry logs what the record of decisions can't have: telemetry that fails before any GPU
// is known, and GPUs whose memory could not be read from the start.
func (b *Broker) tellTelemetry(l *samplerLoop, devices []gpu.Device, err error) {
	switch {
	case err != nil && !l.failing:
		b.logger().Warn("GPU telemetry fails: the broker counts with what it knows until it works again", zap.Error(err))
	case err == nil && l.failing:
		b.logger().Info("GPU telemetry works again")
	}
	l.failing = err != nil
	for _, d := range devices {
		if l.first && !d.MemoryKnown && d.Total > 0 && d.Health != gpu.Lost {
			b.logger().Warn("the memory of a GPU is not read: the broker counts with configured sizes", zap.Int("gpu", d.Index), zap.String("reason", d.Reason))
		}
	}
}

// owner is a consumer whose processes can be told from others.
type owner struct {
	slot string
	gpu  int
	owns func(gpu.Process) bool
}

// owners are the consumers whose memory can be measured: what runs in the process of one with models can't be told apart.
func (b *Broker) owners() (out []owner) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, cc := range b.current.Load().Config.Consumers {
		c := b.consumers[cc.Name]
		if c == nil || c.partner != nil || c.cfg.HasModels() {
			continue
		}
		o := owner{slot: c.name, gpu: c.cfg.GPU}
		sup, supervised := c.driver.(lifecycle.Supervisor)
		switch names := c.cfg.Processes; {
		case len(names) > 0:
			o.owns = func(p gpu.Process) bool {
				return slices.Contains(names, p.Name) || slices.Contains(names, path.Base(p.Name))
			}
		case supervised:
			o.owns = func(p gpu.Process) bool { return sup.Owns(p.PID) }
		default:
			continue
		}
		out = append(out, o)
	}
	return out
}

// device turns a reading into the scheduler's words: which memory is whose, as far as processes tell.
func device(d gpu.Device, owners []owner) scheduler.Device {
	out := scheduler.Device{Index: d.Index, UUID: d.UUID, Name: d.Name, Total: d.Total, Free: d.Free, Known: d.MemoryKnown,
		Unified: d.Unified, Lost: d.Health == gpu.Lost, Reason: d.Reason}
	if !d.ProcessesKnown {
		return out
	}
	out.Measured = map[string]gpu.Bytes{}
	out.Outsiders = []string{}
	strangers := slices.Clone(d.Processes)
	for _, o := range owners {
		if o.gpu != d.Index {
			continue
		}
		var sum gpu.Bytes
		known := true
		strangers = slices.DeleteFunc(strangers, func(p gpu.Process) bool {
			if !o.owns(p) {
				return false
			}
			known = known && p.Used >= 0
			sum += max(0, p.Used)
			return true
		})
		if known {
			out.Measured[o.slot] = sum
		}
	}
	slices.SortFunc(strangers, func(a, b gpu.Process) int { return cmp.Compare(b.Used, a.Used) })
	for _, p := range strangers[:min(len(strangers), 5)] {
		out.Outsiders = append(out.Outsiders, fmt.Sprintf("PID %d %s", p.PID, path.Base(p.Name)))
	}
	return out
}
