package caddyfile

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Route is the configuration of the directive gpu_broker: what requests that
// come this way need.
type Route struct {
	// The consumer, a model server named in the global option, that serves the requests.
	Consumer string `json:"consumer,omitempty"`
	// Where requests say which model they want, by the name or an alias of a consumer; instead of one consumer for all. The
	// first place that holds a name counts.
	ModelFrom []ModelFrom `json:"model_from,omitempty"`
	// The consumer of requests that name no model. Default: none; such requests get 400.
	Default string `json:"default,omitempty"`
	// Whether requests that name an unknown model go to the default, too. Its server gets its send_as instead of the unknown name, else its
	// first alias, else the name as it came. Default: false; such requests get 404.
	DefaultAny bool `json:"default_any,omitempty"`
	// Requests that need no GPU, each as `METHOD /path` or `/path`, where `*` at the end of the path stands
	// for anything: the path as the server will see it. Beside the consumer's own.
	Bypass []string `json:"bypass,omitempty"`
	// Requests that need no GPU but count as use, in the same form. Beside the consumer's own.
	Touch []string `json:"touch,omitempty"`
	// How long a request may wait for its turn and its model, before it gets 504. Default: the consumer's.
	Budget caddy.Duration `json:"budget,omitempty"`
	// How long a request may run, once it is admitted; then it gets 504, or, where its answer has begun, its
	// connection is cut. 0 stands for no bound. Default: the consumer's.
	MaxRun *caddy.Duration `json:"max_run,omitempty"`
	// Pass request bodies on as they come, instead of reading them ahead; a slow upload then holds the GPU. Default: false.
	StreamBody bool `json:"stream_body,omitempty"`
	// The largest request body that is read ahead; above it 413. Default: the broker's.
	MaxBody gpu.Bytes `json:"max_body,omitempty"`
	// Whether responses carry `Server-Timing` and `X-GPU-Broker-Consumer`: `on` or `off`. Default: the broker's.
	Headers string `json:"headers,omitempty"`

	// The priority of the requests: a number, or text with placeholders. Lower is more urgent. Default: the consumer's,
	// also where a placeholder gives no number.
	Priority Priority `json:"priority,omitempty"`
	// The bounds of the priority, whoever chose it. Default: 0 to 1000000.
	PriorityRange *PriorityRange `json:"priority_range,omitempty"`
	// Who asks, as text with placeholders: clients of equal priority take turns. Default: the client's address, `{client_ip}`.
	ClientID string `json:"client_id,omitempty"`
	// Obey the fields x_priority, x_client_id, x_cooldown, x_keep_alive and x_stay_warm of JSON bodies. Without it they
	// are taken out of bodies that are read, and have no effect. Default: false.
	TrustBody bool `json:"trust_body,omitempty"`
	// The most that x_keep_alive and x_stay_warm can ask for; more counts as this. Default: 24h.
	KeepAliveMax caddy.Duration `json:"keep_alive_max,omitempty"`
	// The most that x_cooldown can ask for; more counts as this. Default: 24h.
	CooldownMax caddy.Duration `json:"cooldown_max,omitempty"`
	// Fields to take out of JSON bodies, beside those of the broker.
	Metadata []string `json:"metadata,omitempty"`
	// How long after these requests the model is not unloaded for others. Default: the consumer's.
	KeepAlive caddy.Duration `json:"keep_alive,omitempty"`
	// Consumers that may serve these requests instead. Default: the consumer's.
	Fallback []string `json:"fallback,omitempty"`
	// The model's name that a fallback gets with these requests, by the fallback's name. Default: the consumer's, where the fallbacks are.
	FallbackAs map[string]string `json:"fallback_as,omitempty"`
	// These requests never go to a fallback. Default: the consumer's.
	PinPrimary bool `json:"pin_primary,omitempty"`
	// How often a client that waits for an event stream gets a comment line, so that it and what stands between hold on. Default: 0, never.
	Heartbeat caddy.Duration `json:"heartbeat,omitempty"`

	// Where it stands, `file:line`: the Caddyfile's adapter writes it, so that errors can name the place. It has no effect.
	Source string `json:"source,omitempty"`
}

