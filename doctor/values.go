package doctor

import (
	"bytes"
	"encoding/json"
	"regexp"
	"slices"
	"strings"
)

// maxValues bounds how many values of a placeholder are kept, and how many texts are made of one with placeholders.
const maxValues = 256

// value is what a handler sets a placeholder to.
type value struct {
	text string
	met  []*matcher // all requests for which it is set meet these
}

// remember keeps what a handler sets placeholders to, for the requests that come to it in these ways.
func (w *walker) remember(raw json.RawMessage, ways []passage) {
	if len(ways) == 0 {
		return
	}
	met := slices.Clone(ways[0].met)
	for _, p := range ways[1:] {
		met = slices.DeleteFunc(met, func(m *matcher) bool { return !slices.Contains(p.met, m) })
	}
	for name, texts := range settings(raw) {
		kept := slices.DeleteFunc(slices.Clone(w.vars[name]), func(v value) bool { return overwritten(v.met, met) })
		for _, text := range texts {
			if len(kept) < maxValues {
				kept = append(kept, value{text, met})
			}
		}
		w.vars[name] = kept
	}
}

// overwritten reports whether all requests for which a value is set get the later one, too. Of a group of routes they enter only one.
func overwritten(earlier, later []*matcher) bool {
	return !slices.ContainsFunc(later, func(m *matcher) bool { return m.sets == nil || !slices.Contains(earlier, m) })
}

// settings are the texts and numbers that a handler vars or map may set each placeholder to.
func settings(raw json.RawMessage) map[string][]string {
	read := func(into any) {
		d := json.NewDecoder(bytes.NewReader(raw))
		d.UseNumber()      // a port stays as it is written
		_ = d.Decode(into) // what can't be read sets nothing
	}
	out := map[string][]string{}
	add := func(name string, value any) {
		switch value := value.(type) {
		case string:
			out[name] = append(out[name], value)
		case json.Number:
			out[name] = append(out[name], value.String())
		}
	}
	var handler struct {
		Handler      string   `json:"handler"`
		Destinations []string `json:"destinations"`
		Defaults     []any    `json:"defaults"`
		Mappings     []struct {
			Outputs []any `json:"outputs"`
		} `json:"mappings"`
	}
	if read(&handler); handler.Handler != "map" {
		var vars map[string]any
		read(&vars)
		for name, value := range vars {
			add("{http.vars."+name+"}", value)
		}
		return out
	}
	rows := [][]any{handler.Defaults}
	for _, m := range handler.Mappings {
		rows = append(rows, m.Outputs)
	}
	for _, row := range rows {
		for i, value := range row[:min(len(row), len(handler.Destinations))] {
			add(handler.Destinations[i], value)
		}
	}
	return out
}

// placeholder is any of Caddy's.
var placeholder = regexp.MustCompile(`\{[^{}]+\}`)

// texts are what a text with placeholders may stand for, for requests that come in one of these ways.
func (w *walker) texts(text string, ways []passage) (out []string) {
	left := []string{text}
	for range maxValues {
		if len(left) == 0 {
			break
		}
		text = left[len(left)-1]
		left = left[:len(left)-1]
		found := placeholder.FindAllString(text, -1)
		i := slices.IndexFunc(found, func(name string) bool { return len(w.vars[name]) > 0 })
		if i < 0 {
			out = append(out, text)
			continue
		}
		for _, v := range w.vars[found[i]] {
			if !strings.Contains(v.text, found[i]) && slices.ContainsFunc(ways, v.reaches) {
				left = append(left, strings.ReplaceAll(text, found[i], v.text))
			}
		}
	}
	return out
}

// reaches reports whether the value may be set for requests that come this way.
func (v value) reaches(p passage) bool {
	return !slices.ContainsFunc(v.met, func(m *matcher) bool { return slices.Contains(p.unmet, m) })
}
