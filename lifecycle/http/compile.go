package httplife

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/placeholders"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// plan is a checked configuration with its placeholders read. It does not
// change, so drivers share it.
type plan struct {
	health, residency, load, unload, busy *route
	catalog                               *route
	jobs                                  *route // loaded is its "done", values its ID
	modelNames                            lifecycle.Names
	elsewhere                             []string
	loadWaits                             bool
	model                                 string // of the server as a whole
	remember                              bool
	fullGPU                               bool
	secrets                               *redactor
	fingerprint                           string // of the placeholders' values
}

func (p *plan) empty() bool {
	return p.health == nil && p.residency == nil && p.load == nil && p.unload == nil && p.busy == nil && p.catalog == nil
}

// route is one request, ready to be sent.
type route struct {
	name    string // "load route POST /load": what errors call it; holds no secret
	method  string
	path    text
	header  http.Header
	body    text
	accept  []int // empty: 200 to 299
	timeout time.Duration
	reads   reads

	loaded, resident, busy, values *query // nil if not configured
	names, sizes, fulls, success   *query
	digests, loading               *query
	unit, sizeUnit, fullUnit       gpu.Bytes
	metrics                        []string
	unloadedOn                     []int
	forEach                        *route
	named                          bool // path or body has {model}
}

// reads says how much of an accepted answer is read.
type reads int

const (
	readStatus reads = iota // nothing: the status says all
	readJSON                // all of it, which must be small
	readToEnd               // to its end, since the work ends with it; only the beginning is kept
)

func (r *route) accepts(status int) bool {
	if len(r.accept) == 0 {
		return status >= 200 && status <= 299
	}
	return slices.Contains(r.accept, status)
}

func (r *route) wanted() string {
	if len(r.accept) == 0 {
		return "2xx"
	}
	words := make([]string, len(r.accept))
	for i, code := range r.accept {
		words[i] = strconv.Itoa(code)
	}
	return strings.Join(words, " or ")
}

// request makes the HTTP request; item stands for {item}.
func (r *route) request(upstream string, item any) (*http.Request, error) {
	if name, _ := item.(string); (name == "." || name == "..") && (r.path.has(modelItem) || r.path.has(listItem)) {
		return nil, fmt.Errorf("%s: %q can't stand in a path: it would mean a folder", r.name, name)
	}
	u, err := url.Parse("http://" + upstream + r.path.render(item))
	if err != nil {
		// url.Parse quotes what it was given, which may hold a secret.
		return nil, fmt.Errorf("%s: its path is not valid once its placeholders are replaced", r.name)
	}
	body := r.body.render(item)
	req, err := http.NewRequest(r.method, u.String(), strings.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("%s: the request can't be made: its method or path is not valid", r.name)
	}
	req.Header = r.header.Clone()
	if host := req.Header.Get("Host"); host != "" {
		req.Host = host
		req.Header.Del("Host")
	}
	return req, nil
}

// compiler collects faults and secrets while a configuration is read.
type compiler struct {
	faults []error
	shared http.Header
	secret secretSet
	values placeholders.Values
}

func (c *compiler) fault(format string, args ...any) {
	c.faults = append(c.faults, fmt.Errorf(format, args...))
}

