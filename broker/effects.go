package broker

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// effect starts what a step asks for, in a goroutine that comes back as an
// event. It holds mu.
func (b *Broker) effect(e scheduler.Effect) {
	sl := b.slots[e.Slot]
	if sl == nil || b.closed {
		return
	}
	c := sl.consumer
	switch e.Kind {
	case scheduler.Load:
		ctx, cancel := context.WithTimeout(b.ctx, c.loadTimeout)
		sl.cancelLoad = cancel
		sl.loadBegan = time.Now()
		driver, target := c.driver, b.target(sl)
		b.tasks.Go(func() { b.load(ctx, cancel, sl, driver, target, e) })
	case scheduler.StartUnload:
		if sl.cancelLoad != nil { // an abandoned load must not come back
			sl.cancelLoad()
		}
		if b.sampler != nil { // what comes back is measured against what is free now
			b.sampler.hurry()
		}
		driver, timeout, target := c.driver, c.unloadTimeout, b.target(sl)
		if c.traits.Starts { // its own route, and if that fails the process is stopped
			timeout = 2*timeout + time.Minute
		}
		b.tasks.Go(func() { b.unload(driver, timeout, target, e) })
	case scheduler.CheckBusy:
		driver, timeout, target := c.driver, c.probeTimeout, b.target(sl)
		b.tasks.Go(func() { b.checkBusy(driver, timeout, target, e) })
	case scheduler.ProbeNow:
		select {
		case c.probeNow <- struct{}{}:
		default:
		}
	case scheduler.LookNow:
		if b.sampler != nil {
			b.sampler.hurry()
		}
	case scheduler.Renew:
		if b.unloaded(c) {
			b.renew(c)
		}
	case scheduler.Dropped:
		b.forgetSlot(sl)
	}
}

// forgetSlot forgets a slot that was removed, and with the last of them its consumer. It holds mu.
func (b *Broker) forgetSlot(sl *slot) {
	c := sl.consumer
	delete(b.slots, sl.name)
	if c.turns == sl {
		c.turns = nil
	}
	c.slots = slices.DeleteFunc(c.slots, func(other *slot) bool { return other == sl })
	if len(c.slots) > 0 {
		if b.unloaded(c) { // it may have waited for this one alone
			b.renew(c)
		}
		return
	}
	for _, other := range b.slots { // one may be leaving yet
		if other.consumer == c {
			return
		}
	}
	if b.slotless(c) {
		if b.unloaded(c) {
			b.renew(c)
		}
		return
	}
	b.forgetConsumer(c)
}

// forgetConsumer forgets a consumer that has no slot any more. It holds mu.
func (b *Broker) forgetConsumer(c *consumer) {
	if b.consumers[c.name] == c { // else another has its name
		delete(b.consumers, c.name)
		delete(b.unlisted, c.name)
	}
	c.stopProbes()
	b.dropNext(c)
	if !c.closing { // else it is being closed
		b.close(c.driver)
	}
}

// target is what a slot is to its driver. It holds mu.
func (b *Broker) target(sl *slot) lifecycle.Target {
	index := sl.consumer.cfg.GPU
	t := lifecycle.Target{Model: sl.model, Digest: sl.consumer.digestOf(sl.model), Still: func() (time.Duration, bool) { return b.still(index) }}
	if !sl.consumer.traits.Starts {
		return t
	}
	claim := b.slotConfig(sl).Claim
	t.GPUs = []lifecycle.Placed{{Index: index, Claim: claim}}
	for _, d := range b.devices {
		if d.Index == index && d.Health != gpu.Lost {
			t.GPUs[0].UUID, t.GPUs[0].Total = d.UUID, d.Total
		}
	}
	return t
}

// died takes in that the server of a consumer, which its driver has started, has ended by itself.
func (b *Broker) died(name string, driver lifecycle.Driver, detail string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.withServer(name)
	if c == nil || b.closed || c.driver != driver { // another driver has taken its place, whose server it is not
		return
	}
	now, clean := time.Now(), c.endedWell()
	for _, sl := range b.allSlots(c) {
		if sl.turnOnly {
			continue
		}
		b.apply(now, scheduler.Died{Slot: sl.name, Detail: detail, Clean: clean})
	}
	b.ended()
}

func (b *Broker) load(ctx context.Context, cancel func(), sl *slot, driver lifecycle.Driver, t lifecycle.Target, e scheduler.Effect) {
	defer cancel()
	err := driver.Load(ctx, t)
	done := scheduler.LoadDone{Slot: e.Slot, Epoch: e.Epoch}
	if err != nil {
		done.Err, done.OutOfMemory, done.Partly = err.Error(), errors.Is(err, lifecycle.ErrOutOfMemory), errors.Is(err, lifecycle.ErrPartly)
	}
	b.mu.Lock()
	sl.loadEnded = time.Now()
	if sl.consumer.driver == driver {
		if errors.Is(err, lifecycle.ErrNoModel) && sl.model != "" {
			sl.consumer.miss(sl.loadEnded, sl.model)
		}
		sl.consumer.findUpstream()
		if cat := &sl.consumer.catalog; !cat.told { // it may tell its list now
			cat.at = time.Time{}
			if err != nil {
				cat.failed = sl.loadEnded
			}
		}
	}
	b.mu.Unlock()
	b.step(done)
}

