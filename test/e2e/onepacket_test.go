package e2e

import (
	"bufio"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestASmallBodyComesToItsServerInOnePacketWithItsHeaders(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	first := make(chan string, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		packet := make([]byte, 64<<10)
		n, _ := c.Read(packet)
		first <- string(packet[:n])
		if r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(string(packet[:n])))); err == nil && r.ContentLength > 0 {
			_, _ = c.Write([]byte("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\ntaken"))
		}
	}()
	voice := mvoice()
	voice.Proxy = "reverse_proxy " + l.Addr().String()
	s := start(t, layout{Consumers: []consumer{voice}})
	a := s.post("/mvoice/synthesize", "hello")
	require.Equal(t, 200, a.status)
	require.Equal(t, "taken", string(a.body))
	require.True(t, strings.HasSuffix(<-first, "\r\n\r\nhello"))
}

func TestASmallBodyGoesToTheNextUpstreamWhereTheFirstRefuses(t *testing.T) {
	t.Parallel()
	rec := newRecorder(t)
	voice := mvoice()
	voice.Proxy = "reverse_proxy " + freeAddr(t) + " " + freeAddr(t) + " " + rec.addr + " {\nlb_policy first\nlb_retries 5\nlb_try_interval 10ms\nfail_duration 10s\n}"
	s := start(t, layout{Consumers: []consumer{voice}})
	require.Equal(t, 200, s.post("/mvoice/synthesize", "hello").status)
	got := rec.next(t)
	require.Equal(t, "hello", string(got.body))
	require.EqualValues(t, 5, got.length)
}

func TestABodyThatTheSitePutsInItsPlaceBehindTheBrokerIsSent(t *testing.T) {
	t.Parallel()
	rec, url := newRecorder(t), "http://"+freeAddr(t)
	s := start(t, layout{Consumers: []consumer{mvoice()}, Sites: url + " {\nroute {\ngpu_broker mvoice\nrequest_body {\nset olleh\n}\nreverse_proxy " + rec.addr + "\n}\n}"})
	resp, err := s.client.Post(url+"/synthesize", "text/plain", strings.NewReader("hello"))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 200, resp.StatusCode)
	require.Equal(t, "olleh", string(rec.next(t).body))
}
