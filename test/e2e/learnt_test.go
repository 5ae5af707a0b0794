package e2e

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
)

// halt ends the site's Caddy, which must end well.
func (s *site) halt() {
	s.t.Helper()
	ends := s.ends()
	require.NoError(s.t, s.cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(s.t, s.ended(ends).code)
}

// kill ends the site's Caddy as the kernel does.
func (s *site) kill() {
	s.t.Helper()
	ends := s.ends()
	require.NoError(s.t, s.cmd.Process.Kill())
	s.ended(ends)
}

// again starts the site's Caddy after halt or kill, and waits for its first probes.
func (s *site) again() {
	s.t.Helper()
	s.startAgain()
	s.until("the first probes and the first sample are in", func() bool {
		st := s.status()
		for _, c := range st.Consumers {
			if c.Health == "unknown" {
				return false
			}
		}
		return len(st.GPUs) > 0
	})
}

// learntFile is the one file in which the site keeps what it has learnt.
func (s *site) learntFile() string {
	s.t.Helper()
	found, err := filepath.Glob(filepath.Join(s.dir, "data", "caddy", "gpu_broker", "*-*-*-*-*", "learnt.json"))
	require.NoError(s.t, err)
	require.Len(s.t, found, 1)
	return found[0]
}

// memory is what of a consumer's status is to survive a restart.
func memory(c broker.Consumer) map[string]any {
	return map[string]any{"last_used": c.LastUsed, "last_priority": c.LastPriority, "measured": c.Slots[0].Measured, "switch_cost_ms": int64(c.Slots[0].SwitchCostS * 1000)}
}

func (s *site) memories() map[string]map[string]any {
	s.t.Helper()
	s.until("what is loaded has been measured", func() bool {
		for _, c := range s.status().Consumers {
			if sl := c.Slots[0]; sl.State == "READY" && sl.Measured == 0 {
				return false
			}
		}
		return true
	})
	out := map[string]map[string]any{}
	for name, c := range s.status().Consumers {
		out[name] = memory(c)
	}
	return out
}

// learns makes a site learn something of a and b: what their loads took and cost, and when they were used, b before a.
func (s *site) learns() {
	s.t.Helper()
	for _, name := range []string{"a", "b"} {
		s.serve(name)
		s.doByHand("consumers/" + name + "/unload")
	}
	s.serve("b")
	s.serve("a")
	s.memories()
}

func pair() []consumer {
	a, b := plainModel("a", 6), plainModel("b", 6)
	a.LoadTime, a.UnloadTime = 60*time.Millisecond, 40*time.Millisecond
	return []consumer{a, b, plainModel("t", 6)}
}

func TestWhatWasLearntSurvivesARestart(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: pair()})
	s.learns()
	before := s.memories()
	require.NotEmpty(t, before["a"]["last_used"])
	require.EqualValues(t, gib(6), before["a"]["measured"])
	require.Less(t, before["a"]["switch_cost_ms"], int64(15_000), "it was measured")
	require.EqualValues(t, 20_000, before["t"]["switch_cost_ms"], "it was not")
	s.halt()

	file := s.learntFile()
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	require.Less(t, info.Size(), int64(4096))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var doc struct {
		Version   int
		Consumers map[string]json.RawMessage
	}
	require.NoError(t, json.Unmarshal(text, &doc))
	require.Equal(t, 1, doc.Version)
	require.Len(t, doc.Consumers, 2, "of t there is nothing to say")

	s.again()
	require.Equal(t, before, s.memories())
	s.waitState("a", "READY")
	s.waitState("b", "READY")
	require.Len(t, s.decisions("adopt"), 2, "what is loaded is taken over")
	s.warm("/a/synthesize", "x")
	require.Equal(t, 2, s.servers["a"].Stats().LoadsStarted, "none since the restart")
	require.Equal(t, 2, s.servers["b"].Stats().LoadsStarted)
	require.Zero(t, s.status().Scheduler.Loads)

	// By what was known before: b was used before a. By the order of the configuration it would be a.
	s.halt()
	s.again()
	s.waitState("a", "READY")
	s.waitState("b", "READY")
	s.serve("t")
	st := s.status()
	require.Equal(t, "IDLE", st.Consumers["b"].Slots[0].State)
	require.Equal(t, "READY", st.Consumers["a"].Slots[0].State)
	require.EqualValues(t, 1, st.Scheduler.Evictions)
	s.noOOM()
}

