// Package simulated pretends GPUs, for demos, tests and benchmarks. Programs
// that pretend to hold GPU memory each keep a small file in one folder
// (Holder); the sampler adds up the files of those that live. So a killed
// program frees its memory as a real one does.
//
// The folder holds
//
//	PID or PID-NAME    lines of "INDEX SIZE"; "#name NAME" names the program
//	outsider-NAME      the same for a program that always counts; its PID shows as 0
//	state              see WriteState
//
// and files with other names are passed over.
package simulated

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func init() { caddy.RegisterModule(Simulated{}) }

// Simulated pretends GPUs without any hardware: the memory that is used on them
// is what pretending servers say in a folder. For demos and tests.
type Simulated struct {
	// The memory of each simulated GPU; one size for each.
	Totals []gpu.Bytes `json:"totals,omitempty"`
	// The folder in which pretending servers say what they hold. Default: `$GPU_BROKER_SIM_DIR`,
	// else a folder for each user in the system's folder for temporary files.
	Dir string `json:"dir,omitempty"`
	// How long freed memory still shows as used, as with real drivers. Default: 0.
	ReleaseDelay caddy.Duration `json:"release_delay,omitempty"`
	// Whether looks tell which process holds how much: `on` or `off`. With `off` the
	// broker must infer it, as on WSL2. Default: `on`.
	Processes string `json:"processes,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (Simulated) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "gpu_broker.samplers.simulated",
		New: func() caddy.Module { return new(Simulated) },
	}
}

// UnmarshalCaddyfile reads
//
//	simulated SIZE... {
//		dir FOLDER
//		release_delay DURATION
//		processes on|off
//	}
func (s *Simulated) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the module's name
	for d.NextArg() {
		size, err := gpu.ParseBytes(d.Val())
		if err != nil {
			return d.WrapErr(err)
		}
		s.Totals = append(s.Totals, size)
	}
	seen := map[string]bool{}
	for d.NextBlock(0) {
		option := d.Val()
		if seen[option] {
			return d.Errf("simulated: %s is given twice", option)
		}
		seen[option] = true
		var value string
		switch option {
		case "dir", "release_delay", "processes":
			if !d.AllArgs(&value) {
				return d.Errf("simulated: %s takes one value", option)
			}
		default:
			return d.Errf("simulated: unknown option %q: there are dir, release_delay and processes", option)
		}
		switch option {
		case "dir":
			s.Dir = value
		case "processes":
			s.Processes = value
		case "release_delay":
			delay, err := caddy.ParseDuration(value)
			if err != nil {
				return d.Errf("simulated: release_delay %q is no duration: write for example 800ms", value)
			}
			s.ReleaseDelay = caddy.Duration(delay)
		}
	}
	return nil
}

// Validate checks the configuration.
func (s *Simulated) Validate() error {
	var faults []error
	if len(s.Totals) == 0 {
		faults = append(faults, errors.New("gpu simulated: no size: write one for each GPU, for example gpu simulated 24GiB"))
	}
	for i, total := range s.Totals {
		if total <= 0 {
			faults = append(faults, fmt.Errorf("gpu simulated: GPU %d has no memory: its size must be above zero", i))
		}
	}
	if s.ReleaseDelay < 0 {
		faults = append(faults, fmt.Errorf("gpu simulated: release_delay %s is negative", time.Duration(s.ReleaseDelay)))
	}
	if s.Processes != "" && s.Processes != "on" && s.Processes != "off" {
		faults = append(faults, fmt.Errorf("gpu simulated: processes %q: want on or off", s.Processes))
	}
	return errors.Join(faults...)
}

// Doubts implements gpu.Doubter.
func (s *Simulated) Doubts() []error { return gpu.CheckUnits("gpu simulated", s.Totals) }

// Open makes the sampler and its folder.
func (s *Simulated) Open(_ context.Context, logger *zap.Logger) (gpu.Sampler, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	dir := s.Dir
	if dir == "" {
		dir = DefaultDir()
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("gpu simulated: making its folder: %w", err)
	}
	logger.Info("GPUs are simulated", zap.String("dir", dir), zap.Int("gpus", len(s.Totals)))
	return &sampler{
		totals:        append([]gpu.Bytes(nil), s.Totals...),
		dir:           dir,
		delay:         time.Duration(s.ReleaseDelay),
		hideProcesses: s.Processes == "off",
		now:           time.Now,
		before:        map[string]map[int]gpu.Bytes{},
	}, nil
}

// sampler is used by one goroutine at a time and starts none.
type sampler struct {
	totals        []gpu.Bytes
	dir           string
	delay         time.Duration
	hideProcesses bool
	now           func() time.Time

	before map[string]map[int]gpu.Bytes // what each file said at the last look
	ghosts []ghost
}

// ghost is memory that was freed and still shows as used.
type ghost struct {
	index int
	size  gpu.Bytes
	until time.Time
}

func (s *sampler) Name() string               { return "simulated" }
func (s *sampler) Why() string                { return "the configuration names it; GPUs are simulated in " + s.dir }
func (s *sampler) MinInterval() time.Duration { return 10 * time.Millisecond }
func (s *sampler) Close() error               { return nil }

func (s *sampler) Sample(ctx context.Context, _ gpu.Detail) (gpu.Sample, error) {
	at := s.now()
	if err := ctx.Err(); err != nil {
		return gpu.Sample{}, err
	}
	holdings, control, err := readFolder(s.dir)
	if err != nil {
		return gpu.Sample{}, err
	}
	if control.telemetryLost {
		return gpu.Sample{}, errors.New("simulated GPUs: the state file says: telemetry lost")
	}
	for _, h := range holdings {
		for index := range h.held {
			if index >= len(s.totals) {
				return gpu.Sample{}, fmt.Errorf("simulated GPUs: file %s speaks of GPU %d, but the configuration has %d", h.file, index, len(s.totals))
			}
		}
	}
	s.age(at, holdings)

	sample := gpu.Sample{At: at, Devices: make([]gpu.Device, len(s.totals))}
	for i, total := range s.totals {
		device := gpu.Device{
			Index: i, UUID: "GPU-simulated-" + strconv.Itoa(i), Name: "Simulated GPU", Health: gpu.Healthy,
			Total: total, Utilisation: -1, Temperature: -1, Power: -1,
		}
		if control.lost[i] {
			device.Health, device.Reason = gpu.Lost, "the state file says: lost"
		} else {
			s.fill(&device, holdings, control.baseline[i])
		}
		sample.Devices[i] = device
	}
	return sample, nil
}

// age turns what was freed since the last look into ghosts, and lets old
// ghosts go. The delay runs from the look that first misses the memory.
func (s *sampler) age(now time.Time, holdings []holding) {
	current := make(map[string]map[int]gpu.Bytes, len(holdings))
	for _, h := range holdings {
		current[h.file] = h.held
	}
	if s.delay > 0 {
		for file, held := range s.before {
			for index, size := range held {
				if freed := size - current[file][index]; freed > 0 {
					s.ghosts = append(s.ghosts, ghost{index, freed, now.Add(s.delay)})
				}
			}
		}
	}
	s.before = current
	kept := s.ghosts[:0]
	for _, g := range s.ghosts {
		if g.until.After(now) {
			kept = append(kept, g)
		}
	}
	s.ghosts = kept
}

// fill says what is used on one GPU.
func (s *sampler) fill(device *gpu.Device, holdings []holding, baseline gpu.Bytes) {
	used := baseline
	device.MemoryKnown = true
	device.ProcessesKnown = !s.hideProcesses
	for _, h := range holdings {
		size := h.held[device.Index]
		if size == 0 {
			continue
		}
		used += size
		if s.hideProcesses {
			continue
		}
		name := h.name
		if name == "" {
			name = comm(h.pid)
		}
		device.Processes = append(device.Processes, gpu.Process{PID: h.pid, Name: name, Used: size})
	}
	for _, g := range s.ghosts {
		if g.index == device.Index {
			used += g.size
		}
	}
	device.Free = max(0, device.Total-used)
}

var (
	_ gpu.Guest             = (*Simulated)(nil)
	_ caddy.Validator       = (*Simulated)(nil)
	_ caddyfile.Unmarshaler = (*Simulated)(nil)
)
