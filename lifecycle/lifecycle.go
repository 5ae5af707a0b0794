// Package lifecycle says how the broker talks to a model server: how one is
// probed, loaded, unloaded and found busy. It knows nothing of scheduling.
package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Outcome is what a probe of a server's health came to.
type Outcome int

// The outcomes of a probe.
const (
	Answered    Outcome = iota // an accepted status
	Refused                    // nothing listens there
	Wrong                      // it answered, but not as it should
	TimedOut                   // no answer in time: it may be busy
	Unreachable                // no way leads there, or its name is not found: it may live
)

func (o Outcome) String() string {
	return [...]string{"answered", "refused", "wrong", "timed out", "unreachable"}[o]
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
	// Models are those that it holds, where Traits.Models; nil: it did not say.
	Models []Model
	// Stopped says that the server does not run, which its driver would start: that is no fault.
	Stopped bool
}

// Model is one model that a server says it holds.
type Model struct {
	Name     string
	Digest   string    // of its content: two names with one digest are one model; empty: the server does not say
	Resident gpu.Bytes // its GPU memory; -1 if the server does not say
	Size     gpu.Bytes // all its memory, also what is not the GPU's; -1 if the server does not say
}

// Partly reports whether some of the model is not on the GPU, as far as the server says.
func (m Model) Partly() bool { return m.Resident >= 0 && m.Size > m.Resident }

// Errors that the scheduler must tell apart. Drivers wrap them.
var (
	ErrOutOfMemory = errors.New("out of GPU memory")
	ErrPartly      = errors.New("only partly on the GPU")
	ErrRefused     = errors.New("connection refused") // nothing listens there
	// ErrUnreachable is the error of a call for which no way led to the server, or its name was not found: the server may live.
	ErrUnreachable = errors.New("unreachable")
	// ErrNoModel is the error of a load of a model that the server does not have.
	ErrNoModel = errors.New("the server has no such model")
)

// Traits says what a driver can do. They do not change while it lives.
type Traits struct {
	Load      bool // has a way to load; without, the server loads inside its first request
	Unload    bool // has a way to give its memory back
	Health    bool // can be probed at all
	Residency bool // can tell whether it is loaded
	Busy      bool // can tell whether it works, whoever asked it to

	// Of one model of several: what can be said of each by its name.
	Models      bool  // tells which it holds, in Report.Models
	LoadModel   bool  // can load one
	UnloadModel bool  // can unload one
	Catalog     bool  // can tell which it could load: then it is a Cataloguer
	Names       Names // how it compares their names

	// A load that puts only a part onto the GPU has failed: one of the server as a whole, and one of a model.
	FullGPU, FullGPUModel bool

	Starts bool // the server is started and stopped by the driver: one that does not run is no fault. Then it is a Supervisor.
}

// Target is what is to be loaded, unloaded or found busy.
type Target struct {
	// Model is the model's name; empty: the server as a whole.
	Model string
	// Digest is the model's, as far as it is known.
	Digest string
	// Still reports for how long the free memory of its GPUs has not moved; false: it is not known. nil: it never is.
	Still func() (time.Duration, bool)
	// GPUs are those that it is placed on, as far as they are known; for servers that the driver starts.
	GPUs []Placed
}

// Placed is a GPU that a server is to use, and how much of it.
type Placed struct {
	Index int
	UUID  string
	Total gpu.Bytes // 0: not known
	Claim gpu.Bytes
}

// Driver talks to one model server. Its methods are safe for concurrent use
// and return soon after ctx ends.
type Driver interface {
	Traits() Traits
	// Probe asks once for health and residency.
	Probe(ctx context.Context) Report
	// Load loads and returns once the server says that it is ready. The caller
	// bounds it by ctx. It wraps ErrOutOfMemory if the server says so, and ErrPartly
	// where Traits.FullGPU or FullGPUModel and some of the model did not come onto the GPU; then it was unloaded again.
	Load(ctx context.Context, t Target) error
	// Unload asks the server to give its memory back and waits until it says
	// that it did. confirmed is true if the server's own residency probe said
	// so (or its process is gone), false if it can't tell: then only the
	// memory itself can. An error means that the model must be taken as still loaded.
	Unload(ctx context.Context, t Target) (confirmed bool, err error)
	// Busy asks once whether the server works, whoever gave it the work.
	Busy(ctx context.Context, t Target) (bool, error)
	// Close frees what Open took, and stops the server if the driver has started it. The broker calls it once; calls of the other
	// methods may still run then, after a reload that replaced the driver, and must end as they would.
	Close() error
}

