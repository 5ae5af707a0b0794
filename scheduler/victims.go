package scheduler

import (
	"fmt"
	"slices"
	"time"
)

// permitted reports whether v may ever be unloaded for t, whatever it does now (spec §3.2).
func (s *State) permitted(t, v *slot) bool {
	return !s.cfg.ObserveEvictions && s.candidate(t, v)
}

func (s *State) candidate(t, v *slot) bool {
	return v.state != Idle && v != t && s.shields(t, v) == "" && (overlap(t, v) || conflict(t, v))
}

// protects names what keeps v from being unloaded for t.
func (s *State) protects(t, v *slot) string {
	if s.cfg.ObserveEvictions {
		return orElse(s.shields(t, v), "eviction observe")
	}
	return s.shields(t, v)
}

// conflict reports whether two slots may never be resident together (spec §3.2).
func conflict(a, b *slot) bool {
	if a.cfg.TurnOnly || b.cfg.TurnOnly { // never resident
		return false
	}
	return b.cfg.listed(a.cfg.Conflicts) || a.cfg.listed(b.cfg.Conflicts)
}

// shields names what of the two slots' own settings does.
func (s *State) shields(t, v *slot) string {
	switch {
	case v.pinned():
		return "pin"
	case v.cfg.NoEvict:
		return "no_evict"
	case v.cfg.VRAMManaged:
		return "vram_managed"
	case v.cfg.listed(t.cfg.Coexist):
		return fmt.Sprintf("can_coexist_with of %s", t.cfg.Name)
	case s.cfg.VictimLower && !s.lower(t, v):
		return "victim_priority lower"
	case !v.cfg.CanUnload:
		return "no unload route"
	default:
		return ""
	}
}

// lower reports whether what v was last used for is less urgent than what t is wanted for.
func (s *State) lower(t, v *slot) bool {
	first, used := t.queue.first(), v.used()
	if v.gate.closed && v.gate.target == t { // who comes meanwhile can't undo it
		return !used || first == nil || v.lastPrio > first.priority
	}
	if first == nil || !used && v.queue.count == 0 {
		return true
	}
	return (!used || v.lastPrio > first.priority) && (v.queue.count == 0 || v.queue.first().priority > first.priority)
}

// used reports whether a job of the slot was ever admitted.
func (sl *slot) used() bool { return !sl.lastUse.IsZero() || sl.busy() }

// claimant is a cold target with what it goes by against others.
type claimant struct {
	*slot
	first *job
	age   time.Time     // when it began
	bound time.Duration // B of the policy
}

func (s *State) claimant(t *slot) claimant {
	return claimant{slot: t, first: t.queue.first(), age: t.ageStart(), bound: s.bound(t)}
}

// against is from when the target's age counts, and how long it must be, before
// it may take what v holds, or would hold next. A target that is more urgent than v's next job, or than v's
// last if none waits, needs a tenth of the bound, and of its own age alone (the priority clause).
func (t claimant) against(v *slot) (since time.Time, wants time.Duration, urgent bool) {
	next := v.queue.first()
	if next != nil && next.priority > t.first.priority || next == nil && v.used() && v.lastPrio > t.first.priority {
		return t.first.submitted, t.bound / 10, true
	}
	return t.age, t.bound, false
}

// overdue reports whether a cold target has waited for as long as warm jobs may overtake it.
func (s *State) overdue(now time.Time, t *slot) bool {
	return s.due(now, t.ageStart().Add(s.bound(t)))
}

// mayReserve reports whether a target that could take the memory of some may keep others from it: it is
// overdue, or would be by the priority clause (policy rule 5).
func (s *State) mayReserve(now time.Time, t *slot, could []*slot) bool {
	c := s.claimant(t)
	return s.due(now, c.age.Add(c.bound)) || slices.ContainsFunc(could, func(v *slot) bool {
		since, wants, urgent := c.against(v)
		return urgent && s.due(now, since.Add(wants))
	})
}

// keptUntil is how long an idle slot is kept against a newcomer (policy rule 2).
func (s *State) keptUntil(v *slot) time.Time {
	keep := max(time.Duration(s.cfg.Hold*float64(v.switchCost())), v.cfg.KeepAlive)
	return later(later(v.idleAt, v.leftAt).Add(keep), v.keep)
}

