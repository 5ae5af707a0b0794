package scheduler

import "time"

// Choose says which of a ladder's candidates is to serve a request that comes
// now (spec §4.7): the first if it is warm, or could be loaded with nothing
// unloaded for it; else the first of the others that is warm; else the first all
// the same. pinPrimary makes it the first in any case. It changes nothing. It
// returns "" only if there are no candidates.
func (s *State) Choose(now time.Time, candidates []string, pinPrimary bool) string {
	if len(candidates) == 0 {
		return ""
	}
	if first := s.named[candidates[0]]; pinPrimary || len(candidates) == 1 || s.isWarm(first) || s.loadable(now, first) {
		return candidates[0]
	}
	for _, name := range candidates[1:] {
		if s.isWarm(s.named[name]) {
			return name
		}
	}
	return candidates[0]
}

// takes reports whether jobs for a slot are let in at all; nil stands for one that there is not.
func (s *State) takes(sl *slot) bool {
	return sl != nil && !sl.gone && s.refusesNew(sl, sl.cfg.Name) == nil
}

// isWarm reports whether a job for a slot waits for nothing but its turn.
func (s *State) isWarm(sl *slot) bool {
	switch {
	case !s.takes(sl):
		return false
	case sl.cfg.Cloud:
		return true
	case s.cfg.Mode == Passthrough: // there a server that is unhealthy, or not known yet, gets its requests all the same
		return sl.health != healthBad
	default: // a gate that is closed since nobody uses the slot opens for the first who comes
		return sl.state == Ready && sl.alive() && sl.health == healthGood && !sl.lent && (!sl.gate.closed || sl.gate.idle)
	}
}

// loadable reports whether a cold slot is being loaded, or could be with nothing unloaded for it.
func (s *State) loadable(now time.Time, sl *slot) bool {
	if s.cfg.Mode != Evicting || !s.takes(sl) || sl.cfg.Stale || sl.health != healthGood || sl.gate.closed || now.Before(sl.coolUntil) || s.lentOn(now, sl) {
		return false
	}
	switch sl.state {
	case Loading:
		return true
	case Idle, Unknown:
		return s.sampled && !sl.want.extra && (s.fits(sl) || s.mayHoldItself(sl) && s.lacksOnlyOutsiders(sl))
	default:
		return false
	}
}
