package gpubroker

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// job is one request on its way. It is the response writer of next, so that it knows the status of the answer.
type job struct {
	caddyhttp.ResponseWriterWrapper
	handler    *Handler
	repl       *caddy.Replacer
	target     *target // of the consumer that serves it
	model      string  // … and which of its models, if it has several
	asked      string  // the name by which its client asked, where a server may get another; empty: it goes as it is
	askedOf    string  // the consumer that this names
	own        string  // the name by which that consumer's server knows the model; empty: the client's
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
	if j.upload.isCut() {
		return // reverse_proxy takes it for a client that left, but it gets its 408
	}
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
	if j.upload.isCut() {
		return 0, errCut
	}
	if j.status == 0 {
		j.begin(http.StatusOK)
	}
	j.writes.Add(1) // before it looks: who cuts looks in the other order
	defer j.writes.Add(1)
	if j.isCut.Load() {
		return 0, errCut
	}
	if j.tunnel.Load() {
		j.out.add(p)
	}
	if j.later {
		j.said = append(j.said, p[:min(len(p), lifecycle.MaxAnswer-len(j.said))]...)
	}
	return j.ResponseWriter.Write(p)
}

// ReadFrom notes that there is an answer, as Write does.
func (j *job) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{j}, r) // Write looks at it
}

// FlushError sends what was written, which waits for the client as a write does.
func (j *job) FlushError() error {
	j.writes.Add(1)
	defer j.writes.Add(1)
	if j.isCut.Load() {
		return errCut
	}
	return http.NewResponseController(j.ResponseWriter).Flush()
}

// Hijack hands the connection over. What it carries counts as the tunnel's, and so does what the client has sent already.
func (j *job) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rest, err := http.NewResponseController(j.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	j.tunnel.Store(true)
	t := &tunnelled{conn, carried{moved: &j.moved}, carried{moved: &j.moved}}
	if strings.EqualFold(j.Header().Get("Upgrade"), "websocket") {
		t.in.frames, t.out.frames = &frames{fromClient: true}, &frames{}
	}
	early, _ := rest.Peek(rest.Reader.Buffered())
	t.in.add(early)
	return t, rest, nil
}
