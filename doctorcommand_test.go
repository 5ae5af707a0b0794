package gpubroker

import (
	"encoding/json"
	"fmt"
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
		`{"apps":{"gpu_broker":{"gpu":{"driver":"simulatde"}}}}`:                         "did you mean simulated?",
		`{"apps":{"gpu_broker":{"consumers":[{"name":"a","vram":1,"preset":"olama"}]}}}`: "did you mean ollama?",
	} {
		out, err := command(t, "doctor", "--config", file(t, "site.json", text))
		assert.Error(t, err, text)
		assert.Contains(t, out, want, text)
	}
}
