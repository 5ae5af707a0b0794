package gpubroker

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func TestTheStatusOfAnAnswerIsItsFirstThatIsNotInformational(t *testing.T) {
	for _, c := range []struct {
		statuses []int
		want     int
	}{
		{[]int{http.StatusOK}, http.StatusOK},
		{[]int{http.StatusEarlyHints}, 0},
		{[]int{http.StatusProcessing, http.StatusEarlyHints, http.StatusTeapot}, http.StatusTeapot},
		{[]int{http.StatusTeapot, http.StatusOK}, http.StatusTeapot},
		{[]int{http.StatusSwitchingProtocols}, http.StatusSwitchingProtocols},
	} {
		j := new(job)
		j.ResponseWriter = httptest.NewRecorder()
		for _, status := range c.statuses {
			j.WriteHeader(status)
		}
		require.Equal(t, c.want, j.status, "%v", c.statuses)
	}
}

func TestAnAnswerWithoutAStatusIsA200(t *testing.T) {
	write := func(w *job) { _, _ = w.Write([]byte("x")) }
	read := func(w *job) { _, _ = w.ReadFrom(strings.NewReader("x")) }
	for name, send := range map[string]func(*job){"Write": write, "ReadFrom": read} {
		w := httptest.NewRecorder()
		j := new(job)
		j.ResponseWriter = w
		send(j)
		require.Equal(t, http.StatusOK, j.status, name)
		require.Equal(t, "x", w.Body.String(), name)

		j = new(job)
		j.ResponseWriter = httptest.NewRecorder()
		j.WriteHeader(http.StatusTeapot)
		send(j)
		require.Equal(t, http.StatusTeapot, j.status, name)
	}
}

func TestNothingOfAnAnswerFollowsItsCut(t *testing.T) {
	w := httptest.NewRecorder()
	j := new(job)
	j.ResponseWriter = w
	j.isCut.Store(true)
	_, err := j.Write([]byte("x"))
	require.ErrorIs(t, err, errCut)
	_, err = j.ReadFrom(strings.NewReader("x"))
	require.ErrorIs(t, err, errCut)
	require.ErrorIs(t, j.FlushError(), errCut)
	require.Empty(t, w.Body.String())
	require.False(t, w.Flushed)
}

// A write that blocks is told by an odd count, which the watcher of slow clients looks for.
func TestWhoWatchesAnAnswerSeesItsWritesAndWhatATunnelCarries(t *testing.T) {
	j := new(job)
	var during []uint32
	j.ResponseWriter = seeing{httptest.NewRecorder(), func() { during = append(during, uint32(j.writes.Load())) }}
	_, err := j.Write([]byte("abc"))
	require.NoError(t, err)
	require.NoError(t, j.FlushError())
	require.Equal(t, []uint32{1, 3}, during)
	require.EqualValues(t, 4, j.writes.Load())
	require.Zero(t, j.moved.Load())
	j.tunnel.Store(true)
	j.out.moved = &j.moved
	_, err = j.Write([]byte("abcd"))
	require.NoError(t, err)
	require.EqualValues(t, 4, j.moved.Load())
}

type seeing struct {
	*httptest.ResponseRecorder
	see func()
}

func (s seeing) Write(p []byte) (int, error) { s.see(); return s.ResponseRecorder.Write(p) }
func (s seeing) FlushError() error           { s.see(); return nil }

func TestOfAnAnswerWhoseWorkOutlivesItTheBeginningIsKept(t *testing.T) {
	j := &job{later: true}
	w := httptest.NewRecorder()
	j.ResponseWriter = w
	part := strings.Repeat("x", lifecycle.MaxAnswer-1)
	for _, p := range []string{part, "yz", "more"} {
		_, err := j.Write([]byte(p))
		require.NoError(t, err)
	}
	require.Equal(t, part+"y", string(j.said))
	require.Equal(t, part+"yzmore", w.Body.String(), "and the client gets the whole")
}

func TestGraceComesOnceAndAgainWhileThereIsMoreToDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g graceTimer
		began := time.Now()
		var at []time.Duration
		g.start(time.Second, func() bool { at = append(at, time.Since(began)); return len(at) < 3 })
		g.start(0, func() bool { panic("a second start does nothing") })
		pass(time.Minute)
		synctest.Wait()
		require.Equal(t, []time.Duration{time.Second, time.Second + cutAgain, time.Second + 2*cutAgain}, at)
		g.stop()
	})
	synctest.Test(t, func(t *testing.T) {
		var g graceTimer
		n := 0
		g.start(time.Second, func() bool { n++; return true })
		pass(time.Second + cutAgain/2)
		g.stop()
		pass(time.Minute)
		synctest.Wait()
		require.Equal(t, 1, n, "what was stopped does nothing more")

		var never graceTimer
		never.stop()
		never.start(time.Second, func() bool { panic("it was stopped before it began") })
		pass(time.Minute)
	})
}

