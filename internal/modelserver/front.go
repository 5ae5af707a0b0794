package modelserver

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"time"
)

// FrontHeader marks the requests of clients at a Front: its value is theirs. All others are the broker's own.
const FrontHeader = "X-Client"

// FrontKind is the header of a Front's answer that says what the request has reached.
const FrontKind = "X-Reached"

// FrontHalf begins the FrontHeader of requests whose body never comes whole.
const FrontHalf = "half-"

// Front stands before a pretending server and takes its clients' requests as the real server would: it matches their paths
// by the real one's rules against a table of its routes, and notes what they reach. What the broker itself asks is passed on.
type Front struct {
	server *Server
	routes []Route
	strict bool
	http   *http.Server
	addr   string
	pass   *httputil.ReverseProxy

	mu     sync.Mutex
	count  map[string]int
	faults []string
}

// maxFaults bounds what is kept of them.
const maxFaults = 20

// NewFront makes one that listens. strict: what computes while no model is loaded, or not the one that it names, is a fault. The caller must Close it.
func NewFront(s *Server, routes []Route, strict bool) (*Front, error) {
	target, err := url.Parse(s.URL())
	if err != nil {
		return nil, err
	}
	f := &Front{server: s, routes: routes, strict: strict, count: map[string]int{}}
	f.pass = &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	f.addr = listener.Addr().String()
	f.http = &http.Server{Handler: f, ReadHeaderTimeout: time.Minute}
	go func() { _ = f.http.Serve(listener) }() // it ends with Close
	return f, nil
}

// Addr is its host and port.
func (f *Front) Addr() string { return f.addr }

// Close ends it.
func (f *Front) Close() error { return f.http.Close() }

// Count is how many requests of clients have reached a kind of route; of kind "" those for which there is none.
func (f *Front) Count(kind string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count[kind]
}

// Faults are the requests of clients that should not have come.
func (f *Front) Faults() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.faults...)
}

// ServeHTTP takes a request as the real server would.
func (f *Front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get(FrontHeader) == "" {
		f.pass.ServeHTTP(w, r)
		return
	}
	kind := f.server.opts.Manner.Match(f.routes, r.Method, r.RequestURI, r.Header)
	ready := f.loaded()
	f.mu.Lock()
	f.count[kind]++
	switch {
	case kind == KindBlocked:
		f.fault("%s %s is blocked and was reached", r.Method, r.RequestURI)
	case kind == KindComputes && f.strict && len(ready) == 0:
		f.fault("%s %s computes, and no model is loaded", r.Method, r.RequestURI)
	case kind == KindComputes && strings.HasPrefix(r.Header.Get(FrontHeader), FrontHalf):
		f.fault("%s %s computes, and its body has not come whole", r.Method, r.RequestURI)
	}
	f.mu.Unlock()
	w.Header().Set(FrontKind, kind)
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	var named struct{ Model string }
	if kind == KindComputes && f.strict && json.Unmarshal(body, &named) == nil {
		if _, has := f.server.opts.Models[named.Model]; has && !ready[named.Model] {
			f.mu.Lock()
			f.fault("%s %s computes with %q, which is not loaded", r.Method, r.RequestURI, named.Model)
			f.mu.Unlock()
		}
	}
	if kind == "" {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"id": r.Header.Get(FrontHeader)})
}

// fault notes a fault. The caller holds mu.
func (f *Front) fault(format string, args ...any) {
	if len(f.faults) < maxFaults {
		f.faults = append(f.faults, fmt.Sprintf(format, args...))
	}
}

// loaded returns the names of the models that are loaded.
func (f *Front) loaded() map[string]bool {
	out := map[string]bool{}
	for _, m := range f.server.Report(false).Models {
		if m.State == loaded.String() {
			out[m.Name] = true
		}
	}
	return out
}
