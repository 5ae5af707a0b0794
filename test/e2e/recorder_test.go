package e2e

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// received is one request as a server got it.
type received struct {
	method, uri, host string
	header            http.Header
	body              []byte
	length            int64 // its Content-Length; -1: none
	chunked           bool
}

// recorder is a server that keeps what it gets and answers 200.
type recorder struct {
	addr string
	got  chan received
}

func newRecorder(t *testing.T) *recorder {
	r := &recorder{got: make(chan received, 100)}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path == "/health" { // another test's probe of a server that has died: its port is ours now
			http.NotFound(w, q)
			return
		}
		body, err := io.ReadAll(q.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		r.got <- received{method: q.Method, uri: q.RequestURI, host: q.Host, header: q.Header.Clone(), body: body,
			length: q.ContentLength, chunked: len(q.TransferEncoding) > 0}
		_, _ = w.Write([]byte("taken")) // the client may be gone
	}))
	t.Cleanup(srv.Close)
	r.addr = srv.Listener.Addr().String()
	return r
}

func (r *recorder) next(t *testing.T) received {
	t.Helper()
	select {
	case got := <-r.got:
		return got
	case <-time.After(patience):
		t.Fatal("the server got nothing")
		return received{}
	}
}

// takes sends a request that the ollama of s serves, and returns what came of it.
func (r *recorder) takes(t *testing.T, s *site, path string, header http.Header, body string) received {
	t.Helper()
	s.sending("POST", path, header, []byte(body)).servedBy(t, "ollama")
	got := r.next(t)
	require.EqualValues(t, len(got.body), got.length)
	return got
}
