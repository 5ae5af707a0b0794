package routing

import (
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// Sources are the places where the requests of a route may say which model they want.
type Sources struct {
	list   []config.ModelFrom
	paths  []PathPattern // of the sources of kind path, in their order
	fields []string      // of those of kind body

	hasQuery bool // one of them is of kind query
}

// NewSources checks the places; its error holds all faults.
func NewSources(list []config.ModelFrom) (*Sources, error) {
	s := &Sources{}
	var faults []error
	for _, from := range list {
		from.Name = from.Field()
		switch {
		case from.Source == config.FromPath:
			p, err := ParsePathPattern(from.Name)
			if err != nil {
				faults = append(faults, err)
			}
			s.paths = append(s.paths, p)
		case from.Name == "":
			faults = append(faults, fmt.Errorf("model_from %s: say which %s, as in model_from header X-Model", from.Source, from.Source))
		case from.Source == config.FromBody:
			s.fields = append(s.fields, from.Name)
		case from.Source != config.FromQuery && from.Source != config.FromHeader:
			faults = append(faults, fmt.Errorf("model_from %q: one of %s is wanted", from.Source, strings.Join(config.ModelSources, ", ")))
		}
		s.hasQuery = s.hasQuery || from.Source == config.FromQuery
		s.list = append(s.list, from)
	}
	return s, errors.Join(faults...)
}

// Fields are the fields of bodies to look for, for NewPlan. None: no body need be read.
func (s *Sources) Fields() []string { return s.fields }

// Find is the name of the model that a request wants, from the first place
// that holds one; empty: none does. body is what Peek found; nil: the body was not read.
//
// Error: *BadBody for a name that is longer than MaxName, and for one that stands twice in its place, with different values.
func (s *Sources) Find(r *http.Request, body *Facts) (string, error) {
	var at cursor
	for i := range s.list {
		name, err := s.name(i, &at, r, body)
		if err != nil {
			return "", err
		}
		if len(name) > MaxName {
			return "", bad("the model's name in the %s is longer than %d bytes", s.list[i].Source, MaxName)
		}
		if name != "" {
			return name, nil
		}
	}
	return "", nil
}

// cursor is how far a walk over the places has come.
type cursor struct {
	path, field int
	inPath      bool // a pattern has matched: what a later one makes of the path is no name
}

// name is what the i-th place holds; empty: nothing. The places are asked in their order.
func (s *Sources) name(i int, at *cursor, r *http.Request, body *Facts) (name string, err error) {
	switch from := &s.list[i]; from.Source {
	case config.FromQuery:
		return inQuery(r.URL.RawQuery, from.Name)
	case config.FromHeader:
		return inHeader(r.Header, from.Name)
	case config.FromPath:
		if !at.inPath {
			name, at.inPath = s.paths[at.path].Match(r.URL.Path)
		}
		at.path++
	case config.FromBody:
		if body != nil {
			name = body.Names[at.field]
		}
		at.field++
		if name != "" && body.Form && r.URL.RawQuery != "" && !s.hasQuery {
			return name, notInQuery(r.URL.RawQuery, from.Name, name)
		}
	}
	return name, nil
}

// Other is another name than the one that Find has found, but for those that same reports to mean the same model; empty: there is
// none. Servers look for names in the path, the query and the body, not in headers. One in the path, which is a route of theirs, counts
// alone.
//
// Error: *BadBody for a query that names two.
func (s *Sources) Other(r *http.Request, body *Facts, found string, same func(name string) bool) (string, error) {
	if len(s.list) < 2 || s.InPath(r) == found {
		return "", nil
	}
	var at cursor
	for i := range s.list {
		if s.list[i].Source == config.FromHeader {
			continue
		}
		name, err := s.name(i, &at, r, body)
		if err != nil || name != "" && name != found && !same(name) {
			return name, err
		}
	}
	return "", nil
}

// InPath is the name that the path holds; empty: none.
func (s *Sources) InPath(r *http.Request) string {
	for _, p := range s.paths {
		if name, ok := p.Match(r.URL.Path); ok {
			return name
		}
	}
	return ""
}

// inHeader is the value of a header; a second one must be the same.
func inHeader(h http.Header, name string) (string, error) {
	values := h.Values(name)
	if len(values) == 0 {
		return "", nil
	}
	if slices.ContainsFunc(values, func(v string) bool { return v != values[0] }) {
		return "", twice("header", name)
	}
	return values[0], nil
}

// inQuery is the value of a parameter; a second one must be the same.
func inQuery(query, name string) (value string, err error) {
	found := false
	for pair := range pairsOf(query) {
		i, text, err := field([]string{name}, query[pair.key:pair.equals], query[pair.from:pair.to], false)
		switch {
		case err != nil:
			return "", err
		case i < 0:
		case found && text != value:
			return "", twice("parameter", name)
		default:
			value, found = text, true
		}
	}
	return value, nil
}

// notInQuery refuses a parameter of the name of a form's field with another value: some servers look for fields of forms in
// the query first.
func notInQuery(query, name, value string) error {
	for pair := range pairsOf(query) {
		i, text, err := field([]string{name}, query[pair.key:pair.equals], query[pair.from:pair.to], false)
		if err != nil {
			return err
		}
		if i >= 0 && text != value {
			return bad("the query and the form both hold %q, which names the model, with different values: leave one of them out", name)
		}
	}
	return nil
}

// pair is where a parameter stands in a query.
type pair struct{ key, equals, from, to int }

// pairsOf goes over the parameters of a query.
func pairsOf(query string) iter.Seq[pair] {
	return func(yield func(pair) bool) {
		for at := 0; at < len(query); {
			end := at + strings.IndexByte(query[at:]+"&", '&')
			p := pair{at, end, end, end}
			if equals := strings.IndexByte(query[at:end], '='); equals >= 0 {
				p.equals, p.from = at+equals, at+equals+1
			}
			if !yield(p) {
				return
			}
			at = end + 1
		}
	}
}

// Rename puts name into every place other than the body that names a model: Body.Change is for that. Where the path holds was, the
// name that the client's model was found by, it counts alone, and other names stay.
func (s *Sources) Rename(r *http.Request, was, name string) {
	held := s.InPath(r)
	named := func(value string) bool { return value != "" && (held != was || value == was) }
	for i := range s.list {
		switch from := &s.list[i]; from.Source {
		case config.FromQuery:
			renameQuery(r, from.Name, name, named)
		case config.FromHeader:
			if slices.ContainsFunc(r.Header.Values(from.Name), named) {
				r.Header.Set(from.Name, name)
			}
		}
	}
	for _, p := range s.paths {
		if _, ok := p.Match(r.URL.Path); ok {
			p.rename(r, name)
			return
		}
	}
}

func renameQuery(r *http.Request, field, name string, named func(value string) bool) {
	query := r.URL.RawQuery
	var b strings.Builder
	at := 0
	for p := range pairsOf(query) {
		key, err := url.QueryUnescape(query[p.key:p.equals])
		value, valueErr := url.QueryUnescape(query[p.from:p.to])
		if err == nil && valueErr == nil && key == field && value != name && named(value) {
			b.WriteString(query[at:p.from])
			b.WriteString(url.QueryEscape(name))
			at = p.to
		}
	}
	if at > 0 {
		r.URL.RawQuery = b.String() + query[at:]
		r.RequestURI = r.URL.RequestURI()
	}
}

// String names the places, for people.
func (s *Sources) String() string {
	var places []string
	for _, from := range s.list {
		switch from.Source {
		case config.FromBody:
			places = append(places, fmt.Sprintf("the field %q of the body", from.Name))
		case config.FromQuery:
			places = append(places, fmt.Sprintf("the parameter %q of the query", from.Name))
		case config.FromHeader:
			places = append(places, "the header "+from.Name)
		case config.FromPath:
			places = append(places, "the path, as in "+from.Name)
		}
	}
	return strings.Join(places, ", or in ")
}

// PathPattern is a path in which the first `*` stands for a name and each further one for one segment, such as `/models/*/versions/*/infer`.
type PathPattern struct {
	before string
	after  []string // what follows the name, without its `*`
}

// ParsePathPattern reads a pattern.
func ParsePathPattern(text string) (PathPattern, error) {
	if err := config.CheckPathPattern(text); err != nil {
		return PathPattern{}, fmt.Errorf("model_from %w", err)
	}
	before, after, _ := strings.Cut(text, "*")
	return PathPattern{before, strings.Split(after, "*")}, nil
}

// Match finds the name in a path, as it is when decoded (url.URL.Path). The name may hold slashes, as in org/model.
func (p PathPattern) Match(path string) (name string, ok bool) {
	name, ok = strings.CutPrefix(path, p.before)
	for i := len(p.after) - 1; i >= 0 && ok; i-- {
		if name, ok = strings.CutSuffix(name, p.after[i]); i > 0 && ok {
			segment := strings.LastIndexByte(name, '/') + 1
			name, ok = name[:segment], segment < len(name)
		}
	}
	if !ok || name == "" {
		return "", false
	}
	return name, true
}

// rename puts another name into a path that p matches. What is before and after it stays as it is escaped. Slashes of the name
// are escaped if those of the old one are.
func (p PathPattern) rename(r *http.Request, name string) {
	held, _ := p.Match(r.URL.Path)
	if held == name {
		return
	}
	escaped := r.URL.EscapedPath()
	end := len(p.before) + len(held)
	from, to := escapedIndex(escaped, len(p.before)), escapedIndex(escaped, end)
	text := url.PathEscape(name)
	if !strings.Contains(strings.ToLower(escaped[from:to]), "%2f") {
		text = strings.ReplaceAll(text, "%2F", "/")
	}
	r.URL.Path = p.before + name + r.URL.Path[end:]
	r.URL.RawPath = escaped[:from] + text + escaped[to:]
	r.RequestURI = r.URL.RequestURI()
}

// escapedIndex is where in an escaped path its decoded byte n stands.
func escapedIndex(escaped string, n int) int {
	at := 0
	for ; n > 0; n-- {
		if escaped[at] == '%' {
			at += 2
		}
		at++
	}
	return at
}
