// Package modelserver pretends to be a model server with its memory on a
// simulated GPU. It speaks in the manner of a plain HTTP server or of one of
// the real ones, bad habits included, and can be told to misbehave while it runs.
// Tests, benchmarks and the demo use it; nothing else may import it.
package modelserver

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
)

// Manner is the kind of server that is imitated.
type Manner string

// The manners.
const (
	Plain   Manner = "plain"   // load, unload and health routes of its own; one model
	Ollama  Manner = "ollama"  // several models, loads lazily, unloads asynchronously
	ComfyUI Manner = "comfyui" // a job queue; answers before the work is done; loads lazily
)

// Options says what a pretending server is like. The zero value of every
// field but Name is usable.
type Options struct {
	// Name is shown in answers and as the process's name on the simulated GPU.
	// Two servers of one process that share a SimDir need different names.
	Name string
	// Manner is Plain if empty.
	Manner Manner
	// Addr is where it listens; "127.0.0.1:0" if empty. ":0" takes any port of
	// the loopback address.
	Addr string

	// SimDir is the folder of the simulated GPU; simulated.DefaultDir() if empty.
	SimDir string
	// GPU is the index of the simulated GPU.
	GPU int
	// Total is the size of that GPU. If set, a load that would overfill it,
	// counting everything in SimDir, fails with an out-of-memory error and
	// counts in Stats.OOMs. 0: loads never run out of memory.
	Total gpu.Bytes

	// VRAM is what the loaded model takes. With Models it is not used.
	VRAM gpu.Bytes
	// Models are the models of an ollama, or of another server that has several,
	// by name, with what each takes. Empty: one model, named as the server, of VRAM.
	Models map[string]gpu.Bytes
	// Aliases are other names of Models. An ollama lists them with the digest of their model, and says that the model is loaded by
	// the name by which it was; the others take them without a word, and list their models only.
	Aliases map[string]string
	// Residue is held from the first load until the process ends, as a CUDA
	// context is. It is part of VRAM while loaded, not added to it.
	Residue gpu.Bytes
	// OnCPU makes the models take no VRAM at all; an ollama then says size_vram 0.
	OnCPU bool
	// Spill makes a load that doesn't fit take what is free and succeed, as
	// ollama does (size_vram < size). Needs Total.
	Spill bool

	// LoadTime is how long a load takes. The memory is taken in LoadSteps equal
	// steps over that time; 1, the default, takes all of it at once at the start.
	LoadTime  time.Duration
	LoadSteps int
	// UnloadTime is how long an unload takes.
	UnloadTime time.Duration
	// ReleaseDelay is how long after the server says that it is unloaded its
	// memory is released.
	ReleaseDelay time.Duration
	// RunTime is how long one piece of work takes; a request's ?ms= overrides it.
	RunTime time.Duration

	// Preloaded loads everything before Start and Restart return. Servers that
	// have no other way, a vllm for instance, load at every start anyway.
	Preloaded bool
	// Lazy makes a plain server load inside the first request that needs its
	// model, instead of answering 503. The other manners do what the real one does.
	Lazy bool
	// Concurrency is how many requests are worked on at once; 0 means any
	// number. A plain server with Concurrency 1 is single-threaded: while it
	// works it answers nothing, its health probe included. An ollama bounds its
	// inference only. ComfyUI always has one worker, and kinds that lock do one
	// thing at a time.
	Concurrency int
	// WorksOn keeps a plain server's work going when its client leaves, as swama does.
	WorksOn bool
	// KeepAlive is the idle time before a server unloads a model by itself, if
	// its kind does; 0 is what the real one has (ollama 5 minutes, llamacpp
	// never), never if negative.
	KeepAlive time.Duration
	// Grace is how long an unload waits for running work where the kind bounds
	// that: a llamacpp-router then breaks the work, a localai gives up. 0 is
	// what the real one has: 10 and 30 seconds.
	Grace time.Duration

	// AllowUnload opens the unload route of a kokoro, which is closed at first.
	AllowUnload bool
	// KeepJobs is how long an sdcpp tells of a job that has ended; 0 is what
	// the real one has, 10 minutes.
	KeepJobs time.Duration

	// Quiet leaves requests and work out of the event log, for benchmarks.
	Quiet bool

	// Faults is how it misbehaves from the start.
	Faults Faults
	// OnDeath, if set, is called after the server has died by a fault.
	OnDeath func()
}

