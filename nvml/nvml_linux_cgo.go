//go:build linux && cgo && !nonvml

package nvml

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/turn"
)

// lookTimeout bounds the wait for the driver. The first look wakes every GPU, which takes seconds
// each where nothing keeps them awake; it goes on when its caller has left.
const lookTimeout = 10 * time.Second

// sampler is one user of the process's library.
type sampler struct {
	logger  *zap.Logger
	meminfo string

	// Owned by the library's turn.
	known map[string]gpu.Device // identity of every device ever seen, by UUID
	at    map[int]string        // UUID by index, as of the last look that told
}

func open(ctx context.Context, logger *zap.Logger, path string) (gpu.Sampler, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	_, err := turn.In(ctx, library.turn, func() (struct{}, error) {
		return struct{}{}, library.use(path)
	})
	if err != nil {
		return nil, fmt.Errorf("gpu nvml: %w", err)
	}
	return &sampler{logger: logger, meminfo: memoryInfo, known: map[string]gpu.Device{}, at: map[int]string{}}, nil
}

func (s *sampler) Name() string { return "nvml" }
func (s *sampler) Why() string {
	return "the configuration names it; the NVIDIA driver's library is asked"
}
func (s *sampler) MinInterval() time.Duration { return 50 * time.Millisecond }

func (s *sampler) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), turn.CloseTimeout)
	defer cancel()
	_, err := turn.In(ctx, library.turn, func() (struct{}, error) {
		library.leave()
		return struct{}{}, nil
	})
	if err != nil {
		return fmt.Errorf("gpu nvml: closing: %w", err)
	}
	return nil
}

func (s *sampler) Sample(ctx context.Context, detail gpu.Detail) (gpu.Sample, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	sample, err := turn.In(ctx, library.turn, func() (gpu.Sample, error) {
		at := time.Now()
		devices, err := s.look(detail)
		return gpu.Sample{At: at, Devices: devices}, err
	})
	if err != nil {
		return gpu.Sample{}, fmt.Errorf("gpu nvml: %w", err)
	}
	return sample, nil
}

// look asks for every device. It owns the library's turn.
func (s *sampler) look(detail gpu.Detail) ([]gpu.Device, error) {
	if err := library.start(); err != nil {
		return nil, err
	}
	count, ret := library.api.DeviceGetCount()
	if ret != gonvml.SUCCESS {
		library.stop()
		return nil, failure("counting the GPUs", ret)
	}

	var devices []gpu.Device
	var sick error // the last answer that speaks of the library rather than of a device
	answered := false
	for index := range count {
		device, ret := s.device(index, detail)
		switch {
		case ret == gonvml.SUCCESS:
			answered = true
		case isLost(ret):
		case ret == gonvml.ERROR_NO_PERMISSION && device.UUID == "":
			continue // a GPU that is not ours to open, as in a container
		default:
			sick = failure(fmt.Sprintf("asking GPU %d", index), ret)
		}
		if device.UUID == "" {
			device.UUID = "index-" + strconv.Itoa(index) // lost since before we came
		}
		devices = append(devices, device)
	}
	if sick != nil && !answered {
		// Nobody answers: that says nothing of the GPUs. Begin anew next time.
		library.stop()
		return nil, sick
	}
	devices = append(devices, s.missing(devices)...)
	if len(devices) == 0 {
		return nil, errors.New("the driver lists no GPU that may be opened")
	}
	slices.SortStableFunc(devices, func(a, b gpu.Device) int { return a.Index - b.Index })
	return devices, nil
}

// missing are the devices seen before that the driver no longer lists.
func (s *sampler) missing(listed []gpu.Device) []gpu.Device {
	var gone []gpu.Device
	for uuid, device := range s.known {
		if slices.ContainsFunc(listed, func(d gpu.Device) bool { return d.UUID == uuid }) {
			continue
		}
		device.Health, device.Reason = gpu.Lost, "the driver no longer lists it"
		gone = append(gone, device)
	}
	return gone
}

// device reads one GPU. The result is SUCCESS if the device has answered, with
// its memory or with a sound reason not to tell it; what it holds is usable in
// every case.
func (s *sampler) device(index int, detail gpu.Detail) (gpu.Device, gonvml.Return) {
	device := s.known[s.at[index]]
	device.Index = index
	device.Health = gpu.Healthy
	device.Utilisation, device.Temperature, device.Power = -1, -1, -1

	handle, ret := library.api.DeviceGetHandleByIndex(index)
	if ret != gonvml.SUCCESS {
		return unread(device, ret), ret
	}
	uuid, ret := handle.GetUUID()
	if ret != gonvml.SUCCESS {
		return unread(device, ret), ret
	}
	if uuid != device.UUID {
		device = gpu.Device{Index: index, UUID: uuid, Health: gpu.Healthy, Utilisation: -1, Temperature: -1, Power: -1}
		if name, ret := handle.GetName(); ret == gonvml.SUCCESS {
			device.Name = name
		}
	}
	for other, before := range s.at {
		if before == uuid {
			delete(s.at, other) // indices move when a GPU drops out
		}
	}
	s.at[index] = uuid
	ret = s.memory(&device, handle)
	s.known[uuid] = gpu.Device{
		Index: index, UUID: uuid, Name: device.Name, Total: device.Total,
		Unified: device.Unified, Utilisation: -1, Temperature: -1, Power: -1,
	}
	if ret == gonvml.SUCCESS && detail == gpu.Full {
		s.details(&device, handle)
	}
	return device, ret
}

