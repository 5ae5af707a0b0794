package nvml

import (
	"context"
	"fmt"
	"time"
)

// closeTimeout bounds how long closing waits for a look that does not come back.
const closeTimeout = 5 * time.Second

// turn lets one look at a time into a driver. A look at a sick GPU may hang in
// the kernel, where nothing can end it: its caller stops waiting, and the next
// one must not start a second beside it.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

// take waits for the turn; give ends it.
func (t turn) take(ctx context.Context) error {
	select {
	case t <- struct{}{}:
		return nil
	default:
	}
	select {
	case t <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("an earlier look at the GPUs has not come back yet (a sick GPU can hang the driver): %w", ctx.Err())
	}
}

func (t turn) give() { <-t }

// inTurn runs look when its turn has come, and returns when it has ended or ctx
// has. In the second case the goroutine lives on until look returns, with the
// turn in its hand; so there is never more than one.
func inTurn[T any](ctx context.Context, t turn, look func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	var none T
	if err := t.take(ctx); err != nil {
		return none, err
	}
	done := make(chan answer, 1)
	go func() {
		// The turn is given back before the answer is handed over, so that a
		// caller which has its answer can look or close at once.
		value, err := func() (T, error) {
			defer t.give()
			return look()
		}()
		done <- answer{value, err}
	}()
	select {
	case a := <-done:
		return a.value, a.err
	case <-ctx.Done():
		return none, fmt.Errorf("the GPU driver has not answered in time: %w", ctx.Err())
	}
}
