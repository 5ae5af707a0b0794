package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
	"github.com/google/uuid"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// soaker is one client of the soak, with connections of its own.
type soaker struct {
	k    *soak
	kind string
	name string // as its requests tell
	http *http.Client
	rng  *rand.Rand

	refused bool   // the last answer was a refusal
	last    answer // the last answer

	mu    sync.Mutex
	conns map[string]time.Time // when each of its connections was used first
}

// asked is one request and what became of it.
type asked struct {
	kind, consumer, id, path string
	method                   string
	header                   map[string]string
	body                     io.Reader
	size                     int64 // of the body; -1: not told
	cheap                    bool  // it needs no GPU
	read                     func(io.Reader) ([]byte, error)

	may     []string // who else may answer, by its ladder
	byModel bool     // its route finds out who is meant
	alias   string   // by which that is asked for
	model   string   // of a consumer that has several
	wants   string   // the code by which it must be refused
	own     bool     // the broker itself answers
	beats   bool     // comments may come before its answer

	by          string    // who has answered
	heard       string    // the last of the comments
	began, sent time.Time // sent: when the body was read to its end, or the request began
	leaves      bool      // its client may leave
	gone        bool      // its time was up when its answer came
	got         answer
	major       int // of HTTP
	conn        string
	connSince   time.Time // when its connection was used first
}

// kindsOfClient says how many of each kind there are, how long one pauses
// between two requests on average, and what it does.
var kindsOfClient = []struct {
	name  string
	n     int
	pause time.Duration
	act   func(c *soaker, ctx context.Context)
}{
	{"plain", 7, 350 * time.Millisecond, (*soaker).plain},
	{"stream", 4, 500 * time.Millisecond, (*soaker).stream},
	{"slow reader", 3, 900 * time.Millisecond, (*soaker).slowReader},
	{"leaver", 5, 400 * time.Millisecond, (*soaker).leaver},
	{"uploader", 4, 500 * time.Millisecond, (*soaker).uploader},
	{"cheap", 3, 200 * time.Millisecond, (*soaker).cheap},
	{"chat", 4, 400 * time.Millisecond, (*soaker).chat},
	{"image", 3, 500 * time.Millisecond, (*soaker).image},
	{"websocket", 2, 300 * time.Millisecond, (*soaker).websocket},
	{"too large", 1, 900 * time.Millisecond, (*soaker).tooLarge},
	{"by model", 5, 500 * time.Millisecond, (*soaker).named},
	{"urgent", 4, 600 * time.Millisecond, (*soaker).urgent},
	{"listener", 4, 600 * time.Millisecond, (*soaker).listener},
	{"ladder", 4, 600 * time.Millisecond, (*soaker).ladder},
	{"cloud", 1, 500 * time.Millisecond, (*soaker).cloud},
	{"started", 6, 300 * time.Millisecond, (*soaker).ofProcess},
	{"models", 4, 500 * time.Millisecond, (*soaker).ofLibrary},
	{"in vain", 1, 300 * time.Millisecond, (*soaker).inVain},
}

// plainConsumers are those with /proof, likelier ones more than once.
var plainConsumers = []string{"text", "text", "text", "voice", "voice", "lazy", "embed", "embed", "pinned", "guest"}

func (k *soak) newSoaker(kind string, n int) *soaker {
	c := &soaker{k: k, kind: kind, name: fmt.Sprintf("c%d", n%12), http: k.newClient(), rng: rand.New(rand.NewPCG(uint64(k.seed), uint64(n)))}
	c.http.Timeout = 0
	if n%2 == 1 && kind != "too large" || kind == "websocket" { // HTTP/1.1
		tr := c.http.Transport.(*http.Transport)
		tr.ForceAttemptHTTP2 = false
		tr.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
	}
	return c
}

// loop acts until ctx ends.
func (c *soaker) loop(ctx context.Context, pause time.Duration, act func(*soaker, context.Context)) {
	defer c.http.CloseIdleConnections()
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Duration((0.2 + 1.6*c.rng.Float64()) * float64(pause))):
		}
		act(c, ctx)
		if c.refused {
			c.refused = false
			select {
			case <-ctx.Done():
			case <-time.After(slowly(400 * time.Millisecond)): // a polite client
			}
		}
		if c.rng.IntN(20) == 0 {
			c.http.CloseIdleConnections() // a client that comes anew
		}
	}
}

var soakIDs atomic.Int64

// ask makes a request of a consumer with an ID of its own in its query.
func (c *soaker) ask(consumer, method, path string, query ...any) *asked {
	id := fmt.Sprintf("%s-%d", consumer, soakIDs.Add(1))
	a := &asked{kind: c.kind, consumer: consumer, id: id, method: method, path: "/" + consumer + path + "?id=" + id}
	for i := 0; i+1 < len(query); i += 2 {
		a.path += fmt.Sprintf("&%v=%v", query[i], query[i+1])
	}
	return a
}

