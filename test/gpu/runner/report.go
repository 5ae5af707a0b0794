package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// report is all that was measured.
type report struct {
	options options

	gpuName                string
	auto, ownSampler       string
	caddySampler, caddyWhy string
	degraded, serverAbout  string

	total, freeAtStart, freeAtEnd gpu.Bytes

	first swap // of nobody: the first load
	swaps []swap

	counted bool
	totals  broker.Totals
	servers stats // summed over both

	controlled, control bool // whether both were loaded past the broker, and whether that ran out of memory

	memoryLook, fullLook, smiLook []time.Duration // sorted
	smiMissing                    string

	residue map[string]holding // after everything was unloaded

	broke  error // why it was broken off
	checks []check
}

// check is one thing that must be so.
type check struct {
	what, found string
	ok          bool
}

// judge looks at what was measured. It reports whether all is as it must be.
func (r *report) judge() bool {
	n := r.options.swaps
	must := func(ok bool, what, found string, args ...any) {
		r.checks = append(r.checks, check{what, fmt.Sprintf(found, args...), ok})
	}
	if r.broke != nil {
		must(false, "the check was carried out to its end", "%s", r.broke)
	}
	intact, seen, one := 0, 0, 0
	for _, s := range r.swaps {
		if s.intact() {
			intact++
		}
		if s.seen && s.release.after-s.release.before >= r.options.size*9/10 {
			seen++
		}
		if s.evicted == 1 {
			one++
		}
	}
	must(intact == n, fmt.Sprintf("%d swaps answered, with the right checksum", n), "%d", intact)
	must(one == n, "each by exactly one eviction", "%d", one)
	must(seen == n, "each time at least 90 % of the model's size was seen free before the next load began", "%d", seen)
	if !r.counted {
		return false
	}
	t, s := r.totals, r.servers
	must(t.Evictions == uint64(n), fmt.Sprintf("evictions: %d", n), "%d", t.Evictions)
	must(s.Unloads == n && s.Loads == n+1, fmt.Sprintf("the servers unloaded %d times and loaded %d times", n, n+1), "%d and %d", s.Unloads, s.Loads)
	must(s.OOMs == 0, "out of memory: 0", "%d", s.OOMs)
	must(s.ColdWorks == 0, "requests that met an unloaded model: 0", "%d", s.ColdWorks)
	must(t.LoadFailures == 0 && t.UnloadFailures == 0 && t.Refused == 0, "failed loads, failed unloads, refusals: 0", "%d, %d, %d", t.LoadFailures, t.UnloadFailures, t.Refused)
	must(r.caddySampler == r.options.caddySampler && r.degraded == "", "Caddy read the GPU by "+r.options.caddySampler, "%s %s", r.caddySampler, r.degraded)
	if r.controlled {
		must(r.control, "control: the second model loaded past the broker runs out of memory", "%t", r.control)
	}
	return !slices.ContainsFunc(r.checks, func(c check) bool { return !c.ok })
}

// markdown writes the report.
func (r *report) markdown(w io.Writer) error {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("# gpu_broker on %s\n", orUnknown(r.gpuName))
	if r.options.about != "" {
		line("%s\n", r.options.about)
	}
	line("- card: %s, %s free at the start", mib(r.total), mib(r.freeAtStart))
	line("- each of two servers loads %s and claims %s; %s", mib(r.options.size), mib(r.options.claim), orUnknown(r.serverAbout))
	line("- Caddy's sampler: %s (%s)", orUnknown(r.caddySampler), orUnknown(r.caddyWhy))
	line("- `gpu auto` on this machine: %s", r.auto)
	line("- measured apart by: %s, every %s during a swap\n", orUnknown(r.ownSampler), r.options.poll)
	r.swapTable(line)
	r.queryTable(line)
	r.memoryTable(line)
	line("## Checks\n\n| | must be | found |\n| --- | --- | --- |")
	passed := 0
	for _, c := range r.checks {
		mark := "FAIL"
		if c.ok {
			mark, passed = "ok", passed+1
		}
		line("| %s | %s | %s |", mark, c.what, cell(c.found))
	}
	line("\n%d of %d checks hold.", passed, len(r.checks))
	_, err := io.WriteString(w, b.String())
	return err
}

// columns are the swap table's times, each in milliseconds.
var columns = []struct {
	title string
	of    func(swap) time.Duration
}{
	{"total", func(s swap) time.Duration { return s.request.took }},
	{"unload call", func(s swap) time.Duration { return s.unloadCall }},
	{"memory free", func(s swap) time.Duration { return s.release.took }},
	{"hand-over", func(s swap) time.Duration { return s.handover }},
	{"load call", func(s swap) time.Duration { return s.loadCall }},
	{"load", func(s swap) time.Duration { return s.loaded }},
	{"own", func(s swap) time.Duration { return s.request.took - s.unloadCall - s.loadCall }},
	{"warm", func(s swap) time.Duration { return s.warm.took }},
}

