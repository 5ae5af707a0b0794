package gpubroker

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Codes of requests that are cut because their client makes no progress, of errors_total and of decisions.
const (
	codeUploadStalled   = "upload_stalled"
	codeDownloadStalled = "download_stalled"
	codeTunnelIdle      = "tunnel_idle"
)

// stage is what a request on the list of those that run is doing.
type stage uint8

const (
	uploading stage = iota // its body is read ahead
	answering
)

// progress is what shows that the client of a request takes part. Its counters are set by whoever reads and writes, the rest belongs to the
// list of runs, whose mutex guards it.
type progress struct {
	moved  atomic.Int64 // bytes of an upload, or of a tunnel in both directions, where control frames of a WebSocket don't count
	writes atomic.Int64 // begun and ended ones: odd while one is under way
	tunnel atomic.Bool  // it is a tunnel: a connection that was handed over, or a CONNECT

	stage   stage
	out     carried         // what a CONNECT brings to the client
	upload  *upload         // its body, which is passed on as it comes; nil: it was read ahead
	context context.Context // of its request, over HTTP/1
	mark    int64           // what the counter was …
	left    int             // … and what the system still had to send, when it last changed
	since   time.Time
	stalled string // code for which it was cut; empty: it was not
}

// limits are how long clients may make no progress; 0: for ever.
type limits struct{ upload, answer, tunnel time.Duration }

// every is how often to look: a cut is late by two looks at most.
func (l limits) every() time.Duration {
	least := 8 * maxLook
	for _, d := range []time.Duration{l.upload, l.answer, l.tunnel} {
		if d > 0 {
			least = min(least, d)
		}
	}
	return max(least/8, minLook)
}

const (
	minLook = 10 * time.Millisecond
	maxLook = 5 * time.Second
)

// watcher is the one goroutine that looks for clients that make no progress. Requests only count: they need no timer.
type watcher struct {
	limits  atomic.Pointer[limits]
	changed chan struct{} // holds one at most
	stop    chan struct{}
	once    sync.Once
}

func newWatcher() *watcher {
	w := &watcher{changed: make(chan struct{}, 1), stop: make(chan struct{})}
	w.limits.Store(&limits{})
	return w
}

// set takes the limits of another configuration.
func (w *watcher) set(l limits) {
	w.limits.Store(&l)
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

func (w *watcher) close() { w.once.Do(func() { close(w.stop) }) }

// watch looks until the pool is closed.
func (p *pooled) watch() {
	timer := time.NewTimer(maxLook)
	defer timer.Stop()
	for {
		select {
		case <-p.watcher.stop:
			return
		case <-p.watcher.changed:
		case <-timer.C:
		}
		l := *p.watcher.limits.Load()
		p.look(time.Now(), l)
		timer.Reset(l.every())
	}
}

// slot is a consumer, or one of its models.
type slot struct{ consumer, model string }

// look cuts the requests whose clients have made no progress for too long. Those that run only while others wait for their GPU.
func (p *pooled) look(now time.Time, l limits) {
	var tunnels map[slot][]broker.Lease
	p.running.each(func(j *job) {
		code, limit := j.progress.rests(now, l)
		switch {
		case code == "":
		case j.stage == answering && !p.broker.Contended(j.lease):
		case code == codeTunnelIdle:
			if tunnels == nil {
				tunnels = map[slot][]broker.Lease{}
			}
			at := slot{j.target.name, j.model}
			tunnels[at] = append(tunnels[at], j.lease)
		default:
			p.cutFor(j, code, limit)
		}
	})
	for _, leases := range tunnels { // a server may say that it works all the same; each is asked once
		if !p.broker.Idles(leases[0]) {
			continue
		}
		p.running.each(func(j *job) {
			if code, limit := j.progress.rests(now, l); code == codeTunnelIdle && slices.Contains(leases, j.lease) && p.broker.Contended(j.lease) {
				p.cutFor(j, code, limit)
			}
		})
	}
}

// connKey is the key of a request's context for its connection.
type connKey struct{}

// keepConnections puts the connection into the context of each request of the server that is being provisioned, for rests.
func (a *App) keepConnections(ctx caddy.Context) {
	srv, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok || a.connected[srv] {
		return
	}
	a.connected[srv] = true
	srv.RegisterConnContext(func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) })
}

// rests returns the code for which a request may be cut, as its client has made no progress for the limit; empty: it has.
// The mutex of its list is held.
func (p *progress) rests(now time.Time, l limits) (code string, limit time.Duration) {
	mark, left := p.moved.Load(), 0
	switch {
	case p.stage == uploading:
		code, limit = codeUploadStalled, l.upload
	case p.tunnel.Load():
		code, limit = codeTunnelIdle, l.tunnel
	default:
		mark = p.writes.Load()
		switch {
		case mark%2 == 1:
			code, limit = codeDownloadStalled, l.answer
			if p.context != nil {
				if conn, ok := p.context.Value(connKey{}).(net.Conn); ok {
					left = unsent(conn)
				}
			}
		case p.upload != nil && p.upload.reading.Load():
			code, limit = codeUploadStalled, l.upload
			mark = -1 - mark - p.upload.moved.Load() // never the mark of a write
		default: // it waits for its server, not for its client
			p.since = time.Time{}
			return "", 0
		}
	}
	if p.since.IsZero() || mark != p.mark || left != p.left {
		p.since, p.mark, p.left = now, mark, left
	}
	if limit <= 0 || now.Sub(p.since) < limit {
		return "", limit
	}
	return code, limit
}

