package e2e

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

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

// trickle sends an upload of 120 KiB within three seconds, which is more than upload_idle, and ends it.
func trickle(t *testing.T, in *io.PipeWriter) {
	t.Helper()
	for range 12 {
		_, err := io.WriteString(in, strings.Repeat("x", 10<<10))
		require.NoError(t, err)
		time.Sleep(250 * time.Millisecond) // the client's pace is what is tested
	}
	require.NoError(t, in.Close())
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
		trickle(t, in)
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
		trickle(t, in)
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
