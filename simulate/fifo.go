package simulate

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// fifo serves strictly in the order of submission: nobody begins before all who
// came earlier have. A switch begins when the oldest job wants it: what must go drains, is unloaded, and the load
// follows. It goes through, though the job's client may leave meanwhile. It has the face of
// scheduler.State, knows what a load and an unload are, and nothing of priorities, budgets or fairness.
type fifo struct {
	cfg   scheduler.Config
	slots map[string]*fifoSlot
	order []*fifoSlot // as in the config
	free  map[int]gpu.Bytes

	queue  []*fifoJob // those that left are still in it, until they are at its head
	jobs   map[scheduler.JobID]*fifoJob
	lastID scheduler.JobID
	count  int // waiting jobs

	target  *fifoSlot   // what is being switched to, until its load begins
	leaving []*fifoSlot // what goes for it, one after another, each once its jobs are done

	effects []scheduler.Effect
}

type fifoSlot struct {
	scheduler.SlotConfig
	state   scheduler.SlotState // IDLE, LOADING, READY or STOPPING
	active  int
	lastUse time.Time
	epoch   uint64
}

type fifoJob struct {
	id   scheduler.JobID
	slot *fifoSlot
	over bool // it left, or ended
	runs bool
}

func newFIFO() *fifo {
	return &fifo{slots: map[string]*fifoSlot{}, free: map[int]gpu.Bytes{}, jobs: map[scheduler.JobID]*fifoJob{}}
}

// Step does what scheduler.State's does. It never wants to be woken.
func (q *fifo) Step(now time.Time, e scheduler.Event) ([]scheduler.Effect, time.Time) {
	q.effects = q.effects[:0]
	switch e := e.(type) {
	case scheduler.Configure:
		q.cfg = e.Config
		for _, c := range e.Config.Slots {
			s := &fifoSlot{SlotConfig: c, state: scheduler.Idle}
			if e.Config.Mode != scheduler.Evicting || c.Cloud {
				s.state = scheduler.Ready
			}
			q.slots[c.Name], q.order = s, append(q.order, s)
		}
	case scheduler.Sampled:
		for _, d := range e.Devices {
			q.free[d.Index] = d.Free
		}
	case scheduler.Submit:
		q.submit(e)
	case scheduler.Cancel:
		if j := q.jobs[e.Job]; j != nil && !j.runs {
			q.leave(j)
		}
	case scheduler.Release:
		if j := q.jobs[e.Job]; j != nil {
			j.slot.active--
			j.slot.lastUse = now
			delete(q.jobs, j.id)
		}
	case scheduler.LoadDone:
		if s := q.slots[e.Slot]; s.epoch == e.Epoch {
			s.state = scheduler.Ready
		}
	case scheduler.UnloadDone:
		if s := q.slots[e.Slot]; s.epoch == e.Epoch {
			s.state = scheduler.Idle
			q.effects = append(q.effects, scheduler.Effect{Kind: scheduler.Decided, Slot: s.Name, Decision: &scheduler.Decision{At: now, Kind: "evicted", Slot: s.Name}},
				scheduler.Effect{Kind: scheduler.LookNow, Slot: s.Name})
			return q.effects, time.Time{} // the look tells what is free
		}
	}
	for q.serveHead() {
	}
	return q.effects, time.Time{}
}

func (q *fifo) submit(e scheduler.Submit) {
	s := q.slots[e.Slot]
	switch {
	case s.Disabled:
		q.refuse(0, s, scheduler.NotRunning)
		return
	case q.count >= q.cfg.MaxQueue:
		q.refuse(0, s, scheduler.QueueFull)
		return
	}
	q.lastID++
	j := &fifoJob{id: q.lastID, slot: s}
	q.jobs[j.id] = j
	q.queue = append(q.queue, j)
	q.count++
	q.effects = append(q.effects, scheduler.Effect{Kind: scheduler.Queued, Job: j.id, Slot: s.Name})
}

func (q *fifo) refuse(job scheduler.JobID, s *fifoSlot, code scheduler.Code) {
	q.effects = append(q.effects, scheduler.Effect{Kind: scheduler.Refuse, Job: job, Slot: s.Name, Refusal: &scheduler.Refusal{Code: code, Message: string(code)}})
}

// leave takes a waiting job out.
func (q *fifo) leave(j *fifoJob) {
	j.over = true
	q.count--
	delete(q.jobs, j.id)
}

