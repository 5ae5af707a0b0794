package e2e

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

func TestProbesStatusReadsAndCheapRoutesAreNoUse(t *testing.T) {
	t.Parallel()
	a := plainModel("a", 9, "bypass GET /audio/*")
	s := start(t, layout{Total: "20GiB", Global: "probe_interval 30ms", Consumers: []consumer{a, plainModel("c", 6), plainModel("b", 9)}})
	s.serve("a")
	s.serve("c")
	before := s.status().Consumers["a"]
	require.NotEmpty(t, before.LastUsed)
	probes := s.servers["a"].Stats().HealthProbes
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(t, s.servers["a"].WaitFor(ctx, func(st modelserver.Stats) bool { return st.HealthProbes >= probes+5 }))
	for range 5 {
		s.status()
		s.decisions("")
		require.Equal(t, 200, s.get("/gpu/healthz").status)
		require.Equal(t, 200, s.adminDo("GET", "/metrics", "", "").status)
		require.Equal(t, 200, s.adminDo("GET", "/gpu_broker/status", "", "").status)
		require.Equal(t, 200, s.get("/a/audio/big?bytes=1000").status)
		require.Equal(t, 200, s.do(context.Background(), "HEAD", "/a/synthesize", nil).status)
		require.Equal(t, 204, s.do(context.Background(), "OPTIONS", "/a/synthesize", nil).status)
	}
	after := s.status().Consumers["a"]
	require.Equal(t, before.LastUsed, after.LastUsed)
	require.Equal(t, before.TotalRequests, after.TotalRequests)
	s.serve("b")
	require.Equal(t, 1, s.servers["a"].Stats().UnloadCalls, "a is still the least recently used one")
	require.Zero(t, s.servers["c"].Stats().UnloadCalls)
}

func TestTouchedConsumerCountsAsUsed(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Total: "20GiB", Consumers: []consumer{plainModel("a", 9, "touch GET /audio/*"), plainModel("c", 6), plainModel("b", 9)}})
	s.serve("a")
	s.serve("c")
	require.Equal(t, 200, s.get("/a/audio/big?bytes=1000").status)
	s.serve("b")
	require.Zero(t, s.servers["a"].Stats().UnloadCalls)
	require.Equal(t, 1, s.servers["c"].Stats().UnloadCalls)
}

func TestHealthzIsCheapAndReadOnly(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 2)}})
	for _, path := range []string{"/gpu/healthz", "/gpu/"} {
		a := s.get(path)
		require.Equal(t, 200, a.status)
		require.Contains(t, string(a.body), `"status":"ok"`)
		require.Equal(t, 405, s.post(path, "x").status)
	}
	require.Equal(t, 405, s.post("/gpu/status", "x").status)
	require.JSONEq(t, `{"status":"ok"}`, string(s.adminDo("GET", "/gpu_broker/healthz", "", "").body))
	s.servers["a"].Kill()
	require.Equal(t, 200, s.get("/gpu/healthz").status, "it is the broker's liveness, not its servers'")
}

func TestStatusHasWhatTheContractNames(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("a")
	s.serve("b")
	s.until("its memory is seen", func() bool { return s.status().Consumers["b"].Slots[0].Seen == int64(gib(9)) })
	var doc map[string]any
	s.json("/gpu/status", &doc)
	has := func(m map[string]any, keys ...string) {
		t.Helper()
		for _, key := range keys {
			require.Contains(t, m, key)
		}
	}
	has(doc, "api_version", "gpu_count", "gpus", "total_memory", "free_memory", "used_memory", "scheduler", "queue", "consumers")
	has(doc["gpus"].([]any)[0].(map[string]any), "index", "uuid", "name", "total_memory", "free_memory", "used_memory", "health")
	has(doc["scheduler"].(map[string]any), "evictions", "queue_depth", "in_flight", "total_jobs", "last_wait_ms", "last_run_ms")
	b := doc["consumers"].(map[string]any)["b"].(map[string]any)
	has(b, "health", "loaded", "gpu_resident_mib", "active", "waiting", "total_requests", "last_used", "last_priority", "stay_warm_s", "pinned")
	require.Equal(t, true, b["loaded"])
	require.EqualValues(t, 9*1024, b["gpu_resident_mib"])
	require.EqualValues(t, 1, b["total_requests"])
	require.EqualValues(t, 100, b["last_priority"])
	has(b["slots"].([]any)[0].(map[string]any), "state", "gate", "booking", "seen", "claim_source", "gpu_index", "gpu_indices")
	a := doc["consumers"].(map[string]any)["a"].(map[string]any)
	require.Equal(t, false, a["loaded"])
	require.EqualValues(t, 2, doc["scheduler"].(map[string]any)["total_jobs"])
	require.EqualValues(t, gib(16), doc["total_memory"])

	// The admin endpoint shows the same document.
	var admin map[string]any
	require.NoError(t, json.Unmarshal(s.adminDo("GET", "/gpu_broker/status", "", "").body, &admin))
	require.Equal(t, doc["consumers"], admin["consumers"])
}

