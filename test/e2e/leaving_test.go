package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// freesWithin is how long a place stays taken after its client has left (issue 2, A5).
const freesWithin = 100 * time.Millisecond

func TestAlone_ClientThatLeavesWhileQueuedFreesItsPlaceWithin100ms(t *testing.T) {
	for _, c := range []struct {
		name   string
		https  bool
		method string
		size   int
	}{
		{"GET over HTTP/1.1", false, "GET", 0},
		{"small POST over HTTP/1.1", false, "POST", 10},
		{"POST of 1 MiB over HTTP/1.1", false, "POST", 1 << 20},
		{"POST of 3 MiB over HTTP/1.1", false, "POST", 3 << 20},
		{"GET over HTTP/2", true, "GET", 0},
		{"POST of 1 MiB over HTTP/2", true, "POST", 1 << 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := start(t, layout{HTTPS: c.https, Consumers: []consumer{mvoice(), whisper()}})
			release := s.hold("whisper")
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			left := make(chan answer, 1)
			go func() { left <- s.do(ctx, c.method, "/mvoice/leaver", bytes.NewReader(every(c.size))) }()
			s.waitQueued("mvoice", 1)
			stays := s.send("POST", "/mvoice/stays", "x")
			s.waitQueued("mvoice", 2)

			leave()
			began := time.Now()
			s.waitQueued("mvoice", 1)
			require.Less(t, time.Since(began), freesWithin)
			require.ErrorIs(t, s.await(left).err, context.Canceled)

			require.Equal(t, 200, release().status)
			require.Equal(t, 200, s.await(stays).status)
			require.Zero(t, s.servers["mvoice"].Stats().Requests["/leaver"], "the server of a client that left is never called")
			st := s.nothingRuns()
			require.EqualValues(t, 1, st.Scheduler.Cancelled)
			require.Zero(t, st.Scheduler.QueueDepth)
		})
	}
}

func TestAlone_LastClientToLeaveOpensTheGateAndCausesNoUnload(t *testing.T) {
	s := start(t, layout{Consumers: []consumer{mvoice(), image()}})
	release := s.hold("mvoice")
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	left := s.goCtx(ctx, "POST", "/image/generate", "a picture")
	s.waitQueued("image", 1)
	leave()
	began := time.Now()
	s.waitQueued("image", 0)
	require.Less(t, time.Since(began), freesWithin)
	require.ErrorIs(t, s.await(left).err, context.Canceled)
	require.Equal(t, 200, release().status)
	require.Equal(t, 200, s.post("/mvoice/synthesize", "still here").status)
	require.Equal(t, 1, s.servers["mvoice"].Stats().Loads)
	require.Zero(t, s.servers["mvoice"].Stats().UnloadCalls)
	require.Zero(t, s.servers["image"].Stats().LoadsStarted)
}

// oneAtATime sends jobs of one consumer at once: a place that was given back twice lets two of them run together.
func (s *site) oneAtATime(name string) {
	s.t.Helper()
	srv := s.servers[name]
	var jobs []<-chan answer
	for range 4 {
		jobs = append(jobs, s.send("POST", "/"+name+"/synthesize?ms=30", "next"))
	}
	for _, j := range jobs {
		require.Equal(s.t, 200, s.await(j).status)
	}
	require.Equal(s.t, 1, srv.Stats().MaxConcurrent)
}

func TestClientThatLeavesMidStreamReleasesOnce(t *testing.T) {
	t.Parallel()
	overBothVersions(t, func(t *testing.T, https bool) {
		s := start(t, layout{HTTPS: https, Consumers: []consumer{mvoice(), whisper()}})
		voice := s.servers["mvoice"]
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		req, err := http.NewRequestWithContext(ctx, "GET", s.url+"/mvoice/stream?events=100000&ms=10", nil)
		require.NoError(t, err)
		resp, err := s.client.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		_, err = io.ReadFull(resp.Body, make([]byte, 100))
		require.NoError(t, err)
		require.Equal(t, 1, s.status().Consumers["mvoice"].Active)
		leave()
		s.until("the place is free", func() bool { return s.status().Consumers["mvoice"].Active == 0 })
		require.NoError(t, voice.WaitFor(t.Context(), func(now modelserver.Stats) bool { return now.Aborted == 1 }), "the server hears of it")
		require.Empty(t, s.status().GPUs[0].Lock)

		s.oneAtATime("mvoice")
		require.Equal(t, 200, s.post("/whisper/inference", "others too").status)
		s.idle("whisper")
		st := s.nothingRuns()
		require.EqualValues(t, 6, st.Scheduler.TotalJobs)
		require.EqualValues(t, 5, st.Consumers["mvoice"].TotalRequests)
		require.EqualValues(t, 1, st.Consumers["whisper"].TotalRequests)
	})
}

