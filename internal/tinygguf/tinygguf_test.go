package tinygguf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
)

func TestTheFileHasTheStructureThatReadersExpect(t *testing.T) {
	other := Size{Embedding: 96, Blocks: 3, FeedForward: 200, Heads: 6, HeadsKV: 2, Context: 64}
	tests := []struct {
		name  string
		size  Size
		bytes int // of the tensors, padding left out
	}{
		{"tiny", Tiny(), 4 * (2*286*64 + 64 + 2*(2*64+4*64*64+3*64*128))},
		{"slow", Slow(), 4 * (2*286*64 + 64 + 128*(2*64+4*64*64+3*64*128))},
		{"fewer key and value heads", other, 4 * (2*286*96 + 96 + 3*(2*96+2*96*96+2*96*32+3*96*200))},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			f := parse(t, write(t, test.size, 7))

			want := map[string]any{
				"general.architecture":                   "llama",
				"general.file_type":                      uint32(0),
				"general.alignment":                      uint32(32),
				"llama.context_length":                   uint32(test.size.Context),
				"llama.embedding_length":                 uint32(test.size.Embedding),
				"llama.block_count":                      uint32(test.size.Blocks),
				"llama.feed_forward_length":              uint32(test.size.FeedForward),
				"llama.attention.head_count":             uint32(test.size.Heads),
				"llama.attention.head_count_kv":          uint32(test.size.HeadsKV),
				"llama.attention.layer_norm_rms_epsilon": float32(1e-5),
				"llama.rope.dimension_count":             uint32(16),
				"llama.vocab_size":                       uint32(286),
				"tokenizer.ggml.model":                   "llama",
				"tokenizer.ggml.bos_token_id":            uint32(1),
				"tokenizer.ggml.eos_token_id":            uint32(2),
				"tokenizer.ggml.unknown_token_id":        uint32(0),
			}
			for key, value := range want {
				if f.metadata[key] != value {
					t.Errorf("%s: want %v, found %v", key, value, f.metadata[key])
				}
			}
			checkTensors(t, f, test.size)

			total := 0
			for _, p := range f.tensors {
				total += p.bytes()
			}
			if total != test.bytes {
				t.Errorf("want %d bytes of tensors, found %d", test.bytes, total)
			}
		})
	}
}

// checkTensors looks at names, shapes, places and values.
func checkTensors(t *testing.T, f file, s Size) {
	t.Helper()
	d, kv, ff := s.Embedding, s.Embedding/s.Heads*s.HeadsKV, s.FeedForward
	want := map[string][]int{"token_embd.weight": {d, 286}, "output_norm.weight": {d}, "output.weight": {d, 286}}
	for i := range s.Blocks {
		for name, shape := range map[string][]int{
			"attn_norm": {d}, "attn_q": {d, d}, "attn_k": {d, kv}, "attn_v": {d, kv}, "attn_output": {d, d},
			"ffn_norm": {d}, "ffn_gate": {d, ff}, "ffn_up": {d, ff}, "ffn_down": {ff, d},
		} {
			want[fmt.Sprintf("blk.%d.%s.weight", i, name)] = shape
		}
	}
	if len(f.tensors) != len(want) {
		t.Fatalf("want %d tensors, found %d", len(want), len(f.tensors))
	}
	end := 0
	for _, p := range f.tensors {
		if !slices.Equal(p.shape, want[p.name]) {
			t.Errorf("%s: want shape %v, found %v", p.name, want[p.name], p.shape)
		}
		if p.offset%32 != 0 || p.offset < end || p.offset >= end+32 {
			t.Errorf("%s: want the next multiple of 32 from %d on, found offset %d", p.name, end, p.offset)
		}
		end = p.offset + p.bytes()
		if end > len(f.data) {
			t.Fatalf("%s ends at %d, behind the end of the data at %d", p.name, end, len(f.data))
		}
		checkValues(t, p, f.data[p.offset:end])
	}
	if end != len(f.data) {
		t.Errorf("want the file to end with its last tensor at %d, found %d bytes", end, len(f.data))
	}
}

