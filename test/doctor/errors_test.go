package doctor_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// said are the errors in a log of Caddy's, one a line.
func said(log string) string {
	var b strings.Builder
	for line := range strings.Lines(log) {
		var entry struct{ Level, Msg string }
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Level == "error" {
			b.WriteString(entry.Msg + "\n")
		}
	}
	return b.String()
}

// What is wrong with a configuration is told with its place, and with the right word where there is one near.
func TestFaultsOfTheConfigurationNameTheirPlace(t *testing.T) {
	m := newMachine(t)
	consumer := func(lines string) string {
		return fmt.Sprintf("{\n\tadmin off\n\tgpu_broker {\n\t\tgpu simulated 24GiB {\n\t\t\tdir %s\n\t\t}\n\t\tconsumer a {\n\t\t\tvram 1GiB\n%s\n\t\t}\n\t}\n}\n\n:8080 {\n\tgpu_broker a\n}\n",
			m.path("gpu"), lines)
	}
	const block = 7 // the line of consumer a
	route := func(lines string) string {
		return fmt.Sprintf("{\n\tadmin off\n\tgpu_broker {\n\t\tgpu simulated 24GiB {\n\t\t\tdir %s\n\t\t}\n\t\tconsumer ollama {\n\t\t\tvram 1GiB\n\t\t}\n\t}\n}\n\n:8080 {\n%s\n}\n", m.path("gpu"), lines)
	}
	for name, c := range map[string]struct {
		text string
		line int
		want []string
	}{
		"a preset that is misspelt":              {consumer("\t\t\tpreset comfui"), block, []string{`unknown preset "comfui": did you mean comfyui?`}},
		"a preset that nobody knows":             {consumer("\t\t\tpreset xyzzy"), block, []string{`unknown preset "xyzzy": allowed: `, "ollama"}},
		"a setting that is misspelt":             {consumer("\t\t\tupstraem 127.0.0.1:1"), 9, []string{"did you mean upstream?"}},
		"a lifecycle that is misspelt":           {consumer("\t\t\tlifecycle proces sleep"), 9, []string{"did you mean process?"}},
		"a setting of a lifecycle's route":       {consumer("\t\t\tupstream 127.0.0.1:1\n\t\t\thealth /health {\n\t\t\t\tloded $.x\n\t\t\t}"), 11, []string{"did you mean loaded?"}},
		"a size":                                 {consumer("\t\t\tresidual 1XB"), 9, []string{"1XB"}},
		"a route without a slash":                {consumer("\t\t\tgpu_routes prompt"), 9, []string{`route "prompt"`, "must begin with a slash"}},
		"a method that is misspelt":              {consumer("\t\t\tgpu_routes \"PSOT /prompt\""), 9, []string{`unknown method "PSOT": did you mean POST?`}},
		"a star within a path":                   {consumer("\t\t\tbypass /a/*/b"), 9, []string{"a * is allowed only at the end of the path"}},
		"a query in a route":                     {consumer("\t\t\ttouch /a?b=c"), 9, []string{"only the name of a parameter"}},
		"a health route without a slash":         {consumer("\t\t\tupstream 127.0.0.1:1\n\t\t\thealth health"), 10, []string{`path "health" does not begin with a slash`}},
		"an unload route's method":               {consumer("\t\t\tupstream 127.0.0.1:1\n\t\t\tunload PSOT /unload"), 10, []string{`unknown method "PSOT": did you mean POST?`}},
		"an upstream that is a URL":              {consumer("\t\t\tupstream http://127.0.0.1:1/"), 9, []string{"leave out http://"}},
		"an upstream's placeholder":              {consumer("\t\t\tupstream {env.GPU_BROKER_NOPE}"), block, []string{"upstream", "{env.GPU_BROKER_NOPE}"}},
		"a header's placeholder":                 {consumer("\t\t\tupstream 127.0.0.1:1\n\t\t\theader Authorization {env.GPU_BROKER_NOPE}\n\t\t\thealth /health"), block, []string{"header Authorization", "{env.GPU_BROKER_NOPE}"}},
		"a route's placeholder":                  {consumer("\t\t\tupstream 127.0.0.1:1\n\t\t\tunload POST /unload/{env.GPU_BROKER_NOPE}"), block, []string{"unload", "{env.GPU_BROKER_NOPE}"}},
		"a command's placeholder":                {consumer("\t\t\tprocess sleep {env.GPU_BROKER_NOPE} {gpu_broker.port}"), block, []string{"command", "{env.GPU_BROKER_NOPE}"}},
		"a container's placeholder":              {consumer("\t\t\tupstream 127.0.0.1:1\n\t\t\tdocker {env.GPU_BROKER_NOPE}"), block, []string{"container", "{env.GPU_BROKER_NOPE}"}},
		"a unit's placeholder":                   {consumer("\t\t\tupstream 127.0.0.1:1\n\t\t\tsystemd {env.GPU_BROKER_NOPE}"), block, []string{"unit", "{env.GPU_BROKER_NOPE}"}},
		"a consumer that is misspelt in a route": {route("\tgpu_broker olama"), 14, []string{`unknown consumer "olama": did you mean ollama?`}},
		"a route's setting":                      {route("\tgpu_broker ollama {\n\t\tbudgte 5m\n\t}"), 15, []string{"did you mean budget?"}},
		"a bypass of a route without a slash":    {route("\tgpu_broker ollama {\n\t\tbypass health\n\t}"), 15, []string{`route "health"`, "must begin with a slash"}},
		"a consumer that coexists with nobody":   {consumer("\t\t\tcan_coexist_with b"), block, []string{`unknown consumer in can_coexist_with "b"`}},
	} {
		t.Run(name, func(t *testing.T) {
			path := m.write("Caddyfile", c.text)
			_, log, status := m.run("validate", "--adapter", "caddyfile", "--config", path)
			assert.Equal(t, 1, status)
			errs := said(log)
			assert.Contains(t, errs, fmt.Sprintf("%s:%d", path, c.line))
			for _, want := range c.want {
				assert.Contains(t, errs, want)
			}
		})
	}
}

