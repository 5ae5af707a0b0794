package gpubroker

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func init() {
	caddy.RegisterModule(Handler{})
	httpcaddyfile.RegisterHandlerDirective("gpu_broker", parseHandler)
	httpcaddyfile.RegisterDirectiveOrder("gpu_broker", httpcaddyfile.Before, "reverse_proxy")
}

// Handler gives each request its place on the GPU before it passes it on, and
// takes the place back when the answer is complete.
//
// It sets these placeholders:
//
// Placeholder | Description
// ------------|------------
// `{http.gpu_broker.consumer}` | the model server that serves the request
// `{http.gpu_broker.upstream}` | its address, `host:port`
// `{http.gpu_broker.wait_ms}` | how long the request waited, in milliseconds
// `{http.gpu_broker.reason}` | why it was refused: a code such as `queue_full`
type Handler struct {
	gpucaddyfile.Route

	pool         *pooled
	app          *App
	fixed        *target            // serves all requests; nil: byModel tells which
	byModel      *byModel           // finds the consumer, or the model, of each request; nil: there is nothing to be found
	sources      *routing.Sources   // where the requests of a consumer without models name one that is sent as another; nil: it isn't looked for
	targets      map[string]*target // every consumer
	plan         *routing.Plan      // what to look for in bodies; nil: nothing
	priorityText string             // with placeholders; empty: it is the target's
	maxBody      int64
	headers      bool
}

// CaddyModule returns the Caddy module information.
func (Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.gpu_broker", New: func() caddy.Module { return new(Handler) }}
}

// Provision finds the consumer and the broker.
func (h *Handler) Provision(ctx caddy.Context) error {
	app, err := ctx.App("gpu_broker")
	if err != nil {
		return fmt.Errorf("getting the gpu_broker app: %w", err)
	}
	h.app = app.(*App)
	h.pool = h.app.pool
	err = h.check()
	if err == nil {
		err = h.provisionTargets()
	}
	if err != nil {
		return h.titled(err)
	}
	tell(ctx.Logger(), false, h.routeDoubts())
	if h.maxBody = int64(h.MaxBody); h.maxBody == 0 {
		h.maxBody = int64(h.app.MaxBody)
	}
	h.headers = h.app.HeadersOn() && h.Headers != config.Off
	if h.Headers == config.On {
		h.headers = true
	}
	return nil
}

// provisionTargets makes what is known of consumers, and how a request finds its own.
func (h *Handler) provisionTargets() (err error) {
	h.targets = map[string]*target{}
	for _, c := range h.app.Consumers {
		if h.targets[c.Name], err = h.newTarget(c); err != nil {
			return err
		}
	}
	if _, ok := h.Priority.Number(); !ok {
		h.priorityText = string(h.Priority)
	}
	var fields []string
	h.fixed = h.targets[h.Consumer]
	if only := h.app.consumer(h.Consumer); only == nil || only.HasModels() {
		if h.byModel, err = h.newByModel(only); err != nil {
			return err
		}
		fields = h.byModel.sources.Fields()
	}
	if h.byModel == nil && h.renames() {
		if h.StreamBody {
			return errors.New("stream_body passes bodies on unread, but send_as, or as of a fallback, must read them: leave one of them out")
		}
		if h.sources, err = routing.NewSources(modelFrom(h.app.consumer(h.Consumer))); err != nil {
			return err
		}
		fields = h.sources.Fields()
	}
	changed := h.changedFields()
	if h.ReadsBody() || len(fields) > 0 || len(changed) > 0 {
		h.plan, err = routing.NewPlan(fields, h.Metadata, h.TrustBody)
	}
	if err == nil && h.plan != nil {
		err = h.plan.Mark(changed)
	}
	if err == nil && h.plan != nil && h.folds() {
		h.plan.Fold()
	}
	return err
}

// renames reports whether a server that gets the requests of a route with one consumer, which has no models, is to know the model by another name.
func (h *Handler) renames() bool {
	t := h.fixed
	if t.sent.renames() || len(t.sent.fallbackAs) > 0 {
		return true
	}
	for _, to := range t.candidates {
		if h.targets[to].sent.renames() {
			return true
		}
	}
	return false
}

// changedFields are the fields of JSON that models of the route change.
func (h *Handler) changedFields() (fields []string) {
	if h.byModel == nil {
		return nil
	}
	for name, t := range h.targets {
		if h.Consumer == "" || name == h.Consumer {
			fields = append(fields, t.sent.fields()...)
		}
	}
	slices.Sort(fields)
	return slices.Compact(fields)
}

