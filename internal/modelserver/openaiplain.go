package modelserver

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"image"
	"image/color"
	"image/png"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"
	"time"
)

// OpenAI's routes of a plain server, which has one model and serves it by
// whatever name it is asked for, as llama-server does. Each answer says who gave it.

// completions serves /v1/chat/completions and /v1/completions: the answer repeats what was asked.
func (p *plain) completions(form openAI) func(w http.ResponseWriter, r *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		a, err := p.read(w, r)
		if err != nil {
			return err
		}
		words, finish := answerTo(p.l.s.name, a.lastWords(), max(a.MaxTokens, a.MaxCompletionTokens))
		return p.l.completion(w, r, p.m, form, a, words, p.l.runTime(r)/time.Duration(len(words)), finish)
	}
}

// answerTo is what a server says to the last words, at most limit words if that
// is above 0, and why it ends: "stop" or "length".
func answerTo(server, last string, limit int) (words []string, finish string) {
	words = strings.SplitAfter(server+" answers: "+last, " ")
	if limit > 0 && limit < len(words) {
		return words[:limit], "length"
	}
	return words, "stop"
}

func (p *plain) embeddings(w http.ResponseWriter, r *http.Request) error {
	a, err := p.read(w, r)
	if err != nil {
		return err
	}
	if err := p.l.run(r.Context(), p.m, p.l.runTime(r)); err != nil {
		return err
	}
	return p.l.answer(w, "application/json", line(v1Embeddings(a)))
}

// models needs no model in memory.
func (p *plain) models(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, v1Models([]string{p.l.s.name}, p.l.s.name))
}

// transcribe serves a recording: the body, or the part "file" of a form. The
// text holds its size and hash, so that a changed byte shows.
func (p *plain) transcribe(w http.ResponseWriter, r *http.Request) error {
	body, err := p.body(w, r)
	if err != nil {
		return err
	}
	fields := map[string]string{}
	if kind, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); kind == "multipart/form-data" {
		if body, err = readForm(body, params["boundary"], fields); err != nil {
			fail(w, r, http.StatusBadRequest, err.Error())
			return errAnswered
		}
	}
	text := Transcript(p.l.s.name, body)
	if fields["response_format"] == "text" {
		return p.l.answer(w, "text/plain; charset=utf-8", []byte(text+"\n"))
	}
	return p.l.answer(w, "application/json", line(map[string]string{"text": text}))
}

// Transcript is the text that a plain server hears in a recording.
func Transcript(server string, sound []byte) string {
	return fmt.Sprintf("%s heard %d bytes of sound, sha256 %x", server, len(sound), sha256.Sum256(sound))
}

var errNoFile = errors.New("the form has no part named file")

// readForm gives the part "file" of a form and puts the other parts into fields.
func readForm(body []byte, boundary string, fields map[string]string) (file []byte, err error) {
	form := multipart.NewReader(bytes.NewReader(body), boundary)
	found := false
	for {
		part, err := form.NextRawPart() // raw: no decoding behind our back
		if err == io.EOF && found {
			return file, nil
		}
		if err == io.EOF {
			return nil, errNoFile
		}
		if err != nil {
			return nil, fmt.Errorf("reading the form: %w", err)
		}
		content, err := io.ReadAll(part)
		if err != nil {
			return nil, fmt.Errorf("reading the form's part %q: %w", part.FormName(), err)
		}
		if part.FormName() == "file" {
			file, found = content, true
		} else {
			fields[part.FormName()] = string(content)
		}
	}
}

// draw serves /v1/images/generations with n pictures in base64.
func (p *plain) draw(w http.ResponseWriter, r *http.Request) error {
	a, err := p.read(w, r)
	if err != nil {
		return err
	}
	width, height, err := a.dimensions()
	if err != nil {
		fail(w, r, http.StatusBadRequest, err.Error())
		return errAnswered
	}
	if err := p.l.run(r.Context(), p.m, p.l.runTime(r)); err != nil {
		return err
	}
	return p.l.answer(w, "application/json", line(v1Images(p.l.s.name, a, width, height)))
}

// dimensions reads the size of the pictures that are asked for.
func (a ask) dimensions() (width, height int, err error) {
	width, height = 256, 256
	if a.Size == "" || a.Size == "auto" {
		return width, height, nil
	}
	if _, err := fmt.Sscanf(a.Size, "%dx%d", &width, &height); err != nil || min(width, height) < 1 || max(width, height) > 2048 {
		return 0, 0, fmt.Errorf("size %q: want WIDTHxHEIGHT, each from 1 to 2048", a.Size)
	}
	return width, height, nil
}

// v1Images is OpenAI's answer to a, with its n pictures.
func v1Images(server string, a ask, width, height int) any {
	data := []any{}
	for i := range min(max(a.N, 1), 10) {
		data = append(data, map[string]string{
			"b64_json":       base64.StdEncoding.EncodeToString(picture(fmt.Sprint(a.Prompt, i), width, height)),
			"revised_prompt": server + " drew: " + a.Prompt,
		})
	}
	return map[string]any{"created": time.Now().Unix(), "data": data}
}

// picture is a PNG of one colour, which depends on the prompt.
func picture(prompt string, width, height int) []byte {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(prompt)) // a hash never fails
	sum := hash.Sum32()
	paint := color.RGBA{R: byte(sum), G: byte(sum >> 8), B: byte(sum >> 16), A: 255}
	var out bytes.Buffer
	_ = png.Encode(&out, image.NewPaletted(image.Rect(0, 0, width, height), color.Palette{paint})) // a buffer takes it all
	return out.Bytes()
}

// read reads a request of OpenAI's, or answers why not.
func (p *plain) read(w http.ResponseWriter, r *http.Request) (a ask, err error) {
	body, ok := readBody(w, r)
	if !ok {
		return a, errAnswered
	}
	if err := json.Unmarshal(body, &a); err != nil {
		fail(w, r, http.StatusBadRequest, "the body is no request of OpenAI's: "+err.Error())
		return a, errAnswered
	}
	return a, nil
}

// lastWords is what was said last: the end of a chat, or the prompt.
func (a ask) lastWords() string {
	if len(a.Messages) == 0 {
		return a.Prompt
	}
	content := a.Messages[len(a.Messages)-1].Content
	var text string
	if json.Unmarshal(content, &text) == nil {
		return text
	}
	var parts []struct {
		Text string `json:"text"`
	}
	_ = json.Unmarshal(content, &parts) // what has no text says nothing
	var all strings.Builder
	for _, part := range parts {
		all.WriteString(part.Text)
	}
	return all.String()
}
