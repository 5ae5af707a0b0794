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
	"sync"
	"sync/atomic"
)

// Sizes of what is read ahead (spec §1.7).
const (
	// SmallBody is the largest body of known length that need not be read before the lock is taken.
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

// Buffers bounds what all bodies that are held take together.
type Buffers struct {
	held atomic.Int64
	dir  string // where files go
}

// NewBuffers makes Buffers that spill into dir, which is made when needed.
func NewBuffers(dir string) *Buffers { return &Buffers{dir: dir} }

// Held is how many bytes of bodies are held now.
func (b *Buffers) Held() int64 { return b.held.Load() }

// Body is a body that was read ahead. It can be read again from its start.
type Body struct {
	buffers *Buffers
	memory  []byte
	file    *os.File // what follows memory
	size    int64
	cuts    []span // left out of what is read again; in order, apart from each other
}

// span is a part of a body, from its first byte to the one past its last.
type span struct{ from, to int64 }

// Read reads the whole body of r, at most limit bytes of it, while all that
// is held stays within total bytes. It puts a body into r that reads the same bytes, with the right Content-Length.
// The caller closes the Body when the request is over.
//
// Errors: ErrTooLarge, ErrNoRoom, ErrSpill, or the client's own (it left, or broke off).
func (b *Buffers) Read(r *http.Request, limit, total int64) (*Body, error) {
	if r.ContentLength > limit {
		return nil, fmt.Errorf("%w: %d bytes, at most %d are taken", ErrTooLarge, r.ContentLength, limit)
	}
	body := &Body{buffers: b}
	if err := body.fill(r.Body, limit, total); err != nil {
		body.Close()
		return nil, err
	}
	body.Rewind(r)
	return body, nil
}

// Size is how long the body was when it came, in bytes.
func (y *Body) Size() int64 { return y.size }

// chunks are what bodies are read with.
var chunks = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// fill reads chunks, each booked before it is kept.
func (y *Body) fill(from io.Reader, limit, total int64) error {
	buffer := chunks.Get().(*[32 << 10]byte)
	defer chunks.Put(buffer)
	chunk := buffer[:]
	for {
		n, err := from.Read(chunk)
		if n > 0 {
			if y.size+int64(n) > limit {
				return fmt.Errorf("%w: at most %d bytes are taken", ErrTooLarge, limit)
			}
			y.size += int64(n)
			if y.buffers.held.Add(int64(n)) > total {
				return fmt.Errorf("%w: at most %d bytes in all", ErrNoRoom, total)
			}
			if err := y.keep(chunk[:n]); err != nil {
				return err
			}
		}
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
}

func (y *Body) keep(p []byte) error {
	if y.file == nil && len(y.memory)+len(p) <= memoryBody {
		y.memory = append(y.memory, p...)
		return nil
	}
	if y.file == nil {
		if err := y.spill(); err != nil {
			return fmt.Errorf("%w: %w", ErrSpill, err)
		}
	}
	if _, err := y.file.Write(p); err != nil {
		return fmt.Errorf("%w: %w", ErrSpill, err)
	}
	return nil
}

// spill opens the file for the rest of a large body. Where the system allows it, the
// file has no name any more while it is used: nothing is left over after a crash.
func (y *Body) spill() error {
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

// Rewind makes r read the body from its start, without what was cut out of
// it, and sets the Content-Length accordingly.
func (y *Body) Rewind(r *http.Request) {
	length := y.size
	for _, c := range y.cuts {
		length -= c.to - c.from
	}
	r.ContentLength = length
	r.TransferEncoding = nil
	if len(y.cuts) > 0 && r.Header.Get("Content-Length") != "" {
		r.Header.Set("Content-Length", strconv.FormatInt(length, 10))
	}
	r.Body = y.reader()
	r.GetBody = func() (io.ReadCloser, error) { return y.reader(), nil }
}

// reader reads what is left of the body.
func (y *Body) reader() io.ReadCloser {
	if len(y.cuts) == 0 && y.file == nil {
		if y.size == 0 {
			return http.NoBody
		}
		return io.NopCloser(bytes.NewReader(y.memory))
	}
	var parts []io.Reader
	at := int64(0)
	for _, c := range y.cuts {
		parts = append(parts, y.part(at, c.from)...)
		at = c.to
	}
	parts = append(parts, y.part(at, y.size)...)
	return io.NopCloser(io.MultiReader(parts...))
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

// cut leaves a part out, which begins where the last one ended or later.
func (y *Body) cut(s span) {
	if n := len(y.cuts); n > 0 && y.cuts[n-1].to == s.from {
		y.cuts[n-1].to = s.to
		return
	}
	y.cuts = append(y.cuts, s)
}

// Close gives back what the body holds.
func (y *Body) Close() {
	y.buffers.held.Add(-y.size)
	y.size, y.memory, y.cuts = 0, nil, nil
	if y.file != nil {
		name := y.file.Name()
		_ = y.file.Close()
		_ = os.Remove(name) // for systems on which an open file can't be removed
		y.file = nil
	}
}

// KeepOpen is a request body that a failed attempt can't close, so that the next may read it.
type KeepOpen struct{ io.Reader }

// Close does nothing: the server closes the body itself when the request is over.
func (KeepOpen) Close() error { return nil }
