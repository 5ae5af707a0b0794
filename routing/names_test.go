package routing

import (
	"encoding/json"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

func names(t *testing.T) *Names {
	t.Helper()
	n, err := NewNames([]Named{
		{Consumer: "ollama", Aliases: []string{"qwen2.5:7b", "llama3:latest", "org/phi", "ollama"}},
		{Consumer: "whisper", Aliases: []string{"whisper-1", "qwen2.5"}},
		{Consumer: "old", Aliases: []string{"whisper-0"}, Hidden: true},
	})
	require.NoError(t, err)
	return n
}

func TestNamesAndAliasesFindTheirConsumer(t *testing.T) {
	for name, want := range map[string]string{
		"ollama": "ollama", "qwen2.5:7b": "ollama", "llama3:latest": "ollama", "org/phi": "ollama", "whisper-1": "whisper", "whisper-0": "old",
		"llama3": "ollama", "org/phi:latest": "ollama", "whisper:latest": "whisper", "qwen2.5": "whisper", "qwen2.5:latest": "whisper",
		"": "", "Ollama": "", "qwen2.5:8b": "", "whisper-1:latest:latest": "", "llama3:8b": "", ":latest": "",
	} {
		who, ok := names(t).Lookup(name)
		consumer := who.Consumer
		require.Equal(t, want, consumer, name)
		require.Equal(t, want != "", ok, name)
	}
}

func TestANameForTwoConsumersIsAnError(t *testing.T) {
	_, err := NewNames([]Named{{Consumer: "a", Aliases: []string{"m", "b"}}, {Consumer: "b", Aliases: []string{"m"}}})
	require.ErrorContains(t, err, `requests for "m" could mean consumer "a" or "b"`)
	require.ErrorContains(t, err, `requests for "b" could mean`)
}

func TestN3_APatternFindsWhatNoNameDoes(t *testing.T) {
	fold := func(before, after, name string) bool {
		p := config.NamePattern{Before: strings.ToLower(before), After: strings.ToLower(after)}
		return p.Match(strings.ToLower(name))
	}
	n, err := NewNames([]Named{
		{Consumer: "ollama", Model: "llama", Aliases: []string{"claude-*", "claude-2"}, Match: fold, Same: strings.EqualFold},
		{Consumer: "ollama", Model: "qwen", Aliases: []string{"claude-3*", "*-mini"}, Match: fold, Same: strings.EqualFold},
		{Consumer: "hosted", Aliases: []string{"gpt-*", "claude-*-mini"}},
	})
	require.NoError(t, err)
	for name, want := range map[string]string{
		"claude-1": "llama", "CLAUDE-1": "llama", "claude-3": "qwen", "claude-3.5-mini": "qwen", "claude-1-mini": "", "gpt-4o": "", "x-mini": "qwen",
	} {
		_, known := n.Lookup(name)
		require.False(t, known, name)
		who, ok := n.Match(name)
		require.True(t, ok, name)
		require.Equal(t, want, who.Model, name)
	}
	for _, name := range []string{"GPT-4o", "claud", "", strings.Repeat("claude-", MaxName)} {
		_, ok := n.Match(name)
		require.False(t, ok, name)
	}
	who, known := n.Lookup("claude-2")
	require.True(t, known)
	require.Equal(t, "llama", who.Model)
	require.NotContains(t, n.Near("claude-*x"), "claude-*", "a pattern is no name")
	require.Zero(t, testing.AllocsPerRun(100, func() { n.Lookup("claude-2") }))
}

func TestN3_APatternOfTwoConsumersIsAnErrorThatNamesBothPlaces(t *testing.T) {
	for _, list := range [][]Named{
		{{Consumer: "a", Model: "m", Aliases: []string{"claude-*"}, At: "Caddyfile:3"}, {Consumer: "b", Aliases: []string{"claude-*"}, At: "Caddyfile:9"}},
		{{Consumer: "a", Model: "m", Aliases: []string{"Claude-*"}, At: "Caddyfile:3", Same: strings.EqualFold}, {Consumer: "b", Aliases: []string{"claude-*"}, At: "Caddyfile:9"}},
	} {
		_, err := NewNames(list)
		require.ErrorContains(t, err, `requests for "claude-*" could mean consumer "m" of "a" (Caddyfile:3) or "b" (Caddyfile:9): give it to one of them`)
	}
	_, err := NewNames([]Named{{Consumer: "a", Model: "m", Aliases: []string{"x-*", "x-*", "X-*"}, Same: strings.EqualFold}})
	require.NoError(t, err)
	same := []string{"m-*"}
	for range maxPatterns {
		same = append(same, "m-*")
	}
	_, err = NewNames([]Named{{Consumer: "a", Aliases: same}}) // one pattern, however often it is written
	require.NoError(t, err)
	var many []string
	for i := range maxPatterns + 1 {
		many = append(many, strconv.Itoa(i)+"-*")
	}
	_, err = NewNames([]Named{{Consumer: "a", Aliases: many}})
	require.ErrorContains(t, err, "257 aliases with a *: at most 256")
}

func TestAnUnlistedModelIsShownOnlyToThoseWhoNameIt(t *testing.T) {
	l := NewLists([]Listed{{Name: "seen"}, {Name: "hidden", Unlisted: true}})
	for path, shows := range map[string]bool{"/v1/models": false, "/api/tags": false, "/models": false, "/v1/models/hidden": true} {
		body, _ := l.Answer(httptest.NewRequest("GET", path, nil))
		require.Equal(t, shows, strings.Contains(string(body), "hidden"), path)
	}
}

func TestNearNamesAreProposedTheNearestFirst(t *testing.T) {
	n := names(t)
	near := n.Near("whisper-2")
	require.Equal(t, []string{"whisper-1", "whisper"}, near, "none that is hidden")
	require.Empty(t, n.Near("zzzzzz"))
	require.Empty(t, n.Near(""))
	require.Equal(t, []string{"whisper-1", "whisper-2"}, n.Near("whisper-3", "whisper-2", "whisper-0")[:2], "of others none that is hidden")
	many, err := NewNames([]Named{{Consumer: "aaaa1"}, {Consumer: "aaaa2"}, {Consumer: "aaaa3"}, {Consumer: "aaaa4"}})
	require.NoError(t, err)
	require.Len(t, many.Near("aaaa5"), 3)
}

func TestSourcesAreAskedInTheirOrder(t *testing.T) {
	s, err := NewSources([]config.ModelFrom{{Source: config.FromHeader, Name: "X-Model"}, {Source: config.FromBody, Name: ""}, {Source: config.FromPath, Name: "/models/*/infer"}, {Source: config.FromQuery, Name: ""}, {Source: config.FromBody, Name: "model_id"}, {Source: config.FromPath, Name: "/m/*"}})
	require.NoError(t, err)
	require.Equal(t, []string{"model", "model_id"}, s.Fields())
	for _, c := range []struct {
		target, header string
		body           []string
		want           string
	}{
		{"/models/c/infer?model=d", "a", []string{"b", "e"}, "a"},
		{"/models/c/infer?model=d", "", []string{"b", "e"}, "b"},
		{"/models/c/infer?model=d", "", []string{"", "e"}, "c"},
		{"/models/c?model=d", "", []string{"", "e"}, "d"},
		{"/models/c?model=", "", []string{"", "e"}, "e"},
		{"/m/f", "", []string{"", ""}, "f"},
		{"/m/f", "", nil, "f"},
		{"/models/c?model=d&model=d", "", nil, "d"},
		{"/x", "", nil, ""},
		{"/m/", "", nil, ""},
	} {
		r := httptest.NewRequest("POST", c.target, nil)
		r.Header.Set("X-Model", c.header)
		var body *Facts
		if c.body != nil {
			body = &Facts{Names: c.body}
		}
		name, err := s.Find(r, body)
		require.NoError(t, err)
		require.Equal(t, c.want, name, c.target)
	}
	r := httptest.NewRequest("GET", "/?model="+strings.Repeat("a", 513), nil)
	_, err = s.Find(r, nil)
	var fault *BadBody
	require.ErrorAs(t, err, &fault)
}

func TestSourcesThatCantBeReadAreErrors(t *testing.T) {
	_, err := NewSources([]config.ModelFrom{{Source: config.FromHeader, Name: ""}, {Source: config.FromPath, Name: ""}, {Source: config.FromPath, Name: "/a"}, {Source: config.FromPath, Name: "/*/x*"}, {Source: config.FromPath, Name: "*/a"}, {Source: config.FromPath, Name: "/*?a"}, {Source: "cookie", Name: "a"}})
	for _, want := range []string{"say which header", `path ""`, `path "/a": it must begin with a slash and hold a *`, `path "/*/x*": the first * stands`, `path "*/a": it must begin`, "leave out the query", `"cookie": one of body, query, header, path`} {
		require.ErrorContains(t, err, want)
	}
}

func TestPathPatternFindsTheDecodedName(t *testing.T) {
	p, err := ParsePathPattern("/models/*/infer")
	require.NoError(t, err)
	for path, want := range map[string]string{
		"/models/qwen/infer": "qwen", "/models/qwen2.5%3A7b/infer": "qwen2.5:7b", "/models/org%2Fphi/infer": "org/phi", "/models/org/phi/infer": "org/phi",
		"/models/a%20b/infer": "a b", "/models/a%252Fb/infer": "a%2Fb", "/models/infer": "", "/models//infer": "", "/models/qwen/infer/": "", "/x/models/qwen/infer": "",
	} {
		u, err := url.Parse(path)
		require.NoError(t, err)
		name, ok := p.Match(u.Path)
		require.Equal(t, want != "", ok, path)
		require.Equal(t, want, name, path)
	}
}

func TestN3_AFurtherWildcardOfAPathStandsForOneSegment(t *testing.T) {
	p, err := ParsePathPattern("/m/*/versions/*/infer")
	require.NoError(t, err)
	for path, want := range map[string]string{
		"/m/a/versions/1/infer": "a", "/m/org/a/versions/1/infer": "org/a", "/m/versions/versions/2/infer": "versions",
		"/m/a/versions//infer": "", "/m/a/versions/1/2/infer": "", "/m/a/infer": "", "/m//versions/1/infer": "", "/m/a/versions/1/infer/": "",
	} {
		name, ok := p.Match(path)
		require.Equal(t, want != "", ok, path)
		require.Equal(t, want, name, path)
	}
	r := httptest.NewRequest("POST", "/m/a%20b/versions/v%201/infer?x=1", nil)
	p.rename(r, "org/c")
	require.Equal(t, "/m/org/c/versions/v%201/infer?x=1", r.RequestURI)
	for _, text := range []string{"/m/*/x*", "/m/**", "/m/*x*/y", "/m/*/*y"} {
		_, err := ParsePathPattern(text)
		require.ErrorContains(t, err, "whole segment", text)
	}
	p, err = ParsePathPattern("/m/*/*")
	require.NoError(t, err)
	name, ok := p.Match("/m/org/a/1")
	require.True(t, ok)
	require.Equal(t, "org/a", name)
}

func TestListsHaveTheFormsOfOpenAIAndOllama(t *testing.T) {
	since := time.Unix(1_700_000_000, 0)
	l := NewLists([]Listed{{Name: "qwen", Size: 6 << 30, Since: since}, {Name: "org/phi:7b", Since: since}})
	answer := func(method, path string) string {
		r := httptest.NewRequest(method, path, nil)
		require.True(t, IsList(r))
		body, _ := l.Answer(r)
		return string(body)
	}
	require.JSONEq(t, `{"object":"list","data":[{"id":"qwen","object":"model","created":1700000000,"owned_by":"gpu_broker"},
		{"id":"org/phi:7b","object":"model","created":1700000000,"owned_by":"gpu_broker"}]}`, answer("GET", "/v1/models"))
	require.JSONEq(t, `{"id":"org/phi:7b","object":"model","created":1700000000,"owned_by":"gpu_broker"}`, answer("GET", "/v1/models/org%2Fphi:7b"))
	require.Equal(t, answer("GET", "/v1/models/org%2Fphi:7b"), answer("HEAD", "/v1/models/org/phi:7b"))
	require.Empty(t, answer("GET", "/v1/models/none"))
	var tags struct {
		Models []struct {
			Name, Model, Digest string
			Modified            time.Time `json:"modified_at"`
			Size                int64
			Details             map[string]any
		}
	}
	require.NoError(t, json.Unmarshal([]byte(answer("GET", "/api/tags")), &tags))
	require.Len(t, tags.Models, 2)
	m := tags.Models[0]
	require.Equal(t, "qwen qwen", m.Name+" "+m.Model)
	require.Len(t, m.Digest, 64)
	require.NotEqual(t, m.Digest, tags.Models[1].Digest)
	require.True(t, since.Equal(m.Modified))
	require.EqualValues(t, 6<<30, m.Size)
	require.Equal(t, []any{}, m.Details["families"])
	require.Contains(t, m.Details, "parameter_size")

	for _, c := range [][2]string{{"POST", "/v1/models"}, {"GET", "/v1/modelsx"}, {"GET", "/api/tags/x"}, {"GET", "/v1/chat/completions"}, {"DELETE", "/v1/models/a"}} {
		require.False(t, IsList(httptest.NewRequest(c[0], c[1], nil)), c)
	}
	none := NewLists(nil)
	body, _ := none.Answer(httptest.NewRequest("GET", "/v1/models", nil))
	require.JSONEq(t, `{"object":"list","data":[]}`, string(body))
	body, _ = none.Answer(httptest.NewRequest("GET", "/api/tags", nil))
	require.JSONEq(t, `{"models":[]}`, string(body))
}

func TestListsAnswerAtThePathsThatClientsAskFirst(t *testing.T) {
	l := NewLists([]Listed{{Name: "org/qwen", Size: 1}})
	for path, isList := range map[string]bool{"/v1/models": true, "/v1/models/": true, "/api/tags": true, "/api/tags/": true, "/models": false, "/models/": false, "/v1/models/org/qwen": true} {
		r := httptest.NewRequest("GET", path, nil)
		require.Equal(t, isList, IsList(r), path)
		require.Equal(t, strings.HasPrefix(path, "/models"), IsShortList(r), path)
		body, _ := l.Answer(r)
		require.Contains(t, string(body), "org/qwen", path)
		r.Header.Set("Connection", "Upgrade")
		r.Header.Set("Upgrade", "websocket")
		require.False(t, IsList(r) || IsShortList(r), "%s, as a WebSocket", path)
	}
	require.Contains(t, string(LoadedList([]Listed{{Name: "a", Size: 7}})), `"size_vram":7`)
	require.Contains(t, string(LoadedList([]Listed{{Name: "a"}})), `"expires_at":"9999-01-01T00:00:00Z"`)
	require.JSONEq(t, `{"models":[]}`, string(LoadedList(nil)))
}

func TestAPatternFitsNamesUpToTheirBound(t *testing.T) {
	n, err := NewNames([]Named{{Consumer: "a", Model: "m", Aliases: []string{"like-*"}}})
	require.NoError(t, err)
	longest := "like-" + strings.Repeat("x", MaxName-len("like-"))
	who, ok := n.Match(longest)
	require.True(t, ok)
	require.Equal(t, Found{Consumer: "a", Model: "m"}, who)
	_, ok = n.Match(longest + "x")
	require.False(t, ok)
}

func TestNamesUpToTheirBoundHaveNearOnes(t *testing.T) {
	known := strings.Repeat("x", MaxName-1)
	n, err := NewNames([]Named{{Consumer: known}})
	require.NoError(t, err)
	require.Equal(t, []string{known}, n.Near(known+"y"))
	require.Empty(t, n.Near(known+"yy"))
}
