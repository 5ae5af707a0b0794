package scheduler

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Explanation is what would happen if a request came now.
type Explanation struct {
	Slot     string    `json:"consumer"`
	Priority int       `json:"priority"`
	Outcome  string    `json:"outcome"` // runs, waits, loads, evicts, refused
	Reason   string    `json:"reason"`  // in a sentence
	Code     Code      `json:"code,omitempty"`
	Victims  []string  `json:"victims,omitempty"` // who would be unloaded, now or once they may be
	Need     gpu.Bytes `json:"need,omitempty"`
	Avail    gpu.Bytes `json:"available,omitempty"`
	Estimate float64   `json:"estimate_s"` // until it would run; -1: not known
}

// Explain says what would happen if a request for a slot came now. Nothing
// happens: the state is as before.
func (s *State) Explain(now time.Time, slotName string, priority int) Explanation {
	out := Explanation{Slot: slotName, Priority: priority, Outcome: "refused", Estimate: -1}
	sl := s.named[slotName]
	if r := s.refusesNew(sl, slotName); r != nil {
		out.Code, out.Reason = r.Code, r.Message
		return out
	}
	j := &job{slot: sl, priority: priority, submitted: now, bulk: priority >= s.cfg.ReservedBelow, heapIndex: -1}
	wake, effects, credit, empty := s.wake, len(s.effects), sl.credit, sl.emptyAt
	if sl.queue.count == 0 { // what its coming would do
		sl.credit.lapse(now, s.creditFor(sl))
	}
	sl.queue.push(j)
	defer func() {
		sl.queue.remove(j)
		sl.credit, sl.emptyAt = credit, empty
		s.wake, s.effects = wake, s.effects[:effects]
	}()
	if sl.cfg.Cloud || s.cfg.Mode == Passthrough {
		out.Outcome, out.Reason, out.Estimate = "runs", "it needs nothing of this machine", 0
		return out
	}
	ahead := sl.queue.ahead(j)
	if s.runsNow(sl, j) {
		out.Outcome, out.Reason, out.Estimate = "runs", "it is loaded, and its GPU is free", 0
		return out
	}
	if r := s.full(s.waiting, s.bulk, j); r != nil {
		out.Code, out.Reason = r.Code, r.Message
		return out
	}
	if d := s.estimate(now, sl, ahead); d >= 0 {
		out.Estimate = d.Seconds()
	}
	if sl.cold() {
		s.explainCold(now, sl, &out)
		return out
	}
	out.Outcome = "waits"
	switch {
	case sl.lent:
		out.Reason = "its GPU is lent until " + s.lentUntil(now, sl).UTC().Format(time.RFC3339)
	case sl.state == Loading:
		out.Reason = "it is being loaded"
	case sl.state == Stopping:
		out.Reason = "it is being unloaded, and would be loaded again"
	case sl.gate.closed:
		out.Reason = fmt.Sprintf("it is about to be unloaded for %s, and would be loaded again", orElse(name(sl.gate.target), "nobody in particular"))
	case !sl.alive():
		out.Reason = "its server has just died, or may have"
	case ahead > 0:
		out.Reason = fmt.Sprintf("%d requests for it are before this one", ahead)
	case !sl.hasPlace(j):
		out.Reason = fmt.Sprintf("it runs %d requests, and its concurrency is %d", sl.active, sl.cfg.Concurrency)
	case !s.lockFree(sl):
		out.Reason = "it is loaded, and another computes on its GPU"
	default:
		out.Reason = "it is loaded, and requests of other models on its GPU are before this one"
	}
	return out
}

// runsNow reports whether a job that is in its slot's queue would be admitted at once.
func (s *State) runsNow(sl *slot, j *job) bool {
	open := s.open(sl, j) || sl.state == Ready && sl.gate.idle && sl.alive() && !sl.lent && sl.health == healthGood && sl.hasPlace(j) // that gate opens for it
	if !open || sl.queue.head() != j || !s.lockFree(sl) {
		return false
	}
	if sl.cfg.LockNone {
		return true
	}
	var earlier []*slot
	for _, o := range s.slots {
		if o != sl && o.queue.count > 0 && (s.open(o, o.queue.head()) || o.want.lock) && order(o.queue.first(), sl.queue.first()) < 0 {
			earlier = append(earlier, o)
		}
	}
	return s.mayOvertake(sl, earlier)
}

