package broker

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Explained is what would happen if a request for a consumer came now.
type Explained struct {
	scheduler.Explanation
	Fallback string `json:"fallback,omitempty"` // whom the consumer's own ladder leads to at this moment instead
}

// Explain says what would happen if a request for a consumer came now, of that
// priority; nil: the consumer's own, as far as it has one. It does nothing.
func (b *Broker) Explain(name string, priority *int) (Explained, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	slot, err := b.oneSlot(name)
	if err != nil {
		return Explained{}, err
	}
	consumer, model, _ := strings.Cut(name, "/")
	c := b.configOf(consumer)
	p := DefaultPriority
	if c.Priority != nil {
		p = *c.Priority
	}
	if priority != nil {
		p = *priority
	}
	now := time.Now()
	out := Explained{Explanation: b.state.Explain(now, slot, p)}
	ladder := Request{Consumer: consumer, Model: model, Candidates: append([]string{consumer}, c.Fallback...)}
	if to, _ := b.choose(now, &ladder); to != nil && to.name != consumer {
		out.Fallback = to.name
		out.Reason += fmt.Sprintf("; but %s is warm, and serves it instead, where the route has no other fallback", to.name)
	}
	return out, nil
}

// Lent is a GPU that is lent, or was until now.
type Lent struct {
	GPU   int       `json:"gpu"`
	Until time.Time `json:"lent_until,omitzero"` // zero: it is not lent any more
}

// ErrUnknownGPU is the error of what names a GPU that is not there.
var ErrUnknownGPU = errors.New("no such GPU")

// Lend lends a GPU for so long to a person or a program that asks nobody: what
// is loaded there is unloaded when its work is done, and requests wait. 0 ends that.
func (b *Broker) Lend(index int, d time.Duration) (Lent, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return Lent{}, errStopping
	}
	now := time.Now()
	var there []int
	for _, g := range b.state.Snapshot(now).GPUs {
		there = append(there, g.Index)
		if g.Index != index {
			continue
		}
		out := Lent{GPU: index}
		if d > 0 {
			out.Until = now.Add(d).UTC().Round(0)
		}
		b.apply(now, scheduler.Lend{GPU: index, Until: now.Add(d)})
		b.ended()
		return out, nil
	}
	return Lent{}, fmt.Errorf("%w: %d; there are %v", ErrUnknownGPU, index, there)
}

// Pin pins a consumer by hand, or ends that, whatever its configuration says: until the process ends.
func (b *Broker) Pin(name string, on bool) error {
	b.mu.Lock()
	slots, err := b.slotsNamed(name)
	b.mu.Unlock()
	switch {
	case err != nil:
		return err
	case len(slots) == 0:
		return fmt.Errorf("%w: no model of %q has been asked for yet", ErrCannot, name)
	}
	for _, slot := range slots {
		b.step(scheduler.SetPin{Slot: slot, On: on})
	}
	return nil
}
