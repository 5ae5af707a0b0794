package gpubroker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// HTTP/3 has no connection of its own to close: its requests end by their context.
func TestARequestOverHTTP3IsCutByItsContext(t *testing.T) {
	h := newHandler(t)
	w, r := request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, nothing)) // the one that loads its server has a context of its own in any case
	w, r = request("GET", "/work")
	r.ProtoMajor = 3
	require.PanicsWithValue(t, http.ErrAbortHandler, func() {
		_ = h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			w.WriteHeader(http.StatusOK)
			require.Equal(t, 1, h.pool.running.cut())
			require.Error(t, r.Context().Err(), "the server goes on for nobody")
			return nil
		}))
	})
	require.Zero(t, h.inFlight())
}

// reverse_proxy returns nil where the request to its server was canceled.
func TestAnAnswerThatWasCutIsNotPassedOffAsWhole(t *testing.T) {
	h := newHandler(t)
	w, r := request("GET", "/work")
	require.PanicsWithValue(t, http.ErrAbortHandler, func() {
		_ = h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			_, _ = w.Write([]byte("half"))
			h.pool.running.cut()
			_, err := w.Write([]byte("more"))
			require.ErrorIs(t, err, errCut)
			return nil
		}))
	})
	require.Equal(t, "half", w.Body.String())
	require.Zero(t, h.inFlight())
}

func TestAnAnswerThatMaxRunEndsIsNotPassedOffAsWhole(t *testing.T) {
	app, ctx := newApp(t, map[string]any{"name": "a", "vram": "1GiB", "max_run": "20ms"})
	require.NoError(t, app.Start())
	h := &Handler{Route: gpucaddyfile.Route{Consumer: "a"}}
	require.NoError(t, h.Provision(ctx))
	w, r := request("GET", "/work")
	require.PanicsWithValue(t, http.ErrAbortHandler, func() {
		_ = h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			_, _ = w.Write([]byte("half"))
			<-r.Context().Done()
			return nil
		}))
	})
	require.Zero(t, h.inFlight())

	w, r = request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
		<-r.Context().Done()
		return r.Context().Err()
	})))
	require.Equal(t, http.StatusGatewayTimeout, w.Code, "nothing of it had begun")
}

// bodyFunc is a request body that does something when it is read.
type bodyFunc func() error

func (f bodyFunc) Read([]byte) (int, error) { return 0, f() }
func (bodyFunc) Close() error               { return nil }

// A CONNECT that opens a WebSocket over HTTP/2 has a body without an end.
func TestTheBodyOfATunnelIsNotReadAhead(t *testing.T) {
	h := newHandler(t)
	w, r := request(http.MethodConnect, "/work")
	r.ProtoMajor, r.ContentLength = 2, -1
	r.Body = bodyFunc(func() error {
		t.Error("it is read before the tunnel is there")
		return io.EOF
	})
	reached := false
	require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
		reached = true
		return nil
	})))
	require.True(t, reached)

	read := false
	w, r = request(http.MethodPost, "/work")
	r.ContentLength = -1
	r.Body = bodyFunc(func() error {
		read = true
		return io.EOF
	})
	require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
		require.True(t, read, "any other body is")
		return nil
	})))
}

// net/http ends the context of a request whose connection we cut, and so does a client that leaves.
func TestAStalledUploadIsNoClientThatLeft(t *testing.T) {
	h := newHandler(t)
	for name, stalls := range map[string]bool{"stalled": true, "left": false} {
		t.Run(name, func(t *testing.T) {
			w, r := request("POST", "/work")
			ctx, leave := context.WithCancel(r.Context())
			defer leave()
			r = r.WithContext(ctx)
			r.ContentLength = 10
			r.Body = bodyFunc(func() error {
				if stalls {
					h.pool.running.each(func(j *job) { h.pool.cutFor(j, codeUploadStalled, time.Second) })
				}
				leave()
				return io.ErrUnexpectedEOF
			})
			require.NoError(t, h.ServeHTTP(w, r, nothing))
			if !stalls {
				require.Equal(t, statusClientLeft, w.Code)
				return
			}
			require.Equal(t, http.StatusRequestTimeout, w.Code)
			require.Contains(t, w.Body.String(), codeUploadStalled)
		})
	}
}

func TestRetryAfterIsAtMostAMinute(t *testing.T) {
	h := newHandler(t)
	for after, want := range map[time.Duration]string{time.Millisecond: "1", 7 * time.Second: "7", 59500 * time.Millisecond: "60", 10 * time.Minute: "60"} {
		w, r := request("GET", "/work")
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			return &failure{status: http.StatusServiceUnavailable, code: "queue_full", message: "later", retryAfter: after}
		})))
		require.Equal(t, want, w.Header().Get("Retry-After"), after)
		var doc struct {
			Error struct {
				RetryAfter json.Number `json:"retry_after"`
			} `json:"error"`
		}
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &doc))
		require.Equal(t, want, doc.Error.RetryAfter.String(), after)
	}
}

