package scheduler

import (
	"container/heap"
	"math/rand/v2"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// A world is everything around the scheduler, simulated: GPUs with true
// memory, servers that hold it, clients, outsiders, telemetry. It answers the
// scheduler's effects with later events. rapid draws its shape, its hazards
// and the length of the history, and shrinks them; the seed gives the rest.
type world struct {
	t    *rapid.T
	rand *rand.Rand
	now  time.Time

	agenda agenda
	seq    int

	s, twin *State // the twin lives through the same history: Step is deterministic
	check   checker
	steps   int

	shape   shape
	cfg     Config
	mode    Mode
	gpus    []*simGPU
	servers []*simServer
	jobs    map[JobID]*simJob
	order   []JobID // of jobs, as they came

	blind    bool // telemetry is lost
	calm     bool // the world stands still: nothing fails, nobody comes
	fast     bool // a fast sample is on its way
	wakeSeq  int
	lastLoad []Event // old answers, to be said once more
	probes   []Probed
	ended    []JobID
}

// shape is what rapid draws of a world.
type shape struct {
	gpus, servers int
	length        int // steps before the world calms down
	seed          uint64

	measured, unified, locked, global, cushionless     bool
	crashes, failures, lies, late, leaks               bool
	outsiders, telemetry, gpuLoss                      bool
	cancels, deadlines, manual, reload, stale, strange bool
	smallQueue, priorities, eager                      bool
	idle, observe, drains, modes, reshape, recall      bool
	clients, reserved, conflicts, lends, pins, keeps   bool
	restores, credit, lower, clouds                    bool
	starts, replaced                                   bool
	honest                                             bool // running out of memory is a fault
}

func drawShape(t *rapid.T) shape {
	flag := func(name string) bool { return rapid.Bool().Draw(t, name) }
	return shape{
		gpus:    rapid.SampledFrom([]int{1, 1, 1, 2}).Draw(t, "gpus"),
		servers: rapid.IntRange(2, 5).Draw(t, "servers"),
		length:  rapid.IntRange(50, 450).Draw(t, "length"),
		seed:    rapid.Uint64().Draw(t, "seed"),

		measured: flag("measured"), unified: flag("unified") && flag("really unified"), locked: flag("locked") && flag("only locked") && flag("really locked"),
		global: flag("lock global") && flag("really global"), cushionless: flag("cushionless"),
		crashes: flag("crashes"), failures: flag("failures"), lies: flag("lies"), late: flag("late"), leaks: flag("leaks"),
		outsiders: flag("outsiders"), telemetry: flag("telemetry lost"), gpuLoss: flag("gpu lost"),
		cancels: flag("cancels"), deadlines: flag("deadlines"), manual: flag("manual unloads"), reload: flag("reloads"), stale: flag("stale answers"), strange: flag("strange events"),
		smallQueue: flag("small queue") && flag("really small queue"), priorities: flag("priorities"), eager: flag("eager clients"),
		idle: flag("idle timeouts"), observe: flag("observe") && flag("really observe"), drains: flag("drains") && flag("really drains"),
		modes: flag("modes") && flag("really modes"), reshape: flag("reshaped slots"), recall: flag("recall"),
		clients: flag("clients"), reserved: flag("reserved places"), conflicts: flag("conflicts"), lends: flag("lent GPUs"), pins: flag("pins by hand"), keeps: flag("keep-alive of jobs"),
		restores: flag("restores"), credit: flag("credit"), lower: flag("victim_priority") && flag("really victim_priority"), clouds: flag("clouds") && flag("really clouds"),
		starts: flag("started servers"), replaced: flag("replaced drivers"),
	}
}

type simGPU struct {
	index     int
	total     gpu.Bytes
	driver    gpu.Bytes
	outsiders gpu.Bytes
	lost      bool
}

type simServer struct {
	cfg     SlotConfig
	takes   gpu.Bytes // of each GPU while loaded; its claim or less, but for strange ones
	context gpu.Bytes // what its process keeps once it was loaded

	alive   bool
	hung    bool // answers no probe
	loaded  bool
	life    int // counts crashes and unloads: what was under way then is void
	mem     map[int]gpu.Bytes
	late    map[int][]*gpu.Bytes // unloaded, but not given back yet; the server's next load uses it again
	working int                  // jobs and async work in its hands
	removed bool                 // not in the config just now
}

type simJob struct {
	id     JobID
	server *simServer
	state  simJobState
	lasts  time.Duration
	left   bool // its client left in the middle of it
	works  bool // its server works on it, whatever became of its client
	asked  Submit
	bulk   bool // reserved places were not for it when it came
}

type simJobState uint8

const (
	simWaiting simJobState = iota
	simRunning
	simHeld
	simEnded
)

type happening struct {
	at  time.Time
	seq int
	do  func()
}

type agenda []happening

func (a agenda) Len() int { return len(a) }
func (a agenda) Less(i, k int) bool {
	if a[i].at.Equal(a[k].at) {
		return a[i].seq < a[k].seq
	}
	return a[i].at.Before(a[k].at)
}
func (a agenda) Swap(i, k int) { a[i], a[k] = a[k], a[i] }
func (a *agenda) Push(x any)   { *a = append(*a, x.(happening)) }
func (a *agenda) Pop() any {
	old := *a
	h := old[len(old)-1]
	*a = old[:len(old)-1]
	return h
}

func (w *world) in(d time.Duration, do func()) {
	w.seq++
	heap.Push(&w.agenda, happening{at: w.now.Add(d), seq: w.seq, do: do})
}

// advance lets happen what is due until then.
func (w *world) advance(until time.Time) {
	for len(w.agenda) > 0 && !w.agenda[0].at.After(until) {
		h := heap.Pop(&w.agenda).(happening)
		w.now = h.at
		h.do()
	}
	w.now = until
}

func (w *world) chance(percent int) bool { return w.rand.IntN(100) < percent }

// hazard is a chance that is there only while a hazard is switched on and the world is not calm.
func (w *world) hazard(on bool, percent int) bool { return w.chance(percent) && on && !w.calm }

func (w *world) between(low, high time.Duration) time.Duration {
	return low + time.Duration(w.rand.Int64N(int64(high-low)+1))
}

const mib = gpu.MiB

func newWorld(t *rapid.T, sh shape) *world {
	w := &world{t: t, rand: rand.New(rand.NewPCG(sh.seed, 1)), now: time.Unix(1_000_000, 0), shape: sh, s: New(), twin: New(), jobs: map[JobID]*simJob{}}
	w.check.w = w
	if sh.locked {
		w.mode = Locked
	}
	for i := range sh.gpus {
		w.gpus = append(w.gpus, &simGPU{index: i, total: 16384 * mib, driver: gpu.Bytes(w.rand.IntN(600)) * mib})
	}
	for i := range sh.servers {
		w.servers = append(w.servers, w.newServer(string(rune('a'+i))))
	}
	for i, sv := range w.servers {
		for k, o := range w.servers {
			if i != k && w.chance(10) {
				sv.cfg.Coexist = append(sv.cfg.Coexist, o.cfg.Name)
			}
			if sh.conflicts && i != k && w.chance(12) {
				sv.cfg.Conflicts = append(sv.cfg.Conflicts, o.cfg.Name)
			}
		}
	}
	w.cfg = w.newConfig()
	return w
}

func (w *world) newConfig() Config {
	sh := w.shape
	cfg := Config{
		LockGlobal: sh.global, MaxQueue: 512, MaxEvictions: w.rand.IntN(6),
		EvictWait: 10 * time.Second, DrainTimeout: w.between(20*time.Second, time.Minute), AbandonAfter: w.between(time.Second, 10*time.Second), OutsiderWait: 10 * time.Second,
		Overtake: float64(w.rand.IntN(16)), Hold: 0.25,
		OvertakeMin: w.between(0, 5*time.Second), OvertakeMax: w.between(5*time.Second, 30*time.Second), LockOvertake: w.between(0, 10*time.Second),
	}
	if sh.smallQueue {
		cfg.MaxQueue = 1 + w.rand.IntN(6)
	}
	cfg.Mode = w.mode
	if sh.idle && w.chance(30) {
		cfg.IdleUnload = []IdleUnload{IdleOff, IdleObserve}[w.rand.IntN(2)]
	}
	cfg.ObserveEvictions = sh.observe && w.chance(40)
	if sh.cushionless {
		none := gpu.Bytes(0)
		cfg.Cushion = &none
	}
	if w.chance(20) {
		cfg.Reserve = 1024 * mib
	}
	w.queueRules(&cfg)
	for _, sv := range w.servers {
		if !sv.removed {
			cfg.Slots = append(cfg.Slots, sv.cfg)
		}
	}
	return cfg
}

func (w *world) newServer(name string) *simServer {
	sv := &simServer{alive: true, mem: map[int]gpu.Bytes{}, late: map[int][]*gpu.Bytes{}}
	c := SlotConfig{
		Name: name, Claim: gpu.Bytes(1000+w.rand.IntN(13)*1100) * mib, Concurrency: 1 + w.rand.IntN(3),
		KeepAlive: w.between(0, 4*time.Second) * time.Duration(w.rand.IntN(2)), SwitchCost: w.between(time.Second, 6*time.Second),
		CanUnload: !w.chance(8), CanLoad: w.chance(65), CanProbe: w.chance(85), CanBusy: w.chance(35),
		LockNone: w.chance(12), Pin: w.chance(6), NoEvict: w.chance(6), VRAMManaged: w.chance(6),
	}
	if w.shape.idle && w.chance(70) {
		c.IdleTimeout, c.OwnIdle = w.between(500*time.Millisecond, 20*time.Second), w.chance(30)
	}
	if w.chance(15) {
		c.MaxRun = w.between(time.Second, 2*time.Minute)
	}
	c.CanTell = c.CanProbe && w.chance(65)
	starts := w.shape.starts && w.chance(50)
	if starts { // by its driver, which can do it all
		c.Starts, c.CanLoad, c.CanUnload, c.CanProbe, c.CanTell = true, true, true, true, true
		c.Restart, c.MaxRestarts = w.chance(40), w.rand.IntN(3)
	}
	if w.shape.starts && w.chance(50) {
		c.Consumer = "m"
	}
	c.Async, c.WorksOn = c.CanBusy && w.chance(60), w.chance(10)
	c.GPUs = w.somewhere()
	if w.chance(40) {
		c.Residual = gpu.Bytes(w.rand.IntN(600)) * mib
	}
	if w.shape.honest { // foreign memory may be taken for a residue: that is what the cushion is for
		c.Residual = min(c.Residual, 200*mib)
	}
	if w.chance(30) {
		c.Budget = w.between(5*time.Second, time.Minute)
	}
	if w.shape.reserved && w.chance(40) {
		c.Reserved = w.rand.IntN(c.Concurrency)
	}
	if w.shape.clouds && w.chance(20) {
		c = SlotConfig{Name: name, Cloud: true, Concurrency: 1}
	}
	sv.cfg = c
	sv.takes = c.Claim
	if n := gpu.Bytes(len(c.GPUs)); n > 1 {
		sv.takes = c.Claim / n
	}
	if w.chance(50) {
		sv.takes = sv.takes * gpu.Bytes(50+w.rand.IntN(51)) / 100
	}
	if w.hazard(w.shape.lies, 15) {
		sv.takes = sv.takes * 120 / 100 // a claim that is too low
	}
	sv.context = min(gpu.Bytes(w.rand.IntN(600))*mib, c.Residual)
	if w.hazard(w.shape.leaks, 30) {
		sv.context = gpu.Bytes(w.rand.IntN(900)) * mib
	}
	sv.context = min(sv.context, sv.takes/2)
	if !w.shape.locked && w.chance(25) && w.roomFor(sv) { // loaded before we came
		w.hold(sv)
	}
	return sv
}

// somewhere is the GPUs of a server.
func (w *world) somewhere() []int {
	if w.hazard(w.shape.strange, 3) {
		return []int{7} // there is none
	}
	switch at := w.rand.IntN(4); {
	case w.shape.gpus == 1 || at < 2:
		return []int{0}
	case at == 2:
		return []int{1}
	default:
		return []int{0, 1}
	}
}

// ---- what the scheduler asks for ----

func (w *world) step(e Event) []Effect {
	w.check.before(e)
	effects, wake := w.s.Step(w.now, e)
	w.steps++
	w.check.after(e, effects, wake)
	effects = slices.Clone(effects)
	for _, f := range effects {
		w.answer(f)
	}
	w.wakeSeq++
	if seq := w.wakeSeq; !wake.IsZero() {
		w.in(max(0, wake.Sub(w.now)), func() {
			if seq == w.wakeSeq {
				w.step(Wake{})
			}
		})
	}
	if w.s.FastSampling() && !w.fast {
		w.fast = true
		w.in(50*time.Millisecond, func() { w.fast = false; w.sample() })
	}
	return effects
}

func (w *world) server(name string) *simServer {
	for _, sv := range w.servers {
		if sv.cfg.Name == name {
			return sv
		}
	}
	return nil
}

func (w *world) answer(f Effect) {
	sv := w.server(f.Slot)
	switch f.Kind {
	case Admit:
		w.serve(w.jobs[f.Job])
	case Load:
		w.loadServer(sv, f.Epoch)
	case StartUnload:
		w.unloadServer(sv, f.Epoch)
	case CheckBusy:
		w.in(f.After+w.between(0, 20*time.Millisecond), func() {
			a := BusyAnswer{Slot: f.Slot, Sent: w.now, Busy: sv.working > 0}
			w.in(w.between(0, 50*time.Millisecond), func() { w.step(a) })
		})
	case ProbeNow:
		w.in(0, func() { w.probe(sv) })
	case Renew:
		w.in(w.between(0, 2*time.Second), func() { w.renew(sv) })
	case Queued, Refuse, Dropped, Decided:
	}
}

func (w *world) loadServer(sv *simServer, epoch uint64) {
	sv.alive = sv.alive || sv.cfg.Starts
	life := sv.life
	done := func(e LoadDone) {
		e.Slot, e.Epoch = sv.cfg.Name, epoch
		w.lastLoad = append(w.lastLoad, e)
		w.step(e)
	}
	takes := w.between(0, 5*time.Second)
	w.in(takes/2, func() {
		if sv.alive && sv.life == life && w.roomFor(sv) {
			for _, i := range sv.cfg.GPUs {
				sv.mem[i] = max(sv.mem[i], sv.takes/2)
			}
			sv.reuse()
		}
	})
	w.in(takes, func() {
		switch {
		case sv.life != life: // stopped or crashed meanwhile; its answer may come all the same
			done(LoadDone{Err: "it was stopped"})
		case !sv.alive:
			done(LoadDone{Err: "its server is gone"})
		case w.hazard(w.shape.failures, 15):
			w.letGo(sv, 0)
			done(LoadDone{Err: "a bad day", Partly: w.chance(30)})
		case !w.roomFor(sv):
			w.check.outOfMemory(sv)
			w.letGo(sv, 0)
			done(LoadDone{Err: "out of memory", OutOfMemory: true})
		default:
			w.hold(sv)
			done(LoadDone{})
		}
	})
}

func (w *world) unloadServer(sv *simServer, epoch uint64) {
	const nobody = "nobody listens"
	done := func(err string, confirmed bool) {
		e := UnloadDone{Slot: sv.cfg.Name, Epoch: epoch, Err: err, Refused: err == nobody, Confirmed: confirmed}
		w.lastLoad = append(w.lastLoad, e)
		w.step(e)
	}
	if w.hazard(w.shape.failures, 20) {
		w.in(w.between(0, 3*time.Second), func() { done("it would not", false) })
		return
	}
	if w.hazard(w.shape.lies, 10) {
		w.in(w.between(0, 3*time.Second), func() { done("", w.chance(30)) })
		return
	}
	w.in(w.between(0, 2*time.Second), func() {
		if !sv.alive && w.chance(50) {
			done(nobody, false)
			return
		}
		keep := sv.context
		if w.hazard(w.shape.leaks, 20) {
			keep += sv.takes / 4
		}
		w.letGo(sv, keep)
		done("", sv.cfg.CanTell)
	})
}

// serve runs an admitted job at its server.
func (w *world) serve(j *simJob) {
	sv := j.server
	j.state = simRunning
	if !sv.alive {
		w.in(time.Millisecond, func() { w.release(j, DialRefused) })
		return
	}
	sv.working++
	j.works = true
	life := sv.life
	if !sv.loaded { // the server loads inside its first request
		takes := min(w.between(0, time.Second), j.lasts/2)
		if w.shape.honest {
			takes = 0 // else one that goes on loading for a client that left could do so at any later time
		}
		w.in(takes, func() {
			switch {
			case sv.loaded || sv.life != life:
			case w.roomFor(sv):
				w.hold(sv)
			case sv.cfg.CanLoad && !sv.cfg.CanTell: // it has died and come back, and nothing could tell that it has to load anew
			default:
				w.check.outOfMemory(sv)
			}
		})
	}
	if sv.cfg.Async && w.chance(85) {
		w.in(w.between(0, 100*time.Millisecond), func() {
			w.in(j.lasts, func() { j.over() })
			w.release(j, Accepted)
		})
		return
	}
	if w.shape.cancels && w.chance(10) { // its client leaves, and the server works on
		w.in(time.Duration(w.rand.Int64N(int64(j.lasts)+1)), func() {
			w.in(j.lasts, func() { j.over() })
			j.left = true
			w.release(j, []Outcome{NoAnswer, Served}[w.rand.IntN(2)])
		})
		return
	}
	w.in(j.lasts, func() {
		j.over()
		switch {
		case w.chance(10):
			w.release(j, NoAnswer)
		case w.hazard(w.shape.crashes, 3):
			w.release(j, ServerDied)
		default:
			w.release(j, Served)
		}
	})
}

// over is the end of a job's work at its server.
func (j *simJob) over() {
	if j.works {
		j.works = false
		j.server.working--
	}
}

func (w *world) release(j *simJob, outcome Outcome) {
	if j.state != simRunning {
		return
	}
	j.state = simEnded
	sl := w.s.named[j.server.cfg.Name]
	if outcome == Accepted && sl.cfg.CanBusy || j.left && (sl.cfg.CanBusy || sl.cfg.WorksOn) && (outcome == NoAnswer || outcome == Served) && sl.dead == "" && !sl.cfg.Cloud && w.s.cfg.Mode != Passthrough {
		j.state = simHeld
	}
	w.ended = append(w.ended, j.id)
	w.check.leaving = j.id
	w.step(Release{Job: j.id, Outcome: outcome, Left: j.left})
	w.check.leaving = 0
}
