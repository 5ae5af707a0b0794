package broker

import (
	"context"
	"fmt"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Request asks for a place on a consumer.
type Request struct {
	Consumer  string
	Model     string        // of a consumer that has several
	Priority  int           // lower is more urgent
	Submitted time.Time     // zero: now. A request that is admitted once more keeps its time.
	Budget    time.Duration // for queue and load; 0: the consumer's
	Client    string        // who asks; empty: nobody in particular
	KeepAlive time.Duration // for so long after it the consumer is no victim; 0: the consumer's own
	StayWarm  time.Duration // for so long after it the consumer is not unloaded as idle; 0: the consumer's own
	Cooldown  time.Duration // least time until the client's next start; 0: the configuration's

	// Turn asks for no load: the request takes the place of its model if that is loaded, else only the lock of the consumer's GPUs. A consumer
	// without models has one place for all requests, so there it makes no difference.
	Turn bool

	Candidates []string // the ladder, Consumer being the first of it; empty: Consumer alone
	PinPrimary bool     // Consumer, whatever else is warm

	// Waiting, unless nil, is called once, by Acquire's own goroutine and before
	// it waits, if the request does not have its place at once. place tells where it stands, at any time and from any goroutine.
	Waiting func(place func() Place)
}

// Lease is the right to run one job. It must be released.
type Lease struct {
	b        *Broker
	job      scheduler.JobID
	Began    time.Time // when it was admitted
	Asked    time.Time // when it was asked for: its age in the queue
	Consumer string
	Upstream string        // host:port of the server, or empty
	Async    bool          // its work may outlive its answer
	Loads    bool          // its server loads inside it
	Queued   time.Duration // how long it waited for its turn
	Loading  time.Duration // … and how long for its load
	client   string
	slot     *slot            // what serves it
	driver   lifecycle.Driver // … and whose server that was when it was admitted
}

// Refused is the error of a request that gets no place.
type Refused struct {
	scheduler.Refusal
	Consumer string
}

func (r *Refused) Error() string { return r.Message }

// Acquire waits for a place and returns a lease on it, or an error: *Refused,
// or the context's own if the client left. Nothing is held after an error. If the client left, the lease
// names the consumer that it waited for.
func (b *Broker) Acquire(ctx context.Context, r Request) (Lease, error) {
	if ctx.Err() != nil { // nothing is unloaded for a client that has left already
		return Lease{}, context.Cause(ctx)
	}
	lease, w, err := b.submit(r)
	if err != nil || w == nil {
		return lease, err
	}
	if r.Waiting != nil {
		b.announce(r.Waiting, lease.job, w)
	}
	return b.await(ctx, lease, w)
}

// submit takes a request in: it has its lease at once, is refused, or waits (then w is not nil).
func (b *Broker) submit(r Request) (_ Lease, w *waiter, _ error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now() // under the lock: the state's time never goes back
	if r.Submitted.IsZero() {
		r.Submitted = now
		b.clients.asked(r.Client, now)
	}
	if b.closed { // nobody else may touch what Close looks through
		return Lease{}, nil, b.turnAway(now, r.Consumer, stopping())
	}
	c, sl := b.choose(now, &r)
	if sl == nil {
		return Lease{}, nil, b.turnAway(now, r.Consumer, b.nowhere(&r))
	}
	if len(r.Candidates) > 1 && c.name != r.Candidates[0] {
		b.record(scheduler.Decision{At: now, Kind: "fallback", Slot: r.Candidates[0], Target: c.name, GPU: -1,
			Reason: fmt.Sprintf("a request for %s goes to its fallback %s, which is warm: %[1]s is not, and can't be loaded without an unload", r.Candidates[0], c.name)})
	}
	if r.Budget == 0 {
		r.Budget = time.Duration(c.cfg.Budget)
	}
	effects, wake := b.state.Step(now, scheduler.Submit{Slot: sl.name, Priority: r.Priority, Submitted: r.Submitted, Deadline: r.Submitted.Add(r.Budget),
		Client: r.Client, KeepAlive: r.KeepAlive, StayWarm: r.StayWarm, Cooldown: r.Cooldown})
	c.requests++
	lease := Lease{b: b, job: effects[0].Job, Began: now, Asked: r.Submitted, Consumer: c.name, Upstream: sl.consumer.upstream, Async: c.cfg.Async, client: r.Client, slot: sl, driver: sl.consumer.driver}
	switch effects[0].Kind {
	case scheduler.Admit: // the warm path
		b.act(now, effects, wake)
		return lease, nil, nil
	case scheduler.Refuse:
		refusal := effects[0].Refusal
		b.act(now, effects, wake)
		return Lease{}, nil, b.refusedAtOnce(now, c.name, refusal)
	}
	w = &waiter{ready: make(chan struct{}), consumer: c, slot: sl, since: r.Submitted}
	b.waiters[lease.job] = w
	b.act(now, effects, wake)
	return lease, w, nil
}

// TryAcquire returns a lease if the job can run at once. It never waits and never refuses.
func (b *Broker) TryAcquire(r Request) (Lease, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return Lease{}, false
	}
	now := time.Now()
	c, sl := b.choose(now, &r)
	if sl == nil {
		return Lease{}, false
	}
	effects, wake := b.state.Step(now, scheduler.Submit{Slot: sl.name, Priority: r.Priority, Client: r.Client, KeepAlive: r.KeepAlive, StayWarm: r.StayWarm, Cooldown: r.Cooldown, IfFree: true})
	if effects[0].Kind != scheduler.Admit {
		return Lease{}, false
	}
	lease := Lease{b: b, job: effects[0].Job, Began: now, Asked: now, Consumer: c.name, Upstream: sl.consumer.upstream, Async: c.cfg.Async, client: r.Client, slot: sl, driver: sl.consumer.driver}
	c.requests++
	b.clients.asked(r.Client, now)
	b.act(now, effects, wake)
	return lease, true
}

