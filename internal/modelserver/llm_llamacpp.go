package modelserver

import (
	"context"
	"net/http"
)

// llamaCpp is a llama-server of one model. Its port is open while it loads, and
// says so. There is no route to unload: it falls asleep after KeepAlive (or by
// Server.Unload) and wakes for any task, of which GET /slots is one.
type llamaCpp struct {
	*shape
	ready bool // has loaded once; guarded by Server.mu
}

func newLlamaCpp(l *life) http.Handler {
	c := &llamaCpp{shape: newShape(l)}
	c.fail = failLlama
	c.healthy(map[string]string{"status": "ok"}, "GET /health", "GET /v1/health")
	c.handle(c.props, "GET /props")
	c.handle(c.slots, "GET /slots")
	c.modelNames("GET /models", "GET /v1/models")
	c.gauges(c.metrics, "GET /metrics")
	c.handle(func(w http.ResponseWriter, r *http.Request) {
		// Cheap, but the model's process has to be awake.
		if c.wake(w, r, c.m) {
			writeJSON(w, http.StatusOK, map[string]any{"tokens": []int{1}, "content": ""})
		}
	}, "POST /tokenize", "POST /detokenize", "POST /apply-template")
	c.llama()
	return c
}

func (c *llamaCpp) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if c.loadingFirst() && r.URL.Path != "/models" && r.URL.Path != "/v1/models" {
		c.fail(w, r, http.StatusServiceUnavailable, "Loading model")
		return
	}
	c.mux.ServeHTTP(w, r)
}

func (c *llamaCpp) loadingFirst() bool {
	c.l.s.mu.Lock()
	defer c.l.s.mu.Unlock()
	if run := c.m.load; !c.ready && run != nil {
		select {
		case <-run.done:
			c.ready = true
		default:
		}
	}
	return !c.ready
}

func (c *llamaCpp) props(w http.ResponseWriter, _ *http.Request) {
	asleep := c.phase(c.m) != loaded
	writeJSON(w, http.StatusOK, map[string]any{
		"is_sleeping": asleep, "total_slots": c.slotCount(), "model_path": "/models/" + c.m.name + ".gguf",
	})
}

func (c *llamaCpp) slots(w http.ResponseWriter, r *http.Request) {
	if !c.wake(w, r, c.m) {
		return
	}
	n := c.slotCount()
	c.l.s.mu.Lock()
	working := c.running[c.m]
	c.l.s.mu.Unlock()
	if working >= n && r.URL.Query().Get("fail_on_no_slot") != "" {
		c.fail(w, r, http.StatusServiceUnavailable, "no slot available")
		return
	}
	slots := []any{}
	for i := range max(n, working) {
		slots = append(slots, map[string]any{"id": i, "is_processing": i < working})
	}
	writeJSON(w, http.StatusOK, slots)
}

// slotCount is how much work a llama-server does at once.
func (s *shape) slotCount() int {
	if n := s.l.s.options().Concurrency; n > 0 {
		return n
	}
	return 4
}

func (s *shape) metrics() map[string]int {
	running, waiting := s.busy()
	return map[string]int{"llamacpp:requests_processing": running, "llamacpp:requests_deferred": waiting}
}

// wake loads m for a question that needs its process, and counts that.
func (s *shape) wake(w http.ResponseWriter, r *http.Request, m *model) bool {
	s.l.s.mu.Lock()
	if m.phase == idle || m.phase == unloading {
		s.l.s.stats.WokenByProbe++
	}
	s.l.s.mu.Unlock()
	if err := s.load(r.Context(), m); err != nil {
		s.loadError(w, r, err)
		return false
	}
	return true
}

// llama adds llama-server's routes of work.
func (s *shape) llama() {
	s.v1("/v1")
	s.v1More("/v1")
	s.gpu(s.openAI(chatCompletion), "POST /chat/completions")
	s.gpu(s.say(llamaSpeech), "POST /completion", "POST /completions", "POST /infill")
	s.gpu(s.embed, "POST /embedding", "POST /embeddings")
	s.gpu(s.rank, "POST /rerank", "POST /reranking", "POST /v1/rerank", "POST /v1/reranking")
}

// llamaSpeech is llama-server's own completion.
var llamaSpeech = speech{
	whole: func(_ *job, text, finish string) any {
		return map[string]any{"content": text, "stop": true, "stop_type": finish}
	},
	piece: func(_ *job, word string) []byte { return sse(map[string]any{"content": word, "stop": false}) },
	last: func(_ *job, _, finish string) []byte {
		return sse(map[string]any{"content": "", "stop": true, "stop_type": finish})
	},
}

