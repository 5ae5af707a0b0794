//go:build linux

package examples

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

var curlLine = regexp.MustCompile(`(?m)^#\t(curl .*)$`)

// TestEveryServersExampleAnswersItsOwnCurl runs all of them in one Caddy and on one card, with pretending servers: those
// of units and containers are processes here. Each must answer the line that stands in its head.
func TestEveryServersExampleAnswersItsOwnCurl(t *testing.T) {
	s := prepare(t, 160*gib)
	s.Env = append(s.Env, "TABBY_ADMIN_KEY=none", "TABBY_API_KEY=none")
	s.Broker = "http://" + s.admin + "/gpu_broker"
	app := object{"gpu": object{"driver": "simulated", "totals": []any{int64(s.total)}}, "hold": 0, "probe_interval": "200ms"}
	servers := object{}
	var consumers []any
	addrs := map[string]string{}
	for _, name := range presets.Names() {
		cfg := s.adapted("servers/" + name)
		apps := cfg["apps"].(object)
		c := apps["gpu_broker"].(object)["consumers"].([]any)[0].(object)
		require.Equal(t, name, c["name"])
		s.pretend(name, c)
		consumers = append(consumers, c)
		server := apps["http"].(object)["servers"].(object)["srv0"].(object)
		addrs[name] = caddytest.FreeAddr(t)
		server["listen"] = []any{addrs[name]}
		server["automatic_https"] = object{"disable": true}
		servers[name] = server
	}
	app["consumers"] = consumers
	s.run(object{"admin": object{"listen": s.admin}, "apps": object{"gpu_broker": app, "http": object{"servers": servers}}})

	for _, file := range []string{"speech.wav", "workflow_api.json", "batch.json", "request.json"} {
		text := `{"prompt":{"1":{"class_type":"KSampler","inputs":{}}},"batch":{"graph":{"nodes":{}},"runs":1},"inputs":[]}`
		require.NoError(t, os.WriteFile(filepath.Join(s.Dir, file), []byte(text), 0o600))
	}
	for _, name := range presets.Names() {
		t.Run(name, func(t *testing.T) { s.curl(t, name, addrs[name]) })
	}
	s.well()
}

// pretend puts a pretending server in the place of the real one of a consumer.
func (s *site) pretend(name string, c object) {
	t := s.t
	t.Helper()
	raw, err := json.Marshal(c)
	require.NoError(t, err)
	var is config.Consumer
	require.NoError(t, json.Unmarshal(raw, &is))
	o := modelserver.Options{Name: name, Manner: modelserver.Manner(name), VRAM: is.VRAM, AllowUnload: true}
	for _, m := range is.Models {
		if o.Models == nil {
			o.Models = map[string]gpu.Bytes{}
		}
		o.Models[m.Name] = m.VRAM
	}
	l, _ := c["lifecycle"].(object)
	if l["protocol"] == nil || l["protocol"] == "http" {
		if model, ok := l["model_name"].(string); ok {
			o.Name = model
		}
		s.serve("UNUSED", o)
		c["upstream"] = s.servers[o.Name].Addr()
		return
	}
	bin, err := caddytest.Modelserver()
	require.NoError(t, err)
	delete(c, "upstream")
	command := fmt.Sprintf("%s -name %s -manner %s -preloaded=true -vram %d -total %d -sim-dir %s -load 20ms -run 5ms -addr 127.0.0.1:{gpu_broker.port}",
		bin, name, name, is.VRAM, s.total, s.Sim)
	started := object{"protocol": "process", "command": strings.Fields(command)}
	if l["server"] != nil { // null would take the preset's away
		started["server"] = l["server"]
	}
	c["lifecycle"] = started
}

// curl runs the line of an example's head.
func (s *site) curl(t *testing.T, name, addr string) {
	text, err := os.ReadFile(filepath.Join(folder, "servers", name, "Caddyfile"))
	require.NoError(t, err)
	found := curlLine.FindStringSubmatch(string(text))
	require.NotNil(t, found, "it has no line to try")
	_, port, _ := strings.Cut(addr, ":")
	line := strings.Replace(found[1], "localhost:9080", "localhost:"+port, 1) + " -sS --max-time 30 -D head.txt"
	cmd := exec.Command("sh", "-c", line)
	cmd.Dir, cmd.Env = s.Dir, s.Environ()
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s\n%s", line, out)
	head, err := os.ReadFile(filepath.Join(s.Dir, "head.txt"))
	require.NoError(t, err)
	require.Regexp(t, `(?m)^HTTP/1.1 20\d `, string(head), "%s\n%s", line, out)
	require.Contains(t, strings.ToLower(string(head)), "\nx-gpu-broker-consumer: "+name+"\r", "%s is no GPU work", line)
}
