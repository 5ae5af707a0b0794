package modelserver

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		os.Exit(RunFromArgs(os.Args[1:]))
	}
	goleak.VerifyTestMain(m)
}

// start starts a server that the test closes.
func start(t *testing.T, opts Options) *Server {
	t.Helper()
	if opts.Name == "" {
		opts.Name = "mvoice"
	}
	if opts.SimDir == "" {
		opts.SimDir = t.TempDir()
	}
	s, err := Start(opts)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// bound is the context of one test's waiting.
func bound(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

type answer struct {
	status int
	header http.Header
	body   []byte
	err    error // of the request or of reading the body
}

// call sends a request without keep-alive, so that no idle connection is left.
func call(ctx context.Context, method, url, body string) answer {
	return callAs(ctx, "application/json", method, url, body)
}

// callAs is call with a content type for the body, if there is one.
func callAs(ctx context.Context, contentType, method, url, body string) answer {
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	r.Close = true
	if body != "" {
		r.Header.Set("Content-Type", contentType)
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return answer{err: err}
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, response.Header, text, err}
}

// send is call in the background.
func send(ctx context.Context, method, url, body string) <-chan answer {
	out := make(chan answer, 1)
	go func() { out <- call(ctx, method, url, body) }()
	return out
}

// want fails the test unless the answer has the status.
func want(t *testing.T, status int, a answer) answer {
	t.Helper()
	require.NoError(t, a.err)
	require.Equal(t, status, a.status, "%s", a.body)
	return a
}

func decode[T any](t *testing.T, body []byte) T {
	t.Helper()
	var v T
	require.NoError(t, json.Unmarshal(body, &v), "%s", body)
	return v
}

// used is what the sampler sees on GPU 0 of the folder.
func used(t *testing.T, dir string) gpu.Bytes {
	t.Helper()
	return usedOn(t, dir, 0)
}

func usedOn(t *testing.T, dir string, index int) gpu.Bytes {
	t.Helper()
	guest := simulated.Simulated{Totals: []gpu.Bytes{24 * gpu.GiB, 24 * gpu.GiB}, Dir: dir}
	sampler, err := guest.Open(t.Context(), zap.NewNop())
	require.NoError(t, err)
	sample, err := sampler.Sample(t.Context(), gpu.Memory)
	require.NoError(t, err)
	return sample.Devices[index].Total - sample.Devices[index].Free
}

func holds(b gpu.Bytes) func(Stats) bool { return func(s Stats) bool { return s.Held == b } }

func health(t *testing.T, s *Server) healthAnswer {
	t.Helper()
	return decode[healthAnswer](t, want(t, 200, call(bound(t), "GET", s.URL()+"/health", "")).body)
}

// lines counts the lines of a body.
func lines(body []byte) int { return bytes.Count(body, []byte("\n")) }
