//go:build linux && cgo && !nonvml

package nvml

import (
	"errors"
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-broker/caddy-gpu-broker/internal/turn"
)

// candidates are the libraries that are tried where none is configured: what
// the loader finds, then the place where WSL2 keeps it.
var candidates = []string{"libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1"}

// needed are the functions without which there is no sampler. A call to a
// function that the library lacks ends the whole process, so each is looked up
// before anything is called. Inner lists are versions: one of them is enough.
var needed = [][]string{
	{"nvmlInit_v2", "nvmlInit"},
	{"nvmlShutdown"},
	{"nvmlErrorString"},
	{"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"},
	{"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"},
	{"nvmlDeviceGetUUID"},
	{"nvmlDeviceGetName"},
	{"nvmlDeviceGetMemoryInfo"},
}

// process is the library as this process has it. The dynamic loader binds
// NVML's functions once and for all, so there is one for all samplers, and it
// stays loaded when nobody uses it.
type process struct {
	turn turn.Turn // owns every field below, and every call into NVML

	api     gonvml.Interface
	path    string
	symbols map[string]bool // what has been looked up
	users   int             // open samplers
	started bool            // between a good Init and its Shutdown
	driver  string          // its version, once started
}

var library = &process{turn: turn.New()}

// use counts one more sampler, and loads the library if it is the first ever.
func (p *process) use(path string) error {
	if p.api != nil {
		if path != "" && path != p.path {
			return fmt.Errorf("library %s is wanted, but this process has loaded %s and cannot change it: restart Caddy", path, p.path)
		}
		p.users++
		return nil
	}
	paths := candidates
	if path != "" {
		paths = []string{path}
	}
	var faults []error
	for _, candidate := range paths {
		err := examine(candidate)
		if err == nil {
			p.api, p.path, p.symbols = gonvml.New(gonvml.WithLibraryPath(candidate)), candidate, map[string]bool{}
			p.users++
			return nil
		}
		faults = append(faults, err)
	}
	return fmt.Errorf("no usable NVML library (is the NVIDIA driver installed?): %w", errors.Join(faults...))
}

// examine opens a library on the side and looks for what is needed: go-nvml
// would not say why it cannot be opened, and would die of a wrong one.
func examine(path string) error {
	candidate := dl.New(path, dl.RTLD_LAZY|dl.RTLD_LOCAL)
	if err := candidate.Open(); err != nil {
		return err
	}
	defer func() { _ = candidate.Close() }()
	for _, versions := range needed {
		found := false
		for _, name := range versions {
			found = found || candidate.Lookup(name) == nil
		}
		if !found {
			return fmt.Errorf("%s lacks %s: it is no NVML library", path, strings.Join(versions, " and "))
		}
	}
	return nil
}

// leave counts one sampler less. The last one lets the driver go, so that the
// GPUs may sleep.
func (p *process) leave() {
	p.users--
	if p.users == 0 {
		p.stop()
	}
}

// start readies the library unless it is. It may be tried for ever.
func (p *process) start() error {
	if p.started {
		return nil
	}
	if ret := p.api.Init(); ret != gonvml.SUCCESS {
		return failure("starting NVML", ret)
	}
	p.started = true
	p.driver = ""
	if p.has("nvmlSystemGetDriverVersion") {
		if version, ret := p.api.SystemGetDriverVersion(); ret == gonvml.SUCCESS {
			p.driver = version
		}
	}
	return nil
}

// stop ends what start began; the next look starts anew.
func (p *process) stop() {
	if p.started {
		p.started = false
		_ = p.api.Shutdown() // of a driver that is gone there is nothing more to end
	}
}

// has reports whether the loaded library has a function. Only after start.
func (p *process) has(symbol string) bool {
	known, ok := p.symbols[symbol]
	if !ok {
		known = p.api.Extensions().LookupSymbol(symbol) == nil
		p.symbols[symbol] = known
	}
	return known
}

// failure is an error about the library or driver as a whole.
func failure(doing string, ret gonvml.Return) error {
	return fmt.Errorf("%s: %s", doing, reason(ret))
}

// reason puts a result into words, with what to do where that is known.
func reason(ret gonvml.Return) string {
	text := fmt.Sprintf("%s (NVML error %d)", gonvml.ErrorString(ret), int(ret))
	switch ret {
	case gonvml.ERROR_LIB_RM_VERSION_MISMATCH:
		text += ": the driver was upgraded while the old one runs: reboot, or reload its kernel module, and restart Caddy"
	case gonvml.ERROR_DRIVER_NOT_LOADED:
		text += ": load the NVIDIA kernel module"
	case gonvml.ERROR_OPERATING_SYSTEM:
		text += ": the system or a cgroup blocks the GPU; look at DeviceAllow of Caddy's unit"
	case gonvml.ERROR_UNKNOWN:
		text += ": in a container, its device cgroup may have been lost: make it anew"
	case gonvml.ERROR_GPU_IS_LOST:
		text += ": it fell off the bus: reboot, and look at its power and seat"
	case gonvml.ERROR_RESET_REQUIRED:
		text += ": reset it with nvidia-smi --gpu-reset, or reboot"
	}
	return text
}
