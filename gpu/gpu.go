package gpu

import (
	"context"
	"time"

	"go.uber.org/zap"
)

// Health reports whether a device can be used. A device is lost only when its
// driver says so; telemetry that fails is another matter (a Sample's error)
// and never turns a device into a lost one.
type Health string

// The states of a device.
const (
	Healthy Health = "healthy"
	Lost    Health = "lost" // fell off the bus or needs a reset: nothing may run there
)

// Process is one program that holds memory on a device.
type Process struct {
	PID  int
	Name string // empty if the driver does not tell
	Used Bytes  // -1 if the driver does not tell (WSL2)
}

// Device is what one reading says of one GPU.
type Device struct {
	Index  int    // the driver's index; display only, it may change over a reboot
	UUID   string // the identity: everything is keyed by it
	Name   string
	Health Health
	Reason string // why it is not healthy, why its memory is not known, or what else the driver reports

	Total       Bytes // 0 if not known
	Free        Bytes // live; valid only if MemoryKnown
	MemoryKnown bool
	Unified     bool // memory shared with the CPU: Free is the system's available memory

	Processes      []Process
	ProcessesKnown bool

	// For display; negative if the driver does not tell.
	Utilisation int     // percent
	Temperature int     // degrees Celsius
	Power       float64 // watts
}

// Sample is one look at all devices.
type Sample struct {
	At      time.Time // when the look began
	Devices []Device  // ordered by Index
}

// Detail says how much a look should bring. Memory alone is cheap; process
// lists hold driver locks and must be rare.
type Detail int

// The kinds of look.
const (
	Memory Detail = iota // total and free only; Processes, Utilisation … may be missing
	Full                 // everything that the driver tells
)

// Sampler reads GPUs. The broker calls it from one goroutine at a time.
type Sampler interface {
	// Name is the module's name as in the configuration, "nvml" for example.
	Name() string
	// Why says in a sentence why this sampler serves, and what was tried before it.
	Why() string
	// Sample takes one look. An error means that telemetry as a whole is lost;
	// it says nothing about the devices. It must return when ctx ends, and soon
	// enough by itself: only the sampler knows how long its hardware may take.
	Sample(ctx context.Context, detail Detail) (Sample, error)
	// MinInterval is the least time between two looks that makes sense.
	MinInterval() time.Duration
	// Close frees what Open took. The broker calls it once.
	Close() error
}

// Guest is a provisioned sampler module (namespace gpu_broker.samplers). It
// only holds and checks configuration; Open makes the running thing, which
// lives on the broker's context and not on that of a config.
type Guest interface {
	Open(ctx context.Context, logger *zap.Logger) (Sampler, error)
}
