package modelserver

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ollama has several models, loads them inside the first request, and unloads
// asynchronously: the answer only says that the request was understood.
type ollama struct {
	l   *life
	mux *http.ServeMux
	as  map[*model]string // the name by which a model was loaded last; guarded by Server.mu
}

func newOllama(l *life) *ollama {
	o := &ollama{l: l, mux: http.NewServeMux(), as: map[*model]string{}}
	o.mux.HandleFunc("GET /{$}", o.root)
	o.mux.HandleFunc("GET /api/version", o.version)
	o.mux.HandleFunc("GET /api/tags", o.tags)
	o.mux.HandleFunc("GET /api/ps", o.ps)
	o.mux.HandleFunc("POST /api/show", o.show)
	o.mux.HandleFunc("POST /api/generate", o.native(generateForm))
	o.mux.HandleFunc("POST /api/chat", o.native(chatForm))
	o.mux.HandleFunc("POST /api/embed", o.embed)
	o.mux.HandleFunc("POST /api/embeddings", o.embedOne)
	o.mux.HandleFunc("GET /v1/models", o.v1Models)
	o.mux.HandleFunc("POST /v1/chat/completions", o.completions(chatCompletion))
	o.mux.HandleFunc("POST /v1/completions", o.completions(textCompletion))
	o.mux.HandleFunc("POST /v1/embeddings", o.v1Embeddings)
	return o
}

func (o *ollama) ServeHTTP(w http.ResponseWriter, r *http.Request) { o.mux.ServeHTTP(w, r) }

func (o *ollama) root(w http.ResponseWriter, r *http.Request) {
	if o.l.health(w, r) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = io.WriteString(w, "Ollama is running") // the client may be gone
	}
}

func (o *ollama) version(w http.ResponseWriter, r *http.Request) {
	if o.l.health(w, r) {
		writeJSON(w, http.StatusOK, map[string]string{"version": "0.17.4"})
	}
}

func (o *ollama) tags(w http.ResponseWriter, _ *http.Request) {
	type tag struct {
		Name       string    `json:"name"`
		Model      string    `json:"model"`
		ModifiedAt time.Time `json:"modified_at"`
		Size       int64     `json:"size"`
		Digest     string    `json:"digest"`
	}
	o.l.s.mu.Lock()
	tags := []tag{}
	for _, name := range o.names() {
		tags = append(tags, tag{name, name, time.Unix(1700000000, 0).UTC(), int64(o.l.models[name].size), digest(name)})
	}
	for alias, name := range o.l.s.opts.Aliases {
		tags = append(tags, tag{alias, alias, time.Unix(1700000000, 0).UTC(), int64(o.l.models[name].size), digest(name)})
	}
	o.l.s.mu.Unlock()
	writeJSON(w, http.StatusOK, map[string]any{"models": tags})
}

// running is an entry of /api/ps.
type running struct {
	Name          string    `json:"name"`
	Model         string    `json:"model"`
	Size          int64     `json:"size"`
	Digest        string    `json:"digest"`
	ExpiresAt     time.Time `json:"expires_at"`
	SizeVRAM      int64     `json:"size_vram"`
	ContextLength int       `json:"context_length"`
}

// ps lists what is loaded, what still loads, and what is marked to be unloaded
// but isn't yet.
func (o *ollama) ps(w http.ResponseWriter, r *http.Request) {
	if !o.l.health(w, r) {
		return
	}
	o.l.s.mu.Lock()
	list := []running{}
	for _, name := range o.names() {
		m := o.l.models[name]
		if m.phase == idle {
			continue
		}
		resident := m.resident
		if m.phase == loading && !o.l.s.opts.OnCPU {
			resident = m.size // its estimate
		}
		as := name
		if o.as[m] != "" {
			as = o.as[m]
		}
		list = append(list, running{
			Name: as, Model: as, Size: int64(m.size), Digest: digest(name),
			ExpiresAt: m.expires, SizeVRAM: int64(resident), ContextLength: 4096,
		})
	}
	o.l.s.mu.Unlock()
	writeJSON(w, http.StatusOK, map[string]any{"models": list})
}

func (o *ollama) show(w http.ResponseWriter, r *http.Request) {
	_, m, ok := o.read(w, r)
	if !ok {
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"modelfile": "FROM " + m.name, "details": map[string]string{"format": "gguf", "family": "llama"},
	})
}