// serveHead does what can be done for the oldest job. It reports whether there is more to do now.
func (q *fifo) serveHead() bool {
	if !q.makeRoom() {
		return false
	}
	for len(q.queue) > 0 && q.queue[0].over {
		q.queue = q.queue[1:]
	}
	if len(q.queue) == 0 {
		return false
	}
	j := q.queue[0]
	s := j.slot
	switch {
	case s.state == scheduler.Ready:
		if !q.mayRun(s) {
			return false
		}
		q.queue = q.queue[1:]
		q.count--
		s.active++
		j.runs = true
		q.effects = append(q.effects, scheduler.Effect{Kind: scheduler.Admit, Job: j.id, Slot: s.Name})
		return true
	case q.moving(s):
		return false
	}
	if !q.fits(s, nil) {
		if q.leaving = q.victims(s); q.leaving == nil { // even were all gone that may go
			q.queue = q.queue[1:]
			q.leave(j)
			q.refuse(j.id, s, scheduler.NeverFits)
			return true
		}
	}
	q.target = s
	return true
}

// makeRoom goes on with the switch that is under way. It reports whether there is none any more.
func (q *fifo) makeRoom() bool {
	if q.target == nil {
		return true
	}
	for len(q.leaving) > 0 {
		switch v := q.leaving[0]; {
		case v.state == scheduler.Idle:
			q.leaving = q.leaving[1:]
			continue
		case v.state == scheduler.Ready && v.active == 0:
			v.state = scheduler.Stopping
			v.epoch++
			q.effects = append(q.effects, scheduler.Effect{Kind: scheduler.StartUnload, Slot: v.Name, Epoch: v.epoch})
		}
		return false
	}
	s := q.target
	s.state = scheduler.Loading
	s.epoch++
	q.effects = append(q.effects, scheduler.Effect{Kind: scheduler.Load, Slot: s.Name, Epoch: s.epoch})
	q.target = nil
	return true
}

// mayRun reports whether the slot has a place, and the lock.
func (q *fifo) mayRun(s *fifoSlot) bool {
	switch {
	case q.cfg.Mode == scheduler.Passthrough, s.Cloud:
		return true
	case s.active >= s.Concurrency:
		return false
	case s.LockNone:
		return true
	}
	for _, o := range q.order {
		if o != s && o.active > 0 && !o.LockNone && (q.cfg.LockGlobal || s.meets(o)) {
			return false
		}
	}
	return true
}

// meets reports whether two slots are on a GPU in common.
func (s *fifoSlot) meets(o *fifoSlot) bool {
	return slices.ContainsFunc(s.GPUs, func(i int) bool { return slices.Contains(o.GPUs, i) })
}

// conflicts reports whether two slots may not be loaded together.
func (s *fifoSlot) conflicts(o *fifoSlot) bool {
	return slices.Contains(s.Conflicts, o.Name) || slices.Contains(o.Conflicts, s.Name)
}

// moving reports whether something is loaded or unloaded that the slot has to wait for.
func (q *fifo) moving(s *fifoSlot) bool {
	for _, o := range q.order {
		if (o.state == scheduler.Loading || o.state == scheduler.Stopping) && (o.meets(s) || o.conflicts(s)) {
			return true
		}
	}
	return false
}

// fits reports whether the slot fits, once some others are gone.
func (q *fifo) fits(s *fifoSlot, gone []*fifoSlot) bool {
	for _, o := range q.order {
		if o.state != scheduler.Idle && o != s && s.conflicts(o) && !slices.Contains(gone, o) {
			return false
		}
	}
	cushion := config.DefaultCushion
	if q.cfg.Cushion != nil {
		cushion = *q.cfg.Cushion
	}
	for _, i := range s.GPUs {
		free := q.free[i] - q.cfg.Reserve
		for _, v := range gone {
			if slices.Contains(v.GPUs, i) {
				free += claimOn(&v.SlotConfig)
			}
		}
		if claimOn(&s.SlotConfig)+cushion > free {
			return false
		}
	}
	return true
}

// victims are the slots that must go so that s fits: the least recently used ones, without those that turn out
// not to be needed. Those that compute come last. nil: all together are not enough.
func (q *fifo) victims(s *fifoSlot) []*fifoSlot {
	var all []*fifoSlot
	for _, o := range q.order {
		if o != s && o.state == scheduler.Ready && (o.meets(s) || o.conflicts(s)) && !o.Pin && !o.NoEvict && !o.VRAMManaged && o.CanUnload && !slices.Contains(s.Coexist, o.Name) {
			all = append(all, o)
		}
	}
	slices.SortStableFunc(all, func(a, b *fifoSlot) int {
		return cmp.Or(min(a.active, 1)-min(b.active, 1), a.lastUse.Compare(b.lastUse))
	})
	for i := range all {
		if !q.fits(s, all[:i+1]) {
			continue
		}
		chosen := all[:i+1]
		for k := len(chosen) - 2; k >= 0; k-- {
			if rest := slices.Delete(slices.Clone(chosen), k, k+1); q.fits(s, rest) {
				chosen = rest
			}
		}
		return chosen
	}
	return nil
}
