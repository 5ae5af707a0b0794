package config

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
)

// ask is a request as a handler sees it: the target is as it stands in the request line, headers are "Name: value".
func ask(t *testing.T, method, target string, headers ...string) *http.Request {
	t.Helper()
	r := httptest.NewRequest("GET", "/", nil)
	u, err := r.URL.Parse("http://site" + target)
	if strings.HasPrefix(target, "//") { // not a host
		u, err = r.URL.Parse("http://site/." + target)
		u.Path, u.RawPath = strings.TrimPrefix(u.Path, "/."), ""
	}
	if err != nil {
		t.Fatal(err)
	}
	r.Method, r.URL = method, u
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		r.Header.Add(name, value)
	}
	return r
}

func routes(t *testing.T, c Consumer) *Routes {
	t.Helper()
	r, err := NewRoutes(&c, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

var websocket = []string{"Connection: keep-alive, Upgrade", "Upgrade: websocket"}

func TestK2_WhatNoListNamesTakesATurnWhereRequestsCompute(t *testing.T) {
	computes := routes(t, Consumer{GPURoutes: []string{"POST /generate", "GET /health"}, FreeRoutes: []string{"POST /tokenize", "GET /ws"}, Bypass: []string{"POST /cheap", "/own/*"},
		Touch: []string{"POST /touch"}, Blocked: []string{"/sleep", "POST /unload*"}, UnlistedRequests: UnlistedGPU})
	for _, c := range []struct {
		method, target string
		headers        []string
		want           Need
	}{
		{"POST", "/generate", nil, NeedsGPU},
		{"POST", "/invocations", nil, NeedsTurn},
		{"PUT", "/generate", nil, NeedsTurn},
		{"PATCH", "/anything", nil, NeedsTurn},
		{"DELETE", "/v1/models/x", nil, NeedsTurn},
		{"QUERY", "/search", nil, NeedsTurn},
		{"BREW", "/coffee", nil, NeedsTurn},
		{"post", "/generate", nil, NeedsGPU},
		{"GET", "/v1/models", nil, NeedsNothing},
		{"GET", "/v1/realtime", websocket, NeedsTurn},
		{"GET", "/v1/realtime", []string{"Connection: upgrade", "Upgrade: WebSocket"}, NeedsTurn},
		{"GET", "/v1/realtime", []string{"Upgrade: websocket"}, NeedsNothing}, // no server upgrades that
		{"GET", "/v1/models", []string{"Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"}, NeedsNothing},
		{"GET", "/v1/realtime", []string{"Connection: Upgrade", "Upgrade: websocket", "Upgrade: h2c"}, NeedsTurn}, // a proxy passes the first on
		{"GET", "/v1/realtime", []string{"Connection: Upgrade", "Upgrade: h2c, websocket"}, NeedsTurn},
		{"CONNECT", "/v1/realtime", nil, NeedsTurn},
		{"CONNECT", "/ws", nil, NeedsNothing},
		{"GET", "/ws", websocket, NeedsNothing},
		{"GET", "/health", nil, NeedsGPU},
		{"HEAD", "/health", nil, NeedsGPU},
		{"HEAD", "/v1/models", nil, NeedsNothing},
		{"OPTIONS", "/generate", nil, NeedsNothing},
		{"OPTIONS", "/sleep", nil, NeedsLeave},
		{"HEAD", "/sleep", nil, NeedsLeave},
		{"POST", "/tokenize", nil, NeedsNothing},
		{"POST", "/tokenize/", nil, NeedsTurn},
		{"POST", "/cheap", nil, NeedsNothing},
		{"POST", "/own/anything", nil, NeedsNothing},
		{"POST", "/own/../generate", nil, NeedsGPU},
		{"POST", "/own/%2e%2e/generate", nil, NeedsGPU},
		{"POST", "/own/..%2finvocations", nil, NeedsTurn},
		{"POST", "/own/%252e%252e/invocations", nil, NeedsTurn},
		{"POST", `/own/..\invocations`, nil, NeedsTurn},
		{"POST", "/own/..;x/invocations", nil, NeedsTurn},
		{"POST", "/own/x%3f/%2e%2e/%2e%2e/generate", nil, NeedsGPU}, // for some servers the path doesn't end at a decoded question mark
		{"POST", "/own/x%23/%2e%2e/%2e%2e/invocations", nil, NeedsTurn},
		{"POST", "/own/x%00/%2e%2e/%2e%2e/generate", nil, NeedsGPU},
		{"POST", "/own/%25zz/%252e%252e/%252e%252e/generate", nil, NeedsGPU}, // what is no escape keeps no escape beside it from being decoded
		{"POST", "/own/x%3fy", nil, NeedsNothing},
		{"POST", "/touch", nil, NeedsTouch},
		{"POST", "/touch/../x", nil, NeedsTurn},
	} {
		if got := computes.Needs(ask(t, c.method, c.target, c.headers...)); got != c.want {
			t.Errorf("%s %s %v: %s, want %s", c.method, c.target, c.headers, got, c.want)
		}
	}
}

func TestK2_ListsDecideWhereTheyAreAllThereIs(t *testing.T) {
	lists := routes(t, Consumer{GPURoutes: []string{"POST /prompt"}, FreeRoutes: []string{"POST /interrupt", "GET /ws"}})
	none := routes(t, Consumer{Bypass: []string{"GET /audio/*"}})
	for _, c := range []struct {
		method, target string
		headers        []string
		lists, none    Need
	}{
		{"POST", "/prompt", nil, NeedsGPU, NeedsGPU},
		{"POST", "/other", nil, NeedsLoaded, NeedsGPU},
		{"PUT", "/other", nil, NeedsLoaded, NeedsGPU},
		{"GET", "/other", nil, NeedsNothing, NeedsGPU},
		{"HEAD", "/other", nil, NeedsNothing, NeedsNothing},
		{"GET", "/audio/1", nil, NeedsNothing, NeedsNothing},
		{"POST", "/interrupt", nil, NeedsNothing, NeedsGPU},
		{"GET", "/ws", websocket, NeedsNothing, NeedsGPU},
		{"GET", "/socket", websocket, NeedsLoaded, NeedsGPU},
		{"OPTIONS", "/prompt", nil, NeedsNothing, NeedsNothing},
	} {
		r := ask(t, c.method, c.target, c.headers...)
		if got := lists.Needs(r); got != c.lists {
			t.Errorf("with lists, %s %s: %s, want %s", c.method, c.target, got, c.lists)
		}
		if got := none.Needs(r); got != c.none {
			t.Errorf("without, %s %s: %s, want %s", c.method, c.target, got, c.none)
		}
	}
}

func TestH3_NoSpellingOfAPathGetsPastAList(t *testing.T) {
	exact := Consumer{GPURoutes: []string{"GET /health"}, Blocked: []string{"/api/admin/*", "POST /sleep", "GET /unload"}, UnlistedRequests: UnlistedFree}
	for _, target := range []string{"/api/admin/reload_config", "/api//admin/reload_config", "//api/admin/x", "/api/./admin/x", "/x/../api/admin/x", "/api%2fadmin%2fx", "/%61pi/admin/x",
		"/api/%2e/admin/x", "/api/admin;a=b/x", `/api\admin\x`, "/api%5cadmin/x", "/api%252fadmin/x"} {
		if got := routes(t, exact).Needs(ask(t, "POST", target)); got != NeedsLeave {
			t.Errorf("POST %s: %s, want it refused", target, got)
		}
	}
	for _, target := range []string{"/sleep", "/sleep/", "/sleep//", "//sleep", "/sleep%20", "/sleep%00", "/sleep%00/x", "/x%3f/%2e%2e/sleep", "/x%23/%2e%2e/sleep", "/%25zz/%252e%252e/sleep", "/sleep;x", "/sleep%3flevel=1", "/sleep?level=1", "/SLEEP"} {
		for _, method := range []string{"POST", "post"} {
			want := NeedsLeave
			if target == "/SLEEP" { // another route at this server
				want = NeedsLoaded
			}
			if got := routes(t, exact).Needs(ask(t, method, target)); got != want {
				t.Errorf("%s %s: %s, want %s", method, target, got, want)
			}
		}
	}
	for _, method := range []string{"GET", "HEAD", "CONNECT", "FOO"} {
		if got := routes(t, exact).Needs(ask(t, method, "/unload")); got != NeedsLeave {
			t.Errorf("%s /unload: %s", method, got)
		}
	}
	exact.PathMatch = []string{"caseless", "merge_slashes"}
	for _, target := range []string{"/SLEEP", "/Api/Admin/x", "/api/ADMIN//x"} {
		if got := routes(t, exact).Needs(ask(t, "POST", target)); got != NeedsLeave {
			t.Errorf("caseless, POST %s: %s, want it refused", target, got)
		}
	}
}

func TestH3_AServerThatMatchesByTheEndIsAskedForByTheEnd(t *testing.T) {
	kobold := routes(t, Consumer{GPURoutes: []string{"POST /api/v1/generate", "POST /v1/chat/completions"}, FreeRoutes: []string{"POST /api/extra/tokencount", "POST /files/*"},
		Bypass: []string{"/ui/*", "POST /v1/embeddings"}, Blocked: []string{"/api/admin/*"}, PathMatch: []string{"suffix", "trim_slash", "query"}, UnlistedRequests: UnlistedGPU})
	for target, want := range map[string]Need{
		"/x/v1/chat/completions":                       NeedsGPU,
		"//api/v1/generate":                            NeedsGPU,
		"/api/v1/generate///":                          NeedsGPU,
		"/x/api/admin/reload_config":                   NeedsLeave,
		"/x%2fapi%2fadmin%2freload_config":             NeedsLeave,
		"/x?y=/api/admin/reload_config":                NeedsLeave,
		"/api/extra/tokencount":                        NeedsNothing,
		"/x/api/extra/tokencount/":                     NeedsNothing,
		"/api/extra/tokencount?a=b":                    NeedsNothing,
		"/api/extra/tokencount?x=/api/v1/generate":     NeedsGPU,
		"/api/extra/tokencount/v1/chat/completions":    NeedsGPU,
		"/files/v1/chat/completions":                   NeedsGPU,
		"/files/a":                                     NeedsNothing,
		"/ui/page":                                     NeedsNothing,
		"/ui/v1/chat/completions":                      NeedsGPU,
		"/x/v1/embeddings":                             NeedsNothing,
		"/api/latest/generate":                         NeedsTurn,
		"/api/extra/tokencount%2f..%2f..%2fv1/unknown": NeedsTurn,
	} {
		if got := kobold.Needs(ask(t, "POST", target)); got != want {
			t.Errorf("POST %s: %s, want %s", target, got, want)
		}
	}
}

// A server that resolves dots may leave backslashes alone, or take them for slashes.
func TestH3_ABackslashHidesNoRoute(t *testing.T) {
	r := routes(t, Consumer{GPURoutes: []string{"POST /generate"}, Blocked: []string{"/admin"}, Bypass: []string{"/ui/*"}})
	for target, want := range map[string]Need{
		"/ui/x%5Cy/../../generate": NeedsGPU, "/ui/x%5C../../generate": NeedsGPU, "/ui/x%5Cy/../../admin": NeedsLeave, "/ui/x%5Cy/../../admin%23": NeedsLeave, "/ui/x%5Cy": NeedsNothing,
	} {
		req := ask(t, "POST", "/")
		var err error
		if req.URL.Path, err = url.PathUnescape(target); err != nil {
			t.Fatal(err)
		}
		if got := r.Needs(req); got != want {
			t.Errorf("POST %s: %s, want %s", target, got, want)
		}
	}
}

// A list that names a path by its beginning does not open what a server takes for another route by the end of its path.
func TestWhatPassesByItsBeginningIsNoOtherRouteByItsEnd(t *testing.T) {
	for _, c := range []Consumer{{Bypass: []string{"/ui/*", "/unload"}, Touch: []string{"/seen/*"}}, {Bypass: []string{"/ui/*", "/unload"}, Touch: []string{"/seen/*"}, PathMatch: []string{"suffix"}}} {
		r := routes(t, c)
		match, err := ParsePathMatch(c.PathMatch)
		if err != nil {
			t.Fatal(err)
		}
		asks, err := match.Patterns([]string{"POST /unload", "POST /free"})
		if err != nil {
			t.Fatal(err)
		}
		bySuffix := c.PathMatch != nil
		for target, want := range map[string]bool{"/unload": true, "/x/unload": bySuffix, "/ui/unload": true, "/ui/free": !bySuffix, "/seen/free": !bySuffix, "/seen/it": true, "/free": false} {
			req := ask(t, "POST", target)
			if got := r.Passes(req, r.Needs(req), asks); got != want {
				t.Errorf("%v, POST %s: %t", c.PathMatch, target, got)
			}
		}
	}
}

func TestAPatternMayAskForAQueryParameter(t *testing.T) {
	router := routes(t, Consumer{GPURoutes: []string{"GET /*?model"}, UnlistedRequests: UnlistedGPU})
	for target, want := range map[string]Need{"/props": NeedsNothing, "/props?model=x": NeedsGPU, "/props?a=1&%6dodel=x": NeedsGPU, "/props?Model=x": NeedsGPU, "/props?models=x": NeedsNothing, "/props?a=model": NeedsNothing} {
		if got := router.Needs(ask(t, "GET", target)); got != want {
			t.Errorf("GET %s: %s, want %s", target, got, want)
		}
	}
}

func TestNeedsOfAPlainRequestAllocatesNothing(t *testing.T) {
	all := routes(t, Consumer{GPURoutes: []string{"POST /generate", "GET /*?model"}, FreeRoutes: []string{"POST /tokenize"}, Bypass: []string{"/own/*"}, Blocked: []string{"/sleep"},
		PathMatch: []string{"suffix", "trim_slash", "query"}, UnlistedRequests: UnlistedGPU})
	r := ask(t, "POST", "/v1/chat/completions")
	if n := testing.AllocsPerRun(1000, func() { all.Needs(r) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkNeeds(b *testing.B) {
	r, err := NewRoutes(&Consumer{GPURoutes: []string{"POST /v1/completions", "POST /v1/embeddings", "POST /v1/chat/completions"}, FreeRoutes: []string{"POST /tokenize"}, Blocked: []string{"/sleep", "/wake_up"}, UnlistedRequests: UnlistedGPU}, nil, nil)
	if err != nil {
		b.Fatal(err)
	}
	req := httptest.NewRequest("POST", "/v1/chat/completions", nil)
	b.ReportAllocs()
	for b.Loop() {
		r.Needs(req)
	}
}

func FuzzSimplifiedPathsHaveNothingLeftToSimplify(f *testing.F) {
	for _, p := range []string{"/", "/a//b", "/%2e%2e/a", `\a;b/..`, "/%25252e", "/a%00", "", "?", "//", "/a/.", "/;/;"} {
		f.Add(p)
	}
	f.Fuzz(func(t *testing.T, p string) {
		c := simplified(strings.ReplaceAll(decoded(p), `\`, "/"))
		if !strings.HasPrefix(c, "/") || strings.Contains(c, "//") || strings.Contains(c, `\`) || strings.Contains(c, "/../") || len(c) > 1 && strings.HasSuffix(c, "/") {
			t.Errorf("%q is simplified to %q", p, c)
		}
		if isPlain(p) && c != p {
			t.Errorf("%q is plain, but simplified to %q", p, c)
		}
	})
}
