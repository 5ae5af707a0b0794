package gpubroker

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	zaptest "go.uber.org/zap/zaptest/observer"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
)

func TestBodyAsksToStreamOnlyByTheWordAtItsTop(t *testing.T) {
	for body, want := range map[string]bool{
		`{"stream":true}`: true,
		" \n{ \"a\" : [1,{\"b\":2}] , \"stream\" :\ttrue }": true,
		"\xEF\xBB\xBF{\"stream\":true}":                     true,
		`{"stream":false}`:                                  false,
		`{"stream":"true"}`:                                 false,
		`{"stream":1}`:                                      false,
		`{"stream":null,"a":true}`:                          false,
		`{"a":"stream","b":true}`:                           false,
		`{"a":{"stream":true}}`:                             false,
		`{"a":[{"stream":true}],"stream":false}`:            false,
		`{"a":"\"stream\":true"}`:                           false,
		`{"a":"\\","stream":true}`:                          true,
		`{"streams":true,"strea":true,"":true}`:             false,
		`{"stream":true,"stream":false}`:                    false,
		`{"stream":false,"stream":true}`:                    true,
		`[{"stream":true}]`:                                 false,
		`[true]`:                                            false,
		`"stream"`:                                          false,
		`true`:                                              false,
		``:                                                  false,
		`{`:                                                 false,
		`{"stream`:                                          false,
		`{"stream":tr`:                                      false,
		`not json`:                                          false,
		`{"a":"` + strings.Repeat(`x\"`, 50_000) + `","stream":true}`: true,
	} {
		require.Equal(t, want, asksToStream(strings.NewReader(body)), "%.100s", body)
		require.Equal(t, want, asksToStream(iotest.OneByteReader(strings.NewReader(body))), "in pieces: %.100s", body)
	}
}

