// Package presets holds what is known of kinds of model servers, as data: one
// JSON file a server, each a part of a consumer's configuration (fields as in
// config.Consumer) in which everything can be overridden.
package presets

import (
	"embed"
	"encoding/json"
	"slices"
	"strings"
)

//go:embed *.json
var files embed.FS

const suffix = ".json"

// Get returns the preset of that name. The caller may change what it gets.
func Get(name string) (json.RawMessage, bool) {
	if !slices.Contains(Names(), name) {
		return nil, false
	}
	data, err := files.ReadFile(name + suffix)
	if err != nil {
		return nil, false
	}
	return data, true
}

// Names returns the names of all presets, sorted.
func Names() []string {
	entries, err := files.ReadDir(".")
	if err != nil {
		return nil // an embedded root can always be read
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), suffix))
	}
	slices.Sort(names)
	return names
}
