package scheduler

import (
	"fmt"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// flushWait is how long a flushed server's memory is waited for before other slots are evicted instead.
const flushWait = 2 * time.Second

// unseen is a holding's foreign memory before the first look at it.
const unseen = gpu.Bytes(1 << 62)

// mayBeLoaded reports whether an IDLE lazy slot may have been loaded before the broker came: its server can't tell, and it was neither used nor unloaded since.
func (s *State) mayBeLoaded(v *slot) bool { return v.hides() && !v.unloaded && v.started == 0 }

// hides reports whether the slot's server may be loaded without our knowledge.
func (sl *slot) hides() bool {
	return sl.state == Idle && sl.cfg.CanUnload && sl.cfg.lazy() && !sl.cfg.CanTell
}

// mayHoldItself reports whether a target may hold memory that we don't know of: it may have been loaded before the
// broker came, or past it, if outsiders hold much more than when it was last unloaded.
func (s *State) mayHoldItself(t *slot) bool {
	grew := false
	if t.hides() && (t.unloaded || t.started > 0) {
		s.cards(t, func(c *card, h *holding) {
			grew = grew || c.Known && s.outsiders(c)-h.foreign >= max(t.claim()/4, s.cushion(c))
		})
	}
	return grew || s.mayBeLoaded(t)
}

// outsiders is what programs that are none of ours hold of a GPU.
func (s *State) outsiders(c *card) gpu.Bytes {
	sh := s.sheet(c, nil)
	defer s.reuse(sh)
	return sh.account().Outsiders
}

// noteForeign remembers the least that outsiders held while a lazy slot was IDLE: more than that may be its own.
func (s *State) noteForeign(c *card) {
	var out gpu.Bytes
	counted := false
	if !c.Known {
		return
	}
	for _, sl := range s.slots {
		h := sl.hold(c.Index)
		if h == nil || !sl.hides() {
			continue
		}
		if !counted {
			out, counted = s.outsiders(c), true
		}
		h.foreign = min(h.foreign, out)
	}
}

// unflushable reports which slots may hold memory of a GPU without our knowledge, and why they could not be made to give it back.
func (s *State) unflushable(c *card, t *slot) (parts []string) {
	for _, v := range s.slots {
		if v.flushBad != "" && v.hold(c.Index) != nil && (v == t && s.mayHoldItself(v) || s.mayBeLoaded(v)) {
			parts = append(parts, fmt.Sprintf("the server of %s may hold some of that, and does not unload: %s", v.cfg.Name, v.flushBad))
		}
	}
	return parts
}

// flushable reports whether a target's own unload route is to be called before its load.
func (s *State) flushable(now time.Time, t *slot) bool {
	return s.mayHoldItself(t) && t.health == healthGood && s.due(now, t.retryAt)
}

// unflushed returns a slot to be flushed for the target: first the target itself, then others that may hold memory it needs.
func (s *State) unflushed(now time.Time, t *slot) *slot {
	if s.flushable(now, t) {
		return t
	}
	for _, v := range s.slots {
		if v != t && s.mayBeLoaded(v) && v.unloadBad == 0 && v.queue.count == 0 && !v.gate.closed && v.health == healthGood && overlap(t, v) && s.protects(t, v) == "" {
			return v
		}
	}
	return nil
}

// freesItself flushes a target that would fit if what nobody accounts for is its own, and gives
// that memory time to come back. No other slot is evicted for it before.
func (s *State) freesItself(now time.Time, t *slot) bool {
	if !s.mayHoldItself(t) && !t.ebbing(now) || !s.lacksOnlyOutsiders(t) { // the cheap question first: every cold target is asked
		return false
	}
	switch {
	case s.flushable(now, t):
		t.why = "waits for what its own server may hold already"
		if t.want.blocked.IsZero() {
			t.want.blocked = now
		}
		s.flush(now, t, t)
	case t.flushedAt.IsZero() || s.due(now, t.flushedAt.Add(flushWait)):
		return false
	default:
		t.why = "waits for the memory that its own server gives back"
	}
	return true
}

// lacksOnlyOutsiders reports whether the memory is short for the target, and would not be if no outsider held anything.
func (s *State) lacksOnlyOutsiders(t *slot) bool {
	short, fits := false, true
	known := s.cards(t, func(c *card, h *holding) {
		sh := s.sheet(c, t)
		need := s.need(t, h, c)
		short = short || need > sh.available()
		sh.card.Free += sh.account().Outsiders
		fits = fits && need <= sh.available()
		s.reuse(sh)
	})
	return known && short && fits
}

// ebbing reports whether memory of a flushed target may still come back.
func (sl *slot) ebbing(now time.Time) bool { return now.Before(sl.flushedAt.Add(flushWait)) }

// flush calls the unload route of an IDLE slot that may be loaded without our knowledge (accounting §3). If its
// server can tell that it works, that work may finish. target is who needs the memory; nil: it was asked for by hand.
func (s *State) flush(now time.Time, v, target *slot) {
	v.gate = gate{closed: true, room: target != nil && target != v, own: target == v, since: now}
	s.proceedDrain(now, v)
}

// flushed ends a flush. One that failed is tried again for the slot's own jobs, after a pause.
func (s *State) flushed(now time.Time, v *slot, failure string) {
	v.stop, v.gate = stopping{}, gate{}
	v.flushBad = failure
	d := Decision{At: now, Kind: "flushed", Slot: v.cfg.Name, GPU: v.gpu(), Reason: "its unload route was called, since its server may have been loaded without the broker"}
	if failure != "" {
		v.unloaded = false
		v.unloadBad++
		v.retryAt = now.Add(backoff(v.unloadBad))
		d.Reason += ", and failed: " + failure
		s.decide(d)
		return
	}
	v.unloadBad, v.flushedAt = 0, now
	s.decide(d)
	s.cards(v, func(c *card, h *holding) {
		h.foreign = s.outsiders(c)
		c.ebbs = later(c.ebbs, now.Add(flushWait))
	})
	s.emit(Effect{Kind: LookNow, Slot: v.cfg.Name})
	for _, t := range s.slots { // its memory has time to come back
		if !t.want.blocked.IsZero() {
			t.want.blocked = now
		}
	}
}
