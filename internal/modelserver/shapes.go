package modelserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"mime"
	"net/http"
	"slices"
	"strings"
	"time"
)

// shape is what the imitations of real servers share: a table of routes over
// one life, and how a request finds its model and gets it loaded. A manner
// changes the fields that its server does otherwise and adds its routes.
type shape struct {
	l   *life
	mux *http.ServeMux
	m   *model // the only one; nil in a manner with many

	// join makes sure that a model is loaded and in use until release is
	// called. It is lazily at first.
	join func(ctx context.Context, m *model) (release func(), err error)
	// fail answers with an error. It is fail at first, OpenAI's form.
	fail func(w http.ResponseWriter, r *http.Request, status int, message string)
	// unknown and notLoaded are the statuses for a model that isn't there, 404
	// at first, and one that has to be loaded before it is asked, 503 at first.
	unknown, notLoaded int

	// locks says that a request waits for its turn first and looks at its model then.
	locks bool

	// The work that runs and that waits for its model or its turn, as a busy
	// probe tells it; guarded by Server.mu.
	running, queued map[*model]int
}

func newShape(l *life) *shape {
	s := &shape{
		l: l, mux: http.NewServeMux(), fail: fail,
		unknown: http.StatusNotFound, notLoaded: http.StatusServiceUnavailable,
		running: map[*model]int{}, queued: map[*model]int{},
		locks: manners[l.s.options().Manner].serial,
	}
	s.join = s.lazily
	if !manners[l.s.options().Manner].many {
		for _, m := range l.models {
			s.m = m
		}
	}
	return s
}

// job is one request for GPU work.
type job struct {
	w      http.ResponseWriter
	r      *http.Request
	body   []byte
	ask    ask               // the body, if it is JSON
	form   bool              // the body is a form
	file   []byte            // of a form; nil: it has none
	fields map[string]string // the form's other parts
	m      *model
}

// handle adds the same cheap route at several patterns.
func (s *shape) handle(do http.HandlerFunc, patterns ...string) {
	for _, p := range patterns {
		s.mux.HandleFunc(p, do)
	}
}

// fixed adds cheap routes that always answer the same value as JSON.
func (s *shape) fixed(value any, patterns ...string) {
	s.handle(func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, value) }, patterns...)
}

// health adds a health route of Faults' that answers as ok does.
func (s *shape) health(ok http.HandlerFunc, patterns ...string) {
	s.handle(func(w http.ResponseWriter, r *http.Request) {
		if s.l.health(w, r) {
			ok(w, r)
		}
	}, patterns...)
}

// healthy is health with a fixed answer: a string as text, all else as JSON.
func (s *shape) healthy(value any, patterns ...string) {
	s.health(func(w http.ResponseWriter, _ *http.Request) {
		if text, is := value.(string); is {
			writeText(w, text)
			return
		}
		writeJSON(w, http.StatusOK, value)
	}, patterns...)
}

// gpu adds routes that work on the GPU: the model is found and joined, a turn is
// waited for, and answer computes and writes.
func (s *shape) gpu(answer func(*job) error, patterns ...string) {
	s.handle(func(w http.ResponseWriter, r *http.Request) {
		if j := s.read(w, r); j != nil {
			s.work(j, answer)
		}
	}, patterns...)
}

// read reads a request for work and finds its model, or answers why not.
func (s *shape) read(w http.ResponseWriter, r *http.Request) *job {
	body, ok := readBody(w, r)
	if !ok {
		return nil
	}
	j := &job{w: w, r: r, body: body, m: s.m, fields: map[string]string{}}
	if kind, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); kind == "multipart/form-data" {
		file, err := readForm(body, params["boundary"], j.fields)
		if err != nil && !errors.Is(err, errNoFile) {
			s.fail(w, r, http.StatusBadRequest, err.Error())
			return nil
		}
		j.form, j.file, j.ask.Model = true, file, j.fields["model"]
	} else if len(body) > 0 {
		// A field of another type, "prompt" as an object for instance, is left out.
		var other *json.UnmarshalTypeError
		if err := json.Unmarshal(body, &j.ask); err != nil && !errors.As(err, &other) {
			s.fail(w, r, http.StatusBadRequest, "the body is no JSON request: "+err.Error())
			return nil
		}
	}
	if j.m == nil {
		name := r.PathValue("model")
		if name == "" {
			name = j.ask.Model
		}
		if j.m = s.find(w, r, name); j.m == nil {
			return nil
		}
	}
	return j
}

