package httplife

import (
	"encoding/base64"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAnExcerptIsOneShortLine(t *testing.T) {
	shown := new(secretSet).redactor()
	full := strings.Repeat("x", 200)
	for answer, want := range map[string]string{
		"":                       "",
		" \n\t ":                 "",
		"no memory":              "no memory",
		"\n  no \r\n\t memory\n": "no memory",
		"a\x00\x1b[31mb":         "a [31mb",
		"\xffa":                  "?a",
		full:                     full,
		full + "y":               full,
		full[2:] + " y":          full[2:] + " y",
		full[1:] + " y":          full[1:],
		full[2:] + "ü":           full[2:] + "ü",
		full[1:] + "ü":           full[1:], // a character that does not fit is not shown in halves
		full[3:] + " ü":          full[3:] + " ü",
		full[2:] + " ü":          full[2:],
	} {
		require.Equal(t, want, shown.excerpt([]byte(answer)), "%.40q", answer)
	}
}

func TestWhatIsSecretIsHiddenInEveryFormThatAServerGivesItBackIn(t *testing.T) {
	basic := base64.StdEncoding.EncodeToString([]byte("me:pass word"))
	for _, c := range []struct {
		name   string
		add    func(s *secretSet)
		answer string
		want   string
	}{
		{"nothing", func(*secretSet) {}, "abcd", "abcd"},
		{"a value, however short", func(s *secretSet) { s.addValue("x") }, "a x b", "a [redacted] b"},
		{"an empty one", func(s *secretSet) { s.addValue("") }, "a b", "a b"},
		{"with blanks around it", func(s *secretSet) { s.addValue(" tok\n") }, "a tok b", "a [redacted] b"},
		{"as JSON", func(s *secretSet) { s.addValue(`t"k`) }, `{"got":"t\"k"}`, `{"got":"[redacted]"}`},
		{"as a query", func(s *secretSet) { s.addValue("t k/") }, "t+k%2F", "[redacted]"},
		{"as a path", func(s *secretSet) { s.addValue("t k/") }, "t%20k%2F", "[redacted]"},
		{"as HTML", func(s *secretSet) { s.addValue("<t>") }, "&lt;t&gt;", "[redacted]"},
		{"the longer of two", func(s *secretSet) { s.addValue("ab"); s.addValue("abc"); s.addValue("a") }, "abcd", "[redacted]d"},
		{"a part", func(s *secretSet) { s.addPart("abcd") }, "abcd", "[redacted]"},
		{"a short part, of which messages may be full", func(s *secretSet) { s.addPart("abc") }, "abc", "abc"},
		{"a header", func(s *secretSet) { s.addHeader("Bearer tok-en") }, "Bearer tok-en, tok-en", "[redacted], [redacted]"},
		{"a header of one word", func(s *secretSet) { s.addHeader("tok-en") }, "tok-en", "[redacted]"},
		{"a header of pairs", func(s *secretSet) { s.addHeader(`Digest user="root"; key=to,ken`) }, "root; ken; token", "[redacted]; ken; token"},
		{"a cookie", func(s *secretSet) { s.addHeader("session=c00kie; lang=en") }, "c00kie en", "[redacted] en"},
		{"what is in Basic", func(s *secretSet) { s.addHeader("basic " + basic) }, "me:pass word, pass word, " + basic, "[redacted], [redacted], [redacted]"},
		{"but not in another scheme", func(s *secretSet) { s.addHeader("Other " + basic) }, "pass word", "pass word"},
		{"nor in what is no base64", func(s *secretSet) { s.addHeader("Basic !pass") }, "me !pass", "me [redacted]"},
	} {
		var s secretSet
		c.add(&s)
		require.Equal(t, c.want, s.redactor().excerpt([]byte(c.answer)), c.name)
	}
	var s secretSet
	s.addValue("tok-en")
	for _, verb := range []string{"%v", "%+v", "%#v", "%s"} {
		require.Equal(t, "redactor", fmt.Sprintf(verb, s.redactor()), verb)
	}
}

func TestTheLongestFormOfASecretOfSeveralLinesIsOfAllOfIt(t *testing.T) {
	secret := "first-line\nsecond-line"
	hide, longest := Redactor([]string{secret})
	require.GreaterOrEqual(t, longest, len(url.QueryEscape(secret)))
	for _, text := range []string{secret, "first-line", "second-line", url.QueryEscape(secret)} {
		require.NotContains(t, hide(text), "line", text)
	}
}
