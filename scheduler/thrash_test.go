package scheduler

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// shop is honest servers: loads take 3 s, unloads 1 s, jobs 2 s. All slots are of the same size.
type shop struct {
	f       *fixture
	size    gpu.Bytes
	ends    map[JobID]time.Time  // of jobs
	due     map[string]time.Time // of loads and unloads
	started []*handle
}

func opened(f *fixture, size gpu.Bytes) *shop {
	return &shop{f: f, size: size, ends: map[JobID]time.Time{}, due: map[string]time.Time{}}
}

// work lets them work for a while.
func (p *shop) work(d time.Duration) {
	f := p.f
	f.t.Helper()
	for end := f.now.Add(d); ; {
		next := p.plan(end)
		f.advance(next.Sub(f.now))
		done := p.finish()
		if !done && !f.now.Before(end) {
			return
		}
	}
}

// plan notes what has begun, and says when the next of all that ends.
func (p *shop) plan(next time.Time) time.Time {
	f := p.f
	for _, v := range f.s.Snapshot(f.now).Slots {
		if _, known := p.due[v.Name]; !known && v.State == Loading {
			p.due[v.Name] = f.now.Add(3 * time.Second)
		} else if !known && v.State == Stopping {
			p.due[v.Name] = f.now.Add(time.Second)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(f.jobs)) {
		if h := f.jobs[id]; h.running && p.ends[id].IsZero() {
			p.ends[id] = f.now.Add(2 * time.Second)
			p.started = append(p.started, h)
		}
	}
	for _, at := range p.due {
		next = earlier(next, at)
	}
	for id, at := range p.ends {
		if f.jobs[id].running {
			next = earlier(next, at)
		}
	}
	if !f.wake.IsZero() { // what it does then may end sooner
		next = later(f.now, earlier(next, f.wake))
	}
	return next
}

// finish ends what is due, one thing at a time.
func (p *shop) finish() bool {
	f := p.f
	for _, name := range slices.Sorted(maps.Keys(p.due)) {
		if f.now.Before(p.due[name]) {
			continue
		}
		delete(p.due, name)
		if f.slot(name).State == Loading {
			f.use(p.size)
			f.loaded(name)
		} else {
			f.evicted(name, p.size)
		}
		return true
	}
	for _, id := range slices.Sorted(maps.Keys(p.ends)) {
		if h := f.jobs[id]; h.running && !f.now.Before(p.ends[id]) {
			f.release(h)
			return true
		}
	}
	return false
}

func (p *shop) served(h *handle) bool { return slices.Contains(p.started, h) }

func TestFC24_FiveRequestsForThreeModelsNeedThreeLoads(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000), server("c", 10000))
	p := opened(f, 10000)
	for _, name := range []string{"a", "b", "a", "a", "c"} {
		f.submit(name)
		p.work(100 * time.Millisecond)
	}
	p.work(time.Hour)
	var order []string
	for _, h := range p.started {
		order = append(order, h.slot)
	}
	require.Equal(t, []string{"a", "a", "a", "b", "c"}, order)
	f.requireLoads("a", "b", "c")
	f.requireUnloads("a", "b")
}

// The same, and then a goes on being asked for without a pause.
func TestFC24_ARareModelIsPassedOnlyByWhatCameWithinItsBound(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000), server("c", 10000))
	p := opened(f, 10000)
	for _, name := range []string{"a", "b", "a", "a"} {
		f.submit(name)
	}
	c, began := f.submit("c"), f.now
	came := map[*handle]time.Time{}
	for range 300 {
		p.work(1900 * time.Millisecond) // a job takes two seconds: there is always one that waits
		if p.served(c) {
			break
		}
		came[f.submit("a")] = f.now
	}
	require.True(t, p.served(c))
	const bound = 15 * 20 * time.Second
	passed := 0
	for _, h := range p.started {
		if at, later := came[h]; later {
			require.LessOrEqual(t, at.Sub(began), bound, "c is passed by what came within its bound only")
			passed++
		}
	}
	require.Greater(t, passed, 100)
	f.requireLoads("a", "b", "c")
	require.LessOrEqual(t, f.now.Sub(began), bound+40*time.Second, "the bound, the twelve of a that wait by then, and two switches")
}

// One request chain needs two models, one after the other, and one of them fits.
func chain(t *testing.T, slots ...SlotConfig) (f *fixture, refused int) {
	f = given(t, 16384, slots...)
	p := opened(f, 10000)
	unloads := 0
	for i := range 40 {
		h := f.submit([]string{"a", "b"}[i%2])
		for end := f.now.Add(time.Hour); h.refusal == nil && !p.served(h); p.work(50 * time.Millisecond) {
			require.True(t, f.now.Before(end), "it waits for ever")
			if len(f.unloads) > unloads {
				v := f.slot(f.unloads[unloads])
				require.GreaterOrEqual(t, f.decided("unload", v.Name).At.Sub(v.IdleAt), v.Switch/4, "the hold of %s", v.Name)
				unloads++
			}
		}
		p.work(2 * time.Second) // the answer
		if h.refusal != nil {
			refused++
		}
	}
	return f, refused
}

func TestFC27_TwoThatAlternateAreSwappedOnlyAfterTheHold(t *testing.T) {
	f, refused := chain(t, server("a", 10000), server("b", 10000))
	require.Zero(t, refused)
	require.Len(t, f.loads, 40)
	require.Len(t, f.unloads, 39)
}

func TestFC27_APinEndsTheSwapping(t *testing.T) {
	f, refused := chain(t, server("a", 10000, pinned), server("b", 10000))
	f.requireLoads("a")
	f.requireUnloads()
	require.Equal(t, 20, refused, "b can't be served beside it")
}
