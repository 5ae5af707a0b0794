package httplife_test

import (
	"context"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/lifecycletest"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

const loadConfig = `{"health":{"path":"/health","loaded":"$.loaded"},"load":{"path":"/load","body":"{\"model\":\"x\"}"}}`

// shortly is a context that ends soon, for waits that have no other end.
func shortly(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

func TestLoadCallsItsRouteAndWaitsUntilTheServerSaysLoaded(t *testing.T) {
	f := newFake(t)
	f.answer("POST /load", 200, `{"success":true}`)
	f.handle("GET /health", inTurn(`{}`, `{"loaded":false}`, `{"loaded":false}`, `{"loaded":true}`))
	require.NoError(t, open(t, loadConfig, f.addr).Load(t.Context(), lifecycle.Target{}))
	got := f.called("POST /load")
	require.Len(t, got, 1)
	assert.Equal(t, `{"model":"x"}`, got[0].body)
	assert.Equal(t, "application/json", got[0].header.Get("Content-Type"))
	assert.Len(t, f.called("GET /health"), 4)
}

func TestLoadWaitsThroughUnhealthyAnswers(t *testing.T) {
	f := newFake(t)
	f.answer("POST /load", 200, ``)
	f.handle("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		if len(f.called("GET /health")) < 3 {
			w.WriteHeader(503)
		}
	})
	require.NoError(t, open(t, `{"health":{"path":"/health"},"load":{"path":"/load"}}`, f.addr).Load(t.Context(), lifecycle.Target{}))
	assert.Len(t, f.called("GET /health"), 3)
}

func TestLoadReadsAStreamedAnswerToItsEnd(t *testing.T) {
	f := newFake(t)
	ended := false
	f.handle("POST /load", func(w http.ResponseWriter, _ *http.Request) {
		chunk := make([]byte, 64<<10)
		for range 32 { // more than is kept
			_, _ = w.Write(chunk)
		}
		ended = true
	})
	f.answer("GET /health", 200, `{"loaded":true}`)
	require.NoError(t, open(t, loadConfig, f.addr).Load(t.Context(), lifecycle.Target{}))
	assert.True(t, ended)
}

func TestLoadTellsOutOfMemory(t *testing.T) {
	for name, handler := range map[string]http.HandlerFunc{
		"torch":            says(500, `{"error":"CUDA out of memory. Tried to allocate 2.00 GiB"}`),
		"driver":           says(500, `CUDA_ERROR_OUT_OF_MEMORY`),
		"torch's class":    says(503, `torch.cuda.OutOfMemoryError`),
		"insufficient":     says(507, `Insufficient memory on device`),
		"with a good code": says(200, `{"success":false,"error":"out of memory"}`),
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			f.handle("POST /load", handler)
			f.answer("GET /health", 200, `{"loaded":false}`)
			err := open(t, loadConfig, f.addr).Load(t.Context(), lifecycle.Target{})
			require.ErrorIs(t, err, lifecycle.ErrOutOfMemory)
			assert.ErrorContains(t, err, "consumer mvoice: load: load route POST /load answered")
		})
	}
}

func TestLoadFailsWhereItsRouteDoes(t *testing.T) {
	f := newFake(t)
	f.answer("POST /load", 422, `no such model`)
	err := open(t, loadConfig, f.addr).Load(t.Context(), lifecycle.Target{})
	assert.EqualError(t, err, "consumer mvoice: load: load route POST /load answered 422, wanted 2xx: no such model")
	assert.NotErrorIs(t, err, lifecycle.ErrOutOfMemory)
	assert.Empty(t, f.called("GET /health"))
}

func TestLoadTellsRefused(t *testing.T) {
	assert.ErrorIs(t, open(t, loadConfig, lifecycletest.FreeAddress(t)).Load(t.Context(), lifecycle.Target{}), lifecycle.ErrRefused)
}

func TestLoadTellsThatTheServerWentAwayAfterItsRouteAnswered(t *testing.T) {
	f := newFake(t)
	f.handle("POST /load", func(http.ResponseWriter, *http.Request) { _ = f.Listener.Close() })
	err := open(t, loadConfig, f.addr).Load(shortly(t), lifecycle.Target{})
	assert.ErrorIs(t, err, lifecycle.ErrRefused)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestLoadSaysWhatIsLackingWhenItsTimeIsUp(t *testing.T) {
	for name, c := range map[string]struct {
		health http.HandlerFunc
		want   string
	}{
		"a liar":          {says(200, `{"loaded":false}`), "the server answers but says that it is not loaded"},
		"no such key":     {says(200, `{}`), "the server does not say that it is loaded: health route GET /health: the answer has no $.loaded"},
		"never healthy":   {says(503, `starting`), "the server did not get ready: health route GET /health answered 503, wanted 2xx: starting"},
		"health it hangs": {hangs(nil), "the server did not get ready: health route GET /health did not answer within"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			f.answer("POST /load", 200, ``)
			f.handle("GET /health", c.health)
			err := open(t, loadConfig, f.addr, probeTimeout(50*time.Millisecond)).Load(shortly(t), lifecycle.Target{})
			assert.ErrorContains(t, err, c.want)
			assert.ErrorIs(t, err, context.DeadlineExceeded)
		})
	}
}

// A question that the end of the wait cuts off tells less than the answer before it.
func TestALoadWhoseTimeIsUpTellsTheLastAnswer(t *testing.T) {
	f := newFake(t)
	f.answer("POST /load", 200, ``)
	var asked atomic.Int32
	hung := hangs(nil)
	f.handle("GET /health", func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) > 1 {
			hung(w, r)
			return
		}
		says(200, `{"loaded":false}`)(w, r)
	})
	err := open(t, loadConfig, f.addr, probeTimeout(time.Minute)).Load(shortly(t), lifecycle.Target{})
	assert.ErrorContains(t, err, "the server answers but says that it is not loaded")
}

func TestLoadWithoutRouteWaitsForHealthAlone(t *testing.T) {
	f := newFake(t)
	f.answer("GET /health", 200, `{"loaded":false}`)
	require.NoError(t, open(t, `{"health":{"path":"/health","loaded":"$.loaded"}}`, f.addr).Load(t.Context(), lifecycle.Target{}))
}

func TestLoadEndsWithItsContext(t *testing.T) {
	t.Run("in its route", func(t *testing.T) {
		f := newFake(t)
		arrived := make(chan struct{}, 1)
		f.handle("POST /load", hangs(arrived))
		endsWithContext(t, arrived, func(ctx context.Context) error { return open(t, loadConfig, f.addr).Load(ctx, lifecycle.Target{}) })
	})
	t.Run("while it polls", func(t *testing.T) {
		f := newFake(t)
		arrived := make(chan struct{}, 1)
		f.answer("POST /load", 200, ``)
		f.handle("GET /health", func(w http.ResponseWriter, r *http.Request) {
			if len(f.called("GET /health")) == 5 {
				arrived <- struct{}{}
			}
			says(200, `{"loaded":false}`)(w, r)
		})
		endsWithContext(t, arrived, func(ctx context.Context) error { return open(t, loadConfig, f.addr).Load(ctx, lifecycle.Target{}) })
	})
}

func TestALoadRoutesOwnTimeOut(t *testing.T) {
	f := newFake(t)
	f.handle("POST /load", hangs(nil))
	err := open(t, `{"load":{"path":"/load","timeout":"50ms"}}`, f.addr).Load(t.Context(), lifecycle.Target{})
	assert.ErrorContains(t, err, "load route POST /load did not answer within")
}
