package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/nvml"
)

// The two consumers.
const (
	alpha = "alpha"
	beta  = "beta"
)

// wantChecksum is what the servers' work comes to if their memory is intact.
const wantChecksum = 3.0

// How often each kind of look at the GPU is timed.
const (
	memoryLooks = 1000
	fullLooks   = 20
	smiRuns     = 3
)

// measurer carries out the check and fills the report.
type measurer struct {
	options options
	sampler gpu.Sampler
	site    *site
	report  *report
}

func (m *measurer) all(ctx context.Context) error {
	r := m.report
	d, _, err := device(ctx, m.sampler, gpu.Full)
	if err != nil {
		return err
	}
	r.gpuName, r.total, r.freeAtStart, r.ownSampler = d.Name, d.Total, d.Free, m.sampler.Name()
	told, _, err := m.site.server(ctx, alpha)
	if err != nil {
		return err
	}
	r.serverAbout = told.About

	if r.first, err = m.swap(ctx, 0, alpha, beta); err != nil {
		return fmt.Errorf("the first load: %w", err)
	}
	target, victim := beta, alpha
	for n := range m.options.swaps {
		s, err := m.swap(ctx, n+1, target, victim)
		if err != nil {
			return fmt.Errorf("swap %d, %s for %s: %w", n+1, target, victim, err)
		}
		r.swaps = append(r.swaps, s)
		target, victim = victim, target
	}
	if err := m.counts(ctx); err != nil {
		return err
	}
	// The last target is loaded: without the broker, the other must not fit beside it.
	if r.control, err = m.site.loadPastTheBroker(ctx, target); err != nil {
		return fmt.Errorf("loading %s past the broker: %w", target, err)
	}
	r.controlled = true
	if err := m.queries(ctx); err != nil {
		return err
	}
	return m.residues(ctx, victim)
}

// swap asks for target and measures how victim makes way for it. The first
// load of all has no victim.
func (m *measurer) swap(ctx context.Context, n int, target, victim string) (swap, error) {
	ctx, cancel := context.WithTimeout(ctx, m.options.oneSwap)
	defer cancel()
	s := swap{n: n, target: target, victim: victim}
	before, _, err := device(ctx, m.sampler, gpu.Memory)
	if err != nil {
		return s, err
	}
	began := time.Now()
	points, err := watch(ctx, m.sampler, m.options.poll, func(ctx context.Context) (err error) {
		s.request, err = m.site.work(ctx, target)
		return err
	})
	if err != nil {
		return s, err
	}
	if err := m.explain(ctx, &s, began, points); err != nil {
		return s, err
	}

	after, _, err := device(ctx, m.sampler, gpu.Full)
	if err != nil {
		return s, err
	}
	free := before.Free
	if s.seen {
		free = s.release.after
	}
	s.drop = free - after.Free // from the moment before the load
	if s.held, err = m.holdings(ctx, after, target); err != nil {
		return s, err
	}
	if s.left, err = m.holdings(ctx, after, victim); err != nil {
		return s, err
	}
	// A second request finds the target resident.
	s.warm, err = m.site.work(ctx, target)
	return s, err
}

// explain finds out where a swap's time went: from the broker's decisions, from
// what the servers say of themselves, and from the points.
func (m *measurer) explain(ctx context.Context, s *swap, began time.Time, points []point) error {
	decisions, err := m.site.decisions(ctx, began)
	if err != nil {
		return err
	}
	for _, d := range decisions {
		switch {
		case d.Kind == "evicted" && d.Slot == s.victim:
			s.evicted, s.handover = s.evicted+1, seconds(d.Took)
		case d.Kind == "loaded" && d.Slot == s.target:
			s.loaded = seconds(d.Took)
		}
	}
	told, _, err := m.site.server(ctx, s.target)
	if err != nil {
		return err
	}
	s.loadCall = told.loadCall()
	if s.n == 0 {
		return nil
	}
	gone, _, err := m.site.server(ctx, s.victim)
	if err != nil {
		return err
	}
	s.unloadCall = gone.unloadCall()
	// The broker lets nothing be loaded before it has seen the memory come back.
	s.release, s.seen = released(points, moment(gone.UnloadBegan), moment(told.LoadBegan))
	s.looks = len(points)
	return nil
}

// holdings compares who says what of a server's memory.
func (m *measurer) holdings(ctx context.Context, d gpu.Device, name string) (holding, error) {
	told, how, err := m.site.server(ctx, name)
	if err != nil {
		return holding{}, err
	}
	status, err := m.site.status(ctx)
	if err != nil {
		return holding{}, err
	}
	h := holding{own: gpu.Bytes(how.Resident) * gpu.MiB, process: -1}
	for _, slot := range status.Consumers[name].Slots {
		h.claim, h.booking, h.residue = gpu.Bytes(slot.Claim), gpu.Bytes(slot.Booking), gpu.Bytes(slot.Residue)
	}
	if i := slices.IndexFunc(d.Processes, func(p gpu.Process) bool { return p.PID == told.PID }); i >= 0 {
		h.process = d.Processes[i].Used
	}
	return h, nil
}