func TestClientThatLeavesBeforeTheFirstByteOfItsAnswerReleasesOnce(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice()}})
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	left := s.goCtx(ctx, "POST", "/mvoice/synthesize?ms=60000", "long")
	require.NoError(t, s.servers["mvoice"].WaitFor(t.Context(), func(now modelserver.Stats) bool { return now.Working == 1 }))
	leave()
	require.ErrorIs(t, s.await(left).err, context.Canceled)
	s.idle("mvoice")
	s.oneAtATime("mvoice")
	st := s.nothingRuns()
	require.EqualValues(t, 5, st.Scheduler.TotalJobs)
}

func TestServerThatBreaksOffMidBodyReleasesOnce(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"/mvoice/synthesize", "/mvoice/stream?events=20&ms=1"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Consumers: []consumer{mvoice()}})
			voice := s.servers["mvoice"]
			voice.SetFaults(func(f *modelserver.Faults) { f.AbortMidBody = true })
			a := s.post(path, "hello")
			require.Error(t, a.err, "the client must see that the answer isn't whole")
			require.Equal(t, 200, a.status)
			require.NotEmpty(t, a.body)
			s.idle("mvoice")
			voice.SetFaults(func(f *modelserver.Faults) { f.AbortMidBody = false })
			s.oneAtATime("mvoice")
			st := s.nothingRuns()
			require.EqualValues(t, 5, st.Scheduler.TotalJobs)
			require.Equal(t, 1, voice.Stats().Aborted, "nothing is sent twice")
			require.Equal(t, 4, voice.Stats().Worked)
		})
	}
}

func TestServerThatDiesMidBodyReleasesOnceAndServesAgainOnceItIsBack(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), image()}})
	voice := s.servers["mvoice"]
	voice.SetFaults(func(f *modelserver.Faults) { f.DieMidBody = true })
	a := s.post("/mvoice/synthesize", "hello")
	require.Error(t, a.err)
	require.Equal(t, 200, a.status)
	s.idle("mvoice")
	s.until("its death is seen", func() bool { return s.status().Consumers["mvoice"].Health == "unhealthy" })
	refused := s.post("/mvoice/synthesize", "nobody there")
	require.Equal(t, 503, refused.status)
	require.Equal(t, "unhealthy", refused.code())
	require.Equal(t, 200, s.post("/image/generate", "its memory is free").status)
	require.Zero(t, s.servers["image"].Stats().OOMs)

	require.NoError(t, voice.Restart())
	s.until("its return is seen", func() bool { return s.status().Consumers["mvoice"].Health == "healthy" })
	s.oneAtATime("mvoice")
	s.nothingRuns()
}

func TestServerThatDiesBeforeItAnswersGives502(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice()}})
	voice := s.servers["mvoice"]
	voice.SetFaults(func(f *modelserver.Faults) { f.DieOnRequest = true })
	a := s.post("/mvoice/synthesize", "hello")
	require.Equal(t, 502, a.status)
	require.Equal(t, "server_died", a.code())
	require.Equal(t, "mvoice", a.header.Get("X-GPU-Broker-Consumer"))
	s.idle("mvoice")
	require.Equal(t, 1, voice.Stats().Requests["/synthesize"], "bytes were sent: it is not tried again")
}

func TestClientThatLeavesInTheMiddleOfItsUploadIsNoError(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		head string
		warm bool
	}{
		{"large", "Content-Length: 1000000\r\n\r\nsome of it", false},
		{"large, server loaded", "Content-Length: 1000000\r\n\r\nsome of it", true},
		{"small", "Content-Length: 1000\r\n\r\nsome of it", false},
		{"small, server loaded", "Content-Length: 1000\r\n\r\nsome of it", true},
		{"chunked", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", false},
		{"inside a chunk", "Transfer-Encoding: chunked\r\n\r\n5\r\nhe", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			voice := mvoice()
			voice.Preloaded = c.warm
			s := start(t, layout{Consumers: []consumer{voice}, Routes: "log {\noutput file {env.XDG_DATA_HOME}/access.log\n}"})
			if c.warm {
				s.waitState("mvoice", "READY")
			}
			conn := s.dial()
			_, err := io.WriteString(conn, "POST /mvoice/leaver HTTP/1.1\r\nHost: localhost\r\n"+c.head)
			require.NoError(t, err)
			require.NoError(t, conn.Close())
			got := s.logged("/mvoice/leaver")
			require.Equal(t, 499, got.Status)
			require.Equal(t, "info", got.Level)
			s.idle("mvoice")
			require.Empty(t, s.servers["mvoice"].Stats().Worked)
			// What had reached the server ends there when it sees its connection closed.
			require.NoError(t, s.servers["mvoice"].WaitFor(t.Context(), func(now modelserver.Stats) bool { return now.Working == 0 }))
			s.oneAtATime("mvoice")
			require.Contains(t, string(s.adminDo("GET", "/metrics", "", "").body), `code="server_died",consumer="mvoice"} 0`, "it is not the server's fault")
		})
	}
}

