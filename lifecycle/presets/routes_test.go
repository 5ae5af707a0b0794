package presets_test

import (
	"bufio"
	"encoding/json"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

// tables are the route tables of servers, by preset.
func tables(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/routes/*.txt")
	require.NoError(t, err)
	return files
}

func TestK2_EachPresetHoldsAgainstTheRoutesOfItsServer(t *testing.T) {
	require.Len(t, tables(t), 12)
	kinds := map[string][]config.Need{
		"computes": {config.NeedsGPU},
		"turn":     {config.NeedsGPU, config.NeedsTurn},
		"free":     {config.NeedsNothing, config.NeedsTouch},
		"blocked":  {config.NeedsLeave},
	}
	for _, file := range tables(t) {
		name := strings.TrimSuffix(filepath.Base(file), ".txt")
		t.Run(name, func(t *testing.T) {
			consumer, _ := read(t, name)
			assert.Equal(t, config.UnlistedGPU, consumer.UnlistedRequests, "its requests compute")
			routes, err := config.NewRoutes(&consumer, nil, nil)
			require.NoError(t, err)
			f, err := os.Open(file)
			require.NoError(t, err)
			defer f.Close()
			lines, heads := bufio.NewScanner(f), 0
			for lines.Scan() {
				if strings.HasPrefix(lines.Text(), "# ") {
					heads++
					continue
				}
				fields := strings.Fields(lines.Text())
				require.Len(t, fields, 3, lines.Text())
				require.Contains(t, kinds, fields[2])
				r := request(t, fields[0], fields[1])
				assert.Contains(t, kinds[fields[2]], routes.Needs(r), "%s: %s", lines.Text(), routes.Needs(r))
			}
			assert.Equal(t, 2, heads, "its version and its source")
		})
	}
}

// TestK2_PresetsOfUIsKeepLists tells which presets leave unlisted requests alone.
func TestK2_OnlyPresetsOfUIsPassWhatTheyDoNotList(t *testing.T) {
	var uis []string
	for _, name := range presets.Names() {
		if consumer, _ := read(t, name); consumer.UnlistedRequests != config.UnlistedGPU {
			uis = append(uis, name)
		}
	}
	assert.Equal(t, []string{"a1111", "comfyui", "forge", "invokeai", "sdnext"}, uis)
}

func TestK2_EveryRouteOfGradioThatRunsAFunctionNeedsTheGPU(t *testing.T) {
	for _, name := range []string{"a1111", "forge", "sdnext"} {
		consumer, _ := read(t, name)
		routes, err := config.NewRoutes(&consumer, nil, nil)
		require.NoError(t, err)
		for _, path := range []string{"/run/predict", "/run/predict/", "/run/txt2img", "/api/predict", "/api/predict/", "/api/txt2img", "/call/txt2img", "/queue/join"} {
			assert.Equal(t, config.NeedsGPU, routes.Needs(request(t, http.MethodPost, path)), "%s: %s", name, path)
		}
	}
}

func TestK2_RoutesOfUIsThatRunModelsNeedTheGPUAndThoseThatEndThemAreRefused(t *testing.T) {
	for name, c := range map[string]struct{ computes, blocked []string }{
		"a1111": {computes: []string{"/sdapi/v1/train/embedding", "/sdapi/v1/train/hypernetwork", "/sdapi/v1/create/embedding"}},
		"sdnext": {
			computes: []string{"/sdapi/v1/video", "/sdapi/v1/caption", "/sdapi/v1/openclip", "/sdapi/v1/tagger", "/sdapi/v1/vqa", "/sdapi/v1/rembg", "/sdapi/v1/nudenet", "/sdapi/v1/image-guard", "/sdapi/v1/mask"},
			blocked:  []string{"/sdapi/v1/shutdown", "/sdapi/v1/restart", "/sdapi/v1/restart/"},
		},
		"invokeai": {computes: []string{"/api/v1/utilities/expand-prompt", "/api/v1/utilities/image-to-prompt"}},
	} {
		consumer, _ := read(t, name)
		routes, err := config.NewRoutes(&consumer, nil, nil)
		require.NoError(t, err)
		for _, path := range c.computes {
			assert.Equal(t, config.NeedsGPU, routes.Needs(request(t, http.MethodPost, path)), "%s: %s", name, path)
		}
		for _, path := range c.blocked {
			assert.Equal(t, config.NeedsLeave, routes.Needs(request(t, http.MethodPost, path)), "%s: %s", name, path)
		}
	}
}

// A WebSocket has no body, and a route that a list knows by its parameter names its model there.
func TestK2_PresetsLookForAModelsNameWhereTheirRoutesHaveIt(t *testing.T) {
	var inQuery []string
	for _, name := range presets.Names() {
		consumer, _ := read(t, name)
		if text := string(consumer.LifecycleRaw); !strings.Contains(text, "{model}") && !strings.Contains(text, "{item}") { // its models can't be told apart
			continue
		}
		for _, route := range consumer.GPURoutes {
			if !strings.HasSuffix(route, "/v1/realtime") && !strings.HasSuffix(route, "?model") {
				continue
			}
			inQuery = append(inQuery, name)
			assert.Contains(t, consumer.ModelFrom, config.ModelFrom{Source: config.FromQuery, Name: "model"}, "%s: %s", name, route)
			assert.Contains(t, consumer.ModelFrom, config.ModelFrom{Source: config.FromBody}, "%s: its other routes name it there", name)
			break
		}
	}
	assert.Equal(t, []string{"llama-swap", "llamacpp-router", "localai", "speaches"}, inQuery)
}

// Express, which takes paths in any case and with a slash at the end, answers for LM Studio.
func TestH3_LMStudiosRoutesAreMatchedAsExpressMatchesThem(t *testing.T) {
	consumer, _ := read(t, "lmstudio")
	routes, err := config.NewRoutes(&consumer, nil, nil)
	require.NoError(t, err)
	for path, want := range map[string]config.Need{
		"/API/v1/Models/Unload": config.NeedsLeave, "/api/v1/models/load/": config.NeedsLeave,
		"/V1/Chat/Completions": config.NeedsGPU, "/api/V0/embeddings/": config.NeedsGPU, "/api/v1/models/Download": config.NeedsNothing,
	} {
		assert.Equal(t, want, routes.Needs(request(t, http.MethodPost, path)), path)
	}
}

// request is a request as the handler sees it. WS is a WebSocket.
func request(t *testing.T, method, target string) *http.Request {
	t.Helper()
	r := &http.Request{Method: method, Header: http.Header{}}
	path, query, _ := strings.Cut(target, "?")
	r.URL = &url.URL{Path: path, RawQuery: query}
	if method == "WS" {
		r.Method = http.MethodGet
		r.Header.Set("Connection", "Upgrade")
		r.Header.Set("Upgrade", "websocket")
	}
	return r
}

// routesOf is what the server of a preset has: its table, or what the preset itself names.
func routesOf(t testing.TB, name string, c *config.Consumer) []modelserver.Route {
	t.Helper()
	f, err := os.Open("testdata/routes/" + name + ".txt")
	if err == nil {
		defer f.Close()
		table, err := modelserver.ReadRoutes(f)
		require.NoError(t, err)
		return table
	}
	var out []modelserver.Route
	for _, list := range []struct {
		kind   string
		routes []string
	}{{modelserver.KindComputes, c.GPURoutes}, {modelserver.KindBlocked, c.Blocked}, {modelserver.KindFree, c.FreeRoutes}} {
		for _, text := range list.routes {
			method, path, both := strings.Cut(text, " ")
			if !both {
				method, path = http.MethodPost, text
			}
			for m := range strings.SplitSeq(method, "|") {
				out = append(out, modelserver.Route{Method: m, Path: strings.Replace(path, "*", "x", 1), Kind: list.kind})
			}
		}
	}
	return out
}

// FuzzNothingComputesUnseen holds each preset against its server for any request: what the server takes for a route that computes
// needs the GPU, or a turn, and what it takes for a blocked one is refused.
func FuzzNothingComputesUnseen(f *testing.F) {
	type side struct {
		manner modelserver.Manner
		table  []modelserver.Route
		lists  *config.Routes
	}
	var sides []side
	for _, name := range presets.Names() {
		data, _, err := presets.Load(name)
		require.NoError(f, err)
		var c config.Consumer
		require.NoError(f, json.Unmarshal(data, &c))
		lists, err := config.NewRoutes(&c, nil, nil)
		require.NoError(f, err)
		sides = append(sides, side{modelserver.Manner(name), routesOf(f, name, &c), lists})
		for i, r := range sides[len(sides)-1].table {
			f.Add(uint8(len(sides)-1), r.Method, r.Path, "/x")
			if i%7 == 0 {
				f.Add(uint8(len(sides)-1), strings.ToLower(r.Method), "/x"+strings.ReplaceAll(r.Path, "/", "%2f")+"/", "/x")
			}
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, method, target, prefix string) {
		s := sides[int(which)%len(sides)]
		u, err := url.ParseRequestURI(target)
		if err != nil || !strings.HasPrefix(target, "/") || !validMethod(method) {
			return // no server is asked that
		}
		r := &http.Request{Method: method, URL: u, Header: http.Header{"X-Forwarded-Prefix": {prefix}}}
		if method == "WS" {
			r.Method = http.MethodGet
			r.Header.Set("Connection", "Upgrade")
			r.Header.Set("Upgrade", "websocket")
		}
		sent := u.EscapedPath() // as a proxy passes it on
		if u.RawQuery != "" {
			sent += "?" + u.RawQuery
		}
		got := s.lists.Needs(r)
		switch kind := s.manner.Match(s.table, r.Method, sent, r.Header); {
		case kind == modelserver.KindBlocked && got != config.NeedsLeave,
			(kind == modelserver.KindComputes || kind == modelserver.KindTurn) && got != config.NeedsGPU && !got.Unlisted() && got != config.NeedsLeave:
			t.Errorf("%s: %s %s (prefix %q) reaches a route that is %q, and %s", s.manner, r.Method, sent, prefix, kind, got)
		}
	})
}

func validMethod(method string) bool {
	return method != "" && len(method) < 20 && strings.IndexFunc(method, func(r rune) bool { return (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') && r != '-' }) < 0
}

// The route by which the broker has a server unload must not be one that clients may use.
func TestK3_EveryRouteThatUnloadsAServerIsBlockedOrAsksForAnUnload(t *testing.T) {
	checked := 0
	for _, name := range presets.Names() {
		consumer, _ := read(t, name)
		var l struct {
			Unload *struct{ Method, Path, Body string }
		}
		require.NoError(t, json.Unmarshal(consumer.LifecycleRaw, &l))
		if l.Unload == nil {
			continue
		}
		checked++
		routes, err := config.NewRoutes(&consumer, nil, nil)
		require.NoError(t, err)
		paths, err := config.ParsePathMatch(consumer.PathMatch)
		require.NoError(t, err)
		r := request(t, l.Unload.Method, strings.ReplaceAll(l.Unload.Path, "{item}", "x"))
		asks := false
		for _, u := range consumer.UnloadRequests {
			route, err := paths.Patterns([]string{u.Route})
			require.NoError(t, err)
			asks = asks || routes.Asks(r, route)
		}
		assert.True(t, asks || routes.Needs(r) == config.NeedsLeave, "%s: %s %s", name, l.Unload.Method, l.Unload.Path)
	}
	assert.Greater(t, checked, 15)
}
