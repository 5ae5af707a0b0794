package e2e

import (
	"bytes"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

func TestN3_AnAliasIsSentAsTheModelsOwnNameWhereverItStands(t *testing.T) {
	t.Parallel()
	rec := newRecorder(t)
	s := start(t, layout{
		Consumers: []consumer{{Options: modelserver.Options{Name: "ollama", Manner: modelserver.Ollama, Models: map[string]gpu.Bytes{"llama3.2:3b": gib(3)}},
			Lines: "model llama3.2:3b {\nvram 3GiB\nalias gpt-4o-mini whisper-1\n}"}},
		Routes: "handle {\ngpu_broker {\nmodel_from body\nmodel_from query\nmodel_from header X-Model\nmodel_from path /models/*/generate\n}\nreverse_proxy " + rec.addr + "\n}\n" +
			"handle /real/* {\nuri strip_prefix /real\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	// ollama itself knows nothing of the alias.
	s.askJSON("/real/v1/chat/completions", `{"model":"gpt-4o-mini","messages":[]}`).servedBy(t, "ollama")

	send := func(path string, header http.Header, body string) received {
		t.Helper()
		return rec.takes(t, s, path, header, body)
	}
	json := http.Header{"Content-Type": {"application/json"}}
	large := strings.Repeat("b", 2<<20)
	for sent, want := range map[string]string{
		`{"model":"gpt-4o-mini","a" : 1.0}`:                             `{"model":"llama3.2:3b","a" : 1.0}`,
		`{"x_priority":1,"x":"gpt-4o-mini","mod\u0065l":"gpt-4o-mini"}`: `{"x":"gpt-4o-mini","mod\u0065l":"llama3.2:3b"}`,
		`{"image":"` + large + `","model":"whisper-1"}`:                 `{"image":"` + large + `","model":"llama3.2:3b"}`,
		`{"model":"llama3.2:3b"}`:                                       `{"model":"llama3.2:3b"}`,
	} {
		require.True(t, want == string(send("/v1/chat/completions", json.Clone(), sent).body), "%.80s", sent)
	}
	form := http.Header{"Content-Type": {"application/x-www-form-urlencoded"}}
	require.Equal(t, "a=1&model=llama3.2%3A3b", string(send("/v1/completions", form, "a=1&model=gpt-4o-mini").body))
	body, kind := speech(t, 3<<20, "whisper-1")
	got := send("/v1/audio/transcriptions", http.Header{"Content-Type": {kind}}, string(body))
	require.True(t, bytes.Equal(bytes.Replace(body, []byte("\r\n\r\nwhisper-1\r\n"), []byte("\r\n\r\nllama3.2:3b\r\n"), 1), got.body))
	require.Equal(t, "/v1/completions?x=%7e&model=llama3.2%3A3b", send("/v1/completions?x=%7e&model=gpt-4o-mini", json.Clone(), `{}`).uri)
	require.Equal(t, "/models/llama3.2:3b/generate", send("/models/gpt-4o-mini/generate", json.Clone(), `{}`).uri)
	require.Equal(t, "llama3.2:3b", send("/v1/completions", http.Header{"X-Model": {"gpt-4o-mini"}}, `{}`).header.Get("X-Model"))
}

func TestN3_ACloudFallbackIsAskedByItsOwnName(t *testing.T) {
	t.Parallel()
	cloud := newRecorder(t)
	s := start(t, layout{
		Total:  "12GiB",
		Global: "consumer hosted {\ncloud\nupstream " + cloud.addr + "\nalias gpt-4o-mini gpt-4o\n}",
		Consumers: []consumer{
			{Options: modelserver.Options{Name: "llama", VRAM: gib(10)}, Lines: "alias llama3.1:8b gpt-4\nfallback hosted"},
			{Options: modelserver.Options{Name: "sdxl", VRAM: gib(10)}},
		},
		Routes: "handle {\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	require.Equal(t, `{"model":"gpt-4"}`, string(s.askJSON("/x", `{"model":"gpt-4"}`).body), "the consumer itself gets what the client wrote")
	s.askJSON("/x", `{"model":"sdxl"}`).servedBy(t, "sdxl")
	for sent, want := range map[string]string{
		`{"a":1,"model":"llama3.1:8b","b":2}`: `{"a":1,"model":"gpt-4o-mini","b":2}`,
		`{"model":"gpt-4"}`:                   `{"model":"gpt-4o-mini"}`,
		`{"model":"gpt-4o"}`:                  `{"model":"gpt-4o"}`, // asked for itself
	} {
		s.askJSON("/x", sent).servedBy(t, "hosted")
		require.Equal(t, want, string(cloud.next(t).body))
	}
	taken := s.decisions("fallback")
	require.Len(t, taken, 2, "one asked for it by its own name")
	for _, d := range taken {
		require.Equal(t, "llama hosted", d.Consumer+" "+d.Target)
		require.Contains(t, d.Reason, "hosted, which is warm")
	}
	require.Contains(t, string(s.adminDo("GET", "/metrics", "", "").body), `caddy_gpu_broker_fallbacks_total{consumer="llama",to="hosted"} 2`)
}

// A WebSocket names its model in the query, on a route of its own server, too.
func TestN3_AWebSocketGetsTheModelThatItsQueryNames(t *testing.T) {
	t.Parallel()
	rec := newRecorder(t)
	models := map[string]float64{"small": 3, "other": 2}
	s := start(t, layout{
		Consumers: []consumer{
			shelf("localai", modelserver.LocalAI, "model small {\nvram 3GiB\nalias gpt-4o-realtime\n}\nmodel other {\nvram 2GiB\n}", models),
			shelf("speaches", modelserver.Speaches, "vram 3GiB\nmodel small {\nalias gpt-4o-realtime\n}", models), // one model, and others that are not named
		},
		Routes: "handle_path /one/* {\ngpu_broker localai\nreverse_proxy " + rec.addr + "\n}\nhandle_path /two/* {\ngpu_broker speaches\nreverse_proxy " + rec.addr + "\n}",
	})
	for route, consumer := range map[string]string{"one": "localai", "two": "speaches"} {
		for _, model := range []string{"other", "small", "gpt-4o-realtime"} {
			socket := http.Header{"Connection": {"Upgrade"}, "Upgrade": {"websocket"}}
			s.sending("GET", "/"+route+"/v1/realtime?model="+model+"&language=en", socket, nil).servedBy(t, consumer)
			require.Equal(t, "/v1/realtime?model="+strings.Replace(model, "gpt-4o-realtime", "small", 1)+"&language=en", rec.next(t).uri)
			if model == "other" {
				require.Equal(t, "READY", s.slot(consumer, "other").State, "what was asked for is loaded, and nothing else")
				require.Empty(t, slices.DeleteFunc(s.status().Consumers[consumer].Slots, func(sl broker.Slot) bool { return sl.Model == "other" || sl.State == "IDLE" }))
			}
		}
	}
}
