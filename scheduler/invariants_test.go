package scheduler

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestRandomHistoriesKeepTheRules(t *testing.T) {
	steps, histories := 0, 0
	for steps < historySteps && !t.Failed() {
		rapid.Check(t, func(t *rapid.T) {
			w := newWorld(t, drawShape(t))
			w.live()
			w.standStill(30 * time.Minute)
			w.nobodyCame(5 * time.Minute)
			w.check.theEnd()
			steps += w.steps
			histories++
		})
	}
	t.Logf("%d steps in %d histories", steps, histories)
	if steps < historySteps {
		t.Errorf("want at least %d steps, got %d", historySteps, steps)
	}
}

// With honest servers, whose claims are right, and with telemetry, whoever fits
// by our account must fit in truth: nobody ever runs out of memory.
func TestHonestServersNeverRunOutOfMemory(t *testing.T) {
	steps := 0
	for steps < historySteps/5 && !t.Failed() {
		rapid.Check(t, func(t *rapid.T) {
			sh := drawShape(t)
			sh.honest, sh.cushionless = true, false
			sh.locked, sh.lies, sh.strange, sh.telemetry, sh.gpuLoss, sh.outsiders, sh.reload = false, false, false, false, false, false, false // without reloads there are no other modes either
			w := newWorld(t, sh)
			w.live()
			w.standStill(30 * time.Minute)
			w.check.theEnd()
			steps += w.steps
		})
	}
}

// checker compares every step with the contract. It knows the world's truth,
// reads the state's fields, and does its own arithmetic.
type checker struct {
	w       *world
	coming  *simJob // the job that the next Submit is
	leaving JobID   // the job whose end is said for the first time
	meddled bool    // somebody took memory behind the scheduler's back

	was     map[*slot]standing
	event   Event
	epochs  map[string]uint64 // of the load or unload that was asked for last
	history []record

	idle    idleCheck
	rules   rulesCheck
	wakes   time.Time // when the state wants to be woken
	mode    Mode      // before the step
	dropped bool      // a slot was forgotten in this step
	crowd   []*slot   // who computed at once on a GPU because a configuration allowed it that does not rule any more
}

// standing is what a slot was like before a step.
type standing struct {
	state   SlotState
	gate    gate
	since   time.Time
	lastUse time.Time
	held    int
	heldAt  time.Time
	orphans int
	leftBy  time.Time
	dead    string
	health  health
	first   JobID
	warming bool
	stop    stopping
}

type record struct {
	at      time.Time
	event   Event
	effects []Effect
	wake    time.Time
}

func standingOf(sl *slot) standing {
	return standing{state: sl.state, gate: sl.gate, since: sl.since, lastUse: sl.lastUse, held: sl.held, heldAt: sl.heldAt, orphans: sl.orphans, leftBy: sl.leftBy, health: sl.health, first: sl.first, warming: sl.warming, stop: sl.stop, dead: sl.dead}
}

func (c *checker) before(e Event) {
	if c.was == nil {
		c.was, c.epochs = map[*slot]standing{}, map[string]uint64{}
	}
	clear(c.was)
	for _, sl := range c.w.s.slots {
		c.was[sl] = standingOf(sl)
	}
	c.event, c.mode = e, c.w.s.cfg.Mode
	c.idle.before(c.w)
	c.rules.before(c.w, e)
}

