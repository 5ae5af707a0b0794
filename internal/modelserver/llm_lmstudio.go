package modelserver

import (
	"net/http"
	"time"
)

// lmStudio is an LM Studio from 0.4.0 on. It loads inside the request that
// needs a model, and unloads after KeepAlive. What an unload does to running
// work is not known: here it breaks it.
type lmStudio struct{ *shape }

func newLMStudio(l *life) http.Handler {
	s := &lmStudio{newShape(l)}
	s.health(func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, v1Models(s.names(nil), "organization_owner"))
	}, "GET /v1/models")
	s.handle(s.state, "GET /api/v1/models")
	s.handle(s.oldState, "GET /api/v0/models")
	s.handle(s.loadRoute, "POST /api/v1/models/load")
	s.handle(s.unloadRoute, "POST /api/v1/models/unload")
	s.v1("/v1")
	s.v1More("/v1")
	s.v1("/api/v0")
	s.gpu(s.say(lmSpeech), "POST /api/v1/chat")
	return s.mux
}

var lmSpeech = speech{
	whole: func(j *job, text, _ string) any {
		return map[string]any{
			"model_instance_id": j.m.name, "output": []any{map[string]string{"type": "message", "content": text}},
			"stats": map[string]int{"input_tokens": 1},
		}
	},
	piece: func(_ *job, word string) []byte {
		return typed("message.delta", map[string]any{"content": word})
	},
	last: func(j *job, _, _ string) []byte {
		return typed("chat.end", map[string]any{"result": map[string]string{"model_instance_id": j.m.name}})
	},
}

func (s *lmStudio) state(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"models": s.list(func(m *model) any {
		instances := []any{}
		if m.saysLoaded() {
			instances = append(instances, map[string]any{"id": m.name, "config": map[string]int{"context_length": 4096}})
		}
		return map[string]any{"type": "llm", "key": m.name, "size_bytes": m.size, "loaded_instances": instances}
	})})
}

func (s *lmStudio) oldState(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": s.list(func(m *model) any {
		state := "not-loaded"
		if m.saysLoaded() {
			state = "loaded"
		}
		return map[string]any{"id": m.name, "object": "model", "type": "llm", "state": state}
	})})
}

func (s *lmStudio) loadRoute(w http.ResponseWriter, r *http.Request) {
	m := s.named(w, r)
	if m == nil {
		return
	}
	begun := time.Now()
	if err := s.load(r.Context(), m); err != nil {
		s.loadError(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"type": "llm", "instance_id": m.name, "status": "loaded", "load_time_seconds": time.Since(begun).Seconds(),
	})
}

func (s *lmStudio) unloadRoute(w http.ResponseWriter, r *http.Request) {
	var in struct {
		ID string `json:"instance_id"`
	}
	if !s.readJSON(w, r, &in) {
		return
	}
	m := s.find(w, r, in.ID)
	if m == nil || !s.unloading(w, r, m) {
		return
	}
	if s.phase(m) == idle {
		s.fail(w, r, http.StatusNotFound, "no instance "+in.ID+" is loaded")
		return
	}
	if err := s.l.unload(r.Context(), m); err != nil {
		s.loadError(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"instance_id": in.ID})
}
