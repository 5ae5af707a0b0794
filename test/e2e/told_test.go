package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// logLine is a line of the broker's own in Caddy's log.
type logLine struct {
	Level, Logger, Msg string
	Consumer, For      string
	Code, Reason, GPU  json.RawMessage
}

// says are the lines of the broker that have a message, oldest first; all of its decisions if msg is empty.
func (s *site) says(msg string) (out []logLine) {
	s.t.Helper()
	for line := range strings.Lines(s.log()) {
		var l logLine
		if json.Unmarshal([]byte(line), &l) == nil && l.Logger == "gpu_broker" && (l.Msg == msg || msg == "" && l.Reason != nil && l.GPU != nil) {
			out = append(out, l)
		}
	}
	return out
}

// whoAndWhy are the consumers and codes of all refusals that the decisions hold.
func (s *site) whoAndWhy() (out []string) {
	s.t.Helper()
	for _, d := range s.decisions("refuse") {
		out = append(out, fmt.Sprintf("%q %s", d.Consumer, d.Code))
	}
	return out
}

// toldOnce requires that refusals, and no others, were counted and logged, each once and as it was decided.
func (s *site) toldOnce(want ...string) {
	s.t.Helper()
	require.Equal(s.t, want, s.whoAndWhy())
	require.EqualValues(s.t, len(want), s.status().Scheduler.Refused)
	s.until(fmt.Sprintf("%d refusals are logged", len(want)), func() bool { return len(s.says("refuse")) >= len(want) })
	var lines []string
	for _, l := range s.says("refuse") {
		require.Equal(s.t, "warn", l.Level)
		require.Greater(s.t, len(l.Reason), 2)
		lines = append(lines, fmt.Sprintf("%q %s", l.Consumer, bytes.Trim(l.Code, `"`)))
	}
	require.Equal(s.t, want, lines)
}

// beside is a model that runs beside all others.
func beside(name, lines, route string) consumer {
	c := plainModel(name, 1, "lock none", lines)
	c.Route = route
	return c
}

func TestEveryRefusalIsToldOnce(t *testing.T) {
	t.Parallel()
	relayed, relay := viaRelay(t, beside("relayed", "", ""))
	s := oneURL(t, layout{Total: "24GiB", Global: "max_buffered 1MiB", Consumers: []consumer{
		relayed, beside("small", "", "max_body 1KiB"), beside("fenced", "blocked POST /admin/*", ""), beside("slow", "max_run 1500ms", ""),
		beside("off", "", ""), plainModel("giant", 40), beside("gone", "", ""), beside("brief", "", "budget 200ms"),
	}}, "model_from body")
	s.reloaded(func(c string) string { return strings.Replace(c, "consumer off {", "consumer off {\nenabled off", 1) })
	s.serve("relayed")
	s.serve("slow")
	relay.close()
	s.servers["gone"].Kill()
	s.until("it is unhealthy", func() bool { return s.status().Consumers["gone"].Health == "unhealthy" })
	let := s.hang()
	defer let()
	var want []string
	refused := func(consumer string, status int, code string, a answer) {
		t.Helper()
		a.refused(t, status, code)
		want = append(want, fmt.Sprintf("%q %s", consumer, code))
	}

	// By the handler.
	require.Contains(t, s.askJSON("/echo", `{"model":"zzzzzzzz"}`).refused(t, 404, "unknown_model"), `there is no model "zzzzzzzz": GET /v1/models lists all`)
	want = append(want, `"" unknown_model`)
	refused("", 404, "unknown_model", s.get("/v1/models/nope"))
	refused("", 400, "bad_request", s.askJSON("/echo", `{"model":`))
	refused("", 400, "bad_request", s.askJSON("/echo", `{}`))
	refused("small", 413, "body_too_large", s.post("/small/echo", strings.Repeat("x", 2000)))
	refused("fenced", 403, "blocked", s.post("/fenced/admin/pull", "x"))
	refused("relayed", 503, "unhealthy", s.post("/relayed/synthesize", "x"))
	refused("slow", 504, "budget_exceeded", s.get("/slow/hang"))

	// By the scheduler, which tells of its own.
	refused("off", 503, "not_running", s.post("/off/synthesize", "x"))
	refused("giant", 422, "never_fits", s.post("/giant/synthesize", "x"))
	refused("gone", 503, "unhealthy", s.post("/gone/synthesize", "x"))
	end := s.holdLoad("brief")
	refused("brief", 504, "budget_exceeded", s.post("/brief/synthesize", "x"))
	end()
	s.toldOnce(want...)

	// What quotes the request is kept within a bound.
	refused("fenced", 403, "blocked", s.post("/fenced/admin/"+strings.Repeat("x", 8_000), "x"))
	s.toldOnce(want...)
	reason := s.decisions("refuse")[len(want)-1].Reason
	require.Contains(t, reason, "POST /admin/xxx")
	require.LessOrEqual(t, len(reason), 1100)
	require.Less(t, len(s.says("refuse")[len(want)-1].Reason), 1200)
}

