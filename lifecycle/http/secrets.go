package httplife

import (
	"cmp"
	"encoding/base64"
	"html"
	"maps"
	"net/url"
	"slices"
	"strings"
	"unicode"
)

const (
	// minPart is the least length at which a part of a configured value, or a
	// value that may not be secret at all, is hidden: shorter ones would hide
	// half of every message.
	minPart = 4
	// maxExcerpt bounds what is shown of a server's answer, in bytes.
	maxExcerpt = 200
)

// secretSet collects what must never be shown. Its zero value is empty.
type secretSet map[string]bool

// addValue adds the value of a placeholder, in the forms in which a server
// may give it back.
func (s *secretSet) addValue(v string) {
	if *s == nil {
		*s = secretSet{}
	}
	for _, form := range []string{v, strings.TrimSpace(v), jsonInside(v), url.QueryEscape(v), url.PathEscape(v), html.EscapeString(v)} {
		if form != "" {
			(*s)[form] = true
		}
	}
}

// addPart adds a value that may be no secret, unless it is very short.
func (s *secretSet) addPart(v string) {
	if len(v) >= minPart {
		s.addValue(v)
	}
}

// addHeader adds a header's value, its words ("Bearer xyz", "key=xyz") and,
// for Basic, what is in them.
func (s *secretSet) addHeader(v string) {
	s.addValue(v)
	scheme, credentials, ok := strings.Cut(v, " ")
	if !ok || strings.ContainsAny(scheme, "=;,") { // as in Cookie: the first word is part of the secret
		scheme, credentials = "", v
	}
	for _, word := range strings.FieldsFunc(credentials, func(r rune) bool { return strings.ContainsRune(` ;,"`, r) }) {
		s.addPart(word)
		_, value, _ := strings.Cut(word, "=")
		s.addPart(value)
	}
	if !strings.EqualFold(scheme, "Basic") {
		return
	}
	if pair, err := base64.StdEncoding.DecodeString(strings.TrimSpace(credentials)); err == nil {
		_, password, _ := strings.Cut(string(pair), ":")
		s.addPart(string(pair))
		s.addPart(password)
	}
}

func (s *secretSet) redactor() *redactor {
	all := slices.SortedFunc(maps.Keys(*s), func(a, b string) int { return cmp.Or(cmp.Compare(len(b), len(a)), cmp.Compare(a, b)) })
	pairs := make([]string, 0, 2*len(all))
	for _, secret := range all {
		pairs = append(pairs, secret, "[redacted]")
	}
	return &redactor{strings.NewReplacer(pairs...)}
}

// redactor hides secrets. It keeps them to itself under every verb of fmt.
type redactor struct{ replacer *strings.Replacer }

func (*redactor) String() string   { return "redactor" }
func (*redactor) GoString() string { return "redactor" }

// excerpt is the beginning of a server's answer for people: one line, short, without secrets.
func (r *redactor) excerpt(answer []byte) string {
	clean := r.replacer.Replace(string(answer))
	var b strings.Builder
	blank := false
	for _, c := range strings.ToValidUTF8(clean, "?") {
		if unicode.IsSpace(c) || !unicode.IsPrint(c) {
			blank = b.Len() > 0
			continue
		}
		size := len(string(c))
		if blank {
			size++
		}
		if b.Len()+size > maxExcerpt {
			break
		}
		if blank {
			b.WriteByte(' ')
			blank = false
		}
		b.WriteRune(c)
	}
	return b.String()
}
