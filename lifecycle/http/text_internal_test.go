package httplife

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/placeholders"
)

func TestAnItemIsWrittenAsItsPlaceInTheTextDemands(t *testing.T) {
	t.Setenv("TEST_TEXT", `v"1`)
	t.Setenv("TEST_JSON", `"v"`)
	for _, c := range []struct {
		in   string
		kind textKind
		item any
		want string
	}{
		{"/unload/{model}", pathText, "a b/c?", "/unload/a%20b%2Fc%3F"},
		{"/unload?name={model}", pathText, "a b/c&", "/unload?name=a+b%2Fc%26"},
		{"/{model}?x={model}", pathText, "a b", "/a%20b?x=a+b"},
		{"name={model}", formText, "a b&c", "name=a+b%26c"},
		{`{"name":"{model}"}`, jsonText, `a"b`, `{"name":"a\"b"}`},
		{`{"name":{model}}`, jsonText, `a"b`, `{"name":"a\"b"}`},
		{`{"id":{model}}`, jsonText, 7.0, `{"id":7}`},
		{`{"id":"{model}"}`, jsonText, 7.0, `{"id":"7"}`},
		{`{"a":"\"","name":{model}}`, jsonText, "b", `{"a":"\"","name":"b"}`},
		{`{"a":"\\","name":"{model}"}`, jsonText, `"`, `{"a":"\\","name":"\""}`},
		{`{"a":"{env.TEST_TEXT}","b":"{model}"}`, jsonText, "b", `{"a":"v\"1","b":"b"}`},
		{`{"a":{env.TEST_JSON},"b":"{model}"}`, jsonText, "b", `{"a":"v","b":"b"}`},
		{`"{env.TEST_TEXT}" {model}`, rawText, "b", `"v"1" b`},
		{"{env.TEST_TEXT} {model}", rawText, `b"`, `v"1 b"`},
		{`\{model} {model}`, rawText, "b", "{model} b"},
		{`\{env.TEST_TEXT\} {model}`, rawText, "b", "{env.TEST_TEXT} b"},
		{`a\{env.TEST_TEXT}b\{model}`, rawText, "b", "a{env.TEST_TEXT}b{model}"},
		{`{"a":{"b":1}}`, rawText, "", `{"a":{"b":1}}`},
		{"", rawText, "", ""},
	} {
		c0 := &compiler{values: placeholders.Values{}}
		text := c0.text("path", c.in, c.kind, modelItem)
		require.Empty(t, c0.faults, c.in)
		require.Equal(t, c.want, text.render(c.item), c.in)
	}
	for in, want := range map[string]string{"{item}": "path has {item}", "{model}": "path has {model}", "{env.TEST_NO_SUCH_TEXT}": "TEST_NO_SUCH_TEXT", "{other}": "other"} {
		c := &compiler{values: placeholders.Values{}}
		_ = c.text("path", in, pathText)
		require.Len(t, c.faults, 1, in)
		require.ErrorContains(t, c.faults[0], want)
	}
}

func TestATextIsJSONIfItIsOnceItsPlaceholdersAreFilledIn(t *testing.T) {
	for in, want := range map[string]bool{
		`{"a":{model}}`: true, `{"a":"{model}"}`: true, `{"a":"x{model}y"}`: true, "{model}": true, `{"a":1}`: true,
		"name={model}": false, `{"a":x{model}}`: false, "": false, `{"a":`: false,
	} {
		require.Equal(t, want, isJSON(in), in)
	}
}
