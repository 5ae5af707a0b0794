package gpubroker

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"reflect"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/gpu-broker/caddy-gpu-broker/routing"
)

// onePacket sends a small body that was read ahead in one packet with its headers. net/http writes them apart unless it
// sees that the body is in memory, and it can't see that beneath what reverse_proxy wraps around the body. A write here
// and a read at the server are 7 % of a warm request.
type onePacket struct{ transport *http.Transport }

// onePacketBody is the largest body that is sent so, in bytes: with more, the headers fill net/http's buffer.
const onePacketBody = 4 << 10

// joinOnePacket makes the site's transports send small bodies in one packet.
func joinOnePacket(transports []*reverseproxy.HTTPTransport) {
	done := map[*http.Transport]bool{}
	for _, t := range transports {
		if !done[t.Transport] {
			done[t.Transport] = true
			t.Transport.RegisterProtocol("http", onePacket{t.Transport})
		}
	}
}

// inMemory is the context of a request whose body is in memory already, and that body.
type inMemory struct {
	context.Context
	body bytes.Reader
}

// RoundTrip implements http.RoundTripper. What it leaves to the transport has no small body that was read ahead, or one
// that the site has put something around, which would not see it pass.
func (p onePacket) RoundTrip(r *http.Request) (*http.Response, error) {
	n := r.ContentLength
	if r.Body == nil || n <= 0 || n > onePacketBody {
		return nil, http.ErrSkipAltProtocol
	}
	if _, ok := r.Context().(*inMemory); ok {
		return nil, http.ErrSkipAltProtocol // it comes from below
	}
	text := routing.Unread(beneath(r.Body))
	if int64(len(text)) != n {
		return nil, http.ErrSkipAltProtocol
	}
	ctx := &inMemory{Context: r.Context()}
	ctx.body.Reset(text)
	joined := r.WithContext(ctx)
	joined.Body = io.NopCloser(&ctx.body)
	joined.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(text)), nil }
	resp, err := p.transport.RoundTrip(joined)
	if err != nil && !refusedDial(err) {
		routing.Sent(beneath(r.Body))
	}
	return resp, err
}

var readCloserType = reflect.TypeFor[io.ReadCloser]()

// beneath returns what net/http and reverse_proxy have wrapped to see how far it is read. Their types are not exported. The
// body itself stays unread: reverse_proxy may try another upstream, and an error route may pass it elsewhere.
func beneath(body io.ReadCloser) io.ReadCloser {
	for {
		v := reflect.ValueOf(body)
		if v.Kind() != reflect.Pointer {
			return body
		}
		switch v.Type().String() {
		case "*http.readTrackingBody", "*reverseproxy.bodyNopCloserIfNotRead", "*reverseproxy.requestBodyWithTrailers":
		default:
			return body
		}
		inner := v.Elem().FieldByName("ReadCloser")
		if !inner.IsValid() || inner.Type() != readCloserType || inner.IsNil() {
			return body // another version has it elsewhere
		}
		body = inner.Interface().(io.ReadCloser)
	}
}
