package modelserver

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Bounds of what a server remembers.
const (
	maxEvents = 20000
	maxPaths  = 1000
)

// Stats is what a server has counted since Start; a Kill doesn't reset it.
type Stats struct {
	Loads        int `json:"loads"`         // done
	LoadsStarted int `json:"loads_started"` // includes those that failed
	LoadsFailed  int `json:"loads_failed"`
	Unloads      int `json:"unloads"`      // done: it says that it is unloaded (a lie counts)
	UnloadCalls  int `json:"unload_calls"` // asked for
	OOMs         int `json:"ooms"`         // loads that would have overfilled the GPU
	Spills       int `json:"spills"`       // loads that took less than the model's size
	Deaths       int `json:"deaths"`       // by Kill or by a fault

	// UnloadsWhileBusy counts unloads that a server which doesn't wait for
	// running work began under it, which breaks that work.
	UnloadsWhileBusy int `json:"unloads_while_busy"`
	// WokenByProbe counts loads of which a mere question about the state was the cause.
	WokenByProbe int `json:"woken_by_probe"`

	Requests      map[string]int `json:"requests"` // by path
	HealthProbes  int            `json:"health_probes"`
	InFlight      int            `json:"in_flight"`      // requests inside, health probes too
	Working       int            `json:"working"`        // pieces of work that run now
	Worked        int            `json:"worked"`         // pieces of work done to the end
	Aborted       int            `json:"aborted"`        // pieces of work that a departed client or a death ended
	MaxConcurrent int            `json:"max_concurrent"` // most pieces of work at once

	Loaded  bool      `json:"loaded"`  // any model, in the server's own words
	Held    gpu.Bytes `json:"held"`    // what it really holds on the GPU
	Queue   int       `json:"queue"`   // running and waiting jobs of a server that answers before they are done
	Sockets int       `json:"sockets"` // ComfyUI: open websockets
	Alive   bool      `json:"alive"`
}

// The kinds of Event.
const (
	EventStart        = "start"
	EventDeath        = "death"
	EventRequestStart = "request_start"
	EventRequestEnd   = "request_end"
	EventWorkStart    = "work_start"
	EventWorkEnd      = "work_end"
	EventWorkAbort    = "work_abort"
	EventLoadStart    = "load_start"
	EventLoadEnd      = "load_end"
	EventLoadFail     = "load_fail"
	EventUnloadCall   = "unload_call"
	EventUnloadStart  = "unload_start"
	EventUnloadEnd    = "unload_end"
	EventMemory       = "memory" // Held changed
)

// Event is one line of a server's log.
type Event struct {
	Seq    int       `json:"seq"`
	At     time.Time `json:"at"`
	Kind   string    `json:"kind"`
	ID     int       `json:"id,omitempty"`  // ties the events of one request or prompt together
	Tag    string    `json:"tag,omitempty"` // the request's X-Tag header
	Method string    `json:"method,omitempty"`
	URI    string    `json:"uri,omitempty"` // path and query as received
	Model  string    `json:"model,omitempty"`
	Held   gpu.Bytes `json:"held,omitempty"`
	Detail string    `json:"detail,omitempty"`
}

// Stats is a snapshot.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.snapshot()
}

// Events is a copy of the log, oldest first. It keeps the newest 20,000.
func (s *Server) Events() []Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.events)
}

// ResetStats forgets counters and log. What runs now stays counted.
func (s *Server) ResetStats() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats = Stats{
		Requests: map[string]int{}, InFlight: s.stats.InFlight, Working: s.stats.Working,
		MaxConcurrent: s.stats.Working, Held: s.stats.Held, Sockets: s.stats.Sockets,
	}
	s.events = nil
	s.notify()
}

// WaitFor returns nil once cond holds of the stats. It looks anew at every
// change, without polling, and fails when ctx ends.
func (s *Server) WaitFor(ctx context.Context, cond func(Stats) bool) error {
	for {
		s.mu.Lock()
		now := s.snapshot()
		changed := s.changed()
		s.mu.Unlock()
		if cond(now) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("server %s: waited in vain (%w); its stats: %+v", s.name, ctx.Err(), now)
		}
	}
}

// WaitForEvent returns the first event that cond accepts, waiting for it if it
// isn't in the log yet.
func (s *Server) WaitForEvent(ctx context.Context, cond func(Event) bool) (Event, error) {
	next := 0
	for {
		s.mu.Lock()
		log := s.events
		changed := s.changed()
		s.mu.Unlock()
		for _, e := range log {
			if e.Seq >= next {
				next = e.Seq + 1
				if cond(e) {
					return e, nil
				}
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return Event{}, fmt.Errorf("server %s: waited in vain for an event (%w); seen %d", s.name, ctx.Err(), len(log))
		}
	}
}

// Overlap looks for two servers that worked at the same moment and describes
// the first such pair; empty if there is none. Work that hasn't ended counts
// until now.
func Overlap(servers ...*Server) string {
	type span struct {
		server     string
		start, end time.Time
	}
	var spans []span
	for _, s := range servers {
		open := map[int]int{}
		for _, e := range s.Events() {
			switch e.Kind {
			case EventWorkStart:
				open[e.ID] = len(spans)
				spans = append(spans, span{s.name, e.At, time.Now()})
			case EventWorkEnd, EventWorkAbort:
				if i, ok := open[e.ID]; ok {
					spans[i].end = e.At
					delete(open, e.ID)
				}
			}
		}
	}
	slices.SortFunc(spans, func(a, b span) int { return a.start.Compare(b.start) })
	latest := map[string]time.Time{}
	for _, sp := range spans {
		for other, end := range latest {
			if other != sp.server && sp.start.Before(end) {
				return fmt.Sprintf("%s began to work %s before %s had ended", sp.server, end.Sub(sp.start), other)
			}
		}
		if sp.end.After(latest[sp.server]) {
			latest[sp.server] = sp.end
		}
	}
	return ""
}

// snapshot is for holders of mu.
func (s *Server) snapshot() Stats {
	out := s.stats
	out.Requests = maps.Clone(s.stats.Requests)
	if l := s.life; l != nil && !l.gone {
		out.Alive = true
	}
	if l := s.life; l != nil && !l.dead {
		for _, m := range l.models {
			out.Loaded = out.Loaded || m.saysLoaded()
		}
		if l.queue != nil {
			out.Queue = l.queue.remaining()
		}
	}
	return out
}

// changed is closed at the next change. For holders of mu.
func (s *Server) changed() <-chan struct{} {
	if s.change == nil {
		s.change = make(chan struct{})
	}
	return s.change
}

// notify wakes all who wait for a change. For holders of mu.
func (s *Server) notify() {
	if s.change != nil {
		close(s.change)
		s.change = nil
	}
}

// note logs an event and wakes the waiters. For holders of mu.
func (s *Server) note(e Event) {
	s.seq++
	e.Seq, e.At = s.seq, time.Now()
	if len(s.events) >= maxEvents {
		// A fresh slice, so that copies handed out stay as they are.
		s.events = slices.Clone(s.events[maxEvents/10:])
	}
	s.events = append(s.events, e)
	s.notify()
}

// countPath counts a request; the number of paths is bounded. For holders of mu.
func (s *Server) countPath(path string) {
	if _, ok := s.stats.Requests[path]; !ok && len(s.stats.Requests) >= maxPaths {
		path = "(others)"
	}
	s.stats.Requests[path]++
}
