package turn

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestHangingLookIsLeftBehindAndNoSecondJoinsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turn := New()
		hang := make(chan struct{})
		running, most := 0, 0
		look := func() (int, error) {
			running++
			most = max(most, running)
			<-hang
			running--
			return 7, nil
		}
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			start := time.Now()
			if _, err := In(ctx, turn, look); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v, want the deadline", err)
			}
			if took := time.Since(start); took != time.Second {
				t.Errorf("returned after %v, want 1s", took)
			}
			cancel()
		}
		close(hang)
		if got, err := In(t.Context(), turn, look); got != 7 || err != nil {
			t.Errorf("after the hang: %v, %v", got, err)
		}
		if most != 1 {
			t.Errorf("%d looks at once", most)
		}
	})
}
