package config

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
)

// RoutePattern matches requests by method and path. It is written as `/path`,
// `METHOD /path` or `METHOD|METHOD /path`; a `*` at the end of the path stands
// for anything, also for nothing. `?name` after it asks for a query with that parameter.
type RoutePattern struct {
	methods uint16 // bits of the methods; 0 stands for all
	path    string // without the "*"
	prefix  bool
	query   string // a parameter that must be there; empty: none
	rules   PathMatch
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
	path, query, asks := strings.Cut(p.path, "?")
	if asks && (query == "" || url.QueryEscape(query) != query) {
		return p, fmt.Errorf("route %q: after the ? only the name of a parameter may stand, as in GET /props?model", text)
	}
	p.query = query
	p.path, p.prefix = strings.CutSuffix(path, "*")
	switch {
	case !strings.HasPrefix(p.path, "/"):
		return p, fmt.Errorf("route %q: the path must begin with a slash, as in POST /prompt or /audio/*", text)
	case strings.Contains(p.path, "*"):
		return p, fmt.Errorf("route %q: a * is allowed only at the end of the path", text)
	case strings.Contains(p.path, "#"):
		return p, fmt.Errorf("route %q: leave out the #", text)
	}
	return p, nil
}

// matchPath reports whether one form of a path is meant. wide lets the `*` of a server that
// matches paths by their end stand for any beginning, too.
func (p *RoutePattern) matchPath(path string, wide bool) bool {
	switch {
	case !p.prefix && p.rules.has(PathSuffix):
		return strings.HasSuffix(path, p.path)
	case !p.prefix:
		return path == p.path
	case wide && p.rules.has(PathSuffix):
		return strings.Contains(path, p.path)
	default:
		return strings.HasPrefix(path, p.path)
	}
}

// matchMethod reports whether a request of this method is meant. HEAD runs the handler of GET at
// many servers, and a WebSocket over HTTP/2 (CONNECT) arrives at its server as a GET.
func (p *RoutePattern) matchMethod(method string) bool {
	if p.methods == 0 {
		return true
	}
	bit := methodBit(method)
	switch method {
	case "HEAD", "CONNECT":
		bit |= methodBit("GET")
	}
	return p.methods&bit != 0
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
	if p.query != "" {
		text += "?" + p.query
	}
	if len(methods) > 0 {
		text = strings.Join(methods, "|") + " " + text
	}
	return text
}

// RoutePatterns is a list of patterns, of which any may match.
type RoutePatterns []RoutePattern

// ParseRoutePatterns reads a list for a server that compares paths as they are; its error holds all faults.
func ParseRoutePatterns(texts []string) (RoutePatterns, error) { return PathMatch(0).Patterns(texts) }

// Patterns reads a list of patterns for a server that matches paths by these rules; its error holds all faults.
func (m PathMatch) Patterns(texts []string) (RoutePatterns, error) {
	var list RoutePatterns
	var faults []error
	for _, text := range texts {
		p, err := ParseRoutePattern(text)
		if err != nil {
			faults = append(faults, err)
			continue
		}
		if p.rules = m; m.has(PathCaseless) {
			p.path = strings.ToLower(p.path)
		}
		list = append(list, p)
	}
	return list, errors.Join(faults...)
}

// Any reports whether a pattern matches any of the forms in which the server may take the request's path:
// for lists that refuse requests, or that say that they need the GPU. It does not allocate.
func (l RoutePatterns) Any(r *RequestPath) bool {
	for i := range l {
		p := &l[i]
		if !p.matchMethod(r.Method) && !r.oddMethod || p.query != "" && !r.asks(p.query) {
			continue
		}
		if slices.ContainsFunc(r.forms[:r.count], func(path string) bool { return p.matchPath(path, true) }) {
			return true
		}
	}
	return false
}

// All reports whether for each form in which the server may take the request's path a pattern matches: for lists that let
// requests pass. It does not allocate.
func (l RoutePatterns) All(r *RequestPath) bool {
	if len(l) == 0 {
		return false
	}
	for _, path := range r.forms[:r.count] {
		if !slices.ContainsFunc(l, func(p RoutePattern) bool {
			return p.matchMethod(r.Method) && p.matchPath(path, false) && (p.query == "" || r.asks(p.query))
		}) {
			return false
		}
	}
	return true
}

// BySuffix calls f with the route of each pattern that matches only as the end of a path, until it returns true, and returns that. At
// servers that do not match paths by their end there is none.
func (l RoutePatterns) BySuffix(r *RequestPath, f func(route *RequestPath) bool) bool {
	for i := range l {
		p := &l[i]
		if !p.rules.has(PathSuffix) || p.prefix || !p.matchMethod(r.Method) {
			continue
		}
		for _, form := range r.forms[:r.count] {
			if form != p.path && p.matchPath(form, true) && f(&RequestPath{Method: r.Method, forms: [maxForms]string{p.path}, count: 1}) {
				return true
			}
		}
	}
	return false
}

// Match reports whether any of the patterns matches a request of this method, whose path is taken as it is.
func (l RoutePatterns) Match(method, path string) bool {
	return slices.ContainsFunc(l, func(p RoutePattern) bool { return p.Match(method, path) })
}

// Match reports whether a request of this method is meant, whose path is taken as it is.
func (p RoutePattern) Match(method, path string) bool {
	return p.query == "" && p.matchMethod(method) && p.matchPath(path, true)
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
