package supervise

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// driver is a server that a means starts and stops, and routes in between.
type driver struct {
	means  Means
	guest  lifecycle.Guest // the routes'
	deps   lifecycle.Deps
	routes lifecycle.Traits // what the routes can do
	// turn is held by whoever starts or stops the server: one at a time.
	turn chan struct{}
	// ctx ends a start that is under way when the driver is closed.
	ctx    context.Context
	cancel context.CancelFunc
	// watches are the goroutines that wait for the end of a run.
	watches sync.WaitGroup
	// beginning is held while a run begins, which opens routes and touches files: mu is not, as requests wait for it.
	beginning sync.Mutex

	mu       sync.Mutex // guards what follows; now, upstream and speaker change only under beginning
	closed   bool
	now      *run              // the latest run; nil: none yet
	upstream string            // where that listens
	speaker  lifecycle.Driver  // the routes', for upstream
	listed   []lifecycle.Model // by the latest server that has told its catalog; nil: none has
}

// Driver is a Supervisor that follows jobs and tells the models of its server. It names all that a driver here can do: what wraps one in
// a struct can do no more than that.
type Driver interface {
	lifecycle.Supervisor
	lifecycle.Jobs
	lifecycle.Cataloguer
}

// New makes the driver of a server that means starts and stops. In between it
// is spoken to by routes, a provisioned lifecycle such as http, wherever it
// listens. New starts nothing and asks nobody.
func New(means Means, routes lifecycle.Guest, deps lifecycle.Deps) (Driver, error) {
	d := &driver{means: means, guest: routes, deps: deps.WithDefaults(), turn: make(chan struct{}, 1)}
	// Traits do not depend on the address, which may be known only once it has started.
	sample, err := d.open(cmp.Or(deps.Upstream, "localhost:0"))
	if err != nil {
		return nil, err
	}
	d.routes = sample.Traits()
	if err := sample.Close(); err != nil {
		return nil, err
	}
	if d.routes.Starts {
		return nil, d.wrap("server", errStarts)
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d, nil
}

// open makes a driver of the routes for a server that listens at address.
func (d *driver) open(address string) (lifecycle.Driver, error) {
	deps := d.deps
	deps.Upstream, deps.Died = address, nil
	return d.guest.Open(deps)
}

// restarter is a driver of routes that remembers something of a server which a new start makes untrue.
type restarter interface{ Restarted() }

func (d *driver) Traits() lifecycle.Traits {
	t := d.routes
	t.Starts, t.Load, t.Unload, t.Health, t.Residency = true, true, true, true, true
	return t
}

// Probe asks whether the server runs, and if so what its routes say. A server
// without a residency route is loaded while it runs, unless it was unloaded by its route since.
func (d *driver) Probe(ctx context.Context) lifecycle.Report {
	report := lifecycle.Report{Resident: -1}
	r, err := d.look(ctx)
	if err != nil {
		report.Outcome, report.Detail = lifecycle.Wrong, err.Error()
		if ctx.Err() != nil {
			report.Outcome = lifecycle.TimedOut
		}
		return report
	}
	if r == nil {
		report.Outcome, report.Loaded, report.Detail = lifecycle.Answered, lifecycle.No, "it does not run"
		report.Stopped = true
		if d.routes.Models {
			report.Models = []lifecycle.Model{}
		}
		return report
	}
	report = r.routes.Probe(ctx)
	if !d.routes.Residency && report.Outcome == lifecycle.Answered {
		report.Loaded = lifecycle.TriOf(!d.isUnloaded(r))
	}
	return report
}

// look asks whether the server runs: nil if it does not.
func (d *driver) look(ctx context.Context) (*run, error) {
	running, err := d.means.Running(ctx)
	if err != nil {
		return nil, err
	}
	if !running {
		d.found()
		return nil, nil
	}
	return d.current(false)
}

// Unload takes the mildest means that does it: the server's own route, else a
// stop. Of one model of several only its route is asked, as others may be loaded.
func (d *driver) Unload(ctx context.Context, t lifecycle.Target) (bool, error) {
	r, err := d.look(ctx)
	if err != nil {
		return false, d.wrap("unload", err)
	}
	switch {
	case t.Model != "" && r == nil:
		return true, nil
	case t.Model != "":
		return r.routes.Unload(ctx, t)
	case r != nil && d.routes.Unload:
		confirmed, err := r.routes.Unload(ctx, t)
		if err == nil {
			d.setUnloaded(r, true)
			return confirmed, nil
		}
		if errors.Is(ctx.Err(), context.Canceled) {
			return false, err
		}
		d.deps.Logger.Warn("its unload route failed: the server is stopped instead", zap.Error(err))
	}
	// Also if it does not run: something that it has started may be left.
	if err := d.stop(ctx); err != nil {
		return false, d.wrap("unload", err)
	}
	return true, nil
}

// Busy asks the server whether it works. One that does not run does not.
func (d *driver) Busy(ctx context.Context, t lifecycle.Target) (bool, error) {
	r, err := d.look(ctx)
	if err != nil {
		return false, d.wrap("busy", err)
	}
	if r == nil {
		return false, nil
	}
	return r.routes.Busy(ctx, t)
}

// Catalog asks the server, while it runs, which models it could load.
func (d *driver) Catalog(ctx context.Context) ([]lifecycle.Model, error) {
	r, err := d.look(ctx)
	switch {
	case err != nil:
		return nil, d.wrap("catalog", err)
	case r == nil:
		d.mu.Lock()
		defer d.mu.Unlock()
		return slices.Clone(d.listed), d.wrap("catalog", errors.New("it does not run"))
	}
	return d.ask(ctx, r)
}

// ask asks a running server for its catalog, and remembers the answer: the server may be stopped when it is asked for again.
func (d *driver) ask(ctx context.Context, r *run) ([]lifecycle.Model, error) {
	c, ok := r.routes.(lifecycle.Cataloguer)
	if !ok {
		return nil, d.wrap("catalog", errors.New("its lifecycle has no catalog"))
	}
	models, err := c.Catalog(ctx)
	if err == nil {
		d.mu.Lock()
		d.listed = slices.Clone(models)
		d.mu.Unlock()
	}
	return models, err
}

// Elsewhere reports whether a model of this name may be served though the catalog does not list it.
func (d *driver) Elsewhere(name string) bool {
	d.mu.Lock()
	speaker := d.speaker
	d.mu.Unlock()
	c, ok := speaker.(lifecycle.Cataloguer)
	return ok && c.Elsewhere(name)
}

// Track follows a job that the server's answer names.
func (d *driver) Track(body []byte) bool {
	d.mu.Lock()
	speaker := d.speaker
	d.mu.Unlock()
	jobs, ok := speaker.(lifecycle.Jobs)
	return ok && jobs.Track(body)
}

// Close stops what the means has started.
func (d *driver) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	if d.now != nil {
		d.now.told = true
	}
	d.mu.Unlock()
	d.cancel()
	d.turn <- struct{}{} // who has it ends soon
	err := d.means.Close()
	d.found()
	<-d.turn
	d.watches.Wait()

	d.mu.Lock()
	speaker := d.speaker
	d.mu.Unlock()
	if speaker != nil {
		err = errors.Join(err, speaker.Close())
	}
	if err != nil {
		return d.wrap("close", err)
	}
	return nil
}

func (d *driver) Upstream() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return cmp.Or(d.deps.Upstream, d.upstream)
}

func (d *driver) Running() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.now != nil && !d.now.over
}

func (d *driver) Owns(pid int) bool { return d.means.Owns(pid) }

func (d *driver) State() lifecycle.State {
	s := d.means.State()
	s.Address = cmp.Or(s.Address, d.Upstream())
	return s
}

// wrap says whose and which action failed.
func (d *driver) wrap(action string, err error) error {
	return fmt.Errorf("consumer %s: %s: %w", d.deps.Consumer, action, err)
}