func (c *checker) after(e Event, effects []Effect, wake time.Time) {
	w := c.w
	c.history = append(c.history, record{w.now, e, slices.Clone(effects), wake})
	if len(c.history) > 160 {
		c.history = c.history[80:]
	}
	twin, twinWake := w.twin.Step(w.now, e)
	if !reflect.DeepEqual(effects, twin) || !wake.Equal(twinWake) {
		w.fail("the same history had other effects:\n%s\n%s", tell(effects), tell(twin))
	}
	c.wakes = wake
	c.dropped = slices.ContainsFunc(effects, func(f Effect) bool { return f.Kind == Dropped })
	c.jobs(e, effects)
	c.wake(e, wake)
	c.rules.after(c, e, effects) // before the next, which needs its books
	c.idle.after(c, e, effects)
	for _, sl := range w.s.slots {
		c.edge(sl, effects)
		c.lastUse(sl)
		c.held(sl)
	}
	for _, f := range effects {
		switch {
		case f.Kind == StartUnload:
			c.unload(f)
		case f.Kind == CheckBusy && f.After == 0:
			was, g := c.was[w.s.named[f.Slot]].gate, w.s.named[f.Slot].gate
			if a, ok := e.(BusyAnswer); ok && a.Slot == f.Slot && a.Busy && was.closed && g.since.Equal(was.since) {
				w.fail("%s says that it is busy, and is asked again at once", f.Slot)
			}
		case f.Kind == Renew:
			if sl := w.s.named[f.Slot]; sl.state != Idle && w.s.cfg.Mode == Evicting || sl.busy() || sl.stop.flush || !sl.cfg.Stale {
				w.fail("the driver of %s is to be replaced, which is %s", f.Slot, sl.state)
			}
		case f.Kind == Load:
			c.epochs[f.Slot] = f.Epoch
		case f.Kind == Decided && f.Decision.Kind == "bug":
			w.fail("%s: %s", f.Slot, f.Decision.Reason)
		case f.Kind == Decided && f.Decision.Kind == "load":
			c.load(w.s.named[f.Slot])
		case f.Kind == Decided && (f.Decision.Kind == "unloaded" || f.Decision.Kind == "evicted"):
			c.residue(f.Slot)
			c.looked(w.s.named[f.Slot])
		}
	}
	for _, sl := range w.s.slots {
		if _, sampled := e.(Sampled); sampled {
			c.residue(sl.cfg.Name)
		}
		c.closed(sl)
	}
	c.stale(e, effects)
	if w.s.cfg.Mode != Passthrough {
		c.lock()
		c.transitions()
	}
}

// jobs checks that every job ends exactly once, and that the totals say so.
func (c *checker) jobs(e Event, effects []Effect) {
	w := c.w
	if submit, is := e.(Submit); is {
		switch {
		case len(effects) == 0 || effects[0].Kind > Refuse && effects[0].Kind != NotNow:
			w.fail("the first effect of a Submit is not about its job: %s", tell(effects))
		case submit.IfFree && (effects[0].Kind == Queued || len(effects) != 1):
			w.fail("a job that wanted to run at once or not at all: %s", tell(effects))
		}
		if id := effects[0].Job; id != 0 {
			if w.jobs[id] != nil {
				w.fail("job %d was given out twice", id)
			}
			c.coming.id = id
			w.jobs[id] = c.coming
			w.order = append(w.order, id)
		}
	}
	for _, f := range effects {
		if f.Kind != Admit && f.Kind != Refuse || f.Job == 0 {
			continue
		}
		j := w.jobs[f.Job]
		if j == nil || j.state != simWaiting {
			w.fail("job %d was admitted or refused, and was not waiting", f.Job)
		}
		if f.Kind == Refuse {
			j.state = simEnded
			if f.Refusal == nil || f.Refusal.Code == "" || f.Refusal.Message == "" {
				w.fail("a refusal without a reason: %+v", f.Refusal)
			}
			continue
		}
		j.state = simRunning
		sl := w.s.named[f.Slot]
		was, old := c.was[sl]
		reopened := slices.ContainsFunc(effects, func(o Effect) bool { return o.Kind == Decided && o.Decision.Kind == "reopen" && o.Slot == f.Slot })
		if old && !reopened && w.s.cfg.Mode != Passthrough && was.gate.closed && sl.gate.closed && was.gate.since.Equal(sl.gate.since) {
			w.fail("job %d was admitted to %s, whose gate is closed", f.Job, f.Slot)
		}
		if sl.dead != "" || sl.suspect && !sl.cfg.Cloud && w.s.cfg.Mode != Passthrough {
			w.fail("job %d was admitted to %s, whose server has died, or may have", f.Job, f.Slot)
		}
		if sl.state != Ready {
			w.fail("job %d was admitted to %s, which is %s", f.Job, f.Slot, sl.state)
		}
		if !sl.cfg.Async && !sl.cfg.Cloud && sl.active > sl.cfg.Concurrency && w.s.cfg.Mode != Passthrough {
			w.fail("%s runs %d jobs, its concurrency is %d", f.Slot, sl.active, sl.cfg.Concurrency)
		}
	}
	running := map[*simServer]int{}
	waiting := 0
	for _, id := range w.order[max(0, len(w.order)-600):] {
		switch j := w.jobs[id]; j.state {
		case simRunning:
			running[j.server]++
		case simWaiting:
			waiting++
		case simHeld, simEnded:
		}
	}
	held := 0
	for _, sl := range w.s.slots {
		held += sl.held
		if want := running[w.server(sl.cfg.Name)]; sl.active != want {
			w.fail("%s counts %d active jobs, %d are running", sl.cfg.Name, sl.active, want)
		}
	}
	n := w.s.counts
	if w.s.waiting != waiting || n.Jobs != n.Ended+n.Cancelled+n.Refused+uint64(w.s.waiting+w.s.running) {
		w.fail("the counts don't add up: %+v, %d waiting (truly %d), %d running", n, w.s.waiting, waiting, w.s.running)
	}
	active := 0
	for _, r := range running {
		active += r
	}
	if w.s.running != active+held {
		w.fail("%d jobs count as running, %d are and %d are held", w.s.running, active, held)
	}
}