// failLlama answers with an error as llama-server does.
func failLlama(w http.ResponseWriter, _ *http.Request, status int, message string) {
	kind := map[int]string{
		http.StatusBadRequest: "invalid_request_error", http.StatusNotFound: "not_found_error",
		http.StatusServiceUnavailable: "unavailable_error",
	}[status]
	if kind == "" {
		kind = "server_error"
	}
	writeJSON(w, status, map[string]any{"error": map[string]any{"code": status, "message": message, "type": kind}})
}

// llamaRouter is a llama-server without a model of its own, which starts a
// child for each. It answers at once, before anything is done. Any GET with
// ?model= and any POST for a model loads it. An unload gives running work the
// Grace and then breaks it; a child that still loads is killed at once.
type llamaRouter struct{ *shape }

func newLlamaRouter(l *life) http.Handler {
	c := &llamaRouter{newShape(l)}
	c.fail = failLlama
	c.unknown = http.StatusBadRequest
	c.notLoaded = http.StatusBadRequest
	lazily := c.join
	c.join = func(ctx context.Context, m *model) (func(), error) {
		if ctx.Value(autoloadKey{}) == "false" {
			return c.ifLoaded(ctx, m)
		}
		return lazily(ctx, m)
	}
	c.healthy(map[string]string{"status": "ok"}, "GET /health", "GET /v1/health")
	c.handle(c.models, "GET /models", "GET /v1/models")
	c.handle(c.loadRoute, "POST /models/load")
	c.handle(c.unloadRoute, "POST /models/unload")
	for path, answer := range map[string]any{
		"/slots": []any{}, "/props": map[string]any{"role": "router", "is_sleeping": false},
		"/metrics": "", "/lora-adapters": []any{},
	} {
		c.handle(c.ask(path, answer), "GET "+path)
	}
	c.llama()
	return c
}

type autoloadKey struct{}

func (c *llamaRouter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	r = r.WithContext(context.WithValue(r.Context(), autoloadKey{}, r.URL.Query().Get("autoload")))
	c.mux.ServeHTTP(w, r)
}

func (c *llamaRouter) models(w http.ResponseWriter, _ *http.Request) {
	data := c.list(func(m *model) any {
		status := map[string]any{"value": "unloaded"}
		switch m.phase {
		case loading:
			status["value"] = "loading"
		case loaded, unloading: // a child that was told to exit is there until it is gone
			status["value"] = "loaded"
		case idle:
			if m.load != nil && m.load.err != nil {
				status["failed"], status["exit_code"] = true, 1
			}
		}
		return map[string]any{"id": m.name, "object": "model", "owned_by": "llamacpp", "status": status}
	})
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": data})
}

// named reads the body's model, or answers why not.
func (s *shape) named(w http.ResponseWriter, r *http.Request) *model {
	var in struct{ Model string }
	if !s.readJSON(w, r, &in) {
		return nil
	}
	return s.find(w, r, in.Model)
}

func (c *llamaRouter) loadRoute(w http.ResponseWriter, r *http.Request) {
	m := c.named(w, r)
	if m == nil {
		return
	}
	if c.phase(m) != idle {
		c.fail(w, r, http.StatusBadRequest, "model is already running")
		return
	}
	c.loadLater(m)
	writeJSON(w, http.StatusOK, map[string]bool{"success": true})
}

func (c *llamaRouter) unloadRoute(w http.ResponseWriter, r *http.Request) {
	m := c.named(w, r)
	if m == nil || !c.unloading(w, r, m) {
		return
	}
	if c.phase(m) == idle {
		c.fail(w, r, http.StatusBadRequest, "model is not running")
		return
	}
	c.l.spawn(func() {
		if c.l.killLoad(m) {
			return
		}
		ctx, cancel := context.WithTimeout(c.l.ctx, c.l.s.options().Grace)
		defer cancel()
		if _, err := c.l.unloadFree(ctx, m); err != nil {
			_ = c.l.cut(c.l.ctx, m) // fails only as the life ends
		}
	})
	writeJSON(w, http.StatusOK, map[string]bool{"success": true})
}

// ask serves a question to a child, which loads it.
func (c *llamaRouter) ask(path string, answer any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		name := r.URL.Query().Get("model")
		if name == "" && path == "/props" {
			writeJSON(w, http.StatusOK, answer)
			return
		}
		m := c.find(w, r, name)
		if m == nil {
			return
		}
		if c.phase(m) != loaded && r.URL.Query().Get("autoload") == "false" {
			c.fail(w, r, http.StatusBadRequest, "model is not loaded")
			return
		}
		if c.wake(w, r, m) {
			writeJSON(w, http.StatusOK, answer)
		}
	}
}
