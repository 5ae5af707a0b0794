package gpubroker

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"path"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(StatusHandler{})
	httpcaddyfile.RegisterHandlerDirective("gpu_broker_status", parseStatus)
	httpcaddyfile.RegisterDirectiveOrder("gpu_broker_status", httpcaddyfile.Before, "respond")
}

// StatusHandler shows the broker. The last element of the path says what:
//
// Path | Answer
// -----|-------
// `…/status` | the GPUs, the model servers, the queue and the counters, as JSON
// `…/decisions` | the last 1,000 decisions with their reasons, oldest first; with `?follow=true` new ones as they are made, as an event stream
// `…/healthz` | whether the broker lives
// `…/` | the same, and which paths there are
//
// What no handler after it serves either gets 404. It only reads, and counts as no use of any server.
type StatusHandler struct {
	pool *pooled
}

// CaddyModule returns the Caddy module information.
func (StatusHandler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.gpu_broker_status", New: func() caddy.Module { return new(StatusHandler) }}
}

// Provision finds the broker.
func (h *StatusHandler) Provision(ctx caddy.Context) error {
	app, err := ctx.App("gpu_broker")
	if err != nil {
		return err
	}
	h.pool = app.(*App).pool
	return nil
}

// ServeHTTP answers what it knows and leaves the rest to the next handler. What
// that does not serve either, where Caddy would answer 200 with nothing, gets 404.
func (h *StatusHandler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	last := path.Base(r.URL.Path)
	if strings.HasSuffix(r.URL.Path, "/") {
		last = ""
	}
	doc := documents[last]
	if doc == nil {
		err := next.ServeHTTP(w, r)
		if unhandled, _ := caddyhttp.GetVar(r.Context(), "unhandled").(bool); err == nil && unhandled {
			return h.notFound(w, r)
		}
		return err
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		w.WriteHeader(http.StatusMethodNotAllowed)
		return nil
	}
	if last == "decisions" && r.Method == http.MethodGet && follows(r) {
		return follow(w, r, h.pool.broker)
	}
	return writeJSON(w, http.StatusOK, doc(h.pool))
}

// documents are what there is to see, by the last element of the path.
var documents = map[string]func(p *pooled) any{
	"status":    func(p *pooled) any { return p.broker.Status() },
	"decisions": func(p *pooled) any { return map[string]any{"decisions": p.broker.Decisions()} },
	"healthz":   alive,
	"":          func(*pooled) any { return map[string]any{"status": "ok", "paths": paths} },
}

func alive(*pooled) any { return map[string]string{"status": "ok"} }

// paths say what the documents are, for people who look around.
var paths = map[string]string{
	"status":                "the GPUs, the model servers, the queue and the counters",
	"decisions":             "the last 1,000 decisions with their reasons",
	"decisions?follow=true": "new decisions as they are made, as an event stream",
	"healthz":               "whether the broker lives",
}

// notFound answers a path at which there is nothing.
func (h *StatusHandler) notFound(w http.ResponseWriter, r *http.Request) error {
	f := &failure{status: http.StatusNotFound, code: "not_found",
		message: fmt.Sprintf("there is nothing at %s: the last element of the path is %s", r.URL.Path, strings.Join(slices.Sorted(maps.Keys(paths)), ", "))}
	metrics.errors.WithLabelValues("", f.code).Inc()
	if srv, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); ok && srv != nil && srv.Errors != nil && len(srv.Errors.Routes) > 0 {
		return caddyhttp.Error(f.status, f)
	}
	return writeJSON(w, f.status, errorDocument{errorBody{Message: f.message, Type: "gpu_broker_error", Code: f.code}})
}

func writeJSON(w http.ResponseWriter, status int, doc any) error {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	return json.NewEncoder(w).Encode(doc)
}

// UnmarshalCaddyfile reads the directive; it takes nothing.
func (h *StatusHandler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	for d.Next() {
		if d.NextArg() {
			return d.ArgErr()
		}
		for nesting := d.Nesting(); d.NextBlock(nesting); {
			return d.Errf("gpu_broker_status takes no settings: %q", d.Val())
		}
	}
	return nil
}

func parseStatus(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	s := new(StatusHandler)
	return s, s.UnmarshalCaddyfile(h.Dispenser)
}

// Interface guards
var (
	_ caddy.Provisioner           = (*StatusHandler)(nil)
	_ caddyhttp.MiddlewareHandler = (*StatusHandler)(nil)
	_ caddyfile.Unmarshaler       = (*StatusHandler)(nil)
)