// refusedBy is what reverse_proxy makes of a connection that did not come about.
func refusedBy(err error) error {
	return caddyhttp.Error(http.StatusBadGateway, reverseproxy.NewDialError(&net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", err)}))
}

func TestWhatTheSchedulerIsToldOfAJobsEnd(t *testing.T) {
	_, here := request("GET", "/work")
	gone, leave := context.WithCancel(here.Context())
	leave()
	left := here.WithContext(gone)
	refused, hung := refusedBy(syscall.ECONNREFUSED), refusedBy(os.ErrDeadlineExceeded)
	gatewayTimeout := func(err error) error { return caddyhttp.Error(http.StatusGatewayTimeout, err) }
	for name, c := range map[string]struct {
		r             *http.Request
		status        int
		later         bool
		err           error
		died, cutByUs bool // it panicked; it ran out of its time, or was cut
		dialled       string
		tries         int // before the last one
		want          scheduler.Outcome
	}{
		"it is answered":                           {r: here, status: 200, want: scheduler.Served},
		"with an error of the server":              {r: here, status: 503, want: scheduler.Served},
		"its client left before the answer":        {r: here, status: statusClientLeft, want: scheduler.NoAnswer},
		"it has no answer":                         {r: here, want: scheduler.NoAnswer},
		"its work goes on":                         {r: here, status: 202, later: true, want: scheduler.Accepted},
		"its work may go on, though nobody waits":  {r: here, status: statusClientLeft, later: true, want: scheduler.Accepted},
		"its work was refused":                     {r: here, status: 400, later: true, want: scheduler.Served},
		"its server broke off":                     {r: here, status: 200, died: true, want: scheduler.ServerDied},
		"its client left in the middle":            {r: left, status: 200, died: true, want: scheduler.Served},
		"it was cut in the middle":                 {r: here, status: 200, died: true, cutByUs: true, want: scheduler.Served},
		"it was cut before the answer":             {r: here, died: true, cutByUs: true, want: scheduler.NoAnswer},
		"its server gave no answer":                {r: here, err: io.ErrUnexpectedEOF, want: scheduler.ServerDied},
		"its server gave none in max_run":          {r: here, err: io.ErrUnexpectedEOF, cutByUs: true, want: scheduler.NoAnswer},
		"its client left, which failed the server": {r: left, err: io.ErrUnexpectedEOF, want: scheduler.NoAnswer},
		"its server took no connection":            {r: here, err: refused, want: scheduler.DialRefused},
		"its server did not answer the connection": {r: here, err: hung, want: scheduler.Unreached},
		"its client left before it was connected":  {r: left, err: refusedBy(context.Canceled), want: scheduler.Unreached},
		"its body was at fault":                    {r: here, err: storageFull(io.ErrShortWrite), want: scheduler.NoAnswer},
		"reverse_proxy gave it up":                 {r: here, err: gatewayTimeout(os.ErrDeadlineExceeded), want: scheduler.NoAnswer},
		"the site answers with status 504":         {r: here, err: gatewayTimeout(io.ErrUnexpectedEOF), want: scheduler.ServerDied},
		"another server took no connection":        {r: here, err: refused, dialled: "127.0.0.1:9000", want: scheduler.NoAnswer},
		"another did not answer the connection":    {r: here, err: hung, dialled: "10.0.0.7:8080", want: scheduler.NoAnswer},
		"a socket took no connection":              {r: here, err: refused, dialled: "/run/s.sock", want: scheduler.NoAnswer},
		"its server did not, written differently":  {r: here, err: refused, dialled: "[::1]:8080", want: scheduler.DialRefused},
		"its server took no second connection":     {r: here, err: refused, tries: 1, want: scheduler.DialRefused},
		"another did not, asked after it":          {r: here, err: refused, tries: 1, dialled: "127.0.0.1:9000", want: scheduler.NoAnswer},
		"it did not answer a second connection":    {r: here, err: hung, tries: 1, want: scheduler.NoAnswer},
		"another broke off, asked after it":        {r: here, err: io.ErrUnexpectedEOF, tries: 1, dialled: "127.0.0.1:9000", want: scheduler.NoAnswer},
		"its server broke off twice":               {r: here, err: io.ErrUnexpectedEOF, tries: 1, want: scheduler.ServerDied},
		"another gave no answer, asked after it":   {r: here, err: gatewayTimeout(os.ErrDeadlineExceeded), tries: 1, dialled: "127.0.0.1:9000", want: scheduler.NoAnswer},
	} {
		j := &job{status: c.status, later: c.later, target: &target{}, repl: caddy.NewReplacer(), lease: broker.Lease{Upstream: "127.0.0.1:8080"}}
		j.repl.Set("http.reverse_proxy.upstream.hostport", cmp.Or(c.dialled, "127.0.0.1:8080"))
		j.repl.Set("http.reverse_proxy.retries", c.tries)
		require.Equal(t, c.want, j.outcome(c.r, c.err, !c.died, c.cutByUs), name)
	}
}

func TestOnlyTheServersOwnAddressTellsThatNobodyListensThere(t *testing.T) {
	for text, c := range map[string]struct {
		upstream string
		want     bool
	}{
		"dial tcp 127.0.0.1:8080: connect: connection refused":                                      {"127.0.0.1:8080", true},
		"dial tcp [::1]:8080: connect: connection refused":                                          {"[::1]:8080", true},
		"dial unix /run/s.sock: connect: connection refused":                                        {"/run/s.sock", true},
		"dial unix @s: connect: connection refused":                                                 {"@s", true},
		"dial unix /run/gone.sock: connect: no such file or directory":                              {"/run/gone.sock", false}, // its process may listen on without it
		"dial tcp 10.0.0.7:8080: connect: no route to host":                                         {"10.0.0.7:8080", false},
		"dial tcp 127.0.0.1:8080: i/o timeout":                                                      {"127.0.0.1:8080", false},
		"dial tcp [::1]:8081: connect: connection refused":                                          {"localhost:8081", false}, // 127.0.0.1 may have hung
		"dial tcp: lookup llm on 10.0.0.1:53: read udp 10.0.0.2:9->10.0.0.1:53: connection refused": {"llm:8080", false},
		"proxyconnect tcp: dial tcp 10.0.0.9:3128: connect: connection refused":                     {"10.0.0.7:8080", false},
	} {
		j := &job{repl: caddy.NewReplacer()}
		j.repl.Set("http.reverse_proxy.upstream.hostport", c.upstream)
		require.Equal(t, c.want, j.nobodyListens(reverseproxy.NewDialError(errors.New(text))), text)
	}
}

// A consumer without an upstream doesn't tell where its server is.
func TestWithoutAnUpstreamAnyRefusalIsTheServers(t *testing.T) {
	_, r := request("GET", "/work")
	outcomes := map[string]scheduler.Outcome{"127.0.0.1:8080": scheduler.DialRefused, "llm:8080": scheduler.Unreached, "": scheduler.Unreached}
	for dialled, want := range outcomes {
		j := &job{target: &target{}, repl: caddy.NewReplacer()}
		if dialled != "" { // else it was no reverse_proxy that went there
			j.repl.Set("http.reverse_proxy.upstream.hostport", dialled)
		}
		require.Equal(t, want, j.outcome(r, refusedBy(syscall.ECONNREFUSED), true, false), dialled)
		j.repl.Set("http.reverse_proxy.retries", 1)
		require.Equal(t, scheduler.NoAnswer, j.outcome(r, refusedBy(syscall.ECONNREFUSED), true, false), "%s: another may work on it", dialled)
	}
}

// The site may resolve the name by itself, as by `dynamic a`, or ask another server that has the same port.
func TestAnAddressThatRefusesMayBeThatOfANamedUpstream(t *testing.T) {
	_, r := request("GET", "/work")
	for upstream, want := range map[string]scheduler.Outcome{
		"ollama:11434": scheduler.Unreached, "ollama:11435": scheduler.NoAnswer, "10.0.0.8:11434": scheduler.NoAnswer, "10.0.0.7:11434": scheduler.DialRefused,
		"localhost:11434": scheduler.NoAnswer, "": scheduler.DialRefused,
	} {
		j := &job{target: &target{}, repl: caddy.NewReplacer(), lease: broker.Lease{Upstream: upstream}}
		j.repl.Set("http.reverse_proxy.upstream.hostport", "10.0.0.7:11434")
		refused := refusedBy(syscall.ECONNREFUSED)
		require.Equal(t, want, j.outcome(r, refused, true, false), upstream)
		require.Equal(t, want == scheduler.DialRefused, j.unreached(r, refused), upstream)
		late := caddyhttp.Error(http.StatusGatewayTimeout, os.ErrDeadlineExceeded)
		require.Equal(t, want != scheduler.NoAnswer, j.gaveUp(r, late), "%s: it may work on", upstream)
	}
}

// reverse_proxy repeats a GET also after it was sent, and what lb_retry_match names.
func TestARequestThatAnEarlierTryMayHaveSentIsNotRunAgain(t *testing.T) {
	h := newHandler(t)
	for name, c := range map[string]struct {
		body          string
		reads         bool
		retries       int
		asked, status int
	}{
		"one try":                         {asked: 2, status: 503},
		"a GET":                           {retries: 1, asked: 1, status: 502},
		"a body":                          {body: "x", retries: 1, asked: 2, status: 503},
		"a body that something has taken": {body: "x", reads: true, retries: 1, asked: 1, status: 502},
		"one try that has taken the body": {body: "x", reads: true, asked: 2, status: 503},
	} {
		w, r := request("GET", "/work")
		if c.body != "" {
			r.Method, r.Body, r.ContentLength = "POST", io.NopCloser(strings.NewReader(c.body)), int64(len(c.body))
		}
		asked := 0
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
			asked++
			if c.reads {
				_, err := io.ReadAll(r.Body)
				require.NoError(t, err)
			}
			r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Set("http.reverse_proxy.retries", c.retries)
			return refusedBy(syscall.ECONNREFUSED)
		})), name)
		require.Equal(t, c.asked, asked, name)
		require.Equal(t, c.status, w.Code, name)
	}
}