// ParseRoute reads the directive gpu_broker, which d stands before. Its error
// holds all faults, one a line.
func ParseRoute(d *caddyfile.Dispenser) (*Route, error) {
	r := &Route{}
	s := newSaid(nil)
	var faults []error
	for d.Next() {
		name := d.Val()
		if r.Source == "" {
			r.Source = source(d)
		}
		args := d.RemainingArgs()
		switch {
		case len(args) > 1:
			faults = append(faults, wants(d, name+" [CONSUMER] { ... }, with one consumer"))
		case len(args) == 1:
			r.Consumer = args[0]
			if err := config.CheckName(r.Consumer); err != nil {
				faults = append(faults, d.Errf("consumer %q: %w", r.Consumer, err))
			}
		}
		faults = append(faults, readBlock(d, name, routeWords(r, s)))
	}
	for _, fault := range r.contradictions() {
		faults = append(faults, fmt.Errorf("%w, at %s", fault, r.Source))
	}
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}
	return r, nil
}

func routeWords(r *Route, s *said) map[string]word {
	return map[string]word{
		"model_from": modelFrom(&r.ModelFrom),
		"default":    defaultConsumer(s, r),

		"bypass":      patterns(&r.Bypass),
		"touch":       patterns(&r.Touch),
		"budget":      single(s, &r.Budget, "5m", someDuration),
		"max_run":     optional(s, &r.MaxRun, "30m", duration),
		"max_body":    single(s, &r.MaxBody, "256MiB", someSize),
		"stream_body": flag(s, &r.StreamBody),
		"headers":     single(s, &r.Headers, config.Off, oneOf("headers setting", config.Switches)),

		"priority":       single(s, &r.Priority, "100, or a placeholder", priority),
		"priority_range": priorityRange(&r.PriorityRange),
		"client_id":      single(s, &r.ClientID, "{header.X-Client-ID}", anyText),
		"trust_body":     flag(s, &r.TrustBody),
		"metadata":       checkedList(&r.Metadata, "FIELD ...", checkMetadata),
		"keep_alive":     single(s, &r.KeepAlive, "5m", someDuration),
		"keep_alive_max": single(s, &r.KeepAliveMax, "10m", someDuration),
		"cooldown_max":   single(s, &r.CooldownMax, "1m", someDuration),
		"fallback":       fallback(&r.Fallback, &r.FallbackAs),
		"pin_primary":    flag(s, &r.PinPrimary),
		"heartbeat":      single(s, &r.Heartbeat, "15s", offOrDuration),
	}
}

// Doubts returns what its author can't have meant, though it can be used.
func (r *Route) Doubts() (out []error) {
	if err := gpu.CheckUnit("max_body", r.MaxBody, gpu.LeastBody); err != nil {
		out = append(out, err)
	}
	return out
}

