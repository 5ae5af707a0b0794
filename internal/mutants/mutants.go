package main

// mutant is one planted fault: in a file of a package, old becomes new.
type mutant struct {
	name string
	dir  string // of the package; empty: scheduler
	file string
	old  string // must occur exactly once
	new  string
}

// mutants are the faults that the tests must catch: the ten that a scheduler of
// this kind is most likely to have, those that its random histories once found
// in it, then those of idle unloads, drains, reloads and what was learnt.
var mutants = []mutant{
	{
		name: "a job can be released twice",
		file: "jobs.go",
		old:  "\ts.jobs.put(j)\n\tsl.active--\n",
		new:  "\tsl.active--\n",
	},
	{
		name: "the epoch of a load's answer is ignored",
		file: "handover.go",
		old:  "t == nil || t.state != Loading || t.epoch != e.Epoch",
		new:  "t == nil || t.state != Loading",
	},
	{
		name: "the gate is ignored",
		file: "jobs.go",
		old:  "sl.state == Ready && !sl.gate.closed && sl.health == healthGood",
		new:  "sl.state == Ready && sl.health == healthGood",
	},
	{
		name: "an unload does not free the booking",
		file: "handover.go",
		old:  "h.residue = s.residueNow(v, i, c)",
		new:  "h.residue = v.stop.seen[i]",
	},
	{
		name: "what the target holds already is not subtracted from its need",
		file: "fit.go",
		old:  "return t.claim() - s.heldBy(t, h) + s.cushion(c)",
		new:  "return t.claim() + s.cushion(c)",
	},
	{
		name: "the fit is decided for one amount, another is booked",
		file: "handover.go",
		old:  "h.frozen, h.hasMeas = t.claim(), 0, 0,",
		new:  "h.frozen, h.hasMeas = t.claim()/2, 0, 0,",
	},
	{
		name: "last use is the start of a job, not its end",
		file: "jobs.go",
		old:  "\tsl.started++\n",
		new:  "\tsl.started++\n\tsl.lastUse = now\n",
	},
	{
		name: "the time at which a probe was sent is ignored",
		file: "observe.go",
		old:  "sl == nil || e.Sent.Before(sl.since) ||",
		new:  "sl == nil ||",
	},
	{
		name: "can_coexist_with is ignored",
		file: "plan.go",
		old:  "case slices.Contains(t.cfg.Coexist, v.cfg.Name):",
		new:  "case false:",
	},
	{
		name: "victims go though all together are not enough",
		file: "plan.go",
		old:  "\tif !s.fitsAfter(t, chosen...) {\n\t\treturn nil\n\t}\n",
		new:  "",
	},
	{
		name: "the lock is ignored",
		file: "jobs.go",
		old:  "if l.owner != nil && l.owner != sl && (s.cfg.LockGlobal || sl.hold(l.gpu) != nil) {",
		new:  "if l == nil {",
	},
	{
		name: "a sample from before the unload says that the memory is back",
		file: "handover.go",
		old:  "looked = looked && !c.seenAt.Before(v.stop.at)",
		new:  "looked = looked && c != nil",
	},
	{
		name: "an unload goes out beside another's load",
		file: "handover.go",
		old:  "if o := s.transition(h.card); o != nil && o != v {",
		new:  "if o := s.transition(h.card); o != nil && o == nil {",
	},
	{
		name: "a victim goes though the target fits meanwhile",
		file: "handover.go",
		old:  "case t != nil && !t.want.extra && s.fits(t):",
		new:  "case false:",
	},
	{
		name: "two that are UNKNOWN wait for each other",
		file: "plan.go",
		old:  "return v.health != healthUnknown && (v.queue.count == 0 || targetOrder(t, v) < 0)",
		new:  "return v.health != healthUnknown && v.queue.count == 0",
	},
	{
		name: "memory that a job took counts as seen before a look at it",
		file: "jobs.go",
		old:  "return sl.settled && (!c.Known || !c.seenAt.Before(sl.settledAt))",
		new:  "return sl.settled && c != nil",
	},
	{
		name: "a load does not wait for a look at what a failed one left",
		file: "handover.go",
		old:  "{ c.doubt = now }",
		new:  "{ _ = c }",
	},
	{
		name: "an idle unload ignores that a job waits",
		file: "idle.go",
		old:  "sl.state == Ready && !sl.busy() && sl.queue.count == 0",
		new:  "sl.state == Ready && !sl.busy()",
	},
	{
		name: "idle counts from the last use, not from the last job's end",
		file: "idle.go",
		old:  "return sl.idleAt.Add(max(",
		new:  "return sl.lastUse.Add(max(",
	},
	{
		name: "an idle unload that has begun is not taken back",
		file: "handover.go",
		old:  "case v.gate.idle && !s.idleOver(now, v):",
		new:  "case false:",
	},
	{
		name: "idle_unload observe unloads if it comes in the middle",
		file: "idle.go",
		old:  "return s.cfg.IdleUnload == IdleOn && s.idles(sl)",
		new:  "return s.idles(sl)",
	},
	{
		name: "a failed unload is tried again each second",
		file: "handover.go",
		old:  "v.retryAt = now.Add(backoff(v.unloadBad))",
		new:  "v.retryAt = now.Add(time.Second)",
	},
	{
		name: "an idle slot's gate closes while another loads",
		file: "idle.go",
		old:  "if !s.due(now, sl.retryAt) || !s.mayMove(sl) {",
		new:  "if !s.due(now, sl.retryAt) {",
	},
	{
		name: "nobody wakes the scheduler for an idle slot",
		file: "jobs.go",
		old:  "\t\ts.wakeBy(s.idleEnd(sl))\n",
		new:  "",
	},
	{
		name: "eviction observe does not reach a drain under way",
		file: "plan.go",
		old:  "return orElse(shields(t, v), \"eviction observe\")",
		new:  "return shields(t, v)",
	},
	{
		name: "a drained slot takes jobs",
		file: "jobs.go",
		old:  "case s.draining || s.ending || sl.draining:",
		new:  "case s.draining || s.ending:",
	},
	{
		name: "who waits for a drained slot goes on waiting",
		file: "jobs.go",
		old:  "r := s.drained(sl)",
		new:  "var r *Refusal",
	},
	{
		name: "what was learnt is not recalled",
		file: "observe.go",
		old:  "\t\ts.recall(now, sl)\n",
		new:  "",
	},
	{
		name: "abandon_after is ignored",
		file: "plan.go",
		old:  "return v.queue.count == 0 && s.due(now, v.emptyAt.Add(s.cfg.AbandonAfter))",
		new:  "return v.queue.count == 0",
	},
	{
		name: "a reload that makes slots exclusive gives the lock away too early",
		file: "jobs.go",
		old:  "\tif s.crowded {\n",
		new:  "\tif false {\n",
	},
	{
		name: "a slot that a reload moved is loaded on a GPU that is not there",
		file: "plan.go",
		old:  "if r := s.refusesSlot(t); r != nil {",
		new:  "if r := s.refusesSlot(t); r != nil && s.card(t.on[0].card) != nil {",
	},
	{
		name: "a pending configuration rules at once",
		dir:  "broker",
		file: "generation.go",
		old:  "\tif len(b.gens) == 1 {\n",
		new:  "\tif len(b.gens) >= 1 {\n",
	},
	{
		name: "the drivers of a configuration that never ruled stay open",
		dir:  "broker",
		file: "generation.go",
		old:  "\tif i > 0 { // it never ruled\n\t\tg.discard()\n",
		new:  "\tif i > 0 {\n",
	},
	{
		name: "what was learnt is written though nothing changed",
		dir:  "broker",
		file: "learnt.go",
		old:  "bytes.Equal(doc, b.saved) || ",
		new:  "",
	},
}
