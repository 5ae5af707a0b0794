package scheduler

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// submit takes a job in: it is admitted at once, queued or refused. The first
// effect is about this job.
func (s *State) submit(now time.Time, e *Submit) {
	sl := s.named[e.Slot]
	if e.IfFree && !s.free(now, sl, e) {
		s.emit(Effect{Kind: NotNow, Slot: e.Slot})
		return
	}
	s.counts.Jobs++
	if r := s.refusesNew(sl, e.Slot); r != nil {
		s.counts.Refused++
		s.emit(Effect{Kind: Refuse, Slot: e.Slot, Refusal: r})
		return
	}
	j := s.jobs.take()
	j.slot, j.priority, j.submitted, j.deadline = sl, e.Priority, e.Submitted, e.Deadline
	j.client, j.keepAlive, j.stayWarm, j.cooldown = e.Client, e.KeepAlive, e.StayWarm, e.Cooldown
	j.bulk = e.Priority >= s.cfg.ReservedBelow
	if j.submitted.IsZero() {
		j.submitted = now
	}
	rests := s.rests(now, j)
	if (s.waiting == 0 || sl.cfg.Cloud) && s.open(sl, j) && s.lockFree(sl) && !rests { // the warm path: nobody waits, everything is there
		s.start(now, j)
		return
	}
	s.emit(Effect{Kind: Queued, Job: j.id, Slot: e.Slot})
	full := s.full(s.waiting, s.bulk, j)
	switch s.enqueue(now, j, rests); {
	case full != nil: // it runs at once or not at all: nothing is unloaded or loaded for it
		if sl.gate.idle && sl.state == Ready {
			s.reopen(now, sl, "it is in use after all")
		}
		s.admitReady(now)
		if j.state == jobWaiting || j.state == jobCooling {
			s.refuse(now, j, full)
			return
		}
		s.pump(now) // who waits may take the memory of a slot that a less urgent request uses
	case sl.queue.head() == j:
		s.pump(now)
	default: // whatever can be done for this slot is being done already
	}
}

// full is what a job gets that may not wait, beside so many; nil: there is a place.
func (s *State) full(waiting, bulk int, j *job) *Refusal {
	var msg string
	switch kept := s.cfg.ReservedPlaces; {
	case waiting >= s.cfg.MaxQueue:
		msg = fmt.Sprintf("%d requests wait already: try again later, or raise max_queue", waiting)
	case j.bulk && kept > 0 && bulk >= s.cfg.MaxQueue-kept:
		msg = fmt.Sprintf("%d requests of no urgency wait already, and %d places are kept for priorities below %d: try again later", bulk, kept, s.cfg.ReservedBelow)
	default:
		return nil
	}
	return &Refusal{Code: QueueFull, RetryAfter: 5 * time.Second, Message: msg}
}

// free reports whether a job could run at once.
func (s *State) free(now time.Time, sl *slot, e *Submit) bool {
	if sl == nil || s.waiting > 0 && !sl.cfg.Cloud || s.refusesNew(sl, e.Slot) != nil {
		return false
	}
	j := job{slot: sl, client: e.Client, bulk: e.Priority >= s.cfg.ReservedBelow}
	return !s.rests(now, &j) && s.open(sl, &j) && s.lockFree(sl)
}

// refusesNew says why a job for a slot can't even be taken in.
func (s *State) refusesNew(sl *slot, name string) *Refusal {
	switch {
	case sl == nil:
		return &Refusal{Code: UnknownConsumer, Message: fmt.Sprintf("there is no consumer %q", name)}
	case s.draining || s.ending || sl.draining:
		return s.drained(sl)
	case sl.cfg.Disabled:
		return &Refusal{Code: NotRunning, RetryAfter: time.Minute, Message: fmt.Sprintf("consumer %q is switched off (enabled off)", name)}
	case s.cfg.Mode == Passthrough:
		return nil
	}
	return s.refusesSlot(sl)
}

