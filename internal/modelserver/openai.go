package modelserver

import (
	"fmt"
	"net/http"
	"time"
)

// openAI is what tells the two forms of completion apart.
type openAI struct {
	object, chunkObject string
	whole               func(text string) map[string]any
	delta               func(text string) map[string]any
}

var (
	chatCompletion = openAI{
		object: "chat.completion", chunkObject: "chat.completion.chunk",
		whole: func(text string) map[string]any {
			return map[string]any{"message": map[string]string{"role": "assistant", "content": text}}
		},
		delta: func(text string) map[string]any {
			return map[string]any{"delta": map[string]string{"role": "assistant", "content": text}}
		},
	}
	textCompletion = openAI{
		object: "text_completion", chunkObject: "text_completion",
		whole: func(text string) map[string]any { return map[string]any{"text": text} },
		delta: func(text string) map[string]any { return map[string]any{"text": text} },
	}
)

// completions serves ollama's /v1/chat/completions and /v1/completions.
func (o *ollama) completions(form openAI) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		a, m, ok := o.read(w, r)
		if !ok {
			return
		}
		keep := o.l.s.options().KeepAlive
		o.work(w, r, m, keep, func(words []string, each time.Duration) error {
			id := fmt.Sprintf("chatcmpl-%d", requestOf(r.Context()).id)
			usage := map[string]int{"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": len(words) + 1}
			reply := func(object string, choice map[string]any, finish any) map[string]any {
				choice["index"], choice["finish_reason"] = 0, finish
				return map[string]any{
					"id": id, "object": object, "created": time.Now().Unix(), "model": a.Model,
					"system_fingerprint": "fp_ollama", "choices": []any{choice},
				}
			}
			if a.Stream == nil || !*a.Stream {
				if err := o.l.run(r.Context(), m, each*time.Duration(len(words))); err != nil {
					return err
				}
				whole := reply(form.object, form.whole(join(words)), "stop")
				whole["usage"] = usage
				return o.l.answer(w, "application/json", line(whole))
			}
			w.Header().Set("Content-Type", "text/event-stream")
			last := sse(reply(form.chunkObject, form.delta(""), "stop"))
			if a.StreamOptions.IncludeUsage {
				end := reply(form.chunkObject, form.delta(""), nil)
				end["choices"], end["usage"] = []any{}, usage
				last = append(last, sse(end)...)
			}
			return o.stream(w, r, m, each, words, func(word string) []byte {
				return sse(reply(form.chunkObject, form.delta(word), nil))
			}, append(last, "data: [DONE]\n\n"...))
		}, a)
	}
}

func (o *ollama) v1Models(w http.ResponseWriter, _ *http.Request) {
	o.l.s.mu.Lock()
	data := []any{}
	for _, name := range o.names() {
		data = append(data, map[string]any{"id": name, "object": "model", "created": 1700000000, "owned_by": "library"})
	}
	o.l.s.mu.Unlock()
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": data})
}

func (o *ollama) v1Embeddings(w http.ResponseWriter, r *http.Request) {
	a, m, ok := o.read(w, r)
	if !ok {
		return
	}
	o.work(w, r, m, o.l.s.options().KeepAlive, func(words []string, each time.Duration) error {
		if err := o.l.run(r.Context(), m, each*time.Duration(len(words))); err != nil {
			return err
		}
		return o.l.answer(w, "application/json", line(map[string]any{
			"object": "list", "model": a.Model,
			"data":  []any{map[string]any{"object": "embedding", "index": 0, "embedding": vector(a)}},
			"usage": map[string]int{"prompt_tokens": 1, "total_tokens": 1},
		}))
	}, a)
}

func sse(value any) []byte {
	return append(append([]byte("data: "), line(value)...), "\n\n"...)
}
