// Package samplers brings in every GPU sampler, so that importing it makes all
// of them available to a configuration.
package samplers

import (
	_ "github.com/gpu-broker/caddy-gpu-broker/gpu/amdgpu"    // gpu amdgpu
	_ "github.com/gpu-broker/caddy-gpu-broker/gpu/auto"      // gpu auto
	_ "github.com/gpu-broker/caddy-gpu-broker/gpu/simulated" // gpu simulated
	_ "github.com/gpu-broker/caddy-gpu-broker/gpu/static"    // gpu static
	_ "github.com/gpu-broker/caddy-gpu-broker/nvml"          // gpu nvml, gpu nvidia_smi
)
