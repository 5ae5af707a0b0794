package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"
)

// Identity is what answers at an address.
type Identity struct {
	Address string
	// Open says that something takes connections there, HTTP that it answers in HTTP, and Caddy that it is a Caddy.
	Open, HTTP, Caddy bool
	// Engine is the name of its preset; empty: it is none that can be told.
	Engine string
	// Models are those that it lists, at most maxListed; of an LLM server only.
	Models []ListedModel
}

// ListedModel is a model that a server could load.
type ListedModel struct {
	Name string
	File int64 // its size on disk in bytes; 0: the server does not say
}

const (
	maxListed = 200
	// maxLook bounds what is read of an answer, in bytes.
	maxLook = 1 << 20
	// answerTime is how long one answer may take: who needs longer is busy, and not asked any further.
	answerTime = 2 * time.Second
)

// visitor asks one server with requests that change nothing and wake nobody.
type visitor struct {
	ctx     context.Context
	client  *http.Client
	base    string
	got     map[string]*answer
	gaveUp  bool // it did not answer in time, or not at all
	refused bool
	header  http.Header // of the first answer
}

type answer struct {
	status int
	body   []byte
	fields map[string]json.RawMessage // if it is a JSON object
}

// tells are how the servers are known, in this order: first those that answer
// in others' names. Nothing here loads, wakes or generates: not /health before
// SGLang is ruled out, and never a route with a model in it.
var tells = []struct {
	engine string
	is     func(v *visitor) bool
}{
	{"koboldcpp", func(v *visitor) bool { return v.text("/api/extra/version", "result") == "KoboldCpp" }},
	{"localai", func(v *visitor) bool { return v.has("/system", "loaded_models") }},
	{"sglang", func(v *visitor) bool { return v.has("/get_model_info", "model_path") }},
	{"tabbyapi", func(v *visitor) bool {
		return strings.Contains(string(v.raw("/.well-known/serviceinfo", "software")), "TabbyAPI")
	}},
	{"textgen-webui", func(v *visitor) bool { return v.has("/v1/internal/model/info", "model_name") }},
	{"llama-swap", func(v *visitor) bool { return isList(v.raw("/running", "running")) }},
	{"docker-model-runner", func(v *visitor) bool {
		a := v.get("/engines/ps")
		return a != nil && a.status == http.StatusOK && isList(a.body)
	}},
	{"invokeai", func(v *visitor) bool { return v.has("/api/v1/app/version", "version") }},
	{"comfyui", func(v *visitor) bool {
		system := string(v.raw("/system_stats", "system"))
		return v.has("/system_stats", "devices") && (strings.Contains(system, "comfyui_version") || strings.Contains(system, "python_version"))
	}},
	{"ollama", func(v *visitor) bool { return v.has("/api/version", "version") && isList(v.raw("/api/ps", "models")) }},
	{"sdnext", func(v *visitor) bool { return v.has("/sdapi/v1/status", "status") }},
	{"forge", func(v *visitor) bool {
		return v.has("/sdapi/v1/memory", "cuda") && v.has("/sdapi/v1/progress?skip_current_image=true", "current_task")
	}},
	{"a1111", func(v *visitor) bool { return v.has("/sdapi/v1/memory", "cuda") }},
	{"lmstudio", func(v *visitor) bool {
		return isList(v.raw("/api/v1/models", "models")) && v.is2xx("/v1/models")
	}},
	{"vllm", func(v *visitor) bool {
		return strings.Contains(string(v.raw("/v1/models", "data")), `"vllm"`) || v.has("/is_sleeping", "is_sleeping")
	}},
	{"llamacpp-router", func(v *visitor) bool { return strings.Contains(string(v.raw("/models", "data")), `"status"`) }},
	{"llamacpp", func(v *visitor) bool {
		return v.has("/props", "default_generation_settings") || v.has("/props", "is_sleeping")
	}},
	{"triton", func(v *visitor) bool {
		return v.text("/v2", "name") == "triton" || !v.is2xx("/") && v.is2xx("/v2/health/live") && v.is2xx("/v2/health/ready")
	}},
	{"tgi", func(v *visitor) bool {
		return v.has("/info", "model_id") && strings.Contains(v.body("/metrics"), "tgi_")
	}},
	{"tei", func(v *visitor) bool {
		return v.has("/info", "model_id") && strings.Contains(v.body("/metrics"), "te_")
	}},
	{"xtts", func(v *visitor) bool { return isList([]byte(v.body("/speakers_list"))) }},
	{"alltalk", func(v *visitor) bool {
		return slices.Contains([]string{"Ready", "Unloaded"}, strings.Trim(strings.TrimSpace(v.body("/api/ready")), `"`))
	}},
	{"chatterbox", func(v *visitor) bool { return v.has("/api/model-info", "loaded") }},
	{"immich-ml", func(v *visitor) bool { return strings.TrimSpace(v.body("/ping")) == "pong" }},
	{"speaches", func(v *visitor) bool {
		return isList(v.raw("/api/ps", "models")) && v.text("/health", "message") == "OK"
	}},
	{"infinity", func(v *visitor) bool { return v.has("/health", "unix") }},
	{"chatterbox-tts-api", func(v *visitor) bool { return v.has("/health", "initialization_state") }},
	{"kokoro", func(v *visitor) bool {
		return v.text("/health", "status") == "healthy" && v.has("/v1/audio/voices", "voices")
	}},
	{"whispercpp", func(v *visitor) bool { return strings.Contains(strings.ToLower(v.body("/")), "whisper.cpp") }},
	{"openedai-speech", func(v *visitor) bool {
		return strings.Contains(string(v.raw("/v1/models", "data")), `"tts-1-hd"`) && v.has("/health", "status")
	}},
	{"sdcpp", func(v *visitor) bool { return strings.Contains(string(v.raw("/v1/models", "data")), "sd-cpp") }},
	{"xinference", func(v *visitor) bool {
		return v.is2xx("/status") && v.get("/status").fields != nil && v.has("/v1/models", "data")
	}},
}

