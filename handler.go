package gpubroker

import (
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
)

func init() {
	caddy.RegisterModule(Handler{})
	httpcaddyfile.RegisterHandlerDirective("gpu_broker", parseHandler)
	httpcaddyfile.RegisterDirectiveOrder("gpu_broker", httpcaddyfile.Before, "reverse_proxy")
}

// Handler gives each request its place on the GPU before it passes it on, and
// takes the place back when the answer is complete.
//
// It sets these placeholders:
//
// Placeholder | Description
// ------------|------------
// `{http.gpu_broker.consumer}` | the model server that serves the request
// `{http.gpu_broker.upstream}` | its address, `host:port`
// `{http.gpu_broker.wait_ms}` | how long the request waited, in milliseconds
// `{http.gpu_broker.reason}` | why it was refused: a code such as `queue_full`
type Handler struct {
	gpucaddyfile.Route

	pool         *pooled
	app          *App
	fixed        *target            // serves all requests; nil: byModel tells which
	byModel      *byModel           // finds the consumer, or the model, of each request; nil: there is nothing to be found
	sources      *routing.Sources   // where the requests of a consumer without models name one that is sent as another; nil: it isn't looked for
	targets      map[string]*target // every consumer
	plan         *routing.Plan      // what to look for in bodies; nil: nothing
	pinnedOnly   bool               // … which matters only while the route's model, or a fallback's, is pinned
	priorityText string             // with placeholders; empty: it is the target's
	maxBody      int64
	headers      bool
}

// CaddyModule returns the Caddy module information.
func (Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.gpu_broker", New: func() caddy.Module { return new(Handler) }}
}

// Provision finds the consumer and the broker.
func (h *Handler) Provision(ctx caddy.Context) error {
	app, err := ctx.App("gpu_broker")
	if err != nil {
		return fmt.Errorf("getting the gpu_broker app: %w", err)
	}
	h.app = app.(*App)
	h.pool = h.app.pool
	err = h.check()
	if err == nil {
		err = h.provisionTargets()
	}
	if err != nil {
		return h.titled(err)
	}
	h.app.keepConnections(ctx)
	tell(ctx.Logger(), false, h.routeDoubts())
	if h.maxBody = int64(h.MaxBody); h.maxBody == 0 {
		h.maxBody = int64(h.app.MaxBody)
	}
	h.headers = h.app.HeadersOn() && h.Headers != config.Off
	if h.Headers == config.On {
		h.headers = true
	}
	return nil
}

// provisionTargets makes what is known of consumers, and how a request finds its own.
func (h *Handler) provisionTargets() (err error) {
	h.targets = map[string]*target{}
	for _, c := range h.app.Consumers {
		if h.targets[c.Name], err = h.newTarget(c); err != nil {
			return err
		}
	}
	if _, ok := h.Priority.Number(); !ok {
		h.priorityText = string(h.Priority)
	}
	var fields []string
	h.fixed = h.targets[h.Consumer]
	if only := h.app.consumer(h.Consumer); only == nil || only.HasModels() {
		if h.byModel, err = h.newByModel(only); err != nil {
			return err
		}
		fields = h.byModel.sources.Fields()
	}
	if h.byModel == nil && h.renames() {
		if h.StreamBody {
			return errors.New("stream_body passes bodies on unread, but send_as, or as of a fallback, must read them: leave one of them out")
		}
		if h.sources, err = routing.NewSources(modelFrom(h.app.consumer(h.Consumer))); err != nil {
			return err
		}
		fields = h.sources.Fields()
	}
	changed := h.changedFields()
	if h.StreamBody && len(changed) > 0 {
		return errors.New("stream_body passes bodies on unread, but set, default and strip of a model must change them: leave one of them out")
	}
	pinned := h.pinnedFields()
	h.pinnedOnly = !h.ReadsBody() && len(fields)+len(changed) == 0
	if !h.pinnedOnly || len(pinned) > 0 && !h.StreamBody {
		h.plan, err = routing.NewPlan(fields, h.Metadata, h.TrustBody)
	}
	if err == nil && h.plan != nil {
		err = h.plan.Mark(append(changed, pinned...))
	}
	if err == nil && h.plan != nil && h.folds() {
		h.plan.Fold()
	}
	return err
}

// renames reports whether a server that gets the requests of a route with one consumer, which has no models, is to know the model by another name.
func (h *Handler) renames() bool {
	t := h.fixed
	if t.sent.renames() || len(t.sent.fallbackAs) > 0 {
		return true
	}
	for _, to := range t.candidates {
		if h.targets[to].sent.renames() {
			return true
		}
	}
	return false
}

// changedFields are the fields of JSON that models of the route change.
func (h *Handler) changedFields() (fields []string) {
	if h.byModel == nil {
		return nil
	}
	for name, t := range h.targets {
		if h.Consumer == "" || name == h.Consumer {
			fields = append(fields, t.sent.fields()...)
		}
	}
	slices.Sort(fields)
	return slices.Compact(fields)
}

// pinnedFields are the fields of JSON that get a value at pinned models of the route's consumers.
func (h *Handler) pinnedFields() (fields []string) {
	for name, t := range h.targets {
		if h.Consumer == "" || name == h.Consumer || slices.Contains(h.targets[h.Consumer].candidates, name) {
			for _, f := range t.sent.pinned {
				fields = append(fields, f.Name)
			}
		}
	}
	return fields
}

// folds reports whether a server that may get the route's requests takes fields of JSON in any case.
func (h *Handler) folds() bool {
	if h.fixed != nil {
		return h.fixed.foldKeys
	}
	for _, t := range h.targets {
		if t.foldKeys {
			return true
		}
	}
	return false
}

func (a *App) names() []string {
	var out []string
	for _, c := range a.Consumers {
		if c != nil {
			out = append(out, c.Name)
		}
	}
	return out
}

// ServeHTTP admits the request, calls next, and releases its place: when next
// has returned or panicked, which is after the last byte of the answer.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	t := h.fixed
	if t == nil {
		return h.serveByModel(w, r, next, repl)
	}
	repl.Map(t.placeholders)
	need := t.Needs(r)
	unload := t.mayUnload(r, need)
	if need.Unlisted() && !unload {
		need = h.unlistedAsks(t, r, need)
	}
	switch {
	case (need == config.NeedsGPU || need == config.NeedsTurn || unload) && h.byModel != nil:
		return h.serveByModel(w, r, next, repl)
	case need == config.NeedsNothing && !unload && !t.starts && !isPreflight(r) && !h.looksForName(t, r) && !h.asksForList(r):
		return h.blameSite(w, r, repl, t, next.ServeHTTP(w, r))
	}
	j := jobs.Get().(*job)
	defer j.done()
	j.handler, j.repl, j.target = h, repl, t
	j.ResponseWriter = w // a body that is read ahead may have to be cut
	if unload {
		return j.unlessUnload(w, r, next, need)
	}
	return j.byNeed(w, r, next, need)
}

// parseHandler reads the directive gpu_broker.
func parseHandler(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	route, err := gpucaddyfile.ParseRoute(h.Dispenser)
	if err != nil {
		return nil, err
	}
	return &Handler{Route: *route}, nil
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
	_ http.ResponseWriter         = (*job)(nil)
)
