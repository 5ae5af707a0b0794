package scheduler

import (
	"slices"
	"time"
)

// What holds always of jobs, and of the work that they leave behind.

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
		if old && was.stale && sl.cfg.Stale && w.s.cfg.Mode == Evicting && !w.now.Before(sl.retryAt) && !w.s.worksBefore(sl) {
			w.fail("job %d was admitted to %s, whose driver is to be replaced", f.Job, f.Slot)
		}
		if sl.dead != "" || !sl.suspect.IsZero() && !sl.cfg.Cloud && w.s.cfg.Mode != Passthrough {
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
	case Probed:
		told = sl.state != Ready || e.Outcome == ProbeRefused
	case UnloadDone:
		told = e.Refused
	case Died:
		told = sl.state != Ready || c.mode != Evicting
	case Release: // the last job of a server that has died, or one that it refused: its held work is gone with it
		told = sl.state != Ready && was.dead != "" || e.Outcome == DialRefused || was.refused // a lazy one may be READY again in the same step
	case Cancel:
		told = sl.state != Ready && was.dead != "" || was.refused
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
