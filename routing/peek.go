package routing

import (
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

// maxCuts bounds the places at which metadata fields are taken out of one body.
const maxCuts = 64

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
}

// What to do with a field: an index of Plan.fields or of ownFields + own, and
// whether to take it out.
const (
	takeOut = 1 << 16
	own     = 1 << 15
	isField = 1 << 14
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
	for name := range p.names {
		if name == "" || len(name) > MaxName || !utf8.ValidString(name) {
			return nil, fmt.Errorf("field %.40q can't be read: a name of 1 to %d bytes is wanted", name, MaxName)
		}
	}
	return p, nil
}

// Facts are what a body says about its request.
type Facts struct {
	Names []string // of models, one for each field of the plan; empty: not named there

	Client      string // empty: not said, or not trusted
	Priority    int
	HasPriority bool
	KeepAlive   time.Duration // zero: not said, or not trusted; as the next two
	StayWarm    time.Duration
	Cooldown    time.Duration
}

// Peek reads what p looks for in a body, of the request header h, and takes its
// metadata fields out: Rewind then gives the rest, every other byte as it came. It reads the body in
// pieces; it decodes nothing but the fields.
//
// Read are JSON (also where a client such as curl calls it a form or nothing at
// all), multipart/form-data and application/x-www-form-urlencoded; metadata fields only in JSON objects, at their top
// level. A field that comes twice counts as the last one says in JSON, which is what encoding/json, JavaScript
// and Python make of it, so the server sees the same; as the first one says in forms. Null, and an empty name,
// count as nothing said. Any other body, one that is compressed, and an empty one say nothing.
//
// Errors: *BadBody, or ErrSpill where the body can't be read back.
func (y *Body) Peek(h http.Header, p *Plan) (Facts, error) {
	facts := Facts{Names: make([]string, len(p.fields))}
	if y.size == 0 || y.encoded(h) {
		return facts, nil
	}
	var piece *[32 << 10]byte
	in := &pieces{body: y}
	if y.file != nil {
		piece = chunks.Get().(*[32 << 10]byte)
		defer chunks.Put(piece)
		in.chunk = piece[:]
	}
	kind, params, _ := mime.ParseMediaType(h.Get("Content-Type"))
	var err error
	switch {
	case kind == "multipart/form-data":
		err = readMultipart(&reader{more: in.next}, params["boundary"], p.fields, facts.Names)
	case kind == "application/json" || strings.HasSuffix(kind, "+json"),
		(kind == "" || kind == "text/plain" || kind == "application/x-www-form-urlencoded") && y.looksLikeJSON():
		err = y.peekJSON(in.next, p, &facts)
	case kind == "application/x-www-form-urlencoded":
		err = readForm(in.next, p.fields, facts.Names)
	}
	var fault *BadBody
	switch {
	case err == nil:
		return facts, nil
	case errors.As(err, &fault), errors.Is(err, ErrSpill):
		return Facts{}, fmt.Errorf("the request body can't be read: %w", err)
	}
	return Facts{}, bad("the request body can't be read: %v", err)
}

// encoded says whether the body is compressed.
func (y *Body) encoded(h http.Header) bool {
	coding := h.Get("Content-Encoding")
	return coding != "" && !strings.EqualFold(coding, "identity")
}

// looksLikeJSON says whether the body begins as a JSON object. A form does so in no client: it would escape the brace.
func (y *Body) looksLikeJSON() bool {
	text := strings.TrimLeft(strings.TrimPrefix(string(y.memory[:min(len(y.memory), 64)]), "\uFEFF"), " \t\r\n")
	return strings.HasPrefix(text, "{")
}

// scanners are large, for their bits.
var scanners = sync.Pool{New: func() any { return new(scanner) }}

