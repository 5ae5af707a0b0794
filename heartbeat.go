package gpubroker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
)

// Bounds of an answer that is told in an event, because it is no event stream itself.
const (
	keptAnswer = 64 << 10 // bytes of it that are looked at
	toldAnswer = 2 << 10  // bytes of it that are shown where it is no error of OpenAI's form
)

// stuckAfter is how long a client may leave a comment untaken. After that its connection
// or stream is cut: it must not hold up a request that is admitted, nor the end of the process.
const stuckAfter = 10 * time.Second

// heart is the response writer of a request that waits for an event stream on
// a route with `heartbeat`. While nothing of the answer has come it sends a comment line each interval, so that
// clients, and what stands between, hold on.
//
// The first comment takes status 200 and the headers of an event stream along. From then on
// an event stream is passed on byte by byte, without its own headers, and anything else - an error of
// the server or one of ours - becomes an event with an error in OpenAI's form. The [DONE] of a stream
// doesn't follow it: OpenAI's SDKs raise the error at the event and read no further, and who does
// not look at errors must not take the stream for a whole one.
type heart struct {
	http.ResponseWriter // the client's; mu guards its use
	every               time.Duration
	log                 *zap.Logger

	mu      sync.Mutex
	timer   *time.Timer
	opening http.Header // the headers that go with the first comment
	header  http.Header // those of the answer, as long as they aren't the client's
	place   func() broker.Place
	stopped bool   // no more comments
	begun   bool   // the first one was sent
	timing  string // of the wait, to be told before the answer

	status int    // of the answer; 0: it has none yet
	direct bool   // it is passed on whole: no comment came before it, nor will
	stream bool   // its body is passed on
	passed bool   // some of it was
	kept   []byte // of an answer that becomes an event
	told   bool   // the last event was sent
}

// wantsEvents reports whether the client waits for an event stream, as far as can
// be told before it comes: it accepts one, or asks for one by `"stream": true` in a JSON body that was read ahead.
// Ollama's own API, below /api/, answers that with lines of JSON.
func (j *job) wantsEvents(r *http.Request) bool {
	switch {
	case r.Method == http.MethodConnect || r.Header.Get("Upgrade") != "":
		return false // it takes the connection over
	case j.body == nil && r.ProtoMajor == 1 && r.ContentLength != 0:
		return false // its body is streamed, and HTTP/1 stops reading it once an answer has begun
	}
	for _, accept := range r.Header["Accept"] {
		if strings.Contains(strings.ToLower(accept), "text/event-stream") {
			return true
		}
	}
	if j.body == nil || r.GetBody == nil || strings.HasPrefix(r.URL.Path, "/api/") {
		return false
	}
	body, err := r.GetBody()
	if err != nil {
		return false
	}
	defer body.Close()
	return asksToStream(body)
}

// beat begins the comments of a request that waits, if it is for an event
// stream. place tells where it stands; nil: it waits for its server.
func (j *job) beat(r *http.Request, place func() broker.Place) {
	switch {
	case j.heart != nil: // it is admitted once more, after a server that could not be reached
		j.heart.again(place)
		return
	case !j.wantsEvents(r):
		return
	}
	h := &heart{ResponseWriter: j.ResponseWriter, every: time.Duration(j.handler.Heartbeat), log: j.handler.app.generation.Logger, place: place}
	h.header = j.ResponseWriter.Header().Clone()
	h.opening = h.header.Clone()
	h.opening.Set("Content-Type", "text/event-stream")
	h.opening.Set("Cache-Control", "no-cache")
	h.opening.Set("X-Accel-Buffering", "no")
	if j.handler.headers {
		h.opening.Set("X-Gpu-Broker-Consumer", j.target.name)
	}
	allowOrigin(h.opening, r)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.timer = time.AfterFunc(h.every, h.comment)
	j.heart, j.ResponseWriter = h, h
}

// waits goes on with the comments, or begins them, while an admitted request waits
// for its server: it has waited before, or its server loads inside it.
func (j *job) waits(r *http.Request) {
	if j.heart == nil && j.lease.Loads && j.handler.Heartbeat > 0 {
		j.beat(r, nil)
	}
	if j.heart == nil {
		return
	}
	told := ""
	if j.handler.headers {
		told = timing(j.lease.Queued, j.lease.Loading)
	}
	j.heart.admitted(told)
}

