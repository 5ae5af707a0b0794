package modelserver

import (
	"fmt"
	"net/http"
	"time"
)

// sdcppMost is how many jobs may wait.
const sdcppMost = 64

// sdcpp is a stable-diffusion.cpp sd-server: one lock for everything that
// computes, and jobs of which no route but their own tells, for KeepJobs.
type sdcpp struct {
	*shape
	q *queue
}

func newSDCpp(l *life) http.Handler {
	c := &sdcpp{shape: newShape(l)}
	c.fail = func(w http.ResponseWriter, _ *http.Request, status int, message string) {
		writeError(w, status, message)
	}
	c.q = newQueue(l, c.m, sdcppMost, maxHistory)
	c.healthy(v1Models([]string{"sd-cpp-local"}, "local"), "GET /v1/models")
	c.fixed(map[string]any{"model": map[string]string{"name": c.m.name}, "limits": map[string]int{"max_queue_size": sdcppMost}}, "GET /sdcpp/v1/capabilities")
	c.fixed([]any{map[string]string{"title": c.m.name, "model_name": c.m.name}}, "GET /sdapi/v1/sd-models")
	c.gpu(c.images, "POST /v1/images/generations", "POST /v1/images/edits")
	c.gpu(func(j *job) error {
		return c.whole(j, func() any {
			return map[string]any{"images": []string{drawn(j.ask.Prompt)}, "parameters": struct{}{}, "info": ""}
		})
	}, "POST /sdapi/v1/txt2img", "POST /sdapi/v1/img2img")
	c.handle(c.submit("img_gen"), "POST /sdcpp/v1/img_gen")
	c.handle(c.submit("vid_gen"), "POST /sdcpp/v1/vid_gen")
	c.handle(c.look(c.show), "GET /sdcpp/v1/jobs/{id}")
	c.handle(c.look(c.cancel), "POST /sdcpp/v1/jobs/{id}/cancel")
	return c.mux
}

func (c *sdcpp) images(j *job) error {
	if j.form {
		j.ask.Prompt, j.ask.Size = j.fields["prompt"], j.fields["size"]
	}
	width, height, err := j.ask.dimensions()
	if err != nil {
		c.fail(j.w, j.r, http.StatusBadRequest, err.Error())
		return errAnswered
	}
	return c.whole(j, func() any { return v1Images(c.l.s.name, j.ask, width, height) })
}

func (c *sdcpp) submit(kind string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var in struct {
			Prompt string   `json:"prompt"`
			MS     *float64 `json:"ms"`
		}
		if !c.readJSON(w, r, &in) {
			return
		}
		mu := &c.l.s.mu
		mu.Lock()
		p := &queued{
			id: fmt.Sprintf("job_%08d", c.q.number+1), kind: kind, client: in.Prompt,
			run: runOf(in.MS, nil), request: requestOf(r.Context()),
		}
		ok := c.q.add(p, false)
		var out map[string]any
		if ok {
			out = c.view(p)
		}
		mu.Unlock()
		if !ok {
			c.fail(w, r, http.StatusTooManyRequests, "the job queue is full")
			return
		}
		writeJSON(w, http.StatusAccepted, out)
	}
}

var sdcppStates = [...]string{jobQueued: "queued", jobRunning: "generating", jobCompleted: "completed", jobFailed: "failed", jobCancelled: "cancelled"}

// view is a job as its route shows it. For holders of mu.
func (c *sdcpp) view(p *queued) map[string]any {
	second := func(t time.Time) any {
		if t.IsZero() {
			return nil
		}
		return t.Unix()
	}
	out := map[string]any{
		"id": p.id, "kind": p.kind, "status": sdcppStates[p.state], "queue_position": max(0, c.q.position(p.id)),
		"created": second(p.created), "started": second(p.started), "completed": second(p.over), "result": nil, "error": nil,
	}
	switch p.state {
	case jobCompleted:
		out["result"] = map[string]any{"images": []any{map[string]any{"index": 0, "b64_json": drawn(p.client)}}}
	case jobFailed, jobCancelled:
		out["error"] = map[string]string{"code": sdcppStates[p.state], "message": p.message}
	}
	return out
}

// look answers with a job, or with what do, which is called with Server.mu
// held, has against it.
func (c *sdcpp) look(do func(*queued) (status int, complaint string)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		mu := &c.l.s.mu
		mu.Lock()
		status, complaint := http.StatusOK, ""
		var out map[string]any
		switch p := c.q.find(r.PathValue("id")); {
		case p == nil:
			status, complaint = http.StatusNotFound, "job not found"
		case !p.over.IsZero() && time.Since(p.over) >= c.l.s.opts.KeepJobs:
			status, complaint = http.StatusGone, "job expired"
		default:
			status, complaint = do(p)
			out = c.view(p)
		}
		mu.Unlock()
		if complaint != "" {
			c.fail(w, r, status, complaint)
			return
		}
		writeJSON(w, status, out)
	}
}

func (c *sdcpp) show(*queued) (status int, complaint string) { return http.StatusOK, "" }

// cancel takes a job out of the line; one that runs is not to be stopped.
func (c *sdcpp) cancel(p *queued) (status int, complaint string) {
	if p.state != jobQueued {
		return http.StatusConflict, "the job is " + sdcppStates[p.state]
	}
	c.q.drop(func(id string) bool { return id == p.id }, true)
	return http.StatusOK, ""
}
