package gpubroker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

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
		case j.unreached(r, err) && attempt == 1 && !j.upload.begun() && !j.isCut.Load() && r.Context().Err() == nil:
			continue // nothing was sent: its state is taken anew, and the job is admitted once more
		case j.unreached(r, err):
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
	if outer := admittedWithin(j.ResponseWriter); outer != nil && h.app.Broker.Scheduler != config.Passthrough {
		return nested(outer.target.name, j.target.name)
	}
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
		if lease.Consumer != "" { // it left while it waited, perhaps for a fallback
			j.servedBy(lease.Consumer)
		}
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
	j.later = j.lease.Async && j.target.AfterAnswer(r)
	j.said = j.said[:0]
	j.repl.Delete(answerTime)
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
	limit := j.target.maxRun
	if limit > 0 {
		ctx, cancel := context.WithTimeoutCause(inner.Context(), limit, errMaxRun)
		defer cancel()
		defer j.cutAtEnd(ctx)()
		inner = inner.WithContext(ctx)
	}
	ranOut := func() bool { return limit > 0 && errors.Is(context.Cause(inner.Context()), errMaxRun) }
	j.tunnels(inner)
	j.watchUpload(inner)
	if j.context = nil; r.ProtoMajor == 1 {
		j.context = r.Context()
	}
	running := &j.handler.pool.running
	running.add(j, answering)
	defer func() {
		running.remove(j)
		err = j.uploadEnded(err)
		if j.heart != nil {
			j.heart.logStatus(r, j.status)
		}
		outcome := j.outcome(r, err, completed, ranOut() || j.stalled != "")
		j.hasRun(outcome)
		if outcome == scheduler.Accepted && len(j.said) > 0 {
			j.lease.Track(j.said)
		}
		ended := j.lease.End(outcome, j.brokeOff(inner, completed) || j.gaveUp(r, err))
		j.leased = false
		j.target.ran.Observe(ended.Sub(j.lease.Began).Seconds())
		j.spans(r.Context(), j.lease.Began, ended)
	}()
	if err = next.ServeHTTP(j, inner); err != nil && j.status == 0 {
		err = j.notTheServers(r, err)
	}
	completed = true
	if j.status != 0 && (j.isCut.Load() || ranOut()) { // reverse_proxy may take it for a client that left: what is cut must not look whole
		panic(http.ErrAbortHandler)
	}
	if err != nil && j.status == 0 && ranOut() {
		return &failure{status: http.StatusGatewayTimeout, code: string(scheduler.BudgetExceeded),
			message: fmt.Sprintf("consumer %q had no answer within max_run %s", j.target.name, j.target.maxRun)}
	}
	return err
}

var (
	errMaxRun = errors.New("the request has run for max_run")
	errCut    = errors.New("the connection was cut")
)

// lastWrite is how long a write of an answer that max_run ends may take. What is written by then is sent whole.
const lastWrite = 1 * time.Second

// cutAtEnd lets nothing more be written once ctx has ended because the request has run for max_run, and soon ends a write that is
// under way: a client that reads nothing would hold the GPU. It holds until release is called, which every run must do.
func (j *job) cutAtEnd(ctx context.Context) (release func()) {
	client, done := j.client(), make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(done)
		if !errors.Is(context.Cause(ctx), errMaxRun) {
			return
		}
		if j.isCut.Store(true); j.writes.Load() > 0 || j.tunnel.Load() { // else it may be told why
			_ = client.SetWriteDeadline(time.Now().Add(lastWrite))
		}
	})
	return func() {
		if !stop() {
			<-done // the connection, and j, may serve another request next
		}
	}
}

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
	case refusedDial(err) && (j.misrouted() != nil || j.answered()):
		return scheduler.NoAnswer // that tells nothing of its server
	case refusedDial(err) && !left && j.nobodyListens(err) && (j.lease.Upstream != "" || !j.triedBefore(r)):
		return scheduler.DialRefused // what an earlier try has begun there is gone, too
	case refusedDial(err) && (j.triedBefore(r) || !j.wentToServer() && !j.mayBeNamed()):
		return scheduler.NoAnswer
	case refusedDial(err):
		return scheduler.Unreached // its server may be there, and hang
	case cutByUs && (!completed || err != nil && !left && j.status == 0), err != nil && ours(err), j.gaveUp(r, err):
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

