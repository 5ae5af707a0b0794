package modelserver

import (
	"net/http"
	"strconv"

	"github.com/google/uuid"
)

// invoke is an InvokeAI: a batch only joins its queue, which can be paused. To
// empty the model cache leaves out what is in use, and says the same as if it
// did not.
type invoke struct {
	*shape
	q *queue
}

func newInvoke(l *life) http.Handler {
	v := &invoke{shape: newShape(l)}
	v.fail = failDetail
	v.q = newQueue(l, v.m, maxPending, maxHistory)
	v.healthy(map[string]string{"version": "6.14.0"}, "GET /api/v1/app/version")
	const queue = "/api/v1/queue/default"
	v.handle(v.enqueue, "POST "+queue+"/enqueue_batch")
	v.handle(v.status, "GET "+queue+"/status")
	v.handle(v.batch, "GET "+queue+"/b/{batch}/status")
	v.handle(v.item, "GET "+queue+"/i/{item}")
	v.handle(v.pause(true), "PUT "+queue+"/processor/pause")
	v.handle(v.pause(false), "PUT "+queue+"/processor/resume")
	v.handle(v.empty, "POST /api/v2/models/empty_model_cache")
	v.handle(v.stats, "GET /api/v2/models/stats")
	v.handle(func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"models": []any{map[string]string{"key": v.m.name, "name": v.m.name, "type": "main"}}})
	}, "GET /api/v2/models/{$}")
	return v.mux
}

// enqueue makes a job for each run of the batch. The time of one is RunTime, or
// "ms" in the body.
func (v *invoke) enqueue(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Batch *struct {
			Runs int `json:"runs"`
		} `json:"batch"`
		Prepend bool     `json:"prepend"`
		MS      *float64 `json:"ms"`
	}
	if !v.readJSON(w, r, &in) {
		return
	}
	if in.Batch == nil {
		v.fail(w, r, http.StatusUnprocessableEntity, "field required: batch")
		return
	}
	batch, ids := uuid.NewString(), []int{}
	wanted := min(max(in.Batch.Runs, 1), 1000)
	mu := &v.l.s.mu
	mu.Lock()
	for range wanted {
		// Its number is known before it is in the line: both are made under the lock.
		p := &queued{id: strconv.Itoa(v.q.number + 1), batch: batch, run: runOf(in.MS, nil), request: requestOf(r.Context())}
		if !v.q.add(p, in.Prepend) {
			break
		}
		ids = append(ids, v.q.number)
	}
	mu.Unlock()
	writeJSON(w, http.StatusCreated, map[string]any{
		"queue_id": "default", "enqueued": len(ids), "requested": wanted, "priority": 0,
		"batch": map[string]any{"batch_id": batch, "runs": wanted}, "item_ids": ids,
	})
}

var invokeStates = [...]string{jobQueued: "pending", jobRunning: "in_progress", jobCompleted: "completed", jobFailed: "failed", jobCancelled: "canceled"}

// counts is what a status shows of a batch, of all if it is empty.
func (v *invoke) counts(batch string) map[string]any {
	v.l.s.mu.Lock()
	n := v.q.counts(batch)
	v.l.s.mu.Unlock()
	out, total := map[string]any{"queue_id": "default"}, 0
	for state, name := range invokeStates {
		out[name] = n[state]
		total += n[state]
	}
	out["total"] = total
	return out
}

func (v *invoke) status(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"queue": v.counts(""), "processor": v.processor()})
}

func (v *invoke) batch(w http.ResponseWriter, r *http.Request) {
	out := v.counts(r.PathValue("batch"))
	out["batch_id"] = r.PathValue("batch")
	writeJSON(w, http.StatusOK, out)
}

func (v *invoke) item(w http.ResponseWriter, r *http.Request) {
	v.l.s.mu.Lock()
	p := v.q.find(r.PathValue("item"))
	var out map[string]any
	if p != nil {
		out = map[string]any{"item_id": p.number, "batch_id": p.batch, "status": invokeStates[p.state], "error_message": p.message}
	}
	v.l.s.mu.Unlock()
	if p == nil {
		v.fail(w, r, http.StatusNotFound, "no item "+r.PathValue("item"))
		return
	}
	writeJSON(w, http.StatusOK, out)
}

func (v *invoke) processor() map[string]bool {
	v.l.s.mu.Lock()
	defer v.l.s.mu.Unlock()
	return map[string]bool{"is_started": !v.q.paused, "is_processing": v.q.running != nil}
}

func (v *invoke) pause(on bool) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		v.l.s.mu.Lock()
		v.q.paused = on
		v.q.notify()
		v.l.s.mu.Unlock()
		writeJSON(w, http.StatusOK, v.processor())
	}
}

func (v *invoke) empty(w http.ResponseWriter, r *http.Request) {
	if !v.unloading(w, r, v.m) {
		return
	}
	done := make(chan struct{})
	v.l.s.mu.Lock()
	free := !v.l.dead && v.m.phase == loaded && v.m.users == 0
	if free {
		v.l.beginUnload(v.m, func() { close(done) })
	}
	v.l.s.mu.Unlock()
	if free {
		<-done // it ends with the life
	} else {
		v.l.makeGood(v.m)
	}
	writeJSON(w, http.StatusOK, nil)
}

func (v *invoke) stats(w http.ResponseWriter, _ *http.Request) {
	v.l.s.mu.Lock()
	sizes := map[string]int64{}
	if v.m.saysLoaded() {
		sizes[v.m.name] = int64(v.m.resident)
	}
	v.l.s.mu.Unlock()
	writeJSON(w, http.StatusOK, map[string]any{"in_cache": len(sizes), "loaded_model_sizes": sizes})
}
