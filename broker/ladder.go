package broker

import (
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// choose says which consumer serves a request, and which of its slots: it is asked once, in the step
// that takes the request in. Without a slot there is nobody. It holds mu.
func (b *Broker) choose(now time.Time, r *Request) (*consumer, *slot) {
	if c := b.consumers[r.Consumer]; r.Turn && c != nil && c.real().turns != nil {
		return c, b.turn(c.real(), r.Model)
	}
	if len(r.Candidates) < 2 {
		return b.find(now, r.Consumer, r.Model)
	}
	c, first := b.find(now, r.Candidates[0], r.Model)
	if first == nil {
		return nil, nil
	}
	candidates := b.guarded(r.Candidates)
	names := b.rungs[:0]
	for i, name := range candidates {
		sl := first
		if i > 0 {
			_, sl = b.find(now, name, "")
		}
		if sl == nil { // it is leaving: the scheduler knows nothing of it
			names = append(names, "")
			continue
		}
		names = append(names, sl.name)
	}
	b.rungs = names
	chosen := b.state.Choose(now, names, r.PinPrimary || c.cfg.PinPrimary)
	at := slices.Index(names, chosen)
	return b.consumers[candidates[at]], b.slots[chosen]
}

// turn is the slot of a request that loads nothing: that of its model if it is loaded, else the one that only takes turns. It holds mu.
func (b *Broker) turn(c *consumer, model string) *slot {
	if model != "" {
		if sl := c.known(model); sl != nil {
			if v, known := b.state.Slot(sl.name); known && v.State == scheduler.Ready && v.GateOpen {
				return sl
			}
		}
	}
	return c.turns
}

// guarded is the cloud guard (spec §4.7): without leave, a ladder leads to no
// cloud consumer that the request did not name itself, which is the first. It holds
// mu, under which the result is valid.
func (b *Broker) guarded(candidates []string) []string {
	if b.flagsNow().AllowCloudFallback {
		return candidates
	}
	b.ladder = append(b.ladder[:0], candidates[0])
	for _, name := range candidates[1:] {
		if c := b.configOf(name); c != nil && !c.Cloud {
			b.ladder = append(b.ladder, name)
		}
	}
	return b.ladder
}

// configOf is the configuration of a consumer; nil: it is not known. The caller holds mu.
func (b *Broker) configOf(name string) *config.Consumer {
	if c := b.consumers[name]; c != nil {
		return c.cfg
	}
	return nil
}
