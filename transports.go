package gpubroker

import (
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/intercept"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// httpTransports returns the HTTP transports of a site's reverse_proxy handlers. Caddy cleans up those that are
// configured, and not those that it makes for handlers without a transport: after a reload, their idle connections would
// stay open, two goroutines each, until they time out.
func httpTransports(app *caddyhttp.App) (out []*reverseproxy.HTTPTransport) {
	var walk func(routes caddyhttp.RouteList)
	handlers := func(list []caddyhttp.MiddlewareHandler) {
		for _, h := range list {
			switch h := h.(type) {
			case *caddyhttp.Subroute:
				walk(h.Routes)
				if h.Errors != nil {
					walk(h.Errors.Routes)
				}
			case *intercept.Intercept:
				for _, response := range h.HandleResponse {
					walk(response.Routes)
				}
			case *reverseproxy.Handler:
				if t, ok := h.Transport.(*reverseproxy.HTTPTransport); ok && t.Transport != nil {
					out = append(out, t)
				}
				for _, response := range h.HandleResponse {
					walk(response.Routes)
				}
			}
		}
	}
	walk = func(routes caddyhttp.RouteList) {
		for i := range routes {
			handlers(routes[i].Handlers)
		}
	}
	for _, s := range app.Servers {
		walk(s.Routes)
		if s.Errors != nil {
			walk(s.Errors.Routes)
		}
		for _, r := range s.NamedRoutes {
			if r != nil {
				handlers(r.Handlers)
			}
		}
	}
	return out
}

// closeIdle closes the idle connections of transports, and makes those in use close once they are idle.
func closeIdle(transports []*reverseproxy.HTTPTransport) {
	for _, t := range transports {
		t.Transport.CloseIdleConnections()
	}
}
