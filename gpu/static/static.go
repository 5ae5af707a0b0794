// Package static declares GPUs whose memory nothing reads: the broker then
// counts with configured sizes alone.
package static

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func init() { caddy.RegisterModule(Static{}) }

// Static declares how much memory each GPU has and reads nothing: for hardware
// that no sampler can read. The broker trusts the sizes in the configuration,
// and memory that other programs take goes unnoticed.
type Static struct {
	// The memory of each GPU; one size for each.
	Totals []gpu.Bytes `json:"totals,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (Static) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "gpu_broker.samplers.static",
		New: func() caddy.Module { return new(Static) },
	}
}

// UnmarshalCaddyfile reads
//
//	static SIZE...
func (s *Static) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the module's name
	for d.NextArg() {
		size, err := gpu.ParseBytes(d.Val())
		if err != nil {
			return d.WrapErr(err)
		}
		s.Totals = append(s.Totals, size)
	}
	if d.NextBlock(0) {
		return d.Errf("static: unknown option %q: static has none, only sizes", d.Val())
	}
	return nil
}

// Validate checks the configuration.
func (s *Static) Validate() error {
	var faults []error
	if len(s.Totals) == 0 {
		faults = append(faults, errors.New("gpu static: no size: write one for each GPU, for example gpu static 24GiB"))
	}
	for i, total := range s.Totals {
		if total <= 0 {
			faults = append(faults, fmt.Errorf("gpu static: GPU %d has no memory: its size must be above zero", i))
		}
	}
	return errors.Join(faults...)
}

// Doubts implements gpu.Doubter.
func (s *Static) Doubts() []error { return gpu.CheckUnits("gpu static", s.Totals) }

// Open makes the sampler.
func (s *Static) Open(context.Context, *zap.Logger) (gpu.Sampler, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	return &sampler{totals: append([]gpu.Bytes(nil), s.Totals...)}, nil
}

type sampler struct{ totals []gpu.Bytes }

func (s *sampler) Name() string               { return "static" }
func (s *sampler) Why() string                { return "the configuration declares the GPUs; no hardware is read" }
func (s *sampler) MinInterval() time.Duration { return time.Second }
func (s *sampler) Close() error               { return nil }

func (s *sampler) Sample(ctx context.Context, _ gpu.Detail) (gpu.Sample, error) {
	sample := gpu.Sample{At: time.Now()}
	if err := ctx.Err(); err != nil {
		return gpu.Sample{}, err
	}
	for i, total := range s.totals {
		sample.Devices = append(sample.Devices, gpu.Device{
			Index: i, UUID: "GPU-static-" + strconv.Itoa(i), Name: "Declared GPU",
			Health: gpu.Healthy, Reason: "declared in the configuration: its memory is not read",
			Total: total, Utilisation: -1, Temperature: -1, Power: -1,
		})
	}
	return sample, nil
}

var (
	_ gpu.Guest             = (*Static)(nil)
	_ gpu.Doubter           = (*Static)(nil)
	_ caddy.Validator       = (*Static)(nil)
	_ caddyfile.Unmarshaler = (*Static)(nil)
)
