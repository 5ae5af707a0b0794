package config

import (
	"strings"
	"testing"
)

func TestRoutePatternMatchesMethodAndPath(t *testing.T) {
	for _, tc := range []struct {
		pattern, method, path string
		want                  bool
	}{
		{"POST /prompt", "POST", "/prompt", true},
		{"POST /prompt", "GET", "/prompt", false},
		{"POST /prompt", "POST", "/prompt/", false},
		{"POST /prompt", "POST", "/prompts", false},
		{"POST /prompt", "POST", "/Prompt", false},
		{"POST /prompt", "POST", "", false},
		{"POST /prompt", "post", "/prompt", false},
		{"/queue", "DELETE", "/queue", true},
		{"/queue", "BREW", "/queue", true},
		{"GET /queue", "BREW", "/queue", false},
		{"/audio/*", "GET", "/audio/", true},
		{"/audio/*", "GET", "/audio/a/b.wav", true},
		{"/audio/*", "GET", "/audio", false},
		{"/audio*", "GET", "/audio", true},
		{"/audio*", "GET", "/audiobook", true},
		{"/*", "POST", "/anything", true},
		{"GET|POST /x", "GET", "/x", true},
		{"GET|POST /x", "POST", "/x", true},
		{"GET|POST /x", "PUT", "/x", false},
		{"GET /audio/*", "GET", "/audio/a", true},
		{"GET /audio/*", "POST", "/audio/a", false},
		{"  POST \t /prompt ", "POST", "/prompt", true},
		{"GET /props?model", "GET", "/props", false},
	} {
		p, err := ParseRoutePattern(tc.pattern)
		if err != nil {
			t.Errorf("%q: %v", tc.pattern, err)
			continue
		}
		if got := p.Match(tc.method, tc.path); got != tc.want {
			t.Errorf("%q matches %s %s: %v, want %v", tc.pattern, tc.method, tc.path, got, tc.want)
		}
		again, err := ParseRoutePattern(p.String())
		if err != nil || again != p {
			t.Errorf("%q is written as %q, which reads as %+v (%v), want %+v", tc.pattern, p, again, err, p)
		}
	}
}

func TestEveryKnownMethodMatchesItselfAndGETMatchesWhatArrivesAsAGET(t *testing.T) {
	for _, own := range Methods {
		p, err := ParseRoutePattern(own + " /x")
		if err != nil {
			t.Fatal(err)
		}
		for _, other := range Methods {
			want := own == other || own == "GET" && (other == "HEAD" || other == "CONNECT")
			if got := p.Match(other, "/x"); got != want {
				t.Errorf("%s matches %s: %v", own, other, got)
			}
		}
	}
}

func TestBadRoutePatternsAreRefused(t *testing.T) {
	for text, want := range map[string]string{
		"":               "not of the form",
		"   ":            "not of the form",
		"POST":           "must begin with a slash",
		"prompt":         "must begin with a slash",
		"*":              "must begin with a slash",
		"POST prompt":    "must begin with a slash",
		"GET POST /x":    "not of the form",
		"/a/*/b":         "only at the end",
		"/a/**":          "only at the end",
		"/a?b=c":         "only the name of a parameter",
		"/a?":            "only the name of a parameter",
		"/a#b":           "leave out the #",
		"PSOT /prompt":   `unknown method "PSOT": did you mean POST?`,
		"post /prompt":   "did you mean POST?",
		"GET| /x":        `unknown method ""`,
		"GET|POST|X /x":  `unknown method "X"`,
		"FROBNICATE /xy": "allowed: CONNECT, DELETE, GET",
	} {
		_, err := ParseRoutePattern(text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want one with %q", text, err, want)
		}
	}
}

func TestRoutePatternsMatchIfAnyDoesAndTellAllFaults(t *testing.T) {
	l, err := ParseRoutePatterns([]string{"GET /a", "/b/*"})
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{"/a": true, "/b/c": true, "/c": false} {
		if got := l.Match("GET", path); got != want {
			t.Errorf("GET %s: %v, want %v", path, got, want)
		}
	}
	if RoutePatterns(nil).Match("GET", "/") {
		t.Error("an empty list matches")
	}
	_, err = ParseRoutePatterns([]string{"GTE /a", "/ok", "b"})
	if err == nil || strings.Count(err.Error(), "\n") != 1 {
		t.Errorf("error %v, want two lines", err)
	}
}

func TestRoutePatternMatchDoesNotAllocate(t *testing.T) {
	l, err := ParseRoutePatterns([]string{"POST /prompt", "GET|POST /audio/*", "/x"})
	if err != nil {
		t.Fatal(err)
	}
	matched := true
	allocs := testing.AllocsPerRun(1000, func() {
		matched = matched && l.Match("POST", "/audio/long/path") && !l.Match("BREW", "/none")
	})
	if allocs != 0 || !matched {
		t.Errorf("%v allocations (matched %v), want none", allocs, matched)
	}
}

func BenchmarkRoutePatternsMatch(b *testing.B) {
	l, err := ParseRoutePatterns([]string{"POST /prompt", "GET|POST /audio/*", "/x"})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		l.Match("POST", "/audio/long/path")
	}
}
