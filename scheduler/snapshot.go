package scheduler

import (
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Snapshot is a copy of what people may see of the state.
type Snapshot struct {
	GPUs     []GPUView
	Slots    []SlotView
	Queue    []WaiterView // in the order of (priority, submitted at)
	Oldest   time.Time    // when the oldest of all that wait was submitted, listed or not; zero: nobody waits
	Waiting  int
	Running  int
	Counts   Counts
	Draining bool
	Degraded string // why there is no telemetry; empty: there is
}

// GPUView is one GPU.
type GPUView struct {
	Device
	Used          gpu.Bytes
	Outsiders     gpu.Bytes
	Booked        gpu.Bytes
	Overcommitted bool
	Owner         string // who holds the lock
	SeenAt        time.Time
	LentUntil     time.Time // zero: it is not lent
}

// SlotView is one slot.
type SlotView struct {
	Name      string
	Disabled  bool
	Gone      bool
	State     SlotState
	GateOpen  bool
	DrainFor  string
	Health    string // unknown, healthy, unhealthy
	Detail    string
	Active    int
	Held      int
	Waiting   int
	Why       string
	Claim     gpu.Bytes
	ClaimSeen bool // Claim is what was seen lately, which is more than the configuration says
	Holds     []HoldView
	LastUse   time.Time
	ReadyAt   time.Time
	IdleAt    time.Time
	LastPrio  int
	HasPrio   bool // LastPrio is that of a job: 0 is the most urgent, and what it is before the first
	Pinned    bool
	Draining  bool
	UnloadAt  time.Time // when it will be unloaded if nobody uses it; zero: it won't
	Measured  gpu.Bytes // 95th percentile of what its loads took; 0: not seen
	CoolUntil time.Time
	Switch    time.Duration
	CanUnload bool
	CanLoad   bool
	TurnOnly  bool // it only takes turns: see SlotConfig
}

// HoldView is what a slot holds of one GPU.
type HoldView struct {
	GPU     int
	Booking gpu.Bytes
	Seen    gpu.Bytes
	Residue gpu.Bytes
}

// WaiterView is one waiting job.
type WaiterView struct {
	Job       JobID
	Slot      string
	Client    string
	Priority  int
	Submitted time.Time
	Position  int           // 1 is next, as far as (priority, submitted at) tells
	Estimate  time.Duration // until it runs; -1: not known
	Why       string
}

// snapshotQueue bounds the waiters that a snapshot lists.
const snapshotQueue = 100

// Snapshot copies what people may see. It changes nothing.
func (s *State) Snapshot(now time.Time) Snapshot {
	out := Snapshot{Degraded: s.blind, Waiting: s.waiting, Running: s.running, Counts: s.counts, Draining: s.draining || s.ending}
	for _, c := range s.gpus {
		sh := s.sheet(c, nil)
		l := sh.account()
		v := GPUView{Device: c.Device, Used: l.Used, Outsiders: l.Outsiders, Booked: l.Booked,
			Overcommitted: l.Booked > c.Total-s.cfg.Reserve, Owner: name(s.owner(c.Index)), SeenAt: c.seenAt, LentUntil: c.lentUntil}
		if !c.Known && !c.Lost {
			out.Degraded = orElse(c.Reason, "no telemetry")
			v.Free = c.Total - l.Booked
		}
		out.GPUs = append(out.GPUs, v)
	}
	for _, sl := range s.slots {
		out.Slots = append(out.Slots, s.view(sl))
	}
	out.Queue, out.Oldest = s.viewQueue(now), s.oldest()
	return out
}

// Running is how many admitted jobs have not ended.
func (s *State) Running() int { return s.running }

// Slot is what people may see of one slot.
func (s *State) Slot(name string) (SlotView, bool) {
	sl := s.named[name]
	if sl == nil {
		return SlotView{}, false
	}
	return s.view(sl), true
}

// Pinned reports whether a slot is pinned now, by its configuration or by hand.
func (s *State) Pinned(name string) bool {
	sl := s.named[name]
	return sl != nil && sl.pinned()
}

func (s *State) view(sl *slot) SlotView {
	v := SlotView{Name: sl.cfg.Name, Disabled: sl.cfg.Disabled, Gone: sl.gone, State: sl.state, GateOpen: !sl.gate.closed, DrainFor: name(sl.gate.target),
		Health: [...]string{"unknown", "healthy", "unhealthy"}[sl.health], Detail: sl.detail, Active: sl.active, Held: sl.held,
		Waiting: sl.queue.count + sl.parked, Why: s.reason(sl), LastUse: sl.lastUse, ReadyAt: sl.readyAt, IdleAt: sl.idleAt, LastPrio: sl.lastPrio, HasPrio: sl.busy() || sl.runCost.known || sl.lastPrio != 0 || sl.recalled,
		Pinned: sl.pinned(), CoolUntil: sl.coolUntil, Switch: sl.switchCost(), CanUnload: sl.cfg.CanUnload, CanLoad: sl.cfg.CanLoad, TurnOnly: sl.cfg.TurnOnly,
		Draining: s.draining || s.ending || sl.draining, Measured: sl.footprints().measured()}
	v.Claim, v.ClaimSeen = sl.totalClaim()
	if s.idles(sl) && s.cfg.IdleUnload == IdleOn && !sl.gate.closed {
		v.UnloadAt = s.idleEnd(sl)
	}
	for _, h := range sl.on {
		e := Entry{State: sl.state, Booking: h.booking, Residue: h.residue}
		hv := HoldView{GPU: h.card, Booking: e.booked(), Residue: h.residue}
		if c := s.card(h.card); c != nil {
			l, i := s.ledger(c, sl)
			hv.Seen = l.Seen[i]
		}
		v.Holds = append(v.Holds, hv)
	}
	return v
}

// viewQueue merges the slots' queues by (priority, submitted at), up to a bound.
func (s *State) viewQueue(now time.Time) []WaiterView {
	var heads []*job
	for _, sl := range s.slots {
		for i := range sl.queue.levels {
			heads = append(heads, sl.queue.levels[i].first)
		}
	}
	before := map[*slot]int{} // how many of a slot were listed already
	reasons := map[*slot]string{}
	var out []WaiterView
	for len(heads) > 0 && len(out) < snapshotQueue {
		first := 0
		for i := range heads {
			if order(heads[i], heads[first]) < 0 {
				first = i
			}
		}
		j := heads[first]
		if before[j.slot] == 0 {
			reasons[j.slot] = s.reason(j.slot)
		}
		out = append(out, WaiterView{Job: j.id, Slot: j.slot.cfg.Name, Client: j.client, Priority: j.priority, Submitted: j.submitted,
			Position: len(out) + 1, Estimate: s.estimate(now, j.slot, before[j.slot]), Why: reasons[j.slot]})
		before[j.slot]++
		if heads[first] = j.next; j.next == nil {
			heads = append(heads[:first], heads[first+1:]...)
		}
	}
	for _, client := range s.resting.clients() {
		for _, j := range s.resting.parked[client] {
			if len(out) < snapshotQueue {
				out = append(out, WaiterView{Job: j.id, Slot: j.slot.cfg.Name, Client: j.client, Priority: j.priority, Submitted: j.submitted,
					Position: len(out) + 1, Estimate: -1, Why: coolingReason})
			}
		}
	}
	return out
}

// oldest is the earliest submission among all that wait; zero: nobody does.
func (s *State) oldest() (at time.Time) {
	for _, sl := range s.slots {
		if first, ok := sl.queue.oldest(anyPriority); ok {
			at = earlier(at, first)
		}
	}
	for _, jobs := range s.resting.parked {
		for _, j := range jobs {
			at = earlier(at, j.submitted)
		}
	}
	return at
}

// estimate is how long a job may still wait that has so many before it on its
// slot; -1: nothing is known that would tell. It takes the time of what has to happen first from
// what was measured: the policy's bound, the load, and the jobs before it.
func (s *State) estimate(now time.Time, sl *slot, ahead int) time.Duration {
	if sl.health != healthGood || sl.lent || !sl.want.blocked.IsZero() {
		return -1
	}
	var wait time.Duration
	switch sl.state {
	case Ready:
		if sl.gate.closed {
			return -1
		}
	case Loading:
		wait = max(0, sl.loadAt.Add(sl.loadTime()).Sub(now))
	default:
		wait = sl.loadTime()
		if !s.fits(sl) {
			wait += max(0, sl.ageStart().Add(s.bound(sl)).Sub(now))
		}
	}
	if ahead += sl.active; ahead > 0 {
		if !sl.runCost.known {
			return -1
		}
		wait += time.Duration(int64(ahead/max(1, sl.cfg.Concurrency))) * sl.runCost.value
	}
	return wait
}

// loadTime is how long a load of the slot takes, as far as is known.
func (sl *slot) loadTime() time.Duration {
	if sl.loadCost.known {
		return sl.loadCost.value
	}
	return sl.switchCost()
}
