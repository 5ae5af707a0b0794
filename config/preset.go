package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
)

// Presets looks a preset up: its JSON, an object with fields of a Consumer. It
// is nil if there is none of that name; then known lists all names.
type Presets func(name string) (preset json.RawMessage, known []string, err error)

// withPreset is c with the preset that it names laid under it.
func (c *Consumer) withPreset(presets Presets) (*Consumer, error) {
	if c.Preset == "" {
		return c, nil
	}
	var preset json.RawMessage
	var known []string
	var err error
	if presets != nil {
		preset, known, err = presets(c.Preset)
	}
	if err != nil {
		return c, faultlines.Prefix("preset "+c.Preset, err)
	}
	if preset == nil {
		return c, Unknown("preset", c.Preset, known)
	}
	own, err := json.Marshal(c)
	if err != nil {
		return c, err
	}
	both, err := Merge(preset, own)
	if err != nil {
		return c, fmt.Errorf("preset %s: %w", c.Preset, err)
	}
	merged := new(Consumer)
	if err := json.Unmarshal(both, merged); err != nil {
		return c, fmt.Errorf("preset %s: %w", c.Preset, err)
	}
	return merged, nil
}

// Merge lays over upon under: objects are merged key by key, anything else in
// over, null included, replaces what is under it. Two lifecycles of different
// protocols and two routes of different paths have nothing in common: there over replaces all.
func Merge(under, over json.RawMessage) (json.RawMessage, error) {
	if !isObject(under) || !isObject(over) {
		return over, nil
	}
	var u, o map[string]json.RawMessage
	if err := json.Unmarshal(under, &u); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(over, &o); err != nil {
		return nil, err
	}
	switch below := text(u["protocol"], DefaultProtocol); below {
	case text(o["protocol"], DefaultProtocol):
	case DefaultProtocol: // what starts a server speaks to it as the preset does
		return withServer(u, o)
	default:
		return over, nil
	}
	if text(u["path"], "") != text(o["path"], text(u["path"], "")) {
		return over, nil
	}
	for _, key := range sortedKeys(o) {
		if _, both := u[key]; !both {
			u[key] = o[key]
			continue
		}
		merged, err := Merge(u[key], o[key])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		u[key] = merged
	}
	return json.Marshal(u)
}

// WithServer lays the routes of a lifecycle of the protocol http under one of another protocol, which starts the server.
func WithServer(lifecycle, routes json.RawMessage) (json.RawMessage, error) {
	var r, o map[string]json.RawMessage
	if err := errors.Join(json.Unmarshal(routes, &r), json.Unmarshal(lifecycle, &o)); err != nil {
		return nil, err
	}
	return withServer(r, o)
}

// withServer lays the routes of the protocol http under the key server of a lifecycle of another protocol.
func withServer(routes, other map[string]json.RawMessage) (json.RawMessage, error) {
	server, err := json.Marshal(routes)
	if err != nil {
		return nil, err
	}
	if own, given := other["server"]; given {
		if server, err = Merge(server, own); err != nil {
			return nil, fmt.Errorf("server: %w", err)
		}
	}
	other["server"] = server
	return json.Marshal(other)
}

// withProtocol is a lifecycle's JSON with the default protocol, if it names none.
func withProtocol(raw json.RawMessage) (json.RawMessage, string, error) {
	fields := map[string]json.RawMessage{}
	if len(raw) > 0 {
		if !isObject(raw) {
			return raw, "", errors.New("it must be a JSON object with the key protocol")
		}
		if err := json.Unmarshal(raw, &fields); err != nil {
			return raw, "", err
		}
	}
	if name, ok := fields["protocol"]; ok {
		var protocol string
		if err := json.Unmarshal(name, &protocol); err != nil {
			return raw, "", fmt.Errorf("protocol must be a string: %w", err)
		}
		return raw, protocol, nil
	}
	fields["protocol"] = json.RawMessage(`"` + DefaultProtocol + `"`)
	out, err := json.Marshal(fields)
	return out, DefaultProtocol, err
}

// isBareLifecycle reports whether a lifecycle's JSON says nothing beyond the default protocol.
func isBareLifecycle(raw json.RawMessage) bool {
	both, protocol, err := withProtocol(raw)
	if err != nil || protocol != DefaultProtocol {
		return false
	}
	var fields map[string]json.RawMessage
	return json.Unmarshal(both, &fields) == nil && len(fields) == 1
}

func isObject(raw json.RawMessage) bool {
	return bytes.HasPrefix(bytes.TrimLeft(raw, " \t\r\n"), []byte("{"))
}

// text is a JSON string's value, or otherwise.
func text(raw json.RawMessage, otherwise string) string {
	var s *string
	if json.Unmarshal(raw, &s) != nil || s == nil {
		return otherwise
	}
	return *s
}

func sortedKeys[V any](m map[string]V) []string {
	return slices.Sorted(maps.Keys(m))
}
