package httplife

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// The pace of polling: quick at first, since a small model is there at once.
const (
	firstPoll = 20 * time.Millisecond
	lastPoll  = 250 * time.Millisecond
)

// driver speaks to one server. It has no goroutine; every wait is bounded by
// the caller's context. Of the server it knows what it can't be asked for.
type driver struct {
	plan   *plan
	deps   lifecycle.Deps
	client *http.Client
	// tells is the route that tells residency, nil if none does.
	tells  *route
	jobs   *jobs     // that its answers named and that are not over
	noBusy sync.Once // it was said that the busy route is not there
	last   *memory   // what it was asked last, if that is to be remembered
}

func newDriver(p *plan, deps lifecycle.Deps) *driver {
	d := &driver{plan: p, deps: deps, client: newClient(), tells: p.residency, jobs: new(jobs), last: new(memory)}
	if d.tells == nil && p.health != nil && p.health.tells() {
		d.tells = p.health
	}
	if p.remember {
		d.last.open(deps)
	}
	return d
}

// Inherit takes over the jobs that the driver before it followed, and what it remembered: both go on, what it still does meanwhile included.
func (d *driver) Inherit(before lifecycle.Driver) {
	b, ok := before.(*driver)
	if !ok || b.deps.Upstream != d.deps.Upstream || b.deps.Consumer != d.deps.Consumer {
		return
	}
	d.jobs = b.jobs
	if d.plan.remember && b.plan.remember {
		d.last = b.last
	}
}

// whole reports whether a route can be called for the server as a whole.
func (p *plan) whole(r *route) bool { return !r.named || r.forEach != nil || p.model != "" }

// item is what stands for {model} in a request for a target.
func (p *plan) item(t lifecycle.Target) string {
	if t.Model == "" {
		return p.model
	}
	return t.Model
}

// tells reports whether a route's answer tells residency.
func (r *route) tells() bool { return r.loaded != nil || r.names != nil }

// tellsFull reports whether a route's answer tells how much of each model is on the GPU.
func (r *route) tellsFull() bool { return r != nil && r.fulls != nil }

// String names the driver and keeps its headers to itself.
func (d *driver) String() string { return "lifecycle http of " + d.deps.Consumer }

// GoString is String, so that no verb of fmt shows a secret.
func (d *driver) GoString() string { return d.String() }

func (d *driver) Traits() lifecycle.Traits {
	load, unload := d.plan.load, d.plan.unload
	return lifecycle.Traits{
		Load:        load != nil && d.plan.whole(load),
		Unload:      unload != nil && d.plan.whole(unload),
		Health:      d.deps.Upstream != "",
		Residency:   d.tells != nil || d.plan.remember,
		Busy:        d.plan.busy != nil || d.plan.jobs != nil,
		Models:      d.tells != nil && d.tells.names != nil,
		LoadModel:   load != nil && load.named,
		UnloadModel: unload != nil && (unload.named || unload.forEach != nil),
		Catalog:     d.plan.catalog != nil,
		Names:       d.plan.modelNames,

		FullGPU:      d.plan.fullGPU && d.plan.whole(load),
		FullGPUModel: d.plan.fullGPU && load.named,
	}
}

func (d *driver) Close() error {
	d.client.CloseIdleConnections()
	return nil
}

// Probe asks for health, then for residency, both within the probe's time-out
// unless their routes have their own. Health decides the outcome; a residency
// route that fails leaves residency unknown, unless nothing listens any more.
func (d *driver) Probe(ctx context.Context) lifecycle.Report {
	report, _ := d.probe(ctx)
	return report
}

