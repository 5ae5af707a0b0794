package gpubroker

import (
	"bufio"
	"io"
	"sync"
)

var scanBuffers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 8<<10) }}

// asksToStream reports whether a JSON object says "stream": true at its top. It
// decodes nothing and keeps nothing; of what is no JSON it says no, or whatever: the server looks at it again.
func asksToStream(body io.Reader) (asks bool) {
	in := scanBuffers.Get().(*bufio.Reader)
	in.Reset(body)
	defer func() {
		in.Reset(nil)
		scanBuffers.Put(in)
	}()
	const key, word = "stream", "true"
	depth := 0
	isKey := false // a string at this place is a key of the object at the top
	named := false // … and the last one was the key
	for {
		c, err := in.ReadByte()
		if err != nil {
			return asks
		}
		switch c {
		case ' ', '\t', '\r', '\n', '\xEF', '\xBB', '\xBF':
		case '"':
			same, err := sameString(in, key)
			if err != nil {
				return asks
			}
			named = isKey && same
			isKey = false
		case '{', '[':
			if depth++; depth == 1 {
				if c == '[' {
					return false
				}
				isKey = true
			}
		case '}', ']':
			if depth--; depth <= 0 {
				return asks
			}
		case ',':
			if depth == 1 {
				isKey, named = true, false
			}
		case ':':
			if depth == 1 && named { // the last one of that name counts
				asks = nextIs(in, word)
			}
		default:
			if depth == 0 {
				return false
			}
		}
	}
}

// sameString reads to the end of a string that has begun, and reports whether it is want.
func sameString(in *bufio.Reader, want string) (same bool, err error) {
	same = true
	for n := 0; ; n++ {
		c, err := in.ReadByte()
		switch {
		case err != nil:
			return false, err
		case c == '"':
			return same && n == len(want), nil
		case c == '\\': // a key that is written with escapes for nothing is not looked for
			same = false
			if _, err := in.ReadByte(); err != nil {
				return false, err
			}
		}
		same = same && n < len(want) && c == want[n]
	}
}

// nextIs reports whether this word is next, after blanks. It takes the blanks only.
func nextIs(in *bufio.Reader, word string) bool {
	for {
		text, err := in.Peek(1)
		if err != nil {
			return false
		}
		switch text[0] {
		case ' ', '\t', '\r', '\n':
			_, _ = in.Discard(1)
			continue
		}
		text, _ = in.Peek(len(word))
		return string(text) == word
	}
}
