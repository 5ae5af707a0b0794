package scheduler

import (
	"fmt"
	"time"
)

// lend keeps a GPU for a person or a program: what is loaded there is unloaded,
// and jobs wait.
func (s *State) lend(now time.Time, e Lend) {
	c := s.card(e.GPU)
	if c == nil {
		return
	}
	if now.Before(e.Until) {
		c.lentUntil = e.Until
		s.decide(Decision{At: now, Kind: "lent", GPU: c.Index, Reason: fmt.Sprintf("the GPU is lent for %s", e.Until.Sub(now).Round(time.Second))})
	} else if !c.lentUntil.IsZero() {
		c.lentUntil = now
	}
	s.pump(now)
}

// lentUntil is when the last of the slot's GPUs comes back; zero: none is lent.
func (s *State) lentUntil(now time.Time, sl *slot) (until time.Time) {
	if !s.lending {
		return until
	}
	for _, h := range sl.on {
		if c := s.card(h.card); c != nil && now.Before(c.lentUntil) {
			until = later(until, c.lentUntil)
		}
	}
	return until
}

func (s *State) lentOn(now time.Time, sl *slot) bool { return !s.lentUntil(now, sl).IsZero() }

// clearLent ends what is over, and unloads what is loaded on a lent GPU. What
// is pinned stays loaded; its jobs wait too.
func (s *State) clearLent(now time.Time) {
	was := s.lending
	s.lending = false
	for _, c := range s.gpus {
		switch {
		case c.lentUntil.IsZero():
		case s.due(now, c.lentUntil):
			c.lentUntil = time.Time{}
			s.decide(Decision{At: now, Kind: "returned", GPU: c.Index, Reason: "the GPU is not lent any more"})
		default:
			s.lending = true
		}
	}
	if !was && !s.lending {
		return
	}
	for _, sl := range s.slots {
		sl.lent = s.cfg.Mode == Evicting && s.lentOn(now, sl)
		if sl.lent && (sl.state == Ready || sl.state == Unknown) && !sl.gate.closed && sl.cfg.CanUnload && !sl.pinned() && s.due(now, sl.retryAt) {
			sl.gate = gate{closed: true, lent: true, since: now}
		}
	}
}

// setPin pins a slot by hand, or takes the configuration's pin from it.
func (s *State) setPin(now time.Time, e SetPin) {
	if sl := s.named[e.Slot]; sl != nil {
		on := e.On
		sl.pin = &on
		s.pump(now)
	}
}

// pinned says whether the slot is never to be unloaded: by what was said by
// hand, else by the configuration.
func (sl *slot) pinned() bool {
	if sl.pin != nil {
		return *sl.pin
	}
	return sl.cfg.Pin
}

// restore loads those again that made way for others, once their GPUs have been
// idle for long enough (spec §4.6). It is done by a job that is less urgent than any
// other, and that nobody waits for.
func (s *State) restore(now time.Time) {
	if s.cfg.Mode != Evicting {
		return
	}
	for _, r := range s.cfg.Restore {
		sl := s.named[r.Slot]
		if sl == nil {
			continue
		}
		idle := s.idleSince(sl)
		head := sl.queue.head()
		switch {
		case head != nil && head.phantom:
			if idle.IsZero() {
				s.dequeue(now, head)
				s.jobs.put(head)
			}
		case idle.IsZero() || !sl.evicted || sl.state != Idle || sl.gone || sl.lent || !sl.cfg.CanLoad || s.refusesNew(sl, r.Slot) != nil:
		case s.due(now, later(idle.Add(r.After), sl.coolUntil)):
			j := s.jobs.take()
			j.slot, j.priority, j.submitted, j.phantom = sl, anyPriority, now, true
			s.decide(Decision{At: now, Kind: "restore", Slot: sl.cfg.Name, GPU: sl.gpu(), Reason: fmt.Sprintf("its GPU has been idle for %s", r.After)})
			s.enqueue(now, j, false)
		}
	}
}

// idleSince is since when nobody uses the slot's GPUs; zero: somebody does.
func (s *State) idleSince(sl *slot) (since time.Time) {
	for _, o := range s.slots {
		if !overlap(o, sl) && o != sl {
			continue
		}
		real := o.queue.count
		if head := o.queue.head(); head != nil && head.phantom {
			real--
		}
		if o.busy() || real > 0 {
			return time.Time{}
		}
		since = later(since, later(o.idleAt, o.leftAt))
	}
	return since
}
