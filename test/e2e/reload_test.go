package e2e

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// reloaded gives Caddy its Caddyfile changed by edit, which must be taken, and keeps it.
func (s *site) reloaded(edit func(caddyfile string) string) {
	s.t.Helper()
	file := filepath.Join(s.dir, "Caddyfile")
	old, err := os.ReadFile(file)
	require.NoError(s.t, err)
	changed := edit(string(old))
	require.NotEqual(s.t, string(old), changed, "the edit changed nothing")
	a := s.adminDo("POST", "/load", "text/caddyfile", changed)
	require.Equal(s.t, 200, a.status, "%s", a.body)
	s.write(changed)
	// Connections, kept ones and such as come in this very moment, may be to the server that goes: it closes them unanswered.
	s.until("the new configuration answers", func() bool {
		for range 3 {
			s.client.CloseIdleConnections()
			if s.get("/gpu/healthz").err != nil {
				return false
			}
		}
		return true
	})
}

// inTheMiddle is a site with a stream that runs on a until goesOn ends it, and a request for b that waits.
func inTheMiddle(t *testing.T) (s *site, stream, waits <-chan answer) {
	s = start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("b")
	s.serve("a")
	s.holdWork("a")
	stream = s.send("GET", "/a/stream?events=80&ms=1", "")
	s.working("a")
	waits = s.send("POST", "/b/synthesize", "x")
	s.waitQueued("b", 1)
	return s, stream, waits
}

func (s *site) goesOn(stream, waits <-chan answer) {
	s.t.Helper()
	require.Zero(s.t, len(stream), "the stream still runs")
	s.letWork("a")
	one := s.ok(stream)
	require.Equal(s.t, modelserver.StreamBytes(80), one.body)
	two := s.ok(waits)
	require.True(s.t, two.at.After(one.at))
	require.Equal(s.t, 1, s.servers["a"].Stats().Loads)
	require.Zero(s.t, s.servers["a"].Stats().UnloadsWhileBusy)
	s.nothingRuns()
}

func TestUnrelatedReloadKeepsStatesStreamsAndWaiters(t *testing.T) {
	t.Parallel()
	s, stream, waits := inTheMiddle(t)
	before := s.status()
	s.reloaded(func(c string) string {
		return strings.Replace(c, "handle /gpu/*", "handle /hello {\nrespond hi\n}\nhandle /gpu/*", 1)
	})
	require.Equal(t, "hi", string(s.get("/hello").body), "the new configuration rules")
	after := s.status()
	for name := range before.Consumers {
		was, is := before.Consumers[name], after.Consumers[name]
		require.Equal(t, was.Slots[0].State, is.Slots[0].State)
		require.Equal(t, was.LastUsed, is.LastUsed)
		require.Equal(t, was.TotalRequests, is.TotalRequests)
		require.Equal(t, was.Waiting, is.Waiting)
		require.Equal(t, was.Active, is.Active)
		require.Equal(t, was.Health, is.Health)
	}
	require.Equal(t, before.Scheduler.Loads, after.Scheduler.Loads)
	require.Equal(t, before.Scheduler.Evictions, after.Scheduler.Evictions)
	s.goesOn(stream, waits)
}

func TestBadConfigurationIsRefusedByPlaceAndEverythingGoesOn(t *testing.T) {
	t.Parallel()
	s, stream, waits := inTheMiddle(t)
	for name, c := range map[string]struct{ old, new, want string }{
		"unknown word":       {"consumer a {", "consumer a {\nvrm 3GiB", "vrm"},
		"bad size":           {"consumer a {", "consumer a {\nresidual 8XB", "8XB"},
		"two faults at once": {"consumer a {", "consumer a {\nvrm 3GiB\nlock some", "lock"},
		"unknown consumer":   {"gpu_broker b {", "gpu_broker bee {", "bee"},
		"unknown coexister":  {"consumer a {", "consumer a {\ncan_coexist_with nobody", "nobody"},
	} {
		t.Run(name, func(t *testing.T) {
			a := s.reload(func(text string) string { return strings.Replace(text, c.old, c.new, 1) })
			require.Equal(t, 400, a.status)
			require.Contains(t, string(a.body), c.want)
			require.Regexp(t, regexp.MustCompile(`Caddyfile:\d+`), string(a.body))
		})
	}
	require.Equal(t, "READY", s.state("a"))
	require.Equal(t, 1, s.status().Consumers["b"].Waiting)
	s.goesOn(stream, waits)
	s.serve("a")
}

func TestConfigurationThatFailsToStartIsUndone(t *testing.T) {
	t.Parallel()
	s, stream, waits := inTheMiddle(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	for range 6 { // Caddy starts its apps in any order
		a := s.reload(func(c string) string {
			c = strings.Replace(c, fmt.Sprintf("vram %d", gib(9)), "vram 3GiB", 1)
			return c + fmt.Sprintf("\nhttp://%s {\nbind 127.0.0.1\nrespond hi\n}\n", taken.Addr())
		})
		require.Equal(t, 400, a.status)
		require.Contains(t, string(a.body), "address already in use")
	}
	require.EqualValues(t, gib(9), s.status().Consumers["a"].Slots[0].Claim)
	require.Equal(t, "READY", s.state("a"))
	s.goesOn(stream, waits)
	s.serve("a")
}

func TestChangedClaimTakesEffect(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 5), plainModel("b", 6)}})
	s.serve("a")
	s.serve("b")
	require.Zero(t, s.unloadCalls(), "both fit")
	require.Equal(t, 200, s.adminDo("POST", "/gpu_broker/consumers/b/unload", "", "").status)
	s.reloaded(func(c string) string {
		return strings.Replace(c, fmt.Sprintf("vram %d", gib(6)), "vram 12GiB", 1)
	})
	require.EqualValues(t, gib(12), s.status().Consumers["b"].Slots[0].Claim)
	require.Equal(t, "READY", s.state("a"))
	s.serve("b")
	require.Equal(t, 1, s.servers["a"].Stats().Unloads)
	require.EqualValues(t, gib(12), s.status().Consumers["b"].Slots[0].Booking)
}

func TestRemovedConsumerServesWhoWaitsAndIsUnloaded(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 2), plainModel("b", 2)}})
	s.serve("a")
	s.serve("b")
	runs, end := s.works("b")
	waits := s.send("POST", "/b/synthesize", "x")
	s.waitQueued("b", 1)
	s.reloaded(func(c string) string {
		c = regexp.MustCompile(`(?s)consumer b \{.*?\n\}\n\}\n`).ReplaceAllString(c, "}\n")
		return regexp.MustCompile(`(?s)handle_path /b/\*.*?\n\}\n.*?\n\}\n`).ReplaceAllString(c, "")
	})
	require.True(t, s.status().Consumers["b"].Removed)
	end()
	s.ok(runs)
	s.ok(waits)
	s.until("b is gone", func() bool { _, there := s.status().Consumers["b"]; return !there })
	require.Equal(t, 1, s.servers["b"].Stats().Unloads)
	require.Zero(t, s.servers["b"].Stats().UnloadsWhileBusy)
	s.serve("a")
	require.Equal(t, 1, s.servers["a"].Stats().Loads)
	require.Equal(t, 404, s.adminDo("POST", "/gpu_broker/consumers/b/load", "", "").status)
}
