package main

// elsewhere are faults in the rooms around the scheduler: those of its driver, of requests and their bodies, and of what speaks to servers and GPUs.
var elsewhere = []mutant{
	{
		name: "a model that the server has loaded by itself is not counted",
		dir:  "broker",
		file: "consumer.go", tests: "TestAConsumerWithoutSlotsStaysWhileItIsConfigured",
		old: "case sl == nil && config.CheckModelName(m.Name) == nil:",
		new: "case false:",
	},
	{
		name: "the whole server is unloaded for one of its models",
		dir:  "broker",
		file: "effects.go", tests: "TestOneModelIsLoadedAndUnloadedByHand",
		old: "t := lifecycle.Target{Model: sl.model, ",
		new: "t := lifecycle.Target{",
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
		file: "generation.go", tests: "TestAConsumerThatLeavesWhileItComesBackHasAnOpenDriver",
		old: "\tif i > 0 { // it never ruled\n\t\tg.discard()\n",
		new: "\tif i > 0 {\n",
	},
	{
		name: "what was learnt is written though nothing changed",
		dir:  "broker",
		file: "learnt.go", tests: "TestWhatWasLearntIsSavedAtMostOnceAMinuteAndOnlyIfItChanged",
		old: "bytes.Equal(doc, b.saved) || ",
		new: "",
	},
	{
		name: "models that were removed do not hear of their server",
		dir:  "broker",
		file: "effects.go", tests: "TestWhoWaitsForAModelThatWasRemovedIsServedThoughItsServerDied",
		old: "range b.allSlots(c) {\n\t\tif sl.turnOnly && c.traits.Starts {",
		new: "range slices.Clone(c.slots) {\n\t\tif sl.turnOnly && c.traits.Starts {",
	},
	{
		name: "a model that is partly on the CPU counts as loaded though that is forbidden",
		dir:  "lifecycle/http",
		file: "driver.go", tests: "TestAModelThatIsOnlyPartlyOnTheGPUIsUnloadedAgainWhereThatIsRequired",
		old: "if needsLoaded && d.plan.fullGPU {",
		new: "if false {",
	},
	{
		name: "a hand-over looks at the memory every 2 s", dir: "broker", file: "samples.go", tests: "TestAHandOverLooksAtTheMemory",
		old: "wait = max(fastInterval, s.MinInterval())",
		new: "wait = max(sampleInterval, s.MinInterval())",
	},
	{
		name: "lock_overtake and overtake_max change places", dir: "broker", file: "settings.go", tests: "TestEverySettingOfACaddyfile",
		old: "OvertakeMax: c.EffectiveOvertakeMax(), LockOvertake: c.EffectiveLockOvertake(),",
		new: "OvertakeMax: c.EffectiveLockOvertake(), LockOvertake: c.EffectiveOvertakeMax(),",
	},
	{
		name: "lock_overtake is overtake_min, in its effect", dir: "broker", file: "settings.go", tests: "TestLockOvertakeIs",
		old: "LockOvertake: c.EffectiveLockOvertake()",
		new: "LockOvertake: c.EffectiveOvertakeMin()",
	},
	{
		name: "overtake_max is lock_overtake, in its effect", dir: "broker", file: "settings.go", tests: "TestOvertakeMaxBounds",
		old: "OvertakeMax: c.EffectiveOvertakeMax()",
		new: "OvertakeMax: c.EffectiveLockOvertake()",
	},
	{
		name: "reserved places and their priority change places", dir: "broker", file: "settings.go", tests: "TestReservedPlacesOfTheQueue",
		old: "sc.ReservedPlaces, sc.ReservedBelow = r.Places, r.Below",
		new: "sc.ReservedPlaces, sc.ReservedBelow = r.Below, r.Places",
	},
	{
		name: "lock global is ignored", dir: "broker", file: "settings.go", tests: "TestLockGlobalLetsOne",
		old: "LockGlobal: c.Lock == config.LockGlobal",
		new: "LockGlobal: c.Lock == \"\"",
	},
	{
		name: "victim_priority is ignored", dir: "broker", file: "settings.go", tests: "TestVictimPriorityLower",
		old: "VictimLower: c.OnlyLowerVictims()",
		new: "VictimLower: false",
	},
	{
		name: "a server is started again before what it started is gone", dir: "lifecycle/process", file: "means_linux.go", tests: "TestAServerThatHasEndedIsStartedAgain",
		old: "case <-before.gone:",
		new: "case <-before.ended:",
	},
	{
		name: "a process is not known by its mark", dir: "lifecycle/process", file: "means_linux.go", tests: "TestAnOrphanOfTheServer",
		old: "return mark(pid) == c.record.Mark",
		new: "return false",
	},
	{
		name: "a server that starts anew is taken for gone at once", dir: "lifecycle/http", file: "unload.go", tests: "TestUnloadIsConfirmedByAServerThatComesBack",
		old: "time.Since(refusedSince) >= goneAfter",
		new: "time.Since(refusedSince) >= 0",
	},
	{
		name: "a server that stays away is waited for until the time-out", dir: "lifecycle/http", file: "unload.go", tests: "TestUnloadOfAServerThatStaysAway",
		old: "time.Since(refusedSince) >= goneAfter",
		new: "false",
	},
	{
		name: "a list that fails is asked for until the time-out", dir: "lifecycle/http", file: "unload.go", tests: "TestForEachWhoseListFailsAtOnce",
		old: "\t\t\treturn failed != nil\n\t\t}\n",
		new: "\t\t\treturn false\n\t\t}\n",
	},
	{
		name: "a list that fails once in the middle ends the unload", dir: "lifecycle/http", file: "unload.go", tests: "TestForEachWhoseListFailsLater",
		old: "\t\t\tif first {\n",
		new: "\t\t\tif first || true {\n",
	},
	{
		name: "the status may be cached", dir: ".", file: "status.go", tests: "TestWhatIsToldOfTheBrokerIsNeverCached",
		old: "\tw.Header().Set(\"Cache-Control\", \"no-store\")\n",
		new: "",
	},
	{
		name: "a client that left before the answer counts as served", dir: ".", file: "run.go", tests: "TestWhatTheSchedulerIsToldOfAJobsEnd",
		old: "\tcase j.status == 0 || j.status == statusClientLeft:\n\t\treturn scheduler.NoAnswer",
		new: "\tcase j.status == 0:\n\t\treturn scheduler.NoAnswer",
	},
	{
		name: "the body of a WebSocket over HTTP/2 is read ahead", dir: ".", file: "readahead.go", tests: "TestTheBodyOfATunnelIsNotReadAhead",
		old: "r.Body != http.NoBody && r.Method != http.MethodConnect",
		new: "r.Body != http.NoBody",
	},
	{
		name: "a request over HTTP/3 can't be cut", dir: ".", file: "run.go", tests: "TestARequestOverHTTP3IsCutByItsContext",
		old: "case r.ProtoMajor > 2, j.handler.StreamBody:",
		new: "case j.handler.StreamBody:",
	},
	{
		name: "a stalled upload is taken for a client that left", dir: ".", file: "errors.go", tests: "TestAStalledUploadIsNoClientThatLeft",
		old: "if r.Context().Err() != nil && j.stalled == \"\" {",
		new: "if r.Context().Err() != nil {",
	},
	{
		name: "a stalled upload is what its reader made of it", dir: ".", file: "readahead.go", tests: "TestAStalledUploadIsNoClientThatLeft",
		old: "\t\t\terr = uploadStalled(time.Duration(*h.app.UploadIdle))\n",
		new: "",
	},
	{
		name: "an answer that was cut looks whole", dir: ".", file: "run.go", tests: "TestAnAnswerThatWasCutIsNotPassedOffAsWhole",
		old: "if j.status != 0 && (j.isCut.Load() || ranOut()) {",
		new: "if j.status != 0 && ranOut() {",
	},
	{
		name: "an answer that max_run ended looks whole", dir: ".", file: "run.go", tests: "TestAnAnswerThatMaxRunEndsIsNotPassedOffAsWhole",
		old: "if j.status != 0 && (j.isCut.Load() || ranOut()) {",
		new: "if j.status != 0 && j.isCut.Load() {",
	},
	{
		name: "an answer that was broken off is returned, not aborted", dir: ".", file: "run.go", tests: "TestAnAnswerThat",
		old: "\t\tpanic(http.ErrAbortHandler)\n",
		new: "\t\treturn nil\n",
	},
	{
		name: "a heartbeat that nobody takes has no deadline", dir: ".", file: "heartbeat.go", tests: "TestClientThatTakesNoHeartbeatHoldsNothingUp",
		old: "SetWriteDeadline(past)",
		new: "SetWriteDeadline(time.Time{})",
	},
	{
		name: "Retry-After has no upper bound", dir: ".", file: "errors.go", tests: "TestRetryAfterIsAtMostAMinute",
		old: "min(60, max(1, int(math.Ceil(f.retryAfter.Seconds()))))",
		new: "max(1, int(math.Ceil(f.retryAfter.Seconds())))",
	},
	{
		name: "who left the queue stays in the map of those who wait", dir: "broker", file: "acquire.go", tests: "TestARequestWhoseClientLeavesTheQueue",
		old: "\t\tdelete(b.waiters, lease.job)\n",
		new: "",
	},
	{
		name: "a server inherits Caddy's files", dir: "lifecycle/process", file: "child_linux.go", tests: "TestTheServerGetsNoneOfCaddysFiles",
		old: "unix.CloseRange(3, math.MaxInt32,",
		new: "unix.CloseRange(math.MaxInt32, math.MaxInt32,",
	},
	{
		name: "what is no record hides the records after it", dir: "lifecycle/process", file: "record_linux.go", tests: "TestARecordThatCantBeRead",
		old: "\t\tif !ok {\n\t\t\tcontinue",
		new: "\t\tif !ok {\n\t\t\tbreak",
	},
	{
		name: "busy is told in two ways", dir: "lifecycle/http", file: "compile.go", tests: "TestWhatTellsThatTheServerWorks",
		old: "\tcase in.Busy != \"\" && both:",
		new: "\tcase false:",
	},
	{
		name: "the longest name of a form's field is not read",
		dir:  "routing",
		file: "form.go", tests: "TestBoundsOfAForm",
		old: "len(f.key) == maxEscaped",
		new: "len(f.key) == maxEscaped-1",
	},
	{
		name: "the longest value of a form is not read",
		dir:  "routing",
		file: "form.go", tests: "TestBoundsOfAForm",
		old: "len(f.value) == maxEscaped",
		new: "len(f.value) == maxEscaped-1",
	},
	{
		name: "the longest name of a model is refused in a form",
		dir:  "routing",
		file: "form.go", tests: "TestBoundsOfAForm",
		old: "case long, len(text) > MaxName:",
		new: "case long, len(text) >= MaxName:",
	},
	{
		name: "a model that is named twice in JSON is not noticed",
		dir:  "routing",
		file: "peek.go", tests: "TestH4_AModelThatABodyNamesTwiceWithDifferentValuesIsAnError",
		old: "old.kind != 0 && !old.equals(v)",
		new: "old.kind != 0 && false",
	},
	{
		name: "what a body decodes to has no bound of its ratio",
		dir:  "routing",
		file: "coding.go", tests: "TestK4_BombsAreRefusedAndHeldMemoryIsGivenBack",
		old: "max(freeSize, y.size*maxRatio)",
		new: "max(y.limits.Body, y.size*maxRatio)",
	},
}
