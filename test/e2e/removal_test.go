package e2e

import (
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// withoutBroker is a configuration of the site that has no broker any more.
func (s *site) withoutBroker(string) string {
	return "{\nadmin " + s.admin + "\nauto_https off\n}\n" + s.url + " {\nrespond \"no broker\"\n}\n"
}

// brokerGone takes the broker out of the site and gives back the way to bring it back.
func (s *site) brokerGone() (back func()) {
	s.t.Helper()
	before, err := os.ReadFile(filepath.Join(s.dir, "Caddyfile"))
	require.NoError(s.t, err)
	s.reloaded(s.withoutBroker)
	s.until("the site has no broker", func() bool { return string(s.get("/a/synthesize").body) == "no broker" }) // a kept connection may end just now
	return func() {
		s.t.Helper()
		s.reloaded(func(string) string { return string(before) })
	}
}

func TestBrokerThatLeavesTheConfigurationServesWhoWaitsAndUnloads(t *testing.T) {
	t.Parallel()
	s, stream, waits := inTheMiddle(t)
	back := s.brokerGone()
	require.Zero(t, len(stream), "the stream still runs")
	s.letWork("a")
	s.ok(stream)
	s.ok(waits)
	s.until("both are unloaded", func() bool { return !s.servers["a"].Stats().Loaded && !s.servers["b"].Stats().Loaded })
	require.Zero(t, s.servers["a"].Stats().UnloadsWhileBusy+s.servers["b"].Stats().UnloadsWhileBusy)
	back()
	s.serve("a")
}

func TestBrokerThatComesBackWhileItLeavesGoesOn(t *testing.T) {
	t.Parallel()
	s, stream, waits := inTheMiddle(t)
	before := s.status()
	s.brokerGone()()
	require.Zero(t, len(stream), "the stream still runs")
	after := s.status()
	require.Equal(t, before.Consumers["a"].LastUsed, after.Consumers["a"].LastUsed)
	require.Equal(t, before.Scheduler.Loads, after.Scheduler.Loads, "it is the same broker")
	s.goesOn(stream, waits)
	require.Equal(t, 1, s.servers["b"].Stats().Loads-1, "b was loaded for the first time before, and now for the request that waited")
}

func TestBrokerThatComesWithAConfigurationThatFailsTouchesNothing(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 2), plainModel("b", 2)}})
	s.serve("a")
	s.serve("b")
	back := s.brokerGone()
	s.until("both are unloaded", func() bool { return !s.servers["a"].Stats().Loaded && !s.servers["b"].Stats().Loaded })
	back()
	s.serve("a")
	s.serve("b")
	with, err := os.ReadFile(filepath.Join(s.dir, "Caddyfile"))
	require.NoError(t, err)
	s.reloaded(s.withoutBroker)
	s.until("both are unloaded again", func() bool { return !s.servers["a"].Stats().Loaded && !s.servers["b"].Stats().Loaded })
	for _, name := range []string{"a", "b"} { // by hand: nobody knows of it
		resp, err := http.Post("http://"+s.servers[name].Addr()+"/api/admin/load", "", nil)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
	}
	calls := s.unloadCalls()
	for range 8 { // Caddy starts its apps in any order
		bad := s.adminDo("POST", "/load", "text/caddyfile", string(with)+"\nhttp://"+occupied(t)+" {\nbind 127.0.0.1\nrespond hi\n}\n")
		require.Equal(t, 400, bad.status)
	}
	require.Equal(t, calls, s.unloadCalls())
	require.True(t, s.servers["a"].Stats().Loaded)
	s.reloaded(func(string) string { return string(with) })
	s.serve("a")
	require.Equal(t, calls, s.unloadCalls())
}
