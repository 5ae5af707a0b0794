package routing

import (
	"encoding/json"
	"net/url"
	"slices"
	"strings"
)

// Change is what a server's configuration changes in the bodies of its requests.
type Change struct {
	Set     []Field  // top-level fields of JSON that get this value, whatever the client sent
	Default []Field  // … that get it if the client sent none, or null
	Instead []Field  // … that get it if the client sent one
	Strip   []string // … that are taken out
	Missing string   // the name of a model that comes into the plan's first field where a JSON object or a form names none
	// FoldKeys: the server takes a field in any case, so Set, Default and Strip mean it in any case.
	FoldKeys bool
}

// Field is a field of a JSON object.
type Field struct {
	Name  string
	Value string // as JSON
}

// WithName returns a Change as c with a name for bodies that hold none. c may be nil.
func (c *Change) WithName(name string) *Change {
	var out Change
	if c != nil {
		out = *c
	}
	out.Missing = name
	return &out
}

// WithInstead returns a Change as c that replaces the values of these fields, too. c may be nil.
func (c *Change) WithInstead(fields []Field, foldKeys bool) *Change {
	out := Change{FoldKeys: foldKeys}
	if c != nil {
		out = *c
	}
	out.Instead = fields
	return &out
}

// Fields are the names of all fields that c changes, for NewPlan.
func (c *Change) Fields() []string {
	var names []string
	for _, f := range slices.Concat(c.Set, c.Default, c.Instead) {
		names = append(names, f.Name)
	}
	return append(names, c.Strip...)
}

// encoding of a body in which something was found.
type encoding byte

const (
	asJSON encoding = iota + 1
	asMultipart
	asForm
)

// seen is what Peek found in a body that may be changed.
type seen struct {
	as     encoding
	places []place  // in order
	few    [4]place // the memory of places, as long as there are few

	// Of the object at the top of JSON.
	inside int64 // just past its brace; 0: there is no such object
	last   int64 // the end of its last member; 0: it has none

	// Of multipart with a part.
	boundary, newline string
	first             int64 // where the first boundary's line begins
}

// bare is the kind of a form's field without an equals sign.
const bare = '='

// place is where a value stands.
type place struct {
	do       int   // what the plan says of the field
	folded   bool  // its key is the plan's in another case
	kind     byte  // of JSON: the first character of the value; of a form: bare, or nothing
	from, to int64 // the value

	// Of a JSON member.
	start int64 // its key
	prev  int64 // where the member before it ends; 0: it is the first
	next  int64 // where the member after it starts; 0: it is the last
}

// Change changes the body from what it was when Peek was done with it: name, unless it is
// empty, takes the place of every name of a model that p found, and c, unless it is nil, changes fields of
// JSON. p's metadata fields go in any case. Every other byte stays. A second call replaces the first.
func (y *Body) Change(p *Plan, name string, c *Change) {
	if y.decoded != nil {
		y.decoded.Change(p, name, c)
		return
	}
	y.edits = y.edits[:0]
	missing := ""
	if c != nil {
		missing = c.Missing
	}
	switch y.seen.as {
	case asJSON:
		if y.seen.inside > 0 {
			y.changeJSON(p, name, c)
		}
	case asForm:
		y.changeForm(url.QueryEscape(name), url.QueryEscape(missing))
		if missing != "" && len(y.seen.places) == 0 {
			y.edits = append(y.edits, edit{text: url.QueryEscape(p.fields[0]) + "=" + url.QueryEscape(missing) + "&"})
		}
	case asMultipart:
		y.changeForm(name, missing)
		if nl := y.seen.newline; missing != "" && len(y.seen.places) == 0 && nl != "" {
			y.edits = append(y.edits, edit{y.seen.first, y.seen.first,
				"--" + y.seen.boundary + nl + `Content-Disposition: form-data; name="` + partName.Replace(p.fields[0]) + `"` + nl + nl + missing + nl})
		}
	}
}

// partName escapes the name of a part as browsers do.
var partName = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

// changeForm makes the edits of a form's fields: name takes the place of names, and missing that of empty ones. Empty: they stay.
func (y *Body) changeForm(name, missing string) {
	for i := range y.seen.places {
		at, text := &y.seen.places[i], name
		if at.to == at.from {
			text = missing
		}
		if text != "" && at.kind == bare {
			text = "=" + text
		}
		if text != "" {
			y.edits = append(y.edits, edit{at.from, at.to, text})
		}
	}
}

