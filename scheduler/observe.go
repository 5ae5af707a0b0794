package scheduler

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// configure takes a new configuration. What is known of the slots that stay is kept.
func (s *State) configure(now time.Time, cfg Config) {
	anew := s.cfg.Mode != cfg.Mode
	s.cfg = cfg
	for _, sl := range s.slots {
		if !slices.ContainsFunc(cfg.Slots, func(c SlotConfig) bool { return c.Name == sl.cfg.Name }) {
			if anew { // who waits there is served by the new kind of scheduler
				s.adopt(now, sl, sl.cfg, anew)
			}
			sl.gone, sl.cfg.Stale = true, false // it serves who waits as it is
		}
	}
	slots := make([]*slot, 0, len(cfg.Slots)+len(s.slots))
	for _, c := range cfg.Slots {
		sl := s.named[c.Name]
		if sl == nil {
			sl = &slot{}
			s.named[c.Name] = sl
		}
		s.adopt(now, sl, c, anew)
		slots = append(slots, sl)
	}
	for _, sl := range s.slots {
		if sl.gone {
			slots = append(slots, sl)
		}
	}
	s.slots = slots
	s.conflicts = slices.ContainsFunc(slots, func(sl *slot) bool { return len(sl.cfg.Conflicts) > 0 })
	s.forget() // not before: what is remembered of slots that are there has come back to them
	s.reindex()
	s.relock()
	s.expectAll()
	s.pump(now)
}

// adopt gives a slot its settings. A slot that is new, or comes from another kind of scheduler, starts anew.
func (s *State) adopt(now time.Time, sl *slot, c SlotConfig, anew bool) {
	fresh := sl.cfg.Name == "" || anew && !sl.busy() || sl.cfg.Server != c.Server
	probes := sl.cfg.CanProbe
	if sl.gone && sl.gate.closed && sl.gate.target == nil && sl.state != Stopping {
		s.reopen(now, sl, "it is in the configuration again")
	}
	sl.cfg, sl.gone = c, false
	sl.renewing = sl.renewing && c.Stale
	if !c.Starts || s.cfg.Mode != Evicting {
		sl.suspect = time.Time{}
	}
	if fresh {
		sl.on = nil
	}
	if fresh || sl.state == Idle {
		s.place(sl)
	}
	if fresh {
		for _, t := range []*slot{sl.gate.target, sl.stop.target} { // they wait for room that it makes no more
			if t != nil && t.want.victim == sl {
				t.want.victim = nil
			}
		}
		sl.state, sl.since, sl.idleAt, sl.loadedAt = s.startState(&c), now, time.Time{}, time.Time{}
		sl.stop, sl.gate, sl.readyAt, sl.want = stopping{}, gate{}, now, target{}
		sl.dead, sl.suspect, sl.loadsUntil, sl.deaths, sl.reviving = "", time.Time{}, time.Time{}, 0, false
		sl.refusedAt, sl.returns = time.Time{}, false
		sl.unloaded, sl.started, sl.flushedAt, sl.flushBad, sl.unloadBad, sl.retryAt = false, 0, time.Time{}, "", 0, time.Time{} // an unknown server
		s.recall(now, sl)
	}
	s.checkBudget(now, sl)
	if fresh || probes != c.CanProbe {
		sl.health = healthGood
		if c.CanProbe {
			sl.health = healthUnknown
		}
	}
	for _, h := range sl.on {
		switch sl.state {
		case Unknown:
			h.booking = sl.claim()
		case Ready:
			h.booking = max(h.booking, sl.claim())
		}
	}
}

// place puts a slot on the GPUs of its configuration. One that is loaded stays
// where it is until it is not. What it leaves behind there is foreign.
func (s *State) place(sl *slot) {
	if slices.EqualFunc(sl.on, sl.cfg.GPUs, func(h *holding, index int) bool { return h.card == index }) {
		return
	}
	sl.on = nil
	for _, index := range sl.cfg.GPUs {
		sl.on = append(sl.on, &holding{card: index, known: -1, foreign: unseen, aliveFree: unseen, baseOut: unseen})
	}
	s.reindex()
}

// startState is the first state of a slot (accounting §2).
func (s *State) startState(c *SlotConfig) SlotState {
	switch {
	case s.cfg.Mode != Evicting || c.Cloud || c.TurnOnly:
		return Ready
	case c.Disabled:
		return Idle // nobody asks it: whatever it holds is foreign
	case c.startsIdle():
		return Idle // else its first request would skip the fit
	default:
		return Unknown
	}
}

