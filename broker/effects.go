package broker

import (
	"context"
	"errors"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// effect starts what a step asks for, in a goroutine that comes back as an
// event. It holds mu.
func (b *Broker) effect(e scheduler.Effect) {
	c := b.consumers[e.Slot]
	if c == nil || b.closed {
		return
	}
	switch e.Kind {
	case scheduler.Load:
		ctx, cancel := context.WithTimeout(b.ctx, c.loadTimeout)
		c.cancelLoad = cancel
		c.loadBegan = time.Now()
		driver := c.driver
		b.tasks.Go(func() { b.load(ctx, cancel, c, driver, e) })
	case scheduler.StartUnload:
		if c.cancelLoad != nil { // an abandoned load must not come back
			c.cancelLoad()
		}
		if b.sampler != nil { // what comes back is measured against what is free now
			b.sampler.hurry()
		}
		driver, timeout := c.driver, c.unloadTimeout
		b.tasks.Go(func() { b.unload(driver, timeout, e) })
	case scheduler.CheckBusy:
		driver, timeout := c.driver, c.probeTimeout
		b.tasks.Go(func() { b.checkBusy(driver, timeout, e) })
	case scheduler.ProbeNow:
		select {
		case c.probeNow <- struct{}{}:
		default:
		}
	case scheduler.LookNow:
		if b.sampler != nil {
			b.sampler.hurry()
		}
	case scheduler.Dropped:
		delete(b.consumers, e.Slot)
		if c.stopProbes != nil {
			c.stopProbes()
		}
		_ = c.driver.Close()
	}
}

func (b *Broker) load(ctx context.Context, cancel func(), c *consumer, driver lifecycle.Driver, e scheduler.Effect) {
	defer cancel()
	err := driver.Load(ctx)
	done := scheduler.LoadDone{Slot: e.Slot, Epoch: e.Epoch}
	if err != nil {
		done.Err, done.OutOfMemory = err.Error(), errors.Is(err, lifecycle.ErrOutOfMemory)
	}
	b.mu.Lock()
	c.loadEnded = time.Now()
	b.mu.Unlock()
	b.step(done)
}

func (b *Broker) unload(driver lifecycle.Driver, timeout time.Duration, e scheduler.Effect) {
	ctx, cancel := context.WithTimeout(b.ctx, timeout)
	defer cancel()
	confirmed, err := driver.Unload(ctx)
	done := scheduler.UnloadDone{Slot: e.Slot, Epoch: e.Epoch, Confirmed: confirmed}
	if err != nil {
		done.Err = err.Error()
	}
	b.step(done)
}

// checkBusy asks a server whether it works. One that does not listen does not
// work; any other failure is taken for work, since unloading would cut it.
func (b *Broker) checkBusy(driver lifecycle.Driver, timeout time.Duration, e scheduler.Effect) {
	if !sleep(b.ctx, e.After) {
		return
	}
	ctx, cancel := context.WithTimeout(b.ctx, timeout)
	defer cancel()
	answer := scheduler.BusyAnswer{Slot: e.Slot, Sent: time.Now()}
	busy, err := driver.Busy(ctx)
	answer.Failed = err != nil && !errors.Is(err, lifecycle.ErrRefused)
	answer.Busy = busy || answer.Failed
	b.step(answer)
}

// startProbes starts the loop that asks a server how it is, or tells it of a new interval. It holds mu.
func (b *Broker) startProbes(c *consumer) {
	if c.stopProbes != nil {
		c.stopProbes()
		c.stopProbes = nil
	}
	if !c.traits.Health || !c.cfg.IsEnabled() || c.cfg.Cloud { // one that runs elsewhere is nobody's to watch
		return
	}
	ctx, cancel := context.WithCancel(b.ctx)
	c.stopProbes = cancel
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
	if ctx.Err() != nil {
		return
	}
	b.step(scheduler.Probed{Slot: name, Sent: sent, Outcome: probeOutcomes[r.Outcome], Detail: r.Detail, Loaded: tris[r.Loaded], Resident: r.Resident})
}

var (
	probeOutcomes = map[lifecycle.Outcome]scheduler.ProbeOutcome{
		lifecycle.Answered: scheduler.ProbeAnswered, lifecycle.Refused: scheduler.ProbeRefused,
		lifecycle.Wrong: scheduler.ProbeWrong, lifecycle.TimedOut: scheduler.ProbeTimedOut,
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
