// Package faultlines gives each fault of an error that holds several, one a line, a beginning that says what it is
// about, so that every line can be read by itself.
package faultlines

import (
	"errors"
	"fmt"
	"strings"
)

// Title names what a fault is about, with its place, `file:line`, if that is known.
func Title(what, source string) string {
	if source == "" {
		return what
	}
	return what + " (" + source + ")"
}

// Prefix puts title before every fault of err that does not begin with it already. nil stays nil.
func Prefix(title string, err error) error {
	if err == nil {
		return nil
	}
	if text := err.Error(); !strings.Contains(text, "\n") && !strings.HasPrefix(text, title+": ") {
		return fmt.Errorf("%s: %w", title, err)
	}
	var faults []error
	for line := range strings.Lines(err.Error()) { // Caddy makes a text of what modules return, so there may be nothing to unwrap
		switch line = strings.TrimSpace(line); {
		case line == "":
		case strings.HasPrefix(line, title+": "):
			faults = append(faults, errors.New(line))
		default:
			faults = append(faults, fmt.Errorf("%s: %s", title, line))
		}
	}
	return errors.Join(faults...)
}

// OfModule is Prefix for an error of Caddy's LoadModule: title takes the place of what Caddy puts before the
// first fault: up to the module's ID, and that its configuration is invalid.
func OfModule(title, id string, err error) error {
	if err == nil {
		return nil
	}
	if _, own, found := strings.Cut(err.Error(), id+": "); found {
		err = errors.New(strings.TrimPrefix(own, "invalid configuration: "))
	}
	return Prefix(title, err)
}
