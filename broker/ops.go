package broker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Errors of what people ask for by hand.
var (
	ErrUnknownConsumer = errors.New("no such consumer")
	ErrPinned          = errors.New("the consumer is pinned: unload it with force")
	ErrCannot          = errors.New("the consumer can't do that")
)

// slotNames are the names of what a name of the admin API stands for: a consumer's slots, or CONSUMER/MODEL itself. None: it is not known,
// or has none yet. It holds mu.
func (b *Broker) slotNames(name string) (out []string) {
	if c := b.consumers[name]; c != nil {
		for _, sl := range c.real().slots {
			out = append(out, sl.name)
		}
		return out
	}
	if b.slots[name] != nil {
		out = append(out, name)
	}
	return out
}

// slotsNamed is slotNames with an error where nobody has that name. A consumer with models auto may have no slot, before its first
// request. It holds mu.
func (b *Broker) slotsNamed(name string) ([]string, error) {
	slots := b.slotNames(name)
	if len(slots) == 0 && b.consumers[name] == nil {
		return nil, fmt.Errorf("%w: %q", ErrUnknownConsumer, name)
	}
	return slots, nil
}

// oneSlot is the slot of a consumer that has just one, or of a model CONSUMER/MODEL. It holds mu.
func (b *Broker) oneSlot(name string) (string, error) {
	switch slots, err := b.slotsNamed(name); {
	case err != nil:
		return "", err
	case len(slots) == 0:
		return "", fmt.Errorf("%w: no model of %q has been asked for yet", ErrCannot, name)
	case len(slots) > 1:
		return "", fmt.Errorf("%w: %w", ErrCannot, severalModels(name, slots))
	default:
		return slots[0], nil
	}
}

// severalModels is the error for a consumer where one of its models must be meant.
func severalModels(name string, slots []string) error {
	return fmt.Errorf("%q has several models: name one of %s", name, strings.Join(slots, ", "))
}

// LoadByHand loads a consumer, or a model CONSUMER/MODEL, by the same rules as for a request. It returns
// when that is done or has failed; if ctx ends before, the load goes on.
func (b *Broker) LoadByHand(ctx context.Context, name string) error {
	b.mu.Lock()
	slot, err := b.oneSlot(name)
	b.mu.Unlock()
	if err != nil {
		return err
	}
	v, _ := b.slot(slot)
	switch {
	case v.State == scheduler.Ready && v.GateOpen:
		return nil
	case !v.CanLoad:
		return fmt.Errorf("%w: %q has no load route: it loads inside its first request", ErrCannot, name)
	}
	consumer, model, _ := strings.Cut(slot, "/")
	done := make(chan error, 1)
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return errors.New("the broker is stopping")
	}
	b.tasks.Go(func() { // it goes on if nobody waits for it any more, within the consumer's budget
		l, err := b.Acquire(b.ctx, Request{Consumer: consumer, Model: model, Priority: DefaultPriority})
		l.Release(scheduler.NoAnswer) // no use: it moves the idle clock alone
		done <- err
	})
	b.mu.Unlock()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// UnloadByHand unloads a consumer with all its models, or one model CONSUMER/MODEL; running work ends first. It returns when
// the memory is back, or with what went wrong.
func (b *Broker) UnloadByHand(ctx context.Context, name string, force bool) error {
	b.mu.Lock()
	slots, err := b.slotsNamed(name)
	b.mu.Unlock()
	if err != nil {
		return err
	}
	if s := b.current.Load().Config.Scheduler; s != config.Evicting {
		return fmt.Errorf("%w: the scheduler is %s, which unloads nothing", ErrCannot, s)
	}
	var errs []error
	for _, slot := range slots {
		errs = append(errs, b.unloadSlot(ctx, slot, force))
	}
	return errors.Join(errs...)
}