func compile(l *Lifecycle) (*plan, error) {
	c := &compiler{values: placeholders.Values{}}
	c.shared = c.headers("header", l.Header)
	p := &plan{
		health:    c.route("health", l.Health, http.MethodGet),
		residency: c.route("residency", l.Residency, http.MethodGet),
		load:      c.route("load", l.Load, http.MethodPost),
		unload:    c.route("unload", l.Unload, http.MethodPost),
		busy:      c.route("busy", l.Busy, http.MethodGet),
		jobs:      c.jobs(l.Jobs),
		catalog:   c.route("catalog", l.Catalog, http.MethodGet),
		loadWaits: l.LoadWaits,
		model:     l.ModelName,
		remember:  l.Remember,
		fullGPU:   l.RequireFullGPU,
	}
	p.modelNames = lifecycle.Names{Fold: l.ModelFoldCase, Prefix: l.ModelPrefix, Tag: l.ModelTag}
	p.elsewhere = l.ModelElsewhere
	if l.ModelPrefix != "" && (!strings.HasSuffix(l.ModelPrefix, "/") || strings.HasPrefix(l.ModelPrefix, "/")) {
		c.fault("model_prefix %q must end with a slash, and not begin with one, as in registry.ollama.ai/library/", l.ModelPrefix)
	}
	if l.LoadWaits && l.Load == nil {
		c.fault("load_waits needs load: there is no route that could wait")
	}
	if l.Remember && (l.Load == nil || l.Unload == nil) {
		c.fault("remember needs load and unload: there is nothing to be remembered without")
	}
	if p.fullGPU && (p.load == nil || !p.health.tellsFull() && !p.residency.tellsFull()) {
		c.fault("require_full_gpu needs a load route, and a residency route with sizes_bytes and full_sizes_bytes: else a load can't be judged")
	}
	if len(c.faults) > 0 {
		return nil, errors.Join(c.faults...)
	}
	p.secrets = c.secret.redactor()
	p.fingerprint = c.values.Fingerprint()
	return p, nil
}

func (c *compiler) route(kind string, in *Route, defaultMethod string) *route {
	if in == nil {
		return nil
	}
	r := &route{timeout: time.Duration(in.Timeout), accept: in.Accept, metrics: in.BusyMetrics, unloadedOn: in.UnloadedOn}
	if in.ForEach != nil && kind != "unload" {
		c.fault("%s: for_each is only for unload: remove it", kind)
	}
	withItem := in.ForEach != nil && kind == "unload"
	var names []string
	switch kind {
	case "load", "unload", "busy":
		names = append(names, modelItem)
	}
	if withItem {
		names = append(names, listItem)
	}
	c.address(kind, r, in.Method, defaultMethod, in.Path, in.Header, names...)
	c.body(kind, r, in.Body, names...)
	r.named = r.path.has(modelItem) || r.body.has(modelItem)
	for _, list := range []struct {
		field    string
		statuses []int
	}{{"accept", in.Accept}, {"unloaded_on", in.UnloadedOn}} {
		for _, code := range list.statuses {
			if code < 200 || code > 599 {
				c.fault("%s: %s %d is not a status from 200 to 599", kind, list.field, code)
			}
		}
	}
	if len(in.UnloadedOn) > 0 && kind != "health" && kind != "residency" {
		c.fault("%s: unloaded_on is only for health and residency: remove it", kind)
	}
	if in.Timeout < 0 {
		c.fault("%s: timeout %s is negative", kind, r.timeout)
	}
	c.queries(kind, r, in)
	if withItem {
		r.forEach = c.forEach(in.ForEach)
		if !r.path.has(listItem) && !r.body.has(listItem) && !r.named {
			c.fault("%s: for_each is given, but neither path nor body has {item}: write it where each value goes", kind)
		}
	}
	switch {
	case r.loaded != nil || r.resident != nil || r.busy != nil || r.names != nil || r.success != nil || len(r.metrics) > 0:
		r.reads = readJSON
	case kind == "load" || kind == "unload":
		r.reads = readToEnd
	}
	return r
}

func (c *compiler) forEach(in *ForEach) *route {
	const kind = "unload: for_each"
	r := &route{reads: readJSON}
	c.address(kind, r, in.Method, http.MethodGet, in.Path, in.Header)
	if in.Values == "" {
		c.fault("%s: values is missing: give the JSONPath of what is to be unloaded, such as $.models[*].name", kind)
	} else {
		r.values = c.query(kind, "values", in.Values)
	}
	return r
}

