package modelserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

// Bounds as ComfyUI has them, or has none.
const (
	maxHistory = 10000
	maxPending = 100000
)

// comfy is a ComfyUI: POST /prompt only queues, and one worker runs the
// prompts one by one. Its queue is guarded by Server.mu.
type comfy struct {
	l    *life
	m    *model
	mux  *http.ServeMux
	wake chan struct{} // holds a token while there may be something for the worker

	number  int
	pending []*prompt
	running *prompt
	history map[string]*prompt
	order   []string // of history, oldest first

	// What POST /free has asked for and the worker hasn't done yet.
	unloadModels, freeMemory bool

	sockets map[string]*socket
}

// prompt is one queued workflow.
type prompt struct {
	id        string
	number    int
	client    string
	graph     json.RawMessage
	run       time.Duration // negative: RunTime
	interrupt context.CancelFunc
	request   request

	failed  bool
	message string // why it failed
}

func newComfy(l *life) *comfy {
	c := &comfy{
		l: l, mux: http.NewServeMux(), wake: make(chan struct{}, 1),
		history: map[string]*prompt{}, sockets: map[string]*socket{},
	}
	for _, m := range l.models {
		c.m = m
	}
	for route, handler := range map[string]http.HandlerFunc{
		"POST /prompt":       c.submit,
		"GET /prompt":        c.execInfo,
		"GET /queue":         c.queue,
		"POST /queue":        c.editQueue,
		"GET /history":       c.allHistory,
		"POST /history":      c.editHistory,
		"GET /history/{id}":  c.oneHistory,
		"POST /interrupt":    c.interrupt,
		"POST /free":         c.free,
		"GET /system_stats":  c.systemStats,
		"GET /view":          c.view,
		"GET /ws":            c.socket,
		"POST /upload/image": c.upload,
		"GET /object_info":   cheap(`{"KSampler":{"input":{"required":{}},"output":["LATENT"]}}`),
		"GET /embeddings":    cheap(`[]`),
		"GET /extensions":    cheap(`[]`),
		"GET /features":      cheap(`{"supports_preview_metadata":true}`),
		"GET /models":        cheap(`["checkpoints"]`),
		"GET /settings":      cheap(`{}`),
		"GET /userdata":      cheap(`[]`),
	} {
		method, path, _ := strings.Cut(route, " ")
		c.mux.HandleFunc(route, handler)
		c.mux.HandleFunc(method+" /api"+path, handler)
	}
	c.mux.HandleFunc("GET /{$}", c.page)
	return c
}

func (c *comfy) ServeHTTP(w http.ResponseWriter, r *http.Request) { c.mux.ServeHTTP(w, r) }

// remaining is for holders of mu.
func (c *comfy) remaining() int {
	if c.running != nil {
		return len(c.pending) + 1
	}
	return len(c.pending)
}

var canonicalUUID = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// submit validates and queues a prompt. The time of its run is RunTime, or "ms"
// in the body, in the prompt or in a node's inputs.
func (c *comfy) submit(w http.ResponseWriter, r *http.Request) {
	body, ok := readBody(w, r)
	if !ok {
		return
	}
	var in struct {
		Prompt   json.RawMessage `json:"prompt"`
		ClientID string          `json:"client_id"`
		PromptID string          `json:"prompt_id"`
		Front    bool            `json:"front"`
		MS       *float64        `json:"ms"`
	}
	if err := json.Unmarshal(body, &in); err != nil {
		trouble(w) // aiohttp's answer to a body that isn't JSON
		return
	}
	var graph map[string]json.RawMessage
	switch {
	case len(in.Prompt) == 0 || string(in.Prompt) == "null":
		invalid(w, "no_prompt", "No prompt provided")
		return
	case json.Unmarshal(in.Prompt, &graph) != nil || len(graph) == 0:
		invalid(w, "prompt_no_outputs", "Prompt has no outputs")
		return
	case in.PromptID != "" && !canonicalUUID.MatchString(in.PromptID):
		invalid(w, "invalid_prompt_id", "prompt_id must be a canonical lowercase UUID")
		return
	case in.PromptID == "":
		in.PromptID = uuid.NewString()
	}
	p := &prompt{id: in.PromptID, client: in.ClientID, graph: in.Prompt, run: runOf(in.MS, graph), request: requestOf(r.Context())}
	s := c.l.s
	s.mu.Lock()
	if len(c.pending) >= maxPending {
		s.mu.Unlock()
		writeError(w, http.StatusServiceUnavailable, "the queue is full")
		return
	}
	c.number++
	p.number = c.number
	if in.Front {
		p.number = -p.number
		c.pending = append([]*prompt{p}, c.pending...)
	} else {
		c.pending = append(c.pending, p)
	}
	c.queueChanged()
	s.mu.Unlock()
	writeJSON(w, http.StatusOK, map[string]any{"prompt_id": p.id, "number": p.number, "node_errors": struct{}{}})
}

