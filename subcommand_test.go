package gpubroker

import (
	"bytes"
	"testing"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
	"github.com/stretchr/testify/assert"
)

func TestN5_AnUnknownSubcommandIsAnErrorWithTheNearestWord(t *testing.T) {
	for word, want := range map[string]string{
		"docter": `unknown subcommand "docter": did you mean doctor? allowed: doctor, init, presets, simulate`,
		"preset": `unknown subcommand "preset": did you mean presets?`,
		"xyzzy":  `unknown subcommand "xyzzy": allowed: doctor`,
	} {
		cmd, sub := &cobra.Command{Use: "caddy"}, &cobra.Command{Use: "gpu-broker"}
		caddycmd.Commands()["gpu-broker"].CobraFunc(sub)
		cmd.AddCommand(sub)
		var out bytes.Buffer
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		cmd.SetArgs([]string{"gpu-broker", word})
		err := cmd.Execute()
		if assert.Error(t, err, word) {
			assert.Contains(t, err.Error(), want)
		}
	}
}