// find finds a model by its name, or answers that there is none.
func (s *shape) find(w http.ResponseWriter, r *http.Request, name string) *model {
	if s.m != nil {
		return s.m
	}
	if m := s.l.models[name]; m != nil {
		return m
	}
	if m := s.l.models[s.l.s.opts.Aliases[name]]; m != nil {
		return m
	}
	s.fail(w, r, s.unknown, fmt.Sprintf("model %q not found: there are %s", name, strings.Join(s.names(nil), ", ")))
	return nil
}

// work does a job whose model is known.
func (s *shape) work(j *job, answer func(*job) error) {
	s.count(s.queued, j.m, 1)
	release, done, err := s.begin(j)
	s.count(s.queued, j.m, -1)
	if err != nil {
		s.loadError(j.w, j.r, err)
		return
	}
	defer release()
	defer done()
	s.l.compute(j.r, j.m, func() error { return answer(j) })
}

// begin joins the model and waits for a turn, at whose end done must be called;
// where the kind locks, the other way round.
func (s *shape) begin(j *job) (release, done func(), err error) {
	if s.locks {
		if done, err = s.turn(j); err != nil {
			return nil, nil, err
		}
	}
	if release, err = s.join(j.r.Context(), j.m); err != nil {
		if done != nil {
			done()
		}
		return nil, nil, err
	}
	s.l.s.mu.Lock()
	requestOf(j.r.Context()).joins(j.m)
	s.l.s.mu.Unlock()
	if !s.locks {
		if done, err = s.turn(j); err != nil {
			release()
			return nil, nil, err
		}
	}
	return release, done, nil
}

// turn waits for a turn, from which on the job counts as running.
func (s *shape) turn(j *job) (done func(), err error) {
	over, err := s.l.turn(j.r.Context())
	if err != nil {
		return nil, err
	}
	s.count(s.running, j.m, 1)
	return func() {
		s.count(s.running, j.m, -1)
		over()
	}, nil
}

func (s *shape) count(of map[*model]int, m *model, n int) {
	s.l.s.mu.Lock()
	defer s.l.s.mu.Unlock()
	of[m] += n
	s.l.s.notify()
}

// lazily loads the model inside the request that needs it, and unloads it once
// it was idle for KeepAlive.
func (s *shape) lazily(ctx context.Context, m *model) (func(), error) {
	release, err := s.l.acquire(ctx, m, true)
	if err != nil {
		return nil, err
	}
	return func() {
		release()
		s.keep(m)
	}, nil
}

// ifLoaded refuses a model that isn't loaded at this moment.
func (s *shape) ifLoaded(ctx context.Context, m *model) (func(), error) {
	if s.phase(m) != loaded {
		return nil, errNotLoaded
	}
	return s.l.acquire(ctx, m, false)
}

// keep unloads m after KeepAlive, unless it is used meanwhile.
func (s *shape) keep(m *model) {
	srv := s.l.s
	srv.mu.Lock()
	defer srv.mu.Unlock()
	after := srv.opts.KeepAlive
	if after <= 0 || s.l.dead || m.users > 0 || m.phase != loaded {
		return
	}
	m.stopTimer()
	m.expires = time.Now().Add(after)
	m.timer = time.AfterFunc(after, func() {
		srv.mu.Lock()
		defer srv.mu.Unlock()
		if !s.l.dead && m.phase == loaded && m.users == 0 && m.waiters == 0 && !time.Now().Before(m.expires) {
			s.l.beginUnload(m, nil)
		}
	})
}

