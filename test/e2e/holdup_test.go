package e2e

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

// scaled are the bounds of the contract, scaled down so that a test can wait for them.
const scaled = "upload_idle 500ms\nstall_timeout 500ms\ntunnel_idle 500ms"

// ample are bounds for those who must not be cut: a busy machine may keep them from moving for a while.
const ample = "upload_idle 2s\nstall_timeout 2s\ntunnel_idle 2s"

// holders is a site with a server that an attacker asks, and one that others want to use: only one of them is loaded at a time.
func holders(t *testing.T, https bool, routes string, more ...consumer) *site {
	return holdersWithin(t, scaled, https, routes, more...)
}

func holdersWithin(t *testing.T, bounds string, https bool, routes string, more ...consumer) *site {
	hog := consumer{Options: modelserver.Options{Name: "hog", VRAM: gib(10)}}
	other := consumer{Options: modelserver.Options{Name: "other", VRAM: gib(10)}}
	s := start(t, layout{HTTPS: https, Global: bounds, Consumers: append([]consumer{hog, other}, more...), Routes: routes + "\nhandle /one/* {\nuri strip_prefix /one\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}"})
	require.Equal(t, 200, s.post("/hog/work", "load it").status)
	return s
}

// http3Client is a client of the site over HTTP/3.
func (s *site) http3Client() *http.Client {
	tr := &http3.Transport{TLSClientConfig: &tls.Config{RootCAs: caddytest.CA(s.t, s.dir)}}
	s.t.Cleanup(func() { _ = tr.Close() })
	return &http.Client{Transport: tr, Timeout: 2 * patience}
}

// versions runs a test over each version of HTTP.
func versions(t *testing.T, test func(t *testing.T, https bool, client func(s *site) *http.Client)) {
	plain := func(s *site) *http.Client { return s.client }
	for name, c := range map[string]struct {
		https  bool
		client func(s *site) *http.Client
	}{"HTTP1": {false, plain}, "HTTP2": {true, plain}, "HTTP3": {true, (*site).http3Client}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, c.https, c.client)
		})
	}
}

// slowUpload begins a request whose body comes from the pipe that is returned.
func (s *site) slowUpload(c *http.Client, path string, length int64) (*io.PipeWriter, <-chan answer) {
	s.t.Helper()
	body, in := io.Pipe()
	s.t.Cleanup(func() { _ = in.Close() })
	req, err := http.NewRequestWithContext(s.t.Context(), "POST", s.url+path, body)
	require.NoError(s.t, err)
	req.ContentLength = length
	done := make(chan answer, 1)
	go func() {
		resp, err := c.Do(req)
		if err != nil {
			done <- answer{err: err}
			return
		}
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		done <- answer{status: resp.StatusCode, header: resp.Header, body: data, err: err}
	}()
	return in, done
}

// unread begins a download and reads only its beginning.
func (s *site) unread(c *http.Client, path string) *http.Response {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), "GET", s.url+path, nil)
	require.NoError(s.t, err)
	resp, err := c.Do(req)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

// makesWay asks for the other model, for which the hog's one request is cut.
func (s *site) makesWay(t *testing.T, code string) {
	t.Helper()
	began := time.Now()
	require.Equal(t, 200, s.post("/other/work", "mine").status)
	require.Less(t, time.Since(began), 5*time.Second)
	cuts := s.decisions("cut")
	require.Len(t, cuts, 1)
	require.Equal(t, "hog", cuts[0].Consumer)
	require.Equal(t, code, cuts[0].Code)
}

func TestH6_AnAnswerOfWhichTheClientTakesNothingIsCutOnlyOnceOthersWait(t *testing.T) {
	t.Parallel()
	versions(t, func(t *testing.T, https bool, client func(s *site) *http.Client) {
		s := holders(t, https, "")
		resp := s.unread(client(s), "/hog/audio/big?bytes=200000000")
		require.Equal(t, 200, resp.StatusCode)
		time.Sleep(1200 * time.Millisecond) // more than stall_timeout, while nobody waits
		require.Equal(t, 1, s.status().Scheduler.InFlight, "nobody waits: nobody is cut")
		s.makesWay(t, "download_stalled")
		require.EqualValues(t, 1, s.metric(`errors_total{code="download_stalled",consumer="hog"}`))
		require.Zero(t, s.metric(`errors_total{code="server_died",consumer="hog"}`), "it is not the server's fault")
		_, err := io.Copy(io.Discard, resp.Body)
		require.Error(t, err, "what is cut must not look whole")
	})
}

