package broker

import (
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Bounds of what is kept of requests that no list names.
const (
	maxUnlisted      = 64  // routes of one consumer
	maxUnlistedRoute = 160 // bytes of one
)

// Unlisted records, once per route, a request that no list of its consumer names: that it passed without a turn, or
// that it had to take one.
func (b *Broker) Unlisted(consumer, method, path string, passed bool) {
	route := unlistedRoute(method, path)
	b.mu.Lock()
	defer b.mu.Unlock()
	seen := b.unlisted[consumer]
	if b.closed || seen[route] || len(seen) >= maxUnlisted || b.consumers[consumer] == nil {
		return
	}
	if seen == nil {
		seen = map[string]bool{}
		if b.unlisted == nil {
			b.unlisted = map[string]map[string]bool{}
		}
		b.unlisted[consumer] = seen
	}
	seen[route] = true
	d := scheduler.Decision{At: time.Now(), Kind: "unlisted", Slot: consumer, GPU: -1,
		Reason: route + " is in none of its lists: it takes a turn; name it in bypass if it needs no GPU, or in gpu_routes if it does"}
	if passed {
		d.Reason = route + " is in none of its lists: it was passed on without a turn; name it in gpu_routes if it needs the GPU, or in bypass if it does not"
	}
	if len(seen) == maxUnlisted {
		d.Reason += "; further routes of this consumer are not recorded"
	}
	b.record(d)
}

// unlistedRoute is a method and a path, without what looks like an ID, within the bound.
func unlistedRoute(method, path string) string {
	method, path = method[:min(len(method), 16)], path[:min(len(path), maxUnlistedRoute)]
	segments := strings.Split(path, "/")
	for i, s := range segments {
		digits := 0
		for _, c := range []byte(s) {
			if '0' <= c && c <= '9' {
				digits++
			}
		}
		if digits > 0 && digits == len(s) || digits >= 4 && len(s) >= 8 {
			segments[i] = "*"
		}
	}
	return strings.ToValidUTF8(method+" "+strings.Join(segments, "/"), "")
}

// Loaded reports whether a consumer, or one of its models, is loaded and not about to be unloaded.
func (b *Broker) Loaded(consumer string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.consumers[consumer]
	if c == nil {
		return false
	}
	if c.cfg.Cloud || b.current.Load().Config.Scheduler != config.Evicting {
		return true
	}
	for _, sl := range c.real().slots {
		if v, known := b.state.Slot(sl.name); known && v.State == scheduler.Ready && v.GateOpen {
			return true
		}
	}
	return false
}
