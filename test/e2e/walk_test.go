package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

func TestN1_WhereTheProxyGoesAstrayTheConfigurationIsBlamedAndNotTheServer(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Consumers: []consumer{
			{Options: modelserver.Options{Name: "llm", VRAM: 2 * gpu.GiB}, Proxy: "reverse_proxy {http.gpu_broker.upsteam}", Lines: "bypass GET /tags"},
			{Options: modelserver.Options{Name: "tts", VRAM: 2 * gpu.GiB}, Proxy: "reverse_proxy {gpu_broker.upstream}:80"},
		},
		Routes: "route /right/* {\nuri strip_prefix /right\ngpu_broker llm\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	for _, path := range []string{"/llm/work", "/tts/work", "/llm/tags"} {
		a := s.post(path, "{}")
		if strings.HasSuffix(path, "tags") {
			a = s.get(path)
		}
		assert.Equal(t, 500, a.status, "%s: %s", path, a.body)
		assert.Contains(t, string(a.body), `"code":"misrouted"`, path)
		assert.Contains(t, string(a.body), "{http.gpu_broker.upstream}", path)
	}
	for _, name := range []string{"llm", "tts"} {
		assert.Equal(t, "healthy", s.status().Consumers[name].Health, name)
	}
	assert.Contains(t, s.log(), "unknown placeholder {http.gpu_broker.upsteam}: did you mean {http.gpu_broker.upstream}?")
	a := s.post("/right/work", "{}")
	assert.Equal(t, 200, a.status, "%s", a.body)
}

func TestN1_RoutesThatPassTheBrokerUnseenAreToldWhenTheyAreLoaded(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Consumers: []consumer{{Options: modelserver.Options{Name: "pictures", VRAM: 9 * gpu.GiB, Manner: modelserver.ComfyUI}}},
		Routes: `route /comfy/* {
			gpu_broker pictures
			uri strip_prefix /comfy
			reverse_proxy {http.gpu_broker.upstream}
		}
		route /guarded/* {
			@stranger not header Authorization "Bearer secret"
			respond @stranger 401
			uri strip_prefix /guarded
			reverse_proxy UPSTREAM_OF_pictures
		}
		handle /nobody/* {
			reverse_proxy {
				dynamic gpu_broker
			}
		}`,
	})
	log := s.log()
	for _, want := range []string{"sees another request than the server of pictures: uri strip_prefix /comfy comes after it", "write uri strip_prefix /comfy before gpu_broker",
		"leads to " + s.servers["pictures"].Addr() + " with no gpu_broker before it", "reverse_proxy dynamic gpu_broker is reached by requests that no gpu_broker has admitted"} {
		assert.Equal(t, 1, strings.Count(log, want), "%s in\n%s", want, log)
	}
	assert.Equal(t, 3, strings.Count(log, `"route":"apps.http.servers.srv0.`), log)
}

func TestN1_ValidateTellsOfRoutesThatPassTheBrokerUnseen(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{{Options: modelserver.Options{Name: "llm", VRAM: 2 * gpu.GiB, Manner: modelserver.ComfyUI}}}})
	good, err := os.ReadFile(filepath.Join(s.dir, "Caddyfile"))
	require.NoError(t, err)
	validate := func(text string) (said string, err error) {
		path := filepath.Join(t.TempDir(), "Caddyfile")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		cmd := exec.Command(s.cmd.Path, "validate", "--config", path, "--adapter", "caddyfile")
		cmd.Env = s.cmd.Env
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	with := func(lines string) string {
		return strings.Replace(string(good), "handle /gpu/*", lines+"\nhandle /gpu/*", 1)
	}
	said, err := validate(string(good))
	require.NoError(t, err, said)
	require.NotContains(t, said, "gpu_broker before it")
	for lines, want := range map[string]string{
		"handle /past/* {\nreverse_proxy " + s.servers["llm"].Addr() + "\n}":                                   "with no gpu_broker before it",
		"route /deep/* {\ngpu_broker llm\nuri strip_prefix /deep\nreverse_proxy {http.gpu_broker.upstream}\n}": "uri strip_prefix /deep comes after it",
		"handle /misspelt/* {\ngpu_broker llm\nreverse_proxy {http.gpu_broker.upstrem}\n}":                     "did you mean {http.gpu_broker.upstream}?",
	} {
		said, err := validate(with(lines))
		require.NoError(t, err, said)
		require.Contains(t, said, want, lines)
	}
	// A configuration that fails is not walked: its apps are not all there.
	said, err = validate(with("handle /past/* {\ngpu_broker nobody\nreverse_proxy " + s.servers["llm"].Addr() + "\n}"))
	require.Error(t, err)
	require.NotContains(t, said, "with no gpu_broker before it")
}

