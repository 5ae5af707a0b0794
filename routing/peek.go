package routing

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// Bounds of what bodies say, in bytes.
const (
	// MaxName is the longest name of a model, or of a field.
	MaxName = 512
	// MaxClient is the longest x_client_id.
	MaxClient = 128
)

// MaxDuration is the longest time that a body can ask for; what is longer counts as this.
const MaxDuration = 24 * time.Hour

// maxPlaces bounds the places at which fields of one body are read or changed.
const maxPlaces = 64

// The broker's own metadata fields.
const (
	fieldClient    = "x_client_id"
	fieldPriority  = "x_priority"
	fieldKeepAlive = "x_keep_alive"
	fieldStayWarm  = "x_stay_warm"
	fieldCooldown  = "x_cooldown"
)

var ownFields = []string{fieldClient, fieldPriority, fieldKeepAlive, fieldStayWarm, fieldCooldown}

// BadBody is the error of a body, or of a name in a request, that is not what it
// should be. Its text is fit for the client and holds nothing of the body but a byte or a name.
type BadBody struct{ reason string }

func (b *BadBody) Error() string { return b.reason }

func bad(format string, args ...any) error { return &BadBody{fmt.Sprintf(format, args...)} }

// Plan says what to look for in the bodies of a route. It is made once, and safe for use by many requests at once.
type Plan struct {
	fields []string // where the name of a model may stand
	trust  bool
	names  map[string]int // every name that is looked for in JSON: what to do with it
	marks  []string       // fields that a Change may mean
	folds  []folded       // names that are looked for in any case
}

// folded is a name that is looked for in any case, and what to do with it.
type folded struct {
	name []byte
	do   int
}

// What to do with a field: an index of Plan.fields or of ownFields + own, and
// whether to take it out; + an index of Plan.marks, if it is marked, shifted by markShift.
const (
	isField   = 1 << 14
	own       = 1 << 15
	takeOut   = 1 << 16
	marked    = 1 << 17
	markShift = 18
)

// NewPlan makes a Plan. fields are those in which a body may name its model, the
// first that does so counts; metadata are those to take out of JSON bodies beside the broker's own; with trust
// those are obeyed.
//
// Error: a name that is empty, longer than MaxName, or no UTF-8; more than 100 names.
func NewPlan(fields, metadata []string, trust bool) (*Plan, error) {
	p := &Plan{fields: fields, trust: trust, names: map[string]int{}}
	if len(fields)+len(metadata) > 100 {
		return nil, fmt.Errorf("%d fields are to be read: at most 100 can be", len(fields)+len(metadata))
	}
	for i, name := range fields {
		if _, twice := p.names[name]; !twice {
			p.names[name] = isField | i
		}
	}
	for i, name := range ownFields {
		if p.names[name]&isField == 0 { // else it is the user's wish to read the model from it
			p.names[name] = own | i
		}
		p.names[name] |= takeOut
	}
	for _, name := range metadata {
		p.names[name] |= takeOut
	}
	return p, p.check()
}

func (p *Plan) check() error {
	for name := range p.names {
		if name == "" || len(name) > MaxName || !utf8.ValidString(name) {
			return fmt.Errorf("field %.40q can't be read: a name of 1 to %d bytes is wanted", name, MaxName)
		}
	}
	return nil
}

// Mark makes Peek note where these fields of JSON stand, so that Change can change them. It is
// called once, before the first Peek.
//
// Error: as NewPlan's, for at most 1,000 names.
func (p *Plan) Mark(fields []string) error {
	for _, name := range fields {
		if p.names[name]&marked != 0 {
			continue
		}
		if len(p.marks) == 1000 {
			return errors.New("more than 1000 fields are to be changed")
		}
		p.names[name] |= marked | len(p.marks)<<markShift
		p.marks = append(p.marks, name)
	}
	return p.check()
}

