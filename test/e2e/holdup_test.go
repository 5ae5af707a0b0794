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
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
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

// H1: a body of ten bytes of which one comes.
func TestH1_ASmallBodyThatDoesNotComeHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	versions(t, func(t *testing.T, https bool, client func(s *site) *http.Client) {
		for _, c := range []struct {
			name   string
			length int64
			first  string
		}{{"ten bytes, one comes", 10, "x"}, {"64 KiB, half of it comes", 64 << 10, strings.Repeat("x", 32<<10)}, {"length unknown", -1, "x"}} {
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				s := holders(t, https, "")
				in, done := s.slowUpload(client(s), "/hog/upload", c.length)
				_, err := io.WriteString(in, c.first)
				require.NoError(t, err)
				began := time.Now()
				require.Equal(t, 200, s.post("/other/work", "mine").status)
				require.Less(t, time.Since(began), 5*time.Second)
				a := s.await(done)
				if a.err == nil { // the client may see the connection end first
					require.Equal(t, 408, a.status)
					require.Equal(t, "upload_stalled", a.code())
				}
				require.Zero(t, s.servers["hog"].Stats().Requests["/upload"])
				require.EqualValues(t, 1, s.metric(`errors_total{code="upload_stalled",consumer="hog"}`))
				require.Zero(t, s.metric(`errors_total{code="client_left",consumer="hog"}`), "it is no client that left")
			})
		}
	})
}

// H1: on a route whose small bodies may ask for an unload, the body is read before anything else is done for the request.
func TestH1_ASmallBodyThatDoesNotComeIsCutWhereItMayAskForAnUnload(t *testing.T) {
	t.Parallel()
	versions(t, func(t *testing.T, https bool, client func(s *site) *http.Client) {
		for path, first := range map[string]string{"/api/generate": "{", "/api/chat": `{"model":"whole",`} {
			t.Run(path[1:], func(t *testing.T) {
				t.Parallel()
				s := holders(t, https, "", consumer{Options: modelserver.Options{Name: "whole", Manner: modelserver.Ollama, VRAM: gib(3)}})
				in, done := s.slowUpload(client(s), "/whole"+path, 100)
				_, err := io.WriteString(in, first)
				require.NoError(t, err)
				s.until("it is cut", func() bool { return s.metric(`errors_total{code="upload_stalled",consumer="whole"}`) == 1 })
				if a := s.await(done); a.err == nil {
					require.Equal(t, 408, a.status)
					require.Equal(t, "upload_stalled", a.code())
				}
				require.Zero(t, s.servers["whole"].Stats().Requests[path])
			})
		}
	})
}

// taker is a server that reads its body to the end; of /early it answers the beginning before.
func taker(t *testing.T) string {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		out := http.NewResponseController(w)
		_ = out.EnableFullDuplex()
		if r.URL.Path == "/early" {
			_, _ = io.WriteString(w, "early\n")
			_ = out.Flush()
		}
		n, err := io.Copy(io.Discard, r.Body)
		if err == nil {
			_, _ = fmt.Fprintf(w, "%d bytes", n)
		}
	}))
	t.Cleanup(srv.Close)
	return srv.Listener.Addr().String()
}

// streamedTo is a route that passes bodies on as they come.
func streamedTo(server string) string {
	return "handle_path /stream/* {\ngpu_broker hog {\nstream_body\n}\nreverse_proxy " + server + " {\nflush_interval -1\n}\n}"
}

