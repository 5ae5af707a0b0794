package scheduler

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Times of a hand-over (accounting §4, spec §3.9).
const (
	quiet        = 750 * time.Millisecond // no further rise of free memory for so long: what is back is back
	blindWait    = time.Second            // how long freed memory is waited for without telemetry, or a look at it after a failed load
	maxBackoff   = 60 * time.Second
	cutWait      = 5 * time.Second  // a job that max_run ends is over so soon after
	drainRetry   = 60 * time.Second // a slot that didn't drain is left alone for so long
	failedLoadOO = 1                // loads that ran out of memory and are tried once more
	partlyLoaded = 2                // loads that came only partly onto the GPU and are tried once more
)

// backoff is 1, 2, 4 … 60 s after n failures in a row.
func backoff(n int) time.Duration {
	return min(maxBackoff, time.Second<<min(max(n-1, 0), 6))
}

// close shuts a slot's gate: what runs finishes, nothing enters.
func (s *State) close(now time.Time, v, target *slot, why string) {
	v.gate = gate{closed: true, target: target, since: now}
	if target != nil {
		target.want.victim = v
	}
	if v.busy() {
		s.decide(Decision{At: now, Kind: "drain", Slot: v.cfg.Name, Target: name(target), GPU: v.gpu(), Reason: why})
	}
}

// reopen lets jobs in again, unless the slot's driver is to be replaced.
func (s *State) reopen(now time.Time, v *slot, why string) {
	if t := v.gate.target; t != nil && t.want.victim == v {
		t.want.victim = nil
	}
	v.gate = gate{}
	if v.cfg.Stale { // nothing enters by settings that do not rule any more
		s.renew(now, v)
	}
	if !v.gate.closed {
		s.decide(Decision{At: now, Kind: "reopen", Slot: v.cfg.Name, GPU: v.gpu(), Reason: why})
	}
}

// proceed takes every hand-over as far as it can go now.
func (s *State) proceed(now time.Time) {
	for _, sl := range s.slots {
		if sl.gone {
			s.retire(now, sl)
		}
		if sl.cfg.Stale && !sl.gone {
			s.renew(now, sl)
		}
		if sl.gate.closed {
			s.proceedDrain(now, sl)
		}
		if sl.stop.called {
			s.settle(now, sl)
		}
	}
	s.dropGone()
}

// proceedDrain unloads a slot whose gate is closed, once nothing runs there.
func (s *State) proceedDrain(now time.Time, v *slot) {
	t := v.gate.target
	switch {
	case v.state == Stopping || v.stop.flush:
		return
	case s.cfg.Mode != Evicting: // by a configuration that came meanwhile
		s.reopen(now, v, "the scheduler unloads nothing any more")
		return
	case v.gate.renews && !v.cfg.Stale:
		s.reopen(now, v, "its settings are as they were")
		return
	case v.gate.lent && (!v.lent || v.pinned()):
		s.reopen(now, v, "its GPU is not lent any more, or it is pinned")
		return
	case v.gate.restores && (!t.cold() || s.idleSince(t).IsZero()):
		s.reopen(now, v, fmt.Sprintf("%s is not to be restored any more", t.cfg.Name))
		return
	case v.state == Idle && !v.gate.own && v.queue.count > 0: // it is wanted itself now
		s.reopen(now, v, "requests for it have come")
		return
	case v.gate.own && v.queue.count == 0:
		s.reopen(now, v, "nobody waits for it any more")
		return
	case t != nil && !v.gate.restores && (t.queue.count == 0 || !t.cold()):
		s.reopen(now, v, fmt.Sprintf("%s does not wait any more", t.cfg.Name))
		return
	case v.gate.room && s.cfg.ObserveEvictions:
		s.reopen(now, v, "evictions are only observed now")
		return
	case v.gate.idle && !s.idleOver(now, v): // used at the last instant, or reconfigured
		s.reopen(now, v, "it is in use, or to stay, after all")
		return
	case s.due(now, v.gate.since.Add(s.drainTime(v))):
		v.retryAt = now.Add(drainRetry)
		s.reopen(now, v, fmt.Sprintf("its work did not end within drain_timeout %s", Rounded(s.drainTime(v))))
		return
	case t != nil && s.protects(t, v) != "": // by a configuration that came meanwhile
		s.reopen(now, v, fmt.Sprintf("it is protected from %s by %s", t.cfg.Name, s.protects(t, v)))
		return
	case t != nil && !t.want.extra && s.fits(t):
		s.reopen(now, v, fmt.Sprintf("%s fits without its going", t.cfg.Name))
		return
	case v.busy() || s.worksBefore(v):
		return
	case v.cfg.CanBusy && v.state != Loading && !v.gate.clear:
		s.ask(v, 0)
		return
	}
	if s.mayMove(v) {
		s.stopNow(now, v)
	}
}