// folds reports whether a server that may get the route's requests takes fields of JSON in any case.
func (h *Handler) folds() bool {
	if h.fixed != nil {
		return h.fixed.foldKeys
	}
	for _, t := range h.targets {
		if t.foldKeys {
			return true
		}
	}
	return false
}

func (a *App) names() []string {
	var out []string
	for _, c := range a.Consumers {
		if c != nil {
			out = append(out, c.Name)
		}
	}
	return out
}

// ServeHTTP admits the request, calls next, and releases its place: when next
// has returned or panicked, which is after the last byte of the answer.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	t := h.fixed
	if t == nil {
		return h.serveByModel(w, r, next, repl)
	}
	repl.Map(t.placeholders)
	need := t.Needs(r)
	if need.Unlisted() {
		need = h.unlistedAsks(t, r, need)
	}
	switch {
	case (need == config.NeedsGPU || need == config.NeedsTurn) && h.byModel != nil:
		return h.serveByModel(w, r, next, repl)
	case need == config.NeedsNothing && !t.starts && !isPreflight(r):
		return h.blameSite(w, r, repl, t, next.ServeHTTP(w, r))
	}
	j := jobs.Get().(*job)
	defer j.done()
	j.handler, j.repl, j.target = h, repl, t
	j.ResponseWriter = w // a body that is read ahead may have to be cut
	switch need {
	case config.NeedsGPU:
		return j.work(w, r, next)
	case config.NeedsTurn:
		return j.serveTurn(w, r, next)
	default:
		return j.pass(w, r, next, need)
	}
}

// job is one request on its way. It is the response writer of next, so that it knows the status of the answer.
type job struct {
	caddyhttp.ResponseWriterWrapper
	handler    *Handler
	repl       *caddy.Replacer
	target     *target // of the consumer that serves it
	model      string  // … and which of its models, if it has several
	asked      string  // the name by which its client asked for another name's model or for a consumer with fallbacks; empty: it goes as it is
	askedOf    string  // the consumer that this names
	translated bool    // what its server gets is settled
	turn       bool    // no list names it: at a consumer with models it loads nothing
	submitted  time.Time
	body       *routing.Body
	unread     bool           // its body did not come to its end
	facts      *routing.Facts // what the body says; nil: it was not looked into
	read       routing.Facts  // what facts points to
	status     int
	served     bool // next has answered it whole
	lease      broker.Lease
	leased     bool
	entry      *logEntry // of the request log; nil: it has none, or it was made
	said       []byte    // the beginning of the answer of one whose work outlives it
	later      bool      // its work may outlive its answer
	heart      *heart    // it waits, or has waited, with heartbeats; then this is the response writer

	// Of the list of those that run.
	next, prev *job
	progress               // of its client, for the watcher
	detached   *detached   // nil: it ends when its client leaves
	abort      func()      // ends its context; nil: the end of its connection does
	isCut      atomic.Bool // nothing more may be written
}

var jobs = sync.Pool{New: func() any { return new(job) }}

func (j *job) done() {
	if j.leased { // something panicked between its admission and its run
		j.lease.Release(scheduler.NoAnswer)
	}
	if j.heart != nil {
		j.heart.close(j.target.name)
	}
	if j.entry != nil {
		j.handler.pool.requests.add(j.ended())
	}
	switch {
	case j.body == nil:
	case j.served:
		j.body.Recycle()
	default: // an error route of the site may pass it elsewhere
		j.body.Close()
	}
	*j = job{} // nobody else has it: it is on no list any more
	jobs.Put(j)
}

// WriteHeader notes the status of the answer.
func (j *job) WriteHeader(status int) {
	if j.status == 0 && status >= 200 || status == http.StatusSwitchingProtocols {
		j.begin(status)
	}
	j.ResponseWriter.WriteHeader(status)
}

// begin notes that the answer begins.
func (j *job) begin(status int) {
	j.status = status
	if j.detached != nil {
		j.detached.answered()
	}
}

// Write notes that there is an answer.
func (j *job) Write(p []byte) (int, error) {
	if j.status == 0 {
		j.begin(http.StatusOK)
	}
	if j.isCut.Load() {
		return 0, errCut
	}
	j.writes.Add(1)
	defer j.writes.Add(1)
	if j.tunnel.Load() {
		j.moved.Add(int64(len(p)))
	}
	if j.later {
		j.said = append(j.said, p[:min(len(p), lifecycle.MaxAnswer-len(j.said))]...)
	}
	return j.ResponseWriter.Write(p)
}

