package routing

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// Sources are the places where the requests of a route may say which model they want.
type Sources struct {
	list   []config.ModelFrom
	paths  []PathPattern // of the sources of kind path, in their order
	fields []string      // of those of kind body
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
		s.list = append(s.list, from)
	}
	return s, errors.Join(faults...)
}

// Fields are the fields of bodies to look for, for NewPlan. None: no body need be read.
func (s *Sources) Fields() []string { return s.fields }

// Find is the name of the model that a request wants, from the first place
// that holds one; empty: none does. inBody are the names that Peek found, in the order of Fields; nil: the body was not read.
//
// Error: *BadBody for a name that is longer than MaxName.
func (s *Sources) Find(r *http.Request, inBody []string) (string, error) {
	path, body := 0, 0
	for _, from := range s.list {
		var name string
		switch from.Source {
		case config.FromQuery:
			name = r.URL.Query().Get(from.Name)
		case config.FromHeader:
			name = r.Header.Get(from.Name)
		case config.FromPath:
			name, _ = s.paths[path].Match(r.URL.Path)
			path++
		case config.FromBody:
			if body < len(inBody) {
				name = inBody[body]
			}
			body++
		}
		if len(name) > MaxName {
			return "", bad("the model's name in the %s is longer than %d bytes", from.Source, MaxName)
		}
		if name != "" {
			return name, nil
		}
	}
	return "", nil
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

// PathPattern is a path in which one `*` stands for a name, such as `/models/*/infer`.
type PathPattern struct{ before, after string }

// ParsePathPattern reads a pattern.
func ParsePathPattern(text string) (PathPattern, error) {
	before, after, found := strings.Cut(text, "*")
	switch {
	case !strings.HasPrefix(text, "/"):
		return PathPattern{}, fmt.Errorf("model_from path %q: the pattern must begin with a slash, as in /models/*/infer", text)
	case !found || strings.Contains(after, "*"):
		return PathPattern{}, fmt.Errorf("model_from path %q: one * must stand for the name, as in /models/*/infer", text)
	case strings.ContainsAny(text, "?#"):
		return PathPattern{}, fmt.Errorf("model_from path %q: only the path is compared: leave out the query", text)
	}
	return PathPattern{before, after}, nil
}

// Match finds the name in a path, as it is when decoded (url.URL.Path). The name may hold slashes, as in org/model.
func (p PathPattern) Match(path string) (name string, ok bool) {
	rest, ok := strings.CutPrefix(path, p.before)
	if !ok {
		return "", false
	}
	if name, ok = strings.CutSuffix(rest, p.after); !ok || name == "" {
		return "", false
	}
	return name, true
}
