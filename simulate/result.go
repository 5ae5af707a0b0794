package simulate

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Result is what became of a trace under a policy. Times are in seconds.
type Result struct {
	Policy    Policy  `json:"policy"`
	Loads     int     `json:"loads"`
	Evictions int     `json:"evictions"`
	Seconds   float64 `json:"seconds"` // from the beginning of the trace to the end of the last job
	// Share of that time in which GPUs computed, and in which models were loaded or unloaded, mean over the GPUs.
	Busy      float64 `json:"busy"`
	Switching float64 `json:"switching"`

	All        Group   `json:"all"`
	Consumers  []Group `json:"consumers"`            // in the order of the config; only those with requests
	Priorities []Group `json:"priorities,omitempty"` // most urgent first; only if there are several

	Unfinished int    `json:"unfinished,omitempty"` // requests that were left when the run was stopped
	Limit      *Limit `json:"limit,omitempty"`      // see FindLimit; nil: it was not looked for
}

// Group is what became of some of the requests.
type Group struct {
	Name     string  `json:"name,omitempty"`
	Priority int     `json:"priority,omitempty"`
	Requests int     `json:"requests"`
	Served   int     `json:"served"`
	Share    float64 `json:"share_served"` // 1 if there were no requests
	Loads    int     `json:"loads,omitempty"`
	Wait     Waits   `json:"wait"`
}

// Waits are the times, in seconds, from the first submission of those who were served to their beginning.
type Waits struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
}

func (r *run) result() *Result {
	out := &Result{Policy: r.o.Policy, Evictions: r.unloads, Seconds: r.now.Seconds(), Unfinished: r.open + len(r.requests) - r.sent}
	for _, c := range r.cards {
		if r.now > 0 {
			out.Busy += c.busy.Seconds() / r.now.Seconds() / float64(len(r.cards))
			out.Switching += c.switching.Seconds() / r.now.Seconds() / float64(len(r.cards))
		}
	}
	out.All = r.group(func(*task) bool { return true })
	for i, s := range r.servers {
		out.Loads += s.loads
		g := r.group(func(t *task) bool { return t.consumer == i })
		g.Name, g.Loads = s.Slot.Name, s.loads
		if g.Requests > 0 {
			out.Consumers = append(out.Consumers, g)
		}
	}
	out.All.Loads = out.Loads
	var priorities []int
	for i := range r.tasks {
		if at, found := slices.BinarySearch(priorities, r.tasks[i].priority); !found {
			priorities = slices.Insert(priorities, at, r.tasks[i].priority)
		}
	}
	if len(priorities) > 1 {
		for _, p := range priorities {
			g := r.group(func(t *task) bool { return t.priority == p })
			g.Priority = p
			out.Priorities = append(out.Priorities, g)
		}
	}
	return out
}

func (r *run) group(in func(*task) bool) Group {
	g := Group{Share: 1}
	var waits []time.Duration
	for i := range r.tasks {
		t := &r.tasks[i]
		if !in(t) {
			continue
		}
		g.Requests++
		if t.state == isServed {
			g.Served++
			waits = append(waits, t.wait)
		}
	}
	if g.Requests > 0 {
		g.Share = float64(g.Served) / float64(g.Requests)
	}
	g.Wait = waitsOf(waits)
	return g
}

// waitsOf sorts the waits, and says what people want to know of them.
func waitsOf(waits []time.Duration) Waits {
	if len(waits) == 0 {
		return Waits{}
	}
	slices.Sort(waits)
	var sum float64
	for _, w := range waits {
		sum += w.Seconds()
	}
	at := func(share float64) float64 {
		return waits[max(0, int(math.Ceil(share*float64(len(waits))))-1)].Seconds()
	}
	return Waits{Mean: sum / float64(len(waits)), P50: at(.5), P95: at(.95), P99: at(.99), Max: at(1)}
}

// Worst is the group of the consumer of which the smallest share was served.
func (r *Result) Worst() Group {
	if len(r.Consumers) == 0 {
		return r.All
	}
	return slices.MinFunc(r.Consumers, func(a, b Group) int { return cmp.Compare(a.Share, b.Share) })
}
