// Package tinygguf writes very small language models with random weights in the GGUF file format,
// so that a real model server (ollama, llama.cpp) has something to load, run and unload in a test
// without a download. The text such a model makes is random letters.
package tinygguf

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
)

// Size says how large a model is. The larger Embedding and FeedForward, the more memory it takes;
// the more Blocks, the longer it takes for each token.
type Size struct {
	Embedding   int // length of a token's vector; a multiple of 2 × Heads
	Blocks      int // transformer blocks, one after the other
	FeedForward int // width of a block's inner layer
	Heads       int // attention heads, query side
	HeadsKV     int // attention heads, key and value side; divides Heads
	Context     int // tokens that fit into a conversation, prompt and answer together
}

// Tiny is 0.5 MB on disk, loads in a fraction of a second and makes a token in about a millisecond.
func Tiny() Size {
	return Size{Embedding: 64, Blocks: 2, FeedForward: 128, Heads: 4, HeadsKV: 4, Context: 512}
}

// Slow is for answers that take seconds: 21 MB on disk, between ten and twenty milliseconds for each
// token. It is deep rather than wide, because a processor's time per token grows with each block's
// fixed cost while the file stays small.
func Slow() Size {
	return Size{Embedding: 64, Blocks: 128, FeedForward: 128, Heads: 4, HeadsKV: 4, Context: 2048}
}

func (s Size) check() error {
	if s.Embedding <= 0 || s.Blocks <= 0 || s.FeedForward <= 0 || s.Heads <= 0 || s.HeadsKV <= 0 || s.Context <= 0 {
		return fmt.Errorf("size of the model: every number must be above 0, found %+v", s)
	}
	if s.Embedding%(2*s.Heads) != 0 {
		return fmt.Errorf("size of the model: the embedding must be a multiple of 2 × heads (rotary positions turn pairs), found %d and %d heads", s.Embedding, s.Heads)
	}
	if s.Heads%s.HeadsKV != 0 {
		return fmt.Errorf("size of the model: key and value heads must divide the heads, found %d and %d", s.HeadsKV, s.Heads)
	}
	return nil
}

// Write writes a model of architecture llama with weights drawn from seed. The same size and seed
// give the same bytes.
//
// The model never ends an answer by itself, and each token it makes is one letter or a space: an
// answer has as many tokens as the caller allows, and a stream as many pieces.
func Write(w io.Writer, size Size, seed uint64) error {
	if err := size.check(); err != nil {
		return err
	}
	tensors := layout(size)
	header := encodeHeader(metadata(size), tensors)

	out := bufio.NewWriterSize(w, 1<<16)
	_, _ = out.Write(header) // bufio keeps the first error for Flush
	random := rand.New(rand.NewPCG(seed, 0))
	written := uint64(0)
	for _, t := range tensors {
		_, _ = out.Write(make([]byte, t.offset-written))
		written = t.offset + t.bytes()
		if err := writeTensor(out, t, random); err != nil {
			return fmt.Errorf("writing tensor %s: %w", t.name, err)
		}
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("writing the model: %w", err)
	}
	return nil
}

// A tensor is a matrix of rows × columns (rows 1 for a vector), stored row by row as 32-bit floats.
type tensor struct {
	name          string
	columns, rows int
	vector        bool
	offset        uint64 // from the start of the tensor data
	// value makes the number at a place out of a standard normal draw.
	value func(row, column int, draw float64) float64
}

func (t tensor) bytes() uint64 { return uint64(t.rows) * uint64(t.columns) * 4 }

// bias is the column of a token's vector that holds the same number for every token and that no
// block changes, so that the output matrix can raise and lower tokens by it.
const (
	bias      = 0
	biasValue = 4.0
)

func layout(s Size) []tensor {
	headLength := s.Embedding / s.Heads
	keyValue := headLength * s.HeadsKV

	tensors := []tensor{{name: "token_embd.weight", columns: s.Embedding, rows: vocabularySize, value: embedding}}
	for i := range s.Blocks {
		prefix := fmt.Sprintf("blk.%d.", i)
		// Blocks add to what goes through them; the more there are the less each may add.
		back := 1 / math.Sqrt(2*float64(s.Blocks))
		tensors = append(tensors,
			norm(prefix+"attn_norm.weight", s.Embedding),
			inner(prefix+"attn_q.weight", s.Embedding, s.Embedding),
			inner(prefix+"attn_k.weight", s.Embedding, keyValue),
			inner(prefix+"attn_v.weight", s.Embedding, keyValue),
			outer(prefix+"attn_output.weight", s.Embedding, s.Embedding, back),
			norm(prefix+"ffn_norm.weight", s.Embedding),
			inner(prefix+"ffn_gate.weight", s.Embedding, s.FeedForward),
			inner(prefix+"ffn_up.weight", s.Embedding, s.FeedForward),
			outer(prefix+"ffn_down.weight", s.FeedForward, s.Embedding, back),
		)
	}
	tensors = append(tensors,
		norm("output_norm.weight", s.Embedding),
		tensor{name: "output.weight", columns: s.Embedding, rows: vocabularySize, value: unembedding(s.Embedding)},
	)

	end := uint64(0)
	for i := range tensors {
		tensors[i].offset = align(end)
		end = tensors[i].offset + tensors[i].bytes()
	}
	return tensors
}

func norm(name string, length int) tensor {
	return tensor{name: name, columns: length, rows: 1, vector: true, value: func(int, int, float64) float64 { return 1 }}
}

// inner reads from a block's input.
func inner(name string, columns, rows int) tensor {
	scale := 1 / math.Sqrt(float64(columns))
	return tensor{name: name, columns: columns, rows: rows, value: func(_, _ int, draw float64) float64 { return scale * draw }}
}

// outer adds to what goes through the block, and leaves the bias alone.
func outer(name string, columns, rows int, back float64) tensor {
	scale := back / math.Sqrt(float64(columns))
	return tensor{name: name, columns: columns, rows: rows, value: func(row, _ int, draw float64) float64 {
		if row == bias {
			return 0
		}
		return scale * draw
	}}
}

func embedding(_, column int, draw float64) float64 {
	if column == bias {
		return biasValue
	}
	return draw
}

func unembedding(length int) func(int, int, float64) float64 {
	scale := 1.5 / math.Sqrt(float64(length))
	return func(token, column int, draw float64) float64 {
		switch {
		case column != bias:
			return scale * draw
		case token < firstLetter:
			// Neither the end of the answer nor a lone byte, which could be half a character that
			// the server would hold back.
			return -4 * biasValue
		default:
			return 0
		}
	}
}

func writeTensor(out *bufio.Writer, t tensor, random *rand.Rand) error {
	row := make([]byte, 0, t.columns*4)
	for r := range t.rows {
		row = row[:0]
		for c := range t.columns {
			row = appendFloat32(row, float32(t.value(r, c, random.NormFloat64())))
		}
		if _, err := out.Write(row); err != nil {
			return err
		}
	}
	return nil
}
