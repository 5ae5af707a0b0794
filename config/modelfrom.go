package config

import (
	"fmt"
	"strings"
)

// Values of ModelFrom.Source.
const (
	FromBody   = "body"
	FromQuery  = "query"
	FromHeader = "header"
	FromPath   = "path"
)

// ModelSources are the places where a request may name a model.
var ModelSources = []string{FromBody, FromQuery, FromHeader, FromPath}

// defaultModelField is the name of the field or parameter that names a model.
const defaultModelField = "model"

// ModelFrom is a place of a request where the name of a model may stand.
type ModelFrom struct {
	// `body`: a field of a JSON or multipart body; `query`, `header` or `path`.
	Source string `json:"source"`
	// The name of the field, parameter or header; for `path` a pattern in which `*` stands for the model's name, and each further `*` for one segment.
	// Default for body and query: `model`.
	Name string `json:"name,omitempty"`
}

// Field is Name or its default.
func (m ModelFrom) Field() string {
	if m.Name == "" && (m.Source == FromBody || m.Source == FromQuery) {
		return defaultModelField
	}
	return m.Name
}

// Check says what is wrong with m.
func (m ModelFrom) Check() error {
	if err := oneOf("place of a model's name", m.Source, ModelSources); err != nil {
		return err
	}
	name := m.Field()
	switch m.Source {
	case FromHeader:
		if name == "" || strings.ContainsAny(name, " :{}\t\r\n") {
			return fmt.Errorf("header %q: name a header, without blanks, colons or braces, as in model_from header X-Model", name)
		}
	case FromPath:
		return CheckPathPattern(name)
	}
	return nil
}

// CheckPathPattern says what is wrong with a pattern of the source `path`.
func CheckPathPattern(text string) error {
	before, after, found := strings.Cut(text, "*")
	switch {
	case !strings.HasPrefix(before, "/") || !found:
		return fmt.Errorf("path %q: it must begin with a slash and hold a *, which stands for the name, as in model_from path /models/*/generate", text)
	case strings.ContainsAny(text, "?#"):
		return fmt.Errorf("path %q: only the path is compared: leave out the query", text)
	}
	for i, part := range strings.Split(after, "/") {
		if strings.Contains(part, "*") && (i == 0 || part != "*") {
			return fmt.Errorf("path %q: the first * stands for the name, and each further one for a whole segment, as in /models/*/versions/*/infer", text)
		}
	}
	return nil
}