// reindex numbers the slots in their order, and sees to it that each of their GPUs has a lock.
func (s *State) reindex() {
	for i, sl := range s.slots {
		sl.order = i
		for _, h := range sl.on {
			if !slices.ContainsFunc(s.locks, func(l *lock) bool { return l.gpu == h.card }) {
				s.locks = append(s.locks, &lock{gpu: h.card})
			}
		}
	}
}

// healthTimeouts is how many time-outs in a row make a server unhealthy (spec §1.5).
const healthTimeouts = 3

// probed takes in a server's own word. What was sent before the last change of state ended, or before the server was
// suspected to have died, is out of date, and a server that loads or stops is not asked.
func (s *State) probed(now time.Time, e Probed) {
	sl := s.named[e.Slot]
	if sl == nil || e.Sent.Before(sl.since) || e.Sent.Before(sl.suspect) || sl.state == Loading || sl.state == Stopping || sl.stop.flush {
		return
	}
	if sl.cfg.Starts && e.Outcome != ProbeAnswered {
		s.mute(now, sl, e)
		return
	}
	switch e.Outcome {
	case ProbeTimedOut:
		if sl.busy() || e.Sent.Before(sl.idleAt) {
			break // it computes, or did meanwhile: no evidence
		}
		if sl.timeouts++; sl.timeouts >= healthTimeouts {
			s.sick(sl, now, fmt.Sprintf("no answer to %d probes in a row", sl.timeouts))
		}
	case ProbeWrong:
		s.sick(sl, now, e.Detail)
	case ProbeUnreachable:
		s.sick(sl, now, e.Detail)
		s.unreachable(now, sl)
	case ProbeRefused:
		s.sick(sl, now, e.Detail)
		s.nobodyListens(now, sl, "its server does not listen any more")
	case ProbeAnswered:
		if sl.health == healthBad {
			s.decide(Decision{At: now, Kind: "healthy", Slot: sl.cfg.Name, GPU: sl.gpu(), Reason: "its server answers again"})
		}
		sl.health, sl.timeouts, sl.detail = healthGood, 0, ""
		if !e.Stopped || e.Loaded != No { // else it is gone, which counts once what runs there has broken off
			sl.suspect = time.Time{}
		}
		if s.cfg.Mode == Evicting {
			s.told(now, sl, e)
		}
	}
	s.pump(now)
}

func (s *State) sick(sl *slot, now time.Time, detail string) {
	if sl.health != healthBad {
		s.decide(Decision{At: now, Kind: "unhealthy", Slot: sl.cfg.Name, GPU: sl.gpu(), Reason: detail})
	}
	sl.health, sl.detail = healthBad, detail
}

// told takes in what a server says of its residency.
func (s *State) told(now time.Time, sl *slot, e Probed) {
	switch {
	case e.Loaded == Yes && (sl.state == Unknown || sl.state == Idle):
		s.resident(now, sl, "its server says that it is loaded")
	case sl.returns:
		s.comeBack(now, sl)
		s.emit(Effect{Kind: LookNow, Slot: sl.cfg.Name})
	case e.Loaded == No && sl.state == Unknown && !e.Sent.Before(sl.loadsUntil):
		for _, h := range sl.on { // what was measured may be older than that
			h.hasMeas = false
		}
		s.to(now, sl, Idle)
	case e.Loaded == No && sl.state == Ready && !sl.busy() && !sl.warming && !e.Sent.Before(sl.lastUse): // the newer wins
		if e.Stopped {
			s.fall(now, sl, "it does not run any more", e.Clean)
		} else {
			s.vanish(now, sl, "its server says that it is not loaded any more")
		}
	}
	if sl.state == Ready {
		s.answered(now, sl)
	}
	if e.Resident > 0 && sl.state == Ready {
		for _, h := range sl.on { // its word may raise a booking, never lower it
			resident := e.Resident / gpu.Bytes(len(sl.on))
			h.booking, h.peak = max(h.booking, resident), max(h.peak, resident)
		}
	}
}

// resident counts a slot as loaded that was not loaded by us. It is booked, never refused.
func (s *State) resident(now time.Time, sl *slot, why string) {
	for _, h := range sl.on {
		h.before, h.loadOut = h.residue, h.baseOut // what is foreign now may be its own
		if h.loadOut == unseen {
			h.loadOut = 0
		}
		h.booking, h.residue, h.peak = max(sl.claim(), h.residue), 0, 0
	}
	s.to(now, sl, Ready)
	sl.settled, sl.settledAt = true, time.Time{}
	s.decide(Decision{At: now, Kind: "adopt", Slot: sl.cfg.Name, GPU: sl.gpu(), Reason: why})
}

