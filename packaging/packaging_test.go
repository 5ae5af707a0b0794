// Package packaging_test holds what can be held of the files beside it without
// Docker, systemd or polkit: that they are sound, and that they fit each other.
package packaging_test

import (
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.yaml.in/yaml/v3"

	_ "github.com/gpu-broker/caddy-gpu-broker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func text(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(name)
	require.NoError(t, err)
	return string(data)
}

func write(t *testing.T, name, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
}

// adapted is the Caddyfile as JSON.
func adapted(t *testing.T) []byte {
	t.Helper()
	config, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text(t, "Caddyfile")), map[string]any{"filename": "Caddyfile"})
	require.NoError(t, err)
	require.Empty(t, warnings)
	return config
}

func TestTheCaddyfileIsFormattedAndValid(t *testing.T) {
	before := caddy.DefaultStorage.Path
	caddy.DefaultStorage.Path = t.TempDir()
	t.Cleanup(func() { caddy.DefaultStorage.Path = before })
	assert.Equal(t, string(caddyfile.Format([]byte(text(t, "Caddyfile")))), text(t, "Caddyfile"), "caddy fmt would write it otherwise")
	var config caddy.Config
	require.NoError(t, caddy.StrictUnmarshalJSON(adapted(t), &config))
	require.NoError(t, caddy.Validate(&config))
}

// compose is what counts of compose.yaml.
type compose struct {
	Services map[string]service
	Networks map[string]any
	Volumes  map[string]any
}

type service struct {
	Build           *struct{ Context, Dockerfile string }
	Image           string
	Ports           []string
	Expose          []string
	Networks        []string
	Volumes         []string
	Environment     map[string]string
	StopGracePeriod string   `yaml:"stop_grace_period"`
	NetworkMode     string   `yaml:"network_mode"`
	CapDrop         []string `yaml:"cap_drop"`
	CapAdd          []string `yaml:"cap_add"`
	Privileged      bool
	Deploy          struct {
		Resources struct {
			Reservations struct {
				Devices []struct {
					Driver       string
					Count        string
					Capabilities []string
				}
			}
		}
	}
	Restart string
}

func readCompose(t *testing.T) compose {
	t.Helper()
	var c compose
	decoder := yaml.NewDecoder(strings.NewReader(text(t, "compose.yaml")))
	decoder.KnownFields(true)
	require.NoError(t, decoder.Decode(&c))
	require.Len(t, c.Services, 4)
	return c
}

func TestOnlyCaddyPublishesPorts(t *testing.T) {
	c := readCompose(t)
	for name, s := range c.Services {
		assert.Equal(t, name == "caddy", len(s.Ports) > 0, "%s publishes %v", name, s.Ports)
		assert.Empty(t, s.NetworkMode, "%s is on a network where its ports need no publishing", name)
		assert.False(t, s.Privileged, name)
	}
	// For this machine alone, unless somebody says otherwise.
	for _, port := range c.Services["caddy"].Ports {
		assert.Regexp(t, `^\$\{(WEB|API)_BIND:-127\.0\.0\.1\}:(\d+):(\d+)(/udp)?$`, port)
	}
}

// A client that shared a network with a model server could ask it past the broker.
func TestOnlyCaddyMeetsTheModelServers(t *testing.T) {
	c := readCompose(t)
	for _, server := range models(t) {
		for _, network := range c.Services[server].Networks {
			assert.Contains(t, c.Networks, network)
			for name, other := range c.Services {
				if name != "caddy" && !slices.Contains(models(t), name) {
					assert.NotContains(t, other.Networks, network, "%s and %s share a network", name, server)
				}
			}
		}
	}
	for name, s := range c.Services {
		assert.NotEmpty(t, s.Networks, "%s is on the network of all", name)
		shared := slices.ContainsFunc(s.Networks, func(n string) bool { return slices.Contains(c.Services["caddy"].Networks, n) })
		assert.True(t, shared, "%s and Caddy share no network", name)
		for _, volume := range s.Volumes {
			source, _, _ := strings.Cut(volume, ":")
			if !strings.HasPrefix(source, ".") {
				assert.Contains(t, c.Volumes, source)
			}
		}
	}
}

// app is what counts of the adapted configuration.
type app struct {
	Apps struct {
		GPUBroker struct {
			Consumers []struct{ Name, Upstream string }
		} `json:"gpu_broker"`
		HTTP struct {
			GracePeriod time.Duration `json:"grace_period"`
			Servers     map[string]struct{ Listen []string }
		}
	}
}

func readApp(t *testing.T) app {
	t.Helper()
	var a app
	require.NoError(t, json.Unmarshal(adapted(t), &a))
	return a
}

// models are the services that are model servers.
func models(t *testing.T) (names []string) {
	t.Helper()
	for _, c := range readApp(t).Apps.GPUBroker.Consumers {
		host, _, err := net.SplitHostPort(c.Upstream)
		require.NoError(t, err)
		names = append(names, host)
	}
	require.NotEmpty(t, names)
	return names
}

var dial = regexp.MustCompile(`"dial":"([^"]*)"`)

