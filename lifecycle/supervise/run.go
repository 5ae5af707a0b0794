package supervise

import (
	"cmp"
	"context"
	"errors"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// run is the server from one start to its end.
type run struct {
	ended  <-chan struct{} // of the means; nil: nobody could tell
	routes lifecycle.Driver
	// ctx ends when the run has, after Died has been told if it is to be.
	ctx    context.Context
	finish context.CancelFunc

	// The driver's mutex guards these.
	told     bool // it was told to end
	over     bool
	loads    int  // that wait for it
	ready    bool // a load has succeeded
	foreign  bool // it ran before this driver started anything
	unloaded bool // by its route, and not loaded since
}

var (
	errClosed    = errors.New("the configuration that it belongs to is gone")
	errNoAddress = errors.New("nobody says where the server listens: give the consumer `upstream host:port`, or use {gpu_broker.port} in its command")
)

// adopt returns the run of the server that runs now and listens at upstream.
// One that is not known yet was started by somebody else.
func (d *driver) adopt(upstream string) (*run, error) {
	r, found, err := d.current(d.means.Ended(), cmp.Or(d.deps.Upstream, upstream), true)
	if found || err != nil {
		return r, err
	}
	d.settle()
	r, _, err = d.current(d.means.Ended(), cmp.Or(d.deps.Upstream, upstream), false)
	return r, err
}

// current returns the latest run if it is the one that ends with ended, else,
// unless only such a one is looked for, it makes a new one.
func (d *driver) current(ended <-chan struct{}, upstream string, only bool) (r *run, found bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.now != nil && !d.now.over && d.now.ended == ended && d.upstream == upstream {
		return d.now, true, nil
	}
	if only {
		return nil, false, nil
	}
	r, err = d.begin(ended, upstream)
	if err == nil {
		r.foreign = true
	}
	return r, false, err
}

// settle waits until the end of the latest run is told, if it has ended or could not be watched.
func (d *driver) settle() {
	d.mu.Lock()
	r := d.now
	over := r != nil && r.over
	d.mu.Unlock()
	switch {
	case r == nil:
		return
	case over:
	case r.ended == nil:
		d.end(r)
	default:
		select {
		case <-r.ended:
		default:
			return
		}
	}
	<-r.ctx.Done()
}

// begin makes a run the latest. The caller holds mu.
func (d *driver) begin(ended <-chan struct{}, upstream string) (*run, error) {
	if upstream == "" {
		return nil, errNoAddress
	}
	if d.speaker == nil || d.address != upstream {
		speaker, err := d.open(upstream)
		if err != nil {
			return nil, err
		}
		if d.speaker != nil {
			_ = d.speaker.Close() // it has nothing that could be lost
		}
		d.speaker, d.address = speaker, upstream
	}
	if s, ok := d.speaker.(restarter); ok && d.now != nil {
		s.Restarted()
	}
	r := &run{ended: ended, routes: d.speaker}
	r.ctx, r.finish = context.WithCancel(context.Background())
	d.upstream = upstream
	if d.closed {
		r.finish()
		return r, nil // of a server that outlives us: it is nobody's to watch
	}
	d.now = r
	if ended != nil {
		d.watches.Go(func() { d.watch(r) })
	}
	return r, nil
}

// watch waits for the end of a run.
func (d *driver) watch(r *run) {
	select {
	case <-r.ctx.Done():
	case <-r.ended:
		d.end(r)
	}
}

// end notes that a run is over. The first to do so tells it, unless the server was told to end.
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
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.deps.UnloadTimeout)
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
