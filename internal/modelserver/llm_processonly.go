package modelserver

import (
	"encoding/json"
	"net/http"
	"time"
)

// Servers that load when their process starts, open their port after that, and
// give the memory back when it ends. They have no routes to load or unload.

// newTGI is Hugging Face's text-generation-inference.
func newTGI(l *life) http.Handler {
	s := newShape(l)
	s.health(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }, "GET /health")
	s.fixed(map[string]string{"model_id": s.m.name}, "GET /info")
	s.gauges(func() map[string]int {
		running, waiting := s.busy()
		return map[string]int{"tgi_batch_current_size": running, "tgi_queue_size": waiting}
	}, "GET /metrics")
	s.v1("/v1")
	s.gpu(s.say(tgiSpeech(nil)), "POST /{$}")
	s.gpu(s.say(tgiSpeech(func(*job) bool { return false })), "POST /generate")
	s.gpu(s.say(tgiSpeech(always)), "POST /generate_stream")
	return s.mux
}

func tgiSpeech(streams func(*job) bool) speech {
	return speech{
		whole: func(_ *job, text, _ string) any { return map[string]string{"generated_text": text} },
		piece: func(_ *job, word string) []byte {
			return sse(map[string]any{"token": map[string]any{"id": 1, "text": word, "special": false}, "generated_text": nil})
		},
		last: func(_ *job, text, _ string) []byte {
			return sse(map[string]any{"token": map[string]any{"id": 2, "text": "", "special": true}, "generated_text": text})
		},
		streams: streams,
	}
}

// newTEI is Hugging Face's text-embeddings-inference.
func newTEI(l *life) http.Handler {
	s := newShape(l)
	s.health(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }, "GET /health")
	s.fixed(map[string]string{"model_id": s.m.name}, "GET /info")
	s.fixed([]any{[]any{map[string]int{"id": 1}}}, "POST /tokenize")
	s.fixed([]string{""}, "POST /decode")
	s.gauges(func() map[string]int {
		// What runs has left its queue.
		_, waiting := s.busy()
		return map[string]int{"te_queue_size": waiting}
	}, "GET /metrics")
	inputs := func(j *job) []json.RawMessage {
		var in struct{ Inputs, Texts json.RawMessage }
		_ = json.Unmarshal(j.body, &in) // no inputs have no vectors
		if in.Inputs == nil {
			in.Inputs = in.Texts
		}
		var list []json.RawMessage
		if json.Unmarshal(in.Inputs, &list) != nil {
			list = []json.RawMessage{in.Inputs}
		}
		return list
	}
	s.gpu(func(j *job) error {
		return s.whole(j, func() any {
			out := [][]float64{}
			for _, input := range inputs(j) {
				out = append(out, vectors(ask{Input: input})[0])
			}
			return out
		})
	}, "POST /{$}", "POST /embed", "POST /embed_all", "POST /embed_sparse")
	s.gpu(func(j *job) error {
		return s.whole(j, func() any {
			out := []any{}
			for i := range inputs(j) {
				out = append(out, map[string]any{"index": i, "score": score(i)})
			}
			return out
		})
	}, "POST /rerank", "POST /predict", "POST /similarity")
	s.gpu(s.embed, "POST /v1/embeddings")
	return s.mux
}

// newInfinity is michaelfeil's infinity, without a url_prefix.
func newInfinity(l *life) http.Handler {
	s := newShape(l)
	s.health(func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]float64{"unix": float64(time.Now().UnixMilli()) / 1000})
	}, "GET /health")
	s.handle(func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": s.list(func(m *model) any {
			running, waiting := s.running[m], s.queued[m]
			return map[string]any{"id": m.name, "object": "model", "stats": map[string]any{
				"queue_fraction": float64(waiting) / 32000, "queue_absolute": waiting, "results_pending": running + waiting,
			}}
		})})
	}, "GET /models")
	s.gpu(s.embed, "POST /embeddings")
	s.gpu(s.rank, "POST /rerank")
	s.gpu(s.fixedWork(map[string]any{"object": "classify", "data": []any{}}), "POST /classify")
	return s.mux
}
