// Package auto finds out how the GPUs of a machine can be read.
package auto

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/amdgpu"
	"github.com/gpu-broker/caddy-gpu-broker/nvml"
)

func init() { caddy.RegisterModule(Auto{}) }

// Auto takes the first way of reading the GPUs that works: `nvml`, then `nvidia_smi`,
// then `amdgpu`, the last only where there is no NVIDIA card. Status and log say which
// it is, and why the others are not. If none works, it is tried again every 10 seconds;
// meanwhile the sizes of `fallback` count, and without them requests get 503 gpu_lost.
type Auto struct {
	// How much memory each GPU has, one size for each: for as long as no GPU can be read, and for
	// one whose size the driver does not tell. The broker then counts with configured sizes, and
	// memory that other programs take goes unnoticed. Default: none.
	Fallback []gpu.Bytes `json:"fallback,omitempty"`

	attempts []attempt // for tests; nil: those of this machine
}

type attempt struct {
	name  string
	guest gpu.Guest
}

// CaddyModule returns the Caddy module information.
func (Auto) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "gpu_broker.samplers.auto",
		New: func() caddy.Module { return new(Auto) },
	}
}

// UnmarshalCaddyfile reads
//
//	auto {
//		fallback SIZE...
//	}
func (a *Auto) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the module's name
	if d.NextArg() {
		return d.Errf("auto: unexpected %q: the size of a GPU that can't be read goes into a block, as in auto { fallback 24GiB }", d.Val())
	}
	for d.NextBlock(0) {
		if d.Val() != "fallback" {
			return d.Errf("auto: unknown option %q: there is fallback; name nvml, nvidia_smi or amdgpu to give others", d.Val())
		}
		if len(a.Fallback) > 0 {
			return d.Err("auto: fallback is given twice")
		}
		for d.NextArg() {
			size, err := gpu.ParseBytes(d.Val())
			if err != nil {
				return d.WrapErr(err)
			}
			a.Fallback = append(a.Fallback, size)
		}
		if len(a.Fallback) == 0 {
			return d.Err("auto: fallback has no size: write one for each GPU, for example fallback 24GiB")
		}
	}
	return nil
}

// Validate checks the configuration.
func (a *Auto) Validate() error {
	var faults []error
	for i, total := range a.Fallback {
		if total <= 0 {
			faults = append(faults, fmt.Errorf("gpu auto: fallback: GPU %d has no memory: its size must be above zero", i))
		}
	}
	return errors.Join(faults...)
}

// Doubts returns the sizes that have lost their unit.
func (a *Auto) Doubts() []error { return gpu.CheckUnits("gpu auto: fallback", a.Fallback) }

// Open takes a real look by each way in turn, and the first that brings GPUs.
// It fails if there is none, unless there is a fallback.
func (a *Auto) Open(ctx context.Context, logger *zap.Logger) (gpu.Sampler, error) {
	if err := a.Validate(); err != nil {
		return nil, err
	}
	found, err := a.choose(ctx, logger)
	switch {
	case len(a.Fallback) == 0 || err != nil && ctx.Err() != nil:
		return found, err
	case err != nil:
		logger.Warn("no GPU can be read: the sizes of fallback count until one can", zap.Error(err), zap.Duration("tried again in", retry))
	}
	return newFallback(ctx, a, logger, found, err), nil
}

// choose opens the first way that works.
func (a *Auto) choose(ctx context.Context, logger *zap.Logger) (gpu.Sampler, error) {
	attempts := a.attempts
	if attempts == nil {
		attempts = []attempt{
			{"nvml", new(nvml.NVML)},
			{"nvidia_smi", new(nvml.NvidiaSMI)},
			{"amdgpu", alone{new(amdgpu.AMDGPU), "/sys/bus/pci/devices"}},
		}
	}
	var faults []error
	for _, attempt := range attempts {
		sampler, err := try(ctx, attempt.guest, logger)
		if err == nil {
			why := "auto chose " + attempt.name + ", the first that works"
			if len(faults) > 0 {
				why += "; before it: " + oneLine(errors.Join(faults...))
			}
			logger.Info("GPU sampler chosen", zap.String("sampler", attempt.name), zap.String("why", why))
			return chosen{sampler, why}, nil
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("gpu auto: %w", ctx.Err())
		}
		faults = append(faults, err)
	}
	return nil, fmt.Errorf("gpu auto: no way to read the GPUs works: %s", oneLine(errors.Join(faults...)))
}

// try opens a sampler and keeps it if one look at the GPUs succeeds. How long a look may take is the sampler's own affair.
func try(ctx context.Context, guest gpu.Guest, logger *zap.Logger) (_ gpu.Sampler, err error) {
	sampler, err := guest.Open(ctx, logger)
	if err != nil {
		return nil, err
	}
	sample, err := sampler.Sample(ctx, gpu.Memory)
	if err == nil && len(sample.Devices) == 0 {
		err = errors.New("gpu " + sampler.Name() + ": it lists no GPU")
	}
	if err != nil {
		return nil, errors.Join(err, sampler.Close())
	}
	return sampler, nil
}

// alone is a guest for machines without a card of NVIDIA's. Many processors have
// a small GPU of AMD's: where the driver of the card beside it is not ready yet,
// taking that for the machine's GPU would last until the next restart.
type alone struct {
	gpu.Guest
	devices string // the folder of the PCI devices
}

func (a alone) Open(ctx context.Context, logger *zap.Logger) (gpu.Sampler, error) {
	vendors, _ := filepath.Glob(filepath.Join(a.devices, "*", "vendor")) // the pattern is sound
	for _, path := range vendors {
		vendor, err := os.ReadFile(path)
		if err != nil || strings.TrimSpace(string(vendor)) != "0x10de" {
			continue
		}
		device := filepath.Dir(path)
		class, err := os.ReadFile(filepath.Join(device, "class"))
		if err == nil && strings.HasPrefix(string(class), "0x03") { // a display or a processor for graphics, and not the card's sound
			return nil, fmt.Errorf("gpu amdgpu: not tried, since there is an NVIDIA card at %s: fix its driver, or write gpu amdgpu if that card is not meant", filepath.Base(device))
		}
	}
	return a.Guest.Open(ctx, logger)
}

// oneLine puts joined errors on one line, as fits logs and status.
func oneLine(err error) string {
	return strings.ReplaceAll(err.Error(), "\n", "; ")
}

// chosen is the sampler that was chosen, with the story of the choice.
type chosen struct {
	gpu.Sampler
	why string
}

func (c chosen) Why() string { return c.why }

var (
	_ gpu.Guest             = (*Auto)(nil)
	_ caddy.Validator       = (*Auto)(nil)
	_ caddyfile.Unmarshaler = (*Auto)(nil)
)
