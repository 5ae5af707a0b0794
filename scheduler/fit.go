package scheduler

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// sheet is the memory account of one GPU, actual or hypothetical.
type sheet struct {
	card    Card
	entries []Entry
	slots   []*slot
	holds   []*holding
	target  int // position of the target; -1: none
	seen    []gpu.Bytes
}

// account settles the sheet as it is.
func (sh *sheet) account() Ledger {
	l := account(sh.card, sh.entries, sh.seen)
	sh.seen = l.Seen
	return l
}

// available is what the target may still take.
func (sh *sheet) available() gpu.Bytes {
	return sh.account().available(sh.card, sh.entries, sh.target)
}

// blank is an empty sheet, one that was used before if there is one: an account is drawn up often.
func (s *State) blank() *sheet {
	if n := len(s.spare.blanks); n > 0 {
		sh := s.spare.blanks[n-1]
		s.spare.blanks = s.spare.blanks[:n-1]
		*sh = sheet{entries: sh.entries[:0], slots: sh.slots[:0], holds: sh.holds[:0], seen: sh.seen}
		return sh
	}
	return &sheet{}
}

// reuse gives back a sheet of which nothing is read any more.
func (s *State) reuse(sh *sheet) { s.spare.blanks = append(s.spare.blanks, sh) }

// sheet writes down who holds what of a GPU. Slots that hold nothing are left
// out, but for the target: of many slots only few fit on a GPU, and an account is drawn up often.
func (s *State) sheet(c *card, t *slot) *sheet {
	sh := s.blank()
	if base := c.base; s.planning && base != nil {
		sh.card = base.card
		sh.entries, sh.slots, sh.holds = append(sh.entries, base.entries...), append(sh.slots, base.slots...), append(sh.holds, base.holds...)
	} else {
		sh.card = Card{Total: c.Total, Free: c.Free, Reserve: s.cfg.Reserve, Known: c.Known}
		for _, sl := range s.slots {
			if sl.state != Idle || sl.holdsAnything() {
				sh.add(c, sl)
			}
		}
	}
	if sh.target = slices.Index(sh.slots, t); t == nil {
		sh.target = -1
	} else if sh.target < 0 && sh.add(c, t) { // it holds nothing yet
		sh.target = len(sh.slots) - 1
	}
	if sh.target >= 0 && t.state == Unknown { // nothing is known of it: its memory counts as foreign
		sh.entries[sh.target] = Entry{State: Idle}
	}
	return sh
}

// add writes a slot's part in the account of a GPU down, if it has one.
func (sh *sheet) add(c *card, sl *slot) bool {
	h := sl.hold(c.Index)
	if h == nil {
		return false
	}
	sh.entries = append(sh.entries, Entry{State: sl.state, Booking: h.booking, Residue: h.residue, Drop: h.drop, Blind: h.blind, Settled: sl.settledOn(c), Measured: h.measured, HasMeasured: h.hasMeas})
	sh.slots, sh.holds = append(sh.slots, sl), append(sh.holds, h)
	return true
}

// holdsAnything reports whether there is something to account for, of a slot that is not loaded.
func (sl *slot) holdsAnything() bool {
	for _, h := range sl.on {
		if h.residue != 0 || h.hasMeas {
			return true
		}
	}
	return false
}

// around are the slots that may hold or move anything. Of many few do, and a
// planning asks for each of its targets.
func (s *State) around() []*slot {
	if s.planning {
		return s.spare.present
	}
	return s.slots
}

// lookAround begins a planning.
func (s *State) lookAround() {
	s.spare.present = s.spare.present[:0]
	for _, sl := range s.slots {
		if sl.state != Idle || sl.stop.flush || sl.holdsAnything() {
			s.spare.present = append(s.spare.present, sl)
		}
	}
	for _, c := range s.gpus {
		if c.base != nil {
			s.reuse(c.base)
		}
		c.base = s.sheet(c, nil)
		c.rooms[0].known, c.rooms[1].known = false, false
	}
	s.planning = true
}

// without unloads slots hypothetically: each leaves behind what it left before.
func (sh *sheet) without(s *State, gone []*slot) {
	if len(gone) == 0 {
		return
	}
	l := sh.account()
	for _, v := range gone {
		for i, sl := range sh.slots {
			if sl != v || sl.state == Idle {
				continue
			}
			var rest gpu.Bytes
			if v.stop.called { // it has gone: free memory shows already what came back
				rest = s.residueNow(v, slices.Index(v.on, sh.holds[i]), s.card(sh.holds[i].card))
			} else {
				rest = min(s.knownResidue(v, sh.holds[i]), l.Seen[i])
				sh.card.Free += l.Seen[i] - rest
			}
			sh.entries[i] = Entry{State: Idle, Residue: rest}
		}
	}
}

// need is what must be available for the target on this GPU: its claim, less
// what of its residue it will use again, and the cushion.
func (s *State) need(t *slot, h *holding, c *card) gpu.Bytes {
	return t.claim() - s.heldBy(t, h) + s.cushion(c)
}

func (s *State) heldBy(t *slot, h *holding) gpu.Bytes {
	if t.state != Idle {
		return 0
	}
	return held(h.residue, min(h.measured, h.residue), h.hasMeas, t.health == healthGood, t.cfg.Residual)
}

func (s *State) cushion(c *card) gpu.Bytes {
	switch {
	case s.cfg.Cushion != nil:
		return *s.cfg.Cushion
	case c.Unified:
		return unifiedCushion
	default:
		return defaultCushion
	}
}

// fits reports whether the target could be loaded as things are.
func (s *State) fits(t *slot) bool { return s.fitsAfter(t) }

