package e2e

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

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
		ctx, ended := context.WithCancel(context.Background())
		defer ended()
		var ping sync.Once
		for {
			kind, text, err := conn.Read(context.Background())
			if err != nil || conn.Write(context.Background(), kind, text) != nil {
				return
			}
			ping.Do(func() {
				go func() {
					for conn.Ping(ctx) == nil { // no shorter context: one that ends during a write closes the connection
						time.Sleep(50 * time.Millisecond) // the server's pace is what is tested
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