// drainTime is how long the work of a slot is waited for whose gate is closed. With max_run its jobs are cut by then, the last of
// them just before; that takes a moment.
func (s *State) drainTime(v *slot) time.Duration {
	if v.cfg.MaxRun == 0 {
		return s.cfg.DrainTimeout
	}
	return max(s.cfg.DrainTimeout, v.cfg.MaxRun+cutWait)
}

// mayMove reports whether no other slot loads or unloads on the slot's GPUs (accounting §4).
func (s *State) mayMove(v *slot) bool {
	for _, h := range v.on {
		if o := s.transition(h.card); o != nil && o != v {
			return false
		}
		if w := s.warmer(h.card); w != nil && w != v {
			return false
		}
	}
	return true
}

// stopNow sends the unload call out.
func (s *State) stopNow(now time.Time, v *slot) {
	st := stopping{from: v.state, target: v.gate.target, idle: v.gate.idle, began: now}
	for _, h := range v.on {
		var seen, free, used, out gpu.Bytes
		fresh := false
		if c := s.card(h.card); c != nil {
			l, i := s.ledger(c, v)
			seen, free, used, out = l.Seen[i], c.Free, l.Used, l.Outsiders
			if leak := v.leak(h, out); v.state == Ready {
				h.booking, h.before, seen, out = h.booking+leak, 0, seen+leak, out-leak
			}
			fresh = v.state == Ready && !c.seenAt.Before(later(v.readyAt, v.settledAt))
		}
		st.fresh = append(st.fresh, fresh)
		st.seen, st.free, st.used, st.out = append(st.seen, seen), append(st.free, free), append(st.used, used), append(st.out, out)
	}
	why := unloadReason(st.target)
	switch {
	case v.state == Idle:
		why = "memory is short, and the server may hold some that the broker did not see it take"
	case st.idle:
		why = fmt.Sprintf("nobody has used it for %s", Rounded(now.Sub(v.idleAt)))
	case v.gate.lent:
		why = "its GPU is lent"
	case v.gone && st.target == nil:
		why = "it is not in the configuration any more"
	}
	if v.state != Idle {
		s.to(now, v, Stopping)
	}
	if st.flush = v.state == Idle; st.flush && s.planning {
		s.spare.present = append(s.spare.present, v) // it moves something now
	}
	v.stop, v.unloaded = st, true
	s.nextEpoch(v)
	s.freeze(v)
	s.emit(Effect{Kind: StartUnload, Slot: v.cfg.Name, Epoch: v.epoch})
	s.decide(Decision{At: now, Kind: "unload", Slot: v.cfg.Name, Target: name(st.target), GPU: v.gpu(), Reason: why})
}

func unloadReason(t *slot) string {
	if t == nil {
		return "asked for by hand"
	}
	return fmt.Sprintf("its memory is needed for %s", t.cfg.Name)
}

// freeze ends the attribution of free memory's moves to the other slots of the GPUs on which sl begins a transition.
func (s *State) freeze(sl *slot) {
	for _, o := range s.slots {
		for _, h := range o.on {
			if o != sl && sl.hold(h.card) != nil {
				h.frozen = true
			}
		}
	}
}

