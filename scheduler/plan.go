package scheduler

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Figures of policy §1 that have no knob.
const (
	defaultSwitch  = 20 * time.Second // S of a slot whose load was never measured
	defaultCushion = 256 * gpu.MiB
	unifiedCushion = 4 * gpu.GiB
)

// admitReady is rules 1 and 7 of the policy: who runs among those that are
// loaded. It reports whether anybody was admitted.
func (s *State) admitReady(now time.Time) (progress bool) {
	for s.admitOne(now) {
		progress = true
	}
	return progress
}

// admitOne admits the first job that may run. The slots are looked at in the
// order (priority, submitted at) of their heads; one that must wait for a lock
// keeps those locks from later ones, but for the owner's bounded overtaking.
func (s *State) admitOne(now time.Time) bool {
	if s.waiting == 0 {
		return false
	}
	s.spare.slots = s.spare.slots[:0]
	for _, sl := range s.slots {
		if sl.queue.count == 0 {
			continue
		}
		if s.chill(now, sl); sl.queue.count > 0 && (s.open(sl, sl.queue.head()) || sl.want.lock) {
			s.spare.slots = append(s.spare.slots, sl)
		}
	}
	slices.SortStableFunc(s.spare.slots, func(a, b *slot) int { return order(a.queue.first(), b.queue.first()) })
	for i, sl := range s.spare.slots {
		if sl.want.lock {
			continue // plan loads it and admits its job in one step
		}
		if sl.cfg.LockNone || sl.cfg.Cloud || s.cfg.Mode == Passthrough || s.lockFree(sl) && s.mayOvertake(sl, s.spare.slots[:i]) {
			s.admitHead(now, sl)
			return true
		}
	}
	return false
}

func (s *State) admitHead(now time.Time, sl *slot) {
	j := sl.queue.head()
	if sl.cfg.lazy() && !sl.cfg.Cloud && sl.started == 0 && sl.state == Ready && !sl.settled && s.cfg.Mode == Evicting {
		sl.first, sl.warming, sl.firstLeft = j.id, true, false
	}
	s.start(now, j)
}

// mayOvertake is the bound of rule 7: a job of the lock's owner goes before an
// older one of another slot only if that is no more urgent and older by at most lock_overtake.
func (s *State) mayOvertake(sl *slot, earlier []*slot) bool {
	mine := sl.queue.first()
	for _, o := range earlier {
		if o.cfg.LockNone || !s.share(sl, o) {
			continue
		}
		b := o.queue.first()
		if !sl.busy() || mine.priority > b.priority || mine.submitted.Sub(b.submitted) > s.cfg.LockOvertake {
			return false
		}
	}
	return true
}

// share reports whether two slots need a lock in common.
func (s *State) share(a, b *slot) bool {
	return s.cfg.LockGlobal || overlap(a, b)
}

// overlap reports whether two slots are on a GPU in common.
func overlap(a, b *slot) bool {
	return slices.ContainsFunc(a.on, func(h *holding) bool { return b.hold(h.card) != nil })
}

// order orders jobs by (priority, submitted at).
func order(a, b *job) int {
	if a.priority != b.priority {
		return a.priority - b.priority
	}
	return a.submitted.Compare(b.submitted)
}

// cold reports whether the slot is a target once jobs wait for it.
func (sl *slot) cold() bool { return sl.state == Idle || sl.state == Unknown }

// plan serves the cold targets in the order (priority, age): it starts their
// loads, closes gates, or says why they wait. It reports whether jobs may be admitted now that could not before.
func (s *State) plan(now time.Time) (progress bool) {
	if s.waiting == 0 || s.cfg.Mode != Evicting {
		return false
	}
	for _, c := range s.gpus {
		c.reserved = nil
	}
	defer func() { // who kept the lock free for a lazy target that does not come now?
		for _, sl := range s.slots {
			progress = progress || sl.want.hadLock && !sl.want.lock
			sl.want.hadLock = false
		}
	}()
	for _, sl := range s.slots {
		sl.want.hadLock, sl.want.lock = sl.want.lock, false
	}
	s.spare.targets = s.spare.targets[:0]
	for _, sl := range s.slots {
		if sl.queue.count > 0 && sl.cold() {
			s.spare.targets = append(s.spare.targets, sl.ranked())
		}
	}
	if len(s.spare.targets) == 0 {
		return false
	}
	slices.SortFunc(s.spare.targets, ranked.compare)
	s.lookAround()
	defer func() { s.planning = false }()
	for i, t := range s.spare.targets {
		if s.planTarget(now, t.slot) {
			for _, rest := range s.spare.targets[i+1:] { // planned anew on what has changed
				rest.slot.want.lock = rest.slot.want.hadLock
			}
			return true
		}
	}
	return false
}

