package broker

import (
	"context"
	"errors"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// errStopping is the error of what is asked of a broker that ends.
var errStopping = errors.New("the broker is stopping")

// Followed are decisions in the order in which they were made, for one who follows them.
type Followed struct {
	Decisions []scheduler.Decision
	Last      uint64 // the number of the last of them; the first decision of a process has number 1
	Missed    uint64 // how many since the number asked for are not kept any more
}

// Follow waits for decisions with numbers above after, and returns those that
// there are: at once if there are some, and after at most wait if there are none
// then. Its error is the context's, or says that the process ends.
func (b *Broker) Follow(ctx context.Context, after uint64, wait time.Duration) (Followed, error) {
	timeout := time.NewTimer(wait)
	defer timeout.Stop()
	for {
		b.mu.Lock()
		out, changed := b.records.since(after), b.changed
		over := b.closed || b.state.Ending() != nil
		b.mu.Unlock()
		switch {
		case len(out.Decisions) > 0:
			return out, nil
		case over:
			return out, errStopping
		}
		select {
		case <-changed:
		case <-timeout.C:
			return out, nil
		case <-ctx.Done():
			return out, context.Cause(ctx)
		case <-b.ctx.Done():
			return out, errStopping
		}
	}
}

// wakeFollowers lets those look who wait for a decision: that the process ends is none.
func (b *Broker) wakeFollowers() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.changed)
	b.changed = make(chan struct{})
}

// Recorded is the number of the last decision, or 0.
func (b *Broker) Recorded() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.records.count
}

// since are the decisions with numbers above after. One from another process may be above all.
func (r *ring) since(after uint64) Followed {
	if after > r.count {
		after = 0
	}
	fresh := r.count - after
	out := Followed{Last: r.count}
	if n := min(r.count, ringSize); fresh > n {
		out.Missed, fresh = fresh-n, n
	}
	for i := int(fresh); i > 0; i-- { // no more of them: the broker stands still meanwhile
		out.Decisions = append(out.Decisions, r.items[(r.next-i+ringSize)%ringSize])
	}
	return out
}