// wake checks that nobody who waits is forgotten, and that waking is no busy loop.
func (c *checker) wake(e Event, wake time.Time) {
	now := c.w.now
	if _, woken := e.(Wake); woken && !wake.IsZero() && !wake.After(now) {
		c.w.fail("after a wake at %s the next is due at %s", now, wake)
	}
	latest := now.Add(5 * time.Second)
	if end := c.rules.restsUntil(c.w); !end.IsZero() { // all who wait rest: nothing else can change their answer
		latest = later(latest, end)
	}
	if c.w.s.waiting > 0 && (wake.IsZero() || wake.After(latest)) {
		c.w.fail("jobs wait, and the next wake is at %s", wake)
	}
}

// edge checks the second column of accounting §2: why a slot's state may change.
func (c *checker) edge(sl *slot, effects []Effect) {
	was, old := c.was[sl]
	if !old || was.state == sl.state || c.w.s.cfg.Mode != Evicting || c.mode != Evicting { // a change of mode begins anew
		return
	}
	has := func(k EffectKind) bool {
		return slices.ContainsFunc(effects, func(f Effect) bool { return f.Kind == k && f.Slot == sl.cfg.Name })
	}
	why := true
	switch sl.state {
	case Loading:
		why = has(Load)
	case Stopping:
		why = has(StartUnload)
	case Ready:
		switch e := c.event.(type) {
		case LoadDone:
			why = was.state == Loading && e.Slot == sl.cfg.Name && e.Epoch == c.epochs[e.Slot] || has(Admit)
		case UnloadDone:
			why = was.state == Stopping && e.Err != "" || has(Admit)
		case Probed:
			why = was.state != Loading && was.state != Stopping || has(Admit)
		default:
			why = has(Admit) // lazy
		}
	case Idle:
		switch c.event.(type) {
		case Probed, Release, Cancel, Died: // a Cancel may meet a job that was admitted
			why = was.state == Ready || was.state == Unknown || was.state == Stopping
		case LoadDone:
			why = was.state == Loading || was.state == Stopping
		default:
			why = was.state == Stopping
		}
	case Unknown:
		e, ok := c.event.(UnloadDone)
		why = ok && e.Err != "" && was.state == Stopping
	}
	if !why {
		c.w.fail("%s went from %s to %s by %T", sl.cfg.Name, was.state, sl.state, c.event)
	}
	if was.state == Loading || was.state == Stopping || sl.state == Loading {
		c.epoch(sl)
	}
}

