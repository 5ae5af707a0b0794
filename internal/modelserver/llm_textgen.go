package modelserver

import (
	"context"
	"net/http"
)

// textgen is a text-generation-webui. Its unload takes no lock: work that runs
// is broken. When it has dropped its model by itself (--idle-timeout) it goes on
// naming it as loaded, and loads it again inside the next request.
type textgen struct {
	*shape
	shown bool // it names its model; guarded by Server.mu
}

func newTextgen(l *life) http.Handler {
	t := &textgen{shape: newShape(l), shown: l.s.options().Preloaded}
	t.notLoaded = http.StatusInternalServerError
	t.join = t.ifShown
	t.healthy(map[string]string{"status": "ok"}, "GET /v1/internal/health")
	t.handle(t.info, "GET /v1/internal/model/info")
	t.handle(t.loadRoute, "POST /v1/internal/model/load")
	t.handle(t.unloadRoute, "POST /v1/internal/model/unload")
	t.handle(func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"model_names": t.names(nil)})
	}, "GET /v1/internal/model/list")
	t.modelNames("GET /v1/models")
	t.v1("/v1")
	t.gpu(t.say(messages), "POST /v1/messages")
	t.gpu(t.fixedWork(map[string]any{"created": 0, "data": []any{}}), "POST /v1/images/generations")
	t.gpu(t.fixedWork(map[string]float64{"a": 1}), "POST /v1/internal/logits")
	return t.mux
}

func (t *textgen) showing() bool {
	t.l.s.mu.Lock()
	defer t.l.s.mu.Unlock()
	t.shown = t.shown || t.m.saysLoaded()
	return t.shown
}

func (t *textgen) show(on bool) {
	t.l.s.mu.Lock()
	defer t.l.s.mu.Unlock()
	t.shown = on
}

func (t *textgen) ifShown(ctx context.Context, m *model) (func(), error) {
	if t.showing() {
		return t.lazily(ctx, m)
	}
	return nil, errNotLoaded
}

func (t *textgen) info(w http.ResponseWriter, _ *http.Request) {
	name, loader := "None", any(nil)
	if t.showing() {
		name, loader = t.m.name, "llama.cpp"
	}
	writeJSON(w, http.StatusOK, map[string]any{"model_name": name, "lora_names": []string{}, "loader": loader})
}

func (t *textgen) loadRoute(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Name string `json:"model_name"`
	}
	if !t.readJSON(w, r, &in) {
		return
	}
	if in.Name == "" {
		t.fail(w, r, http.StatusBadRequest, "model_name is missing")
		return
	}
	// It unloads what is there first, be it the same.
	err := t.l.unload(r.Context(), t.m)
	if err == nil {
		err = t.load(r.Context(), t.m)
	}
	t.show(err == nil)
	if err != nil {
		t.loadError(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, "OK")
}

func (t *textgen) unloadRoute(w http.ResponseWriter, r *http.Request) {
	if !t.unloading(w, r, t.m) {
		return
	}
	if err := t.l.unload(r.Context(), t.m); err != nil {
		t.loadError(w, r, err)
		return
	}
	t.show(t.phase(t.m) == loaded) // as with the fault that keeps it loaded
	writeJSON(w, http.StatusOK, "OK")
}
