// Package httplife is the lifecycle `http`: it probes, loads and unloads a
// model server, and asks whether it is busy, by HTTP routes that the
// configuration names.
package httplife

import (
	"errors"
	"fmt"
	"net"
	"net/http"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

func init() { caddy.RegisterModule(new(Lifecycle)) }

// Lifecycle speaks to a model server by HTTP routes on its `upstream`. Every
// route may be left out: without `health` the server is healthy when its port
// takes a connection; without `load` it loads inside its first request;
// without `unload` it keeps its memory until it gives it back by itself.
//
// Header values, paths and bodies may hold placeholders such as `{env.TOKEN}`
// and `{file./run/secrets/token}`. They are read when the configuration is
// loaded. Their values, and those of headers, are never shown.
//
// Connections are direct (no proxy from the environment), redirects are not
// followed, and connections are not kept, since a kept one would block a
// server that serves one at a time.
type Lifecycle struct {
	// Headers that are sent with every route, such as `Authorization`. A route's own of the same name wins.
	Header http.Header `json:"header,omitempty"`
	// Asks whether the server is well. With `loaded` it also tells residency. Default: a TCP connection to `upstream`.
	Health *Route `json:"health,omitempty"`
	// Asks whether the model is on the GPU; needs `loaded` or `names`. Default: the health route, if that has one of them.
	Residency *Route `json:"residency,omitempty"`
	// Loads the model. The server is ready when the health route answers and, where residency can be told, says loaded.
	Load *Route `json:"load,omitempty"`
	// Gives the GPU memory back. Done when the residency probe says so; without one only the memory itself can tell.
	Unload *Route `json:"unload,omitempty"`
	// Asks whether the server works, whoever asked it to; needs `busy` or `busy_metrics`.
	Busy *Route `json:"busy,omitempty"`
	// Jobs that its answers name and that go on after them, for a server that does not list them.
	Jobs *JobRoute `json:"jobs,omitempty"`
	// Lists the models that the server could load, loaded or not; needs `names`. A model that the configuration does not name is looked up
	// there first, so that a wrong name unloads nothing. Default: none; then the server is asked to load whatever is asked for.
	Catalog *Route `json:"catalog,omitempty"`
	// The load route answers only once the model is loaded. A load that it has accepted, and after which the server twice
	// lists other models only, then fails at once; without it, not before the list and the free memory have stood still for 10 s.
	LoadWaits bool `json:"load_waits,omitempty"`
	// The server ignores case in models' names.
	ModelFoldCase bool `json:"model_fold_case,omitempty"`
	// What a model's name without a registry or namespace means to the server: with `registry.ollama.ai/library/`, `llama3` and
	// `registry.ollama.ai/library/llama3` are the same. It ends with a slash. Default: none.
	ModelPrefix string `json:"model_prefix,omitempty"`
	// Endings of names of models that the server may serve from elsewhere though its catalog does not list them, such as `-cloud`. Default: none.
	ModelElsewhere []string `json:"model_elsewhere,omitempty"`
	// What a model's name without a tag means to the server: with `latest`, `llama3` and `llama3:latest` are the same. Default: none.
	ModelTag string `json:"model_tag,omitempty"`
	// What `{model}` stands for where the server as a whole is meant: the name of its one model, for a server that must be told. Default: none; then
	// a route with `{model}` is for the consumer's `model` blocks alone.
	ModelName string `json:"model_name,omitempty"`
	// For a server that can't report whether it is loaded, starts loaded, and must not be asked twice to load or to
	// unload: what it was asked last is remembered, also over a restart of Caddy, but not of the machine that Caddy runs on.
	Remember bool `json:"remember,omitempty"`
	// A load that puts only a part of the model onto the GPU counts as failed: it is unloaded, more room is made if there is
	// any, and after 3 such loads its requests get 503 `load_failed`. Needs `load`, and `full_sizes_bytes` or `full_sizes_mib`.
	RequireFullGPU bool `json:"require_full_gpu,omitempty"`

	plan *plan // made by Provision
}

// JobRoute follows jobs that are named in answers, such as
// `202 {"id": "7"}`. Each is asked for until it is over; one that the server does not know any more is over, too.
type JobRoute struct {
	// JSONPath to the job's ID in the answer to the request.
	ID string `json:"id"`
	// Path at which the server tells of a job; `{item}` stands for its ID, escaped.
	Path string `json:"path"`
	// Headers of this request.
	Header http.Header `json:"header,omitempty"`
	// JSONPath that is true once the job is over, `$.status == "completed" || $.status == "failed"` for example.
	Done string `json:"done"`
}

// Route is one HTTP request to the server and how its answer is read.
//
// `loaded`, `resident_mib`, `resident_bytes`, `busy` and `values` are JSONPath
// expressions (github.com/PaesslerAG/jsonpath) such as `$.loaded`; operators
// may be used, as in `!$.is_sleeping`, `$.status == "loaded"` or
// `$.data[?(@.status.value == "loaded")]`. What they yield is true if it is
// true, a number above 0, an array or object that is not empty, or a text other
// than the empty one, `none`, `null`, `unloaded` and `false`. null is false.
// A key that is missing is neither: the server did not say. But a path with a
// wildcard (`$.models[*]`) yields an empty array where a key is missing, so
// write `$.models` for `loaded`.
//
// In the path and body of load, unload and busy `{model}` stands for the name of
// the model that is meant, of a consumer that has several: in a path it is
// escaped; in a JSON body it is the whole JSON value outside quotes, and escaped text inside.
type Route struct {
	// Default: POST for load and unload, GET for the others.
	Method string `json:"method,omitempty"`
	// Path on the server, with its query if it has one. Must begin with `/`.
	Path string `json:"path"`
	// Headers of this route.
	Header http.Header `json:"header,omitempty"`
	// The request body. If it is JSON, `Content-Type: application/json` is sent unless a header says otherwise.
	Body string `json:"body,omitempty"`
	// Statuses that mean success, 200 to 599. Default: any from 200 to 299.
	Accept []int `json:"accept,omitempty"`
	// Load and unload: JSONPath that must be true in the answer, `$.success` for example, else the call has failed.
	Success string `json:"success,omitempty"`
	// Health and residency: statuses, beside those accepted, that mean: nothing is loaded.
	UnloadedOn []int `json:"unloaded_on,omitempty"`
	// How long the answer may take. Default: `probe_timeout` for health, residency, catalog, busy and for_each, what is
	// left of `load_timeout` or `unload_timeout` for load and unload.
	Timeout caddy.Duration `json:"timeout,omitempty"`

	// Health and residency: is the model on the GPU?
	Loaded string `json:"loaded,omitempty"`
	// Health and residency: how much GPU memory it holds, in MiB; an array is summed.
	ResidentMiB string `json:"resident_mib,omitempty"`
	// Health and residency: how much GPU memory it holds, in bytes; an array is summed.
	ResidentBytes string `json:"resident_bytes,omitempty"`
	// Health and residency: the names of the models that are on the GPU, `$.models[*].name` for example. Catalog: of all that there are.
	Names string `json:"names,omitempty"`
	// Health and residency: how much GPU memory each of these models holds, in the same order: in bytes, or in MiB.
	SizesBytes string `json:"sizes_bytes,omitempty"`
	SizesMiB   string `json:"sizes_mib,omitempty"`
	// Health and residency: how large each of these models is, what is not on the GPU included, for `require_full_gpu`: in bytes, or in MiB.
	FullSizesBytes string `json:"full_sizes_bytes,omitempty"`
	FullSizesMiB   string `json:"full_sizes_mib,omitempty"`
	// Health, residency and catalog: the digest of each of these models, in the same order. Two names with one digest are one model.
	Digests string `json:"digests,omitempty"`
	// Health and residency: the names of the models that are still being loaded. Their load is not given up early.
	Loading string `json:"loading,omitempty"`
	// Busy: does it work?
	Busy string `json:"busy,omitempty"`
	// Busy: the answer is in Prometheus' text form, and the server works if any of these metrics is above 0.
	BusyMetrics []string `json:"busy_metrics,omitempty"`
	// Unload: first get this list, then call the route for each of its values, until the list is empty.
	ForEach *ForEach `json:"for_each,omitempty"`
}

// ForEach is a list that the server tells, such as its loaded models. The
// unload route is called once for each value, which stands for `{item}` in its
// path (escaped) and body: in a JSON body `{item}` outside quotes is the whole
// JSON value, inside quotes it is escaped text.
type ForEach struct {
	// Default: GET.
	Method string `json:"method,omitempty"`
	// Path on the server. Must begin with `/`.
	Path string `json:"path"`
	// Headers of this request.
	Header http.Header `json:"header,omitempty"`
	// JSONPath to the values, `$.models[*].name` for example.
	Values string `json:"values"`
}

// CaddyModule returns the Caddy module information.
func (*Lifecycle) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "gpu_broker.lifecycles.http",
		New: func() caddy.Module { return new(Lifecycle) },
	}
}

