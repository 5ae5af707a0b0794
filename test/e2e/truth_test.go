package e2e

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

func TestN2_AModelThatSomebodyElseUnloadedIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	for name, lines := range map[string]string{"inferred": "", "measured": "processes a"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Global: "probe_interval 1m", Consumers: []consumer{plainModel("a", 9, lines), plainModel("b", 12)}})
			s.serve("a")
			resp, err := http.Post(s.servers["a"].URL()+"/api/admin/unload", "", nil)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, 200, resp.StatusCode)
			s.until("its memory is free", func() bool { return s.status().GPUs[0].Used == 0 })
			require.Equal(t, "READY", s.state("a"), "nobody has told the broker")
			got := s.serve("b")
			require.Less(t, got.took, 5*time.Second, "it does not wait for evict_wait")
			require.Contains(t, s.decisions("evicted")[0].Reason, "gone already")
		})
	}
}

func TestN2_AnOutsiderThatComesDuringALoadIsNotTheServersResidue(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "load_timeout 400ms", Consumers: []consumer{plainModel("a", 9, "processes a")}})
	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.HangPaths = []string{"/api/admin/load"} })
	t.Cleanup(func() { s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.HangPaths = nil }) })
	out := s.send("POST", "/a/synthesize", "x")
	s.waitState("a", "LOADING")
	s.outsider("game", gib(5))
	require.Equal(t, "load_failed", s.await(out).code())
	s.until("it is an outsider's", func() bool {
		st := s.status()
		return st.GPUs[0].Outsiders == int64(gib(5)) && st.Consumers["a"].Slots[0].Residue == 0
	})
}