// refusesSlot says why nothing can run on a slot now: its server or its GPU is bad.
func (s *State) refusesSlot(sl *slot) *Refusal {
	if sl.health == healthBad {
		return &Refusal{Code: Unhealthy, RetryAfter: 5 * time.Second,
			Message: fmt.Sprintf("the server of consumer %q is unhealthy: %s", sl.cfg.Name, sl.detail)}
	}
	if s.cfg.Mode != Evicting || !s.sampled || sl.cfg.Cloud {
		return nil
	}
	for _, h := range sl.on {
		c := s.card(h.card)
		switch {
		case c == nil:
			return &Refusal{Code: GPULost, RetryAfter: 30 * time.Second, Message: fmt.Sprintf("consumer %q wants GPU %d, and %s", sl.cfg.Name, h.card, s.knownGPUs())}
		case c.Lost:
			return &Refusal{Code: GPULost, RetryAfter: 30 * time.Second,
				Message: fmt.Sprintf("GPU %d of consumer %q is lost: %s", h.card, sl.cfg.Name, c.Reason)}
		}
	}
	return nil
}

// knownGPUs says which GPUs there are.
func (s *State) knownGPUs() string {
	if len(s.gpus) == 0 {
		return "no GPU is known: " + orElse(s.blind, "the driver lists none") + withoutTelemetry
	}
	var there []string
	for _, c := range s.gpus {
		if text := fmt.Sprintf("GPU %d", c.Index); !slices.Contains(there, text) {
			there = append(there, text)
		}
	}
	if len(there) == 1 {
		return fmt.Sprintf("there is %s only", there[0])
	}
	return fmt.Sprintf("there are %s and %s only", strings.Join(there[:len(there)-1], ", "), there[len(there)-1])
}

// open reports whether a job of the slot could run now, were the lock free.
func (s *State) open(sl *slot, j *job) bool {
	return s.cfg.Mode == Passthrough || sl.cfg.Cloud ||
		!sl.lent && sl.alive() && sl.state == Ready && !sl.gate.closed && sl.health == healthGood && sl.hasPlace(j)
}

// hasPlace reports whether one more job may run on the slot. Putting work into the
// queue of an async server is not bounded (spec §12.3).
func (sl *slot) hasPlace(j *job) bool {
	return sl.cfg.Async || sl.active < sl.cfg.Concurrency && (!j.bulk || sl.bulk < sl.cfg.Concurrency-sl.cfg.Reserved)
}

// lockFree reports whether nobody else computes on the slot's GPUs.
func (s *State) lockFree(sl *slot) bool {
	if sl.cfg.LockNone || sl.cfg.Cloud || s.cfg.Mode == Passthrough {
		return true
	}
	for _, l := range s.locks {
		if l.owner != nil && l.owner != sl && (s.cfg.LockGlobal || sl.hold(l.gpu) != nil) {
			return false
		}
	}
	return true
}

func (s *State) enqueue(now time.Time, j *job, rests bool) {
	s.waiting++
	if j.bulk {
		s.bulk++
	}
	s.deadlines.add(j)
	if rests {
		s.resting.park(j)
		s.wakeBy(s.resting.until[j.restKey()])
		return
	}
	s.queueUp(now, j)
}

// queueUp puts a job into the queue of its slot.
func (s *State) queueUp(now time.Time, j *job) {
	sl := j.slot
	if sl.queue.count == 0 {
		sl.credit.lapse(now, s.creditFor(sl))
	}
	j.state = jobWaiting
	sl.queue.push(j)
	sl.emptyAt = time.Time{}
}

// dequeue takes a waiting job out of its queue.
func (s *State) dequeue(now time.Time, j *job) {
	s.deadlines.drop(j)
	s.waiting--
	if j.bulk {
		s.bulk--
	}
	if j.state == jobCooling {
		s.resting.take(j)
		return
	}
	s.leaveQueue(now, j)
}

func (s *State) leaveQueue(now time.Time, j *job) {
	j.slot.queue.remove(j)
	if j.slot.queue.count == 0 {
		j.slot.why = ""
		j.slot.want = target{victim: j.slot.want.victim} // what was tried for those who waited says nothing about the next
		if j.slot.state == Loading {
			j.slot.emptyAt = now
		}
	}
}