// peekJSON reads a whole JSON document. Only the members of an object at its top are looked at.
func (y *Body) peekJSON(more func() ([]byte, error), p *Plan, facts *Facts) error {
	s := scanners.Get().(*scanner)
	*s = scanner{more: more, captured: s.captured[:0]}
	defer func() {
		s.more, s.buf = nil, nil
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
	m := members{scanner: s, plan: p, lastKept: -1, values: make([]value, len(p.fields)+len(ownFields))}
	if err := m.read(y); err != nil {
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
	values []value // of the plan's fields, then of ownFields

	lastKept int64 // the end of the last member that stays; -1: there is none
	first    int64 // the start of the first of the members that go and have followed it
	going    bool  // the last one goes
}

// read reads its members, and cuts out of y those that go.
//
// A member goes with the comma and the blanks after it, so that the next one
// stands in its place; those at the end go from the end of the last one that stays, and so take the comma before them along.
func (m *members) read(y *Body) error {
	if err := m.open(true); err != nil {
		return err
	}
	m.pos++ // the brace
	c, err := m.space()
	if err != nil {
		return m.malformed(err, "a key or a brace")
	}
	if c == '}' {
		m.pos++
		return nil
	}
	for {
		start := m.offset()
		if m.going { // its comma and the blanks before this one go too
			y.cut(span{m.first, start})
			if len(y.cuts) > maxCuts {
				return bad("its metadata fields stand at more than %d places", maxCuts)
			}
			m.first = start
		}
		do, err := m.name()
		if err != nil {
			return err
		}
		if err := m.take(do); err != nil {
			return err
		}
		switch {
		case do&takeOut == 0:
			m.lastKept, m.going = m.offset(), false
		case !m.going:
			m.first, m.going = start, true
		}
		end := m.offset()
		c, err := m.space()
		switch {
		case err != nil || c != ',' && c != '}':
			return m.malformed(err, "a comma or a brace")
		case c == '}':
			m.pos++
			if m.going {
				y.cutEnd(m.lastKept, m.first, end)
			}
			return nil
		}
		m.pos++
		if c, err = m.space(); err != nil || c != '"' {
			return m.malformed(err, "a key in quotes")
		}
	}
}

// cutEnd cuts out the last members, of which those before first are cut out already.
func (y *Body) cutEnd(lastKept, first, end int64) {
	if lastKept < 0 { // nothing stays, so no comma may: those before are one cut up to first
		y.cut(span{first, end})
		return
	}
	for len(y.cuts) > 0 && y.cuts[len(y.cuts)-1].from >= lastKept {
		y.cuts = y.cuts[:len(y.cuts)-1]
	}
	y.cut(span{lastKept, end})
}

// name reads a key and its colon; what is to be done with it, 0 if nothing.
func (m *members) name() (do int, _ error) {
	c, err := m.space()
	if err != nil || c != '"' {
		return 0, m.malformed(err, "a key in quotes")
	}
	m.capture()
	if err := m.string(); err != nil {
		return 0, err
	}
	if text, ok := m.text(); ok {
		do = m.plan.lookUp(text)
	}
	return do, m.byte(':')
}

// lookUp takes a key as it stands in the body, with its quotes.
func (p *Plan) lookUp(text []byte) int {
	inner := text[1 : len(text)-1]
	if !slices.Contains(inner, '\\') {
		return p.names[string(inner)]
	}
	name, _ := unquote(text)
	return p.names[name]
}

// take reads a value, and keeps it if its field is read.
func (m *members) take(do int) error {
	if do&(own|isField) == 0 {
		return m.value()
	}
	c, err := m.space()
	if err != nil {
		return m.malformed(err, "a value")
	}
	m.capture()
	if err := m.value(); err != nil {
		return err
	}
	text, ok := m.text()
	v := value{kind: c, long: !ok}
	if ok {
		v.text = string(text)
	}
	index := do & (isField - 1)
	if do&own != 0 {
		index += len(m.plan.fields)
	}
	m.values[index] = v
	return nil
}
