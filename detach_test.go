package gpubroker

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestARequestThatLoadsItsServerOutlivesItsClientUntilItsAnswerBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, leave := context.WithCancel(context.WithValue(t.Context(), t, "kept"))
		ctx, d := detach(client, time.Minute)
		defer d.end()
		require.Equal(t, "kept", ctx.Value(t))
		leave()
		pass(59 * time.Second)
		require.NoError(t, ctx.Err(), "the load goes on")
		d.answered()
		require.Error(t, ctx.Err(), "nobody waits for the answer")
	})
}

func TestARequestThatLoadsItsServerDoesNotOutliveItsClientForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, leave := context.WithCancel(t.Context())
		ctx, d := detach(client, time.Minute)
		defer d.end()
		leave()
		pass(time.Minute + time.Nanosecond)
		require.Error(t, ctx.Err())
	})
}

func TestARequestWhoseAnswerHasBegunEndsWithItsClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, leave := context.WithCancel(t.Context())
		ctx, d := detach(client, time.Minute)
		defer d.end()
		d.answered()
		require.NoError(t, ctx.Err())
		leave()
		synctest.Wait()
		require.Error(t, ctx.Err())
	})
}

func TestARequestThatIsOverLeavesNothingBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // which fails if a goroutine is left
		client, leave := context.WithCancel(t.Context())
		ctx, d := detach(client, time.Minute)
		d.end()
		require.Error(t, ctx.Err())
		leave()
		synctest.Wait()
		require.Nil(t, d.left)
	})
}

// pass lets time go by on the clock of a synctest bubble, which waits for nothing
// but that everything else in the bubble has come to rest.
func pass(d time.Duration) { time.Sleep(d) } // of the bubble's clock: no time is spent