// H1: stream_body gives a request the GPU before its body is there.
func TestH1_AStreamedUploadThatStallsIsCutOnceOthersWait(t *testing.T) {
	t.Parallel()
	versions(t, func(t *testing.T, https bool, client func(s *site) *http.Client) {
		for _, length := range []int64{10, -1} {
			s := holders(t, https, streamedTo(taker(t)))
			in, done := s.slowUpload(client(s), "/stream/upload", length)
			_, err := io.WriteString(in, "x")
			require.NoError(t, err)
			s.until("it runs", func() bool { return s.status().Scheduler.InFlight == 1 })
			require.Equal(t, 200, s.post("/other/work", "mine").status)
			a := s.await(done)
			require.NoError(t, a.err)
			require.Equal(t, 408, a.status)
			require.Equal(t, "upload_stalled", a.code())
			require.EqualValues(t, 1, s.metric(`errors_total{code="upload_stalled",consumer="hog"}`))
			require.Zero(t, s.metric(`errors_total{code="client_left",consumer="hog"}`), "it is no client that left")
			require.Zero(t, s.metric(`errors_total{code="server_died",consumer="hog"}`), "it is not the server's fault")
			require.Empty(t, s.decisions("cut"), "it is told as a refusal")
		}
	})
}

// Over HTTP/1 net/http reads the whole body before an answer begins.
func TestH1_AStreamedUploadThatStallsAfterItsAnswerHasBegunIsCut(t *testing.T) {
	t.Parallel()
	s := holders(t, true, streamedTo(taker(t)))
	in, done := s.slowUpload(s.client, "/stream/early", -1)
	_, err := io.WriteString(in, "x")
	require.NoError(t, err)
	s.until("it runs", func() bool { return s.status().Scheduler.InFlight == 1 })
	s.makesWay(t, "upload_stalled")
	a := s.await(done)
	require.Error(t, a.err, "what is cut must not look whole")
	require.EqualValues(t, 1, s.metric(`errors_total{code="upload_stalled",consumer="hog"}`))
}

// A transport closes a body of which its server wants no more, and so net/http reads on.
func TestH1_AStalledUploadThatItsServerRefusesHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
	t.Cleanup(srv.Close)
	versions(t, func(t *testing.T, https bool, client func(s *site) *http.Client) {
		s := holders(t, https, streamedTo(srv.Listener.Addr().String()))
		in, _ := s.slowUpload(client(s), "/stream/upload", 10)
		_, err := io.WriteString(in, "x")
		require.NoError(t, err)
		require.Equal(t, 200, s.post("/other/work", "mine").status)
	})
}

func TestH1_AStreamedUploadThatGoesOnIsServed(t *testing.T) {
	t.Parallel()
	versions(t, func(t *testing.T, https bool, client func(s *site) *http.Client) {
		s := holdersWithin(t, ample, https, streamedTo(taker(t)))
		in, done := s.slowUpload(client(s), "/stream/upload", -1)
		_, err := io.WriteString(in, "x")
		require.NoError(t, err)
		s.until("it runs", func() bool { return s.status().Scheduler.InFlight == 1 })
		waits := s.send("POST", "/other/work", "mine")
		for range 12 { // three seconds in all: more than upload_idle
			_, err := io.WriteString(in, strings.Repeat("x", 10<<10))
			require.NoError(t, err)
			time.Sleep(250 * time.Millisecond) // the client's pace is what is tested
		}
		require.NoError(t, in.Close())
		a := s.await(done)
		require.NoError(t, a.err)
		require.Equal(t, "122881 bytes", string(a.body))
		require.Equal(t, 200, s.await(waits).status)
	})
}

// The client has sent all it has: it waits for its server.
func TestH1_AServerThatThinksOverAStreamedUploadIsNeverCut(t *testing.T) {
	t.Parallel()
	s := holders(t, false, streamedTo(thinker(t, 2*time.Second)))
	thinks := s.send("POST", "/stream/", "think")
	s.until("it runs", func() bool { return s.status().Scheduler.InFlight == 1 })
	waits := s.send("POST", "/other/work", "mine")
	require.Equal(t, "data: 1\n\ndata: 2\n\n", string(s.await(thinks).body))
	require.Equal(t, 200, s.await(waits).status)
	require.Empty(t, s.decisions("cut"))
}