// again goes on after an attempt of which nothing came.
func (h *heart) again(place func() broker.Place) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.place, h.timing = place, ""
}

// admitted notes that the request waits for its server now, and how long it has waited before; empty: that is not told.
func (h *heart) admitted(timing string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.place, h.timing = nil, timing
}

// comment runs on the timer's goroutine. It never touches the client's writer once the heart has stopped.
func (h *heart) comment() {
	h.mu.Lock()
	place := h.place
	h.mu.Unlock()
	line := ": waiting for the answer\n\n"
	if place != nil {
		line = saying(place()) // which takes the broker's mutex
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped {
		return
	}
	defer func() {
		if fault := recover(); fault != nil { // of a writer of another module: here it would end the process
			h.stopped = true
			h.log.Error("a heartbeat could not be written", zap.Any("panic", fault), zap.Stack("stack"))
		}
	}()
	cut := time.AfterFunc(stuckAfter, func() {
		_ = http.NewResponseController(innermost(h.ResponseWriter)).SetWriteDeadline(past)
	})
	defer cut.Stop()
	if !h.begun {
		h.begun = true
		replace(h.ResponseWriter.Header(), h.opening) // the first write takes status 200 along
	}
	if h.write([]byte(line)) != nil {
		return // the client has left, which the request's context tells
	}
	h.timer.Reset(h.every)
}

func saying(p broker.Place) string {
	switch {
	case p.Position == 0:
		return ": waiting for the answer\n\n"
	case p.Loading:
		return fmt.Sprintf(": waiting for %s, which is being loaded, position %d\n\n", p.Consumer, p.Position)
	default:
		return fmt.Sprintf(": waiting for %s, position %d\n\n", p.Consumer, p.Position)
	}
}

// write sends something at once. It holds mu.
func (h *heart) write(p []byte) error {
	if _, err := h.ResponseWriter.Write(p); err != nil {
		return err
	}
	return http.NewResponseController(h.ResponseWriter).Flush()
}

// stop ends the comments and reports whether there were any. If not, the headers
// are the client's own from now on: somebody else may answer, such as the site's error routes.
func (h *heart) stop() (begun bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.end()
	if !h.begun && !h.direct {
		replace(h.ResponseWriter.Header(), h.header)
		h.direct = true
	}
	return h.begun
}

// end is stop. It holds mu.
func (h *heart) end() {
	h.stopped = true
	h.timer.Stop()
}

// Unwrap is for http.ResponseController.
func (h *heart) Unwrap() http.ResponseWriter { return h.ResponseWriter }

// Header is the answer's: the client's own only once no comment can come any more.
func (h *heart) Header() http.Header {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.direct {
		return h.ResponseWriter.Header()
	}
	return h.header
}

// WriteHeader begins the answer.
func (h *heart) WriteHeader(status int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.answer(status)
}

// answer begins the answer, once. It holds mu.
func (h *heart) answer(status int) {
	informs := status < 200 && status != http.StatusSwitchingProtocols
	switch {
	case h.direct:
		if !informs {
			h.status = status
		}
		h.ResponseWriter.WriteHeader(status)
	case h.begun && (informs || h.status != 0):
	case h.begun:
		h.status = status
		h.stream = status == http.StatusOK && isEventStream(h.header)
	default:
		replace(h.ResponseWriter.Header(), h.header)
		if !informs {
			h.end()
			h.status, h.direct = status, true
		}
		h.ResponseWriter.WriteHeader(status)
	}
}

func isEventStream(h http.Header) bool {
	kind, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	coding := h.Get("Content-Encoding")
	return err == nil && kind == "text/event-stream" && (coding == "" || strings.EqualFold(coding, "identity"))
}

// Write passes a part of the answer on, or keeps it.
func (h *heart) Write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.status == 0 {
		h.answer(http.StatusOK)
	}
	switch {
	case h.direct:
		return h.ResponseWriter.Write(p)
	case h.stream:
		if !h.passed && len(p) > 0 {
			h.end()
			h.passed = true
			if h.timing != "" {
				if _, err := io.WriteString(h.ResponseWriter, ": "+h.timing+"\n\n"); err != nil {
					return 0, err
				}
			}
		}
		return h.ResponseWriter.Write(p)
	}
	h.kept = append(h.kept, p[:min(len(p), keptAnswer-len(h.kept))]...)
	return len(p), nil
}

