package routing

import (
	"encoding/binary"
	"fmt"
	"io"
)

// maxDepth is how deep JSON may be nested. Model servers give up at depths such as 1,000 themselves.
const maxDepth = 1024

// maxCapture is how long the text of a key or value may be that is looked at:
// as long as the longest name with each of its bytes written as an escape of six characters.
const maxCapture = 6*MaxName + 2

// pieces hands out a body as it came, piece by piece: what is in memory as it
// lies there, the rest in chunks.
type pieces struct {
	body  *Body
	at    int64
	chunk []byte
}

// next is the next piece, valid until the next call; its error is io.EOF at the end.
func (p *pieces) next() ([]byte, error) {
	inMemory := int64(len(p.body.memory))
	switch {
	case p.at >= p.body.size:
		return nil, io.EOF
	case p.at < inMemory:
		piece := p.body.memory[p.at:]
		p.at = inMemory
		return piece, nil
	}
	want := min(int64(len(p.chunk)), p.body.size-p.at)
	n, err := p.body.file.ReadAt(p.chunk[:want], p.at-inMemory)
	if int64(n) < want {
		return nil, fmt.Errorf("%w: reading it again: %w", ErrSpill, err)
	}
	p.at += want
	return p.chunk[:n], nil
}

// scanner reads JSON without decoding it, and accepts what encoding/json does,
// but for two things: it passes over a byte order mark, which some clients send
// and some servers take, and it bounds the depth. As there, a string may hold bytes that
// are no UTF-8: what to make of them is the server's business.
//
// It holds one piece of its input, and of texts what is captured, at most maxCapture bytes.
type scanner struct {
	more func() ([]byte, error)
	buf  []byte
	pos  int   // in buf
	base int64 // where buf begins in the input

	capturing bool
	from      int    // where the captured text begins in buf
	captured  []byte // what of it was in earlier pieces
	overflow  bool   // the text is longer than maxCapture; it is not whole

	depth   int
	objects [maxDepth / 64]uint64 // a bit for each open brace or bracket: 1 for a brace

	values []value // room for those of the members of the object at the top
}

// keptFor is room for n values, all of them empty.
func (s *scanner) keptFor(n int) []value {
	if cap(s.values) < n {
		s.values = make([]value, n)
	}
	s.values = s.values[:n]
	return s.values
}

// offset is the place in the input.
func (s *scanner) offset() int64 { return s.base + int64(s.pos) }

// peek is the byte at the place; its error is io.EOF at the end.
func (s *scanner) peek() (byte, error) {
	for s.pos == len(s.buf) {
		if s.capturing {
			s.keep(s.buf[s.from:])
			s.from = 0
		}
		s.base += int64(len(s.buf))
		s.buf, s.pos = nil, 0
		piece, err := s.more()
		if err != nil {
			return 0, err
		}
		s.buf = piece
	}
	return s.buf[s.pos], nil
}

func (s *scanner) keep(p []byte) {
	if s.overflow = s.overflow || len(s.captured)+len(p) > maxCapture; !s.overflow {
		s.captured = append(s.captured, p...)
	}
}

// capture begins to keep the text from the place on.
func (s *scanner) capture() {
	s.capturing, s.from, s.captured, s.overflow = true, s.pos, s.captured[:0], false
}

// text ends the capture: the text up to the place, valid until the next one; ok is false if it is too long.
func (s *scanner) text() (text []byte, ok bool) {
	s.capturing = false
	if len(s.captured) == 0 && !s.overflow { // all of it is in this piece
		text = s.buf[s.from:s.pos]
		return text, len(text) <= maxCapture
	}
	s.keep(s.buf[s.from:s.pos])
	return s.captured, !s.overflow
}

// malformed is the error of a byte that can't be there, or of an end that comes too soon.
func (s *scanner) malformed(err error, want string) error {
	switch {
	case err == io.EOF:
		return bad("it is no valid JSON: it ends at byte %d, where %s should be", s.offset(), want)
	case err != nil:
		return err
	}
	return bad("it is no valid JSON: at byte %d is %q, where %s should be", s.offset(), s.buf[s.pos], want)
}

// space passes over blanks, and is the byte after them.
func (s *scanner) space() (byte, error) {
	if s.pos < len(s.buf) && s.buf[s.pos] > ' ' {
		return s.buf[s.pos], nil
	}
	for {
		c, err := s.peek()
		if err != nil || c != ' ' && c != '\n' && c != '\r' && c != '\t' {
			return c, err
		}
		s.pos++
	}
}

// bom passes over a byte order mark at the start.
func (s *scanner) bom() error {
	for i := range 3 {
		c, err := s.peek()
		switch {
		case i == 0 && (err == io.EOF || err == nil && c != 0xEF):
			return nil
		case err != nil || c != "\uFEFF"[i]:
			return s.malformed(err, "a value")
		}
		s.pos++
	}
	return nil
}

// byte passes over one byte that must be there.
func (s *scanner) byte(want byte) error {
	c, err := s.space()
	if err != nil || c != want {
		return s.malformed(err, string(rune(want)))
	}
	s.pos++
	return nil
}

// value passes over one value of any kind, and blanks before it.
func (s *scanner) value() error {
	bottom := s.depth
	for {
		opened, err := s.begin()
		if err != nil {
			return err
		}
		if opened {
			continue
		}
		for { // a value has ended
			if s.depth == bottom {
				return nil
			}
			another, err := s.follow()
			if err != nil {
				return err
			}
			if another {
				break
			}
		}
	}
}