func TestRequestsThatRunAreListedUntilTheyEnd(t *testing.T) {
	names := func(l *runs) (out []string) {
		l.each(func(j *job) { out = append(out, j.model) })
		return out
	}
	for _, gone := range []string{"a", "b", "c"} {
		var l runs
		all := map[string]*job{}
		for _, name := range []string{"a", "b", "c"} {
			all[name] = &job{model: name}
			l.add(all[name], uploading)
		}
		require.Equal(t, []string{"c", "b", "a"}, names(&l))
		l.remove(all[gone])
		l.remove(all[gone]) // a second time is harmless
		delete(all, gone)
		require.Len(t, names(&l), 2)
		require.NotContains(t, names(&l), gone)
		for name, j := range all {
			require.Contains(t, names(&l), name)
			l.remove(j)
			require.Nil(t, j.next)
			require.Nil(t, j.prev)
		}
		require.Empty(t, names(&l))
	}
}

// Other modules may send events of the same name as Caddy's.
func TestAnotherModulesEventDoesNotStopTheBroker(t *testing.T) {
	h := newHandler(t)
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	defer cancel()
	mod, err := ctx.LoadModuleByID("http.handlers.gpu_broker.origin_test", nil)
	require.NoError(t, err)
	require.NoError(t, stopping{h.app}.Handle(t.Context(), mod.(*originTest).event))
	require.False(t, h.pool.lived.Load())

	own, err := caddy.NewEvent(ctx, "stopping", nil)
	require.NoError(t, err)
	require.Nil(t, own.Origin())
	require.NoError(t, stopping{h.app}.Handle(t.Context(), own))
	require.True(t, h.pool.lived.Load())
}

// originTest is a module that makes an event.
type originTest struct{ event caddy.Event }

func init() { caddy.RegisterModule(originTest{}) }

func (originTest) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.gpu_broker.origin_test", New: func() caddy.Module { return new(originTest) }}
}

func (o *originTest) Provision(ctx caddy.Context) (err error) {
	o.event, err = caddy.NewEvent(ctx, "stopping", nil)
	return err
}

func TestARequestWhoseServerLoadsInsideItGetsHeartbeats(t *testing.T) {
	h := newHandler(t)
	for _, c := range []struct {
		name  string
		loads bool
		every time.Duration
		want  bool
	}{
		{"its server loads, on a route with heartbeats", true, time.Hour, true},
		{"its server is there", false, time.Hour, false},
		{"a route without heartbeats", true, 0, false},
	} {
		h.Heartbeat = caddy.Duration(c.every)
		w, r := request("GET", "/stream")
		r.Header.Set("Accept", "text/event-stream")
		j := &job{handler: h, target: h.fixed, lease: broker.Lease{Loads: c.loads}}
		j.ResponseWriter = w
		j.waits(r)
		require.Equal(t, c.want, j.heart != nil, c.name)
		if j.heart != nil {
			require.Equal(t, h.headers, j.heart.timing != "", "the timing is told where headers are")
			j.heart.stop()
		}
	}
}

// breaking is a writer whose client is gone.
type breaking struct{ *httptest.ResponseRecorder }

func (breaking) Write([]byte) (int, error)       { return 0, http.ErrHandlerTimeout }
func (breaking) WriteString(string) (int, error) { return 0, http.ErrHandlerTimeout }

func TestAStreamHearsThatItsClientIsGoneBeforeItsFirstPart(t *testing.T) {
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		pass(time.Second)
		synctest.Wait()
		h.admitted("gpu-queue;dur=1.0")
		h.Header().Set("Content-Type", "text/event-stream")
		h.WriteHeader(http.StatusOK)
		h.mu.Lock()
		h.ResponseWriter = breaking{w}
		h.mu.Unlock()
		n, err := h.Write([]byte("data: 1\n\n"))
		require.ErrorIs(t, err, http.ErrHandlerTimeout)
		require.Zero(t, n)
	})
}

func TestARefusalForWantOfRoomSaysWhenToComeAgain(t *testing.T) {
	h := newHandler(t)
	for _, c := range []struct {
		code   scheduler.Code
		after  time.Duration
		status int
		header string
	}{
		{scheduler.QueueFull, 0, 503, "1"},
		{scheduler.QueueFull, 1500 * time.Millisecond, 503, "2"},
		{scheduler.QueueFull, 30 * time.Second, 503, "30"},
		{scheduler.QueueFull, time.Hour, 503, "60"},
		{scheduler.NeverFits, 0, 422, ""},
		{scheduler.BudgetExceeded, 0, 504, ""},
		{scheduler.UnknownConsumer, 0, 404, ""},
	} {
		w, r := request("GET", "/work")
		j := &job{handler: h, target: h.fixed, repl: r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)}
		j.ResponseWriter = w
		require.NoError(t, j.fail(w, r, &broker.Refused{Consumer: "a", Refusal: scheduler.Refusal{Code: c.code, Message: "no", RetryAfter: c.after}}))
		require.Equal(t, c.status, w.Code, "%s %s", c.code, c.after)
		require.Equal(t, c.header, w.Header().Get("Retry-After"), "%s %s", c.code, c.after)
		require.Contains(t, w.Body.String(), string(c.code))
		reason, _ := j.repl.GetString("http.gpu_broker.reason")
		require.Equal(t, string(c.code), reason)
	}
}

func TestWhatIsKeptOfALongReasonIsBounded(t *testing.T) {
	short := strings.Repeat("x", maxReason)
	require.Equal(t, short, keptReason(short))
	require.Equal(t, short+"…", keptReason(short+"y"))
	require.Equal(t, short[1:]+"…", keptReason(short[1:]+"üü"), "between two characters")
}
