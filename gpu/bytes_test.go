package gpu

import (
	"encoding/json"
	"math"
	"testing"
)

func TestParseBytesReadsSizesAsPeopleWriteThem(t *testing.T) {
	for text, want := range map[string]Bytes{
		"0": 0, "1": 1, "1048576": MiB, "7b": 7, "7 B": 7,
		"1KiB": 1024, "1MiB": 1 << 20, "1GiB": 1 << 30, "1TiB": 1 << 40,
		"1KB": 1e3, "1MB": 1e6, "1GB": 1e9, "1TB": 1e12,
		"1K": 1024, "1M": 1 << 20, "1G": 1 << 30, "1T": 1 << 40,
		"13 gb": 13e9, " 13GIB ": 13 * GiB, "13\tgib": 13 * GiB, "512m": 512 * MiB,
		"2.8GiB": 3006477107, "0.5GiB": 512 * MiB, ".5k": 512, "5.": 5, "1.5": 2,
		"9223372036854775807": math.MaxInt64,
	} {
		got, err := ParseBytes(text)
		if err != nil || got != want {
			t.Errorf("ParseBytes(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
}

func TestParseBytesRefusesWhatIsNoSize(t *testing.T) {
	for _, text := range []string{
		"", "  ", "GiB", "8XB", "8PiB", "8gibb", "8 GiB 3", "1.2.3GiB", ".", "-1", "-1GiB", "-0.5GiB", "--1", "1-",
		"NaN", "nanGiB", "Inf", "+Inf", "1e3", "1e3GiB", "0x10", "0x1p4", "1_000", "1,5GiB",
		"9223372036854775808", "99999999999999999999", "8388608TiB", "8796093022208MiB", "9e99GiB",
		"99999999999.5TiB", "-99999999999999999999",
	} {
		if got, err := ParseBytes(text); err == nil {
			t.Errorf("ParseBytes(%q) = %d, want an error", text, got)
		}
	}
}

func TestBytesShowInTheLargestFittingUnit(t *testing.T) {
	for b, want := range map[Bytes]string{
		0: "0B", 1023: "1023B", KiB: "1KiB", 1536: "1.5KiB", 24 * GiB: "24GiB", 2 * TiB: "2TiB",
		-5 * GiB: "-5GiB", 100 * GiB: "100GiB", math.MinInt64: "-9223372036854775808B",
	} {
		if got := b.String(); got != want {
			t.Errorf("Bytes(%d).String() = %q, want %q", int64(b), got, want)
		}
	}
}

func TestBytesUnmarshalFromNumbersAndStrings(t *testing.T) {
	for text, want := range map[string]Bytes{`1048576`: MiB, `"1MiB"`: MiB, `"2 GB"`: 2e9, `0`: 0} {
		var got Bytes
		if err := json.Unmarshal([]byte(text), &got); err != nil || got != want {
			t.Errorf("%s: %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{`"many"`, `-1`, `true`, `1e3`, `[1]`, `""`} {
		var got Bytes
		if err := json.Unmarshal([]byte(text), &got); err == nil {
			t.Errorf("%s: %d, want an error", text, got)
		}
	}
}

// FuzzParseBytes holds that what is accepted is never negative, and that JSON
// gives back every amount exactly.
func FuzzParseBytes(f *testing.F) {
	for _, seed := range []string{"2.8GiB", "13 gb", "512M", "1048576", "-1", "", "8XB", "NaN", "1e400", "9223372036854775807", "1.5.5", "0.0000001k", "٣GiB", "\x00"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		b, err := ParseBytes(text)
		if err != nil {
			return
		}
		if b < 0 {
			t.Fatalf("ParseBytes(%q) = %d", text, b)
		}
		data, err := json.Marshal(b)
		if err != nil {
			t.Fatal(err)
		}
		var back Bytes
		if err := json.Unmarshal(data, &back); err != nil || back != b {
			t.Fatalf("%d became %s, then %d, %v", b, data, back, err)
		}
	})
}