// begin passes over a scalar or an empty list or object, or goes to the first value in one; then opened is true.
func (s *scanner) begin() (opened bool, _ error) {
	c, err := s.space()
	if err != nil {
		return false, s.malformed(err, "a value")
	}
	switch {
	case c == '"':
		return false, s.string()
	case c == '{' || c == '[':
		if err := s.open(c == '{'); err != nil {
			return false, err
		}
		s.pos++
		inside, err := s.space()
		if err != nil {
			return false, s.malformed(err, "a value or its end")
		}
		if inside == c+2 { // its end
			s.pos++
			s.depth--
			return false, nil
		}
		if c == '{' {
			return true, s.key()
		}
		return true, nil
	case c == '-' || '0' <= c && c <= '9':
		return false, s.number()
	case c == 't':
		return false, s.word("true")
	case c == 'f':
		return false, s.word("false")
	case c == 'n':
		return false, s.word("null")
	}
	return false, s.malformed(nil, "a value")
}

// follow goes to the next value of the innermost list or object; another is false if that ends instead.
func (s *scanner) follow() (another bool, _ error) {
	c, err := s.space()
	object := s.inObject()
	switch {
	case err != nil:
		return false, s.malformed(err, "a comma or an end")
	case c == ',':
		s.pos++
		if object {
			return true, s.key()
		}
		return true, nil
	case object && c == '}', !object && c == ']':
		s.pos++
		s.depth--
		return false, nil
	case object:
		return false, s.malformed(nil, "a comma or a brace")
	}
	return false, s.malformed(nil, "a comma or a bracket")
}

func (s *scanner) open(object bool) error {
	if s.depth == maxDepth {
		return bad("it is nested deeper than %d, at byte %d", maxDepth, s.offset())
	}
	bit := uint64(1) << (s.depth % 64)
	s.objects[s.depth/64] &^= bit
	if object {
		s.objects[s.depth/64] |= bit
	}
	s.depth++
	return nil
}

func (s *scanner) inObject() bool {
	last := s.depth - 1
	return s.objects[last/64]&(1<<(last%64)) != 0
}

// key passes over a key and its colon.
func (s *scanner) key() error {
	c, err := s.space()
	if err != nil || c != '"' {
		return s.malformed(err, "a key in quotes")
	}
	if err := s.string(); err != nil {
		return err
	}
	return s.byte(':')
}

// plain are the bytes that stand for themselves within a string.
var plain = func() (t [256]bool) {
	for c := range t {
		t[c] = c >= ' ' && c != '"' && c != '\\'
	}
	return t
}()

// allPlain reports whether eight bytes are all plain. Each of the three terms sets the highest bit of a byte that is not: XOR turns
// quotes and backslashes into zeros, subtracting 1 from a zero borrows, and so does subtracting a space from a control character.
func allPlain(eight uint64) bool {
	const each, high = 0x0101010101010101, 0x8080808080808080
	quote, backslash := eight^each*'"', eight^each*'\\'
	return ((quote-each)&^quote|(backslash-each)&^backslash|(eight-each*' ')&^eight)&high == 0
}

// string passes over a string; the place is at its first quote.
func (s *scanner) string() error {
	s.pos++
	for {
		buf, i := s.buf, s.pos
		for i+8 <= len(buf) && allPlain(binary.LittleEndian.Uint64(buf[i:])) {
			i += 8
		}
		for i < len(buf) && plain[buf[i]] {
			i++
		}
		s.pos = i
		c, err := s.peek()
		switch {
		case err != nil:
			return s.malformed(err, "a quote")
		case c == '"':
			s.pos++
			return nil
		case c == '\\':
			s.pos++
			if err := s.escape(); err != nil {
				return err
			}
		case !plain[c]:
			return s.malformed(nil, "no control character")
		}
	}
}

// escape passes over what follows a backslash.
func (s *scanner) escape() error {
	c, err := s.peek()
	if err != nil {
		return s.malformed(err, "an escaped character")
	}
	switch c {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.pos++
		return nil
	case 'u':
		s.pos++
		for range 4 {
			c, err := s.peek()
			if err != nil || !('0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'f') {
				return s.malformed(err, "a hexadecimal digit")
			}
			s.pos++
		}
		return nil
	}
	return s.malformed(nil, "an escaped character")
}

// number passes over a number; the place is at its first character.
func (s *scanner) number() error {
	c, err := s.peek()
	if err == nil && c == '-' {
		s.pos++
		c, err = s.peek()
	}
	switch {
	case err == nil && c == '0':
		s.pos++
	default:
		if err := s.digits(); err != nil {
			return err
		}
	}
	if c, err = s.peek(); err == nil && c == '.' {
		s.pos++
		if err := s.digits(); err != nil {
			return err
		}
	}
	if c, err = s.peek(); err == nil && c|0x20 == 'e' {
		s.pos++
		if c, err = s.peek(); err == nil && (c == '+' || c == '-') {
			s.pos++
		}
		if err := s.digits(); err != nil {
			return err
		}
	}
	if err == io.EOF {
		return nil
	}
	return err
}

// digits passes over one digit or more.
func (s *scanner) digits() error {
	for n := 0; ; n++ {
		c, err := s.peek()
		if err != nil && err != io.EOF {
			return err
		}
		if err != nil || c < '0' || c > '9' {
			if n > 0 {
				return nil
			}
			return s.malformed(err, "a digit")
		}
		s.pos++
	}
}

// word passes over true, false or null.
func (s *scanner) word(word string) error {
	for i := range len(word) {
		c, err := s.peek()
		if err != nil || c != word[i] {
			return s.malformed(err, word)
		}
		s.pos++
	}
	return nil
}
