package doctor

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

func TestK2_TheDoctorTellsWhichRoutesChangeSides(t *testing.T) {
	var former map[string][]string
	require.NoError(t, json.Unmarshal(formerRoutes, &former))
	for name, routes := range former {
		require.Contains(t, presets.Names(), name)
		_, err := config.ParseRoutePatterns(routes)
		require.NoError(t, err)
	}
	b := &config.Broker{}
	require.NoError(t, json.Unmarshal([]byte(`{"gpu":{"driver":"static"},"consumers":[
		{"name":"v","preset":"vllm","upstream":"127.0.0.1:1","vram":"1GiB","bypass":["POST /v1/load_lora_adapter"]},
		{"name":"mine","preset":"vllm","upstream":"127.0.0.1:2","vram":"1GiB","gpu_routes":["POST /v1/chat/completions"]},
		{"name":"free","preset":"vllm","upstream":"127.0.0.1:3","vram":"1GiB","unlisted_requests":"free"},
		{"name":"c","preset":"comfyui","upstream":"127.0.0.1:4","vram":"1GiB"},
		{"name":"own","upstream":"127.0.0.1:5","vram":"1GiB"}]}`), b))
	_ = config.Resolve(b, presets.Load) // the driver is not compiled in here
	found := judgeNewDefault(&facts{site: &Site{Broker: b}})
	require.Len(t, found, 2)
	require.Equal(t, "v", found[0].Consumer)
	require.Equal(t, Note, found[0].Severity)
	require.Contains(t, found[0].What, "POST /invocations")
	require.NotContains(t, found[0].What, "POST /v1/load_lora_adapter", "bypass keeps it on its side")
	require.NotContains(t, found[0].What, "POST /v1/chat/completions", "it needed the GPU before")
	require.Equal(t, "mine", found[1].Consumer)
	require.Contains(t, found[1].What, "what gpu_routes does not name")
	require.Contains(t, found[1].Mend, "unlisted_requests free")
}
