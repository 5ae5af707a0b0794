package onecard

import (
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Server is `one`, as whoever runs it sees it.
type Server interface {
	// Line is the consumer's line that names it.
	Line() string
	// Start starts it without the broker.
	Start()
	// PID is that of its process; 0: it does not run.
	PID() int
	// Kill kills its process.
	Kill()
}

// atOnce bounds how late the end of a server is noticed, the question included. Probes are an hour apart.
const (
	atOnce   = time.Second
	noProbes = "probe_interval 1h"
)

// TakesTurns lets a request start the server, and the rival's stop it.
func (c *Card) TakesTurns(s Server) {
	c.t.Helper()
	c.Run("", s.Line())
	require.Zero(c.t, s.PID(), "nobody has asked yet")
	c.Serve("one")
	first := s.PID()
	require.NotZero(c.t, first)
	state := c.State()
	require.True(c.t, state.Running)
	require.Equal(c.t, first, state.PID)
	require.Equal(c.t, 1, state.Starts)
	c.holds(oneSize)
	require.Zero(c.t, c.Status().GPUs[0].Outsiders, "its memory is known to be its own")
	c.Serve("one")
	require.Equal(c.t, first, s.PID(), "it is warm")

	c.Serve("rival")
	require.Zero(c.t, s.PID())
	c.holds(rivalSize)
	require.False(c.t, c.State().Running)
	require.EqualValues(c.t, 1, c.Status().Scheduler.Evictions)

	c.Serve("one")
	require.NotZero(c.t, s.PID())
	require.NotEqual(c.t, first, s.PID())
	require.Equal(c.t, 2, c.State().Starts)
	c.holds(oneSize)
	c.Halt()
	require.Zero(c.t, s.PID(), "Caddy has stopped what it had started")
}

// holds waits until the card's memory, taken and booked, is that of one server.
func (c *Card) holds(want gpu.Bytes) {
	c.t.Helper()
	c.Until(want.String()+" of the card are taken and booked", func() bool {
		card := c.Status().GPUs[0]
		return gpu.Bytes(card.Used) == want && gpu.Bytes(card.Booked) == want
	})
}

// DeathIsNoticed kills the server. why is what is said of its end.
func (c *Card) DeathIsNoticed(s Server, why string) {
	c.t.Helper()
	c.Run(noProbes, s.Line())
	c.Serve("one")
	first := s.PID()
	s.Kill()
	killed := time.Now()
	c.Until("its booking is free", func() bool { return c.Status().GPUs[0].Booked == 0 })
	require.Less(c.t, time.Since(killed), atOnce)
	require.Contains(c.t, c.State().LastExit, why)
	c.Serve("one")
	require.NotEqual(c.t, first, s.PID())
	require.Equal(c.t, 2, c.State().Starts)
}

// DeathAtWorkIsTold kills the server in the middle of its work.
func (c *Card) DeathAtWorkIsTold(s Server) {
	c.t.Helper()
	c.Run(noProbes, s.Line())
	c.Serve("one")
	answer := make(chan Answer, 1)
	go func() { answer <- c.Post("one", "/synthesize?ms=600000") }()
	c.Until("it works", func() bool { return c.Status().Consumers["one"].Active == 1 })
	s.Kill()
	a := <-answer
	require.Equal(c.t, 502, a.Status, "%s", a.Body)
	require.Equal(c.t, "server_died", a.Code)
	c.Serve("one")
}

// ReloadLeavesItAlone changes the configuration while the server runs, and then takes the consumer away.
func (c *Card) ReloadLeavesItAlone(s Server) {
	c.t.Helper()
	c.Run("", s.Line())
	c.Serve("one")
	first := s.PID()
	working := make(chan Answer, 1)
	go func() { working <- c.Post("one", "/synthesize?ms=700") }()
	c.Until("it works", func() bool { return c.Status().Consumers["one"].Active == 1 })
	c.Reload(func(text string) string {
		return strings.Replace(text, "vram "+oneSize.String(), "vram "+(oneSize+gpu.GiB).String(), 1)
	})
	require.Equal(c.t, 200, (<-working).Status, "what runs there goes on")
	c.Serve("one")
	require.Equal(c.t, first, s.PID(), "its unit or container is the same")
	require.Equal(c.t, 1, c.State().Starts)

	c.Reload(func(text string) string {
		begin, end := strings.Index(text, "consumer one {"), strings.Index(text, "consumer rival {")
		text = text[:begin] + text[end:]
		begin, end = strings.Index(text, "handle_path /one/*"), strings.Index(text, "handle_path /rival/*")
		return text[:begin] + text[end:]
	})
	c.Until("the server of a consumer that is gone is stopped", func() bool { return s.PID() == 0 })
	c.Serve("rival")
}

// FoundRunningStays takes over a server that runs already. A stop of Caddy leaves it, the rival's request does not.
func (c *Card) FoundRunningStays(s Server) {
	c.t.Helper()
	s.Start()
	first := s.PID()
	require.NotZero(c.t, first)
	c.Run("", s.Line())
	c.Until("it is taken over", func() bool { return c.slot("one") == "READY" })
	c.holds(oneSize)
	c.Serve("one")
	require.Equal(c.t, first, s.PID())
	require.Zero(c.t, c.State().Starts)
	c.Halt()
	require.Equal(c.t, first, s.PID(), "who did not start it does not stop it")

	c.Again()
	c.Serve("rival")
	require.Zero(c.t, s.PID(), "it has to make room like any other")
	c.holds(rivalSize)
}

// OutlivesAKilledCaddy kills Caddy while the server runs: the next one takes it over.
func (c *Card) OutlivesAKilledCaddy(s Server) {
	c.t.Helper()
	c.Run("", s.Line())
	c.Serve("one")
	first := s.PID()
	c.Kill()
	require.Equal(c.t, first, s.PID(), "it is not Caddy's child")
	c.Again()
	c.Serve("one")
	require.Equal(c.t, first, s.PID())
	c.holds(oneSize)
	c.Serve("rival")
	require.Zero(c.t, s.PID())
}
