package modelserver

import (
	"context"
	"fmt"
	"net/http"
)

// triton is an NVIDIA Triton in explicit mode. An unload is accepted at once:
// from then on new requests are refused and the index says UNLOADING, but the
// memory goes only when the work in flight has ended. Its metrics, on a port of
// their own in reality, count what waits and not what runs.
type triton struct {
	*shape
	leaving map[*model]bool // to be unloaded; guarded by Server.mu
}

func newTriton(l *life) http.Handler {
	t := &triton{shape: newShape(l), leaving: map[*model]bool{}}
	t.unknown, t.notLoaded = http.StatusBadRequest, http.StatusBadRequest
	t.join = t.ifReady
	t.health(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }, "GET /v2/health/live", "GET /v2/health/ready")
	t.handle(t.modelReady, "GET /v2/models/{model}/ready")
	t.handle(t.index, "POST /v2/repository/index")
	t.handle(t.loadRoute, "POST /v2/repository/models/{model}/load")
	t.handle(t.unloadRoute, "POST /v2/repository/models/{model}/unload")
	t.gauges(func() map[string]int {
		out := map[string]int{}
		for _, m := range l.models {
			out[fmt.Sprintf("nv_inference_pending_request_count{model=%q,version=\"1\"}", m.name)] = t.queued[m]
		}
		return out
	}, "GET /metrics")
	for _, path := range []string{"POST /v2/models/{model}", "POST /v2/models/{model}/versions/{version}"} {
		t.gpu(t.infer, path+"/infer")
		t.gpu(t.say(tritonSpeech), path+"/generate")
		streamed := tritonSpeech
		streamed.streams = always
		t.gpu(t.say(streamed), path+"/generate_stream")
	}
	return t.mux
}

var tritonSpeech = speech{
	whole: func(j *job, text, _ string) any {
		return map[string]string{"model_name": j.m.name, "model_version": "1", "text_output": text}
	},
	piece: func(j *job, word string) []byte {
		return sse(map[string]string{"model_name": j.m.name, "model_version": "1", "text_output": word})
	},
	last:    func(*job, string, string) []byte { return nil },
	streams: func(*job) bool { return false },
}

func (t *triton) infer(j *job) error {
	return t.whole(j, func() any {
		words, _ := j.words(t.l)
		return map[string]any{
			"model_name": j.m.name, "model_version": "1",
			"outputs": []any{map[string]any{"name": "OUTPUT", "datatype": "BYTES", "shape": []int{1}, "data": []string{join(words)}}},
		}
	})
}

func (t *triton) ready(m *model) bool {
	t.l.s.mu.Lock()
	defer t.l.s.mu.Unlock()
	return m.phase == loaded && !t.leaving[m]
}

func (t *triton) ifReady(ctx context.Context, m *model) (func(), error) {
	if !t.ready(m) {
		return nil, errNotLoaded
	}
	return t.l.acquire(ctx, m, false)
}

func (t *triton) modelReady(w http.ResponseWriter, r *http.Request) {
	m := t.find(w, r, r.PathValue("model"))
	if m == nil {
		return
	}
	if !t.ready(m) {
		t.fail(w, r, http.StatusBadRequest, "model "+m.name+" is not ready")
		return
	}
	w.WriteHeader(http.StatusOK)
}

func (t *triton) index(w http.ResponseWriter, r *http.Request) {
	var in struct{ Ready bool }
	if r.ContentLength != 0 && !t.readJSON(w, r, &in) {
		return
	}
	writeJSON(w, http.StatusOK, t.list(func(m *model) any {
		entry := map[string]string{"name": m.name, "version": "1"}
		switch {
		case t.leaving[m], m.phase == unloading:
			entry["state"] = "UNLOADING"
		case m.phase == loading:
			entry["state"] = "LOADING"
		case m.phase == loaded:
			entry["state"] = "READY"
		case m.load != nil:
			entry["state"], entry["reason"] = "UNAVAILABLE", "unloaded"
		}
		if in.Ready && entry["state"] != "READY" {
			return nil
		}
		return entry
	}))
}

func (t *triton) loadRoute(w http.ResponseWriter, r *http.Request) {
	m := t.find(w, r, r.PathValue("model"))
	if m == nil {
		return
	}
	err := t.l.waitUntil(r.Context(), func() bool { return !t.leaving[m] })
	if err == nil {
		err = t.load(r.Context(), m)
	}
	if err != nil {
		t.loadError(w, r, err)
		return
	}
	w.WriteHeader(http.StatusOK)
}

func (t *triton) unloadRoute(w http.ResponseWriter, r *http.Request) {
	m := t.find(w, r, r.PathValue("model"))
	if m == nil || !t.unloading(w, r, m) {
		return
	}
	t.leave(m, true)
	t.l.spawn(func() {
		_, _ = t.l.unloadFree(t.l.ctx, m) // fails only as the life ends
		t.leave(m, false)
	})
	w.WriteHeader(http.StatusOK) // loaded or not
}

func (t *triton) leave(m *model, on bool) {
	t.l.s.mu.Lock()
	defer t.l.s.mu.Unlock()
	t.leaving[m] = on
	t.l.s.notify()
}
