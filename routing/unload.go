package routing

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// MaxUnloadBody is the size of the largest body that can ask for an unload, in bytes.
const MaxUnloadBody = 4 << 10

// Unload is what a body says that may ask the server for an unload.
type Unload struct {
	Model string // as it is named there; empty: it is not
	Only  bool   // it asks for nothing else
}

// Unloads reads a body as an unload request of the form u; ok is false if it does not ask for an unload. Keys count
// in any case, since some servers take them so. y may be nil: the body was not read.
func (y *Body) Unloads(u config.UnloadRequest) (_ Unload, ok bool) {
	if y != nil && y.decoded != nil {
		y = y.decoded
	}
	if u.Frees() {
		return y.frees(u.True)
	}
	return y.computes(u)
}

// frees is Unloads for a route that only frees memory: it asks for an unload unless it is a JSON object in which none of these fields is true.
// No field is named: it always does.
func (y *Body) frees(names []string) (out Unload, ok bool) {
	out.Only = true
	var fields map[string]json.RawMessage
	if y == nil || y.file != nil || len(y.memory) > MaxUnloadBody || json.Unmarshal(y.memory, &fields) != nil {
		return out, true
	}
	ok = len(names) == 0
	for key, value := range fields {
		if strings.EqualFold(key, "model") {
			_ = json.Unmarshal(value, &out.Model)
		}
		ok = ok || !isFalse(value) && slices.ContainsFunc(names, func(name string) bool { return strings.EqualFold(name, key) })
	}
	if !ok {
		return Unload{}, false
	}
	return out, true
}

// computes is Unloads for a route that computes. Where a field must be zero, a body that does not ask for an unload is told without being
// decoded, as a rule.
func (y *Body) computes(u config.UnloadRequest) (_ Unload, ok bool) {
	if y == nil || y.file != nil || len(y.memory) > MaxUnloadBody || u.Zero != "" && !mayBeZero(y.memory, u.Zero) {
		return Unload{}, false
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(y.memory, &fields) != nil {
		return Unload{}, false
	}
	out := Unload{Only: true}
	asked := false
	for key, value := range fields {
		switch {
		case u.Zero != "" && strings.EqualFold(key, u.Zero):
			if !isZero(value) {
				return Unload{}, false
			}
			asked = true
		case slices.ContainsFunc(u.Empty, func(field string) bool { return strings.EqualFold(field, key) }):
			out.Only = out.Only && isEmpty(value)
		case strings.EqualFold(key, "model"):
			_ = json.Unmarshal(value, &out.Model) // one that is no text names none
		}
	}
	if !asked && (u.Zero != "" || !out.Only) {
		return Unload{}, false
	}
	return out, true
}

// mayBeZero reports whether a field of this name seems to be followed by something that begins as a zero does. It does not allocate.
func mayBeZero(body []byte, field string) bool {
	if escapesLetters(body) {
		return true
	}
	for {
		at := indexFold(body, field)
		if at < 0 {
			return false
		}
		body = body[at+len(field):]
		value := bytes.TrimLeft(body, "\": \t\r\n")
		if len(value) > 0 && strings.IndexByte("0+-.", value[0]) >= 0 {
			return true
		}
	}
}

// escapesLetters reports whether a body writes an ASCII letter, or an underscore, as \u00XX: only then can a key be there that
// does not stand there as it is. No usual encoder does so.
func escapesLetters(body []byte) bool {
	for {
		at := bytes.Index(body, []byte(`\u00`))
		if at < 0 || at+4 >= len(body) {
			return false
		}
		if body = body[at+4:]; '4' <= body[0] && body[0] <= '7' {
			return true
		}
	}
}

// indexFold is the place of the first text in body that is field, in any case; -1: there is none.
func indexFold(body []byte, field string) int {
	for i := 0; i+len(field) <= len(body); i++ {
		if body[i]|0x20 == field[0]|0x20 && bytes.EqualFold(body[i:i+len(field)], []byte(field)) {
			return i
		}
	}
	return -1
}

// isZero reports whether a value is the number 0 or a text that is a duration of 0. Less than a nanosecond is 0, as it is to Go's servers.
func isZero(value json.RawMessage) bool {
	var seconds float64
	if string(value) != "null" && json.Unmarshal(value, &seconds) == nil {
		return seconds > -1e-9 && seconds < 1e-9
	}
	var text string
	if string(value) == "null" || json.Unmarshal(value, &text) != nil {
		return false
	}
	d, err := time.ParseDuration(text)
	return err == nil && d == 0
}

// isFalse reports whether a value is false, null, the number 0, or an empty text, list or object.
func isFalse(value json.RawMessage) bool {
	var number float64
	return isEmpty(value) || string(value) == "false" || json.Unmarshal(value, &number) == nil && number == 0
}

// isEmpty reports whether a value is null, an empty text, list or object. A text of blanks is not empty: servers compute with it.
func isEmpty(value json.RawMessage) bool {
	value = bytes.TrimSpace(value)
	switch string(value) {
	case "null", `""`:
		return true
	}
	return len(value) > 1 && (value[0] == '[' || value[0] == '{') && len(bytes.TrimSpace(value[1:len(value)-1])) == 0
}
