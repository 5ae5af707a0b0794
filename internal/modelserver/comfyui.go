package modelserver

import (
	"encoding/json"
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
	*queue
	mux *http.ServeMux

	// What POST /free has asked for and the worker hasn't done yet.
	unloadModels, freeMemory bool

	sockets map[string]*socket
}

func newComfy(l *life) *comfy {
	c := &comfy{mux: http.NewServeMux(), sockets: map[string]*socket{}}
	for _, m := range l.models {
		c.queue = newQueue(l, m, maxPending, maxHistory)
	}
	c.changed = func() { c.broadcast(statusMessage(c.remaining(), "")) }
	c.between = c.takeFlags
	c.begins = func(p *queued) { c.tell(p, "execution_start", nil) }
	c.loads = func(p *queued) { c.tell(p, "executing", map[string]any{"node": "1"}) }
	c.ends = c.tellEnd
	for route, handler := range map[string]http.HandlerFunc{
		"POST /prompt":       c.submit,
		"GET /prompt":        c.execInfo,
		"GET /queue":         c.list,
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
	p := &queued{id: in.PromptID, client: in.ClientID, asked: in.Prompt, run: runOf(in.MS, graph), request: requestOf(r.Context())}
	s := c.l.s
	s.mu.Lock()
	ok = c.add(p, in.Front)
	s.mu.Unlock()
	if !ok {
		writeError(w, http.StatusServiceUnavailable, "the queue is full")
		return
	}
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

// tellEnd tells of a prompt's end.
func (c *comfy) tellEnd(p *queued) {
	switch p.state {
	case jobCancelled:
		c.l.s.mu.Lock()
		c.broadcast(event("execution_interrupted", map[string]any{"prompt_id": p.id}))
		c.l.s.mu.Unlock()
	case jobFailed:
		c.tell(p, "execution_error", map[string]any{"exception_message": p.message})
	default:
		c.tell(p, "executing", map[string]any{"node": nil})
		c.tell(p, "execution_success", nil)
	}
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
	c.nudge()
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
		p.cancel()
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
	c.drop(edit.names, false)
	c.l.s.mu.Unlock()
	w.WriteHeader(http.StatusOK)
}

func (c *comfy) editHistory(w http.ResponseWriter, r *http.Request) {
	edit, ok := readEdit(w, r)
	if !ok {
		return
	}
	c.l.s.mu.Lock()
	c.forget(edit.names)
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
