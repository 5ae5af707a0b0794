package config

import (
	"encoding/json"
	"fmt"
	"strings"
)

// UnloadRequest is a request that asks the server to give memory back, though it is sent to a route that computes. It is told by its body,
// a JSON object of at most 4 KiB.
type UnloadRequest struct {
	// The requests that may do so, as `METHOD /path` or `/path`.
	Route string `json:"route"`
	// The field that is there and zero: a number, or a text such as `0s`.
	Zero string `json:"zero"`
	// Fields that are not there, null or empty: with them the request is work.
	Empty []string `json:"empty,omitempty"`
	// The answer, in JSON, where the broker unloads the model or finds nothing to be unloaded. `{model}` stands for the model's name as the
	// request has it and `{time}` for the time, each as a JSON value. Default: `{}`.
	Answer string `json:"answer,omitempty"`
}

// Check reports what is wrong with the request.
func (u UnloadRequest) Check() error {
	if _, err := ParseRoutePattern(u.Route); err != nil {
		return err
	}
	if u.Zero == "" {
		return fmt.Errorf("%s: zero is missing: name the field that is zero, such as keep_alive", u.Route)
	}
	if u.Answer != "" && !json.Valid([]byte(strings.NewReplacer("{model}", `""`, "{time}", `""`).Replace(u.Answer))) {
		return fmt.Errorf("%s: answer is not JSON", u.Route)
	}
	return nil
}