// probe is Probe. It also returns the models that are still being loaded.
func (d *driver) probe(ctx context.Context) (report lifecycle.Report, loading []string) {
	report = lifecycle.Report{Resident: -1}
	if d.deps.Upstream == "" {
		report.Detail = "the consumer has no upstream: nothing is probed"
		return report, nil
	}
	end := time.Now().Add(d.deps.Limits.Probe())
	said, err := d.health(ctx, end)
	if err != nil {
		report.Outcome, report.Detail = outcomeOf(err), err.Error()
		if report.Outcome == lifecycle.Refused || report.Outcome == lifecycle.Unreachable { // of a container that was stopped the name is gone, too
			d.last.forget() // it starts loaded
		}
		return report, nil
	}
	report.Loaded, report.Resident, report.Models, report.Detail = said.loaded, said.resident, said.models, said.detail
	if d.plan.remember && d.tells == nil {
		report.Loaded = lifecycle.TriOf(!d.last.unloaded())
	}
	if d.tells == nil || d.tells == d.plan.health {
		return report, said.loading
	}
	now, err := d.residency(ctx, end)
	if err != nil {
		report.Loaded, report.Detail = lifecycle.Unknown, err.Error()
		if outcomeOf(err) == lifecycle.Refused {
			report.Outcome = lifecycle.Refused
		}
		return report, nil
	}
	report.Loaded, report.Models, report.Detail = now.loaded, now.models, now.detail
	if d.tells.resident != nil || d.tells.sizes != nil {
		report.Resident = now.resident
	}
	return report, now.loading
}

// said is what an answer says about residency.
type said struct {
	loaded   lifecycle.Tri
	resident gpu.Bytes // -1: it does not say
	models   []lifecycle.Model
	loading  []string // models that are still being loaded
	detail   string   // what it lacks
}

// of is what an answer says of a target.
func (d *driver) of(s said, t lifecycle.Target) lifecycle.Tri {
	switch {
	case t.Model == "":
		return s.loaded
	case s.models == nil:
		return lifecycle.Unknown
	}
	return lifecycle.TriOf(slices.ContainsFunc(s.models, func(m lifecycle.Model) bool { return d.same(m, t) }))
}

// same reports whether a model that the server lists is the target.
func (d *driver) same(m lifecycle.Model, t lifecycle.Target) bool {
	return d.plan.modelNames.Same(m.Name, t.Model) || t.Digest != "" && m.Digest == t.Digest
}

func (d *driver) health(ctx context.Context, end time.Time) (said, error) {
	r := d.plan.health
	if r == nil {
		return said{resident: -1}, d.connect(ctx, end)
	}
	if r.reads == readJSON {
		return d.questioned(ctx, r, end)
	}
	_, err := d.exchange(ctx, r, nil, limit(r, end))
	return said{resident: -1}, err
}

func (d *driver) residency(ctx context.Context, end time.Time) (said, error) {
	return d.questioned(ctx, d.tells, end)
}

// questioned sends a route's request and asks its answer for residency. An
// accepted answer that does not say is no error: the server is well.
func (d *driver) questioned(ctx context.Context, r *route, end time.Time) (said, error) {
	out := said{resident: -1}
	body, err := d.exchange(ctx, r, nil, limit(r, end))
	var f *failure
	if errors.As(err, &f) && slices.Contains(r.unloadedOn, f.status) {
		out.loaded, out.models = lifecycle.No, []lifecycle.Model{}
		return out, nil
	}
	if err != nil {
		return out, err
	}
	answer, err := parseAnswer(body)
	if err != nil {
		out.detail = fmt.Sprintf("%s: %v", r.name, err)
		return out, nil
	}
	if r.names != nil {
		if out.models, err = r.listModels(ctx, answer, maxModels); err != nil {
			out.detail = fmt.Sprintf("%s: %v", r.name, err)
		} else {
			out.loaded, out.resident = lifecycle.TriOf(len(out.models) > 0), sumOf(out.models)
			out.loading = r.listLoading(ctx, answer)
		}
	}
	if r.loaded != nil {
		if value, err := r.loaded.find(ctx, answer); err != nil {
			out.detail = fmt.Sprintf("%s: %v", r.name, err)
		} else {
			out.loaded = lifecycle.TriOf(truth(value))
		}
	}
	if r.resident != nil {
		if value, err := r.resident.find(ctx, answer); err == nil {
			out.resident = amount(value, r.unit)
		}
		// The sum over a list that is missing is 0, which then means nothing.
		if out.resident == 0 && r.tells() && out.loaded == lifecycle.Unknown {
			out.resident = -1
		}
	}
	return out, nil
}

