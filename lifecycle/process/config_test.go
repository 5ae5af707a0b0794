//go:build linux

package process_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/process"
)

func TestFaultsAreToldAllAtOnce(t *testing.T) {
	_, err := provision(t, `{
		"command": ["llama-server", "{env.NOT_THERE}", "{gpu_broker.prot}"],
		"ports": "9200-9100", "env": {"": "x", "A=B": "x", "C": "{env.NOT_THERE_EITHER}"}, "user": "nobody-of-that-name", "signal": "SIGNOTHING", "grace": -1,
		"restart": "always", "max_restarts": -1, "server": {"health": {"path": "no slash"}}}`)
	for _, want := range []string{
		"command: word 2", "env.NOT_THERE", "set it, or correct its name",
		"{gpu_broker.prot} is unknown: there are {gpu_broker.port}",
		`ports: "9200-9100" is not a range of ports`,
		`env: "" is not the name of a variable`, `env: "A=B" is not the name of a variable`, "env.NOT_THERE_EITHER",
		`user "nobody-of-that-name" is not known on this host`,
		`signal "SIGNOTHING" is unknown`, "grace -1ns is negative",
		`restart "always" is unknown: use on_failure or never`,
		"max_restarts -1 is negative",
		`server: lifecycle http: health: path "no slash"`, `does not begin with /`,
	} {
		require.ErrorContains(t, err, want)
	}
}

func TestFaultsOneByOne(t *testing.T) {
	for config, want := range map[string]string{
		`{}`:                                "command is missing",
		`{"command": [""]}`:                 "command is missing",
		`{"command": ["x"], "ports": "90"}`: "neither command nor env uses {gpu_broker.port}",
		`{"command": ["x", "{gpu_broker.port}"], "ports": "0-1"}`:     "is not a range of ports",
		`{"command": ["x", "{gpu_broker.port}"], "ports": "1-65536"}`: "is not a range of ports",
		`{"command": ["x"], "max_restarts": 3}`:                       "max_restarts needs `restart on_failure`",
		`{"command": ["x"], "server": []}`:                            "server: it must be a JSON object",
		`{"command": ["x"], "server": {"protocol": "process"}}`:       "its lifecycle starts a server itself",
		`{"command": ["x"], "env_pass": ["HOME"]}`:                    "env_pass has no effect without env_clear",
		`{"command": ["x"], "env_clear": true, "env_pass": [""]}`:     `env_pass: "" is not the name of a variable`,
		`{"command": ["x"], "env_clear": true, "env_pass": ["A=B"]}`:  `env_pass: "A=B" is not`,
		`{"command": ["x"], "env_clear": true, "env_pass": ["*A"]}`:   `env_pass: "*A" is not`,
		`{"command": ["x"], "env_clear": true, "env_pass": ["A**"]}`:  `env_pass: "A**" is not`,
		`{"command": ["x\u0000"]}`:                                    "holds a zero byte",
	} {
		_, err := provision(t, config)
		require.ErrorContains(t, err, want, config)
	}
	for _, config := range []string{`{"command": ["x"]}`, `{"command": ["x"], "server": null}`, `{"command": ["x", "{file}", "{env}", "{}"]}`,
		`{"command": ["x"], "env_clear": true, "env_pass": ["A_1", "A*", "*"]}`} {
		_, err := provision(t, config)
		require.NoError(t, err, config)
	}
}

func TestFaultsThatOnlyTheConsumerShows(t *testing.T) {
	for config, want := range map[string]string{
		`{"command": ["x"]}`: "nobody says where the server listens",
		`{"command": ["x", "{gpu_broker.port}"], "ports": "9000"}`:         "", // without upstream
		`{"command": ["x", "{gpu_broker.port}", "y"]}`:                     "",
		`{"command": ["x"], "env": {"A": "{gpu_broker.port}", "B": "y"}}`:  "",
		`{"command": ["x"], "dir": "/srv/{gpu_broker.port}"}`:              "",
		`{"command": ["x", "{gpu_broker.port}"], "ports": "9000-9001"} up`: "`upstream` and `ports` are both given",
	} {
		deps := lifecycle.Deps{Consumer: "qwen"}
		if n := len(config) - len(" up"); config[n:] == " up" {
			config, deps.Upstream = config[:n], "127.0.0.1:9000"
		}
		l, err := provision(t, config)
		require.NoError(t, err)
		d, err := l.Open(deps)
		if want != "" {
			require.ErrorContains(t, err, want)
			require.ErrorContains(t, err, "consumer qwen: ")
			continue
		}
		require.NoError(t, err)
		require.NoError(t, d.Close())
	}
	l, err := provision(t, `{"command": ["x"]}`)
	require.NoError(t, err)
	_, err = l.Open(lifecycle.Deps{Consumer: "qwen", Upstream: "nowhere"})
	require.ErrorContains(t, err, `upstream "nowhere" is not host:port`)
	_, err = new(process.Lifecycle).Open(lifecycle.Deps{Consumer: "qwen", Upstream: "127.0.0.1:9000"})
	require.ErrorContains(t, err, "opened before it was provisioned")
}