// Global settings, consumers and their lifecycles are told of at once, then all of a route; each line says what it is about and where that is.
func TestEveryFaultNamesItsPlaceInALineOfItsOwn(t *testing.T) {
	m := newMachine(t)
	const global = `{
	admin off
	gpu_broker {
		gpu simulated 24GiB {
			dir %s
			release_delay -1s
			processes raeal
		}
		max_queue 10
		reserved_interactive 20 below 100
		restore nobody after 2m
		overtake_min 5m
		overtake_max 1m
		request_log {env.GPU_BROKER_NOPE}/log.csv
		consumer a {
			preset comfui
		}
		consumer b {
			vram 1GiB
			process sleep {env.GPU_BROKER_NOPE} {
				user nobodyatall
			}
			unload POST /unload/{env.GPU_BROKER_NOPE}
			load POST /load/{env.GPU_BROKER_NOPE}
		}
		consumer c {
			vram 1GiB
			upstream {env.GPU_BROKER_NOPE}
			docker "a b" {
				signal sig!
			}
			unload POST /unload/{env.GPU_BROKER_NOPE}
		}
		consumer d {
			vram 1GiB
			upstream 127.0.0.1:1
			header Authorization {env.GPU_BROKER_NOPE}
			health /{env.GPU_BROKER_NOPE}
		}
	}
}
`
	validate := func(text string) string {
		_, log, status := m.run("validate", "--adapter", "caddyfile", "--config", m.write("Caddyfile", text))
		assert.Equal(t, 1, status)
		return said(log)
	}
	type fault struct {
		what string
		line int
		text string
	}
	compare := func(log string, want []fault) {
		t.Helper()
		lines := strings.Split(strings.TrimSpace(log), "\n")
		if assert.Len(t, lines, len(want), log) {
			for i, f := range want {
				assert.Contains(t, lines[i], fmt.Sprintf("%s (%s:%d): %s", f.what, m.path("Caddyfile"), f.line, f.text))
			}
		}
	}
	app := []fault{
		{"gpu_broker", 10, "reserved_interactive has 20 places"},
		{"gpu_broker", 14, "request_log"},
		{"gpu_broker", 12, "overtake_min is 5m0s, above overtake_max"},
		{`consumer "a"`, 15, `unknown preset "comfui"`},
		{`consumer "a"`, 15, "vram is missing"},
		{`consumer "c"`, 26, "upstream"},
		{"gpu_broker", 11, `unknown consumer in restore "nobody"`},
		{"gpu_broker", 4, "gpu simulated: release_delay -1s is negative"},
		{"gpu_broker", 4, `gpu simulated: processes "raeal"`},
		{`consumer "b"`, 18, "lifecycle process: command: word 2"},
		{`consumer "b"`, 18, `lifecycle process: user "nobodyatall" is not known`},
		{`consumer "b"`, 18, "lifecycle process: server: lifecycle http: load: path"},
		{`consumer "b"`, 18, "lifecycle process: server: lifecycle http: unload: path"},
		{`consumer "c"`, 26, "lifecycle docker: container"},
		{`consumer "c"`, 26, "lifecycle docker: signal"},
		{`consumer "c"`, 26, "lifecycle docker: server: lifecycle http: unload: path"},
		{`consumer "d"`, 34, "lifecycle http: header Authorization"},
		{`consumer "d"`, 34, "lifecycle http: health: path"},
	}
	compare(validate(fmt.Sprintf(global, m.path("gpu"))+":8080 {\n\tgpu_broker a\n}\n"), app)

	const routes = `{
	admin off
	gpu_broker {
		gpu simulated 24GiB {
			dir %s
		}
		consumer ollama {
			vram 1GiB
			upstream 127.0.0.1:1
			unload POST /unload/{model}
			model a
		}
	}
}

:8080 {
	gpu_broker {
		model_from header X-Model
		default ollama
		fallback x y
	}
}
`
	compare(validate(fmt.Sprintf(routes, m.path("gpu"))), []fault{
		{"gpu_broker", 17, `unknown consumer in fallback "x"`},
		{"gpu_broker", 17, `unknown consumer in fallback "y"`},
		{"gpu_broker", 17, `default names consumer "ollama", which has several models`},
	})
}