// sample takes in a look at the GPUs.
func (s *State) sample(now time.Time, e Sampled) {
	s.sampled, s.blind = true, e.Lost
	if e.First && e.Lost == "" {
		s.gpus = slices.DeleteFunc(s.gpus, func(c *card) bool { return !e.lists(c.UUID) })
	}
	if e.Lost != "" {
		for _, c := range s.gpus { // telemetry is gone, the GPUs are not: book-keeping goes on
			s.readable(now, c, false, e.Lost)
			if c.Known = false; !c.Lost { // else why it is lost still holds, as far as is known
				c.Reason = e.Lost
			}
		}
	}
	changed := false
	for _, d := range e.Devices {
		c := s.cardOf(d.UUID)
		if c == nil {
			c = s.successor(&e, d.Index)
		}
		if c == nil {
			c = &card{Device: Device{UUID: d.UUID, Index: d.Index}}
			s.gpus = append(s.gpus, c)
		}
		if d.Total == 0 { // what was read before still holds
			d.Total = c.Total
		}
		if d.Total == 0 { // unknown is not zero: nothing fits on it now, and everything may later
			d.Known = false
			if !d.Lost {
				d.Lost, d.Reason = true, "how much memory it has is not known: "+orElse(d.Reason, "the driver does not say")+withoutTelemetry
			}
		}
		changed = changed || c.Total != d.Total
		if d.Lost != c.Lost {
			s.decide(Decision{At: now, Kind: "gpu_" + map[bool]string{true: "lost", false: "back"}[d.Lost], GPU: d.Index, Reason: orElse(d.Reason, "it answers again")})
		} else if !d.Lost && !c.seenAt.IsZero() {
			s.readable(now, c, d.Known, d.Reason)
		}
		if d.Outsiders == nil {
			d.Outsiders = c.Outsiders
		}
		c.Device, c.seenAt = d, e.At
		s.follow(c)
	}
	slices.SortFunc(s.gpus, func(a, b *card) int { return a.Index - b.Index })
	if changed {
		s.expectAll()
	}
	back := s.endUnseen(now)
	for _, sl := range s.slots {
		back = s.comeBack(now, sl) || back
	}
	if back || s.waiting > 0 || s.unsettled() || s.lending || len(s.cfg.Restore) > 0 { // a lent GPU may have another index, one that is idle more memory
		s.pump(now)
	}
}

// withoutTelemetry ends messages about GPUs of which too little is known.
const withoutTelemetry = "; to serve by configured sizes meanwhile, write for example: gpu auto { fallback 24GiB }"

// readable records that the memory of a GPU can't be read any more, or can again.
func (s *State) readable(now time.Time, c *card, known bool, reason string) {
	switch {
	case c.Known && !known:
		s.decide(Decision{At: now, Kind: "telemetry_lost", GPU: c.Index, Reason: reason})
	case !c.Known && known:
		s.decide(Decision{At: now, Kind: "telemetry_back", GPU: c.Index, Reason: "its memory can be read again"})
	}
}

// successor returns the card that a reading lists under another identity, by its
// index; nil if there is none. A GPU that did not answer, or was only declared, gets its UUID later.
func (s *State) successor(e *Sampled, index int) *card {
	for _, c := range s.gpus {
		if c.Index == index && !e.lists(c.UUID) {
			return c
		}
	}
	return nil
}

// lists reports whether a reading has a GPU.
func (e *Sampled) lists(uuid string) bool {
	return slices.ContainsFunc(e.Devices, func(d Device) bool { return d.UUID == uuid })
}

func (s *State) cardOf(uuid string) *card {
	for _, c := range s.gpus {
		if c.UUID == uuid {
			return c
		}
	}
	return nil
}

// unsettled reports whether a hand-over is under way, so that memory matters at once.
func (s *State) unsettled() bool {
	for _, sl := range s.slots {
		if sl.stop.called || sl.gate.closed || sl.gone {
			return true
		}
	}
	return false
}

