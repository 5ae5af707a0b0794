// Package supervised is what the lifecycles systemd and docker share: servers
// that somebody else runs, who is asked and tells.
package supervised

import (
	"sync"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// View is what whoever runs a server says of it at one moment.
type View struct {
	Runs    bool
	Run     string // differs from one run to the next
	PID     int
	Started time.Time
	// End says how the latest run ended, for people; empty: it is not known.
	End string
}

// Record follows the runs of one server by views of it. Views must come in the order in which they were true.
type Record struct {
	mu       sync.Mutex
	run      *run // the latest; nil: none was seen
	asked    bool // a start was asked for, and it is not known yet what came of it
	starts   int
	lastExit string
}

type run struct {
	View
	ours  bool // we have asked for it
	told  bool // to end, by us
	over  bool
	ended chan struct{} // closed once over
}

// stopped is why a run ended that we have told to.
const stopped = "the broker stopped it"

// again is why a run ended of which only the next one was seen.
const again = "it ended and was started again, not by the broker"

// See takes a view.
func (r *Record) See(v View) {
	r.mu.Lock()
	defer r.mu.Unlock()
	live := r.run != nil && !r.run.over
	if live && (!v.Runs || v.Run != r.run.Run) {
		switch {
		case r.run.told && !v.Runs:
			v.End = stopped
		case v.End == "" && v.Runs:
			v.End = again
		}
		r.lastExit = v.End
		r.run.over = true
		close(r.run.ended)
		live = false
	}
	switch {
	case !v.Runs:
	case live:
		r.run.View = v
	default:
		r.run = &run{View: v, ours: r.asked, ended: make(chan struct{})}
		if r.asked {
			r.starts++
		}
	}
}

// Asking notes that a start is asked for.
func (r *Record) Asking() { r.setAsked(true) }

// Answered notes that what came of it has been seen.
func (r *Record) Answered() { r.setAsked(false) }

func (r *Record) setAsked(is bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = is
}

// Stopping notes that the server is told to end.
func (r *Record) Stopping() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.run != nil {
		r.run.told = true
	}
}

// Asked reports whether a start was asked for of which it is not known what came of it.
func (r *Record) Asked() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked
}

// Ours reports whether the server may run because we have asked for it.
func (r *Record) Ours() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked || r.run != nil && !r.run.over && r.run.ours
}

// Runs reports whether the server ran when it was seen last.
func (r *Record) Runs() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.run != nil && !r.run.over
}

// Ended is closed once the latest run is over; nil: none was seen.
func (r *Record) Ended() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.run == nil {
		return nil
	}
	return r.run.ended
}

// Why says how the run before ended.
func (r *Record) Why() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lastExit
}

// State is for people.
func (r *Record) State() lifecycle.State {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := lifecycle.State{Starts: r.starts, LastExit: r.lastExit}
	if r.run != nil {
		s.StartedAt = r.run.Started
		if !r.run.over {
			s.Running, s.PID = true, r.run.PID
		}
	}
	return s
}
