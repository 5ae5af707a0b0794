// Package gpu holds the vocabulary that the rest of the project uses to speak
// of accelerators: amounts of memory, devices, samples of what is free, and
// the Sampler that takes them.
package gpu

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Bytes is an amount of memory in bytes. It is signed, because differences of
// readings taken while others allocate may be negative.
type Bytes int64

// Binary units.
const (
	KiB Bytes = 1 << 10
	MiB Bytes = 1 << 20
	GiB Bytes = 1 << 30
	TiB Bytes = 1 << 40
)

// units maps a lower-case suffix to its factor. The one-letter forms are
// binary, as people use them for VRAM; "gb" and its kin are decimal.
var units = map[string]Bytes{
	"": 1, "b": 1,
	"k": KiB, "kib": KiB, "kb": 1e3,
	"m": MiB, "mib": MiB, "mb": 1e6,
	"g": GiB, "gib": GiB, "gb": 1e9,
	"t": TiB, "tib": TiB, "tb": 1e12,
}

// ParseBytes reads a size such as "2.8GiB", "13 gb", "512M" or "1048576".
// GiB, MiB, KiB and TiB are binary; GB, MB, KB and TB are decimal; G, M, K and
// T are binary; a bare number is bytes. Case and blanks do not matter.
// Negative, empty, unknown units, NaN and overflow are errors.
func ParseBytes(s string) (Bytes, error) {
	text := strings.ToLower(strings.Join(strings.Fields(s), ""))
	if text == "" {
		return 0, fmt.Errorf("size %q is empty: write for example 2.8GiB", s)
	}
	split := strings.LastIndexAny(text, "0123456789.") + 1
	number, unit := text[:split], text[split:]
	factor, ok := units[unit]
	if !ok || number == "" {
		return 0, fmt.Errorf("size %q is not a number with a unit: write for example 512MiB, 2.8GiB, 13GB or a count of bytes", s)
	}
	if n, err := strconv.ParseInt(number, 10, 64); err == nil {
		if n < 0 {
			return 0, fmt.Errorf("size %q is negative", s)
		}
		if n > math.MaxInt64/int64(factor) {
			return 0, fmt.Errorf("size %q is too large", s)
		}
		return Bytes(n) * factor, nil
	}
	f, err := strconv.ParseFloat(number, 64)
	if err != nil || math.IsNaN(f) || strings.ContainsAny(number, "exp_") {
		return 0, fmt.Errorf("size %q is not a number with a unit: write for example 512MiB, 2.8GiB, 13GB or a count of bytes", s)
	}
	if f < 0 {
		return 0, fmt.Errorf("size %q is negative", s)
	}
	f *= float64(factor)
	if f >= math.MaxInt64 {
		return 0, fmt.Errorf("size %q is too large", s)
	}
	return Bytes(math.Round(f)), nil
}

// Sizes below these must have lost their unit: see CheckUnit.
const (
	LeastMemory = MiB // of a model, or of a part of a GPU
	LeastBody   = KiB // of a request body
)

// CheckUnit returns an error if n, the value of a setting, is above zero and
// below least: then its unit was forgotten, and `vram 13` is 13 bytes.
func CheckUnit(setting string, n, least Bytes) error {
	if n <= 0 || n >= least {
		return nil
	}
	unit := "MiB" // 256, or 6144 as nvidia-smi counts
	if n < 200 && least == LeastMemory {
		unit = "GiB"
	}
	return fmt.Errorf("%s is %d bytes, because a number without a unit counts bytes: did you mean %d%s?", setting, n, n, unit)
}

// CheckUnits is CheckUnit for the sizes of GPUs, which a sampler declares.
func CheckUnits(sampler string, totals []Bytes) (doubts []error) {
	for i, total := range totals {
		if err := CheckUnit(fmt.Sprintf("%s: the memory of GPU %d", sampler, i), total, LeastMemory); err != nil {
			doubts = append(doubts, err)
		}
	}
	return doubts
}

// Doubter is a sampler's configuration that may be valid and yet not what its author meant.
type Doubter interface {
	// Doubts returns what is doubtful, each with what to write instead.
	Doubts() []error
}

// MiB is b in whole mebibytes, rounded down.
func (b Bytes) MiB() int64 { return int64(b / MiB) }

// String shows b in the largest binary unit in which it is at least one.
func (b Bytes) String() string {
	abs := b
	if abs < 0 {
		abs = -abs
	}
	for _, u := range []struct {
		name string
		size Bytes
	}{{"TiB", TiB}, {"GiB", GiB}, {"MiB", MiB}, {"KiB", KiB}} {
		if abs >= u.size {
			return strings.TrimSuffix(strings.TrimRight(strconv.FormatFloat(float64(b)/float64(u.size), 'f', 2, 64), "0"), ".") + u.name
		}
	}
	return strconv.FormatInt(int64(b), 10) + "B"
}

// MarshalJSON writes b as a size that ParseBytes reads back exactly.
func (b Bytes) MarshalJSON() ([]byte, error) {
	for _, u := range []struct {
		name string
		size Bytes
	}{{"GiB", GiB}, {"MiB", MiB}, {"KiB", KiB}} {
		if b != 0 && b%u.size == 0 {
			return json.Marshal(strconv.FormatInt(int64(b/u.size), 10) + u.name)
		}
	}
	return strconv.AppendInt(nil, int64(b), 10), nil
}

// UnmarshalJSON reads a number of bytes or a size as a string.
func (b *Bytes) UnmarshalJSON(data []byte) error {
	text := string(data)
	if strings.HasPrefix(text, `"`) {
		if err := json.Unmarshal(data, &text); err != nil {
			return err
		}
	}
	v, err := ParseBytes(text)
	if err != nil {
		return err
	}
	*b = v
	return nil
}
