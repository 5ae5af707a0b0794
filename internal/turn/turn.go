// Package turn keeps looks at GPUs from joining one that hangs.
package turn

import (
	"context"
	"fmt"
	"time"
)

// CloseTimeout bounds how long closing waits for a look that does not come back.
const CloseTimeout = 5 * time.Second

// Turn lets one look at a time into a driver. A look at a sick GPU may hang in
// the kernel, where nothing can end it: its caller stops waiting, and the next
// one must not start a second beside it.
type Turn chan struct{}

// New makes a turn that nobody has.
func New() Turn { return make(Turn, 1) }

// Take waits for the turn; Give ends it.
func (t Turn) Take(ctx context.Context) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	select {
	case t <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("an earlier look at the GPUs has not come back yet (a sick GPU can hang the driver): %w", ctx.Err())
	}
}

// Give gives the turn back.
func (t Turn) Give() { <-t }

// Close waits for a look that its caller has left behind.
func (t Turn) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), CloseTimeout)
	defer cancel()
	if err := t.Take(ctx); err != nil {
		return err
	}
	t.Give()
	return nil
}

// In runs look when its turn has come, and returns when it has ended or ctx
// has. In the second case the goroutine lives on until look returns, with the
// turn in its hand; so there is never more than one.
func In[T any](ctx context.Context, t Turn, look func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	var none T
	if err := t.Take(ctx); err != nil {
		return none, err
	}
	done := make(chan answer, 1)
	go func() {
		// The turn is given back before the answer is handed over, so that a
		// caller which has its answer can look or close at once.
		value, err := func() (T, error) {
			defer t.Give()
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
