package doctor

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// secretWords are the parts of a variable's name, between underscores, that mark its value as a secret.
var secretWords = []string{"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASS", "CREDENTIAL", "CREDENTIALS"}

// maxSecrets bounds the names that one finding lists.
const maxSecrets = 8

// judgeSecrets warns of variables of this environment that look like secrets and reach the server of a consumer, though
// nothing in the configuration names them. It never reads out a value.
func (f *facts) judgeSecrets(c *config.Consumer, g guest) []Finding {
	names := g.secrets(os.Environ())
	if len(names) == 0 {
		return nil
	}
	list := strings.Join(names[:min(len(names), maxSecrets)], ", ")
	if more := len(names) - maxSecrets; more > 0 {
		list += fmt.Sprintf(" and %d more", more)
	}
	return []Finding{f.about(Warning, "process", c, "process").saying("its server inherits variables of Caddy's environment that look like secrets: "+list,
		"write env_clear, and env_pass NAME for each variable that it needs")}
}

// secrets returns the names of the variables in environ that look like secrets and that the server inherits without being
// named: a variable that env or env_pass spells out is meant to reach it.
func (g guest) secrets(environ []string) (names []string) {
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		if value == "" || !looksSecret(name) || g.names(name) {
			continue
		}
		if !g.EnvClear || slices.ContainsFunc(g.EnvPass, func(pattern string) bool {
			stem, open := strings.CutSuffix(pattern, "*")
			return open && strings.HasPrefix(name, stem)
		}) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// names reports whether the configuration names a variable itself.
func (g guest) names(variable string) bool {
	_, set := g.Env[variable]
	return set || slices.Contains(g.EnvPass, variable)
}

func looksSecret(name string) bool {
	return slices.ContainsFunc(strings.Split(strings.ToUpper(name), "_"), func(word string) bool { return slices.Contains(secretWords, word) })
}
