package routing

import (
	"io"
	"mime"
	"mime/multipart"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// changed is the body that a server would get.
func changed(t testing.TB, p *Plan, contentType, body, name string, c *Change) string {
	t.Helper()
	r, y := post(t, contentType, []byte(body))
	_, err := y.Peek(r.Context(), r.Header, p)
	require.NoError(t, err, "%.80s", body)
	y.Change(p, "another", c) // a second call replaces the first
	y.Change(p, name, c)
	y.Rewind(r)
	rest, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	require.EqualValues(t, len(rest), r.ContentLength)
	return string(rest)
}

func TestN3_TheNameIsReplacedAndEveryOtherByteStays(t *testing.T) {
	p := plan(t, []string{"model", "model_id"}, []string{"x_mine"}, false)
	large := strings.Repeat("b", 3*memoryBody)
	for _, c := range []struct{ body, want string }{
		{`{"model":"gpt"}`, `{"model":"qwen \"2\""}`},
		{`{ "a" : 1.0e1 , "model" : "gpt" , "b":"\u00e9" }` + "\n", `{ "a" : 1.0e1 , "model" : "qwen \"2\"" , "b":"\u00e9" }` + "\n"},
		{`{"model":"gpt","model":"gpt"}`, `{"model":"qwen \"2\"","model":"qwen \"2\""}`},
		{`{"x_mine":1,"model":"gpt","x_priority":2}`, `{"model":"qwen \"2\""}`},
		{`{"model_id":"gpt","model":null}`, `{"model_id":"qwen \"2\"","model":null}`},
		{`{"model":"","model_id":"gpt"}`, `{"model":"","model_id":"qwen \"2\""}`},
		{`{"messages":[{"model":"gpt"}],"mod\u0065l":"g\u0070t"}`, `{"messages":[{"model":"gpt"}],"mod\u0065l":"qwen \"2\""}`},
		{`{"x":"` + large + `","model":"gpt","y":"` + large + `"}`, `{"x":"` + large + `","model":"qwen \"2\"","y":"` + large + `"}`},
		{"\uFEFF{\"model\":\"gpt\"}", "\uFEFF{\"model\":\"qwen \\\"2\\\"\"}"},
		{`[{"model":"gpt"}]`, `[{"model":"gpt"}]`},
		{`{}`, `{}`},
	} {
		got := changed(t, p, jsonType, c.body, `qwen "2"`, nil)
		require.True(t, c.want == got, "%.80s became %.80s", c.body, got)
	}
	require.Equal(t, "a=1&model=qwen+%222%22&model=qwen+%222%22&b=%zz", changed(t, p, formType, "a=1&model=gpt&model=g%70t&b=%zz", `qwen "2"`, nil))
	body, kind := parts(t, "a", "gpt", "file!", "model\r\ngpt\r\n", "model", "gpt", "model", "gpt", "model_id", "gpt")
	require.Equal(t, strings.ReplaceAll(body, "\"model\"\r\n\r\ngpt", "\"model\"\r\n\r\nqwen"), strings.Replace(changed(t, p, kind, body, "qwen", nil), "_id\"\r\n\r\nqwen", "_id\"\r\n\r\ngpt", 1))
	body, kind = parts(t, "file!", large, "model", "gpt", "z", large)
	require.True(t, strings.Replace(body, "gpt", "a longer name", 1) == changed(t, p, kind, body, "a longer name", nil))
	require.Equal(t, body, changed(t, p, kind, body, "", nil))
}

func TestN3_ANameComesWhereThereIsNone(t *testing.T) {
	p := plan(t, []string{"model", "model_id"}, []string{"x_mine"}, false)
	p.Fold()
	c := (*Change)(nil).WithName(`a "b"`)
	for body, want := range map[string]string{
		`{}`:                               `{"model":"a \"b\""}`,
		`{ "a" : 1 }`:                      `{ "a" : 1,"model":"a \"b\"" }`,
		`{"x_mine":1}`:                     `{"model":"a \"b\""}`,
		`{"a":1,"x_priority":2}`:           `{"a":1,"model":"a \"b\""}`,
		`{"model":"","a":1}`:               `{"model":"a \"b\"","a":1}`,
		`{"model":null}`:                   `{"model":"a \"b\""}`,
		`{"model":"given"}`:                `{"model":"given"}`,
		`{"Model":"","model_id":null}`:     `{"Model":"","model_id":null,"model":"a \"b\""}`,
		`{"messages":[{"model":"given"}]}`: `{"messages":[{"model":"given"}],"model":"a \"b\""}`,
		`[]`:                               `[]`,
	} {
		require.Equal(t, want, changed(t, p, jsonType, body, "", c), body)
	}
	for body, want := range map[string]string{"a=1": "model=a+%22b%22&a=1", "a=1&model=": "a=1&model=a+%22b%22", "model=given": "model=given", "model&a=1": "model=a+%22b%22&a=1"} {
		require.Equal(t, want, changed(t, p, formType, body, "", c), body)
	}

	body, kind := parts(t, "language", "en", "file!", "model\r\ngpt\r\n")
	_, params, err := mime.ParseMediaType(kind)
	require.NoError(t, err)
	got := changed(t, p, kind, body, "", c)
	require.Equal(t, "--"+params["boundary"]+"\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\na \"b\"\r\n"+body, got)
	form, err := multipart.NewReader(strings.NewReader(got), params["boundary"]).ReadForm(1 << 20)
	require.NoError(t, err)
	require.Equal(t, map[string][]string{"model": {`a "b"`}, "language": {"en"}}, form.Value)
	require.Len(t, form.File["file"], 1)
	body, kind = parts(t, "model", "", "file!", "x")
	require.Equal(t, strings.Replace(body, "\"model\"\r\n\r\n", "\"model\"\r\n\r\na \"b\"", 1), changed(t, p, kind, body, "", c))
	body, kind = parts(t, "model", "given", "file!", "x")
	require.Equal(t, body, changed(t, p, kind, body, "", c))
}

func TestN3_FieldsAreSetDefaultedAndStripped(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	change := &Change{Set: []Field{{"temperature", "0.5"}}, Default: []Field{{"top_p", `{"a":1}`}}, Strip: []string{"seed", "n"}}
	require.NoError(t, p.Mark(change.Fields()))
	for _, c := range []struct{ body, want string }{
		{`{}`, `{"temperature":0.5,"top_p":{"a":1}}`},
		{"{ \n}", "{\"temperature\":0.5,\"top_p\":{\"a\":1} \n}"},
		{`{"model":"m"}`, `{"model":"m","temperature":0.5,"top_p":{"a":1}}`},
		{`{"model":"m" }`, `{"model":"m","temperature":0.5,"top_p":{"a":1} }`},
		{`{"temperature":[1,{}],"top_p":2}`, `{"temperature":0.5,"top_p":2}`},
		{`{"temperature":1,"top_p":null,"temperature":2}`, `{"temperature":0.5,"top_p":{"a":1},"temperature":0.5}`},
		{`{"seed":1}`, `{"temperature":0.5,"top_p":{"a":1}}`},
		{`{"seed":1,"n":2}`, `{"temperature":0.5,"top_p":{"a":1}}`},
		{`{"a":1,"seed":1}`, `{"a":1,"temperature":0.5,"top_p":{"a":1}}`},
		{`{"seed":1,"a":1,"n":3,"b":2,"n":3}`, `{"a":1,"b":2,"temperature":0.5,"top_p":{"a":1}}`},
		{`{"top_p":1,"seed":1,"temperature":9}`, `{"top_p":1,"temperature":0.5}`},
		{`{"top_p":1,"temperature":9,"seed":1}`, `{"top_p":1,"temperature":0.5}`},
		{`{"top_p":1,"x_priority":1,"seed":2,"x_cooldown":3}`, `{"top_p":1,"temperature":0.5}`},
		{`{"a":{"seed":1,"temperature":2},"Seed":4,"top_p":0}`, `{"a":{"seed":1,"temperature":2},"Seed":4,"top_p":0,"temperature":0.5}`},
		{`["seed"]`, `["seed"]`},
	} {
		require.Equal(t, c.want, changed(t, p, jsonType, c.body, "", change), c.body)
	}
	for kind, body := range map[string]string{formType: "seed=1&model=m", "audio/wav": "seed"} {
		require.Equal(t, body, changed(t, p, kind, body, "", change))
	}
	require.Equal(t, `{"model":"other","temperature":0.5,"top_p":{"a":1}}`, changed(t, p, jsonType, `{"model":"m","n":1}`, "other", change))
}

func TestN3_AServerThatFoldsCaseGetsNoFieldInAnotherCase(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	change := &Change{Set: []Field{{"temperature", "0.5"}}, Strip: []string{"seed"}, FoldKeys: true}
	require.NoError(t, p.Mark(change.Fields()))
	p.Fold()
	require.Equal(t, `{"TEMPERATURE":0.5}`, changed(t, p, jsonType, `{"Seed":1,"TEMPERATURE":2,"ſeed":3}`, "", change))
	change.FoldKeys = false
	require.Equal(t, `{"Seed":1,"TEMPERATURE":2,"temperature":0.5}`, changed(t, p, jsonType, `{"Seed":1,"TEMPERATURE":2}`, "", change))
}

func TestN3_QueryHeaderAndPathAreRenamedByteForByte(t *testing.T) {
	s, err := NewSources([]config.ModelFrom{{Source: config.FromQuery}, {Source: config.FromHeader, Name: "X-Model"}, {Source: config.FromPath, Name: "/m/*/x"}})
	require.NoError(t, err)
	for _, c := range []struct{ was, name, target, want string }{
		{"gpt", "qwen 2:7b", "/?a=%7e&model=gpt&b=1;2", "/?a=%7e&model=qwen+2%3A7b&b=1;2"},
		{"gpt", "q", "/?model=gpt&x=gpt&mod%65l=g%70t&model=", "/?model=q&x=gpt&mod%65l=q&model="},
		{"gpt", "q", "/?models=gpt", "/?models=gpt"},
		{"gpt", "q", "/?model=other", "/?model=q"},
		{"gpt", "q", "/?model=%71", "/?model=%71"},
		{"gpt", "org/q", "/m/gpt/x?a=1", "/m/org/q/x?a=1"},
		{"a/b", "org/q", "/m/a%2fb/x", "/m/org%2Fq/x"},
		{"a/b", "org/q", "/m/a/b/x", "/m/org/q/x"},
		{"gpt", "a b?%", "/%6d/gpt/%78", "/%6d/a%20b%3F%25/%78"},
		{"é", "q", "/m/%C3%A9/x", "/m/q/x"},
		{"gpt", "q", "/m/gpt", "/m/gpt"},
		{"gpt", "q", "/m/other/x", "/m/q/x"},
		{"gpt", "q", "/m/gpt/x?model=other&model=gpt", "/m/q/x?model=other&model=q"},
		{"gpt", "q", "/m/other/x?model=more", "/m/q/x?model=q"},
		{"gpt", "gpt", "/m/%67pt/x?model=%67pt", "/m/%67pt/x?model=%67pt"},
	} {
		r := httptest.NewRequest("GET", c.target, nil)
		r.Header.Set("X-Model", c.was)
		s.Rename(r, c.was, c.name)
		require.Equal(t, c.want, r.URL.RequestURI(), c.target)
		require.Equal(t, c.name, r.Header.Get("X-Model"))
	}
	r := httptest.NewRequest("GET", "/", nil)
	s.Rename(r, "gpt", "q")
	require.Empty(t, r.Header)
	r.Header["X-Model"] = []string{"", "another"}
	s.Rename(r, "gpt", "q")
	require.Equal(t, []string{"q"}, r.Header["X-Model"])

	r = httptest.NewRequest("GET", "/m/gpt/x", nil)
	r.Header.Set("X-Model", "another")
	s.Rename(r, "gpt", "q")
	require.Equal(t, "another", r.Header.Get("X-Model"), "the path counts alone")
}