// unloadDone takes in what the unload call came to.
func (s *State) unloadDone(now time.Time, e UnloadDone) {
	v := s.named[e.Slot]
	if v == nil || v.epoch != e.Epoch || v.stop.began.IsZero() || v.stop.called {
		return
	}
	s.nextEpoch(v)
	switch {
	case v.stop.flush:
		s.flushed(now, v, e.Err)
	case e.Err != "":
		s.unloadFailed(now, v, e.Err)
	default:
		v.stop.called, v.stop.confirmed, v.stop.at, v.stop.lastRise = true, e.Confirmed, now, now
		s.emit(Effect{Kind: LookNow, Slot: v.cfg.Name}) // the memory may be back already
	}
	if e.Refused && (v.state != Idle || v.cfg.CanProbe) { // else it would be flushed again at once
		s.nobodyListens(now, v, "its server does not listen any more")
	}
	s.pump(now)
}

// unloadFailed puts a slot back to where it came from. A failed unload is no eviction (spec §3.7).
func (s *State) unloadFailed(now time.Time, v *slot, why string) {
	s.counts.UnloadFailures++
	v.unloadBad++
	v.retryAt = now.Add(backoff(v.unloadBad))
	s.decide(Decision{At: now, Kind: "unload_failed", Slot: v.cfg.Name, Target: name(v.stop.target), GPU: v.gpu(), Reason: why})
	if t := v.stop.target; t != nil && t.want.victim == v {
		t.want.victim = nil
	}
	if v.cfg.CanProbe { // it may be gone altogether
		s.emit(Effect{Kind: ProbeNow, Slot: v.cfg.Name})
	}
	from := v.stop.from
	v.stop, v.gate = stopping{}, gate{}
	abandoned := from == Loading
	if abandoned { // the load may have got anywhere
		from = Unknown
	}
	ready, idle, started := v.readyAt, v.idleAt, v.started
	s.to(now, v, from)
	if abandoned {
		v.loadsUntil = v.loadAt.Add(2 * v.loadTime())
	}
	if from == Ready { // as if nothing had been
		v.readyAt, v.idleAt, v.started = ready, idle, started
	}
}

// settle waits for the memory of an unloaded slot (accounting §4).
func (s *State) settle(now time.Time, v *slot) {
	known, looked, done, early, absent := true, true, true, v.stop.confirmed, v.stop.confirmed
	gone, large := true, false
	for i, h := range v.on {
		c := s.card(h.card)
		if c == nil || !c.Known {
			known = false
			continue
		}
		// A look from before the call returned may be older than the load even.
		looked = looked && !c.seenAt.Before(v.stop.at)
		rise := c.Free - v.stop.free[i]
		if rise > v.stop.best {
			v.stop.best, v.stop.lastRise = rise, c.seenAt
		}
		done = done && rise >= v.stop.seen[i]-s.knownResidue(v, h)
		absent = absent && rise <= s.cushion(c) && s.absent(v, i, c)
		gone = gone && rise <= 0 && v.stop.seen[i] == 0  // as measured
		large = large || v.stop.seen[i] > 2*s.cushion(c) // else what is there can't be told from nothing
		// Only a look can tell that nothing rises any more, the mere passing of time can't.
		// What is known by now to take less than it was booked with gives back less.
		early = early && 2*rise >= min(v.stop.seen[i], v.stop.used[i], v.claim()) && !c.seenAt.Before(v.stop.lastRise.Add(quiet))
	}
	switch t := v.stop.target; {
	case !known:
		if !s.due(now, v.stop.at.Add(blindWait)) {
			return
		}
	case looked && done:
		v.stop.absent = gone && v.stop.from == Ready
	case looked && absent && large:
		v.stop.absent = true
	case looked && t != nil && t.queue.count > 0 && t.cold() && s.fitsAfter(t, v):
	case early:
	case s.due(now, v.stop.at.Add(s.cfg.EvictWait)):
	default:
		return
	}
	s.stopped(now, v)
}