func (s *shape) phase(m *model) phase {
	s.l.s.mu.Lock()
	defer s.l.s.mu.Unlock()
	return m.phase
}

// busy is the work on all models. For holders of mu.
func (s *shape) busy() (running, waiting int) {
	for _, m := range s.l.models {
		running += s.running[m]
		waiting += s.queued[m]
	}
	return running, waiting
}

// names lists the models that which accepts, all if it is nil; which is called
// with Server.mu held.
func (s *shape) names(which func(*model) bool) []string {
	s.l.s.mu.Lock()
	defer s.l.s.mu.Unlock()
	out := []string{}
	for _, name := range slices.Sorted(maps.Keys(s.l.models)) {
		if which == nil || which(s.l.models[name]) {
			out = append(out, name)
		}
	}
	return out
}

// list is what each gives for each model, in the order of the names. each is
// called with Server.mu held; nil leaves the model out.
func (s *shape) list(each func(*model) any) []any {
	s.l.s.mu.Lock()
	defer s.l.s.mu.Unlock()
	out := []any{}
	for _, name := range slices.Sorted(maps.Keys(s.l.models)) {
		if entry := each(s.l.models[name]); entry != nil {
			out = append(out, entry)
		}
	}
	return out
}

// load loads m and waits.
func (s *shape) load(ctx context.Context, m *model) error {
	release, err := s.lazily(ctx, m)
	if err == nil {
		release()
	}
	return err
}

// loadLater starts to load m, if it is idle, and doesn't wait.
func (s *shape) loadLater(m *model) {
	s.l.s.mu.Lock()
	defer s.l.s.mu.Unlock()
	if m.phase == idle && !s.l.dead {
		s.l.startLoad(m)
	}
}

// unloading counts an unload request and reports whether to go on.
func (s *shape) unloading(w http.ResponseWriter, r *http.Request, m *model) bool {
	s.l.unloadCalled(m)
	if s.l.faults().FailUnload {
		s.fail(w, r, http.StatusInternalServerError, "unload failed")
		return false
	}
	return true
}

// loadError answers for a model that could not be joined.
func (s *shape) loadError(w http.ResponseWriter, r *http.Request, err error) {
	switch {
	case errors.Is(err, errNotLoaded):
		s.fail(w, r, s.notLoaded, "no model is loaded")
	case errors.Is(err, errDead), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		panic(http.ErrAbortHandler)
	default:
		s.fail(w, r, http.StatusInternalServerError, err.Error())
	}
}

// readJSON reads a body into v, or answers why not.
func (s *shape) readJSON(w http.ResponseWriter, r *http.Request, v any) bool {
	body, ok := readBody(w, r)
	if !ok {
		return false
	}
	if err := json.Unmarshal(body, v); err != nil {
		s.fail(w, r, http.StatusBadRequest, "want a JSON body: "+err.Error())
		return false
	}
	return true
}

// gauges adds Prometheus metrics; values is called with Server.mu held.
func (s *shape) gauges(values func() map[string]int, patterns ...string) {
	s.handle(func(w http.ResponseWriter, _ *http.Request) {
		s.l.s.mu.Lock()
		now := values()
		s.l.s.mu.Unlock()
		var b strings.Builder
		for _, name := range slices.Sorted(maps.Keys(now)) {
			family, _, _ := strings.Cut(name, "{")
			fmt.Fprintf(&b, "# TYPE %s gauge\n%s %d\n", family, name, now[name])
		}
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_, _ = w.Write([]byte(b.String())) // the client may be gone
	}, patterns...)
}

// failDetail answers with an error as FastAPI does.
func failDetail(w http.ResponseWriter, _ *http.Request, status int, message string) {
	writeJSON(w, status, map[string]string{"detail": message})
}

func writeText(w http.ResponseWriter, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = w.Write([]byte(text)) // the client may be gone
}