func (b *Broker) unload(driver lifecycle.Driver, timeout time.Duration, t lifecycle.Target, e scheduler.Effect) {
	ctx, cancel := context.WithTimeout(b.ctx, timeout)
	defer cancel()
	confirmed, err := driver.Unload(ctx, t)
	done := scheduler.UnloadDone{Slot: e.Slot, Epoch: e.Epoch, Confirmed: confirmed}
	if err != nil {
		done.Err, done.Refused = err.Error(), errors.Is(err, lifecycle.ErrRefused)
	}
	b.step(done)
}

// checkBusy asks a server whether it works. One that does not listen does not
// work; any other failure is taken for work, since unloading would cut it.
func (b *Broker) checkBusy(driver lifecycle.Driver, timeout time.Duration, t lifecycle.Target, e scheduler.Effect) {
	if !sleep(b.ctx, e.After) {
		return
	}
	ctx, cancel := context.WithTimeout(b.ctx, timeout)
	defer cancel()
	answer := scheduler.BusyAnswer{Slot: e.Slot, Sent: time.Now()}
	busy, err := driver.Busy(ctx, t)
	answer.Failed = err != nil && !errors.Is(err, lifecycle.ErrRefused)
	answer.Busy = busy || answer.Failed
	answer.Mute = answer.Failed && !timedOut(ctx, err) && !errors.Is(err, lifecycle.ErrUnreachable)
	b.step(answer)
}

// timedOut reports whether a call to a server got no answer in time, which one that computes may not give.
func timedOut(ctx context.Context, err error) bool {
	var network net.Error
	return ctx.Err() != nil || errors.Is(err, context.DeadlineExceeded) || errors.As(err, &network) && network.Timeout()
}

// startProbes starts the loop that asks a server how it is, or tells it of a new interval. It holds mu.
func (b *Broker) startProbes(c *consumer) {
	c.stopProbes()
	if !c.traits.Health || !c.cfg.IsEnabled() || c.cfg.Cloud { // one that runs elsewhere is nobody's to watch
		return
	}
	ctx, cancel := context.WithCancel(b.ctx)
	c.stopProbes, c.probeNow = cancel, make(chan struct{}, 1) // one that has ended must not take what is meant for this one
	name, driver, interval, timeout, now := c.name, c.driver, c.interval, c.probeTimeout, c.probeNow
	b.tasks.Go(func() {
		for {
			b.probe(ctx, name, driver, timeout)
			t := time.NewTimer(interval)
			select {
			case <-ctx.Done():
				t.Stop()
				return
			case <-now:
				t.Stop()
			case <-t.C:
			}
		}
	})
}

func (b *Broker) probe(ctx context.Context, name string, driver lifecycle.Driver, timeout time.Duration) {
	// A probe may be two calls, and the driver bounds each; this is the bound of last resort.
	pctx, cancel := context.WithTimeout(ctx, 2*timeout+time.Second)
	defer cancel()
	sent := time.Now()
	r := driver.Probe(pctx)
	if b.strange(name, r.Models) {
		wait(pctx, b.ask(name))
	}
	if ctx.Err() != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.withServer(name)
	if c == nil || b.closed || ctx.Err() != nil {
		return
	}
	now := time.Now()
	c.listed = time.Time{}
	if r.Outcome == lifecycle.Answered && r.Models != nil {
		c.listed = sent
	}
	b.learnOf(now, c, r.Models)
	for _, sl := range b.allSlots(c) {
		if sl.turnOnly && c.traits.Starts {
			continue
		}
		b.apply(now, said(sl, r, sent))
	}
	b.ended()
}

// allSlots are the slots of a consumer, and after them those that were removed and serve who waits for them yet: their
// server is the same. It holds mu.
func (b *Broker) allSlots(c *consumer) []*slot {
	all := slices.Clone(c.slots)
	for _, sl := range b.slots {
		if sl.consumer == c && !slices.Contains(c.slots, sl) {
			all = append(all, sl)
		}
	}
	slices.SortFunc(all[len(c.slots):], func(x, y *slot) int { return strings.Compare(x.name, y.name) })
	return all
}

// said is what a server's report says of one of its slots.
func said(sl *slot, r lifecycle.Report, sent time.Time) scheduler.Probed {
	e := scheduler.Probed{Slot: sl.name, Sent: sent, Outcome: probeOutcomes[r.Outcome], Detail: r.Detail, Stopped: r.Stopped, Clean: r.Stopped && sl.consumer.endedWell(), Loaded: tris[r.Loaded], Resident: r.Resident}
	if sl.model == "" && !sl.turnOnly {
		return e
	}
	e.Loaded, e.Resident = scheduler.NotTold, -1
	switch {
	case sl.turnOnly:
	case r.Models != nil:
		e.Loaded = scheduler.No
		for _, m := range r.Models {
			if sl.consumer.traits.Names.Same(m.Name, sl.model) || sl.consumer.holds(m) == sl { // it may go by an alias
				e.Loaded, e.Resident = scheduler.Yes, m.Resident
			}
		}
	case r.Loaded == lifecycle.No: // nothing at all is
		e.Loaded = scheduler.No
	}
	return e
}

var (
	probeOutcomes = map[lifecycle.Outcome]scheduler.ProbeOutcome{
		lifecycle.Answered: scheduler.ProbeAnswered, lifecycle.Refused: scheduler.ProbeRefused,
		lifecycle.Wrong: scheduler.ProbeWrong, lifecycle.Unreachable: scheduler.ProbeUnreachable, lifecycle.TimedOut: scheduler.ProbeTimedOut,
	}
	tris = map[lifecycle.Tri]scheduler.Tri{lifecycle.Unknown: scheduler.NotTold, lifecycle.No: scheduler.No, lifecycle.Yes: scheduler.Yes}
)

// sleep waits for d; false: ctx ended before.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