// start admits a job.
func (s *State) start(now time.Time, j *job) {
	sl := j.slot
	if j.state == jobWaiting {
		sl.queue.served(j)
		s.dequeue(now, j)
	}
	j.state, j.started, j.server = jobRunning, now, sl.cfg.Server
	s.running++
	s.counts.LastWait = now.Sub(j.submitted)
	sl.active++
	if j.bulk {
		sl.bulk++
	}
	sl.started++
	sl.lastPrio, sl.credit = j.priority, credit{}
	s.rest(now, j)
	if !sl.cfg.LockNone && !sl.cfg.Cloud {
		for _, l := range s.locks {
			if s.cfg.LockGlobal || sl.hold(l.gpu) != nil {
				l.owner = sl
			}
		}
	}
	s.emit(Effect{Kind: Admit, Job: j.id, Slot: sl.cfg.Name, Loads: sl.warming && sl.first == j.id})
}

// refuse ends a waiting job with an error.
func (s *State) refuse(now time.Time, j *job, r *Refusal) {
	s.dequeue(now, j)
	s.counts.Refused++
	s.emit(Effect{Kind: Refuse, Job: j.id, Slot: j.slot.cfg.Name, Refusal: r})
	s.decide(Decision{At: now, Kind: "refuse", Slot: j.slot.cfg.Name, GPU: j.slot.gpu(), Code: r.Code, Reason: r.Message})
	s.jobs.put(j)
}

// refuseAll refuses all who wait for a slot.
func (s *State) refuseAll(now time.Time, sl *slot, r *Refusal) {
	for sl.queue.count > 0 {
		s.refuse(now, sl.queue.head(), r)
	}
}

func (sl *slot) gpu() int {
	if len(sl.on) == 0 {
		return -1
	}
	return sl.on[0].card
}

// cancel takes a job back whose client left.
func (s *State) cancel(now time.Time, id JobID) {
	j := s.jobs.get(id)
	switch {
	case j == nil:
		return
	case j.state == jobRunning: // it was admitted meanwhile
		s.release(now, &Release{Job: id, Outcome: NoAnswer})
		return
	}
	matters := j.state == jobWaiting && (j.slot.queue.head() == j || j.prev == nil) // the next, or the oldest of its priority
	if j.state == jobWaiting {
		j.slot.leftAt = now
		if j.slot.state != Ready && s.creditFor(j.slot) > 0 {
			j.slot.credit.left(now, j.submitted)
		}
	}
	s.dequeue(now, j)
	s.counts.Cancelled++
	s.jobs.put(j)
	if matters {
		s.pump(now)
	}
}

// release ends an admitted job. A second release of it does nothing.
func (s *State) release(now time.Time, e *Release) {
	id, outcome := e.Job, e.Outcome
	j := s.jobs.get(id)
	if j == nil || j.state != jobRunning {
		return
	}
	sl, warmed, server, started := j.slot, j.slot.first == id, j.server, j.started
	worked := outcome == Served || outcome == Accepted || outcome == ServerDied
	if worked {
		sl.lastUse = now
		sl.runCost.add(now.Sub(started))
	}
	sl.keep = later(sl.keep, now.Add(j.keepAlive))
	sl.warmFor = j.stayWarm
	sl.active--
	if j.bulk {
		sl.bulk--
	}
	sl.idleAt = now
	s.jobs.put(j)
	orphan := e.Left && s.worksOn(sl, outcome)
	switch {
	case outcome == Accepted && sl.cfg.CanBusy, orphan:
		sl.held++
		sl.heldAt = now
		if orphan {
			sl.orphans++
			sl.leftBy = now
			sl.firstLeft = sl.firstLeft || sl.first == id
			s.wakeBy(now.Add(s.cfg.DrainTimeout))
		}
		if sl.cfg.CanBusy {
			s.ask(sl, 0)
		}
	default:
		s.ended(1)
		if sl.first == id {
			s.warm(now, sl)
		}
		if worked {
			sl.settle(now)
		}
	}
	s.unlock(sl)
	if sl.dead != "" && sl.active == 0 {
		if s.cfg.Mode == Evicting {
			s.fall(now, sl, sl.dead, sl.clean)
		}
		sl.dead, warmed = "", true // it moves: others may
	}
	if started.After(sl.refusedAt) && (outcome == Served || outcome == Accepted || orphan) { // a new process listens
		sl.refusedAt = time.Time{}
	}
	if sl.active == 0 && !sl.refusedAt.IsZero() {
		sl.refusedAt, warmed = time.Time{}, true
		s.dialRefused(now, sl, true)
	}
	switch outcome {
	case DialRefused, Unreached:
		if server == sl.cfg.Server { // else a new configuration has moved the slot meanwhile
			s.dialRefused(now, sl, outcome == DialRefused)
			warmed = true
		}
	case ServerDied:
		s.suspects(now, sl)
		s.emit(Effect{Kind: ProbeNow, Slot: sl.cfg.Name})
	}
	if s.waiting > 0 || sl.gate.closed || sl.gone || warmed || s.lending || len(s.cfg.Restore) > 0 { // a transition that ends lets another begin
		s.pump(now)
	} else if s.idles(sl) {
		s.wakeBy(s.idleEnd(sl))
	}
}

