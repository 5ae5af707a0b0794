package docker_test

import (
	"encoding/json"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/docker"
)

func TestCaddyfileIsRead(t *testing.T) {
	for text, want := range map[string]string{
		`docker llama`: `{"container": "llama"}`,
		`docker llama {
			host unix:///run/docker.sock
			signal SIGINT
			grace 1m
		}`: `{"container": "llama", "host": "unix:///run/docker.sock", "signal": "SIGINT", "grace": 60000000000}`,
		`docker llama {
			grace 0s
		}`: `{"container": "llama", "grace": 0}`,
	} {
		l := new(docker.Lifecycle)
		require.NoError(t, l.UnmarshalCaddyfile(caddyfile.NewTestDispenser(text)), text)
		got, err := json.Marshal(l)
		require.NoError(t, err)
		require.JSONEq(t, want, string(got), text)
	}
}

func TestCaddyfileFaultsSayWhatIsWanted(t *testing.T) {
	for text, want := range map[string]string{
		"docker":                                "docker takes the name of one container",
		"docker a b":                            "docker takes the name of one container",
		"docker a {\n pause\n}":                 "keeps its GPU memory",
		"docker a {\n image b\n}":               "there are host, signal and grace",
		"docker a {\n grace soon\n}":            "is no duration",
		"docker a {\n host\n}":                  "host takes one value",
		"docker a {\n grace 1s\n grace 2s\n}":   "given twice",
		"docker a {\n signal SIGINT SIGTERM\n}": "signal takes one value",

		"docker a {\n image b\n host x y\n}": "there are host, signal and grace, at Testfile:2\ndocker: host takes one value, at Testfile:3",
	} {
		require.ErrorContains(t, new(docker.Lifecycle).UnmarshalCaddyfile(caddyfile.NewTestDispenser(text)), want, text)
	}
}

func TestConfigurationIsChecked(t *testing.T) {
	t.Setenv("CONTAINER", "llama")
	for config, want := range map[string]string{
		`{"container": "llama"}`: "",
		`{"container": "{env.CONTAINER}", "host": "tcp://proxy:2375"}`: "",
		`{"container": "llama", "signal": "9", "grace": "1h"}`:         "",
		`{"container": "llama", "server": {"health": {"path": "/"}}}`:  "",
		`{"container": ""}`:                                       "is no name of a container",
		`{"container": "a/b"}`:                                    "is no name of a container",
		`{"container": "{env.NOT_SET_ANYWHERE}"}`:                 "env.NOT_SET_ANYWHERE",
		`{"container": "a", "host": "/var/run/docker.sock"}`:      "want unix:///PATH or tcp://HOST:PORT",
		`{"container": "a", "host": "unix://docker.sock"}`:        "want unix:///PATH or tcp://HOST:PORT",
		`{"container": "a", "host": "tcp://proxy"}`:               "want unix:///PATH or tcp://HOST:PORT",
		`{"container": "a", "host": "ssh://proxy:22"}`:            "want unix:///PATH or tcp://HOST:PORT",
		`{"container": "a", "signal": "please"}`:                  "is no signal",
		`{"container": "a", "grace": "1500ms"}`:                   "want whole seconds",
		`{"container": "a", "grace": "2h"}`:                       "want whole seconds",
		`{"container": "a", "grace": "-1s"}`:                      "want whole seconds",
		`{"container": "a", "server": {"health": {"path": "x"}}}`: "server",
		`{"container": "", "signal": "?"}`:                        "is no signal",
	} {
		_, err := provision(t, config)
		if want == "" {
			require.NoError(t, err, config)
		} else {
			require.ErrorContains(t, err, want, config)
		}
	}
}

func TestTheValueOfAPlaceholderIsNotShown(t *testing.T) {
	t.Setenv("HOST", "tcp://me:geheim@proxy:2375")
	_, err := provision(t, `{"container": "a", "host": "{env.HOST}"}`)
	require.ErrorContains(t, err, "host \"{env.HOST}\": want unix:///PATH or tcp://HOST:PORT")
	require.NotContains(t, err.Error(), "geheim")
}

func TestOpenNeedsAnUpstream(t *testing.T) {
	l, err := provision(t, `{"container": "llama"}`)
	require.NoError(t, err)
	_, err = l.Open(lifecycle.Deps{Consumer: "mvoice"})
	require.ErrorContains(t, err, "consumer mvoice")
	require.ErrorContains(t, err, "upstream host:port")
	_, err = new(docker.Lifecycle).Open(lifecycle.Deps{Upstream: "localhost:1"})
	require.ErrorContains(t, err, "provisioned")
}

func TestFingerprintDiffersWithThePlaceholders(t *testing.T) {
	key := func(container, token string) string {
		t.Setenv("CONTAINER", container)
		t.Setenv("TOKEN", token)
		l, err := provision(t, `{"container": "{env.CONTAINER}", "server": {"header": {"Authorization": ["{env.TOKEN}"]}}}`)
		require.NoError(t, err)
		return l.Fingerprint()
	}
	first := key("llama", "geheim")
	require.Equal(t, first, key("llama", "geheim"))
	require.NotEqual(t, first, key("whisper", "geheim"))
	require.NotEqual(t, first, key("llama", "secret"))
	require.NotContains(t, first, "geheim")
}