func TestH6_ASlowClientThatReadsOnIsNotCut(t *testing.T) {
	t.Parallel()
	for _, https := range []bool{false, true} {
		t.Run(fmt.Sprintf("https %v", https), func(t *testing.T) {
			t.Parallel()
			s := holdersWithin(t, ample, https, "")
			raw := s.dial()
			defer raw.Close()
			require.NoError(t, raw.(*net.TCPConn).SetReadBuffer(64<<10)) // so that it takes little at once
			conn := raw
			if https {
				conn = tls.Client(raw, &tls.Config{RootCAs: caddytest.CA(t, s.dir), ServerName: "localhost"})
			}
			_, err := io.WriteString(conn, "GET /hog/audio/big?bytes=30000000 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
			require.NoError(t, err)
			waits := s.send("POST", "/other/work", "mine")
			chunk := make([]byte, 1<<20)
			total := 0
			for i := 0; err == nil; i++ {
				var n int
				if i < 30 { // no write ends within stall_timeout: only the system's send buffer shrinks
					n, err = io.ReadFull(conn, chunk[:64<<10])
					time.Sleep(100 * time.Millisecond)
				} else {
					n, err = io.ReadFull(conn, chunk)
					time.Sleep(70 * time.Millisecond) // the client's pace is what is tested
				}
				total += n
			}
			require.Greater(t, total, 30000000, "the whole answer came: %v", err)
			require.Equal(t, 200, s.await(waits).status)
			require.Empty(t, s.decisions("cut"))
		})
	}
}

// thinker is a server that answers a byte, thinks, and answers the rest.
func thinker(t *testing.T, silence time.Duration) string {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: 1\n\n")
		_ = http.NewResponseController(w).Flush()
		time.Sleep(silence)
		_, _ = io.WriteString(w, "data: 2\n\n")
	}))
	t.Cleanup(srv.Close)
	return srv.Listener.Addr().String()
}

func TestH6_AServerThatThinksInSilenceIsNeverCut(t *testing.T) {
	t.Parallel()
	versions(t, func(t *testing.T, https bool, client func(s *site) *http.Client) {
		s := holders(t, https, "handle_path /thinker/* {\ngpu_broker hog\nreverse_proxy "+thinker(t, 2*time.Second)+" {\nflush_interval -1\n}\n}")
		thinks := make(chan answer, 1)
		go func() {
			thinks <- s.doWith(client(s), context.Background(), "POST", "/thinker/", strings.NewReader("think"))
		}()
		s.until("it runs", func() bool { return s.status().Scheduler.InFlight == 1 })
		waits := s.send("POST", "/other/work", "mine")
		a := s.await(thinks)
		require.NoError(t, a.err)
		require.Equal(t, "data: 1\n\ndata: 2\n\n", string(a.body))
		require.Equal(t, 200, s.await(waits).status)
		require.Empty(t, s.decisions("cut"))
	})
}

