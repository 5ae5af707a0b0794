package presets_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

// remote is a pretending server that runs as a process of its own, spoken to by its /control.
type remote struct {
	s       *site
	address string
}

// pretending is the site's server, wherever it runs.
func (s *site) pretending() remote {
	s.t.Helper()
	if s.server != nil {
		return remote{s, s.server.Addr()}
	}
	p := s.Status().Consumers["server"].Process
	require.NotNil(s.t, p)
	require.NotEmpty(s.t, p.Address)
	return remote{s, p.Address}
}

func (r remote) hold(on bool) {
	r.s.t.Helper()
	body, err := json.Marshal(map[string]any{"faults": map[string]bool{"hold_work": on}})
	require.NoError(r.s.t, err)
	a := r.s.to("http://"+r.address, post("/control", string(body)))
	if on || r.s.server != nil { // else its process may be stopped before it has answered: what it worked on is done
		a.good(r.s.t, "control")
	}
}

func (r remote) stats() modelserver.Stats {
	r.s.t.Helper()
	a := r.s.to("http://"+r.address, ask{method: http.MethodGet, path: "/control"})
	a.good(r.s.t, "control")
	var report modelserver.Report
	require.NoError(r.s.t, json.Unmarshal(a.body, &report))
	return report.Stats
}

// works waits until so many pieces of work run or wait at the server.
func (r remote) works() {
	r.s.t.Helper()
	r.s.Until("the server works", func() bool { return r.stats().Working > 0 })
}

// TestEveryPresetServesAndMakesWay drives each server once round: it is probed, loads, serves, finishes what runs
// while a rival waits for its memory, is unloaded, and is loaded again.
func TestEveryPresetServesAndMakesWay(t *testing.T) {
	t.Parallel()
	for _, name := range presets.Names() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := preset(t, name)
			k.circle(t, start(t, k.layout(false)))
		})
		if k := preset(t, name); k.About.Models == presets.Each {
			t.Run(name+" as a whole", func(t *testing.T) {
				t.Parallel()
				k.circle(t, start(t, k.layout(true)))
			})
		}
	}
}

func (k *known) circle(t *testing.T, s *site) {
	several := s.server != nil && len(s.Status().Consumers["server"].Slots) > 1
	slot := "" // of the model that is worked with
	if several {
		slot = k.first()
	}
	k.probes(t, s)
	k.refusals(t, s)

	s.ask(k.ask(k.first())).good(t, "the first request")
	s.settled(k)
	require.Equal(t, "READY", s.slot(slot).State)

	s.drains(k, slot)
	if s.server != nil {
		require.LessOrEqual(t, s.server.Stats().Held, rest, "its memory is back")
		require.Equal(t, "IDLE", s.slot(slot).State)
	} else {
		require.False(t, s.Status().Consumers["server"].Process.Running)
	}

	s.Until("the card holds little more than the rival", func() bool {
		used := s.Status().GPUs[0].Used
		return used >= int64(model) && used <= int64(model+rest)
	})

	s.ask(k.ask(k.first())).good(t, "a request once the rival is done")
	s.settled(k)
	require.Zero(t, s.rival.Stats().Held, "the rival has made way, too")
	if several {
		k.swaps(t, s)
	}
	k.unharmed(t, s)
}

// probes requires that questions about its state have no effect.
func (k *known) probes(t *testing.T, s *site) {
	t.Helper()
	if s.server == nil {
		require.False(t, s.Status().Consumers["server"].Process.Running, "a probe starts nothing")
		return
	}
	require.Equal(t, "healthy", s.Status().Consumers["server"].Health)
	require.NoError(t, s.server.WaitFor(bound(t), func(st modelserver.Stats) bool { return st.Requests[bare(k.routes.Health.Path)] >= 3 }))
	if r := k.routes.Residency; r != nil {
		require.NoError(t, s.server.WaitFor(bound(t), func(st modelserver.Stats) bool { return st.Requests[bare(r.Path)] >= 3 }))
	}
	st := s.server.Stats()
	require.Zero(t, st.Worked+st.Working)
	require.Zero(t, st.WokenByProbe)
	require.LessOrEqual(t, st.LoadsStarted, 1)
	if st.LoadsStarted == 1 { // by its own start
		require.Equal(t, modelserver.EventLoadStart, firstOf(s.server, modelserver.EventLoadStart, modelserver.EventRequestStart))
	}
}

