package e2e

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// heartbeats is the route of these tests: a hundred beats and more in a few seconds.
const heartbeats = "heartbeat 20ms"

// listener reads an event stream as it comes.
type listener struct {
	s    *site
	resp *http.Response
	in   *bufio.Reader
}

// listen asks for an event stream and returns once its head is there. body, unless empty, is JSON.
func (s *site) listen(ctx context.Context, path, body string, header ...string) *listener {
	s.t.Helper()
	req := s.asks(ctx, path, body, header...)
	resp, err := s.client.Do(req)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = resp.Body.Close() })
	return &listener{s, resp, bufio.NewReader(resp.Body)}
}

// asks is a request for an event stream.
func (s *site) asks(ctx context.Context, path, body string, header ...string) *http.Request {
	s.t.Helper()
	method, content := "GET", io.Reader(http.NoBody)
	if body != "" {
		method, content = "POST", strings.NewReader(body)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	s.t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, method, s.url+path, content)
	require.NoError(s.t, err)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	} else {
		req.Header.Set("Accept", "application/json, text/event-stream")
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return req
}

// comment reads a comment line and the blank line after it.
func (l *listener) comment() string {
	l.s.t.Helper()
	line, err := l.in.ReadString('\n')
	require.NoError(l.s.t, err)
	require.True(l.s.t, strings.HasPrefix(line, ": "), "%q is no comment", line)
	require.Less(l.s.t, len(line), 200)
	blank, err := l.in.ReadString('\n')
	require.NoError(l.s.t, err)
	require.Equal(l.s.t, "\n", blank, "the comment's block is ended")
	return strings.TrimSpace(line[2:])
}

// comments reads comments until one is as wanted.
func (l *listener) comments(want string) {
	l.s.t.Helper()
	for got := ""; got != want; {
		got = l.comment()
	}
}

// rest is all that follows the comments, and the last of these.
func (l *listener) rest() (last string, rest []byte) {
	l.s.t.Helper()
	for {
		next, err := l.in.Peek(2)
		if err != nil || string(next) != ": " {
			break
		}
		last = l.comment()
	}
	rest, err := io.ReadAll(l.in)
	require.NoError(l.s.t, err)
	return last, rest
}

// opened checks the head of an event stream that began with a comment.
func (l *listener) opened(consumer string) {
	l.s.t.Helper()
	require.Equal(l.s.t, 200, l.resp.StatusCode)
	for name, want := range map[string]string{
		"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Gpu-Broker-Consumer": consumer,
		"X-Modelserver": "", "Content-Length": "",
	} {
		require.Equal(l.s.t, want, l.resp.Header.Get(name), name)
	}
}

// failed reads the error event that ends a stream of which only comments came.
func (l *listener) failed() map[string]any {
	l.s.t.Helper()
	_, rest := l.rest()
	text, ok := strings.CutPrefix(string(rest), "data: ")
	require.True(l.s.t, ok, "%q", rest)
	text, ok = strings.CutSuffix(text, "\n\n")
	require.True(l.s.t, ok, "%q", rest)
	require.NotContains(l.s.t, text, "\n", "one event, and no [DONE] after it")
	var doc struct{ Error map[string]any }
	require.NoError(l.s.t, json.Unmarshal([]byte(text), &doc))
	require.NotEmpty(l.s.t, doc.Error)
	return doc.Error
}

// beating is a model server with heartbeats on its route.
func beating(name string, vram float64, lines ...string) consumer {
	c := plainModel(name, vram)
	c.Route = strings.Join(append([]string{heartbeats}, lines...), "\n")
	return c
}

const timed = `^gpu-queue;dur=\d+(\.\d)?, gpu-load;dur=\d+(\.\d)?$`

func TestFC26_QueuedStreamHearsItsPlaceAndThenEveryByte(t *testing.T) {
	t.Parallel()
	overBothVersions(t, func(t *testing.T, https bool) {
		s := start(t, layout{HTTPS: https, Consumers: []consumer{beating("a", 4), plainModel("b", 4)}})
		s.serve("a")
		_, end := s.works("b")
		first := s.send("POST", "/a/synthesize", "x") // of no event stream
		s.waitQueued("a", 1)
		l := s.listen(t.Context(), "/a/stream?events=20&ms=1", "", "Origin", "https://app.example")
		l.opened("a")
		require.Equal(t, "https://app.example", l.resp.Header.Get("Access-Control-Allow-Origin"))
		for range 5 {
			require.Equal(t, "waiting for a, position 2", l.comment())
		}
		require.Zero(t, len(first))
		end()
		last, rest := l.rest()
		require.Regexp(t, timed, last, "how long it waited is told at last")
		require.NotContains(t, last, "gpu-queue;dur=0,")
		require.Equal(t, modelserver.StreamBytes(20), rest)
		a := s.ok(first)
		require.Equal(t, "audio/wav", a.header.Get("Content-Type"))
		require.Equal(t, modelserver.SynthesizeBytes([]byte("x")), a.body, "what is no event stream gets no heartbeats")
	})
}

