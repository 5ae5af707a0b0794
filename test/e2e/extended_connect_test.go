package e2e

import (
	"crypto/tls"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"

	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

// A WebSocket over HTTP/2 (RFC 8441) takes its turn as one over HTTP/1 does, and its first bytes are not read as a body. Its server pings.
// Go offers it only where GODEBUG says so, so the test can't run beside others.
//
//nolint:staticcheck // net/http's own Transport is the advised one, and may refuse a header :protocol
func TestH6_AWebSocketOverHTTP2TakesATurnAndIsCutWhenItIsLeftAlone(t *testing.T) {
	t.Setenv("GODEBUG", "http2xconnect=1")
	s := holders(t, true, "handle_path /tunnel/* {\ngpu_broker hog\nreverse_proxy "+pinging(t)+"\n}")
	tr := &http2.Transport{TLSClientConfig: &tls.Config{RootCAs: caddytest.CA(t, s.dir)}}
	t.Cleanup(tr.CloseIdleConnections)
	out, in := io.Pipe()
	t.Cleanup(func() { _ = in.Close() })
	req, err := http.NewRequestWithContext(t.Context(), http.MethodConnect, s.url+"/tunnel/ws", out)
	require.NoError(t, err)
	req.Header[":protocol"] = []string{"websocket"}
	req.Header.Set("Sec-WebSocket-Version", "13")
	resp, err := tr.RoundTrip(req)
	require.NoError(t, err)
	t.Cleanup(func() { _ = resp.Body.Close() })
	require.Equal(t, 200, resp.StatusCode)
	require.Equal(t, "hog", resp.Header.Get("X-Gpu-Broker-Consumer"))

	_, err = in.Write([]byte{0x81, 0x82, 0, 0, 0, 0, 'h', 'i'}) // a masked text frame
	require.NoError(t, err)
	echo := make([]byte, 4)
	_, err = io.ReadFull(resp.Body, echo)
	require.NoError(t, err)
	require.Equal(t, []byte{0x81, 2, 'h', 'i'}, echo)
	require.Equal(t, 1, s.status().Scheduler.InFlight)

	s.makesWay(t, "tunnel_idle")
}