func (s *State) ended(n int) {
	s.running -= n
	s.counts.Ended += uint64(n)
}

// warm ends the transition that the first job of a lazy slot is.
func (s *State) warm(now time.Time, sl *slot) {
	sl.first, sl.warming, sl.firstLeft = 0, false, false
	s.doubt(now, sl)
	sl.since = now // what a probe saw before is of no use: the server was still loading
}

// settle notes the end of the first job since the load.
func (sl *slot) settle(now time.Time) {
	if !sl.settled {
		sl.settled, sl.settledAt = true, now
	}
}

// settledOn reports whether what the slot has taken of a GPU is in the last look
// at it: one from before its first job ended may not have seen it all.
func (sl *slot) settledOn(c *card) bool {
	return sl.settled && (!c.Known || !c.seenAt.Before(sl.settledAt))
}

// unlock gives the lock back if the slot computes no more.
func (s *State) unlock(sl *slot) {
	if sl.busy() {
		return
	}
	for _, l := range s.locks {
		if l.owner == sl {
			l.owner = nil
		}
	}
	if s.crowded {
		s.relock()
	}
}

// relock gives each lock to one who computes. There may be several: a new
// configuration can make those exclusive that were not, with their jobs running.
func (s *State) relock() {
	s.crowded = false
	for _, l := range s.locks {
		for _, sl := range s.slots {
			if !sl.busy() || sl.cfg.LockNone || sl.cfg.Cloud || !s.cfg.LockGlobal && sl.hold(l.gpu) == nil {
				continue
			}
			s.crowded = s.crowded || l.owner != nil && l.owner != sl
			if l.owner == nil || l.owner.cfg.LockNone {
				l.owner = sl
			}
		}
	}
}

// worksOn reports whether the server may work on a request that was broken off: its busy route tells, or the configuration says so.
func (s *State) worksOn(sl *slot, outcome Outcome) bool {
	return (sl.cfg.CanBusy || sl.cfg.WorksOn) && outcome != DialRefused && outcome != Unreached && outcome != ServerDied && outcome != Accepted &&
		sl.dead == "" && !sl.cfg.Cloud && s.cfg.Mode != Passthrough
}

// letGo ends so many of a slot's held jobs: their work is over.
func (s *State) letGo(now time.Time, sl *slot, n int) {
	s.ended(n)
	sl.held -= n
	sl.orphans = min(sl.orphans, sl.held)
	sl.idleAt = now
	sl.settle(now)
	if sl.warming && s.jobs.get(sl.first) == nil && (sl.held == 0 || sl.firstLeft) { // its first job was among them
		s.warm(now, sl)
	}
	s.unlock(sl)
}

