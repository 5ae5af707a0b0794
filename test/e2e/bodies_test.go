package e2e

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// hold makes a job of a consumer run until release is called; release returns its answer.
func (s *site) hold(name string) (release func() answer) {
	s.t.Helper()
	srv := s.servers[name]
	srv.SetFaults(func(f *modelserver.Faults) { f.HangPaths = []string{"/hold"} })
	let := func() { srv.SetFaults(func(f *modelserver.Faults) { f.HangPaths = nil }) }
	s.t.Cleanup(let) // else a test that fails meanwhile would wait for it
	before := srv.Stats().Requests["/hold"]
	job := s.send("POST", "/"+name+"/hold", "hold")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(s.t, srv.WaitFor(ctx, func(now modelserver.Stats) bool { return now.Requests["/hold"] > before }))
	return func() answer {
		s.t.Helper()
		let()
		return s.await(job)
	}
}

// works makes a job of a consumer compute, and waits until it does: it runs until end is called, which may be called again.
func (s *site) works(name string) (runs <-chan answer, end func()) {
	s.t.Helper()
	end = s.holdWork(name)
	runs = s.send("POST", "/"+name+"/synthesize", "x")
	s.working(name)
	return runs, end
}

// holdWork keeps a server's work from ending until end is called: a stream
// stands still in its middle, any other answer does not begin.
func (s *site) holdWork(name string) (end func()) {
	s.servers[name].SetFaults(func(f *modelserver.Faults) { f.HoldWork = true })
	end = func() { s.letWork(name) }
	s.t.Cleanup(end) // else a test that fails meanwhile would wait for it
	return end
}

// letWork ends what holdWork began.
func (s *site) letWork(name string) {
	s.servers[name].SetFaults(func(f *modelserver.Faults) { f.HoldWork = false })
}

// working waits until a server computes.
func (s *site) working(name string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(s.t, s.servers[name].WaitFor(ctx, func(now modelserver.Stats) bool { return now.Working > 0 }))
}

// holdLoad keeps a server's load from ending until end is called.
func (s *site) holdLoad(name string) (end func()) {
	hold := func(on bool) { s.servers[name].SetFaults(func(f *modelserver.Faults) { f.HangLoad = on }) }
	hold(true)
	end = func() { hold(false) }
	s.t.Cleanup(end)
	return end
}

// every is a body with every byte there is, as long as asked for.
func every(size int) []byte {
	out := make([]byte, size)
	const period = 64 << 10
	for i := range min(size, period) {
		out[i] = byte(i + i>>8)
	}
	for at := period; at < size; at += period {
		copy(out[at:], out[:period])
	}
	return out
}

func form(t *testing.T) (body []byte, contentType string) {
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	require.NoError(t, w.WriteField("model", "whisper-1"))
	h := textproto.MIMEHeader{}
	h.Set("Content-Disposition", `form-data; name="file"; filename="speech \"1\".wav"`)
	h.Set("Content-Type", "audio/wav")
	part, err := w.CreatePart(h)
	require.NoError(t, err)
	_, err = part.Write(every(100_000))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.Bytes(), w.FormDataContentType()
}

// unknownLength hides the length of a body, so that it is sent chunked.
type unknownLength struct{ io.Reader }

type upload struct {
	name, contentType string
	body              []byte
	chunked, expect   bool
}

func uploads(t *testing.T) []upload {
	parts, kind := form(t)
	return []upload{
		{name: "JSON", contentType: "application/json; charset=utf-8", body: []byte("{ \"a\":1.0,\n\t\"x_speed\" : [1 ,2], \"é\":\"\\u00e9\" }\r\n")},
		{name: "multipart", contentType: kind, body: parts},
		{name: "every byte", contentType: "application/octet-stream", body: every(256)},
		{name: "no Content-Type", body: []byte("plain")},
		{name: "empty", contentType: "application/json", body: []byte{}},
		{name: "chunked", contentType: "text/x-odd", body: every(5000), chunked: true},
		{name: "chunked and empty", contentType: "text/x-odd", body: []byte{}, chunked: true},
		{name: "64 KiB", contentType: "audio/wav", body: every(64 << 10)},
		{name: "64 KiB and 1", contentType: "audio/wav", body: every(64<<10 + 1)},
		{name: "1 MiB and 1", contentType: "audio/wav", body: every(1<<20 + 1)},
		{name: "5 MiB chunked", contentType: "audio/wav", body: every(5 << 20), chunked: true},
		{name: "Expect: 100-continue", contentType: "audio/wav", body: every(200 << 10), expect: true},
		{name: "small Expect: 100-continue", contentType: "audio/wav", body: every(20), expect: true},
	}
}

