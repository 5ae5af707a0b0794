package scheduler

import (
	"fmt"
	"slices"
	"time"
)

// stable is how long a server must have been loaded for its death not to count as one of a row.
const stable = time.Minute

// died takes in that a server has ended by itself. Its memory is free at once;
// what ran there breaks off by itself, and nothing new enters before the last of it has ended.
func (s *State) died(now time.Time, e Died) {
	sl := s.named[e.Slot]
	if sl != nil && s.cfg.Mode != Evicting && sl.held > 0 {
		s.letGo(now, sl, sl.held)
		s.pump(now)
	}
	if sl == nil || s.cfg.Mode != Evicting || sl.state != Ready && sl.state != Unknown { // a load or an unload ends by its own word
		return
	}
	if sl.active > 0 {
		sl.dead, sl.clean = orElse(e.Detail, "it ended"), e.Clean
		return
	}
	s.fall(now, sl, e.Detail, e.Clean)
	s.pump(now)
}

// fall is the edge of a slot whose server has died, or has come to a clean end. One that keeps dying cools down.
func (s *State) fall(now time.Time, sl *slot, detail string, clean bool) {
	lived, leaving := now.Sub(sl.readyAt), sl.gate.closed
	s.vanish(now, sl, "its server died: "+orElse(detail, "it ended"))
	if sl.deaths++; lived >= stable {
		sl.deaths = 1
	}
	sl.reviving = sl.cfg.Restart && !clean && !leaving && sl.deaths <= sl.cfg.MaxRestarts
	if sl.deaths > 1 {
		cool := backoff(sl.deaths - 1)
		sl.coolUntil = now.Add(cool)
		s.refuseAll(now, sl, &Refusal{Code: LoadFailed, RetryAfter: cool, Message: fmt.Sprintf(
			"the server of consumer %q has died %d times in a row, the last time after %s: %s; it is started again in %s at the earliest", sl.cfg.Name, sl.deaths, Rounded(lived), detail, Rounded(cool))})
		return
	}
	if sl.reviving && s.mayLoadUnasked(sl) && s.mayMove(sl) && s.booksAllow(sl) { // at once, so that nobody takes its memory
		sl.reviving = false
		s.load(now, sl)
		sl.emptyAt = now
	}
}

// booksAllow reports whether a slot's claim would still be within what may be booked, and nobody is there with whom it may not be.
// What is free is not looked at: no sample shows yet that its server is gone.
func (s *State) booksAllow(sl *slot) bool {
	allow := !slices.ContainsFunc(s.slots, func(v *slot) bool { return v != sl && v.state != Idle && conflict(sl, v) })
	known := s.cards(sl, func(c *card, h *holding) {
		l, _ := s.ledger(c, sl)
		e := Entry{State: sl.state, Booking: h.booking, Residue: h.residue}
		allow = allow && l.Booked-e.booked()+sl.claim() <= c.Total-s.cfg.Reserve
	})
	return known && allow
}

// alive reports whether nothing speaks for it that the server of the slot has died.
func (sl *slot) alive() bool { return sl.dead == "" && sl.suspect.IsZero() }

// mayLoadUnasked reports whether a slot may be loaded that nobody asks for.
func (s *State) mayLoadUnasked(sl *slot) bool {
	return s.sampled && sl.state == Idle && !sl.gone && !sl.lent && !sl.cfg.Stale && !sl.gate.closed && sl.cfg.CanLoad && sl.health == healthGood && s.refusesNew(sl, sl.cfg.Name) == nil
}

// revive loads those again whose servers have died, as soon as they have cooled down and fit beside what somebody waits for.
func (s *State) revive(now time.Time) {
	for _, sl := range s.slots {
		if !sl.reviving {
			continue
		}
		if sl.state != Idle || sl.gone {
			sl.reviving = false
			continue
		}
		if s.due(now, sl.coolUntil) && s.mayLoadUnasked(sl) && s.holdUp(now, sl) == "" && !s.keptFree(sl) && s.fits(sl) {
			sl.reviving = false
			s.load(now, sl)
			sl.emptyAt = now
		}
	}
}

// keptFree reports whether a GPU of the slot is kept free, or made so, for one that jobs wait for.
func (s *State) keptFree(sl *slot) bool {
	return s.waiting > 0 && slices.ContainsFunc(sl.on, func(h *holding) bool { return s.card(h.card).reserved != nil })
}

// mute is a probe without a good answer of a server that the driver starts. It
// is no reason to refuse: one that lives and does not answer is stopped, and the next request starts it.
func (s *State) mute(now time.Time, sl *slot, e Probed) {
	defer s.pump(now)
	sl.health, sl.detail = healthGood, e.Detail
	if e.Outcome == ProbeRefused && sl.active == 0 && sl.held > 0 { // nobody works on there
		s.letGo(now, sl, sl.held)
	}
	if s.cfg.Mode != Evicting || sl.state != Ready || sl.busy() || sl.gate.closed || e.Sent.Before(sl.idleAt) {
		return
	}
	most := healthTimeouts
	if e.Outcome != ProbeTimedOut {
		most = 2 // the first may have met one that is dying: then Died follows
	}
	if sl.timeouts++; sl.timeouts < most {
		return
	}
	sl.timeouts = 0
	s.decide(Decision{At: now, Kind: "unhealthy", Slot: sl.cfg.Name, GPU: sl.gpu(), Reason: orElse(e.Detail, "it does not answer") + ": it is stopped"})
	sl.gate = gate{closed: true, since: now, clear: e.Outcome == ProbeRefused} // else it may work for somebody who came past us: it is asked
}

// renew unloads a slot whose driver is to be replaced, and says when that can be done. A scheduler that
// unloads nothing has it replaced as soon as nothing runs there.
func (s *State) renew(now time.Time, sl *slot) {
	sl.renewing = sl.renewing && !sl.busy()
	switch {
	case s.worksBefore(sl):
	case s.cfg.Mode != Evicting && (sl.busy() || sl.queue.count > 0):
	case s.cfg.Mode != Evicting || sl.state == Idle && !sl.stop.flush && !sl.busy():
		if !sl.renewing {
			sl.renewing = true
			s.emit(Effect{Kind: Renew, Slot: sl.cfg.Name})
		}
	case (sl.state == Ready || sl.state == Unknown) && !sl.gate.closed && s.due(now, sl.retryAt):
		sl.gate = gate{closed: true, renews: true, since: now}
	}
}
