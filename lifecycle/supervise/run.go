package supervise

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// run is the server from one start to its end.
type run struct {
	routes lifecycle.Driver
	// ctx ends when the run has, after Died has been told if it is to be.
	ctx    context.Context
	finish context.CancelFunc

	// The driver's mutex guards these.
	ended    <-chan struct{} // of the means; nil: nobody could tell
	told     bool            // it was told to end
	over     bool
	loads    int  // that wait for it
	ready    bool // a load has succeeded
	foreign  bool // it ran before this driver started anything
	unloaded bool // by its route, and not loaded since
}

// lateNews is how long after a server was found not to run its watch may still tell it.
const lateNews = time.Second

// ErrClosed says that the driver, or its means, is closed.
var ErrClosed = errors.New("the configuration that it belongs to is gone")

var errNoAddress = errors.New("nobody says where the server listens: give the consumer `upstream host:port`, or use {gpu_broker.port} in its command")

// current returns the run of the means' latest server. One that is not known yet
// is a new one, foreign as long as nobody says that we have started it. fresh: it
// is known that it has just started.
func (d *driver) current(fresh bool) (*run, error) {
	d.beginning.Lock()
	defer d.beginning.Unlock()
	ended, upstream := d.means.Latest()
	upstream = cmp.Or(d.deps.Upstream, upstream)
	d.mu.Lock()
	r := d.now
	continues := d.continues(ended, upstream)
	d.mu.Unlock()
	if !continues {
		if r != nil {
			d.end(r)
			fresh = true
		}
		var err error
		if r, err = d.begin(ended, upstream); err != nil {
			return nil, err
		}
	}
	if s, ok := r.routes.(restarter); ok && fresh {
		s.Restarted()
	}
	return r, nil
}

// continues reports whether the latest run goes on, and watches it if only now
// somebody can tell its end. The caller holds mu.
func (d *driver) continues(ended <-chan struct{}, upstream string) bool {
	r := d.now
	switch {
	case r == nil || r.over || d.upstream != upstream:
		return false
	case r.ended == nil && ended != nil:
		r.ended = ended
		d.watches.Go(func() { d.watch(r, ended) })
		return true
	default:
		return ended == nil || ended == r.ended
	}
}

// settle waits until the end of the latest run is told, if it has ended.
func (d *driver) settle() {
	d.mu.Lock()
	r := d.now
	var ended <-chan struct{}
	over := false
	if r != nil {
		ended, over = r.ended, r.over
	}
	d.mu.Unlock()
	if !over {
		select {
		case <-ended:
		default:
			return
		}
	}
	d.end(r)
}

// begin makes a run the latest. The caller holds beginning.
func (d *driver) begin(ended <-chan struct{}, upstream string) (*run, error) {
	if upstream == "" {
		return nil, errNoAddress
	}
	speaker := d.speaker
	if speaker == nil || d.upstream != upstream {
		var err error
		if speaker, err = d.open(upstream); err != nil {
			return nil, err
		}
		if d.speaker != nil {
			_ = d.speaker.Close() // it has nothing that could be lost
		}
	}
	r := &run{ended: ended, routes: speaker, foreign: true}
	r.ctx, r.finish = context.WithCancel(context.Background())
	d.mu.Lock()
	defer d.mu.Unlock()
	d.speaker, d.upstream = speaker, upstream
	if d.closed {
		r.finish()
		return r, nil // of a server that outlives us: it is nobody's to watch
	}
	d.now = r
	if ended != nil {
		d.watches.Go(func() { d.watch(r, ended) })
	}
	return r, nil
}

// noteGone is settle for a server that was found not to run: if that is watched, the news may be on its way.
func (d *driver) noteGone(ctx context.Context) {
	d.mu.Lock()
	r := d.now
	watched := r != nil && r.ended != nil
	d.mu.Unlock()
	if r == nil {
		return
	}
	if watched {
		late := time.NewTimer(lateNews)
		defer late.Stop()
		select {
		case <-r.ctx.Done():
		case <-late.C:
		case <-ctx.Done():
			return
		}
	}
	d.end(r)
}

// watch waits for the end of a run.
func (d *driver) watch(r *run, ended <-chan struct{}) {
	select {
	case <-r.ctx.Done():
	case <-ended:
		d.end(r)
	}
}

// end notes that a run is over, and returns once that is told. The first to do
// so tells it, unless the server was told to end.
func (d *driver) end(r *run) {
	d.mu.Lock()
	first := !r.over
	r.over = true
	tell := first && !r.told && d.deps.Died != nil
	d.mu.Unlock()
	if tell {
		d.deps.Died(d.means.Why())
	}
	if first {
		r.finish()
	}
	<-r.ctx.Done()
}

// found notes that the server was found not to run. A run that is watched ends
// by its watch, which may be on its way.
func (d *driver) found() {
	d.mu.Lock()
	r := d.now
	gone := r != nil && !r.over && (r.ended == nil || r.told)
	d.mu.Unlock()
	if gone {
		d.end(r)
	}
}

// stop ends the server and all that it has started. A time limit of ctx is for
// what came before; being called off makes the stop hurry.
func (d *driver) stop(ctx context.Context) error {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.deps.Limits.Unload())
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) {
			cancel()
		}
	})()
	select {
	case d.turn <- struct{}{}:
	case <-limited.Done():
		return errors.New("it is being started or stopped by somebody else, who takes too long")
	}
	defer func() { <-d.turn }()
	return d.stopNow(limited, nil)
}

// stopNow stops the server; if only is not nil, only if that is the latest run and nobody else needs it. The caller has the turn.
func (d *driver) stopNow(ctx context.Context, only *run) error {
	d.mu.Lock()
	r := d.now
	if only != nil && (r != only || r.loads > 0) {
		d.mu.Unlock()
		return nil
	}
	if r != nil {
		r.told = true
	}
	d.mu.Unlock()
	err := d.means.Stop(ctx)
	switch {
	case r == nil:
	case err == nil:
		d.end(r)
	default:
		d.mu.Lock()
		r.told = d.closed
		d.mu.Unlock()
	}
	return err
}

func (d *driver) isUnloaded(r *run) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return r.unloaded
}

func (d *driver) setUnloaded(r *run, is bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r.unloaded = is
}
