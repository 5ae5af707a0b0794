package modelserver

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"
)

// queue is the line of jobs of a server that answers before the work is done,
// and the one worker that does them, one by one. Its fields are guarded by Server.mu.
type queue struct {
	l    *life
	m    *model
	wake chan struct{} // holds a token while there may be something for the worker

	number  int
	pending []*queued
	running *queued
	ended   map[string]*queued
	order   []string // of ended, oldest first
	most    int      // of pending
	kept    int      // of ended
	paused  bool     // the worker begins nothing new

	// What the kind does beside, if it isn't nil.
	changed func()          // at each change; called with mu held
	between func()          // between two jobs
	begins  func(p *queued) // when a job is taken up
	loads   func(p *queued) // when its model is there
	ends    func(p *queued)
}

// jobState is where a job is.
type jobState int

const (
	jobQueued jobState = iota
	jobRunning
	jobCompleted
	jobFailed
	jobCancelled
)

// queued is one job. Its id, what was asked and by whom never change.
type queued struct {
	id, batch, kind, client string
	number                  int
	asked                   json.RawMessage
	run                     time.Duration // negative: RunTime
	request                 request

	cancel  context.CancelFunc // of the running one
	state   jobState
	message string // why it failed
	// When it came, was begun and ended; zero until then.
	created, started, over time.Time
}

func newQueue(l *life, m *model, most, kept int) *queue {
	q := &queue{l: l, m: m, most: most, kept: kept, wake: make(chan struct{}, 1), ended: map[string]*queued{}}
	l.queue, l.worker = q, q.work
	return q
}

// remaining is how many jobs run and wait. For holders of mu.
func (q *queue) remaining() int {
	if q.running != nil {
		return len(q.pending) + 1
	}
	return len(q.pending)
}

// add puts a job at the end, or at the front, unless the line is full. For holders of mu.
func (q *queue) add(p *queued, front bool) bool {
	if len(q.pending) >= q.most {
		return false
	}
	q.number++
	p.number, p.created = q.number, time.Now()
	if front {
		p.number = -p.number
		q.pending = slices.Insert(q.pending, 0, p)
	} else {
		q.pending = append(q.pending, p)
	}
	q.notify()
	return true
}

// nudge wakes the worker. For holders of mu.
func (q *queue) nudge() {
	select {
	case q.wake <- struct{}{}:
	default: // it is awake
	}
}

// notify wakes the worker and tells of a change. For holders of mu.
func (q *queue) notify() {
	q.nudge()
	if q.changed != nil {
		q.changed()
	}
	q.l.s.notify()
}

// find finds a job, ended or not. For holders of mu.
func (q *queue) find(id string) *queued {
	if q.running != nil && q.running.id == id {
		return q.running
	}
	if i := q.position(id); i >= 0 {
		return q.pending[i]
	}
	return q.ended[id]
}

// position is a job's place in the line, from 0; -1 if it doesn't wait. For holders of mu.
func (q *queue) position(id string) int {
	return slices.IndexFunc(q.pending, func(p *queued) bool { return p.id == id })
}

// drop takes those out of the line that which names; they count as cancelled
// but, unless remember is set, leave no trace. For holders of mu.
func (q *queue) drop(which func(id string) bool, remember bool) {
	kept := []*queued{}
	for _, p := range q.pending {
		switch {
		case !which(p.id):
			kept = append(kept, p)
		case remember:
			p.state, p.over = jobCancelled, time.Now()
			q.remember(p)
		}
	}
	q.pending = kept
	q.notify()
}

// remember keeps an ended job, and forgets the oldest beyond kept. For holders of mu.
func (q *queue) remember(p *queued) {
	q.ended[p.id] = p
	q.order = append(q.order, p.id)
	if len(q.order) > q.kept {
		delete(q.ended, q.order[0])
		q.order = q.order[1:]
	}
}

// forget forgets those of the ended jobs that which names. For holders of mu.
func (q *queue) forget(which func(id string) bool) {
	q.order = slices.DeleteFunc(q.order, func(id string) bool {
		gone := which(id)
		if gone {
			delete(q.ended, id)
		}
		return gone
	})
}

// counts is how many jobs of a batch, of all if it is empty, are in each state. For holders of mu.
func (q *queue) counts(batch string) (n [jobCancelled + 1]int) {
	count := func(p *queued) {
		if batch == "" || p.batch == batch {
			n[p.state]++
		}
	}
	for _, p := range q.pending {
		count(p)
	}
	if q.running != nil {
		count(q.running)
	}
	for _, p := range q.ended {
		count(p)
	}
	return n
}

// work is the worker. It ends with the life.
func (q *queue) work() {
	for {
		q.next()
		if q.between != nil {
			q.between()
		}
		q.l.s.mu.Lock()
		more := len(q.pending) > 0 && !q.paused
		q.l.s.mu.Unlock()
		if q.l.ctx.Err() != nil {
			return
		}
		if more {
			continue
		}
		select {
		case <-q.wake:
		case <-q.l.ctx.Done():
			return
		}
	}
}

// next does one job if there is one.
func (q *queue) next() {
	s := q.l.s
	s.mu.Lock()
	if len(q.pending) == 0 || q.paused || q.l.dead {
		s.mu.Unlock()
		return
	}
	p := q.pending[0]
	q.pending = q.pending[1:]
	q.running = p
	ctx, cancel := context.WithCancel(q.l.ctx)
	defer cancel()
	p.cancel, p.state, p.started = cancel, jobRunning, time.Now()
	q.notify()
	s.mu.Unlock()

	tell(q.begins, p)
	err := q.execute(ctx, p)
	if q.l.ctx.Err() != nil {
		return
	}
	s.mu.Lock()
	p.over = time.Now()
	switch {
	case errors.Is(err, context.Canceled):
		p.state, p.message = jobCancelled, "interrupted"
	case err != nil:
		p.state, p.message = jobFailed, err.Error()
	default:
		p.state = jobCompleted
	}
	q.running = nil
	q.remember(p)
	q.notify()
	s.mu.Unlock()
	tell(q.ends, p)
}

func tell(hook func(*queued), p *queued) {
	if hook != nil {
		hook(p)
	}
}

// execute loads the model if need be and computes.
func (q *queue) execute(ctx context.Context, p *queued) error {
	done, err := q.l.turn(ctx)
	if err != nil {
		return err
	}
	defer done()
	release, err := q.l.acquire(ctx, q.m, true)
	if err != nil {
		return err
	}
	defer release()
	tell(q.loads, p)
	end := q.l.beginWork(p.request, q.m)
	if q.l.takeFault(func(f *Faults) bool { was := f.DieOnRequest; f.DieOnRequest = false; return was }) {
		end(false)
		q.l.dieOf("die_on_request")
		return errDead
	}
	run := p.run
	if run < 0 {
		run = q.l.s.options().RunTime
	}
	if err = q.l.sleep(ctx, run); err == nil {
		err = q.l.hangWhile(ctx, func(f Faults) bool { return f.HoldWork })
	}
	end(err == nil)
	return err
}
