// Package amdgpu reads AMD GPUs by what the kernel's driver amdgpu shows in
// files: no library, no program, no cgo.
package amdgpu

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func init() { caddy.RegisterModule(AMDGPU{}) }

// AMDGPU reads AMD GPUs by the files in which the kernel's driver amdgpu tells
// of them. It works in every build of Caddy on Linux and needs neither ROCm nor root.
type AMDGPU struct {
	// The folder in which the machine's `sys` and `proc` are: for a container that has the
	// host's mounted elsewhere. Default: `/`.
	Root string `json:"root,omitempty"`
	// Whether the GPUs share the memory of the CPU: `auto`, `on` or `off`. `auto` takes that
	// of processors with a GPU whose own part of the memory is the smaller one, as the driver
	// does. Default: `auto`.
	Unified string `json:"unified,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (AMDGPU) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "gpu_broker.samplers.amdgpu",
		New: func() caddy.Module { return new(AMDGPU) },
	}
}

// UnmarshalCaddyfile reads
//
//	amdgpu {
//		root FOLDER
//		unified auto|on|off
//	}
func (a *AMDGPU) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the module's name
	if d.NextArg() {
		return d.Errf("amdgpu: unexpected %q: options go into a block", d.Val())
	}
	for d.NextBlock(0) {
		option := d.Val()
		fields := map[string]*string{"root": &a.Root, "unified": &a.Unified}
		field, ok := fields[option]
		if !ok {
			return d.Errf("amdgpu: unknown option %q: there are root and unified", option)
		}
		if *field != "" {
			return d.Errf("amdgpu: %s is given twice", option)
		}
		if !d.AllArgs(field) {
			return d.Errf("amdgpu: %s takes one value", option)
		}
	}
	return nil
}

// Validate checks the configuration.
func (a *AMDGPU) Validate() error {
	var faults []error
	if a.Root != "" && !filepath.IsAbs(a.Root) {
		faults = append(faults, fmt.Errorf("gpu amdgpu: root %q is not an absolute path: write for example /host", a.Root))
	}
	switch a.Unified {
	case "", "auto", "on", "off":
	default:
		faults = append(faults, fmt.Errorf("gpu amdgpu: unified %q: want auto, on or off", a.Unified))
	}
	return errors.Join(faults...)
}

// Open makes the sampler. Whether there is a GPU is found out by the first look.
func (a *AMDGPU) Open(_ context.Context, logger *zap.Logger) (gpu.Sampler, error) {
	if err := a.Validate(); err != nil {
		return nil, err
	}
	root := a.Root
	if root == "" {
		root = "/"
	}
	return &sampler{files: files{root}, unified: a.Unified, logger: logger, known: map[string]gpu.Device{}}, nil
}

var (
	_ gpu.Guest             = (*AMDGPU)(nil)
	_ caddy.Validator       = (*AMDGPU)(nil)
	_ caddyfile.Unmarshaler = (*AMDGPU)(nil)
)
