package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// image is a server beside which mvoice doesn't fit on a card of 16 GiB.
func image() consumer {
	return consumer{Options: modelserver.Options{Name: "image", VRAM: gib(14), LoadTime: 10 * time.Millisecond, UnloadTime: 10 * time.Millisecond}}
}

// open sends a request and returns its answer's head; the caller reads and closes the body.
func (s *site) open(method, path string) *http.Response {
	s.t.Helper()
	req, err := http.NewRequest(method, s.url+path, nil)
	require.NoError(s.t, err)
	resp, err := s.client.Do(req)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

func TestFC07_StreamFlowsAtOnceAndWholeWhileAnotherWaitsForItsMemory(t *testing.T) {
	t.Parallel()
	overBothVersions(t, func(t *testing.T, https bool) {
		s := start(t, layout{HTTPS: https, Consumers: []consumer{mvoice(), image()}})
		voice := s.servers["mvoice"]
		end := s.holdWork("mvoice")
		resp := s.open("GET", "/mvoice/stream?events=40&ms=1")
		require.Equal(t, "text/event-stream", resp.Header.Get("Content-Type"))
		first := make([]byte, 10)
		_, err := io.ReadFull(resp.Body, first)
		require.NoError(t, err)
		require.Zero(t, voice.Stats().Worked, "the first event comes while the others are still being made")

		picture := s.send("POST", "/image/generate", "a picture")
		s.waitQueued("image", 1)
		end()
		rest, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.True(t, bytes.Equal(modelserver.StreamBytes(40), append(first, rest...)), "the stream must be whole")
		require.Equal(t, 200, s.await(picture).status)

		ended, called := times(voice, modelserver.EventWorkEnd), times(voice, modelserver.EventUnloadCall)
		require.Len(t, ended, 1)
		require.Len(t, called, 1)
		require.True(t, called[0].After(ended[0]), "mvoice is unloaded after its stream")
		require.Zero(t, voice.Stats().UnloadsWhileBusy)
		require.Zero(t, s.servers["image"].Stats().OOMs)
	})
}

func TestEventsOfAStreamArriveOneByOne(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice()}})
	voice := s.servers["mvoice"]
	resp := s.open("GET", "/mvoice/stream?events=5&ms=200")
	var got []byte
	chunk := make([]byte, 4096)
	for reads := 0; ; reads++ {
		n, err := resp.Body.Read(chunk)
		got = append(got, chunk[:n]...)
		if err == io.EOF {
			require.GreaterOrEqual(t, reads, 3, "events must not arrive in a lump") // a busy machine may join some
			break
		}
		require.NoError(t, err)
		if bytes.Count(got, []byte("event:")) < 5 {
			require.Zero(t, voice.Stats().Worked)
		}
	}
	require.True(t, bytes.Equal(modelserver.StreamBytes(5), got))
}

func TestSlotIsReleasedOnlyAfterTheLastByteOfAnAnswer(t *testing.T) {
	t.Parallel()
	const size = 96 << 20 // more than all buffers between the server and us
	s := start(t, layout{Consumers: []consumer{mvoice(), image()}})
	resp := s.open("GET", "/mvoice/audio/big?bytes=100663296")
	picture := s.send("POST", "/image/generate", "a picture")
	s.waitQueued("image", 1)
	audio, want, got := modelserver.Audio(), make([]byte, 1<<20), make([]byte, 1<<20)
	took := func(size int) {
		for range size / len(got) {
			_, _ = io.ReadFull(audio, want)
			_, err := io.ReadFull(resp.Body, got)
			require.NoError(t, err)
			require.True(t, bytes.Equal(want, got))
		}
	}
	for range 2 {
		took(size / 4)
		st := s.status()
		require.Equal(t, 1, st.Consumers["mvoice"].Active)
		require.Equal(t, 1, st.Consumers["image"].Waiting)
		require.Zero(t, s.servers["mvoice"].Stats().UnloadCalls)
	}
	took(size / 2)
	require.Equal(t, 200, s.await(picture).status)
	require.Equal(t, 1, s.servers["mvoice"].Stats().UnloadCalls)
}

func TestDownloadOnABypassRouteRunsWhileTheLockIsHeld(t *testing.T) {
	t.Parallel()
	voice := mvoice()
	voice.Route = "bypass GET /audio/*"
	s := start(t, layout{Consumers: []consumer{voice, image()}})
	size := int64(25_000_000)
	if testing.Short() {
		size = 4_000_000
	}
	want := modelserver.AudioBytes(size)
	for _, holder := range []string{"mvoice", "image"} {
		release := s.hold(holder)
		jobs := s.status().Scheduler.TotalJobs
		a := s.get(fmt.Sprintf("/mvoice/audio/big?bytes=%d", size))
		require.NoError(t, a.err)
		require.Equal(t, 200, a.status)
		require.True(t, bytes.Equal(want, a.body))
		require.Equal(t, holder, s.status().GPUs[0].Lock)
		require.Equal(t, jobs, s.status().Scheduler.TotalJobs, "a download is no job")
		require.Equal(t, 200, release().status)
	}
}