// The site may ask its server again in handle_response, as reverse_proxy does by lb_retry_match.
func TestAJobThatItsServerHasAnsweredIsNotRunAgain(t *testing.T) {
	h := newHandler(t)
	for name, c := range map[string]struct {
		before, within bool // it is answered by another server before it is admitted; it is answered
		asked, status  int
	}{
		"it is not answered":                    {asked: 2, status: http.StatusServiceUnavailable},
		"it is":                                 {within: true, asked: 1, status: http.StatusBadGateway},
		"another has answered before (an auth)": {before: true, asked: 2, status: http.StatusServiceUnavailable},
	} {
		w, r := request("GET", "/work")
		repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
		if c.before {
			repl.Set(answerTime, time.Second)
		}
		asked := 0
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			asked++
			if c.within {
				repl.Set(answerTime, time.Second)
			}
			return refusedBy(syscall.ECONNREFUSED)
		})))
		require.Equal(t, c.asked, asked, name)
		require.Equal(t, c.status, w.Code, name)
	}
}

func TestWhereReverseProxyAsksNobodyTheServerIsUnhealthy(t *testing.T) {
	h := newHandler(t)
	w, r := request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, nothing))
	nobody := caddyhttp.Error(http.StatusServiceUnavailable, errors.New("no upstreams available"))
	w, r = request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, failing(nobody)))
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Equal(t, "unhealthy", document(t, w).Code)
	require.Equal(t, "5", w.Header().Get("Retry-After"))

	w, r = request("GET", "/work")
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	require.ErrorIs(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
		repl.Set(answerTime, time.Second)
		return nobody
	})), nobody, "its server has answered, and another of the site is down")
}