func TestK7_APinnedServerIsNotUnloadedThroughItsDouble(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Total: "16GiB",
		Consumers: []consumer{
			{Options: modelserver.Options{Name: "kept", VRAM: 9 * gpu.GiB}, Lines: "pin"},
			{Options: modelserver.Options{Name: "other", VRAM: 10 * gpu.GiB}},
		},
		Global: "consumer double {\nupstream UPSTREAM_OF_kept\nvram 9GiB\nhealth /health {\nloaded $.loaded\nresident_mib $.gpu_resident_mib\n}\nload POST /api/admin/load\nunload POST /api/admin/unload\n}",
		Routes: "handle_path /double/* {\ngpu_broker double\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	// The server that the global lines name first is the first of the two.
	require.Equal(t, 200, s.post("/kept/work", "{}").status)
	require.Equal(t, 200, s.post("/double/work", "{}").status)
	a := s.post("/other/work", "{}")
	assert.Equal(t, 422, a.status, "%s", a.body)
	is := s.servers["kept"].Stats()
	assert.Zero(t, is.UnloadCalls, "%+v", is)
	assert.EqualValues(t, 1, is.LoadsStarted, "%+v", is)
	assert.Contains(t, s.log(), "one server is one consumer. Write shares double instead")
}

func TestK7_TwoNamesForOneServersModelsKeepToTheirOwn(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Consumers: []consumer{
			{Options: modelserver.Options{Name: "chat", Manner: modelserver.Ollama, VRAM: gib(4), Models: map[string]gpu.Bytes{"a": gib(4), "b": gib(4)}}, Lines: "vram 4GiB\nmodel a {\npin\n}"},
			{Options: modelserver.Options{Name: "large", VRAM: gib(9)}},
		},
		Global: "consumer code {\npreset ollama\nupstream UPSTREAM_OF_chat\nvram 4GiB\nmodel b\n}",
		Routes: "handle_path /code/* {\ngpu_broker code\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	s.askJSON("/chat/api/chat", `{"model":"a"}`).servedBy(t, "chat")
	s.askJSON("/code/api/chat", `{"model":"b"}`).servedBy(t, "code")
	a := s.askJSON("/code/api/chat", `{"model":"a"}`)
	require.Equal(t, 404, a.status, "%s", a.body)
	require.Contains(t, string(a.body), "another consumer stands for the same server")
	a = s.post("/large/work", "{}")
	require.Equal(t, 200, a.status, "%s", a.body)
	var evicted []string
	for _, d := range s.decisions("evicted") {
		evicted = append(evicted, d.Consumer)
	}
	assert.Equal(t, []string{"code/b"}, evicted, "a is pinned, by its one name")

	assert.Contains(t, s.log(), "one server is one consumer. Move its models there")
}

// N1: two gpu_brokers, one after the other, would make each request wait for itself with the GPU held.
func TestN1_ARequestThatComesToTwoBrokersIsRefusedAtOnceAndHoldsNothing(t *testing.T) {
	t.Parallel()
	route := func(path, first, second string) string {
		return "handle_path " + path + " {\nroute {\ngpu_broker " + first + "\nencode\ngpu_broker " + second + "\nreverse_proxy {http.gpu_broker.upstream}\n}\n}\n"
	}
	s := start(t, layout{
		Consumers: []consumer{
			{Options: modelserver.Options{Name: "a", VRAM: gib(10)}},
			{Options: modelserver.Options{Name: "b", VRAM: gib(10)}},
		},
		Routes: route("/two/*", "a", "b") + route("/same/*", "a", "a"),
	})
	for _, path := range []string{"/two/work", "/same/work"} {
		began := time.Now()
		require.Contains(t, s.post(path, "x").refused(t, 500, "misrouted"), "two gpu_broker directives", path)
		require.Less(t, time.Since(began), 5*time.Second, path)
		require.Equal(t, 200, s.post("/b/work", "mine").status)
	}
	require.Zero(t, s.servers["a"].Stats().Requests["/work"])
}
