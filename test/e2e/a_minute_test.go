package e2e

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Tests that last a minute. The go command starts tests in the order of their files' names: these come first, so that
// nothing has to wait for them in the end.

func TestVictimWhoseWorkDoesNotEndIsLetBeAndTriedLater(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "drain_timeout 500ms\novertake 0\novertake_min 0", Consumers: []consumer{plainModel("a", 9, "switch_cost 1ms"), plainModel("b", 9)}})
	s.serve("a")
	release := s.hold("a")
	asked := time.Now()
	wants := s.sendPatiently("POST", "/b/synthesize", "x")
	s.waitQueued("b", 1)
	s.until("a is let be", func() bool { return len(s.decisions("reopen")) == 1 })
	drain, reopen := s.decisions("drain")[0], s.decisions("reopen")[0]
	require.Equal(t, "a", drain.Consumer)
	require.Equal(t, "b", drain.Target)
	require.GreaterOrEqual(t, reopen.At.Sub(drain.At), 500*time.Millisecond)
	require.Less(t, reopen.At.Sub(drain.At), 500*time.Millisecond+late)
	require.Contains(t, reopen.Reason, "drain_timeout")
	slot := s.status().Consumers["a"].Slots[0]
	require.Equal(t, "open", slot.Gate)
	require.Zero(t, s.unloadCalls())
	require.Equal(t, 200, release().status, "its work was never cut")
	s.serve("a") // it serves again
	require.Equal(t, 1, s.status().Consumers["b"].Waiting)

	select { // and a minute later it is tried again
	case got := <-wants:
		require.NoError(t, got.err)
		require.Equal(t, 200, got.status, "%s", got.body)
		require.Greater(t, got.at.Sub(asked), time.Minute)
	case <-time.After(3 * time.Minute):
		t.Fatal("it was not tried again")
	}
	require.Equal(t, 1, s.servers["a"].Stats().UnloadCalls)
	require.Zero(t, s.servers["a"].Stats().UnloadsWhileBusy)
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
}

func TestWhatWasLearntIsKeptWhileCaddyRuns(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: pair()})
	s.learns()
	before := s.memories()
	deadline := time.Now().Add(2 * time.Minute) // it is written once a minute
	for len(learntFiles(t, s.dir)) == 0 {
		require.True(t, time.Now().Before(deadline), "it was not written")
		time.Sleep(100 * time.Millisecond)
	}
	s.kill()
	s.again()
	require.Equal(t, before, s.memories())
}
