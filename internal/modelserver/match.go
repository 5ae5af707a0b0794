package modelserver

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
)

// Route is a route of a real server, as a table of its routes has it.
type Route struct {
	Method string // WS stands for a WebSocket
	Path   string // with an example where the server takes any value; "?name" asks for a query parameter
	Kind   string // what it does: KindComputes …
}

// The kinds of routes, the one that matters most last.
const (
	KindFree     = "free"
	KindTurn     = "turn"
	KindComputes = "computes"
	KindBlocked  = "blocked"
)

var kinds = []string{"", KindFree, KindTurn, KindComputes, KindBlocked}

// ReadRoutes reads a table: `METHOD /path kind` a line, and comments that begin with #.
func ReadRoutes(in io.Reader) ([]Route, error) {
	var out []Route
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "#") {
			continue
		}
		fields := strings.Fields(lines.Text())
		if len(fields) != 3 || rank(fields[2]) == 0 {
			return nil, fmt.Errorf("%q is not of the form METHOD /path kind", lines.Text())
		}
		out = append(out, Route{fields[0], fields[1], fields[2]})
	}
	return out, lines.Err()
}

func rank(kind string) int {
	for i, k := range kinds {
		if k == kind {
			return i
		}
	}
	return 0
}

// Match is what a real server of this manner would do with a request that arrives as target, the path and query as they stand in
// the request line: the kind of the route that it takes it for, of several the one that matters most. Empty: it has no such route.
func (m Manner) Match(routes []Route, method, target string, header http.Header) (kind string) {
	path, query, _ := strings.Cut(target, "?")
	decoded, err := url.PathUnescape(path)
	if err != nil {
		return ""
	}
	upgraded := method == http.MethodConnect || method == http.MethodGet && strings.EqualFold(header.Get("Upgrade"), "websocket") && strings.Contains(strings.ToLower(header.Get("Connection")), "upgrade")
	if method == http.MethodHead || method == http.MethodConnect { // many run the handler of GET
		method = http.MethodGet
	}
	values, _ := url.ParseQuery(query) // as far as it can be read
	for _, r := range routes {
		own := r.Method
		if own == "WS" {
			if own = http.MethodGet; !upgraded {
				continue
			}
		}
		route, parameter, asks := strings.Cut(r.Path, "?")
		if strings.Contains(parameter, "=/") { // an example of a path's end in the query
			continue
		}
		if name, _, _ := strings.Cut(parameter, "="); own != method || asks && !values.Has(name) {
			continue
		}
		if m.takes(route, path, decoded, query, header) && rank(r.Kind) > rank(kind) {
			kind = r.Kind
		}
	}
	return kind
}

// takes reports whether a server of this manner takes a path for a route.
func (m Manner) takes(route, raw, decoded, query string, header http.Header) bool {
	switch m {
	case KoboldCpp: // it decodes nothing, and looks at the end; before 1.80 with the query
		trimmed := strings.TrimRight(raw, "/")
		if route == "/" {
			return trimmed == ""
		}
		return strings.HasSuffix(trimmed, route) || query != "" && strings.HasSuffix(strings.TrimRight(raw+"?"+query, "/"), route)
	case LocalAI: // it cuts off a prefix that the client names, and a slash at the end
		for _, prefix := range header.Values("X-Forwarded-Prefix") {
			if rest, ok := strings.CutPrefix(decoded, strings.TrimSuffix(prefix, "/")+"/"); ok && prefix != "" {
				decoded = "/" + rest
				break
			}
		}
		return decoded == route || len(decoded) > 1 && strings.TrimSuffix(decoded, "/") == route
	default:
		return decoded == route
	}
}