// follow brings the slots' parts of a GPU up to date with a new reading.
func (s *State) follow(c *card) {
	for _, sl := range s.slots {
		h := sl.hold(c.Index)
		if h == nil {
			continue
		}
		if c.Measured != nil {
			h.measured, h.hasMeas = c.Measured[sl.cfg.Name], false
			_, h.hasMeas = c.Measured[sl.cfg.Name]
			if h.hasMeas && (sl.state == Ready || sl.state == Loading) {
				h.booking, h.peak = max(h.booking, h.measured), max(h.peak, h.measured)
			}
		}
		if !c.Known {
			continue
		}
		if (sl.state == Loading || sl.state == Ready) && !h.frozen {
			h.drop = clamp(h.loadFree-c.Free, 0, h.booking)
		}
		if sl.state == Stopping && !c.seenAt.Before(sl.stop.began) {
			sl.rebase(c)
		}
	}
	s.capResidues(c)
	s.claimLeaks(c)
	s.noteForeign(c)
}

// claimLeaks books what a slot kept from before its load, and has not used again, to it: a leak never becomes an
// outsider (accounting §4). It shows as memory that nobody explains once the load has taken what it takes.
func (s *State) claimLeaks(c *card) {
	if !c.Known {
		return
	}
	for _, sl := range s.slots {
		h := sl.hold(c.Index)
		if h == nil || h.before <= 0 || sl.state != Ready || !sl.settledOn(c) || s.transition(c.Index) != nil {
			continue
		}
		h.booking, h.before = h.booking+sl.leak(h, s.outsiders(c)), 0
	}
}

// leak is what of its residue from before its load a slot has not used again, if outsiders seem to hold so much.
func (sl *slot) leak(h *holding, outsiders gpu.Bytes) gpu.Bytes {
	if h.hasMeas {
		return 0
	}
	return clamp(outsiders-h.loadOut, 0, h.before)
}

// capResidues caps what unloaded slots left on a GPU anew by what nobody else explains of its memory.
func (s *State) capResidues(c *card) {
	if !c.Known {
		return
	}
	for _, sl := range s.slots {
		h := sl.hold(c.Index)
		if h == nil {
			continue
		}
		if sl.state != Idle {
			h.kept = 0
			continue
		}
		if h.hasMeas && c.Measured != nil {
			h.residue, h.guessed = h.measured, false
		}
		if h.hasMeas || max(h.residue, h.kept) == 0 {
			h.known = min(h.known, h.residue)
			continue
		}
		l, at := s.ledger(c, sl)
		rest := l.Used
		for i, seen := range l.Seen {
			if i != at {
				rest -= seen
			}
		}
		if !h.frozen {
			h.residue = min(h.residue, h.base-(c.Free-h.baseFree), rest-h.baseOut)
		}
		// What another gives back just now is booked to it still, and looks as if it were gone from here.
		h.kept = max(h.kept, h.residue)
		h.residue = max(0, min(h.kept, rest))
		if !s.stoppingOn(c) {
			h.kept = 0
			h.known = min(h.known, h.residue) // it came back late: the next unload may be trusted to give as much
		}
	}
}

// rebase corrects what an unload is measured against: the look on which it was
// decided may be older than the load, or the first job, of what goes.
func (sl *slot) rebase(c *card) {
	for i, h := range sl.on {
		more := sl.stop.free[i] - c.Free
		if h.card != c.Index || more <= 0 {
			continue
		}
		sl.stop.free[i] -= more
		sl.stop.used[i] += more
		sl.stop.seen[i] = min(h.booking, sl.stop.seen[i]+more)
	}
}

// stoppingOn reports whether a slot of the GPU is being unloaded.
func (s *State) stoppingOn(c *card) bool {
	return slices.ContainsFunc(s.slots, func(sl *slot) bool { return sl.state == Stopping && sl.hold(c.Index) != nil })
}

// ledger is the account of a GPU, and the position of a slot in it.
func (s *State) ledger(c *card, of *slot) (Ledger, int) {
	sh := s.sheet(c, nil)
	l, at := sh.account(), slices.Index(sh.slots, of)
	if at < 0 { // it holds nothing
		l.Seen, at = append(l.Seen, 0), len(l.Seen)
	}
	return l, at
}

// doubtful reports whether memory has moved since the last look at it, to nobody knows where.
func (c *card) doubtful() bool { return c.Known && c.seenAt.Before(c.doubt) }

// FastSampling reports whether somebody waits to see memory move, so that samples
// should come as fast as the sampler can.
func (s *State) FastSampling() bool {
	for _, sl := range s.slots {
		if sl.stop.called {
			return true
		}
	}
	return s.waiting > 0 && slices.ContainsFunc(s.gpus, func(c *card) bool { return c.doubtful() || c.Known && c.seenAt.Before(c.ebbs) })
}
