package scheduler

import "github.com/gpu-broker/caddy-gpu-broker/gpu"

// Card is what is known of one GPU's memory.
type Card struct {
	Total   gpu.Bytes
	Free    gpu.Bytes // live; meaningless unless Known
	Reserve gpu.Bytes // kept free for others' growth
	Known   bool      // is there telemetry?
}

// Entry is one slot's part in the account of one GPU.
type Entry struct {
	State       SlotState
	Booking     gpu.Bytes // what it is counted for: its claim, raised to what it was seen to take
	Residue     gpu.Bytes // IDLE: what its process still holds
	Drop        gpu.Bytes // by how much free memory fell since its load began
	Blind       bool      // there was no telemetry when its load began: Drop says nothing
	Settled     bool      // READY: a job has ended since its load, so it has taken what it takes
	Measured    gpu.Bytes // by process; valid if HasMeasured
	HasMeasured bool
}

// booked is b of accounting §1.
func (e *Entry) booked() gpu.Bytes {
	if e.State == Idle {
		return e.Residue
	}
	return e.Booking
}

// Ledger is the account of one GPU: who holds what of the memory in use.
type Ledger struct {
	Used      gpu.Bytes   // U
	Outsiders gpu.Bytes   // O: held by programs that are none of ours
	Booked    gpu.Bytes   // Σ b
	Seen      []gpu.Bytes // v of each entry
}

// account follows accounting §1: how much of the memory in use is whose.
// seen is scratch space that is used for the result if it is large enough.
func account(c Card, entries []Entry, seen []gpu.Bytes) Ledger {
	l := Ledger{Seen: append(seen[:0], make([]gpu.Bytes, len(entries))...)}
	for i := range entries {
		l.Booked += entries[i].booked()
	}
	if !c.Known {
		for i := range entries {
			l.Seen[i] = entries[i].booked()
		}
		l.Used = l.Booked
		return l
	}
	l.Used = c.Total - c.Free
	var explained gpu.Bytes
	for i := range entries {
		e := &entries[i]
		if e.unseen() {
			continue
		}
		l.Seen[i] = e.seen()
		explained += l.Seen[i]
	}
	for i := range entries { // given out last, in the order of the config
		e := &entries[i]
		if e.unseen() {
			l.Seen[i] = clamp(l.Used-explained, 0, e.Booking)
			explained += l.Seen[i]
		}
	}
	l.Outsiders = max(0, l.Used-explained)
	return l
}

// unseen reports whether nothing tells how much of the memory in use is an entry's: all that is left may be.
func (e *Entry) unseen() bool {
	if e.HasMeasured {
		return false
	}
	return e.State == Unknown || e.Blind && (e.State == Loading || e.State == Ready && !e.Settled)
}

// seen is v of accounting §1 where something tells it.
func (e *Entry) seen() gpu.Bytes {
	switch {
	case e.HasMeasured:
		return e.Measured
	case e.State == Idle:
		return e.Residue
	case e.State == Loading, e.State == Ready && !e.Settled:
		return clamp(e.Drop, 0, e.Booking)
	default:
		return e.Booking
	}
}

// available is A of accounting §1: what entry target may still take; -1 for a newcomer without an entry.
func (l Ledger) available(c Card, entries []Entry, target int) gpu.Bytes {
	free := c.Free
	if !c.Known {
		free = c.Total // all of which that is booked is subtracted below
	}
	var growth, booked, residue gpu.Bytes
	for i := range entries {
		e := &entries[i]
		if i == target {
			residue = e.Residue
			continue
		}
		b := e.booked()
		growth += max(0, b-l.Seen[i])
		booked += b
	}
	return min(free-growth, c.Total-l.Outsiders-booked-residue) - c.Reserve
}

// held is what of its residue a slot will use again when it is loaded.
func held(residue, measuredResidue gpu.Bytes, hasMeasured, processLives bool, residual gpu.Bytes) gpu.Bytes {
	switch {
	case !processLives:
		return 0
	case hasMeasured:
		return measuredResidue
	default:
		return min(residue, residual)
	}
}

func clamp[T ~int64](v, low, high T) T { return max(low, min(v, high)) }