// Cataloguer is a Driver that can tell which models its server could load, loaded or not.
type Cataloguer interface {
	// Catalog asks once. The order is the server's. With an error it may return what the server has told before.
	Catalog(ctx context.Context) ([]Model, error)
	// Elsewhere reports whether a model of this name may be served though the catalog does not list it.
	Elsewhere(name string) bool
}

// Supervisor is a Driver that starts and stops its server.
type Supervisor interface {
	Driver
	// Upstream is the host:port at which the server of the latest start listens;
	// empty: it is the one in Deps, or none has started.
	Upstream() string
	// Running reports whether the server runs, loaded or not, as far as the driver knows without asking.
	Running() bool
	// Owns reports whether a process of this host is the server or one of its children.
	Owns(pid int) bool
	// State is for people.
	State() State
}

// Restarter is a Supervisor that says what is to be done when its server has died.
type Restarter interface {
	// RestartOnFailure reports whether it is started again though nobody asks for it.
	RestartOnFailure() bool
	// MaxRestarts is how often in a row.
	MaxRestarts() int
	// Failed reports whether its latest server has ended by a failure: one that has done what it was to do is not started again.
	Failed() bool
}

// State is what is told of a supervised server.
type State struct {
	Running   bool      `json:"running"`
	PID       int       `json:"pid,omitempty"`
	Unit      string    `json:"unit,omitempty"`      // of systemd
	Container string    `json:"container,omitempty"` // of Docker
	Address   string    `json:"address,omitempty"`   // where it listens
	StartedAt time.Time `json:"started_at,omitzero"`
	Starts    int       `json:"starts"`              // since the driver was made
	LastExit  string    `json:"last_exit,omitempty"` // how it ended the last time
	Output    []string  `json:"output,omitempty"`    // its last lines, at most MaxOutput
}

// MaxOutput bounds State.Output, in lines.
const MaxOutput = 200

// Jobs is a Driver of a server whose answers name jobs that go on after them.
type Jobs interface {
	// Track takes an accepted answer's body, of at most MaxAnswer bytes. Busy is true until the server says that
	// the job in it is over. It returns false if the body names no job.
	Track(body []byte) bool
}

// Heir is a Driver that takes over what the one before it knew of the same server, which can't be asked for it. It is called before any other method.
type Heir interface {
	Inherit(before Driver)
}

// MaxAnswer is how much of an answer Jobs.Track wants to see, in bytes.
const MaxAnswer = 64 << 10

// Deps is what a driver gets from the broker.
type Deps struct {
	Consumer string  // the consumer's name, for logs and errors
	Upstream string  // host:port of the server; empty if the config names none
	Limits   *Limits // nil: the defaults
	Logger   *zap.Logger
	// Dir is a folder of the broker's own, where a driver may keep what must outlive a crash of Caddy, such as
	// what it has started. It may not exist yet. Empty: nothing is kept.
	Dir string
	// Died is called when a server that the driver has started ends without having been told to; nil: nobody
	// wants to know. detail says how, for people. It does not block.
	Died func(detail string)
}

// WithDefaults is d with a value for all that a driver can't do without.
func (d Deps) WithDefaults() Deps {
	if d.Limits == nil {
		d.Limits = NewLimits(0, 0)
	}
	if d.Logger == nil {
		d.Logger = zap.NewNop()
	}
	return d
}

// Limits are how long a driver may take. A reload may change them while it lives: its server need not be started anew.
type Limits struct{ probe, unload atomic.Int64 }

// NewLimits makes limits, see Set.
func NewLimits(probe, unload time.Duration) *Limits {
	l := new(Limits)
	l.Set(probe, unload)
	return l
}

// Set sets how long one probe may take, by default 2 s, and one unload, confirmation included, by default 30 s.
func (l *Limits) Set(probe, unload time.Duration) {
	l.probe.Store(int64(cmp.Or(max(0, probe), 2*time.Second)))
	l.unload.Store(int64(cmp.Or(max(0, unload), 30*time.Second)))
}

// Probe is how long one probe may take.
func (l *Limits) Probe() time.Duration { return time.Duration(l.probe.Load()) }

// Unload is how long one unload may take, confirmation included.
func (l *Limits) Unload() time.Duration { return time.Duration(l.unload.Load()) }

// Guest is a provisioned lifecycle module (namespace gpu_broker.lifecycles).
// It only holds and checks configuration; Open makes the running thing.
type Guest interface {
	Open(deps Deps) (Driver, error)
}

// Namer is a Guest that knows how its server compares the names of models.
type Namer interface {
	ModelNames() Names
}

// Fingerprinter is a Guest with placeholders in its configuration. The broker
// keeps the driver of a configuration that a reload left unchanged, and the
// text alone does not tell that.
type Fingerprinter interface {
	// Fingerprint differs where the values of the placeholders do. It does not show them.
	Fingerprint() string
}