// changeJSON makes the edits of a JSON object.
//
// A member that goes takes the comma and the blanks after it along, so that the
// next one stands in its place; members at the end go from the end of the last one that stays, and so take the
// comma before them along. A member that comes is added at the end.
func (y *Body) changeJSON(p *Plan, name string, c *Change) {
	places := y.seen.places
	name = quoted(name)
	empty := y.seen.last == 0
	for i := 0; i < len(places); i++ {
		first := &places[i]
		if !p.goes(first, c) {
			if text := p.becomes(first, name, c); text != "" {
				y.edits = append(y.edits, edit{first.from, first.to, text})
			}
			continue
		}
		last := first
		for i+1 < len(places) && places[i+1].start == last.next && p.goes(&places[i+1], c) {
			i++
			last = &places[i]
		}
		switch {
		case last.next > 0:
			y.edits = append(y.edits, edit{from: first.start, to: last.next})
		case first.prev > 0:
			y.edits = append(y.edits, edit{from: first.prev, to: last.to})
		default: // none stays
			y.edits = append(y.edits, edit{from: first.start, to: last.to})
			empty = true
		}
	}
	more := p.added(places, c)
	if more == "" {
		return
	}
	if empty {
		more = more[1:]
	}
	if n := len(y.edits); n > 0 && y.edits[n-1].to == y.seen.last {
		y.edits[n-1].text += more
		return
	}
	end := max(y.seen.last, y.seen.inside)
	y.edits = append(y.edits, edit{end, end, more})
}

// mark is the name of the field at a place that a Change may mean; empty: none does. The name of a model is no such field.
func (p *Plan) mark(at *place, c *Change) string {
	if c == nil || at.do&marked == 0 || at.do&isField != 0 || at.folded && !c.FoldKeys {
		return ""
	}
	return p.marks[at.do>>markShift]
}

// isFirst reports whether a place is the plan's first field that names a model.
func isFirst(at *place) bool { return at.do&isField != 0 && at.do&(isField-1) == 0 && !at.folded }

// goes reports whether a member is taken out.
func (p *Plan) goes(at *place, c *Change) bool {
	if at.do&takeOut != 0 && !at.folded {
		return true
	}
	mark := p.mark(at, c)
	return mark != "" && slices.Contains(c.Strip, mark)
}

// becomes is the text that takes the place of a value; empty: it stays.
func (p *Plan) becomes(at *place, name string, c *Change) string {
	if at.do&isField != 0 {
		switch {
		case at.kind == 'n', at.kind == '"' && at.to-at.from == int64(len(`""`)):
			if c != nil && isFirst(at) {
				return quoted(c.Missing)
			}
			return ""
		case at.kind == '"':
			return name
		}
		return ""
	}
	mark := p.mark(at, c)
	if mark == "" {
		return ""
	}
	if text := valueOf(c.Set, mark); text != "" {
		return text
	}
	if text := valueOf(c.Instead, mark); text != "" {
		return text
	}
	if at.kind == 'n' {
		return valueOf(c.Default, mark)
	}
	return ""
}

// added is the text of the members that come, each after a comma.
func (p *Plan) added(places []place, c *Change) string {
	if c == nil {
		return ""
	}
	var text strings.Builder
	if c.Missing != "" && !slices.ContainsFunc(places, func(at place) bool { return isFirst(&at) }) {
		text.WriteString("," + quoted(p.fields[0]) + ":" + quoted(c.Missing))
	}
	for _, list := range [][]Field{c.Set, c.Default} {
		for _, f := range list {
			if p.names[f.Name]&isField == 0 && !slices.ContainsFunc(places, func(at place) bool { return p.mark(&at, c) == f.Name }) {
				text.WriteString("," + quoted(f.Name) + ":" + f.Value)
			}
		}
	}
	return text.String()
}

func valueOf(fields []Field, name string) string {
	for _, f := range fields {
		if f.Name == name {
			return f.Value
		}
	}
	return ""
}

// quoted writes a JSON string; an empty one stays empty.
func quoted(text string) string {
	if text == "" {
		return ""
	}
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(text) // a string can be encoded
	return strings.TrimSuffix(b.String(), "\n")
}
