package scheduler

import (
	"slices"
	"strings"
	"time"
)

// rulesCheck checks clients, reserved places, conflicts, lent GPUs, pins, restores,
// and who may be evicted when: with books of its own, that it keeps from the events.
type rulesCheck struct {
	pins     map[string]bool       // by hand
	lent     map[int]time.Time     // GPUs
	rests    map[restKey]time.Time // clients
	kept     map[*slot]time.Time
	warm     map[*slot]time.Duration
	credits  map[*slot]*departures
	waited   map[*slot]int // before the step
	expected *Explanation  // of the Submit that comes next

	leaving *slot // whose waiting job is taken back now
	began   time.Time
}

// departures are of those who left a cold slot.
type departures struct{ from, last time.Time }

func (c *rulesCheck) before(w *world, e Event) {
	if w.s.cfg.Mode == Passthrough { // nobody rests there
		clear(c.rests)
	}
	if c.pins == nil {
		c.pins, c.lent, c.rests = map[string]bool{}, map[int]time.Time{}, map[restKey]time.Time{}
		c.kept, c.warm, c.credits, c.waited = map[*slot]time.Time{}, map[*slot]time.Duration{}, map[*slot]*departures{}, map[*slot]int{}
	}
	clear(c.waited)
	for _, sl := range w.s.slots {
		c.waited[sl] = sl.queue.count
	}
	c.leaving = nil
	switch e := e.(type) {
	case Lend:
		if w.s.card(e.GPU) != nil {
			c.lent[e.GPU] = e.Until
		}
	case SetPin:
		if w.s.named[e.Slot] != nil {
			c.pins[e.Slot] = e.On
		}
	case Cancel:
		c.leaves(w, e.Job)
	case Release:
		if j := w.s.jobs.get(e.Job); j != nil && j.state == jobRunning {
			c.ends(w, w.jobs[e.Job])
		}
	}
}

// leaves notes who takes back a job.
func (c *rulesCheck) leaves(w *world, id JobID) {
	j := w.s.jobs.get(id)
	if j == nil {
		return
	}
	switch j.state {
	case jobRunning:
		c.ends(w, w.jobs[id])
	case jobWaiting:
		c.leaving, c.began = j.slot, j.submitted
	case jobFree, jobCooling:
	}
}

// ends notes for how long a job that ends wants its slot kept.
func (c *rulesCheck) ends(w *world, j *simJob) {
	sl := w.s.named[j.server.cfg.Name]
	if j.asked.KeepAlive > 0 {
		c.kept[sl] = later(c.kept[sl], w.now.Add(j.asked.KeepAlive))
	}
	c.warm[sl] = j.asked.StayWarm
}

func (c *rulesCheck) pinned(sl *slot) bool {
	if on, said := c.pins[sl.cfg.Name]; said {
		return on
	}
	return sl.cfg.Pin
}

// idleEnd is when a slot goes that has been idle since then.
func (c *rulesCheck) idleEnd(sl *slot, since time.Time) time.Time {
	timeout := sl.cfg.IdleTimeout
	if own := c.warm[sl]; own > 0 {
		timeout = own
	}
	return later(since.Add(max(timeout, sl.cfg.KeepAlive)), c.kept[sl])
}

func (c *rulesCheck) after(k *checker, e Event, effects []Effect) {
	w := k.w
	c.credit(k, e, effects)
	for _, f := range effects {
		switch {
		case f.Kind == Admit:
			c.admitted(k, w.jobs[f.Job], w.s.named[f.Slot])
		case f.Kind == StartUnload:
			c.unloads(k, w.s.named[f.Slot])
		case f.Kind == Decided && f.Decision.Kind == "load":
			c.loads(k, w.s.named[f.Slot])
		case f.Kind == Dropped:
			delete(c.pins, f.Slot)
		}
	}
	if _, came := e.(Submit); came && w.s.cfg.Mode == Evicting {
		c.told(k, effects)
	}
	c.expected = nil
	if s, came := e.(Submit); came {
		c.places(k, s, effects)
	}
	for _, v := range w.s.slots {
		c.closed(k, v)
	}
}

