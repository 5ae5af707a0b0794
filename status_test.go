package gpubroker

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

// A cached status is a wrong one.
func TestWhatIsToldOfTheBrokerIsNeverCached(t *testing.T) {
	h := newHandler(t)
	status := &StatusHandler{pool: h.pool}
	for _, path := range []string{"/gpu/status", "/gpu/decisions", "/gpu/healthz", "/gpu/"} {
		for _, method := range []string{http.MethodGet, http.MethodHead} {
			w := httptest.NewRecorder()
			require.NoError(t, status.ServeHTTP(w, httptest.NewRequest(method, path, nil), nothing))
			require.Equal(t, "no-store", w.Header().Get("Cache-Control"), "%s %s", method, path)
			require.Equal(t, "application/json", w.Header().Get("Content-Type"), "%s %s", method, path)
		}
	}
}
