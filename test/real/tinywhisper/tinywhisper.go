// Package tinywhisper writes a very small whisper model with random weights in whisper.cpp's own
// file format, so that a real whisper-server has something to load and to listen with in a test
// without a download. The text such a model hears is random letters.
package tinywhisper

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
)

// What whisper.cpp takes for granted: the lengths of the vocabulary of English (the tokens that steer
// it have fixed places at its end), of the window it hears, and of its spectrum.
const (
	magic      = 0x67676d6c // "ggml"
	vocabulary = 51864
	ordinary   = 50256 // tokens below this one are text
	audio      = 1500
	spectrum   = 80  // bands
	fourier    = 201 // frequencies that a band is a sum of

	typeFloat32 = 0
)

// Size says how large a model is. All are above 0.
type Size struct {
	State  int // length of a vector; a multiple of Heads
	Heads  int // attention heads
	Layers int // of the half that hears, and of the half that writes; whisper.cpp takes 4 for its own "tiny"
	Text   int // tokens that fit into a text, twice
}

// Tiny is 8 MB on disk, nearly all of it the vocabulary, and hears a second of sound in less.
func Tiny() Size { return Size{State: 32, Heads: 2, Layers: 4, Text: 64} }

// Write writes a model with weights drawn from seed. The same size and seed give the same bytes.
func Write(w io.Writer, size Size, seed uint64) error {
	if size.State <= 0 || size.Heads <= 0 || size.Layers <= 0 || size.Text <= 0 || size.State%size.Heads != 0 {
		return fmt.Errorf("size of the model: want numbers above 0, and a state that is a multiple of the heads, found %+v", size)
	}
	out := &writer{buffer: bufio.NewWriterSize(w, 1<<16)}
	out.numbers(magic, vocabulary, audio, size.State, size.Heads, size.Layers, size.Text, size.State, size.Heads, size.Layers, spectrum, typeFloat32)
	out.filters()
	out.tokens()
	random := rand.New(rand.NewPCG(seed, 0))
	for _, t := range layout(size) {
		out.tensor(t, random)
	}
	if err := out.buffer.Flush(); err != nil {
		return fmt.Errorf("writing the model: %w", err)
	}
	return nil
}

// writer writes little-endian. bufio keeps the first error for Flush.
type writer struct{ buffer *bufio.Writer }

func (w *writer) numbers(all ...int) {
	for _, n := range all {
		w.raw(uint32(n))
	}
}

func (w *writer) floats(all ...float32) {
	for _, f := range all {
		w.raw(math.Float32bits(f))
	}
}

func (w *writer) raw(bits uint32) {
	var encoded [4]byte
	binary.LittleEndian.PutUint32(encoded[:], bits)
	_, _ = w.buffer.Write(encoded[:])
}

// filters writes what makes bands of frequencies: each band has its share of them, side by side.
func (w *writer) filters() {
	w.numbers(spectrum, fourier)
	for band := range spectrum {
		for frequency := range fourier {
			if frequency*spectrum/fourier == band {
				w.floats(0.02)
			} else {
				w.floats(0)
			}
		}
	}
}

// tokens writes what each token of text says: a space, which whisper.cpp looks for by name, and
// then a space and a letter, in turn. whisper.cpp itself names the tokens behind them.
func (w *writer) tokens() {
	w.numbers(ordinary, 1)
	_, _ = w.buffer.WriteString(" ")
	for i := range ordinary - 1 {
		w.numbers(2)
		_, _ = w.buffer.Write([]byte{' ', 'a' + byte(i%26)})
	}
}

func (w *writer) tensor(t tensor, random *rand.Rand) {
	w.numbers(len(t.shape), len(t.name), typeFloat32)
	w.numbers(t.shape...)
	_, _ = w.buffer.WriteString(t.name)
	count := 1
	for _, n := range t.shape {
		count *= n
	}
	for range count {
		w.floats(t.mean + float32(random.NormFloat64())*t.spread)
	}
}
