package gpubroker

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/routing"
)

// writes are what the transport of a test wrote, each as one text, and how its connections fail.
type writes struct {
	mu     sync.Mutex
	texts  []string
	dials  int
	refuse int  // so many dials fail
	broken bool // the next write fails
}

func (w *writes) all() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.texts...)
}

var errNoConnection = errors.New("no connection")

func (w *writes) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	w.mu.Lock()
	w.dials++
	refused := w.dials <= w.refuse
	w.mu.Unlock()
	if refused {
		return nil, errNoConnection
	}
	c, err := new(net.Dialer).DialContext(ctx, network, addr)
	return &writtenTo{c, w}, err
}

type writtenTo struct {
	net.Conn
	*writes
}

func (c *writtenTo) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken {
		c.broken = false
		return 0, errors.New("broken")
	}
	c.texts = append(c.texts, string(p))
	return c.Conn.Write(p)
}

// echo is a server that answers with what it got, a transport to it that joins small bodies to their headers, and what is written to it.
func echo(t *testing.T) (url string, transport *http.Transport, w *writes) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		_, _ = w.Write(body)
	}))
	t.Cleanup(srv.Close)
	w = &writes{}
	transport = &http.Transport{DialContext: w.dial, DisableCompression: true}
	t.Cleanup(transport.CloseIdleConnections)
	ofSite := &reverseproxy.HTTPTransport{Transport: transport}
	joinOnePacket([]*reverseproxy.HTTPTransport{ofSite, ofSite}) // which several handlers may have
	return srv.URL, transport, w
}

// outgoing is a request as a transport gets one whose body was read ahead.
func outgoing(t *testing.T, url, body string) *http.Request {
	t.Helper()
	r := httptest.NewRequest("POST", url, strings.NewReader(body))
	ahead, err := routing.NewBuffers(t.TempDir()).Read(r, routing.Limits{Body: 1 << 20, Total: 1 << 20})
	require.NoError(t, err)
	t.Cleanup(ahead.Close)
	r.RequestURI = ""
	return r
}

func answered(t *testing.T, resp *http.Response, err error) string {
	t.Helper()
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(b)
}

func TestSmallBodiesGoInOnePacketWithTheirHeaders(t *testing.T) {
	for size, writes := range map[int]int{1: 1, 700: 1, 3 << 10: 1, onePacketBody + 1: 2, 100 << 10: 2} {
		url, transport, w := echo(t)
		text := strings.Repeat("x", size)
		r := outgoing(t, url, text)
		resp, err := transport.RoundTrip(r)
		require.Equal(t, text, answered(t, resp, err))
		if all := w.all(); writes == 1 {
			require.Len(t, all, 1, size)
			require.True(t, strings.HasPrefix(all[0], "POST / HTTP/1.1\r\n") && strings.HasSuffix(all[0], "\r\n\r\n"+text), all[0])
		} else {
			require.Greater(t, len(all), 1, size)
			require.Equal(t, "POST / HTTP/1.1\r\n", all[0][:17])
			require.NotContains(t, all[0], "xx", "the headers go ahead")
		}
	}
}

// A request that was not read ahead may come slowly, and its headers must not wait for it.
func TestABodyThatWasNotReadAheadIsLeftToTheTransport(t *testing.T) {
	url, transport, w := echo(t)
	body, client := io.Pipe()
	r, err := http.NewRequestWithContext(t.Context(), "POST", url, body)
	require.NoError(t, err)
	r.ContentLength = 5
	done := make(chan string)
	go func() {
		resp, err := transport.RoundTrip(r)
		done <- answered(t, resp, err)
	}()
	_, err = client.Write([]byte("hel")) // once this is taken, the headers have been sent
	require.NoError(t, err)
	require.NotContains(t, w.all()[0], "hel")
	_, err = client.Write([]byte("lo"))
	require.NoError(t, err)
	require.NoError(t, client.Close())
	require.Equal(t, "hello", <-done)

	r, err = http.NewRequestWithContext(t.Context(), "GET", url, nil)
	require.NoError(t, err)
	resp, err := transport.RoundTrip(r)
	require.Empty(t, answered(t, resp, err))
}

// What the site puts between the broker and the transport, such as a log of bodies, sees every body pass.
func TestABodyThatSomethingWrapsOrReplacesIsLeftToTheTransport(t *testing.T) {
	url, transport, w := echo(t)
	r := outgoing(t, url, "hello")
	var seen bytes.Buffer
	r.Body = io.NopCloser(io.TeeReader(r.Body, &seen))
	resp, err := transport.RoundTrip(r)
	require.Equal(t, "hello", answered(t, resp, err))
	require.Equal(t, "hello", seen.String())
	require.NotContains(t, w.all()[0], "hello")

	r = outgoing(t, url, "hello")
	r.Body = io.NopCloser(io.MultiReader(strings.NewReader("olleh")))
	resp, err = transport.RoundTrip(r)
	require.Equal(t, "olleh", answered(t, resp, err))

	r = outgoing(t, url, "hello")
	_, err = r.Body.Read(make([]byte, 3))
	require.NoError(t, err)
	r.ContentLength = 2
	resp, err = transport.RoundTrip(r)
	require.Equal(t, "lo", answered(t, resp, err), "the rest")
}

func TestASmallBodyCanBeSentAgainWhereNoConnectionWasHad(t *testing.T) {
	url, transport, w := echo(t)
	w.refuse = 2
	r := outgoing(t, url, "hello")
	for range 2 {
		resp, err := transport.RoundTrip(r)
		require.ErrorIs(t, err, errNoConnection)
		require.Nil(t, resp)
	}
	resp, err := transport.RoundTrip(r)
	require.Equal(t, "hello", answered(t, resp, err))
	require.Len(t, w.all(), 1)
}

// A server may close a connection just as it is used again.
func TestASmallBodyIsSentAgainWhereAnIdleConnectionHasEnded(t *testing.T) {
	url, transport, w := echo(t)
	r := outgoing(t, url, "hello")
	resp, err := transport.RoundTrip(r)
	require.Equal(t, "hello", answered(t, resp, err))
	w.mu.Lock()
	w.broken = true
	w.mu.Unlock()
	r = outgoing(t, url, "again")
	resp, err = transport.RoundTrip(r)
	require.Equal(t, "again", answered(t, resp, err))
	require.False(t, w.broken, "it was tried")
	require.Equal(t, 2, w.dials)
}
