package gpubroker

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
)

func TestRequestThatIsAdmittedOnceMoreGetsTheServersOwnHeaders(t *testing.T) {
	place := func() broker.Place { return broker.Place{Consumer: "a", Position: 1} }
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		h.again(place)
		h.Header().Add("Content-Type", "application/json") // as reverse_proxy does
		h.WriteHeader(http.StatusOK)
		require.Equal(t, []string{"application/json"}, w.Header()["Content-Type"])
		require.Empty(t, w.Header().Get("X-Accel-Buffering"))
		require.Equal(t, "own", w.Header().Get("X-Site"))
	})
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		pass(time.Second)
		synctest.Wait()
		h.again(place)
		h.Header().Add("Content-Type", "application/json")
		h.WriteHeader(http.StatusOK)
		_, _ = h.Write([]byte(`{"choices":[]}`))
		h.close("a")
		require.Contains(t, w.Body.String(), "instead of an event stream", "what is no stream is not passed on as one")
	})
}

// A server that takes no connection is asked once more: the request waits for a place again.
func TestHeartbeatsGoOnWhenARequestWaitsOnceMore(t *testing.T) {
	handler := newHandler(t)
	handler.Heartbeat = 1e9
	synctest.Test(t, func(t *testing.T) {
		w, r := request("GET", "/stream")
		r.Header.Set("Accept", "text/event-stream")
		j := &job{handler: handler, target: handler.fixed}
		j.ResponseWriter = w
		at := func(position int) func() broker.Place {
			return func() broker.Place { return broker.Place{Consumer: "a", Position: position} }
		}
		second := func() {
			pass(time.Second)
			synctest.Wait()
		}
		j.beat(r, at(4))
		h := j.heart
		second()
		h.admitted("gpu-queue;dur=1.0")
		second()
		j.beat(r, at(2))
		require.Same(t, h, j.heart)
		second()
		require.Equal(t, ": waiting for a, position 4\n\n: waiting for the answer\n\n: waiting for a, position 2\n\n", w.Body.String())
		w.Body.Reset()
		h.Header().Set("Content-Type", "text/event-stream")
		h.WriteHeader(http.StatusOK)
		_, _ = h.Write([]byte("data: 1\n\n"))
		require.Equal(t, "data: 1\n\n", w.Body.String(), "what was waited before tells nothing of this wait")
		h.close("a")
	})
}

func TestTheFirstStatusAfterHeartbeatsIsTheAnswers(t *testing.T) {
	for kind, later := range map[string]int{"text/event-stream": http.StatusTeapot, "text/plain": http.StatusOK} {
		beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
			pass(time.Second)
			synctest.Wait()
			w.Body.Reset()
			h.WriteHeader(http.StatusEarlyHints)
			require.Zero(t, h.status)
			h.Header().Set("Content-Type", kind)
			first := map[int]int{http.StatusTeapot: http.StatusOK, http.StatusOK: http.StatusTeapot}[later]
			h.WriteHeader(first)
			h.WriteHeader(later)
			require.Equal(t, first, h.status)
			_, _ = h.Write([]byte("data: 1\n\n"))
			h.close("a")
			if first == http.StatusOK {
				require.Equal(t, "data: 1\n\n", w.Body.String())
			} else {
				require.Contains(t, w.Body.String(), "answered with status 418: data: 1")
			}
		})
	}
}

func TestRefusalBeforeTheFirstHeartbeatKeepsItsHeadersForTheSitesErrorRoutes(t *testing.T) {
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		h.Header().Set("Retry-After", "7")
		require.False(t, h.stop())
		require.Equal(t, "7", w.Header().Get("Retry-After"), "of which only the client's writer is left")
		require.Equal(t, "own", w.Header().Get("X-Site"))
		h.Header().Set("X-Later", "too")
		require.Equal(t, "too", w.Header().Get("X-Later"))
		w.Header().Set("X-Site", "its error route's")
		require.False(t, h.stop())
		require.Equal(t, "its error route's", w.Header().Get("X-Site"))
		h.WriteHeader(http.StatusServiceUnavailable)
		_, _ = h.Write([]byte("x"))
		require.Equal(t, http.StatusServiceUnavailable, w.Code)
		require.Equal(t, "x", w.Body.String())
	})
}

// stuck is the writer of a client that takes nothing, until its deadline.
type stuck struct {
	*httptest.ResponseRecorder
	once sync.Once
	cut  chan struct{}
}

func (s *stuck) Write([]byte) (int, error) {
	<-s.cut
	return 0, http.ErrHandlerTimeout
}

func (s *stuck) SetWriteDeadline(at time.Time) error {
	if !at.IsZero() && at.Before(time.Now()) { // as for a connection: the zero time is no deadline
		s.once.Do(func() { close(s.cut) })
	}
	return nil
}

