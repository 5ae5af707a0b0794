package routing

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"mime"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"sync"
)

// maxPartHeader bounds what the header of one part of a multipart body takes, with its boundary.
const maxPartHeader = 64 << 10

var errPartHeader = bad("a part of it has a header of more than %d bytes", maxPartHeader)

// lines reads a body line by line and knows where each begins. A line that is longer than its buffer comes in pieces.
type lines struct {
	in   *bufio.Reader
	at   int64  // where line begins
	end  int64  // where it ends
	line []byte // with its end, valid until the next
	full bool   // line is the end of a line
}

// lineBuffers are larger than the longest boundary, so that a delimiter is one line.
var lineBuffers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 16<<10) }}

// next reads a line. Its error is io.EOF if there is none.
func (l *lines) next() error {
	line, err := l.in.ReadSlice('\n')
	if len(line) == 0 && err != nil {
		return err
	}
	if err != nil && err != io.EOF && err != bufio.ErrBufferFull {
		return err
	}
	l.at, l.end, l.line, l.full = l.end, l.end+int64(len(line)), line, err == nil
	return nil
}

// source makes an io.Reader of pieces.
type source struct {
	more  func() ([]byte, error)
	piece []byte
}

func (s *source) Read(p []byte) (int, error) {
	for len(s.piece) == 0 {
		piece, err := s.more()
		if err != nil {
			return 0, err
		}
		s.piece = piece
	}
	n := copy(p, s.piece)
	s.piece = s.piece[n:]
	return n, nil
}

// multipartReader walks over the parts of a multipart body. It reads them as
// mime/multipart does, and refuses what that reads in another way than other servers may. It decodes nothing.
type multipartReader struct {
	lines
	delimiter []byte // two dashes and the boundary
	newline   string // how lines end: CRLF, or LF if the first delimiter does so
}

// readMultipart looks for fields, and notes where they stand.
func (y *Body) readMultipart(more func() ([]byte, error), boundary string, fields, names []string) error {
	if boundary == "" {
		return bad("its Content-Type is multipart/form-data without a boundary that can be read: one with characters such as = and / must stand in quotes")
	}
	in := lineBuffers.Get().(*bufio.Reader)
	in.Reset(&source{more: more})
	defer func() {
		in.Reset(nil)
		lineBuffers.Put(in)
	}()
	if len(boundary) > in.Size()/2 {
		return bad("its boundary has %d bytes", len(boundary))
	}
	m := multipartReader{lines: lines{in: in}, delimiter: []byte("--" + boundary)}
	final, err := m.begin()
	if err == nil && !final {
		y.seen.boundary, y.seen.newline, y.seen.first = boundary, m.newline, m.at
	}
	seen := make([]bool, len(fields))
	for err == nil && !final {
		var field int
		if field, err = m.header(fields); err != nil {
			break
		}
		at := place{do: isField | max(field, 0), from: m.end}
		var text []byte
		if text, at.to, final, err = m.content(field >= 0); err != nil || field < 0 {
			continue
		}
		switch {
		case at.to-at.from > MaxName:
			return tooLong(fields[field], MaxName)
		case seen[field] && names[field] != string(text):
			return twice("field", fields[field])
		case !seen[field]:
			names[field], seen[field] = string(text), true
		}
		err = y.note(at)
	}
	return multipartError(err)
}

// begin reads to the end of the first delimiter; final: it is the last one, too.
func (m *multipartReader) begin() (final bool, err error) {
	start := true
	for {
		if err := m.next(); err != nil {
			return false, err
		}
		if start && bytes.HasPrefix(m.line, m.delimiter) {
			rest := m.line[len(m.delimiter):]
			if isEnd(rest) {
				return true, nil
			}
			if trimmed := bytes.TrimLeft(rest, " \t"); string(trimmed) == "\r\n" || string(trimmed) == "\n" {
				m.newline = string(trimmed)
				return false, nil
			}
		}
		start = m.full
	}
}

// isEnd reports whether what follows a delimiter makes it the last one.
func isEnd(rest []byte) bool {
	rest, ok := bytes.CutPrefix(rest, []byte("--"))
	return ok && len(bytes.Trim(rest, " \t\r\n")) == 0
}

// header reads the header of a part; field is the index of the field that it is, or -1.
func (m *multipartReader) header(fields []string) (field int, err error) {
	var header []byte
	for start := true; ; start = m.full {
		if err := m.next(); err != nil {
			return -1, err
		}
		if header = append(header, m.line...); len(header) > maxPartHeader {
			return -1, errPartHeader
		}
		if blank := string(m.line); start && (blank == "\r\n" || blank == "\n") {
			break
		}
	}
	h, err := textproto.NewReader(bufio.NewReader(bytes.NewReader(header))).ReadMIMEHeader()
	if err != nil {
		return -1, err
	}
	disposition := h.Get("Content-Disposition")
	kind, params, err := mime.ParseMediaType(disposition)
	if err != nil && slices.ContainsFunc(fields, func(f string) bool { return strings.Contains(disposition, f) }) {
		return -1, bad("it is no valid multipart/form-data: the Content-Disposition of a part can't be read")
	}
	field = slices.Index(fields, params["name"])
	if strings.Contains(disposition, "*") && len(fields) > 0 {
		others := strings.ReplaceAll(strings.ToLower(disposition), "filename*", "")
		if field >= 0 || strings.Contains(others, "name*") {
			return -1, bad("the Content-Disposition of a part has a parameter with an asterisk, which not all servers read: leave it out")
		}
	}
	if err != nil || field < 0 || params["filename"] != "" {
		return -1, nil
	}
	if kind != "form-data" { // many servers look at the name alone
		return -1, bad("field %q has the Content-Disposition %.64q: form-data is wanted", fields[field], kind)
	}
	if n := len(h["Content-Disposition"]); n > 1 {
		return -1, bad("field %q has %d headers Content-Disposition", fields[field], n)
	}
	for _, kind := range h["Content-Type"] {
		if charset, _ := foreignCharset(kind); charset != "" {
			return -1, bad("the Content-Type of field %q says %.64q: send it in UTF-8", fields[field], charset)
		}
	}
	switch strings.ToLower(strings.TrimSpace(h.Get("Content-Transfer-Encoding"))) {
	case "", "7bit", "8bit", "binary":
		return field, nil
	}
	return -1, bad("field %q is encoded: send it without a Content-Transfer-Encoding", fields[field])
}