// Check says what is wrong with a route that may have come as JSON; its error
// holds all faults. That the consumers exist is what CheckNames checks.
func (r *Route) Check() error {
	faults := r.contradictions()
	add := func(err error) {
		if err != nil {
			faults = append(faults, err)
		}
	}
	for _, m := range r.ModelFrom {
		if err := m.Check(); err != nil {
			add(fmt.Errorf("model_from: %w", err))
		}
	}
	for _, list := range []struct {
		name     string
		patterns []string
	}{{"bypass", r.Bypass}, {"touch", r.Touch}} {
		for _, text := range list.patterns {
			if _, err := config.ParseRoutePattern(text); err != nil {
				add(fmt.Errorf("%s: %w", list.name, err))
			}
		}
	}
	for _, d := range []struct {
		name  string
		value caddy.Duration
	}{{"budget", r.Budget}, {"max_run", r.maxRun()}, {"keep_alive", r.KeepAlive}, {"keep_alive_max", r.KeepAliveMax},
		{"cooldown_max", r.CooldownMax}, {"heartbeat", r.Heartbeat}} {
		if d.value < 0 {
			add(fmt.Errorf("%s is %s: it must not be negative", d.name, time.Duration(d.value)))
		}
	}
	if r.MaxBody < 0 {
		add(fmt.Errorf("max_body is %d bytes: it must not be negative", r.MaxBody))
	}
	if r.Headers != "" {
		add(known("headers setting", config.Switches)(r.Headers))
	}
	add(r.Priority.Check())
	if r.PriorityRange != nil {
		if err := r.PriorityRange.Check(); err != nil {
			add(fmt.Errorf("priority_range: %w", err))
		}
	}
	add(config.CheckFallbackAs(r.FallbackAs, r.Fallback))
	for _, field := range r.Metadata {
		add(checkMetadata(field))
	}
	return errors.Join(faults...)
}

// CheckNames reports whether the route names a consumer, or where requests name one, and whether all that it names are
// among consumers. Its error holds all faults.
func (r *Route) CheckNames(consumers []string) error {
	var faults []error
	if r.Consumer == "" && len(r.ModelFrom) == 0 {
		faults = append(faults, fmt.Errorf("name the consumer that serves these requests: gpu_broker NAME; there are %s; "+
			"or say where requests name a model: model_from", strings.Join(consumers, ", ")))
	}
	check := func(what, name string) {
		if name != "" && !slices.Contains(consumers, name) {
			faults = append(faults, config.Unknown(what, name, consumers))
		}
	}
	check("consumer", r.Consumer)
	check("consumer in default", r.Default)
	for _, name := range r.Fallback {
		check("consumer in fallback", name)
	}
	return errors.Join(faults...)
}

// ReadsBody reports whether the bodies of requests are looked into.
func (r *Route) ReadsBody() bool { return r.bodyReader() != "" }

// bodyReader is the word for which the bodies of requests are looked into, or "".
func (r *Route) bodyReader() string {
	switch {
	case slices.ContainsFunc(r.ModelFrom, func(m ModelFrom) bool { return m.Source == config.FromBody }):
		return "model_from body"
	case r.TrustBody:
		return "trust_body"
	case len(r.Metadata) > 0:
		return "metadata"
	default:
		return ""
	}
}

// contradictions are the words that don't go together.
func (r *Route) contradictions() (faults []error) {
	if r.Consumer != "" && len(r.ModelFrom) > 0 {
		faults = append(faults, fmt.Errorf("consumer %s and model_from: which of the two? leave the consumer out if requests name it, or model_from if it serves all of them", r.Consumer))
	}
	if r.Default != "" && len(r.ModelFrom) == 0 {
		faults = append(faults, fmt.Errorf("default %s is for requests that name no model, but there is no model_from that says where they name one", r.Default))
	}
	if r.DefaultAny && r.Default == "" {
		faults = append(faults, errors.New("default_any, but there is no default: name the consumer that serves unknown models"))
	}
	if r.Consumer != "" && slices.Contains(r.Fallback, r.Consumer) {
		faults = append(faults, fmt.Errorf("fallback names %s, the consumer itself: it is always asked first; leave that out", r.Consumer))
	}
	if r.PinPrimary && len(r.Fallback) > 0 {
		faults = append(faults, errors.New("pin_primary and fallback: which of the two? leave one of them out"))
	}
	if reader := r.bodyReader(); r.StreamBody && reader != "" {
		faults = append(faults, fmt.Errorf("stream_body passes bodies on unread, but %s must read them: leave one of them out", reader))
	}
	return faults
}

func (r *Route) maxRun() caddy.Duration {
	if r.MaxRun == nil {
		return 0
	}
	return *r.MaxRun
}

func checkMetadata(field string) error {
	if field == "" {
		return errors.New("metadata: the name of a field is empty")
	}
	return nil
}
