package modelserver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestPlainServerTakesAndFreesMemoryByItsRoutes(t *testing.T) {
	s := start(t, Options{VRAM: 2 * gpu.GiB, Residue: 300 * gpu.MiB})
	ctx := bound(t)
	require.Equal(t, healthAnswer{Status: "ok"}, health(t, s))
	require.Zero(t, used(t, s.dir))

	want(t, 200, call(ctx, "POST", s.URL()+"/api/admin/load", ""))
	require.Equal(t, healthAnswer{"ok", true, 2048, 0}, health(t, s))
	require.Equal(t, 2*gpu.GiB, used(t, s.dir))
	want(t, 200, call(ctx, "POST", s.URL()+"/api/admin/load", ""))

	want(t, 200, call(ctx, "POST", s.URL()+"/api/admin/unload", ""))
	require.Equal(t, healthAnswer{Status: "ok"}, health(t, s))
	require.Equal(t, 300*gpu.MiB, used(t, s.dir), "the context stays")

	stats := s.Stats()
	require.Equal(t, 1, stats.Loads, "a loaded server isn't loaded again")
	require.Equal(t, 1, stats.Unloads)
	require.Equal(t, 3, stats.HealthProbes)
	require.Equal(t, 2, stats.Requests["/api/admin/load"])
}

func TestPlainServerRefusesWorkUntilItIsLoadedUnlessLazy(t *testing.T) {
	s := start(t, Options{VRAM: gpu.GiB})
	ctx := bound(t)
	refused := want(t, 503, call(ctx, "POST", s.URL()+"/echo", "x"))
	require.JSONEq(t, `{"error":"not loaded"}`, string(refused.body))
	require.Zero(t, s.Stats().Worked)

	s.SetOptions(func(o *Options) { o.Lazy = true })
	want(t, 200, call(ctx, "POST", s.URL()+"/echo", "x"))
	require.Equal(t, 1, s.Stats().Loads)
}

func TestEchoGivesBodyAndContentTypeBackByteForByte(t *testing.T) {
	s := start(t, Options{Preloaded: true})
	body := string(AudioBytes(300_001))
	r, err := http.NewRequestWithContext(bound(t), "POST", s.URL()+"/any/path?q=1", strings.NewReader(body))
	require.NoError(t, err)
	r.Close = true
	r.Header.Set("Content-Type", `multipart/form-data; boundary="x y"`)
	response, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer response.Body.Close()
	got, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.True(t, body == string(got), "the body came back changed")
	sum := sha256.Sum256([]byte(body))
	require.Equal(t, hex.EncodeToString(sum[:]), response.Header.Get("X-Body-Sha256"))
	require.Equal(t, `multipart/form-data; boundary="x y"`, response.Header.Get("Content-Type"))
	require.Equal(t, "/any/path?q=1", response.Header.Get("X-Received-Uri"))
}

func TestAnswersAreDeterministic(t *testing.T) {
	s := start(t, Options{Preloaded: true})
	ctx := bound(t)
	require.Equal(t, SynthesizeBytes([]byte("hello")), want(t, 200, call(ctx, "POST", s.URL()+"/synthesize", "hello")).body)
	require.NotEqual(t, SynthesizeBytes([]byte("hello")), SynthesizeBytes([]byte("hullo")))
	require.Equal(t, AudioBytes(1_000_003), want(t, 200, call(ctx, "GET", s.URL()+"/audio/big?bytes=1000003", "")).body)
	stream := want(t, 200, call(ctx, "POST", s.URL()+"/stream?events=7&ms=1", "{}"))
	require.Equal(t, StreamBytes(7), stream.body)
	require.Equal(t, "text/event-stream", stream.header.Get("Content-Type"))
	upload := want(t, 200, call(ctx, "POST", s.URL()+"/upload?read_ms=1", strings.Repeat("z", 100_000)))
	require.JSONEq(t, fmt.Sprintf(`{"bytes":100000,"sha256":"%x"}`, sha256.Sum256([]byte(strings.Repeat("z", 100_000)))), string(upload.body))
}

func TestStreamSendsEachEventAtOnce(t *testing.T) {
	s := start(t, Options{Preloaded: true})
	ctx, cancel := context.WithCancel(bound(t))
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, "GET", s.URL()+"/stream?events=1000&ms=50", nil)
	require.NoError(t, err)
	response, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer response.Body.Close()
	first := make([]byte, len(streamEvent(0)))
	_, err = response.Body.Read(first)
	require.NoError(t, err)
	require.Equal(t, streamEvent(0), string(first))
	require.Equal(t, 1, s.Stats().Working, "the stream still runs")

	cancel()
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Aborted == 1 && st.Working == 0 }))
}

