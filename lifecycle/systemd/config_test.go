package systemd_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/systemd"
)

func TestCaddyfileIsRead(t *testing.T) {
	for text, want := range map[string]string{
		"systemd llama.service":      `{"unit": "llama.service"}`,
		"systemd llama {\n user\n}":  `{"unit": "llama", "user": true}`,
		"systemd {env.UNIT}.service": `{"unit": "{env.UNIT}.service"}`,
	} {
		l := new(systemd.Lifecycle)
		require.NoError(t, l.UnmarshalCaddyfile(caddyfile.NewTestDispenser(text)), text)
		got, err := json.Marshal(l)
		require.NoError(t, err)
		require.JSONEq(t, want, string(got), text)
	}
}

func TestCaddyfileFaultsSayWhatIsWanted(t *testing.T) {
	for text, want := range map[string]string{
		"systemd":                      "systemd takes the name of one unit",
		"systemd a b":                  "systemd takes the name of one unit",
		"systemd a {\n user me\n}":     "user takes no value",
		"systemd a {\n user\n user\n}": "given twice",
		"systemd a {\n freeze\n}":      "keeps its GPU memory",
		"systemd a {\n host b\n}":      "there is user",

		"systemd a {\n host b\n user me you\n}": "there is user, at Testfile:2\nsystemd: user takes no value, at Testfile:3",
	} {
		require.ErrorContains(t, new(systemd.Lifecycle).UnmarshalCaddyfile(caddyfile.NewTestDispenser(text)), want, text)
	}
}

func TestConfigurationIsChecked(t *testing.T) {
	t.Setenv("UNIT", "llama")
	for config, want := range map[string]string{
		`{"unit": "llama"}`:                                      "",
		`{"unit": "llama@7b.service"}`:                           "",
		`{"unit": "qwen2.5-7b"}`:                                 "",
		`{"unit": "{env.UNIT}"}`:                                 "",
		`{"unit": "llama", "server": {"health": {"path": "/"}}}`: "",
		`{"unit": ""}`:                                           "is no name of a service",
		`{"unit": "llama.socket"}`:                               "is a socket: want a service",
		`{"unit": "llama@.service"}`:                             "is no name of a service",
		`{"unit": "a/b.service"}`:                                "is no name of a service",
		`{"unit": "` + strings.Repeat("a", 250) + `"}`:           "is no name of a service",
		`{"unit": "{env.NOT_SET_ANYWHERE}"}`:                     "env.NOT_SET_ANYWHERE",
		`{"unit": "llama", "server": {"health": {"path": "x"}}}`: "server",
	} {
		_, err := provision(t, config)
		if want == "" {
			require.NoError(t, err, config)
		} else {
			require.ErrorContains(t, err, want, config)
		}
	}
}

func TestOpenNeedsAnUpstream(t *testing.T) {
	l, err := provision(t, `{"unit": "llama"}`)
	require.NoError(t, err)
	_, err = l.Open(lifecycle.Deps{Consumer: "mvoice"})
	require.ErrorContains(t, err, "consumer mvoice")
	require.ErrorContains(t, err, "upstream host:port")
	_, err = new(systemd.Lifecycle).Open(lifecycle.Deps{Upstream: "localhost:1"})
	require.ErrorContains(t, err, "provisioned")
}

func TestFingerprintDiffersWithThePlaceholders(t *testing.T) {
	key := func(unit, token string) string {
		t.Setenv("UNIT", unit)
		t.Setenv("TOKEN", token)
		l, err := provision(t, `{"unit": "{env.UNIT}", "server": {"header": {"Authorization": ["{env.TOKEN}"]}}}`)
		require.NoError(t, err)
		return l.Fingerprint()
	}
	first := key("llama", "geheim")
	require.Equal(t, first, key("llama", "geheim"))
	require.NotEqual(t, first, key("whisper", "geheim"))
	require.NotEqual(t, first, key("llama", "secret"))
	require.NotContains(t, first, "geheim")
}
