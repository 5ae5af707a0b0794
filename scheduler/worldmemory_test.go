package scheduler

import (
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// What the servers of a world hold of its GPUs, and how they lose it.

func (g *simGPU) used(w *world) gpu.Bytes {
	u := g.driver + g.outsiders
	for _, sv := range w.servers {
		u += sv.holds(g.index)
	}
	return u
}

// holds is what a server's process holds of a GPU.
func (sv *simServer) holds(index int) gpu.Bytes {
	n := sv.mem[index]
	for _, late := range sv.late[index] {
		n += *late
	}
	return n
}

func (w *world) gpu(index int) *simGPU {
	if index < len(w.gpus) {
		return w.gpus[index]
	}
	return nil
}

// roomFor reports whether the server can truly be loaded now.
func (w *world) roomFor(sv *simServer) bool {
	for _, i := range sv.cfg.GPUs {
		g := w.gpu(i)
		if g == nil || g.lost || g.used(w)-sv.holds(i)+sv.takes > g.total {
			return false
		}
	}
	return true
}

func (w *world) hold(sv *simServer) {
	sv.loaded = true
	sv.reuse()
	clear(sv.mem) // it may have been configured to run elsewhere since
	for _, i := range sv.cfg.GPUs {
		sv.mem[i] = sv.takes
	}
}

// reuse takes what was on its way back.
func (sv *simServer) reuse() {
	for _, all := range sv.late {
		for _, late := range all {
			*late = 0
		}
	}
	clear(sv.late)
}

// letGo is the end of a server's model. Its memory may come back later, or not at all.
func (w *world) letGo(sv *simServer, keep gpu.Bytes) {
	sv.loaded = false
	sv.life++
	for i, held := range sv.mem {
		gone := max(0, held-keep)
		sv.mem[i] -= gone
		var delay time.Duration
		switch {
		case w.calm, !w.shape.late || w.chance(40):
		case w.chance(10) && w.shape.leaks:
			delay = time.Hour
		default:
			delay = w.between(0, 4*time.Second)
		}
		if delay == 0 || gone == 0 {
			continue
		}
		late := gone
		sv.late[i] = append(sv.late[i], &late)
		w.in(delay, func() { late = 0 })
	}
}

func (w *world) crash(sv *simServer) {
	sv.alive, sv.loaded, sv.working = false, false, 0
	sv.life++
	clear(sv.mem)
	sv.reuse()
	for _, id := range w.order {
		j := w.jobs[id]
		if j.server != sv {
			continue
		}
		j.works = false
		if j.state == simRunning {
			w.in(w.between(0, 20*time.Millisecond), func() { w.release(j, NoAnswer) })
		}
	}
	if !sv.cfg.Starts {
		w.in(w.between(100*time.Millisecond, 20*time.Second), func() { sv.alive = true })
		return
	}
	for n := 1 + w.rand.IntN(2); n > 0; n-- { // its driver says so, and may do so twice
		w.in(w.between(0, 30*time.Millisecond), func() { w.step(Died{Slot: sv.cfg.Name, Detail: "killed", Clean: w.chance(20)}) })
	}
}

// renew replaces the driver of a slot, as was asked for.
func (w *world) renew(sv *simServer) {
	sv.cfg.Stale = false
	w.cfg.Slots = slices.Clone(w.cfg.Slots)
	for i := range w.cfg.Slots {
		if c := &w.cfg.Slots[i]; c.Name == sv.cfg.Name {
			c.Stale = false
		}
	}
	w.step(Configure{w.cfg})
}
