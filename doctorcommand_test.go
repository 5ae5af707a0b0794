package gpubroker

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/doctor"
)

// A site whose only fault is a claim above the card, and whose server is not asked.
func TestDoctorTellsAnErrorByItsExitStatus(t *testing.T) {
	const site = `{
	admin off
	gpu_broker {
		gpu simulated 16GiB {
			dir %s
		}
		consumer afar {
			cloud
			upstream 192.0.2.1:443
		}
		consumer chat {
			vram %s
			no_evict
		}
	}
}

http://localhost:28999 {
	gpu_broker %s
	reverse_proxy {http.gpu_broker.upstream}
}
`
	checks := func(vram, route string) (found []doctor.Finding, err error) {
		out, err := command(t, "doctor", "--json", "--config", file(t, "Caddyfile", fmt.Sprintf(site, t.TempDir(), vram, route)))
		var r doctor.Report
		require.NoError(t, json.Unmarshal([]byte(out), &r), "%s", out)
		for _, f := range r.Findings {
			if f.Severity == doctor.Error {
				found = append(found, f)
			}
		}
		assert.Len(t, found, r.Errors)
		return found, err
	}
	found, err := checks("15GiB", "chat")
	assert.NoError(t, err)
	assert.Empty(t, found)

	found, err = checks("16GiB", "chat")
	assert.ErrorContains(t, err, "not all is well")
	if assert.Len(t, found, 1) {
		assert.Equal(t, "claims", found[0].Check)
		assert.Equal(t, "chat", found[0].Consumer)
		assert.Regexp(t, `Caddyfile:12$`, found[0].Where)
	}

	found, err = checks("15GiB", "chta")
	assert.Error(t, err)
	if assert.Len(t, found, 1) {
		assert.Contains(t, found[0].What, `unknown consumer "chta": did you mean chat?`)
		assert.Equal(t, "write chat", found[0].Mend)
		assert.Regexp(t, `Caddyfile:19$`, found[0].Where)
	}

	_, err = command(t, "doctor", "--timeout", "-1s")
	assert.ErrorContains(t, err, "--timeout is -1s: it must be above 0")
}

func TestDoctorReadsJSONToo(t *testing.T) {
	for text, want := range map[string]string{
		"no JSON": "invalid character",
		`{}`:      "has no app gpu_broker",
		`{"apps":{"gpu_broker":{"gpu":{"driver":"simulatde"}}}}`:                                                                                  "did you mean simulated?",
		`{"apps":{"gpu_broker":{"consumers":[{"name":"a","vram":1,"preset":"olama"}]}}}`:                                                          "did you mean ollama?",
		`{"apps":{"gpu_broker":{"consumers":[null]},"http":{"servers":{"a":{"routes":[{"handle":[{"handler":"gpu_broker","consumer":"b"}]}]}}}}}`: "it is null: leave it out",
	} {
		out, err := command(t, "doctor", "--config", file(t, "site.json", text))
		assert.Error(t, err, text)
		assert.Contains(t, out, want, text)
	}
}

// Settings, lifecycles and routes are faulty, and each fault is told once, where it stands.
func TestDoctorTellsEachFaultOfTheConfigurationWhereItStands(t *testing.T) {
	const site = `{
	admin off
	gpu_broker {
		gpu simulatde 16GiB
		max_queue 10
		reserved_interactive 20 below 100
		restore nobody after 2m
		consumer a {
			vram 1GiB
			process sleep {gpu_broker.prot} {
				signal SIGNOTHING
			}
			unload POST /x#y
		}
		consumer b {
			vram 1GiB
			upstream 127.0.0.1:1
			preset olama
		}
	}
}

http://localhost:28999 {
	gpu_broker a {
		fallback x y
	}
	gpu_broker c
}
`
	find := func(text string) (found []doctor.Finding) {
		out, err := command(t, "doctor", "--json", "--config", file(t, "Caddyfile", text))
		assert.Error(t, err)
		var r doctor.Report
		require.NoError(t, json.Unmarshal([]byte(out), &r), "%s", out)
		for _, f := range r.Findings {
			if f.Severity == doctor.Error && f.Check == "config" {
				found = append(found, f)
			}
		}
		return found
	}
	found := find(site)
	if assert.Len(t, found, 1, "%+v", found) { // Caddy reads no further
		assert.Contains(t, found[0].What, "did you mean simulated?")
	}
	found = find(strings.Replace(site, "simulatde 16GiB", "simulated 0B", 1))
	want := []struct {
		line int
		what string
	}{
		{6, "gpu_broker: reserved_interactive has 20 places"},
		{18, "unknown preset"},
		{7, `gpu_broker: unknown consumer in restore "nobody"`},
		{4, "gpu_broker: gpu simulated: GPU 0 has no memory"},
		{8, "lifecycle process: command: word 2"},
		{11, `lifecycle process: signal "SIGNOTHING" is unknown`},
		{13, `lifecycle process: server: lifecycle http: unload: path "/x#y" has a #`},
		{24, `gpu_broker: unknown consumer in fallback "x"`},
		{24, `gpu_broker: unknown consumer in fallback "y"`},
		{27, `gpu_broker: unknown consumer "c"`},
	}
	if assert.Len(t, found, len(want), "%+v", found) {
		for i, w := range want {
			assert.Contains(t, found[i].What, w.what)
			assert.Regexp(t, fmt.Sprintf("Caddyfile:%d$", w.line), found[i].Where, w.what)
		}
	}
}

// The server has one model, and each name would be booked.
func TestK7_TwoNamesOfOneModelAreToldByTheServersOwnComparison(t *testing.T) {
	site := file(t, "Caddyfile", `{
	admin off
	gpu_broker {
		gpu simulated 16GiB {
			dir `+t.TempDir()+`
		}
		consumer ollama {
			preset ollama
			upstream 127.0.0.1:1
			model small {
				vram 5GiB
			}
			model large {
				vram 5GiB
			}
			model Small:latest {
				vram 5GiB
			}
		}
	}
}

http://localhost:28998 {
	gpu_broker ollama
	reverse_proxy {http.gpu_broker.upstream}
}
`)
	out, err := command(t, "doctor", "--json", "--config", site)
	require.Error(t, err)
	require.Contains(t, out, `models \"small\" and \"Small:latest\" are one to its server`)
	require.NotContains(t, out, `\"large\"`)
}
