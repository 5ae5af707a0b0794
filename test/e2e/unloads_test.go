package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// ejects are requests that give the memory of a model back.
var ejects = map[string]string{
	"/api/generate": `{"model":%q,"keep_alive":0}`,
	"/api/chat":     `{"model":%q,"messages":[],"keep_alive":"0s"}`, // as Open WebUI's eject
}

func TestK3_GivingBackWhatIsNotLoadedLoadsAndUnloadsNothing(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{
		shelf("ollama", modelserver.Ollama, "vram 9GiB\nmodel small\nmodel big", map[string]float64{"small": 9, "big": 9}),
		{Options: modelserver.Options{Name: "tts", VRAM: gib(12)}},
	}})
	require.Equal(t, 200, s.post("/tts/", "x").status)
	for path, body := range ejects {
		a := s.askJSON("/ollama"+path, fmt.Sprintf(body, "Small"))
		require.Equal(t, 200, a.status, string(a.body))
		var doc struct {
			Model      string
			Done       bool
			DoneReason string `json:"done_reason"`
		}
		require.NoError(t, json.Unmarshal(a.body, &doc))
		require.Equal(t, "Small", doc.Model)
		require.True(t, doc.Done)
		require.Equal(t, "unload", doc.DoneReason)
		require.Equal(t, 404, s.askJSON("/ollama"+path, fmt.Sprintf(body, "nope")).status, "nor is what the server does not have")
	}
	require.Equal(t, "READY", s.state("tts"))
	require.Zero(t, s.status().Scheduler.Evictions)
	require.Zero(t, s.servers["ollama"].Stats().Loads)
}

func TestK3_AnUnloadIsToldHoweverItsPathIsSpelt(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{
		shelf("ollama", modelserver.Ollama, "vram 9GiB\nmodel small\nmodel big", map[string]float64{"small": 9, "big": 9}),
		shelf("docker-model-runner", modelserver.DockerModelRunner, "vram 9GiB\nmodel ai/small", map[string]float64{"ai/small": 9}),
		{Options: modelserver.Options{Name: "tts", VRAM: gib(12)}},
	}})
	require.Equal(t, 200, s.post("/tts/", "x").status)
	for _, path := range []string{"//api/generate", "/api//generate", "/api/generate/", "/api/./generate", "/api/%2567enerate", "/api/generate;x"} {
		for consumer, model := range map[string]string{"ollama": "small", "docker-model-runner": "ai/small"} {
			a := s.askJSON("/"+consumer+path, fmt.Sprintf(`{"model":%q,"keep_alive":0}`, model))
			require.Equal(t, 200, a.status, "%s%s: %s", consumer, path, a.body)
		}
	}
	require.Equal(t, "READY", s.state("tts"))
	require.Zero(t, s.status().Scheduler.Evictions)
}

func TestK3_GivingBackWhatIsLoadedUnloadsItOnceItsWorkHasEnded(t *testing.T) {
	t.Parallel()
	for path, body := range ejects {
		t.Run(path[1:], func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Consumers: []consumer{shelf("ollama", modelserver.Ollama, "vram 5GiB\nmodel small\nmodel big", map[string]float64{"small": 5, "big": 5})}})
			require.Equal(t, 200, s.chat("ollama", "big").status)
			working := s.send("POST", "/ollama/api/generate?ms=400", `{"model":"small","prompt":"x","stream":false}`)
			s.until("it works", func() bool { return s.status().Consumers["ollama"].Active == 1 })
			began := time.Now()
			eject := s.askJSON("/ollama"+path, fmt.Sprintf(body, "library/small"))
			require.Equal(t, 200, eject.status, string(eject.body))
			require.Equal(t, "IDLE", s.slot("ollama", "small").State)
			work := s.await(working)
			require.Equal(t, 200, work.status, "its work was not cut")
			require.Greater(t, time.Since(began), 300*time.Millisecond, "the unload waited for it")
			require.Equal(t, "READY", s.slot("ollama", "big").State, "no other was asked to go")
			require.Zero(t, s.status().Scheduler.Evictions)
		})
	}
}

