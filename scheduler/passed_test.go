package scheduler

import (
	"container/heap"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// How far can an older job be passed? Slots share a GPU of which each needs more
// than half, all is of one priority, and the servers are honest. Let T be the cold target
// that has waited longest, since τ, and the oldest since o; v the slot that is loaded, READY
// since r; D the longest job, U and L the longest unload and load, S and B as in the policy. Then
//
//  1. a job of v starts before T only if it was submitted at or before max(τ + B(T), r), or
//     if r + S(v) is not over, the minimum residency;
//  2. so it was submitted at or before max(τ + B(T), o) + D + U + L, and S(v) more at most for the
//     minimum residency: what is loaded before T was to make way before T was overdue;
//  3. T starts at the latest D + U + L after the latest of the last start of such a job,
//     τ + B(T), r + S(v) and o: one drain, one unload, one load.
//
// Where the clients of v take turns, 1 and 2 are true of the oldest that waits for v, and younger
// ones start before it when it is their client's turn.
func TestAnOlderJobIsPassedByNoneThatCameLaterThanTheBoundAndOneDrainOneLoadAndTheMinimumResidency(t *testing.T) {
	starts, served := 0, 0
	for starts < passedStarts && !t.Failed() {
		rapid.Check(t, func(t *rapid.T) {
			r := newRace(t)
			r.run()
			starts += r.starts
			served += r.served
		})
	}
	t.Logf("%d jobs started, %d times the oldest cold target was served", starts, served)
	if served < starts/20 {
		t.Errorf("cold targets were served %d times", served)
	}
}

// passedStarts is how many jobs start in all.
const passedStarts = 25_000

// race is that world: its own clock, agenda and books.
type race struct {
	t      *rapid.T
	s      *State
	cfg    Config
	now    time.Time
	agenda agenda
	seq    int
	wake   time.Time
	lanes  []*lane
	loaded *lane
	jobs   map[JobID]*racer
	turns  bool // clients take turns

	longest   time.Duration // job
	change    time.Duration // the longest unload and the longest load
	last      *lane         // the slot that was loaded last
	lastStart time.Time     // of a job there
	oldest    *lane
	since     time.Time // since when it is
	starts    int
	served    int
	story     []string
}

// lane is a slot and its server.
type lane struct {
	name         string
	load, unload time.Duration
	loads        int
	unloads      int
	ready        time.Time
	waiting      []*racer // in the order of their submission
}

type racer struct {
	id        JobID
	lane      *lane
	submitted time.Time
	lasts     time.Duration
}

func newRace(t *rapid.T) *race {
	r := &race{t: t, s: New(), now: time.Unix(1_000_000, 0), jobs: map[JobID]*racer{}, turns: rapid.Bool().Draw(t, "turns")}
	ms := func(name string, low, high int) time.Duration {
		return time.Duration(rapid.IntRange(low, high).Draw(t, name)) * time.Millisecond
	}
	cfg := defaults()
	cfg.MaxQueue = 10_000
	cfg.Overtake = float64(rapid.IntRange(1, 15).Draw(t, "overtake"))
	cfg.OvertakeMin, cfg.OvertakeMax = ms("overtake_min", 0, 10_000), ms("overtake_max", 10_000, 100_000)
	var unload, load time.Duration
	for i := range rapid.IntRange(2, 4).Draw(t, "slots") {
		l := &lane{name: string(rune('a' + i)), load: ms("load", 500, 8000), unload: ms("unload", 100, 2000)}
		r.lanes = append(r.lanes, l)
		unload, load = max(unload, l.unload), max(load, l.load)
		cfg.Slots = append(cfg.Slots, server(l.name, 10_000, wide(rapid.IntRange(1, 3).Draw(t, "concurrency")), costs(ms("switch cost", 500, 8000))))
	}
	r.cfg, r.change = cfg, unload+load
	r.step(Configure{cfg})
	r.look()
	for _, l := range r.lanes {
		r.step(Probed{Slot: l.name, Sent: r.now, Outcome: ProbeAnswered, Loaded: No, Resident: -1})
	}
	// One slot is hot, and has work all the time; the others are asked for now and then.
	at := time.Duration(0)
	r.longest = 100 * time.Millisecond
	for range rapid.IntRange(20, 150).Draw(t, "jobs") {
		at += ms("gap", 0, 4000)
		l := r.lanes[0]
		if rapid.IntRange(0, 3).Draw(t, "hot") == 0 {
			l = r.lanes[rapid.IntRange(1, len(r.lanes)-1).Draw(t, "slot")]
		}
		lasts := ms("lasts", 100, 6000)
		r.longest = max(r.longest, lasts)
		client := ""
		if r.turns {
			client = rapid.SampledFrom([]string{"x", "y", "z"}).Draw(t, "client")
		}
		r.in(at, func() { r.submit(l, lasts, client) })
	}
	return r
}

func (r *race) in(d time.Duration, do func()) {
	r.seq++
	heap.Push(&r.agenda, happening{at: r.now.Add(d), seq: r.seq, do: do})
}

// run lets everything happen, in its order, until all have been served.
func (r *race) run() {
	for end := r.now.Add(24 * time.Hour); len(r.agenda) > 0 || r.s.waiting+r.s.running > 0; {
		switch {
		case !r.wake.IsZero() && (len(r.agenda) == 0 || !r.agenda[0].at.Before(r.wake)):
			r.now = later(r.now, r.wake)
			r.step(Wake{})
		case len(r.agenda) > 0:
			h := heap.Pop(&r.agenda).(happening)
			r.now = h.at
			h.do()
		default:
			r.fail("%d wait, and nothing is to happen any more", r.s.waiting)
		}
		if r.now.After(end) {
			r.fail("somebody waits for ever")
		}
	}
}

func (r *race) submit(l *lane, lasts time.Duration, client string) {
	j := &racer{lane: l, submitted: r.now, lasts: lasts}
	l.waiting = append(l.waiting, j)
	r.watch()
	r.stepFor(Submit{Slot: l.name, Priority: 100, Client: client}, j)
}

func (r *race) step(e Event) { r.stepFor(e, nil) }

func (r *race) stepFor(e Event, coming *racer) {
	effects, wake := r.s.Step(r.now, e)
	r.wake = wake
	effects = slices.Clone(effects)
	if len(effects) > 0 {
		r.story = append(r.story, fmt.Sprintf("%10.3f %T → %s", r.now.Sub(time.Unix(1_000_000, 0)).Seconds(), e, tell(effects)))
	}
	if coming != nil {
		coming.id = effects[0].Job
		r.jobs[coming.id] = coming
	}
	for _, f := range effects {
		r.answer(f)
	}
	r.watch()
}

// watch notes which cold target has waited longest.
func (r *race) watch() {
	var oldest *lane
	for _, l := range r.lanes {
		if l != r.loaded && len(l.waiting) > 0 && (oldest == nil || l.waiting[0].submitted.Before(oldest.waiting[0].submitted)) {
			oldest = l
		}
	}
	if oldest != r.oldest {
		r.oldest, r.since = oldest, r.now
	}
}

func (r *race) answer(f Effect) {
	l := r.lanes[0]
	for _, o := range r.lanes {
		if o.name == f.Slot {
			l = o
		}
	}
	switch f.Kind {
	case Admit:
		r.start(r.jobs[f.Job])
	case Load:
		r.in(l.load, func() {
			r.arrives(l)
			l.loads++
			r.loaded, r.last, l.ready = l, l, r.now
			r.watch()
			r.step(LoadDone{Slot: l.name, Epoch: f.Epoch})
			r.look()
		})
	case StartUnload:
		r.in(l.unload, func() {
			l.unloads++
			r.loaded = nil
			r.step(UnloadDone{Slot: l.name, Epoch: f.Epoch, Confirmed: true})
			r.look()
		})
	case Refuse:
		r.fail("refused: %s", f.Refusal.Message)
	case Queued, CheckBusy, ProbeNow, LookNow, Dropped, NotNow, Decided:
	}
}

func (r *race) look() {
	free := gpu.Bytes(16_384)
	if r.loaded != nil {
		free -= 10_000
	}
	r.step(Sampled{At: r.now, Devices: []Device{{UUID: "GPU-0", Total: 16_384 * gpu.MiB, Free: free * gpu.MiB, Known: true}}})
}

// switchCost is S: what was measured, which is always the same.
func (r *race) switchCost(l *lane) time.Duration {
	switch {
	case l.loads == 0:
		return r.cfg.Slots[slices.Index(r.lanes, l)].SwitchCost
	case l.unloads == 0:
		return l.load
	default:
		return l.load + l.unload
	}
}

func (r *race) bound(l *lane) time.Duration {
	return clamp(time.Duration(r.cfg.Overtake*float64(r.switchCost(l))), r.cfg.OvertakeMin, r.cfg.OvertakeMax)
}

// arrives checks the third part of the claim.
func (r *race) arrives(t *lane) {
	if r.oldest != t || r.last == nil {
		return
	}
	r.served++
	v := r.last
	from := later(t.waiting[0].submitted.Add(r.bound(t)), r.since)
	from = later(from, later(r.lastStart, v.ready.Add(v.load+v.unload)))
	if late := r.now.Sub(from.Add(r.longest + v.unload + t.load)); late > 0 {
		r.fail("%s is served %s too late", t.name, late)
	}
}

// start checks the first and the second part of the claim, and runs the job.
func (r *race) start(j *racer) {
	l := j.lane
	r.starts++
	if l != r.loaded {
		r.fail("%s is not loaded, and a job of it starts", l.name)
	}
	if t := r.oldest; t != nil {
		overdue := t.waiting[0].submitted.Add(r.bound(t))
		first := j.submitted
		if r.turns {
			first = l.waiting[0].submitted
		}
		until, limit := later(overdue, l.ready), later(overdue, r.since).Add(r.longest+r.change)
		if r.now.Before(l.ready.Add(r.switchCost(l))) {
			until, limit = r.now, limit.Add(r.switchCost(l))
		}
		if first.After(until) || first.After(limit) {
			r.fail("a job of %s starts that came %s after %s was overdue", l.name, first.Sub(overdue), t.name)
		}
	}
	l.waiting = slices.DeleteFunc(l.waiting, func(o *racer) bool { return o == j })
	r.lastStart = r.now
	r.in(j.lasts, func() { r.step(Release{Job: j.id, Outcome: Served}) })
}

func (r *race) fail(format string, args ...any) {
	r.t.Helper()
	story := ""
	for _, line := range r.story[max(0, len(r.story)-40):] {
		story += "\n" + line
	}
	r.t.Fatalf("%s%s", fmt.Sprintf(format, args...), story)
}
