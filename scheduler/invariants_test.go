package scheduler

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
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
	stale   bool
	since   time.Time
	lastUse time.Time
	held    int
	heldAt  time.Time
	orphans int
	leftBy  time.Time
	dead    string
	refused bool
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
	return standing{state: sl.state, gate: sl.gate, stale: sl.cfg.Stale, since: sl.since, lastUse: sl.lastUse, held: sl.held, heldAt: sl.heldAt, orphans: sl.orphans, leftBy: sl.leftBy, health: sl.health, first: sl.first, warming: sl.warming, stop: sl.stop, dead: sl.dead, refused: !sl.refusedAt.IsZero()}
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
		case Probed, Sampled:
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
		case Sampled: // its server does not answer, and its memory is free
			why = was.state == Stopping || was.health == healthBad && was.state == Ready
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
	if name == sl.cfg.Name && c.was[sl].state != sl.state && epoch != c.epochs[name] && sl.state != Loading && sl.state != Stopping {
		c.w.fail("an answer with epoch %d moved %s, which is at %d", epoch, name, c.epochs[name])
	}
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
