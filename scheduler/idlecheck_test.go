package scheduler

import (
	"maps"
	"slices"
	"time"
)

// idleCheck checks idle unloads, observing, and drains: with a clock of its own,
// that it takes from the events and not from the state's fields.
type idleCheck struct {
	since    map[*slot]time.Time // READY, or the last job's end, whichever is later
	active   map[*slot]int       // active and held jobs, as they were before the step
	drained  map[string]bool
	all      bool // all are drained
	unloaded int
}

func (c *idleCheck) before(w *world) {
	if c.since == nil {
		c.since, c.active, c.drained = map[*slot]time.Time{}, map[*slot]int{}, map[string]bool{}
	}
	clear(c.active)
	for _, sl := range w.s.slots {
		c.active[sl] = sl.active + sl.held
	}
}

func (c *idleCheck) after(k *checker, e Event, effects []Effect) {
	w := k.w
	if d, ok := e.(Drain); ok && (d.Slot == "" || w.s.named[d.Slot] != nil) {
		c.drain(d)
	}
	for _, f := range effects {
		switch {
		case f.Kind == Admit && (c.all || c.drained[f.Slot]):
			w.fail("a job was admitted to %s, which is drained", f.Slot)
		case f.Kind == StartUnload:
			c.unload(k, w.s.named[f.Slot])
		case f.Kind == Dropped:
			delete(c.drained, f.Slot)
		}
	}
	for _, sl := range w.s.slots {
		c.follow(k, e, sl)
		c.remembered(k, sl)
		if w.s.waiting > 0 && sl.queue.count > 0 && (c.all || c.drained[sl.cfg.Name]) {
			w.fail("%d jobs wait for %s, which is drained", sl.queue.count, sl.cfg.Name)
		}
	}
	maps.DeleteFunc(c.since, func(sl *slot, _ time.Time) bool { return !slices.Contains(w.s.slots, sl) })
}

func (c *idleCheck) drain(d Drain) {
	if d.Slot == "" {
		c.all = !d.Off
	} else {
		c.drained[d.Slot] = !d.Off
	}
}

// unload checks one that goes out because nobody uses the slot, or is not to go out because people only observe.
func (c *idleCheck) unload(k *checker, v *slot) {
	w := k.w
	cfg := w.s.cfg
	switch {
	case cfg.Mode != Evicting:
		w.fail("%s is unloaded, and the scheduler unloads nothing", v.cfg.Name)
	case v.stop.target != nil && cfg.ObserveEvictions:
		w.fail("%s is unloaded for %s, and evictions are only observed", v.cfg.Name, v.stop.target.cfg.Name)
	}
	if !v.stop.idle {
		return
	}
	c.unloaded++
	end := k.rules.idleEnd(v, c.since[v])
	switch {
	case cfg.IdleUnload != IdleOn || v.cfg.IdleTimeout == 0 || k.rules.pinned(v) || v.cfg.VRAMManaged && !v.cfg.OwnIdle:
		w.fail("%s is unloaded because it is idle, and is to stay: %+v", v.cfg.Name, v.cfg)
	case w.now.Before(end):
		w.fail("%s is unloaded %s before it has been idle for long enough", v.cfg.Name, end.Sub(w.now))
	case c.active[v]+v.queue.count > 0:
		w.fail("%s is unloaded because it is idle, and has %d jobs", v.cfg.Name, c.active[v]+v.queue.count)
	case v.health != healthGood:
		w.fail("%s is unloaded because it is idle, and its server does not answer", v.cfg.Name)
	}
}

// follow keeps the clock.
func (c *idleCheck) follow(k *checker, e Event, sl *slot) {
	now := k.w.now
	was, old := k.was[sl]
	u, _ := e.(UnloadDone)
	putBack := was.state == Stopping && u.Slot == sl.cfg.Name && u.Err != "" // as if nothing had been
	switch {
	case sl.state != Ready:
		return
	case !old || was.state != Ready && !putBack, c.since[sl].IsZero():
		c.since[sl] = now
	}
	mine := func(id JobID) bool { j := k.w.jobs[id]; return j != nil && j.server.cfg.Name == sl.cfg.Name }
	switch e := e.(type) {
	case Release:
		if e.Job == k.leaving && mine(e.Job) {
			c.since[sl] = now
		}
	case BusyAnswer:
		if e.Slot == sl.cfg.Name && sl.held < was.held {
			c.since[sl] = now
		}
	case Touch:
		if e.Slot == sl.cfg.Name {
			c.since[sl] = now
		}
	}
}

// remembered checks that an idle slot's time is not slept through.
func (c *idleCheck) remembered(k *checker, sl *slot) {
	w := k.w
	if !c.mayGo(w, sl) || sl.gate.closed {
		return
	}
	if slices.ContainsFunc(sl.on, func(h *holding) bool { return w.s.transition(h.card) != nil || w.s.warmer(h.card) != nil }) {
		return // whose end is soon enough
	}
	end := later(k.rules.idleEnd(sl, sl.idleAt), sl.retryAt) // a failed unload is not tried again before
	if !end.After(w.now) {
		return
	}
	if k.wakes.IsZero() || k.wakes.After(end) {
		w.fail("%s is to be unloaded at %s, and the next wake is at %s", sl.cfg.Name, end, k.wakes)
	}
}

// mayGo reports whether the slot is one that goes once it has been idle for long enough.
func (c *idleCheck) mayGo(w *world, sl *slot) bool {
	cfg := sl.cfg
	return w.s.cfg.Mode == Evicting && w.s.cfg.IdleUnload == IdleOn && cfg.IdleTimeout > 0 && !w.check.rules.pinned(sl) && cfg.CanUnload && (!cfg.VRAMManaged || cfg.OwnIdle) &&
		sl.state == Ready && sl.active+sl.held+sl.queue.count == 0 && sl.health == healthGood
}

// nobodyCame lets time go by in which nobody comes. In the end all is unloaded
// that goes when it is idle, failures and all, and the state wants nothing any more that is overdue.
func (w *world) nobodyCame(bound time.Duration) {
	left := func() *slot {
		for _, sl := range w.s.slots {
			if w.check.idle.mayGo(w, sl) || sl.state == Stopping || sl.state == Loading {
				return sl
			}
		}
		return nil
	}
	for end := w.now.Add(bound); left() != nil; w.advance(w.now.Add(2 * time.Second)) {
		if w.now.After(end) {
			w.fail("nobody has used %s for %s, and it is not unloaded", left().cfg.Name, bound)
		}
	}
	if at := w.check.wakes; !at.IsZero() && at.Before(w.now) {
		w.fail("it is %s, and the state waits to be woken at %s", w.now, at)
	}
}
