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
	// The name of the field, parameter or header; for `path` a pattern in which `*` stands for the model's name.
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
		if !strings.HasPrefix(name, "/") || strings.Count(name, "*") != 1 || strings.ContainsAny(name, "?#") {
			return fmt.Errorf("path %q: it must begin with a slash and hold one *, which stands for the name, and no query, as in model_from path /models/*/generate", name)
		}
	}
	return nil
}
