package gpubroker

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// failing is a handler behind the broker's that returns an error.
func failing(err error) caddyhttp.Handler {
	return caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return err })
}

// document is the error document of an answer.
func document(t *testing.T, w *httptest.ResponseRecorder) errorBody {
	t.Helper()
	require.Equal(t, "application/json", w.Header().Get("Content-Type"))
	require.Equal(t, strconv.Itoa(w.Body.Len()), w.Header().Get("Content-Length"))
	var doc errorDocument
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &doc), "%s", w.Body)
	return doc.Error
}

// ofServer gives a request what Caddy's server gives it, and returns the fields of its line in the access log.
func ofServer(r *http.Request, srv *caddyhttp.Server) (*http.Request, func() map[string]any) {
	extra := new(caddyhttp.ExtraLogFields)
	ctx := context.WithValue(r.Context(), caddyhttp.ServerCtxKey, srv)
	ctx = context.WithValue(ctx, caddyhttp.ExtraLogFieldsCtxKey, extra)
	return r.WithContext(ctx), func() map[string]any {
		fields := map[string]any{}
		for all, i := reflect.ValueOf(extra).Elem().FieldByName("fields"), 0; i < all.Len(); i++ { // Caddy shows them to its log alone
			f := all.Index(i)
			if fields[f.FieldByName("Key").String()] = f.FieldByName("Integer").Int(); f.FieldByName("String").String() != "" {
				fields[f.FieldByName("Key").String()] = f.FieldByName("String").String()
			}
		}
		return fields
	}
}

func refusalsOf(h *Handler) (all []scheduler.Decision) {
	for _, d := range h.pool.broker.Decisions() {
		if d.Kind == "refuse" {
			all = append(all, d)
		}
	}
	return all
}

func TestARefusalIsCountedAndOnRecordOnce(t *testing.T) {
	h := byModelHandler(t, gpucaddyfile.Route{ModelFrom: inBody})
	for i, c := range []struct{ body, code, consumer string }{
		{`{"model":"nobody's"}`, "unknown_model", ""}, // which the handler refuses
		{`{"model":"off"}`, "not_running", "off"},     // and the scheduler
	} {
		w, r := post("POST", "/v1/chat/completions", c.body)
		require.NoError(t, h.ServeHTTP(w, r, nothing))
		require.Equal(t, c.code, document(t, w).Code)
		all := refusalsOf(h)
		require.Len(t, all, i+1)
		require.Equal(t, c.code, string(all[i].Code))
		require.Equal(t, c.consumer, all[i].Slot)
		require.EqualValues(t, i+1, h.pool.broker.Status().Scheduler.Refused)
	}
	short, long := strings.Repeat("x", maxReason), strings.Repeat("x", maxReason+1)
	require.Equal(t, short, keptReason(short))
	require.Equal(t, short+"…", keptReason(long))
}

func TestTheAccessLogTellsOfTheBroker(t *testing.T) {
	h := byModelHandler(t, gpucaddyfile.Route{ModelFrom: inBody})
	srv := &caddyhttp.Server{Logs: &caddyhttp.ServerLogConfig{}}
	serve := func(srv *caddyhttp.Server, body string) (map[string]any, any) {
		t.Helper()
		w, r := post("POST", "/v1/chat/completions", body)
		r, fields := ofServer(r, srv)
		require.NoError(t, h.ServeHTTP(w, r, nothing))
		return fields(), caddyhttp.GetVar(r.Context(), caddyhttp.LogLevelVar)
	}
	got, level := serve(srv, `{"model":"plain"}`)
	require.Equal(t, "plain", got["gpu_consumer"])
	require.Contains(t, got, "gpu_wait")
	require.NotContains(t, got, "gpu_reason")
	require.Nil(t, level)
	got, level = serve(srv, `{"model":"off"}`)
	require.Equal(t, "off", got["gpu_consumer"])
	require.Equal(t, "not_running", got["gpu_reason"])
	require.Equal(t, "WARN", level, "a 503 of the broker is no error of the site")
	got, level = serve(srv, `{"model":"nobody's"}`)
	require.Equal(t, "unknown_model", got["gpu_reason"])
	require.Nil(t, level)
	got, _ = serve(&caddyhttp.Server{}, `{"model":"plain"}`)
	require.Empty(t, got, "a site without logs")

	for body, want := range map[string]string{`{"model":"off"}`: "off", `{"model":"nobody's"}`: ""} {
		w, r := post("POST", "/v1/chat/completions", body)
		r, fields := ofServer(r, srv)
		ctx, leave := context.WithCancel(r.Context())
		r.Body = leaving{r.Body, leave}
		require.NoError(t, h.ServeHTTP(w, r.WithContext(ctx), nothing))
		require.Equal(t, statusClientLeft, w.Code)
		if want == "" {
			require.Empty(t, fields(), "no consumer is known")
			continue
		}
		require.Equal(t, want, fields()["gpu_consumer"])
		require.NotContains(t, fields(), "gpu_reason")
	}
}

