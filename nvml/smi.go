package nvml

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/turn"
)

const (
	defaultInterval = 500 * time.Millisecond
	defaultTimeout  = 10 * time.Second
	// smiOnWSL2 is where nvidia-smi is on WSL2, outside of PATH.
	smiOnWSL2 = "/usr/lib/wsl/lib/nvidia-smi"
)

// NvidiaSMI reads NVIDIA GPUs by running the program nvidia-smi. It works in
// every build of Caddy, but each look starts a process, and freed memory is
// seen later than with nvml.
type NvidiaSMI struct {
	// The path of nvidia-smi. Default: where PATH finds it, then that of WSL2.
	Path string `json:"path,omitempty"`
	// The least time between two runs. Default: 500ms.
	Interval caddy.Duration `json:"interval,omitempty"`
	// How long one run may take before it is killed; a look is one run, or two. Where nothing keeps
	// the GPUs awake, each needs up to 3s: raise it on a machine with many, or use persistence mode. Default: 10s.
	Timeout caddy.Duration `json:"timeout,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (NvidiaSMI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "gpu_broker.samplers.nvidia_smi",
		New: func() caddy.Module { return new(NvidiaSMI) },
	}
}

// UnmarshalCaddyfile reads
//
//	nvidia_smi {
//		path PATH
//		interval DURATION
//		timeout DURATION
//	}
func (n *NvidiaSMI) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the module's name
	if d.NextArg() {
		return d.Errf("nvidia_smi: unexpected %q: options go into a block", d.Val())
	}
	seen := map[string]bool{}
	for d.NextBlock(0) {
		option := d.Val()
		if !slices.Contains([]string{"path", "interval", "timeout"}, option) {
			return d.Errf("nvidia_smi: unknown option %q: there are path, interval and timeout", option)
		}
		if seen[option] {
			return d.Errf("nvidia_smi: %s is given twice", option)
		}
		seen[option] = true
		var value string
		if !d.AllArgs(&value) {
			return d.Errf("nvidia_smi: %s takes one value", option)
		}
		if option == "path" {
			n.Path = value
			continue
		}
		duration, err := caddy.ParseDuration(value)
		if err != nil {
			return d.Errf("nvidia_smi: %s %q is no duration: write for example 1s", option, value)
		}
		if option == "interval" {
			n.Interval = caddy.Duration(duration)
		} else {
			n.Timeout = caddy.Duration(duration)
		}
	}
	return nil
}

// Validate checks the configuration.
func (n *NvidiaSMI) Validate() error {
	var faults []error
	if n.Interval < 0 {
		faults = append(faults, fmt.Errorf("gpu nvidia_smi: interval %s is negative", time.Duration(n.Interval)))
	}
	if n.Timeout < 0 {
		faults = append(faults, fmt.Errorf("gpu nvidia_smi: timeout %s is negative", time.Duration(n.Timeout)))
	}
	return errors.Join(faults...)
}

// Open finds the program. What it answers is found out by the first look.
func (n *NvidiaSMI) Open(_ context.Context, logger *zap.Logger) (gpu.Sampler, error) {
	if err := n.Validate(); err != nil {
		return nil, err
	}
	path, err := findSMI(n.Path)
	if err != nil {
		return nil, err
	}
	s := &smi{
		path: path, interval: time.Duration(n.Interval), timeout: time.Duration(n.Timeout),
		meminfo: memoryInfo, logger: logger,
		fields: slices.Clone(gpuFields), known: map[string]identity{},
	}
	if s.interval == 0 {
		s.interval = defaultInterval
	}
	if s.timeout == 0 {
		s.timeout = defaultTimeout
	}
	return s, nil
}

func findSMI(configured string) (string, error) {
	if configured != "" {
		path, err := exec.LookPath(configured)
		if err != nil {
			return "", fmt.Errorf("gpu nvidia_smi: %w", err)
		}
		return path, nil
	}
	path, err := exec.LookPath("nvidia-smi")
	if err != nil {
		if path, wslErr := exec.LookPath(smiOnWSL2); wslErr == nil {
			return path, nil
		}
		return "", fmt.Errorf("gpu nvidia_smi: %w: install the NVIDIA driver, or name the program's path", err)
	}
	return path, nil
}

// smiTurn is the one turn of all samplers of this process: a run that hangs in
// the kernel cannot be killed, so a second must not join it, reload or not.
var smiTurn = turn.New()

// smi runs nvidia-smi for each look.
type smi struct {
	path              string
	interval, timeout time.Duration
	meminfo           string
	logger            *zap.Logger

	// Of the one goroutine that looks.
	fields   []string            // what this driver's nvidia-smi can be asked for
	known    map[string]identity // every device ever seen, by UUID
	warned   string              // what was last logged of the lines that are no rows
	warnedAt time.Time
}

// identity is what stays of a device when it no longer answers.
type identity struct {
	index      int
	uuid, name string
	busID      string
	total      gpu.Bytes
}

func (s *smi) Name() string               { return "nvidia_smi" }
func (s *smi) Why() string                { return "the configuration names it; " + s.path + " is run" }
func (s *smi) MinInterval() time.Duration { return s.interval }

// Close waits for a run that its caller has left behind. It is being killed,
// so this takes no time unless the kernel holds it.
func (s *smi) Close() error {
	if err := smiTurn.Close(); err != nil {
		return fmt.Errorf("gpu nvidia_smi: closing: %w", err)
	}
	return nil
}

// Sample runs the program once, and once more for the processes. Each run has the
// whole timeout; a GPU that does not answer or an old driver costs some more runs.
func (s *smi) Sample(ctx context.Context, detail gpu.Detail) (gpu.Sample, error) {
	at := time.Now()
	devices, err := s.look(ctx, detail)
	if err != nil {
		return gpu.Sample{}, fmt.Errorf("gpu nvidia_smi: %w", err)
	}
	return gpu.Sample{At: at, Devices: devices}, nil
}

func (s *smi) look(ctx context.Context, detail gpu.Detail) ([]gpu.Device, error) {
	r, err := s.queryGPUs(ctx)
	if err != nil {
		return nil, err
	}
	s.warn(r.noise)
	devices, err := s.devices(r)
	if err != nil {
		return nil, err
	}
	if detail == gpu.Full {
		s.fillProcesses(ctx, devices)
	}
	return devices, nil
}

// run runs the program when no other run is under way.
func (s *smi) run(ctx context.Context, arguments ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	return turn.In(ctx, smiTurn, func() (string, error) { return runSMI(ctx, s.path, arguments...) })
}

// warnEvery is the least time between two warnings about what the program prints.
const warnEvery = time.Minute

// warn logs what the program printed beside its rows, when that has changed.
func (s *smi) warn(noise []string) {
	text := strings.Join(noise, "; ")
	if text == s.warned || time.Since(s.warnedAt) < warnEvery {
		return
	}
	s.warned = text
	if text != "" {
		s.warnedAt = time.Now()
		s.logger.Warn("nvidia-smi prints more than its rows; the rows count", zap.String("printed", text))
	}
}

func (s *smi) byBusID(busID string) (identity, bool) {
	for _, device := range s.known {
		if busID != "" && strings.EqualFold(device.busID, busID) {
			return device, true
		}
	}
	return identity{}, false
}

func (s *smi) byIndex(index int) (identity, bool) {
	for _, device := range s.known {
		if device.index == index {
			return device, true
		}
	}
	return identity{}, false
}

// devices turns rows into devices, and adds those that have no row any more.
func (s *smi) devices(r reading) ([]gpu.Device, error) {
	var devices []gpu.Device
	listed := map[string]bool{}
	answered, sick := false, ""
	for _, row := range r.rows {
		told := row.uuid != ""
		if !told { // a lost GPU may not even tell that
			before, ok := s.byBusID(row.busID)
			if !ok {
				before, ok = s.byIndex(row.index)
			}
			if ok && !listed[before.uuid] {
				row.uuid, row.name, row.busID = before.uuid, before.name, before.busID
			} else {
				row.uuid = unnamed(row.index)
			}
		}
		device := row.device(s.meminfo)
		if device.Total == 0 {
			device.Total = s.known[row.uuid].total
		}
		switch {
		case device.Health == gpu.Lost:
		case row.unknownError:
			sick = device.Reason
		default:
			answered = true
		}
		listed[row.uuid] = true
		if told {
			s.identify(row)
			if device.Health != gpu.Lost {
				s.known[row.uuid] = identity{row.index, row.uuid, row.name, row.busID, device.Total}
			}
		}
		device.Reason = join(device.Reason, about(r.noise, row.busID))
		devices = append(devices, device)
	}
	if sick != "" && !answered {
		return nil, fmt.Errorf("no GPU answers: %s", sick)
	}
	for uuid, before := range s.known {
		if listed[uuid] {
			continue
		}
		why := "nvidia-smi no longer lists it"
		if said := r.lost[uuid]; said != "" {
			why = said
		}
		devices = append(devices, gpu.Device{
			Index: before.index, UUID: uuid, Name: before.name, Health: gpu.Lost, Reason: why,
			Total: before.total, Utilisation: -1, Temperature: -1, Power: -1,
		})
	}
	if len(devices) == 0 {
		return nil, errors.New(join("nvidia-smi lists no GPU", strings.Join(r.noise, "; ")))
	}
	slices.SortStableFunc(devices, func(a, b gpu.Device) int { return a.Index - b.Index })
	return devices, nil
}

// identify forgets the stand-ins of a GPU that tells its UUID now.
func (s *smi) identify(row gpuRow) {
	delete(s.known, unnamed(row.index))
	for uuid, before := range s.known {
		if uuid == unnamed(before.index) && row.busID != "" && strings.EqualFold(before.busID, row.busID) {
			delete(s.known, uuid)
		}
	}
}

// join puts two reasons together. Either may be empty.
func join(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + "; " + b
}

// fillProcesses asks who holds memory. If that fails, it is unknown: it does
// not mean that nobody does.
func (s *smi) fillProcesses(ctx context.Context, devices []gpu.Device) {
	text, err := s.run(ctx, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits")
	var failed *smiError
	if errors.As(err, &failed) && strings.TrimSpace(failed.text) != "" {
		text, err = failed.text, nil
	}
	if err == nil {
		var byUUID map[string][]gpu.Process
		if byUUID, err = parseProcesses(text); err == nil {
			for i := range devices {
				if devices[i].Health != gpu.Lost {
					devices[i].Processes, devices[i].ProcessesKnown = byUUID[devices[i].UUID], true
				}
			}
			return
		}
	}
	s.logger.Debug("the processes on the GPUs are not known", zap.Error(err))
}

// smiEnvironment asks for plain English, whatever Caddy's own locale is.
func smiEnvironment() []string { return append(os.Environ(), "LC_ALL=C") }

var (
	_ gpu.Guest             = (*NvidiaSMI)(nil)
	_ caddy.Validator       = (*NvidiaSMI)(nil)
	_ caddyfile.Unmarshaler = (*NvidiaSMI)(nil)
)
