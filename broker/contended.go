package broker

import (
	"context"
	"errors"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Contended reports whether others wait for a GPU that a running job keeps from them.
func (b *Broker) Contended(l Lease) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.closed && l.b == b && b.state.Contended(l.job)
}

// Idles asks the server of a running job whether it does nothing, whoever gave it work. A server without a busy route is
// taken for idle, one that can't be asked for busy. It waits for the server, at most probe_timeout.
func (b *Broker) Idles(l Lease) bool {
	b.mu.Lock()
	c := l.slot.consumer
	if b.closed || c == nil {
		b.mu.Unlock()
		return false
	}
	c = c.real()
	driver, timeout, target := l.driver, c.probeTimeout, b.target(l.slot)
	b.mu.Unlock()
	if driver == nil || !driver.Traits().Busy {
		return true
	}
	ctx, cancel := context.WithTimeout(b.ctx, timeout)
	defer cancel()
	busy, err := driver.Busy(ctx, target)
	return !busy && err == nil || errors.Is(err, lifecycle.ErrRefused)
}

// Cut records that a running job was cut outside the broker. The reason is kept, so it must have a bound.
func (b *Broker) Cut(l Lease, code scheduler.Code, reason string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.record(scheduler.Decision{At: time.Now(), Kind: "cut", Slot: l.slot.name, GPU: -1, Code: code, Reason: reason})
}
