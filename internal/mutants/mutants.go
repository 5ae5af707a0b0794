package main

import "slices"

// mutant is one planted fault: in a file of a package, old becomes new.
type mutant struct {
	name  string
	dir   string // of the package; empty: scheduler
	file  string
	old   string // must occur exactly once
	new   string
	tests string // matches the tests that must find it; empty: all of the package
	apart bool   // its tests run in a PID namespace of their own, or not at all
}

// mutants are the faults that the tests must catch.
var mutants = slices.Concat(inScheduler, elsewhere)

// inScheduler are the ten faults that a scheduler of this kind is most likely to have, those that its random histories once found
// in it, and those of idle unloads, drains, reloads, what was learnt, and the order of service.
var inScheduler = []mutant{
	{
		name: "a job can be released twice",
		file: "jobs.go", tests: "TestH6_AJobIsContendedWhileOthersWaitForItsGPU",
		old: "\tsl.idleAt = now\n\ts.jobs.put(j)\n",
		new: "\tsl.idleAt = now\n",
	},
	{
		name: "a server that answers no probe is gone though its memory is taken",
		file: "gone.go", tests: "TestAServerThatAnswersNoProbeIsIdleOnceItsMemoryIsFree",
		old: "4*back >= 3*took && ",
		new: "",
	},
	{
		name: "the epoch of a load's answer is ignored",
		file: "handover.go", tests: "TestAStaleLoadDoneIsIgnored",
		old: "t == nil || t.state != Loading || t.epoch != e.Epoch",
		new: "t == nil || t.state != Loading",
	},
	{
		name: "the gate is ignored",
		file: "jobs.go", tests: "TestAJobThatComesAtTheVeryInstantIsServed",
		old: "sl.state == Ready && !sl.gate.closed && sl.health == healthGood",
		new: "sl.state == Ready && sl.health == healthGood",
	},
	{
		name: "an unload does not free the booking",
		file: "handover.go", tests: "TestFC31_AFloorThatRisesWithEachExitMakesNoEvictionLoop",
		old: "h.residue = s.residueNow(v, i, c)",
		new: "h.residue = v.stop.seen[i]",
	},
	{
		name: "what the target holds already is not subtracted from its need",
		file: "fit.go", tests: "TestK0_WhatIsMeasuredOfTheTargetsProcessCountsForIt",
		old: "return t.claim() - s.heldBy(t, h) + s.cushion(c)",
		new: "return t.claim() + s.cushion(c)",
	},
	{
		name: "the fit is decided for one amount, another is booked",
		file: "handover.go", tests: "TestABusySlotIsLeftAloneForItsSwitchCost",
		old: "h.booking, h.loadFree, h.blind, h.before = t.claim(), c.Free, !c.Known, h.residue",
		new: "h.booking, h.loadFree, h.blind, h.before = t.claim()/2, c.Free, !c.Known, h.residue",
	},
	{
		name: "what was loaded without telemetry is other programs' when it is back",
		file: "ledger.go", tests: "TestK6_WhatWasLoadedWithoutTelemetryIsNoOutsidersMemoryWhenItIsBack",
		old: "e.State == Unknown || e.Blind && (e.State == Loading || e.State == Ready && !e.Settled)",
		new: "e.State == Unknown",
	},
	{
		name: "last use is the start of a job, not its end",
		file: "jobs.go", tests: "TestOnlyRealWorkIsUse",
		old: "\tsl.started++\n",
		new: "\tsl.started++\n\tsl.lastUse = now\n",
	},
	{
		name: "the time at which a probe was sent is ignored",
		file: "observe.go", tests: "TestAProbeSentBeforeTheLastChangeOfStateIsIgnored",
		old: "sl == nil || e.Sent.Before(sl.since) ||",
		new: "sl == nil ||",
	},
	{
		name: "can_coexist_with is ignored",
		file: "victims.go", tests: "TestWarmJobsOfSlotsThatTakeNoPartAreNotDelayed",
		old: "case v.cfg.listed(t.cfg.Coexist):",
		new: "case false:",
	},
	{
		name: "victims go though all together are not enough",
		file: "victims.go", tests: "TestASlotThatServedNobodySinceItBecameReadyStaysThoughItsJobsAreYoung",
		old: "\tif !s.fitsAfter(t, all...) {\n\t\treturn nil\n\t}\n",
		new: "",
	},
	{
		name: "the lock is ignored",
		file: "jobs.go", tests: "TestAServerWithAPortOfItsOwnIsNotUnloadedUnderTheModelsThatItGets",
		old: "if l.owner != nil && l.owner != sl && (s.cfg.LockGlobal || sl.hold(l.gpu) != nil) {",
		new: "if l == nil {",
	},
	{
		name: "a sample from before the unload says that the memory is back",
		file: "handover.go", tests: "TestOnlyALookFromAfterTheCallShowsThatMemoryIsBack",
		old: "looked = looked && !c.seenAt.Before(v.stop.at)",
		new: "looked = looked && c != nil",
	},
	{
		name: "an unload goes out beside another's load",
		file: "handover.go", tests: "TestADeadServerWaitsForTheLoadOfAnotherBeforeItIsStartedAgain",
		old: "if o := s.transition(h.card); o != nil && o != v {",
		new: "if o := s.transition(h.card); o != nil && o == nil {",
	},
	{
		name: "a victim goes though the target fits meanwhile",
		file: "handover.go", tests: "TestADrainedVictimStaysIfTheUnloadBeforeItsOwnMadeEnoughRoom",
		old: "case t != nil && !t.want.extra && s.fits(t):",
		new: "case false:",
	},
	{
		name: "two that are UNKNOWN wait for each other",
		file: "victims.go", tests: "TestTwoUnknownSlotsThatAreWaitedForDoNotWaitForEachOther",
		old: "return v.health != healthUnknown && (v.queue.count == 0 || t.ranked().compare(v.ranked()) < 0)",
		new: "return v.health != healthUnknown && v.queue.count == 0",
	},
	{
		name: "memory that a job took counts as seen before a look at it",
		file: "jobs.go", tests: "TestWhatAJobTookIsOnlySeenByALookAfterIt",
		old: "return sl.settled && (!c.Known || !c.seenAt.Before(sl.settledAt))",
		new: "return sl.settled && c != nil",
	},
	{
		name: "a load does not wait for a look at what a failed one left",
		file: "handover.go", tests: "TestALazySlotLoadsInTheStepThatAdmitsItsFirstJob",
		old: "{ c.doubt = now }",
		new: "{ _ = c }",
	},
	{
		name: "the lock of all GPUs is rebuilt from those on each GPU alone",
		file: "jobs.go", tests: "TestTheLockOfAllGPUsIsRebuiltFromAllWhoCompute",
		old: "!s.cfg.LockGlobal && sl.hold(l.gpu) == nil {",
		new: "sl.hold(l.gpu) == nil {",
	},
	{
		name: "the lock of a GPU is rebuilt from nobody unless there is one for all",
		file: "jobs.go", tests: "TestJobsThatAnEarlierConfigurationLetRunAtOnceKeepTheLockUntilTheLastEnds",
		old: "!s.cfg.LockGlobal && sl.hold(l.gpu) == nil {",
		new: "!s.cfg.LockGlobal || sl.hold(l.gpu) == nil {",
	},
	{
		name: "a target that is held up does not say why",
		file: "plan.go", tests: "TestWhoIsHeldUpByALoadInsideAJobSaysSo",
		old: "\t\tt.why = why\n\t\tif len(t.on) > 1 {",
		new: "\t\tif len(t.on) > 1 {",
	},
	{
		name: "outsiders lose their names between full samples",
		file: "observe.go", tests: "TestTheNamesOfOutsidersStayBetweenFullLooks",
		old: "\t\t\td.Outsiders = c.Outsiders\n",
		new: "\t\t\td.Outsiders = nil\n",
	},
	{
		name: "free memory teaches nothing of what a load took",
		file: "handover.go", tests: "TestK9_TheNextClaimIsWhatWasSeenLately",
		old: "took = max(took, clamp(",
		new: "took = max(took, 0*clamp(",
	},
	{
		name: "a lazy target's own server is not unloaded before its load",
		file: "flush.go", tests: "TestK0_BothAreUnloadedIfOnlyBothMakeRoom",
		old: "\tif s.flushable(now, t) {\n\t\treturn t\n\t}\n",
		new: "",
	},
	{
		name: "others are evicted before a lazy target's own server is unloaded",
		file: "flush.go", tests: "TestK0_NoOtherIsEvictedWhileTheTargetsOwnMemoryMayComeBack",
		old: "|| !s.lacksOnlyOutsiders(t) { // the cheap",
		new: "|| true { // the cheap",
	},
	{
		name: "what was seen of a slot does not raise its claim",
		file: "claim.go", tests: "TestK9_TheNextClaimIsWhatWasSeenLately",
		old: "return max(sl.configured(), seen)",
		new: "return max(sl.configured(), 0*seen)",
	},
	{
		name: "work whose client has left holds nothing",
		file: "jobs.go", tests: "TestK8_TheLockStaysUntilTheBusyRouteSaysIdle",
		old: "orphan := e.Left && s.worksOn(sl, outcome)",
		new: "orphan := false && s.worksOn(sl, outcome)",
	},
	{
		name: "an idle unload ignores that a job waits",
		file: "idle.go", tests: "TestASlotWithJobsIsNotIdle",
		old: "sl.state == Ready && !sl.busy() && sl.queue.count == 0",
		new: "sl.state == Ready && !sl.busy()",
	},
	{
		name: "idle counts from the last use, not from the last job's end",
		file: "idle.go", tests: "TestIdleCountsFromReadyForOneThatWasNeverUsed",
		old: "return later(sl.idleAt.Add(max(",
		new: "return later(sl.lastUse.Add(max(",
	},
	{
		name: "an idle unload that has begun is not taken back",
		file: "handover.go", tests: "TestAJobThatComesAtTheVeryInstantIsServed",
		old: "case v.gate.idle && !s.idleOver(now, v):",
		new: "case false:",
	},
	{
		name: "idle_unload observe unloads if it comes in the middle",
		file: "idle.go", tests: "TestANewConfigurationTakesAnIdleUnloadBack",
		old: "return s.cfg.IdleUnload == IdleOn && s.idles(sl)",
		new: "return s.idles(sl)",
	},
	{
		name: "a failed unload is tried again each second",
		file: "handover.go", tests: "TestASlotWhoseUnloadFailsIsTriedAgainWithBackOff",
		old: "v.retryAt = now.Add(backoff(v.unloadBad))",
		new: "v.retryAt = now.Add(time.Second)",
	},
	{
		name: "an idle slot's gate closes while another loads",
		file: "idle.go", tests: "TestAnIdleUnloadWaitsForTheTransitionOfAnotherOnItsGPU",
		old: "if !s.due(now, sl.retryAt) || !s.mayMove(sl) {",
		new: "if !s.due(now, sl.retryAt) {",
	},
	{
		name: "nobody wakes the scheduler for an idle slot",
		file: "jobs.go", tests: "TestAnIdleSlotIsUnloadedAtTheExactTime",
		old: "\t\ts.wakeBy(s.idleEnd(sl))\n",
		new: "",
	},
	{
		name: "eviction observe does not reach a drain under way",
		file: "victims.go", tests: "TestObservedEvictionsAreSaidOnceForThoseWhoWaitAndNotDone",
		old: "return orElse(s.shields(t, v), \"eviction observe\")",
		new: "return s.shields(t, v)",
	},
	{
		name: "a drained slot takes jobs",
		file: "jobs.go", tests: "TestACloudSlotIsRefusedWhenItsServerIsUnhealthyOrDrained",
		old: "case s.draining || s.ending || sl.draining:",
		new: "case s.draining || s.ending:",
	},
	{
		name: "who waits for a drained slot goes on waiting",
		file: "jobs.go", tests: "TestADrainedSlotTakesNoMoreJobsAndEndsThoseThatRun",
		old: "r := s.drained(sl)",
		new: "var r *Refusal",
	},
	{
		name: "what was learnt is not recalled",
		file: "observe.go", tests: "TestK9_TheNextClaimIsWhatWasSeenLately",
		old: "\t\ts.recall(now, sl)\n",
		new: "",
	},
	{
		name: "abandon_after is ignored",
		file: "victims.go", tests: "TestADeadServerIsStartedAgainAndKeepsItsMemoryFromOthers",
		old: "return v.queue.count == 0 && s.due(now, v.emptyAt.Add(s.cfg.AbandonAfter))",
		new: "return v.queue.count == 0",
	},
	{
		name: "a reload that makes slots exclusive gives the lock away too early",
		file: "jobs.go", tests: "TestJobsThatAnEarlierConfigurationLetRunAtOnceKeepTheLockUntilTheLastEnds",
		old: "\tif s.crowded {\n",
		new: "\tif false {\n",
	},
	{
		name: "a slot that a reload moved is loaded on a GPU that is not there",
		file: "plan.go", tests: "TestASlotThatIsMovedToAGPUThatIsNotThereRefusesWhoWaits",
		old: "if r := s.refusesSlot(t); r != nil {",
		new: "if r := s.refusesSlot(t); r != nil && s.card(t.on[0].card) != nil {",
	},
	{
		name: "credit is never cleared",
		file: "jobs.go", tests: "TestAStartedJobClearsTheCredit",
		old: "sl.lastPrio, sl.credit = j.priority, credit{}",
		new: "sl.lastPrio = j.priority",
	},
	{
		name: "a load does not clear the credit",
		file: "state.go", tests: "TestACompletedLoadClearsTheCredit",
		old: "\tif sl.state == Loading && state == Ready {\n\t\tsl.credit = credit{}\n\t}\n",
		new: "",
	},
	{
		name: "credit is counted of those who leave a loaded slot",
		file: "jobs.go", tests: "TestWhoLeavesALoadedSlotGivesItNoCredit",
		old: "if j.slot.state != Ready && s.creditFor(j.slot) > 0 {",
		new: "if s.creditFor(j.slot) > 0 {",
	},
	{
		name: "credit does not lapse",
		file: "clients.go", tests: "TestCreditLapsesBeforeARequestThatComesTooLongAfterTheLastDeparture",
		old: "if !c.from.IsZero() && now.Sub(c.last) > after {",
		new: "if false {",
	},
	{
		name: "an urgent target waits for the whole bound",
		file: "victims.go", tests: "TestVictimPriorityLowerSparesASlotForWhichSomebodyAsUrgentWaits",
		old: "return t.first.submitted, t.bound / 10, true",
		new: "return t.first.submitted, t.bound, true",
	},
	{
		name: "credit makes an urgent target older",
		file: "victims.go", tests: "TestCreditDoesNotMakeAnUrgentJobOlder",
		old: "return t.first.submitted, t.bound / 10, true",
		new: "return t.age, t.bound / 10, true",
	},
	{
		name: "the batch of a loaded slot holds against an urgent target",
		file: "victims.go", tests: "TestExplainSaysWhyARequestWouldWait",
		old: "return urgent || !queued ||",
		new: "return urgent && false || !queued ||",
	},
	{
		name: "a slot need not stay loaded for its switch cost",
		file: "victims.go", tests: "TestABusySlotIsLeftAloneForItsSwitchCost",
		old: "v.started == 0 || !s.due(now, v.readyAt.Add(v.switchCost()))",
		new: "v.started == 0",
	},
	{
		name: "clients take no turns",
		file: "queue.go", tests: "TestClientsOfOnePriorityTakeTurns",
		old: "return q.levels[0].next.first",
		new: "return q.levels[0].first",
	},
	{
		name: "whose turn it is stands for a slot, not the oldest",
		file: "queue.go", tests: "TestTheOldestJobStandsForASlotWhoeversTurnItIs",
		old: "\t\tif !ok || l.first.submitted.Before(at) {\n\t\t\tat, ok = l.first.submitted, true\n\t\t}\n",
		new: "\t\tif !ok || l.next.first.submitted.Before(at) {\n\t\t\tat, ok = l.next.first.submitted, true\n\t\t}\n",
	},
	{
		name: "a client that waits elsewhere does not rest",
		file: "clients.go", tests: "TestAClientStartsItsNextJobAfterItsCooldown",
		old: "\tif len(s.resting.until) == 0 {\n\t\treturn\n\t}\n",
		new: "\tif true {\n\t\treturn\n\t}\n",
	},
	{
		name: "a reserved place of the queue is used",
		file: "jobs.go", tests: "TestPlacesOfTheQueueAreKeptForUrgentJobs",
		old: "bulk >= s.cfg.MaxQueue-kept",
		new: "bulk > s.cfg.MaxQueue-kept",
	},
	{
		name: "a reserved place of a slot is used",
		file: "jobs.go", tests: "TestPlacesOfTheConcurrencyAreKeptForUrgentJobs",
		old: "sl.bulk < sl.cfg.Concurrency-sl.cfg.Reserved",
		new: "sl.bulk <= sl.cfg.Concurrency-sl.cfg.Reserved",
	},
	{
		name: "a conflict is one-sided",
		file: "victims.go", tests: "TestConflictingSlotsAreNeverResidentTogether",
		old: "return b.cfg.listed(a.cfg.Conflicts) || a.cfg.listed(b.cfg.Conflicts)",
		new: "return b.cfg.listed(a.cfg.Conflicts)",
	},
	{
		name: "victim_priority lower looks at the last job only",
		file: "victims.go", tests: "TestVictimPriorityLowerSparesASlotForWhichSomebodyAsUrgentWaits",
		old: "&& (v.queue.count == 0 || v.queue.first().priority > first.priority)",
		new: "",
	},
	{
		name: "a slot is loaded on a lent GPU",
		file: "plan.go", tests: "TestWhatRunsOnALentGPUDrains",
		old: "\tif t.lent {\n\t\tt.why =",
		new: "\tif false {\n\t\tt.why =",
	},
	{
		name: "a job runs on a lent GPU",
		file: "jobs.go", tests: "TestWhatLoadsOnALentGPUIsUnloadedOnceItIsLoaded",
		old: "!sl.lent && sl.alive()",
		new: "sl.alive()",
	},
	{
		name: "a pin by hand is forgotten",
		file: "lend.go", tests: "TestAPinByHandKeepsASlotUntilItIsTakenBack",
		old: "\tif sl.pin != nil {\n\t\treturn *sl.pin\n\t}\n",
		new: "",
	},
	{
		name: "a slot is restored while others on its GPU work",
		file: "restore.go", tests: "TestAnyUseOfTheGPUPutsTheRestoreOff",
		old: "if o.busy() || o.queue.count+o.parked > 0 {",
		new: "if o == sl && o.queue.count+o.parked > 0 {",
	},
	{
		name: "what was unloaded by hand is restored",
		file: "handover.go", tests: "TestWhatWasUnloadedByHandIsNotRestored",
		old: "v.evicted = v.gate.lent",
		new: "v.evicted = true",
	},
	{
		name: "a job's keep-alive is ignored",
		file: "jobs.go", tests: "TestAJobKeepsItsSlotForAsLongAsItAsked",
		old: "sl.keep = later(sl.keep, now.Add(j.keepAlive))",
		new: "sl.keep = later(sl.keep, now)",
	},
	{
		name: "to explain leaves its job in the queue",
		file: "explain.go", tests: "TestExplainSaysWhatWouldRunLoadOrEvict",
		old: "\t\tsl.queue.remove(j)\n",
		new: "",
	},
	{
		name: "a server that died keeps its booking",
		file: "died.go", tests: "TestAServerThatDiesWhileItIsToMakeRoomHasMadeIt",
		old: "\ts.vanish(now, sl, \"its server died: \"+orElse(detail, \"it ended\"))\n",
		new: "\theld := sl.on[0].booking\n\ts.vanish(now, sl, \"its server died: \"+orElse(detail, \"it ended\"))\n\tsl.on[0].residue = held\n",
	},
	{
		name: "a job enters a server that may have died",
		file: "died.go", tests: "TestASuspectServerTakesNoJobBeforeAProbeHasAnswered",
		old: "return sl.dead == \"\" && sl.suspect.IsZero()",
		new: "return sl.dead == \"\"",
	},
	{
		name: "a job enters a server that has died",
		file: "died.go", tests: "TestADeadServerTakesNoJobBeforeTheLastOfItsJobsHasEnded",
		old: "bool { return sl.dead == \"\" &&",
		new: "bool { return",
	},
	{
		name: "a driver is replaced while its server is loaded",
		file: "died.go", tests: "TestAStaleServerIsNotUnloadedUnderTheWorkOfAModelThatItHadBefore",
		old: "sl.state == Idle && !sl.stop.flush && !sl.busy():",
		new: "!sl.stop.flush && !sl.busy():",
	},
	{
		name: "a server that keeps dying does not back off",
		file: "died.go", tests: "TestAServerThatKeepsDyingBacksOffUntilItHasLivedForAMinute",
		old: "cool := backoff(sl.deaths - 1)",
		new: "cool := time.Duration(0)",
	},
	{
		name: "a slot whose driver is to be replaced is loaded",
		file: "plan.go", tests: "TestAStaleSlotEndsItsWorkIsUnloadedAndThenRenewedOnce",
		old: "\tif t.cfg.Stale {\n\t\tt.why",
		new: "\tif false {\n\t\tt.why",
	},
	{
		name: "a gate that reopens lets jobs in at a server whose driver is to be replaced",
		file: "handover.go", tests: "TestAStaleSlotLetsNobodyInAsItNeedNotMakeRoomAnyMore",
		old: "if v.cfg.Stale { // nothing",
		new: "if false { // nothing",
	},
	{
		name: "what went during an unload is booked again with the next load",
		file: "state.go", tests: "TestFC31_AFloorThatRisesWithEachExitMakesNoEvictionLoop",
		old: "if unloaded { // what",
		new: "if unloaded && false { // what",
	},
	{
		name: "a driver that is to replace another is offered once only",
		file: "state.go", tests: "TestAStaleSlotThatIsLoadedAgainBeforeItsDriverIsReplacedIsRenewedOnceMore",
		old: "sl.renewing = false // one",
		new: "// one",
	},
	{
		name: "a card that has shrunk does not lower what is claimed on it", file: "observe.go", tests: "TestWhatWasSeenOfASlotIsBounded",
		old: "changed = changed || c.Total != d.Total",
		new: "changed = changed && c.Total != d.Total",
	},
}