func TestClientThatTakesNoHeartbeatHoldsNothingUp(t *testing.T) {
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		s := &stuck{ResponseRecorder: w, cut: make(chan struct{})}
		defer s.once.Do(func() { close(s.cut) }) // or a failure would not end
		h.mu.Lock()
		h.ResponseWriter = &caddyhttp.ResponseWriterWrapper{ResponseWriter: s}
		h.mu.Unlock()
		pass(time.Second)
		synctest.Wait() // its first comment is under way
		require.False(t, h.mu.TryLock(), "it holds whoever wants to answer up")
		pass(10 * time.Second)
		synctest.Wait()
		require.True(t, h.mu.TryLock())
		h.mu.Unlock()
		require.True(t, h.stop())
		h.close("a")
	})
}

func TestACommentSaysWhatARequestWaitsFor(t *testing.T) {
	for want, place := range map[string]broker.Place{
		": waiting for the answer\n\n":                             {Consumer: "a"},
		": waiting for a, position 1\n\n":                          {Consumer: "a", Position: 1},
		": waiting for a, which is being loaded, position 2\n\n":   {Consumer: "a", Position: 2, Loading: true},
		": waiting for a/m, which is being loaded, position 1\n\n": {Consumer: "a/m", Position: 1, Loading: true},
	} {
		require.Equal(t, want, saying(place))
	}
}

func TestAnErrorOfTheSiteIsToldWithoutItsCause(t *testing.T) {
	for _, c := range []struct {
		err    error
		status int
		want   string
	}{
		{errors.New("whatever"), http.StatusInternalServerError, "whatever"},
		{caddyhttp.Error(http.StatusTeapot, errors.New("secret")), http.StatusTeapot, "the request failed with status 418 I'm a teapot"},
		{caddyhttp.HandlerError{Err: errors.New("without a status")}, http.StatusInternalServerError, caddyhttp.HandlerError{Err: errors.New("without a status")}.Error()},
	} {
		f := failureOf(c.err)
		require.Equal(t, &failure{status: c.status, code: "failed", told: true, message: c.want}, f)
	}
}

// A status of its own never reached the client, which got 200 with the first comment.
func TestTheAccessLogTellsTheStatusThatFollowedHeartbeats(t *testing.T) {
	for _, c := range []struct {
		begun  bool
		status int
		want   any
	}{{true, 503, int64(503)}, {true, 200, nil}, {true, 0, nil}, {false, 503, nil}} {
		_, r := request("GET", "/stream")
		r, fields := ofServer(r, &caddyhttp.Server{Logs: &caddyhttp.ServerLogConfig{}})
		(&heart{begun: c.begun}).logStatus(r, c.status)
		require.Equal(t, c.want, fields()["gpu_status"], "%+v", c)
	}
}

func TestOnlyAPlainEventStreamIsOne(t *testing.T) {
	for _, c := range []struct {
		kind, coding string
		want         bool
		told         string
	}{
		{"text/event-stream", "", true, `"text/event-stream"`},
		{"Text/Event-Stream; charset=utf-8", "Identity", true, `"Text/Event-Stream; charset=utf-8" in "Identity"`},
		{"text/event-stream", "gzip", false, `"text/event-stream" in "gzip"`},
		{"text/plain", "", false, `"text/plain"`},
		{"text/event-stream; =", "", false, `"text/event-stream; ="`},
		{"", "", false, `""`},
	} {
		h := http.Header{"Content-Type": {c.kind}}
		if c.coding != "" {
			h.Set("Content-Encoding", c.coding)
		}
		require.Equal(t, c.want, isEventStream(h), "%+v", c)
		require.Equal(t, c.told, kindOf(h))
	}
}

func TestAnAnswerIsFlushedOnlyWhereItIsPassedOn(t *testing.T) {
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		require.NoError(t, h.FlushError())
		require.False(t, w.Flushed, "nothing has come")
		h.WriteHeader(http.StatusOK)
		require.NoError(t, h.FlushError())
		require.True(t, w.Flushed)
	})
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		pass(time.Second)
		synctest.Wait()
		w.Flushed = false
		h.Header().Set("Content-Type", "text/event-stream")
		h.WriteHeader(http.StatusOK)
		require.NoError(t, h.FlushError())
		require.False(t, w.Flushed)
		_, _ = h.Write(nil)
		require.NoError(t, h.FlushError())
		require.False(t, w.Flushed, "of a stream without an event there is nothing to send")
		_, _ = h.Write([]byte("data: 1\n\n"))
		require.NoError(t, h.FlushError())
		require.True(t, w.Flushed)
		h.close("a")
	})
}
