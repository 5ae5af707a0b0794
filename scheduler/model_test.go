package scheduler

import (
	"fmt"
	"maps"
	"slices"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// model is accounting §1 written down once more, plainly, from the contract.
type model struct {
	w       *world
	total   gpu.Bytes
	free    gpu.Bytes
	known   bool
	need    gpu.Bytes
	held    gpu.Bytes
	booked  map[string]gpu.Bytes // of the others
	seen    map[string]gpu.Bytes
	targets gpu.Bytes       // seen of the target: its residue
	foes    map[string]bool // those who are there and conflict with the target
}

// model is the account of the target's GPU, with v as it was before its unload began.
// nil where it can't tell: several GPUs, or an unload that is not over.
func (c *checker) model(t, v *slot) *model {
	if len(t.on) != 1 || c.w.s.card(t.on[0].card) == nil {
		return nil
	}
	for _, sl := range c.w.s.slots {
		if sl.hold(t.on[0].card) != nil && sl.stop.called {
			return nil
		}
	}
	g := c.w.s.card(t.on[0].card)
	state := v.state
	if state == Stopping {
		v.state = v.stop.from
	}
	m := c.w.newModel(g, t)
	v.state = state
	h := t.on[0]
	if t.state == Idle && t.health == healthGood {
		m.held = min(h.residue, t.cfg.Residual)
		if h.hasMeas {
			m.held = min(h.residue, h.measured)
		}
	}
	cushion := 256 * mib
	if g.Unified {
		cushion = 4096 * mib
	}
	if c.w.s.cfg.Cushion != nil {
		cushion = *c.w.s.cfg.Cushion
	}
	m.need = t.claim() - m.held + cushion
	return m
}

func (w *world) newModel(g *card, t *slot) *model {
	m := &model{w: w, total: g.Total, free: g.Free, known: g.Known, booked: map[string]gpu.Bytes{}, seen: map[string]gpu.Bytes{}, foes: map[string]bool{}}
	var unknown []string
	for _, sl := range w.s.slots {
		if sl != t && sl.state != Idle && (slices.Contains(t.cfg.Conflicts, sl.cfg.Name) || slices.Contains(sl.cfg.Conflicts, t.cfg.Name)) {
			m.foes[sl.cfg.Name] = true
		}
		h := sl.hold(g.Index)
		if h == nil {
			continue
		}
		if sl == t {
			if t.state == Idle {
				m.targets = h.residue
			}
			continue
		}
		b := bookingOf(sl, h)
		m.booked[sl.cfg.Name] = b
		v := b
		switch {
		case h.hasMeas && sl.state != Idle:
			v = h.measured
		case h.hasMeas:
			v = h.measured
		case sl.state == Loading, sl.state == Ready && (!sl.settled || g.Known && g.seenAt.Before(sl.settledAt)):
			if h.blind {
				unknown = append(unknown, sl.cfg.Name)
				continue
			}
			v = max(0, min(h.drop, b))
		case sl.state == Unknown:
			unknown = append(unknown, sl.cfg.Name)
			continue
		}
		m.seen[sl.cfg.Name] = v
	}
	for _, n := range unknown {
		v := max(0, min(m.used()-m.othersSeen()-m.targets, m.booked[n]))
		m.seen[n] = v
	}
	return m
}

func (m *model) used() gpu.Bytes { return m.total - m.free }

func (m *model) othersSeen() gpu.Bytes { return sum(m.seen) }

func sum(of map[string]gpu.Bytes) (n gpu.Bytes) {
	for v := range maps.Values(of) {
		n += v
	}
	return n
}

// unload takes a slot away hypothetically: what it left behind before stays.
func (m *model) unload(sl *slot) {
	delete(m.foes, sl.cfg.Name)
	b, on := m.booked[sl.cfg.Name]
	state := sl.state
	if state == Stopping {
		state = sl.stop.from
	}
	if !on || b == 0 || state == Idle {
		return
	}
	rest := sl.cfg.Residual
	for _, h := range sl.on {
		if c := m.w.s.card(h.card); c != nil && h.known >= 0 && c.Total == m.total {
			rest = h.known
		}
	}
	if len(sl.on) > 1 { // of two GPUs, take the better
		rest = 0
	}
	v := m.seen[sl.cfg.Name]
	if !m.known {
		v = b
	}
	rest = min(rest, v)
	m.free += v - rest
	m.booked[sl.cfg.Name], m.seen[sl.cfg.Name] = rest, rest
}

// available is A.
func (m *model) available() gpu.Bytes {
	reserve := m.w.s.cfg.Reserve
	if !m.known {
		return m.total - sum(m.booked) - m.targets - reserve
	}
	var growth gpu.Bytes
	for n, b := range m.booked {
		growth += max(0, b-m.seen[n])
	}
	outsiders := max(0, m.used()-m.othersSeen()-m.targets)
	return min(m.free-growth, m.total-outsiders-sum(m.booked)-m.targets) - reserve
}

func (m *model) fits() bool { return len(m.foes) == 0 && m.need <= m.available() }

func (m *model) String() string {
	return fmt.Sprintf("need %s (held %s), available %s of free %s, booked %v, seen %v", m.need, m.held, m.available(), m.free, m.booked, m.seen)
}
