// Package lifecycle says how the broker talks to a model server: how one is
// probed, loaded, unloaded and found busy. It knows nothing of scheduling.
package lifecycle

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Outcome is what a probe of a server's health came to.
type Outcome int

// The outcomes of a probe.
const (
	Answered Outcome = iota // an accepted status
	Refused                 // nothing listens there
	Wrong                   // it answered, but not as it should
	TimedOut                // no answer in time: it may be busy
)

func (o Outcome) String() string {
	return [...]string{"answered", "refused", "wrong", "timed out"}[o]
}

// Tri is a truth that may be unknown.
type Tri int

// The values of a Tri.
const (
	Unknown Tri = iota
	No
	Yes
)

// TriOf makes a known Tri.
func TriOf(b bool) Tri {
	if b {
		return Yes
	}
	return No
}

// Report is a server's own word about itself.
type Report struct {
	Outcome  Outcome
	Detail   string    // for people: what was wrong; never holds a secret
	Loaded   Tri       // does it hold its model on the GPU?
	Resident gpu.Bytes // how much of it; -1 if it does not say
}

// Errors that the scheduler must tell apart. Drivers wrap them.
var (
	ErrOutOfMemory = errors.New("out of GPU memory")
	ErrRefused     = errors.New("connection refused")
)

// Traits says what a driver can do. They do not change while it lives.
type Traits struct {
	Load      bool // has a way to load; without, the server loads inside its first request
	Unload    bool // has a way to give its memory back
	Health    bool // can be probed at all
	Residency bool // can tell whether it is loaded
	Busy      bool // can tell whether it works, whoever asked it to
}

// Driver talks to one model server. Its methods are safe for concurrent use
// and return soon after ctx ends.
type Driver interface {
	Traits() Traits
	// Probe asks once for health and residency.
	Probe(ctx context.Context) Report
	// Load loads and returns once the server says that it is ready. The caller
	// bounds it by ctx. It wraps ErrOutOfMemory if the server says so.
	Load(ctx context.Context) error
	// Unload asks the server to give its memory back and waits until it says
	// that it did. confirmed is true if the server's own residency probe said
	// so (or its process is gone), false if it can't tell: then only the
	// memory itself can. An error means that the model must be taken as still loaded.
	Unload(ctx context.Context) (confirmed bool, err error)
	// Busy asks once whether the server works, whoever gave it the work.
	Busy(ctx context.Context) (bool, error)
	// Close frees what Open took. The broker calls it once; calls of the other
	// methods may still run then, after a reload that replaced the driver, and must end as they would.
	Close() error
}

// Deps is what a driver gets from the broker.
type Deps struct {
	Consumer      string        // the consumer's name, for logs and errors
	Upstream      string        // host:port of the server; empty if the config names none
	ProbeTimeout  time.Duration // for one probe
	UnloadTimeout time.Duration // for one unload, confirmation included
	Logger        *zap.Logger
}

// Guest is a provisioned lifecycle module (namespace gpu_broker.lifecycles).
// It only holds and checks configuration; Open makes the running thing.
type Guest interface {
	Open(deps Deps) (Driver, error)
}

// Fingerprinter is a Guest with placeholders in its configuration. The broker
// keeps the driver of a configuration that a reload left unchanged, and the
// text alone does not tell that.
type Fingerprinter interface {
	// Fingerprint differs where the values of the placeholders do. It does not show them.
	Fingerprint() string
}
