package httplife

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"syscall"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

const (
	// maxAnswer bounds what is kept of an answer, in bytes.
	maxAnswer = 1 << 20
	// dialTimeout bounds a connection attempt, which net/http goes on with
	// even after the request that wanted it is gone.
	dialTimeout = 10 * time.Second
	// maxConnections bounds those to one server: a hanging load and a few probes beside it.
	maxConnections = 8
)

// failure is an exchange that did not go well. Its text is for people and holds no secret.
type failure struct {
	outcome lifecycle.Outcome
	text    string
	cause   error // lifecycle.ErrRefused, lifecycle.ErrUnreachable, lifecycle.ErrOutOfMemory, a context's error, or nil
	status  int   // of an answer that was not accepted
}

func (f *failure) Error() string { return f.text }
func (f *failure) Unwrap() error { return f.cause }

// outcomeOf is what a probe calls err.
func outcomeOf(err error) lifecycle.Outcome {
	var f *failure
	switch {
	case err == nil:
		return lifecycle.Answered
	case errors.As(err, &f):
		return f.outcome
	default:
		return lifecycle.Wrong
	}
}

func newClient() *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			// No Proxy: what answers must be the server itself.
			DialContext:            (&net.Dialer{Timeout: dialTimeout}).DialContext,
			DisableKeepAlives:      true,
			DisableCompression:     true,
			MaxConnsPerHost:        maxConnections,
			MaxResponseHeaderBytes: 64 << 10,
		},
		// A redirect is an answer. Followed, it would carry the headers elsewhere.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// exchange sends a route's request and reads its answer, within limit if that
// is above 0. Without an accepted answer it returns a *failure, and what was
// read of the answer if there was one.
func (d *driver) exchange(ctx context.Context, r *route, item any, limit time.Duration) ([]byte, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if limit > 0 {
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	req, err := r.request(d.deps.Upstream, item)
	if err != nil {
		return nil, &failure{outcome: lifecycle.Wrong, text: err.Error()}
	}
	begun := time.Now()
	resp, err := d.client.Do(req.WithContext(ctx))
	if err != nil {
		return nil, d.broken(ctx, r.name, begun, err)
	}
	defer func() { _ = resp.Body.Close() }() // nothing is lost: connections are not kept

	if !r.accepts(resp.StatusCode) {
		// The status is the news; if the body breaks off or dawdles, its beginning will do.
		defer time.AfterFunc(d.deps.Limits.Probe(), cancel).Stop()
		body, _ := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
		text := fmt.Sprintf("%s answered %d, wanted %s", r.name, resp.StatusCode, r.wanted())
		if excerpt := d.plan.secrets.excerpt(body); excerpt != "" {
			text += ": " + excerpt
		}
		return body, &failure{outcome: lifecycle.Wrong, text: text, status: resp.StatusCode}
	}
	body, err := r.read(resp.Body)
	if errors.Is(err, errTooLarge) {
		return nil, &failure{outcome: lifecycle.Wrong, text: fmt.Sprintf("%s: the answer is larger than %d bytes", r.name, maxAnswer)}
	}
	if err != nil {
		return body, d.broken(ctx, r.name, begun, err)
	}
	return body, nil
}

var errTooLarge = errors.New("answer too large")

func (r *route) read(body io.Reader) ([]byte, error) {
	if r.reads == readStatus {
		return nil, nil
	}
	kept, err := io.ReadAll(io.LimitReader(body, maxAnswer+1))
	if err != nil || len(kept) <= maxAnswer {
		return kept, err
	}
	if r.reads == readJSON {
		return nil, errTooLarge
	}
	_, err = io.Copy(io.Discard, body)
	return kept[:maxAnswer], err
}

// ask sends a route's request and returns its answer as JSON.
func (d *driver) ask(ctx context.Context, r *route, item any, limit time.Duration) (any, error) {
	body, err := d.exchange(ctx, r, item, limit)
	if err != nil {
		return nil, err
	}
	answer, err := parseAnswer(body)
	if err != nil {
		text := fmt.Sprintf("%s: %v", r.name, err)
		if excerpt := d.plan.secrets.excerpt(body); excerpt != "" {
			text += ": " + excerpt
		}
		return nil, &failure{outcome: lifecycle.Wrong, text: text}
	}
	return answer, nil
}

// broken turns an error of net or net/http into a failure.
func (d *driver) broken(ctx context.Context, what string, begun time.Time, err error) *failure {
	// url.Error shows the URL, which may hold a key.
	var inURL *url.Error
	if errors.As(err, &inURL) {
		err = inURL.Err
	}
	waited := time.Since(begun).Round(time.Millisecond)
	var inName *net.DNSError
	var inNet net.Error
	lost := errors.As(err, &inName) && !inName.IsTimeout || errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH)
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return &failure{outcome: lifecycle.TimedOut, text: fmt.Sprintf("%s was given up after %s", what, waited), cause: context.Canceled}
	case ctx.Err() != nil, pastDeadline(ctx): // which net may tell before the context does
		return &failure{outcome: lifecycle.TimedOut, text: fmt.Sprintf("%s did not answer within %s", what, waited), cause: context.DeadlineExceeded}
	case errors.Is(err, syscall.ECONNREFUSED) && waited >= dialTimeout: // by the first address of a name; another one took no connection in time
		return &failure{outcome: lifecycle.TimedOut, text: fmt.Sprintf("%s did not answer within %s", what, waited), cause: context.DeadlineExceeded}
	case lost:
		text := fmt.Sprintf("%s: %s: is %s right, and can it be reached from here?", what, d.shown(err), d.deps.Upstream)
		return &failure{outcome: lifecycle.Unreachable, text: text, cause: lifecycle.ErrUnreachable}
	case errors.Is(err, syscall.ECONNREFUSED):
		return &failure{outcome: lifecycle.Refused, text: fmt.Sprintf("%s: %s: does the server run at %s?", what, d.shown(err), d.deps.Upstream), cause: lifecycle.ErrRefused}
	case errors.As(err, &inNet) && inNet.Timeout():
		return &failure{outcome: lifecycle.TimedOut, text: fmt.Sprintf("%s did not answer within %s", what, waited), cause: context.DeadlineExceeded}
	default:
		return &failure{outcome: lifecycle.Wrong, text: fmt.Sprintf("%s: the connection broke: %s", what, d.shown(err)), cause: nil}
	}
}

// pastDeadline reports whether a context's time is over. Of a name with two addresses net tells the first one's refusal, also where the
// other took no connection until then.
func pastDeadline(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ok && !time.Now().Before(deadline)
}

func (d *driver) shown(err error) string { return d.plan.secrets.excerpt([]byte(err.Error())) }

// saysOutOfMemory tells whether an answer is about memory of the GPU that is lacking.
func saysOutOfMemory(body []byte) bool {
	body = bytes.ToLower(body)
	for _, phrase := range []string{"out of memory", "out_of_memory", "outofmemory", "insufficient memory"} {
		if bytes.Contains(body, []byte(phrase)) {
			return true
		}
	}
	return false
}