// send uploads it. Whether the site asked for an expected body is checked.
func (u upload) send(s *site, client *http.Client) answer {
	var body io.Reader = bytes.NewReader(u.body)
	if u.chunked {
		body = unknownLength{body}
	}
	asked := false
	ctx := httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{Got100Continue: func() { asked = true }})
	req, err := http.NewRequestWithContext(ctx, "POST", s.url+"/mvoice/synthesize", body)
	if err != nil {
		return answer{err: err}
	}
	if u.contentType != "" {
		req.Header.Set("Content-Type", u.contentType)
	}
	if u.expect {
		req.Header.Set("Expect", "100-continue")
	}
	resp, err := client.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err == nil && u.expect && !asked {
		err = fmt.Errorf("the site never asked for the body")
	}
	return answer{status: resp.StatusCode, header: resp.Header, body: data, err: err}
}

func (u upload) check(t *testing.T, got received) {
	t.Helper()
	require.True(t, bytes.Equal(u.body, got.body), "sent %d bytes, the server got %d", len(u.body), len(got.body))
	require.Equal(t, u.contentType, got.header.Get("Content-Type"))
	require.EqualValues(t, len(u.body), got.length, "Content-Length")
	if len(u.body) > 0 {
		require.Equal(t, strconv.Itoa(len(u.body)), got.header.Get("Content-Length"))
	}
	require.False(t, got.chunked)
}

// patientClient waits for 100 Continue as long as it takes, so that a site which never asks shows.
func (s *site) patientClient() *http.Client {
	c := s.newClient()
	c.Transport.(*http.Transport).ExpectContinueTimeout = patience
	return c
}

func recorded(t *testing.T) (*recorder, consumer) {
	r := newRecorder(t)
	voice := mvoice()
	voice.Proxy = "reverse_proxy " + r.addr
	return r, voice
}

func whisper() consumer {
	return consumer{Options: modelserver.Options{Name: "whisper", VRAM: gib(2), LoadTime: 10 * time.Millisecond, UnloadTime: 10 * time.Millisecond}}
}

func TestBodyAndContentTypeReachALoadedServerByteForByte(t *testing.T) {
	t.Parallel()
	rec, voice := recorded(t)
	voice.Preloaded = true
	s := start(t, layout{Consumers: []consumer{voice}})
	s.waitState("mvoice", "READY")
	client := s.patientClient()
	for _, u := range uploads(t) {
		t.Run(u.name, func(t *testing.T) {
			a := u.send(s, client)
			require.NoError(t, a.err)
			require.Equal(t, 200, a.status)
			u.check(t, rec.next(t))
		})
	}
}

