package modelserver

import (
	"encoding/json"
	"fmt"
	"html"
	"io"
	"net/http"
	"strconv"
)

// The routes of a ComfyUI that only tell: none of them waits for the GPU.

func (c *comfy) execInfo(w http.ResponseWriter, _ *http.Request) {
	c.l.s.mu.Lock()
	n := c.remaining()
	c.l.s.mu.Unlock()
	writeJSON(w, http.StatusOK, map[string]any{"exec_info": map[string]int{"queue_remaining": n}})
}

// item is a prompt as /queue shows it: an array with the id at index 1.
func item(p *queued) []any {
	return []any{p.number, p.id, p.asked, map[string]string{"client_id": p.client}, []string{"1"}}
}

func (c *comfy) list(w http.ResponseWriter, _ *http.Request) {
	c.l.s.mu.Lock()
	running, pending := [][]any{}, [][]any{}
	if c.running != nil {
		running = append(running, item(c.running))
	}
	for _, p := range c.pending {
		pending = append(pending, item(p))
	}
	c.l.s.mu.Unlock()
	writeJSON(w, http.StatusOK, map[string]any{"queue_running": running, "queue_pending": pending})
}

// entry is a prompt as /history shows it. For holders of mu.
func entry(p *queued) map[string]any {
	status := map[string]any{"status_str": "success", "completed": true, "messages": []any{}}
	outputs := map[string]any{"1": map[string]any{
		"images": []any{map[string]string{"filename": p.id + ".png", "subfolder": "", "type": "output"}},
	}}
	if p.state != jobCompleted {
		kind := "execution_error"
		if p.state == jobCancelled {
			kind = "execution_interrupted"
		}
		status = map[string]any{"status_str": "error", "completed": false, "messages": []any{
			[]any{kind, map[string]string{"prompt_id": p.id, "exception_message": p.message}},
		}}
		outputs = map[string]any{}
	}
	return map[string]any{"prompt": item(p), "status": status, "outputs": outputs, "meta": struct{}{}}
}

func (c *comfy) allHistory(w http.ResponseWriter, r *http.Request) {
	most, err := strconv.Atoi(r.URL.Query().Get("max_items"))
	if err != nil || most < 0 {
		most = maxHistory
	}
	c.l.s.mu.Lock()
	out := map[string]any{}
	for _, id := range c.order[max(0, len(c.order)-most):] {
		out[id] = entry(c.ended[id])
	}
	c.l.s.mu.Unlock()
	writeJSON(w, http.StatusOK, out)
}

func (c *comfy) oneHistory(w http.ResponseWriter, r *http.Request) {
	out := map[string]any{}
	c.l.s.mu.Lock()
	if p := c.ended[r.PathValue("id")]; p != nil {
		out[p.id] = entry(p)
	}
	c.l.s.mu.Unlock()
	writeJSON(w, http.StatusOK, out)
}

func (c *comfy) systemStats(w http.ResponseWriter, r *http.Request) {
	if !c.l.health(w, r) {
		return
	}
	opts := c.l.s.options()
	total := opts.Total
	if total == 0 {
		total = opts.VRAM
	}
	free, err := c.l.memory.gpuFree(total)
	if err != nil {
		trouble(w)
		return
	}
	pool := int64(c.l.memory.pool())
	writeJSON(w, http.StatusOK, map[string]any{
		"system": map[string]any{"os": "posix", "comfyui_version": "0.3.64", "python_version": "3.12.3"},
		"devices": []any{map[string]any{
			"name": "cuda:0 Simulated GPU", "type": "cuda", "index": 0,
			"vram_total": int64(total), "vram_free": int64(free),
			"torch_vram_total": pool, "torch_vram_free": 0,
		}},
	})
}

// view sends a deterministic picture's worth of bytes; ?bytes=N says how many.
func (c *comfy) view(w http.ResponseWriter, r *http.Request) {
	size, err := strconv.ParseInt(r.URL.Query().Get("bytes"), 10, 64)
	if err != nil || size < 0 || size > 1<<30 {
		size = 64 << 10
	}
	w.Header().Set("Content-Type", "image/png")
	w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	_, _ = io.CopyN(w, newPattern(0), size) // the client may be gone
}

func (c *comfy) upload(w http.ResponseWriter, r *http.Request) {
	if _, ok := readBody(w, r); ok {
		writeJSON(w, http.StatusOK, map[string]string{"name": "upload.png", "subfolder": "", "type": "input"})
	}
}

func (c *comfy) page(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	name := html.EscapeString(c.l.s.name)
	_, _ = fmt.Fprintf(w, pageText, name, name) // the client may be gone
}

const pageText = `<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>%s (ComfyUI, pretended)</title>
<h1>%s</h1>
<p>This server only pretends. Prompts in its queue: <span id="n">?</span></p>
<script>
const socket = new WebSocket(new URL("ws", location.href).href.replace(/^http/, "ws"));
socket.onmessage = event => {
	const { type, data } = JSON.parse(event.data);
	if (type === "status") document.getElementById("n").textContent = data.status.exec_info.queue_remaining;
};
</script>
</html>
`

// event is one message of the websocket.
func event(kind string, data any) []byte {
	text, err := json.Marshal(map[string]any{"type": kind, "data": data})
	if err != nil {
		return []byte(`{"type":"error","data":{}}`)
	}
	return text
}

// statusMessage is what all sockets get at each change of the queue. The first
// one of a socket names its session.
func statusMessage(remaining int, session string) []byte {
	data := map[string]any{"status": map[string]any{"exec_info": map[string]int{"queue_remaining": remaining}}}
	if session != "" {
		data["sid"] = session
	}
	return event("status", data)
}
