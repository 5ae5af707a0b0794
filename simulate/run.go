package simulate

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// engine is what decides: scheduler.State, or something with the same face.
type engine interface {
	Step(now time.Time, e scheduler.Event) (effects []scheduler.Effect, wakeAt time.Time)
}

// origin is the beginning of every trace.
var origin = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// run is one simulation. It drives the engine as package broker does, in virtual time.
type run struct {
	w       *World
	o       Options
	engine  engine
	servers []*server
	named   map[string]int
	cards   []*card

	requests []Request // by time of arrival
	sent     int       // of them
	tasks    []task
	jobs     map[scheduler.JobID]int // the tasks that wait or run
	open     int                     // tasks that are not over
	lastAt   time.Duration           // of the last arrival

	now     time.Duration
	agenda  agenda
	wake    time.Duration     // when the engine wants to be woken; never if it doesn't
	pending []scheduler.Event // to be told to the engine at this very time

	submitting int // the task whose submission is being decided
	unloads    int // for room
	stopped    bool
}

// server pretends to be a model server.
type server struct {
	Consumer
	index   int
	loaded  bool // it holds its memory, from the beginning of a load to the end of an unload
	epoch   uint64
	loads   int
	loading *rand.Rand // draws the load times: the k-th load takes the same under every policy
	stop    *rand.Rand
}

// card is one GPU, and what it did.
type card struct {
	total, free gpu.Bytes
	running     int // jobs
	moving      int // loads and unloads
	since       time.Duration
	busy        time.Duration // time with jobs
	switching   time.Duration // time with loads or unloads
}

// task is one request, with all of its client's tries.
type task struct {
	consumer int
	client   string
	service  time.Duration
	priority int
	patience time.Duration
	then     []FollowUp
	first    time.Duration // when it was submitted first
	try      int           // from 1
	job      scheduler.JobID
	state    taskState
	wait     time.Duration // until it began
}

type taskState uint8

const (
	isAway    taskState = iota // not yet, or not now, submitted
	isWaiting                  // in the queue
	isRunning
	isServed
	isLost // its client gave up, or was refused, for the last time
)

