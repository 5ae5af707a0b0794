package gpubroker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
)

func init() { caddy.RegisterModule(Admin{}) }

// active is the broker of this process, while a configuration has one. The
// admin endpoint looks it up at each request: it is replaced before the apps of a
// configuration are provisioned, and stays replaced if they fail.
var active atomic.Pointer[pooled]

// Admin serves the broker on Caddy's admin endpoint:
//
// Request | Effect
// --------|-------
// `GET /gpu_broker/status` | as the handler's status
// `GET /gpu_broker/decisions` | as the handler's decisions
// `GET /gpu_broker/decisions?follow=true` | new decisions as they are made, as an event stream
// `GET /gpu_broker/explain?consumer=<name>[&priority=<n>]` | what would happen if a request for it came now
// `GET /gpu_broker/config`, `PUT /gpu_broker/config` | the settings that can be changed while it runs, kept over restarts
// `POST /gpu_broker/lend?for=<duration>[&gpu=<index>]` | keeps a GPU for somebody else for so long; `for=0` ends it
// `POST /gpu_broker/consumers/<name>/pin`, `…/unpin` | pins it, or not, until the process ends
// `POST /gpu_broker/consumers/<name>/load` | loads it, in its turn
// `POST /gpu_broker/consumers/<name>/unload` | lets running work finish, then unloads it; a pinned one only with `?force=true`
// `POST /gpu_broker/consumers/<name>/drain`, `POST /gpu_broker/drain` | takes no more requests for it, or for all, and waits until none runs
// `POST /gpu_broker/consumers/<name>/resume`, `POST /gpu_broker/resume` | takes requests again
//
// A name is a consumer's, and stands for all its models, or `CONSUMER/MODEL`.
// What is done with consumers is answered when it is done, at most after `?wait=` (default 5m), and then with 202.
type Admin struct{}

// CaddyModule returns the Caddy module information.
func (Admin) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.gpu_broker", New: func() caddy.Module { return new(Admin) }}
}

// Provision registers the metrics: it runs for every configuration, so they are complete even after one that failed.
func (Admin) Provision(ctx caddy.Context) error { return registerMetrics(ctx.GetMetricsRegistry()) }

// Routes returns the admin routes.
func (a Admin) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{{Pattern: "/gpu_broker/", Handler: caddy.AdminHandlerFunc(a.serve)}}
}

// adminWait is how long a load or unload by hand is waited for.
const adminWait = 5 * time.Minute

func (Admin) serve(w http.ResponseWriter, r *http.Request) error {
	p := active.Load()
	if p == nil {
		return caddy.APIError{HTTPStatus: http.StatusNotFound, Err: errors.New("no configuration has the app gpu_broker")}
	}
	rest := strings.TrimPrefix(r.URL.Path, "/gpu_broker/")
	if doc := documents[rest]; doc != nil && rest != "" {
		switch {
		case r.Method != http.MethodGet:
			return methodNotAllowed(w, "GET")
		case rest == "decisions" && follows(r):
			return follow(w, r, p.broker)
		}
		return writeJSON(w, http.StatusOK, doc(p))
	}
	if rest == "" && r.Method == http.MethodGet {
		return writeJSON(w, http.StatusOK, map[string]string{"status": "ok", "routes": adminRoutes})
	}
	if methods := pages[rest]; methods != nil {
		if serve := methods[r.Method]; serve != nil {
			return serve(w, r, p.broker)
		}
		return methodNotAllowed(w, strings.Join(slices.Sorted(maps.Keys(methods)), ", "))
	}
	name, what := "", rest
	if of, is := strings.CutPrefix(rest, "consumers/"); is {
		if at := strings.LastIndexByte(of, '/'); at > 0 { // the name of a model may have slashes, too
			name, what = of[:at], of[at+1:]
		}
	}
	if act, ok := actions[what]; ok && (name != "" || act.all) {
		if r.Method != http.MethodPost {
			return methodNotAllowed(w, "POST")
		}
		return perform(w, r, p.broker, name, act.do)
	}
	return caddy.APIError{HTTPStatus: http.StatusNotFound,
		Err: fmt.Errorf("no such route: %s; there are %s", r.URL.Path, adminRoutes)}
}

// adminRoutes are what there is, for people who look around.
const adminRoutes = "status, decisions, healthz, explain, config, lend, drain, resume, and of consumers/<name>/: load, unload, drain, resume, pin, unpin"

// action does something with a consumer, or with all if the name is empty.
type action func(ctx context.Context, b *broker.Broker, name string, force bool) error

// actions are what can be asked for by hand.
var actions = map[string]struct {
	do  action
	all bool // can be done with all
}{
	"load": {do: func(ctx context.Context, b *broker.Broker, name string, _ bool) error { return b.LoadByHand(ctx, name) }},
	"unload": {do: func(ctx context.Context, b *broker.Broker, name string, force bool) error {
		return b.UnloadByHand(ctx, name, force)
	}},
	"drain":  {all: true, do: func(ctx context.Context, b *broker.Broker, name string, _ bool) error { return b.Drain(ctx, name) }},
	"pin":    {do: func(_ context.Context, b *broker.Broker, name string, _ bool) error { return b.Pin(name, true) }},
	"unpin":  {do: func(_ context.Context, b *broker.Broker, name string, _ bool) error { return b.Pin(name, false) }},
	"resume": {all: true, do: func(_ context.Context, b *broker.Broker, name string, _ bool) error { return b.Resume(name) }},
}

func perform(w http.ResponseWriter, r *http.Request, b *broker.Broker, name string, act action) error {
	q := r.URL.Query()
	wait := adminWait
	if text := q.Get("wait"); text != "" {
		d, err := caddy.ParseDuration(text)
		if err != nil || d < 0 {
			return caddy.APIError{HTTPStatus: http.StatusBadRequest, Err: fmt.Errorf("wait=%q is no duration: write for example wait=30s", text)}
		}
		wait = min(d, time.Hour)
	}
	ctx, cancel := context.WithTimeout(r.Context(), wait)
	defer cancel()
	force := q.Get("force") == "true" || q.Get("force") == "1"
	err := act(ctx, b, name, force)
	done := func(is bool) error {
		doc := map[string]any{"done": is}
		if name != "" {
			doc["consumer"] = name
		}
		return writeJSON(w, http.StatusOK, doc)
	}
	var refused *broker.Refused
	status := http.StatusInternalServerError
	switch {
	case err == nil:
		return done(true)
	case errors.Is(err, context.DeadlineExceeded):
		w.WriteHeader(http.StatusAccepted)
		return done(false)
	case errors.Is(err, broker.ErrUnknownConsumer):
		return unknownConsumer(b, name)
	case errors.Is(err, broker.ErrPinned), errors.Is(err, broker.ErrCannot):
		status = http.StatusConflict
	case errors.As(err, &refused):
		status = http.StatusServiceUnavailable
		if s := statuses[refused.Code]; s != 0 {
			status = s
		}
	}
	return caddy.APIError{HTTPStatus: status, Err: err}
}

func methodNotAllowed(w http.ResponseWriter, allowed string) error {
	w.Header().Set("Allow", allowed)
	return caddy.APIError{HTTPStatus: http.StatusMethodNotAllowed, Err: fmt.Errorf("use %s", allowed)}
}

// Interface guards
var (
	_ caddy.AdminRouter = (*Admin)(nil)
	_ caddy.Provisioner = (*Admin)(nil)
)