// names is for holders of mu.
func (o *ollama) names() []string { return slices.Sorted(maps.Keys(o.l.models)) }

// ask is what the routes that name a model take.
type ask struct {
	Model     string          `json:"model"`
	Prompt    string          `json:"prompt"`
	Messages  []message       `json:"messages"`
	Input     json.RawMessage `json:"input"`
	Stream    *bool           `json:"stream"`
	KeepAlive json.RawMessage `json:"keep_alive"`
	Options   struct {
		NumPredict int `json:"num_predict"`
	} `json:"options"`

	// OpenAI's only
	MaxTokens           int    `json:"max_tokens"`
	MaxCompletionTokens int    `json:"max_completion_tokens"`
	EncodingFormat      string `json:"encoding_format"`
	Size                string `json:"size"`
	N                   int    `json:"n"`
	StreamOptions       struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
}

type message struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content,omitempty"`
}

// read reads a request and finds its model, or answers why not.
func (o *ollama) read(w http.ResponseWriter, r *http.Request) (ask, *model, bool) {
	var a ask
	body, ok := readBody(w, r)
	if !ok {
		return a, nil, false
	}
	if len(bytes.TrimSpace(body)) == 0 {
		fail(w, r, http.StatusBadRequest, "missing request body")
		return a, nil, false
	}
	if err := json.Unmarshal(body, &a); err != nil {
		fail(w, r, http.StatusBadRequest, err.Error())
		return a, nil, false
	}
	o.l.s.mu.Lock()
	m := o.find(a.Model)
	o.l.s.mu.Unlock()
	if m == nil {
		fail(w, r, http.StatusNotFound, fmt.Sprintf("model %q not found, try pulling it first", a.Model))
		return a, nil, false
	}
	return a, m, true
}

// find is the model of a name in any of its spellings. It is for holders of mu.
func (o *ollama) find(name string) *model {
	for has, m := range o.l.models {
		if fullName(has) == fullName(name) {
			if m.phase == idle {
				o.as[m] = has
			}
			return m
		}
	}
	for alias, has := range o.l.s.opts.Aliases {
		if m := o.l.models[has]; m != nil && fullName(alias) == fullName(name) {
			if m.phase == idle {
				o.as[m] = alias
			}
			return m
		}
	}
	return nil
}

// fullName is a name with all its parts, registry/namespace/model:tag, in lower case.
func fullName(name string) string {
	name = strings.ToLower(name)
	tag := "latest"
	if i := strings.LastIndex(name, ":"); i > strings.LastIndex(name, "/") {
		name, tag = name[:i], name[i+1:]
	}
	if _, after, ok := strings.Cut(name, "://"); ok {
		name = after
	}
	switch strings.Count(name, "/") {
	case 0:
		name = "registry.ollama.ai/library/" + name
	case 1:
		name = "registry.ollama.ai/" + name
	}
	return name + ":" + tag
}

// keepAlive reads keep_alive: seconds, or a duration such as "5m"; negative
// means for ever. Absent, it is the server's own.
func (o *ollama) keepAlive(raw json.RawMessage) (d time.Duration, given bool, err error) {
	if len(raw) == 0 || string(raw) == "null" {
		return o.l.s.options().KeepAlive, false, nil
	}
	var seconds float64
	if json.Unmarshal(raw, &seconds) == nil {
		return time.Duration(seconds * float64(time.Second)), true, nil
	}
	var text string
	if err := json.Unmarshal(raw, &text); err != nil {
		return 0, false, fmt.Errorf("keep_alive %s: want seconds or a duration", raw)
	}
	if n, err := strconv.ParseFloat(text, 64); err == nil {
		return time.Duration(n * float64(time.Second)), true, nil
	}
	if d, err = time.ParseDuration(text); err != nil {
		return 0, false, fmt.Errorf("keep_alive: %w", err)
	}
	return d, true, nil
}

// form is what tells /api/generate and /api/chat apart.
type form struct {
	empty func(ask) bool
	chunk func(out map[string]any, text string)
}

