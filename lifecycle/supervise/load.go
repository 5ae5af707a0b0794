package supervise

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	httplife "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
)

// The pace at which a started server is waited for. A look at its port costs
// next to nothing, and how late it is seen is what a cold start costs beyond the server's own.
const (
	firstKnock = 2 * time.Millisecond
	lastKnock  = 20 * time.Millisecond
	knockQuick = time.Second // after which the distance grows
	dialTime   = time.Second
	firstPoll  = 20 * time.Millisecond
	lastPoll   = 250 * time.Millisecond
)

var errEnded = errors.New("the server has ended")

// Load starts the server unless it runs, and loads what is meant. A server that
// fails to get ready is stopped, since it would keep memory, unless it serves others.
func (d *driver) Load(ctx context.Context, t lifecycle.Target) error {
	r, err := d.start(ctx, t)
	if err != nil {
		return d.wrap("load", err)
	}
	err = d.ready(ctx, r, t)
	d.mu.Lock()
	r.loads--
	if err == nil {
		r.ready, r.unloaded = true, false
	}
	keep := err == nil || t.Model != "" && (r.foreign || r.ready || r.loads > 0)
	d.mu.Unlock()
	if keep {
		return err
	}
	return join(err, d.giveUp(ctx, r))
}

// start starts the server unless it runs. The run's loads count the caller.
func (d *driver) start(ctx context.Context, t lifecycle.Target) (*run, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.ctx, cancel)()
	select {
	case d.turn <- struct{}{}:
		defer func() { <-d.turn }()
	case <-ctx.Done():
		return nil, d.given(ctx, "it waited for a start or stop that is under way")
	}
	d.settle()
	if d.ctx.Err() != nil {
		return nil, ErrClosed
	}
	running, err := d.means.Running(ctx)
	if err != nil {
		return nil, err
	}
	if !running {
		d.noteGone(ctx)
	}
	if err := d.means.Start(ctx, t); err != nil {
		if !running { // half a start may come true later
			err = join(err, d.stopped(ctx, nil))
		}
		return nil, err
	}
	r, err := d.started(!running)
	if err != nil && !running {
		err = join(err, d.stopped(ctx, nil))
	}
	return r, err
}

// started is the run of the server that Start has returned. fresh: it did not run before.
func (d *driver) started(fresh bool) (*run, error) {
	r, err := d.current(fresh)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, ErrClosed
	}
	if fresh { // a probe may have seen it first
		r.foreign = false
	}
	r.loads++
	return r, nil
}

// ready waits until the server is ready and has loaded what is meant.
func (d *driver) ready(ctx context.Context, r *run, t lifecycle.Target) error {
	within, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.ctx, cancel)()
	err := d.byRoutes(within, r, t)
	if r.ctx.Err() == nil {
		return err
	}
	// Also if somebody has answered: that was another server, or its last word.
	why := d.means.Why()
	text := fmt.Errorf("%w before it was ready: %s", errEnded, why)
	if httplife.SaysOutOfMemory(why) || httplife.SaysOutOfMemory(strings.Join(d.means.State().Output, "\n")) {
		text = fmt.Errorf("%w (%w)", text, lifecycle.ErrOutOfMemory)
	}
	return d.wrap("load", text)
}

func (d *driver) byRoutes(ctx context.Context, r *run, t lifecycle.Target) error {
	d.mu.Lock()
	fresh := !r.ready
	d.mu.Unlock()
	if fresh {
		if err := d.listening(ctx); err != nil {
			return d.wrap("load", err)
		}
	}
	byRoute := d.routes.Load
	if t.Model != "" {
		byRoute = d.routes.LoadModel
	}
	if fresh && byRoute { // a load route is no use before the server is well, and there may be no need of it
		loaded, err := d.healthy(ctx, r, t)
		if err != nil {
			return d.wrap("load", err)
		}
		if d.routes.Catalog { // should the load fail, the server is stopped, and can't be asked
			_, _ = d.ask(ctx, r)
		}
		if loaded {
			return nil
		}
	}
	return r.routes.Load(ctx, t)
}

// listening waits until the server's port takes a connection.
func (d *driver) listening(ctx context.Context) error {
	address := d.Upstream()
	began := time.Now()
	wait := firstKnock
	for {
		try, cancel := context.WithTimeout(ctx, dialTime)
		conn, err := new(net.Dialer).DialContext(try, "tcp", address)
		cancel()
		if err == nil {
			return conn.Close()
		}
		if time.Since(began) > knockQuick {
			wait = min(wait*3/2, lastKnock)
		}
		if !pause(ctx, wait) {
			return d.given(ctx, fmt.Sprintf("it was started, but nothing listens at %s (%v)", address, err))
		}
	}
}

// healthy waits until the server is well, and reports whether it has loaded what is meant by itself.
func (d *driver) healthy(ctx context.Context, r *run, t lifecycle.Target) (loaded bool, err error) {
	for wait := firstPoll; ; wait = min(2*wait, lastPoll) {
		report := r.routes.Probe(ctx)
		if report.Outcome == lifecycle.Answered {
			return d.holds(report, t), nil
		}
		if !pause(ctx, wait) {
			return false, d.given(ctx, "it was started, but did not get ready: "+report.Detail)
		}
	}
}

// holds reports whether a report shows that what is meant is loaded.
func (d *driver) holds(report lifecycle.Report, t lifecycle.Target) bool {
	if t.Model == "" {
		return d.routes.Residency && report.Loaded == lifecycle.Yes
	}
	for _, m := range report.Models {
		if d.routes.Names.Same(m.Name, t.Model) || t.Digest != "" && m.Digest == t.Digest {
			return true
		}
	}
	return false
}

// giveUp stops the server after a load that failed, unless there is another by now or others load on it.
func (d *driver) giveUp(ctx context.Context, r *run) error {
	d.turn <- struct{}{} // each turn is bounded
	defer func() { <-d.turn }()
	return d.stopped(ctx, r)
}

// stopped stops the server after a failure, also if ctx has ended. The caller has the turn.
func (d *driver) stopped(ctx context.Context, only *run) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.deps.Limits.Unload())
	defer cancel()
	err := d.stopNow(ctx, only)
	if err != nil {
		d.deps.Logger.Error("the server failed to get ready, and it can't be stopped: it may keep GPU memory", zap.Error(err))
		return fmt.Errorf("and it can't be stopped: %w", err)
	}
	return nil
}

// given says what was waited for when ctx ended.
func (d *driver) given(ctx context.Context, what string) error {
	if d.ctx.Err() != nil {
		return ErrClosed
	}
	return fmt.Errorf("%s (%w)", what, ctx.Err())
}

// join is err and what followed from it, in one line.
func join(err, then error) error {
	if then == nil {
		return err
	}
	return fmt.Errorf("%w; %w", err, then)
}

// pause waits; false: ctx ended before.
func pause(ctx context.Context, wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
