package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"
)

// SendClient is the value of send_as with which a server gets the name as the client wrote it.
const SendClient = "client"

// maxField is the greatest length of a field that a model changes, in bytes.
const maxField = 256

// CheckSendAs returns an error if a server can't be sent this name.
func CheckSendAs(name string) error {
	if _, pattern := ParseNamePattern(name); pattern {
		return fmt.Errorf("send_as or as: %q stands for many names: write the one that the server knows", name)
	}
	if err := CheckAlias(name); err != nil {
		return fmt.Errorf("send_as or as: %w", err)
	}
	return nil
}

// CheckChangedField returns an error if the field can't be changed in request bodies.
func CheckChangedField(name string) error {
	switch {
	case name == "":
		return errors.New("the field has no name")
	case len(name) > maxField:
		return fmt.Errorf("the field's name has %d bytes: at most %d are allowed", len(name), maxField)
	case !utf8.ValidString(name):
		return fmt.Errorf("field %q: its name is not UTF-8", name)
	}
	return nil
}

// checkSent checks what the server of a model gets instead of what its clients send.
func (f *faults) checkSent(at string, c *Consumer, m *Model) {
	if m.SendAs != "" {
		if err := CheckSendAs(m.SendAs); err != nil {
			f.add(at, "%w", err)
		}
	}
	words := map[string][]string{} // by field, as the server tells them apart
	note := func(word, field string, value json.RawMessage) {
		if err := CheckChangedField(field); err != nil {
			f.add(at, "%s: %w", word, err)
		}
		if value != nil && !json.Valid(value) {
			f.add(at, "%s %s: its value is not JSON", word, field)
		}
		if c.namesModelIn(field) {
			f.add(at, "%s %s: that field names the model: write send_as NAME instead", word, field)
		}
		if c.FoldKeys {
			field = strings.ToLower(field)
		}
		words[field] = append(words[field], word)
	}
	for _, field := range slices.Sorted(maps.Keys(m.Set)) {
		note("set", field, m.Set[field])
	}
	for _, field := range slices.Sorted(maps.Keys(m.Default)) {
		note("default", field, m.Default[field])
	}
	for _, field := range m.Strip {
		note("strip", field, nil)
	}
	for _, field := range slices.Sorted(maps.Keys(words)) {
		if len(words[field]) > 1 {
			f.add(at, "%s: the field %q is given twice: leave all but one of them out", strings.Join(words[field], " and "), field)
		}
	}
}

// namesModelIn reports whether a JSON field names the model in the requests of c.
func (c *Consumer) namesModelIn(field string) bool {
	from := c.ModelFrom
	if len(from) == 0 {
		from = []ModelFrom{{Source: FromBody}}
	}
	return slices.ContainsFunc(from, func(m ModelFrom) bool {
		return m.Source == FromBody && (m.Field() == field || c.FoldKeys && strings.EqualFold(m.Field(), field))
	})
}

// CheckFallbackAs returns an error if a name is given for a consumer that is no fallback, or can't be sent.
func CheckFallbackAs(as map[string]string, fallback []string) error {
	var all []error
	for _, to := range slices.Sorted(maps.Keys(as)) {
		if !slices.Contains(fallback, to) {
			all = append(all, fmt.Errorf("fallback_as names %s, which is not among its fallbacks: add it to fallback, or leave it out", to))
		}
		if err := CheckSendAs(as[to]); err != nil {
			all = append(all, fmt.Errorf("fallback %s: %w", to, err))
		}
	}
	return errors.Join(all...)
}

// checkPinnedSet checks the fields that get a value at a pinned model.
func (f *faults) checkPinnedSet(at string, c *Consumer) {
	for _, field := range slices.Sorted(maps.Keys(c.PinnedSet)) {
		if err := CheckChangedField(field); err != nil {
			f.add(at, "pinned_set: %w", err)
		}
		if !json.Valid(c.PinnedSet[field]) {
			f.add(at, "pinned_set %s: its value is not JSON", field)
		}
		if c.namesModelIn(field) {
			f.add(at, "pinned_set %s: that field names the model", field)
		}
	}
}