// send sends it and reads the whole answer; it always ends, at the latest after answerWithin.
func (c *soaker) send(ctx context.Context, a *asked) *asked {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	if a.body == nil {
		a.size = 0
	}
	req, err := http.NewRequestWithContext(ctx, a.method, c.k.url+a.path, a.body)
	if err != nil {
		panic(err)
	}
	if a.size != 0 {
		req.ContentLength = a.size
	}
	req.Header.Set("X-Tag", a.id)
	req.Header.Set("X-Client", c.name)
	for name, value := range a.header {
		req.Header.Set(name, value)
	}
	req = req.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { a.conn, a.connSince = c.connection(info) }}))
	a.began = time.Now()
	a.sent = a.began
	a.major = 1
	if c.http.Transport.(*http.Transport).ForceAttemptHTTP2 {
		a.major = 2
	}
	resp, err := c.http.Do(req)
	if slow, ok := a.body.(*slowBody); ok {
		a.sent = slow.ended(a.began)
	}
	if err != nil {
		a.got = answer{err: err, at: time.Now(), took: time.Since(a.began)}
		c.last = a.got
		return a
	}
	defer resp.Body.Close()
	read := a.read
	if read == nil {
		read = io.ReadAll
	}
	data, err := read(resp.Body)
	c.refused = resp.StatusCode >= 500
	a.got = answer{status: resp.StatusCode, header: resp.Header, body: data, err: err, at: time.Now(), took: time.Since(a.began)}
	c.last = a.got
	return a
}

// connection tells which connection a request got, for people, and since when it is used.
func (c *soaker) connection(info httptrace.GotConnInfo) (string, time.Time) {
	local := info.Conn.LocalAddr().String()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conns == nil || len(c.conns) > 100 {
		c.conns = map[string]time.Time{}
	}
	if !info.Reused || c.conns[local].IsZero() {
		c.conns[local] = time.Now()
	}
	since := c.conns[local]
	return fmt.Sprintf("connection %s, first used %s ago, idle for %s", local, time.Since(since).Round(time.Millisecond), info.IdleTime.Round(time.Millisecond)), since
}

func (c *soaker) pick(from []string) string { return from[c.rng.IntN(len(from))] }

// about is between half and one and a half of n.
func (c *soaker) about(n int) int { return n/2 + c.rng.IntN(n+1) }

func exactly(want []byte) func([]byte) string {
	return func(got []byte) string {
		if bytes.Equal(got, want) {
			return ""
		}
		return fmt.Sprintf("%d bytes that begin with %.80q, wanted %d that begin with %.80q", len(got), got, len(want), want)
	}
}

func (c *soaker) plain(context.Context) {
	size, body := c.about(2000), fmt.Sprintf("hello %d", c.rng.Int())
	a := c.ask(c.pick(plainConsumers), "POST", "/proof", "ms", c.about(25), "bytes", size)
	a.body, a.size = strings.NewReader(body), int64(len(body))
	c.send(c.k.hard, a)
	c.k.judge(a, exactly(modelserver.ProofBytes(a.consumer, a.id, []byte(body), size)))
}

func (c *soaker) stream(context.Context) {
	events := c.about(12)
	a := c.ask(c.pick(plainConsumers), "GET", "/proof/stream", "ms", c.about(12), "events", events)
	c.send(c.k.hard, a)
	c.k.judge(a, exactly(modelserver.ProofStream(a.consumer, a.id, events)))
}

// slowReader takes its time over a large answer.
func (c *soaker) slowReader(context.Context) {
	size, pause := c.about(1<<20), time.Duration(c.about(25))*time.Millisecond
	a := c.ask(c.pick(plainConsumers), "POST", "/proof", "ms", 5, "bytes", size)
	a.read = func(r io.Reader) ([]byte, error) {
		var all bytes.Buffer
		for {
			_, err := io.CopyN(&all, r, 128<<10)
			if errors.Is(err, io.EOF) {
				return all.Bytes(), nil
			}
			if err != nil {
				return all.Bytes(), err
			}
			time.Sleep(pause)
		}
	}
	c.send(c.k.hard, a)
	c.k.judge(a, exactly(modelserver.ProofBytes(a.consumer, a.id, nil, size)))
}