func TestStatusAnswersWhileEverythingIsBusy(t *testing.T) {
	t.Parallel()
	a := plainModel("a", 9)
	a.UnloadTime = 300 * time.Millisecond
	b := plainModel("b", 9)
	b.LoadTime = 300 * time.Millisecond
	s := start(t, layout{Consumers: []consumer{a, b}})
	s.serve("a")
	runs, end := s.works("a")
	var waits []<-chan answer
	for range 20 {
		waits = append(waits, s.send("POST", "/b/synthesize", "x"))
	}
	s.waitQueued("b", 20)
	seen := map[string]bool{}
	for first := true; s.servers["b"].Stats().Worked == 0; first = false {
		st := s.status()
		if first {
			end()
		}
		seen[st.Consumers["a"].Slots[0].State], seen[st.Consumers["b"].Slots[0].State] = true, true
		if len(st.Queue) > 0 && st.Consumers["b"].Slots[0].State != "READY" {
			require.NotEmpty(t, st.Queue[0].Reason, "each waiter has its reason")
		}
	}
	require.Subset(t, seen, map[string]bool{"READY": true, "STOPPING": true, "LOADING": true, "IDLE": true}, "it was seen in the middle of everything")
	s.ok(runs)
	for _, ch := range waits {
		s.ok(ch)
	}
}

func TestN5_TheStatusPathListsWhatIsThereAndAWrongOneIs404(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 2)}, Routes: "handle /else/* {\ngpu_broker_status\nrespond \"the next handler\"\n}"})
	var list struct{ Paths map[string]string }
	s.json("/gpu/", &list)
	for _, path := range []string{"status", "decisions", "healthz"} {
		require.NotEmpty(t, list.Paths[path])
		require.Equal(t, 200, s.get("/gpu/"+path).status)
	}
	for _, path := range []string{"/gpu/stauts", "/gpu/status/x", "/gpu/metrics"} {
		for _, method := range []string{"GET", "POST"} {
			a := s.do(context.Background(), method, path, nil)
			require.Equal(t, 404, a.status, "%s %s", method, path)
			r := s.refusal(a)
			require.Equal(t, "not_found", r.Code)
			for _, word := range []string{path, "status", "decisions", "healthz"} {
				require.Contains(t, r.Message, word)
			}
		}
	}
	require.Equal(t, 6.0, s.metric(`errors_total{code="not_found",consumer=""}`))
	require.Equal(t, "the next handler", string(s.get("/else/where").body), "a handler after it may serve the path")
	a := s.adminDo("GET", "/gpu_broker/", "", "")
	require.Equal(t, 200, a.status)
	require.Contains(t, string(a.body), "explain")
	require.Equal(t, 404, s.adminDo("GET", "/gpu_broker/stauts", "", "").status)
}

func TestN2_StayWarmIsTheTimeThatRules(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "idle_timeout 7m\nstay_warm diffusion 20m", Consumers: []consumer{
		plainModel("plain", 2), plainModel("category", 2, "category diffusion"), plainModel("own", 2, "category diffusion\nidle_timeout 2m"),
		plainModel("kept", 2, "keep_alive 1h"), plainModel("forever", 2, "idle_timeout 0\nkeep_alive 30s"),
	}})
	for name, want := range map[string]time.Duration{"plain": 7 * time.Minute, "category": 20 * time.Minute, "own": 2 * time.Minute, "kept": time.Hour, "forever": 30 * time.Second} {
		require.Equal(t, want.Seconds(), s.status().Consumers[name].StayWarmS, name)
	}
	s.reloaded(func(c string) string {
		return strings.Replace(c, "idle_timeout 7m", "idle_timeout 7m\nidle_unload off", 1)
	})
	require.Zero(t, s.status().Consumers["category"].StayWarmS, "nothing is unloaded as idle")
}
