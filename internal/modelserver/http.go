package modelserver

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"
)

// maxBody bounds what is read of a request into memory.
const maxBody = 512 << 20

// request is what wrap knows of the request that is being served.
type request struct {
	id   int
	tag  string
	work *work
}

// work is the piece of work that a request is: its model and the epoch of that at
// which it joined the model. Any unload after that breaks it, also one between
// two parts of it or before the first. m is nil outside of work. It is guarded by Server.mu.
type work struct {
	m     *model
	epoch int
}

type requestKey struct{}

// errAnswered says of a piece of work that its client was told of an error.
var errAnswered = errors.New("answered")

// errBroken says of a piece of work that its model went away under it.
var errBroken = errors.New("the model was unloaded under running work")

func requestOf(ctx context.Context) request {
	r, _ := ctx.Value(requestKey{}).(request)
	return r
}

// joins notes the epoch of m, unless the request has joined m already. For holders of mu.
func (r request) joins(m *model) {
	if r.work != nil && r.work.m != m {
		*r.work = work{m, m.epoch}
	}
}

// wrap is what all manners share: counting, the log, /control, and the faults
// that go by path.
func (l *life) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !l.enter() {
			panic(http.ErrAbortHandler)
		}
		defer l.tasks.Done()
		if r.URL.Path == "/control" {
			l.control(w, r)
			return
		}
		s := l.s
		s.mu.Lock()
		s.nextID++
		req := request{id: s.nextID, tag: r.Header.Get("X-Tag"), work: new(work)}
		quiet := s.opts.Quiet
		s.countPath(r.URL.Path)
		s.stats.InFlight++
		if quiet {
			s.notify()
		} else {
			s.note(Event{Kind: EventRequestStart, ID: req.id, Tag: req.tag, Method: r.Method, URI: r.RequestURI})
		}
		status, fail := s.faults.FailPaths[r.URL.Path]
		if !fail {
			status, fail = s.faults.FailPaths[r.Method+" "+r.URL.Path]
		}
		s.mu.Unlock()
		defer func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.stats.InFlight--
			if quiet {
				s.notify()
			} else {
				s.note(Event{Kind: EventRequestEnd, ID: req.id, Tag: req.tag, Method: r.Method, URI: r.RequestURI})
			}
		}()
		hangs := func(f Faults) bool {
			return slices.Contains(f.HangPaths, r.URL.Path) || slices.Contains(f.HangPaths, r.Method+" "+r.URL.Path)
		}
		if l.hangWhile(r.Context(), hangs) != nil {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("X-Modelserver", s.name)
		w.Header().Set("X-Received-Uri", r.RequestURI)
		if fail {
			writeError(w, status, "told to fail")
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), requestKey{}, req)))
	})
}

// turn waits for one of the server's Concurrency turns.
func (l *life) turn(ctx context.Context) (done func(), err error) {
	if l.turns == nil {
		return func() {}, nil
	}
	select {
	case l.turns <- struct{}{}:
		return func() { <-l.turns }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-l.ctx.Done():
		return nil, errDead
	}
}

// health applies the faults of health probes and reports whether to go on.
func (l *life) health(w http.ResponseWriter, r *http.Request) bool {
	l.s.mu.Lock()
	l.s.stats.HealthProbes++
	l.s.notify()
	l.s.mu.Unlock()
	if l.hangWhile(r.Context(), func(f Faults) bool { return f.HangHealth }) != nil {
		panic(http.ErrAbortHandler)
	}
	if status := l.faults().HealthStatus; status != 0 {
		writeError(w, status, "not healthy")
		return false
	}
	return true
}

// work is one piece of GPU work: m is loaded, if need be, and in use while do
// runs. If do fails the connection breaks and the work counts as aborted.
func (l *life) work(w http.ResponseWriter, r *http.Request, m *model, lazy bool, do func() error) {
	release, err := l.acquire(r.Context(), m, lazy)
	if err != nil {
		l.loadError(w, r, err)
		return
	}
	defer release()
	l.compute(r, m, do)
}

// compute is work on a model that the caller has acquired.
func (l *life) compute(r *http.Request, m *model, do func() error) {
	end := l.beginWork(requestOf(r.Context()), m)
	ok := false
	defer func() { end(ok) }()
	if l.takeFault(func(f *Faults) bool { was := f.DieOnRequest; f.DieOnRequest = false; return was }) {
		l.dieOf("die_on_request")
		panic(http.ErrAbortHandler)
	}
	switch err := do(); {
	case err == nil:
		ok = true
	case !errors.Is(err, errAnswered):
		panic(http.ErrAbortHandler)
	}
}