func TestFC26_LongLoadIsNotSilent(t *testing.T) {
	t.Parallel()
	lazy := beating("a", 4)
	lazy.Lazy = true
	lazy.Lines = "lifecycle_by_hand\nhealth /health {\nloaded $.loaded\nresident_mib $.gpu_resident_mib\n}\nunload POST /api/admin/unload"
	for _, c := range []struct {
		name     string
		consumer consumer
		says     string
	}{
		{"that the broker asks for", beating("a", 4), "waiting for a, which is being loaded, position 1"},
		{"inside its first request", lazy, "waiting for the answer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			overBothVersions(t, func(t *testing.T, https bool) {
				s := start(t, layout{HTTPS: https, Consumers: []consumer{c.consumer}})
				loaded := s.holdLoad("a")
				l := s.listen(t.Context(), "/a/stream?events=20&ms=1", "")
				l.opened("a")
				for range 5 {
					l.comments(c.says)
				}
				require.Zero(t, s.servers["a"].Stats().Working)
				loaded()
				last, rest := l.rest()
				require.Regexp(t, timed, last)
				require.Equal(t, modelserver.StreamBytes(20), rest)
				require.Equal(t, 1, s.servers["a"].Stats().Worked)
			})
		})
	}
}

func TestHeartbeatsGoOnUntilTheFirstByteOfAStreamWhoseHeadCameLongBefore(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{beating("a", 4), plainModel("b", 4)}})
	s.serve("a")
	release := s.hold("b")
	hold := s.holdWork("a")
	l := s.listen(t.Context(), "/a/stream?events=1&ms=1", "") // held before its first event
	l.comments("waiting for a, position 1")
	require.Equal(t, 200, release().status)
	s.working("a")
	for range 5 {
		l.comments("waiting for the answer")
	}
	hold()
	_, rest := l.rest()
	require.Equal(t, modelserver.StreamBytes(1), rest)
}

func TestHeartbeatsByTheWordStreamOfAJSONBody(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{beating("a", 4), plainModel("b", 4)}})
	s.serve("a")
	_, end := s.works("b")
	const ask = `{"messages":[{"role":"user","content":"say \"stream\":true"}],"model":"a","options":{"stream":true}`
	whole := s.send("POST", "/a/v1/chat/completions", ask+`,"stream":false}`)
	s.waitQueued("a", 1)
	large := strings.Replace(ask, "say", strings.Repeat("s", 400_000), 1) // a word, as each is an event of the answer
	small := s.listen(t.Context(), "/a/v1/chat/completions", ask+`, "stream" : true }`, "Accept", "*/*")
	small.opened("a")
	small.comments("waiting for a, position 2")
	long := s.listen(t.Context(), "/a/v1/chat/completions", large+`,"stream":true}`)
	long.comments("waiting for a, position 3")
	end()
	a := s.ok(whole)
	require.Equal(t, "application/json", a.header.Get("Content-Type"))
	require.True(t, json.Valid(a.body))
	for _, l := range []*listener{small, long} {
		_, rest := l.rest()
		require.True(t, bytes.HasPrefix(rest, []byte("data: {")), "%s", rest)
		require.True(t, bytes.HasSuffix(rest, []byte("data: [DONE]\n\n")), "%s", rest)
	}
}

func TestAfterHeartbeatsAnErrorIsAnEventInOpenAIsForm(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		route   string
		path    string
		breaks  func(s *site) // while the request waits
		code    string
		message string
	}{
		{name: "its budget is over", route: "budget 300ms", code: "budget_exceeded"},
		{name: "its load fails", code: "load_failed", breaks: func(s *site) {
			s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.RefuseLoad = true })
			s.letWork("b")
		}},
		{name: "no more requests are taken", code: "draining", breaks: func(s *site) { s.byHand("consumers/a/drain") }},
		{name: "the server has an error", code: "no_stream", message: "status 503: told to fail", breaks: func(s *site) {
			s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.FailPaths = map[string]int{"/stream": 503} })
			s.letWork("b")
		}},
		{name: "the server's answer is no event stream", path: "/a/v1/embeddings?input=x", code: "no_stream", breaks: func(s *site) { s.letWork("b") }},
		{name: "the server dies", code: "server_died", breaks: func(s *site) {
			s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.DieOnRequest = true })
			s.letWork("b")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			a := beating("a", 9, c.route)
			s := start(t, layout{Consumers: []consumer{a, plainModel("b", 9)}, Routes: "log {\noutput file {env.XDG_DATA_HOME}/access.log\n}"})
			runs, end := s.works("b")
			path := c.path
			if path == "" {
				path = "/a/stream?events=3"
			}
			l := s.listen(t.Context(), path, "")
			l.opened("a")
			l.comments("waiting for a, position 1")
			if c.breaks != nil {
				c.breaks(s)
			}
			doc := l.failed()
			require.Equal(t, c.code, doc["code"], "%v", doc)
			require.Equal(t, "gpu_broker_error", doc["type"])
			require.Equal(t, "a", doc["consumer"])
			require.Contains(t, doc["message"], c.message)
			require.NotEmpty(t, doc["message"])
			logged := s.logged(path)
			require.Equal(t, 200, logged.Status)
			require.Equal(t, "a", logged.Consumer)
			if c.code != "no_stream" {
				require.Equal(t, c.code, logged.Reason)
				require.NotZero(t, s.metric(fmt.Sprintf(`errors_total{code=%q,consumer="a"}`, c.code)))
			}
			end()
			s.ok(runs)
			s.until("nothing is left", func() bool {
				st := s.status().Scheduler
				return st.InFlight == 0 && st.QueueDepth == 0
			})
		})
	}
}

