//go:build !linux || !cgo || nonvml

package nvml

import (
	"context"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestBuildWithoutNVMLUnderstandsItsConfigurationAndSaysWhatToDo(t *testing.T) {
	module, err := caddyfile.UnmarshalModule(dispenser("gpu nvml {\n library /x\n}"), "gpu_broker.samplers.nvml")
	if err != nil {
		t.Fatal(err)
	}
	_, err = module.(gpu.Guest).Open(context.Background(), zap.NewNop())
	if err == nil || !strings.Contains(err.Error(), "cgo") || !strings.Contains(err.Error(), "nvidia_smi") {
		t.Errorf("%v", err)
	}
}