// explainCold is the part of a slot that is not loaded. The request has been put into its queue, hypothetically.
func (s *State) explainCold(now time.Time, t *slot, out *Explanation) {
	out.Need, out.Avail = s.needOf(t)
	out.Outcome = "waits"
	if r := s.neverFits(t); r != nil {
		out.Outcome, out.Code, out.Reason = "refused", r.Code, r.Message
		return
	}
	switch {
	case t.health == healthUnknown || !s.sampled:
		out.Reason = "nothing is known of its server or of the GPU yet"
		return
	case t.lent:
		out.Reason = "its GPU is lent until " + s.lentUntil(now, t).UTC().Format(time.RFC3339)
		return
	case t.cfg.Stale:
		out.Reason = "the settings of its server have changed: it is stopped first"
		return
	case t.gate.closed:
		out.Reason = "it is about to be unloaded, and would be loaded again"
		return
	case t.want.victim != nil:
		out.Reason = fmt.Sprintf("it waits for %s to make room", t.want.victim.cfg.Name)
		return
	case now.Before(t.coolUntil):
		out.Reason = "it cools down after a failed load until " + t.coolUntil.UTC().Format(time.RFC3339)
		return
	}
	if r := s.reserver(now, t); r != nil {
		out.Reason = fmt.Sprintf("%s, which is overdue, takes memory before it", r.cfg.Name)
		return
	}
	fits := s.fits(t)
	moves := slices.ContainsFunc(t.on, func(h *holding) bool { return s.transition(h.card) != nil })
	if why := s.holdUp(now, t); why != "" && (fits || moves) { // else who is to make room for it is told to at once
		out.Reason = "it " + why
		return
	}
	if fits && t.cfg.lazy() && !s.mayEnter(t) {
		out.Reason = "it loads inside its first request, which waits for the lock of its GPU"
		return
	} else if fits {
		out.Outcome, out.Reason = "loads", fmt.Sprintf("it would be loaded at once: it needs %s, and %s is available", out.Need, out.Avail)
		return
	}
	if own := s.mayHoldItself(t); (own || t.ebbing(now)) && s.lacksOnlyOutsiders(t) {
		then := "it has just been asked to give that back"
		if own {
			then = "its unload route would be called first"
		}
		out.Reason = fmt.Sprintf("it needs %s, %s is available, and its own server may hold the rest: %s", out.Need, out.Avail, then)
		return
	}
	if s.spent(t) {
		out.Reason = fmt.Sprintf("it needs %s, %s is available, and unloads did not bring the memory back", out.Need, out.Avail)
		if until := t.want.blocked.Add(s.cfg.OutsiderWait); s.unflushed(now, t) != nil || !t.want.blocked.IsZero() && now.Before(until) {
			out.Reason += ": it waits for what servers were asked to give back"
			return
		}
		out.Outcome, out.Code = "refused", VRAMExhausted
		return
	}
	if plan := s.choose(t, s.permitsNow(now, t)); plan != nil {
		out.Victims = slotNames(plan)
		out.Outcome, out.Reason = "evicts", fmt.Sprintf("it needs %s, %s is available: %s would make way at once", out.Need, out.Avail, names(plan))
		if s.cfg.ObserveEvictions {
			out.Outcome, out.Code, out.Reason = "refused", VRAMExhausted, out.Reason+", were evictions not only observed"
		}
		return
	}
	if could := s.choose(t, func(v *slot) bool { return s.permitted(t, v) }); could != nil {
		out.Victims = slotNames(could)
		out.Reason = fmt.Sprintf("it needs %s, %s is available: it would wait until it may take the memory of %s, at the latest when it has waited for %s and they have served what came before",
			out.Need, out.Avail, names(could), Rounded(s.bound(t)))
		return
	}
	out.Outcome, out.Code = "refused", VRAMExhausted
	out.Reason = fmt.Sprintf("it needs %s, %s is available, and nothing that may be unloaded would bring enough: %s; it would be refused after %s", out.Need, out.Avail, s.inTheWay(t), Rounded(s.cfg.OutsiderWait))
}

// reserver is an overdue target that is planned before t and keeps memory from it; nil: none does.
func (s *State) reserver(now time.Time, t *slot) *slot {
	for _, o := range s.slots {
		if o == t || o.cfg.Stale || !o.cold() || o.queue.count == 0 || !overlap(o, t) && !conflict(o, t) || t.ranked().compare(o.ranked()) < 0 {
			continue
		}
		if o.want.victim != nil || o.want.lock && s.overdue(now, o) {
			return o
		}
		if (!s.fits(o) || len(o.on) > 1 && s.holdUp(now, o) != "") && s.reserves(now, o) {
			return o
		}
	}
	return nil
}

func slotNames(slots []*slot) (out []string) {
	for _, sl := range slots {
		out = append(out, sl.cfg.Name)
	}
	return out
}
