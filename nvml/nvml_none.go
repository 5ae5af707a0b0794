//go:build !linux || !cgo || nonvml

package nvml

import (
	"context"
	"errors"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// open stands in where NVML cannot be linked, so that the same configuration
// is understood by every build.
func open(context.Context, *zap.Logger, string) (gpu.Sampler, error) {
	return nil, errors.New("gpu nvml: this build has no NVML: it needs Linux and cgo; build Caddy with CGO_ENABLED=1, or write gpu nvidia_smi")
}