// leaver leaves while it waits, or in the middle of its answer.
func (c *soaker) leaver(context.Context) {
	ctx, leave := context.WithTimeout(c.k.hard, time.Duration(c.rng.IntN(600))*time.Millisecond)
	defer leave()
	a := c.ask(c.pick(plainConsumers), "GET", "/proof/stream", "ms", c.about(20), "events", 20)
	want := modelserver.ProofStream(a.consumer, a.id, 20)
	if c.rng.IntN(2) == 0 {
		a = c.ask(c.pick(plainConsumers), "POST", "/proof", "ms", c.about(100))
		body := strings.Repeat("x", c.rng.IntN(100_000))
		a.body, a.size = strings.NewReader(body), int64(len(body))
		want = modelserver.ProofBytes(a.consumer, a.id, []byte(body), 0)
	}
	if c.rng.IntN(3) == 0 { // while comments come
		a, want = c.listen("model", c.pick(plainConsumers), 20)
	}
	a.leaves = true
	c.send(ctx, a)
	a.gone = ctx.Err() != nil
	c.k.judge(a, exactly(want))
}

// slowBody is a body that comes in pieces. It ends early if its client gives up.
type slowBody struct {
	data  []byte
	pause time.Duration
	last  atomic.Int64 // when its end was read, in nanoseconds
}

func (s *slowBody) Read(p []byte) (int, error) {
	if len(s.data) == 0 {
		s.last.Store(time.Now().UnixNano())
		return 0, io.EOF
	}
	time.Sleep(s.pause)
	n := copy(p, s.data[:min(len(s.data), 16<<10)])
	s.data = s.data[n:]
	return n, nil
}

// ended is when the body was sent, at least since.
func (s *slowBody) ended(since time.Time) time.Time {
	if at := time.Unix(0, s.last.Load()); at.After(since) {
		return at
	}
	return since
}

// uploader sends bodies above and below 64 KiB, slowly, with and without their length.
func (c *soaker) uploader(context.Context) {
	body := make([]byte, []int{8 << 10, 60 << 10, 90 << 10, 300 << 10, 1200 << 10}[c.rng.IntN(5)])
	for i := range body {
		body[i] = byte(c.rng.Uint32())
	}
	a := c.ask(c.pick(plainConsumers), "POST", "/proof", "ms", c.about(15))
	a.body, a.size = &slowBody{data: body, pause: time.Duration(c.rng.IntN(10)) * time.Millisecond}, int64(len(body))
	if c.rng.IntN(2) == 0 {
		a.size = -1
	}
	c.send(c.k.hard, a)
	c.k.judge(a, exactly(modelserver.ProofBytes(a.consumer, a.id, body, 0)))
}

// cheap asks for what needs no GPU.
func (c *soaker) cheap(context.Context) {
	consumer := c.pick(plainConsumers)
	var a *asked
	var want []byte
	switch c.rng.IntN(4) {
	case 0:
		c.lists()
		return
	case 1:
		a = c.ask(consumer, "HEAD", "/proof")
	case 2:
		a = c.ask(consumer, "OPTIONS", "/proof")
	default:
		size := c.about(60_000)
		a, want = c.ask(consumer, "GET", "/audio/big", "bytes", size), modelserver.AudioBytes(int64(size))
	}
	a.cheap = true
	c.send(c.k.hard, a)
	c.k.judge(a, exactly(want))
}

// tooLarge sends a body above max_body.
func (c *soaker) tooLarge(context.Context) {
	a := c.ask("text", "POST", "/proof")
	a.body, a.size = strings.NewReader(strings.Repeat("x", 5<<20)), 5<<20
	c.send(c.k.hard, a)
	c.k.judge(a, func([]byte) string { return "a body above max_body was taken" })
}