func TestFileOfWhatWasLearntIsWrittenOnlyWhenSomethingHasChanged(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: pair()})
	s.learns()
	s.halt()
	file := s.learntFile()
	before, err := os.Stat(file)
	require.NoError(t, err)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	s.again()
	require.Equal(t, 200, s.do(t.Context(), "HEAD", "/a/synthesize", nil).status)
	s.halt()
	after, err := os.Stat(file)
	require.NoError(t, err)
	require.True(t, os.SameFile(before, after) && before.ModTime().Equal(after.ModTime()), "nothing was learnt, nothing was written")
	s.again()
	s.serve("a")
	s.halt()
	now, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NotEqual(t, text, now)
}

func TestSiteThatLearntNothingWritesNothing(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: pair()})
	s.reloaded(func(c string) string { return insert(c, "budget 3m") })
	require.Equal(t, 204, s.do(t.Context(), "OPTIONS", "/a/synthesize", nil).status)
	s.halt()
	require.Empty(t, learntFiles(t, s.dir))
	_, err := os.Stat(filepath.Join(s.dir, "data", "caddy", "gpu_broker"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestFileOfWhatWasLearntHoldsNoSecrets(t *testing.T) {
	t.Parallel()
	a := plainModel("a", 6, "header Authorization \"Bearer hush-hush\"")
	s := start(t, layout{Consumers: []consumer{a}})
	req := s.post("/a/synthesize?key=hush-hush", "hush-hush")
	require.Equal(t, 200, req.status)
	s.halt()
	text, err := os.ReadFile(s.learntFile())
	require.NoError(t, err)
	require.NotContains(t, string(text), "hush")
	require.NotContains(t, string(text), s.servers["a"].Addr(), "nor addresses")
	require.NotContains(t, s.log(), "hush-hush")
}

func TestDamagedFileOfWhatWasLearntIsSetAsideAndTheSiteServes(t *testing.T) {
	t.Parallel()
	good := `{"version":1,"consumers":{"a":{"load_seconds":1.5,"last_used":"2026-01-02T03:04:05Z"}}}`
	for name, damaged := range map[string][]byte{
		"garbage":         {0, 1, 2, 0xff, 0xfe, '{'},
		"empty":           {},
		"truncated":       []byte(good[:len(good)-20]),
		"of a later time": []byte(strings.Replace(good, `"version":1`, `"version":2`, 1)),
		"of no version":   []byte(`{}`),
		"two in one":      []byte(good + good),
		"huge":            append([]byte(good), bytes.Repeat([]byte(" "), 2<<20)...),
		"another form":    []byte(`[1,2,3]`),
		"negative time":   []byte(strings.Replace(good, "1.5", "-1.5", 1)),
		"endless time":    []byte(strings.Replace(good, "1.5", "1e300", 1)),
		"bad name":        []byte(strings.Replace(good, `"a"`, `"a b"`, 1)),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Consumers: []consumer{plainModel("a", 6), plainModel("b", 6)}})
			s.serve("a")
			s.halt()
			file := s.learntFile()
			require.NoError(t, os.WriteFile(file, damaged, 0o600))
			s.again()
			require.Empty(t, s.status().Consumers["a"].LastUsed, "it begins anew")
			s.until("the log warns", func() bool { return strings.Contains(s.log(), "it is set aside") })
			for line := range strings.Lines(s.log()) {
				if strings.Contains(line, "it is set aside") {
					require.Contains(t, line, `"level":"warn"`)
					require.Contains(t, line, "learnt.json.damaged-")
					require.Less(t, len(line), 2000, "the damage is not poured into the log")
				}
			}
			aside, err := filepath.Glob(file + ".damaged-*")
			require.NoError(t, err)
			require.Len(t, aside, 1)
			kept, err := os.ReadFile(aside[0])
			require.NoError(t, err)
			require.True(t, bytes.Equal(damaged, kept), "it is kept as it was")
			info, err := os.Stat(aside[0])
			require.NoError(t, err)
			require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
			_, err = os.Stat(file)
			require.ErrorIs(t, err, os.ErrNotExist)

			s.serve("a")
			s.serve("b")
			before := s.memories()
			s.halt()
			s.again()
			require.Equal(t, before, s.memories(), "it learns anew")
			require.Equal(t, 1, strings.Count(s.log(), "it is set aside"), "once")
		})
	}
}