// gaveUp reports whether reverse_proxy broke the request off without any answer, so that its server may work on: by a time-out of its
// own (response_header_timeout, read_timeout), or in an earlier try than the last, which failed. A time-out in the middle of an answer
// can't be told from a server that died.
func (j *job) gaveUp(r *http.Request, err error) bool {
	if err == nil || j.status != 0 {
		return false
	}
	if j.triedBefore(r) {
		return refusedDial(err) || timedOut(err) || !j.wentToServer()
	}
	return timedOut(err) && (j.wentToServer() || j.mayBeNamed())
}

// timedOut reports whether a request failed because reverse_proxy timed out before its answer.
func timedOut(err error) bool {
	var caddys caddyhttp.HandlerError
	var inNet net.Error
	return errors.As(err, &caddys) && caddys.StatusCode == http.StatusGatewayTimeout && errors.As(caddys.Err, &inNet) && inNet.Timeout()
}

// refusedDial reports whether nothing was sent, as no connection came about.
func refusedDial(err error) bool {
	if err == nil {
		return false // without the allocation that errors.As costs
	}
	var dial reverseproxy.DialError
	return errors.As(err, &dial)
}

// unreached reports whether the job's own server took no connection, so that nothing was sent to it.
func (j *job) unreached(r *http.Request, err error) bool {
	return refusedDial(err) && j.wentToServer() && !j.mayBeAtWork(r)
}

// mayBeAtWork reports whether some server may have got the request in this attempt, though the last connection failed.
func (j *job) mayBeAtWork(r *http.Request) bool { return j.answered() || j.triedBefore(r) }

// triedBefore reports whether reverse_proxy may have sent the request before its last try: it repeats a GET, and what
// lb_retry_match names, wherever it failed, and any request of which no connection came about.
func (j *job) triedBefore(r *http.Request) bool {
	retries, _ := j.repl.Get("http.reverse_proxy.retries")
	n, _ := retries.(int)
	return n > 0 && (!hasBody(r) || j.body.Begun() || j.upload.begun())
}

// answerTime is a placeholder that reverse_proxy sets once a server has answered, whatever the site then does with the answer.
const answerTime = "http.reverse_proxy.upstream.latency"

// answered reports whether a server has answered in this attempt, though nothing of it has reached the client: handle_response may
// ask other servers first, or the same one again. Another try would do the work twice.
func (j *job) answered() bool {
	_, ok := j.repl.Get(answerTime)
	return ok
}

// wentToServer reports whether the last request of reverse_proxy went to the job's own server, and not to another server of the
// site, such as that of forward_auth. A consumer without an upstream doesn't tell where its server is: there any address may be.
func (j *job) wentToServer() bool {
	dialled, ok := j.repl.GetString("http.reverse_proxy.upstream.hostport")
	return !ok || j.lease.Upstream == "" || config.ServerAddress(dialled) == config.ServerAddress(j.lease.Upstream)
}

// mayBeNamed reports whether the job's upstream may be a name of the address that was dialled last, as where the site resolves it by
// itself (`dynamic a`). It may as well be another server's, which uses the same port: only a probe tells.
func (j *job) mayBeNamed() bool {
	dialled, _ := j.repl.GetString("http.reverse_proxy.upstream.hostport")
	address, err := netip.ParseAddrPort(dialled)
	host, name, _ := net.SplitHostPort(j.lease.Upstream)
	port, _ := net.LookupPort("tcp", name)
	_, isName := netip.ParseAddr(host)
	return err == nil && isName != nil && !config.IsOwnHost(host) && port == int(address.Port())
}

// nobodyListens reports whether a connection failed because no process listens at the address of the job's own server. DialError shows no
// more of its cause than the text. Of a name with several addresses it tells the first one's fault alone.
func (j *job) nobodyListens(err error) bool {
	text := err.Error()
	if !j.wentToServer() || !strings.Contains(text, "connect: "+syscall.ECONNREFUSED.Error()) || strings.Contains(text, "proxyconnect") {
		return false
	}
	address, _ := j.repl.GetString("http.reverse_proxy.upstream.hostport")
	_, noAddress := netip.ParseAddrPort(address)
	return noAddress == nil || strings.Contains(text, "dial unix ")
}

// ours reports whether a request failed of the client or of this machine, not of its server.
func ours(err error) bool {
	var f *failure
	return errors.As(err, &f)
}
