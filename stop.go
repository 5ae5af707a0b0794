package gpubroker

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"go.uber.org/zap"
)

// stopping hears that Caddy is about to stop a configuration's apps: because
// another has taken its place, or because the process ends.
//
// In the first case this is the moment from which nothing of the new
// configuration can fail any more. In the second it comes before the http app
// begins to wait for the requests that are under way, those in the queue included.
type stopping struct{ app *App }

// Handle implements caddyevents.Handler.
func (s stopping) Handle(_ context.Context, e caddy.Event) error {
	if e.Origin() != nil { // some module's event of this name; Caddy's own has no origin
		return nil
	}
	s.app.pool.lived.Store(true)
	if !caddy.Exiting() {
		return s.app.Stop()
	}
	s.app.pool.stop(time.Duration(*s.app.StopGrace), s.app.generation.Logger)
	return nil
}

// stop refuses new and waiting requests, and lets running ones go on for so long.
func (p *pooled) stop(grace time.Duration, log *zap.Logger) {
	p.broker.StopAdmitting()
	said := false
	p.grace.start(grace, func() (more bool) {
		n := p.running.cut()
		if n > 0 && !said {
			said = true
			log.Warn("stop_grace is over: connections of running requests were closed", zap.Int("requests", n), zap.Duration("stop_grace", grace))
		}
		return n > 0
	})
}

// exitPoll is how often a broker that no configuration has any more looks whether the process ends.
const exitPoll = 100 * time.Millisecond

// stopWithProcess is for a broker that no configuration has any more, while it
// goes on with what it has: of the end of the process nobody tells it. exiting reports whether the process ends.
func (p *pooled) stopWithProcess(grace time.Duration, log *zap.Logger, exiting func() bool) {
	retiring.mu.Lock()
	retires, done := retiring.pooled == p, retiring.done
	retiring.mu.Unlock()
	if !retires {
		return
	}
	go func() {
		look := time.NewTicker(exitPoll)
		defer look.Stop()
		for {
			select {
			case <-done:
				return
			case <-look.C:
				if exiting() {
					p.stop(grace, log)
					return
				}
			}
		}
	}()
}

// cutAgain is how often those are cut anew that are not gone yet: the server
// takes deadlines back when it begins to read or write.
const cutAgain = 200 * time.Millisecond

// graceTimer does what is to be done when the time of grace is over, again while there is more of it.
type graceTimer struct {
	mu      sync.Mutex
	timer   *time.Timer
	stopped bool
}

func (g *graceTimer) start(after time.Duration, do func() (more bool)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.timer != nil || g.stopped {
		return
	}
	g.timer = time.AfterFunc(after, func() {
		more := do()
		g.mu.Lock()
		defer g.mu.Unlock()
		if more && !g.stopped {
			g.timer.Reset(cutAgain)
		}
	})
}

func (g *graceTimer) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stopped = true
	if g.timer != nil {
		g.timer.Stop()
	}
}

// runs are the requests that run, so that they can be cut when time is up. A
// request of its own context would cost more, on each request, than this list.
type runs struct {
	mu    sync.Mutex
	first *job
}

func (l *runs) add(j *job, s stage) {
	l.mu.Lock()
	defer l.mu.Unlock()
	j.stage, j.since = s, time.Time{}
	if j.next = l.first; j.next != nil {
		j.next.prev = j
	}
	l.first = j
}

func (l *runs) remove(j *job) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case j.prev != nil:
		j.prev.next = j.next
	case l.first == j:
		l.first = j.next
	}
	if j.next != nil {
		j.next.prev = j.prev
	}
	j.prev, j.next = nil, nil
}

// each calls do for each that runs, while none can be added or removed. do must not block.
func (l *runs) each(do func(*job)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for j := l.first; j != nil; j = j.next {
		do(j)
	}
}

// cut ends all that run, and returns how many there were.
func (l *runs) cut() (n int) {
	l.each(func(j *job) {
		n++
		j.cut()
	})
	return n
}

// cut ends a request that runs; the mutex of its list is held. Deadlines of the past end
// what reads from the client and what writes to it, one that is blocked for a
// slow client too. The server takes that for a client that left, which ends the
// context of a request that does neither; those that have one of their own are ended by it.
func (j *job) cut() {
	j.isCut.Store(true)
	if j.abort != nil {
		j.abort()
	}
	client := j.client()
	_ = client.SetReadDeadline(past) // HTTP/1, where the server always reads; a failure means that the writer is no connection's
	_ = client.SetWriteDeadline(past)
}

// innermost is the server's own response writer, which takes deadlines from any goroutine. Those around it do not.
func innermost(w http.ResponseWriter) http.ResponseWriter {
	for {
		around, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return w
		}
		w = around.Unwrap()
	}
}

var _ caddyevents.Handler = stopping{}
