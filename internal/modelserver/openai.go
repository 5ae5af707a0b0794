package modelserver

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strings"
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

// completion answers with words, whole or as a stream. each is the time of one
// word; finish says why the words end: "stop" or "length".
func (l *life) completion(w http.ResponseWriter, r *http.Request, m *model, form openAI, a ask, words []string, each time.Duration, finish string) error {
	id := fmt.Sprintf("chatcmpl-%d", requestOf(r.Context()).id)
	usage := map[string]int{"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": len(words) + 1}
	reply := func(object string, choice map[string]any, finish any) map[string]any {
		choice["index"], choice["finish_reason"] = 0, finish
		return map[string]any{
			"id": id, "object": object, "created": time.Now().Unix(), "model": a.Model,
			"system_fingerprint": "fp_" + l.s.name, "choices": []any{choice},
		}
	}
	if a.Stream == nil || !*a.Stream {
		if err := l.run(r.Context(), m, each*time.Duration(len(words))); err != nil {
			return err
		}
		whole := reply(form.object, form.whole(join(words)), finish)
		whole["usage"] = usage
		return l.answer(w, "application/json", line(whole))
	}
	w.Header().Set("Content-Type", "text/event-stream")
	last := sse(reply(form.chunkObject, form.delta(""), finish))
	if a.StreamOptions.IncludeUsage {
		end := reply(form.chunkObject, form.delta(""), nil)
		end["choices"], end["usage"] = []any{}, usage
		last = append(last, sse(end)...)
	}
	return l.stream(w, r, m, each, words, func(word string) []byte {
		return sse(reply(form.chunkObject, form.delta(word), nil))
	}, append(last, "data: [DONE]\n\n"...))
}

// v1Embeddings is OpenAI's answer to a: one vector for each input, as numbers or as OpenAI's SDKs ask for it, in base64.
func v1Embeddings(a ask) map[string]any {
	data := []any{}
	for i, v := range vectors(a) {
		var embedding any = v
		if strings.EqualFold(a.EncodingFormat, "base64") {
			var raw []byte
			for _, x := range v {
				raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(float32(x)))
			}
			embedding = base64.StdEncoding.EncodeToString(raw)
		}
		data = append(data, map[string]any{"object": "embedding", "index": i, "embedding": embedding})
	}
	return map[string]any{
		"object": "list", "model": a.Model, "data": data,
		"usage": map[string]int{"prompt_tokens": len(data), "total_tokens": len(data)},
	}
}

// v1Models is OpenAI's list of models.
func v1Models(names []string, owner string) map[string]any {
	data := []any{}
	for _, name := range names {
		data = append(data, map[string]any{"id": name, "object": "model", "created": 1700000000, "owned_by": owner})
	}
	return map[string]any{"object": "list", "data": data}
}

// completions serves ollama's /v1/chat/completions and /v1/completions.
func (o *ollama) completions(form openAI) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		a, m, ok := o.read(w, r)
		if !ok {
			return
		}
		o.work(w, r, m, o.l.s.options().KeepAlive, func(words []string, each time.Duration) error {
			return o.l.completion(w, r, m, form, a, words, each, "stop")
		}, a)
	}
}

func (o *ollama) v1Models(w http.ResponseWriter, _ *http.Request) {
	o.l.s.mu.Lock()
	names := o.names()
	o.l.s.mu.Unlock()
	writeJSON(w, http.StatusOK, v1Models(names, "library"))
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
		return o.l.answer(w, "application/json", line(v1Embeddings(a)))
	}, a)
}

// fail answers with an error in OpenAI's form below /v1/, else in ollama's.
func fail(w http.ResponseWriter, r *http.Request, status int, message string) {
	if !strings.HasPrefix(r.URL.Path, "/v1/") {
		writeError(w, status, message)
		return
	}
	kind := map[int]string{http.StatusBadRequest: "invalid_request_error", http.StatusNotFound: "not_found_error"}[status]
	if kind == "" {
		kind = "api_error"
	}
	writeJSON(w, status, map[string]any{"error": map[string]any{"message": message, "type": kind, "param": nil, "code": nil}})
}

func sse(value any) []byte {
	return append(append([]byte("data: "), line(value)...), "\n\n"...)
}

// inputs are the texts to be embedded: input is one text, one list of tokens, or a list of either.
func inputs(a ask) []json.RawMessage {
	var list []json.RawMessage
	isList := json.Unmarshal(a.Input, &list) == nil && list != nil
	switch {
	case len(a.Input) == 0:
		text, _ := json.Marshal(a.Prompt) // a string is always JSON
		return []json.RawMessage{text}
	case isList && (len(list) == 0 || strings.HasPrefix(string(list[0]), `"`) || strings.HasPrefix(string(list[0]), "[")):
		return list
	default:
		return []json.RawMessage{a.Input}
	}
}
