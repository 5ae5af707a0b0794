package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// withoutDriver skips the test on a machine whose GPUs can be read.
func withoutDriver(s *site) {
	s.t.Helper()
	if st := s.status(); st.Sampler != "" && st.Sampler != "fallback" {
		s.t.Skip("this machine has a GPU, which is read by " + st.Sampler)
	}
}

func TestN5_WithoutADriverConfiguredSizesServe(t *testing.T) {
	t.Parallel()
	for name, sampler := range map[string]string{"auto with a fallback": "gpu auto {\nfallback 16GiB\n}", "static": "gpu static 16GiB"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Sampler: sampler, Consumers: []consumer{plainModel("a", 9), plainModel("b", 9), plainModel("huge", 17)}})
			if strings.Contains(sampler, "auto") {
				withoutDriver(s)
			}
			s.serve("a")
			s.serve("b")
			st := s.status()
			require.NotEmpty(t, st.Degraded)
			require.Equal(t, "healthy", st.GPUs[0].Health)
			require.EqualValues(t, gib(16), st.GPUs[0].Total)
			require.EqualValues(t, 1, st.Scheduler.Evictions)
			require.Contains(t, s.log(), "configured sizes")
			require.Equal(t, "never_fits", s.refusal(s.post("/huge/synthesize", "x")).Code)
		})
	}
}

func TestN5_WithoutADriverAndASizeTheRefusalSaysWhatToWrite(t *testing.T) {
	t.Parallel()
	for name, sampler := range map[string]string{"auto": "gpu auto", "nvidia_smi": "gpu nvidia_smi {\npath /nowhere/nvidia-smi\n}"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Sampler: sampler, NoGPU: true, Consumers: []consumer{plainModel("a", 9)}})
			withoutDriver(s)
			r := s.refusal(s.post("/a/synthesize", "x"))
			require.Equal(t, "gpu_lost", r.Code)
			require.NotZero(t, r.RetryAfter)
			require.Contains(t, r.Message, "gpu auto { fallback 24GiB }")
			require.Contains(t, r.Message, "nvidia-smi")
			s.reloaded(func(c string) string { return strings.Replace(c, sampler, "gpu static 16GiB", 1) })
			s.until("the declared GPU is known", func() bool { return len(s.status().GPUs) == 1 })
			s.serve("a")
		})
	}
}

func TestN5_AGPUThatIsNotThereIsARefusalThatListsThoseThatAre(t *testing.T) {
	t.Parallel()
	for want, sampler := range map[string]string{"there is GPU 0 only": "", "there are GPU 0 and GPU 1 only": "gpu static 16GiB 16GiB"} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Sampler: sampler, Consumers: []consumer{plainModel("a", 9), plainModel("far", 9, "gpu 3")}})
			a := s.post("/far/synthesize", "x")
			require.Equal(t, 503, a.status)
			r := s.refusal(a)
			require.Equal(t, "gpu_lost", r.Code)
			require.Contains(t, r.Message, "GPU 3")
			require.Contains(t, r.Message, want)
			require.Less(t, a.took, 5*time.Second)
			s.serve("a")
		})
	}
}
