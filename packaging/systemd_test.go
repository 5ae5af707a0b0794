package packaging_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coreos/go-systemd/v22/unit"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const dropIn = "systemd/gpu-broker.conf"

func options(t *testing.T) []*unit.UnitOption {
	t.Helper()
	options, err := unit.DeserializeOptions(strings.NewReader(text(t, dropIn)))
	require.NoError(t, err)
	return options
}

// option is the value of a key that is there once.
func option(t *testing.T, section, name string) string {
	t.Helper()
	var values []string
	for _, o := range options(t) {
		if o.Section == section && o.Name == name {
			values = append(values, o.Value)
		}
	}
	require.Len(t, values, 1, "%s in [%s]", name, section)
	return values[0]
}

func TestTheDropInSaysWhatTheBrokerNeeds(t *testing.T) {
	assert.Equal(t, "mixed", option(t, "Service", "KillMode"))
	assert.Equal(t, "continue", option(t, "Service", "OOMPolicy"))
	assert.Equal(t, "CAP_NET_BIND_SERVICE", option(t, "Service", "AmbientCapabilities"))
	groups := strings.Fields(option(t, "Service", "SupplementaryGroups"))
	assert.Equal(t, []string{"video", "render"}, groups, "docker's is as good as root: only for those who ask for it")
	for _, o := range options(t) {
		assert.NotContains(t, []string{"ExecStart", "User", "Group", "Type"}, o.Name, "that is the unit's own to say")
	}
}

// Each setting has a comment that tells why, right above it or above the group that it ends.
func TestEverySettingOfTheDropInIsExplained(t *testing.T) {
	explained := false
	for _, line := range strings.Split(text(t, dropIn), "\n") {
		switch {
		case strings.HasPrefix(line, "# "):
			explained = true
		case line == "":
			explained = false
		case strings.Contains(line, "="):
			assert.True(t, explained, line)
		}
	}
}

// caddyUnit is a unit as the drop-in is made for.
const caddyUnit = `[Unit]
Description=Caddy
After=network.target network-online.target
Requires=network-online.target

[Service]
Type=notify
User=root
ExecStart=/bin/true
ExecReload=/bin/true
TimeoutStopSec=5s
LimitNOFILE=1048576
PrivateTmp=true
ProtectSystem=full
AmbientCapabilities=CAP_NET_ADMIN CAP_NET_BIND_SERVICE

[Install]
WantedBy=multi-user.target
`

// systemd's own word, where there is one; the tests above do without.
func TestSystemdTakesTheDropIn(t *testing.T) {
	program, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Log("systemd-analyze is not installed: only our own parser has read the file")
		options(t)
		return
	}
	check := func(text string) string {
		dir := t.TempDir()
		require.NoError(t, os.Mkdir(filepath.Join(dir, "caddy.service.d"), 0o755))
		write(t, filepath.Join(dir, "caddy.service"), caddyUnit)
		write(t, filepath.Join(dir, "caddy.service.d", "gpu-broker.conf"), text)
		command := exec.Command(program, "verify", "--man=no", "caddy.service")
		command.Env = append(os.Environ(), "SYSTEMD_UNIT_PATH="+dir+":")
		command.Dir = dir
		output, _ := command.CombinedOutput() // the status tells of the whole machine's units, too
		var ours []string
		for _, line := range strings.Split(string(output), "\n") {
			if strings.Contains(line, "caddy.service") {
				ours = append(ours, line)
			}
		}
		return strings.Join(ours, "\n")
	}
	assert.Empty(t, check(text(t, dropIn)))
	assert.NotEmpty(t, check("[Service]\nKillMode=mostly\n"), "a fault would not be seen")
}