// leaving is the body of a client that leaves once it is sent.
type leaving struct {
	io.ReadCloser
	leave func()
}

func (l leaving) Read(p []byte) (int, error) {
	n, err := l.ReadCloser.Read(p)
	if err != nil {
		l.leave()
	}
	return n, err
}

func TestARefusalsHeaders(t *testing.T) {
	for _, on := range []string{config.On, config.Off, ""} {
		h := byModelHandler(t, gpucaddyfile.Route{ModelFrom: inBody, Headers: on})
		w, r := post("POST", "/v1/chat/completions", `{"model":"off"}`)
		r.Header.Set("Origin", "https://page.example")
		w.Header().Set("Server-Timing", "gpu-queue;dur=0")
		require.NoError(t, h.ServeHTTP(w, r, nothing))
		require.Equal(t, map[string]string{config.On: "off", config.Off: "", "": "off"}[on], w.Header().Get("X-Gpu-Broker-Consumer"))
		require.Empty(t, w.Header().Get("Server-Timing"), "of what was not served")
		require.Equal(t, "60", w.Header().Get("Retry-After"))
		require.Equal(t, "https://page.example", w.Header().Get("Access-Control-Allow-Origin"))
		require.Equal(t, "Origin", w.Header().Get("Vary"))
		require.Contains(t, w.Header().Get("Access-Control-Expose-Headers"), "Retry-After")
		require.Empty(t, w.Header().Get("Connection"))
		repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
		require.Equal(t, "not_running", repl.ReplaceAll("{http.gpu_broker.reason}", ""))

		w, r = post("POST", "/v1/chat/completions", `{"model":"nobody's"}`)
		w.Header().Set("Access-Control-Allow-Origin", "the site's own")
		r.Header.Set("Origin", "https://page.example")
		require.NoError(t, h.ServeHTTP(w, r, nothing))
		require.NotContains(t, w.Header(), "X-Gpu-Broker-Consumer")
		require.NotContains(t, w.Header(), "Retry-After")
		require.Equal(t, []string{"the site's own"}, w.Header()["Access-Control-Allow-Origin"])
		require.Empty(t, w.Header().Get("Vary"))

		w, r = request("GET", "/v1/chat/completions")
		require.NoError(t, h.ServeHTTP(w, r, nothing))
		require.Empty(t, w.Header().Get("Access-Control-Allow-Origin"), "it comes from no page")
	}
}

// A client that waits for "100 Continue" may never send its body: the connection can't be used again.
func TestARefusalOfABodyThatWasNotReadEndsItsConnection(t *testing.T) {
	app, ctx := newApp(t, map[string]any{"name": "off", "vram": "1GiB", "enabled": "off"})
	require.NoError(t, app.Start())
	for _, c := range []struct {
		route  gpucaddyfile.Route
		length int64
		expect string
		proto  int
		closes bool
	}{
		{gpucaddyfile.Route{Consumer: "off", StreamBody: true}, 3, "100-continue", 1, true},
		{gpucaddyfile.Route{Consumer: "off", StreamBody: true}, 3, "", 1, false},
		{gpucaddyfile.Route{Consumer: "off", StreamBody: true}, 3, "100-continue", 2, false},
		{gpucaddyfile.Route{Consumer: "off"}, 3, "100-continue", 1, false}, // it was read
	} {
		h := &Handler{Route: c.route}
		require.NoError(t, h.Provision(ctx))
		w, r := post("POST", "/work", "abc")
		r.ProtoMajor, r.ContentLength = c.proto, c.length
		if c.expect != "" {
			r.Header.Set("Expect", c.expect)
		}
		require.NoError(t, h.ServeHTTP(w, r, nothing))
		require.Equal(t, http.StatusServiceUnavailable, w.Code)
		require.Equal(t, c.closes, w.Header().Get("Connection") == "close", "%+v", c)
	}
}

