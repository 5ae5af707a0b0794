package scheduler

import (
	"fmt"
	"time"
)

// idles reports whether the slot is one that goes when nobody uses it, and nobody
// does just now (spec §5.1).
func (s *State) idles(sl *slot) bool {
	return s.cfg.Mode == Evicting && s.cfg.IdleUnload != IdleOff && sl.cfg.IdleTimeout > 0 && !sl.cfg.Cloud && !sl.pinned() && sl.cfg.CanUnload &&
		(!sl.cfg.VRAMManaged || sl.cfg.OwnIdle) &&
		sl.state == Ready && !sl.busy() && sl.queue.count == 0
}

// idleEnd is when an idle slot has been so for long enough: counted from READY,
// or the end of its last job, whichever is later.
func (s *State) idleEnd(sl *slot) time.Time {
	timeout := sl.cfg.IdleTimeout
	if sl.warmFor > 0 {
		timeout = sl.warmFor
	}
	return later(sl.idleAt.Add(max(timeout, sl.cfg.KeepAlive)), sl.keep)
}

// idleOver reports whether an idle slot is to be unloaded now.
func (s *State) idleOver(now time.Time, sl *slot) bool {
	return s.cfg.IdleUnload == IdleOn && s.idles(sl) && sl.health == healthGood && !now.Before(s.idleEnd(sl))
}

// unloadIdle unloads what nobody uses. It is looked at in the same step in
// which jobs are admitted, so no job can come in between.
func (s *State) unloadIdle(now time.Time) {
	for _, sl := range s.slots {
		// A server that does not answer would not hear that it has to go, and keep others from loading meanwhile.
		if !s.idles(sl) || sl.gate.closed || sl.health != healthGood || !s.due(now, s.idleEnd(sl)) {
			continue
		}
		if s.cfg.IdleUnload == IdleObserve {
			if !sl.observed.Equal(sl.idleAt) {
				sl.observed = sl.idleAt
				s.decide(Decision{At: now, Kind: "would_unload", Slot: sl.cfg.Name, GPU: sl.gpu(),
					Reason: fmt.Sprintf("nobody has used it for %s; idle unloads are only observed", Rounded(now.Sub(sl.idleAt)))})
			}
			continue
		}
		if !s.due(now, sl.retryAt) || !s.mayMove(sl) { // what moves says when it is done
			continue
		}
		sl.gate = gate{closed: true, idle: true, since: now}
		s.proceedDrain(now, sl)
	}
}

// busyThough lets an idle slot be whose server works for somebody else, or can't be asked.
func (s *State) busyThough(now time.Time, sl *slot, failed bool) {
	if failed {
		sl.unloadBad++
		sl.retryAt = now.Add(backoff(sl.unloadBad))
		s.reopen(now, sl, "its server can't be asked whether it works")
		return
	}
	sl.idleAt = now
	s.reopen(now, sl, "its server works for somebody else")
}

// drain lets no more jobs in, or lets them in again.
func (s *State) drain(now time.Time, e Drain) {
	if e.Final {
		s.ending = true
	} else if e.Slot == "" {
		s.draining = !e.Off
	} else if sl := s.named[e.Slot]; sl != nil {
		sl.draining = !e.Off
	}
	s.pump(now)
}

// Ending is what all jobs get because the process ends; nil: it does not.
func (s *State) Ending() *Refusal {
	if !s.ending {
		return nil
	}
	return s.drained(nil)
}

// drained is what a job gets that may not come in; nil: it may.
func (s *State) drained(sl *slot) *Refusal {
	switch {
	case s.draining || s.ending:
		return &Refusal{Code: Draining, RetryAfter: 5 * time.Second, Message: "no more requests are taken: the broker is drained, or stops"}
	case sl.draining:
		return &Refusal{Code: Draining, RetryAfter: 30 * time.Second, Message: fmt.Sprintf("no more requests are taken for consumer %q: it is drained", sl.cfg.Name)}
	default:
		return nil
	}
}
