package gpubroker

import (
	"encoding/json"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/intercept"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// siteJSON is the JSON of a provisioned site's routes. Caddy drops the JSON
// that it was made from once the modules are loaded, so it is made again from these: as far as it decides where requests go.
func siteJSON(app *caddyhttp.App) []byte {
	servers := object{}
	for name, s := range app.Servers {
		server := object{"routes": routesJSON(s.Routes)}
		if s.Errors != nil {
			server["errors"] = object{"routes": routesJSON(s.Errors.Routes)}
		}
		named := object{}
		for name, r := range s.NamedRoutes {
			if r != nil {
				named[name] = routeJSON(r)
			}
		}
		server["named_routes"] = named
		servers[name] = server
	}
	doc, err := json.Marshal(object{"apps": object{"http": object{"servers": servers}}})
	if err != nil {
		return nil // it has only what was JSON before
	}
	return doc
}

type object map[string]any

func routesJSON(list caddyhttp.RouteList) []object {
	out := make([]object, len(list))
	for i := range list {
		out[i] = routeJSON(&list[i])
	}
	return out
}

func routeJSON(r *caddyhttp.Route) object {
	var match []object
	for _, set := range r.MatcherSets {
		one := object{}
		for _, m := range set {
			if module, ok := m.(caddy.Module); ok {
				one[module.CaddyModule().ID.Name()] = again(m)
			}
		}
		match = append(match, one)
	}
	var handle []object
	for _, h := range r.Handlers {
		handle = append(handle, handlerJSON(h))
	}
	out := object{"group": r.Group, "terminal": r.Terminal, "handle": handle}
	if len(match) > 0 {
		out["match"] = match
	}
	return out
}

func handlerJSON(h caddyhttp.MiddlewareHandler) object {
	out := object{}
	_ = json.Unmarshal(again(h), &out) // what does not marshal has only its name
	if out == nil {
		out = object{}
	}
	if module, ok := h.(caddy.Module); ok {
		out["handler"] = module.CaddyModule().ID.Name()
	}
	switch h := h.(type) {
	case *caddyhttp.Subroute:
		out["routes"] = routesJSON(h.Routes)
		if h.Errors != nil {
			out["errors"] = object{"routes": routesJSON(h.Errors.Routes)}
		}
	case *reverseproxy.Handler:
		out["handle_response"] = responsesJSON(h.HandleResponse)
		if source := sourceJSON(h.DynamicUpstreams); source != nil {
			out["dynamic_upstreams"] = source
		}
	case *intercept.Intercept:
		out["handle_response"] = responsesJSON(h.HandleResponse)
	}
	return out
}

func responsesJSON(list []caddyhttp.ResponseHandler) []object {
	out := make([]object, len(list))
	for i, r := range list {
		out[i] = object{"routes": routesJSON(r.Routes)}
	}
	return out
}

func sourceJSON(source reverseproxy.UpstreamSource) object {
	module, ok := source.(caddy.Module)
	if !ok {
		return nil
	}
	out := object{}
	_ = json.Unmarshal(again(source), &out) // as above
	if out == nil {
		out = object{}
	}
	out["source"] = module.CaddyModule().ID.Name()
	return out
}

// again is the JSON of a module; null if it has none.
func again(v any) json.RawMessage {
	raw, err := json.Marshal(v)
	if err != nil {
		return json.RawMessage("null")
	}
	return raw
}
