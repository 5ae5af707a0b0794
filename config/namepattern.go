package config

import (
	"cmp"
	"fmt"
	"strings"
)

// NamePattern is an alias in which a `*` stands for any text, or for none.
type NamePattern struct{ Before, After string }

// ParseNamePattern returns the pattern of an alias; false: the alias is a plain name.
func ParseNamePattern(alias string) (NamePattern, bool) {
	before, after, found := strings.Cut(alias, "*")
	return NamePattern{before, after}, found
}

// String is the pattern as it is written.
func (p NamePattern) String() string { return p.Before + "*" + p.After }

// Match reports whether a name is one that the pattern stands for.
func (p NamePattern) Match(name string) bool {
	return len(name) >= len(p.Before)+len(p.After) && strings.HasPrefix(name, p.Before) && strings.HasSuffix(name, p.After)
}

// Compare orders patterns by which is asked first: the one whose text before the `*` is longer, then the one whose text after it is.
func (p NamePattern) Compare(other NamePattern) int {
	return cmp.Or(len(other.Before)-len(p.Before), len(other.After)-len(p.After))
}

// checkPattern returns an error if the alias is neither a name nor a valid pattern.
func checkPattern(alias string) error {
	switch strings.Count(alias, "*") {
	case 0:
		return nil
	case 1:
		if alias != "*" {
			return nil
		}
		return fmt.Errorf("alias * would stand for every name: leave it out, and write default CONSUMER any on the route of the site that serves unknown models")
	default:
		return fmt.Errorf("alias %q holds more than one *: write one, which stands for any text, as in alias claude-*", alias)
	}
}