// listModels reads the models that an answer lists, at most so many. A list that is missing is an error: it does not say.
func (r *route) listModels(ctx context.Context, answer any, most int) ([]lifecycle.Model, error) {
	value, err := r.names.findList(ctx, answer)
	if err != nil {
		return nil, err
	}
	names, err := list(value)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", r.names.expression, err)
	}
	sizes, fulls, digests := r.sizes.beside(ctx, answer, len(names)), r.fulls.beside(ctx, answer, len(names)), r.digests.beside(ctx, answer, len(names))
	models := make([]lifecycle.Model, 0, min(len(names), most))
	for i, name := range names[:min(len(names), most)] {
		m := lifecycle.Model{Name: plain(name), Resident: -1, Size: -1}
		if sizes != nil {
			m.Resident = amount(sizes[i], r.sizeUnit)
		}
		if fulls != nil {
			m.Size = amount(fulls[i], r.fullUnit)
		}
		if digests != nil {
			m.Digest, _ = digests[i].(string)
		}
		if m.Name != "" {
			models = append(models, m)
		}
	}
	return models, nil
}

// maxModels bounds how many models of one server are known to be loaded.
const maxModels = 256

// sumOf is how much all of them hold; -1 if one does not say.
func sumOf(models []lifecycle.Model) (sum gpu.Bytes) {
	for _, m := range models {
		if m.Resident < 0 {
			return -1
		}
		sum += m.Resident
	}
	if len(models) == 0 {
		return -1
	}
	return sum
}

// connect is the health probe of a server without a health route.
func (d *driver) connect(ctx context.Context, end time.Time) error {
	ctx, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	begun := time.Now()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", d.deps.Upstream)
	if err != nil {
		return d.broken(ctx, "connecting to "+d.deps.Upstream, begun, err)
	}
	_ = conn.Close() // it has told what it had to
	return nil
}

// limit is how long a probe's request may take: the route's own time-out, or
// what is left until end.
func limit(r *route, end time.Time) time.Duration {
	if r.timeout > 0 {
		return r.timeout
	}
	return max(time.Until(end), time.Millisecond)
}

// Load calls the load route and waits until the server is healthy and, where
// it can tell, loaded. Without a load route it waits for health alone, as
// nothing would make the server load.
func (d *driver) Load(ctx context.Context, t lifecycle.Target) error {
	r := d.plan.load
	if r != nil && (t.Model == "" && !d.plan.whole(r) || t.Model != "" && !r.named) {
		r = nil // it is for what is not meant
	}
	called := r != nil && !(d.plan.remember && !d.last.unloaded())
	if called {
		if err := d.callLoad(ctx, r, t); err != nil {
			return d.wrap("load", err)
		}
	}
	needsLoaded := r != nil && d.tells != nil && (t.Model == "" || d.tells.names != nil)
	var last lifecycle.Report
	var nothing error
	seen := false
	came := outcome{waits: d.plan.loadWaits, model: t.Model != "", still: t.Still}
	err := poll(ctx, func() bool {
		report, loading := d.probe(ctx)
		if ctx.Err() != nil && seen {
			return false // cut off by the end of the wait: the one before tells more
		}
		if t.Model != "" {
			report.Loaded = d.of(said{models: report.Models}, t)
		}
		last, seen = report, true
		if last.Outcome == lifecycle.Answered && (!needsLoaded || last.Loaded == lifecycle.Yes) {
			return true
		}
		absent := called && last.Outcome == lifecycle.Answered && last.Loaded == lifecycle.No && !d.lists(loading, t.Model)
		if absent && came.since.IsZero() && t.Model != "" && t.Digest == "" { // it may be listed by another of its names
			t.Digest = d.digest(ctx, t.Model)
		}
		if came.toNothing(time.Now(), absent, last.Models) {
			nothing = d.cameToNothing(t, last.Models)
		}
		return nothing != nil
	})
	switch {
	case nothing != nil:
		return d.wrap("load", nothing)
	case err != nil:
		return d.wrap("load", notReady(last, err))
	}
	if needsLoaded && d.plan.fullGPU {
		return d.wholly(ctx, t, last.Models)
	}
	return nil
}

// callLoad calls the load route for a target.
func (d *driver) callLoad(ctx context.Context, r *route, t lifecycle.Target) error {
	body, err := d.call(ctx, r, d.plan.item(t))
	if saysOutOfMemory(body) {
		text := fmt.Sprintf("%s answered: %s", r.name, d.plan.secrets.excerpt(body))
		if err != nil {
			text = err.Error()
		}
		return &failure{outcome: lifecycle.Wrong, text: text, cause: lifecycle.ErrOutOfMemory}
	}
	var f *failure
	if errors.As(err, &f) && f.status == http.StatusNotFound && t.Model != "" {
		f.cause = lifecycle.ErrNoModel
	}
	if err != nil {
		return err
	}
	d.last.forget()
	d.deps.Logger.Debug("load route answered", zap.String("consumer", d.deps.Consumer))
	return nil
}