// Provision checks the configuration, reads the placeholders in it and reports
// all faults at once. It connects to nothing.
func (l *Lifecycle) Provision(caddy.Context) error {
	p, err := compile(l)
	if err != nil {
		return err
	}
	l.plan = p
	return nil
}

// Open makes the driver of one server. It starts nothing and connects to nothing.
func (l *Lifecycle) Open(deps lifecycle.Deps) (lifecycle.Driver, error) {
	if l.plan == nil {
		return nil, errors.New("lifecycle http is opened before it was provisioned")
	}
	if deps.Upstream == "" && !l.plan.empty() {
		return nil, fmt.Errorf("consumer %s: lifecycle http has routes but the consumer has no upstream: add `upstream host:port`", deps.Consumer)
	}
	if deps.Upstream != "" {
		if _, port, err := net.SplitHostPort(deps.Upstream); err != nil || port == "" {
			return nil, fmt.Errorf("consumer %s: upstream %q is not host:port", deps.Consumer, deps.Upstream)
		}
	}
	return newDriver(l.plan, deps.WithDefaults()), nil
}

// ModelNames returns how the server compares the names of models.
func (l *Lifecycle) ModelNames() lifecycle.Names { return l.plan.modelNames }

// Fingerprint differs where the values of the placeholders do.
func (l *Lifecycle) Fingerprint() string { return l.plan.fingerprint }

// String names the lifecycle and keeps its headers, which may be secret, to itself.
func (l *Lifecycle) String() string { return "lifecycle http" }

// GoString is String, so that no verb of fmt shows a secret.
func (l *Lifecycle) GoString() string { return l.String() }

// Interface guards.
var (
	_ caddy.Provisioner       = (*Lifecycle)(nil)
	_ lifecycle.Guest         = (*Lifecycle)(nil)
	_ lifecycle.Fingerprinter = (*Lifecycle)(nil)
	_ lifecycle.Namer         = (*Lifecycle)(nil)
)