// ranked is a slot with what gives it its turn among cold targets.
type ranked struct {
	slot     *slot
	priority int
	age      int64 // when it began, in nanoseconds
}

func (sl *slot) ranked() ranked {
	return ranked{slot: sl, priority: sl.queue.first().priority, age: sl.ageStart().UnixNano()}
}

// compare is the order in which cold targets are served: by priority, then by age.
func (r ranked) compare(o ranked) int {
	return cmp.Or(cmp.Compare(r.priority, o.priority), cmp.Compare(r.age, o.age), cmp.Compare(r.slot.order, o.slot.order))
}

// ageStart is when the age of a cold target begins: with its oldest submission
// that was not served, also if that client has left (policy rule 6).
func (sl *slot) ageStart() time.Time {
	at, _ := sl.queue.oldest(anyPriority)
	return earlier(at, sl.credit.from)
}

// switchCost is S of the policy: what a switch to the slot costs.
func (sl *slot) switchCost() time.Duration {
	if sl.loadCost.known {
		return sl.loadCost.value + sl.stopCost.value
	}
	if sl.cfg.SwitchCost > 0 {
		return sl.cfg.SwitchCost
	}
	return defaultSwitch
}

// bound is B of the policy: how far warm jobs may overtake the cold target.
func (s *State) bound(t *slot) time.Duration {
	b := clamp(time.Duration(s.cfg.Overtake*float64(t.switchCost())), s.cfg.OvertakeMin, s.cfg.OvertakeMax)
	if t.cfg.Budget > 0 {
		b = min(b, t.cfg.Budget/2)
	}
	return b
}

// planTarget does for one cold target what can be done now.
func (s *State) planTarget(now time.Time, t *slot) (progress bool) {
	if t.health == healthUnknown || !s.sampled {
		t.why = "waits for the first probe"
		return false
	}
	if r := s.refusesSlot(t); r != nil { // in this step it has come to a GPU that is not there
		s.refuseAll(now, t, r)
		return true
	}
	if !s.due(now, t.coolUntil) {
		t.why = "cools down after a failed load"
		return false
	}
	if t.cfg.Stale {
		t.why = "waits until its server is stopped, whose settings have changed"
		return false
	}
	if t.gate.closed { // it is about to be unloaded: it claims nothing before that is over
		t.why = "waits until it has been unloaded"
		return false
	}
	if r := s.neverFits(t); r != nil {
		s.refuseAll(now, t, r)
		return true
	}
	s.checkClaim(now, t)
	if v := t.want.victim; v != nil {
		if v.state != Stopping && s.fits(t) && !t.want.extra {
			s.reopen(now, v, fmt.Sprintf("%s fits without its going", t.cfg.Name))
			return true
		}
		t.why = fmt.Sprintf("waits for %s to make room", v.cfg.Name)
		s.reserve(t)
		return false
	}
	if t.lent {
		t.why = "its GPU is lent until " + s.lentUntil(now, t).UTC().Format(time.RFC3339)
		return false
	}
	if s.conflicts {
		for _, c := range s.gpus {
			if r := c.reserved; r != nil && r != t && conflict(r, t) {
				t.why = fmt.Sprintf("waits behind %s, which is overdue and conflicts with it", r.cfg.Name)
				return false
			}
		}
	}
	for _, h := range t.on {
		if r := s.card(h.card).reserved; r != nil && r != t {
			t.why = fmt.Sprintf("waits behind %s, which is overdue", r.cfg.Name)
			return false
		}
		if o := s.transition(h.card); o != nil {
			if o.state == Loading && s.abandonedFor(now, t, o) {
				s.close(now, o, t, unloadReason(t))
				return true
			}
			t.why = "waits for the load or unload of " + o.cfg.Name
			if len(t.on) > 1 { // else nobody takes anything meanwhile
				s.reserveOverdue(now, t)
			}
			return false
		}
	}
	if s.fits(t) && !t.want.extra {
		return s.begin(now, t)
	}
	if s.freesItself(now, t) {
		return false
	}
	if s.spent(t) {
		t.why = "waits for memory that unloads did not bring back"
		if s.settleForLess(t) {
			return true
		}
		if v := s.unflushed(now, t); v != nil {
			t.want.blocked = now
			s.flush(now, v, t)
			return false
		}
		if !t.want.blocked.IsZero() && !s.due(now, t.want.blocked.Add(s.cfg.OutsiderWait)) { // what was flushed has time to come back
			return false
		}
		s.exhausted(now, t, "unloads did not bring the memory back")
		return true
	}
	if plan := s.choose(t, s.permitsNow(now, t)); plan != nil && s.cfg.ObserveEvictions {
		s.wouldEvict(now, t, plan)
	} else if plan != nil {
		if t.want.planned == 0 {
			t.want.planned = len(plan)
		}
		s.close(now, plan[0], t, unloadReason(t))
		return true
	}
	return s.wait(now, t)
}