// wholly unloads again what has come only partly onto the GPU, which is an error.
func (d *driver) wholly(ctx context.Context, t lifecycle.Target, loaded []lifecycle.Model) error {
	for _, m := range loaded {
		if !m.Partly() || t.Model != "" && !d.same(m, t) {
			continue
		}
		text := fmt.Sprintf("only %s of the %s of %s came onto the GPU, and require_full_gpu is set", m.Resident, m.Size, m.Name)
		if _, err := d.Unload(ctx, t); err != nil {
			text += "; it is loaded still: " + err.Error()
		}
		return d.wrap("load", &failure{outcome: lifecycle.Wrong, text: text, cause: lifecycle.ErrPartly})
	}
	return nil
}

// call sends a load or unload route's request, and looks at what its answer says of its success.
func (d *driver) call(ctx context.Context, r *route, item any) ([]byte, error) {
	body, err := d.exchange(ctx, r, item, r.timeout)
	if err != nil || r.success == nil {
		return body, err
	}
	answer, err := parseAnswer(body)
	if err == nil {
		var value any
		if value, err = r.success.find(ctx, answer); err == nil && !truth(value) {
			err = fmt.Errorf("the answer says that it failed (%s is not true)", r.success.expression)
		}
	}
	if err != nil {
		return body, &failure{outcome: lifecycle.Wrong, text: fmt.Sprintf("%s: %v: %s", r.name, err, d.plan.secrets.excerpt(body))}
	}
	return body, nil
}

// notReady says what was lacking when the wait for a load ended.
func notReady(last lifecycle.Report, ended error) error {
	text := "the server does not say that it is loaded"
	switch {
	case last.Outcome != lifecycle.Answered:
		text = "the server did not get ready"
	case last.Loaded == lifecycle.No:
		text = "the server answers but says that it is not loaded"
	}
	if last.Detail != "" {
		text += ": " + last.Detail
	}
	if last.Outcome == lifecycle.Refused {
		return fmt.Errorf("%s (%w; %w)", text, lifecycle.ErrRefused, ended)
	}
	return fmt.Errorf("%s (%w)", text, ended)
}

// Busy asks the busy route once, and for the jobs that answers have named. A
// server that does not have the route, as llama-server without --metrics, can't tell: then what the broker counts must do.
func (d *driver) Busy(ctx context.Context, t lifecycle.Target) (bool, error) {
	busy, err := d.busy(ctx, t)
	var f *failure
	if errors.As(err, &f) && slices.Contains([]int{http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented}, f.status) {
		d.noBusy.Do(func() {
			d.deps.Logger.Warn("the server does not have its busy route: work that came past the broker is not seen", zap.Error(err))
		})
		return false, nil
	}
	return busy, err
}

func (d *driver) busy(ctx context.Context, t lifecycle.Target) (bool, error) {
	r := d.plan.busy
	if r == nil && d.plan.jobs == nil {
		return false, d.wrap("busy", errors.New("no busy route is configured"))
	}
	if d.plan.jobs != nil {
		if busy, err := d.working(ctx); busy || err != nil || r == nil {
			return busy, err
		}
	}
	if len(r.metrics) > 0 {
		return d.measured(ctx, r, t)
	}
	answer, err := d.ask(ctx, r, d.plan.item(t), limit(r, time.Now().Add(d.deps.Limits.Probe())))
	if err != nil {
		return false, d.wrap("busy", err)
	}
	value, err := r.busy.find(ctx, answer)
	if err != nil {
		return false, d.wrap("busy", fmt.Errorf("%s: %w", r.name, err))
	}
	return truth(value), nil
}

// wrap says whose and which action failed.
func (d *driver) wrap(action string, err error) error {
	return fmt.Errorf("consumer %s: %s: %w", d.deps.Consumer, action, err)
}

// poll calls try until it is true, at once and then at growing distances. It
// returns the context's error if that ends first.
func poll(ctx context.Context, try func() bool) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for wait := firstPoll; ; wait = min(2*wait, lastPoll) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		}
		if try() {
			return nil
		}
		timer.Reset(wait)
	}
}