// Identify finds out what answers at an address, host:port. It asks with GET alone.
func Identify(ctx context.Context, address string) Identity {
	id := Identity{Address: address}
	transport := &http.Transport{DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10}
	defer transport.CloseIdleConnections()
	v := &visitor{ctx: ctx, base: "http://" + address, got: map[string]*answer{}, client: &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	v.get("/")
	id.Open, id.HTTP = !v.refused, v.header != nil
	if v.header == nil || v.gaveUp {
		return id
	}
	for _, name := range []string{"Server", "Via"} {
		id.Caddy = id.Caddy || strings.Contains(strings.Join(v.header.Values(name), " "), "Caddy")
	}
	if id.Caddy {
		return id // what it passes on is not its own
	}
	for _, tell := range tells {
		is := tell.is(v)
		if v.gaveUp {
			return id
		}
		if is {
			id.Engine = tell.engine
			break
		}
	}
	if e, ok := EngineOf(id.Engine); ok && e.LLM {
		id.Models = v.models(id.Engine)
	}
	return id
}

// get asks for a path once; nil: there is no answer.
func (v *visitor) get(path string) *answer {
	if a, asked := v.got[path]; asked {
		return a
	}
	v.got[path] = nil
	if v.gaveUp {
		return nil
	}
	ctx, cancel := context.WithTimeout(v.ctx, answerTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, v.base+path, http.NoBody)
	if err != nil {
		return nil
	}
	req.Header.Set("User-Agent", "caddy-gpu-broker doctor")
	resp, err := v.client.Do(req)
	if err != nil {
		v.gaveUp = true
		var op *net.OpError
		v.refused = errors.As(err, &op) && op.Op == "dial"
		return nil
	}
	defer func() { _ = resp.Body.Close() }() // it was only read
	if v.header == nil {
		v.header = resp.Header
	}
	a := &answer{status: resp.StatusCode}
	if a.body, err = io.ReadAll(io.LimitReader(resp.Body, maxLook)); err != nil {
		v.gaveUp = errors.Is(err, context.DeadlineExceeded)
		return nil
	}
	if json.Unmarshal(a.body, &a.fields) != nil {
		a.fields = nil
	}
	v.got[path] = a
	return a
}

func (v *visitor) is2xx(path string) bool {
	a := v.get(path)
	return a != nil && a.status/100 == 2
}

// raw is a field of an accepted answer, as JSON.
func (v *visitor) raw(path, field string) json.RawMessage {
	if !v.is2xx(path) {
		return nil
	}
	return v.get(path).fields[field]
}

func (v *visitor) has(path, field string) bool { return v.raw(path, field) != nil }

func (v *visitor) text(path, field string) (text string) {
	if json.Unmarshal(v.raw(path, field), &text) != nil {
		return ""
	}
	return text
}

func (v *visitor) body(path string) string {
	if !v.is2xx(path) {
		return ""
	}
	return string(v.get(path).body)
}

func isList(raw []byte) bool {
	var list []json.RawMessage
	return json.Unmarshal(raw, &list) == nil && list != nil
}

// models are those that a server lists, in its own way or in OpenAI's.
func (v *visitor) models(engine string) (out []ListedModel) {
	var listed []struct {
		ID   string `json:"id"`
		Name string `json:"name"`
		Size int64  `json:"size"`
	}
	raw := v.raw("/v1/models", "data")
	if engine == "ollama" {
		raw = v.raw("/api/tags", "models")
	}
	if json.Unmarshal(raw, &listed) != nil {
		return nil
	}
	for _, m := range listed {
		name := m.ID
		if engine == "ollama" {
			name = m.Name
		}
		if name != "" && len(out) < maxListed {
			out = append(out, ListedModel{name, max(0, m.Size)})
		}
	}
	return out
}
