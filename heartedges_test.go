package gpubroker

import (
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

func TestRefusalBeforeTheFirstHeartbeatKeepsItsHeadersForTheSitesErrorRoutes(t *testing.T) {
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		h.Header().Set("Retry-After", "7")
		require.False(t, h.stop())
		require.Equal(t, "7", w.Header().Get("Retry-After"), "of which only the client's writer is left")
		require.Equal(t, "own", w.Header().Get("X-Site"))
		h.Header().Set("X-Later", "too")
		require.False(t, h.stop())
		require.Equal(t, "too", w.Header().Get("X-Later"))
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