// content reads the content of a part, to the end of the delimiter after it. It keeps no more than is needed to see that it is too long.
func (m *multipartReader) content(keep bool) (text []byte, to int64, final bool, err error) {
	from := m.end
	to = from
	start, bare := true, false // at the start of a line; that is, after a line feed that is no newline
	for {
		if err := m.next(); err != nil {
			return nil, 0, false, err
		}
		if start && bytes.HasPrefix(m.line, m.delimiter) {
			rest := m.line[len(m.delimiter):]
			final := isEnd(rest)
			clean := final || string(bytes.TrimLeft(rest, " \t")) == m.newline
			switch {
			case clean && bare:
				return nil, 0, false, bad("it is no valid multipart/form-data: a boundary stands after a bare line feed")
			case clean:
				return text[:min(int64(len(text)), to-from)], to, final, nil
			case !bare && (len(rest) == 0 || strings.IndexByte(" \t\r\n-", rest[0]) >= 0):
				return nil, 0, false, bad("it is no valid multipart/form-data: a boundary is followed by something else")
			}
		}
		if keep && len(text) <= MaxName+len(m.newline) {
			text = append(text, m.line...)
		}
		start, bare = m.full, m.full && !bytes.HasSuffix(m.line, []byte(m.newline))
		to = m.end
		if m.full {
			to -= int64(len(m.newline))
		}
	}
}

func multipartError(err error) error {
	var fault *BadBody
	switch {
	case err == nil, errors.As(err, &fault), errors.Is(err, ErrSpill):
		return err
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return bad("it is no valid multipart/form-data: it ends too soon")
	}
	return bad("it is no valid multipart/form-data: %v", err)
}

// readForm looks for fields in a form as browsers send it, and notes where they stand.
func (y *Body) readForm(more func() ([]byte, error), fields, names []string) error {
	f := form{fields: fields, names: names, seen: make([]bool, len(fields))}
	for {
		piece, err := more()
		if err == io.EOF {
			return f.pair(y)
		}
		if err != nil {
			return err
		}
		for _, c := range piece {
			if c != '&' {
				f.add(c)
			} else if err := f.pair(y); err != nil {
				return err
			}
			f.at++
		}
	}
}

// maxEscaped is the longest name with each byte written as %XX.
const maxEscaped = 3 * MaxName

// form is one pair of a form in the making.
type form struct {
	fields, names []string
	seen          []bool
	at, from      int64  // the place in the form, and where the value begins
	key, value    []byte // escaped
	inValue       bool
	longKey, long bool // it is not whole
}

func (f *form) add(c byte) {
	switch {
	case !f.inValue && c == '=':
		f.inValue, f.from = true, f.at+1
	case !f.inValue:
		if f.longKey = f.longKey || len(f.key) == maxEscaped; !f.longKey {
			f.key = append(f.key, c)
		}
	default:
		if f.long = f.long || len(f.value) == maxEscaped; !f.long {
			f.value = append(f.value, c)
		}
	}
}

// pair ends a pair.
func (f *form) pair(y *Body) error {
	at := place{do: isField, from: f.from, to: f.at}
	if !f.inValue {
		at.from, at.kind = f.at, bare
	}
	key, value, longKey, long := f.key, f.value, f.longKey, f.long
	f.key, f.value, f.inValue, f.longKey, f.long = f.key[:0], f.value[:0], false, false, false
	if longKey {
		return nil // no field has so long a name
	}
	i, text, err := field(f.fields, string(key), string(value), long)
	if err != nil || i < 0 {
		return err
	}
	if f.seen[i] && f.names[i] != text {
		return twice("field", f.fields[i])
	}
	f.names[i], f.seen[i] = text, true
	return y.note(at)
}

// field is the index of the field that a pair of a form or of a query is, or -1, and its value. long: the value is cut short.
func field(fields []string, key, value string, long bool) (index int, text string, _ error) {
	name, err := url.QueryUnescape(key)
	if err != nil {
		return -1, "", nil
	}
	if semicolon := strings.IndexByte(key+value, ';'); semicolon >= 0 {
		for part := range strings.SplitSeq(key+"="+value, ";") {
			inner, _, _ := strings.Cut(part, "=")
			if inner, err := url.QueryUnescape(inner); err == nil && slices.Contains(fields, inner) {
				return -1, "", bad("a semicolon stands beside %q, which names the model, and not all servers read it alike: write it as %%3B", inner)
			}
		}
	}
	if index = slices.Index(fields, name); index < 0 {
		return -1, "", nil
	}
	text, err = url.QueryUnescape(value)
	switch {
	case long, len(text) > MaxName:
		return -1, "", tooLong(name, MaxName)
	case err != nil:
		return -1, "", bad("field %q: %v", name, err)
	}
	return index, text, nil
}
