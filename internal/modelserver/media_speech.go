package modelserver

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strings"
)

// whisper is a whisper.cpp server: one lock, and no way to unload. It can be
// told to load another file, which is the same model here, with the lock held;
// a file that it can't load ends the process, and so does one that is no .bin.
type whisper struct {
	*shape
	swaps bool // it loads another file; guarded by Server.mu
}

func newWhisper(l *life) http.Handler {
	p := &whisper{shape: newShape(l)}
	p.handle(p.state, "GET /health")
	p.handle(p.swap, "POST /load")
	p.gpu(p.hear, "POST /inference", "POST /v1/audio/transcriptions")
	return p.mux
}

func (p *whisper) state(w http.ResponseWriter, r *http.Request) {
	if !p.l.health(w, r) {
		return
	}
	p.l.s.mu.Lock()
	swaps := p.swaps
	p.l.s.mu.Unlock()
	if swaps {
		writeJSON(w, http.StatusServiceUnavailable, map[string]string{"status": "loading model"})
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
}

func (p *whisper) setSwaps(on bool) {
	p.l.s.mu.Lock()
	defer p.l.s.mu.Unlock()
	p.swaps = on
	p.l.s.notify()
}

func (p *whisper) swap(w http.ResponseWriter, r *http.Request) {
	j := p.read(w, r)
	if j == nil {
		return
	}
	done, err := p.l.turn(r.Context())
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer done()
	p.setSwaps(true)
	defer p.setSwaps(false)
	file, given := j.fields["model"]
	if !given {
		p.fail(w, r, http.StatusBadRequest, "no 'model' field in the request")
		return
	}
	p.l.unloadCalled(p.m)
	if err := p.l.unload(r.Context(), p.m); err != nil {
		p.loadError(w, r, err)
		return
	}
	if !strings.HasSuffix(file, ".bin") || p.load(p.l.ctx, p.m) != nil {
		p.l.dieOf("it could not load " + file)
		panic(http.ErrAbortHandler)
	}
	writeText(w, "Load was successful!")
}

// newImmich is Immich's machine learning. Nothing but its own idle time, the
// KeepAlive, unloads it: then a new worker takes the place of the old one, and
// what came meanwhile waits for that.
func newImmich(l *life) http.Handler {
	s := newShape(l)
	s.fail = failDetail
	s.healthy("pong", "GET /ping")
	s.gpu(func(j *job) error {
		var entries map[string]json.RawMessage
		if json.Unmarshal([]byte(j.fields["entries"]), &entries) != nil || len(entries) == 0 {
			s.fail(j.w, j.r, http.StatusUnprocessableEntity, "entries: want a JSON object")
			return errAnswered
		}
		return s.whole(j, func() any {
			out := map[string]any{"imageHeight": 256, "imageWidth": 256}
			for task := range entries {
				out[task] = []any{}
				if task == "clip" {
					vector := line(vectors(ask{Input: line(j.fields["text"])})[0])
					out[task] = string(vector) // a text that holds JSON, as there
				}
			}
			return out
		})
	}, "POST /predict")
	return s.mux
}

// speaches has several models and its own list of them. An unload of one that is
// in use is refused, but takes it off the list: it stays on the GPU, where only
// its idle time or another request for it ends that.
type speaches struct {
	*shape
	hidden map[*model]bool // guarded by Server.mu
}

func newSpeaches(l *life) http.Handler {
	p := &speaches{shape: newShape(l), hidden: map[*model]bool{}}
	p.fail = failDetail
	p.join = p.shown
	p.healthy(map[string]string{"message": "OK"}, "GET /health")
	p.modelNames("GET /v1/models")
	p.handle(p.ps, "GET /api/ps")
	p.handle(p.loadRoute, "POST /api/ps/{model...}")
	p.handle(p.unloadRoute, "DELETE /api/ps/{model...}")
	p.gpu(p.hear, "POST /v1/audio/transcriptions", "POST /v1/audio/translations")
	p.gpu(p.speak, "POST /v1/audio/speech")
	p.gpu(p.fixedWork(map[string]any{"timestamps": []any{}}), "POST /v1/audio/speech/timestamps", "POST /v1/audio/diarization")
	p.gpu(p.fixedWork(map[string]any{"embedding": []float64{1}}), "POST /v1/audio/speech/embedding")
	p.gpu(p.openAI(chatCompletion), "POST /v1/chat/completions")
	return p.mux
}

// shown puts the model back on the list and joins it.
func (p *speaches) shown(ctx context.Context, m *model) (func(), error) {
	p.l.s.mu.Lock()
	delete(p.hidden, m)
	p.l.s.mu.Unlock()
	return p.lazily(ctx, m)
}

// lists reports whether the model is on the list. For holders of mu.
func (p *speaches) lists(m *model) bool { return m.saysLoaded() && !p.hidden[m] }

func (p *speaches) ps(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"models": p.names(p.lists)})
}

