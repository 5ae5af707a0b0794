package config

import (
	"encoding/json"
	"fmt"
	"strings"
)

// UnloadRequest is a request that asks the server to give memory back: by a field of its body, which is a JSON object of at most 4 KiB, or,
// where no field is named, by its route alone.
type UnloadRequest struct {
	// The requests that may do so, as `METHOD /path` or `/path`.
	Route string `json:"route"`
	// The field that is there and zero: a number, or a text such as `0s`.
	Zero string `json:"zero,omitempty"`
	// Fields of which one holds anything but false, null, 0 or what is empty. A body that can't be read, or is larger, asks for it, too: the
	// server may read it.
	True []string `json:"true,omitempty"`
	// Fields that are not there, null or empty: with them the request is work.
	Empty []string `json:"empty,omitempty"`
	// The answer, in JSON, where the broker unloads the model or finds nothing to be unloaded. `{model}` stands for the model's name as the
	// request has it and `{time}` for the time, each as a JSON value. Default: `{}`.
	Answer string `json:"answer,omitempty"`
}

// Frees reports whether the request is for a route that does nothing but free memory.
func (u UnloadRequest) Frees() bool { return u.Zero == "" && len(u.Empty) == 0 }

// Check reports what is wrong with the request.
func (u UnloadRequest) Check() error {
	if _, err := ParseRoutePattern(u.Route); err != nil {
		return err
	}
	switch {
	case u.Zero != "" && len(u.True) > 0:
		return fmt.Errorf("%s: zero and true exclude each other: write two unload requests", u.Route)
	case len(u.True) > 0 && len(u.Empty) > 0:
		return fmt.Errorf("%s: empty and true exclude each other: a route with fields that are true does nothing but free memory", u.Route)
	}
	if u.Answer != "" && !json.Valid([]byte(strings.NewReplacer("{model}", `""`, "{time}", `""`).Replace(u.Answer))) {
		return fmt.Errorf("%s: answer is not JSON", u.Route)
	}
	return nil
}
