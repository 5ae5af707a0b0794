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
	Holds     []HoldView
	LastUse   time.Time
	ReadyAt   time.Time
	IdleAt    time.Time
	LastPrio  int
	Pinned    bool
	Draining  bool
	UnloadAt  time.Time // when it will be unloaded if nobody uses it; zero: it won't
	Measured  gpu.Bytes // 95th percentile of what its loads took; 0: not seen
	CoolUntil time.Time
	Switch    time.Duration
	CanUnload bool
	CanLoad   bool
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
func (s *State) Snapshot() Snapshot {
	out := Snapshot{Waiting: s.waiting, Running: s.running, Counts: s.counts, Draining: s.draining || s.ending}
	for _, c := range s.gpus {
		sh := s.sheet(c, nil)
		l := account(sh.card, sh.entries, nil)
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
	out.Queue = s.viewQueue()
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

func (s *State) view(sl *slot) SlotView {
	v := SlotView{Name: sl.cfg.Name, Disabled: sl.cfg.Disabled, Gone: sl.gone, State: sl.state, GateOpen: !sl.gate.closed, DrainFor: name(sl.gate.target),
		Health: [...]string{"unknown", "healthy", "unhealthy"}[sl.health], Detail: sl.detail, Active: sl.active, Held: sl.held,
		Waiting: sl.queue.count, Why: sl.why, Claim: sl.cfg.Claim, LastUse: sl.lastUse, ReadyAt: sl.readyAt, IdleAt: sl.idleAt, LastPrio: sl.lastPrio,
		Pinned: sl.pinned(), CoolUntil: sl.coolUntil, Switch: sl.switchCost(), CanUnload: sl.cfg.CanUnload, CanLoad: sl.cfg.CanLoad,
		Draining: s.draining || s.ending || sl.draining, Measured: sl.took.measured()}
	if s.idles(sl) && s.cfg.IdleUnload == IdleOn && !sl.gate.closed {
		v.UnloadAt = s.idleEnd(sl)
	}
	for _, h := range sl.on {
		hv := HoldView{GPU: h.card, Booking: Entry{State: sl.state, Booking: h.booking, Residue: h.residue}.booked(), Residue: h.residue}
		if c := s.card(h.card); c != nil {
			l, i := s.ledger(c, sl)
			hv.Seen = l.Seen[i]
		}
		v.Holds = append(v.Holds, hv)
	}
	return v
}

// viewQueue merges the slots' queues by (priority, submitted at), up to a bound.
func (s *State) viewQueue() []WaiterView {
	var heads []*job
	for _, sl := range s.slots {
		for i := range sl.queue.levels {
			heads = append(heads, sl.queue.levels[i].first)
		}
	}
	var out []WaiterView
	for len(heads) > 0 && len(out) < snapshotQueue {
		first := 0
		for i := range heads {
			if before(heads[i], heads[first]) < 0 {
				first = i
			}
		}
		j := heads[first]
		out = append(out, WaiterView{Job: j.id, Slot: j.slot.cfg.Name, Priority: j.priority, Submitted: j.submitted, Why: j.slot.why})
		if heads[first] = j.next; j.next == nil {
			heads = append(heads[:first], heads[first+1:]...)
		}
	}
	return out
}