// E4: no single request holds another model up for longer than the contract allows.
func TestE4_NoSingleRequestHoldsAnothersModelUp(t *testing.T) {
	t.Parallel()
	raw := func(head string) func(t *testing.T, s *site) {
		return func(t *testing.T, s *site) {
			conn := s.dial()
			t.Cleanup(func() { _ = conn.Close() })
			_, err := io.WriteString(conn, head)
			require.NoError(t, err)
		}
	}
	posts := func(path, body string) func(t *testing.T, s *site) {
		return func(_ *testing.T, s *site) { s.post(path, body) }
	}
	// begins sends a request and doesn't wait for its answer.
	begins := func(method, path, body string) func(t *testing.T, s *site) {
		return func(_ *testing.T, s *site) { s.send(method, path, body) }
	}
	// zipped sends a part of a compressed body that names the hog.
	zipped := func(part func(whole []byte) []byte) func(t *testing.T, s *site) {
		var b bytes.Buffer
		w := gzip.NewWriter(&b)
		_, err := io.WriteString(w, `{"model":"hog","input":"`+strings.Repeat("a", 3<<20)+`"}`)
		require.NoError(t, err)
		require.NoError(t, w.Close())
		return raw(fmt.Sprintf("POST /one/work HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s", b.Len(), part(b.Bytes())))
	}
	for _, c := range []struct {
		name string
		do   func(t *testing.T, s *site)
	}{
		{"HEAD", begins("HEAD", "/hog/work", "")},
		{"HEAD of a large answer", begins("HEAD", "/hog/audio/big?bytes=200000000", "")},
		{"HEAD whose body does not come", raw("HEAD /hog/work HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")},
		{"Expect on a route by model", raw("POST /one/work HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n")},
		{"an expectation nobody knows", raw("POST /hog/upload HTTP/1.1\r\nHost: localhost\r\nExpect: 200-maybe\r\nContent-Length: 10\r\n\r\n")},
		{"compressed body that stalls", zipped(func(whole []byte) []byte { return whole[:len(whole)/2] })},
		{"compressed body that expands a thousandfold", zipped(func(whole []byte) []byte { return whole })},
		{"compressed body that is none", zipped(func(whole []byte) []byte { return bytes.Repeat([]byte("x"), len(whole)) })},
		{"two models in one body", posts("/one/work", `{"model":"hog","model":"other"}`)},
		{"two models, the second of which stalls", raw("POST /one/work HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"model\":\"hog\",\"model\":\"ot")},
		{"unknown model of a consumer with models", begins("POST", "/ollama/api/generate", `{"model":"nope-1","prompt":"x"}`)},
		{"unknown model on a route by model", begins("POST", "/one/api/generate", `{"model":"library/nope:8b","prompt":"x"}`)},
		{"another spelling of a model", begins("POST", "/ollama/api/generate", `{"model":"library/Llama3.1:8B","prompt":"x"}`)},
		{"another spelling on a route by model", begins("POST", "/one/api/generate", `{"model":"Llama3.1:8b","prompt":"x"}`)},
		{"a model that is given back, cold", begins("POST", "/ollama/api/generate", `{"model":"llama3.1:8b","keep_alive":0}`)},
		{"a model that is to stay for ever", begins("POST", "/ollama/api/generate", `{"model":"llama3.1:8b","prompt":"x","keep_alive":-1}`)},
		{"stalled upload", raw("POST /hog/upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nx")},
		{"stalled upload of a large body", raw("POST /hog/upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\nx")},
		{"stalled upload to a route by model", raw("POST /one/work HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"model\":\"hog\",")},
		{"stalled chunk", raw("POST /hog/upload HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe")},
		{"no trailer comes", raw("POST /hog/upload HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n5\r\nhello\r\n0\r\nX-S")},
		{"Expect, and nothing comes", raw("POST /hog/upload HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n")},
		{"stalled download", func(_ *testing.T, s *site) { s.unread(s.client, "/hog/audio/big?bytes=200000000") }},
		{"idle WebSocket", func(t *testing.T, s *site) {
			conn := s.socket("/tunnel/ws")
			t.Cleanup(func() { _ = conn.CloseNow() })
		}},
		{"x_cooldown", posts("/one/work", `{"model":"hog","x_cooldown":86400}`)},
		{"x_keep_alive", posts("/one/work", `{"model":"hog","x_keep_alive":86400,"x_stay_warm":86400}`)},
		{"x_priority and x_client_id", posts("/one/work", `{"model":"hog","x_priority":0,"x_client_id":"other"}`)},
		{"framing trailer", raw("POST /hog/upload HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n5\r\nhello\r\n0\r\nContent-Length: 5\r\n\r\n")},
		{"unknown model", posts("/one/work", `{"model":"nope-1"}`)},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := holders(t, false, "handle_path /tunnel/* {\ngpu_broker hog\nreverse_proxy "+sockets(t)+"\n}",
				shelf("ollama", modelserver.Ollama, "vram 9GiB\nmodel llama3.1:8b", map[string]float64{"llama3.1:8b": 9}))
			c.do(t, s)
			began := time.Now()
			a := s.post("/other/work", "mine")
			require.Equal(t, 200, a.status, string(a.body))
			require.Less(t, time.Since(began), 4*time.Second)
			again := s.post("/one/work", `{"model":"hog"}`)
			require.Equal(t, 200, again.status, string(again.body))
			require.Less(t, again.took, 4*time.Second)
		})
	}
}