// absent reports whether nothing of a slot's memory is left on a GPU, as far as others and outsiders from before its load explain what is used.
func (s *State) absent(v *slot, i int, c *card) bool {
	h := v.on[i]
	l, at := s.ledger(c, v)
	rest := l.Used - max(v.stop.out[i], h.loadOut)
	for k, seen := range l.Seen {
		if k != at {
			rest -= seen
		}
	}
	return rest <= s.knownResidue(v, h)+s.cushion(c)
}

// knownResidue is what stays behind after an unload, as far as was seen before.
func (s *State) knownResidue(v *slot, h *holding) gpu.Bytes {
	if h.known >= 0 {
		return h.known
	}
	return v.cfg.Residual
}

// residueNow is r of accounting §1 for a slot whose unload has returned: what
// has not come back and is nobody else's either.
func (s *State) residueNow(v *slot, i int, c *card) gpu.Bytes {
	if !c.Known {
		return 0
	}
	h := v.on[i]
	l, at := s.ledger(c, v)
	var others gpu.Bytes
	for k, seen := range l.Seen {
		if k != at {
			others += seen
		}
	}
	r := max(0, min(v.stop.seen[i]-(c.Free-v.stop.free[i]), l.Used-others-v.stop.out[i]))
	if h.hasMeas {
		r = min(r, h.measured)
	}
	return r
}

// stopped ends an unload: what didn't come back is booked to the slot as its residue.
func (s *State) stopped(now time.Time, v *slot) {
	var gave, kept, base, footprint gpu.Bytes
	known := true
	for i, h := range v.on {
		c := s.card(h.card)
		if c == nil {
			continue
		}
		h.residue = s.residueNow(v, i, c)
		before := s.knownResidue(v, h)
		took := h.peak
		if c.Known && !h.hasMeas { // what came back, and what its next load will use again
			most := v.stop.seen[i]
			if v.stop.fresh[i] { // else what outsiders seem to have taken since its load may be another's that has gone since
				most += max(0, v.stop.out[i]-h.loadOut)
			}
			took = max(took, clamp(c.Free-v.stop.free[i], 0, most)+min(h.residue, v.cfg.Residual))
		}
		footprint += took
		h.peak = 0
		h.base, h.baseFree, h.baseOut, h.frozen = h.residue, c.Free, v.stop.out[i], false
		h.booking, h.drop, h.hasMeas = 0, 0, false // what was measured may be older than the unload
		kept += max(0, h.residue-before)
		base += min(v.stop.seen[i], v.stop.used[i])
		gave += clamp(c.Free-v.stop.free[i], 0, v.stop.seen[i]+v.stop.out[i])
		known = known && c.Known
		h.known = h.residue
	}
	t := v.stop.target
	v.stopCost.add(now.Sub(v.stop.began))
	v.unloadBad = 0
	d := Decision{At: now, Kind: "unloaded", Slot: v.cfg.Name, Target: name(t), GPU: v.gpu(), Took: now.Sub(v.stop.began).Seconds(),
		Reason: gaveBack(gave, base, known, v.stop.absent)}
	switch {
	case t != nil:
		d.Kind = "evicted"
		s.counts.Evictions++
		v.evicted = true
		t.want.extra = false
		if t.want.victim == v {
			t.want.victim = nil
		}
		if 2*kept > base {
			t.want.tries = append(t.want.tries, v.cfg.Name+": "+d.Reason)
		}
	case v.stop.idle:
		d.Kind = "idle_unloaded"
		s.counts.IdleUnloads++
	default:
		v.evicted = v.gate.lent
		s.counts.ManualUnloads++
	}
	s.learn(v, footprint)
	v.stop = stopping{}
	s.to(now, v, Idle)
	s.decide(d)
}

// gaveBack says what came back of what a slot was seen to hold.
func gaveBack(gave, held gpu.Bytes, known, absent bool) string {
	switch {
	case !known:
		return "what it gave back is not known: there is no telemetry"
	case absent:
		return "its memory was gone already: its server had been unloaded before"
	default:
		return fmt.Sprintf("gave back %s of %s", gave, max(held, gave))
	}
}

// nextEpoch begins, or ends, a slot's load or unload: no answer to an earlier one counts any more. Slots share the count, so that one
// that goes and comes back does not take the answer of the server that it had before.
func (s *State) nextEpoch(sl *slot) {
	s.epochs++
	sl.epoch = s.epochs
}