// FuzzBodyAsksToStream holds it against encoding/json.
func FuzzBodyAsksToStream(f *testing.F) {
	for _, seed := range []string{`{"stream":true}`, `{"a":[{"stream":true}],"stream":false}`, `{"a":"\"","stream" : true}`, `[1]`, `{"stream":{"stream":true}}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		got := asksToStream(bytes.NewReader(body))
		var doc map[string]json.RawMessage
		if json.Unmarshal(body, &doc) == nil && !bytes.Contains(body, []byte(`\u`)) {
			require.Equal(t, string(doc["stream"]) == "true", got, "%s", body)
		}
	})
}

// beats is a heart with an interval of a second, in a bubble of time.
func beats(t *testing.T, test func(t *testing.T, h *heart, w *httptest.ResponseRecorder)) {
	handler := newHandler(t)
	handler.Heartbeat = 1e9
	synctest.Test(t, func(t *testing.T) {
		w, r := request("GET", "/stream")
		r.Header.Set("Accept", "Text/Event-Stream")
		w.Header().Set("X-Site", "own")
		j := &job{handler: handler, target: handler.fixed}
		j.ResponseWriter = w
		at := 3
		j.beat(r, func() broker.Place { at--; return broker.Place{Consumer: "a", Position: at} })
		require.NotNil(t, j.heart)
		defer j.heart.stop()
		test(t, j.heart, w)
	})
}

func stream(w http.ResponseWriter, status int, contentType, body string) {
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("X-Server", "its own")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(body))
	_ = http.NewResponseController(w).Flush()
}

func TestAnswerBeforeTheFirstHeartbeatIsPassedOnWhole(t *testing.T) {
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		pass(999 * time.Millisecond)
		stream(h, http.StatusTeapot, "text/plain", "hello")
		h.Header().Set("X-Trailer", "late")
		pass(time.Minute)
		h.close("a")
		require.Equal(t, http.StatusTeapot, w.Code)
		require.Equal(t, "hello", w.Body.String())
		require.Equal(t, "own", w.Result().Header.Get("X-Site"))
		require.Equal(t, "its own", w.Result().Header.Get("X-Server"))
		require.Equal(t, "late", w.Header().Get("X-Trailer"), "headers after the body are the client's")
		require.Empty(t, w.Header().Get("X-Accel-Buffering"))
	})
}

func TestStreamFollowsTheHeartbeatsWithoutItsHeaders(t *testing.T) {
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		pass(2500 * time.Millisecond)
		synctest.Wait()
		require.True(t, w.Flushed)
		h.admitted("gpu-queue;dur=2500.0, gpu-load;dur=0.0")
		h.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		h.WriteHeader(http.StatusEarlyHints)
		h.WriteHeader(http.StatusOK)
		pass(time.Second)
		synctest.Wait()
		_, _ = h.Write([]byte("data: 1\n\n"))
		pass(time.Minute)
		_, _ = h.Write([]byte("data: 2\n\n"))
		h.close("a")
		require.Equal(t, ": waiting for a, position 2\n\n: waiting for a, position 1\n\n: waiting for the answer\n\n"+
			": gpu-queue;dur=2500.0, gpu-load;dur=0.0\n\ndata: 1\n\ndata: 2\n\n", w.Body.String())
		head := w.Result().Header
		require.Equal(t, "own", head.Get("X-Site"))
		require.Equal(t, "text/event-stream", head.Get("Content-Type"))
		require.Empty(t, head.Get("X-Server"))
	})
}

func TestWhatIsNoStreamBecomesOneBoundedEvent(t *testing.T) {
	long := strings.Repeat("ü", 100_000)
	for name, c := range map[string]struct {
		status      int
		contentType string
		body        string
		want        string // of the message
		own         string // the whole error, if it is the server's
	}{
		"an error of OpenAI's form": {401, "application/json", "{\n\"error\": {\"message\": \"no key\",\n\"code\": null}}", "", `{"message":"no key","code":null}`},
		"an error of ollama's form": {404, "application/json", `{"error":"model \"x\" not found"}`, `consumer "a" answered with status 404: model "x" not found`, ""},
		"a page":                    {502, "text/html", "<p>bad\ngateway</p>", "consumer \"a\" answered with status 502: <p>bad\ngateway</p>", ""},
		"an answer in one piece":    {200, "application/json", `{"choices":[]}`, `consumer "a" answered with "application/json" instead of an event stream: {"choices":[]}`, ""},
		"a long one":                {500, "text/plain", long, `consumer "a" answered with status 500: ` + long[:2048], ""},
		"a long error":              {500, "application/json", `{"error":"x` + long[:10_000] + `"}`, `consumer "a" answered with status 500: x` + long[:2046], ""},
		"an empty stream":           {200, "text/event-stream", "", `consumer "a" ended its event stream before the first event`, ""},
		"nothing":                   {0, "", "", `consumer "a" gave no answer`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
				pass(time.Second)
				synctest.Wait()
				if c.status != 0 {
					stream(h, c.status, c.contentType, c.body)
				}
				h.close("a")
				h.close("a")
				pass(time.Minute)
				text, ok := strings.CutPrefix(w.Body.String(), ": waiting for a, position 2\n\ndata: ")
				require.True(t, ok, w.Body.String())
				text, ok = strings.CutSuffix(text, "\n\n")
				require.True(t, ok, text)
				require.NotContains(t, text, "\n")
				require.LessOrEqual(t, len(text), 2*toldAnswer)
				var doc struct{ Error json.RawMessage }
				require.NoError(t, json.Unmarshal([]byte(text), &doc))
				if c.own != "" {
					require.JSONEq(t, c.own, string(doc.Error))
					return
				}
				var body errorBody
				require.NoError(t, json.Unmarshal(doc.Error, &body))
				require.Equal(t, errorBody{Message: c.want, Type: "gpu_broker_error", Code: "no_stream", Consumer: "a"}, body)
			})
		})
	}
}

func TestAnErrorOfAServerIsPassedOnAsItIsUpToItsBound(t *testing.T) {
	for size, own := range map[int]bool{64 << 10: true, 64<<10 + 1: false} {
		beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
			pass(time.Second)
			synctest.Wait()
			const frame = `{"error":{"message":""}}`
			text := strings.Replace(frame, `""`, `"`+strings.Repeat("x", size-len(frame))+`"`, 1)
			h.Header().Set("Content-Type", "application/json")
			h.WriteHeader(http.StatusBadRequest)
			for part := range slices.Chunk([]byte(text), 10_000) {
				n, err := h.Write(part)
				require.NoError(t, err)
				require.Equal(t, len(part), n)
			}
			h.close("a")
			require.Equal(t, own, !strings.Contains(w.Body.String(), "no_stream"), size)
			require.Equal(t, own, w.Body.Len() > size)
		})
	}
}

func TestCompressedStreamCannotFollowHeartbeats(t *testing.T) {
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		pass(time.Second)
		synctest.Wait()
		h.Header().Set("Content-Encoding", "br")
		stream(h, 200, "text/event-stream", "\xff\x00compressed")
		h.close("a")
		require.Contains(t, w.Body.String(), `\"text/event-stream\" in \"br\" instead of an event stream`)
	})
	r := httptest.NewRequest("GET", "/", nil)
	require.Same(t, r, identity(r))
	r.Header.Set("Accept-Encoding", "gzip, br")
	require.Equal(t, "identity", identity(r).Header.Get("Accept-Encoding"), "so it is not asked for")
	require.Equal(t, "gzip, br", r.Header.Get("Accept-Encoding"))
}

