package config

import (
	"encoding/hex"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
)

// PathMatch is how a server matches paths, beyond comparing them as they are: a set of rules.
type PathMatch uint8

// The rules. The zero PathMatch compares paths as they are.
const (
	PathSuffix       PathMatch = 1 << iota // a route also matches a path that ends in it
	PathCaseless                           // case does not count
	PathTrimSlash                          // slashes at the end do not count
	PathMergeSlashes                       // several slashes are one
	PathQuery                              // the query counts as the end of the path
)

// PathRules are the words for how a server matches paths, as `path_match` has them.
var PathRules = []string{"suffix", "caseless", "trim_slash", "merge_slashes", "query"}

// ParsePathMatch reads words of PathRules. Its error names the first that it does not know.
func ParsePathMatch(words []string) (PathMatch, error) {
	var m PathMatch
	for _, word := range words {
		i := slices.Index(PathRules, word)
		if i < 0 {
			return m, Unknown("rule", word, PathRules)
		}
		m |= 1 << i
	}
	return m, nil
}

func (m PathMatch) has(rule PathMatch) bool { return m&rule != 0 }

// maxForms bounds the forms of one path.
const maxForms = 6

// RequestPath is a request as lists of routes see it: its method, and its path in each form in which a server may take it.
type RequestPath struct {
	Method    string
	forms     [maxForms]string
	count     int
	oddMethod bool // no list can name it
	query     string
}

// Forms are the forms of a path that differ.
func (r *RequestPath) Forms() []string { return r.forms[:r.count] }

// Read returns the forms of a request's path for a server that matches paths by these rules: as it was decoded once, and resolved in
// full, as a whole and up to where some servers take it to end. A plain path has one form, for which nothing is allocated.
func (m PathMatch) Read(method string, u *url.URL) RequestPath {
	r := RequestPath{Method: method, oddMethod: methodBit(method) == 0, query: u.RawQuery}
	if r.oddMethod { // servers exist that do not mind its case
		if upper := strings.ToUpper(method); methodBit(upper) != 0 {
			r.Method, r.oddMethod = upper, false
		}
	}
	raw := m.form(u.Path)
	r.add(raw)
	if !isPlain(u.Path) {
		whole := decoded(u.Path)
		ends := []string{whole}
		if i := strings.IndexAny(whole, "?#\x00"); i >= 0 { // where some servers take the path to end
			ends = append(ends, whole[:i])
		}
		for _, p := range ends {
			r.add(m.form(simplified(strings.ReplaceAll(p, `\`, "/"))))
			r.add(m.form(simplified(p))) // not every server that resolves dots takes backslashes for slashes
		}
	}
	if m.has(PathQuery) && strings.Contains(u.RawQuery, "/") { // else no route ends there
		r.add(strings.TrimRight(m.form(u.EscapedPath())+"?"+u.RawQuery, "/"))
	}
	return r
}

// asks reports whether the query has a parameter of this name, which servers may compare without regard to case.
func (r *RequestPath) asks(name string) bool {
	if r.query == "" {
		return false
	}
	for pair := range strings.FieldsFuncSeq(r.query, func(c rune) bool { return c == '&' || c == ';' }) {
		key, _, _ := strings.Cut(pair, "=")
		if key, err := url.QueryUnescape(key); err == nil && strings.EqualFold(key, name) {
			return true
		}
	}
	return false
}

func (r *RequestPath) add(form string) {
	if !slices.Contains(r.forms[:r.count], form) {
		r.forms[r.count] = form
		r.count++
	}
}

// form is a path by the server's own rules.
func (m PathMatch) form(p string) string {
	if m.has(PathMergeSlashes) {
		for strings.Contains(p, "//") {
			p = strings.ReplaceAll(p, "//", "/")
		}
	}
	if m.has(PathTrimSlash) && len(p) > 1 {
		if p = strings.TrimRight(p, "/"); p == "" {
			p = "/"
		}
	}
	if m.has(PathCaseless) {
		p = strings.ToLower(p)
	}
	return p
}

// isPlain reports whether simplified would leave a path as it is.
func isPlain(p string) bool {
	if len(p) == 0 || p[0] != '/' || len(p) > 1 && p[len(p)-1] == '/' {
		return false
	}
	for i := range len(p) {
		switch c := p[i]; {
		case c == '%' || c == '\\' || c == ';' || c == '?' || c == '#' || c <= ' ' || c >= 0x7f:
			return false
		case c == '/' && i+1 < len(p) && (p[i+1] == '/' || p[i+1] == '.'):
			return false
		}
	}
	return true
}

// maxDecodings bounds how often a path is decoded again.
const maxDecodings = 4

// decoded is a path with its escapes decoded until none is left. What looks like an escape and is none stays, as most servers leave it.
func decoded(p string) string {
	for range maxDecodings {
		more := unescape(p)
		if more == p {
			break
		}
		p = more
	}
	return p
}

// unescape decodes the escapes of a path once, and leaves alone what is none.
func unescape(p string) string {
	if !strings.Contains(p, "%") {
		return p
	}
	var out strings.Builder
	for i := 0; i < len(p); i++ {
		if p[i] == '%' && i+2 < len(p) {
			if b, err := hex.DecodeString(p[i+1 : i+3]); err == nil {
				out.Write(b)
				i += 2
				continue
			}
		}
		out.WriteByte(p[i])
	}
	return out.String()
}

// simplified is a decoded path as the most obliging server would take it: without parameters, dot segments, empty segments, and blanks
// or slashes at the end.
func simplified(p string) string {
	if strings.Contains(p, ";") {
		segments := strings.Split(p, "/")
		for i, s := range segments {
			segments[i], _, _ = strings.Cut(s, ";")
		}
		p = strings.Join(segments, "/")
	}
	p = strings.TrimRightFunc(p, func(r rune) bool { return r <= ' ' || r == '/' || r == 0x7f })
	return path.Clean("/" + p)
}

// IsTunnel reports whether a request asks for a connection of its own, such as a WebSocket, by HTTP/1 or by HTTP/2.
func IsTunnel(r *http.Request) bool {
	if r.Method == http.MethodConnect {
		return true
	}
	if len(r.Header) == 0 || len(r.Header["Upgrade"]) == 0 {
		return false
	}
	for _, value := range r.Header["Connection"] {
		for token := range strings.SplitSeq(value, ",") {
			if strings.EqualFold(strings.TrimSpace(token), "upgrade") {
				return slices.ContainsFunc(r.Header["Upgrade"], func(v string) bool { return !strings.EqualFold(strings.TrimSpace(v), "h2c") })
			}
		}
	}
	return false
}