// load starts the load of a slot that fits. A lazy one is READY at once and
// loads inside the job that is admitted in the same step.
func (s *State) load(now time.Time, t *slot) {
	need, avail := s.needOf(t)
	s.cards(t, func(c *card, h *holding) {
		sh := s.sheet(c, t)
		h.loadOut = sh.account().Outsiders
		s.reuse(sh)
		h.booking, h.loadFree, h.blind, h.before = t.claim(), c.Free, !c.Known, h.residue
		h.residue, h.drop, h.frozen, h.hasMeas, h.peak, h.guessed = 0, 0, false, false, 0, false
	})
	t.settled, t.loadAt = false, now
	t.want.victim, t.want.blocked, t.want.planned, t.want.tries, t.want.atMost = nil, time.Time{}, 0, nil, 0
	s.to(now, t, Loading)
	s.freeze(t)
	s.counts.Loads++
	s.decide(Decision{At: now, Kind: "load", Slot: t.cfg.Name, GPU: t.gpu(), Need: need, Avail: avail,
		Reason: fmt.Sprintf("it needs %s, %s is available", need, avail)})
	if t.cfg.lazy() {
		s.to(now, t, Ready)
		return
	}
	s.nextEpoch(t)
	s.emit(Effect{Kind: Load, Slot: t.cfg.Name, Epoch: t.epoch})
}

// loadDone takes in what a load came to.
func (s *State) loadDone(now time.Time, e LoadDone) {
	t := s.named[e.Slot]
	if t == nil || t.state != Loading || t.epoch != e.Epoch {
		return
	}
	s.nextEpoch(t)
	took := now.Sub(t.loadAt)
	if e.Err == "" {
		t.loadCost.add(took)
		t.loadBad, t.want.oom, t.want.extra, t.coolUntil = 0, 0, false, time.Time{}
		t.health, t.timeouts = healthGood, 0
		s.doubt(now, t)
		s.to(now, t, Ready)
		s.checkBudget(now, t)
		s.decide(Decision{At: now, Kind: "loaded", Slot: t.cfg.Name, GPU: t.gpu(), Took: took.Seconds(), Reason: fmt.Sprintf("ready after %s", Rounded(took))})
		s.pump(now)
		return
	}
	s.learnPeak(t)
	s.cards(t, func(c *card, h *holding) {
		h.residue, h.baseOut = s.leftBehind(c, t)
		h.guessed = h.residue > 0 && !h.hasMeas
		if h.base, h.baseFree = h.residue, h.loadFree-h.residue; h.blind {
			h.baseFree = c.Free
		}
		h.booking, h.drop, h.hasMeas = 0, 0, false
	})
	s.doubt(now, t)
	s.to(now, t, Idle)
	s.counts.LoadFailures++
	s.decide(Decision{At: now, Kind: "load_failed", Slot: t.cfg.Name, GPU: t.gpu(), Took: took.Seconds(), Reason: e.Err})
	victim := s.anyVictim(t)
	again := e.OutOfMemory && victim && t.want.oom < failedLoadOO || e.Partly && t.want.oom < partlyLoaded
	if again && t.queue.count > 0 {
		t.want.oom++ // make room once more, try once more (spec §3.9)
		t.want.extra = victim
	} else {
		s.loadFailed(now, t, e.Err)
	}
	s.pump(now)
}

// checkBudget says, once for each setting, that requests can't wait for a load as long as it takes.
func (s *State) checkBudget(now time.Time, sl *slot) {
	if b := sl.cfg.Budget; b > 0 && sl.loadCost.known && sl.loadCost.value > b && sl.shortBudget != b {
		sl.shortBudget = b
		s.decide(Decision{At: now, Kind: "short_budget", Slot: sl.cfg.Name, GPU: sl.gpu(), Took: sl.loadCost.value.Seconds(),
			Reason: fmt.Sprintf("a load takes %s and its budget is %s: requests that need one get 504; raise the budget, keep it warm with keep_alive, or pin it", Rounded(sl.loadCost.value), Rounded(b))})
	}
}