func (p *speaches) loadRoute(w http.ResponseWriter, r *http.Request) {
	m := p.find(w, r, r.PathValue("model"))
	if m == nil {
		return
	}
	p.l.s.mu.Lock()
	there := p.lists(m)
	delete(p.hidden, m)
	p.l.s.mu.Unlock()
	if there {
		p.fail(w, r, http.StatusConflict, "model "+m.name+" is already loaded")
		return
	}
	if err := p.load(r.Context(), m); err != nil {
		p.loadError(w, r, err)
		return
	}
	w.WriteHeader(http.StatusCreated)
}

func (p *speaches) unloadRoute(w http.ResponseWriter, r *http.Request) {
	m := p.find(w, r, r.PathValue("model"))
	if m == nil || !p.unloading(w, r, m) {
		return
	}
	done := make(chan struct{})
	p.l.s.mu.Lock()
	there := p.lists(m)
	inUse := there && m.users+m.waiters > 0
	begins := there && !inUse && m.phase == loaded && !p.l.dead
	if inUse {
		p.hidden[m] = true
	}
	if begins {
		p.l.beginUnload(m, func() { close(done) })
	}
	p.l.s.mu.Unlock()
	switch {
	case inUse:
		p.fail(w, r, http.StatusConflict, "model "+m.name+" is in use")
	case !begins:
		p.l.makeGood(m)
		p.fail(w, r, http.StatusNotFound, "model "+m.name+" is not loaded")
	default:
		<-done // it ends with the life
		w.WriteHeader(http.StatusOK)
	}
}

// newKokoro is a Kokoro-FastAPI. Its unload is closed unless AllowUnload opens
// it, and its lock doesn't cover work that runs, which breaks.
func newKokoro(l *life) http.Handler {
	s := newShape(l)
	s.fail = failDetail
	s.healthy(map[string]string{"status": "healthy"}, "GET /health")
	s.modelNames("GET /v1/models")
	s.fixed(map[string]any{"voices": []string{"af_heart"}}, "GET /v1/audio/voices")
	s.handle(func(w http.ResponseWriter, r *http.Request) {
		if !l.s.options().AllowUnload {
			s.fail(w, r, http.StatusForbidden, "unloading is not allowed: set ALLOW_DEV_UNLOAD=true")
			return
		}
		if s.unloadNow(w, r) {
			writeJSON(w, http.StatusOK, map[string]string{"status": "unloaded"})
		}
	}, "POST /dev/unload")
	s.gpu(s.told(s.speak), "POST /v1/audio/speech", "POST /dev/generate_from_phonemes", "POST /dev/dialogue", "POST /dev/ssml")
	s.gpu(s.told(func(j *job) error {
		return s.whole(j, func() any {
			return map[string]any{"audio": base64.StdEncoding.EncodeToString(SynthesizeBytes(j.body)), "audio_format": "wav", "timestamps": []any{}}
		})
	}), "POST /dev/captioned_speech")
	return s.mux
}