func TestEveryUpstreamIsAServiceAtThatPort(t *testing.T) {
	c := readCompose(t)
	var addresses []string
	for _, consumer := range readApp(t).Apps.GPUBroker.Consumers {
		addresses = append(addresses, consumer.Upstream)
	}
	for _, match := range dial.FindAllStringSubmatch(string(adapted(t)), -1) {
		if !strings.HasPrefix(match[1], "{") {
			addresses = append(addresses, match[1])
		}
	}
	assert.Len(t, addresses, len(c.Services)-1, "each service but Caddy is an upstream: %v", addresses)
	for _, address := range addresses {
		host, port, err := net.SplitHostPort(address)
		require.NoError(t, err, address)
		require.Contains(t, c.Services, host)
		assert.Contains(t, c.Services[host].Expose, port, host)
	}
}

func TestCaddyPublishesEveryPortOfItsSitesAndClientsAskThere(t *testing.T) {
	c := readCompose(t)
	published := map[string]bool{}
	for _, port := range c.Services["caddy"].Ports {
		fields := strings.Split(strings.TrimSuffix(port, "/udp"), ":")
		assert.Equal(t, fields[len(fields)-2], fields[len(fields)-1], "clients and Caddyfile speak of one port")
		published[":"+fields[len(fields)-1]] = true
	}
	listened := map[string]bool{":80": true} // Caddy's own, for redirects
	for _, server := range readApp(t).Apps.HTTP.Servers {
		for _, address := range server.Listen {
			listened[address] = true
		}
	}
	assert.Equal(t, listened, published)
	for _, name := range []string{"OLLAMA_BASE_URL", "COMFYUI_BASE_URL"} {
		address, ok := strings.CutPrefix(c.Services["open-webui"].Environment[name], "http://caddy")
		assert.True(t, ok, name)
		assert.True(t, listened[address], "%s: %s", name, address)
	}
}

var variable = regexp.MustCompile(`\{\$([A-Z_]+):([^}]*)\}`)

func TestTheCaddyfilesVariablesArePassedOnWithTheSameDefaults(t *testing.T) {
	environment := readCompose(t).Services["caddy"].Environment
	found := map[string]string{}
	for _, match := range variable.FindAllStringSubmatch(text(t, "Caddyfile"), -1) {
		if match[1] != "NAME" { // an explanation
			found[match[1]] = "${" + match[1] + ":-" + match[2] + "}"
		}
	}
	assert.Equal(t, found, environment)
}

// The broker's running requests have stop_grace; whoever waits for Caddy must wait longer.
func TestEachOneWaitsLongerThanTheOneInside(t *testing.T) {
	const stopGrace = 30 * time.Second // the default, which docs/configuration.md has
	grace := readApp(t).Apps.HTTP.GracePeriod
	assert.Greater(t, grace, stopGrace)
	docker, err := time.ParseDuration(readCompose(t).Services["caddy"].StopGracePeriod)
	require.NoError(t, err)
	assert.Greater(t, docker, grace)
	seconds, err := strconv.Atoi(option(t, "Service", "TimeoutStopSec"))
	require.NoError(t, err)
	assert.Greater(t, time.Duration(seconds)*time.Second, grace)
}

func TestTheImageIsDebiansRunsWithoutRootAndIsBuiltFromWhatIsThere(t *testing.T) {
	dockerfile := text(t, "Dockerfile")
	var from []string
	var last string
	for _, line := range strings.Split(dockerfile, "\n") {
		word, rest, _ := strings.Cut(line, " ")
		switch word {
		case "FROM":
			from = append(from, strings.Fields(rest)[0])
			last = ""
		case "USER":
			last = rest
		}
	}
	require.Len(t, from, 2)
	release := regexp.MustCompile(`^golang:([0-9.]+)-([a-z]+)$`).FindStringSubmatch(from[0])
	require.NotNil(t, release, from[0])
	assert.Equal(t, "debian:"+release[2]+"-slim", from[1], "both stages have the same glibc")
	assert.Contains(t, text(t, "../go.mod"), "\ngo "+release[1], "the image has the Go that go.mod wants")
	assert.Equal(t, "caddy", last)
	for _, part := range []string{"CGO_ENABLED=1", "setcap cap_net_bind_service", "HEALTHCHECK", "/gpu_broker/healthz"} {
		assert.Contains(t, dockerfile, part)
	}

	caddy := readCompose(t).Services["caddy"]
	assert.FileExists(t, filepath.Join(caddy.Build.Context, caddy.Build.Dockerfile))
	assert.FileExists(t, filepath.Join(caddy.Build.Context, caddy.Build.Dockerfile+".dockerignore"))
	assert.Equal(t, []string{"ALL"}, caddy.CapDrop)
	assert.Equal(t, []string{"NET_BIND_SERVICE"}, caddy.CapAdd)
}

// The shell of RUN must at least be shell.
func TestTheImagesScriptsParse(t *testing.T) {
	joined := strings.ReplaceAll(text(t, "Dockerfile"), "\\\n", "")
	scripts := 0
	for _, line := range strings.Split(joined, "\n") {
		script, ok := strings.CutPrefix(line, "RUN ")
		if !ok {
			continue
		}
		scripts++
		command := exec.Command("sh", "-n")
		command.Stdin = strings.NewReader(script)
		output, err := command.CombinedOutput()
		assert.NoError(t, err, "%s\n%s", script, output)
	}
	assert.Equal(t, 3, scripts)
}