// spent reports whether so many unloads have not brought the memory back that more would not help either.
func (s *State) spent(t *slot) bool {
	n := len(t.want.tries)
	return n > 0 && n >= t.want.planned+s.cfg.MaxEvictions
}

// abandonedFor reports whether the load of o is to be broken off for t: nobody
// waits for it any more, and t needs its room.
func (s *State) abandonedFor(now time.Time, t, o *slot) bool {
	may := s.permitsNow(now, t)
	return !s.cfg.ObserveEvictions && may(o) && !s.fits(t) && slices.Contains(s.choose(t, may), o)
}

// begin loads a target that fits, unless another loads inside its first job.
func (s *State) begin(now time.Time, t *slot) bool {
	t.want.blocked = time.Time{}
	if why := s.holdUp(now, t); why != "" {
		t.why = why
		if len(t.on) > 1 {
			s.reserveOverdue(now, t)
		}
		return false
	}
	if t.cfg.lazy() && !s.mayEnter(t) {
		t.why, t.want.lock = "waits for the lock of its GPU", true
		if s.overdue(now, t) {
			s.reserve(t)
		}
		return false
	}
	t.why = "is being loaded"
	s.load(now, t)
	if t.cfg.lazy() {
		s.admitHead(now, t)
	}
	return true
}

// holdUp is what keeps the memory of a target's GPUs from being taken at all just now; empty: nothing.
func (s *State) holdUp(now time.Time, t *slot) string {
	for _, h := range t.on {
		if o := s.transition(h.card); o != nil {
			return "waits for the load or unload of " + o.cfg.Name
		}
		if w := s.warmer(h.card); w != nil {
			return fmt.Sprintf("waits for the first job of %s, inside which it loads", w.cfg.Name)
		}
		if c := s.card(h.card); c.doubtful() && !s.due(now, c.doubt.Add(blindWait)) {
			return "waits for a look at the memory, after a load that has just ended"
		}
	}
	return ""
}

// mayEnter reports whether the first job of a lazy slot can have the lock. It is
// admitted in the step that loads the slot, so its turn comes as for a loaded one.
func (s *State) mayEnter(t *slot) bool {
	if t.cfg.LockNone {
		return true
	}
	if !s.lockFree(t) {
		return false
	}
	for _, o := range s.slots {
		if o.queue.count > 0 && !o.cfg.LockNone && s.open(o, o.queue.head()) && s.share(o, t) && order(o.queue.first(), t.queue.first()) < 0 {
			return false
		}
	}
	return true
}

func (s *State) reserve(t *slot) {
	s.cards(t, func(c *card, _ *holding) {
		if c.reserved == nil {
			c.reserved = t
		}
	})
}

// reserveOverdue keeps the other GPUs of a target free while it waits for something on one of them.
func (s *State) reserveOverdue(now time.Time, t *slot) {
	if s.reserves(now, t) {
		s.reserve(t)
	}
}

