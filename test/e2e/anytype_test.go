package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// soloByDefaultTTS is a site by whose one URL tts serves what names no model, beside an ollama that has solo, and other, which no line names.
func soloByDefaultTTS() layout {
	return layout{
		Consumers: []consumer{
			shelf("ollama", modelserver.Ollama, "vram 9GiB\nmodel solo", map[string]float64{"solo": 9, "other": 9}),
			{Options: modelserver.Options{Name: "tts", VRAM: gib(12)}},
		},
		Routes: "handle {\ngpu_broker {\nmodel_from body\ndefault tts\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	}
}

// K4: a body that names a model never falls to the default, or to a consumer's only model, because of its Content-Type:
// many servers read JSON whatever it is called.
func TestK4_JSONNamesItsModelWhateverItsContentTypeIsCalled(t *testing.T) {
	t.Parallel()
	s := start(t, soloByDefaultTTS())
	for _, kind := range []string{"application/octet-stream", "text/json", "application/x-ndjson", "text/html", "nonsense", "a/b; c=1; c=2"} {
		for path, model := range map[string]string{"/api/generate": "solo", "/ollama/api/generate": "other"} {
			s.post("/tts/", "x")
			a := s.ask("POST", path, kind, fmt.Appendf(nil, `{"model":%q,"prompt":"x","stream":false}`, model))
			require.Equal(t, 200, a.status, "%s as %s: %s", path, kind, a.body)
			require.Equal(t, "ollama", a.header.Get("X-Gpu-Broker-Consumer"), kind)
			require.Equal(t, "READY", s.slot("ollama", model).State, kind)
		}
	}
	evictions := s.status().Scheduler.Evictions
	for _, kind := range []string{"", "application/octet-stream"} {
		a := s.ask("POST", "/v1/completions", kind, []byte("\xFF\xFE{\x00}\x00"))
		require.Contains(t, a.refused(t, 400, "bad_request"), "no valid JSON")
	}
	require.Equal(t, evictions, s.status().Scheduler.Evictions)
}

// K4, H4: what a server may read, and the broker can't, falls neither to the default nor to a consumer's server.
func TestK4_ABodyThatHidesItsModelIsRefused(t *testing.T) {
	t.Parallel()
	s := start(t, soloByDefaultTTS())
	const object = `{"model":"other","prompt":"x","stream":false}`
	const form = "--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nsolo\r\n--x--\r\n"
	behindBlanks := strings.Repeat(" ", 1<<20+10) + object
	for _, c := range []struct{ kind, body, why string }{
		{"text/plain", behindBlanks, "blanks"},
		{"application/octet-stream", "\uFEFF" + behindBlanks, "blanks"},
		{"application/x-www-form-urlencoded", behindBlanks, "blanks"},
		{"application/json; charset=utf-7", `{"model":"solo","+AG0-odel":"other"}`, "charset"},
		{`text/plain; charset="UTF-16"`, object, "charset"},
		{"multipart/form-data; boundary=x", object + "\r\n" + form, "JSON object"},
	} {
		for _, path := range []string{"/v1/completions", "/ollama/v1/completions"} {
			a := s.ask("POST", path, c.kind, []byte(c.body))
			require.Contains(t, a.refused(t, 400, "bad_request"), c.why, "%s as %s", path, c.kind)
		}
	}
	require.Zero(t, s.servers["ollama"].Stats().LoadsStarted)
	require.Zero(t, s.servers["tts"].Stats().LoadsStarted)
	behindBlanks = strings.Replace(behindBlanks, "other", "solo", 1)
	s.ask("POST", "/v1/completions", "application/json; charset=UTF-8", []byte(behindBlanks)).servedBy(t, "ollama")
}
