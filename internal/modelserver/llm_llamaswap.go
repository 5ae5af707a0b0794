package modelserver

import (
	"context"
	"net/http"
	"strings"
)

// llamaSwap is a llama-swap whose models share a group that doesn't swap. Any
// call below /upstream/MODEL/ loads that model, as a request for it does. An
// unload waits until the model's process has stopped; running work is cut.
type llamaSwap struct {
	*shape
	upstream *http.ServeMux // what a model's own server answers
}

func newLlamaSwap(l *life) http.Handler {
	s := &llamaSwap{shape: newShape(l), upstream: http.NewServeMux()}
	s.healthy("OK", "GET /health")
	s.handle(s.processes, "GET /running")
	s.handle(s.models, "GET /v1/models")
	s.handle(s.unloadAll(func(w http.ResponseWriter) { writeJSON(w, http.StatusOK, map[string]string{"msg": "ok"}) }), "POST /api/models/unload")
	s.handle(s.unloadAll(func(w http.ResponseWriter) { writeText(w, "OK") }), "GET /unload")
	s.handle(s.unloadOne, "POST /api/models/unload/{model...}")
	s.handle(s.toUpstream, "/upstream/{path...}")
	s.v1("/v1")
	s.v1More("/v1")
	s.gpu(s.rank, "POST /v1/rerank")
	s.gpu(s.hear, "POST /v1/audio/transcriptions")

	inner := &shape{}
	*inner = *s.shape
	inner.mux = s.upstream
	inner.llama()
	inner.handle(func(w http.ResponseWriter, r *http.Request) {
		m := s.l.models[r.PathValue("model")]
		if err := s.load(r.Context(), m); err != nil {
			s.loadError(w, r, err)
			return
		}
		writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	}, "/")
	return s.mux
}

func (s *llamaSwap) processes(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"running": s.list(func(m *model) any {
		state := [...]string{idle: "", loading: "starting", loaded: "ready", unloading: "stopping"}[m.phase]
		if state == "" {
			return nil
		}
		return map[string]any{"model": m.name, "state": state, "ttl": 0, "proxy": "http://localhost:5800"}
	})})
}

func (s *llamaSwap) models(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": s.list(func(m *model) any {
		value := "unloaded"
		if m.saysLoaded() {
			value = "loaded"
		}
		return map[string]any{"id": m.name, "object": "model", "owned_by": "llama-swap", "status": map[string]string{"value": value}}
	})})
}

// stop stops one model's process, in whatever state that is.
func (s *llamaSwap) stop(ctx context.Context, m *model) error {
	if s.l.killLoad(m) {
		return nil
	}
	return s.l.cut(ctx, m)
}

func (s *llamaSwap) unloadAll(answer func(http.ResponseWriter)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !s.unloading(w, r, nil) {
			return
		}
		for _, m := range s.l.models {
			if err := s.stop(r.Context(), m); err != nil {
				s.loadError(w, r, err)
				return
			}
		}
		answer(w)
	}
}

func (s *llamaSwap) unloadOne(w http.ResponseWriter, r *http.Request) {
	m := s.find(w, r, r.PathValue("model"))
	if m == nil || !s.unloading(w, r, m) {
		return
	}
	if err := s.stop(r.Context(), m); err != nil {
		s.loadError(w, r, err)
		return
	}
	writeText(w, "OK")
}

// toUpstream finds the model in the path; its name may hold slashes.
func (s *llamaSwap) toUpstream(w http.ResponseWriter, r *http.Request) {
	path := r.PathValue("path")
	name := ""
	for candidate := range s.l.models {
		if len(candidate) > len(name) && (path == candidate || strings.HasPrefix(path, candidate+"/")) {
			name = candidate
		}
	}
	if name == "" {
		s.fail(w, r, http.StatusNotFound, "no model is named in "+r.URL.Path)
		return
	}
	inner := r.Clone(r.Context())
	inner.URL.Path = "/" + strings.TrimPrefix(strings.TrimPrefix(path, name), "/")
	inner.URL.RawPath = ""
	inner.SetPathValue("model", name)
	s.upstream.ServeHTTP(w, inner)
}