func TestBodyAndContentTypeOfQueuedRequestsReachTheServerByteForByte(t *testing.T) {
	t.Parallel()
	rec, voice := recorded(t)
	s := start(t, layout{Consumers: []consumer{voice, whisper()}})
	client := s.patientClient()
	for _, u := range uploads(t) {
		t.Run(u.name, func(t *testing.T) {
			release := s.hold("whisper")
			done := make(chan answer, 1)
			go func() { done <- u.send(s, client) }()
			s.waitQueued("mvoice", 1)
			require.Empty(t, rec.got, "the server is called before its turn")
			require.Equal(t, 200, release().status)
			a := s.await(done)
			require.NoError(t, a.err)
			require.Equal(t, 200, a.status)
			u.check(t, rec.next(t))
		})
	}
	// The large ones went through files, and left none.
	left, err := os.ReadDir(filepath.Join(s.dir, "data", "caddy", "gpu_broker", "bodies"))
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestBodyReachesTheServerByteForByteOverHTTP2(t *testing.T) {
	t.Parallel()
	rec, voice := recorded(t)
	s := start(t, layout{HTTPS: true, Consumers: []consumer{voice, whisper()}})
	for _, u := range uploads(t) {
		if u.expect {
			continue // no client of HTTP/2 waits for it
		}
		t.Run(u.name, func(t *testing.T) {
			release := s.hold("whisper")
			done := make(chan answer, 1)
			go func() { done <- u.send(s, s.client) }()
			s.waitQueued("mvoice", 1)
			require.Equal(t, 200, release().status)
			a := s.await(done)
			require.NoError(t, a.err)
			require.Equal(t, 200, a.status)
			u.check(t, rec.next(t))
		})
	}
}

func TestMethodPathQueryAndHeadersReachTheServerAsWithoutTheBroker(t *testing.T) {
	t.Parallel()
	rec, voice := recorded(t)
	s := start(t, layout{Consumers: []consumer{voice}, Routes: "handle_path /plain/* {\nreverse_proxy " + rec.addr + "\n}"})
	for _, c := range []struct{ method, uri, body string }{
		{"GET", "/a/b?x=1&x=2&flag&empty=&slash=%2F&plus=a+b&euro=%E2%82%AC", ""},
		{"POST", "/with%2Fslash/%E2%82%AC/a%20b/?q=%zz", "body"},
		{"DELETE", "/thing/1", ""},
		{"PATCH", "/x;v=1", "{}"},
		{"PUT", "/", "{}"},
	} {
		t.Run(c.method+c.uri, func(t *testing.T) {
			var both [2]received
			for i, prefix := range []string{"/plain", "/mvoice"} {
				req, err := http.NewRequest(c.method, s.url, strings.NewReader(c.body))
				require.NoError(t, err)
				if c.body == "" {
					req.Body, req.ContentLength = nil, 0
				}
				req.URL.Opaque = prefix + c.uri // as it stands, without Go's tidying
				req.Header = http.Header{"X-Many": {"1", "2"}, "X-Empty": {""}, "Cookie": {"a=1; b=2"}, "Authorization": {"Bearer key"},
					"Accept-Encoding": {"br, gzip;q=0.5"}, "Origin": {"https://example.com"}, "X-Priority": {"5"}, "User-Agent": {"test/1"}}
				resp, err := s.client.Do(req)
				require.NoError(t, err)
				_, _ = io.Copy(io.Discard, resp.Body)
				require.NoError(t, resp.Body.Close())
				require.Equal(t, 200, resp.StatusCode)
				both[i] = rec.next(t)
			}
			require.Equal(t, both[0], both[1])
			require.Equal(t, c.uri, both[1].uri)
			require.Equal(t, []string{"1", "2"}, both[1].header["X-Many"])
		})
	}
}

func TestSlowUploadDoesNotHoldTheLock(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		length int64
	}{{"length known", 256 << 10}, {"length unknown", -1}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Consumers: []consumer{mvoice(), whisper()}})
			require.Equal(t, 200, s.post("/mvoice/synthesize", "warm").status)
			content := every(256 << 10)
			body, in := io.Pipe()
			req, err := http.NewRequest("POST", s.url+"/mvoice/upload", body)
			require.NoError(t, err)
			req.ContentLength = c.length
			done := make(chan answer, 1)
			go func() {
				resp, err := s.client.Do(req)
				if err != nil {
					done <- answer{err: err}
					return
				}
				defer resp.Body.Close()
				data, err := io.ReadAll(resp.Body)
				done <- answer{status: resp.StatusCode, body: data, err: err}
			}()
			_, err = in.Write(content[:200<<10])
			require.NoError(t, err)

			require.Equal(t, 200, s.post("/whisper/inference", "another consumer").status)
			require.Equal(t, 200, s.post("/mvoice/synthesize", "another job of the same consumer").status)
			require.Empty(t, done)
			require.Zero(t, s.servers["mvoice"].Stats().Requests["/upload"], "the server must not be called before all is there")

			_, err = in.Write(content[200<<10:])
			require.NoError(t, err)
			require.NoError(t, in.Close())
			a := s.await(done)
			require.NoError(t, a.err)
			require.Equal(t, 200, a.status)
			require.Contains(t, string(a.body), `"bytes":262144`)
		})
	}
}