func TestStorageThatFailsCostsWhatWasLearntAndNothingElse(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 6)}})
	s.serve("a")
	s.halt()
	file := s.learntFile()
	require.NoError(t, os.Remove(file))
	require.NoError(t, os.MkdirAll(filepath.Join(file, "in", "the", "way"), 0o700)) // it can be neither read nor replaced
	s.again()
	s.until("the log warns", func() bool { return strings.Contains(s.log(), "can't be read") })
	require.Empty(t, s.status().Consumers["a"].LastUsed)
	s.serve("a")
	s.halt()
	require.DirExists(t, filepath.Join(file, "in", "the", "way"))
	require.NoError(t, os.RemoveAll(file))
	s.again()
	s.serve("a")
	s.halt()
	require.NotEmpty(t, s.learntFile())
}

func TestSettingsOfAConsumerThatWasAwayAreRememberedToo(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: pair()})
	s.learns()
	before := s.memories()["b"]
	whole := s.caddyfileNow()
	s.doByHand("consumers/b/unload")
	s.reloaded(func(c string) string { return withoutConsumer(c, "b") })
	s.until("b is gone", func() bool { _, there := s.status().Consumers["b"]; return !there })
	s.halt()
	s.again()
	s.serve("a")
	s.reloaded(func(string) string { return whole })
	now := s.memories()["b"]
	require.Equal(t, before["last_used"], now["last_used"])
	require.Equal(t, before["measured"], now["measured"])
	require.Less(t, now["switch_cost_ms"], int64(15_000), "it was measured")
}

func TestBrokerThatLeavesTheConfigurationKeepsWhatItHasLearnt(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: pair()})
	s.learns()
	before := s.memories()
	back := s.brokerGone()
	s.until("it is kept", func() bool { return len(learntFiles(t, s.dir)) == 1 })
	s.until("both are unloaded", func() bool { return !s.servers["a"].Stats().Loaded && !s.servers["b"].Stats().Loaded })
	back()
	now := s.memories()
	for _, name := range []string{"a", "b"} {
		require.Equal(t, before[name]["last_used"], now[name]["last_used"])
	}
	s.serve("a")
}

func TestKilledCaddyLeavesAWholeFile(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: pair()})
	s.learns()
	s.halt()
	file := s.learntFile()
	whole := func() {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		var doc struct {
			Version   int
			Consumers map[string]json.RawMessage
		}
		require.NoError(t, json.Unmarshal(text, &doc), "%s", text)
		require.Equal(t, 1, doc.Version)
		require.GreaterOrEqual(t, len(doc.Consumers), 2)
	}
	for i := range 8 { // just while it writes, if it can be
		s.again()
		require.NotEmpty(t, s.status().Consumers["a"].LastUsed)
		s.serve("a")
		ends := s.ends()
		require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
		select {
		case <-ends:
		case <-time.After(time.Duration(i*15) * time.Millisecond):
			_ = s.cmd.Process.Kill() // it may have ended just now
			s.ended(ends)
		}
		whole()
	}
	require.NotContains(t, s.log(), "it is set aside")
}

func TestCaddysThatShareAStorageHaveWhatTheyLearntApart(t *testing.T) {
	t.Parallel()
	shared := t.TempDir()
	sites := map[string]*site{}
	for _, name := range []string{"one", "two"} {
		s := start(t, layout{Consumers: []consumer{plainModel(name, 6)}})
		s.reloaded(func(c string) string {
			return strings.Replace(c, "local_certs", "local_certs\nstorage file_system "+shared, 1)
		})
		s.serve(name)
		sites[name] = s
	}
	before := map[string]map[string]map[string]any{}
	for name, s := range sites {
		before[name] = s.memories()
		s.halt()
		require.Empty(t, learntFiles(t, s.dir), "it is in the storage of the configuration that ruled last")
	}
	found, err := filepath.Glob(filepath.Join(shared, "gpu_broker", "*", "learnt.json"))
	require.NoError(t, err)
	require.Len(t, found, 2)
	for name, s := range sites {
		s.again()
		require.Equal(t, before[name], s.memories())
	}
}