func TestHeadAndOptionsNeverWaitNorLoad(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), image()}})
	release := s.hold("image")
	defer release()
	for _, method := range []string{"HEAD", "OPTIONS"} {
		for _, path := range []string{"/mvoice/synthesize", "/image/generate"} {
			a := s.do(t.Context(), method, path, nil)
			require.NoError(t, a.err)
			require.Less(t, a.status, 300, "%s %s", method, path)
		}
	}
	st := s.status()
	require.EqualValues(t, 1, st.Scheduler.TotalJobs, "the holder alone")
	require.Zero(t, s.servers["mvoice"].Stats().LoadsStarted)
	require.Empty(t, st.Consumers["mvoice"].LastUsed)
}

func TestTouchRoutesCountAsUseAndBypassRoutesDoNot(t *testing.T) {
	t.Parallel()
	voice := mvoice()
	voice.Route = "touch GET /touched\nbypass GET /audio/*"
	voice.Preloaded = true
	s := start(t, layout{Consumers: []consumer{voice, image()}})
	s.waitState("mvoice", "READY")
	used := func() string { return s.status().Consumers["mvoice"].LastUsed }
	require.Empty(t, used())
	require.Equal(t, 200, s.get("/mvoice/audio/big?bytes=10").status)
	require.Equal(t, 204, s.do(t.Context(), "OPTIONS", "/mvoice/touched", nil).status)
	require.Empty(t, used(), "neither bypassed requests nor probes count as use")
	require.Equal(t, 200, s.get("/mvoice/touched").status)
	first := used()
	require.NotEmpty(t, first)
	require.Equal(t, 200, s.get("/mvoice/audio/big?bytes=10").status)
	require.Equal(t, first, used())
	require.Equal(t, 200, s.get("/mvoice/touched").status)
	require.Greater(t, used(), first)
	require.Zero(t, s.status().Scheduler.TotalJobs, "a touch takes no lock and is no job")
}

func TestTouchRouteDoesNotWaitForTheLock(t *testing.T) {
	t.Parallel()
	voice := mvoice()
	voice.Lines = "touch GET /touched"
	voice.Preloaded = true
	s := start(t, layout{Consumers: []consumer{voice, whisper()}})
	s.waitState("mvoice", "READY")
	release := s.hold("whisper")
	require.Equal(t, 200, s.get("/mvoice/touched").status)
	require.Equal(t, "whisper", s.status().GPUs[0].Lock)
	require.Equal(t, 200, release().status)
}

func TestAnswerTellsWhoServedAndHowLongItWaited(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), whisper()}})
	cold := s.post("/mvoice/synthesize", "hello")
	require.Equal(t, "mvoice", cold.header.Get("X-GPU-Broker-Consumer"))
	require.Regexp(t, `^gpu-queue;dur=\d+(\.\d)?, gpu-load;dur=\d+(\.\d)?$`, cold.header.Get("Server-Timing"))
	require.NotContains(t, cold.header.Get("Server-Timing"), "gpu-load;dur=0", "it was loaded for this request: 50 ms")
	warm := s.post("/mvoice/synthesize", "hello")
	require.Equal(t, "gpu-queue;dur=0, gpu-load;dur=0", warm.header.Get("Server-Timing"))
	require.Equal(t, "mvoice", warm.header.Get("X-GPU-Broker-Consumer"))

	release := s.hold("whisper")
	queued := s.send("POST", "/mvoice/synthesize", "hello")
	s.waitQueued("mvoice", 1)
	require.Equal(t, 200, release().status)
	timing := s.await(queued).header.Get("Server-Timing")
	require.NotContains(t, timing, "gpu-queue;dur=0,", timing)
	require.True(t, strings.HasSuffix(timing, "gpu-load;dur=0.0"), "mvoice was there: %s", timing)
}

func TestHeadersCanBeOff(t *testing.T) {
	t.Parallel()
	on := whisper()
	on.Route = "headers on"
	s := start(t, layout{Global: "headers off", Consumers: []consumer{mvoice(), on}})
	a := s.post("/mvoice/synthesize", "hello")
	require.Equal(t, 200, a.status)
	require.Empty(t, a.header.Get("X-GPU-Broker-Consumer"))
	require.Empty(t, a.header.Get("Server-Timing"))
	a = s.post("/whisper/inference", "hello")
	require.Equal(t, "whisper", a.header.Get("X-GPU-Broker-Consumer"))
	require.NotEmpty(t, a.header.Get("Server-Timing"))
}
