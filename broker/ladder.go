package broker

import (
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// choose says which consumer serves a request: it is asked once, in the step
// that takes the request in. It holds mu.
func (b *Broker) choose(now time.Time, r *Request) string {
	if len(r.Candidates) < 2 {
		return r.Consumer
	}
	candidates, first := b.guarded(r.Candidates), b.configOf(r.Candidates[0])
	return b.state.Choose(now, candidates, r.PinPrimary || first != nil && first.PinPrimary)
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