// Fold makes Peek look for names of models, and for marked fields, in any case, too: some server of the
// route takes them so. It is called once, after Mark.
func (p *Plan) Fold() {
	for name, do := range p.names {
		if do&(isField|marked) != 0 {
			p.folds = append(p.folds, folded{[]byte(name), do})
		}
	}
}

// Facts are what a body says about its request.
type Facts struct {
	Names []string // of models, one for each field of the plan; empty: not named there
	// OtherCase is a field that names a model in the plan's spelling, where a key of the body is that name in another
	// case and holds something else than the field itself: a server that folds case may read that. Empty: there is none.
	OtherCase string
	Form      bool // the body is a form, in one of its two encodings

	Client      string // empty: not said, or not trusted
	Priority    int
	HasPriority bool
	KeepAlive   time.Duration // zero: not said, or not trusted; as the next two
	StayWarm    time.Duration
	Cooldown    time.Duration
}

// Peek reads what p looks for in a body, of the request header h, and takes its
// metadata fields out: Rewind then gives the rest, every other byte as it came. It reads the body in
// pieces; it decodes nothing but the fields. The content codings gzip, deflate, zstd and br are decoded
// first, within the bounds of the body itself; see Rewind for what becomes of them.
//
// Read are JSON, multipart/form-data and application/x-www-form-urlencoded; metadata fields only in JSON objects, at their top
// level. A body that begins as a JSON object is JSON whatever its Content-Type: many servers don't look at that. A metadata field that comes twice counts as the last one says. A model that is named twice with different
// values is an error: of two servers one reads the first and another the last. Null, and an empty name,
// count as nothing said. Any other body, and an empty one, say nothing.
//
// Decoding ends when ctx does.
//
// Errors: *BadBody, ErrEncoding, ErrTooLarge and ErrNoRoom for what it decodes to, ErrSpill where the body can't be read back, or the cause that ctx ended.
func (y *Body) Peek(ctx context.Context, h http.Header, p *Plan) (Facts, error) {
	if y.size == 0 {
		return Facts{Names: make([]string, len(p.fields))}, nil
	}
	codings, err := contentCodings(h)
	if err != nil {
		return Facts{}, err
	}
	if len(codings) > 0 {
		if y.decoded != nil { // by a look that failed
			y.decoded.Recycle()
		}
		if y.decoded, err = y.decode(ctx, codings); err != nil {
			if ctx.Err() != nil {
				return Facts{}, context.Cause(ctx)
			}
			return Facts{}, unreadable(err)
		}
		y = y.decoded
	}
	facts := Facts{Names: make([]string, len(p.fields))}
	if err := y.look(h, p, &facts); err != nil {
		return Facts{}, unreadable(err)
	}
	y.Change(p, "", nil)
	return facts, nil
}

// unreadable says what an error is about.
func unreadable(err error) error {
	var fault *BadBody
	if errors.As(err, &fault) || errors.Is(err, ErrSpill) || errors.Is(err, ErrTooLarge) || errors.Is(err, ErrNoRoom) {
		return fmt.Errorf("the request body can't be read: %w", err)
	}
	return bad("the request body can't be read: %v", err)
}

