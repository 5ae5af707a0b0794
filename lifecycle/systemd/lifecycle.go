// Package systemd is the lifecycle `systemd`: it starts and stops a model
// server that is a unit of systemd, over D-Bus.
package systemd

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
	"github.com/gpu-broker/caddy-gpu-broker/internal/placeholders"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/supervise"
)

func init() { caddy.RegisterModule(new(Lifecycle)) }

// Lifecycle starts a model server that is a service of systemd when it is
// needed, and stops it to free its GPU memory. A service that runs already is
// taken over as it is; one that the broker has not started is left running when Caddy stops.
//
// The consumer needs an `upstream`: a unit does not tell where its server listens.
//
// Write `Restart=no` or `Restart=on-failure` into the unit. `Restart=always` does not
// undo a stop by the broker either, but a server that exits by itself comes
// back at once, and takes its memory without being asked. Leave
// `KillMode=control-group`, systemd's default, so that a stop ends everything
// that the server has started. `TimeoutStopSec=` says after how long systemd
// kills a server that does not end; keep it below `unload_timeout`.
// `StartLimitIntervalSec=0` keeps systemd from refusing a server that is
// started often. What the server prints is in the journal: `journalctl -u UNIT`.
//
// Unless Caddy runs as root, polkit must allow it the action
// `org.freedesktop.systemd1.manage-units` for the unit, as
// `packaging/polkit/50-gpu-broker.rules` does; or use units of Caddy's own user, with `user`.
type Lifecycle struct {
	// The unit's name; `.service` may be left out. Placeholders such as `{env.UNIT}` are replaced when the configuration is loaded.
	Unit string `json:"unit"`
	// Whether the unit belongs to the systemd of the user that Caddy runs as (`systemctl --user`). That needs no
	// polkit rule, but a session that lingers: `loginctl enable-linger USER`. Default: false, the system's.
	User bool `json:"user,omitempty"`
	// How the server is spoken to while it runs. Default: `http` without routes, which waits until `upstream` takes a connection.
	Server json.RawMessage `json:"server,omitempty" caddy:"namespace=gpu_broker.lifecycles inline_key=protocol"`

	// By Provision.
	unit   string // with its suffix
	values placeholders.Values
	routes lifecycle.Guest
}

// CaddyModule returns the Caddy module information.
func (*Lifecycle) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "gpu_broker.lifecycles.systemd",
		New: func() caddy.Module { return new(Lifecycle) },
	}
}

// UnmarshalCaddyfile reads
//
//	systemd UNIT {
//		user
//	}
func (l *Lifecycle) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the module's name
	if !d.AllArgs(&l.Unit) {
		return d.Err("systemd takes the name of one unit: write for example systemd llama.service")
	}
	var faults []error
	for d.NextBlock(0) {
		switch option := d.Val(); {
		case option == "freeze":
			faults = append(faults, d.Err("systemd: freeze is not offered: a frozen server keeps its GPU memory. Leave it out: the unit is stopped"))
		case option != "user":
			faults = append(faults, d.Errf("systemd: unknown option %q: there is user", option))
		case d.NextArg():
			faults = append(faults, d.Err("systemd: user takes no value"))
		case l.User:
			faults = append(faults, d.Err("systemd: user is given twice"))
		default:
			l.User = true
		}
		d.RemainingArgs() // of one that is faulty
	}
	return errors.Join(faults...)
}

// unitName is what systemd takes as the name of a service.
var unitName = regexp.MustCompile(`^[A-Za-z0-9:_.\\-]+(@[A-Za-z0-9:_.\\-]+)?\.service$`)

// suffix is that of another kind of unit.
var suffix = regexp.MustCompile(`\.(target|socket|timer|mount|automount|swap|path|slice|scope|device)$`)

// Provision checks the configuration and loads the routes. It connects to nothing.
func (l *Lifecycle) Provision(ctx caddy.Context) error {
	l.values = placeholders.Values{}
	unit, err := l.service()
	routes, routesErr := supervise.Routes(ctx, l, &l.Server)
	if err := errors.Join(err, faultlines.Prefix("lifecycle systemd", routesErr)); err != nil {
		return err
	}
	l.unit, l.routes = unit, routes
	return nil
}

// service is the whole name of the unit.
func (l *Lifecycle) service() (string, error) {
	unit, err := l.values.Read("lifecycle systemd: unit", l.Unit)
	if err != nil {
		return "", err
	}
	if other := suffix.FindString(unit); other != "" {
		return "", fmt.Errorf("lifecycle systemd: unit %q is a %s: want a service, such as llama.service", l.Unit, other[1:])
	}
	if !strings.HasSuffix(unit, ".service") {
		unit += ".service"
	}
	if !unitName.MatchString(unit) || len(unit) > 255 {
		return "", fmt.Errorf("lifecycle systemd: unit %q is no name of a service: want one such as llama.service, or llama@7b.service of a template", l.Unit)
	}
	return unit, nil
}

// Open makes the driver of one unit. It starts nothing and connects to nothing.
func (l *Lifecycle) Open(deps lifecycle.Deps) (lifecycle.Driver, error) {
	if l.routes == nil {
		return nil, errors.New("lifecycle systemd is opened before it was provisioned")
	}
	if deps.Upstream == "" {
		return nil, fmt.Errorf("consumer %s: lifecycle systemd can't tell where unit %s listens: add `upstream host:port`", deps.Consumer, l.unit)
	}
	deps = deps.WithDefaults()
	return supervise.New(newMeans(ref{l.unit, l.User}, deps), l.routes, deps)
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
