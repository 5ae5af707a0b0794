package modelserver

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
)

// sglang is an SGLang with its memory saver on. Its port opens once the model
// is in. Three things kill the engine, and the process with it: to release the
// memory while a request runs, to resume what wasn't released, and (an
// assumption) to generate while it is released. Its health probe generates.
type sglang struct{ *shape }

func newSGLang(l *life) http.Handler {
	g := &sglang{newShape(l)}
	g.join = g.orDie
	g.handle(g.generateHealth, "GET /health", "GET /health_generate")
	info := map[string]any{"model_path": g.m.name, "tokenizer_path": g.m.name, "is_generation": true}
	g.healthy(info, "GET /get_model_info", "GET /model_info")
	g.fixed(map[string]any{"model_path": g.m.name, "internal_states": []any{}}, "GET /get_server_info", "GET /server_info")
	g.modelNames("GET /v1/models")
	g.gauges(func() map[string]int {
		running, waiting := g.busy()
		return map[string]int{"sglang:num_running_reqs": running, "sglang:num_queue_reqs": waiting}
	}, "GET /metrics")
	g.handle(g.getLoad, "GET /get_load")
	g.handle(g.flushCache, "POST /flush_cache")
	g.handle(g.release, "POST /release_memory_occupation")
	g.handle(g.resume, "POST /resume_memory_occupation")
	g.v1("/v1")
	g.gpu(g.say(sglangSpeech), "POST /generate")
	g.gpu(g.embed, "POST /encode", "POST /classify")
	g.gpu(g.rank, "POST /v1/rerank")
	return g.mux
}

var sglangSpeech = speech{
	whole: func(_ *job, text, finish string) any {
		return map[string]any{"text": text, "meta_info": map[string]any{"finish_reason": map[string]string{"type": finish}}}
	},
	piece: func(_ *job, word string) []byte { return sse(map[string]string{"text": word}) },
	last:  func(*job, string, string) []byte { return []byte(streamEnd) },
}

// orDie is the join of a server that doesn't look whether its memory is there.
func (g *sglang) orDie(ctx context.Context, m *model) (func(), error) {
	if g.phase(m) != loaded {
		g.l.dieOf("it generated while its memory was released")
		return nil, errDead
	}
	return g.l.acquire(ctx, m, false)
}

// generateHealth generates one token: it is work, and counts as such.
func (g *sglang) generateHealth(w http.ResponseWriter, r *http.Request) {
	if !g.l.health(w, r) {
		return
	}
	if g.phase(g.m) != loaded {
		g.l.s.mu.Lock()
		g.l.s.stats.WokenByProbe++
		g.l.s.mu.Unlock()
	}
	g.work(&job{w: w, r: r, m: g.m}, func(j *job) error {
		if err := g.l.run(j.r.Context(), j.m, g.l.runTime(j.r)/8); err != nil {
			return err
		}
		j.w.WriteHeader(http.StatusOK)
		return nil
	})
}

func (g *sglang) getLoad(w http.ResponseWriter, _ *http.Request) {
	g.l.s.mu.Lock()
	running, waiting := g.busy()
	g.l.s.mu.Unlock()
	writeJSON(w, http.StatusOK, []any{map[string]int{
		"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting, "num_tokens": 100 * running,
	}})
}

func (g *sglang) flushCache(w http.ResponseWriter, _ *http.Request) {
	g.l.s.mu.Lock()
	running, waiting := g.busy()
	g.l.s.mu.Unlock()
	if running+waiting > 0 {
		w.WriteHeader(http.StatusBadRequest)
	}
	writeText(w, "Cache flushed.\n")
}

// occupation reads the body that both routes insist on.
func (g *sglang) occupation(w http.ResponseWriter, r *http.Request) bool {
	body, ok := readBody(w, r)
	if !ok {
		return false
	}
	if !json.Valid(body) || !bytes.HasPrefix(bytes.TrimSpace(body), []byte("{")) {
		failDetail(w, r, http.StatusUnprocessableEntity, "field required: a JSON body")
		return false
	}
	return true
}

func (g *sglang) release(w http.ResponseWriter, r *http.Request) {
	if !g.occupation(w, r) || !g.unloading(w, r, g.m) {
		return
	}
	g.l.s.mu.Lock()
	running, waiting := g.busy()
	if running+waiting > 0 {
		g.l.s.stats.UnloadsWhileBusy++
	}
	g.l.s.mu.Unlock()
	if running+waiting > 0 {
		g.l.dieOf("its memory was released while a request ran")
		panic(http.ErrAbortHandler)
	}
	if err := g.l.unload(r.Context(), g.m); err != nil {
		g.loadError(w, r, err)
		return
	}
	w.WriteHeader(http.StatusOK)
}

func (g *sglang) resume(w http.ResponseWriter, r *http.Request) {
	if !g.occupation(w, r) {
		return
	}
	if g.phase(g.m) == loaded {
		g.l.dieOf("its memory was resumed without having been released")
		panic(http.ErrAbortHandler)
	}
	if err := g.load(r.Context(), g.m); err != nil {
		g.loadError(w, r, err)
		return
	}
	w.WriteHeader(http.StatusOK)
}
