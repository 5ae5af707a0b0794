package broker

import (
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Observer is told what is decided, for metrics and events.
type Observer interface {
	// Count is called under the broker's lock, for every decision: it must not block.
	Count(d scheduler.Decision)
	// Resided is called under the broker's lock, when a slot that was loaded for so long is not any more: it must not block.
	Resided(slot string, stayed time.Duration)
	// Decided is called from one goroutine, in order, under no lock. In a flood of decisions some are left out.
	Decided(d scheduler.Decision)
}

// ringSize is how many decisions are kept.
const ringSize = 1000

// ring holds the latest decisions.
type ring struct {
	items [ringSize]scheduler.Decision
	next  int
	full  bool
	count uint64 // of all that there ever were
}

func (r *ring) add(d scheduler.Decision) {
	r.items[r.next] = d
	r.count++
	r.next = (r.next + 1) % ringSize
	r.full = r.full || r.next == 0
}

// latest goes through the decisions, the newest first.
func (r *ring) latest(yield func(*scheduler.Decision) bool) {
	for i := 1; i <= ringSize; i++ {
		at := (r.next - i + ringSize) % ringSize
		if !r.full && at >= r.next || !yield(&r.items[at]) {
			return
		}
	}
}

// list is oldest first.
func (r *ring) list() []scheduler.Decision {
	var out []scheduler.Decision
	if r.full {
		out = append(out, r.items[r.next:]...)
	}
	return append(out, r.items[:r.next]...)
}

// record keeps a decision, wakes those who watch, and hands it to the goroutine that tells. It holds mu.
func (b *Broker) record(d scheduler.Decision) {
	d.Slot, d.Target = shown(d.Slot), shown(d.Target)
	b.records.add(d)
	if g := b.current.Load(); g != nil && g.Observer != nil {
		g.Observer.Count(d)
	}
	close(b.changed)
	b.changed = make(chan struct{})
	if b.closed { // who tells has ended, or is about to
		logDecision(b.logger(), d)
		return
	}
	select {
	case b.posts <- d:
	default: // a flood of refusals: the ring has the latest, the log says how many it lacks
		b.dropped.Add(1)
	}
}

// tell logs and passes on what is decided, in its order, until the broker ends.
func (b *Broker) tell() {
	for {
		select {
		case <-b.ctx.Done():
			b.lastWords()
			return
		case d := <-b.posts:
			b.log(d)
			if g := b.current.Load(); g != nil && g.Observer != nil {
				g.Observer.Decided(d)
			}
		}
	}
}

// lastWords logs what was decided before the end. Nobody else is told of it any more.
func (b *Broker) lastWords() {
	for {
		select {
		case d := <-b.posts:
			b.log(d)
		default:
			return
		}
	}
}

// log logs a decision, and how many before it are missing.
func (b *Broker) log(d scheduler.Decision) {
	if n := b.dropped.Swap(0); n > 0 {
		b.logger().Warn("decisions not logged", zap.Int64("count", n))
	}
	logDecision(b.logger(), d)
}

func logDecision(log *zap.Logger, d scheduler.Decision) {
	fields := []zap.Field{zap.String("consumer", d.Slot), zap.Int("gpu", d.GPU), zap.String("reason", d.Reason)}
	if d.Target != "" {
		fields = append(fields, zap.String("for", d.Target))
	}
	if d.Code != "" {
		fields = append(fields, zap.String("code", string(d.Code)))
	}
	if d.Took > 0 {
		fields = append(fields, zap.Duration("took", time.Duration(d.Took*float64(time.Second))))
	}
	switch d.Kind {
	case "bug":
		log.Error(d.Kind, fields...)
	case "refuse", "short_budget", "claim_raised", "load_failed", "unload_failed", "unhealthy", "gpu_lost", "telemetry_lost":
		log.Warn(d.Kind, fields...)
	default:
		log.Info(d.Kind, fields...)
	}
}

// Decisions is the record of the latest decisions, oldest first.
func (b *Broker) Decisions() []scheduler.Decision {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.records.list()
}