func TestSingleThreadedServerDoesNotAnswerItsProbeWhileItWorks(t *testing.T) {
	s := start(t, Options{Preloaded: true, Concurrency: 1})
	ctx, leave := context.WithCancel(bound(t))
	busy := send(ctx, "POST", s.URL()+"/echo?ms=60000", "x")
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	probe := send(bound(t), "GET", s.URL()+"/health", "")
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 2 }))
	require.Zero(t, s.Stats().HealthProbes, "the probe waits for its turn")
	leave()
	require.Error(t, (<-busy).err)
	want(t, 200, <-probe)

	free := start(t, Options{Name: "async", Preloaded: true})
	ctx, leave = context.WithCancel(bound(t))
	defer leave()
	busy = send(ctx, "POST", free.URL()+"/echo?ms=60000", "x")
	require.NoError(t, free.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	health(t, free)
	leave()
	<-busy
}

func TestConcurrencyIsCountedAndBounded(t *testing.T) {
	s := start(t, Options{Preloaded: true, Concurrency: 3, Faults: Faults{HoldWork: true}})
	var answers []<-chan answer
	for range 9 {
		answers = append(answers, send(bound(t), "POST", s.URL()+"/echo", "x"))
	}
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 3 && st.InFlight == 9 }))
	s.SetFaults(func(f *Faults) { f.HoldWork = false })
	for _, a := range answers {
		want(t, 200, <-a)
	}
	require.Equal(t, 3, s.Stats().MaxConcurrent)
	require.Equal(t, 9, s.Stats().Worked)
}

func TestManyRequestsShareOneLoadThatTheFirstOnesLeavingDoesNotStop(t *testing.T) {
	s := start(t, Options{VRAM: gpu.GiB, Lazy: true, Faults: Faults{HangLoad: true}})
	ctx, leave := context.WithCancel(bound(t))
	first := send(ctx, "POST", s.URL()+"/echo", "x")
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.LoadsStarted == 1 }))
	second := send(bound(t), "POST", s.URL()+"/echo", "x")
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 2 }))
	leave()
	require.Error(t, (<-first).err)
	s.SetFaults(func(f *Faults) { f.HangLoad = false })
	want(t, 200, <-second)
	require.Equal(t, 1, s.Stats().LoadsStarted)
	require.Equal(t, 1, s.Stats().Loads)
}

func TestUnloadUnderRunningWorkBreaksItAndIsCounted(t *testing.T) {
	s := start(t, Options{Preloaded: true})
	work := send(bound(t), "POST", s.URL()+"/echo?ms=60000", "x")
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	want(t, 200, call(bound(t), "POST", s.URL()+"/api/admin/unload", ""))
	require.Error(t, (<-work).err)
	require.Equal(t, 1, s.Stats().UnloadsWhileBusy)
	require.Equal(t, 1, s.Stats().Aborted)
}

func TestHeadAndOptionsAreNoWork(t *testing.T) {
	s := start(t, Options{})
	want(t, 200, call(bound(t), "HEAD", s.URL()+"/synthesize", ""))
	want(t, 204, call(bound(t), "OPTIONS", s.URL()+"/synthesize", ""))
	require.Zero(t, s.Stats().MaxConcurrent)
}

func TestOverlapFindsTwoServersThatWorkAtOnce(t *testing.T) {
	a := start(t, Options{Name: "a", Preloaded: true, Lazy: true})
	b := start(t, Options{Name: "b", Preloaded: true, Lazy: true})
	want(t, 200, call(bound(t), "POST", a.URL()+"/echo", "x"))
	want(t, 200, call(bound(t), "POST", b.URL()+"/echo", "x"))
	require.Empty(t, Overlap(a, b))

	ctx, leave := context.WithCancel(bound(t))
	long := send(ctx, "POST", a.URL()+"/echo?ms=60000", "x")
	require.NoError(t, a.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	want(t, 200, call(bound(t), "POST", b.URL()+"/echo", "x"))
	leave()
	<-long
	require.NotEmpty(t, Overlap(a, b))
}

func TestEventsCarryTagsAndOrder(t *testing.T) {
	s := start(t, Options{Preloaded: true})
	r, err := http.NewRequestWithContext(bound(t), "POST", s.URL()+"/echo", nil)
	require.NoError(t, err)
	r.Close = true
	r.Header.Set("X-Tag", "mine")
	response, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	_, err = s.WaitForEvent(bound(t), func(e Event) bool { return e.Kind == EventRequestEnd && e.Tag == "mine" })
	require.NoError(t, err)
	var kinds []string
	for _, e := range s.Events() {
		if e.Tag == "mine" {
			kinds = append(kinds, e.Kind)
		}
	}
	require.Equal(t, []string{EventRequestStart, EventWorkStart, EventWorkEnd, EventRequestEnd}, kinds)
}