func newRun(w *World, requests []Request, o Options) (*run, error) {
	if err := w.Check(); err != nil {
		return nil, err
	}
	if o.Speed == 0 {
		o.Speed = 1
	}
	r := &run{w: w, o: o, named: map[string]int{}, jobs: map[scheduler.JobID]int{}, wake: never}
	for i, c := range w.Consumers {
		r.named[c.Slot.Name] = i
		r.servers = append(r.servers, &server{Consumer: c, index: i,
			loading: rand.New(rand.NewPCG(o.Seed, uint64(2*i+1))), stop: rand.New(rand.NewPCG(o.Seed, uint64(2*i+2)))})
	}
	for _, total := range w.GPUs {
		r.cards = append(r.cards, &card{total: total, free: total})
	}
	for _, q := range requests {
		if _, ok := r.named[q.Consumer]; !ok {
			return nil, fmt.Errorf("a request is for consumer %q, which is not there", q.Consumer)
		}
	}
	r.requests = slices.Clone(requests)
	slices.SortStableFunc(r.requests, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
	if n := len(r.requests); n > 0 {
		r.lastAt = r.scaled(r.requests[n-1].At)
	}
	switch o.Policy {
	case Bounded, Collate:
		r.engine = scheduler.New()
	case FIFO:
		r.engine = newFIFO()
	default:
		return nil, fmt.Errorf("unknown policy %q: allowed: %s, %s, %s", o.Policy, Bounded, Collate, FIFO)
	}
	return r, nil
}

// scaled is when something of the trace happens in a faster or slower one.
func (r *run) scaled(at time.Duration) time.Duration {
	if r.o.Speed == 1 {
		return at
	}
	return time.Duration(float64(at) / r.o.Speed)
}

// run lets happen all that will.
func (r *run) run(ctx context.Context) error {
	r.step(scheduler.Configure{Config: r.w.config(r.o.Policy)})
	r.step(r.sample(true))
	for _, s := range r.servers {
		r.step(r.probe(s))
	}
	idle := 0 // wakes in a row at the same time
	for steps := 0; r.open > 0 || r.sent < len(r.requests); steps++ {
		if steps%1024 == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if len(r.pending) > 0 {
			e := r.pending[0]
			r.pending = append(r.pending[:0], r.pending[1:]...)
			r.step(e)
			continue
		}
		arrival := never
		if r.sent < len(r.requests) {
			arrival = r.scaled(r.requests[r.sent].At)
		}
		at := min(arrival, r.wake, r.agenda.next())
		if at == never {
			return fmt.Errorf("after %s %d requests wait, and nothing will ever happen: this is a bug, please report it", r.now, r.open)
		}
		if r.o.StopAfter > 0 && at > r.lastAt+r.o.StopAfter {
			r.stopped = true
			break
		}
		if at > r.now {
			r.now, idle = at, 0
		}
		switch at {
		case r.agenda.next():
			r.happen(r.agenda.take())
		case arrival:
			r.arrive(r.requests[r.sent])
			r.sent++
		default:
			if idle++; idle > 1000 {
				return fmt.Errorf("at %s the scheduler wants to be woken again and again: this is a bug, please report it", r.now)
			}
			r.step(scheduler.Wake{})
		}
	}
	r.tally()
	return nil
}

func (r *run) time() time.Time { return origin.Add(r.now) }

// step tells the engine something, and does what it says. What follows at the same time is put down, never done from within.
func (r *run) step(e scheduler.Event) {
	effects, wake := r.engine.Step(r.time(), e)
	r.wake = never
	if !wake.IsZero() {
		r.wake = max(r.now, wake.Sub(origin))
	}
	for i := range effects {
		r.obey(&effects[i])
	}
}

func (r *run) obey(f *scheduler.Effect) {
	switch f.Kind {
	case scheduler.Queued:
		r.queued(f.Job)
	case scheduler.Admit:
		r.begin(f)
	case scheduler.Refuse:
		r.refused(f)
	case scheduler.Load:
		r.load(r.server(f.Slot), f.Epoch)
	case scheduler.StartUnload:
		s := r.server(f.Slot)
		s.epoch++ // a load that is under way will not be done
		r.move(s, 1)
		r.agenda.add(happening{at: r.now + max(0, s.Unload(s.stop)), kind: unloaded, who: s.index, epoch: f.Epoch})
	case scheduler.ProbeNow:
		r.pending = append(r.pending, r.probe(r.server(f.Slot)))
	case scheduler.LookNow:
		r.look()
	case scheduler.CheckBusy:
		r.pending = append(r.pending, scheduler.BusyAnswer{Slot: f.Slot, Sent: r.time()})
	case scheduler.Decided:
		if f.Decision.Kind == "evicted" {
			r.unloads++
		}
	case scheduler.Dropped, scheduler.NotNow:
	}
}

func (r *run) server(name string) *server { return r.servers[r.named[name]] }

// happen lets one thing of the agenda happen.
func (r *run) happen(h happening) {
	switch h.kind {
	case arrives:
		r.submit(h.who)
	case leaves:
		if t := &r.tasks[h.who]; t.state == isWaiting && uint64(t.try) == h.epoch {
			r.step(scheduler.Cancel{Job: t.job})
			r.away(h.who)
		}
	case warms:
		r.warm(h.who)
	case ends:
		r.end(h.who)
	case loaded:
		r.loadDone(r.servers[h.who], h.epoch)
	case unloaded:
		s := r.servers[h.who]
		r.move(s, -1)
		r.give(s)
		r.step(r.sample(false)) // else one of this very time, but from before, would be taken for a look at what has come back
		r.step(scheduler.UnloadDone{Slot: s.Slot.Name, Epoch: h.epoch, Confirmed: true})
	}
}

// load begins a load: the memory is taken at once.
func (r *run) load(s *server, epoch uint64) {
	s.epoch++
	s.loads++
	r.move(s, 1)
	r.take(s)
	r.agenda.add(happening{at: r.now + max(0, s.Load(s.loading)), kind: loaded, who: s.index, epoch: epoch<<32 | s.epoch&(1<<32-1)})
}

func (r *run) loadDone(s *server, epochs uint64) {
	r.move(s, -1)
	if epochs&(1<<32-1) != s.epoch&(1<<32-1) { // it was broken off
		return
	}
	r.step(scheduler.LoadDone{Slot: s.Slot.Name, Epoch: epochs >> 32})
}

// take lets a server take its memory. Each change of memory is seen at once.
func (r *run) take(s *server) {
	if !s.loaded {
		s.loaded = true
		r.each(s, func(c *card) { c.free -= s.claim() })
		r.look()
	}
}

func (r *run) give(s *server) {
	if s.loaded {
		s.loaded = false
		r.each(s, func(c *card) { c.free += s.claim() })
	}
}

func (s *server) claim() gpu.Bytes { return claimOn(&s.Slot) }

// claimOn is what a slot takes of each of its GPUs (spec §7.2).
func claimOn(c *scheduler.SlotConfig) gpu.Bytes {
	if n := gpu.Bytes(len(c.GPUs)); n > 1 {
		return c.Claim / n * 110 / 100
	}
	return c.Claim
}

func (r *run) each(s *server, f func(c *card)) {
	for _, i := range s.Slot.GPUs {
		f(r.cards[i])
	}
}

// look puts a sample down, unless one is.
func (r *run) look() {
	for i, e := range r.pending {
		if _, is := e.(scheduler.Sampled); is {
			r.pending[i] = r.sample(false)
			return
		}
	}
	r.pending = append(r.pending, r.sample(false))
}

func (r *run) sample(first bool) scheduler.Sampled {
	e := scheduler.Sampled{At: r.time(), First: first}
	for i, c := range r.cards {
		e.Devices = append(e.Devices, scheduler.Device{Index: i, UUID: fmt.Sprintf("GPU-simulated-%d", i), Name: "simulated", Total: c.total, Free: c.free, Known: true})
	}
	return e
}

func (r *run) probe(s *server) scheduler.Probed {
	p := scheduler.Probed{Slot: s.Slot.Name, Sent: r.time(), Loaded: scheduler.No, Resident: -1}
	if s.loaded {
		p.Loaded = scheduler.Yes
	}
	return p
}