// epoch checks that an answer which ends a load or unload is the answer to the one under way.
func (c *checker) epoch(sl *slot) {
	var name string
	var epoch uint64
	switch e := c.event.(type) {
	case LoadDone:
		name, epoch = e.Slot, e.Epoch
	case UnloadDone:
		name, epoch = e.Slot, e.Epoch
	default:
		return
	}
	if name == sl.cfg.Name && c.was[sl].state != sl.state && epoch+1 < sl.epoch && sl.state != Loading && sl.state != Stopping {
		c.w.fail("an answer with epoch %d moved %s, which is at %d", epoch, name, sl.epoch)
	}
}

// lastUse checks that it is the end of real work, and nothing else.
func (c *checker) lastUse(sl *slot) {
	was, old := c.was[sl]
	worked := false
	switch e := c.event.(type) {
	case Release:
		j := c.w.jobs[e.Job]
		worked = j != nil && j.server.cfg.Name == sl.cfg.Name && (e.Outcome == Served || e.Outcome == Accepted || e.Outcome == ServerDied)
	case BusyAnswer:
		worked = e.Slot == sl.cfg.Name && !e.Busy
	case Touch:
		worked = e.Slot == sl.cfg.Name
	}
	if old && !was.lastUse.Equal(sl.lastUse) && (!worked || !sl.lastUse.Equal(c.w.now)) {
		c.w.fail("%T moved the last use of %s to %s", c.event, sl.cfg.Name, sl.lastUse)
	}
	if e, ok := c.event.(Release); ok && worked && e.Job == c.leaving && !sl.lastUse.Equal(c.w.now) {
		c.w.fail("a served job of %s did not move its last use", sl.cfg.Name)
	}
}

// held checks that work which outlives its answers is let go only on its server's word, or with its server.
func (c *checker) held(sl *slot) {
	was, old := c.was[sl]
	if !old || sl.held >= was.held {
		return
	}
	told := false
	switch e := c.event.(type) {
	case BusyAnswer:
		told = e.Slot == sl.cfg.Name && !e.Busy && !e.Sent.Before(was.heldAt)
	case Probed, Died:
		told = sl.state != Ready
	case Release, Cancel: // the last job of a server that has died: its held work is gone with it
		told = sl.state != Ready && was.dead != ""
	}
	if told && sl.held == 0 {
		for _, j := range c.w.jobs {
			if j.state == simHeld && j.server.cfg.Name == sl.cfg.Name {
				j.state = simEnded
			}
		}
		return
	}
	if w := c.w; was.orphans > 0 && sl.orphans == 0 && sl.held == was.held-was.orphans && !w.now.Before(was.leftBy.Add(w.s.cfg.DrainTimeout)) {
		for _, j := range w.jobs {
			if j.state == simHeld && j.left && j.server.cfg.Name == sl.cfg.Name {
				j.state = simEnded
			}
		}
		return
	}
	c.w.fail("%T ended held work of %s", c.event, sl.cfg.Name)
}

// unload checks spec §3.2: what a victim is at the moment of its unload.
func (c *checker) unload(f Effect) {
	w, v := c.w, c.w.s.named[f.Slot]
	c.epochs[f.Slot] = f.Epoch
	t := v.stop.target
	if v.active > 0 || v.held > 0 {
		w.fail("%s is unloaded with %d active and %d held jobs", f.Slot, v.active, v.held)
	}
	if sv := w.server(f.Slot); sv.cfg.CanBusy && sv.working > 0 && !v.stop.flush && v.stop.from != Loading {
		w.fail("%s is unloaded, and its server works on %d jobs", f.Slot, sv.working)
	}
	if !v.cfg.CanUnload {
		w.fail("%s is unloaded, and has no way to", f.Slot)
	}
	if v.stop.flush || t == nil {
		return
	}
	switch {
	case v == t || c.rules.pinned(v) || v.cfg.NoEvict || v.cfg.VRAMManaged || slices.Contains(t.cfg.Coexist, v.cfg.Name):
		w.fail("%s is unloaded for %s, and is protected from that", f.Slot, t.cfg.Name)
	case t.state != Idle && t.state != Unknown || t.queue.count+t.parked == 0 && !v.gate.restores: // a client may have started another job in the same step
		w.fail("%s is unloaded for %s, which is %s and has %d waiting", f.Slot, t.cfg.Name, t.state, t.queue.count)
	case v.stop.from == Idle:
		w.fail("%s is unloaded for %s, and was not loaded", f.Slot, t.cfg.Name)
	}
	if m := c.model(t, v); m != nil && !t.want.extra && m.fits() && !c.dropped {
		w.fail("%s is unloaded for %s, which fits: %s", f.Slot, t.cfg.Name, m)
	}
}

