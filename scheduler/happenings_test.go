package scheduler

import (
	"fmt"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// What comes by itself: samples, probes, clients, and the hazards of the world.

func (w *world) start() {
	if w.shape.recall { // what a broker before this one learnt, of some that are there and one that is not
		learnt := map[string]Learnt{"gone for long": {LoadCost: time.Second, LastUse: w.now.Add(-time.Hour)}}
		for _, sv := range w.servers {
			if w.chance(60) {
				learnt[sv.cfg.Name] = Learnt{LoadCost: w.between(0, 10*time.Second), UnloadCost: w.between(0, time.Second),
					LastUse: w.now.Add(w.between(-time.Hour, time.Minute)), LastPriority: 100, Footprints: []gpu.Bytes{sv.takes}}
			}
		}
		w.twin.Step(w.now, Recall{learnt})
		w.s.Step(w.now, Recall{learnt})
	}
	w.twin.Step(w.now, Configure{w.cfg})
	w.s.Step(w.now, Configure{w.cfg})
	w.in(w.between(0, time.Second), w.sampleRegularly)
	for _, sv := range w.servers {
		w.in(w.between(0, 2*time.Second), func() { w.probeRegularly(sv) })
	}
}

func (w *world) sampleRegularly() {
	w.sample()
	w.in(2*time.Second, w.sampleRegularly)
}

func (w *world) sample() {
	e := Sampled{At: w.now}
	if w.blind {
		e.Lost = "the driver does not answer"
		w.step(e)
		return
	}
	look := w.shape.measured && w.chance(70)
	for _, g := range w.gpus {
		d := Device{Index: g.index, UUID: fmt.Sprint("gpu-", g.index), Total: g.total, Unified: w.shape.unified}
		if g.lost {
			d.Lost, d.Total, d.Reason = true, 0, "fell off the bus"
		} else {
			d.Known, d.Free = true, g.total-g.used(w)
		}
		if look {
			d.Measured = map[string]gpu.Bytes{}
			for _, sv := range w.servers {
				if _, on := sv.mem[g.index]; on {
					d.Measured[sv.cfg.Name] = sv.holds(g.index)
				}
			}
		}
		e.Devices = append(e.Devices, d)
	}
	w.step(e)
}

func (w *world) probeRegularly(sv *simServer) {
	w.probe(sv)
	w.in(w.between(3*time.Second, 5*time.Second), func() { w.probeRegularly(sv) })
}

func (w *world) probe(sv *simServer) {
	if !sv.cfg.CanProbe {
		return
	}
	p := Probed{Slot: sv.cfg.Name, Sent: w.now, Resident: -1}
	travels := w.between(0, 100*time.Millisecond)
	switch {
	case !sv.alive && sv.cfg.Starts && w.chance(80):
		p.Stopped, p.Loaded = true, No
	case !sv.alive && !sv.cfg.Starts && w.chance(30):
		p.Outcome, p.Detail = ProbeUnreachable, "no such host"
	case !sv.alive:
		p.Outcome, p.Detail = ProbeRefused, "connection refused"
	case sv.alive && !sv.cfg.Starts && w.chance(3): // its name is not found for a moment
		p.Outcome, p.Detail = ProbeUnreachable, "no such host"
	case sv.hung && !w.calm, w.hazard(w.shape.failures, 3):
		p.Outcome, travels = ProbeTimedOut, 2*time.Second
	case w.hazard(w.shape.failures, 2):
		p.Outcome, p.Detail = ProbeWrong, "status 500"
	case sv.cfg.CanTell:
		p.Loaded = No
		if sv.loaded {
			p.Loaded = Yes
			if w.chance(50) {
				p.Resident = sv.takes * gpu.Bytes(len(sv.cfg.GPUs))
			}
		}
	}
	if w.hazard(w.shape.stale, 10) {
		travels += w.between(0, 4*time.Second)
	}
	w.probes = append(w.probes, p)
	w.in(travels, func() { w.step(p) })
}

func (w *world) submit() {
	sv := w.servers[w.rand.IntN(len(w.servers))]
	e := Submit{Slot: sv.cfg.Name, Priority: 100}
	if w.chance(40) && w.shape.priorities {
		e.Priority = []int{10, 50, 200}[w.rand.IntN(3)]
	}
	if w.hazard(w.shape.deadlines, 40) {
		e.Deadline = w.now.Add(w.between(0, 40*time.Second))
	}
	if w.hazard(w.shape.strange, 5) {
		e.Submitted = w.now.Add(-w.between(0, 10*time.Second)) // admitted once more
	}
	if w.hazard(w.shape.strange, 2) {
		e.Slot = "nobody"
	}
	e.IfFree = w.hazard(w.shape.strange, 10)
	w.askFor(&e)
	j := &simJob{server: sv, lasts: w.between(0, 4*time.Second), asked: e, bulk: e.Priority >= w.s.cfg.ReservedBelow}
	if w.chance(4) {
		j.lasts = w.between(10*time.Second, 80*time.Second)
	}
	w.check.coming = j
	w.check.rules.foretell(w, e)
	w.step(e)
}

// someJob is a recent job in a state.
func (w *world) someJob(state simJobState) *simJob {
	var found []*simJob
	for _, id := range w.order[max(0, len(w.order)-60):] {
		if j := w.jobs[id]; j.state == state {
			found = append(found, j)
		}
	}
	if len(found) == 0 {
		return nil
	}
	return found[w.rand.IntN(len(found))]
}

func (w *world) cancel() {
	if j := w.someJob(simWaiting); j != nil && w.chance(70) {
		j.state = simEnded
		w.ended = append(w.ended, j.id)
		w.step(Cancel{Job: j.id})
		return
	}
	if j := w.someJob(simRunning); j != nil { // its client leaves; its server may work on
		j.state = simEnded
		w.ended = append(w.ended, j.id)
		if w.chance(50) {
			w.step(Cancel{Job: j.id})
		} else {
			w.step(Release{Job: j.id, Outcome: NoAnswer})
		}
	}
}

// repeatOld says something once more that is long out of date.
func (w *world) repeatOld() {
	switch w.rand.IntN(6) {
	case 0, 4, 5:
		var fitting []Event // of a slot that loads or unloads just now, if there is one
		for _, e := range w.lastLoad {
			name := ""
			switch e := e.(type) {
			case LoadDone:
				name = e.Slot
			case UnloadDone:
				name = e.Slot
			}
			if sl := w.s.named[name]; sl != nil && (sl.state == Loading || sl.state == Stopping) {
				fitting = append(fitting, e)
			}
		}
		if len(fitting) == 0 {
			fitting = w.lastLoad
		}
		if n := len(fitting); n > 0 {
			w.step(fitting[w.rand.IntN(n)])
		}
	case 1:
		if n := len(w.ended); n > 0 {
			w.step(Release{Job: w.ended[max(0, n-1-w.rand.IntN(6))], Outcome: Served})
		}
	case 2:
		if n := len(w.ended); n > 0 {
			w.step(Cancel{Job: w.ended[max(0, n-1-w.rand.IntN(6))]})
		}
	case 3:
		if n := len(w.probes); n > 0 {
			w.step(w.probes[max(0, n-1-w.rand.IntN(10))])
		}
	}
}

func (w *world) reload() {
	sv := w.servers[w.rand.IntN(len(w.servers))]
	switch w.rand.IntN(7) {
	case 6:
		sv.cfg.Disabled = !sv.cfg.Disabled && w.chance(50)
	case 0, 1:
		sv.removed = !sv.removed
	case 2:
		sv.cfg.Pin = !sv.cfg.Pin && w.chance(50)
	case 3:
		sv.cfg.Concurrency = 1 + w.rand.IntN(3)
		sv.cfg.Reserved = min(sv.cfg.Reserved, sv.cfg.Concurrency-1) // as a configuration has to
	case 4:
		sv.cfg.Coexist = nil
		if o := w.servers[w.rand.IntN(len(w.servers))]; o != sv {
			sv.cfg.Coexist = []string{o.cfg.Name}
		}
	case 5:
		sv.cfg.NoEvict = !sv.cfg.NoEvict && w.chance(50)
	}
	if w.shape.replaced && sv.cfg.Starts && w.chance(60) {
		sv.cfg.Stale = !sv.cfg.Stale
	}
	if w.shape.reshape {
		w.reshapeSlot(w.servers[w.rand.IntN(len(w.servers))])
	}
	if w.shape.modes && w.chance(50) {
		w.mode = []Mode{Evicting, Evicting, Locked, Passthrough}[w.rand.IntN(4)]
	}
	w.cfg = w.newConfig()
	w.step(Configure{w.cfg})
}

// reshapeSlot changes what a slot is while it may be in any state, with jobs running.
func (w *world) reshapeSlot(sv *simServer) {
	switch c := &sv.cfg; w.rand.IntN(6) {
	case 0:
		c.LockNone = !c.LockNone
	case 1:
		c.GPUs = w.somewhere()
	case 2:
		c.KeepAlive = w.between(0, 4*time.Second)
	case 3:
		c.IdleTimeout, c.OwnIdle = w.between(0, 10*time.Second), w.chance(30)
	case 4: // a claim that was wrong before, or is now
		c.Claim = gpu.Bytes(1000+w.rand.IntN(13)*1100) * mib
	case 5:
		c.VRAMManaged = !c.VRAMManaged && w.chance(50)
	}
}

// drainSome lets no more jobs in, or lets them in again.
func (w *world) drainSome(sv *simServer) {
	e := Drain{Slot: sv.cfg.Name, Off: w.chance(60)}
	if w.chance(30) {
		e.Slot = ""
	}
	w.step(e)
}

// victim is a server for a crash: one that loads or unloads, if there is one.
func (w *world) victim(sv *simServer) *simServer {
	for _, o := range w.servers {
		if sl := w.s.named[o.cfg.Name]; sl != nil && (sl.state == Loading || sl.state == Stopping) {
			return o
		}
	}
	return sv
}

// act is one thing that happens by chance.
func (w *world) act() {
	sv := w.servers[w.rand.IntN(len(w.servers))]
	g := w.gpus[w.rand.IntN(len(w.gpus))]
	on := w.shape
	if w.chance(8) {
		w.byHand(sv, g)
	}
	switch p := w.rand.IntN(100); {
	case p < 60:
		for n := 1 + w.rand.IntN(2)*w.rand.IntN(4); n > 0; n-- {
			w.submit()
		}
	case p < 68:
		if on.cancels {
			w.cancel()
		}
	case p < 72:
		if on.manual {
			w.step(Unload{Slot: sv.cfg.Name})
		}
	case p < 78:
		if on.stale {
			w.repeatOld()
		}
	case p < 81:
		if w.chance(50) {
			sv = w.victim(sv)
		}
		if on.crashes && sv.alive {
			w.crash(sv)
		}
	case p < 82:
		if on.failures {
			sv.hung = !sv.hung && w.chance(50)
		}
	case p < 84:
		if on.crashes && sv.alive && sv.working == 0 { // by itself, or by somebody who doesn't ask us
			if sv.loaded {
				w.letGo(sv, sv.context)
			} else if on.outsiders && w.roomFor(sv) {
				w.check.meddled = true
				w.hold(sv)
			}
		}
	case p < 90:
		if on.outsiders {
			w.check.meddled = true
			g.outsiders = 0
			if room := g.total - g.used(w); w.chance(60) && room > 0 {
				g.outsiders = gpu.Bytes(w.rand.Int64N(int64(room) + 1))
			}
		}
	case p < 92:
		if on.telemetry {
			w.blind = !w.blind
		}
	case p < 93:
		if on.gpuLoss && !g.lost {
			g.lost = true
			w.in(w.between(time.Second, 10*time.Second), func() { g.lost = false })
		}
	case p < 96:
		if on.reload {
			w.reload()
		}
	case p < 97:
		w.step(Wake{})
	case p < 98:
		if on.drains {
			w.drainSome(sv)
		}
	default:
		if on.strange {
			w.step(Touch{Slot: sv.cfg.Name})
			w.step(Unload{Slot: "nobody"})
			w.step(Release{Job: JobID(w.rand.Uint32())})
			w.step(BusyAnswer{Slot: sv.cfg.Name, Sent: w.now.Add(-time.Hour)})
		}
	}
}

// live lets the world go on until it has seen as many steps as its shape says.
func (w *world) live() {
	w.start()
	gap := 3 * time.Second
	if w.shape.eager {
		gap = time.Second
	}
	for w.steps < w.shape.length {
		w.advance(w.now.Add(w.between(0, gap)))
		w.act()
	}
}

// standStill ends all hazards: from now on every server is healthy and honest,
// outsiders have left and nobody comes. Nothing may wait for ever then.
func (w *world) standStill(bound time.Duration) {
	w.calm = true
	for _, g := range w.gpus {
		g.outsiders, g.lost = 0, false
	}
	for _, sv := range w.servers {
		sv.alive, sv.hung = true, false
	}
	if w.chance(70) {
		w.blind = false
	}
	for end := w.now.Add(bound); w.s.waiting+w.s.running > 0; w.advance(w.now.Add(2 * time.Second)) {
		if w.now.After(end) {
			w.fail("%d jobs wait and %d run %s after the world stood still", w.s.waiting, w.s.running, bound)
		}
	}
}

func (w *world) fail(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("%s\n%s", fmt.Sprintf(format, args...), w.check.story())
}