func TestClientThatLeavesDuringHeartbeatsFreesItsPlaceAtOnce(t *testing.T) {
	t.Parallel()
	overBothVersions(t, func(t *testing.T, https bool) {
		s := start(t, layout{HTTPS: https, Consumers: []consumer{beating("a", 4), plainModel("b", 4)}})
		s.serve("a")
		runs, end := s.works("b")
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		l := s.listen(ctx, "/a/stream?events=20&ms=1", "")
		l.comments("waiting for a, position 1")
		leave()
		s.waitQueued("a", 0)
		require.EqualValues(t, 1, s.status().Scheduler.Cancelled)
		end()
		s.ok(runs)
		s.serve("a")
		require.Zero(t, s.servers["a"].Stats().Requests["/stream"], "its server is never called")
		s.nothingRuns()
	})
}

func TestHeartbeatsPassAnEncoderOneByOne(t *testing.T) {
	t.Parallel()
	a := beating("a", 4)
	a.Proxy = "encode {\ngzip\nmatch {\nheader Content-Type text/event-stream*\n}\nminimum_length 1\n}\nreverse_proxy {http.gpu_broker.upstream}"
	s := start(t, layout{Consumers: []consumer{a, plainModel("b", 4)}})
	s.serve("a")
	_, end := s.works("b")
	l := s.listen(t.Context(), "/a/stream?events=20&ms=1", "", "Accept-Encoding", "gzip")
	require.Equal(t, "gzip", l.resp.Header.Get("Content-Encoding"))
	unzip, err := gzip.NewReader(l.resp.Body)
	require.NoError(t, err)
	l.in = bufio.NewReader(unzip)
	for range 5 {
		require.Equal(t, "waiting for a, position 1", l.comment())
	}
	end()
	_, rest := l.rest()
	require.Equal(t, modelserver.StreamBytes(20), rest)
}

func TestStreamThatDoesNotWaitIsTheServersOwn(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{beating("a", 4), plainModel("off", 4), plainModel("b", 4)}})
	s.serve("a")
	s.serve("off")
	l := s.listen(t.Context(), "/a/stream?events=20&ms=1", "")
	require.Equal(t, "a", l.resp.Header.Get("X-Modelserver"))
	require.Equal(t, "gpu-queue;dur=0, gpu-load;dur=0", l.resp.Header.Get("Server-Timing"))
	last, rest := l.rest()
	require.Empty(t, last)
	require.Equal(t, modelserver.StreamBytes(20), rest)

	// Where there are no heartbeats nothing comes until it is served.
	_, end := s.works("b")
	off, beats := make(chan *http.Response, 1), s.listen(t.Context(), "/a/stream?events=20&ms=1", "")
	go func() {
		resp, err := s.client.Do(s.asks(t.Context(), "/off/stream?events=20&ms=1", ""))
		if err != nil {
			t.Error(err)
			close(off)
			return
		}
		off <- resp
	}()
	s.waitQueued("off", 1)
	for range 5 {
		beats.comments("waiting for a, position 1")
	}
	require.Zero(t, len(off))
	end()
	resp := <-off
	require.NotNil(t, resp)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, modelserver.StreamBytes(20), body)
	require.Equal(t, "off", resp.Header.Get("X-Modelserver"))
	require.NotEmpty(t, resp.Header.Get("Server-Timing"))
}

func TestShortWaitOfAStreamLeavesItsHeadersAsTheyAre(t *testing.T) {
	t.Parallel()
	a := plainModel("a", 4)
	a.Route = "heartbeat 1h"
	s := start(t, layout{Consumers: []consumer{a}})
	l := s.listen(t.Context(), "/a/stream?events=20&ms=1", "")
	require.Equal(t, "a", l.resp.Header.Get("X-Modelserver"))
	require.Regexp(t, timed, l.resp.Header.Get("Server-Timing"))
	require.NotContains(t, l.resp.Header.Get("Server-Timing"), "gpu-load;dur=0,")
	_, rest := l.rest()
	require.Equal(t, modelserver.StreamBytes(20), rest)
	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.FailPaths = map[string]int{"/stream": 503} })
	require.Equal(t, 200, s.adminDo("POST", "/gpu_broker/consumers/a/unload", "", "").status)
	req := s.asks(t.Context(), "/a/stream?events=3", "")
	resp, err := s.client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, 503, resp.StatusCode)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.JSONEq(t, `{"error":"told to fail"}`, string(body))
}