func checkValues(t *testing.T, p place, data []byte) {
	t.Helper()
	different := map[float32]bool{}
	for len(data) > 0 {
		value := math.Float32frombits(binary.LittleEndian.Uint32(data))
		data = data[4:]
		if math.IsNaN(float64(value)) || math.Abs(float64(value)) > 16 {
			t.Fatalf("%s: want small numbers, found %v", p.name, value)
		}
		different[value] = true
	}
	if len(p.shape) == 1 {
		if len(different) != 1 || !different[1] {
			t.Errorf("%s: want nothing but 1, found %d different numbers", p.name, len(different))
		}
	} else if len(different) < 1000 {
		t.Errorf("%s: want random numbers, found only %d different ones", p.name, len(different))
	}
}

func TestTheVocabularyIsSpecialTokensThenBytesThenLetters(t *testing.T) {
	f := parse(t, write(t, Tiny(), 7))
	tokens, _ := f.metadata["tokenizer.ggml.tokens"].([]any)
	kinds, _ := f.metadata["tokenizer.ggml.token_type"].([]any)
	scores, _ := f.metadata["tokenizer.ggml.scores"].([]any)
	if len(tokens) != 286 || len(kinds) != 286 || len(scores) != 286 {
		t.Fatalf("want 286 tokens, kinds and scores, found %d, %d, %d", len(tokens), len(kinds), len(scores))
	}
	for id, want := range map[int]struct {
		token string
		kind  int32
	}{
		0: {"<unk>", 2}, 1: {"<s>", 3}, 2: {"</s>", 3},
		3: {"<0x00>", 6}, 13: {"<0x0A>", 6}, 258: {"<0xFF>", 6},
		259: {"▁", 1}, 260: {"a", 1}, 285: {"z", 1},
	} {
		if tokens[id] != want.token || kinds[id] != want.kind || scores[id] != float32(0) {
			t.Errorf("token %d: want %q of kind %d and score 0, found %q, %d, %v", id, want.token, want.kind, tokens[id], kinds[id], scores[id])
		}
	}
}

func TestTheSameSeedGivesTheSameBytesAndAnotherSeedOthers(t *testing.T) {
	first := write(t, Tiny(), 1)
	if !bytes.Equal(first, write(t, Tiny(), 1)) {
		t.Error("want the same bytes from the same seed")
	}
	second := write(t, Tiny(), 2)
	if bytes.Equal(first, second) {
		t.Error("want other weights from another seed")
	}
	if len(first) != len(second) {
		t.Errorf("want files of the same length, found %d and %d", len(first), len(second))
	}
}

func TestASizeThatNoReaderAcceptsIsRefused(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*Size)
		want   string
	}{
		{"nothing set", func(s *Size) { *s = Size{} }, "above 0"},
		{"no block", func(s *Size) { s.Blocks = 0 }, "above 0"},
		{"an embedding that the heads do not divide", func(s *Size) { s.Embedding = 66 }, "multiple"},
		{"an odd length of a head", func(s *Size) { s.Embedding = 60 }, "multiple"},
		{"key and value heads that do not divide the heads", func(s *Size) { s.HeadsKV = 3 }, "divide"},
	} {
		t.Run(test.name, func(t *testing.T) {
			size := Tiny()
			test.change(&size)
			var out bytes.Buffer
			err := Write(&out, size, 1)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("want an error with %q, found %v", test.want, err)
			}
			if out.Len() != 0 {
				t.Errorf("want nothing written, found %d bytes", out.Len())
			}
		})
	}
}

func TestAWriterThatFailsIsReported(t *testing.T) {
	full := errors.New("disk full")
	if err := Write(failing{full}, Tiny(), 1); !errors.Is(err, full) {
		t.Errorf("want %v, found %v", full, err)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

func write(t *testing.T, size Size, seed uint64) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := Write(&out, size, seed); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
