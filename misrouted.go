package gpubroker

import (
	"fmt"
	"net/http"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

// misrouted returns the error for a request whose reverse_proxy went to an address without a host, which is what a misspelt
// placeholder leaves. It is no evidence about the consumer's server. It returns nil for every other address: a site may
// name upstreams of its own.
func misrouted(repl *caddy.Replacer, consumer, upstream string) *failure {
	dialled, ok := repl.GetString("http.reverse_proxy.upstream.hostport")
	host, _, _ := strings.Cut(dialled, ":")
	if !ok || host != "" || dialled == upstream {
		return nil
	}
	return &failure{status: http.StatusInternalServerError, code: "misrouted", message: fmt.Sprintf(
		"this site's configuration is wrong: the reverse_proxy after gpu_broker went to %q, which names no host, and not to %s, where consumer %q is. Its upstream must be {http.gpu_broker.upstream}, spelt so; caddy gpu-broker doctor finds the line",
		dialled, upstream, consumer)}
}

// blameSite is err, of a request that needs no GPU, unless it is the site's configuration that is wrong: then it answers so.
func (h *Handler) blameSite(w http.ResponseWriter, r *http.Request, repl *caddy.Replacer, t *target, err error) error {
	if !refusedDial(err) {
		return err
	}
	f := misrouted(repl, t.name, t.upstream)
	if f == nil {
		return err
	}
	j := jobs.Get().(*job)
	defer j.done()
	j.handler, j.repl, j.target = h, repl, t
	return j.fail(w, r, f)
}

// misrouted is the error for an admitted request that went elsewhere; nil: it did not.
func (j *job) misrouted() error {
	if f := misrouted(j.repl, j.target.name, j.lease.Upstream); f != nil {
		return f
	}
	return nil
}

// admittedWithin is the request that was admitted already, if a request came to another gpu_broker since; nil: it was not.
func admittedWithin(w http.ResponseWriter) *job {
	for {
		if outer, ok := w.(*job); ok && outer.leased {
			return outer
		}
		around, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return nil
		}
		w = around.Unwrap()
	}
}

// nested is the error for a request that holds a place and would wait for another: for itself, as often as not.
func nested(outer, inner string) error {
	return &failure{status: http.StatusInternalServerError, code: "misrouted", message: fmt.Sprintf(
		"this site's configuration is wrong: a request came to two gpu_broker directives, one after the other, for consumers %q and %q: while it held the GPU it would wait for itself. Leave one of them out, or give them matchers that exclude each other",
		outer, inner)}
}
