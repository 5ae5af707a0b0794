package main

// equivalent are random faults that were looked at and found to change nothing that anybody could see, by room and
// the text of the change, with the reason. The runner leaves them out.
var equivalent = map[string]string{
	`routing/values.go: integer: return 0, false, err => return 0, true, err`: withError,

	`routing/values.go: seconds: return 0, err => return 1, err`: withError,
	`routing/scan.go: string: for i+8 <= len(buf) && allPlain(binary.LittleEndian.Uint64(buf[i:])) { => for i+8 < len(buf) && allPlain(binary.LittleEndian.Uint64(buf[i:])) {`: "the last eight bytes are read one by one instead",

	"request path/run.go: run: if limit > 0 { => if limit > 1 {": "the bound would be a nanosecond",
	"request path/run.go: run: ranOut := func() bool { return limit > 0 && errors.Is(context.Cause(inner.Context()), errMaxRun) } => ranOut := func() bool { return limit > 1 && errors.Is(context.Cause(inner.Context()), errMaxRun) }": "the bound would be a nanosecond",

	"lifecycle/process/child_linux.go: hold: runtime.UnlockOSThread() => {}":                                                                                          "the runtime parks a main thread whose goroutine has ended, and works with others",
	"lifecycle/process/reap_linux.go: endOrphans: for wait := firstLook; ; wait = min(2*wait, lastLook) { => for wait := firstLook; ; wait = min(3*wait, lastLook) {": pace,
	"lifecycle/process/reap_linux.go: endOrphans: for wait := firstLook; ; wait = min(2*wait, lastLook) { => for wait := firstLook; ; wait = min(1*wait, lastLook) {": pace,
	"lifecycle/http/driver.go: poll: for wait := firstPoll; ; wait = min(2*wait, lastPoll) { => for wait := firstPoll; ; wait = min(3*wait, lastPoll) {":              pace,
	"lifecycle/http/driver.go: poll: for wait := firstPoll; ; wait = min(2*wait, lastPoll) { => for wait := firstPoll; ; wait = min(1*wait, lastPoll) {":              pace,
	"lifecycle/process/reap_linux.go: : firstLook    = 2 * time.Millisecond => firstLook    = 3 * time.Millisecond":                                                   pace,
	"lifecycle/process/reap_linux.go: : firstLook    = 2 * time.Millisecond => firstLook    = 1 * time.Millisecond":                                                   pace,
	"lifecycle/process/reap_linux.go: : lastLook     = 50 * time.Millisecond => lastLook     = 51 * time.Millisecond":                                                 pace,
	"lifecycle/process/reap_linux.go: : lastLook     = 50 * time.Millisecond => lastLook     = 25 * time.Millisecond":                                                 pace,

	"request path/sent.go: looksForName: return h.plan != nil && !h.pinnedOnly && h.fixed == t && !h.StreamBody && 0 < r.ContentLength && r.ContentLength <= min(maxNamedBody, h.maxBody) && hasBody(r) && t.NamesModel(r) => return h.plan != nil && !h.pinnedOnly && h.fixed == t && !h.StreamBody && 0 <= r.ContentLength && r.ContentLength <= min(maxNamedBody, h.maxBody) && hasBody(r) && t.NamesModel(r)": "hasBody is false for a length of 0",

	"request path/stop.go: : const exitPoll = 100 * time.Millisecond => const exitPoll = 50 * time.Millisecond": pace,

	"lifecycle/process/reap_linux.go: : reapPatience = 10 * time.Second // for those that were killed to be gone => reapPatience = 11 * time.Second // for those that were killed to be gone": "only what can not be killed is waited for so long",

	"lifecycle/process/child_linux.go: sweep: for wait := firstLook; c.kill(seen); wait = min(wait*3/2, slowLook) { => for wait := firstLook; c.kill(seen); wait = min(wait*3*2, slowLook) {": pace,
	"lifecycle/process/output.go: : maxLogging = 1024 => maxLogging = 1025": "a bound",
	"lifecycle/process/child_linux.go: sweep: time.Sleep(wait) // nothing tells of the end of a process that is not a child => {} // nothing tells of the end of a process that is not a child":     pace,
	"lifecycle/process/reap_linux.go: endOrphans: time.Sleep(wait) // nothing tells of the end of a process that is not a child => {} // nothing tells of the end of a process that is not a child": pace,
	"lifecycle/process/means_linux.go: Owns: for at, i := pid, 0; at > 1 && i < deepest; i++ { => for at, i := pid, 0; at > 2 && i < deepest; i++ {":                                                "nobody's server is the kernel's thread 2",

	"routing/sources.go: pairsOf: for at := 0; at < len(query); { => for at := 0; at <= len(query); {":                                               "the last pair would be one without a name",
	"routing/change.go: changeJSON: case first.prev > 0: => case first.prev > 1:":                                                                    "no member ends at the first byte",
	"broker/acquire.go: submit: if len(r.Candidates) > 1 && c.name != r.Candidates[0] { => if len(r.Candidates) >= 1 && c.name != r.Candidates[0] {": "of one candidate there is no other",
	"routing/scan.go: text: s.capturing = false => s.capturing = true":                                                                               "what is kept in vain is dropped when the next text begins",

	"broker/status.go: slotStatus: if sl.adopted && sl.size > 0 { => if sl.adopted && sl.size > 1 {":                                            "no model has one byte",
	"broker/catalog.go: offered: return Offer{Silent: cat.fault}, false => return Offer{Silent: cat.fault}, true":                               "it is asked for once more, and was asked a moment ago",
	"broker/catalog.go: offered: return Offer{Starts: true, Failed: cat.failed}, false => return Offer{Starts: true, Failed: cat.failed}, true": "it is asked for once more, and was asked a moment ago",

	"routing/body.go: Read: if n := r.ContentLength; n >= int64(cap(body.memory)) && n <= SmallBody { => if n := r.ContentLength; n >= int64(cap(body.memory)) && n < SmallBody {": pieces,
	"routing/body.go: Read: body.memory = make([]byte, 0, largestKept) => {}":                                                                                                      pieces,
	"routing/unload.go: mayBeZero: if at < 0 { => if at <= 0 {":                                                                                                                    "JSON does not begin with a name, and a quote stands between two",
	"routing/values.go: simple: if len(text) < 2 || text[0] != '\"' || text[len(text)-1] != '\"' { => if len(text) < 3 || text[0] != '\"' || text[len(text)-1] != '\"' {":          "an empty text is decoded, to the same",
	"routing/coding.go: newDecoder: if z, err = zstd.NewReader(d.in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow)); err == nil { => if z, err = zstd.NewReader(d.in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(false), zstd.WithDecoderMaxWindow(maxWindow)); err == nil {": "it changes only how much memory a decoder takes",
	"routing/unload.go: mayBeZero: if at < 0 { => if at < 1 {": "JSON does not begin with a name, and a quote stands between two",
	"scheduler/handover.go: stopNow: h.booking, h.before, seen, out = h.booking+leak, 0, seen+leak, out-leak => h.booking, h.before, seen, out = h.booking+leak, 1, seen+leak, out-leak": "one byte",

	"scheduler/words.go: Rounded: case abs < time.Millisecond: => case abs <= time.Millisecond:": roundAnyway,
	"scheduler/words.go: Rounded: case abs < time.Second: => case abs <= time.Second:":           roundAnyway,
	"scheduler/words.go: Rounded: case abs < time.Minute: => case abs <= time.Minute:":           roundAnyway,

	"scheduler/observe.go: claimLeaks: if h == nil || h.before <= 0 || sl.state != Ready || !sl.settledOn(c) || s.transition(c.Index) != nil { => if h == nil || h.before < 0 || sl.state != Ready || !sl.settledOn(c) || s.transition(c.Index) != nil {": "the leak of a slot that kept nothing is 0",

	"broker/effects.go: probe: pctx, cancel := context.WithTimeout(ctx, 2*timeout+time.Second) => pctx, cancel := context.WithTimeout(ctx, 3*timeout+time.Second)": "the driver bounds its calls itself",
	"request path/job.go: done: jobs.Put(j) => {}":                                                                                                   "it changes only how often memory is made",
	"request path/models.go: liveness: w.Header().Set(\"Content-Type\", \"text/plain; charset=utf-8\") => {}":                                        "net/http finds the same from the text",
	"lifecycle/process/means_linux.go: Owns: for at, i := pid, 0; at > 1 && i < deepest; i++ { => for at, i := pid, 0; at > 1 || i < deepest; i++ {": "one more is read in vain: PID 1, and its parent, which is none",

	"scheduler/clients.go: clientRests: return len(s.resting.until) > 0 && s.cfg.Mode != Passthrough && now.Before(s.resting.until[r]) => return len(s.resting.until) >= 0 && s.cfg.Mode != Passthrough && now.Before(s.resting.until[r])": "it only saves a look into an empty map",
}

const roundAnyway = "the bound itself is a whole number of either unit"

const withError = "Peek drops all facts of a body that has an error"

const pace = "it changes only how often something is looked at"

const pieces = "it changes only how much is read at once"