// look reads the body by its kind.
func (y *Body) look(h http.Header, p *Plan, facts *Facts) error {
	y.seen = seen{}
	y.seen.places = y.seen.few[:0]
	if y.size == 0 {
		return nil
	}
	var piece *[32 << 10]byte
	y.in = pieces{body: y}
	if y.more == nil {
		y.more = y.in.next
	}
	if y.file != nil {
		piece = chunks.Get().(*[32 << 10]byte)
		defer chunks.Put(piece)
		y.in.chunk = piece[:]
	}
	kinds := h["Content-Type"]
	if slices.ContainsFunc(kinds, func(kind string) bool { return kind != kinds[0] }) {
		return bad("the request has %d different headers Content-Type", len(kinds))
	}
	kind, params := mediaType(h.Get("Content-Type"))
	isJSON, hidden := y.looksLikeJSON()
	named := isJSON || isJSONType(kind) || kind == "multipart/form-data" || kind == "application/x-www-form-urlencoded"
	if charset, begins := foreignCharset(h.Get("Content-Type")); charset != "" && len(p.fields) > 0 && (named || !begins) {
		return bad("its Content-Type says %.64q, which may change the model's name: send it in UTF-8", charset)
	}
	switch {
	case kind == "multipart/form-data" && isJSON: // a server that doesn't look at the Content-Type stops reading where the object ends
		return bad("its Content-Type is multipart/form-data, but it begins as a JSON object")
	case hidden && !isJSONType(kind):
		return bad("it begins with %d bytes of blanks: leave them out", len(y.memory))
	case kind == "multipart/form-data":
		y.seen.as, facts.Form = asMultipart, true
		return y.readMultipart(y.more, params["boundary"], p.fields, facts.Names)
	case isJSONType(kind), isJSON:
		y.seen.as = asJSON
		return y.peekJSON(y.more, p, facts)
	case kind == "application/x-www-form-urlencoded":
		y.seen.as, facts.Form = asForm, true
		return y.readForm(y.more, p.fields, facts.Names)
	}
	return nil
}

func isJSONType(kind string) bool { return kind == jsonType || strings.HasSuffix(kind, "+json") }

const jsonType = "application/json"

// foreignCharset returns the parameter of a Content-Type that names a charset in which ASCII may stand for something else, or empty. begins:
// a text begins there as in ASCII all the same. Servers differ in how they read a header that is malformed, or that names two: every
// charset in it counts.
func foreignCharset(header string) (parameter string, begins bool) {
	if header == jsonType {
		return "", true
	}
	rest := strings.ToLower(header)
	for {
		var found bool
		if _, rest, found = strings.Cut(rest, "charset"); !found {
			return "", true
		}
		charset, _, _ := strings.Cut(rest, ";")
		label, named := strings.CutPrefix(strings.TrimSpace(charset), "=")
		if label = labelMarks.Replace(strings.Trim(label, " \t\"'")); !named || label != "" && !isOf(extendASCII, label) {
			return "charset" + charset, named && isOf(beginAsASCII, label)
		}
	}
}

// Charsets, without labelMarks; a star stands for the rest of the name.
var (
	// Every byte of ASCII stands for itself there, and for nothing else.
	extendASCII = []string{"utf8", "ascii", "usascii", "binary", "iso8859*", "latin*", "windows125*", "cp125*", "windows874", "koi8*", "euc*", "macintosh", "tis620"}
	// There it may be the second byte of a character, too: a backslash in JSON.
	beginAsASCII = []string{"gb*", "big5*", "shiftjis*", "sjis", "xsjis", "windows31j", "ms932", "cp932", "cp936", "cp949", "cp950", "uhc", "johab"}
)

func isOf(charsets []string, charset string) bool {
	return slices.ContainsFunc(charsets, func(known string) bool {
		family, isFamily := strings.CutSuffix(known, "*")
		return charset == known || isFamily && strings.HasPrefix(charset, family)
	})
}

// labelMarks takes out what servers pass over in the name of a charset.
var labelMarks = strings.NewReplacer("-", "", "_", "")

// mediaType reads a Content-Type. The usual one costs nothing. One whose parameters are malformed has none.
func mediaType(header string) (kind string, params map[string]string) {
	if header == jsonType {
		return header, nil
	}
	kind, params, err := mime.ParseMediaType(header)
	if err != nil {
		kind, _, _ = strings.Cut(header, ";")
		return strings.ToLower(strings.TrimSpace(kind)), nil
	}
	return kind, params
}

// note keeps a place.
func (y *Body) note(at place) error {
	if len(y.seen.places) == maxPlaces {
		return bad("its metadata fields, and those that name a model, stand at more than %d places", maxPlaces)
	}
	y.seen.places = append(y.seen.places, at)
	return nil
}