func TestARefusalForWantOfBufferIsToldOnce(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "max_buffered 2MiB", Consumers: []consumer{mvoice(), whisper()}})
	release := s.hold("whisper")
	large := string(every(900 << 10)) // of which one client may have one
	first := s.send("POST", "/mvoice/synthesize", large)
	s.waitQueued("mvoice", 1)
	s.post("/mvoice/synthesize", string(every(300<<10))).refused(t, 503, "queue_full") // what is left of it is short enough to be read to its end
	s.toldOnce(`"mvoice" queue_full`)
	require.Equal(t, 200, release().status)
	s.ok(first)
}

func TestARefusalOfAStoppedServerIsToldOnce(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "7GiB", lines: "gpu_routes POST /synthesize\ntouch GET /touch"})
	s.get("/one/other").refused(t, 503, "not_running")
	s.get("/one/touch").refused(t, 503, "not_running")
	s.toldOnce(`"one" not_running`, `"one" not_running`)
}

func TestARefusalAfterHeartbeatsIsToldOnce(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{beside("slow", "max_run 300ms", heartbeats)}})
	end := s.holdLoad("slow")
	let := s.hang()
	defer let()
	l := s.listen(t.Context(), "/slow/hang", "")
	require.Contains(t, l.comment(), "waiting for slow")
	end()
	text, err := io.ReadAll(l.in)
	require.NoError(t, err)
	require.Contains(t, string(text), `"code":"budget_exceeded"`)
	s.toldOnce(`"slow" budget_exceeded`)
}

func TestWhatIsNoRefusalIsNotToldAsOne(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), whisper()}})
	s.serve("mvoice")

	// Clients that leave: in the queue, while they send, and while their request runs.
	runs, end := s.works("mvoice")
	ctx, leave := context.WithCancel(t.Context())
	left := s.goCtx(ctx, "POST", "/whisper/inference", "x")
	s.waitQueued("whisper", 1)
	leave()
	require.ErrorIs(t, s.await(left).err, context.Canceled)
	s.waitQueued("whisper", 0)
	conn := s.dial()
	_, err := io.WriteString(conn, "POST /mvoice/synthesize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\nhello")
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	s.until("both have left", func() bool {
		return s.metric(`errors_total{code="client_left",consumer="whisper"}`) == 1 && s.metric(`errors_total{code="client_left",consumer="mvoice"}`) == 1
	})
	end()
	s.ok(runs)

	// Servers that die of a request, in the middle of the answer and before it.
	s.servers["mvoice"].SetFaults(func(f *modelserver.Faults) { f.DieMidBody = true })
	require.Error(t, s.post("/mvoice/synthesize", "x").err)
	s.serve("whisper")
	s.servers["whisper"].SetFaults(func(f *modelserver.Faults) { f.DieOnRequest = true })
	s.post("/whisper/inference", "x").refused(t, 502, "server_died")
	require.Empty(t, s.says("refuse"))
	require.Empty(t, s.decisions("refuse"))
	require.Zero(t, s.status().Scheduler.Refused)
}

func TestTheLogHasALineOfEachLoadEvictionAndRefusalAndNoneOfAWarmRequest(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9), plainModel("giant", 17), beside("fenced", "blocked POST /admin/*", "")}})
	s.serve("a")
	s.serve("b")
	s.post("/giant/synthesize", "x").refused(t, 422, "never_fits")
	s.post("/fenced/admin/pull", "x").refused(t, 403, "blocked")
	decided := func() (out []string) {
		for _, d := range s.decisions("") {
			out = append(out, strings.TrimSpace(d.Kind+" "+d.Consumer+" "+d.Target))
		}
		return out
	}
	logged := func() (out []string) {
		for _, l := range s.says("") {
			out = append(out, strings.TrimSpace(l.Msg+" "+l.Consumer+" "+l.For))
		}
		return out
	}
	want := []string{"load a", "loaded a", "unload a b", "evicted a b", "load b", "loaded b", "refuse giant", "refuse fenced"}
	require.Equal(t, want, decided())
	s.until("all of it is logged", func() bool { return len(logged()) >= len(want) })
	require.Equal(t, want, logged())

	ours := func() (n int) {
		for line := range strings.Lines(s.log()) {
			if strings.Contains(line, `"logger":"gpu_broker`) {
				n++
			}
		}
		return n
	}
	before := ours()
	for range 20 {
		s.serve("b")
	}
	s.post("/giant/synthesize", "x").refused(t, 422, "never_fits") // its line comes after theirs, had they any
	s.until("the last line is there", func() bool { return len(logged()) > len(want) })
	require.Equal(t, before+1, ours())
	require.Equal(t, append(slices.Clone(want), "refuse giant"), logged())
}

func TestARefusalOfTheHandlersIsFollowedToo(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{beside("fenced", "blocked POST /admin/*", "")}})
	f := s.follow(t, s.url+"/gpu/decisions?follow=true", "")
	s.post("/fenced/admin/pull", "x").refused(t, 403, "blocked")
	d := f.next()
	require.Equal(t, "refuse fenced blocked", d.Kind+" "+d.Consumer+" "+d.Code)
}