// credit keeps the books of policy rule 6.
func (c *rulesCheck) credit(k *checker, e Event, effects []Effect) {
	w := k.w
	if c.leaving != nil && k.was[c.leaving].state != Ready && c.lasts(w, c.leaving) > 0 {
		d := c.credits[c.leaving]
		if d == nil {
			d = &departures{from: c.began}
			c.credits[c.leaving] = d
		}
		d.from, d.last = earlier(d.from, c.began), w.now
	}
	for _, sl := range w.s.slots {
		if d := c.credits[sl]; d != nil && c.waited[sl] == 0 && sl.queue.count > 0 && w.now.Sub(d.last) > c.lasts(w, sl) {
			delete(c.credits, sl)
		}
		if _, loaded := e.(LoadDone); loaded && k.was[sl].state == Loading && sl.state == Ready {
			delete(c.credits, sl)
		}
	}
	for _, f := range effects {
		if f.Kind == Admit {
			delete(c.credits, w.s.named[f.Slot])
		}
	}
}

// lasts is for how long the age of those who left stands.
func (c *rulesCheck) lasts(w *world, sl *slot) time.Duration {
	if d := w.s.cfg.Credit; d != nil {
		return *d
	}
	return max(time.Minute, 2*bound(w.s.cfg, sl))
}

// bound is B of the policy.
func bound(cfg Config, t *slot) time.Duration {
	b := min(max(time.Duration(cfg.Overtake*float64(t.switchCost())), cfg.OvertakeMin), cfg.OvertakeMax)
	if t.cfg.Budget > 0 {
		b = min(b, t.cfg.Budget/2)
	}
	return b
}

// admitted checks who may run: whose client has rested, on no lent GPU, and not in a place that is kept for others.
func (c *rulesCheck) admitted(k *checker, j *simJob, sl *slot) {
	w, cfg := k.w, k.w.s.cfg
	if cfg.Mode == Passthrough || sl.cfg.Cloud { // nobody rests there
		return
	}
	if client := j.asked.Client; client != "" {
		rests := restKey{client, orElse(sl.cfg.Consumer, sl.cfg.Name)}
		if until := c.rests[rests]; w.now.Before(until) {
			w.fail("a job of client %s starts %s before it has rested", client, until.Sub(w.now))
		}
		if d := max(cfg.ClientCooldown, j.asked.Cooldown); d > 0 {
			c.rests[rests] = w.now.Add(d)
		}
	}
	if cfg.Mode == Evicting && c.isLent(w, sl) {
		w.fail("a job starts on %s, whose GPU is lent", sl.cfg.Name)
	}
	if j.bulk && !sl.cfg.Async {
		bulk := 0
		for _, o := range w.jobs {
			if o.state == simRunning && o.bulk && o.server == j.server {
				bulk++
			}
		}
		if free := sl.cfg.Concurrency - sl.cfg.Reserved; bulk > free {
			w.fail("%s runs %d jobs of no urgency, and has %d places for them", sl.cfg.Name, bulk, free)
		}
	}
}

// restsUntil is when the first client has rested, if all who wait do so for that.
func (c *rulesCheck) restsUntil(w *world) (end time.Time) {
	if w.s.waiting == 0 {
		return time.Time{}
	}
	for _, sl := range w.s.slots {
		if sl.queue.count > 0 {
			return time.Time{}
		}
	}
	for _, j := range w.jobs {
		if j.state == simWaiting {
			end = earlier(end, c.rests[restKey{j.asked.Client, orElse(j.server.cfg.Consumer, j.server.cfg.Name)}])
		}
	}
	return end
}

func (c *rulesCheck) isLent(w *world, sl *slot) bool {
	return slices.ContainsFunc(sl.on, func(h *holding) bool { return w.s.card(h.card) != nil && w.now.Before(c.lent[h.card]) })
}

// places checks the places of the queue that are kept for urgent jobs.
func (c *rulesCheck) places(k *checker, e Submit, effects []Effect) {
	w, cfg := k.w, k.w.s.cfg
	j := w.jobs[effects[0].Job]
	if j == nil || j.state != simWaiting || !j.bulk || cfg.ReservedPlaces == 0 {
		return
	}
	bulk := 0
	for _, o := range w.jobs {
		if o.state == simWaiting && o.bulk {
			bulk++
		}
	}
	if free := cfg.MaxQueue - cfg.ReservedPlaces; bulk > free {
		w.fail("%d jobs of no urgency wait, and %d places are theirs; the last is for %s", bulk, free, e.Slot)
	}
}

// loads checks a load that has begun: nobody who conflicts is there, and the GPU is not lent.
func (c *rulesCheck) loads(k *checker, t *slot) {
	w := k.w
	if c.isLent(w, t) {
		w.fail("%s is loaded on a GPU that is lent", t.cfg.Name)
	}
	for _, o := range w.s.slots {
		if o != t && o.state != Idle && (slices.Contains(t.cfg.Conflicts, o.cfg.Name) || slices.Contains(o.cfg.Conflicts, t.cfg.Name)) {
			w.fail("%s is loaded beside %s, which is %s and conflicts with it", t.cfg.Name, o.cfg.Name, o.state)
		}
	}
	if t.queue.count+t.parked == 0 && t.active == 0 && !(t.cfg.Restart && t.deaths > 0) {
		c.restores(k, t, true)
	}
}

