package gpubroker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/gpu-broker/caddy-gpu-broker/routing"
)

// hasBody reports whether a request has a body that can be read ahead. That of a
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
	if j.looksInside() {
		return j.peek(r)
	}
	return nil
}

// looksInside reports whether the body is to be looked into: for fields that matter at a pinned model alone only while one is pinned.
func (j *job) looksInside() bool {
	h := j.handler
	if h.plan == nil || !h.pinnedOnly {
		return h.plan != nil
	}
	pinned := func(t *target, model string) bool {
		return len(t.sent.pinned) > 0 && h.pool.broker.Pinned(t.name, model)
	}
	return pinned(j.target, j.model) || slices.ContainsFunc(j.target.candidates, func(name string) bool { return pinned(h.targets[name], "") })
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

// bodyError returns the error for a body that could not be read ahead.
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