// closed checks "plan before acting": a gate closes only if the permitted victims together are enough.
func (c *checker) closed(v *slot) {
	t := v.gate.target
	if t != nil && c.w.s.cfg.ObserveEvictions && c.w.s.cfg.Mode == Evicting && v.state != Stopping {
		c.w.fail("the gate of %s is closed for %s, and evictions are only observed", v.cfg.Name, t.cfg.Name)
	}
	if was, old := c.was[v]; !old || t == nil || was.gate.closed && was.gate.target == t && was.gate.since.Equal(v.gate.since) || t.want.extra {
		return
	}
	m := c.model(t, v)
	if m == nil {
		return
	}
	for _, o := range c.w.s.slots {
		if o != t && !c.rules.pinned(o) && !o.cfg.NoEvict && !o.cfg.VRAMManaged && o.cfg.CanUnload && !slices.Contains(t.cfg.Coexist, o.cfg.Name) {
			m.unload(o)
		}
	}
	for foe := range m.foes { // it may have been loaded since, in the same step
		if was := c.was[c.w.s.named[foe]].state; was == Idle || was == Stopping {
			delete(m.foes, foe)
		}
	}
	if !m.fits() {
		c.w.fail("the gate of %s closes for %s, and all victims together are not enough: %s", v.cfg.Name, t.cfg.Name, m)
	}
}

// load checks that no decision takes the bookings of a GPU above what it has.
func (c *checker) load(t *slot) {
	if t.cfg.Stale {
		c.w.fail("%s is loaded by a driver that is to be replaced", t.cfg.Name)
	}
	for _, h := range t.on {
		g := c.w.s.card(h.card)
		if h.booking < t.configured() { // what was seen of it may be more than can be had
			c.w.fail("%s is loaded and booked for %s, its claim is %s", t.cfg.Name, h.booking, t.configured())
		}
		var booked gpu.Bytes
		for _, sl := range c.w.s.slots {
			if o := sl.hold(h.card); o != nil {
				booked += bookingOf(sl, o)
			}
		}
		if booked > g.Total-c.w.s.cfg.Reserve {
			c.w.fail("the load of %s takes the bookings of GPU %d to %s of %s", t.cfg.Name, h.card, booked, g.Total-c.w.s.cfg.Reserve)
		}
	}
}

func bookingOf(sl *slot, h *holding) gpu.Bytes {
	if sl.state == Idle {
		return h.residue
	}
	return h.booking
}

// residue checks the cap of accounting §1: what nobody else and no earlier outsider explains of the memory in use.
func (c *checker) residue(name string) {
	sl := c.w.s.named[name]
	if sl == nil || sl.state != Idle || c.othersMoved(sl) {
		return
	}
	for _, h := range sl.on {
		g := c.w.s.card(h.card)
		if g == nil || !g.Known || h.hasMeas || h.residue == 0 {
			continue
		}
		m := c.w.newModel(g, sl)
		if rest := m.used() - m.othersSeen(); h.residue > max(0, rest) {
			c.w.fail("%s keeps a residue of %s on GPU %d, only %s is left unexplained", name, h.residue, h.card, rest)
		}
	}
}

// looked checks that memory counts as back only by a look at it after the unload call returned, or after evict_wait.
func (c *checker) looked(v *slot) {
	if v == nil { // it was dropped in the same step
		return
	}
	now, returned := c.w.now, c.w.now
	if was := c.was[v]; was.stop.called {
		returned = was.stop.at
	}
	known, stale := true, false
	for _, h := range v.on {
		g := c.w.s.card(h.card)
		known = known && g != nil && g.Known
		stale = stale || g != nil && g.seenAt.Before(returned)
	}
	if known && stale && now.Before(returned.Add(c.w.s.cfg.EvictWait)) {
		c.w.fail("%s counts as unloaded, and nobody has looked at its memory since the call returned", v.cfg.Name)
	}
}

