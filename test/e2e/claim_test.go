package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// A model that took more than its vram is not loaded by that figure again (K9).
func TestK9_TheNextLoadClaimsWhatWasSeenAlsoAfterARestart(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]consumer{
		"in the free memory":   {Options: modelserver.Options{Name: "a", VRAM: gib(9)}, Lines: "lifecycle_by_hand\nvram 4GiB\nhealth /health {\nloaded $.loaded\n}\nload POST /api/admin/load\nunload POST /api/admin/unload"},
		"by process":           {Options: modelserver.Options{Name: "a", VRAM: gib(9)}, Lines: "vram 4GiB\nprocesses a"},
		"by the server's word": {Options: modelserver.Options{Name: "a", VRAM: gib(11)}, Lines: "vram 3GiB"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Consumers: []consumer{c, plainModel("b", 10)}})
			vram := strings.Fields(strings.ReplaceAll(c.Lines, "lifecycle_by_hand", ""))[1]
			require.Equal(t, "config", s.status().Consumers["a"].Slots[0].ClaimSource)
			s.serve("a")
			s.looked()
			s.serve("b")
			slot := s.status().Consumers["a"].Slots[0]
			require.Equal(t, int64(c.VRAM), slot.Claim)
			require.Equal(t, "measured", slot.ClaimSource)
			s.serve("a") // 6 GiB are free, which is more than its vram
			said := s.decisions("claim_raised")
			require.Len(t, said, 1)
			require.Contains(t, said[0].Reason, "its vram is "+vram)
			require.Contains(t, said[0].Reason, c.VRAM.String()+" was seen")
			require.Equal(t, 1, s.servers["b"].Stats().Unloads)

			s.doByHand("consumers/a/unload")
			s.serve("b")
			s.restart()
			s.until("what is loaded is known", func() bool { return s.state("a") == "IDLE" && s.state("b") == "READY" })
			s.serve("a")
			require.Equal(t, 2, s.servers["b"].Stats().Unloads)
			require.Len(t, s.decisions("claim_raised"), 1)
			require.Zero(t, s.status().Scheduler.LoadFailures)
			s.noOOM()
		})
	}
}

// looked waits for a look at the GPUs that has not begun yet.
func (s *site) looked() {
	s.t.Helper()
	now := time.Now()
	s.until("the GPUs are looked at", func() bool {
		at, err := time.Parse(time.RFC3339Nano, s.status().GPUs[0].SampledAt)
		return err == nil && at.After(now)
	})
}

// So it is for a server that the broker starts, whose memory ends with it.
func TestK9_AStartedServerThatTookMoreThanItsVRAMClaimsItAtItsNextStart(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "4GiB", args: "-vram 9GiB"}, started{name: "two", vram: "6GiB"})
	s.serve("one")
	s.looked()
	require.Empty(t, s.decisions("claim_raised"), "it has not been loaded by that figure")
	s.serve("two")
	require.False(t, s.process("one").Running)
	s.serve("one")
	require.False(t, s.process("two").Running, "6 GiB were free, which is more than its vram")
	said := s.decisions("claim_raised")
	require.Len(t, said, 1)
	require.Contains(t, said[0].Reason, "its vram is 4GiB")
	require.Contains(t, said[0].Reason, "9GiB was seen")
	require.EqualValues(t, 2, s.status().Scheduler.Evictions)
	require.Zero(t, s.status().Scheduler.LoadFailures)
}