// reserves reports whether a target may keep others from memory until enough of theirs is free for it to fit.
func (s *State) reserves(now time.Time, t *slot) bool {
	could := s.able(func(v *slot) bool { return s.permitted(t, v) })
	return s.fitsAfter(t, could...) && s.mayReserve(now, t, could)
}

// wait is accounting §3: the target does not fit and nothing may go now. It
// waits where waiting can help, and is refused where it can't.
func (s *State) wait(now time.Time, t *slot) (progress bool) {
	could := s.able(func(v *slot) bool { return s.permitted(t, v) })
	switch {
	case t.want.extra && len(could) == 0: // out of memory, and nobody left to make room
		s.loadFailed(now, t, "it ran out of memory, and nothing may be unloaded for it")
		return true
	case len(could) > 0 && (t.want.extra || s.fitsAfter(t, could...)):
		t.want.blocked = time.Time{}
		t.why = waitsForTurn
		if s.mayReserve(now, t, could) {
			s.reserve(t)
		}
		return false
	}
	if s.settleForLess(t, could...) {
		return true
	}
	why := s.inTheWay(t)
	t.why = "waits for memory: " + why
	if t.want.blocked.IsZero() {
		t.want.blocked = now
	}
	if v := s.unflushed(now, t); v != nil {
		s.flush(now, v, t)
		return false
	}
	if !s.due(now, t.want.blocked.Add(s.cfg.OutsiderWait)) {
		return false
	}
	if plan := s.choose(t, func(v *slot) bool { return s.candidate(t, v) }); plan != nil { // no turn of theirs has come, but would have
		s.wouldEvict(now, t, plan)
	}
	s.exhausted(now, t, why)
	return true
}

// waitsForTurn is why jobs wait for the memory of others, whom reason names.
const waitsForTurn = "waits until it may take the memory of others"

// reason is why the jobs of a slot wait, for people.
func (s *State) reason(t *slot) string {
	switch {
	case t.queue.count == 0:
		return t.why
	case !t.cold() && !t.want.lock, s.cfg.Mode != Evicting:
		return s.whyWarm(t)
	case t.why != waitsForTurn:
		return t.why
	}
	if could := s.choose(t, func(v *slot) bool { return s.permitted(t, v) }); could != nil { // found out when somebody asks, since it takes its time
		return "waits until it may take the memory of " + names(could)
	}
	return t.why
}

// whyWarm is why the jobs of a slot wait that is loaded, or on the way there or back.
func (s *State) whyWarm(t *slot) string {
	switch {
	case t.health == healthUnknown && !t.cfg.Cloud:
		return "waits for the first probe"
	case t.state == Loading:
		return "is being loaded"
	case t.state == Stopping:
		return "is being unloaded, to be loaded again"
	case t.lent:
		return "its GPU is lent"
	case t.gate.closed:
		return "is to be unloaded for " + orElse(name(t.gate.target), "nobody in particular")
	case !t.alive():
		return "its server has died, or may have"
	case !t.hasPlace(t.queue.head()):
		return fmt.Sprintf("runs %d requests, as many as its concurrency allows", t.active)
	case !s.lockFree(t):
		return "waits for the lock of its GPU"
	default:
		return "waits for its turn on its GPU"
	}
}

// wouldEvict says who would be unloaded for t, once for those who wait now.
func (s *State) wouldEvict(now time.Time, t *slot, plan []*slot) {
	if t.want.would {
		return
	}
	t.want.would = true
	for _, v := range plan {
		s.decide(Decision{At: now, Kind: "would_evict", Slot: v.cfg.Name, Target: t.cfg.Name, GPU: v.gpu(), Reason: unloadReason(t) + "; evictions are only observed"})
	}
}

func (s *State) exhausted(now time.Time, t *slot, why string) {
	need, _ := s.needOf(t)
	r := &Refusal{Code: VRAMExhausted, RetryAfter: 10 * time.Second, Detail: s.detail(t),
		Message: fmt.Sprintf("consumer %q needs %s of GPU memory and can't get it: %s", t.cfg.Name, need, why)}
	if len(t.want.tries) > 0 {
		r.Message += "; tried: " + strings.Join(t.want.tries, "; ")
	}
	t.want = target{}
	s.refuseAll(now, t, r)
}

func names(slots []*slot) string { return strings.Join(slotNames(slots), ", ") }
