package simulate

import (
	"context"
	"math"
	"time"
)

// Limit is how much of a trace's load a policy sustains.
type Limit struct {
	// The trace may come so many times as fast. 0: it may not even come 64 times as slowly.
	Multiple float64 `json:"multiple"`
	// More may be sustained: the time for the search was over, or the trace is too short to tell.
	AtLeast bool `json:"at_least,omitempty"`
}

// What counts as sustained: so much is served, and what is left when the last request has come is done soon.
const (
	servedEnough = .95
	leftover     = 20 // a part of the trace's length
	atLeastLeft  = 2 * time.Minute
)

// precise is how near a limit is found.
const precise = 1.03

// FindLimit looks for the highest multiple of a trace's load that a policy
// still sustains: at least 95 % of the requests are served, and when the last has come, no
// more is left than can be done in a twentieth of the trace's length (or two minutes, beside the longest
// request). It halves the interval until it is 3 % wide. At the end of ctx it tells what it has found by then.
func FindLimit(ctx context.Context, w *World, requests []Request, o Options) (Limit, error) {
	length, longest := time.Duration(0), time.Duration(0)
	for _, q := range requests {
		length, longest = max(length, q.At), max(longest, q.Service)
	}
	sustains := func(speed float64) (bool, error) {
		o.Speed = speed
		o.StopAfter = max(time.Duration(float64(length)/speed/leftover), atLeastLeft+longest)
		r, err := Run(ctx, w, requests, o)
		return err == nil && r.Unfinished == 0 && r.All.Share >= servedEnough, err
	}
	low, high := 0., 1.
	for speed := 1.; speed >= 1./64; speed /= 2 {
		switch ok, err := sustains(speed); {
		case err != nil && ctx.Err() != nil:
			return Limit{AtLeast: true}, nil
		case err != nil:
			return Limit{}, err
		case ok:
			low = speed
		default:
			high = speed
			continue
		}
		break
	}
	if low == 0 {
		return Limit{}, nil
	}
	found := low < 1 // something that is not sustained
	if low == 1 {
		high = max(1.1*capacity(w, requests, length), precise)
	}
	for high/low > precise {
		middle := math.Sqrt(low * high)
		switch ok, err := sustains(middle); {
		case err != nil && ctx.Err() != nil:
			return Limit{Multiple: low, AtLeast: true}, nil
		case err != nil:
			return Limit{}, err
		case ok:
			low = middle
		default:
			high, found = middle, true
		}
	}
	return Limit{Multiple: low, AtLeast: !found}, nil
}

// capacity is the multiple of the trace at which some GPU would compute all the time, were nothing ever loaded.
func capacity(w *World, requests []Request, length time.Duration) float64 {
	least := math.Inf(1)
	for _, work := range workOf(w, requests) {
		if work > 0 {
			least = min(least, length.Seconds()/work)
		}
	}
	if math.IsInf(least, 1) { // nothing takes any time
		return 1
	}
	return least
}

// workOf is how many seconds each GPU would compute for a trace. Jobs of one server that may run side by side are taken to do so.
func workOf(w *World, requests []Request) []float64 {
	out := make([]float64, len(w.GPUs))
	slots := map[string]int{}
	for i, c := range w.Consumers {
		slots[c.Slot.Name] = i
	}
	for _, q := range requests {
		slot := &w.Consumers[slots[q.Consumer]].Slot
		s := q.Service.Seconds()
		for _, f := range q.Then {
			s += f.Service.Seconds()
		}
		for _, i := range slot.GPUs {
			out[i] += s / float64(max(1, slot.Concurrency))
		}
	}
	return out
}
