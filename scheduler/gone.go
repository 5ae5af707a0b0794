package scheduler

import (
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// What is known of servers whose process is gone, or seems to be.

// refused acts on a connection that did not come about. Its server's state is taken anew from a probe. If the connection
// was refused, no process listens: the models that it held are gone, and so is the work (spec §1.11).
func (s *State) refused(now time.Time, sl *slot, gone bool) {
	s.emit(Effect{Kind: ProbeNow, Slot: sl.cfg.Name})
	if sl.cfg.Starts { // it is dying, or comes up anew: a probe, or Died, tells
		if sl.cfg.CanProbe {
			sl.suspects(now)
		}
		return
	}
	if !gone && sl.busy() { // it computes, and may be too slow to take another
		return
	}
	s.awaitProbe(sl)
	sl.since = now
	if !gone || sl.cfg.Cloud {
		return
	}
	for _, o := range s.slots { // the other models of a server go with its process
		if o != sl && (sl.cfg.Server == "" || o.cfg.Server != sl.cfg.Server) || o.cfg.Starts || o.state != Ready {
			continue
		}
		if o.active > 0 { // its jobs break off by themselves
			o.refusedAt = now
			continue
		}
		if o.held > 0 {
			s.letGo(now, o, o.held)
		}
		if s.cfg.Mode == Evicting {
			s.awaitProbe(o)
			s.processEnded(now, o, "a connection to its server was refused")
			if o.cfg.Consumer != sl.cfg.Consumer {
				s.emit(Effect{Kind: ProbeNow, Slot: o.cfg.Name})
			}
		}
	}
}

// processEnded acts on a slot whose process has ended: what it held is gone. If it comes back, some servers can neither tell
// whether they are loaded nor be unloaded to be sure. Those count as loaded once a probe finds them and their memory
// is taken, and all the while if there is no probe.
func (s *State) processEnded(now time.Time, sl *slot, why string) {
	blind := !sl.cfg.CanTell && !sl.cfg.startsIdle() && !sl.cfg.TurnOnly && sl.state == Ready
	if blind && !sl.cfg.CanProbe {
		s.startsAnew(sl)
		return
	}
	s.vanish(now, sl, why)
	sl.returns = blind
}

// comeBack counts a slot as loaded again whose process ended while it was: its server answers, and as much memory is taken
// as would explain it. It reports whether it does.
func (s *State) comeBack(now time.Time, sl *slot) (back bool) {
	if !sl.returns || sl.cfg.CanTell || sl.health != healthGood {
		return false
	}
	back = true
	s.cards(sl, func(c *card, h *holding) {
		switch {
		case !c.Known:
		case h.hasMeas:
			back = back && 2*h.measured >= sl.claim()
		default:
			back = back && 2*(s.outsiders(c)-h.baseOut+h.residue) >= sl.claim()
		}
	})
	if back {
		s.resident(now, sl, "its server answers again, and as much memory is taken as it had")
	}
	return back
}

// startsAnew counts a READY slot as one whose process has ended, and may load past us: what it is booked for is kept for
// it, until free memory falls by that, or it has worked again.
func (s *State) startsAnew(sl *slot) {
	sl.settled, sl.anew = false, true
	s.cards(sl, func(c *card, h *holding) {
		h.drop, h.before, h.loadFree, h.blind, h.frozen = 0, 0, c.Free, !c.Known, s.transition(c.Index) != nil
	})
	s.emit(Effect{Kind: LookNow, Slot: sl.cfg.Name})
}

// awaitProbe lets a slot's jobs wait until its server answers a probe.
func (s *State) awaitProbe(sl *slot) {
	if sl.cfg.CanProbe && sl.health == healthGood {
		sl.health, sl.timeouts = healthUnknown, 0
	}
}

// suspects notes that a loaded server that the driver starts may have died.
func (sl *slot) suspects(now time.Time) {
	if sl.cfg.Starts && sl.state == Ready {
		sl.suspect = now
	}
}

// vanish is the edge of a slot whose memory went without us: a crash, or its own doing.
func (s *State) vanish(now time.Time, sl *slot, why string) {
	if sl.cfg.TurnOnly {
		return
	}
	s.learnPeak(sl)
	s.cards(sl, func(c *card, h *holding) {
		h.residue, h.baseOut = s.leftBehind(c, sl)
		h.base, h.baseFree, h.frozen = h.residue, c.Free, false
		c.ebbs = now.Add(quiet)
		h.booking, h.drop, h.hasMeas = 0, 0, false
	})
	if sl.held > 0 { // the work that went on there is gone with it
		s.ended(sl.held)
		sl.held, sl.orphans = 0, 0
		s.unlock(sl)
	}
	s.to(now, sl, Idle)
	if sl.hides() { // its next process may load past us, as one from before the broker
		sl.unloaded, sl.started, sl.unloadBad, sl.flushBad, sl.retryAt = false, 0, 0, "", time.Time{}
	}
	s.emit(Effect{Kind: LookNow, Slot: sl.cfg.Name})
	s.decide(Decision{At: now, Kind: "gone", Slot: sl.cfg.Name, GPU: sl.gpu(), Reason: why})
}

// leftBehind is what a slot that is not loaded any more may still hold of a
// GPU, until samples show it free, and what outsiders hold beside it.
func (s *State) leftBehind(c *card, sl *slot) (residue, outsiders gpu.Bytes) {
	if !c.Known {
		return 0, 0
	}
	sh := s.sheet(c, nil)
	defer s.reuse(sh)
	l, at := sh.account(), slices.Index(sh.slots, sl)
	if at < 0 { // it holds nothing
		return 0, l.Outsiders
	}
	rest := l.Used
	for i, e := range sh.entries {
		switch {
		case i == at:
		case e.State == Unknown: // it is seen last, and what it is booked for is in use all the same
			rest -= e.Booking
		default:
			rest -= l.Seen[i]
		}
	}
	return clamp(rest, 0, l.Seen[at]), l.Outsiders
}
