package modelserver

import (
	"context"
	"net/http"
	"time"
)

// dockerRunner is a Docker Model Runner. It loads inside the request that needs
// a model. An unload leaves out busy runners without a word: only the count of
// those that it did unload tells.
type dockerRunner struct{ *shape }

func newDockerRunner(l *life) http.Handler {
	d := &dockerRunner{newShape(l)}
	d.healthy("Docker Model Runner is running", "GET /engines/status")
	d.handle(d.ps, "GET /engines/ps")
	d.handle(d.unloadRoute, "POST /engines/unload")
	d.modelNames("GET /engines/v1/models", "GET /models")
	for _, prefix := range []string{"/engines/v1", "/engines/{backend}/v1"} {
		d.gpu(d.openAI(chatCompletion), "POST "+prefix+"/chat/completions")
		d.gpu(d.openAI(textCompletion), "POST "+prefix+"/completions")
		d.gpu(d.embed, "POST "+prefix+"/embeddings")
		d.gpu(d.say(messages), "POST "+prefix+"/messages")
		d.gpu(d.fixedWork(map[string]any{"created": 0, "data": []any{}}), "POST "+prefix+"/images/generations")
	}
	d.gpu(d.rank, "POST /rerank", "POST /score")
	d.gpu(d.say(ollamaSpeech(chatForm)), "POST /api/chat")
	d.gpu(d.say(ollamaSpeech(generateForm)), "POST /api/generate")
	return d
}

// ServeHTTP answers what only loads before it can count as work.
func (d *dockerRunner) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost || r.Header.Get("X-Preload-Only") != "true" {
		d.mux.ServeHTTP(w, r)
		return
	}
	m := d.named(w, r)
	if m == nil {
		return
	}
	if err := d.load(r.Context(), m); err != nil {
		d.loadError(w, r, err)
		return
	}
	w.WriteHeader(http.StatusOK)
}

func (d *dockerRunner) ps(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, d.list(func(m *model) any {
		if m.phase == idle {
			return nil
		}
		return map[string]any{
			"backend_name": "llama.cpp", "model_name": m.name, "mode": "completion",
			"in_use": m.users > 0, "loading": m.phase == loading, "last_used": time.Now().UTC(),
		}
	}))
}

func (d *dockerRunner) unloadRoute(w http.ResponseWriter, r *http.Request) {
	var in struct {
		All     bool
		Backend string
		Models  []string
	}
	if !d.readJSON(w, r, &in) || !d.unloading(w, r, nil) {
		return
	}
	if in.All {
		in.Models = d.names(nil)
	}
	now, cancel := context.WithCancel(r.Context())
	cancel() // no waiting
	unloaded := 0
	for _, name := range in.Models {
		if m := d.l.models[name]; m != nil {
			if done, err := d.l.unloadFree(now, m); err == nil && done {
				unloaded++
			}
		}
	}
	writeJSON(w, http.StatusOK, map[string]int{"unloaded_runners": unloaded})
}