func (c *compiler) jobs(in *JobRoute) *route {
	if in == nil {
		return nil
	}
	r := &route{reads: readJSON}
	c.address("jobs", r, "", http.MethodGet, in.Path, in.Header, listItem)
	if !r.path.has(listItem) {
		c.fault("jobs: path has no {item}: write it where the job's ID goes")
	}
	r.values, r.loaded = c.query("jobs", "id", in.ID), c.query("jobs", "done", in.Done)
	return r
}

// address reads what makes up a request's first line and headers. items are the ones that path may hold.
func (c *compiler) address(kind string, r *route, method, defaultMethod, path string, header http.Header, items ...string) {
	r.method = method
	if method == "" {
		r.method = defaultMethod
	}
	if !slices.Contains(methods, r.method) {
		c.fault("%s: method %q is unknown: use one of %s", kind, r.method, strings.Join(methods, ", "))
	}
	bare, rawQuery, _ := strings.Cut(path, "?") // a query may hold a key: errors name the path only
	r.name = kind + " route " + r.method + " " + bare
	before := len(c.faults)
	r.path = c.text(kind+": path", path, pathText, items...)
	switch full := r.path.render("x"); {
	case len(c.faults) > before: // a placeholder is missing: that is said already
	case !strings.HasPrefix(full, "/"):
		c.fault("%s: path %q does not begin with /", kind, bare)
	case strings.Contains(full, "#"):
		c.fault("%s: path %q has a #, what follows is never sent: write %%23", kind, bare)
	case !validPath(full):
		c.fault("%s: path %q is not a valid URL path", kind, bare)
	}
	for _, pair := range strings.Split(rawQuery, "&") {
		_, value, _ := strings.Cut(pair, "=")
		if plain, err := url.QueryUnescape(value); err == nil {
			c.secret.addPart(plain)
		}
	}
	r.header = c.shared.Clone()
	if r.header == nil {
		r.header = http.Header{}
	}
	for name, values := range c.headers(kind+": header", header) {
		r.header[name] = values
	}
	if r.header.Get("User-Agent") == "" {
		r.header.Set("User-Agent", "caddy-gpu-broker")
	}
}

var methods = []string{
	http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions,
}

func validPath(path string) bool {
	u, err := url.Parse("http://upstream" + path)
	return err == nil && u.Host == "upstream" && !strings.ContainsAny(path, " \t\r\n")
}

func (c *compiler) body(kind string, r *route, body string, items ...string) {
	how := rawText
	switch {
	case isJSON(body):
		how = jsonText
		if r.header.Get("Content-Type") == "" {
			r.header.Set("Content-Type", "application/json")
		}
	case strings.HasPrefix(r.header.Get("Content-Type"), "application/json") && body != "":
		c.fault("%s: body is not JSON, but its Content-Type says so", kind)
	case strings.HasPrefix(r.header.Get("Content-Type"), "application/x-www-form-urlencoded"):
		how = formText
	}
	r.body = c.text(kind+": body", body, how, items...)
}

func (c *compiler) headers(where string, in http.Header) http.Header {
	if in == nil {
		return nil
	}
	out := http.Header{}
	for name, values := range in {
		if !httpguts.ValidHeaderFieldName(name) {
			c.fault("%s: %q is not a header name", where, name)
			continue
		}
		name = http.CanonicalHeaderKey(name)
		for _, value := range values {
			plain := c.text(where+" "+name, value, rawText).render(nil)
			if !httpguts.ValidHeaderFieldValue(plain) {
				c.fault("%s %s: its value holds a control character, such as a line end", where, name)
				continue
			}
			if !slices.Contains(openHeaders, name) {
				c.secret.addHeader(plain)
			}
			out[name] = append(out[name], plain)
		}
	}
	return out
}

// openHeaders are those whose values are no secrets.
var openHeaders = []string{"Content-Type", "Accept", "User-Agent", "Host"}