// counts reads what must be right at the end.
func (m *measurer) counts(ctx context.Context) error {
	status, err := m.site.status(ctx)
	if err != nil {
		return err
	}
	r := m.report
	r.totals, r.caddySampler, r.caddyWhy, r.degraded = status.Scheduler, status.Sampler, status.SamplerWhy, status.Degraded
	for _, name := range []string{alpha, beta} {
		told, _, err := m.site.server(ctx, name)
		if err != nil {
			return err
		}
		r.servers.Loads += told.Loads
		r.servers.Unloads += told.Unloads
		r.servers.OOMs += told.OOMs
		r.servers.ColdWorks += told.ColdWorks
	}
	r.counted = true
	return nil
}

// queries times looks at the GPU, while both servers have it open.
func (m *measurer) queries(ctx context.Context) (err error) {
	r := m.report
	if r.memoryLook, err = timeLooks(ctx, m.sampler, gpu.Memory, memoryLooks); err != nil {
		return err
	}
	if r.fullLook, err = timeLooks(ctx, m.sampler, gpu.Full, fullLooks); err != nil {
		return err
	}
	smi, err := new(nvml.NvidiaSMI).Open(ctx, zap.NewNop())
	if err != nil {
		r.smiMissing = err.Error()
		return nil
	}
	defer func() { _ = smi.Close() }()
	if r.smiLook, err = timeLooks(ctx, smi, gpu.Memory, smiRuns); err != nil {
		r.smiMissing = err.Error()
	}
	return nil
}

// timeLooks takes n looks, each as long as it takes; the result is sorted.
func timeLooks(ctx context.Context, s gpu.Sampler, detail gpu.Detail, n int) ([]time.Duration, error) {
	times := make([]time.Duration, 0, n)
	for range n {
		began := time.Now()
		if _, err := s.Sample(ctx, detail); err != nil {
			return nil, err
		}
		times = append(times, time.Since(began))
	}
	slices.Sort(times)
	return times, nil
}

// residues unloads the last server too, and sees what stays.
func (m *measurer) residues(ctx context.Context, last string) error {
	if err := m.site.unloadByHand(ctx, last); err != nil {
		return fmt.Errorf("unloading %s by hand: %w", last, err)
	}
	d, err := m.settled(ctx)
	if err != nil {
		return err
	}
	m.report.freeAtEnd = d.Free
	m.report.residue = map[string]holding{}
	for _, name := range []string{alpha, beta} {
		if m.report.residue[name], err = m.holdings(ctx, d, name); err != nil {
			return err
		}
	}
	return nil
}

// settled is the GPU as soon as its free memory has not risen for a while:
// drivers may show freed memory late.
func (m *measurer) settled(ctx context.Context) (gpu.Device, error) {
	const quiet = 500 * time.Millisecond
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	var most gpu.Bytes
	rose := time.Now()
	for {
		d, at, err := device(ctx, m.sampler, gpu.Memory)
		switch {
		case err != nil:
			return d, err
		case d.Free > most:
			most, rose = d.Free, at
		case at.Sub(rose) >= quiet:
			d, _, err = device(ctx, m.sampler, gpu.Full)
			return d, err
		}
		select {
		case <-ctx.Done():
			return d, ctx.Err()
		case <-ticker.C:
		}
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// swap is one measured swap.
type swap struct {
	n              int
	target, victim string

	request, warm served        // through Caddy: the one that swapped, and one after it
	evicted       int           // evictions of the victim that the broker decided
	unloadCall    time.Duration // as the victim's server saw it
	handover      time.Duration // the broker's: from the unload call until it saw the memory
	loadCall      time.Duration // as the target's server saw it
	loaded        time.Duration // the broker's: from the load call until READY

	release release
	seen    bool // the memory was seen to come back
	looks   int

	drop gpu.Bytes // of the free memory, from before the load until after it
	held holding   // the target, loaded
	left holding   // the victim, unloaded
}

func (s swap) intact() bool {
	return math.Abs(s.request.checksum-wantChecksum) < 1e-3 && math.Abs(s.warm.checksum-wantChecksum) < 1e-3
}

// holding is what is said of one server's memory.
type holding struct {
	claim, booking, residue gpu.Bytes // the broker
	own                     gpu.Bytes // the server
	process                 gpu.Bytes // the driver, of its process; -1: it does not tell
}