func TestH5_ASlowUploadThatGoesOnIsServed(t *testing.T) {
	t.Parallel()
	versions(t, func(t *testing.T, https bool, client func(s *site) *http.Client) {
		s := holdersWithin(t, ample, https, "")
		in, done := s.slowUpload(client(s), "/hog/upload", -1)
		for range 12 { // three seconds in all: more than upload_idle
			_, err := io.WriteString(in, strings.Repeat("x", 10<<10))
			require.NoError(t, err)
			time.Sleep(250 * time.Millisecond) // the client's pace is what is tested
		}
		require.NoError(t, in.Close())
		a := s.await(done)
		require.NoError(t, a.err)
		require.Equal(t, 200, a.status)
	})
}

func TestH5_StalledUploadsGiveTheirRoomBack(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: scaled + "\nmax_buffered 2MiB", Consumers: []consumer{mvoice()}})
	require.Equal(t, 200, s.post("/mvoice/synthesize", "warm").status)
	var all []<-chan answer
	for range 8 {
		in, done := s.slowUpload(s.newClient(), "/mvoice/upload", 900<<10)
		go func() { _, _ = in.Write(every(700 << 10)) }() // it breaks off where the site has no room
		all = append(all, done)
	}
	require.Equal(t, 200, s.post("/mvoice/synthesize", "small bodies need no room").status)
	for _, done := range all {
		if a := s.await(done); a.err == nil {
			require.Contains(t, []int{408, 503}, a.status)
		}
	}
	s.until("the room is back", func() bool { return s.metric("buffered_bytes") == 0 })
	require.Equal(t, 200, s.post("/mvoice/synthesize", string(every(900<<10))).status)
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

// sockets is a server of WebSockets that say nothing by themselves, and answer each message by itself.
func sockets(t *testing.T) string {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			return
		}
		defer func() { _ = conn.CloseNow() }()
		for {
			kind, text, err := conn.Read(context.Background())
			if err != nil || conn.Write(context.Background(), kind, text) != nil {
				return
			}
		}
	}))
	t.Cleanup(srv.Close)
	return srv.Listener.Addr().String()
}

func TestH6_AWebSocketThatIsLeftAloneIsCutOnceOthersWait(t *testing.T) {
	t.Parallel()
	s := holders(t, false, "handle_path /tunnel/* {\ngpu_broker hog\nreverse_proxy "+sockets(t)+"\n}")
	conn := s.socket("/tunnel/ws")
	defer func() { _ = conn.CloseNow() }()
	s.makesWay(t, "tunnel_idle")
	require.EqualValues(t, 1, s.metric(`errors_total{code="tunnel_idle",consumer="hog"}`))
}

// pinging is a server of WebSockets that answers each message by itself, and pings from the first one on, as uvicorn does every 20 s.
func pinging(t *testing.T) string {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			return
		}
		defer func() { _ = conn.CloseNow() }()
		conn.SetReadLimit(1 << 20)
		ended := make(chan struct{})
		defer close(ended)
		var ping sync.Once
		for {
			kind, text, err := conn.Read(context.Background())
			if err != nil || conn.Write(context.Background(), kind, text) != nil {
				return
			}
			ping.Do(func() {
				go func() {
					for {
						select {
						case <-ended:
							return
						case <-time.After(50 * time.Millisecond):
							ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
							_ = conn.Ping(ctx)
							cancel()
						}
					}
				}()
			})
		}
	}))
	t.Cleanup(srv.Close)
	return srv.Listener.Addr().String()
}

// H6: browsers answer pings by themselves, whoever has gone for lunch.
func TestH6_AWebSocketThatOnlyPingsIsCutOnceOthersWait(t *testing.T) {
	t.Parallel()
	for _, length := range []int{0, 5, 200, 100_000} {
		s := holders(t, false, "handle_path /tunnel/* {\ngpu_broker hog\nreverse_proxy "+pinging(t)+"\n}")
		conn := s.socket("/tunnel/ws")
		defer func() { _ = conn.CloseNow() }()
		conn.SetReadLimit(1 << 20)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, conn.Write(ctx, websocket.MessageText, every(length)))
		_, text, err := conn.Read(ctx)
		require.NoError(t, err)
		require.Len(t, text, length)
		go func() { _, _, _ = conn.Read(context.Background()) }() // it answers pings
		s.makesWay(t, "tunnel_idle")
	}
}

