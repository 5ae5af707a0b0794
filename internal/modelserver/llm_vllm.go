package modelserver

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
)

// vllm is a vLLM in dev mode with sleep mode on. Its port opens once the model
// is in. It says that it is healthy while it sleeps, and holds requests until
// it wakes. Sleep aborts running work unless mode=wait is asked for. Levels 1
// and 2 are imitated as the same; mode=keep isn't.
type vllm struct {
	*shape
	paused bool // told to sleep: nothing new begins until it is woken; guarded by Server.mu
}

func newVLLM(l *life) http.Handler {
	v := &vllm{shape: newShape(l)}
	v.join = v.whenAwake
	v.health(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }, "GET /health", "GET /ping")
	v.fixed(map[string]string{"version": "0.17.1"}, "GET /version")
	v.modelNames("GET /v1/models")
	v.gauges(v.counts, "GET /metrics")
	v.handle(v.isSleeping, "GET /is_sleeping")
	v.handle(v.sleep, "POST /sleep")
	v.handle(v.wakeUp, "POST /wake_up")
	v.fixed(map[string]any{"tokens": []int{1}, "count": 1}, "POST /tokenize")
	v.fixed(map[string]string{"prompt": ""}, "POST /detokenize")
	v.v1("/v1")
	v.v1More("/v1")
	v.gpu(v.hear, "POST /v1/audio/transcriptions", "POST /v1/audio/translations")
	v.gpu(v.embed, "POST /pooling")
	v.gpu(v.rank, "POST /rerank", "POST /v1/rerank", "POST /v2/rerank", "POST /score", "POST /v1/score", "POST /classify")
	return v
}

func (v *vllm) ServeHTTP(w http.ResponseWriter, r *http.Request) { v.mux.ServeHTTP(w, r) }

// whenAwake waits until the model is there, however long that takes.
func (v *vllm) whenAwake(ctx context.Context, m *model) (func(), error) {
	if err := v.l.waitUntil(ctx, func() bool {
		awake := !v.paused && m.phase == loaded
		if awake {
			m.users++ // at once, so that no sleep comes between
		}
		return awake
	}); err != nil {
		return nil, err
	}
	return func() { v.l.release(m) }, nil
}

func (v *vllm) counts() map[string]int {
	running, waiting := v.busy()
	return map[string]int{
		fmt.Sprintf("vllm:num_requests_running{engine=\"0\",model_name=%q}", v.m.name): running,
		fmt.Sprintf("vllm:num_requests_waiting{engine=\"0\",model_name=%q}", v.m.name): waiting,
	}
}

func (v *vllm) isSleeping(w http.ResponseWriter, _ *http.Request) {
	v.l.s.mu.Lock()
	asleep := !v.m.saysLoaded() // not before a sleep has ended
	v.l.s.mu.Unlock()
	writeJSON(w, http.StatusOK, map[string]bool{"is_sleeping": asleep})
}

func (v *vllm) sleep(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	level, err := strconv.Atoi(q.Get("level"))
	if q.Get("level") == "" {
		level, err = 1, nil
	}
	mode := q.Get("mode")
	if err != nil || level < 0 || level > 2 || mode != "" && mode != "wait" && mode != "abort" {
		v.fail(w, r, http.StatusBadRequest, "want level 0, 1 or 2 and mode wait or abort")
		return
	}
	if !v.unloading(w, r, v.m) {
		return
	}
	v.pause(true)
	if level > 0 {
		if mode == "wait" {
			_, err = v.l.unloadFree(r.Context(), v.m)
		} else {
			err = v.l.cut(r.Context(), v.m)
		}
	}
	if err != nil {
		v.loadError(w, r, err)
		return
	}
	w.WriteHeader(http.StatusOK)
}

func (v *vllm) wakeUp(w http.ResponseWriter, r *http.Request) {
	if err := v.load(r.Context(), v.m); err != nil {
		v.loadError(w, r, err)
		return
	}
	v.pause(false)
	w.WriteHeader(http.StatusOK)
}

func (v *vllm) pause(on bool) {
	v.l.s.mu.Lock()
	defer v.l.s.mu.Unlock()
	v.paused = on
	v.l.s.notify()
}