// looksLikeJSON reports whether the body begins as a JSON object, in UTF-8, UTF-16 or UTF-32: with a brace, blanks, and a quote or the
// other brace. Hardly any sound or picture does so, and no form: it would escape the brace. hidden: only blanks are in memory, and
// the rest is in the file.
func (y *Body) looksLikeJSON() (looks, hidden bool) {
	begin := beginning(y.memory)
	switch c, ok := begin.next(); {
	case !ok:
		return false, y.file != nil
	case c != '{':
		return false, false
	}
	c, ok := begin.next()
	return !ok || c == '"' || c == '}', false // without one the rest may be in the file
}

// beginning are the characters of a text after its byte order mark. Where it has none, the place of its zeros tells how wide they are.
func beginning(text []byte) characters {
	for _, mark := range byteOrderMarks {
		if rest, ok := bytes.CutPrefix(text, mark.bytes); ok {
			mark.characters.text = rest
			return mark.characters
		}
	}
	c := characters{text: text, width: 1}
	if len(text) < 4 {
		return c
	}
	switch first, second, wide := text[0] == 0, text[1] == 0, text[2] == 0 && text[3] == 0; {
	case first && second && text[2] == 0:
		c.width, c.low = 4, 3
	case second && !first && wide:
		c.width = 4
	case first && !second:
		c.width, c.low = 2, 1
	case second && !first:
		c.width = 2
	}
	return c
}

// byteOrderMarks are in the order in which they are to be tried: that of UTF-16 begins one of UTF-32.
var byteOrderMarks = []struct {
	bytes      []byte
	characters characters
}{
	{[]byte("\xEF\xBB\xBF"), characters{width: 1}},
	{[]byte("\xFF\xFE\x00\x00"), characters{width: 4}},
	{[]byte("\x00\x00\xFE\xFF"), characters{width: 4, low: 3}},
	{[]byte("\xFF\xFE"), characters{width: 2}},
	{[]byte("\xFE\xFF"), characters{width: 2, low: 1}},
}

// characters are those of a text in which each takes width bytes, of which the one at low holds all of ASCII.
type characters struct {
	text       []byte
	width, low int
}

// next is the next character but blanks; those beyond ASCII all count as 0xFF. ok is false at the end. Blanks are
// those of C and Python, which some servers strip before they read JSON.
func (c *characters) next() (char byte, ok bool) {
	for len(c.text) >= c.width {
		char = c.text[c.low]
		for i, other := range c.text[:c.width] {
			if i != c.low && other != 0 {
				char = 0xFF
			}
		}
		c.text = c.text[c.width:]
		if char != ' ' && (char < '\t' || char > '\r') {
			return char, true
		}
	}
	return 0, false
}

// scanners are large, for their bits.
var scanners = sync.Pool{New: func() any { return new(scanner) }}

// peekJSON reads a whole JSON document. Only the members of an object at its top are looked at.
func (y *Body) peekJSON(more func() ([]byte, error), p *Plan, facts *Facts) error {
	s := scanners.Get().(*scanner)
	*s = scanner{more: more, captured: s.captured[:0], values: s.values}
	defer func() {
		s.more, s.buf = nil, nil
		clear(s.values)
		scanners.Put(s)
	}()
	if err := s.bom(); err != nil {
		return err
	}
	c, err := s.space()
	if err != nil || c != '{' {
		if err := s.value(); err != nil {
			return err
		}
		return s.end()
	}
	m := members{scanner: s, plan: p, body: y, values: s.keptFor(len(p.fields) + len(ownFields) + len(p.fields))}
	if err := m.read(); err != nil {
		return err
	}
	if err := s.end(); err != nil {
		return err
	}
	return m.tell(facts)
}

