package e2e

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// busyPlain tells how the broker asks a pretending plain server whether it works.
const busyPlain = "busy GET /health {\nbusy $.working\n}"

// leftWork is a site whose server a computes on for a client that has left in the middle of its request at path; b is loaded, too.
func leftWork(t *testing.T, path, global, lines string) *site {
	t.Helper()
	a := plainModel("a", 5, lines)
	a.WorksOn = true
	s := start(t, layout{Global: global, Consumers: []consumer{a, plainModel("b", 5)}})
	s.serve("b")
	s.serve("a")
	s.holdWork("a")
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	gone := s.goCtx(ctx, "POST", "/a"+path, "x")
	s.working("a")
	leave()
	require.Error(t, s.await(gone).err)
	s.until("its place is free", func() bool { return s.status().Consumers["a"].Slots[0].Held == 1 })
	return s
}

func TestK8_NoOtherModelStartsBesideWorkWhoseClientHasLeft(t *testing.T) {
	t.Parallel()
	for name, path := range map[string]string{"before the answer": "/synthesize", "in the middle of a stream": "/stream?events=4&ms=10"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := leftWork(t, path, "", busyPlain)
			next := s.send("POST", "/b/synthesize", "x")
			s.waitQueued("b", 1)
			own := s.send("POST", "/a/synthesize", "x") // a warm client's next one enters at once
			s.until("both are at the server", func() bool { return s.servers["a"].Stats().Working == 2 })
			require.Equal(t, 1, s.status().Consumers["b"].Waiting)
			s.letWork("a")
			s.ok(own)
			s.ok(next)
			require.Empty(t, modelserver.Overlap(s.servers["a"], s.servers["b"]))
			require.Zero(t, s.servers["a"].Stats().Aborted)
		})
	}
}

func TestK8_ItIsNotUnloadedBesideSuchWorkEither(t *testing.T) {
	t.Parallel()
	s := leftWork(t, "/synthesize", "", busyPlain)
	unloaded := s.byHand("consumers/a/unload")
	s.until("it drains", func() bool { return s.status().Consumers["a"].Slots[0].Gate == "closed" })
	require.Zero(t, s.servers["a"].Stats().UnloadCalls)
	s.letWork("a")
	s.ok(unloaded)
	s.waitState("a", "IDLE")
	require.Zero(t, s.servers["a"].Stats().UnloadsWhileBusy)
}

func TestK8_TheHoldEndsAfterDrainTimeout(t *testing.T) {
	t.Parallel()
	for name, lines := range map[string]string{"with a busy route": busyPlain, "without one, said to work on": "stops_when_left off"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := leftWork(t, "/synthesize", "drain_timeout 800ms", lines)
			began := time.Now()
			a := s.serve("b")
			require.Less(t, a.took, 5*time.Second)
			require.Greater(t, time.Since(began), 300*time.Millisecond, "it waited")
			require.NotEmpty(t, s.decisions("busy_unknown"))
		})
	}
}

func TestK8_AServerThatStopsWithItsClientHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "drain_timeout 1m", Consumers: []consumer{plainModel("a", 5, busyPlain), plainModel("b", 5)}})
	s.serve("b")
	s.serve("a")
	end := s.holdWork("a")
	defer end()
	ctx, leave := context.WithCancel(context.Background())
	gone := s.goCtx(ctx, "POST", "/a/synthesize", "x")
	s.working("a")
	leave()
	require.Error(t, s.await(gone).err)
	a := s.serve("b")
	require.Less(t, a.took, 3*time.Second)
}
