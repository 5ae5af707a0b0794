package e2e

import (
	"encoding/json"
	"net/http"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// listed are the names in a list of models, in both of its forms.
func (s *site) listed(path string) (names []string) {
	s.t.Helper()
	a := s.get(path)
	require.Equal(s.t, 200, a.status, "%s: %s", path, a.body)
	require.Contains(s.t, a.header.Get("Content-Type"), "application/json")
	var doc struct {
		Data   []struct{ ID string }
		Models []struct{ Name, Model string }
	}
	require.NoError(s.t, json.Unmarshal(a.body, &doc))
	for _, m := range doc.Data {
		names = append(names, m.ID)
	}
	for _, m := range doc.Models {
		require.Equal(s.t, m.Name, m.Model)
		names = append(names, m.Name)
	}
	slices.Sort(names)
	return names
}

func TestN3_AListOfARouteWithOneConsumerShowsWhatTheRouteServes(t *testing.T) {
	t.Parallel()
	models := map[string]float64{"llama3.2:3b": 3, "hidden:7b": 4, "extra:latest": 2}
	lines := "model llama3.2:3b {\nvram 3GiB\nalias gpt-4o-mini claude-*\n}\nmodel hidden:7b {\nvram 4GiB\nalias secret\nunlisted\n}\nmodel absent {\nvram 1GiB\nalias gone\n}"
	s := start(t, layout{Consumers: []consumer{
		shelf("any", modelserver.Ollama, "vram 2GiB\n"+lines, models),
		shelf("only", modelserver.Ollama, lines, models),
	}})
	require.Equal(t, []string{"extra:latest", "gpt-4o-mini", "llama3.2:3b"}, s.listed("/any/api/tags"))
	require.Equal(t, []string{"gpt-4o-mini", "llama3.2:3b"}, s.listed("/only/api/tags"), "without a vram the route refuses what is not named")
	require.Equal(t, 404, s.chat("only", "extra").status)
	for _, name := range []string{"gpt-4o-mini", "secret", "extra", "claude-3"} {
		require.Equal(t, 200, s.chat("any", name).status, name)
	}

	// The entry of an alias is the model's own, but for the name.
	var doc struct{ Models []map[string]any }
	require.NoError(t, json.Unmarshal(s.get("/any/api/tags").body, &doc))
	byName := map[string]map[string]any{}
	for _, m := range doc.Models {
		byName[m["name"].(string)] = m
	}
	alias, own := byName["gpt-4o-mini"], byName["llama3.2:3b"]
	delete(alias, "name")
	delete(alias, "model")
	delete(own, "name")
	delete(own, "model")
	require.Equal(t, own, alias)
	require.NotEmpty(t, own["digest"])

	require.Equal(t, "gpt-4o-mini", jsonField(t, s.get("/any/v1/models/gpt-4o-mini"), "id"))
	head := s.sending("HEAD", "/any/api/tags", http.Header{}, nil)
	require.Equal(t, 200, head.status)
}

func jsonField(t *testing.T, a answer, field string) any {
	t.Helper()
	require.Equal(t, 200, a.status, "%s", a.body)
	var doc map[string]any
	require.NoError(t, json.Unmarshal(a.body, &doc))
	return doc[field]
}

func TestN3_AListOfOtherServersShowsAliasesToo(t *testing.T) {
	t.Parallel()
	for manner, paths := range map[modelserver.Manner][]string{modelserver.LlamaCppRouter: {"/v1/models", "/models"}, modelserver.LocalAI: {"/v1/models"}} {
		t.Run(string(manner), func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Consumers: []consumer{
				shelf("llm", manner, "model small {\nvram 3GiB\nalias gpt-4o-mini\n}\nmodel hidden {\nvram 4GiB\nunlisted\n}", map[string]float64{"small": 3, "hidden": 4, "other": 1}),
			}})
			for _, path := range paths {
				require.Equal(t, []string{"gpt-4o-mini", "small"}, s.listed("/llm"+path))
			}
			require.Equal(t, 200, s.chat("llm", "hidden").status)
			req, err := http.NewRequest("GET", s.url+"/llm/v1/models", nil)
			require.NoError(t, err)
			req.Header.Set("Accept-Encoding", "gzip")
			resp, err := s.client.Do(req)
			require.NoError(t, err)
			defer resp.Body.Close()
			require.Empty(t, resp.Header.Get("Content-Encoding"))
		})
	}
}

func TestN3_AModelIsShownByASpellingThatItsServerTakesForItsName(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Consumers: []consumer{shelf("ollama", modelserver.Ollama, "model llama3.2:3b {\nvram 3GiB\nalias \"My Model\"\n}", map[string]float64{"llama3.2:3b": 3})},
		Routes:    "handle_path /all/* {\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	for name, want := range map[string]string{"Llama3.2:3B": "llama3.2:3b", "library/llama3.2:3b": "llama3.2:3b", "ollama%2Fllama3.2:3b": "llama3.2:3b", "my%20model": "llama3.2:3b"} {
		require.Equal(t, want, jsonField(t, s.get("/all/v1/models/"+name), "id"), name)
	}
	require.Equal(t, "llama3.2:3b", jsonField(t, s.get("/ollama/v1/models/my%20model"), "id"), "its server knows no such name")
}

func TestN3_AModelIsShownByANameThatOnlyAPatternFits(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Consumers: []consumer{shelf("ollama", modelserver.Ollama, "vram 4GiB\nmodels auto\nmodel llama3.2:3b {\nvram 3GiB\nalias gpt-*\n}", map[string]float64{"llama3.2:3b": 3, "gpt-oss:20b": 4})},
		Routes:    "handle_path /all/* {\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	for path, want := range map[string]string{"/all/v1/models/gpt-4o": "llama3.2:3b", "/all/v1/models/gpt-oss:20b": "gpt-oss:20b", "/ollama/v1/models/gpt-4o": "llama3.2:3b"} {
		require.Equal(t, want, jsonField(t, s.get(path), "id"), path)
	}
	require.Equal(t, 404, s.get("/all/v1/models/claude").status)
}

// A list is asked for again and again by a page that waits for its server.
func TestAListOfModelsIsThereWhileItsServerStarts(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: startingSlowly(startedRouter(t, "model small {\nalias gpt-4o-mini\n}")), Routes: allAndLLM})
	chat := s.goCtx(t.Context(), "POST", "/llm/v1/chat/completions", `{"model":"gpt-4o-mini","messages":[{"role":"user","content":"a"}]}`)
	s.until("its process runs", func() bool { p := s.status().Consumers["llm"].Process; return p != nil && p.Running })
	require.Equal(t, []string{"gpt-4o-mini", "small"}, s.listed("/llm/v1/models"))
	s.get("/llm/health").refused(t, 503, "not_running")
	require.Equal(t, 200, s.await(chat).status)
}
