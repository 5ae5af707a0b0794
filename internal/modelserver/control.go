package modelserver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// order is what POST /control takes. All parts are optional and done in the
// order of the fields.
type order struct {
	// Faults changes those faults that it names. See Faults for the names.
	Faults json.RawMessage `json:"faults"`
	// Set changes options, by the words of the command line ("run", "vram", …):
	// those that SetOptions can change.
	Set map[string]string `json:"set"`
	// ResetStats forgets counters and log.
	ResetStats bool `json:"reset_stats"`
	// Kill ends the life after the answer: a server alone in its process takes
	// the process with it. With RestartAfter ("500ms") it ends too and starts
	// anew after that time, in the same process.
	Kill         bool   `json:"kill"`
	RestartAfter string `json:"restart_after"`
}

// Report is the answer of GET and POST /control.
type Report struct {
	Name   string        `json:"name"`
	Manner Manner        `json:"manner"`
	Stats  Stats         `json:"stats"`
	Faults Faults        `json:"faults"`
	Models []ModelReport `json:"models"`
	Events []Event       `json:"events,omitempty"` // with ?events=1
}

// ModelReport is one model in a Report.
type ModelReport struct {
	Name     string    `json:"name"`
	State    string    `json:"state"` // idle, loading, loaded, unloading
	Size     gpu.Bytes `json:"size"`
	Resident gpu.Bytes `json:"resident"`
	Users    int       `json:"users"`
}

func (p phase) String() string {
	return [...]string{"idle", "loading", "loaded", "unloading"}[p]
}

// Report is what GET /control answers.
func (s *Server) Report(events bool) Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := Report{Name: s.name, Manner: s.opts.Manner, Stats: s.snapshot(), Faults: s.faults.clone()}
	if !s.life.dead {
		for _, name := range slices.Sorted(maps.Keys(s.life.models)) {
			m := s.life.models[name]
			r.Models = append(r.Models, ModelReport{m.name, m.phase.String(), m.size, m.resident, m.users})
		}
	}
	if events {
		r.Events = slices.Clone(s.events)
	}
	return r
}

// control serves /control. It takes no turn and counts as no request.
func (l *life) control(w http.ResponseWriter, r *http.Request) {
	var after func()
	switch r.Method {
	case http.MethodGet:
	case http.MethodPost:
		var err error
		if after, err = l.obey(w, r); err != nil {
			writeError(w, http.StatusBadRequest, err.Error())
			return
		}
	default:
		writeError(w, http.StatusMethodNotAllowed, "want GET or POST")
		return
	}
	writeJSON(w, http.StatusOK, l.s.Report(r.URL.Query().Get("events") == "1"))
	if after != nil {
		_ = http.NewResponseController(w).Flush() // if it can't be told, it is told to die all the same
		after()
		panic(http.ErrAbortHandler)
	}
}

// obey does what the request orders. What is to be done once it is answered
// comes back as a function.
func (l *life) obey(w http.ResponseWriter, r *http.Request) (after func(), err error) {
	var o order
	if err := strict(http.MaxBytesReader(w, r.Body, 1<<20), &o); err != nil {
		return nil, fmt.Errorf("control: %w", err)
	}
	s := l.s
	faults := s.Faults()
	if len(o.Faults) > 0 {
		// Into a copy of what holds now: fields that aren't named stay.
		if err := strict(bytes.NewReader(o.Faults), &faults); err != nil {
			return nil, fmt.Errorf("control: faults: %w", err)
		}
	}
	opts := s.options()
	for key, value := range o.Set {
		if !slices.Contains(settable, key) {
			return nil, fmt.Errorf("control: set %q: want one of %s", key, strings.Join(settable, ", "))
		}
		if err := setOption(&opts, key, value); err != nil {
			return nil, fmt.Errorf("control: %w", err)
		}
	}
	var pause time.Duration
	if o.RestartAfter != "" {
		if pause, err = time.ParseDuration(o.RestartAfter); err != nil {
			return nil, fmt.Errorf("control: restart_after: %w", err)
		}
	}
	if len(o.Faults) > 0 {
		s.SetFaults(func(f *Faults) { *f = faults })
	}
	if len(o.Set) > 0 {
		s.SetOptions(func(old *Options) { *old = opts })
	}
	if o.ResetStats {
		s.ResetStats()
	}
	switch {
	case o.RestartAfter != "":
		return func() { l.reincarnate("killed by control", pause, s.options().Preloaded) }, nil
	case o.Kill:
		return func() { l.dieOf("killed by control") }, nil
	}
	return nil, nil
}

// reincarnate ends the life and has the server start anew after a pause. Each of
// loads reports whether with everything loaded; the next one is tried where that
// fails. If all fail the log says so and the server stays dead. No cause means
// that the life's end is no death.
func (l *life) reincarnate(cause string, pause time.Duration, loads ...bool) {
	s := l.s
	s.mu.Lock()
	if s.closed || l.dead {
		s.mu.Unlock()
		return
	}
	s.later.Add(1)
	s.mu.Unlock()
	l.die(cause)
	go func() {
		defer s.later.Done()
		timer := time.NewTimer(pause)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-s.ended:
			return
		}
		if !s.mayStart() {
			return
		}
		var err error
		for _, load := range loads {
			if err = s.restart("restarted", load); err == nil {
				break
			}
		}
		if err != nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.note(Event{Kind: EventDeath, Detail: err.Error()})
		}
	}()
}

// mayStart waits while HoldStart is set and reports whether the server is still
// to start then: not once it is closed.
func (s *Server) mayStart() bool {
	for {
		s.mu.Lock()
		hold, changed := s.faults.HoldStart, s.changed()
		s.mu.Unlock()
		if !hold {
			return true
		}
		select {
		case <-changed:
		case <-s.ended:
			return false
		}
	}
}

// strict decodes one JSON value and refuses unknown fields.
func strict(r io.Reader, into any) error {
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one JSON value")
	}
	return nil
}