// giveUpOrphans takes the work of clients that left for done once drain_timeout has passed.
func (s *State) giveUpOrphans(now time.Time) {
	for _, sl := range s.slots {
		if sl.orphans == 0 || !s.due(now, sl.leftBy.Add(s.cfg.DrainTimeout)) {
			continue
		}
		s.decide(Decision{At: now, Kind: "busy_unknown", Slot: sl.cfg.Name, GPU: sl.gpu(),
			Reason: fmt.Sprintf("the work of clients that left has not ended within drain_timeout %s, as far as its server tells: it is taken for done", Rounded(s.cfg.DrainTimeout))})
		n := sl.orphans
		sl.orphans = 0
		s.letGo(now, sl, n)
	}
}

// ask sends for word whether a server works.
func (s *State) ask(sl *slot, after time.Duration) {
	if sl.asking {
		return
	}
	sl.asking = true
	s.emit(Effect{Kind: CheckBusy, Slot: sl.cfg.Name, After: after})
}

// busyPoll is how often a server is asked whether its work is done.
const busyPoll = 250 * time.Millisecond

// busyAnswer ends held jobs, or a drain, once the server itself says that it is idle.
func (s *State) busyAnswer(now time.Time, e BusyAnswer) {
	sl := s.named[e.Slot]
	if sl == nil {
		return
	}
	sl.asking = false
	switch {
	case !e.Failed:
		sl.muteSince = time.Time{}
	case sl.muteSince.IsZero():
		sl.muteSince = now
	case now.Sub(sl.muteSince) >= s.cfg.DrainTimeout: // a busy route that never works must not hold the GPU for ever
		sl.muteSince, e.Busy = time.Time{}, false
		s.decide(Decision{At: now, Kind: "busy_unknown", Slot: sl.cfg.Name, GPU: sl.gpu(), Reason: fmt.Sprintf("its busy route has failed for drain_timeout %s: its work is taken for done", Rounded(s.cfg.DrainTimeout))})
	}
	if e.Mute && sl.orphans > 0 && sl.orphans == sl.held && !sl.cfg.WorksOn { // as at a server without a busy route
		e.Busy = false
	}
	switch {
	case e.Busy:
	case sl.held > 0 && !e.Sent.Before(sl.heldAt):
		sl.lastUse = now
		s.letGo(now, sl, sl.held)
		fallthrough
	default:
		if sl.gate.closed && !e.Mute && !sl.busy() && !e.Sent.Before(sl.idleAt) && !e.Sent.Before(sl.gate.since) {
			sl.gate.clear = true
		}
	}
	if e.Busy && sl.gate.idle && sl.state != Stopping {
		s.busyThough(now, sl, e.Failed)
	}
	if sl.held > 0 || sl.gate.closed && sl.state != Stopping && !sl.gate.clear && !sl.busy() {
		s.ask(sl, busyPoll) // before pump, which would ask again at once
	}
	s.pump(now)
}

// expire refuses the jobs whose budget has ended.
func (s *State) expire(now time.Time) {
	for len(s.deadlines) > 0 && !now.Before(s.deadlines[0].deadline) {
		j := s.deadlines[0]
		why := orElse(s.reason(j.slot), "others were before it")
		if j.state == jobCooling {
			why = coolingReason
		}
		s.refuse(now, j, &Refusal{Code: BudgetExceeded, Message: fmt.Sprintf(
			"consumer %q could not be served within the request's budget of %s: %s", j.slot.cfg.Name, Rounded(j.deadline.Sub(j.submitted)), why)})
	}
}

// sweep refuses all who wait for a slot on which nothing can run.
func (s *State) sweep(now time.Time) {
	for _, sl := range s.slots {
		if sl.queue.count == 0 {
			continue
		}
		r := s.drained(sl)
		if r == nil {
			r = s.refusesSlot(sl)
		}
		if r != nil {
			s.refuseAll(now, sl, r)
		}
	}
	for _, client := range s.resting.clients() {
		for _, j := range slices.Clone(s.resting.parked[client]) {
			r := s.drained(j.slot)
			if r == nil {
				r = s.refusesSlot(j.slot)
			}
			if r != nil {
				s.refuse(now, j, r)
			}
		}
	}
}

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}
