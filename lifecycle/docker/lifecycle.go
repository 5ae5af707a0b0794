// Package docker is the lifecycle `docker`: it starts and stops a model server
// that is a container, through the API of the Docker Engine (or Podman's).
package docker

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
	"github.com/gpu-broker/caddy-gpu-broker/internal/placeholders"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/supervise"
)

func init() { caddy.RegisterModule(new(Lifecycle)) }

// The defaults, and the longest grace.
const (
	defaultHost  = "unix:///var/run/docker.sock"
	defaultGrace = 10 * time.Second
	maxGrace     = time.Hour
)

// Lifecycle starts a model server that is a container when it is needed, and
// stops it to free its GPU memory. The container must exist: make it with
// `docker create` or `docker compose create`. One that runs already is taken over
// as it is; one that the broker has not started is left running when Caddy stops.
//
// The consumer needs an `upstream`, as a port that is published or the container's own address.
//
// `restart: always` and `unless-stopped` do not undo a stop by the broker, but
// a server that exits by itself comes back at once, and takes its memory
// without being asked: leave the restart policy out. Pausing is not offered, since a
// paused container keeps its GPU memory.
//
// Who may speak to Docker is as good as root. Caddy's user may be put into the
// group `docker`; better is a socket proxy that allows no more than `GET /_ping`,
// `GET /containers/NAME/json`, `GET /events` and `POST /containers/NAME/start` and `/stop`.
type Lifecycle struct {
	// The container's name or ID. Placeholders such as `{env.CONTAINER}` are replaced when the configuration is loaded.
	Container string `json:"container"`
	// Where Docker listens: `unix:///PATH` or `tcp://HOST:PORT`, the latter without TLS. Placeholders are replaced. Default: `unix:///var/run/docker.sock`.
	Host string `json:"host,omitempty"`
	// The signal that asks the server to end, `SIGINT` for example; needs Docker 23 or later. Default: the container's own, which is `SIGTERM` unless its image says otherwise.
	Signal string `json:"signal,omitempty"`
	// How long after that signal Docker kills the server, in whole seconds. Keep it below `unload_timeout`. Default: 10s.
	Grace *caddy.Duration `json:"grace,omitempty"`
	// How the server is spoken to while it runs. Default: `http` without routes, which waits until `upstream` takes a connection.
	Server json.RawMessage `json:"server,omitempty" caddy:"namespace=gpu_broker.lifecycles inline_key=protocol"`

	// By Provision.
	settings settings
	values   placeholders.Values
	routes   lifecycle.Guest
}

// settings are what the configuration comes to.
type settings struct {
	container, host, signal string
	grace                   time.Duration
}

// CaddyModule returns the Caddy module information.
func (*Lifecycle) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "gpu_broker.lifecycles.docker",
		New: func() caddy.Module { return new(Lifecycle) },
	}
}

// UnmarshalCaddyfile reads
//
//	docker CONTAINER {
//		host unix:///PATH|tcp://HOST:PORT
//		signal SIGNAL
//		grace DURATION
//	}
func (l *Lifecycle) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the module's name
	if !d.AllArgs(&l.Container) {
		return d.Err("docker takes the name of one container: write for example docker llama")
	}
	var faults []error
	seen := map[string]bool{}
	for d.NextBlock(0) {
		option := d.Val()
		if seen[option] {
			faults = append(faults, d.Errf("docker: %s is given twice", option))
		} else {
			faults = append(faults, l.option(d, option))
		}
		seen[option] = true
		d.RemainingArgs() // of one that is faulty
	}
	return errors.Join(faults...)
}

