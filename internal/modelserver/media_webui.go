package modelserver

import (
	"context"
	"encoding/json"
	"net/http"
)

// webUI is an AUTOMATIC1111, a Forge or an SD.Next. One lock makes its work
// wait for its turn, which its progress doesn't tell of; the unload doesn't
// take that lock and breaks what runs. The first picture loads the model. After
// an unload an AUTOMATIC1111 leaves it in host RAM, where the next picture
// fails, until it is told to reload; the others load it again by themselves.
type webUI struct {
	*shape
	kind   Manner
	parked bool // it was unloaded and not reloaded; guarded by Server.mu
}

func newWebUI(l *life) http.Handler {
	u := &webUI{shape: newShape(l), kind: l.s.options().Manner}
	u.fail, u.notLoaded = failWebUI, http.StatusInternalServerError
	u.join = u.unlessParked
	u.health(u.memory, "GET /sdapi/v1/memory")
	u.handle(u.progress, "GET /sdapi/v1/progress")
	u.handle(u.unloadRoute, "POST /sdapi/v1/unload-checkpoint")
	u.handle(u.reloadRoute, "POST /sdapi/v1/reload-checkpoint")
	u.handle(u.setOptions, "POST /sdapi/v1/options")
	u.fixed(map[string]any{"sd_model_checkpoint": u.m.name}, "GET /sdapi/v1/options")
	u.fixed([]any{map[string]any{"title": u.m.name, "model_name": u.m.name, "hash": nil}}, "GET /sdapi/v1/sd-models")
	u.fixed([]any{map[string]any{"name": "Euler a", "aliases": []string{}, "options": struct{}{}}}, "GET /sdapi/v1/samplers")
	u.fixed([]any{}, "GET /sdapi/v1/loras")
	if u.kind == SDNext {
		u.health(u.status, "GET /sdapi/v1/status")
		u.healthy(map[string]string{"app": "sd.next"}, "GET /sdapi/v1/version")
		u.gpu(u.draw("processed"), "POST /sdapi/v1/control")
	} else {
		u.healthy(struct{}{}, "GET /internal/ping")
	}
	u.gpu(u.draw("images"), "POST /sdapi/v1/txt2img", "POST /sdapi/v1/img2img", "POST /sdapi/v1/extra-batch-images")
	u.gpu(u.told(u.fixedWork(map[string]string{"html_info": "", "image": drawn("larger")})), "POST /sdapi/v1/extra-single-image")
	u.gpu(u.told(u.fixedWork(map[string]string{"caption": u.m.name + " saw a boat"})), "POST /sdapi/v1/interrogate")
	u.gpu(u.told(u.fixedWork(map[string]any{"data": []any{}, "is_generating": false})), "POST /run/predict")
	return u.mux
}

// failWebUI answers with an error as these servers' API does.
func failWebUI(w http.ResponseWriter, _ *http.Request, status int, message string) {
	writeJSON(w, status, map[string]string{"error": "RuntimeError", "detail": "", "body": "", "errors": message})
}

// draw answers with a picture in a list of that name.
func (u *webUI) draw(list string) func(*job) error {
	return u.told(func(j *job) error {
		return u.whole(j, func() any {
			parameters := json.RawMessage(j.body)
			if len(parameters) == 0 || j.form {
				parameters = json.RawMessage("{}")
			}
			return map[string]any{list: []string{drawn(j.ask.Prompt)}, "parameters": parameters, "info": u.l.s.name + " drew: " + j.ask.Prompt}
		})
	})
}

func (u *webUI) unlessParked(ctx context.Context, m *model) (func(), error) {
	u.l.s.mu.Lock()
	parked := u.parked && u.kind == A1111
	u.l.s.mu.Unlock()
	if parked {
		return u.ifLoaded(ctx, m)
	}
	return u.lazily(ctx, m)
}

func (u *webUI) park(on bool) {
	u.l.s.mu.Lock()
	defer u.l.s.mu.Unlock()
	u.parked = on
}

// memory tells of the whole GPU, and of this process's pool.
func (u *webUI) memory(w http.ResponseWriter, r *http.Request) {
	opts := u.l.s.options()
	total := opts.Total
	if total == 0 {
		total = opts.VRAM
	}
	free, err := u.l.memory.gpuFree(total)
	if err != nil {
		u.fail(w, r, http.StatusInternalServerError, err.Error())
		return
	}
	pool := int64(u.l.memory.pool())
	now := map[string]int64{"current": pool, "peak": pool}
	writeJSON(w, http.StatusOK, map[string]any{
		"ram": map[string]int64{"free": 1 << 34, "used": 1 << 33, "total": 3 << 33},
		"cuda": map[string]any{
			"system": map[string]int64{"free": int64(free), "used": int64(total - free), "total": int64(total)},
			"active": now, "allocated": now, "reserved": now, "events": map[string]int{"retries": 0, "oom": 0},
		},
	})
}

// counts is how much runs and waits.
func (u *webUI) counts() (running, waiting int) {
	u.l.s.mu.Lock()
	defer u.l.s.mu.Unlock()
	return u.busy()
}

func (u *webUI) progress(w http.ResponseWriter, _ *http.Request) {
	running, _ := u.counts() // the wait for the lock is not seen here
	state := map[string]any{"job": "", "job_count": 0, "job_no": 0, "sampling_step": 0, "sampling_steps": 0, "interrupted": false}
	progress := 0.0
	if running > 0 {
		state["job"], state["job_count"], state["sampling_steps"], progress = "scripts_txt2img", running, 20, 0.01
	}
	answer := map[string]any{"progress": progress, "eta_relative": 0.0, "state": state, "current_image": nil, "textinfo": nil}
	if u.kind == Forge {
		answer["current_task"] = nil
	}
	writeJSON(w, http.StatusOK, answer)
}

// status is SD.Next's, which tells of those who wait, too.
func (u *webUI) status(w http.ResponseWriter, _ *http.Request) {
	running, waiting := u.counts()
	status, task := "idle", ""
	if running > 0 {
		status, task = "running", "txt2img"
	}
	writeJSON(w, http.StatusOK, map[string]any{"status": status, "task": task, "queued": waiting, "progress": 0, "eta": nil})
}

// done is the answer without content.
func (u *webUI) done(w http.ResponseWriter) {
	if u.kind == SDNext {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	writeJSON(w, http.StatusOK, struct{}{})
}

func (u *webUI) unloadRoute(w http.ResponseWriter, r *http.Request) {
	if !u.unloadNow(w, r) {
		return
	}
	u.park(u.phase(u.m) != loaded) // but for the fault that keeps it loaded
	u.done(w)
}

func (u *webUI) reloadRoute(w http.ResponseWriter, r *http.Request) {
	if u.kind != Forge { // there it does nothing
		if err := u.load(r.Context(), u.m); err != nil {
			u.loadError(w, r, err)
			return
		}
		u.park(false)
	}
	u.done(w)
}

// setOptions loads another checkpoint; the one that is there stays as it is, in
// host RAM too.
func (u *webUI) setOptions(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Checkpoint string `json:"sd_model_checkpoint"`
	}
	if !u.readJSON(w, r, &in) {
		return
	}
	if in.Checkpoint != "" && in.Checkpoint != u.m.name {
		if err := u.load(r.Context(), u.m); err != nil {
			u.loadError(w, r, err)
			return
		}
		u.park(false)
	}
	writeJSON(w, http.StatusOK, nil)
}