// restores checks a load that nobody asks for, or an unload for it.
func (c *rulesCheck) restores(k *checker, t *slot, idle bool) {
	w := k.w
	i := slices.IndexFunc(w.s.cfg.Restore, func(r Restore) bool { return r.Slot == t.cfg.Name })
	if i < 0 {
		w.fail("%s is loaded for nobody", t.cfg.Name)
	}
	for _, o := range w.s.slots {
		if o != t && !overlap(o, t) {
			continue
		}
		if o.busy() || o.queue.count > 0 {
			w.fail("%s is restored while %s has jobs on its GPU", t.cfg.Name, o.cfg.Name)
		}
		if since := k.idle.since[o]; idle && o.state == Ready && w.now.Before(since.Add(w.s.cfg.Restore[i].After)) {
			w.fail("%s is restored %s after %s was in use on its GPU", t.cfg.Name, w.now.Sub(since), o.cfg.Name)
		}
	}
}

// unloads checks that nothing pinned goes but by hand or with its configuration, and strict priorities.
func (c *rulesCheck) unloads(k *checker, v *slot) {
	w, t := k.w, v.stop.target
	if c.pinned(v) && (t != nil || v.stop.idle || v.gate.lent) {
		w.fail("%s is unloaded and is pinned", v.cfg.Name)
	}
	if v.gate.lent && !c.isLent(w, v) {
		w.fail("%s is unloaded for a GPU that is not lent", v.cfg.Name)
	}
	switch {
	case t == nil || v.stop.flush || t.parked > 0: // their client may have started another job in the same step
	case v.gate.restores:
		c.restores(k, t, false) // another may have been restored since it began
	case w.s.cfg.VictimLower && v.used() && v.lastPrio <= t.queue.first().priority:
		w.fail("%s was last used at priority %d, and is unloaded for one of %d", v.cfg.Name, v.lastPrio, t.queue.first().priority)
	}
}

// closed checks rules 2, 3 and 4 of the policy, and its priority clause, when a gate closes.
func (c *rulesCheck) closed(k *checker, v *slot) {
	w, t := k.w, v.gate.target
	was, old := k.was[v]
	if !old || k.mode != Evicting || t == nil || t.queue.count == 0 || t.parked > 0 || // its head may have been another before this step ended
		v.gate.restores || v.gate.room || was.state != Ready || was.gate.closed && was.gate.target == t && was.gate.since.Equal(v.gate.since) {
		return
	}
	oldest := func(sl *slot, priority int) (at time.Time) {
		for _, l := range sl.queue.levels {
			for j := l.first; j != nil && j.priority <= priority; j = j.next {
				at = earlier(at, j.submitted)
			}
		}
		return at
	}
	cfg, S := w.s.cfg, v.switchCost()
	head := t.queue.levels[0].priority
	since, wants := oldest(t, anyPriority), bound(cfg, t)
	if d := c.credits[t]; d != nil {
		since = earlier(since, d.from)
	}
	next := v.lastPrio
	known := v.used()
	if v.queue.count > 0 {
		next, known = v.queue.levels[0].priority, true
	}
	urgent := known && next > head
	if urgent {
		since, wants = oldest(t, head), wants/10
	}
	if v.queue.count == 0 && !v.busy() {
		if free := later(later(v.idleAt, v.leftAt).Add(max(time.Duration(cfg.Hold*float64(S)), v.cfg.KeepAlive)), c.kept[v]); w.now.Before(since.Add(wants)) && w.now.Before(free) {
			w.fail("%s, which is idle, is to go for %s, %s before it may", v.cfg.Name, t.cfg.Name, free.Sub(w.now))
		}
		return
	}
	reference := oldest(v, head)
	if reference.IsZero() {
		reference = w.now
	}
	batch := oldest(v, anyPriority)
	switch {
	case reference.Before(since.Add(wants)):
		w.fail("%s, which works, is to go for %s: its next came %s too early", v.cfg.Name, t.cfg.Name, since.Add(wants).Sub(reference))
	case v.started == 0 || w.now.Before(v.readyAt.Add(S)):
		w.fail("%s is to go for %s, %s after it was loaded, having started %d jobs", v.cfg.Name, t.cfg.Name, w.now.Sub(v.readyAt), v.started)
	case !urgent && !batch.IsZero() && !batch.After(v.readyAt) && w.now.Before(v.readyAt.Add(cfg.OvertakeMax)):
		w.fail("%s is to go for %s, and what was queued when it was loaded still waits", v.cfg.Name, t.cfg.Name)
	}
}

