package routing

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEightBytesArePlainIfEachIs(t *testing.T) {
	for _, other := range []byte{' ', '!', '#', '[', ']', 'a', 0x7F, 0x80, 0xFF} {
		for place := range 8 {
			for c := range 256 {
				eight := [8]byte{other, other, other, other, other, other, other, other}
				eight[place] = byte(c)
				require.Equal(t, plain[c], allPlain(binary.LittleEndian.Uint64(eight[:])), "%#x at %d, beside %#x", c, place, other)
			}
		}
	}
}

// wrapped is a text in a piece, in pieces of one byte each, or in two.
func wrapped(text string, size int) *scanner {
	rest := []byte(text)
	return &scanner{more: func() ([]byte, error) {
		if len(rest) == 0 {
			return nil, io.EOF
		}
		piece := rest[:min(size, len(rest))]
		rest = rest[len(piece):]
		return piece, nil
	}}
}

// What the broker takes for JSON and a server does not, or the other way round, they would read differently.
func TestJSONIsWhatServersTakeForIt(t *testing.T) {
	numbers := []string{"0", "-0", "00", "01", "-01", "-1", "-", "--1", "+1", "1", "10", "1.", "1.0", "1.05", ".5", "-.5", "1..2", "1e", "1e5", "1E5", "1e+", "1e+5", "1e-5", "1e+-5", "1e5.0", "1d5", "1D5", "1f5", "1g5", "0e0", "0.e1", "1a", "0x1", "1 2", "Infinity", "NaN"}
	texts := []string{`""`, `"a`, `"`, `"\"`, `"\\"`, `"\"\"`, `"\/\b\f\n\r\t"`, `"\a"`, `"\u"`, `"\u12"`, `"\u123g"`, `"\u00e9"`, `"\u00E9"`, `"\u00@0"`, `"\u00` + "`" + `0"`, `"\u00G0"`, `"\u00/0"`, `"\u00:0"`, "\"\x1f\"", "\"\x7f\"", "\"\n\"", "\"\xff\"", `'a'`, `"12345678"`, `"1234567\"9"`}
	words := []string{"true", "false", "null", "tru", "truee", "True", "nul", "nil", "fals", "falsE"}
	lists := []string{"[]", "[ ]", "[", "]", "[1", "[1,", "[1,]", "[,1]", "[1 1]", "[1,2]", "[[]]", "[[],{}]", "[}", "[1}", "[[1]", "[]]"}
	objects := []string{"{}", "{ }", "{", "}", `{"a"}`, `{"a":}`, `{"a":1`, `{"a":1,`, `{"a":1,}`, `{,"a":1}`, `{"a":1 "b":2}`, `{"a":1,"b":2}`, `{"a":{"b":[{}]},"c":[]}`, `{a:1}`, `{1:1}`, `{"a" : 1 , "b":2}`, `{"a":1]`, `{"a":[1}`, `{"a"::1}`, `{"a":1,,"b":2}`, `{"a":[1],"b":{"c":2}}`, `{"a":1}}`}
	blanks := []string{"", " ", " 1", "1 ", "\t\n\r 1 \t\n\r", "\v1", "1\f", "\u00a01", "[\v1]", "[1\v]", "{\v}"}
	for _, doc := range slices.Concat(numbers, texts, words, lists, objects, blanks) {
		for _, size := range []int{len(doc) + 1, 1, 2, 3} {
			s := wrapped(doc, size)
			err := s.value()
			if err == nil {
				if _, err = s.space(); err == nil {
					err = errors.New("something follows")
				} else if err == io.EOF {
					err = nil
				}
			}
			require.Equal(t, json.Valid([]byte(doc)), err == nil, "%q in pieces of %d: %v", doc, size, err)
			if err == nil {
				require.EqualValues(t, len(doc), s.offset(), "%q", doc)
				require.Zero(t, s.depth, "%q", doc)
			}
		}
	}
}