// othersMoved says whether another slot changed its state in this step: what is seen of it is another amount now.
func (c *checker) othersMoved(sl *slot) bool {
	return slices.ContainsFunc(c.w.s.slots, func(o *slot) bool {
		was, old := c.was[o]
		return o != sl && (!old || was.state != o.state)
	})
}

// lock checks that at most one exclusive slot computes on a GPU. Those that a
// configuration of before let compute at once end what they do, and no other joins them.
func (c *checker) lock() {
	s := c.w.s
	_, configured := c.event.(Configure)
	var crowd []*slot
	for _, g := range s.gpus {
		var who []*slot
		for _, sl := range s.slots {
			if sl.busy() && !sl.cfg.LockNone && !sl.cfg.Cloud && (s.cfg.LockGlobal || sl.hold(g.Index) != nil) {
				who = append(who, sl)
			}
		}
		if len(who) > 1 {
			for _, sl := range who {
				if !configured && !slices.Contains(c.crowd, sl) {
					c.w.fail("%s computes on GPU %d beside others", sl.cfg.Name, g.Index)
				}
			}
			crowd = append(crowd, who...)
		}
		if owner := s.owner(g.Index); len(who) > 0 && who[0].hold(g.Index) != nil && !slices.Contains(who, owner) {
			c.w.fail("%s computes on GPU %d, its lock is %q's", who[0].cfg.Name, g.Index, name(owner))
		}
	}
	c.crowd = crowd
}

// transitions checks accounting §4: at most one load or unload on a GPU, the first job of a lazy slot included.
func (c *checker) transitions() {
	for _, g := range c.w.s.gpus {
		var who []string
		for _, sl := range c.w.s.slots {
			if sl.hold(g.Index) != nil && (sl.state == Loading || sl.state == Stopping || sl.stop.flush || sl.warming) {
				who = append(who, sl.cfg.Name)
			}
		}
		if len(who) > 1 {
			c.w.fail("%s load or unload at once on GPU %d", who, g.Index)
		}
	}
	for _, sl := range c.w.s.slots {
		if sl.warming && c.w.jobs[sl.first].state == simEnded {
			c.w.fail("%s counts as loading, and its first job has ended", sl.cfg.Name)
		}
	}
}

// stale checks that what is out of date changes nothing.
func (c *checker) stale(e Event, effects []Effect) {
	p, ok := e.(Probed)
	sl := c.w.s.named[p.Slot]
	if !ok || sl == nil || !p.Sent.Before(c.was[sl].since) {
		return
	}
	if was := c.was[sl]; sl.health != was.health || len(effects) > 0 {
		c.w.fail("a probe of %s, sent %s before its last change, had effects: %s", p.Slot, was.since.Sub(p.Sent), tell(effects))
	}
}

// outOfMemory is a server that found less memory than it was promised.
func (c *checker) outOfMemory(sv *simServer) {
	if c.w.shape.honest && !c.meddled && !c.w.calm {
		c.w.fail("%s ran out of memory", sv.cfg.Name)
	}
}

// theEnd checks what must hold once all is over.
func (c *checker) theEnd() {
	if a, b := c.w.s.Snapshot(c.w.now), c.w.twin.Snapshot(c.w.now); !reflect.DeepEqual(a, b) {
		c.w.fail("the same history came to another state:\n%+v\n%+v", a, b)
	}
	for _, id := range c.w.order {
		if j := c.w.jobs[id]; j.state == simWaiting || j.state == simRunning {
			c.w.fail("job %d never ended", id)
		}
	}
	for _, g := range c.w.s.gpus {
		if o := c.w.s.owner(g.Index); o != nil {
			c.w.fail("nothing runs, and %s holds the lock of GPU %d", o.cfg.Name, g.Index)
		}
	}
}
