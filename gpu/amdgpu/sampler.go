package amdgpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/turn"
)

const (
	// lookTimeout bounds the wait for the driver.
	lookTimeout = 10 * time.Second
	// carveOut is the most that a GPU inside a processor has of its own where
	// its sensors do not tell what it is. No card to run models on has so little.
	carveOut = gpu.GiB
)

// looks is the one turn of all samplers of this process: a read of a sick GPU
// may hang in the kernel, and a second must not join it, reload or not.
var looks = turn.New()

// sampler reads the files of the driver at each look.
type sampler struct {
	files
	unified string
	logger  *zap.Logger

	// Owned by looks.
	known map[string]gpu.Device // what stays of every device ever seen, by address
	blind bool                  // it has been logged that the processes are not known
}

func (s *sampler) Name() string { return "amdgpu" }
func (s *sampler) Why() string {
	return "the configuration names it; the files of the driver amdgpu are read"
}
func (s *sampler) MinInterval() time.Duration { return 50 * time.Millisecond }

// Close waits for a look that its caller has left behind.
func (s *sampler) Close() error {
	if err := looks.Close(); err != nil {
		return fmt.Errorf("gpu amdgpu: closing: %w", err)
	}
	return nil
}

func (s *sampler) Sample(ctx context.Context, detail gpu.Detail) (gpu.Sample, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	sample, err := turn.In(ctx, looks, func() (gpu.Sample, error) {
		at := time.Now()
		devices, err := s.look(ctx, detail)
		return gpu.Sample{At: at, Devices: devices}, err
	})
	if err != nil {
		return gpu.Sample{}, fmt.Errorf("gpu amdgpu: %w", err)
	}
	return sample, nil
}

func (s *sampler) look(ctx context.Context, detail gpu.Detail) ([]gpu.Device, error) {
	nodes := s.nodes()
	cards, err := s.cards(nodes)
	if err != nil {
		return nil, err
	}
	if len(cards) == 0 && len(s.known) == 0 {
		return nil, fmt.Errorf("%s has no GPU of the driver amdgpu: load that kernel module and look at the kernel's log; "+
			"a card that is given to a virtual machine does not count", s.path("sys", "class", "drm"))
	}
	byAddress := map[string]*gpu.Device{}
	var faults []error
	answered := false
	for _, c := range cards {
		device, err := s.device(c, detail)
		if err != nil {
			faults = append(faults, err)
		} else {
			answered = true
		}
		byAddress[c.address] = &device
	}
	if !answered && len(faults) > 0 {
		return nil, errors.Join(faults...) // nobody answers: that says nothing of the GPUs
	}
	s.remember(byAddress)
	if detail == gpu.Full {
		s.fillProcesses(ctx, nodes, byAddress)
	}
	return s.inOrder(byAddress), nil
}

// device reads one card. The error says that its memory cannot be read; what
// the device holds is usable all the same.
func (s *sampler) device(c card, detail gpu.Detail) (gpu.Device, error) {
	before := s.known[c.address]
	device := gpu.Device{UUID: c.uuid(), Health: gpu.Healthy, Utilisation: -1, Temperature: -1, Power: -1}
	if c.unique == "" && before.UUID != "" {
		device.UUID = before.UUID // its number was told before: one GPU has one identity
	}
	if device.Name = before.Name; device.Name == "" || device.UUID != before.UUID {
		device.Name = s.name(c)
	}
	asleep := c.asleep()
	if !asleep && c.offTheBus() {
		if device.UUID == before.UUID {
			device.Total, device.Unified = before.Total, before.Unified
		}
		device.Health, device.Reason = gpu.Lost, "it no longer answers on the PCI bus: reboot, and look at its power and seat"
		return device, nil
	}
	if err := s.memory(&device, c); err != nil {
		device.Reason = "its memory cannot be read: " + advise(err).Error()
		return device, errors.New(device.Reason)
	}
	if detail == gpu.Full && !asleep {
		details(&device, c)
	}
	return device, nil
}