// option reads one option of the block.
func (l *Lifecycle) option(d *caddyfile.Dispenser, option string) error {
	var grace string
	field, known := map[string]*string{"host": &l.Host, "signal": &l.Signal, "grace": &grace}[option]
	switch {
	case option == "pause" || option == "unpause":
		return d.Errf("docker: %s is not offered: a paused container keeps its GPU memory. Leave it out: the container is stopped", option)
	case !known:
		return d.Errf("docker: unknown option %q: there are host, signal and grace", option)
	case !d.AllArgs(field):
		return d.Errf("docker: %s takes one value", option)
	case option == "grace":
		parsed, err := caddy.ParseDuration(grace)
		if err != nil {
			return d.Errf("docker: grace %q is no duration: write for example 10s", grace)
		}
		l.Grace = (*caddy.Duration)(&parsed)
	}
	return nil
}

// What Docker takes as a container's name, and as a signal.
var (
	containerName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]*$`)
	signalName    = regexp.MustCompile(`^(SIG)?[A-Z][A-Z0-9+-]*$|^[1-9][0-9]?$`)
)

// Provision checks the configuration and loads the routes. It connects to nothing.
func (l *Lifecycle) Provision(ctx caddy.Context) error {
	l.values = placeholders.Values{}
	s, err := l.settle()
	routes, routesErr := supervise.Routes(ctx, l, &l.Server)
	if err := errors.Join(err, faultlines.Prefix("lifecycle docker", routesErr)); err != nil {
		return err
	}
	l.settings, l.routes = s, routes
	return nil
}

// settle checks everything and tells all faults at once.
func (l *Lifecycle) settle() (settings, error) {
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("lifecycle docker: "+format, args...))
	}
	s := settings{signal: l.Signal, grace: defaultGrace}
	var err error
	if s.container, err = l.values.Read("lifecycle docker: container", l.Container); err != nil {
		faults = append(faults, err)
	} else if !containerName.MatchString(s.container) || len(s.container) > 255 {
		fault("container %q is no name of a container: want one such as llama, or an ID", l.Container)
	}
	host := cmp.Or(l.Host, defaultHost)
	if s.host, err = l.values.Read("lifecycle docker: host", host); err != nil {
		faults = append(faults, err)
	} else if !isHost(s.host) {
		fault("host %q: want unix:///PATH or tcp://HOST:PORT", host)
	}
	if s.signal != "" && !signalName.MatchString(s.signal) {
		fault("signal %q is no signal: want one such as SIGTERM", s.signal)
	}
	if l.Grace != nil {
		s.grace = time.Duration(*l.Grace)
	}
	if s.grace < 0 || s.grace > maxGrace || s.grace%time.Second != 0 {
		fault("grace %v: want whole seconds, 0s to %v", s.grace, maxGrace)
	}
	return s, errors.Join(faults...)
}

func isHost(host string) bool {
	if path, ok := strings.CutPrefix(host, "unix://"); ok {
		return filepath.IsAbs(path)
	}
	u, err := url.Parse(host)
	return err == nil && u.Scheme == "tcp" && u.Hostname() != "" && u.Port() != "" && u.User == nil
}

// Open makes the driver of one container. It starts nothing and connects to nothing.
func (l *Lifecycle) Open(deps lifecycle.Deps) (lifecycle.Driver, error) {
	if l.routes == nil {
		return nil, errors.New("lifecycle docker is opened before it was provisioned")
	}
	if deps.Upstream == "" {
		return nil, fmt.Errorf("consumer %s: lifecycle docker does not know where container %s listens: add `upstream host:port`", deps.Consumer, l.settings.container)
	}
	deps = deps.WithDefaults()
	return supervise.New(newMeans(l.settings, deps), l.routes, deps)
}

// Fingerprint differs where the values of the placeholders do.
func (l *Lifecycle) Fingerprint() string {
	return l.values.Fingerprint() + supervise.Fingerprint(l.routes)
}

// ModelNames returns how the server compares the names of models.
func (l *Lifecycle) ModelNames() lifecycle.Names { return supervise.ModelNames(l.routes) }

// Interface guards.
var (
	_ caddy.Provisioner       = (*Lifecycle)(nil)
	_ caddyfile.Unmarshaler   = (*Lifecycle)(nil)
	_ lifecycle.Guest         = (*Lifecycle)(nil)
	_ lifecycle.Fingerprinter = (*Lifecycle)(nil)
)