func TestARefusalInTheMiddleOfABodyEndsItsConnection(t *testing.T) {
	h := newHandlerOf(t, gpucaddyfile.Route{Consumer: "a", MaxBody: 1 << 10})
	for _, c := range []struct {
		size, proto, status int
		closes              bool
	}{
		{1<<10 + 1, 1, http.StatusRequestEntityTooLarge, true},
		{1<<10 + 1, 2, http.StatusRequestEntityTooLarge, false}, // of a stream nothing else depends on
		{1 << 10, 1, http.StatusTeapot, false},
	} {
		w, r := post("POST", "/work", strings.Repeat("x", c.size))
		r.ProtoMajor, r.ContentLength = c.proto, -1
		require.NoError(t, h.ServeHTTP(w, r, failing(&failure{status: http.StatusTeapot, code: "tea", message: "no"})))
		require.Equal(t, c.status, w.Code, "%+v", c)
		require.Equal(t, c.closes, w.Header().Get("Connection") == "close", "%+v", c)
	}
	w, r := post("POST", "/work", strings.Repeat("x", 1<<10))
	require.NoError(t, h.ServeHTTP(w, r, nothing))
	require.Equal(t, http.StatusOK, w.Code, "as large as may be, by its own word")
}

func TestARequestWhoseServerFailsGetsTheServersOrTheSitesError(t *testing.T) {
	h := newHandler(t)
	own := caddyhttp.Error(http.StatusTeapot, errors.New("the site's own"))
	w, r := request("GET", "/work")
	require.ErrorIs(t, h.ServeHTTP(w, r, failing(own)), own)
	require.Empty(t, w.Body.String())

	w, r = request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, failing(caddyhttp.Error(http.StatusBadGateway, errors.New("EOF")))))
	require.Equal(t, http.StatusBadGateway, w.Code)
	doc := document(t, w)
	require.Equal(t, "server_died", doc.Code)
	require.Equal(t, `the server of consumer "a" gave no answer: EOF`, doc.Message)
	require.Equal(t, "a", doc.Consumer)

	w, r = request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, failing(context.Canceled)))
	require.Equal(t, statusClientLeft, w.Code)
	require.Empty(t, w.Body.String())
	require.Empty(t, refusalsOf(h), "these are no refusals")
	require.Zero(t, h.inFlight())
}

func TestAServerThatTakesNoConnectionIsAskedOnceMore(t *testing.T) {
	h := newHandler(t)
	refused := caddyhttp.Error(http.StatusBadGateway, reverseproxy.NewDialError(&net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")}))
	asked := 0
	next := func(until int) caddyhttp.Handler {
		asked = 0
		return caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			if asked++; asked < until {
				return refused
			}
			w.WriteHeader(http.StatusOK)
			return nil
		})
	}
	w, r := request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, next(2)))
	require.Equal(t, http.StatusOK, w.Code)
	require.Equal(t, 2, asked)

	w, r = request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, next(9)))
	require.Equal(t, 2, asked)
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	doc := document(t, w)
	require.Equal(t, "unhealthy", doc.Code)
	require.Contains(t, doc.Message, `the server of consumer "a" can't be reached: dial tcp: connection refused`)
	require.Equal(t, "5", w.Header().Get("Retry-After"))

	w, r = request("GET", "/work")
	ctx, leave := context.WithCancel(r.Context())
	asked = 0
	require.NoError(t, h.ServeHTTP(w, r.WithContext(ctx), caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
		asked++
		leave()
		return refused
	})))
	require.Equal(t, 1, asked, "nobody waits for it")
	require.Equal(t, statusClientLeft, w.Code)
	require.Zero(t, h.inFlight())
}

func TestAServerThatIsAskedOnceMoreGetsTheWholeRequestAgain(t *testing.T) {
	refused := reverseproxy.NewDialError(errors.New("connection refused"))
	for name, c := range map[string]struct {
		route      gpucaddyfile.Route
		body, want string
	}{
		"as it came":     {gpucaddyfile.Route{Consumer: "plain"}, `{"model":"any"}`, `{"model":"any"}`},
		"and translated": {gpucaddyfile.Route{ModelFrom: inBody}, `{"model":"sent"}`, `{"model":"sent-tuned"}`},
	} {
		t.Run(name, func(t *testing.T) {
			h := &Handler{Route: c.route}
			require.NoError(t, h.Provision(newSending(t)))
			asked := 0
			w, r := post("POST", "/v1/chat/completions", c.body)
			require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
				asked++
				got, err := io.ReadAll(r.Body)
				require.NoError(t, err)
				require.Equal(t, c.want, string(got))
				require.EqualValues(t, len(got), r.ContentLength)
				if asked == 1 {
					return refused
				}
				return nil
			})))
			require.Equal(t, http.StatusOK, w.Code, "%s", w.Body)
			require.Equal(t, 2, asked)
		})
	}
}