func TestCaddyfile(t *testing.T) {
	d := caddyfile.NewTestDispenser(`process llama-server -m /models/q.gguf --port {gpu_broker.port} {
		ports 9000-9100
		env A "b c"
		env D {env.E}
		dir /srv
		user nobody
		signal SIGINT
		grace 20s
		restart on_failure
		max_restarts 5
		env_clear
		env_pass OLLAMA_* TOKEN
		env_pass LAST
	}`)
	l := new(process.Lifecycle)
	require.NoError(t, l.UnmarshalCaddyfile(d))
	raw, err := json.Marshal(l)
	require.NoError(t, err)
	require.JSONEq(t, `{"command": ["llama-server", "-m", "/models/q.gguf", "--port", "{gpu_broker.port}"], "ports": "9000-9100",
		"env": {"A": "b c", "D": "{env.E}"}, "dir": "/srv", "user": "nobody", "signal": "SIGINT", "grace": 20000000000,
		"restart": "on_failure", "max_restarts": 5, "env_clear": true, "env_pass": ["OLLAMA_*", "TOKEN", "LAST"]}`, string(raw))

	for text, want := range map[string]string{
		"process":                            "wanted: process COMMAND ARGS...",
		"process x {\n port 1\n}":            `unknown word "port" in process: there are ports`,
		"process x {\n ports\n}":             "wanted: ports with one value, found 0",
		"process x {\n ports 1\n ports 2\n}": "ports is set twice",
		"process x {\n env A\n}":             "wanted: env NAME VALUE",
		"process x {\n env A b\n env A c\n}": "env A is set twice",
		"process x {\n grace soon\n}":        `grace "soon" is not a duration`,
		"process x {\n env_clear on\n}":      "wanted: env_clear, with nothing after it",
		"process x {\n env_pass\n}":          "wanted: env_pass NAME...",
		"process x {\n max_restarts few\n}":  `max_restarts "few" is not a number`,
		"process x {\n dir a b\n}":           "wanted: dir with one value, found 2",
		"process x {\n health /health\n}":    `unknown word "health"`,
	} {
		err := new(process.Lifecycle).UnmarshalCaddyfile(caddyfile.NewTestDispenser(text))
		require.ErrorContains(t, err, want, text)
	}
	all := "process x {\n port 1\n grace soon\n dir a\n dir b\n env A\n}"
	err = new(process.Lifecycle).UnmarshalCaddyfile(caddyfile.NewTestDispenser(all))
	for i, want := range []string{`unknown word "port"`, `grace "soon"`, "dir is set twice", "wanted: env NAME VALUE"} {
		lines := strings.Split(err.Error(), "\n")
		require.Len(t, lines, 4)
		require.Contains(t, lines[i], want)
	}
}

func TestTheDriverTellsThePolicy(t *testing.T) {
	for config, want := range map[string]string{
		`{"command": ["x", "{gpu_broker.port}"]}`:                                             "false 3",
		`{"command": ["x", "{gpu_broker.port}"], "restart": "on_failure"}`:                    "true 3",
		`{"command": ["x", "{gpu_broker.port}"], "restart": "on_failure", "max_restarts": 0}`: "true 0",
		`{"command": ["x", "{gpu_broker.port}"], "restart": "never"}`:                         "false 3",
	} {
		l, err := provision(t, config)
		require.NoError(t, err)
		d, err := l.Open(lifecycle.Deps{Consumer: "qwen"})
		require.NoError(t, err)
		p := d.(lifecycle.Restarter)
		require.Equal(t, want, fmt.Sprint(p.RestartOnFailure(), p.MaxRestarts()), config)
		require.NoError(t, d.Close())
	}
}

func TestTheFingerprintFollowsThePlaceholders(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(secret, []byte("k1-k1-k1\n"), 0o600))
	t.Setenv("TEST_MODEL", "a")
	t.Setenv("TEST_HEADER", "b")
	config := `{"command": ["x", "{env.TEST_MODEL}"], "env": {"KEY": "{file.` + secret + `}"}, "server": {"header": {"X": ["{env.TEST_HEADER}"]}}}`
	seen := map[string]bool{}
	read := func() {
		l, err := provision(t, config)
		require.NoError(t, err)
		again, err := provision(t, config)
		require.NoError(t, err)
		require.Equal(t, l.Fingerprint(), again.Fingerprint())
		require.False(t, seen[l.Fingerprint()])
		seen[l.Fingerprint()] = true
		require.NotContains(t, fmt.Sprintf("%v %+v %#v", l, l, l), "k1-k1")
	}
	read()
	t.Setenv("TEST_MODEL", "a2")
	read()
	t.Setenv("TEST_HEADER", "b2")
	read()
	require.NoError(t, os.WriteFile(secret, []byte("k2"), 0o600))
	read()
}
