// Package routing reads requests: whether one needs the GPU at all, and its
// body, ahead of the queue.
package routing

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

// Sizes of what is read ahead (spec §1.7).
const (
	// SmallBody is the largest body that is outside the bound of all bodies together, in bytes.
	SmallBody = 64 << 10
	// memoryBody is how much of one body is kept in memory; the rest goes to a file.
	memoryBody = 1 << 20
)

// Errors of reading a body ahead.
var (
	ErrTooLarge = errors.New("the request body is too large")
	ErrNoRoom   = errors.New("too many request bodies are held already")
	ErrSpill    = errors.New("a large request body can't be kept in a file") // a fault of this machine
)

// Limits bound the reading of one body.
type Limits struct {
	Body   int64         // the largest that is taken, in bytes
	Total  int64         // how much of the bodies above SmallBody may be held together, in bytes
	Client string        // whose body it is: each client has a share of Total. Empty is a client, too.
	Moved  *atomic.Int64 // grows with every byte that comes; nil: nobody looks
}

// Buffers bounds what all bodies that are held take together.
type Buffers struct {
	dir string // where files go

	mu       sync.Mutex
	held     int64
	byClient map[string]int64
}

// NewBuffers makes Buffers that spill into dir, which is made when needed.
func NewBuffers(dir string) *Buffers { return &Buffers{dir: dir, byClient: map[string]int64{}} }

// Held returns how many bytes of bodies above SmallBody are held now.
func (b *Buffers) Held() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.held
}

// book adds n bytes to what a client holds, or returns ErrNoRoom and adds nothing. A client may hold as much as is
// left for others, which is half of all if it is the only one: however many take their share, some is left for the next.
func (b *Buffers) book(client string, n, total int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	held, its := b.held+n, b.byClient[client]+n
	switch {
	case held > total:
		return fmt.Errorf("%w: at most %d bytes in all", ErrNoRoom, total)
	case its > total-held:
		return fmt.Errorf("%w from this client: %d bytes of %d, of which %d would be left for others", ErrNoRoom, its, total, total-held)
	}
	b.held, b.byClient[client] = held, its
	return nil
}

func (b *Buffers) free(client string, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held -= n
	if b.byClient[client] -= n; b.byClient[client] <= 0 {
		delete(b.byClient, client)
	}
}

// Body is a body that was read ahead. It can be read again from its start.
type Body struct {
	buffers *Buffers
	limits  Limits
	memory  []byte
	file    *os.File // what follows memory
	size    int64
	booked  int64       // of size
	readers *bodyReader // that were handed out

	seen    seen   // what Peek found that may be changed
	edits   []edit // how what is read again differs; in order, apart from each other
	decoded *Body  // the body without its content coding, once Peek has read it; nil: it has none

	get  func() (io.ReadCloser, error) // reopen, made once
	in   pieces                        // what Peek reads it by
	more func() ([]byte, error)        // in.next, made once
}

// edit replaces a part of a body, from its first byte to the one past its last, by a text.
type edit struct {
	from, to int64
	text     string
}

// bodies are empty, and keep the memory of small bodies.
var bodies = sync.Pool{New: func() any { return &Body{memory: make([]byte, 0, 4<<10)} }}

// largestKept is the largest memory that an empty body keeps: a small body, and room to see its end.
const largestKept = SmallBody + 512

// Read reads the whole body of r within limits. It puts a body into r that reads the same bytes, with the right Content-Length.
// The caller closes the Body when the request is over, or recycles it.
//
// Errors: ErrTooLarge, ErrNoRoom, ErrSpill, or the client's own (it left, or broke off).
func (b *Buffers) Read(r *http.Request, limits Limits) (*Body, error) {
	if r.ContentLength > limits.Body {
		return nil, fmt.Errorf("%w: %d bytes, at most %d are taken", ErrTooLarge, r.ContentLength, limits.Body)
	}
	body := bodies.Get().(*Body)
	body.buffers, body.limits = b, limits
	if n := r.ContentLength; n >= int64(cap(body.memory)) && n <= SmallBody {
		body.memory = make([]byte, 0, largestKept)
	}
	if err := body.fill(r.Body, limits); err != nil {
		body.Recycle()
		return nil, err
	}
	body.Rewind(r)
	return body, nil
}

// Size is how long the body was when it came, in bytes.
func (y *Body) Size() int64 { return y.size }

