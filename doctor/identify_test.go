package doctor_test

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gpu-broker/caddy-gpu-broker/doctor"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, opts modelserver.Options) *modelserver.Server {
	t.Helper()
	if opts.Name == "" {
		opts.Name = "tested"
	}
	if opts.SimDir == "" {
		opts.SimDir = t.TempDir()
	}
	if opts.VRAM == 0 {
		opts.VRAM = gpu.GiB
	}
	s, err := modelserver.Start(opts)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func TestEveryKindOfServerIsKnownByWhatItAnswers(t *testing.T) {
	for _, manner := range modelserver.Manners() {
		if !slices.Contains(presets.Names(), string(manner)) {
			continue // it is no real server's
		}
		if manner == "whispercpp" {
			continue // its page, by which it is known, is not imitated: see below
		}
		t.Run(string(manner), func(t *testing.T) {
			t.Parallel()
			s := start(t, modelserver.Options{Manner: manner, Preloaded: true})
			id := doctor.Identify(t.Context(), s.Addr())
			assert.Equal(t, string(manner), id.Engine)
			assert.True(t, id.Open)
			assert.True(t, id.HTTP)
			assert.False(t, id.Caddy)
			is := s.Stats()
			assert.Zero(t, is.WokenByProbe, "it was woken")
			assert.Zero(t, is.UnloadCalls, "it was asked to unload")
			assert.Zero(t, is.Worked+is.Aborted+is.Working, "it was made to work")
			assert.LessOrEqual(t, is.LoadsStarted, 1, "it was made to load")
		})
	}
}

func TestWhatIsNoModelServerIsNone(t *testing.T) {
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write([]byte("<html>a page for every path</html>"))
	}))
	defer site.Close()
	id := doctor.Identify(t.Context(), site.Listener.Addr().String())
	assert.True(t, id.HTTP)
	assert.Empty(t, id.Engine)

	dead := httptest.NewServer(nil)
	address := dead.Listener.Addr().String()
	dead.Close()
	assert.Equal(t, doctor.Identity{Address: address}, doctor.Identify(t.Context(), address))
}

func TestWhisperIsKnownByItsPage(t *testing.T) {
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/" {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte("<html><head><title>Whisper.cpp Server</title></head></html>"))
	}))
	defer site.Close()
	assert.Equal(t, "whispercpp", doctor.Identify(t.Context(), site.Listener.Addr().String()).Engine)
}

func TestACaddyIsKnownAndNotAskedFurther(t *testing.T) {
	asked := 0
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked++
		w.Header().Set("Server", "Caddy")
		w.WriteHeader(http.StatusNotFound)
	}))
	defer site.Close()
	id := doctor.Identify(t.Context(), site.Listener.Addr().String())
	assert.True(t, id.Caddy)
	assert.Equal(t, 1, asked)
}

// A server that does not answer in time is busy: the next question might wake it.
func TestWhoDoesNotAnswerIsAskedOnce(t *testing.T) {
	asked := make(chan string, 100)
	held := make(chan struct{})
	site := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked <- r.URL.Path
		if r.URL.Path != "/" {
			<-held
		}
	}))
	defer site.Close()
	defer close(held)
	begun := time.Now()
	id := doctor.Identify(t.Context(), site.Listener.Addr().String())
	assert.Empty(t, id.Engine)
	assert.True(t, id.HTTP)
	assert.Len(t, asked, 2)
	assert.Less(t, time.Since(begun), 10*time.Second)
}

func TestEveryEngineHasAPresetAndAPort(t *testing.T) {
	for _, name := range presets.Names() {
		e, ok := doctor.EngineOf(name)
		if assert.True(t, ok, name) {
			assert.NotEmpty(t, e.Title, name)
			assert.NotEmpty(t, e.Bind, name)
			assert.Positive(t, e.Port, name)
			assert.Positive(t, e.Claim, name)
		}
	}
}
