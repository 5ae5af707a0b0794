package tinygguf

import (
	"encoding/binary"
	"math"
	"testing"
)

// file is what a reader makes of a GGUF file, by the description of the format and without the
// writer's own constants.
type file struct {
	metadata map[string]any
	tensors  []place
	data     []byte
}

type place struct {
	name   string
	shape  []int
	offset int
}

func (p place) bytes() int {
	n := 4
	for _, length := range p.shape {
		n *= length
	}
	return n
}

func parse(t *testing.T, all []byte) file {
	t.Helper()
	r := &reader{t: t, rest: all}
	if found := string(r.take(4)); found != "GGUF" {
		t.Fatalf("want magic GGUF, found %q", found)
	}
	if found := r.uint32(); found != 3 {
		t.Fatalf("want version 3, found %d", found)
	}
	tensors, pairs := r.length(), r.length()
	f := file{metadata: map[string]any{}}
	for range pairs {
		key := r.text()
		if _, twice := f.metadata[key]; twice {
			t.Errorf("%s is there twice", key)
		}
		f.metadata[key] = r.value(r.uint32())
	}
	for range tensors {
		p := place{name: r.text()}
		for range r.uint32() {
			p.shape = append(p.shape, r.length())
		}
		if kind := r.uint32(); kind != 0 {
			t.Fatalf("%s: want type 0 (F32), found %d", p.name, kind)
		}
		p.offset = r.length()
		f.tensors = append(f.tensors, p)
	}
	read := len(all) - len(r.rest)
	for _, b := range r.take((32 - read%32) % 32) {
		if b != 0 {
			t.Fatal("want zeros as padding before the tensors")
		}
	}
	f.data = r.rest
	return f
}

type reader struct {
	t    *testing.T
	rest []byte
}

func (r *reader) take(n int) []byte {
	r.t.Helper()
	if n < 0 || n > len(r.rest) {
		r.t.Fatalf("want %d more bytes, found %d", n, len(r.rest))
	}
	taken := r.rest[:n]
	r.rest = r.rest[n:]
	return taken
}

func (r *reader) uint32() uint32 { return binary.LittleEndian.Uint32(r.take(4)) }
func (r *reader) length() int    { return int(binary.LittleEndian.Uint64(r.take(8))) }
func (r *reader) text() string   { return string(r.take(r.length())) }

func (r *reader) value(kind uint32) any {
	r.t.Helper()
	switch kind {
	case 4:
		return r.uint32()
	case 5:
		return int32(r.uint32())
	case 6:
		return math.Float32frombits(r.uint32())
	case 8:
		return r.text()
	case 9:
		element := r.uint32()
		var values []any
		for range r.length() {
			values = append(values, r.value(element))
		}
		return values
	}
	r.t.Fatalf("want metadata of type 4, 5, 6, 8 or 9, found %d", kind)
	return nil
}