func TestJSONIsNestedAsDeepAsMayBeAndNoDeeper(t *testing.T) {
	nested := func(open, end string, n int) string {
		return strings.Repeat(open, n) + "1" + strings.Repeat(end, n)
	}
	for _, c := range []struct {
		doc string
		ok  bool
	}{
		{nested("[", "]", maxDepth), true}, {nested("[", "]", maxDepth+1), false},
		{nested(`{"a":`, "}", maxDepth), true}, {nested(`{"a":`, "}", maxDepth+1), false},
		{nested(`[{"a":`, "}]", maxDepth/2), true}, {nested(`[{"a":`, "]}", maxDepth/2), false}, {nested(`{"a":[`, "]}", maxDepth/2), true},
	} {
		err := wrapped(c.doc, len(c.doc)).value()
		require.Equal(t, c.ok, err == nil, "%.20s: %v", c.doc, err)
	}
	require.Equal(t, 1024, maxDepth, "model servers give up at depths such as 1,000 themselves")
}

func TestATextIsCapturedUpToItsBound(t *testing.T) {
	for _, n := range []int{0, 1, maxCapture - 1, maxCapture, maxCapture + 1, 3 * maxCapture} {
		text := strings.Repeat("x", n)
		for _, size := range []int{n + 2, 1, 7, maxCapture - 1, maxCapture, maxCapture + 1} {
			s := wrapped("["+text+"]", size)
			_, err := s.peek()
			require.NoError(t, err)
			s.pos++
			s.capture()
			for range n {
				_, err := s.peek()
				require.NoError(t, err)
				s.pos++
			}
			got, ok := s.text()
			require.Equal(t, n <= maxCapture, ok, "%d in pieces of %d", n, size)
			require.True(t, !ok || string(got) == text, "%d in pieces of %d", n, size)
		}
	}
	require.GreaterOrEqual(t, maxCapture, len(`""`)+len(strings.Repeat(`\u00e9`, MaxName)), "a name that is written in escapes")
}

func TestAByteOrderMarkIsPassedOverOnlyWhole(t *testing.T) {
	for text, want := range map[string]bool{"": true, "{": true, "\uFEFF{": true, "\xEF\xBB{": false, "\xEF{": false, "\xEF\xBB": false, "\xEF": false, "\xBB\xBF": true} {
		s := wrapped(text, 1)
		require.Equal(t, want, s.bom() == nil, "%q", text)
	}
}

func TestAPlanReadsAtMostAHundredFields(t *testing.T) {
	fields := func(n int) (out []string) {
		for i := range n {
			out = append(out, fmt.Sprint("field", i))
		}
		return out
	}
	for _, c := range []struct {
		fields, metadata int
		ok               bool
	}{{100, 0, true}, {99, 1, true}, {101, 0, false}, {100, 1, false}, {0, 101, false}} {
		_, err := NewPlan(fields(c.fields), fields(c.fields + c.metadata)[c.fields:], true)
		require.Equal(t, c.ok, err == nil, "%+v: %v", c, err)
	}
}

// A large body is read back from a file. What can't be read is no end of it.
func TestAReadThatFailsIsNotTakenForJSON(t *testing.T) {
	broken := errors.New("the file can't be read")
	doc := `[-10.25e+3, 7, {"a" : true, "b\n\u00e9": [null, "c"], "d":{}}, false]`
	for at := range len(doc) {
		rest := doc[:at]
		s := &scanner{more: func() ([]byte, error) {
			if rest == "" {
				return nil, broken
			}
			piece := rest[:1]
			rest = rest[1:]
			return []byte(piece), nil
		}}
		require.ErrorIs(t, s.value(), broken, "after %q", doc[:at])
	}
	for _, number := range []string{"1", "-10.2", "0.25", "1e5", "1e+55"} { // it might go on
		rest := number
		s := &scanner{more: func() ([]byte, error) {
			if rest == "" {
				return nil, broken
			}
			piece := rest
			rest = ""
			return []byte(piece), nil
		}}
		require.ErrorIs(t, s.value(), broken, number)
	}
}
