package gpubroker

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// byModel is what a route needs whose requests name their model.
type byModel struct {
	sources *routing.Sources
	names   *routing.Names
	lists   *routing.Lists
	none    *target              // of requests that name no model; nil: they are refused
	bypass  config.RoutePatterns // of the route: they need no GPU, whoever would serve them
}

// began stands for the time since when models are there: nothing better is known, and it must not change with a reload.
var began = time.Now()

// newByModel makes it for a route, whose targets are there.
func (h *Handler) newByModel() (*byModel, error) {
	m := &byModel{}
	var places []routing.Source
	for _, from := range h.ModelFrom {
		places = append(places, routing.Source{Kind: from.Source, Name: from.Name})
	}
	var named []routing.Named
	var listed []routing.Listed
	for _, c := range h.app.Consumers {
		named = append(named, routing.Named{Consumer: c.Name, Aliases: c.Alias, Hidden: !c.IsEnabled()})
		if c.IsEnabled() {
			for _, name := range append([]string{c.Name}, c.Alias...) {
				listed = append(listed, routing.Listed{Name: name, Size: int64(c.VRAM), Since: began})
			}
		}
	}
	m.lists = routing.NewLists(listed)
	var faults [4]error
	m.sources, faults[0] = routing.NewSources(places)
	m.names, faults[1] = routing.NewNames(named)
	var touch config.RoutePatterns
	m.bypass, faults[2] = config.ParseRoutePatterns(h.Bypass)
	touch, faults[3] = config.ParseRoutePatterns(h.Touch)
	m.bypass = append(m.bypass, touch...)
	if h.Default != "" {
		m.none = h.targets[h.Default]
	}
	return m, errors.Join(faults[:]...)
}

// serveByModel serves a request that names its model.
func (h *Handler) serveByModel(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler, repl *caddy.Replacer) error {
	j := jobs.Get().(*job)
	defer j.done()
	j.handler, j.repl, j.target = h, repl, nobody
	j.ResponseWriter = w
	t, err := j.resolve(r)
	if t == nil && err == nil {
		body, name := h.byModel.lists.Answer(r)
		if body != nil {
			return answerJSON(w, body)
		}
		err = h.byModel.unknown(name)
	}
	if err != nil {
		repl.Map(nobody.placeholders)
		return j.fail(w, r, err)
	}
	repl.Map(t.placeholders)
	j.target = t
	switch t.needs(r) {
	case needsTouch:
		h.pool.broker.Touch(t.name)
		return next.ServeHTTP(w, r)
	case needsNothing:
		return next.ServeHTTP(w, r)
	}
	return j.serve(w, r, next)
}

// resolve finds the consumer of a request. Neither that nor an error: it asks for a list of models.
func (j *job) resolve(r *http.Request) (*target, error) {
	h, m := j.handler, j.handler.byModel
	cheap := r.Method == http.MethodOptions || r.Method == http.MethodHead
	if h.plan != nil && hasBody(r) && !cheap {
		if err := j.readAhead(r); err != nil {
			return nil, err
		}
	}
	var inBody []string
	if j.facts != nil {
		inBody = j.facts.Names
	}
	name, err := m.sources.Find(r, inBody)
	switch {
	case err != nil:
		return nil, badRequest(err)
	case name != "":
		consumer, ok := m.names.Lookup(name)
		if !ok {
			return nil, m.unknown(name)
		}
		return h.targets[consumer], nil
	case routing.IsList(r):
		return nil, nil
	case m.none != nil:
		return m.none, nil
	case cheap || m.bypass.Match(r.Method, r.URL.Path):
		return nil, &failure{status: http.StatusNotFound, code: string(scheduler.UnknownConsumer),
			message: "this request names no model, so no server is known that could answer it: name it in " + m.sources.String()}
	}
	message := "this request names no model: name it in " + m.sources.String()
	if r.Header.Get("Content-Encoding") != "" {
		message += "; a compressed body is not looked into"
	}
	return nil, &failure{status: http.StatusBadRequest, code: "bad_request", message: message}
}

// unknown is the error for a name that no consumer has.
func (m *byModel) unknown(name string) error {
	message := fmt.Sprintf("there is no model %.512q", name)
	if near := m.names.Near(name); len(near) > 0 {
		for i := range near {
			near[i] = strconv.Quote(near[i])
		}
		message += ": did you mean " + strings.Join(near, ", ") + "?"
	}
	return &failure{status: http.StatusNotFound, code: string(scheduler.UnknownConsumer), message: message + " GET /v1/models lists all"}
}

func badRequest(err error) error {
	return &failure{status: http.StatusBadRequest, code: "bad_request", message: err.Error()}
}

// peek looks into a body that was read ahead, and takes its metadata out.
func (j *job) peek(r *http.Request) error {
	facts, err := j.body.Peek(r.Header, j.handler.plan)
	var bad *routing.BadBody
	switch {
	case errors.As(err, &bad):
		return badRequest(err)
	case err != nil:
		return err
	}
	j.facts = &facts
	j.body.Rewind(r)
	return nil
}

func answerJSON(w http.ResponseWriter, body []byte) error {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(http.StatusOK)
	_, err := w.Write(body)
	return err
}
