// Package presets holds what is known of kinds of model servers, as data: one
// JSON file a server, each a part of a consumer's configuration (fields as in
// config.Consumer) in which everything can be overridden, and beside that, under
// the key `about`, what people need to know. Users' own files have the same form.
package presets

import (
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

//go:embed *.json
var files embed.FS

const suffix = ".json"

// About is what people need to know of a kind of server. It has no effect.
type About struct {
	// What the server is called.
	Title string `json:"title"`
	// The port that it listens on if nothing else is said.
	Port int `json:"port,omitempty"`
	// What frees its GPU memory, in a sentence.
	Frees string `json:"frees,omitempty"`
	// What that costs: time until it is loaded again, host RAM.
	Costs string `json:"costs,omitempty"`
	// What is to be set at the server, or in its consumer's block.
	Set []string `json:"set,omitempty"`
	// What its unload does to work that runs: Waits, Refuses, Aborts or Breaks; empty if it has none.
	Unload string `json:"unload,omitempty"`
	// Only the end of its process frees the memory.
	NeedsProcess bool `json:"needs_process,omitempty"`
	// It has one model, of which it has to be told: model_name says which.
	NeedsName bool `json:"needs_name,omitempty"`
	// Whether it has several models that are loaded and unloaded by name: Each, Must; empty if not.
	Models string `json:"models,omitempty"`
	// The command that starts it, with Caddy's placeholders.
	Command string `json:"command,omitempty"`
	// Lines of the consumer's block that the user has to complete.
	Example []string `json:"example,omitempty"`
	// What else is to be known.
	Notes []string `json:"notes,omitempty"`
	// Of which version all this is known, and from where.
	Source string `json:"source,omitempty"`
}

// Values of About.Unload.
const (
	Waits   = "waits"   // for the work's end
	Refuses = "refuses" // does nothing while it works
	Aborts  = "aborts"  // ends the work
	Breaks  = "breaks"  // breaks the work, or the server
)

// Values of About.Models.
const (
	Each = "each" // they may be named, and then each is loaded and unloaded by itself
	Must = "must" // they must be named: it loads nothing by itself
)

// Preset is one of them.
type Preset struct {
	Name string
	// Consumer is a part of a consumer, with fields of config.Consumer.
	Consumer json.RawMessage
	About    About

	extends string // of a user's file: the preset that it is built upon
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

// Describe tells what is known of the preset of that name.
func Describe(name string) (About, bool) {
	p, err := builtIn(name)
	if p == nil || err != nil {
		return About{}, false
	}
	return p.About, true
}

// builtIn is the preset of that name; nil if there is none.
func builtIn(name string) (*Preset, error) {
	if !slices.Contains(Names(), name) {
		return nil, nil
	}
	data, err := files.ReadFile(name + suffix)
	if err != nil {
		return nil, err
	}
	return parse(name, data)
}

// parse takes a file apart.
func parse(name string, data []byte) (*Preset, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(data, &fields); err != nil {
		return nil, at(data, err)
	}
	if fields == nil {
		return nil, errors.New("it is null: write an object with fields of a consumer, such as gpu_routes and lifecycle")
	}
	p := &Preset{Name: name}
	for key, into := range map[string]any{"about": &p.About, "extends": &p.extends} {
		if raw, ok := fields[key]; ok {
			if err := strict(raw, into); err != nil {
				return nil, fmt.Errorf("%s: %w", key, err)
			}
			delete(fields, key)
		}
	}
	var err error
	p.Consumer, err = json.Marshal(fields)
	return p, err
}
