package modelserver

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"
)

// The answers of language model servers. Each says who answers and repeats what
// was said last, so that a mixed-up answer shows.

// speech is how a route words generated text.
type speech struct {
	whole func(j *job, text, finish string) any
	// piece is one word of a stream, last what follows all of them. Without
	// piece the route never streams.
	piece func(j *job, word string) []byte
	last  func(j *job, text, finish string) []byte
	// streams reports whether to stream; nil: if the body's "stream" is true.
	streams func(j *job) bool
	ndjson  bool
}

// say answers with text.
func (s *shape) say(form speech) func(*job) error {
	return func(j *job) error {
		words, finish := j.words(s.l)
		each := s.l.runTime(j.r) / time.Duration(len(words))
		streams := j.ask.Stream != nil && *j.ask.Stream
		if form.streams != nil {
			streams = form.streams(j)
		}
		if !streams || form.piece == nil {
			return s.whole(j, func() any { return form.whole(j, join(words), finish) })
		}
		j.w.Header().Set("Content-Type", "text/event-stream")
		if form.ndjson {
			j.w.Header().Set("Content-Type", "application/x-ndjson")
		}
		return s.l.stream(j.w, j.r, j.m, each, words, func(word string) []byte {
			return form.piece(j, word)
		}, form.last(j, join(words), finish))
	}
}

// whole takes the time of the work and answers with value as JSON.
func (s *shape) whole(j *job, value func() any) error {
	if err := s.l.run(j.r.Context(), j.m, s.l.runTime(j.r)); err != nil {
		return err
	}
	return s.l.answer(j.w, "application/json", line(value()))
}

// openAI answers in one of OpenAI's two forms.
func (s *shape) openAI(form openAI) func(*job) error {
	return func(j *job) error {
		words, finish := j.words(s.l)
		return s.l.completion(j.w, j.r, j.m, form, j.ask, words, s.l.runTime(j.r)/time.Duration(len(words)), finish)
	}
}

// words is what to say. The name of a server with several models has the
// model's behind it.
func (j *job) words(l *life) (words []string, finish string) {
	who := l.s.name
	if j.m.name != who {
		who += "/" + j.m.name
	}
	return answerTo(who, j.lastWords(), max(j.ask.MaxTokens, j.ask.MaxCompletionTokens, j.ask.Options.NumPredict))
}

// lastWords is what was said last, in the words of any of the servers.
func (j *job) lastWords() string {
	if said := j.ask.lastWords(); said != "" {
		return said
	}
	var fields map[string]json.RawMessage
	_ = json.Unmarshal(j.body, &fields) // what is no JSON says nothing
	for _, name := range []string{"input", "inputs", "text_input", "text"} {
		var text string
		if json.Unmarshal(fields[name], &text) == nil && text != "" {
			return text
		}
	}
	return ""
}

func (s *shape) embed(j *job) error {
	return s.whole(j, func() any { return v1Embeddings(j.ask) })
}

// hear answers as a transcription, which a form whose "stream" is true gets in OpenAI's events.
func (s *shape) hear(j *job) error {
	sound := j.file
	switch {
	case j.form && sound == nil:
		s.fail(j.w, j.r, http.StatusBadRequest, errNoFile.Error())
		return errAnswered
	case !j.form:
		sound = j.body
	}
	text := Transcript(s.l.s.name, sound)
	if j.fields["stream"] != "true" {
		return s.whole(j, func() any { return map[string]string{"text": text} })
	}
	j.w.Header().Set("Content-Type", "text/event-stream")
	words := strings.SplitAfter(text, " ")
	return s.l.stream(j.w, j.r, j.m, s.l.runTime(j.r)/time.Duration(len(words)), words, func(word string) []byte {
		return sse(map[string]string{"type": "transcript.text.delta", "delta": word})
	}, append(sse(map[string]string{"type": "transcript.text.done", "text": text}), "data: [DONE]\n\n"...))
}

// rank answers with one score for each of the body's documents.
func (s *shape) rank(j *job) error {
	var in struct{ Documents []json.RawMessage }
	_ = json.Unmarshal(j.body, &in) // no documents have no scores
	return s.whole(j, func() any {
		results := []any{}
		for i := range in.Documents {
			results = append(results, map[string]any{"index": i, "relevance_score": score(i)})
		}
		return map[string]any{"model": j.m.name, "results": results}
	})
}

func score(i int) float64 { return 1 / float64(i+1) }

// fixedWork answers work with a fixed value as JSON.
func (s *shape) fixedWork(value any) func(*job) error {
	return func(j *job) error { return s.whole(j, func() any { return value }) }
}

// v1 adds OpenAI's routes of text below prefix, "/v1" for instance.
func (s *shape) v1(prefix string) {
	s.gpu(s.openAI(chatCompletion), "POST "+prefix+"/chat/completions")
	s.gpu(s.openAI(textCompletion), "POST "+prefix+"/completions")
	s.gpu(s.embed, "POST "+prefix+"/embeddings")
}

// v1More adds the newer ways to ask for text: OpenAI's responses and Anthropic's messages.
func (s *shape) v1More(prefix string) {
	s.gpu(s.say(responses), "POST "+prefix+"/responses")
	s.gpu(s.say(messages), "POST "+prefix+"/messages")
}

var responses = speech{
	whole: func(j *job, text, _ string) any {
		return map[string]any{
			"id": "resp_1", "object": "response", "status": "completed", "model": j.ask.Model,
			"output": []any{map[string]any{
				"type": "message", "role": "assistant",
				"content": []any{map[string]string{"type": "output_text", "text": text}},
			}},
		}
	},
	piece: func(_ *job, word string) []byte {
		return typed("response.output_text.delta", map[string]any{"delta": word})
	},
	last: func(j *job, _, _ string) []byte {
		return typed("response.completed", map[string]any{"response": map[string]any{"status": "completed", "model": j.ask.Model}})
	},
}

var messages = speech{
	whole: func(j *job, text, _ string) any {
		return map[string]any{
			"id": "msg_1", "type": "message", "role": "assistant", "model": j.ask.Model, "stop_reason": "end_turn",
			"content": []any{map[string]string{"type": "text", "text": text}},
		}
	},
	piece: func(_ *job, word string) []byte {
		return typed("content_block_delta", map[string]any{"index": 0, "delta": map[string]string{"type": "text_delta", "text": word}})
	},
	last: func(*job, string, string) []byte { return typed("message_stop", map[string]any{}) },
}

// ollamaSpeech is /api/generate or /api/chat of those who speak ollama's language too.
func ollamaSpeech(f form) speech {
	reply := func(j *job, text string, done bool) map[string]any {
		out := map[string]any{"model": j.m.name, "created_at": time.Now().UTC(), "done": done}
		f.chunk(out, text)
		if done {
			out["done_reason"] = "stop"
		}
		return out
	}
	return speech{
		whole:   func(j *job, text, _ string) any { return reply(j, text, true) },
		piece:   func(j *job, word string) []byte { return append(line(reply(j, word, false)), '\n') },
		last:    func(j *job, _, _ string) []byte { return append(line(reply(j, "", true)), '\n') },
		streams: func(j *job) bool { return j.ask.Stream == nil || *j.ask.Stream },
		ndjson:  true,
	}
}

// typed is an event whose name is also in its data.
func typed(event string, data map[string]any) []byte {
	data["type"] = event
	return append([]byte("event: "+event+"\n"), sse(data)...)
}

// always is for speech.streams.
func always(*job) bool { return true }