// ReadFrom notes that there is an answer, as Write does.
func (j *job) ReadFrom(r io.Reader) (int64, error) {
	if j.status == 0 {
		j.begin(http.StatusOK)
	}
	if j.isCut.Load() {
		return 0, errCut
	}
	return io.Copy(struct{ io.Writer }{j}, r) // Write looks at it
}

// FlushError sends what was written, which waits for the client as a write does.
func (j *job) FlushError() error {
	if j.isCut.Load() {
		return errCut
	}
	j.writes.Add(1)
	defer j.writes.Add(1)
	return http.NewResponseController(j.ResponseWriter).Flush()
}

// Hijack hands the connection over. What it carries counts as the tunnel's.
func (j *job) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rest, err := http.NewResponseController(j.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	j.tunnel.Store(true)
	return tunnelled{conn, &j.moved}, rest, nil
}

func (j *job) serve(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	j.ResponseWriterWrapper.ResponseWriter = w
	for attempt := 1; ; attempt++ {
		if err := j.acquire(r); err != nil {
			return j.fail(j.ResponseWriter, r, err)
		}
		j.tell(j.ResponseWriter, r)
		err := j.run(r, next)
		switch {
		case err == nil:
			j.served = true
			return nil
		case j.status != 0: // an answer has begun: nothing can be added to it
			if j.heart != nil && j.heart.stop() {
				return nil // an event tells of it
			}
			return err
		case refusedDial(err) && j.misrouted() != nil:
			return j.fail(j.ResponseWriter, r, j.misrouted())
		case refusedDial(err) && attempt == 1 && r.Context().Err() == nil:
			continue // nothing was sent: its state is taken anew, and the job is admitted once more
		case refusedDial(err):
			return j.fail(j.ResponseWriter, r, unhealthy(j.target.name, err))
		default:
			return j.fail(j.ResponseWriter, r, err)
		}
	}
}

// acquire gets the place. Any body is read before the job is submitted: a slow upload must not hold the GPU, and only
// past a body does HTTP/1 tell that the client left.
func (j *job) acquire(r *http.Request) error {
	h := j.handler
	if err := h.app.waitRuled(r.Context(), h.pool.broker, j.target.name); err != nil {
		return err
	}
	switch {
	case j.body != nil:
		j.body.Rewind(r)
	case hasBody(r) && !h.StreamBody:
		if err := j.readAhead(r); err != nil {
			return err
		}
	}
	req := j.request(r)
	if h.Heartbeat > 0 {
		req.Waiting = func(place func() broker.Place) {
			j.servedBy(place().Consumer)
			j.beat(r, place)
		}
	}
	j.enters(req.Priority)
	lease, err := h.pool.broker.Acquire(r.Context(), req)
	if err != nil {
		return err
	}
	j.admitted(lease)
	j.translate(r, true)
	return nil
}

// admitted notes the place that the request has got.
func (j *job) admitted(lease broker.Lease) {
	j.lease, j.leased, j.submitted = lease, true, lease.Asked
	j.servedBy(lease.Consumer)
}

// hasBody says whether a request has a body that can be read ahead. That of a
// CONNECT is a tunnel, such as a websocket over HTTP/2: it has no end to read to.
func hasBody(r *http.Request) bool {
	return r.ContentLength != 0 && r.Body != nil && r.Body != http.NoBody && r.Method != http.MethodConnect
}

// readAhead reads the body, and looks into it where the route says so. A stop waits for a slow upload no longer than for those that run.
func (j *job) readAhead(r *http.Request) (err error) {
	h := j.handler
	if err := h.pool.broker.Ending(j.target.name); err != nil { // it would be read for nothing
		return err
	}
	if r.ContentLength > h.maxBody {
		return bodyError(r, fmt.Errorf("%w: %d bytes, at most %d are taken", routing.ErrTooLarge, r.ContentLength, h.maxBody))
	}
	if err := j.readBody(r); err != nil {
		return err
	}
	if fault := trailerFault(r); fault != nil {
		return fault
	}
	if h.plan != nil {
		return j.peek(r)
	}
	return nil
}

