package config

import (
	"errors"
	"fmt"
	"strings"
)

// RoutePattern matches requests by method and path. It is written as `/path`,
// `METHOD /path` or `METHOD|METHOD /path`; a `*` at the end of the path stands
// for anything, also for nothing. All else is compared as it is, case included.
type RoutePattern struct {
	methods uint16 // bits of the methods; 0 stands for all
	path    string // without the "*"
	prefix  bool
}

// Methods are the request methods that a pattern may name.
var Methods = []string{"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"}

// ParseRoutePattern reads one pattern.
func ParseRoutePattern(text string) (RoutePattern, error) {
	var p RoutePattern
	fields := strings.Fields(text)
	switch len(fields) {
	case 1:
		p.path = fields[0]
	case 2:
		for method := range strings.SplitSeq(fields[0], "|") {
			bit := methodBit(method)
			if bit == 0 {
				return p, fmt.Errorf("route %q: %w", text, Unknown("method", method, Methods))
			}
			p.methods |= bit
		}
		p.path = fields[1]
	default:
		return p, fmt.Errorf("route %q is not of the form /path or METHOD /path", text)
	}
	p.path, p.prefix = strings.CutSuffix(p.path, "*")
	switch {
	case !strings.HasPrefix(p.path, "/"):
		return p, fmt.Errorf("route %q: the path must begin with a slash, as in POST /prompt or /audio/*", text)
	case strings.Contains(p.path, "*"):
		return p, fmt.Errorf("route %q: a * is allowed only at the end of the path", text)
	case strings.ContainsAny(p.path, "?#"):
		return p, fmt.Errorf("route %q: only the path is compared: leave out the query", text)
	}
	return p, nil
}

// Match says whether a request of this method and path is meant. It does not allocate.
func (p RoutePattern) Match(method, path string) bool {
	if p.prefix {
		if !strings.HasPrefix(path, p.path) {
			return false
		}
	} else if path != p.path {
		return false
	}
	return p.methods == 0 || p.methods&methodBit(method) != 0
}

// String is the pattern as it may be written.
func (p RoutePattern) String() string {
	var methods []string
	for _, m := range Methods {
		if p.methods&methodBit(m) != 0 {
			methods = append(methods, m)
		}
	}
	text := p.path
	if p.prefix {
		text += "*"
	}
	if len(methods) > 0 {
		text = strings.Join(methods, "|") + " " + text
	}
	return text
}

// RoutePatterns is a list of patterns, of which any may match.
type RoutePatterns []RoutePattern

// ParseRoutePatterns reads a list; its error holds all faults.
func ParseRoutePatterns(texts []string) (RoutePatterns, error) {
	var list RoutePatterns
	var faults []error
	for _, text := range texts {
		p, err := ParseRoutePattern(text)
		if err != nil {
			faults = append(faults, err)
			continue
		}
		list = append(list, p)
	}
	return list, errors.Join(faults...)
}

// Match says whether any of the patterns matches.
func (l RoutePatterns) Match(method, path string) bool {
	for i := range l {
		if l[i].Match(method, path) {
			return true
		}
	}
	return false
}

func methodBit(method string) uint16 {
	switch method {
	case "GET":
		return 1 << 0
	case "POST":
		return 1 << 1
	case "HEAD":
		return 1 << 2
	case "OPTIONS":
		return 1 << 3
	case "PUT":
		return 1 << 4
	case "DELETE":
		return 1 << 5
	case "PATCH":
		return 1 << 6
	case "CONNECT":
		return 1 << 7
	case "TRACE":
		return 1 << 8
	case "QUERY":
		return 1 << 9
	}
	return 0
}
