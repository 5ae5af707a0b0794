package process

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/placeholders"
)

func TestAWordOfACommandHoldsPlaceholdersOnlyWhereItSaysSo(t *testing.T) {
	t.Setenv("TEST_WORD", "value")
	for in, want := range map[string]string{
		"":                                 "",
		"plain":                            "plain",
		"{env.TEST_WORD}":                  "value",
		"a{env.TEST_WORD}b":                "avalueb",
		"{env.TEST_WORD}{gpu_broker.port}": "value9101",
		`\{env.TEST_WORD}`:                 "{env.TEST_WORD}",
		`a\{gpu_broker.port} b`:            "a{gpu_broker.port} b",
		`{"a": {"b": 1}}`:                  `{"a": {"b": 1}}`,
		"{{ .Prompt }} {other.thing}":      "{{ .Prompt }} {other.thing}",
		"{env.TEST WORD} {env.}":           "{env.TEST WORD} {env.}",
	} {
		c := &compiler{values: placeholders.Values{}}
		text := c.text("command", in)
		require.Empty(t, c.faults, in)
		require.Equal(t, want, text.render(map[string]string{"{gpu_broker.port}": "9101"}), in)
		require.Equal(t, strings.Contains(want, "value"), len(c.values) > 0, "what is no placeholder is no secret: %s", in)
		require.Equal(t, in == "{env.TEST_WORD}{gpu_broker.port}", text.has("{gpu_broker.port}"), in)
	}
	for _, in := range []string{"a\x00b", "{gpu_broker.prot}", "{env.TEST_NO_SUCH_WORD}"} {
		c := &compiler{values: placeholders.Values{}}
		_ = c.text("command", in)
		require.Len(t, c.faults, 1, "%q", in)
	}
}

func TestPortsAreARangeOrOne(t *testing.T) {
	for in, want := range map[string]span{
		"9100-9199": {9100, 9199}, "1 - 65535": {1, 65535}, "80": {80, 80}, "80-80": {80, 80},
		"0": {}, "0-1": {}, "80-79": {}, "1-65536": {}, "-1": {}, "1-": {}, "-": {}, "": {}, "a-b": {}, "1-2-3": {},
	} {
		got, err := parseSpan(in)
		require.Equal(t, want, got, in)
		require.Equal(t, want == span{}, err != nil, in)
	}
	require.Equal(t, "9100-9199", defaultPorts.String(), "as is documented")
}
