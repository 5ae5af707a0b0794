// Package broker runs the scheduler: it is the driver around the pure reducer.
// It owns the clock, the goroutines and the talk with servers and GPUs; what is
// to be done is decided in package scheduler alone.
package broker

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Broker is the one scheduler of a process. It outlives every configuration.
type Broker struct {
	mu        sync.Mutex
	state     *scheduler.State            // guarded by mu
	waiters   map[scheduler.JobID]*waiter // guarded by mu
	consumers map[string]*consumer        // guarded by mu; replaced entries keep their pointer
	slots     map[string]*slot            // guarded by mu; by the scheduler's name
	gens      []*Generation               // guarded by mu; in the order of their start
	closed    bool                        // guarded by mu
	wakeAt    time.Time                   // guarded by mu: when timer fires; zero: it doesn't
	timer     *time.Timer                 // guarded by mu
	lastRun   time.Duration               // guarded by mu
	refused   uint64                      // guarded by mu: refusals that the scheduler does not count
	records   ring                        // guarded by mu
	changed   chan struct{}               // guarded by mu: closed and replaced at each decision
	sampler   *samplerLoop                // guarded by mu
	devices   map[string]gpu.Device       // guarded by mu: the last full reading of each GPU, for display
	stillness map[int]stillness           // guarded by mu: by a GPU's index

	flags  flags    // see there
	ladder []string // guarded by mu: scratch space of guarded
	rungs  []string // guarded by mu: scratch space of choose

	clients   clients                    // guarded by mu
	unlisted  map[string]map[string]bool // guarded by mu: by consumer, the routes of which Unlisted has told
	outliving map[string]*outliving      // guarded by mu: by consumer

	released chan struct{} // guarded by mu: closed after the next event; nil: nobody waits for that
	keeping  bool          // guarded by mu: the loop that saves runs

	saving      sync.Mutex // guards what follows, and calls of the store
	recalled    bool
	saved       []byte                      // the document as it is in the store
	sharesStore bool                        // another process writes there, too
	others      map[string]scheduler.Learnt // what another process has written there; at most one document of it
	unsaved     bool                        // there is one that could not be read nor moved: it is not written over

	current atomic.Pointer[Generation]
	posts   chan scheduler.Decision // to the one goroutine that logs and tells; bounded
	dropped atomic.Int64

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup // every goroutine of the broker
}

// waiter is a request that waits. Its channel is closed under the broker's mutex.
type waiter struct {
	ready    chan struct{}
	consumer *consumer // who was asked for
	slot     *slot     // what serves it
	since    time.Time
	refusal  *scheduler.Refusal // valid once ready is closed; nil: admitted
	queued   time.Duration      // valid once ready is closed, as is what follows
	loading  time.Duration
	driver   lifecycle.Driver
	upstream string // of the consumer as it was admitted: a reload may have moved it meanwhile
	async    bool
	loads    bool // the server loads inside this job
}

// New makes a broker without a configuration. Close ends it.
func New() *Broker {
	b := &Broker{
		state:     scheduler.New(),
		waiters:   map[scheduler.JobID]*waiter{},
		consumers: map[string]*consumer{},
		slots:     map[string]*slot{},
		devices:   map[string]gpu.Device{},
		stillness: map[int]stillness{},
		changed:   make(chan struct{}),
		posts:     make(chan scheduler.Decision, 1024),
	}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	b.tasks.Go(b.tell)
	return b
}

// Close ends all that the broker runs, refuses who still waits, and returns
// when the last goroutine has ended. It may be called more than once.
func (b *Broker) Close() {
	b.mu.Lock()
	first := !b.closed
	b.closed = true
	if first {
		b.cancel()
		if b.timer != nil {
			b.timer.Stop()
		}
		for id, w := range b.waiters {
			delete(b.waiters, id)
			w.refusal = stopping()
			_ = b.turnAway(time.Now(), w.slot.name, w.refusal) // it is told by its waiter
			close(w.ready)
		}
		for _, o := range b.outliving {
			o.end()
		}
		b.outliving = nil
		for _, g := range b.gens[min(1, len(b.gens)):] {
			g.discard()
		}
		b.gens = nil
	}
	b.mu.Unlock()
	b.tasks.Wait()
	if first {
		var closing sync.WaitGroup
		all := map[*consumer]bool{}
		for _, c := range b.consumers { // nobody else is left
			all[c] = true
		}
		for _, sl := range b.slots { // of one that leaves another may have the name
			all[sl.consumer] = true
		}
		for c := range all {
			for _, s := range []*settings{&c.settings, c.next} {
				if s != nil && s.driver != nil {
					closing.Go(func() { _ = s.driver.Close() })
				}
			}
		}
		closing.Wait()
		b.save()
	}
}

