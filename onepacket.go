package gpubroker

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"

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

// RoundTrip implements http.RoundTripper. What it leaves to the transport has no body that was read ahead, or a large one.
func (p onePacket) RoundTrip(r *http.Request) (*http.Response, error) {
	n := r.ContentLength
	if r.GetBody == nil || n <= 0 || n > onePacketBody {
		return nil, http.ErrSkipAltProtocol
	}
	if _, ok := r.Context().(*inMemory); ok {
		return nil, http.ErrSkipAltProtocol // it comes from below
	}
	text, err := readExactly(r.Body, n)
	if err != nil {
		return nil, err
	}
	ctx := &inMemory{Context: r.Context()}
	ctx.body.Reset(text)
	joined := r.WithContext(ctx)
	joined.Body = io.NopCloser(&ctx.body)
	joined.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(text)), nil }
	resp, err := p.transport.RoundTrip(joined)
	if err != nil {
		routing.Restart(r) // reverse_proxy may try another upstream
	}
	return resp, err
}

// readExactly reads a body of n bytes to its end, and closes it.
func readExactly(body io.ReadCloser, n int64) ([]byte, error) {
	defer body.Close()
	text := make([]byte, n+1) // with room to see that there is no more
	got, err := io.ReadFull(body, text)
	switch {
	case err != nil && err != io.EOF && err != io.ErrUnexpectedEOF:
		return nil, err
	case int64(got) != n:
		return nil, fmt.Errorf("the request's Content-Length is %d, and its body is of another length", n)
	}
	return text[:n], nil
}