// entry is a line of the access log.
type entry struct {
	Level    string   `json:"level"`
	Status   int      `json:"status"`
	Consumer string   `json:"gpu_consumer"`
	Wait     *float64 `json:"gpu_wait"`
	Reason   string   `json:"gpu_reason"`
	Request  struct {
		URI string `json:"uri"`
	} `json:"request"`
}

// logged waits for the access log's line of a request. The site must log to its data folder.
func (s *site) logged(uri string) (found entry) {
	s.t.Helper()
	s.until("the access log tells of "+uri, func() bool {
		text, _ := os.ReadFile(filepath.Join(s.dir, "data", "access.log"))
		for line := range bytes.Lines(text) {
			var e entry
			if json.Unmarshal(line, &e) == nil && e.Request.URI == uri {
				found = e
				return true
			}
		}
		return false
	})
	return found
}

func TestAccessLogTellsTheConsumerAndTheWait(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "max_queue 1", Consumers: []consumer{mvoice(), whisper()}, Routes: "log {\noutput file {env.XDG_DATA_HOME}/access.log\n}"})
	require.Equal(t, 200, s.post("/mvoice/synthesize?n=cold", "hello").status)
	cold := s.logged("/mvoice/synthesize?n=cold")
	require.Equal(t, "mvoice", cold.Consumer)
	require.NotNil(t, cold.Wait)
	require.Greater(t, *cold.Wait, 0.05, "it was loaded for this request")
	require.Equal(t, 200, s.post("/mvoice/synthesize?n=warm", "hello").status)
	require.Zero(t, *s.logged("/mvoice/synthesize?n=warm").Wait)

	release := s.hold("whisper")
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	left := s.goCtx(ctx, "POST", "/mvoice/synthesize?n=left", "x")
	s.waitQueued("mvoice", 1)
	require.Equal(t, 503, s.post("/mvoice/synthesize?n=refused", "x").status)
	refused := s.logged("/mvoice/synthesize?n=refused")
	require.Equal(t, "warn", refused.Level, "overload is no error")
	require.Equal(t, "mvoice", refused.Consumer)
	require.Equal(t, "queue_full", refused.Reason)
	leave()
	require.ErrorIs(t, s.await(left).err, context.Canceled)
	require.Equal(t, 499, s.logged("/mvoice/synthesize?n=left").Status)
	require.Equal(t, 200, release().status)
}

func TestErrorRoutesOfTheSiteWin(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "max_queue 1", Consumers: []consumer{mvoice(), whisper()},
		Routes: "handle_errors {\nheader X-Own yes\nrespond \"own: {http.gpu_broker.reason} {http.gpu_broker.consumer} {err.status_code}\"\n}"})
	release := s.hold("whisper")
	queued := s.send("POST", "/mvoice/synthesize", "x")
	s.waitQueued("mvoice", 1)
	a := s.post("/mvoice/synthesize", "x")
	require.Equal(t, 503, a.status)
	require.Equal(t, "own: queue_full mvoice 503", string(a.body))
	require.Equal(t, "yes", a.header.Get("X-Own"))
	seconds, err := strconv.Atoi(a.header.Get("Retry-After"))
	require.NoError(t, err)
	require.True(t, 1 <= seconds && seconds <= 60)
	require.Equal(t, 200, release().status)
	require.Equal(t, 200, s.await(queued).status)

	s.servers["mvoice"].SetFaults(func(f *modelserver.Faults) { f.FailPaths = map[string]int{"/fails": 503} })
	a = s.post("/mvoice/fails", "x")
	require.Equal(t, 503, a.status)
	require.Contains(t, string(a.body), "told to fail", "a server's own error is its own")
}

func TestWithoutErrorRoutesARefusalIsInOpenAIsForm(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "max_queue 1", Consumers: []consumer{mvoice(), whisper()}})
	release := s.hold("whisper")
	queued := s.send("POST", "/mvoice/synthesize", "x")
	s.waitQueued("mvoice", 1)
	req, err := http.NewRequest("POST", s.url+"/mvoice/synthesize", bytes.NewReader([]byte("x")))
	require.NoError(t, err)
	req.Header.Set("Origin", "https://app.example")
	resp, err := s.client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, 503, resp.StatusCode)
	require.Equal(t, "application/json", resp.Header.Get("Content-Type"))
	require.Equal(t, "https://app.example", resp.Header.Get("Access-Control-Allow-Origin"))
	var doc struct {
		Error struct {
			Message, Type, Code, Consumer string
			RetryAfter                    int `json:"retry_after"`
		}
	}
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&doc))
	require.Equal(t, "gpu_broker_error", doc.Error.Type)
	require.Equal(t, "queue_full", doc.Error.Code)
	require.Equal(t, "mvoice", doc.Error.Consumer)
	require.NotEmpty(t, doc.Error.Message)
	require.Equal(t, resp.Header.Get("Retry-After"), strconv.Itoa(doc.Error.RetryAfter))
	require.Equal(t, 200, release().status)
	require.Equal(t, 200, s.await(queued).status)
}