// FlushError flushes what was passed on.
func (h *heart) FlushError() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.direct || h.passed {
		return http.NewResponseController(h.ResponseWriter).Flush()
	}
	return nil
}

// logStatus tells the access log of a status of the server's that the client did not get as such.
func (h *heart) logStatus(r *http.Request, status int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.begun && status != 0 && status != http.StatusOK {
		logFields(r, zap.Int("gpu_status", status))
	}
}

// fail sends an error of ours as the last event, if comments came before it. The caller has called stop.
func (h *heart) fail(doc errorDocument) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tell(doc)
}

// tell sends the last event. It holds mu.
func (h *heart) tell(doc any) {
	text, err := json.Marshal(doc)
	if err != nil || h.told || h.passed {
		return
	}
	h.told = true
	event := append(append([]byte("data: "), text...), "\n\n"...)
	_ = h.write(event) // the client may be gone
}

// close ends the heart with its request: what came instead of a stream is told in an event.
func (h *heart) close(consumer string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.end()
	if h.begun && h.status != statusClientLeft {
		h.tell(h.instead(consumer))
	}
}

// instead is the error that stands for an answer that was no event stream: the
// server's own where it has OpenAI's form.
func (h *heart) instead(consumer string) any {
	var own struct {
		Error json.RawMessage `json:"error"`
	}
	if json.Unmarshal(h.kept, &own) == nil && bytes.HasPrefix(own.Error, []byte("{")) {
		return own
	}
	doc := errorDocument{errorBody{Type: "gpu_broker_error", Code: "no_stream", Consumer: consumer}}
	text := strings.ToValidUTF8(string(h.kept[:min(len(h.kept), toldAnswer)]), "")
	var reason string
	if json.Unmarshal(own.Error, &reason) == nil && reason != "" { // as ollama has it
		text = reason[:cutAt(reason, toldAnswer)]
	}
	switch {
	case h.status == 0:
		doc.Error.Message = fmt.Sprintf("consumer %q gave no answer", consumer)
	case h.stream:
		doc.Error.Message = fmt.Sprintf("consumer %q ended its event stream before the first event", consumer)
	case h.status == http.StatusOK:
		doc.Error.Message = fmt.Sprintf("consumer %q answered with %s instead of an event stream: %s", consumer, kindOf(h.header), text)
	default:
		doc.Error.Message = fmt.Sprintf("consumer %q answered with status %d: %s", consumer, h.status, text)
	}
	return doc
}

// failureOf is an error that another handler would have answered, had nothing been sent.
func failureOf(err error) *failure {
	f := &failure{status: http.StatusInternalServerError, code: "failed", told: true, message: err.Error()}
	var caddys caddyhttp.HandlerError
	if errors.As(err, &caddys) && caddys.StatusCode != 0 {
		f.status = caddys.StatusCode
		f.message = fmt.Sprintf("the request failed with status %d %s", caddys.StatusCode, http.StatusText(caddys.StatusCode))
	}
	return f
}

func kindOf(h http.Header) string {
	if coding := h.Get("Content-Encoding"); coding != "" {
		return fmt.Sprintf("%.100q in %.100q", h.Get("Content-Type"), coding)
	}
	return fmt.Sprintf("%.100q", h.Get("Content-Type"))
}

// cutAt is the length of text within a bound, between two of its characters.
func cutAt(text string, bound int) int {
	if len(text) <= bound {
		return len(text)
	}
	for bound > 0 && !utf8.RuneStart(text[bound]) {
		bound--
	}
	return bound
}

// replace makes the header to equal another.
func replace(header, by http.Header) {
	clear(header)
	for name, values := range by {
		header[name] = values
	}
}

// identity is a request whose answer comes as it is: a compressed stream can't follow comments.
func identity(r *http.Request) *http.Request {
	if r.Header.Get("Accept-Encoding") == "" {
		return r // then the transport undoes what it asks for
	}
	plain := r.WithContext(r.Context())
	plain.Header = r.Header.Clone()
	plain.Header.Set("Accept-Encoding", "identity")
	return plain
}