// runOf finds the time that a prompt wishes to take.
func runOf(ms *float64, graph map[string]json.RawMessage) time.Duration {
	if ms == nil {
		if raw, ok := graph["ms"]; ok {
			ms = new(float64)
			if json.Unmarshal(raw, ms) != nil {
				ms = nil
			}
		}
	}
	for _, raw := range graph {
		var node struct {
			Inputs struct {
				MS *float64 `json:"ms"`
			} `json:"inputs"`
		}
		if ms == nil && json.Unmarshal(raw, &node) == nil {
			ms = node.Inputs.MS
		}
	}
	if ms == nil || *ms < 0 || *ms > 1e9 {
		return -1
	}
	return time.Duration(*ms * float64(time.Millisecond))
}

// queueChanged wakes the worker and tells all sockets. For holders of mu.
func (c *comfy) queueChanged() {
	select {
	case c.wake <- struct{}{}:
	default: // it is awake
	}
	c.broadcast(statusMessage(c.remaining(), ""))
	c.l.s.notify()
}

// work is the worker. It ends with the life.
func (c *comfy) work() {
	for {
		c.runNext()
		c.takeFlags()
		c.l.s.mu.Lock()
		more := len(c.pending) > 0
		c.l.s.mu.Unlock()
		if c.l.ctx.Err() != nil {
			return
		}
		if more {
			continue
		}
		select {
		case <-c.wake:
		case <-c.l.ctx.Done():
			return
		}
	}
}

// runNext runs one prompt if there is one.
func (c *comfy) runNext() {
	s := c.l.s
	s.mu.Lock()
	if len(c.pending) == 0 || c.l.dead {
		s.mu.Unlock()
		return
	}
	p := c.pending[0]
	c.pending = c.pending[1:]
	c.running = p
	ctx, cancel := context.WithCancel(c.l.ctx)
	defer cancel()
	p.interrupt = cancel
	c.queueChanged()
	s.mu.Unlock()

	c.tell(p, "execution_start", nil)
	err := c.execute(ctx, p)
	if c.l.ctx.Err() != nil {
		return
	}
	s.mu.Lock()
	if err != nil {
		p.failed, p.message = true, err.Error()
		if errors.Is(err, context.Canceled) {
			p.message = "interrupted"
		}
	}
	c.running = nil
	c.history[p.id] = p
	c.order = append(c.order, p.id)
	if len(c.order) > maxHistory {
		delete(c.history, c.order[0])
		c.order = c.order[1:]
	}
	c.queueChanged()
	s.mu.Unlock()
	switch {
	case p.message == "interrupted":
		s.mu.Lock()
		c.broadcast(event("execution_interrupted", map[string]any{"prompt_id": p.id}))
		s.mu.Unlock()
	case p.failed:
		c.tell(p, "execution_error", map[string]any{"exception_message": p.message})
	default:
		c.tell(p, "executing", map[string]any{"node": nil})
		c.tell(p, "execution_success", nil)
	}
}

// execute loads the model if need be and computes.
func (c *comfy) execute(ctx context.Context, p *prompt) error {
	release, err := c.l.acquire(ctx, c.m, true)
	if err != nil {
		return err
	}
	defer release()
	c.tell(p, "executing", map[string]any{"node": "1"})
	end := c.l.beginWork(p.request, c.m)
	if c.l.takeFault(func(f *Faults) bool { was := f.DieOnRequest; f.DieOnRequest = false; return was }) {
		end(false)
		c.l.dieOf("die_on_request")
		return errDead
	}
	run := p.run
	if run < 0 {
		run = c.l.s.options().RunTime
	}
	if err = c.l.sleep(ctx, run); err == nil {
		err = c.l.hangWhile(ctx, func(f Faults) bool { return f.HoldWork })
	}
	end(err == nil)
	return err
}