// doubt notes that a load has ended, well or not: what free memory was before
// another's load can only be told from a look that is newer.
func (s *State) doubt(now time.Time, sl *slot) {
	s.cards(sl, func(c *card, _ *holding) { c.doubt = now })
	s.emit(Effect{Kind: LookNow, Slot: sl.cfg.Name})
}

// loadFailed sends those away who waited for a load, and lets the slot cool down.
func (s *State) loadFailed(now time.Time, t *slot, why string) {
	t.loadBad++
	t.want = target{}
	cool := backoff(t.loadBad)
	t.coolUntil = now.Add(cool)
	s.refuseAll(now, t, &Refusal{Code: LoadFailed, RetryAfter: cool, Message: fmt.Sprintf("consumer %q could not be loaded: %s", t.cfg.Name, why)})
}

// unloadByHand closes the gate of a loaded slot for good; the rest follows.
func (s *State) unloadByHand(now time.Time, slotName string) {
	v := s.named[slotName]
	if v == nil || !v.cfg.CanUnload || s.cfg.Mode != Evicting {
		return
	}
	if v.state == Ready || v.state == Unknown {
		if t := v.gate.target; t != nil {
			t.want.victim = nil
		}
		since := now
		if v.gate.closed {
			since = v.gate.since
		}
		v.gate = gate{closed: true, since: since}
		s.pump(now)
	} else if s.mayBeLoaded(v) && v.queue.count == 0 && !v.gate.closed {
		s.flush(now, v, nil)
	}
}

// retire unloads a slot that is not in the config any more, once nobody waits for it.
func (s *State) retire(now time.Time, sl *slot) {
	if sl.queue.count > 0 || sl.parked > 0 || sl.busy() || s.succeeded(sl) {
		return
	}
	if sl.cfg.CanUnload && s.cfg.Mode == Evicting && !sl.gate.closed && (sl.state == Ready || sl.state == Unknown) && s.due(now, sl.retryAt) {
		sl.gate = gate{closed: true, since: now}
	}
}

// succeeded reports whether other slots have taken the place of a removed one at the same server: a consumer
// has got models, or has them no more. What is loaded there is theirs now, and not to be unloaded with this one.
func (s *State) succeeded(sl *slot) bool {
	return sl.gone && slices.ContainsFunc(s.slots, func(o *slot) bool {
		return !o.gone && (o.cfg.Server != "" || o.cfg.Starts && sl.cfg.Starts) && o.cfg.Server == sl.cfg.Server && (o.cfg.Consumer == sl.cfg.Name || sl.cfg.Consumer == o.cfg.Name) && o.cfg.Consumer != sl.cfg.Consumer
	})
}

// worksBefore reports whether a removed slot works whose place at the same server this one has taken: its work would be cut with an unload.
func (s *State) worksBefore(sl *slot) bool {
	return slices.ContainsFunc(s.slots, func(o *slot) bool {
		return o.gone && o.busy() && (o.cfg.Consumer == sl.cfg.Name || sl.cfg.Consumer == o.cfg.Name)
	})
}

// dropGone forgets the removed slots that hold nothing any more.
func (s *State) dropGone() {
	kept := s.slots[:0]
	for _, sl := range s.slots {
		over := sl.gone && sl.queue.count == 0 && sl.parked == 0 && !sl.busy() &&
			(s.succeeded(sl) && sl.state != Loading && sl.state != Stopping || sl.state == Idle && !sl.stop.flush || !sl.cfg.CanUnload && sl.state != Loading && sl.state != Stopping || s.cfg.Mode != Evicting)
		if !over {
			kept = append(kept, sl)
			continue
		}
		delete(s.named, sl.cfg.Name)
		s.remember(sl)
		s.emit(Effect{Kind: Dropped, Slot: sl.cfg.Name})
	}
	clear(s.slots[len(kept):])
	s.slots = kept
}

func name(sl *slot) string {
	if sl == nil {
		return ""
	}
	return sl.cfg.Name
}
