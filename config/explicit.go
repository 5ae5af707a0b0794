package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
)

// Explicit marks a field, by its JSON name, as given by the user although its
// value is zero, so that it overrides a preset's: `"pin": false`. Decoding
// JSON does so by itself.
func (c *Consumer) Explicit(field string) {
	if c.explicit == nil {
		c.explicit = map[string]bool{}
	}
	c.explicit[field] = true
}

// plain is a Consumer without its methods.
type plain Consumer

// UnmarshalJSON reads a consumer. It refuses unknown fields, all at once, and
// remembers those that were given with a zero value.
func (c *Consumer) UnmarshalJSON(data []byte) error {
	var given map[string]json.RawMessage
	if err := json.Unmarshal(data, &given); err != nil {
		return fmt.Errorf("a consumer must be a JSON object: %w", err)
	}
	if given == nil { // null
		return nil
	}
	who := "a consumer"
	if name, ok := given["name"]; ok {
		who = "consumer " + string(name)
	}
	var faults []error
	for _, key := range sortedKeys(given) {
		if _, ok := consumerFields[key]; !ok {
			faults = append(faults, fmt.Errorf("%s: %w", who, Unknown("field", key, sortedKeys(consumerFields))))
		}
	}
	if len(faults) > 0 {
		return errors.Join(faults...)
	}
	var decoded plain
	if err := json.Unmarshal(data, &decoded); err != nil {
		return fmt.Errorf("%s: %w", who, err)
	}
	*c = Consumer(decoded)
	v := reflect.ValueOf(decoded)
	for key := range given {
		if isEmpty(v.Field(consumerFields[key])) {
			c.Explicit(key)
		}
	}
	return nil
}

// MarshalJSON writes a consumer: its fields that are not zero, then those that
// were given although they are.
func (c Consumer) MarshalJSON() ([]byte, error) {
	out, err := json.Marshal(plain(c))
	if err != nil || len(c.explicit) == 0 {
		return out, err
	}
	extra := map[string]any{}
	v := reflect.ValueOf(plain(c))
	for key := range c.explicit {
		i, ok := consumerFields[key]
		if !ok || key == "name" || key == "lifecycle" || !isEmpty(v.Field(i)) {
			continue // written already, or has no zero value to write
		}
		extra[key] = v.Field(i).Interface()
		if v.Field(i).Kind() == reflect.Slice {
			extra[key] = []string{}
		}
	}
	if len(extra) == 0 {
		return out, nil
	}
	more, err := json.Marshal(extra)
	if err != nil {
		return nil, err
	}
	// name is always written, so out is never an empty object
	return bytes.Join([][]byte{bytes.TrimSuffix(out, []byte("}")), bytes.TrimPrefix(more, []byte("{"))}, []byte(",")), nil
}

// consumerFields maps the JSON name of each of a consumer's fields to its index.
var consumerFields = func() map[string]int {
	fields := map[string]int{}
	t := reflect.TypeFor[Consumer]()
	for i := range t.NumField() {
		if name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ","); name != "" {
			fields[name] = i
		}
	}
	return fields
}()

// isEmpty reports whether "omitempty" leaves v out.
func isEmpty(v reflect.Value) bool {
	if v.Kind() == reflect.Slice {
		return v.Len() == 0
	}
	return v.IsZero()
}