func (r *report) swapTable(line func(string, ...any)) {
	line("## Swaps, in ms\n")
	line("total: the client's request through Caddy. unload call, load call: as the servers saw them. memory free: from the begin of the unload call until")
	line("the free memory, polled apart, shows it. hand-over, load: as the broker's decisions have them (hand-over: unload call and wait for the memory).")
	line("own: total without the two calls. warm: the same request once more.\n")
	head, rule := "| swap | for | gives back | looks |", "| --- | --- | --- | --- |"
	for _, c := range columns {
		head, rule = head+" "+c.title+" |", rule+" ---: |"
	}
	line("%s\n%s", head, rule)
	row := fmt.Sprintf("| first load | %s | | |", r.first.target)
	for _, c := range columns {
		row += " " + ms(c.of(r.first)) + " |"
	}
	line("%s", row)
	for _, s := range r.swaps {
		row := fmt.Sprintf("| %d | %s | %s | %d |", s.n, s.target, mib(s.release.after-s.release.before), s.looks)
		for _, c := range columns {
			row += " " + ms(c.of(s)) + " |"
		}
		line("%s", row)
	}
	row = "| **median** | | | |"
	for _, c := range columns {
		var times []time.Duration
		for _, s := range r.swaps {
			times = append(times, c.of(s))
		}
		slices.Sort(times)
		row += " **" + ms(quantile(times, 0.5)) + "** |"
	}
	line("%s\n", row)
}

func (r *report) queryTable(line func(string, ...any)) {
	line("## Cost of a look at the GPU, in µs\n\n| look | times | median | p95 | most |\n| --- | ---: | ---: | ---: | ---: |")
	row := func(what string, times []time.Duration) {
		if len(times) > 0 {
			line("| %s | %d | %s | %s | %s |", what, len(times), us(quantile(times, 0.5)), us(quantile(times, 0.95)), us(times[len(times)-1]))
		}
	}
	row(r.ownSampler+", memory only", r.memoryLook)
	row(r.ownSampler+", all with processes", r.fullLook)
	row("a run of nvidia-smi", r.smiLook)
	if r.smiMissing != "" {
		line("| nvidia-smi | | %s | | |", cell(r.smiMissing))
	}
	line("")
}

// memoryTable sets the claim against what was measured.
func (r *report) memoryTable(line func(string, ...any)) {
	line("## Claim against measured, in MiB (medians over the loads)\n")
	line("| server | claim | booked while loaded | it says itself | free memory drops by | driver: its process, loaded | driver: its process, unloaded | broker: residue after unload |")
	line("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
	for _, name := range []string{alpha, beta} {
		var loaded, unloaded []swap
		for _, s := range append([]swap{r.first}, r.swaps...) {
			switch name {
			case s.target:
				loaded = append(loaded, s)
			case s.victim:
				if s.n > 0 {
					unloaded = append(unloaded, s)
				}
			}
		}
		line("| %s | %s | %s | %s | %s | %s | %s | %s |", name,
			median(loaded, func(s swap) gpu.Bytes { return s.held.claim }),
			median(loaded, func(s swap) gpu.Bytes { return s.held.booking }),
			median(loaded, func(s swap) gpu.Bytes { return s.held.own }),
			median(loaded, func(s swap) gpu.Bytes { return s.drop }),
			median(loaded, func(s swap) gpu.Bytes { return s.held.process }),
			median(unloaded, func(s swap) gpu.Bytes { return s.left.process }),
			median(unloaded, func(s swap) gpu.Bytes { return s.left.residue }))
	}
	line("\nThe very first load (%s), with the server's CUDA context: free memory dropped by %s; the driver gives its process %s.",
		r.first.target, mib(r.first.drop), toldMiB(r.first.held.process))
	if r.residue != nil {
		line("After everything was unloaded, %s less were free than at the start; the driver gives %s to alpha's process and %s to beta's; the broker books %s and %s as residue.",
			mib(r.freeAtStart-r.freeAtEnd), toldMiB(r.residue[alpha].process), toldMiB(r.residue[beta].process), mib(r.residue[alpha].residue), mib(r.residue[beta].residue))
	}
	if worst := r.mostHeld(); worst > r.options.claim {
		line("**The claim is too small**: a load took %s.", mib(worst))
	}
	line("")
}

// mostHeld is the most that a loaded server took, by the driver.
func (r *report) mostHeld() gpu.Bytes {
	worst := max(r.first.drop, r.first.held.process)
	for _, s := range r.swaps {
		worst = max(worst, s.drop, s.held.process)
	}
	return worst
}

func median(swaps []swap, of func(swap) gpu.Bytes) string {
	var sizes []gpu.Bytes
	for _, s := range swaps {
		if size := of(s); size >= 0 {
			sizes = append(sizes, size)
		}
	}
	if len(sizes) == 0 {
		return "not told"
	}
	slices.Sort(sizes)
	return fmt.Sprint(sizes[len(sizes)/2].MiB())
}

// quantile of sorted times.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[int(q*float64(len(sorted)-1)+0.5)]
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f", float64(d.Microseconds())/1000) }
func us(d time.Duration) string { return fmt.Sprintf("%.1f", float64(d.Nanoseconds())/1000) }
func mib(size gpu.Bytes) string { return fmt.Sprintf("%d MiB", size.MiB()) }
func cell(text string) string   { return strings.NewReplacer("|", "/", "\n", " ").Replace(text) }
func orUnknown(s string) string {
	if s == "" {
		return "not known"
	}
	return s
}

func toldMiB(size gpu.Bytes) string {
	if size < 0 {
		return "nothing that it tells"
	}
	return mib(size)
}
