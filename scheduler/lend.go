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
		s.decide(Decision{At: now, Kind: "lent", GPU: c.Index, Reason: fmt.Sprintf("the GPU is lent for %s", Rounded(e.Until.Sub(now)))})
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

// clearLent ends what is over, and notes which slots are on a lent GPU.
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
	if was || s.lending {
		for _, sl := range s.slots {
			sl.lent = s.cfg.Mode == Evicting && s.lentOn(now, sl)
		}
	}
}

// emptyLent unloads what is loaded on a lent GPU. What is pinned stays loaded;
// its jobs wait too.
func (s *State) emptyLent(now time.Time) {
	if !s.lending {
		return
	}
	for _, sl := range s.slots {
		if sl.lent && (sl.state == Ready || sl.state == Unknown) && !sl.gate.closed && sl.cfg.CanUnload && !sl.pinned() && s.due(now, sl.retryAt) {
			sl.gate = gate{closed: true, lent: true, since: now}
			s.proceedDrain(now, sl)
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

// pinned reports whether the slot is never to be unloaded: by what was said by
// hand, else by the configuration.
func (sl *slot) pinned() bool {
	if sl.pin != nil {
		return *sl.pin
	}
	return sl.cfg.Pin
}