func TestH8_ATrailerThatOnlyAHeaderCanBeIsTheClientsFault(t *testing.T) {
	t.Parallel()
	stream := consumer{Options: modelserver.Options{Name: "stream", VRAM: gib(1)}, Route: "stream_body"}
	s := start(t, layout{Consumers: []consumer{mvoice(), stream}})
	for _, path := range []string{"/mvoice/upload", "/stream/upload"} {
		for _, trailer := range []string{"Content-Length: 3", "Transfer-Encoding: chunked", "Trailer: X"} {
			got := s.raw("POST " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n5\r\nhello\r\n0\r\n" + trailer + "\r\n\r\n")
			if path == "/stream/upload" && strings.HasPrefix(got, "HTTP/1.1 200 ") {
				continue // the body was gone before the trailer came
			}
			require.True(t, strings.HasPrefix(got, "HTTP/1.1 400 "), "%s %s: %s", path, trailer, got)
			require.Contains(t, got, `"code":"bad_request"`)
		}
	}
	got := s.raw("POST /mvoice/upload HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n5\r\nhello\r\n0\r\nHost: elsewhere\r\n\r\n")
	require.True(t, strings.HasPrefix(got, "HTTP/1.1 400 "), got)
	for _, name := range []string{"mvoice", "stream"} {
		require.Zero(t, s.metric(`errors_total{code="server_died",consumer="`+name+`"}`))
		require.Equal(t, "healthy", s.status().Consumers[name].Health)
	}
}

func TestH1_ABodyThatIsExpectedIsAskedFor(t *testing.T) {
	t.Parallel()
	s := holders(t, false, "")
	conn := s.dial()
	defer conn.Close()
	_, err := io.WriteString(conn, "POST /hog/upload HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
	require.NoError(t, err)
	in := bufio.NewReader(conn)
	line, err := in.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "HTTP/1.1 100 Continue\r\n", line)
	_, err = io.WriteString(conn, "hello")
	require.NoError(t, err)
	rest, err := io.ReadAll(in)
	require.NoError(t, err)
	require.Contains(t, string(rest), "HTTP/1.1 200 OK")
}

// H2: what one client says in a body shuts out nobody, not even itself.
func TestH2_FieldsThatCostOthersSomethingNeedTrust(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{Total: "24GiB", Routes: "handle_path /trusted/* {\ngpu_broker {\nmodel_from body\ntrust_body\ncooldown_max 1h\nbudget 2s\n}\nreverse_proxy {http.gpu_broker.upstream}\n}"}, "model_from body\nbudget 5s")
	require.Equal(t, 200, s.askJSON("/work", `{"model":"llama","x_cooldown":86400,"x_keep_alive":"nonsense"}`).status)
	for _, name := range []string{"llama", "whisper"} {
		require.Equal(t, 200, s.askJSON("/work", `{"model":"`+name+`"}`).status)
	}
	require.Equal(t, 200, s.askJSON("/trusted/work", `{"model":"llama","x_client_id":"me","x_cooldown":86400}`).status)
	a := s.askJSON("/trusted/work", `{"model":"llama","x_client_id":"me"}`)
	require.Equal(t, 504, a.status)
	require.Contains(t, string(a.body), "cooldown")
	require.Equal(t, 200, s.askJSON("/trusted/work", `{"model":"whisper","x_client_id":"me"}`).status, "another consumer")
	require.Equal(t, 200, s.askJSON("/trusted/work", `{"model":"llama","x_client_id":"you"}`).status, "another client")
}

func TestH2_WhatATrustedBodyAsksForIsClampedByItsRoute(t *testing.T) {
	t.Parallel()
	route := func(name, lines string) string {
		return "handle_path /" + name + "/* {\ngpu_broker {\nmodel_from body\ntrust_body\nbudget 2500ms\n" + lines + "\n}\nreverse_proxy {http.gpu_broker.upstream}\n}\n"
	}
	s := oneURL(t, layout{Routes: route("clamped", "keep_alive_max 300ms\ncooldown_max 300ms") + route("open", "")}, "model_from body\nbudget 5s")
	ask := func(route, text string) answer { return s.askJSON("/"+route+"/work", text) }

	require.Equal(t, 200, ask("clamped", `{"model":"llama","x_client_id":"me","x_cooldown":86400}`).status)
	require.Equal(t, 200, ask("clamped", `{"model":"llama","x_client_id":"me"}`).status, "300 ms later")
	require.Equal(t, 200, ask("open", `{"model":"llama","x_client_id":"you","x_cooldown":86400}`).status)
	require.Equal(t, 504, ask("open", `{"model":"llama","x_client_id":"you"}`).status, "nothing clamps it")

	require.Equal(t, 200, ask("clamped", `{"model":"llama","x_client_id":"she","x_keep_alive":86400,"x_stay_warm":86400}`).status)
	require.Equal(t, 200, ask("clamped", `{"model":"whisper","x_client_id":"she","x_keep_alive":86400}`).status, "llama made way after 300 ms")
	require.Equal(t, 200, ask("open", `{"model":"llama","x_client_id":"he","x_keep_alive":86400}`).status)
	refused := ask("open", `{"model":"whisper","x_client_id":"he"}`)
	require.Contains(t, []int{503, 504}, refused.status, "%s", refused.body)
}