// memory reads total and free: of the card's own memory, and where a processor
// and its GPU share theirs, also of what the GPU may take of the system's.
func (s *sampler) memory(device *gpu.Device, c card) error {
	total, err := number(filepath.Join(c.device, "mem_info_vram_total"))
	if err != nil {
		return err
	}
	device.Total = gpu.Bytes(total)
	used, err := number(filepath.Join(c.device, "mem_info_vram_used"))
	if err != nil {
		return err
	}
	free := gpu.Bytes(max(0, total-used))
	unified, shared, err := s.shared(c, device.Total)
	if err != nil {
		return err
	}
	if unified {
		used, err := number(filepath.Join(c.device, "mem_info_gtt_used"))
		if err != nil {
			return err
		}
		available, err := s.available()
		if err != nil {
			return err
		}
		device.Unified = true
		device.Total += shared
		free += max(0, min(shared-gpu.Bytes(used), available))
	}
	device.Free, device.MemoryKnown = free, true
	return nil
}

// shared reports whether the GPU works in the system's memory, and in how much of
// it at most. The driver puts what is allocated there where that part is larger
// than the GPU's own; only processors have such GPUs, and only they have a
// sensor for the voltage of the northbridge.
func (s *sampler) shared(c card, own gpu.Bytes) (bool, gpu.Bytes, error) {
	if s.unified == "off" {
		return false, 0, nil
	}
	most, err := number(filepath.Join(c.device, "mem_info_gtt_total"))
	if s.unified == "on" {
		return true, gpu.Bytes(most), err
	}
	label, _ := read(c.sensor("in1_label")) // where there is none, the size tells
	if err != nil || label != "vddnb" && own > carveOut {
		return false, 0, nil
	}
	return gpu.Bytes(most) > own, gpu.Bytes(most), nil
}

// details reads what is for people. What the driver does not tell stays unknown.
func details(device *gpu.Device, c card) {
	if percent, err := number(filepath.Join(c.device, "gpu_busy_percent")); err == nil && percent <= 100 {
		device.Utilisation = int(percent)
	}
	if milli, err := number(c.sensor("temp1_input")); err == nil && milli < 1e6 { // the first is that of the chip's edge
		device.Temperature = int((milli + 500) / 1000)
	}
	for _, name := range []string{"power1_average", "power1_input"} {
		if micro, err := number(c.sensor(name)); err == nil {
			device.Power = float64(micro) / 1e6
			break
		}
	}
}

// remember keeps what stays of the devices, and adds those that are gone.
func (s *sampler) remember(byAddress map[string]*gpu.Device) {
	for address, d := range byAddress {
		total := d.Total
		if total == 0 && s.known[address].UUID == d.UUID {
			total = s.known[address].Total
			d.Total = total
		}
		s.known[address] = gpu.Device{UUID: d.UUID, Name: d.Name, Total: total, Unified: d.Unified, Utilisation: -1, Temperature: -1, Power: -1}
	}
	for address, before := range s.known {
		if byAddress[address] != nil {
			continue
		}
		moved := false
		for _, d := range byAddress {
			moved = moved || d.UUID == before.UUID
		}
		if moved {
			delete(s.known, address)
			continue
		}
		before.Health, before.Reason = gpu.Lost, "it is gone from the PCI bus: look at its power, cable and seat"
		if _, err := os.Stat(s.path("sys", "bus", "pci", "devices", address)); err == nil {
			before.Reason = "the driver amdgpu no longer serves it: load that kernel module again, and look at the kernel's log"
		}
		byAddress[address] = &before
	}
}

// inOrder numbers the devices by their place on the bus. Those that are gone
// keep theirs, so that the others do not move up.
func (s *sampler) inOrder(byAddress map[string]*gpu.Device) []gpu.Device {
	var addresses []string
	for address := range byAddress {
		addresses = append(addresses, address)
	}
	slices.SortFunc(addresses, compareAddresses)
	devices := make([]gpu.Device, 0, len(addresses))
	for index, address := range addresses {
		device := *byAddress[address]
		device.Index = index
		devices = append(devices, device)
	}
	return devices
}

// fillProcesses tells who holds memory. If that cannot be seen, it is unknown:
// it does not mean that nobody does.
func (s *sampler) fillProcesses(ctx context.Context, nodes []node, byAddress map[string]*gpu.Device) {
	unified := map[string]bool{}
	for address, d := range byAddress {
		unified[address] = d.Unified
	}
	lists, err := s.processes(ctx, nodes, unified)
	if err != nil {
		if !s.blind && ctx.Err() == nil {
			s.blind = true
			s.logger.Info("which process holds how much of the GPUs is not known", zap.Error(err))
		}
		return
	}
	s.blind = false
	for address, d := range byAddress {
		if d.Health != gpu.Lost {
			d.Processes, d.ProcessesKnown = lists[address], true
		}
	}
}
