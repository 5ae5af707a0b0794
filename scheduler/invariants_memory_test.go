package scheduler

import (
	"slices"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// What holds always of memory: who is unloaded for whom, and what is booked.

// unload checks spec §3.2: what a victim is at the moment of its unload.
func (c *checker) unload(f Effect) {
	w, v := c.w, c.w.s.named[f.Slot]
	c.epochs[f.Slot] = f.Epoch
	t := v.stop.target
	if v.active > 0 || v.held > 0 {
		w.fail("%s is unloaded with %d active and %d held jobs", f.Slot, v.active, v.held)
	}
	if sv := w.server(f.Slot); sv.cfg.CanBusy && sv.working > 0 && !v.stop.flush && v.stop.from != Loading {
		w.fail("%s is unloaded, and its server works on %d jobs", f.Slot, sv.working)
	}
	if !v.cfg.CanUnload {
		w.fail("%s is unloaded, and has no way to", f.Slot)
	}
	if v.stop.flush || t == nil {
		return
	}
	switch {
	case v == t || c.rules.pinned(v) || v.cfg.NoEvict || v.cfg.VRAMManaged || slices.Contains(t.cfg.Coexist, v.cfg.Name):
		w.fail("%s is unloaded for %s, and is protected from that", f.Slot, t.cfg.Name)
	case t.state != Idle && t.state != Unknown || t.queue.count+t.parked == 0 && !v.gate.restores: // a client may have started another job in the same step
		w.fail("%s is unloaded for %s, which is %s and has %d waiting", f.Slot, t.cfg.Name, t.state, t.queue.count)
	case v.stop.from == Idle:
		w.fail("%s is unloaded for %s, and was not loaded", f.Slot, t.cfg.Name)
	}
	if m := c.model(t, v); m != nil && !t.want.extra && m.fits() && !c.dropped {
		w.fail("%s is unloaded for %s, which fits: %s", f.Slot, t.cfg.Name, m)
	}
}

// closed checks "plan before acting": a gate closes only if the permitted victims together are enough.
func (c *checker) closed(v *slot) {
	t := v.gate.target
	if t != nil && c.w.s.cfg.ObserveEvictions && c.w.s.cfg.Mode == Evicting && v.state != Stopping {
		c.w.fail("the gate of %s is closed for %s, and evictions are only observed", v.cfg.Name, t.cfg.Name)
	}
	if was, old := c.was[v]; !old || t == nil || was.gate.closed && was.gate.target == t && was.gate.since.Equal(v.gate.since) || t.want.extra {
		return
	}
	m := c.model(t, v)
	if m == nil {
		return
	}
	for _, o := range c.w.s.slots {
		if o != t && !c.rules.pinned(o) && !o.cfg.NoEvict && !o.cfg.VRAMManaged && o.cfg.CanUnload && !slices.Contains(t.cfg.Coexist, o.cfg.Name) {
			m.unload(o)
		}
	}
	for foe := range m.foes { // it may have been loaded since, in the same step
		if was := c.was[c.w.s.named[foe]].state; was == Idle || was == Stopping {
			delete(m.foes, foe)
		}
	}
	if !m.fits() {
		c.w.fail("the gate of %s closes for %s, and all victims together are not enough: %s", v.cfg.Name, t.cfg.Name, m)
	}
}

// load checks that no decision takes the bookings of a GPU above what it has.
func (c *checker) load(t *slot) {
	if t.cfg.Stale {
		c.w.fail("%s is loaded by a driver that is to be replaced", t.cfg.Name)
	}
	for _, h := range t.on {
		g := c.w.s.card(h.card)
		if h.booking < t.configured() { // what was seen of it may be more than can be had
			c.w.fail("%s is loaded and booked for %s, its claim is %s", t.cfg.Name, h.booking, t.configured())
		}
		var booked gpu.Bytes
		for _, sl := range c.w.s.slots {
			if o := sl.hold(h.card); o != nil {
				booked += bookingOf(sl, o)
			}
		}
		if booked > g.Total-c.w.s.cfg.Reserve {
			c.w.fail("the load of %s takes the bookings of GPU %d to %s of %s", t.cfg.Name, h.card, booked, g.Total-c.w.s.cfg.Reserve)
		}
	}
}

func bookingOf(sl *slot, h *holding) gpu.Bytes {
	if sl.state == Idle {
		return h.residue
	}
	return h.booking
}

// residue checks the cap of accounting §1: what nobody else and no earlier outsider explains of the memory in use.
func (c *checker) residue(name string) {
	sl := c.w.s.named[name]
	if sl == nil || sl.state != Idle || c.othersMoved(sl) {
		return
	}
	for _, h := range sl.on {
		g := c.w.s.card(h.card)
		if g == nil || !g.Known || h.hasMeas || h.residue == 0 {
			continue
		}
		m := c.w.newModel(g, sl)
		if rest := m.used() - m.othersSeen(); h.residue > max(0, rest) {
			c.w.fail("%s keeps a residue of %s on GPU %d, only %s is left unexplained", name, h.residue, h.card, rest)
		}
	}
}

// looked checks that memory counts as back only by a look at it after the unload call returned, or after evict_wait.
func (c *checker) looked(v *slot) {
	if v == nil { // it was dropped in the same step
		return
	}
	now, returned := c.w.now, c.w.now
	if was := c.was[v]; was.stop.called {
		returned = was.stop.at
	}
	known, stale := true, false
	for _, h := range v.on {
		g := c.w.s.card(h.card)
		known = known && g != nil && g.Known
		stale = stale || g != nil && g.seenAt.Before(returned)
	}
	if known && stale && now.Before(returned.Add(c.w.s.cfg.EvictWait)) {
		c.w.fail("%s counts as unloaded, and nobody has looked at its memory since the call returned", v.cfg.Name)
	}
}

// othersMoved reports whether another slot changed its state in this step: the memory seen of it has changed with it.
func (c *checker) othersMoved(sl *slot) bool {
	return slices.ContainsFunc(c.w.s.slots, func(o *slot) bool {
		was, old := c.was[o]
		return o != sl && (!old || was.state != o.state)
	})
}

// outOfMemory is a server that found less memory than it was promised.
func (c *checker) outOfMemory(sv *simServer) {
	if c.w.shape.honest && !c.meddled && !c.w.calm {
		c.w.fail("%s ran out of memory", sv.cfg.Name)
	}
}
