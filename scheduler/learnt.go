package scheduler

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Learnt is what was found out about a slot that is worth keeping over a restart (spec §10.5).
type Learnt struct {
	LoadCost     time.Duration // mean of its measured load times; 0: none was
	UnloadCost   time.Duration
	LastUse      time.Time
	LastPriority int
	Footprints   []gpu.Bytes // what its latest loads took, oldest first
}

// maxPast bounds the slots that are remembered though they are not there.
const maxPast = 256

// Learnt is what is known of all slots, those from before included, by name.
func (s *State) Learnt() map[string]Learnt {
	out := maps.Clone(s.past)
	if out == nil {
		out = map[string]Learnt{}
	}
	for _, sl := range s.slots {
		if l, known := sl.learnt(); known {
			out[sl.cfg.Name] = l
		}
	}
	return out
}

func (sl *slot) learnt() (l Learnt, known bool) {
	l = Learnt{LoadCost: sl.loadCost.value, UnloadCost: sl.stopCost.value, LastUse: sl.lastUse, LastPriority: sl.lastPrio}
	l.Footprints = sl.footprints().latest
	return l, !sl.cfg.TurnOnly && (l.LoadCost > 0 || l.UnloadCost > 0 || !l.LastUse.IsZero() || len(l.Footprints) > 0)
}

// footprints returns what the slot's loads took, the present one included if it takes more than they did.
func (sl *slot) footprints() footprint {
	f := footprint{latest: slices.Clone(sl.took.latest)}
	if peak := sl.peak(); sl.state == Ready && peak > f.measured() {
		f.add(peak)
	}
	return f
}

// recallAll takes in what was known before. It copies one by one: a clone would
// make all events, those of the warm path too, escape to the heap.
func (s *State) recallAll(learnt map[string]Learnt) {
	s.past = make(map[string]Learnt, len(learnt))
	for name, l := range learnt {
		s.past[name] = l
	}
}

// recall gives a new slot what was known of its name.
func (s *State) recall(now time.Time, sl *slot) {
	l, known := s.past[sl.cfg.Name]
	if !known {
		return
	}
	delete(s.past, sl.cfg.Name)
	sl.loadCost = ewma{value: l.LoadCost, known: l.LoadCost > 0}
	sl.stopCost = ewma{value: l.UnloadCost, known: l.UnloadCost > 0}
	sl.lastPrio, sl.recalled = l.LastPriority, !l.LastUse.IsZero()
	if sl.lastUse = l.LastUse; sl.lastUse.After(now) { // the clock was set back
		sl.lastUse = now
	}
	sl.took = footprint{latest: slices.Clone(l.Footprints[max(0, len(l.Footprints)-maxFootprints):])}
}

// remember keeps what is known of a slot that goes.
func (s *State) remember(sl *slot) {
	l, known := sl.learnt()
	if !known {
		return
	}
	if s.past == nil {
		s.past = map[string]Learnt{}
	}
	s.past[sl.cfg.Name] = l
	s.forget()
}

// forget keeps what is remembered within its bound: those that were not used for longest go.
func (s *State) forget() {
	if len(s.past) <= maxPast {
		return
	}
	oldest := slices.SortedFunc(maps.Keys(s.past), func(a, b string) int {
		return cmp.Or(s.past[a].LastUse.Compare(s.past[b].LastUse), cmp.Compare(a, b))
	})
	for _, name := range oldest[:len(oldest)-maxPast] {
		delete(s.past, name)
	}
}

// footprint is what a slot's loads took, as far as it was seen.
type footprint struct {
	latest []gpu.Bytes // oldest first
}

// maxFootprints is how many are kept: older ones say little about the next.
const maxFootprints = 32

func (f *footprint) add(taken gpu.Bytes) {
	if taken <= 0 {
		return
	}
	if len(f.latest) == maxFootprints {
		f.latest = slices.Delete(f.latest, 0, 1)
	}
	f.latest = append(f.latest, taken)
}

// measured is the 95th percentile of what loads took; 0: nothing was seen.
func (f footprint) measured() gpu.Bytes {
	if len(f.latest) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(f.latest))
	return sorted[(len(sorted)*95+99)/100-1]
}