// beginWork counts a piece of work; end must be called once.
func (l *life) beginWork(req request, m *model) (end func(ok bool)) {
	s := l.s
	s.mu.Lock()
	defer s.mu.Unlock()
	req.joins(m)
	s.stats.Working++
	s.stats.MaxConcurrent = max(s.stats.MaxConcurrent, s.stats.Working)
	quiet := s.opts.Quiet
	event := Event{ID: req.id, Tag: req.tag, Model: m.name}
	log := func(kind string) {
		if quiet {
			s.notify()
			return
		}
		event.Kind = kind
		s.note(event)
	}
	log(EventWorkStart)
	return func(ok bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.stats.Working--
		if req.work != nil {
			*req.work = work{}
		}
		if ok {
			s.stats.Worked++
			log(EventWorkEnd)
		} else {
			s.stats.Aborted++
			log(EventWorkAbort)
		}
	}
}

// run takes the time of one piece of work, and goes on while Faults.HoldWork
// is set. It fails if the client leaves, the server dies, or the model is unloaded under it.
func (l *life) run(ctx context.Context, m *model, d time.Duration) error {
	return l.runPart(ctx, m, d, true)
}

// runPart is run for a part of a work. holds: it is the one that HoldWork keeps from ending.
func (l *life) runPart(ctx context.Context, m *model, d time.Duration, holds bool) error {
	s := l.s
	s.mu.Lock()
	if s.opts.WorksOn {
		ctx = context.WithoutCancel(ctx)
	}
	before, held := m.epoch, holds && s.faults.HoldWork
	if w := requestOf(ctx).work; w != nil && w.m == m {
		before = w.epoch
	}
	whole := m.epoch == before
	s.mu.Unlock()
	if d <= 0 && !held && whole {
		return ctx.Err()
	}
	timer := time.NewTimer(max(0, d))
	defer timer.Stop()
	for over := false; ; {
		s.mu.Lock()
		broken := m.epoch != before
		held = holds && s.faults.HoldWork
		changed := s.changed()
		s.mu.Unlock()
		switch {
		case broken:
			return errBroken
		case over && !held:
			return nil
		}
		select {
		case <-timer.C:
			over = true
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-l.ctx.Done():
			return errDead
		}
	}
}

// runTime is how long the work of r takes: ?ms=, else RunTime.
func (l *life) runTime(r *http.Request) time.Duration {
	if text := r.URL.Query().Get("ms"); text != "" {
		if ms, err := strconv.ParseFloat(text, 64); err == nil && ms >= 0 && ms < 1e9 {
			return time.Duration(ms * float64(time.Millisecond))
		}
	}
	return l.s.options().RunTime
}

// half is called when half of an answer is sent, for the faults that end it there.
func (l *life) half(w http.ResponseWriter) {
	dies := l.takeFault(func(f *Faults) bool { was := f.DieMidBody; f.DieMidBody = false; return was })
	if !dies && !l.faults().AbortMidBody {
		return
	}
	_ = http.NewResponseController(w).Flush() // the client may be gone
	if dies {
		l.dieOf("die_mid_body")
	}
	panic(http.ErrAbortHandler)
}

// answer sends a whole body, in two halves.
func (l *life) answer(w http.ResponseWriter, contentType string, body []byte) error {
	if contentType != "" {
		w.Header().Set("Content-Type", contentType)
	}
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(http.StatusOK)
	if _, err := w.Write(body[:len(body)/2]); err != nil {
		return err
	}
	l.half(w)
	_, err := w.Write(body[len(body)/2:])
	return err
}

// loadError answers for a load that failed.
func (l *life) loadError(w http.ResponseWriter, r *http.Request, err error) {
	switch {
	case errors.Is(err, errNotLoaded):
		fail(w, r, http.StatusServiceUnavailable, "not loaded")
	case errors.Is(err, errOOM), errors.Is(err, errRefused):
		fail(w, r, http.StatusInternalServerError, err.Error())
	case errors.Is(err, errDead), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		panic(http.ErrAbortHandler)
	default:
		fail(w, r, http.StatusInternalServerError, err.Error())
	}
}

func readBody(w http.ResponseWriter, r *http.Request) ([]byte, bool) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		writeError(w, http.StatusRequestEntityTooLarge, "body too large")
		return nil, false
	case err != nil: // the client has left
		panic(http.ErrAbortHandler)
	}
	return body, true
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	text, err := json.Marshal(value)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(text)))
	w.WriteHeader(status)
	_, _ = w.Write(text) // the client may be gone
}

func writeError(w http.ResponseWriter, status int, message string) {
	writeJSON(w, status, map[string]string{"error": message})
}
