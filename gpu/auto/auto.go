// Package auto finds out how the GPUs of a machine can be read.
package auto

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/amdgpu"
	"github.com/gpu-broker/caddy-gpu-broker/nvml"
)

// attemptTimeout bounds one attempt: sleeping GPUs need seconds to wake, and a
// sick one may never answer.
const attemptTimeout = 20 * time.Second

func init() { caddy.RegisterModule(Auto{}) }

// Auto takes the first way of reading the GPUs that works: `nvml`, then `nvidia_smi`,
// then `amdgpu`, the last only where there is no NVIDIA card. Status and log say which
// it is, and why the others are not. If none works, the log says why, requests get 503
// gpu_lost, and it is tried again every 10 seconds.
type Auto struct {
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
//	auto
func (*Auto) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the module's name
	if d.NextArg() || d.NextBlock(0) {
		return d.Errf("auto: unexpected %q: auto has no options; name nvml, nvidia_smi or amdgpu to give some", d.Val())
	}
	return nil
}

// Open takes a real look by each way in turn, and the first that brings GPUs.
func (a *Auto) Open(ctx context.Context, logger *zap.Logger) (gpu.Sampler, error) {
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
	return nil, fmt.Errorf("gpu auto: no way to read the GPUs works: %s; to go without, declare what there is, for example: gpu static 24GiB", oneLine(errors.Join(faults...)))
}

// try opens a sampler and keeps it if one look at the GPUs succeeds.
func try(ctx context.Context, guest gpu.Guest, logger *zap.Logger) (_ gpu.Sampler, err error) {
	sampler, err := guest.Open(ctx, logger) // it may live on ctx, so that has no limit here
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
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
			return nil, fmt.Errorf("gpu amdgpu: not tried, since there is an NVIDIA card at %s: mend its driver, or write gpu amdgpu if that card is not meant", filepath.Base(device))
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
	_ caddyfile.Unmarshaler = (*Auto)(nil)
)