// takeFlags does what POST /free has asked for, once, between two prompts.
func (c *comfy) takeFlags() {
	s := c.l.s
	s.mu.Lock()
	asked := c.unloadModels || c.freeMemory
	c.unloadModels, c.freeMemory = false, false
	s.mu.Unlock()
	if asked {
		_ = c.l.unload(c.l.ctx, c.m) // fails only as the life ends
	}
}

func (c *comfy) free(w http.ResponseWriter, r *http.Request) {
	body, ok := readBody(w, r)
	if !ok {
		return
	}
	var in struct {
		UnloadModels bool `json:"unload_models"`
		FreeMemory   bool `json:"free_memory"`
	}
	if json.Unmarshal(body, &in) != nil {
		trouble(w)
		return
	}
	c.l.unloadCalled(c.m)
	if c.l.faults().FailUnload {
		trouble(w)
		return
	}
	s := c.l.s
	s.mu.Lock()
	c.unloadModels = c.unloadModels || in.UnloadModels
	c.freeMemory = c.freeMemory || in.FreeMemory
	select {
	case c.wake <- struct{}{}:
	default:
	}
	s.mu.Unlock()
	w.WriteHeader(http.StatusOK)
}

func (c *comfy) interrupt(w http.ResponseWriter, r *http.Request) {
	body, ok := readBody(w, r)
	if !ok {
		return
	}
	var in struct {
		PromptID string `json:"prompt_id"`
	}
	if len(body) > 0 && json.Unmarshal(body, &in) != nil {
		trouble(w)
		return
	}
	c.l.s.mu.Lock()
	if p := c.running; p != nil && (in.PromptID == "" || in.PromptID == p.id) {
		p.interrupt()
	}
	c.l.s.mu.Unlock()
	w.WriteHeader(http.StatusOK)
}

func (c *comfy) editQueue(w http.ResponseWriter, r *http.Request) {
	edit, ok := readEdit(w, r)
	if !ok {
		return
	}
	c.l.s.mu.Lock()
	kept := []*prompt{}
	for _, p := range c.pending {
		if !edit.names(p.id) {
			kept = append(kept, p)
		}
	}
	c.pending = kept
	c.queueChanged()
	c.l.s.mu.Unlock()
	w.WriteHeader(http.StatusOK)
}

func (c *comfy) editHistory(w http.ResponseWriter, r *http.Request) {
	edit, ok := readEdit(w, r)
	if !ok {
		return
	}
	c.l.s.mu.Lock()
	kept := []string{}
	for _, id := range c.order {
		if edit.names(id) {
			delete(c.history, id)
		} else {
			kept = append(kept, id)
		}
	}
	c.order = kept
	c.l.s.mu.Unlock()
	w.WriteHeader(http.StatusOK)
}

// edit is the body of POST /queue and /history.
type edit struct {
	Clear  bool     `json:"clear"`
	Delete []string `json:"delete"`
}

func (e edit) names(id string) bool {
	for _, d := range e.Delete {
		if d == id {
			return true
		}
	}
	return e.Clear
}

func readEdit(w http.ResponseWriter, r *http.Request) (edit, bool) {
	var e edit
	body, ok := readBody(w, r)
	if ok && json.Unmarshal(body, &e) != nil {
		trouble(w)
		return e, false
	}
	return e, ok
}

// trouble is what aiohttp answers where a handler has raised.
func trouble(w http.ResponseWriter) {
	http.Error(w, "500 Internal Server Error\n\nServer got itself in trouble", http.StatusInternalServerError)
}

// invalid is the answer to a prompt that fails validation: no job was made.
func invalid(w http.ResponseWriter, kind, text string) {
	writeJSON(w, http.StatusBadRequest, map[string]any{
		"error":       map[string]any{"type": kind, "message": text, "details": text, "extra_info": struct{}{}},
		"node_errors": struct{}{},
	})
}

func cheap(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		_, _ = fmt.Fprint(w, body) // the client may be gone
	}
}