// request_buffers reads of a body before there is a connection.
func TestABodyThatIsStreamedIsSentAgainOnlyIfNothingOfItWasRead(t *testing.T) {
	h := newHandlerOf(t, gpucaddyfile.Route{Consumer: "a", StreamBody: true})
	for name, c := range map[string]struct {
		body         string
		buffered     int64
		asked, again int // how often it is asked, and how much of the body comes then
		status       int
	}{
		"nothing was read":   {body: "hello", asked: 2, again: 5, status: http.StatusOK},
		"a part was read":    {body: "hello", buffered: 1, asked: 1, status: http.StatusServiceUnavailable},
		"all of it was":      {body: "hello", buffered: 9, asked: 1, status: http.StatusServiceUnavailable},
		"it turns out empty": {buffered: 9, asked: 2, status: http.StatusOK},
	} {
		w, r := post("POST", "/work", c.body)
		r.ContentLength = -1
		asked, again := 0, 0
		require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			if asked++; asked == 1 {
				_, err := io.CopyN(io.Discard, r.Body, c.buffered)
				require.True(t, err == nil || errors.Is(err, io.EOF), name)
				return reverseproxy.NewDialError(errors.New("connection refused"))
			}
			rest, err := io.ReadAll(r.Body)
			require.NoError(t, err)
			again = len(rest)
			w.WriteHeader(http.StatusOK)
			return nil
		})))
		require.Equal(t, c.asked, asked, name)
		require.Equal(t, c.again, again, name)
		require.Equal(t, c.status, w.Code, name)
		if c.status != http.StatusOK {
			require.Equal(t, "unhealthy", document(t, w).Code, name)
			require.Equal(t, "5", w.Header().Get("Retry-After"), name)
		}
	}
}

// The placeholder of the upstream was misspelt: the server was never asked.
func TestAProxyThatWentElsewhereIsTheSitesFault(t *testing.T) {
	h := newHandler(t)
	asked := 0
	elsewhere := caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
		asked++
		r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Set("http.reverse_proxy.upstream.hostport", ":80")
		return reverseproxy.NewDialError(errors.New("connection refused"))
	})
	w, r := request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, elsewhere))
	require.Equal(t, http.StatusInternalServerError, w.Code)
	require.Equal(t, "misrouted", document(t, w).Code)
	require.Equal(t, 1, asked)
	w, r = request("OPTIONS", "/work")
	require.NoError(t, h.ServeHTTP(w, r, elsewhere))
	require.Equal(t, "misrouted", document(t, w).Code, "also of a request that needs no GPU")
}

func TestARequestThatIsAdmittedDoesNotWaitForAnotherPlace(t *testing.T) {
	h := newHandler(t)
	w, r := request("GET", "/work")
	require.NoError(t, h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
		return h.ServeHTTP(&caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, r, nothing)
	})))
	require.Equal(t, http.StatusInternalServerError, w.Code)
	require.Contains(t, document(t, w).Message, `two gpu_broker directives, one after the other, for consumers "a" and "a"`)
}

func TestTheErrorRoutesOfASiteAnswerWhatTheBrokerRefuses(t *testing.T) {
	h := byModelHandler(t, gpucaddyfile.Route{ModelFrom: inBody})
	for routes, own := range map[int]bool{0: false, 1: true} {
		w, r := post("POST", "/v1/chat/completions", `{"model":"off"}`)
		r, _ = ofServer(r, &caddyhttp.Server{Errors: &caddyhttp.HTTPErrorConfig{Routes: make(caddyhttp.RouteList, routes)}})
		err := h.ServeHTTP(w, r, nothing)
		require.Equal(t, "60", w.Header().Get("Retry-After"))
		if !own {
			require.NoError(t, err)
			require.Equal(t, "not_running", document(t, w).Code)
			continue
		}
		var caddys caddyhttp.HandlerError
		require.ErrorAs(t, err, &caddys)
		require.Equal(t, http.StatusServiceUnavailable, caddys.StatusCode)
		require.Empty(t, w.Body.String())
	}
	require.Len(t, refusalsOf(h), 2)
}