// Faults are the ways in which a server can misbehave. They can be changed
// while it runs; what hangs goes on once its fault is cleared.
type Faults struct {
	RefuseLoad bool `json:"refuse_load,omitempty"` // loads answer 500
	HangLoad   bool `json:"hang_load,omitempty"`   // a load takes its memory and never gets ready
	OOMLoads   int  `json:"oom_loads,omitempty"`   // so many loads fail with CUDA's out-of-memory text
	DieOnLoad  bool `json:"die_on_load,omitempty"` // the next load takes its memory and then kills the process

	HangUnload     bool `json:"hang_unload,omitempty"`      // an unload never gets done
	FailUnload     bool `json:"fail_unload,omitempty"`      // unloads answer 500 and do nothing
	LieUnloaded    bool `json:"lie_unloaded,omitempty"`     // says unloaded, keeps the memory until it really unloads
	LieStillLoaded bool `json:"lie_still_loaded,omitempty"` // answers 200 to an unload and goes on saying that it is loaded
	NeverRelease   bool `json:"never_release,omitempty"`    // unloads, but the memory doesn't come back while this is set

	LeakPerCycle gpu.Bytes `json:"leak_per_cycle,omitempty"` // so much more stays after each unload
	Extra        gpu.Bytes `json:"extra,omitempty"`          // held beyond the declared VRAM while loaded; applies at once

	DieMidBody   bool `json:"die_mid_body,omitempty"`   // the next answer stops half-way and the process dies
	AbortMidBody bool `json:"abort_mid_body,omitempty"` // answers stop half-way, the server lives on
	DieOnRequest bool `json:"die_on_request,omitempty"` // the next work kills the process before any answer

	// HoldWork keeps work from ending while it is set: a stream stands still in
	// its middle, any other answer does not begin.
	HoldWork bool `json:"hold_work,omitempty"`

	HealthStatus int  `json:"health_status,omitempty"` // health answers with this status, 500 for example
	HangHealth   bool `json:"hang_health,omitempty"`   // health doesn't answer

	// HoldStart keeps a server that starts anew by itself, or by /control's
	// restart_after, from doing so while it is set: its port stays closed.
	HoldStart bool `json:"hold_start,omitempty"`

	// FailPaths answers requests for a path ("/prompt") or method and path
	// ("GET /prompt") with a status and does nothing else.
	FailPaths map[string]int `json:"fail_paths,omitempty"`
	// HangPaths are answered only once they are taken off this list.
	HangPaths []string `json:"hang_paths,omitempty"`
}

func (f Faults) clone() Faults {
	f.FailPaths = maps.Clone(f.FailPaths)
	f.HangPaths = slices.Clone(f.HangPaths)
	return f
}

// complete fills in defaults and says what is wrong.
func (o Options) complete() (Options, error) {
	if o.Name == "" {
		return o, fmt.Errorf("a pretending server needs a name")
	}
	if o.Manner == "" {
		o.Manner = Plain
	}
	if _, known := manners[o.Manner]; !known {
		return o, fmt.Errorf("server %s: manner %q is none of %v", o.Name, o.Manner, Manners())
	}
	if o.Addr == "" || o.Addr == ":0" {
		o.Addr = "127.0.0.1:0"
	}
	if o.SimDir == "" {
		o.SimDir = simulated.DefaultDir()
	}
	if o.LoadSteps <= 0 {
		o.LoadSteps = 1
	}
	if o.KeepAlive == 0 {
		o.KeepAlive = manners[o.Manner].keepAlive
	}
	if o.Grace == 0 {
		o.Grace = manners[o.Manner].grace
	}
	if o.KeepJobs == 0 {
		o.KeepJobs = 10 * time.Minute
	}
	if manners[o.Manner].serial {
		o.Concurrency = 1
	}
	if len(o.Models) > 0 && !manners[o.Manner].many {
		return o, fmt.Errorf("server %s: a %s server has one model: set its vram", o.Name, o.Manner)
	}
	if len(o.Models) == 0 {
		o.Models = map[string]gpu.Bytes{o.Name: o.VRAM}
	}
	o.Models = maps.Clone(o.Models)
	for name, size := range o.Models {
		if size < 0 {
			return o, fmt.Errorf("server %s: model %s takes %s: it can't be negative", o.Name, name, size)
		}
	}
	if o.Residue < 0 || o.Total < 0 || o.GPU < 0 || o.Concurrency < 0 {
		return o, fmt.Errorf("server %s: residue, total, gpu and concurrency can't be negative", o.Name)
	}
	if o.GPU >= maxGPUs {
		return o, fmt.Errorf("server %s: gpu %d: there are at most %d simulated GPUs", o.Name, o.GPU, maxGPUs)
	}
	o.Faults = o.Faults.clone()
	return o, nil
}
