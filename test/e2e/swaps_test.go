package e2e

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// Requests come for a, b, a, a and c, of which one fits.
func TestFC24_FiveRequestsForThreeModelsNeedThreeLoads(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "overtake_min 30s", Consumers: []consumer{plainModel("a", 9), plainModel("b", 9), plainModel("c", 9)}})
	s.serve("a")
	first, end := s.works("a")
	b := s.send("POST", "/b/synthesize", "x")
	s.waitQueued("b", 1)
	second := s.send("POST", "/a/synthesize", "x")
	s.waitQueued("a", 1)
	third := s.send("POST", "/a/synthesize", "x")
	s.waitQueued("a", 2)
	c := s.send("POST", "/c/synthesize", "x")
	s.waitQueued("c", 1)
	end()
	s.ok(first)
	atB, atC := s.ok(b).at, s.ok(c).at
	require.True(t, s.ok(second).at.Before(atB), "the model is there")
	require.True(t, s.ok(third).at.Before(atB), "the model is there")
	require.True(t, atB.Before(atC), "nobody who came later passes b")
	for _, name := range []string{"a", "b", "c"} {
		require.Equal(t, 1, s.servers[name].Stats().Loads, name)
	}
	s.noOOM()
}

// slowModel takes long enough to load that what was measured of it counts.
func slowModel(name string, lines ...string) consumer {
	m := plainModel(name, 9, lines...)
	m.Options = modelserver.Options{Name: name, VRAM: gib(9), LoadTime: 100 * time.Millisecond, UnloadTime: 20 * time.Millisecond}
	return m
}

// One request of a chain asks a, the next asks b with what a said, and so on.
func TestFC27_TwoThatAlternateAreSwappedOnlyAfterTheHold(t *testing.T) {
	t.Parallel()
	const hold = 4
	s := start(t, layout{Global: "hold 4", Consumers: []consumer{slowModel("a"), slowModel("b")}})
	s.serve("a")
	s.serve("b") // now it is known how long a switch takes
	for _, name := range []string{"a", "b"} {
		answer := s.ok(s.send("POST", "/"+name+"/synthesize", "x"))
		require.GreaterOrEqual(t, answer.took, hold*100*time.Millisecond, "the other one is held for %d times its load", hold)
	}
	require.Equal(t, 2, s.servers["a"].Stats().Loads)
	require.Equal(t, 2, s.servers["b"].Stats().Loads)
	s.noOOM()
}

func TestFC27_APinEndsTheSwapping(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9, "pin"), plainModel("b", 9)}})
	for range 3 {
		s.serve("a")
		require.Equal(t, 422, s.post("/b/synthesize", "x").status, "it can't be served beside a")
	}
	require.Equal(t, 1, s.servers["a"].Stats().Loads)
	require.Zero(t, s.servers["a"].Stats().UnloadCalls)
	require.Zero(t, s.servers["b"].Stats().Loads)
}
