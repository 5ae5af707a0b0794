package modelserver

import (
	"net/http"
)

// xinference is an Xinference. A model is there only once it was launched, with
// a spec that the server forgets when it is terminated. That a termination ends
// running work is not known for sure: here it does.
type xinference struct{ *shape }

func newXinference(l *life) http.Handler {
	x := &xinference{newShape(l)}
	x.fail = failDetail
	x.unknown, x.notLoaded = http.StatusBadRequest, http.StatusBadRequest
	x.join = x.ifLoaded
	x.healthy(map[string]string{"status": "ok"}, "GET /status")
	x.handle(x.models, "GET /v1/models")
	x.handle(x.launch, "POST /v1/models")
	x.handle(x.terminate, "DELETE /v1/models/{model}")
	x.v1("/v1")
	x.gpu(x.rank, "POST /v1/rerank")
	x.gpu(x.hear, "POST /v1/audio/transcriptions")
	x.gpu(x.speak, "POST /v1/audio/speech")
	x.gpu(x.fixedWork(map[string]any{"created": 0, "data": []any{}}), "POST /v1/images/generations")
	return x.mux
}

func (x *xinference) models(w http.ResponseWriter, _ *http.Request) {
	up := x.names(func(m *model) bool { return m.saysLoaded() })
	writeJSON(w, http.StatusOK, v1Models(up, "xinference"))
}

func (x *xinference) launch(w http.ResponseWriter, r *http.Request) {
	var spec struct {
		Name   string `json:"model_name"`
		Engine string `json:"model_engine"`
		UID    string `json:"model_uid"`
	}
	if !x.readJSON(w, r, &spec) {
		return
	}
	if spec.Name == "" || spec.Engine == "" {
		x.fail(w, r, http.StatusBadRequest, "Invalid input. Please specify the model name and the model engine.")
		return
	}
	if spec.UID == "" {
		spec.UID = spec.Name
	}
	m := x.find(w, r, spec.UID)
	if m == nil {
		return
	}
	if x.phase(m) == loaded {
		x.fail(w, r, http.StatusBadRequest, "Model is already in the model list, uid: "+m.name)
		return
	}
	if err := x.load(r.Context(), m); err != nil {
		x.loadError(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"model_uid": m.name})
}

func (x *xinference) terminate(w http.ResponseWriter, r *http.Request) {
	m := x.find(w, r, r.PathValue("model"))
	if m == nil || !x.unloading(w, r, m) {
		return
	}
	if x.phase(m) == idle {
		x.fail(w, r, http.StatusBadRequest, "Model not found in the model list, uid: "+m.name)
		return
	}
	if err := x.l.cut(r.Context(), m); err != nil {
		x.loadError(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, nil)
}
