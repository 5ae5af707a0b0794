package samplers

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestEverySamplerIsAGuestThatAConfigurationCanName(t *testing.T) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	for _, text := range []string{
		`{"driver": "auto"}`, `{"driver": "nvml", "library": "/x"}`, `{"driver": "nvidia_smi", "path": "/x", "interval": "2s"}`,
		`{"driver": "amdgpu", "root": "/host", "unified": "on"}`, `{"driver": "static", "totals": ["24GiB"]}`, `{"driver": "simulated", "totals": ["24GiB", 1048576], "dir": "/x", "release_delay": "800ms"}`,
	} {
		config := struct {
			GPURaw json.RawMessage `caddy:"namespace=gpu_broker.samplers inline_key=driver"`
		}{json.RawMessage(text)}
		module, err := ctx.LoadModule(&config, "GPURaw")
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if _, ok := module.(gpu.Guest); !ok {
			t.Errorf("%s: %T is no guest", text, module)
		}
	}
	for _, text := range []string{`{"driver": "static"}`, `{"driver": "simulated", "totals": ["x"]}`, `{"driver": "nvidia_smi", "timeout": -1}`, `{"driver": "auto", "path": "/x"}`, `{"driver": "amdgpu", "root": "host"}`} {
		config := struct {
			GPURaw json.RawMessage `caddy:"namespace=gpu_broker.samplers inline_key=driver"`
		}{json.RawMessage(text)}
		if _, err := ctx.LoadModule(&config, "GPURaw"); err == nil {
			t.Errorf("%s was taken", text)
		}
	}
}
