package gpubroker

import (
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Bounds of preflight requests, and of what is remembered of their answers.
const (
	maxOrigins       = 16      // of one consumer
	maxOrigin        = 256     // bytes
	maxAllowHeaders  = 4 << 10 // bytes of Access-Control-Request-Headers that are echoed
	preflightSeconds = "60"    // for so long a browser keeps our answer: the server's own may differ
)

// isPreflight reports whether a browser asks whether a page may send a request.
func isPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Origin") != "" && r.Header.Get("Access-Control-Request-Method") != ""
}

// origins remembers which origins each server last allowed, so that the broker can answer preflights while a server does not
// run. It is safe for concurrent use.
type origins struct {
	mu  sync.Mutex
	all map[string][]string // by consumer, the latest last
}

// allowed remembers that a consumer's server has allowed an origin; "*" stands for all.
func (o *origins) allowed(consumer, origin string) {
	if origin == "" || origin == "null" || len(origin) > maxOrigin {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.all == nil {
		o.all = map[string][]string{}
	}
	list := slices.DeleteFunc(o.all[consumer], func(known string) bool { return known == origin })
	if len(list) >= maxOrigins {
		list = slices.Delete(list, 0, 1)
	}
	o.all[consumer] = append(list, strings.Clone(origin))
}

// forbidden forgets an origin that a consumer's server does not allow any more.
func (o *origins) forbidden(consumer, origin string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if list := o.all[consumer]; len(list) > 0 {
		o.all[consumer] = slices.DeleteFunc(list, func(known string) bool { return known == origin || known == "*" })
	}
}

// has reports whether a consumer's server has allowed an origin.
func (o *origins) has(consumer, origin string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Contains(o.all[consumer], origin) || slices.Contains(o.all[consumer], "*")
}

// preflight answers a preflight request for which no running server is known, and reports whether it did: only for allowed
// origins. What the site's own configuration says of origins stays as it is.
func (j *job) preflight(w http.ResponseWriter, r *http.Request) bool {
	if !isPreflight(r) || !j.allows(r) {
		return false
	}
	header := w.Header()
	if header.Get("Access-Control-Allow-Origin") == "" {
		header.Set("Access-Control-Allow-Origin", r.Header.Get("Origin"))
		header.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")
		if asked := r.Header.Get("Access-Control-Request-Headers"); asked != "" && len(asked) <= maxAllowHeaders {
			header.Set("Access-Control-Allow-Headers", asked)
		}
		header.Set("Access-Control-Max-Age", preflightSeconds)
		header.Add("Vary", "Origin, Access-Control-Request-Headers")
	}
	w.WriteHeader(http.StatusNoContent)
	return true
}

// answerOwn answers in the place of a server, so that pages of allowed origins can read it.
func (j *job) answerOwn(w http.ResponseWriter, r *http.Request, body []byte) error {
	if r.Header.Get("Origin") != "" && j.allows(r) {
		allowOrigin(w.Header(), r)
	}
	return answerJSON(w, body)
}

// allows reports whether a page of the request's origin may send requests, and so may start servers.
func (j *job) allows(r *http.Request) bool {
	origin := r.Header.Get("Origin")
	if configured := j.handler.app.CORSOrigins; len(configured) > 0 {
		return slices.ContainsFunc(configured, func(o string) bool { return o == "*" || strings.EqualFold(o, origin) })
	}
	u, err := url.Parse(origin)
	if err != nil || u.Host == "" {
		return false
	}
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	if strings.EqualFold(u.Hostname(), strings.Trim(host, "[]")) || isLocal(u.Hostname()) {
		return true
	}
	if j.target.name != "" {
		return j.handler.pool.origins.has(j.target.name, origin)
	}
	for name := range j.handler.targets { // any of them may be meant
		if j.handler.pool.origins.has(name, origin) {
			return true
		}
	}
	return false
}

// isLocal reports whether a host's name stands for the browser's own machine.
func isLocal(host string) bool {
	ip := net.ParseIP(host)
	return strings.EqualFold(host, "localhost") || strings.HasSuffix(strings.ToLower(host), ".localhost") || ip != nil && ip.IsLoopback()
}

// passPreflight passes a preflight request to a server that runs, and remembers which origin it allows.
func (j *job) passPreflight(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	heard := &originReader{ResponseWriterWrapper: caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, own: w.Header().Get("Access-Control-Allow-Origin")}
	err := next.ServeHTTP(heard, r)
	switch {
	case err != nil || heard.status == 0 || heard.status >= http.StatusInternalServerError || heard.own != "": // nothing was learnt
	case heard.allows == "*", heard.allows == r.Header.Get("Origin"):
		j.handler.pool.origins.allowed(j.target.name, heard.allows)
	default:
		j.handler.pool.origins.forbidden(j.target.name, r.Header.Get("Origin"))
	}
	return err
}

// originReader notes which origin an answer allows.
type originReader struct {
	caddyhttp.ResponseWriterWrapper
	own    string // what the site itself said
	allows string
	status int
}

// WriteHeader notes which origin the answer allows.
func (o *originReader) WriteHeader(status int) {
	if o.status == 0 && status >= 200 {
		o.status, o.allows = status, o.Header().Get("Access-Control-Allow-Origin")
	}
	o.ResponseWriterWrapper.WriteHeader(status)
}
