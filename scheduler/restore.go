package scheduler

import (
	"fmt"
	"slices"
	"time"
)

// restore loads those again that made way for others, once their GPUs have been
// idle for long enough (spec §4.6). It evicts by the rules for idle slots alone,
// and gives way to the first request that comes.
func (s *State) restore(now time.Time) {
	if s.cfg.Mode != Evicting {
		return
	}
	for _, r := range s.cfg.Restore {
		sl := s.named[r.Slot]
		if sl == nil || !sl.evicted || !s.mayLoadUnasked(sl) {
			continue
		}
		idle := s.idleSince(sl)
		sl.restoring = sl.restoring && !idle.IsZero()
		if idle.IsZero() || !s.due(now, later(idle.Add(r.After), sl.coolUntil)) || s.holdUp(now, sl) != "" {
			continue
		}
		if s.fits(sl) {
			s.beginRestore(now, sl, idle)
			s.load(now, sl)
			sl.evicted, sl.restoring, sl.emptyAt = false, false, now // whatever comes of it: it is not tried again and again
		} else if plan := s.choose(sl, func(v *slot) bool { return s.givesWayIdle(now, sl, v) }); plan != nil && s.neverFits(sl) == nil {
			s.beginRestore(now, sl, idle)
			v := plan[0]
			v.gate = gate{closed: true, target: sl, restores: true, since: now}
			s.proceedDrain(now, v)
		}
	}
}

// beginRestore puts on record, once, why a slot is loaded that nobody asks for.
func (s *State) beginRestore(now time.Time, sl *slot, idle time.Time) {
	if sl.restoring {
		return
	}
	sl.restoring = true
	s.decide(Decision{At: now, Kind: "restore", Slot: sl.cfg.Name, GPU: sl.gpu(), Reason: fmt.Sprintf("its GPU has been idle for %s", Rounded(now.Sub(idle)))})
}

// givesWayIdle reports whether an idle slot may be unloaded for one that is restored.
func (s *State) givesWayIdle(now time.Time, t, v *slot) bool {
	return s.permitted(t, v) && v.state == Ready && !v.gate.closed && !v.busy() && v.queue.count == 0 && v.parked == 0 &&
		s.due(now, later(v.retryAt, s.keptUntil(v))) &&
		!slices.ContainsFunc(s.cfg.Restore, func(r Restore) bool { return r.Slot == v.cfg.Name }) // else two would take turns for nothing
}

// idleSince is since when nobody uses the slot's GPUs; zero: somebody does.
func (s *State) idleSince(sl *slot) (since time.Time) {
	for _, o := range s.slots {
		if o != sl && !overlap(o, sl) {
			continue
		}
		if o.busy() || o.queue.count+o.parked > 0 {
			return time.Time{}
		}
		since = later(since, later(o.idleAt, o.leftAt))
	}
	return since
}
