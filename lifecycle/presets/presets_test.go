package presets_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	httplife "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// read decodes a preset as strictly as Caddy decodes a configuration.
func read(t *testing.T, name string) (config.Consumer, *httplife.Lifecycle) {
	t.Helper()
	data, _, err := presets.Load(name)
	require.NoError(t, err)
	var consumer config.Consumer
	require.NoError(t, caddy.StrictUnmarshalJSON(data, &consumer))

	var raw map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(consumer.LifecycleRaw, &raw))
	require.JSONEq(t, `"http"`, string(raw["protocol"]))
	delete(raw, "protocol") // as Caddy does with an inline key
	rest, err := json.Marshal(raw)
	require.NoError(t, err)
	guest := new(httplife.Lifecycle)
	require.NoError(t, caddy.StrictUnmarshalJSON(rest, guest))
	require.NoError(t, guest.Provision(caddy.Context{}))
	return consumer, guest
}

func open(t *testing.T, guest *httplife.Lifecycle, handler http.Handler) lifecycle.Driver {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	d, err := guest.Open(lifecycle.Deps{
		Consumer: "x", Upstream: server.Listener.Addr().String(),
		Limits: lifecycle.NewLimits(10*time.Second, 20*time.Second),
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

func TestNames(t *testing.T) {
	assert.Equal(t, []string{
		"a1111", "alltalk", "chatterbox", "chatterbox-tts-api", "comfyui", "docker-model-runner", "forge", "immich-ml", "infinity", "invokeai",
		"koboldcpp", "kokoro", "llama-swap", "llamacpp", "llamacpp-router", "lmstudio", "localai", "ollama", "openedai-speech", "sdcpp", "sdnext",
		"sglang", "speaches", "tabbyapi", "tei", "textgen-webui", "tgi", "triton", "vllm", "whispercpp", "xinference", "xtts",
	}, presets.Names())
	for _, name := range []string{"nobody", "../presets/ollama", ""} {
		p, known, err := presets.Find(name)
		if !presets.IsFile(name) {
			assert.NoError(t, err)
			assert.Equal(t, presets.Names(), known)
		}
		assert.Nil(t, p, name)
	}
}

func TestAPresetCanBeChangedByItsReader(t *testing.T) {
	first, _, _ := presets.Load("ollama")
	kept := bytes.Clone(first)
	clear(first)
	second, _, _ := presets.Load("ollama")
	assert.Equal(t, kept, []byte(second))
}

func TestEveryPresetIsAValidPartOfAConsumer(t *testing.T) {
	for _, name := range presets.Names() {
		t.Run(name, func(t *testing.T) {
			consumer, _ := read(t, name)
			assert.NotEmpty(t, consumer.GPURoutes)
			for _, list := range [][]string{consumer.GPURoutes, consumer.Bypass, consumer.Touch, consumer.Blocked, consumer.AsyncRoutes} {
				_, err := config.ParseRoutePatterns(list)
				require.NoError(t, err)
				assert.Len(t, slices.Compact(slices.Sorted(slices.Values(list))), len(list), "a route stands there twice")
			}
			// What is refused is no work, and what answers early is.
			for _, route := range consumer.Blocked {
				assert.NotContains(t, consumer.GPURoutes, route)
			}
			assert.Subset(t, consumer.GPURoutes, consumer.AsyncRoutes)
			// What only the user can know is left to the user, and so is what would go before a global setting of theirs.
			assert.Empty(t, consumer.Name)
			assert.Empty(t, consumer.Upstream)
			assert.Zero(t, consumer.VRAM)
			assert.Zero(t, consumer.Concurrency)
			assert.Empty(t, consumer.Category)
			assert.Nil(t, consumer.IdleTimeout)
		})
	}
}

func TestWhatLoadsAndUnloadsIsRefusedToClients(t *testing.T) {
	free := []string{ // they free what nobody uses, and harm nobody; ollama's load and unload are ordinary requests
		"POST /free", "POST /api/v2/models/empty_model_cache", "POST /api/generate", "POST /api/embed", "POST /engines/v1/chat/completions",
		"GET /health", // a load that only waits
	}
	for _, name := range presets.Names() {
		consumer, guest := read(t, name)
		blocked, err := config.ParseRoutePatterns(consumer.Blocked)
		require.NoError(t, err)
		for _, r := range []*httplife.Route{guest.Load, guest.Unload} {
			if r == nil || slices.Contains(free, r.Method+" "+r.Path) {
				continue
			}
			path, _, _ := strings.Cut(r.Path, "?")
			assert.True(t, blocked.Match(r.Method, path), "%s: %s %s", name, r.Method, path)
		}
		// What the broker asks is no GPU work, else its probes would be told apart from clients' only by their sender.
		gpu, err := config.ParseRoutePatterns(consumer.GPURoutes)
		require.NoError(t, err)
		for _, r := range []*httplife.Route{guest.Health, guest.Residency, guest.Busy} {
			if r != nil {
				path, _, _ := strings.Cut(r.Path, "?")
				assert.False(t, gpu.Match(r.Method, path), "%s: %s %s", name, r.Method, path)
			}
		}
	}
}

func TestEveryPresetSaysWhatPeopleNeedToKnow(t *testing.T) {
	for _, name := range presets.Names() {
		t.Run(name, func(t *testing.T) {
			p, _, err := presets.Find(name)
			require.NoError(t, err)
			about := p.About
			_, guest := read(t, name)
			assert.NotEmpty(t, about.Title)
			assert.NotZero(t, about.Port)
			assert.NotEmpty(t, about.Set)
			assert.NotEmpty(t, about.Source)
			for _, text := range append(append([]string{about.Frees, about.Costs}, about.Notes...), about.Set...) {
				assert.NotEmpty(t, text)
				assert.NotContains(t, text, "\n")
			}
			for _, sentence := range append([]string{about.Frees, about.Costs}, about.Notes...) {
				assert.True(t, strings.HasSuffix(sentence, "."), sentence)
			}

			traits := open(t, guest, http.NotFoundHandler()).Traits()
			assert.True(t, traits.Health)
			assert.Equal(t, about.NeedsProcess, guest.Unload == nil, "what has no way to unload needs a process")
			if about.NeedsProcess {
				assert.Empty(t, about.Unload)
			} else {
				assert.Contains(t, []string{presets.Waits, presets.Refuses, presets.Aborts, presets.Breaks}, about.Unload)
				assert.True(t, traits.Unload, "it can be unloaded as a whole")
			}
			byName := traits.Models && traits.LoadModel && traits.UnloadModel
			assert.Equal(t, about.Models != "", byName)
			assert.Contains(t, []string{"", presets.Each, presets.Must}, about.Models)
			assert.Equal(t, about.NeedsName, traits.LoadModel && !byName, "one that must be told its model, and has no more than one")
			if about.NeedsName {
				assert.Contains(t, strings.Join(about.Example, "\n"), "model_name ")
			}
			if about.Models != "" {
				assert.Contains(t, strings.Join(about.Example, "\n"), "model ")
			}
		})
	}
}

// ollama in its manners: an unload is answered at once and done two looks later.
type ollama struct {
	mu     sync.Mutex
	loaded map[string]int // looks left, -1: it stays
}

func (o *ollama) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch r.Method + " " + r.URL.Path {
	case "GET /api/version":
		_, _ = io.WriteString(w, `{"version":"0.33.0"}`)
	case "GET /api/ps":
		models := []map[string]any{}
		for name, left := range o.loaded {
			switch {
			case left == 0:
				delete(o.loaded, name)
				continue
			case left > 0:
				o.loaded[name]--
			}
			models = append(models, map[string]any{"name": name, "model": name, "size": 3 << 30, "size_vram": 2 << 30})
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"models": models})
	case "POST /api/generate":
		var in struct {
			Model     string
			Prompt    string
			KeepAlive *int `json:"keep_alive"`
		}
		if json.NewDecoder(r.Body).Decode(&in) != nil || in.KeepAlive == nil || *in.KeepAlive != 0 || in.Prompt != "" {
			http.Error(w, "not an unload", http.StatusBadRequest)
			return
		}
		if _, ok := o.loaded[in.Model]; !ok {
			http.Error(w, `{"error":"model not found"}`, http.StatusNotFound)
			return
		}
		o.loaded[in.Model] = 2
		_, _ = fmt.Fprintf(w, `{"model":%q,"done":true,"done_reason":"unload"}`, in.Model)
	default:
		http.NotFound(w, r)
	}
}

func TestOllamaIsProbedAndUnloadedModelByModel(t *testing.T) {
	consumer, guest := read(t, "ollama")
	assert.Equal(t, []string{
		"POST /api/generate", "POST /api/chat", "POST /api/embed", "POST /api/embeddings", "POST /v1/chat/completions",
		"POST /v1/completions", "POST /v1/embeddings", "POST /v1/responses", "POST /v1/messages", "POST /v1/audio/transcriptions",
	}, consumer.GPURoutes)
	assert.False(t, consumer.Async)
	assert.False(t, consumer.VRAMManaged)

	d := open(t, guest, &ollama{loaded: map[string]int{"llama3:8b": -1, "hf.co/a/b:Q4": -1}})
	assert.Equal(t, lifecycle.Traits{Unload: true, Health: true, Residency: true, Models: true, LoadModel: true, UnloadModel: true, Catalog: true,
		Names: lifecycle.Names{Fold: true, Prefix: "registry.ollama.ai/library/", Tag: "latest"}}, d.Traits())
	report := d.Probe(t.Context())
	assert.ElementsMatch(t, []lifecycle.Model{{Name: "llama3:8b", Resident: 2 * gpu.GiB, Size: 3 * gpu.GiB}, {Name: "hf.co/a/b:Q4", Resident: 2 * gpu.GiB, Size: 3 * gpu.GiB}}, report.Models)
	report.Models = nil
	assert.Equal(t, lifecycle.Report{Loaded: lifecycle.Yes, Resident: 4 * gpu.GiB}, report)

	confirmed, err := d.Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	assert.True(t, confirmed)
	assert.Equal(t, lifecycle.Report{Loaded: lifecycle.No, Resident: 0, Models: []lifecycle.Model{}}, d.Probe(t.Context()))
}

func TestComfyUIIsAsyncLazyAndFreedByFlag(t *testing.T) {
	consumer, guest := read(t, "comfyui")
	assert.Equal(t, []string{"POST /prompt", "POST /api/prompt"}, consumer.GPURoutes)
	assert.True(t, consumer.Async)
	assert.Equal(t, 512*gpu.MiB, consumer.Residual)

	var queue atomic.Int64
	var freed atomic.Value
	mux := http.NewServeMux()
	mux.HandleFunc("GET /system_stats", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"devices":[{"vram_total":1}]}`)
	})
	mux.HandleFunc("GET /prompt", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `{"exec_info":{"queue_remaining":%d}}`, queue.Load())
	})
	mux.HandleFunc("POST /free", func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		freed.Store(r.Header.Get("Content-Type") + " " + string(body))
	})
	d := open(t, guest, mux)
	assert.Equal(t, lifecycle.Traits{Unload: true, Health: true, Busy: true}, d.Traits())
	assert.Equal(t, lifecycle.Report{Loaded: lifecycle.Unknown, Resident: -1}, d.Probe(t.Context()))

	busy, err := d.Busy(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	assert.False(t, busy)
	queue.Store(3)
	busy, err = d.Busy(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	assert.True(t, busy)

	confirmed, err := d.Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	assert.False(t, confirmed, "an accepted flag is no unload")
	assert.Equal(t, `application/json {"unload_models":true,"free_memory":true}`, freed.Load())
}
