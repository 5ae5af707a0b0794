package gpubroker

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
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
	if !caddy.Exiting() {
		return s.app.Stop()
	}
	s.app.pool.stop(time.Duration(*s.app.StopGrace), s.app.generation.Logger)
	return nil
}

// stop refuses new and waiting requests, and lets running ones go on for so long.
func (p *pooled) stop(grace time.Duration, log *zap.Logger) {
	p.broker.StopAdmitting()
	p.grace.start(grace, func() {
		if n := p.running.cut(); n > 0 {
			log.Warn("stop_grace is over: connections of running requests were closed", zap.Int("requests", n), zap.Duration("stop_grace", grace))
		}
	})
}

// graceTimer runs once what is to be done when the time of grace is over.
type graceTimer struct {
	mu      sync.Mutex
	timer   *time.Timer
	stopped bool
}

func (g *graceTimer) start(after time.Duration, do func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.timer == nil && !g.stopped {
		g.timer = time.AfterFunc(after, do)
	}
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

func (l *runs) add(j *job, r *http.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	j.request = r
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
	j.prev, j.next, j.request = nil, nil, nil
}

// cut ends all that run: what they write fails, and the connection that they
// came by is closed, which ends their contexts, but for those that have one of
// their own. It says how many there were.
func (l *runs) cut() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for j := l.first; j != nil; j = j.next {
		n++
		j.isCut.Store(true)
		if j.abort != nil {
			j.abort()
		}
		if conn, ok := j.request.Context().Value(caddyhttp.ConnCtxKey).(net.Conn); ok {
			_ = conn.Close()
		}
	}
	return n
}

var _ caddyevents.Handler = stopping{}