func TestK3_APinnedModelIsNotGivenBack(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{
		shelf("ollama", modelserver.Ollama, "vram 5GiB\nmodel small {\npin\n}", map[string]float64{"small": 5}),
		{Options: modelserver.Options{Name: "whole", Manner: modelserver.Ollama, VRAM: gib(3)}, Lines: "pin"},
	}})
	require.Equal(t, 200, s.chat("ollama", "small").status)
	require.Equal(t, 200, s.chat("whole", "whole").status)
	for path, body := range ejects {
		for consumer, model := range map[string]string{"ollama": "small", "whole": "whole"} {
			a := s.askJSON("/"+consumer+path, fmt.Sprintf(body, model))
			require.Equal(t, 403, a.status, string(a.body))
			require.Contains(t, string(a.body), "is pinned")
		}
	}
	require.Equal(t, "READY", s.slot("ollama", "small").State)
	require.Zero(t, s.servers["whole"].Stats().Unloads)
}

func TestK3_AServerWithoutModelsIsNotLoadedToBeUnloadedAndUnloadsItself(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{{Options: modelserver.Options{Name: "whole", Manner: modelserver.Ollama, VRAM: gib(3)}}}})
	for path, body := range ejects {
		require.Equal(t, 200, s.askJSON("/whole"+path, fmt.Sprintf(body, "whole")).status)
		require.Equal(t, "IDLE", s.state("whole"))
	}
	require.Zero(t, s.servers["whole"].Stats().Loads)
	for path, body := range ejects {
		require.Equal(t, 200, s.chat("whole", "whole").status)
		require.Equal(t, 200, s.askJSON("/whole"+path, fmt.Sprintf(body, "whole")).status)
		s.until("the broker has noticed", func() bool { return s.state("whole") == "IDLE" })
	}
}

func TestK3_AnUnloadBehindWorkIsNoticedAndKeptAliveIsNoUnload(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{shelf("ollama", modelserver.Ollama, "vram 5GiB\nmodel small", map[string]float64{"small": 5})}})
	for _, keep := range []string{"-1", `"-1m"`, `"5m"`} {
		a := s.askJSON("/ollama/api/generate", `{"model":"small","keep_alive":`+keep+`}`)
		require.Equal(t, 200, a.status, string(a.body))
		require.Equal(t, "READY", s.slot("ollama", "small").State, keep)
	}
	began := time.Now()
	require.Equal(t, 200, s.askJSON("/ollama/api/generate", `{"model":"small","prompt":"x","stream":false,"keep_alive":0}`).status)
	s.until("the broker has noticed", func() bool { return s.slot("ollama", "small").State == "IDLE" })
	require.Less(t, time.Since(began), 5*time.Second)
}

// K3: an unload is told however it is written, and however its body is sent.
func TestK3_AnUnloadIsToldHoweverItIsWritten(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{
		shelf("ollama", modelserver.Ollama, "vram 5GiB\nmodel small", map[string]float64{"small": 5}),
		{Options: modelserver.Options{Name: "whole", Manner: modelserver.Ollama, VRAM: gib(5)}},
		{Options: modelserver.Options{Name: "tts", VRAM: gib(12)}},
	}})
	require.Equal(t, 200, s.post("/tts/", "x").status)
	for name, model := range map[string]string{"ollama": "small", "whole": "whole"} {
		for _, body := range []string{`{"model":%q,"keep_alive":0}`, `{"model":%q,"keep\u005falive":0}`, `{"model":%q,"Keep_\u0041live":"0s","prompt":""}`} {
			text := fmt.Sprintf(body, model)
			for _, length := range []int64{int64(len(text)), -1} {
				req, err := http.NewRequest("POST", s.url+"/"+name+"/api/generate", strings.NewReader(text))
				require.NoError(t, err)
				req.ContentLength = length
				req.Header.Set("Content-Type", "application/json")
				resp, err := s.client.Do(req)
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
				require.Equal(t, 200, resp.StatusCode)
				require.Equal(t, "READY", s.state("tts"), "%s of length %d", text, length)
			}
		}
	}
	require.Zero(t, s.status().Scheduler.Evictions)
}
