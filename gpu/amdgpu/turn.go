package amdgpu

import (
	"context"
	"fmt"
	"time"
)

// closeTimeout bounds how long closing waits for a look that does not come back.
const closeTimeout = 5 * time.Second

// turn lets one look at a time into the driver, of all samplers of this process.
// A read of a sick GPU may hang in the kernel, where nothing can end it: its
// caller stops waiting, and the next one must not start a second beside it.
var turn = make(chan struct{}, 1)

// inTurn runs look when its turn has come, and returns when it has ended or ctx
// has. In the second case the goroutine lives on until look returns, with the
// turn in its hand; so there is never more than one.
func inTurn[T any](ctx context.Context, look func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	var none T
	if ctx.Err() != nil {
		return none, ctx.Err()
	}
	select {
	case turn <- struct{}{}:
	case <-ctx.Done():
		return none, fmt.Errorf("an earlier look at the GPUs has not come back yet (a sick GPU can hang the driver): %w", ctx.Err())
	}
	done := make(chan answer, 1)
	go func() {
		// The turn is given back before the answer is handed over, so that a
		// caller which has its answer can look or close at once.
		value, err := func() (T, error) {
			defer func() { <-turn }()
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