// Fault returns ErrSpill if the body could not be read back from its file.
func (y *Body) Fault() error {
	if y.decoded != nil {
		if err := y.decoded.Fault(); err != nil {
			return err
		}
	}
	for r := y.readers; r != nil; r = r.next {
		r.mu.Lock()
		fault := r.fault
		r.mu.Unlock()
		if fault != nil {
			return fault
		}
	}
	return nil
}

// chunks are what large bodies are read with.
var chunks = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// fill reads to the end: into memory first, then a chunk at a time into a file.
func (y *Body) fill(from io.Reader, limits Limits) error {
	for y.file == nil {
		if len(y.memory) == cap(y.memory) {
			if len(y.memory) >= memoryBody {
				break
			}
			y.memory = append(make([]byte, 0, min(memoryBody, max(largestKept, 2*cap(y.memory)))), y.memory...)
		}
		n, err := from.Read(y.memory[len(y.memory):cap(y.memory)])
		y.memory = y.memory[:len(y.memory)+n]
		if fault := y.count(int64(n), limits); fault != nil {
			return fault
		}
		if err != nil {
			return unlessEOF(err)
		}
	}
	chunk := chunks.Get().(*[32 << 10]byte)
	defer chunks.Put(chunk)
	for {
		n, err := from.Read(chunk[:])
		if fault := y.count(int64(n), limits); fault != nil {
			return fault
		}
		if n > 0 {
			if fault := y.spill(chunk[:n]); fault != nil {
				return fmt.Errorf("%w: %w", ErrSpill, fault)
			}
		}
		if err != nil {
			return unlessEOF(err)
		}
	}
}

func unlessEOF(err error) error {
	if err == io.EOF {
		return nil
	}
	return err
}

// count takes in n bytes more, if limits allow them.
func (y *Body) count(n int64, limits Limits) error {
	if n == 0 {
		return nil
	}
	if limits.Moved != nil {
		limits.Moved.Add(n)
	}
	if y.size+n > limits.Body {
		return fmt.Errorf("%w: at most %d bytes are taken", ErrTooLarge, limits.Body)
	}
	if y.size += n; y.size > SmallBody {
		if err := y.buffers.book(limits.Client, y.size-y.booked, limits.Total); err != nil {
			return err
		}
		y.booked = y.size
	}
	return nil
}

// spill adds to the file.
func (y *Body) spill(p []byte) error {
	if y.file == nil {
		if err := y.open(); err != nil {
			return err
		}
	}
	_, err := y.file.Write(p)
	return err
}

