package process

import (
	"errors"
	"fmt"
	"maps"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/internal/placeholders"
	httplife "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
)

// plan is a checked configuration with Caddy's placeholders read. It does not change, so drivers share it.
type plan struct {
	shown       string // the program as the configuration names it, without secrets
	command     []text
	env         map[string]text
	envClear    bool
	envPass     []string
	dir         text
	user        *account // nil: Caddy's own
	ports       span
	ownPorts    bool // the configuration names them
	usesPort    bool
	signal      syscall.Signal
	grace       time.Duration
	policy      policy
	redact      func(string) string
	longest     int    // of what is redacted, in bytes
	fingerprint string // of the placeholders' values
}

// account is whom the server is to run as.
type account struct {
	name, home string
	uid, gid   uint32
	groups     []uint32
}

// compiler collects faults and the values of placeholders while a configuration is read.
type compiler struct {
	faults []error
	values placeholders.Values // of Caddy's
}

func (c *compiler) fault(format string, args ...any) {
	c.faults = append(c.faults, fmt.Errorf(format, args...))
}

func compile(l *Lifecycle) (*plan, error) {
	c := &compiler{values: placeholders.Values{}}
	if err := supported(); err != nil {
		c.faults = append(c.faults, err)
	}
	p := &plan{env: map[string]text{}, grace: time.Duration(l.Grace), envClear: l.EnvClear, envPass: l.EnvPass}
	if len(l.EnvPass) > 0 && !l.EnvClear {
		c.fault("env_pass has no effect without env_clear: all of Caddy's environment is passed on. Write env_clear, or remove env_pass")
	}
	for _, name := range l.EnvPass {
		if stem, _ := strings.CutSuffix(name, "*"); name == "" || strings.ContainsAny(stem, "=* \x00") {
			c.fault("env_pass: %q is not the name of a variable, or the beginning of one with a * after it", name)
		}
	}
	for i, word := range l.Command {
		p.command = append(p.command, c.text(fmt.Sprintf("command: word %d", i+1), word))
	}
	if len(l.Command) == 0 || l.Command[0] == "" {
		c.fault("command is missing: give the program and its arguments")
	} else {
		p.shown = l.Command[0]
	}
	for _, name := range slices.Sorted(maps.Keys(l.Env)) {
		if name == "" || strings.ContainsAny(name, "=\x00") {
			c.fault("env: %q is not the name of a variable", name)
			continue
		}
		p.env[name] = c.text("env "+name, l.Env[name])
	}
	p.dir = c.text("dir", l.Dir)
	c.user(l, p)
	c.stopping(l, p)
	c.ports(l, p)
	c.restart(l, p)
	if len(c.faults) > 0 {
		return nil, errors.Join(c.faults...)
	}
	p.redact, p.longest = httplife.Redactor(slices.Collect(maps.Values(c.values)))
	p.fingerprint = c.values.Fingerprint()
	return p, nil
}

func (c *compiler) ports(l *Lifecycle, p *plan) {
	p.usesPort = p.dir.has(portItem)
	for _, t := range p.command {
		p.usesPort = p.usesPort || t.has(portItem)
	}
	for _, t := range p.env {
		p.usesPort = p.usesPort || t.has(portItem)
	}
	p.ports, p.ownPorts = defaultPorts, l.Ports != ""
	if !p.ownPorts {
		return
	}
	var err error
	if p.ports, err = parseSpan(l.Ports); err != nil {
		c.fault("ports: %w", err)
	} else if !p.usesPort {
		c.fault("ports is given, but neither command nor env uses {gpu_broker.port}: write it where the port goes, or remove ports")
	}
}

func (c *compiler) stopping(l *Lifecycle, p *plan) {
	if p.grace < 0 {
		c.fault("grace %s is negative", p.grace)
	}
	if p.grace == 0 {
		p.grace = defaultGrace
	}
	name := l.Signal
	if name == "" {
		name = defaultSignal
	}
	var ok bool
	if p.signal, ok = signalOf(name); !ok {
		c.fault("signal %q is unknown: use a name such as SIGTERM, SIGINT or SIGQUIT", name)
	}
}

func (c *compiler) restart(l *Lifecycle, p *plan) {
	switch l.Restart {
	case "", restartNever:
	case restartOnFailure:
		p.policy.onFailure = true
	default:
		c.fault("restart %q is unknown: use %s or %s", l.Restart, restartOnFailure, restartNever)
	}
	p.policy.most = defaultMaxRestarts
	switch {
	case l.Most == nil:
	case *l.Most < 0:
		c.fault("max_restarts %d is negative", *l.Most)
	case !p.policy.onFailure:
		c.fault("max_restarts needs `restart on_failure`: add it, or remove max_restarts")
	default:
		p.policy.most = *l.Most
	}
}

// user looks up whom the server is to run as.
func (c *compiler) user(l *Lifecycle, p *plan) {
	if l.User == "" {
		return
	}
	u, err := user.Lookup(l.User)
	var unknown user.UnknownUserError
	if errors.As(err, &unknown) {
		u, err = user.LookupId(l.User)
	}
	if err != nil {
		c.fault("user %q is not known on this host: create it, or correct its name", l.User)
		return
	}
	a := &account{name: u.Username, home: u.HomeDir}
	ids, err := u.GroupIds()
	if err != nil {
		c.fault("user %q: its groups can't be read: %w", l.User, err)
		return
	}
	for i, id := range append([]string{u.Uid, u.Gid}, ids...) {
		number, err := strconv.ParseUint(id, 10, 32)
		if err != nil {
			c.fault("user %q: %q is not the number of a user or group", l.User, id)
			return
		}
		switch i {
		case 0:
			a.uid = uint32(number)
		case 1:
			a.gid = uint32(number)
		default:
			a.groups = append(a.groups, uint32(number))
		}
	}
	p.user = a
}