func TestStreamBodyPassesTheBodyOnAsItComes(t *testing.T) {
	t.Parallel()
	voice := mvoice()
	voice.Route = "stream_body"
	s := start(t, layout{Consumers: []consumer{voice}})
	body, in := io.Pipe()
	done := make(chan answer, 1)
	go func() { done <- s.do(context.Background(), "POST", "/mvoice/upload", body) }()
	_, err := in.Write(every(100 << 10))
	require.NoError(t, err)
	require.NoError(t, s.servers["mvoice"].WaitFor(t.Context(), func(now modelserver.Stats) bool { return now.Requests["/upload"] == 1 }))
	require.Empty(t, done)
	require.NoError(t, in.Close())
	a := s.await(done)
	require.Equal(t, 200, a.status)
	require.Contains(t, string(a.body), `"bytes":102400`)
}

func TestBodyAboveMaxBodyIsRefusedWith413(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		size    int
		chunked bool
		warm    bool
		limit   string
	}{
		{"length known", 100<<10 + 1, false, false, "100KiB"},
		{"length unknown", 100<<10 + 1, true, false, "100KiB"},
		{"small, server loaded", 10<<10 + 1, false, true, "10KiB"},
		{"small, server not loaded", 10<<10 + 1, false, false, "10KiB"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			voice := mvoice()
			voice.Route = "max_body " + c.limit
			voice.Preloaded = c.warm
			s := start(t, layout{Consumers: []consumer{voice}})
			if c.warm {
				s.waitState("mvoice", "READY")
			}
			var body io.Reader = bytes.NewReader(every(c.size))
			if c.chunked {
				body = unknownLength{body}
			}
			a := s.do(context.Background(), "POST", "/mvoice/synthesize", body)
			require.NoError(t, a.err)
			require.Equal(t, 413, a.status)
			require.Equal(t, "body_too_large", a.code())
			require.Equal(t, "mvoice", a.header.Get("X-Gpu-Broker-Consumer"))
			require.Zero(t, s.servers["mvoice"].Stats().Requests["/synthesize"])
			require.Zero(t, s.status().Scheduler.TotalJobs)

			a = s.do(context.Background(), "POST", "/mvoice/synthesize", bytes.NewReader(every(c.size-1)))
			require.NoError(t, a.err)
			require.Equal(t, 200, a.status, "a body of the very size that is allowed")
		})
	}
}

func TestTooLargeABodyIsRefusedBeforeItIsAskedFor(t *testing.T) {
	t.Parallel()
	voice := mvoice()
	voice.Route = "max_body 10KiB"
	s := start(t, layout{Consumers: []consumer{voice}})
	conn := s.dial()
	defer conn.Close()
	_, err := io.WriteString(conn, "POST /mvoice/synthesize HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 20000\r\n\r\n")
	require.NoError(t, err)
	head, err := bufio.NewReader(conn).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "HTTP/1.1 413 Request Entity Too Large\r\n", head)
}

func TestLimitOfCaddysOwnRequestBodyDirectiveIsKept(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		chunked bool
		warm    bool
	}{{"known, not loaded", false, false}, {"unknown, not loaded", true, false}, {"known, loaded", false, true}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			voice := mvoice()
			voice.Proxy = "request_body {\nmax_size 10KB\n}\nreverse_proxy {http.gpu_broker.upstream}"
			voice.Preloaded = c.warm
			s := start(t, layout{Consumers: []consumer{voice}})
			if c.warm {
				s.waitState("mvoice", "READY")
			}
			var body io.Reader = bytes.NewReader(every(20_000))
			if c.chunked {
				body = unknownLength{body}
			}
			a := s.do(t.Context(), "POST", "/mvoice/synthesize", body)
			require.NoError(t, a.err)
			require.Equal(t, 413, a.status)
			require.Equal(t, 200, s.post("/mvoice/synthesize", "small").status)
			s.idle("mvoice")
		})
	}
}