// open opens the file for the rest of a large body. Where the system allows it, the
// file has no name any more while it is used: nothing is left over after a crash.
func (y *Body) open() error {
	if err := os.MkdirAll(y.buffers.dir, 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(y.buffers.dir, "body-*")
	if err != nil {
		return err
	}
	y.file = f
	_ = os.Remove(f.Name())
	return nil
}

// Rewind makes r read the body from its start, with what Peek and Change
// have changed, and sets the Content-Length accordingly. An encoded body is passed on as it came,
// unless something in it has changed: then it is passed on decoded, without a Content-Encoding.
func (y *Body) Rewind(r *http.Request) {
	if y.decoded != nil && len(y.decoded.edits) > 0 {
		r.Header.Del("Content-Encoding")
		y.decoded.Rewind(r)
		return
	}
	length := y.size
	for _, e := range y.edits {
		length += int64(len(e.text)) - (e.to - e.from)
	}
	r.ContentLength = length
	r.TransferEncoding = nil
	if len(y.edits) > 0 && r.Header.Get("Content-Length") != "" {
		r.Header.Set("Content-Length", strconv.FormatInt(length, 10))
	}
	if old, ok := r.Body.(*bodyReader); !ok || !old.again(y) {
		r.Body = y.reader()
	}
	if y.get == nil {
		y.get = y.reopen
	}
	r.GetBody = y.get
}

// reopen is GetBody of a request. Whoever sends the body begins with its reader, and reads it anew by this.
func (y *Body) reopen() (io.ReadCloser, error) {
	body := y.reader()
	if r, ok := body.(*bodyReader); ok {
		r.aside = true
	}
	return body, nil
}

// reader reads the body with its edits.
func (y *Body) reader() io.ReadCloser {
	if len(y.edits) == 0 && y.size == 0 {
		return http.NoBody
	}
	r := &bodyReader{of: y, next: y.readers}
	y.readers = r
	r.from = y.content(r)
	return r
}

// content is what r reads.
func (y *Body) content(r *bodyReader) io.Reader {
	if len(y.edits) == 0 && y.file == nil {
		r.whole.Reset(y.memory)
		return &r.whole
	}
	var parts []io.Reader
	at := int64(0)
	for _, e := range y.edits {
		parts = append(parts, y.part(at, e.from)...)
		if e.text != "" {
			parts = append(parts, strings.NewReader(e.text))
		}
		at = e.to
	}
	parts = append(parts, y.part(at, y.size)...)
	return io.MultiReader(parts...)
}

// part reads the body as it came between two places. Nothing is copied.
func (y *Body) part(from, to int64) (parts []io.Reader) {
	inMemory := int64(len(y.memory))
	if from < min(to, inMemory) {
		parts = append(parts, bytes.NewReader(y.memory[from:min(to, inMemory)]))
	}
	if from = max(from, inMemory); from < to {
		parts = append(parts, io.NewSectionReader(y.file, from-inMemory, to-from))
	}
	return parts
}

// Close gives back what the body holds. What is in memory can still be read: an error route of the site may pass it elsewhere.
func (y *Body) Close() {
	if y.booked > 0 {
		y.buffers.free(y.limits.Client, y.booked)
		y.booked = 0
	}
	if y.file != nil {
		name := y.file.Name()
		_ = y.file.Close()
		_ = os.Remove(name) // for systems on which an open file can't be removed
		y.file = nil
	}
	if y.decoded != nil {
		y.decoded.Close()
	}
}

// Recycle closes the body and lets the next request have its memory. Nothing reads it any more: a
// transport may go on sending a body after its answer has come, so each reader is ended first.
func (y *Body) Recycle() {
	y.Close()
	for r := y.readers; r != nil; r = r.next {
		r.end()
	}
	if y.decoded != nil {
		y.decoded.Recycle()
	}
	memory := y.memory[:0]
	if cap(memory) > largestKept {
		memory = make([]byte, 0, 4<<10)
	}
	*y = Body{memory: memory, get: y.get, more: y.more}
	bodies.Put(y)
}

// bodyReader reads a body, as long as it is not recycled.
type bodyReader struct {
	of    *Body
	next  *bodyReader
	aside bool // it is one of reopen's

	mu    sync.Mutex
	from  io.Reader // nil: the body is gone
	whole bytes.Reader
	begun bool
	sent  bool  // a copy of it was
	fault error // of reading the file back
}

var errGone = errors.New("the request is over")

// Read implements io.Reader. It fails once the body is recycled.
func (r *bodyReader) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.from == nil {
		return 0, errGone
	}
	r.begun = true
	n, err := r.from.Read(p)
	if err != nil && err != io.EOF {
		r.fault = fmt.Errorf("%w: %w", ErrSpill, err)
	}
	return n, err
}

// Close does nothing: a failed attempt must not take the body from the next.
func (r *bodyReader) Close() error { return nil }

// again makes the reader of a body that has changed read it as it is now. It reports false if somebody has begun to read it, or it is another's.
func (r *bodyReader) again(y *Body) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of != y || r.begun {
		return false
	}
	r.from = y.content(r)
	return true
}

// Begun reports whether somebody has begun to read the body since it was read ahead, or has sent it otherwise. It is false for nil.
func (y *Body) Begun() bool {
	if y == nil {
		return false
	}
	for r := y.readers; r != nil; r = r.next {
		r.mu.Lock()
		begun := r.begun || r.sent
		r.mu.Unlock()
		if begun && !r.aside {
			return true
		}
	}
	return y.decoded.Begun()
}

// Sent notes that a copy of what Unread returned for a body was sent.
func Sent(body io.Reader) {
	if r, ok := body.(*bodyReader); ok {
		r.mu.Lock()
		r.sent = true
		r.mu.Unlock()
	}
}

// Unread returns a copy of what a body that was read ahead will read, and leaves it unread. Nil: it is none, or a
// large one, or somebody has begun to read it.
func Unread(body io.Reader) []byte {
	r, ok := body.(*bodyReader)
	if !ok {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of == nil || r.begun || r.of.size > SmallBody {
		return nil
	}
	return r.of.text()
}

// text is what a small body reads, with its edits.
func (y *Body) text() []byte {
	out := make([]byte, 0, len(y.memory))
	at := int64(0)
	for _, e := range y.edits {
		out = append(append(out, y.memory[at:e.from]...), e.text...)
		at = e.to
	}
	return append(out, y.memory[at:]...)
}

// end waits for a read that is under way, and fails those to come.
func (r *bodyReader) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.from, r.of = nil, nil
}