// unread marks a device that did not answer.
func unread(device gpu.Device, ret gonvml.Return) gpu.Device {
	device.Free, device.MemoryKnown = 0, false
	if isLost(ret) {
		device.Health = gpu.Lost
	}
	device.Reason = reason(ret)
	return device
}

// memory reads total and free as version 1 of the call gives them: there
// total is free plus used, on every driver.
func (s *sampler) memory(device *gpu.Device, handle gonvml.Device) gonvml.Return {
	memory, ret := handle.GetMemoryInfo()
	if library.has("nvmlDeviceGetMigMode") {
		if mode, _, migRet := handle.GetMigMode(); migRet == gonvml.SUCCESS && mode == gonvml.DEVICE_MIG_ENABLE {
			if ret == gonvml.SUCCESS {
				device.Total = clamp(memory.Total)
			}
			device.Reason = "MIG is enabled: the free memory of its parts is not read"
			if isLost(ret) {
				*device = unread(*device, ret)
				return ret
			}
			return gonvml.SUCCESS
		}
	}
	switch ret {
	case gonvml.SUCCESS:
		device.Total, device.Free, device.MemoryKnown = clamp(memory.Total), clamp(memory.Free), true
		device.Unified = false
		return ret
	case gonvml.ERROR_NOT_SUPPORTED:
		if isUnified(device.Name) {
			fillUnified(device, s.meminfo)
		} else {
			device.Reason = "the driver does not tell its memory: " + reason(ret)
		}
		return gonvml.SUCCESS
	case gonvml.ERROR_NO_PERMISSION:
		device.Reason = "its memory may not be read: " + reason(ret)
		return gonvml.SUCCESS
	default:
		*device = unread(*device, ret)
		return ret
	}
}

// details reads what is for people, and the processes. What the driver does
// not tell stays unknown.
func (s *sampler) details(device *gpu.Device, handle gonvml.Device) {
	if library.has("nvmlDeviceGetUtilizationRates") {
		if rates, ret := handle.GetUtilizationRates(); ret == gonvml.SUCCESS {
			device.Utilisation = int(rates.Gpu)
		}
	}
	if library.has("nvmlDeviceGetTemperature") {
		if celsius, ret := handle.GetTemperature(gonvml.TEMPERATURE_GPU); ret == gonvml.SUCCESS {
			device.Temperature = int(celsius)
		}
	}
	if library.has("nvmlDeviceGetPowerUsage") {
		if milliwatts, ret := handle.GetPowerUsage(); ret == gonvml.SUCCESS {
			device.Power = float64(milliwatts) / 1000
		}
	}
	if processListBroken(library.driver) || !hasVersion("nvmlDeviceGetComputeRunningProcesses") {
		return
	}
	compute, ret := handle.GetComputeRunningProcesses()
	if ret != gonvml.SUCCESS {
		return
	}
	device.ProcessesKnown = true
	all := compute
	if hasVersion("nvmlDeviceGetGraphicsRunningProcesses") {
		if graphics, ret := handle.GetGraphicsRunningProcesses(); ret == gonvml.SUCCESS {
			all = append(all, graphics...)
		}
	}
	device.Processes = processes(all)
}

// processes merges the lists of the driver: a program that computes and draws
// is in two of them, each time with all that it holds.
func processes(infos []gonvml.ProcessInfo) []gpu.Process {
	used := make(map[int]gpu.Bytes, len(infos))
	var pids []int
	for _, info := range infos {
		size := gpu.Bytes(-1)
		if info.UsedGpuMemory != math.MaxUint64 { // NVML_VALUE_NOT_AVAILABLE, on WSL2
			size = clamp(info.UsedGpuMemory)
		}
		pid := int(info.Pid)
		if before, ok := used[pid]; !ok {
			pids = append(pids, pid)
		} else {
			size = max(size, before)
		}
		used[pid] = size
	}
	slices.Sort(pids)
	list := make([]gpu.Process, 0, len(pids))
	for _, pid := range pids {
		list = append(list, gpu.Process{PID: pid, Name: processName(pid), Used: used[pid]})
	}
	return list
}

// processName asks the driver, then the system. Both may be blind to a process
// in another PID namespace.
func processName(pid int) string {
	if library.has("nvmlSystemGetProcessName") {
		if name, ret := library.api.SystemGetProcessName(pid); ret == gonvml.SUCCESS && name != "" {
			return name
		}
	}
	comm, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(comm))
}

func hasVersion(name string) bool {
	return library.has(name) || library.has(name+"_v2") || library.has(name+"_v3")
}

func isLost(ret gonvml.Return) bool {
	return ret == gonvml.ERROR_GPU_IS_LOST || ret == gonvml.ERROR_RESET_REQUIRED
}

func clamp(bytes uint64) gpu.Bytes { return gpu.Bytes(min(bytes, math.MaxInt64)) }