// step takes one event into the state and does what follows. The caller must not hold mu.
func (b *Broker) step(e scheduler.Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed {
		now := time.Now()
		b.apply(now, e)
		b.ended()
	}
}

// apply takes one event into the state and does what follows. It holds mu.
func (b *Broker) apply(now time.Time, e scheduler.Event) {
	effects, wake := b.state.Step(now, e)
	b.act(now, effects, wake)
}

// act does what a step says. It holds mu, so it only closes channels, starts
// goroutines and sets the timer.
func (b *Broker) act(now time.Time, effects []scheduler.Effect, wake time.Time) {
	for _, e := range effects {
		switch e.Kind {
		case scheduler.Admit:
			b.grant(now, e, nil)
		case scheduler.Refuse:
			b.grant(now, e, e.Refusal)
		case scheduler.Decided:
			b.record(*e.Decision)
		case scheduler.Resided:
			if g := b.current.Load(); g != nil && g.Observer != nil {
				g.Observer.Resided(e.Slot, e.Stayed)
			}
		case scheduler.Queued, scheduler.NotNow:
		default:
			b.effect(e)
		}
	}
	if !wake.Equal(b.wakeAt) {
		b.setTimer(now, wake)
	}
}

// unloaded reports whether nothing of a consumer is loaded, so that its driver may be replaced. It holds mu.
func (b *Broker) unloaded(c *consumer) bool {
	for _, sl := range b.slots {
		if sl.consumer != c {
			continue
		}
		v, known := b.state.Slot(sl.name)
		if known && sl.turnOnly && v.Active == 0 && !v.Gone {
			continue
		}
		if known && (v.Gone || v.Active+v.Held > 0 || v.State != scheduler.Idle && b.current.Load().Config.Scheduler == config.Evicting) { // one that is gone may have work, or some that wait
			return false
		}
	}
	return true
}

func (b *Broker) setTimer(now, at time.Time) {
	b.wakeAt = at
	switch {
	case at.IsZero():
		if b.timer != nil {
			b.timer.Stop()
		}
	case b.timer == nil:
		b.timer = time.AfterFunc(at.Sub(now), b.wake)
	default:
		b.timer.Reset(at.Sub(now))
	}
}

// wake runs on the timer's goroutine. A timer that was set anew meanwhile does no harm.
func (b *Broker) wake() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return
	}
	now := time.Now()
	b.wakeAt = time.Time{}
	b.apply(now, scheduler.Wake{})
	b.ended()
}

// grant tells a waiter its answer.
func (b *Broker) grant(now time.Time, e scheduler.Effect, r *scheduler.Refusal) {
	w := b.waiters[e.Job]
	if w == nil {
		return
	}
	delete(b.waiters, e.Job)
	w.refusal, w.loads = r, e.Loads
	w.loading = w.slot.loadedSince(w.since)
	w.queued = max(0, now.Sub(w.since)-w.loading)
	w.driver = w.slot.consumer.driver
	w.upstream, w.async = w.slot.consumer.upstream, w.consumer.cfg.Async
	close(w.ready)
}

// ended wakes those who wait for what an event may have ended. It holds mu.
func (b *Broker) ended() {
	if len(b.outliving) > 0 {
		b.settle()
	}
	if b.released != nil {
		close(b.released)
		b.released = nil
	}
}

func (b *Broker) logger() *zap.Logger {
	if g := b.current.Load(); g != nil && g.Logger != nil {
		return g.Logger
	}
	return zap.NewNop()
}