// fitsAfter reports whether it could be, were some slots unloaded.
func (s *State) fitsAfter(t *slot, gone ...*slot) bool {
	if len(t.cfg.Conflicts) > 0 || s.conflicts {
		for _, v := range s.around() {
			if v != t && v.state != Idle && conflict(t, v) && !slices.Contains(gone, v) {
				return false
			}
		}
	}
	fits := true
	ok := s.cards(t, func(c *card, h *holding) {
		fits = fits && s.need(t, h, c) <= s.room(c, t, gone)
	})
	return ok && fits
}

// room is what the target may take of a GPU, were some slots unloaded. To all
// targets that hold nothing themselves it is the same, and a planning asks for each of them.
func (s *State) room(c *card, t *slot, gone []*slot) gpu.Bytes {
	memo := &c.rooms[min(1, len(gone))]
	newcomer := s.planning && t.state == Idle && !t.holdsAnything()
	if newcomer && memo.known && slices.Equal(memo.gone, gone) {
		return memo.room
	}
	sh := s.sheet(c, t)
	sh.without(s, gone)
	room := sh.available()
	s.reuse(sh)
	if newcomer {
		memo.known, memo.gone, memo.room = true, append(memo.gone[:0], gone...), room
	}
	return room
}

// needOf is what the target needs and what is available, on the first of its GPUs.
func (s *State) needOf(t *slot) (need, avail gpu.Bytes) {
	for _, h := range t.on[:min(1, len(t.on))] {
		if c := s.card(h.card); c != nil {
			sh := s.sheet(c, t)
			need, avail = s.need(t, h, c), sh.available()
			s.reuse(sh)
		}
	}
	return need, avail
}

// neverFits refuses a claim that no set of evictions could satisfy: the first row of accounting §3.
func (s *State) neverFits(t *slot) *Refusal {
	for _, h := range t.on {
		c := s.card(h.card)
		if c == nil {
			continue
		}
		var pinned gpu.Bytes
		for _, v := range s.around() {
			if v == t || v.state == Idle || !v.pinned() {
				continue
			}
			if vh := v.hold(h.card); vh != nil {
				pinned += min(vh.booking, v.configured()) // what was learnt may have been another's
			}
		}
		need, room := t.configured()+s.cushion(c), c.Total-s.cfg.Reserve-pinned
		if need <= room {
			continue
		}
		msg := fmt.Sprintf("consumer %q can never fit: it claims %s and %s cushion, and GPU %d has %s in all", t.cfg.Name, t.configured(), s.cushion(c), c.Index, c.Total)
		if s.cfg.Reserve > 0 {
			msg += fmt.Sprintf(", less %s reserve", s.cfg.Reserve)
		}
		if pinned > 0 {
			msg += fmt.Sprintf(", less %s of pinned consumers", pinned)
		}
		return &Refusal{Code: NeverFits, Message: msg + ": nothing was unloaded; lower its vram if that is too high, or run it elsewhere", Detail: s.detail(t)}
	}
	return nil
}

// inTheWay says why a target can't fit, though all that may be unloaded for it were.
func (s *State) inTheWay(t *slot) string {
	var parts []string
	s.cards(t, func(c *card, _ *holding) {
		sh := s.sheet(c, t)
		l := sh.account()
		if l.Outsiders > 0 {
			part := fmt.Sprintf("programs that are none of the broker's hold %s", l.Outsiders)
			if len(c.Outsiders) > 0 {
				part += " (on the GPU run: " + strings.Join(c.Outsiders, ", ") + ")"
			}
			parts = append(append(parts, part), s.unflushable(c, t)...)
		}
		for _, v := range s.around() {
			h := v.hold(c.Index)
			if v != t && v.state != Idle && conflict(t, v) && s.protects(t, v) != "" {
				parts = append(parts, fmt.Sprintf("%s conflicts with it and is protected by %s", v.cfg.Name, s.protects(t, v)))
				continue
			}
			if h == nil || v == t {
				continue
			}
			e := Entry{State: v.state, Booking: h.booking, Residue: h.residue}
			switch p := s.protects(t, v); {
			case e.booked() == 0:
			case v.state == Idle:
				part := fmt.Sprintf("%s has not given back %s", v.cfg.Name, h.residue)
				if h.guessed {
					part += " since a load of it failed, unless a program holds that which was started meanwhile"
					if len(c.Outsiders) > 0 && l.Outsiders == 0 {
						part += " (on the GPU run: " + strings.Join(c.Outsiders, ", ") + ")"
					}
				}
				parts = append(parts, part)
			case p != "":
				parts = append(parts, fmt.Sprintf("%s holds %s and is protected by %s", v.cfg.Name, h.booking, p))
			}
		}
	})
	return orElse(strings.Join(parts, "; "), "the memory is not there")
}

// detail is who holds the memory that a target needs.
func (s *State) detail(t *slot) *Detail {
	d := &Detail{Need: t.cfg.Claim, Free: map[int]gpu.Bytes{}, Unloads: t.want.tries}
	s.cards(t, func(c *card, h *holding) {
		d.Need = s.need(t, h, c)
		sh := s.sheet(c, t)
		l := sh.account()
		d.Free[c.Index] = c.Free
		for i, v := range sh.slots {
			if b := sh.entries[i].booked(); b > 0 && v != t {
				d.Holders = append(d.Holders, Holder{Name: v.cfg.Name, State: v.state.String(), Bytes: b, Protected: s.protects(t, v)})
			}
		}
		if l.Outsiders > 0 {
			d.Holders = append(d.Holders, Holder{Name: "outsiders", Bytes: l.Outsiders, Protected: strings.Join(c.Outsiders, ", ")})
		}
	})
	return d
}