// queries reads what a route says about its answer.
func (c *compiler) queries(kind string, r *route, in *Route) {
	probe := kind == "health" || kind == "residency"
	const listing = "health, residency and catalog"
	for _, f := range []struct {
		field, expression string
		allowed           bool
		only              string
		target            **query
		unit              gpu.Bytes
	}{
		{"loaded", in.Loaded, probe, "health and residency", &r.loaded, 0},
		{"resident_mib", in.ResidentMiB, probe, "health and residency", &r.resident, gpu.MiB},
		{"resident_bytes", in.ResidentBytes, probe, "health and residency", &r.resident, 1},
		{"names", in.Names, probe || kind == "catalog", listing, &r.names, 0},
		{"digests", in.Digests, probe || kind == "catalog", listing, &r.digests, 0},
		{"loading", in.Loading, probe, "health and residency", &r.loading, 0},
		{"sizes_mib", in.SizesMiB, probe, "health and residency", &r.sizes, gpu.MiB},
		{"sizes_bytes", in.SizesBytes, probe, "health and residency", &r.sizes, 1},
		{"full_sizes_mib", in.FullSizesMiB, probe, "health and residency", &r.fulls, gpu.MiB},
		{"full_sizes_bytes", in.FullSizesBytes, probe, "health and residency", &r.fulls, 1},
		{"busy", in.Busy, kind == "busy", "busy", &r.busy, 0},
		{"success", in.Success, kind == "load" || kind == "unload", "load and unload", &r.success, 0},
	} {
		switch {
		case f.expression == "":
		case !f.allowed:
			c.fault("%s: %s is only for %s: remove it", kind, f.field, f.only)
		default:
			*f.target = c.query(kind, f.field, f.expression)
			switch {
			case f.unit == 0:
			case f.target == &r.sizes:
				r.sizeUnit = f.unit
			case f.target == &r.fulls:
				r.fullUnit = f.unit
			default:
				r.unit = f.unit
			}
		}
	}
	if probe && in.ResidentMiB != "" && in.ResidentBytes != "" {
		c.fault("%s: resident_mib and resident_bytes are both given: keep one", kind)
	}
	if in.SizesMiB != "" && in.SizesBytes != "" {
		c.fault("%s: sizes_mib and sizes_bytes are both given: keep one", kind)
	}
	if in.FullSizesMiB != "" && in.FullSizesBytes != "" {
		c.fault("%s: full_sizes_mib and full_sizes_bytes are both given: keep one", kind)
	}
	if r.fulls != nil && r.sizes == nil {
		c.fault("%s: full sizes without sizes: give sizes_bytes or sizes_mib as well, for what of each is on the GPU", kind)
	}
	if r.sizes != nil && r.names == nil {
		c.fault("%s: sizes without names: give the JSONPath to the names of these models as well", kind)
	}
	if (r.digests != nil || r.loading != nil) && r.names == nil {
		c.fault("%s: digests or loading without names: give the JSONPath to the names of the models as well", kind)
	}
	if kind == "catalog" && in.Names == "" {
		c.fault("catalog: names is missing: give the JSONPath to the names of all models, such as $.models[*].name")
	}
	if kind == "residency" && in.Loaded == "" && in.Names == "" {
		c.fault("residency: loaded is missing: give the JSONPath that tells whether the model is on the GPU, such as $.loaded, or names with that to the names of those that are")
	}
	switch both := len(in.BusyMetrics) > 0; {
	case both && kind != "busy":
		c.fault("%s: busy_metrics is only for busy: remove it", kind)
	case kind == "busy" && in.Busy == "" && !both:
		c.fault("busy: busy is missing: give the JSONPath that tells whether the server works, such as $.queue_remaining, or busy_metrics")
	case in.Busy != "" && both:
		c.fault("busy: busy and busy_metrics are both given: keep one")
	}
}

func (c *compiler) query(kind, field, expression string) *query {
	q, err := newQuery(expression)
	if err != nil {
		c.fault("%s: %s %q is not a JSONPath: %w", kind, field, expression, err)
	}
	return q
}