// permitsNow adds rules 2, 3 and 4 of the policy: which slots may go for t at this moment?
func (s *State) permitsNow(now time.Time, t *slot) func(v *slot) bool {
	c := s.claimant(t)
	return func(v *slot) bool { return s.permittedNow(now, c, v) }
}

func (s *State) permittedNow(now time.Time, t claimant, v *slot) bool {
	if !s.candidate(t.slot, v) || v.gate.closed || v.state == Stopping || !s.due(now, v.retryAt) {
		return false
	}
	works := v.busy() || v.queue.count > 0
	// Rule 4: no thrash. As long as it holds, nothing else matters.
	if v.state == Ready && works && (v.started == 0 || !s.due(now, v.readyAt.Add(v.switchCost()))) {
		return false
	}
	since, wants, urgent := t.against(v)
	old := s.due(now, since.Add(wants))
	switch {
	case v.state == Unknown: // one that waits itself goes too if t is before it: else the two would wait for each other
		return v.health != healthUnknown && (v.queue.count == 0 || t.ranked().compare(v.ranked()) < 0)
	case v.state == Loading: // abandoned
		return v.queue.count == 0 && s.due(now, v.emptyAt.Add(s.cfg.AbandonAfter))
	case !works: // rule 2
		return old || s.due(now, s.keptUntil(v))
	}
	// Rule 3: by the age of its next job, relative to the target's.
	if next, waits := v.queue.oldest(t.first.priority); waits && next.Before(since.Add(wants)) || !waits && !old {
		return false
	}
	// Rule 4 once more: the batch that was queued when it became ready.
	batch, queued := v.queue.oldest(anyPriority)
	return urgent || !queued || batch.After(v.readyAt) || s.due(now, v.readyAt.Add(s.cfg.OvertakeMax))
}

// choose picks the slots that must go so that t fits, out of those that may:
// idle ones first, then by spec §3.4, only as many as needed, and without
// those that turned out not to be. nil: all together are not enough. That t
// does not fit as things are is known. What is returned is valid until the next choice.
func (s *State) choose(t *slot, may func(v *slot) bool) []*slot {
	all := s.able(may)
	if len(all) == 0 {
		return nil
	}
	slices.SortStableFunc(all, evictOrder)
	if t.want.extra { // one that goes, though the rest would fit
		return all[:1]
	}
	if !s.fitsAfter(t, all...) {
		return nil
	}
	chosen := s.spare.chosen[:0]
	for _, v := range all {
		if chosen = append(chosen, v); s.fitsAfter(t, chosen...) {
			break
		}
	}
	s.spare.chosen = chosen
	for i := len(chosen) - 2; i >= 0; i-- {
		if rest := slices.Delete(slices.Clone(chosen), i, i+1); s.fitsAfter(t, rest...) {
			chosen = rest
		}
	}
	return chosen
}

// able are the slots that may go, valid until the next choice.
func (s *State) able(may func(v *slot) bool) []*slot {
	all := s.spare.able[:0]
	for _, v := range s.around() {
		if may(v) {
			all = append(all, v)
		}
	}
	s.spare.able = all
	return all
}

// evictOrder: idle before busy; never used; lowest priority; least recently used (spec §3.4).
func evictOrder(a, b *slot) int {
	rank := func(sl *slot) int {
		if sl.busy() || sl.queue.count > 0 {
			return 1
		}
		return 0
	}
	if d := rank(a) - rank(b); d != 0 {
		return d
	}
	if a.lastUse.IsZero() != b.lastUse.IsZero() {
		if a.lastUse.IsZero() {
			return -1
		}
		return 1
	}
	if d := b.lastPrio - a.lastPrio; d != 0 && !a.lastUse.IsZero() {
		return d
	}
	return a.lastUse.Compare(b.lastUse)
}

// anyVictim reports whether something could go for t, now or later.
func (s *State) anyVictim(t *slot) bool {
	return slices.ContainsFunc(s.slots, func(v *slot) bool { return s.permitted(t, v) })
}