// reasons are what decisions say of requests that were cut.
var reasons = map[string]string{
	codeUploadStalled:   "the client sent nothing of its body for %s while others waited for the GPU (upload_idle)",
	codeDownloadStalled: "the client took nothing of its answer for %s while others waited for the GPU (stall_timeout)",
	codeTunnelIdle:      "a tunnel carried nothing for %s while others waited for the GPU (tunnel_idle)",
}

// cutFor ends a request for its client's fault. The mutex of the list is held.
func (p *pooled) cutFor(j *job, code string, limit time.Duration) {
	first := j.stalled == ""
	if first {
		j.stalled = code
	}
	switch {
	case code != codeUploadStalled:
		if first {
			p.tellCut(j, limit)
		}
		j.cut()
		return
	case j.stage == answering: // whether an answer has begun, and so what to tell, is known once it has ended: uploadEnded
		j.upload.cut.Store(true)
		j.isCut.Store(true)
		j.abort()
	}
	_ = j.client().SetReadDeadline(past)
}

// tellCut tells of a request that is cut, once.
func (p *pooled) tellCut(j *job, limit time.Duration) {
	metrics.errors.WithLabelValues(j.target.name, j.stalled).Inc()
	p.broker.Cut(j.lease, scheduler.Code(j.stalled), fmt.Sprintf(reasons[j.stalled], limit))
}

// uploadEnded returns the error of a request that ran and is on the list no more. One that was cut for its upload gets 408, unless its
// answer had begun.
func (j *job) uploadEnded(err error) error {
	limit := time.Duration(*j.handler.app.UploadIdle)
	switch {
	case j.stalled != codeUploadStalled:
		return err
	case j.status == 0:
		j.unread = true
		return uploadStalled(limit)
	}
	j.handler.pool.tellCut(j, limit)
	return err
}

// past is a deadline that ends reads and writes that are under way, and those to come.
var past = time.Unix(1, 0)

// client controls the client's connection, or stream, from any goroutine.
func (j *job) client() *http.ResponseController {
	return http.NewResponseController(innermost(j.ResponseWriter))
}

// tunnelled is a connection that was handed over, of which what it carries counts.
type tunnelled struct {
	net.Conn
	in, out carried
}

func (t *tunnelled) Read(p []byte) (int, error) {
	n, err := t.Conn.Read(p)
	t.in.add(p[:n])
	return n, err
}

func (t *tunnelled) Write(p []byte) (int, error) {
	n, err := t.Conn.Write(p)
	t.out.add(p[:n])
	return n, err
}

// tunnelBody is what a client sends into a tunnel over HTTP/2 or HTTP/3, which counts.
type tunnelBody struct {
	io.ReadCloser
	in carried
}

func (t tunnelBody) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	t.in.add(p[:n])
	return n, err
}

// tunnels makes a CONNECT's bytes count, in both directions.
func (j *job) tunnels(r *http.Request) {
	connect := r.Method == http.MethodConnect
	if j.tunnel.Store(connect); !connect {
		return
	}
	in := carried{moved: &j.moved}
	j.out = in
	if isWebSocket(r) {
		in.frames, j.out.frames = &frames{fromClient: true}, &frames{}
	}
	if r.Body != nil {
		r.Body = tunnelBody{r.Body, in}
	}
}

// upload is a body that is passed on as it comes. A transport may still read it when its request is over.
type upload struct {
	io.ReadCloser
	moved   atomic.Int64
	reading atomic.Bool // somebody waits for the client
	cut     atomic.Bool // no answer may begin any more
}

func (u *upload) isCut() bool { return u != nil && u.cut.Load() }

// begun reports whether anything was read of it, which can't be sent again. request_buffers reads even before there is a connection.
func (u *upload) begun() bool { return u != nil && u.moved.Load() > 0 }

func (u *upload) Read(p []byte) (int, error) {
	u.reading.Store(true)
	defer u.reading.Store(false)
	n, err := u.ReadCloser.Read(p)
	u.moved.Add(int64(n))
	return n, err
}

// Close may read what is left, as net/http's body does.
func (u *upload) Close() error {
	if u.cut.Load() {
		return nil
	}
	u.reading.Store(true)
	defer u.reading.Store(false)
	return u.ReadCloser.Close()
}

// watchUpload makes the watcher see how the body of a request comes, if it was not read ahead.
func (j *job) watchUpload(r *http.Request) {
	if j.upload = nil; j.handler.StreamBody && hasBody(r) {
		j.upload = &upload{ReadCloser: r.Body}
		r.Body = j.upload
	}
}