// What a client sends with its request, before there is a tunnel, is the beginning of its frames.
func TestH6_AWebSocketThatBeginsEarlyAndThenOnlyPingsIsCut(t *testing.T) {
	t.Parallel()
	s := holders(t, false, "handle_path /tunnel/* {\ngpu_broker hog\nreverse_proxy "+sockets(t)+"\n}")
	conn := s.dial()
	defer conn.Close()
	ping := string([]byte{0x89, 0x82, 0, 0, 0, 0, 'h', 'i'})
	_, err := io.WriteString(conn, "GET /tunnel/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"+
		string([]byte{0x81, 0x82, 0, 0, 0, 0, 'h', 'i'})+ping[:5])
	require.NoError(t, err)
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, 101, resp.StatusCode)
	go func() {
		for rest := ping[5:]; ; rest = ping {
			if _, err := io.WriteString(conn, rest); err != nil {
				return
			}
			time.Sleep(50 * time.Millisecond) // the client's pace is what is tested
		}
	}()
	echo := make([]byte, 4)
	_, err = io.ReadFull(in, echo)
	require.NoError(t, err)
	require.Equal(t, []byte{0x81, 2, 'h', 'i'}, echo)
	s.makesWay(t, "tunnel_idle")
}

func TestH6_AWebSocketThatIsUsedIsNotCut(t *testing.T) {
	t.Parallel()
	s := holdersWithin(t, ample, false, "handle_path /tunnel/* {\ngpu_broker hog\nreverse_proxy "+pinging(t)+"\n}")
	conn := s.socket("/tunnel/ws")
	defer func() { _ = conn.CloseNow() }()
	waits := s.send("POST", "/other/work", "mine")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for range 16 { // four seconds in all, twice tunnel_idle
		require.NoError(t, conn.Write(ctx, websocket.MessageText, []byte("hello")))
		_, _, err := conn.Read(ctx)
		require.NoError(t, err)
		time.Sleep(250 * time.Millisecond) // the client's pace is what is tested
	}
	require.Empty(t, s.decisions("cut"))
	require.NoError(t, conn.Close(websocket.StatusNormalClosure, ""))
	require.Equal(t, 200, s.await(waits).status)
}

func TestH6_AnIdleTunnelStaysWhileItsServerSaysThatItWorks(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Global:    scaled,
		Consumers: []consumer{{Options: modelserver.Options{Name: "hog", VRAM: gib(10)}, Lines: busyPlain}, {Options: modelserver.Options{Name: "other", VRAM: gib(10)}}},
		Routes:    "handle_path /tunnel/* {\ngpu_broker hog\nreverse_proxy " + sockets(t) + "\n}",
	})
	s.serve("hog")
	conn := s.socket("/tunnel/ws")
	defer func() { _ = conn.CloseNow() }()
	s.holdWork("hog")
	worked := make(chan error, 1)
	go func() { // its server computes for it, and says so
		resp, err := http.Post(s.servers["hog"].URL()+"/work", "text/plain", strings.NewReader("x"))
		if err == nil {
			err = resp.Body.Close()
		}
		worked <- err
	}()
	s.working("hog")
	waits := s.send("POST", "/other/work", "mine")
	s.waitQueued("other", 1)
	time.Sleep(1200 * time.Millisecond) // more than twice tunnel_idle
	require.Empty(t, s.decisions("cut"))
	require.Equal(t, 1, s.status().Consumers["other"].Waiting)
	s.letWork("hog")
	require.NoError(t, <-worked)
	s.ok(waits)
	cuts := s.decisions("cut")
	require.Len(t, cuts, 1)
	require.Equal(t, "tunnel_idle", cuts[0].Code)
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
