package modelserver

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

// plain is a server with routes of its own:
//
//	GET  /health                  {"status":"ok","loaded":false,"gpu_resident_mib":0,"working":0}
//	POST /api/admin/load, unload  answer when it is done
//	POST /synthesize              SynthesizeBytes of the body
//	POST /inference, /v1/audio/transcriptions   Transcript of the body or of a form's file
//	POST /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/images/generations   OpenAI's
//	GET  /v1/models               its one model; needs no model
//	POST /upload?read_ms=M        reads the body, with a pause after each 64 KiB; its size and hash
//	     /stream?events=N&ms=M    N events, one each M ms, then [DONE]: StreamBytes
//	     /proof?id=ID&bytes=N     ProofBytes of the body
//	     /proof/stream?id=ID&events=N&ms=M   as /stream: ProofStream
//	GET  /audio/big?bytes=N       AudioBytes; needs no model
//	     any other                work: a body is sent back with its Content-Type;
//	                              HEAD and OPTIONS only say that the path is there
type plain struct {
	l   *life
	m   *model
	mux *http.ServeMux
}

func newPlain(l *life) *plain {
	p := &plain{l: l, mux: http.NewServeMux()}
	for _, m := range l.models {
		p.m = m
	}
	p.mux.HandleFunc("GET /health", p.health)
	p.mux.HandleFunc("POST /api/admin/load", p.load)
	p.mux.HandleFunc("POST /api/admin/unload", p.unload)
	p.mux.HandleFunc("POST /synthesize", p.working(p.synthesize))
	p.mux.HandleFunc("POST /inference", p.working(p.transcribe))
	p.mux.HandleFunc("POST /v1/audio/transcriptions", p.working(p.transcribe))
	p.mux.HandleFunc("POST /v1/chat/completions", p.working(p.completions(chatCompletion)))
	p.mux.HandleFunc("POST /v1/completions", p.working(p.completions(textCompletion)))
	p.mux.HandleFunc("POST /v1/embeddings", p.working(p.embeddings))
	p.mux.HandleFunc("POST /v1/images/generations", p.working(p.draw))
	p.mux.HandleFunc("GET /v1/models", p.models)
	p.mux.HandleFunc("POST /upload", p.working(p.upload))
	p.mux.HandleFunc("/stream", p.working(p.stream))
	p.mux.HandleFunc("/proof", p.working(p.proof))
	p.mux.HandleFunc("/proof/stream", p.working(p.proofStream))
	p.mux.HandleFunc("GET /audio/big", p.audio)
	p.mux.HandleFunc("/", p.working(p.echo))
	return p
}

func (p *plain) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// All routes take a turn: with Concurrency 1 it is a single-threaded server.
	done, err := p.l.turn(r.Context())
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer done()
	if p.l.s.options().WorksOn {
		body, err := io.ReadAll(r.Body) // work begins once the request is there
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		w, r.Body = heedless{w}, io.NopCloser(bytes.NewReader(body))
	}
	switch {
	case r.Method == http.MethodOptions:
		w.WriteHeader(http.StatusNoContent)
	case r.Method == http.MethodHead && r.URL.Path != "/health":
		w.WriteHeader(http.StatusOK)
	default:
		p.mux.ServeHTTP(w, r)
	}
}

// heedless does not notice that nobody reads the answer any more.
type heedless struct{ http.ResponseWriter }

func (h heedless) Write(b []byte) (int, error) {
	_, _ = h.ResponseWriter.Write(b)
	return len(b), nil
}

func (h heedless) FlushError() error {
	_ = http.NewResponseController(h.ResponseWriter).Flush()
	return nil
}

func (p *plain) health(w http.ResponseWriter, r *http.Request) {
	if !p.l.health(w, r) {
		return
	}
	writeJSON(w, http.StatusOK, p.state())
}

// healthAnswer is the answer of /health and of the admin routes.
type healthAnswer struct {
	Status   string `json:"status"`
	Loaded   bool   `json:"loaded"`
	Resident int64  `json:"gpu_resident_mib"`
	Working  int    `json:"working"` // requests that compute
}

func (p *plain) state() healthAnswer {
	p.l.s.mu.Lock()
	defer p.l.s.mu.Unlock()
	a := healthAnswer{Status: "ok", Loaded: p.m.saysLoaded(), Working: p.l.s.stats.Working}
	if a.Loaded {
		a.Resident = p.m.resident.MiB()
	}
	return a
}

func (p *plain) load(w http.ResponseWriter, r *http.Request) {
	release, err := p.l.acquire(r.Context(), p.m, true)
	if err != nil {
		p.l.loadError(w, r, err)
		return
	}
	release()
	writeJSON(w, http.StatusOK, p.state())
}

func (p *plain) unload(w http.ResponseWriter, r *http.Request) {
	p.l.unloadCalled(p.m)
	if p.l.faults().FailUnload {
		writeError(w, http.StatusInternalServerError, "unload failed")
		return
	}
	if err := p.l.unload(r.Context(), p.m); err != nil {
		p.l.loadError(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, p.state())
}

// working makes a handler of a function that does GPU work.
func (p *plain) working(do func(w http.ResponseWriter, r *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		p.l.work(w, r, p.m, p.l.s.options().Lazy, func() error { return do(w, r) })
	}
}

// body reads the request and takes the work's time.
func (p *plain) body(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	body, ok := readBody(w, r)
	if !ok {
		return nil, errAnswered
	}
	return body, p.l.run(r.Context(), p.m, p.l.runTime(r))
}

func (p *plain) echo(w http.ResponseWriter, r *http.Request) error {
	body, err := p.body(w, r)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(body)
	w.Header().Set("X-Body-Sha256", hex.EncodeToString(sum[:]))
	return p.l.answer(w, r.Header.Get("Content-Type"), body)
}

func (p *plain) synthesize(w http.ResponseWriter, r *http.Request) error {
	body, err := p.body(w, r)
	if err != nil {
		return err
	}
	return p.l.answer(w, "audio/wav", SynthesizeBytes(body))
}

func (p *plain) upload(w http.ResponseWriter, r *http.Request) error {
	pause, _ := strconv.Atoi(r.URL.Query().Get("read_ms"))
	hash := sha256.New()
	var size int64
	for {
		n, err := io.CopyN(hash, r.Body, 64<<10)
		size += n
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if err := p.l.sleep(r.Context(), time.Duration(pause)*time.Millisecond); err != nil {
			return err
		}
	}
	if err := p.l.run(r.Context(), p.m, p.l.runTime(r)); err != nil {
		return err
	}
	text := fmt.Sprintf(`{"bytes":%d,"sha256":"%x"}`, size, hash.Sum(nil))
	return p.l.answer(w, "application/json", []byte(text))
}

func (p *plain) stream(w http.ResponseWriter, r *http.Request) error {
	return p.events(w, r, streamEvent)
}

func (p *plain) audio(w http.ResponseWriter, r *http.Request) {
	size, err := strconv.ParseInt(r.URL.Query().Get("bytes"), 10, 64)
	if err != nil || size < 0 || size > 1<<32 {
		writeError(w, http.StatusBadRequest, "bytes: want a number from 0 to 4294967296")
		return
	}
	w.Header().Set("Content-Type", "audio/wav")
	w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	source := newPattern(0)
	if _, err := io.CopyN(w, source, size/2); err != nil {
		panic(http.ErrAbortHandler)
	}
	p.l.half(w)
	if _, err := io.CopyN(w, source, size-size/2); err != nil {
		panic(http.ErrAbortHandler)
	}
}