// Touch counts as use of a consumer, of all its models, without a job.
func (b *Broker) Touch(consumer string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.consumers[consumer]
	if c == nil || b.closed {
		return
	}
	now := time.Now()
	for _, sl := range c.real().slots {
		b.apply(now, scheduler.Touch{Slot: sl.name})
	}
	b.ended()
}

// await waits for the answer, or gives the place back if the client leaves.
func (b *Broker) await(ctx context.Context, lease Lease, w *waiter) (Lease, error) {
	select {
	case <-w.ready:
	case <-ctx.Done():
		b.mu.Lock()
		delete(b.waiters, lease.job)
		b.mu.Unlock()
		b.step(scheduler.Cancel{Job: lease.job}) // a place that was granted meanwhile goes back with it
		return Lease{Consumer: lease.Consumer}, context.Cause(ctx)
	}
	if w.refusal != nil {
		return Lease{}, &Refused{Refusal: *w.refusal, Consumer: lease.Consumer}
	}
	lease.Began = time.Now()
	lease.Queued, lease.Loading = w.queued, w.loading
	lease.Upstream, lease.Async, lease.Loads = w.upstream, w.async, w.loads
	lease.driver = w.driver
	return lease, nil
}

// Release ends the job, and says when. A second call does nothing.
func (l Lease) Release(outcome scheduler.Outcome) (at time.Time) { return l.End(outcome, false) }

// End is Release of a job whose request may have been broken off, by its client or by us (left): then its server may still
// work on it, and the GPU is held until it doesn't, as far as can be told.
func (l Lease) End(outcome scheduler.Outcome, left bool) (at time.Time) {
	b := l.b
	if b == nil {
		return time.Now()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if !b.closed && b.state.Knows(l.job) {
		b.lastRun = now.Sub(l.Began)
		b.clients.ended(l.client, now, l.Queued+l.Loading, b.lastRun)
		effects, wake := b.state.Step(now, scheduler.Release{Job: l.job, Outcome: outcome, Left: left})
		b.act(now, effects, wake)
		b.ended()
	}
	return now
}

// stopping is why nobody gets a place any more.
func stopping() *scheduler.Refusal {
	return &scheduler.Refusal{Code: scheduler.Draining, Message: "the broker is stopping", RetryAfter: 5 * time.Second}
}

// nowhere is why a request has no slot. It holds mu.
func (b *Broker) nowhere(r *Request) *scheduler.Refusal {
	c := b.consumers[r.Consumer]
	switch {
	case b.closed:
		return stopping()
	case c == nil:
		return &scheduler.Refusal{Code: scheduler.UnknownConsumer, Message: fmt.Sprintf("there is no consumer %q", r.Consumer)}
	case r.Model == "":
		return &scheduler.Refusal{Code: scheduler.UnknownConsumer, Message: fmt.Sprintf("consumer %q has several models, and the request names none", r.Consumer)}
	case c.leavesToDouble(r.Model):
		return &scheduler.Refusal{Code: scheduler.UnknownConsumer, Message: fmt.Sprintf("consumer %q has no model %.256q: another consumer stands for the same server, so each serves only the models that it names", r.Consumer, r.Model)}
	case c.cfg.ServesUnnamed() && config.CheckModelName(r.Model) == nil && !b.leaves(c.real()):
		return &scheduler.Refusal{Code: scheduler.QueueFull, RetryAfter: 30 * time.Second,
			Message: fmt.Sprintf("consumer %q holds %d models that its configuration does not name: no other is taken in before one of them is unloaded", r.Consumer, maxAdopted)}
	default:
		return &scheduler.Refusal{Code: scheduler.UnknownConsumer, Message: fmt.Sprintf("consumer %q has no model %.256q: name it in the configuration, or give the consumer a vram for those that are not named", r.Consumer, r.Model)}
	}
}

// refusedAtOnce makes the error of a request that never queued, for which the scheduler keeps no record. It holds mu.
func (b *Broker) refusedAtOnce(now time.Time, consumer string, r *scheduler.Refusal) error {
	b.record(scheduler.Decision{At: now, Kind: "refuse", Slot: consumer, GPU: -1, Code: r.Code, Reason: r.Message})
	return &Refused{Refusal: *r, Consumer: consumer}
}

// turnAway is refusedAtOnce for a request that the scheduler never saw, so that it does not count it. It holds mu.
func (b *Broker) turnAway(now time.Time, consumer string, r *scheduler.Refusal) error {
	b.refused++
	return b.refusedAtOnce(now, consumer, r)
}

// TurnAway counts, keeps and tells of a refusal that was made outside the broker, as of its own. consumer may be empty:
// it is not known. The reason is kept, so it must have a bound.
func (b *Broker) TurnAway(consumer string, code scheduler.Code, reason string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_ = b.turnAway(time.Now(), consumer, &scheduler.Refusal{Code: code, Message: reason}) // the caller has its error
}
