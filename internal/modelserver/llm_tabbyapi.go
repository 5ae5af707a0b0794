package modelserver

import (
	"fmt"
	"net/http"
)

// tabby is a TabbyAPI. Its load streams its progress and tells a failure in the
// stream, after a 200. An unload cancels running work at once. Once something
// has gone wrong its health stays bad until the process ends.
type tabby struct {
	*shape
	issues []string // guarded by Server.mu
}

func newTabby(l *life) http.Handler {
	t := &tabby{shape: newShape(l)}
	t.join = t.ifLoaded
	t.fail = failTabby
	t.health(t.healthRoute, "GET /health")
	t.healthy(map[string]any{"version": 0.1, "software": map[string]string{"name": "TabbyAPI"}}, "GET /.well-known/serviceinfo")
	t.modelNames("GET /v1/models", "GET /v1/model/list")
	t.handle(t.model, "GET /v1/model")
	t.handle(t.loadRoute, "POST /v1/model/load")
	t.handle(t.unloadRoute, "POST /v1/model/unload")
	t.handle(func(w http.ResponseWriter, r *http.Request) {
		if t.isLoaded(w, r) {
			writeJSON(w, http.StatusOK, map[string]any{"tokens": []int{1}, "length": 1})
		}
	}, "POST /v1/token/encode", "POST /v1/token/decode")
	t.v1("/v1")
	return t.mux
}

func failTabby(w http.ResponseWriter, _ *http.Request, status int, message string) {
	writeJSON(w, status, map[string]any{"detail": map[string]any{"error": map[string]any{"message": message, "trace": nil}}})
}

func (t *tabby) isLoaded(w http.ResponseWriter, r *http.Request) bool {
	if t.phase(t.m) == loaded {
		return true
	}
	t.fail(w, r, http.StatusServiceUnavailable, "No models are currently loaded.")
	return false
}

func (t *tabby) healthRoute(w http.ResponseWriter, _ *http.Request) {
	t.l.s.mu.Lock()
	issues := append([]string{}, t.issues...)
	t.l.s.mu.Unlock()
	status, word := http.StatusOK, "healthy"
	if len(issues) > 0 {
		status, word = http.StatusServiceUnavailable, "unhealthy"
	}
	writeJSON(w, status, map[string]any{"status": word, "issues": issues})
}

func (t *tabby) model(w http.ResponseWriter, r *http.Request) {
	if t.isLoaded(w, r) {
		writeJSON(w, http.StatusOK, map[string]any{"id": t.m.name, "object": "model", "parameters": map[string]int{"max_seq_len": 4096}})
	}
}

func (t *tabby) loadRoute(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Name string `json:"model_name"`
	}
	if !t.readJSON(w, r, &in) {
		return
	}
	if in.Name == "" {
		t.fail(w, r, http.StatusBadRequest, "A model name was not provided for load.")
		return
	}
	already := t.phase(t.m) == loaded
	w.Header().Set("Content-Type", "text/event-stream")
	w.WriteHeader(http.StatusOK)
	tell := func(event map[string]any) {
		_, _ = w.Write(sse(event)) // a client that has left doesn't stop the load
		_ = http.NewResponseController(w).Flush()
	}
	progress := func(done int, status string) {
		tell(map[string]any{"model_type": "model", "module": done, "modules": 1, "status": status})
	}
	if already {
		tell(map[string]any{"error": map[string]string{"message": fmt.Sprintf("Model %q is already loaded! Aborting.", t.m.name)}})
		return
	}
	progress(0, "processing")
	if err := t.load(t.l.ctx, t.m); err != nil {
		t.l.s.mu.Lock()
		if len(t.issues) < 100 {
			t.issues = append(t.issues, err.Error())
		}
		t.l.s.mu.Unlock()
		tell(map[string]any{"error": map[string]string{"message": err.Error()}})
		return
	}
	progress(1, "finished")
}

func (t *tabby) unloadRoute(w http.ResponseWriter, r *http.Request) {
	if !t.unloading(w, r, t.m) || !t.isLoaded(w, r) {
		return
	}
	if err := t.l.cut(r.Context(), t.m); err != nil {
		t.loadError(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, nil)
}