// firstOf is which of some kinds of events came first.
func firstOf(server *modelserver.Server, kinds ...string) string {
	for _, e := range server.Events() {
		for _, kind := range kinds {
			if e.Kind == kind {
				return kind
			}
		}
	}
	return ""
}

// refusals requires that clients can't reach what is the broker's.
func (k *known) refusals(t *testing.T, s *site) {
	t.Helper()
	for _, pattern := range k.consumer.Blocked {
		method, path, both := strings.Cut(pattern, " ")
		if !both {
			method, path = http.MethodPost, pattern
		}
		path = strings.ReplaceAll(path, "*", "x")
		before := 0
		if s.server != nil {
			before = s.server.Stats().Requests[path]
		}
		a := s.ask(ask{method: method, path: path})
		require.NoError(t, a.err)
		require.Equal(t, http.StatusForbidden, a.status, "%s: %.300s", pattern, a.body)
		if s.server != nil && path != bare(k.routes.Health.Path) {
			require.Equal(t, before, s.server.Stats().Requests[path], pattern)
		}
	}
}

// drains requires that what runs ends whole before the server makes way for its rival.
func (s *site) drains(k *known, slot string) {
	s.t.Helper()
	server := s.pretending()
	before := server.stats()
	server.hold(true)
	long := s.send(s.url+"/server", k.ask(k.first()))
	server.works()
	if k.async() {
		s.await("the answer that comes before its work is done", long)
	}
	waits := s.sendRival()
	s.Until("the server drains for its rival", func() bool { return s.slot(slot).Gate == "closed" })
	st := server.stats()
	require.Equal(s.t, 1, st.Working)
	require.Equal(s.t, before.UnloadCalls, st.UnloadCalls, "it was not asked while it works")
	require.Zero(s.t, s.rival.Stats().LoadsStarted-s.rival.Stats().Unloads)
	server.hold(false)
	if !k.async() {
		s.await("the request that ran", long)
	}
	s.await("the rival's", waits)
	if s.server != nil {
		require.Equal(s.t, before.Worked+1, s.server.Stats().Worked)
	}
}

// swaps requires that one model of a server makes way for another, by the server's own list.
func (k *known) swaps(t *testing.T, s *site) {
	t.Helper()
	s.ask(k.ask(two)).good(t, "a request for its second model")
	s.Until("the second is loaded in place of the first", func() bool {
		loaded := map[string]string{}
		for _, m := range s.server.Report(false).Models {
			loaded[m.Name] = m.State
		}
		return loaded[two] == "loaded" && loaded[k.first()] == "idle"
	})
	require.Equal(t, "READY", s.slot(two).State)
	require.Equal(t, "IDLE", s.slot(k.first()).State)
	s.ask(k.ask(k.first())).good(t, "a request for its first model again")
}

// settled waits for the end of work that goes on after its answer.
func (s *site) settled(k *known) {
	s.t.Helper()
	if k.async() {
		s.Until("its work is done", func() bool { return s.Status().Consumers["server"].Active == 0 })
	}
}

// unharmed requires that nothing went wrong on the way.
func (k *known) unharmed(t *testing.T, s *site) {
	t.Helper()
	assert.Empty(t, s.failures())
	servers := []*modelserver.Server{s.rival}
	if s.server != nil {
		servers = append(servers, s.server)
	}
	for _, server := range servers {
		st := server.Stats()
		assert.Zero(t, st.Aborted, "%s: work was cut", server.Name())
		assert.Zero(t, st.UnloadsWhileBusy, "%s was unloaded under its work", server.Name())
		assert.Zero(t, st.Deaths, "%s has died", server.Name())
		assert.Zero(t, st.OOMs, "%s was loaded before there was room", server.Name())
		assert.Zero(t, st.LoadsFailed, server.Name())
		assert.Zero(t, st.WokenByProbe, "%s was loaded by a question", server.Name())
		assert.LessOrEqual(t, st.Held, model)
	}
	assert.Empty(t, modelserver.Overlap(servers...))
	assert.Zero(t, s.Status().Scheduler.UnloadFailures)
	s.Until("all memory is known to be theirs", func() bool { return s.Status().GPUs[0].Outsiders == 0 })
}

func bound(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), caddytest.Patience)
	t.Cleanup(cancel)
	return ctx
}

func bare(path string) string {
	path, _, _ = strings.Cut(path, "?")
	return path
}
