// Package nvml reads NVIDIA GPUs: by the driver's library NVML, and by its
// program nvidia-smi where the library cannot be used.
package nvml

import (
	"context"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func init() {
	caddy.RegisterModule(NVML{})
	caddy.RegisterModule(NvidiaSMI{})
}

// NVML reads NVIDIA GPUs by the driver's own library, which is the cheapest and
// surest way. It needs Linux and a Caddy that was built with CGO_ENABLED=1.
type NVML struct {
	// The path of libnvidia-ml.so.1. A process can use one library only: another path needs
	// a restart, not a reload. Default: where the system's loader finds it, then that of WSL2.
	Library string `json:"library,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (NVML) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "gpu_broker.samplers.nvml",
		New: func() caddy.Module { return new(NVML) },
	}
}

// UnmarshalCaddyfile reads
//
//	nvml {
//		library PATH
//	}
func (n *NVML) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the module's name
	if d.NextArg() {
		return d.Errf("nvml: unexpected %q: options go into a block", d.Val())
	}
	for d.NextBlock(0) {
		if d.Val() != "library" {
			return d.Errf("nvml: unknown option %q: there is library", d.Val())
		}
		if n.Library != "" {
			return d.Err("nvml: library is given twice")
		}
		if !d.AllArgs(&n.Library) {
			return d.Err("nvml: library takes one path")
		}
	}
	return nil
}

// Open finds the library and loads it; an error says why there is none. What
// the driver answers is found out by the first look: a driver that is not
// ready yet, or is out of step with its library, is telemetry lost for as long
// as that lasts, and no reason not to serve.
func (n *NVML) Open(ctx context.Context, logger *zap.Logger) (gpu.Sampler, error) {
	return open(ctx, logger, n.Library)
}

var (
	_ gpu.Guest             = (*NVML)(nil)
	_ caddyfile.Unmarshaler = (*NVML)(nil)
)