// chat asks the ollama, in its own form and in OpenAI's.
func (c *soaker) chat(context.Context) {
	words, streams := c.about(10), c.rng.IntN(3) > 0
	var a *asked
	ask := c.ask
	if c.rng.IntN(2) == 0 {
		ask = func(consumer, method, path string, query ...any) *asked {
			return c.askModel("model", consumer, method, path, query...)
		}
	}
	if c.rng.IntN(2) == 0 {
		a = ask("llm", "POST", "/api/generate", "ms", c.about(80))
		a.body = strings.NewReader(fmt.Sprintf(`{"model":%q,"prompt":"hi","stream":%t,"options":{"num_predict":%d}}`, chatModel, streams, words))
	} else {
		a = ask("llm", "POST", "/v1/chat/completions", "ms", c.about(80))
		a.beats = a.byModel && streams
		a.body = strings.NewReader(fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"hi"}],"stream":%t,"max_tokens":%d}`, chatModel, streams, words))
	}
	c.send(c.k.hard, a)
	want := modelserver.ProofWords("llm", a.id, words)
	c.k.judge(a, func(body []byte) string {
		text, whole := said(body)
		if text != want || !whole {
			return fmt.Sprintf("the words %.200q (whole: %t), wanted %.200q", text, whole, want)
		}
		return ""
	})
}

// said is the text of an answer of ollama's, and whether it has its end.
func said(body []byte) (text string, whole bool) {
	lines := bufio.NewScanner(bytes.NewReader(body))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := strings.TrimPrefix(lines.Text(), "data: ")
		if line == "[DONE]" {
			whole = true
			continue
		}
		var doc struct {
			Object   string
			Response string
			Done     bool
			Choices  []struct {
				Message, Delta struct{ Content string }
			}
		}
		if json.Unmarshal([]byte(line), &doc) != nil {
			continue
		}
		text += doc.Response
		for _, choice := range doc.Choices {
			text += choice.Message.Content + choice.Delta.Content
		}
		whole = whole || doc.Done || doc.Object == "chat.completion"
	}
	return text, whole
}

// image queues a prompt and looks until its work is done.
func (c *soaker) image(context.Context) {
	var random [16]byte
	for i := range random {
		random[i] = byte(c.rng.Uint32())
	}
	id := uuid.UUID(random).String()
	a := c.ask("image", "POST", "/prompt")
	a.body = strings.NewReader(fmt.Sprintf(`{"prompt_id":%q,"prompt":{"1":{"class_type":"KSampler","inputs":{"ms":%d}}}}`, id, c.about(80)))
	c.send(c.k.hard, a)
	taken := c.k.judge(a, func(body []byte) string {
		var doc struct {
			ID string `json:"prompt_id"`
		}
		if err := json.Unmarshal(body, &doc); err != nil || doc.ID != id {
			return fmt.Sprintf("%.200q, wanted prompt_id %s", body, id)
		}
		return ""
	})
	if !taken {
		return
	}
	for time.Since(a.began) < answerWithin && c.k.hard.Err() == nil {
		h := c.ask("image", "GET", "/history/"+id)
		h.cheap = true
		c.send(c.k.hard, h)
		state := ""
		seen := c.k.judge(h, func(body []byte) string {
			var doc map[string]struct {
				Status struct {
					Text string `json:"status_str"`
				}
			}
			if err := json.Unmarshal(body, &doc); err != nil {
				return fmt.Sprintf("%.200q is no history", body)
			}
			state = doc[id].Status.Text
			return ""
		})
		switch {
		case state == "success":
			c.k.rec.count("image work", "done")
			return
		case state != "" || !seen && c.k.disturbed("image", a.began, time.Now()):
			c.lostWork(a, "failed: "+state)
			return
		}
		time.Sleep(80 * time.Millisecond)
	}
	c.lostWork(a, "never came")
}

func (c *soaker) lostWork(a *asked, how string) {
	if c.k.disturbed("image", a.began, time.Now()) || c.k.scarce(a.began, time.Now()) || c.k.hard.Err() != nil {
		c.k.rec.count("image work", "lost with its server")
		return
	}
	c.k.rec.count("image work", "lost")
	c.k.wrong(a, "accepted work %s", how)
}

// websocket listens to the ComfyUI for a while; a reload must not cut it.
func (c *soaker) websocket(storm context.Context) {
	began, id := time.Now(), fmt.Sprintf("image-%d", soakIDs.Add(1))
	a := &asked{kind: c.kind, consumer: "image", id: id, method: "GET", path: "/image/ws?clientId=" + id, began: began, sent: began, cheap: true}
	ctx, cancel := context.WithTimeout(c.k.hard, answerWithin)
	defer cancel()
	conn, resp, err := websocket.Dial(ctx, c.k.url+a.path, &websocket.DialOptions{HTTPClient: c.http})
	if err != nil {
		a.got = answer{err: err, at: time.Now(), took: time.Since(began)}
		if resp != nil {
			a.got.status, a.got.header, a.got.err = resp.StatusCode, resp.Header, nil
		}
		c.k.judge(a, func([]byte) string { return "no websocket: " + err.Error() })
		return
	}
	defer func() { _ = conn.CloseNow() }()
	stay, stop := context.WithTimeout(ctx, time.Duration(c.about(6000))*time.Millisecond)
	defer stop()
	defer context.AfterFunc(storm, stop)()
	for n := 0; ; n++ {
		_, text, err := conn.Read(stay)
		switch {
		case err == nil && n == 0 && !strings.Contains(string(text), id):
			c.k.wrong(a, "the first message of its websocket is another's: %.200q", text)
			return
		case err == nil:
			continue
		case stay.Err() != nil:
			c.k.rec.count("websocket", "left by its client")
			return
		case c.k.disturbed("image", began, time.Now()):
			c.k.rec.count("websocket", "cut with its server")
			return
		}
		c.k.rec.count("websocket", "cut")
		c.k.wrong(a, "its websocket was cut after %s: %v", time.Since(began).Round(time.Millisecond), err)
		return
	}
}