// foretell asks what would happen. The twin is not asked: that asking changes nothing is checked with every step.
func (c *rulesCheck) foretell(w *world, e Submit) {
	c.expected = nil
	if w.shape.strange || w.shape.clients || w.s.cfg.Mode != Evicting || !w.chance(30) {
		return
	}
	for _, sl := range w.s.slots {
		newest := sl.queue.count > 0 && sl.queue.levels[0].last.submitted.Equal(w.now) // who of them is before it?
		if newest || sl.stop.called || sl.want.extra {                                 // what has come back may be enough for it
			return
		}
	}
	x := w.s.Explain(w.now, e.Slot, e.Priority)
	c.expected = &x
}

// told compares what was foretold with what has happened.
func (c *rulesCheck) told(k *checker, effects []Effect) {
	x := c.expected
	if x == nil {
		return
	}
	w := k.w
	if k.was[w.s.named[x.Slot]].gate.closed { // the request itself may be what opens it
		return
	}
	has := func(f func(f Effect) bool) bool { return slices.ContainsFunc(effects, f) }
	j := effects[0].Job
	runs := has(func(f Effect) bool { return f.Kind == Admit && f.Job == j && f.Job != 0 })
	loads := has(func(f Effect) bool { return f.Kind == Decided && f.Decision.Kind == "load" && f.Slot == x.Slot })
	evicts := slices.ContainsFunc(w.s.slots, func(v *slot) bool { return name(v.gate.target) == x.Slot })
	refused := has(func(f Effect) bool { return f.Kind == Refuse && f.Job == j })
	ok := true
	switch x.Outcome {
	case "runs":
		ok = runs && !loads
	case "loads":
		ok = loads
	case "evicts":
		ok = evicts
	case "refused":
		ok = refused || x.Code == VRAMExhausted || x.Code == NeverFits
	case "waits": // for others it may be in vain: what they are was seen at the last planning
		ok = !refused && (!runs && !loads || strings.Contains(x.Reason, "before"))
	}
	if !ok {
		w.fail("it was foretold that a request for %s %s: %s; runs %t, loads %t, evicts %t, refused %t", x.Slot, x.Outcome, x.Reason, runs, loads, evicts, refused)
	}
}

// ---- what happens ----

// queueRules sets what of a configuration is about the queue.
func (w *world) queueRules(cfg *Config) {
	sh := w.shape
	if sh.clients && w.chance(60) {
		cfg.ClientCooldown = w.between(0, 6*time.Second)
	}
	if sh.reserved {
		cfg.ReservedPlaces, cfg.ReservedBelow = w.rand.IntN(min(cfg.MaxQueue, 4)), 100
		if w.chance(50) && cfg.MaxQueue > 4 {
			cfg.ReservedPlaces = cfg.MaxQueue - 4
		}
	}
	if sh.credit && w.chance(60) {
		d := w.between(0, 30*time.Second) * time.Duration(w.rand.IntN(2))
		cfg.Credit = &d
	}
	cfg.VictimLower = sh.lower && w.chance(60)
	if sh.restores {
		for _, sv := range w.servers {
			if w.chance(40) {
				cfg.Restore = append(cfg.Restore, Restore{Slot: sv.cfg.Name, After: w.between(0, 10*time.Second)})
			}
		}
	}
}

// askFor sets what a client asks for beside its slot.
func (w *world) askFor(e *Submit) {
	if w.shape.clients && w.chance(60) {
		e.Client = string(rune('p' + w.rand.IntN(6)))
		if w.chance(20) {
			e.Cooldown = w.between(0, 8*time.Second)
		}
	}
	if w.shape.keeps && w.chance(30) {
		e.KeepAlive, e.StayWarm = w.between(0, 6*time.Second)*time.Duration(w.rand.IntN(2)), w.between(0, 12*time.Second)*time.Duration(w.rand.IntN(2))
	}
}

// byHand is what people do.
func (w *world) byHand(sv *simServer, g *simGPU) {
	if w.shape.lends && w.chance(60) {
		e := Lend{GPU: g.index, Until: w.now.Add(w.between(0, 20*time.Second))}
		if w.chance(40) {
			e.Until = time.Time{}
		}
		w.step(e)
	}
	if w.shape.pins {
		w.step(SetPin{Slot: sv.cfg.Name, On: w.chance(40)})
	}
}
