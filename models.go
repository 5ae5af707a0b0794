package gpubroker

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// byModel is what a route needs whose requests name their model.
type byModel struct {
	sources *routing.Sources
	names   *routing.Names
	lists   *routing.Lists
	only    *config.Consumer     // whose models they are; nil: all consumers'
	auto    []string             // consumers that serve what their servers list
	listed  []routing.Listed     // what lists show of the configuration
	none    *target              // of requests that name no model; nil: they are refused
	bypass  config.RoutePatterns // of the route: they need no GPU, whoever would serve them
}

// began stands for the time since when models are there: nothing better is known, and it must not change with a reload.
var began = time.Now()

// newByModel makes it for a route, whose targets are there: for all consumers, or for one that has several models.
func (h *Handler) newByModel(only *config.Consumer) (*byModel, error) {
	m := &byModel{only: only}
	from, consumers := h.ModelFrom, h.app.Consumers
	if only != nil {
		consumers, from = []*config.Consumer{only}, modelFrom(only)
	}
	var named []routing.Named
	var listed []routing.Listed
	for _, c := range consumers {
		all, shown := names(c, h.app.modelNames[c.Name])
		named = append(named, all...)
		listed = append(listed, shown...)
		if c.AutoModels && c.IsEnabled() {
			m.auto = append(m.auto, c.Name)
		}
	}
	m.lists, m.listed = routing.NewLists(listed), listed
	var errSources, errNames error
	m.sources, errSources = routing.NewSources(from)
	m.names, errNames = routing.NewNames(named)
	m.bypass, _ = config.ParseRoutePatterns(slices.Concat(h.Bypass, h.Touch)) // newTarget has refused what can't be read
	if h.Default != "" {
		m.none = h.targets[h.Default]
	}
	return m, errors.Join(errSources, errNames)
}

// modelFrom is where the requests of a consumer with models name theirs.
func modelFrom(c *config.Consumer) []config.ModelFrom {
	if len(c.ModelFrom) == 0 {
		return []config.ModelFrom{{Source: config.FromBody}}
	}
	return c.ModelFrom
}

// names is what requests may call a consumer or its models, and what of that lists show. compare is how its server compares models' names.
func names(c *config.Consumer, compare lifecycle.Names) (all []routing.Named, shown []routing.Listed) {
	list := func(n routing.Named, size gpu.Bytes, unlisted bool, names ...string) {
		n.Consumer, n.Hidden = c.Name, !c.IsEnabled() || unlisted
		all = append(all, n)
		for _, name := range append(names, plainNames(n.Aliases)...) {
			if c.IsEnabled() {
				shown = append(shown, routing.Listed{Name: name, Size: int64(size), Since: began, Unlisted: unlisted})
			}
		}
	}
	if !c.HasModels() {
		list(routing.Named{Aliases: c.Alias, At: c.Source}, c.VRAM, c.Unlisted, c.Name)
		return all, shown
	}
	for _, m := range c.Models {
		list(routing.Named{Model: m.Name, Aliases: m.Alias, Same: compare.Same, Match: compare.Match, At: m.Source}, cmp.Or(m.VRAM, c.VRAM), m.Unlisted || c.Unlisted, m.Name)
	}
	return all, shown
}

// serveByModel serves a request that names its model.
func (h *Handler) serveByModel(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler, repl *caddy.Replacer) error {
	j := jobs.Get().(*job)
	defer j.done()
	j.handler, j.repl, j.target = h, repl, nobody
	if h.fixed != nil {
		j.target = h.fixed
	}
	j.ResponseWriter = w
	j.turn = h.fixed != nil && h.fixed.Needs(r) != config.NeedsGPU
	t, err := j.resolve(r)
	if t == nil && err == nil {
		if h.byModel.only != nil { // its server knows better what it has, if it runs
			return j.pass(w, r, next, config.NeedsNothing)
		}
		body, name := h.byModel.answerList(r, h)
		if body != nil {
			return j.answerOwn(w, r, body)
		}
		err = h.byModel.unknown(name)
	}
	if err != nil && h.fixed == nil && (j.liveness(w, r) || j.preflight(w, r)) {
		return nil
	}
	if err != nil {
		repl.Map(j.target.placeholders)
		return j.fail(w, r, err)
	}
	repl.Map(t.placeholders)
	j.target = t
	need := t.Needs(r)
	if t.mayUnload(r, need) {
		return j.unlessUnload(w, r, next, need)
	}
	if h.fixed == nil && need.Unlisted() { // else it is settled
		need = h.unlistedAsks(t, r, need)
	}
	return j.byNeed(w, r, next, need)
}

// resolve finds the consumer of a request, and which of its models. Neither that nor an error: it asks for a list of models.
func (j *job) resolve(r *http.Request) (*target, error) {
	t, err := j.find(r)
	if t == nil || err != nil {
		return t, err
	}
	return t, j.checkCase(t)
}

