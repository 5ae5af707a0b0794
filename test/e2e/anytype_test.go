package e2e

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// K4: a body that names a model never falls to the default, or to a consumer's only model, because of its Content-Type:
// many servers read JSON whatever it is called.
func TestK4_JSONNamesItsModelWhateverItsContentTypeIsCalled(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Consumers: []consumer{
			shelf("ollama", modelserver.Ollama, "vram 9GiB\nmodel solo", map[string]float64{"solo": 9, "other": 9}),
			{Options: modelserver.Options{Name: "tts", VRAM: gib(12)}},
		},
		Routes: "handle {\ngpu_broker {\nmodel_from body\ndefault tts\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
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
