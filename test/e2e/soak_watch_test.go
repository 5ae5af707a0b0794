package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// watch polls the live status and holds it against the invariants of the
// scheduler's property tests, until ctx ends.
func (k *soak) watch(ctx context.Context) {
	client := k.newClient()
	defer client.CloseIdleConnections()
	ticks := time.NewTicker(slowly(100 * time.Millisecond))
	defer ticks.Stop()
	var before broker.Status
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		sent := time.Now()
		now, err := k.statusBy(ctx, client)
		switch {
		case err == nil:
			k.status0.Store(&now)
			k.invariants(sent, before, now)
			before = now
			k.rec.count("looks", "at the status")
		case ctx.Err() == nil && !k.spells.between(sent, time.Now(), time.Second, spellReload, ""):
			k.rec.violation("no status: %v", err)
		}
		if n%10 == 0 {
			k.lookAtServers()
			k.lookAtModels()
		}
		if n%3 == 0 {
			k.lookAtProcesses()
		}
	}
}

func (k *soak) statusBy(ctx context.Context, client *http.Client) (st broker.Status, err error) {
	ctx, cancel := context.WithTimeout(ctx, slowly(5*time.Second))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", k.url+"/gpu/status", nil)
	if err != nil {
		return st, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return st, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 {
		return st, fmt.Errorf("status %d", resp.StatusCode)
	}
	return st, json.NewDecoder(resp.Body).Decode(&st)
}

// brief tells a status, for people.
func brief(st broker.Status) string {
	var b strings.Builder
	gibs := func(n int64) float64 { return float64(n) / float64(gpu.GiB) }
	for _, g := range st.GPUs {
		fmt.Fprintf(&b, "            GPU: total %.2f, free %.2f, booked %.2f, outsiders %.2f, lock %q, %s, degraded %q; %d wait, %d run\n", gibs(g.Total), gibs(g.Free),
			gibs(g.Booked), gibs(g.Outsiders), g.Lock, g.Health, st.Degraded, st.Scheduler.QueueDepth, st.Scheduler.InFlight)
	}
	for _, name := range soakServers {
		c, ok := st.Consumers[name]
		if !ok {
			continue
		}
		for _, s := range c.Slots {
			fmt.Fprintf(&b, "            %-7s %-8s gate %s, booked %.2f, seen %.2f, residue %.2f, claim %.2f, active %d (held %d), waiting %d, %s %s, why: %s %s %s\n", name, s.State, s.Gate,
				gibs(s.Booking), gibs(s.Seen), gibs(s.Residue), gibs(s.Claim), c.Active, s.Held, c.Waiting, c.Health, c.Reason, s.Why, s.CoolsUntil, s.Model)
		}
		if p := c.Process; p != nil {
			fmt.Fprintf(&b, "            %-7s running %t, PID %d at %s, %d starts, last exit %q\n", name, p.Running, p.PID, p.Address, p.Starts, p.LastExit)
		}
	}
	return b.String()
}

// lately tells what the broker decided last, for people.
func (k *soak) lately() string {
	const most, tail = 15, 64 << 10
	f, err := os.Open(filepath.Join(k.dir, "caddy.log"))
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > tail {
		_, err = f.Seek(-tail, io.SeekEnd)
		if err != nil {
			return err.Error()
		}
	}
	text, err := io.ReadAll(f)
	if err != nil {
		return err.Error()
	}
	var out []string
	for line := range strings.Lines(string(text)) {
		var d struct {
			TS                                 float64
			Logger, Msg, Consumer, For, Reason string
		}
		if json.Unmarshal([]byte(line), &d) == nil && d.Logger == "gpu_broker" && d.Msg != "refuse" {
			out = append(out, fmt.Sprintf("            %7.3fs %s %s %s: %s\n", d.TS-float64(k.rec.began.UnixNano())/1e9, d.Msg, d.Consumer, d.For, d.Reason))
		}
	}
	return strings.Join(out[max(0, len(out)-most):], "")
}

func (k *soak) invariants(sent time.Time, before, now broker.Status) {
	bad := func(format string, args ...any) {
		k.rec.breach("status: "+format, fmt.Sprintf("status: %s; going on: %s\n%s", fmt.Sprintf(format, args...), k.spells.around(sent, time.Now()), brief(now)+k.lately()))
	}
	k.deepest(now.Scheduler.QueueDepth)
	waiting, active := 0, 0
	for name, c := range now.Consumers {
		if c.Shares != "" { // all that is told of it is told of the other
			continue
		}
		waiting, active = waiting+c.Waiting, active+c.Active
		k.asConfigured(sent, name, c, bad)
		k.keptByPin(name, before, now, bad)
	}
	k.queue(now, bad)
	if waiting != now.Scheduler.QueueDepth || len(now.Queue) != min(100, waiting) {
		bad("queue_depth is %d, %d wait, %d are listed", now.Scheduler.QueueDepth, waiting, len(now.Queue))
	}
	if active != now.Scheduler.InFlight {
		bad("in_flight is %d, %d are active", now.Scheduler.InFlight, active)
	}
	for _, g := range now.GPUs {
		k.card(sent, now, g, bad)
	}
	for what, pair := range map[string][2]uint64{
		"total_jobs": {before.Scheduler.TotalJobs, now.Scheduler.TotalJobs}, "loads": {before.Scheduler.Loads, now.Scheduler.Loads},
		"evictions": {before.Scheduler.Evictions, now.Scheduler.Evictions}, "refused": {before.Scheduler.Refused, now.Scheduler.Refused},
		"cancelled": {before.Scheduler.Cancelled, now.Scheduler.Cancelled}, "unload_failures": {before.Scheduler.UnloadFailures, now.Scheduler.UnloadFailures},
	} {
		if pair[1] < pair[0] {
			bad("%s went back from %d to %d", what, pair[0], pair[1])
		}
	}
}

// queue checks who waits: not more than may, in their order, and each with its own priority.
func (k *soak) queue(now broker.Status, bad func(string, ...any)) {
	bulk := 0
	for i, w := range now.Queue {
		if w.Position != i+1 {
			bad("the waiter in place %d has position %d", i+1, w.Position)
		}
		if w.Priority >= soakBulk {
			bulk++
		}
		if _, want, ok := strings.Cut(w.Client, urgentSign); ok && want != strconv.Itoa(w.Priority) {
			bad("%s waits with priority %d", w.Client, w.Priority)
		}
	}
	if len(now.Queue) > soakQueue || bulk > soakQueue-soakKept {
		bad("%d wait, %d of no urgency", len(now.Queue), bulk)
	}
	for _, c := range now.Clients {
		if strings.HasPrefix(c.Client, overruled) {
			bad("a client is called %s", c.Client)
		}
	}
	if len(now.Clients) > 256 {
		bad("%d clients are remembered", len(now.Clients))
	}
	if a, b := now.Consumers["guest"], now.Consumers["lazy"]; a.Loaded && b.Loaded {
		at := time.Now()
		if !k.disturbed("guest", at.Add(-5*time.Second), at) && !k.disturbed("lazy", at.Add(-5*time.Second), at) {
			bad("guest and lazy are loaded together")
		}
	}
}

// keptByPin checks that what was pinned by hand in time is not unloaded.
func (k *soak) keptByPin(name string, before, now broker.Status, bad func(string, ...any)) {
	was, ok := before.Consumers[name]
	if !ok || len(was.Slots)*len(now.Consumers[name].Slots) == 0 || was.Slots[0].State != "READY" || was.Slots[0].Gate != "open" || now.Consumers[name].Slots[0].State != "STOPPING" {
		return
	}
	if at := time.Now(); k.spells.covers(at.Add(-slowly(500*time.Millisecond)), at, spellPinned, name) && !k.disturbed(name, at.Add(-2*time.Second), at) {
		bad("%s is unloaded though it is pinned", name)
	}
}

// card checks one GPU: bookings, lock, transitions.
func (k *soak) card(sent time.Time, now broker.Status, g broker.GPU, bad func(string, ...any)) {
	var moving, computing []string
	var booked, guessed int64
	for name, c := range now.Consumers {
		if c.Shares != "" {
			continue
		}
		for _, s := range c.Slots {
			booked += s.Booking
			if s.Adopted && s.State == "UNKNOWN" { // it was asked for just now; the next probe tells whether it is there
				guessed += s.Booking
			}
			if s.State == "LOADING" || s.State == "STOPPING" {
				moving = append(moving, name)
			}
		}
		if c.Active > 0 && name != "embed" && name != "sky" { // it has lock none, the other is elsewhere
			computing = append(computing, name)
		}
	}
	if len(moving) > 1 {
		bad("%s load or unload at once", moving)
	}
	if len(computing) > 1 || len(computing) == 1 && broker.ConsumerOf(g.Lock) != computing[0] || len(computing) == 0 && g.Lock != "" {
		bad("%s compute, the lock is %q's", computing, g.Lock)
	}
	if booked != g.Booked {
		bad("%d is booked, the slots have %d", g.Booked, booked)
	}
	if g.Booked > g.Total && !g.Overcommitted {
		bad("%d is booked of %d, and nobody says so", g.Booked, g.Total)
	}
	from := sent.Add(-5 * time.Second)
	if g.Overcommitted && g.Booked-guessed > g.Total && !k.spells.between(from, sent, consequences, spellServer, "") && !k.scarce(from, sent) {
		bad("%s booked of %s", gpu.Bytes(g.Booked), gpu.Bytes(g.Total))
	}
}

// asConfigured checks what the status says of a consumer against the
// configurations that ruled meanwhile: one that Caddy refused must never show.
func (k *soak) asConfigured(sent time.Time, name string, c broker.Consumer, bad func(string, ...any)) {
	ruled := k.ruled(sent)
	limit := map[string]int{"text": 0, "lazy": 2, "embed": 4, "pinned": 2, "guest": 2, "llm": 4, "voice": 1, "library": 2, "child": 2, "fork": 2}
	for _, conf := range k.ruled(sent.Add(-answerWithin)) { // what was let in stays in
		limit["text"] = max(limit["text"], conf.concurrency)
	}
	if name != "image" && name != "sky" && c.Active > limit[name] { // image is async, sky elsewhere
		bad("%s has %d active, its concurrency is %d", name, c.Active, limit[name])
	}
	ruling := func(match func(settings) bool) bool { return slices.ContainsFunc(ruled, match) }
	switch {
	case name == "voice" && !ruling(func(s settings) bool { return int64(gib(s.vram)) == c.Slots[0].Claim }) && !k.sawVoiceTake(sent, c.Slots[0]):
		bad("the claim of voice is %s", gpu.Bytes(c.Slots[0].Claim))
	case name == "pinned" && !ruling(func(s settings) bool { return s.pin == c.Pinned }):
		bad("pinned: %t", c.Pinned)
	case name != "pinned" && c.Pinned && !k.spells.between(sent, time.Now(), 0, spellPin, name):
		bad("%s is pinned", name)
	case name == "guest" && !c.Removed && !ruling(func(s settings) bool { return s.guest }):
		bad("guest is there, and it was taken away")
	}
}

// sawVoiceTake reports whether the broker may have seen voice take what it claims: as much as it was once booked
// with, as far as free memory tells, or more where it or a program of another took more.
func (k *soak) sawVoiceTake(sent time.Time, s broker.Slot) bool {
	if s.ClaimSource != "measured" {
		return false
	}
	booked := slices.ContainsFunc(k.ruled(time.Time{}), func(conf settings) bool { return int64(gib(conf.vram)) >= s.Claim })
	return booked || k.spells.between(time.Time{}, sent, 0, spellServer, "voice") || k.spells.between(time.Time{}, sent, 0, spellMemory, "")
}

// sample is what the Caddy process has of what can leak.
type sample struct {
	goroutines, files int
	rss, heap         gpu.Bytes
	stacks            string
}

func (s sample) String() string {
	return fmt.Sprintf("%d goroutines, %d files, RSS %.0f MiB, heap %.1f MiB", s.goroutines, s.files, float64(s.rss)/float64(gpu.MiB), float64(s.heap)/float64(gpu.MiB))
}

var (
	goroutineTotal = regexp.MustCompile(`^goroutine profile: total (\d+)`)
	heapInUse      = regexp.MustCompile(`(?m)^# HeapAlloc = (\d+)$`)
	residentSet    = regexp.MustCompile(`(?m)^VmRSS:\s+(\d+) kB$`)
)

// sampleProcess looks at the Caddy process, after a collection of its garbage.
func (k *soak) sampleProcess() (s sample, err error) {
	number := func(text string, re *regexp.Regexp) int {
		m := re.FindStringSubmatch(text)
		if m == nil {
			err = fmt.Errorf("%s not found in %.100q", re, text)
			return 0
		}
		n, _ := strconv.Atoi(m[1])
		return n
	}
	heap := k.adminGet("/debug/pprof/heap?debug=1&gc=1")
	s.heap = gpu.Bytes(number(heap, heapInUse))
	s.stacks = k.adminGet("/debug/pprof/goroutine?debug=1")
	s.goroutines = number(s.stacks, goroutineTotal)
	proc := filepath.Join("/proc", strconv.Itoa(k.cmd.Process.Pid))
	files, e := os.ReadDir(filepath.Join(proc, "fd"))
	if e != nil {
		return s, e
	}
	s.files = len(files)
	status, e := os.ReadFile(filepath.Join(proc, "status"))
	if e != nil {
		return s, e
	}
	s.rss = gpu.Bytes(number(string(status), residentSet)) * gpu.KiB
	return s, err
}

// grown tells which stacks are more now.
func grown(before, now string) string {
	count := func(text string) map[string]int {
		out := map[string]int{}
		for _, block := range strings.Split(text, "\n\n") {
			head, stack, _ := strings.Cut(block, "\n")
			var frames []string
			for line := range strings.Lines(stack) {
				if f := strings.Fields(line); len(f) > 2 {
					frames = append(frames, f[2])
				}
			}
			n, _, _ := strings.Cut(head, " @")
			c, _ := strconv.Atoi(n)
			out[strings.Join(frames, " < ")] += c
		}
		return out
	}
	was := count(before)
	var out []string
	for stack, n := range count(now) {
		if n > was[stack] {
			out = append(out, fmt.Sprintf("%+d  %.600s", n-was[stack], stack))
		}
	}
	return strings.Join(out, "\n")
}

// adminGet asks Caddy's admin endpoint; it is read only.
func (k *soak) adminGet(path string) string {
	status, body := k.admin0("GET", path, "", nil)
	if status != 200 {
		return fmt.Sprintf("status %d: %s", status, body)
	}
	return body
}

// admin0 sends a request to the admin endpoint, which each reload starts anew.
func (k *soak) admin0(method, path, contentType string, body io.Reader) (status int, text string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+k.site.admin+path, body)
	if err != nil {
		return 0, err.Error()
	}
	req.Close = true
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(data)
}