// checkCase refuses a body that names its model in a case that only the server would read.
func (j *job) checkCase(t *target) error {
	if j.facts == nil || j.facts.OtherCase == "" || !t.foldKeys {
		return nil
	}
	return &failure{status: http.StatusBadRequest, code: "bad_request", message: fmt.Sprintf(
		"the request body names the model in a field that is %q in another case, which the server of consumer %q reads, too: write it as %q, and once", j.facts.OtherCase, t.name, j.facts.OtherCase)}
}

// find is resolve, but for what it refuses of the body.
func (j *job) find(r *http.Request) (*target, error) {
	h, m := j.handler, j.handler.byModel
	cheap := r.Method == http.MethodOptions || r.Method == http.MethodHead
	if h.plan != nil && !h.pinnedOnly && hasBody(r) && !cheap {
		if err := j.readAhead(r); err != nil {
			return nil, err
		}
	}
	name, err := m.sources.Find(r, j.facts)
	switch {
	case j.turn: // what it names may be something else
		return j.mayName(r, name)
	case err != nil:
		return nil, badRequest(err)
	case name != "":
		t, err := j.named(r, name)
		if err == nil {
			err = j.checkOther(r, t, name)
		}
		return t, err
	case routing.IsList(r) && (h.fixed == nil || !h.fixed.Computes(r)):
		return nil, nil
	case m.none != nil:
		j.askedOf = m.none.name
		return m.none, nil
	case routing.IsShortList(r) && (h.fixed == nil || !h.fixed.Computes(r)):
		return nil, nil
	case m.only != nil && len(m.only.Models) == 1:
		j.model, j.askedOf = m.only.Models[0].Name, h.fixed.name
		return h.fixed, nil
	case cheap || r.Method == http.MethodGet || m.bypass.Match(r.Method, r.URL.Path):
		return nil, &failure{status: http.StatusNotFound, code: string(scheduler.UnknownConsumer), message: m.namesNone() + m.sources.String()}
	}
	return nil, &failure{status: http.StatusBadRequest, code: "bad_request", message: "this request names no model: name it in " + m.sources.String()}
}

// namesNone says what becomes of a request that needs no more than a server to answer it, and names no model.
func (m *byModel) namesNone() string {
	if m.only != nil {
		return fmt.Sprintf("this request names no model, and consumer %q has several: if it needs none, add its route to bypass; else name it in ", m.only.Name)
	}
	return "this request names no model, so no server is known that could answer it: name it in "
}

// checkOther refuses a request that names another model in a second place: its server may load that one.
func (j *job) checkOther(r *http.Request, t *target, name string) error {
	if j.model == "" {
		return nil
	}
	m := j.handler.byModel
	same := func(other string) bool {
		if j.handler.app.modelNames[t.name].Same(other, j.model) {
			return true
		}
		who, ok := m.names.Lookup(other)
		if ok = ok && who == (routing.Found{Consumer: t.name, Model: j.model}); ok {
			j.asked, j.askedOf, j.own = name, t.name, j.model // the server knows only its own name, wherever it looks
		}
		return ok
	}
	other, err := m.sources.Other(r, j.facts, name, same)
	switch {
	case err != nil:
		return badRequest(err)
	case other == "":
		return nil
	}
	return &failure{status: http.StatusBadRequest, code: "bad_request",
		message: fmt.Sprintf("this request names two models, %.512q and %.512q, and its server may read either: leave one of them out", name, other)}
}

// mayName is named for a request of a known consumer that no list names: a name that means nothing here is the server's to judge.
func (j *job) mayName(r *http.Request, name string) (*target, error) {
	if name != "" {
		m := j.handler.byModel
		if who, ok := m.names.Lookup(name); ok {
			j.means(name, who)
		} else if consumer, model := j.handler.pool.broker.Holder(m.only.Name, name); consumer != "" {
			j.model = model
		} else if who, ok := j.matches(r, name); ok {
			j.means(name, who)
		}
	}
	return j.handler.fixed, nil
}

// matches finds whose pattern a name fits on a route with one consumer, unless the consumer's server has a model of that name.
func (j *job) matches(r *http.Request, name string) (routing.Found, bool) {
	only := j.handler.byModel.only
	who, ok := j.handler.byModel.names.Match(name)
	if ok && only.ServesUnnamed() && j.handler.pool.broker.Offer(r.Context(), only.Name, name).Known == lifecycle.Yes {
		return routing.Found{}, false
	}
	return who, ok
}

