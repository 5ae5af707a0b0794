package scheduler

import (
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// SlotState is where a slot stands.
type SlotState uint8

// The states of a slot (accounting §2).
const (
	Unknown  SlotState = iota // residency can't be told yet
	Idle                      // not loaded
	Loading                   // being loaded
	Ready                     // loaded; its gate reports whether jobs may enter
	Stopping                  // being unloaded, or waiting for its memory to come back
)

func (s SlotState) String() string {
	return [...]string{"UNKNOWN", "IDLE", "LOADING", "READY", "STOPPING"}[s]
}

// MarshalText writes the state's name.
func (s SlotState) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// legal holds every edge of accounting §2 and no other.
var legal = map[[2]SlotState]bool{
	{Unknown, Ready}: true, {Unknown, Idle}: true, {Unknown, Loading}: true, {Unknown, Stopping}: true,
	{Idle, Loading}: true, {Idle, Ready}: true,
	{Loading, Ready}: true, {Loading, Idle}: true, {Loading, Stopping}: true,
	{Ready, Stopping}: true, {Ready, Idle}: true,
	{Stopping, Idle}: true, {Stopping, Ready}: true, {Stopping, Unknown}: true,
}

// startsIdle reports whether a slot loads inside its first job, and can be told to unload whatever it may hold before.
func (c *SlotConfig) startsIdle() bool { return c.CanUnload && !c.CanLoad && !c.CanTell }

// Mode says how much the scheduler does.
type Mode uint8

// The kinds of scheduler (spec §1.10).
const (
	Evicting    Mode = iota // queue, lock, loads and evictions
	Locked                  // queue and lock; every slot is taken for loaded
	Passthrough             // nothing
)

// Config is what the rules depend on.
type Config struct {
	Mode         Mode
	LockGlobal   bool       // one lock of all GPUs
	Cushion      *gpu.Bytes // nil: 256 MiB, 4 GiB on unified memory
	Reserve      gpu.Bytes
	MaxQueue     int
	MaxEvictions int

	EvictWait, DrainTimeout, AbandonAfter, OutsiderWait time.Duration

	IdleUnload       IdleUnload
	ObserveEvictions bool // evictions are only said, not done

	Overtake, Hold                         float64
	OvertakeMin, OvertakeMax, LockOvertake time.Duration
	Credit                                 *time.Duration // how long a departed client's age stands for its slot; nil: policy rule 6

	VictimLower    bool          // only slots that were used at a lower priority are victims (spec §3.3)
	ClientCooldown time.Duration // least time between two starts of one client
	ReservedPlaces int           // places in the queue that are kept for jobs below ReservedBelow
	ReservedBelow  int
	Restore        []Restore // who is loaded again when a GPU has been idle

	Slots []SlotConfig // in the order in which unexplained memory is given out
}

// Restore loads a slot again once its GPUs have been idle for so long (spec §4.6).
type Restore struct {
	Slot  string
	After time.Duration
}

// IdleUnload says what is done with slots that nobody uses.
type IdleUnload uint8

// The ways to treat idle slots (spec §5).
const (
	IdleOn      IdleUnload = iota // they are unloaded
	IdleOff                       // nothing
	IdleObserve                   // it is said, and not done
)

// SlotConfig is one slot: a consumer, or one of its models.
type SlotConfig struct {
	Name        string
	Consumer    string // whose model it is; empty: it is a consumer itself
	Server      string // its address: with another, it is another server, of which nothing is known
	Disabled    bool   // kept in status, refused
	GPUs        []int
	Claim       gpu.Bytes
	Residual    gpu.Bytes // at most so much of its residue is used again by its next load
	Concurrency int
	LockNone    bool // computes beside anybody
	Coexist     []string
	Pin         bool
	NoEvict     bool
	VRAMManaged bool
	KeepAlive   time.Duration
	IdleTimeout time.Duration // unloaded after so long without use; 0: never
	OwnIdle     bool          // IdleTimeout is the slot's own: it counts for one that manages its memory itself, too
	MaxRun      time.Duration // its jobs are cancelled after so long, by the driver; 0: never
	SwitchCost  time.Duration
	Budget      time.Duration // the usual one: overtaking is bounded by half of it
	Async       bool          // its work outlives its answers
	WorksOn     bool          // its server goes on with the work of clients that left
	Conflicts   []string      // never resident together with these
	Reserved    int           // places of Concurrency that are kept for jobs below Config.ReservedBelow
	Cloud       bool          // runs elsewhere: takes no memory and no lock, and never waits
	Starts      bool          // its driver starts and stops its server: one that does not run, or does not answer, is no fault
	Restart     bool          // … and starts one that has died again, though nobody asks for it
	MaxRestarts int           // … so often in a row
	TurnOnly    bool          // holds no memory and is never loaded or unloaded: its jobs take the GPU lock, and nothing else
	Stale       bool          // its driver is to be replaced: it is unloaded, and then Renew says that it may be

	// What its driver can do.
	CanLoad, CanUnload, CanProbe, CanTell, CanBusy bool
}

// listed reports whether a list of consumers and slots has the slot.
func (c *SlotConfig) listed(list []string) bool {
	return slices.Contains(list, c.Name) || c.Consumer != "" && slices.Contains(list, c.Consumer)
}

// lazy slots load inside their first job.
func (c *SlotConfig) lazy() bool { return !c.CanLoad }

// JobID names a job. It is never used again for another.
type JobID uint64

// Event is something that happened. The driver says it to Step.
type Event interface{ event() }

// The events.
type (
	// Configure takes a new configuration. Slots are known by name: what is known of those that stay is kept.
	Configure struct{ Config Config }
	// Submit asks for a place on a slot. The job's ID is in the first effect that is returned.
	Submit struct {
		Slot      string
		Priority  int           // lower is more urgent
		Submitted time.Time     // when it came; zero: now. A job that is admitted once more keeps its time.
		Deadline  time.Time     // when its budget ends; zero: never
		Client    string        // who asks: clients of equal priority take turns; empty: nobody in particular
		KeepAlive time.Duration // for so long after it the slot is no victim; 0: the slot's own
		StayWarm  time.Duration // for so long after it the slot is not unloaded as idle; 0: the slot's own
		Cooldown  time.Duration // least time until the client's next start; 0: the configuration's
		IfFree    bool          // only if it can run at once; else the effect is NotNow and nothing has happened
	}
	// Cancel takes a waiting job back, or ends one that was admitted meanwhile.
	Cancel struct{ Job JobID }
	// Release ends an admitted job.
	Release struct {
		Job     JobID
		Outcome Outcome
		Left    bool // its request was broken off by its client, or by us: its server may work on
	}
	// LoadDone ends a load.
	LoadDone struct {
		Slot        string
		Epoch       uint64
		Err         string // empty: loaded
		OutOfMemory bool
		Partly      bool // it had come only partly onto the GPU, and was unloaded again
	}
	// UnloadDone ends an unload call.
	UnloadDone struct {
		Slot      string
		Epoch     uint64
		Err       string // empty: done
		Refused   bool   // … since nothing listened there
		Confirmed bool   // the server itself says that it is unloaded, or its process is gone
	}
	// BusyAnswer answers CheckBusy.
	BusyAnswer struct {
		Slot   string
		Sent   time.Time
		Busy   bool
		Failed bool // the server could not be asked, and is taken for busy
		Mute   bool // … though it answered: its busy route tells nothing
	}
	// Probed is what a probe told.
	Probed struct {
		Slot     string
		Sent     time.Time
		Outcome  ProbeOutcome
		Detail   string
		Stopped  bool // the server, which its driver starts, does not run
		Clean    bool // … and has not failed
		Loaded   Tri
		Resident gpu.Bytes // -1: not told
	}
	// Sampled is a look at the GPUs, or the news that there is none to be had.
	Sampled struct {
		At      time.Time
		Lost    string // why telemetry as a whole is lost; Devices is empty then
		First   bool   // of a sampler: GPUs that it does not know are not there any more
		Devices []Device
	}
	// Unload asks for a slot to be unloaded by hand.
	Unload struct{ Slot string }
	// Drain lets no more jobs in, and sends away those that wait; what runs goes on. Off takes it back.
	Drain struct {
		Slot  string // empty: all
		Off   bool
		Final bool // of all, and never taken back: the process ends
	}
	// Recall brings back what was learnt before a restart. It comes before the first Configure.
	Recall struct{ Learnt map[string]Learnt }
	// Lend lends a GPU to a person or a program until then: what is loaded there is unloaded, and jobs wait.
	// A time that is past ends it.
	Lend struct {
		GPU   int
		Until time.Time
	}
	// SetPin pins a slot, or ends that, until the process ends or it is said anew.
	SetPin struct {
		Slot string
		On   bool
	}
	// Died says that the server of a slot has ended without having been told to.
	Died struct {
		Slot   string
		Detail string // for people
		Clean  bool   // it has not failed: it is not started again unasked
	}
	// Touch counts as use of a slot, without a job.
	Touch struct{ Slot string }
	// Wake says that the time that Step named has come.
	Wake struct{}
)

func (Configure) event()  {}
func (Submit) event()     {}
func (Cancel) event()     {}
func (Release) event()    {}
func (LoadDone) event()   {}
func (UnloadDone) event() {}
func (BusyAnswer) event() {}
func (Probed) event()     {}
func (Sampled) event()    {}
func (Unload) event()     {}
func (Drain) event()      {}
func (Recall) event()     {}
func (Lend) event()       {}
func (SetPin) event()     {}
func (Touch) event()      {}
func (Died) event()       {}
func (Wake) event()       {}

// Outcome is how an admitted job ended.
type Outcome uint8

// The outcomes of a job.
const (
	Served      Outcome = iota // its server answered
	Accepted                   // an async server took the work: it goes on
	NoAnswer                   // no response came, or the client left before one did
	DialRefused                // nothing listened there
	ServerDied                 // its server went away in the middle of the answer
	Unreached                  // no connection came about, though something may listen there
)

// ProbeOutcome is what a health probe came to.
type ProbeOutcome uint8

// The outcomes of a probe.
const (
	ProbeAnswered ProbeOutcome = iota
	ProbeRefused
	ProbeWrong
	ProbeUnreachable // no way leads to the server, or its name is not found
	ProbeTimedOut
)

// Tri is a truth that may be unknown.
type Tri uint8

// The values of a Tri.
const (
	NotTold Tri = iota
	No
	Yes
)

// Device is what a sample says of one GPU.
type Device struct {
	Index     int
	UUID      string
	Name      string
	Total     gpu.Bytes
	Free      gpu.Bytes
	Known     bool // is Free known?
	Unified   bool
	Lost      bool
	Reason    string
	Measured  map[string]gpu.Bytes // by slot, where processes can be told apart; nil: not looked at this time
	Outsiders []string             // who else holds memory, for people; nil: not looked at this time
}

// EffectKind tells effects apart.
type EffectKind uint8

// The effects.
const (
	Queued      EffectKind = iota // Job was put in the queue
	Admit                         // Job may run
	Refuse                        // Job may not: see Refusal
	Load                          // load Slot
	StartUnload                   // unload Slot
	CheckBusy                     // ask Slot once, in After, whether it works
	ProbeNow                      // probe Slot
	LookNow                       // take a look at the GPUs: memory has moved
	Dropped                       // Slot was removed from the config and is gone now
	NotNow                        // a job that asked to be admitted at once can not be
	Decided                       // for the record: see Decision
	Renew                         // the driver of Slot, which is stale, may be replaced now: it is not loaded
	Resided                       // Slot is not loaded any more: see Stayed
)

// Effect is something that the driver must do.
type Effect struct {
	Kind     EffectKind
	Job      JobID
	Slot     string
	Epoch    uint64
	After    time.Duration
	Loads    bool          // of Admit: the server loads inside this job
	Stayed   time.Duration // of Resided: how long it was loaded, as far as was seen
	Refusal  *Refusal
	Decision *Decision
}

// Code is why a job was refused, in the words of spec §8.
type Code string

// The codes of refusals.
const (
	UnknownConsumer Code = "unknown_model"
	NeverFits       Code = "never_fits"
	Unhealthy       Code = "unhealthy"
	NotRunning      Code = "not_running"
	QueueFull       Code = "queue_full"
	VRAMExhausted   Code = "vram_exhausted"
	LoadFailed      Code = "load_failed"
	GPULost         Code = "gpu_lost"
	Draining        Code = "draining"
	BudgetExceeded  Code = "budget_exceeded"
)

// Refusal says why a job gets no place.
type Refusal struct {
	Code       Code
	Message    string
	RetryAfter time.Duration // 0: trying again is of no use
	Detail     *Detail       // what of the memory; nil where memory is not the reason
}

// Detail is the state of memory behind a refusal.
type Detail struct {
	Need    gpu.Bytes         `json:"need"`
	Free    map[int]gpu.Bytes `json:"free,omitempty"`
	Holders []Holder          `json:"holders,omitempty"`
	Unloads []string          `json:"unloads,omitempty"`
}

// Holder is one who holds memory.
type Holder struct {
	Name      string    `json:"name"`
	State     string    `json:"state,omitempty"`
	Bytes     gpu.Bytes `json:"bytes"`
	Protected string    `json:"protected,omitempty"`
}

// Decision is one line of the record: what was decided, and why.
type Decision struct {
	At     time.Time `json:"at"`
	Kind   string    `json:"kind"` // load, loaded, load_failed, unload, unloaded, idle_unloaded, evicted, unload_failed, adopt, gone, drain, reopen, refuse, gpu …
	Slot   string    `json:"consumer,omitempty"`
	Target string    `json:"target,omitempty"` // for whom
	GPU    int       `json:"gpu"`
	Code   Code      `json:"code,omitempty"`
	Reason string    `json:"reason"`
	Need   gpu.Bytes `json:"need,omitempty"`
	Avail  gpu.Bytes `json:"available,omitempty"`
	Took   float64   `json:"took_seconds,omitempty"`
}
