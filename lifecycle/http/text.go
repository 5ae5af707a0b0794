package httplife

import (
	"encoding/json"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// textKind says how a value that is put into a text is escaped.
type textKind int

const (
	rawText  textKind = iota // not at all
	pathText                 // as a path segment, after ? as a query value
	formText                 // as a form value
	jsonText                 // as JSON, inside and outside of quotes
)

// text is a configured text whose {env.…} are replaced and whose {item}s wait.
type text []piece

type piece struct {
	literal string
	item    func(any) string // not nil: the piece is an item, written so
	name    string           // … of this name
}

// The items: values that are known only when a request is made.
const (
	listItem  = "{item}"  // one of a list that the server tells
	modelItem = "{model}" // the name of the model that is meant
)

// placeholder is deliberately narrower than Caddy's, to which every JSON
// object is a placeholder: a name, perhaps with a dot and more.
var placeholder = regexp.MustCompile(`\{[A-Za-z_][\w-]*(?:\.[^{}"\s]*)?\}`)

// text reads in, which may hold these items. What it can't read it
// reports as a fault of where. The values of placeholders become secrets.
func (c *compiler) text(where, in string, kind textKind, items ...string) text {
	var out text
	var scan scanner
	split(in, func(literal, key string) {
		out = append(out, piece{literal: literal})
		scan.read(literal)
		switch {
		case key == "":
		case slices.Contains(items, key):
			out = append(out, piece{item: scan.escaper(kind), name: key})
		case key == listItem:
			c.fault("%s has {item}, which is known only in the path and body of an unload route with for_each", where)
		case key == modelItem:
			c.fault("%s has {model}, which is known only in the path and body of load, unload and busy", where)
		default:
			value, err := c.values.Read(where, key)
			if err != nil {
				c.faults = append(c.faults, err)
				return
			}
			c.secret.addValue(value)
			if kind == jsonText && scan.quoted {
				value = jsonInside(value)
			}
			out = append(out, piece{literal: value})
		}
	})
	return out
}

func (t text) has(item string) bool {
	return slices.ContainsFunc(t, func(p piece) bool { return p.name == item })
}

func (t text) render(item any) string {
	var b strings.Builder
	for _, p := range t {
		if p.item != nil {
			b.WriteString(p.item(item))
		} else {
			b.WriteString(p.literal)
		}
	}
	return b.String()
}

// isJSON tells whether in is JSON once its placeholders are replaced.
func isJSON(in string) bool {
	var b strings.Builder
	split(in, func(literal, key string) {
		b.WriteString(literal)
		if key != "" {
			b.WriteString("0") // valid in and out of quotes
		}
	})
	return json.Valid([]byte(b.String()))
}

// split calls f for each literal text and the placeholder that follows it,
// which is empty after the last. A brace after a backslash is literal.
func split(in string, f func(literal, placeholder string)) {
	literal := ""
	for {
		at := placeholder.FindStringIndex(in)
		if at == nil {
			f(literal+in, "")
			return
		}
		if at[0] > 0 && in[at[0]-1] == '\\' {
			literal += in[:at[0]-1] + strings.Replace(in[at[0]:at[1]], `\}`, "}", 1)
			in = in[at[1]:]
			continue
		}
		f(literal+in[:at[0]], in[at[0]:at[1]])
		literal, in = "", in[at[1]:]
	}
}

// scanner knows, at the end of what it has read, whether it is inside quotes
// (of JSON) and whether it is behind a ? (of a path).
type scanner struct {
	quoted, escaped, query bool
}

func (s *scanner) read(literal string) {
	s.query = s.query || strings.Contains(literal, "?")
	for _, r := range literal {
		switch {
		case s.escaped:
			s.escaped = false
		case r == '\\' && s.quoted:
			s.escaped = true
		case r == '"':
			s.quoted = !s.quoted
		}
	}
}

// escaper is how an item is written at the place that the scanner has reached.
func (s *scanner) escaper(kind textKind) func(any) string {
	switch {
	case kind == jsonText && s.quoted:
		return func(v any) string { return jsonInside(plain(v)) }
	case kind == jsonText:
		return jsonValue
	case kind == formText || kind == pathText && s.query:
		return func(v any) string { return url.QueryEscape(plain(v)) }
	case kind == pathText:
		return func(v any) string { return url.PathEscape(plain(v)) }
	default:
		return plain
	}
}

func jsonValue(v any) string {
	out, err := json.Marshal(v)
	if err != nil {
		return "null" // can't be: v comes from JSON
	}
	return string(out)
}

// jsonInside is s as it is written between the quotes of a JSON string.
func jsonInside(s string) string {
	quoted := jsonValue(s)
	return quoted[1 : len(quoted)-1]
}

// plain is a JSON scalar as text.
func plain(v any) string {
	if s, ok := v.(string); ok {
		return s
	}
	return jsonValue(v)
}