func TestHeartThatIsStoppedSaysNoMore(t *testing.T) {
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		require.False(t, h.stop())
		h.comment() // its timer had fired already
		pass(time.Minute)
		require.Empty(t, w.Body.String())
	})
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		pass(time.Second)
		synctest.Wait()
		require.True(t, h.stop())
		h.WriteHeader(statusClientLeft)
		h.close("a")
		pass(time.Minute)
		require.Equal(t, ": waiting for a, position 2\n\n", w.Body.String(), "a client that left is told nothing")
	})
}

// brittle is a writer of another module that fails in its own way.
type brittle struct{ *httptest.ResponseRecorder }

func (brittle) Write([]byte) (int, error) { panic("at once") }

func TestWriterThatPanicsDoesNotEndTheProcess(t *testing.T) {
	beats(t, func(t *testing.T, h *heart, w *httptest.ResponseRecorder) {
		core, logs := zaptest.New(zap.ErrorLevel)
		h.mu.Lock()
		h.ResponseWriter, h.log = brittle{w}, zap.New(core)
		h.mu.Unlock()
		pass(time.Minute)
		synctest.Wait()
		require.Equal(t, 1, logs.Len())
		h.mu.Lock()
		defer h.mu.Unlock()
		require.True(t, h.stopped)
		h.told = true
	})
}

func TestOnlyRequestsForEventStreamsGetHeartbeats(t *testing.T) {
	h := newHandler(t)
	for name, c := range map[string]struct {
		edit func(r *http.Request)
		want bool
	}{
		"accepts one":              {func(r *http.Request) { r.Header.Set("Accept", "text/event-stream") }, true},
		"accepts one among others": {func(r *http.Request) { r.Header.Set("Accept", "application/json, text/event-stream;q=0.9") }, true},
		"accepts others":           {func(r *http.Request) { r.Header.Set("Accept", "application/json, */*") }, false},
		"says nothing":             {func(*http.Request) {}, false},
		"takes the connection over": {func(r *http.Request) {
			r.Header.Set("Accept", "text/event-stream")
			r.Header.Set("Upgrade", "websocket")
		}, false},
		"streams its body over HTTP/1": {func(r *http.Request) {
			r.Header.Set("Accept", "text/event-stream")
			r.ContentLength = -1
		}, false},
		"streams its body over HTTP/2": {func(r *http.Request) {
			r.Header.Set("Accept", "text/event-stream")
			r.ContentLength, r.ProtoMajor = -1, 2
		}, true},
	} {
		_, r := request("POST", "/v1/chat/completions")
		c.edit(r)
		require.Equal(t, c.want, (&job{handler: h}).wantsEvents(r), name)
	}
	for path, want := range map[string]bool{"/v1/chat/completions": true, "/completion": true, "/api/chat": false} {
		_, r := request("POST", path)
		r.Body = http.NoBody
		r.ContentLength = -1
		body := strings.NewReader(`{"model":"a","stream":true}`)
		r.Body = readCloser{body}
		j := &job{handler: h}
		var err error
		j.body, err = h.pool.buffers.Read(r, routing.Limits{Body: 1 << 20, Total: 1 << 20})
		require.NoError(t, err)
		require.Equal(t, want, j.wantsEvents(r), path)
		j.body.Close()
	}
}

type readCloser struct{ *strings.Reader }

func (readCloser) Close() error { return nil }
