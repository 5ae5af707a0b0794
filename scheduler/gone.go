package scheduler

import (
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// What is known of servers whose process is gone, or seems to be.

// dialRefused acts on a connection that did not come about. Its server's state is taken anew from a probe. If the connection
// was refused, no process listens: the models that it held are gone, and so is the work (spec §1.11).
func (s *State) dialRefused(now time.Time, sl *slot, gone bool) {
	s.emit(Effect{Kind: ProbeNow, Slot: sl.cfg.Name})
	if sl.cfg.Starts { // it is dying, or comes up anew: a probe, or Died, tells
		s.suspects(now, sl)
		return
	}
	if !gone && sl.busy() { // it computes, and may be too slow to take another
		return
	}
	awaitProbe(now, sl)
	if gone {
		s.nobodyListens(now, sl, "a connection to its server was refused")
	}
}

// nobodyListens acts on a server that has no process any more, for all slots of its address.
func (s *State) nobodyListens(now time.Time, sl *slot, why string) {
	for _, o := range s.slots {
		if o != sl && (sl.cfg.Server == "" || o.cfg.Server != sl.cfg.Server) || o.cfg.Starts || o.cfg.Cloud {
			continue
		}
		if awaitProbe(now, o) {
			s.emit(Effect{Kind: ProbeNow, Slot: o.cfg.Name})
		}
		switch {
		case o.hides():
			o.mayLoadUnseen()
		case o.state != Ready && o.state != Unknown: // its load or unload fails by itself
		case o.active > 0: // its jobs break off by themselves
			o.refusedAt = now
		default:
			if o.held > 0 {
				s.letGo(now, o, o.held)
			}
			s.processEnded(now, o, why)
		}
	}
}

// processEnded acts on a slot whose process has ended: what it held is gone. Of some servers nothing can tell whether the next
// process is loaded, nor can an unload make sure. Its memory tells.
func (s *State) processEnded(now time.Time, sl *slot, why string) {
	if s.cfg.Mode != Evicting || sl.cfg.TurnOnly {
		return
	}
	returns := !sl.cfg.CanTell && !sl.cfg.startsIdle() && (sl.state == Ready || !sl.cfg.CanLoad)
	s.vanish(now, sl, why)
	sl.returns = returns
}

// endUnseen takes loaded slots for gone whose servers answer no probe, though none was refused, once their memory is seen to be free:
// a container that was stopped, say, has no name and no address any more. A server that hangs, or whose name is not found for a
// moment, keeps its memory, and stays as it is. Bookings may be more than what is taken, so only what is free tells. It may be that all
// such servers have gone, or one of them; which of two that have taken as much, nothing tells. It reports whether a slot is gone.
func (s *State) endUnseen(now time.Time) bool {
	var silent, gone []*slot
	for _, sl := range s.slots {
		if sl.state == Ready && sl.health == healthBad && s.mayEndUnseen(sl) {
			silent = append(silent, sl)
		}
	}
	switch {
	case len(silent) == 0:
		return false
	case s.freed(now, silent):
		gone = silent
	default:
		for i := range silent {
			if s.freed(now, silent[i:i+1]) {
				gone = append(gone, silent[i])
			}
		}
		if len(gone) != 1 {
			return false
		}
	}
	for _, sl := range gone {
		s.processEnded(now, sl, "its server does not answer, and its memory is free")
	}
	return true
}

// freed reports whether on all their GPUs as much has become free since the servers of some slots last answered, but for a quarter, as
// they had taken then. What others have left there may become free, too.
func (s *State) freed(now time.Time, all []*slot) bool {
	free := true
	for _, sl := range all {
		free = s.cards(sl, func(c *card, h *holding) {
			var took, left gpu.Bytes
			for _, o := range s.slots {
				switch oh := o.hold(c.Index); {
				case oh == nil:
				case slices.Contains(all, o):
					took += oh.aliveTook
				default:
					left += oh.residue
				}
			}
			back := c.Free - h.aliveFree
			near := h.aliveFree != unseen && 4*back >= 3*took && 4*back <= 5*took && 4*left < took
			free = free && c.Known && near && s.calm(now, c, sl) && !(h.hasMeas && 4*h.measured > h.aliveTook)
		}) && free
	}
	return free
}

// unreachable acts on a probe that found no route to a server, or could not resolve its name. An UNKNOWN slot, whose container may have
// been stopped before the broker started, is gone if other slots explain nearly all memory in use. A server that is starting has a name.
func (s *State) unreachable(now time.Time, sl *slot) {
	gone := sl.state == Unknown && !now.Before(sl.loadsUntil) && s.mayEndUnseen(sl)
	all := gone && s.cards(sl, func(c *card, h *holding) {
		l, at := s.ledger(c, sl)
		rest := l.Used
		for i, seen := range l.Seen {
			if i != at {
				rest -= seen
			}
		}
		gone = gone && c.Known && s.calm(now, c, sl) && 4*max(rest, -rest) <= h.booking
	})
	if gone && all {
		s.processEnded(now, sl, "its server can't be reached, and its memory is free")
	}
}

// mayEndUnseen reports whether a slot's server may end without anybody's word, and no work of it is known.
func (s *State) mayEndUnseen(sl *slot) bool {
	return s.cfg.Mode == Evicting && !sl.busy() && len(sl.on) > 0 && !sl.cfg.Starts && !sl.cfg.Cloud && !sl.cfg.TurnOnly
}

// answered notes what is free, and what a loaded slot has taken of it, as its server answers.
func (s *State) answered(now time.Time, sl *slot) {
	s.cards(sl, func(c *card, h *holding) {
		if !c.Known || c.seenAt.Before(sl.since) || !s.calm(now, c, sl) {
			return
		}
		h.aliveFree, h.aliveTook = c.Free, h.drop
		if h.blind || 4*h.drop < h.booking { // it was loaded past us, or has not taken all yet
			h.aliveTook = h.booking
		}
	})
}

// calm reports whether nothing of other slots is being loaded on a GPU, or given back.
func (s *State) calm(now time.Time, c *card, sl *slot) bool {
	t, w := s.transition(c.Index), s.warmer(c.Index)
	return (t == nil || t == sl) && (w == nil || w == sl) && !now.Before(c.ebbs)
}

// moves forgets what was free when the servers of other slots last answered: a slot's change of state moves memory of its GPUs.
func (s *State) moves(sl *slot) {
	for _, h := range sl.on {
		for _, o := range s.slots {
			if oh := o.hold(h.card); oh != nil && o != sl {
				oh.aliveFree = unseen
			}
		}
	}
}

// comeBack counts a slot as loaded again whose process has ended, once half of its claim is seen to be taken since.
// If its server is probed, that must answer. It reports whether the slot is back.
func (s *State) comeBack(now time.Time, sl *slot) (back bool) {
	if !sl.returns {
		return false
	}
	back = sl.health == healthGood
	s.cards(sl, func(c *card, h *holding) {
		if !c.Known { // if it never was since, nothing can tell
			back = back && h.baseOut == unseen
			return
		}
		h.baseOut = min(h.baseOut, s.outsiders(c))
		taken := s.outsiders(c) - h.baseOut + h.residue
		if h.hasMeas {
			taken = h.measured
		}
		// Until some time has passed, what the last process held may still be seen.
		back = back && 2*taken >= sl.claim() && c.seenAt.After(sl.since.Add(quiet))
	})
	if back {
		s.resident(now, sl, "its process had ended, and as much memory is taken again as it had")
	}
	return back
}

// awaitProbe lets a slot's jobs wait until its server answers a probe that is sent from now on. It reports whether they did not yet.
func awaitProbe(now time.Time, sl *slot) bool {
	if !sl.cfg.CanProbe || sl.health != healthGood {
		return false
	}
	sl.health, sl.since = healthUnknown, now
	return true
}

// suspects notes that a loaded server that the driver starts may have died.
func (s *State) suspects(now time.Time, sl *slot) {
	if sl.cfg.Starts && sl.cfg.CanProbe && sl.state == Ready && s.cfg.Mode == Evicting {
		sl.suspect = now
	}
}

// mayLoadUnseen notes of a slot's server that its next process may load past us, as one from before the broker.
func (sl *slot) mayLoadUnseen() {
	sl.unloaded, sl.started, sl.unloadBad, sl.flushBad, sl.retryAt = false, 0, 0, "", time.Time{}
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
	if sl.hides() {
		sl.mayLoadUnseen()
	}
	s.emit(Effect{Kind: LookNow, Slot: sl.cfg.Name})
	s.decide(Decision{At: now, Kind: "gone", Slot: sl.cfg.Name, GPU: sl.gpu(), Reason: why})
}

// leftBehind is what a slot that is not loaded any more may still hold of a
// GPU, until samples show it free, and what outsiders hold beside it. What they held before its load is not its own.
func (s *State) leftBehind(c *card, sl *slot) (residue, outsiders gpu.Bytes) {
	if !c.Known {
		return 0, unseen
	}
	sh := s.sheet(c, nil)
	defer s.reuse(sh)
	l, at := sh.account(), slices.Index(sh.slots, sl)
	if at < 0 { // it holds nothing
		return 0, l.Outsiders
	}
	if sl.state == Unknown { // it may have held nothing
		return 0, l.Outsiders + l.Seen[at]
	}
	before := sl.hold(c.Index).loadOut
	rest := l.Used - before
	for i, e := range sh.entries {
		switch {
		case i == at:
		case e.State == Unknown: // it is seen last, and what it is booked for is in use all the same
			rest -= e.Booking
		default:
			rest -= l.Seen[i]
		}
	}
	return clamp(rest, 0, l.Seen[at]), max(l.Outsiders, before)
}
