package gpubroker

import (
	"errors"
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func init() { caddy.RegisterModule(Upstreams{}) }

// Upstreams is an upstream source for reverse_proxy: the server to which the
// handler `gpu_broker` before it has assigned the request.
type Upstreams struct{}

// CaddyModule returns the Caddy module information.
func (Upstreams) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.reverse_proxy.upstreams.gpu_broker", New: func() caddy.Module { return new(Upstreams) }}
}

// GetUpstreams returns the one upstream of the request.
func (Upstreams) GetUpstreams(r *http.Request) ([]*reverseproxy.Upstream, error) {
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	addr, _ := repl.GetString("http.gpu_broker.upstream")
	if addr == "" {
		return nil, errors.New("dynamic gpu_broker: no gpu_broker handler before this reverse_proxy has named an upstream: put gpu_broker NAME before it, and an upstream into its consumer")
	}
	return []*reverseproxy.Upstream{{Dial: addr}}, nil
}

// UnmarshalCaddyfile reads `dynamic gpu_broker`; it takes nothing.
func (Upstreams) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	for d.Next() {
		if d.NextArg() || d.NextBlock(d.Nesting()) {
			return d.Err("dynamic gpu_broker takes no settings")
		}
	}
	return nil
}

// Interface guards
var (
	_ reverseproxy.UpstreamSource = (*Upstreams)(nil)
	_ caddyfile.Unmarshaler       = (*Upstreams)(nil)
)
