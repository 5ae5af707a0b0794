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
	rec, dead := newRecorder(t), freeAddr(t)
	var sites strings.Builder
	urls := map[string]string{}
	for name, behind := range map[string][2]string{ // the broker
		"nothing":                 {},
		"a bound":                 {"request_body {\nmax_size 1MB\n}"},
		"a buffer for less of it": {"", "request_buffers 1000"},
		"a buffer for all of it":  {"", "request_buffers 100KiB"},
		"the body as a header":    {"request_header X-Length {http.request.body}"},
		"an error route":          {"error_route"},
	} {
		url := "http://" + freeAddr(t)
		urls[name] = url
		proxy := "reverse_proxy " + dead + " " + rec.addr + " {\nlb_policy first\nlb_retries 5\nlb_try_interval 10ms\nfail_duration 10s\n" + behind[1] + "\n}"
		errors := ""
		if behind[0] == "error_route" {
			behind[0], proxy = "request_body {\nmax_size 1MB\n}", "reverse_proxy "+dead
			errors = "handle_errors {\nreverse_proxy " + rec.addr + "\n}"
		}
		sites.WriteString(url + " {\nroute {\ngpu_broker mvoice\n" + behind[0] + "\n" + proxy + "\n}\n" + errors + "\n}\n")
	}
	s := start(t, layout{Consumers: []consumer{mvoice()}, Sites: sites.String()})
	for name, url := range urls {
		for _, size := range []int{5, 3000, 6000} {
			text := strings.Repeat("x", size)
			resp, err := s.client.Post(url+"/synthesize", "text/plain", strings.NewReader(text))
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			if name != "an error route" {
				require.Equal(t, 200, resp.StatusCode, "%s, %d bytes", name, size)
			}
			got := rec.next(t)
			require.Equal(t, text, string(got.body), name)
			require.EqualValues(t, size, got.length, name)
		}
	}
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