func (b *Broker) unloadSlot(ctx context.Context, name string, force bool) error {
	v, ok := b.slot(name)
	switch {
	case !ok:
		return nil // it has gone meanwhile
	case v.Pinned && !force:
		return fmt.Errorf("%w: %q", ErrPinned, name)
	case !v.CanUnload:
		return fmt.Errorf("%w: %q has no unload route", ErrCannot, name)
	}
	since := time.Now()
	b.step(scheduler.Unload{Slot: name})
	for {
		b.mu.Lock()
		changed, closed := b.changed, b.closed
		unloaded, failure := b.records.unload(name, since)
		b.mu.Unlock()
		v, ok := b.slot(name)
		switch {
		case !ok || unloaded || v.State == scheduler.Idle && v.GateOpen:
			return nil
		case failure != "":
			return fmt.Errorf("%q was not unloaded: %s", name, failure)
		case closed:
			return errors.New("the broker is stopping")
		case v.State == scheduler.Ready && v.GateOpen: // it was being loaded when this was asked for
			b.step(scheduler.Unload{Slot: name})
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Drain lets no more requests of a consumer, or of a model CONSUMER/MODEL, in, or of all if the name is empty:
// those that wait are refused at once. It returns when the last that runs has
// ended. Resume lets them in again.
func (b *Broker) Drain(ctx context.Context, name string) error {
	slots, err := b.drain(name, false)
	if err != nil {
		return err
	}
	return b.until(ctx, func() bool {
		if name == "" {
			return b.state.Running() == 0
		}
		return !slices.ContainsFunc(slots, func(slot string) bool {
			v, _ := b.state.Slot(slot)
			return v.Active+v.Held > 0
		})
	})
}

// drain begins or ends a Drain, and says of which slots.
func (b *Broker) drain(name string, off bool) ([]string, error) {
	slots := []string{""}
	if name != "" {
		b.mu.Lock()
		var err error
		if slots, err = b.slotsNamed(name); err != nil {
			b.mu.Unlock()
			return nil, err
		}
		if c := b.consumers[name]; c != nil {
			c.real().drained = !off
			if c.real().turns != nil {
				slots = append(slots, c.real().turns.name)
			}
		}
		b.mu.Unlock()
	}
	for _, slot := range slots {
		b.step(scheduler.Drain{Slot: slot, Off: off})
	}
	return slots, nil
}

// until waits for what the end of a job, or another event, can bring about. over is called under mu.
func (b *Broker) until(ctx context.Context, over func() bool) error {
	for {
		b.mu.Lock()
		if b.released == nil {
			b.released = make(chan struct{})
		}
		released, done := b.released, over()
		b.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-released:
		case <-b.ctx.Done():
			return errors.New("the broker is stopping")
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Resume ends a Drain.
func (b *Broker) Resume(name string) error {
	_, err := b.drain(name, true)
	return err
}

// StopAdmitting is Drain of all, without waiting, and for good: the process ends.
func (b *Broker) StopAdmitting() {
	b.step(scheduler.Drain{Final: true})
	b.wakeFollowers()
}

// Ending refuses a request that can't be served any more because the process ends; nil: it does not.
func (b *Broker) Ending(consumer string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r := b.state.Ending(); r != nil {
		return b.turnAway(time.Now(), consumer, r)
	}
	return nil
}

// unload is what became of an unload of a consumer since then: it may be loaded
// again by the time that anybody looks. Neither: it is under way.
func (r *ring) unload(name string, since time.Time) (done bool, failure string) {
	for d := range r.latest {
		if d.At.Before(since) {
			break
		}
		if d.Slot == name {
			switch d.Kind {
			case "unloaded", "evicted", "idle_unloaded", "gone":
				return true, ""
			case "unload_failed", "reopen":
				return false, d.Reason
			}
		}
	}
	return false, ""
}

func (b *Broker) slot(name string) (scheduler.SlotView, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state.Slot(name)
}

// DefaultPriority is that of a job for which nothing else is said. Lower is more urgent.
const DefaultPriority = 100
