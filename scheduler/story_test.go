package scheduler

import (
	"fmt"
	"strings"
	"time"
)

// story is what happened last, for people.
func (c *checker) story() string {
	var b strings.Builder
	start := time.Unix(1_000_000, 0)
	for _, sl := range c.w.s.slots {
		fmt.Fprintf(&b, "%+v\n", sl.cfg)
	}
	for _, r := range c.history {
		if len(r.effects) == 0 {
			switch r.event.(type) {
			case Probed, Sampled, Wake:
				continue
			}
		}
		event := fmt.Sprintf("%T%+v", r.event, r.event)
		if e, ok := r.event.(Submit); ok {
			event = fmt.Sprintf("Submit %s priority %d", e.Slot, e.Priority)
		}
		fmt.Fprintf(&b, "%8.3f %s → %s\n", r.at.Sub(start).Seconds(), event, tell(r.effects))
	}
	for _, sl := range c.w.s.slots {
		fmt.Fprintf(&b, "%s: %s was %s active %d held %d waiting %d (%s) gate %t for %q epoch %d health %d warming %t gone %t lent %t wants the lock %t order %d\n", sl.cfg.Name, sl.state, c.was[sl].state, sl.active, sl.held, sl.queue.count, sl.why,
			sl.gate.closed, name(sl.gate.target), sl.epoch, sl.health, sl.warming, sl.gone, sl.lent, sl.want.lock, sl.order)
		for _, h := range sl.on {
			fmt.Fprintf(&b, "    %+v\n", *h)
		}
	}
	for _, g := range c.w.s.gpus {
		fmt.Fprintf(&b, "GPU %d: total %s free %s known %t lost %t owner %s\n", g.Index, g.Total, g.Free, g.Known, g.Lost, name(c.w.s.owner(g.Index)))
	}
	return b.String()
}

func tell(effects []Effect) string {
	var parts []string
	for _, f := range effects {
		kind := [...]string{"queued", "admit", "refuse", "LOAD", "UNLOAD", "check busy", "probe", "look", "dropped", "not now", "decided", "renew", "resided"}[f.Kind]
		switch {
		case f.Decision != nil:
			parts = append(parts, fmt.Sprintf("[%s %s: %s]", f.Decision.Kind, f.Slot, f.Decision.Reason))
		case f.Refusal != nil:
			parts = append(parts, fmt.Sprintf("%s %d %s", kind, f.Job, f.Refusal.Code))
		default:
			parts = append(parts, fmt.Sprintf("%s %s %d/%d", kind, f.Slot, f.Job, f.Epoch))
		}
	}
	return strings.Join(parts, ", ")
}