// readBody reads the body, unless it stops coming.
func (j *job) readBody(r *http.Request) (err error) {
	h := j.handler
	h.pool.running.add(j, uploading)
	defer func() {
		h.pool.running.remove(j)
		j.unread = j.body == nil
		if j.stalled != "" { // whatever the reader made of it
			err = uploadStalled(time.Duration(*h.app.UploadIdle))
		}
	}()
	j.body, err = h.pool.buffers.Read(r, routing.Limits{Body: h.maxBody, Total: int64(h.app.MaxBuffered), Client: sender(r), Moved: &j.moved})
	if err != nil {
		return bodyError(r, err)
	}
	return nil
}

// sender is whose share of max_buffered a body is held in: the client's address, or its IPv6 network, in which it may choose any.
func sender(r *http.Request) string {
	address, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
	if ip, err := netip.ParseAddr(address); err == nil && ip.Is6() && !ip.Is4In6() {
		if network, err := ip.Prefix(64); err == nil {
			return network.String()
		}
	}
	return address
}

// tell sets the headers, placeholders and log fields of an admitted request.
func (j *job) tell(w http.ResponseWriter, r *http.Request) {
	l := &j.lease
	wait := l.Queued + l.Loading
	j.target.waited.Observe(wait.Seconds())
	if j.handler.headers {
		w.Header().Set("X-Gpu-Broker-Consumer", l.Consumer)
		w.Header().Set("Server-Timing", timing(l.Queued, l.Loading))
	}
	if l.Upstream != j.target.upstream { // a reload has moved the server since
		j.repl.Set("http.gpu_broker.upstream", l.Upstream)
	}
	j.waits(r)
	if wait > 0 {
		j.repl.Set("http.gpu_broker.wait_ms", strconv.FormatInt(wait.Milliseconds(), 10))
	}
	logFields(r, zap.String("gpu_consumer", l.Consumer), zap.Duration("gpu_wait", wait))
}

// logFields adds to the access log, where there is one.
func logFields(r *http.Request, fields ...zap.Field) {
	srv, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok || srv == nil || srv.Logs == nil {
		return
	}
	if extra, ok := r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
		for _, f := range fields {
			extra.Set(f)
		}
	}
}

func timing(queued, loading time.Duration) string {
	if queued == 0 && loading == 0 {
		return "gpu-queue;dur=0, gpu-load;dur=0"
	}
	millis := func(d time.Duration) string { return strconv.FormatFloat(float64(d.Microseconds())/1000, 'f', 1, 64) }
	return "gpu-queue;dur=" + millis(queued) + ", gpu-load;dur=" + millis(loading)
}

// run calls next, and gives the place back whatever becomes of it.
func (j *job) run(r *http.Request, next caddyhttp.Handler) (err error) {
	j.status, j.detached, j.abort = 0, nil, nil // it may be the second try
	j.later = j.lease.Async && j.target.AfterAnswer(r)
	j.said = j.said[:0]
	inner, completed := r, false
	switch {
	case j.lease.Loads:
		var ctx context.Context
		ctx, j.detached = detach(r.Context(), j.target.loadTimeout)
		defer j.detached.end()
		inner, j.abort = r.WithContext(ctx), j.detached.cancel
	case r.ProtoMajor > 2, j.handler.StreamBody: // HTTP/3 has no connection to end, and HTTP/1 looks for its end only past the body
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		inner, j.abort = r.WithContext(ctx), cancel
	}
	if j.heart != nil {
		inner = identity(inner)
	}
	if limit := j.target.maxRun; limit > 0 {
		ctx, cancel := context.WithTimeoutCause(inner.Context(), limit, errMaxRun)
		defer cancel()
		inner = inner.WithContext(ctx)
	}
	if j.tunnel.Store(r.Method == http.MethodConnect); r.Method == http.MethodConnect && r.Body != nil {
		inner.Body = tunnelBody{inner.Body, &j.moved}
	}
	if j.context = nil; r.ProtoMajor == 1 {
		j.context = r.Context()
	}
	running := &j.handler.pool.running
	running.add(j, answering)
	defer func() {
		running.remove(j)
		if j.heart != nil {
			j.heart.logStatus(r, j.status)
		}
		outcome := j.outcome(r, err, completed, ranOut(inner) || j.stalled != "")
		j.hasRun(outcome)
		if outcome == scheduler.Accepted && len(j.said) > 0 {
			j.lease.Track(j.said)
		}
		ended := j.lease.End(outcome, j.brokeOff(inner, completed))
		j.leased = false
		j.target.ran.Observe(ended.Sub(j.lease.Began).Seconds())
		j.spans(r.Context(), j.lease.Began, ended)
	}()
	if err = next.ServeHTTP(j, inner); err != nil && j.status == 0 {
		err = j.notTheServers(r, err)
	}
	completed = true
	if j.status != 0 && (j.isCut.Load() || ranOut(inner)) { // reverse_proxy may take it for a client that left: what is cut must not look whole
		panic(http.ErrAbortHandler)
	}
	if err != nil && j.status == 0 && ranOut(inner) {
		return &failure{status: http.StatusGatewayTimeout, code: string(scheduler.BudgetExceeded),
			message: fmt.Sprintf("consumer %q had no answer within max_run %s", j.target.name, j.target.maxRun)}
	}
	return err
}