func TestARequestIsBrokenOffOnlyIfItEndsBeforeItsAnswer(t *testing.T) {
	_, here := request("GET", "/work")
	gone, leave := context.WithCancel(here.Context())
	leave()
	left := here.WithContext(gone)
	for name, c := range map[string]struct {
		inner     *http.Request
		cut       bool
		status    int
		completed bool
		want      bool
	}{
		"it is answered":                          {inner: here, status: 200, completed: true},
		"its server failed":                       {inner: here, completed: true},
		"its server broke off":                    {inner: here, status: 200},
		"its client leaves after the answer":      {inner: left, status: 200, completed: true},
		"its client leaves in the middle":         {inner: left, status: 200, want: true},
		"its client leaves before the answer":     {inner: left, completed: true, want: true},
		"its client leaves, as reverse_proxy has": {inner: left, status: statusClientLeft, completed: true, want: true},
		"it is cut in the middle":                 {inner: here, cut: true, status: 200, want: true},
		"it is cut before the answer":             {inner: here, cut: true, completed: true, want: true},
	} {
		j := &job{status: c.status}
		j.isCut.Store(c.cut)
		require.Equal(t, c.want, j.brokeOff(c.inner, c.completed), name)
	}
}

func TestAServerThatCantBeReachedIsToldWithoutCaddysTrace(t *testing.T) {
	const want = `the server of consumer "a" can't be reached: unexpected EOF`
	require.EqualError(t, unhealthy("a", io.ErrUnexpectedEOF), want)
	require.EqualError(t, unhealthy("a", caddyhttp.Error(http.StatusBadGateway, io.ErrUnexpectedEOF)), want)
	require.NotContains(t, unhealthy("a", caddyhttp.HandlerError{StatusCode: http.StatusBadGateway}).Error(), "<nil>")
}
