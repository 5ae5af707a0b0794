package modelserver

import (
	"context"
	"errors"
	"net/http"
)

// localAI is a LocalAI. It loads inside the request that needs a model. A
// shutdown waits for running work, but not longer than Grace: then it fails and
// the model stays. Its imitation of ollama says that nothing is in VRAM.
type localAI struct{ *shape }

func newLocalAI(l *life) http.Handler {
	a := &localAI{newShape(l)}
	a.healthy("OK", "GET /healthz", "GET /readyz")
	a.modelNames("GET /v1/models")
	a.handle(a.system, "GET /system")
	a.handle(a.ps, "GET /api/ps")
	a.handle(a.loadRoute, "POST /backend/load")
	a.handle(a.shutdown, "POST /backend/shutdown")
	a.v1("/v1")
	a.v1More("/v1")
	a.gpu(a.openAI(textCompletion), "POST /v1/engines/{model}/completions")
	a.gpu(a.embed, "POST /v1/engines/{model}/embeddings")
	a.gpu(a.rank, "POST /v1/rerank")
	a.gpu(a.hear, "POST /v1/audio/transcriptions")
	a.gpu(a.speak, "POST /v1/audio/speech", "POST /tts")
	a.gpu(a.fixedWork(map[string]any{"created": 0, "data": []any{}}), "POST /v1/images/generations")
	a.gpu(a.say(ollamaSpeech(chatForm)), "POST /api/chat")
	a.gpu(a.say(ollamaSpeech(generateForm)), "POST /api/generate")
	a.gpu(func(j *job) error {
		return a.whole(j, func() any { return map[string]any{"model": j.m.name, "embeddings": vectors(j.ask)} })
	}, "POST /api/embed")
	return a.mux
}

// speak answers with sound.
func (s *shape) speak(j *job) error {
	if err := s.l.run(j.r.Context(), j.m, s.l.runTime(j.r)); err != nil {
		return err
	}
	return s.l.answer(j.w, "audio/wav", SynthesizeBytes(j.body))
}

func (a *localAI) system(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"backends": []string{"llama-cpp"}, "loaded_models": a.list(func(m *model) any {
		if !m.saysLoaded() {
			return nil
		}
		return map[string]string{"id": m.name, "backend": "llama-cpp"}
	})})
}

func (a *localAI) ps(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"models": a.list(func(m *model) any {
		if !m.saysLoaded() {
			return nil
		}
		return map[string]any{"name": m.name, "model": m.name, "size": m.size, "size_vram": 0}
	})})
}

func (a *localAI) loadRoute(w http.ResponseWriter, r *http.Request) {
	m := a.named(w, r)
	if m == nil {
		return
	}
	if err := a.load(r.Context(), m); err != nil {
		a.loadError(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{"loaded": []string{m.name}, "message": "model loaded"})
}

func (a *localAI) shutdown(w http.ResponseWriter, r *http.Request) {
	m := a.named(w, r)
	if m == nil || !a.unloading(w, r, m) {
		return
	}
	if a.phase(m) == idle {
		a.fail(w, r, http.StatusNotFound, "model "+m.name+" not found")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), a.l.s.options().Grace)
	defer cancel()
	_, err := a.l.unloadFree(ctx, m)
	switch {
	case r.Context().Err() == nil && errors.Is(err, context.DeadlineExceeded):
		a.fail(w, r, http.StatusInternalServerError, "model "+m.name+" is still busy")
	case err != nil:
		a.loadError(w, r, err)
	default:
		writeJSON(w, http.StatusOK, map[string]string{"message": "model stopped"})
	}
}