func TestTrailersOfAChunkedBodyReachTheServerAsWithoutTheBroker(t *testing.T) {
	t.Parallel()
	trailers := make(chan http.Header, 2)
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		trailers <- r.Trailer
	}))
	t.Cleanup(srv.Close)
	voice := mvoice()
	voice.Proxy = "reverse_proxy " + srv.Listener.Addr().String()
	s := start(t, layout{Consumers: []consumer{voice}, Routes: "handle_path /plain/* {\n" + voice.Proxy + "\n}"})
	for _, path := range []string{"/plain/", "/mvoice/"} {
		answer := s.raw("POST " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 42\r\n\r\n")
		require.True(t, strings.HasPrefix(answer, "HTTP/1.1 200 "), answer)
	}
	want := http.Header{"X-Sum": {"42"}}
	require.Equal(t, want, <-trailers, "without the broker")
	require.Equal(t, want, <-trailers)
}

func TestBodiesAboveMaxBufferedInAllAreRefusedWith503(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "max_buffered 1MiB", Consumers: []consumer{mvoice(), whisper()}})
	release := s.hold("whisper")
	large := string(every(500 << 10))
	first := s.send("POST", "/mvoice/synthesize", large)
	s.waitQueued("mvoice", 1)
	a := s.post("/mvoice/synthesize", large[:300<<10]) // net/http reads what is left of it, so that the answer comes through
	require.Equal(t, 503, a.status)
	require.Equal(t, "queue_full", a.code())
	seconds, err := strconv.Atoi(a.header.Get("Retry-After"))
	require.NoError(t, err)
	require.True(t, 1 <= seconds && seconds <= 60, "Retry-After: %d", seconds)
	require.Equal(t, 200, release().status)
	require.Equal(t, 200, s.await(first).status)
	for range 3 { // what was held is given back, also by the one that was refused
		require.Equal(t, 200, s.post("/mvoice/synthesize", large).status)
	}
	require.Equal(t, 4, s.servers["mvoice"].Stats().Requests["/synthesize"])
}

func TestMalformedChunkedBodyIsRefusedWith400(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, body string }{
		{"length is no number", "5\r\nhello\r\nzz\r\nworld\r\n0\r\n\r\n"},
		{"chunk is longer than it says", "5\r\nhello world\r\n0\r\n\r\n"},
		{"length is too large", "fffffffffffffffff\r\nhello\r\n0\r\n\r\n"},
		{"length is negative", "-5\r\nhello\r\n0\r\n\r\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Consumers: []consumer{mvoice(), whisper()}})
			require.Equal(t, 200, s.post("/whisper/inference", "resident").status)
			answer := s.raw("POST /mvoice/synthesize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + c.body)
			require.True(t, strings.HasPrefix(answer, "HTTP/1.1 400 "), answer)
			require.Contains(t, answer, `"code":"bad_request"`)
			require.Contains(t, answer, `"type":"gpu_broker_error"`)
			require.Zero(t, s.servers["mvoice"].Stats().Requests["/synthesize"])
			require.Zero(t, s.servers["mvoice"].Stats().LoadsStarted)
			require.Zero(t, s.servers["whisper"].Stats().UnloadCalls)
			s.nothingRuns()
		})
	}
}

// raw sends bytes to the site and reads what comes until it closes the connection.
func (s *site) raw(text string) string {
	s.t.Helper()
	conn := s.dial()
	defer conn.Close()
	_, err := io.WriteString(conn, text)
	require.NoError(s.t, err)
	data, _ := io.ReadAll(conn) // the site may reset the connection after its answer
	return string(data)
}

func (s *site) dial() net.Conn {
	s.t.Helper()
	_, addr, _ := strings.Cut(s.url, "://")
	conn, err := net.Dial("tcp", addr)
	require.NoError(s.t, err)
	require.NoError(s.t, conn.SetDeadline(time.Now().Add(patience)))
	return conn
}

func TestManyUploadsAtOnceAllArriveWhole(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), whisper()}})
	var wg sync.WaitGroup
	failed := make(chan string, 100)
	for i := range 24 {
		wg.Go(func() {
			body := every(1000 + i*90_000) // from memory to files
			body[0] = byte(i)
			a := s.do(context.Background(), "POST", []string{"/mvoice/echo", "/whisper/echo"}[i%2], bytes.NewReader(body))
			if a.err != nil || a.status != 200 || !bytes.Equal(a.body, body) {
				failed <- fmt.Sprintf("upload %d: %d, %v, %d of %d bytes", i, a.status, a.err, len(a.body), len(body))
			}
		})
	}
	wg.Wait()
	require.Empty(t, failed)
}