var (
	generateForm = form{
		empty: func(a ask) bool { return a.Prompt == "" },
		chunk: func(out map[string]any, text string) { out["response"] = text },
	}
	chatForm = form{
		empty: func(a ask) bool { return len(a.Messages) == 0 },
		chunk: func(out map[string]any, text string) {
			out["message"] = map[string]string{"role": "assistant", "content": text}
		},
	}
)

// native serves /api/generate and /api/chat.
func (o *ollama) native(f form) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		a, m, ok := o.read(w, r)
		if !ok {
			return
		}
		keep, given, err := o.keepAlive(a.KeepAlive)
		if err != nil {
			writeError(w, http.StatusBadRequest, err.Error())
			return
		}
		reply := func(text string, more map[string]any) map[string]any {
			out := map[string]any{"model": a.Model, "created_at": time.Now().UTC(), "done": more != nil}
			f.chunk(out, text)
			maps.Copy(out, more)
			return out
		}
		if f.empty(a) {
			if given && keep == 0 {
				o.l.unloadCalled(m)
				if o.l.faults().FailUnload {
					writeError(w, http.StatusInternalServerError, "unload failed")
					return
				}
				o.expire(m)
				writeJSON(w, http.StatusOK, reply("", map[string]any{"done_reason": "unload"}))
				return
			}
			o.load(w, r, m, keep, reply("", map[string]any{"done_reason": "load"}))
			return
		}
		o.work(w, r, m, keep, func(words []string, each time.Duration) error {
			final := map[string]any{"done_reason": "stop", "eval_count": len(words)}
			if a.Stream != nil && !*a.Stream {
				if err := o.l.run(r.Context(), m, each*time.Duration(len(words))); err != nil {
					return err
				}
				return o.l.answer(w, "application/json; charset=utf-8", line(reply(join(words), final)))
			}
			w.Header().Set("Content-Type", "application/x-ndjson")
			return o.l.stream(w, r, m, each, words, func(word string) []byte {
				return append(line(reply(word, nil)), '\n')
			}, append(line(reply("", final)), '\n'))
		}, a)
	}
}

func (o *ollama) embed(w http.ResponseWriter, r *http.Request) {
	o.embedding(w, r, func(a ask) map[string]any { return map[string]any{"model": a.Model, "embeddings": vectors(a)} })
}

// embedOne is the older route, for one text.
func (o *ollama) embedOne(w http.ResponseWriter, r *http.Request) {
	o.embedding(w, r, func(a ask) map[string]any {
		return map[string]any{"embedding": vectors(ask{Prompt: a.Prompt})[0]}
	})
}

func (o *ollama) embedding(w http.ResponseWriter, r *http.Request, reply func(ask) map[string]any) {
	a, m, ok := o.read(w, r)
	if !ok {
		return
	}
	keep, _, err := o.keepAlive(a.KeepAlive)
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	if len(a.Input) == 0 && a.Prompt == "" { // nothing is computed
		o.load(w, r, m, keep, map[string]any{"model": a.Model, "embeddings": [][]float64{}})
		return
	}
	o.work(w, r, m, keep, func(words []string, each time.Duration) error {
		if err := o.l.run(r.Context(), m, each*time.Duration(len(words))); err != nil {
			return err
		}
		return o.l.answer(w, "application/json; charset=utf-8", line(reply(a)))
	}, a)
}

// load loads a model, and answers with a value.
func (o *ollama) load(w http.ResponseWriter, r *http.Request, m *model, keep time.Duration, value any) {
	release, err := o.use(r.Context(), m, keep)
	if err != nil {
		o.l.loadError(w, r, err)
		return
	}
	release()
	writeJSON(w, http.StatusOK, value)
}

// work answers with generated words. each is the time of one word.
func (o *ollama) work(w http.ResponseWriter, r *http.Request, m *model, keep time.Duration,
	do func(words []string, each time.Duration) error, a ask) {
	release, err := o.use(r.Context(), m, keep)
	if err != nil {
		o.l.loadError(w, r, err)
		return
	}
	defer release()
	done, err := o.l.turn(r.Context())
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer done()
	n := max(a.Options.NumPredict, a.MaxTokens, a.MaxCompletionTokens)
	if n <= 0 {
		n = 8
	}
	words := make([]string, min(n, 1<<16))
	for i := range words {
		words[i] = vocabulary[i%len(vocabulary)]
	}
	words[0] = o.l.s.name + " " // so that the answer shows whose it is
	if id := r.URL.Query().Get("id"); id != "" {
		for i := range words {
			words[i] = proofWord(o.l.s.name, id, i)
		}
	}
	each := o.l.runTime(r) / time.Duration(len(words))
	o.l.compute(r, m, func() error { return do(words, each) })
}

