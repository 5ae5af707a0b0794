package doctor

import (
	"slices"
	"strconv"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

// Engine is what the doctor knows of a kind of server.
type Engine struct {
	Preset string // its name, and the preset's
	presets.About
	// MorePorts are those at which it listens beside About.Port, if it is told so by habit.
	MorePorts []int
	// LLM says that it answers in OpenAI's form, and that its requests name a model.
	LLM bool
	// Bind says how it is told to listen on this machine alone.
	Bind string
	// Claim is what one commonly needs, where nothing tells.
	Claim gpu.Bytes
}

// engines are all that can be told apart. What is known of them beside this is in their presets.
var engines = []Engine{
	{Preset: "ollama", LLM: true, Bind: "OLLAMA_HOST=127.0.0.1:11434", Claim: 8 * gpu.GiB},
	{Preset: "llamacpp", LLM: true, Bind: "--host 127.0.0.1", Claim: 8 * gpu.GiB},
	{Preset: "llamacpp-router", LLM: true, Bind: "--host 127.0.0.1", Claim: 8 * gpu.GiB},
	{Preset: "comfyui", Bind: "--listen 127.0.0.1", Claim: 12 * gpu.GiB},
	{Preset: "a1111", MorePorts: []int{7861}, Bind: "no --listen", Claim: 8 * gpu.GiB},
	{Preset: "forge", MorePorts: []int{7861}, Bind: "no --listen", Claim: 8 * gpu.GiB},
	{Preset: "sdnext", Bind: "no --listen", Claim: 8 * gpu.GiB},
	{Preset: "vllm", LLM: true, Bind: "--host 127.0.0.1", Claim: 20 * gpu.GiB},
	{Preset: "sglang", LLM: true, Bind: "--host 127.0.0.1", Claim: 20 * gpu.GiB},
	{Preset: "textgen-webui", LLM: true, Bind: "no --listen", Claim: 8 * gpu.GiB},
	{Preset: "lmstudio", LLM: true, Bind: "turn off \"serve on local network\"", Claim: 8 * gpu.GiB},
	{Preset: "localai", LLM: true, Bind: "--address 127.0.0.1:8080", Claim: 8 * gpu.GiB},
	{Preset: "koboldcpp", LLM: true, Bind: "--host 127.0.0.1", Claim: 8 * gpu.GiB},
	{Preset: "tabbyapi", LLM: true, Bind: "network: host: 127.0.0.1", Claim: 8 * gpu.GiB},
	{Preset: "whispercpp", Bind: "--host 127.0.0.1", Claim: 3 * gpu.GiB},
	{Preset: "speaches", Bind: "UVICORN_HOST=127.0.0.1", Claim: 4 * gpu.GiB},
	{Preset: "invokeai", Bind: "host: 127.0.0.1 in invokeai.yaml", Claim: 12 * gpu.GiB},
	{Preset: "sdcpp", Bind: "-l 127.0.0.1", Claim: 8 * gpu.GiB},
	{Preset: "llama-swap", LLM: true, Bind: "--listen 127.0.0.1:8080", Claim: 8 * gpu.GiB},
	{Preset: "docker-model-runner", LLM: true, Bind: "its TCP port on 127.0.0.1", Claim: 8 * gpu.GiB},
	{Preset: "xinference", LLM: true, Bind: "--host 127.0.0.1", Claim: 8 * gpu.GiB},
	{Preset: "triton", Bind: "--http-address 127.0.0.1", Claim: 8 * gpu.GiB},
	{Preset: "tgi", LLM: true, Bind: "--hostname 127.0.0.1", Claim: 20 * gpu.GiB},
	{Preset: "tei", Bind: "--hostname 127.0.0.1", Claim: 2 * gpu.GiB},
	{Preset: "infinity", Bind: "--host 127.0.0.1", Claim: 2 * gpu.GiB},
	{Preset: "immich-ml", Bind: "IMMICH_HOST=127.0.0.1", Claim: 2 * gpu.GiB},
	{Preset: "kokoro", Bind: "--host 127.0.0.1", Claim: 2 * gpu.GiB},
	{Preset: "chatterbox", MorePorts: []int{8000}, Bind: "server: host: 127.0.0.1 in its config.yaml", Claim: 4 * gpu.GiB},
	{Preset: "chatterbox-tts-api", Bind: "HOST=127.0.0.1", Claim: 4 * gpu.GiB},
	{Preset: "openedai-speech", Bind: "--host 127.0.0.1", Claim: 3 * gpu.GiB},
	{Preset: "alltalk", Bind: "ip_address 127.0.0.1 in its confignew.json", Claim: 4 * gpu.GiB},
	{Preset: "xtts", Bind: "--host 127.0.0.1", Claim: 4 * gpu.GiB},
}

// EngineOf is what is known of a preset's kind of server.
func EngineOf(preset string) (Engine, bool) {
	i := slices.IndexFunc(engines, func(e Engine) bool { return e.Preset == preset })
	if i < 0 {
		return Engine{}, false
	}
	e := engines[i]
	e.About, _ = presets.Describe(preset) // a test sees to it that there is one for each
	return e, true
}

// Ports are those at which it listens by default.
func (e Engine) Ports() []int { return append([]int{e.Port}, e.MorePorts...) }

// DefaultPorts are those at which some engine listens by default.
func DefaultPorts() []string {
	var ports []int
	for _, e := range engines {
		known, _ := EngineOf(e.Preset)
		ports = append(ports, known.Ports()...)
	}
	slices.Sort(ports)
	var out []string
	for _, p := range slices.Compact(ports) {
		if p > 0 {
			out = append(out, strconv.Itoa(p))
		}
	}
	return out
}

// alike are presets whose servers answer alike: one may be used for the other on purpose.
var alike = [][]string{{"a1111", "forge", "reforge"}, {"chatterbox", "chatterbox-tts-api"}}

func mayStandFor(preset, engine string) bool {
	return preset == engine || slices.ContainsFunc(alike, func(group []string) bool {
		return slices.Contains(group, preset) && slices.Contains(group, engine)
	})
}