var (
	errMaxRun = errors.New("the request has run for max_run")
	errCut    = errors.New("the connection was cut")
)

// ranOut says whether a request has run for longer than it may.
func ranOut(r *http.Request) bool { return errors.Is(context.Cause(r.Context()), errMaxRun) }

// brokeOff reports whether the request to the server ended before its answer did, because its client left or we ended it.
func (j *job) brokeOff(inner *http.Request, completed bool) bool {
	return (inner.Context().Err() != nil || j.isCut.Load()) && (!completed || j.status == 0 || j.status == statusClientLeft)
}

// outcome is how the job ended, as far as the scheduler has to know. cutByUs: it ran out of its time, or was cut.
func (j *job) outcome(r *http.Request, err error, completed, cutByUs bool) scheduler.Outcome {
	left := r.Context().Err() != nil
	switch {
	case !completed && (left || cutByUs && j.status != 0):
		return scheduler.Served // it ended in the middle of the answer, and not by its server
	case !completed && !cutByUs:
		return scheduler.ServerDied
	case err != nil && refusedDial(err) && j.misrouted() != nil:
		return scheduler.NoAnswer // its server was not asked
	case err != nil && refusedDial(err):
		return scheduler.DialRefused
	case cutByUs && (!completed || err != nil && !left && j.status == 0), err != nil && ours(err):
		return scheduler.NoAnswer
	case err != nil && !left && j.status == 0:
		return scheduler.ServerDied
	case j.later && (j.status < 400 || j.status == statusClientLeft):
		return scheduler.Accepted // it may have taken the work, though the client did not wait to hear so
	case j.status == 0 || j.status == statusClientLeft:
		return scheduler.NoAnswer
	default:
		return scheduler.Served
	}
}

// refusedDial reports whether nothing was sent, as the server did not take the connection.
func refusedDial(err error) bool {
	var dial reverseproxy.DialError
	return errors.As(err, &dial)
}

// ours reports whether a request failed of the client or of this machine, not of its server.
func ours(err error) bool {
	var f *failure
	return errors.As(err, &f)
}

// parseHandler reads the directive gpu_broker.
func parseHandler(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	route, err := gpucaddyfile.ParseRoute(h.Dispenser)
	if err != nil {
		return nil, err
	}
	return &Handler{Route: *route}, nil
}

// bodyError says what became of a body that could not be read ahead.
func bodyError(r *http.Request, err error) error {
	var tooLarge *http.MaxBytesError
	var network *net.OpError
	switch {
	case r.Context().Err() != nil:
		return context.Cause(r.Context())
	case errors.Is(err, routing.ErrTooLarge), errors.As(err, &tooLarge):
		return &failure{status: http.StatusRequestEntityTooLarge, code: "body_too_large", message: err.Error() + ": raise max_body, or use stream_body on this route"}
	case errors.Is(err, routing.ErrEncoding):
		return &failure{status: http.StatusUnsupportedMediaType, code: "unsupported_encoding", message: err.Error() + ", and this route has to look into bodies"}
	case errors.Is(err, routing.ErrNoRoom):
		return &failure{status: http.StatusServiceUnavailable, code: "queue_full", message: err.Error() + ": try again later, or raise max_buffered", retryAfter: 5 * time.Second}
	case errors.Is(err, routing.ErrSpill):
		return storageFull(err)
	case errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &network) && !network.Timeout(): // HTTP/1 says no more of a client that left
		return context.Canceled
	default: // it is malformed, or stopped coming
		return &failure{status: http.StatusBadRequest, code: "bad_request", message: "the request body could not be read: " + err.Error()}
	}
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
	_ http.ResponseWriter         = (*job)(nil)
)