// named finds who is meant by a name: what the configuration names, then what servers have that it does not, then what its patterns
// stand for, then the default for unknown names.
func (j *job) named(r *http.Request, name string) (*target, error) {
	h, m := j.handler, j.handler.byModel
	if who, ok := m.names.Lookup(name); ok {
		return j.means(name, who), nil
	}
	like, matches := m.names.Match(name)
	if m.only != nil && m.only.ServesUnnamed() {
		offer := h.pool.broker.Offer(r.Context(), m.only.Name, name)
		switch {
		case offer.Known == lifecycle.Yes:
			return j.takes(name, h.fixed, offer.As, ""), nil
		case matches:
			return j.means(name, like), nil
		case offer.Known == lifecycle.No: // to ask for it would unload others for nothing
			return nil, m.missing(name, slices.DeleteFunc(offer.Listed, func(other string) bool { return !h.shows(other) }))
		case offer.Silent != "" && h.fixed.candidates == nil: // else a fallback may serve it
			return nil, untold(m.only.Name, name, offer.Silent)
		}
		if j.turn = offer.Elsewhere; j.turn {
			return h.fixed, nil
		}
		return j.takes(name, h.fixed, strings.Clone(name), ""), nil
	}
	consumer := ""
	var listed []string
	if m.only != nil {
		consumer = m.only.Name
	} else {
		var t *target
		var err error
		if t, listed, err = j.automatic(r, name, matches); t != nil || err != nil {
			return t, err
		}
	}
	consumer, model := h.pool.broker.Holder(consumer, name)
	if t := h.targets[consumer]; t != nil {
		return j.takes(name, t, model, ""), nil
	}
	if matches {
		return j.means(name, like), nil
	}
	if h.DefaultAny {
		return j.takes(name, m.none, "", m.none.first()), nil
	}
	return nil, m.missing(name, listed)
}

// means notes what a name of the configuration means.
func (j *job) means(name string, who routing.Found) *target {
	h, own := j.handler, ""
	if who.Model != "" && !h.app.modelNames[who.Consumer].Same(name, who.Model) {
		own = who.Model
	}
	return j.takes(name, h.targets[who.Consumer], who.Model, own)
}

// takes notes which model of t's consumer a name means, and the name itself where a server may get another. own is the name that
// the consumer's server knows the model by; empty: it knows the client's.
func (j *job) takes(name string, t *target, model, own string) *target {
	j.model = model
	if own != "" || t.candidates != nil || t.sent.byModel != nil {
		j.asked, j.askedOf, j.own = name, t.name, own
	}
	return t
}

// unknown is the error for a name that no consumer has.
func (m *byModel) unknown(name string) error { return m.missing(name, nil) }

// missing is the error for a name that no consumer has, nor the server whose list this is.
func (m *byModel) missing(name string, listed []string) error {
	message := fmt.Sprintf("there is no model %.512q", name)
	if m.only != nil {
		message += fmt.Sprintf(" at consumer %q", m.only.Name)
	}
	if near := m.names.Near(name, listed...); len(near) > 0 {
		for i := range near {
			near[i] = strconv.Quote(near[i])
		}
		message += ": did you mean " + strings.Join(near, ", ") + "?"
	} else {
		message += ":"
	}
	return &failure{status: http.StatusNotFound, code: string(scheduler.UnknownConsumer), message: message + " GET /v1/models lists all"}
}

func badRequest(err error) error {
	return &failure{status: http.StatusBadRequest, code: "bad_request", message: err.Error()}
}

// peek looks into a body that was read ahead, and takes its metadata out.
func (j *job) peek(r *http.Request) (err error) {
	if j.read, err = j.body.Peek(r.Context(), r.Header, j.handler.plan); err != nil {
		return peekError(r, err)
	}
	j.facts = &j.read
	j.body.Rewind(r)
	return nil
}

func peekError(r *http.Request, err error) error {
	var bad *routing.BadBody
	if errors.As(err, &bad) {
		return badRequest(err)
	}
	return bodyError(r, err)
}

// liveness answers what health checks and clients ask first, where no server is known that could: the process lives, and the
// models that are loaded. It reports whether it did.
func (j *job) liveness(w http.ResponseWriter, r *http.Request) bool {
	h := j.handler
	if h.byModel.none != nil || r.Method != http.MethodGet && r.Method != http.MethodHead {
		return false
	}
	var err error
	switch strings.TrimRight(r.URL.Path, "/") {
	case "":
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(http.StatusOK)
		_, err = w.Write([]byte("The GPU broker is running.\n"))
	case "/health":
		err = j.answerOwn(w, r, []byte(`{"status":"ok"}`))
	case "/api/version":
		err = j.answerOwn(w, r, []byte(`{"version":"`+routing.OllamaVersion+`"}`))
	case "/api/ps":
		err = j.answerOwn(w, r, h.loadedModels())
	default:
		return false
	}
	_ = err // the client has left
	return true
}

// loadedModels lists the loaded models of the route in Ollama's form.
func (h *Handler) loadedModels() []byte {
	var loaded []routing.Listed
	status := h.pool.broker.Status()
	for _, c := range h.app.Consumers {
		for _, slot := range status.Consumers[c.Name].Slots {
			if h.targets[c.Name] == nil || slot.State != scheduler.Ready.String() || c.Cloud {
				continue
			}
			name := slot.Model
			if name == "" {
				name = c.Name
			}
			if c.IsUnlisted(slot.Model) {
				continue
			}
			loaded = append(loaded, routing.Listed{Name: name, Size: slot.Booking, Since: began})
		}
	}
	return routing.LoadedList(loaded)
}

func answerJSON(w http.ResponseWriter, body []byte) error {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(http.StatusOK)
	_, err := w.Write(body)
	return err
}