var vocabulary = []string{"It ", "answers, ", "but ", "it ", "only ", "pretends ", "to ", "think. "}

// stream sends one chunk a word, flushed, and then the last ones.
func (l *life) stream(w http.ResponseWriter, r *http.Request, m *model, each time.Duration,
	words []string, chunk func(string) []byte, last []byte) error {
	w.WriteHeader(http.StatusOK)
	flusher := http.NewResponseController(w)
	for i, word := range words {
		if err := l.runPart(r.Context(), m, each, i == len(words)/2); err != nil {
			return err
		}
		if i == len(words)/2 {
			l.half(w)
		}
		if _, err := w.Write(chunk(word)); err != nil {
			return err
		}
		if err := flusher.Flush(); err != nil {
			return err
		}
	}
	_, err := w.Write(last)
	return err
}

// use is acquire with a keep-alive that starts to run at release.
func (o *ollama) use(ctx context.Context, m *model, keep time.Duration) (func(), error) {
	release, err := o.l.acquire(ctx, m, true)
	if err != nil {
		return nil, err
	}
	s := o.l.s
	s.mu.Lock()
	m.keepAlive = keep
	m.expires = expiry(keep)
	s.mu.Unlock()
	return func() {
		release()
		s.mu.Lock()
		keep := m.keepAlive
		m.stopTimer()
		m.expires = expiry(keep)
		idleNow := m.users == 0 && m.phase == loaded && !o.l.dead
		if idleNow && keep > 0 {
			m.timer = time.AfterFunc(keep, func() { o.expireIdle(m) })
		}
		s.mu.Unlock()
		if keep == 0 {
			o.expire(m)
		}
	}, nil
}

func expiry(keep time.Duration) time.Time {
	if keep < 0 {
		return time.Date(2318, 1, 1, 0, 0, 0, 0, time.UTC) // as ollama writes "never"
	}
	return time.Now().Add(keep)
}

// expireIdle is expire when a keep-alive has run out, unless m is used again.
func (o *ollama) expireIdle(m *model) {
	o.l.s.mu.Lock()
	due := m.users == 0 && m.waiters == 0 && !time.Now().Before(m.expires)
	o.l.s.mu.Unlock()
	if due {
		o.expire(m)
	}
}

// expire marks m to be unloaded once nobody uses it, and returns at once.
func (o *ollama) expire(m *model) {
	s := o.l.s
	s.mu.Lock()
	due := m.phase != idle && !o.l.dead
	start := due && !m.expiring
	if due {
		m.expired = true
	}
	if start {
		m.expiring = true
	}
	s.notify()
	s.mu.Unlock()
	if !due {
		o.l.makeGood(m)
	}
	if start {
		o.l.spawn(func() { o.unloadWhenFree(m) })
	}
}

// unloadWhenFree ends when m is being unloaded or the mark is wiped out.
func (o *ollama) unloadWhenFree(m *model) {
	// The only error is the end of the life.
	_ = o.l.waitUntil(o.l.ctx, func() bool {
		switch {
		case !m.expired, m.phase == idle, m.phase == unloading, o.l.dead:
			m.expired = false
		case m.phase == loaded && m.users == 0 && m.waiters == 0:
			o.l.beginUnload(m, nil)
		default:
			return false
		}
		m.expiring = false
		return true
	})
}

func line(value any) []byte {
	text, err := json.Marshal(value)
	if err != nil {
		return []byte(strconv.Quote(err.Error()))
	}
	return text
}

func join(words []string) string {
	var b bytes.Buffer
	for _, w := range words {
		b.WriteString(w)
	}
	return b.String()
}

func digest(name string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(name))) }

// vectors are small embeddings, one for each input, that depend on it only.
func vectors(a ask) (out [][]float64) {
	for _, input := range inputs(a) {
		sum := sha256.Sum256(input)
		v := make([]float64, 8)
		for i := range v {
			v[i] = float64(int(sum[i])-128) / 128
		}
		out = append(out, v)
	}
	return out
}
