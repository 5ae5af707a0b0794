package routing

import (
	"errors"
	"io"
	"mime/multipart"
	"net/url"
	"slices"
)

// maxPartHeader bounds what the header of one part of a multipart body takes, with its boundary.
const maxPartHeader = 64 << 10

// reader reads pieces, at most left bytes of them if that isn't negative.
type reader struct {
	more  func() ([]byte, error)
	piece []byte
	left  int
}

var errPartHeader = bad("a part of it has a header of more than %d bytes", maxPartHeader)

func (r *reader) Read(p []byte) (int, error) {
	for len(r.piece) == 0 {
		piece, err := r.more()
		if err != nil {
			return 0, err
		}
		r.piece = piece
	}
	if r.left >= 0 {
		if r.left == 0 {
			return 0, errPartHeader
		}
		p = p[:min(len(p), r.left)]
	}
	n := copy(p, r.piece)
	r.piece = r.piece[n:]
	if r.left >= 0 {
		r.left -= n
	}
	return n, nil
}

// readMultipart looks for fields, up to the first that holds a name: that one counts, and the rest is not read.
func readMultipart(r *reader, boundary string, fields, names []string) error {
	if boundary == "" {
		return bad("its Content-Type is multipart/form-data without a boundary")
	}
	parts := multipart.NewReader(r, boundary)
	for {
		r.left = maxPartHeader
		part, err := parts.NextPart()
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return multipartError(err)
		}
		r.left = -1
		if i := slices.Index(fields, part.FormName()); i >= 0 && part.FileName() == "" && names[i] == "" {
			text, err := io.ReadAll(io.LimitReader(part, MaxName+1))
			if err != nil {
				return multipartError(err)
			}
			if len(text) > MaxName {
				return tooLong(fields[i], MaxName)
			}
			names[i] = string(text)
			if i == 0 && len(text) > 0 {
				return nil
			}
		}
		// To its end, so that only the next header counts as such.
		if _, err := io.Copy(io.Discard, part); err != nil {
			return multipartError(err)
		}
	}
}

func multipartError(err error) error {
	var fault *BadBody
	switch {
	case errors.As(err, &fault), errors.Is(err, ErrSpill):
		return err
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return bad("it is no valid multipart/form-data: it ends too soon")
	}
	return bad("it is no valid multipart/form-data: %v", err)
}

// readForm looks for fields in a form as browsers send it. The first of a name counts.
func readForm(more func() ([]byte, error), fields, names []string) error {
	f := form{fields: fields, names: names, seen: make([]bool, len(fields))}
	for {
		piece, err := more()
		if err == io.EOF {
			return f.pair()
		}
		if err != nil {
			return err
		}
		for _, c := range piece {
			if c != '&' {
				f.add(c)
				continue
			}
			if err := f.pair(); err != nil {
				return err
			}
			if len(f.fields) > 0 && f.seen[0] {
				return nil
			}
		}
	}
}

// maxEscaped is the longest name with each byte written as %XX.
const maxEscaped = 3 * MaxName

// form is one pair of a form in the making.
type form struct {
	fields, names []string
	seen          []bool
	key, value    []byte // escaped
	inValue       bool
	longKey, long bool // it is not whole
}

func (f *form) add(c byte) {
	switch {
	case !f.inValue && c == '=':
		f.inValue = true
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
func (f *form) pair() error {
	key, value, longKey, long := string(f.key), string(f.value), f.longKey, f.long
	f.key, f.value, f.inValue, f.longKey, f.long = f.key[:0], f.value[:0], false, false, false
	name, err := url.QueryUnescape(key)
	i := slices.Index(f.fields, name)
	if longKey || err != nil || i < 0 || f.seen[i] {
		return nil // no field has so long a name
	}
	text, err := url.QueryUnescape(value)
	switch {
	case long, len(text) > MaxName:
		return tooLong(name, MaxName)
	case err != nil:
		return bad("field %q: %v", name, err)
	}
	f.names[i], f.seen[i] = text, text != ""
	return nil
}
