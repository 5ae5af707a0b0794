package tinygguf

import (
	"encoding/binary"
	"fmt"
	"math"
)

// What a GGUF file is made of, version 3: magic, version, counts, metadata, descriptions of the
// tensors, padding, and the tensors, each at a multiple of the alignment. Little-endian.
const (
	magic     = "GGUF"
	version   = 3
	alignment = 32

	typeUint32  = 4
	typeInt32   = 5
	typeFloat32 = 6
	typeString  = 8
	typeArray   = 9

	tensorFloat32 = 0
)

// The vocabulary: three special tokens, every byte, and then a space and the small letters.
const (
	tokenUnknown   = 0
	tokenBegin     = 1
	tokenEnd       = 2
	firstByte      = 3
	firstLetter    = firstByte + 256
	vocabularySize = firstLetter + 27

	kindNormal  = 1
	kindUnknown = 2
	kindControl = 3
	kindByte    = 6
)

// A pair is one entry of the metadata. Its value is a string, uint32, float32 or a slice of string,
// int32 or float32.
type pair struct {
	key   string
	value any
}

func metadata(s Size) []pair {
	tokens, kinds, scores := vocabulary()
	return []pair{
		{"general.architecture", "llama"},
		{"general.name", "tinygguf"},
		{"general.alignment", uint32(alignment)},
		{"general.file_type", uint32(0)}, // all tensors are 32-bit floats
		{"llama.context_length", uint32(s.Context)},
		{"llama.embedding_length", uint32(s.Embedding)},
		{"llama.block_count", uint32(s.Blocks)},
		{"llama.feed_forward_length", uint32(s.FeedForward)},
		{"llama.attention.head_count", uint32(s.Heads)},
		{"llama.attention.head_count_kv", uint32(s.HeadsKV)},
		{"llama.attention.layer_norm_rms_epsilon", float32(1e-5)},
		{"llama.rope.dimension_count", uint32(s.Embedding / s.Heads)},
		{"llama.vocab_size", uint32(vocabularySize)},
		{"tokenizer.ggml.model", "llama"},
		{"tokenizer.ggml.tokens", tokens},
		{"tokenizer.ggml.scores", scores},
		{"tokenizer.ggml.token_type", kinds},
		{"tokenizer.ggml.bos_token_id", uint32(tokenBegin)},
		{"tokenizer.ggml.eos_token_id", uint32(tokenEnd)},
		{"tokenizer.ggml.unknown_token_id", uint32(tokenUnknown)},
	}
}

func vocabulary() (tokens []string, kinds []int32, scores []float32) {
	tokens = []string{"<unk>", "<s>", "</s>"}
	kinds = []int32{kindUnknown, kindControl, kindControl}
	for b := range 256 {
		tokens = append(tokens, fmt.Sprintf("<0x%02X>", b))
		kinds = append(kinds, kindByte)
	}
	tokens = append(tokens, "▁") // sentencepiece's space
	kinds = append(kinds, kindNormal)
	for letter := 'a'; letter <= 'z'; letter++ {
		tokens = append(tokens, string(letter))
		kinds = append(kinds, kindNormal)
	}
	return tokens, kinds, make([]float32, len(tokens))
}

// encodeHeader gives all that comes before the tensor data, padding included.
func encodeHeader(pairs []pair, tensors []tensor) []byte {
	b := []byte(magic)
	b = appendUint32(b, version)
	b = appendUint64(b, uint64(len(tensors)))
	b = appendUint64(b, uint64(len(pairs)))
	for _, p := range pairs {
		b = appendString(b, p.key)
		b = appendValue(b, p.value)
	}
	for _, t := range tensors {
		b = appendString(b, t.name)
		if t.vector {
			b = appendUint32(b, 1)
			b = appendUint64(b, uint64(t.columns))
		} else {
			b = appendUint32(b, 2)
			b = appendUint64(b, uint64(t.columns))
			b = appendUint64(b, uint64(t.rows))
		}
		b = appendUint32(b, tensorFloat32)
		b = appendUint64(b, t.offset)
	}
	return append(b, make([]byte, align(uint64(len(b)))-uint64(len(b)))...)
}

func appendValue(b []byte, value any) []byte {
	switch v := value.(type) {
	case string:
		return appendString(appendUint32(b, typeString), v)
	case uint32:
		return appendUint32(appendUint32(b, typeUint32), v)
	case float32:
		return appendFloat32(appendUint32(b, typeFloat32), v)
	case []string:
		b = appendArray(b, typeString, len(v))
		for _, s := range v {
			b = appendString(b, s)
		}
	case []int32:
		b = appendArray(b, typeInt32, len(v))
		for _, n := range v {
			b = appendUint32(b, uint32(n))
		}
	case []float32:
		b = appendArray(b, typeFloat32, len(v))
		for _, f := range v {
			b = appendFloat32(b, f)
		}
	default:
		panic(fmt.Sprintf("tinygguf: metadata of type %T", value)) // only metadata() makes pairs
	}
	return b
}

func appendArray(b []byte, elementType uint32, length int) []byte {
	b = appendUint32(b, typeArray)
	b = appendUint32(b, elementType)
	return appendUint64(b, uint64(length))
}

func appendString(b []byte, s string) []byte {
	return append(appendUint64(b, uint64(len(s))), s...)
}

func appendUint32(b []byte, n uint32) []byte   { return binary.LittleEndian.AppendUint32(b, n) }
func appendUint64(b []byte, n uint64) []byte   { return binary.LittleEndian.AppendUint64(b, n) }
func appendFloat32(b []byte, f float32) []byte { return appendUint32(b, math.Float32bits(f)) }

func align(n uint64) uint64 { return (n + alignment - 1) / alignment * alignment }
