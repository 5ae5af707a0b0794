package routing

import (
	"encoding/json"
	"slices"
)

// MaxServerList is the most that is read of a server's list of models to change it, in bytes.
const MaxServerList = 4 << 20

// listNames are the fields by which a list of models names one, in OpenAI's form and in Ollama's.
var listNames = []string{"id", "name", "model"}

// AmendList changes a server's own list of models, in OpenAI's or Ollama's form, to what a route serves. shown reports whether the route
// shows a model of this name; aliases are the further names by which it shows that model, each as an entry like the model's own. It returns
// body itself if there is nothing to change, or if that is no such list. An entry that stays has the same JSON value.
func AmendList(body []byte, shown func(name string) bool, aliases func(name string) []string) []byte {
	var doc map[string]json.RawMessage
	if json.Unmarshal(body, &doc) != nil {
		return body
	}
	changed := false
	for _, field := range []string{"data", "models"} {
		var entries []json.RawMessage
		if doc[field] == nil || json.Unmarshal(doc[field], &entries) != nil {
			continue
		}
		if amended, ok := amend(entries, shown, aliases); ok {
			doc[field], changed = encode(amended), true
		}
	}
	if !changed {
		return body
	}
	return encode(doc)
}

// amend is AmendList for the entries of a list. It reports whether they change.
func amend(entries []json.RawMessage, shown func(string) bool, aliases func(string) []string) (out []json.RawMessage, changed bool) {
	out = []json.RawMessage{} // no list is null
	var listed []string
	for _, entry := range entries {
		listed = append(listed, entryName(entry))
	}
	for i, entry := range entries {
		name := listed[i]
		if name != "" && !shown(name) {
			changed = true
			continue
		}
		out = append(out, entry)
		if name == "" {
			continue
		}
		for _, alias := range aliases(name) {
			if !slices.Contains(listed, alias) {
				out, changed = append(out, renamedEntry(entry, name, alias)), true
				listed = append(listed, alias)
			}
		}
	}
	return out, changed
}

// entryName is the name of the model of an entry; empty: it has none.
func entryName(entry json.RawMessage) string {
	var fields map[string]json.RawMessage
	if json.Unmarshal(entry, &fields) != nil {
		return ""
	}
	for _, field := range listNames {
		var name string
		if json.Unmarshal(fields[field], &name) == nil && name != "" {
			return name
		}
	}
	return ""
}

// renamedEntry is a copy of an entry under another name.
func renamedEntry(entry json.RawMessage, was, name string) json.RawMessage {
	var fields map[string]json.RawMessage
	_ = json.Unmarshal(entry, &fields) // it has a name, so it can be read
	for _, field := range listNames {
		var text string
		if json.Unmarshal(fields[field], &text) == nil && text == was {
			fields[field] = json.RawMessage(quoted(name))
		}
	}
	return encode(fields)
}
