package caddyfile

import (
	"errors"
	"fmt"
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
			r.Source = fmt.Sprintf("%s:%d", d.File(), d.Line())
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
		faults = append(faults, readBlock(d, name, map[string]word{
			"bypass":      patterns(&r.Bypass),
			"touch":       patterns(&r.Touch),
			"budget":      single(s, &r.Budget, "5m", someDuration),
			"max_run":     optional(s, &r.MaxRun, "30m", duration),
			"max_body":    single(s, &r.MaxBody, "256MiB", someSize),
			"stream_body": flag(s, &r.StreamBody),
			"headers":     single(s, &r.Headers, config.Off, oneOf("headers setting", config.Switches)),
		}))
	}
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}
	return r, nil
}

// Check says what is wrong with a route that may have come as JSON; its error
// holds all faults. That the consumer exists is checked by who knows them.
func (r *Route) Check() error {
	var faults []error
	for _, list := range []struct {
		name     string
		patterns []string
	}{{"bypass", r.Bypass}, {"touch", r.Touch}} {
		for _, text := range list.patterns {
			if _, err := config.ParseRoutePattern(text); err != nil {
				faults = append(faults, fmt.Errorf("%s: %w", list.name, err))
			}
		}
	}
	if r.Budget < 0 {
		faults = append(faults, fmt.Errorf("budget is %s: it must not be negative", time.Duration(r.Budget)))
	}
	if r.MaxRun != nil && *r.MaxRun < 0 {
		faults = append(faults, fmt.Errorf("max_run is %s: it must not be negative", time.Duration(*r.MaxRun)))
	}
	if r.MaxBody < 0 {
		faults = append(faults, fmt.Errorf("max_body is %d bytes: it must not be negative", r.MaxBody))
	}
	if r.Headers != "" {
		if err := known("headers setting", config.Switches)(r.Headers); err != nil {
			faults = append(faults, err)
		}
	}
	return errors.Join(faults...)
}
