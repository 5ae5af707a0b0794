package scheduler

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// claim is what the slot's load takes of each of its GPUs: the larger of what the configuration
// says and of what was seen lately (accounting §1).
func (sl *slot) claim() gpu.Bytes {
	seen := sl.seenLately
	if sl.want.atMost > 0 {
		seen = min(seen, sl.want.atMost)
	}
	return max(sl.configured(), seen)
}

// configured is what the configuration says that the slot's load takes of each of its GPUs.
func (sl *slot) configured() gpu.Bytes {
	n := gpu.Bytes(len(sl.on))
	if n <= 1 {
		return sl.cfg.Claim
	}
	return sl.cfg.Claim / n * 110 / 100
}

// totalClaim is what the slot's load takes of all its GPUs together, before any allowance.
func (sl *slot) totalClaim() (claim gpu.Bytes, seen bool) {
	if sl.claim() == sl.configured() {
		return sl.cfg.Claim, false
	}
	return sl.claim() * gpu.Bytes(max(1, len(sl.on))), true
}

// learn notes what a load took of all GPUs of a slot.
func (s *State) learn(sl *slot, taken gpu.Bytes) {
	sl.took.add(taken)
	s.expect(sl)
}

// learnPeak notes what was seen of a load that ends without an unload of ours.
func (s *State) learnPeak(sl *slot) {
	s.learn(sl, sl.peak())
	for _, h := range sl.on {
		h.peak = 0
	}
}

// peak is the most that was measured of a slot, or reported by its server, since its load; 0: nothing was.
func (sl *slot) peak() (sum gpu.Bytes) {
	for _, h := range sl.on {
		sum += h.peak
	}
	return sum
}

// expect brings up to date what was seen lately of a slot. It is bounded by its GPUs, so that a
// job that once filled a card doesn't keep its consumer from ever being loaded again.
func (s *State) expect(sl *slot) {
	seen := sl.took.lately() / gpu.Bytes(max(1, len(sl.on)))
	s.cards(sl, func(c *card, _ *holding) {
		seen = min(seen, c.Total-s.cfg.Reserve-s.cushion(c))
	})
	sl.seenLately = max(0, seen)
}

// expectAll is expect for all slots, after their settings or their GPUs have changed.
func (s *State) expectAll() {
	for _, sl := range s.slots {
		s.expect(sl)
	}
}

// checkClaim puts on record that a load claims more than the configuration says.
func (s *State) checkClaim(now time.Time, t *slot) {
	claim, raised := t.totalClaim()
	switch {
	case !raised:
		t.raisedTo = 0
	case t.raisedTo == 0 || claim > t.raisedTo+t.raisedTo/20:
		t.raisedTo = claim
		s.decide(Decision{At: now, Kind: "claim_raised", Slot: t.cfg.Name, GPU: t.gpu(), Need: claim,
			Reason: fmt.Sprintf("its vram is %s, and %s was seen of it lately: its next load claims %s; raise vram, or make its server take less", t.cfg.Claim, max(claim, t.took.lately()), claim)})
	}
}

// settleForLess lowers a claim that is larger than the configured one to what the slot could have once
// some slots were gone. It reports whether that is less.
func (s *State) settleForLess(t *slot, gone ...*slot) bool {
	before := t.claim()
	if before <= t.configured() {
		return false
	}
	room := before
	known := s.cards(t, func(c *card, h *holding) {
		room = min(room, s.room(c, t, gone)+s.heldBy(t, h)-s.cushion(c))
	})
	if !known || room >= before {
		return false
	}
	t.want.atMost = max(1, room)
	return true
}

// recent are the weights of a footprint: each load counts for 0.85 of the next.
const recent = 0.85

// lately is the 95th percentile of what loads took, of which recent ones count for more; 0: nothing was
// seen. A load like no other is forgotten after about nine others.
func (f *footprint) lately() gpu.Bytes {
	type weighted struct {
		taken  gpu.Bytes
		weight float64
	}
	all := make([]weighted, 0, len(f.latest))
	weight, total := 1.0, 0.0
	for _, taken := range slices.Backward(f.latest) {
		all = append(all, weighted{taken, weight})
		total += weight
		weight *= recent
	}
	slices.SortStableFunc(all, func(a, b weighted) int { return int(clamp(b.taken-a.taken, -1, 1)) })
	above := 0.0
	for _, w := range all {
		if above += w.weight; above > 0.05*total {
			return w.taken
		}
	}
	return 0
}
