package packaging_test

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const rule = "polkit/50-gpu-broker.rules"

// harness runs the rule as polkit does, with an object of that name, and asks
// it about every combination.
const harness = `
const fs = require("fs"), vm = require("vm");
const rules = [];
const polkit = {
	Result: {NO: "no", YES: "yes", AUTH_ADMIN: "auth_admin", NOT_HANDLED: null},
	addRule: (rule) => rules.push(rule),
	log: () => {},
};
vm.runInNewContext(fs.readFileSync(process.argv[1], "utf8"), {polkit});
if (rules.length !== 1) throw new Error(rules.length + " rules");
const answers = {};
for (const id of ["org.freedesktop.systemd1.manage-units", "org.freedesktop.systemd1.manage-unit-files", "org.freedesktop.systemd1.reload-daemon", "org.freedesktop.login1.power-off"])
	for (const user of ["caddy", "root", "alice", "", undefined])
		for (const unit of ["comfyui.service", "whisper.service", "caddy.service", "comfyui.socket", "comfyui", "xcomfyui.service", "", undefined])
			for (const verb of ["start", "stop", "restart", "kill", "reload", "set-property", "freeze", "", undefined]) {
				const details = {unit, verb};
				const answer = rules[0]({id, lookup: (name) => details[name]}, {user, groups: [], local: true, active: true});
				if (answer !== null) answers[[id, user, unit, verb].join(" ")] = answer;
			}
console.log(JSON.stringify(answers));
`

// node runs a script; the tests of this project need node anyway.
func node(t *testing.T, arguments ...string) []byte {
	t.Helper()
	program, err := exec.LookPath("node")
	require.NoError(t, err, "install Node 20 or later: it stands in for polkit")
	command := exec.Command(program, arguments...)
	var stderr strings.Builder
	command.Stderr = &stderr
	output, err := command.Output()
	require.NoError(t, err, stderr.String())
	return output
}

func TestTheRuleIsJavaScript(t *testing.T) {
	// Node goes by the name's end.
	copied := filepath.Join(t.TempDir(), "rule.js")
	write(t, copied, text(t, rule))
	node(t, "--check", copied)
}

func TestTheRuleAllowsExactlyTheNamedUnitsAndVerbs(t *testing.T) {
	path, err := filepath.Abs(rule)
	require.NoError(t, err)
	var answers map[string]string
	require.NoError(t, json.Unmarshal(node(t, "-e", harness, path), &answers))
	const action = "org.freedesktop.systemd1.manage-units caddy "
	assert.Equal(t, map[string]string{
		action + "comfyui.service start": "yes", action + "comfyui.service stop": "yes",
		action + "whisper.service start": "yes", action + "whisper.service stop": "yes",
	}, answers)
}