// end is nil if nothing but blanks follows.
func (s *scanner) end() error {
	if _, err := s.space(); err != io.EOF {
		return s.malformed(err, "its end")
	}
	return nil
}

// value is what a field holds.
type value struct {
	kind byte   // the first character of its text; 0: there is none
	text string // as it stands in the body
	long bool   // it is too long to be kept
}

// members reads the object at the top.
type members struct {
	*scanner
	plan   *Plan
	body   *Body
	values []value // of the plan's fields, then of ownFields, then of keys that are the plan's fields in another case
}

// read reads its members, and notes those that may be changed.
func (m *members) read() error {
	seen := &m.body.seen
	_ = m.open(true) // the outermost is not too deep
	m.pos++          // the brace
	seen.inside = m.offset()
	c, err := m.space()
	if err != nil {
		return m.malformed(err, "a key or a brace")
	}
	if c == '}' {
		m.pos++
		return nil
	}
	noted := false // the member before is the last of the places
	for {
		at := place{start: m.offset(), prev: seen.last}
		if noted {
			seen.places[len(seen.places)-1].next = at.start
		}
		if at.do, at.folded, err = m.name(); err != nil {
			return err
		}
		if at.kind, err = m.space(); err != nil {
			return m.malformed(err, "a value")
		}
		at.from = m.offset()
		if err := m.take(&at); err != nil {
			return err
		}
		at.to = m.offset()
		seen.last = at.to
		if noted = at.do&(takeOut|isField|marked) != 0; noted {
			if err := m.body.note(at); err != nil {
				return err
			}
		}
		c, err := m.space()
		switch {
		case err != nil || c != ',' && c != '}':
			return m.malformed(err, "a comma or a brace")
		case c == '}':
			m.pos++
			return nil
		}
		m.pos++
		if c, err = m.space(); err != nil || c != '"' {
			return m.malformed(err, "a key in quotes")
		}
	}
}

// name reads a key and its colon; what is to be done with it, 0 if nothing.
func (m *members) name() (do int, inOtherCase bool, _ error) {
	c, err := m.space()
	if err != nil || c != '"' {
		return 0, false, m.malformed(err, "a key in quotes")
	}
	m.capture()
	if err := m.string(); err != nil {
		return 0, false, err
	}
	if text, ok := m.text(); ok {
		do, inOtherCase = m.plan.lookUp(text)
	}
	return do, inOtherCase, m.byte(':')
}

// lookUp takes a key as it stands in the body, with its quotes.
func (p *Plan) lookUp(text []byte) (do int, inOtherCase bool) {
	inner := text[1 : len(text)-1]
	if slices.Contains(inner, '\\') {
		name, _ := unquote(text)
		inner = []byte(name)
	}
	if do = p.names[string(inner)]; do != 0 {
		return do, false
	}
	for i := range p.folds {
		if bytes.EqualFold(inner, p.folds[i].name) {
			return p.folds[i].do, true
		}
	}
	return 0, false
}

// take reads a value, and keeps it if its field is read.
func (m *members) take(at *place) error {
	read := at.do&isField != 0 || at.do&own != 0 && !at.folded
	if !read {
		return m.value()
	}
	m.capture()
	if err := m.value(); err != nil {
		return err
	}
	text, ok := m.text()
	v := value{kind: at.kind, long: !ok}
	if ok {
		v.text = string(text)
	}
	index := at.do & (isField - 1)
	switch {
	case at.do&own != 0:
		index += len(m.plan.fields)
	case at.folded:
		index += len(m.plan.fields) + len(ownFields)
	}
	if old := m.values[index]; at.do&isField != 0 && old.kind != 0 && !old.equals(v) {
		return twice("field", m.plan.fields[at.do&(isField-1)])
	}
	m.values[index] = v
	return nil
}

// twice is the error of something that names a model twice, and not the same one.
func twice(what, name string) error {
	return bad("the %s %q, which names the model, stands there twice with different values: leave one of them out", what, name)
}