func TestARefusalForMemoryTellsWhoHoldsIt(t *testing.T) {
	require.Nil(t, detailOf(nil))
	got := detailOf(&scheduler.Detail{Need: 3, Free: map[int]gpu.Bytes{0: 2, 7: -1}, Unloads: []string{"a: gave nothing"},
		Holders: []scheduler.Holder{{Name: "b", State: "READY", Bytes: 5, Protected: "pin"}}})
	require.Equal(t, &errorDetail{Need: 3, Free: map[string]int64{"0": 2, "7": 0}, Unloads: []string{"a: gave nothing"},
		Holders: []errorHolder{{Name: "b", State: "READY", Bytes: 5, Protected: "pin"}}}, got)
	text, err := json.Marshal(detailOf(&scheduler.Detail{}))
	require.NoError(t, err)
	require.JSONEq(t, `{"need":0,"free":{},"holders":[]}`, string(text), "lists are there, though they are empty")
}

// beating is a handler whose requests wait for a place, since all are taken, until what it returns is called.
func beating(t *testing.T) (*Handler, func()) {
	t.Helper()
	h := newHandlerOf(t, gpucaddyfile.Route{Consumer: "a", Heartbeat: caddy.Duration(time.Millisecond)})
	var all []broker.Lease
	for range h.app.consumer("a").Concurrency {
		l, err := h.pool.broker.Acquire(t.Context(), broker.Request{Consumer: "a", Priority: broker.DefaultPriority})
		require.NoError(t, err)
		all = append(all, l)
	}
	return h, func() {
		for _, l := range all {
			l.Release(scheduler.Served)
		}
	}
}

func TestAfterHeartbeatsAnErrorIsTheLastEvent(t *testing.T) {
	for name, c := range map[string]struct {
		next          caddyhttp.Handler
		code, message string
		status        any // that the access log tells
	}{
		"of the broker":             {nil, "draining", "no more requests are taken", nil},
		"of the server":             {failing(caddyhttp.Error(http.StatusBadGateway, errors.New("EOF"))), "server_died", "gave no answer: EOF", nil},
		"of a handler of the sites": {failing(caddyhttp.Error(http.StatusTeapot, errors.New("secret"))), "failed", "the request failed with status 418 I'm a teapot", nil},
		"of any kind":               {failing(errors.New("whatever")), "failed", "whatever", nil},
		"that the server answers":   {caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error { w.WriteHeader(http.StatusTeapot); return nil }), "no_stream", "status 418", int64(http.StatusTeapot)},
	} {
		t.Run(name, func(t *testing.T) {
			h, free := beating(t)
			w, r := request("GET", "/stream")
			r.Header.Set("Accept", "text/event-stream")
			r, fields := ofServer(r, &caddyhttp.Server{Logs: &caddyhttp.ServerLogConfig{}})
			began := make(chan struct{})
			first := &seen{ResponseRecorder: w, first: began}
			served := make(chan error, 1)
			go func() { served <- h.ServeHTTP(first, r, c.next) }()
			<-began
			if c.next == nil {
				h.pool.broker.StopAdmitting()
			}
			free()
			require.NoError(t, <-served)
			require.Equal(t, http.StatusOK, w.Code)
			require.True(t, strings.HasPrefix(w.Body.String(), ": waiting for a, position 1\n\n"), w.Body)
			_, event, ok := strings.Cut(w.Body.String(), "data: ")
			require.True(t, ok, w.Body)
			var doc errorDocument
			require.NoError(t, json.Unmarshal([]byte(event), &doc), event)
			require.Equal(t, c.code, doc.Error.Code)
			require.Contains(t, doc.Error.Message, c.message)
			require.NotContains(t, event, "secret")
			require.Equal(t, c.status, fields()["gpu_status"])
			require.Len(t, refusalsOf(h), map[bool]int{true: 1, false: 0}[c.next == nil], "a server's failure is no refusal")
			require.Zero(t, h.inFlight())
		})
	}
}

// seen is a recorder that tells of the first write to it.
type seen struct {
	*httptest.ResponseRecorder
	first chan struct{}
}

func (s *seen) Write(p []byte) (int, error) {
	if s.first != nil {
		close(s.first)
		s.first = nil
	}
	return s.ResponseRecorder.Write(p)
}
