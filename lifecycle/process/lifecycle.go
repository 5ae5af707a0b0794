// Package process is the lifecycle `process`: it starts a model server as a
// child process of Caddy, and stops it with all that it has started.
package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/supervise"
)

func init() { caddy.RegisterModule(new(Lifecycle)) }

// Lifecycle starts a model server as a process of its own and stops it, the
// whole process group, to free its GPU memory. It is for Linux.
//
// In `command`, `env` and `dir` two kinds of placeholders are replaced; other
// braces stay as they are, and a backslash before a placeholder keeps it. Caddy's
// `{env.NAME}`, `{file./path}` and `{system.…}` are read when the configuration is loaded; their values are
// hidden in the server's output. The broker's are known at each start:
//
//   - `{gpu_broker.port}`: the port at which it is to listen, on 127.0.0.1;
//   - `{gpu_broker.gpus}`: the UUIDs of its GPUs, joined by commas; indices where there are no UUIDs;
//   - `{gpu_broker.gpu_indices}`: their indices, joined by commas;
//   - `{gpu_broker.gpu_count}`: how many they are; 0 if that is not known;
//   - `{gpu_broker.tensor_parallel}`: over how many GPUs the model is split; 0 if that is not known;
//   - `{gpu_broker.utilisation}`: which part of a GPU it may fill, from 0.01 to 0.99; 0.9 if that is not known.
//
// The server gets Caddy's environment, unless `env_clear` is set, that of `env`, and, where its GPUs are
// known, CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, unless `env` sets them.
// If Caddy dies, its servers die with it.
type Lifecycle struct {
	// The program and its arguments, each a text of its own; there is no shell. The program is looked for in Caddy's PATH.
	Command []string `json:"command"`
	// The ports from which `{gpu_broker.port}` is chosen, at each start the first that is free. Where the consumer has
	// an `upstream`, its port is taken instead. Default: `9100-9199`.
	Ports string `json:"ports,omitempty"`
	// Environment variables that are set beside Caddy's own.
	Env map[string]string `json:"env,omitempty"`
	// Start it without Caddy's environment, which may hold secrets, but for PATH, HOME, USER, LOGNAME, LANG, TZ and TMPDIR and what
	// `env_pass` names. Default: false.
	EnvClear bool `json:"env_clear,omitempty"`
	// With `env_clear`: variables of Caddy's that it gets all the same. A `*` at the end stands for anything: `OLLAMA_*`.
	EnvPass []string `json:"env_pass,omitempty"`
	// The folder in which it is started. Default: Caddy's.
	Dir string `json:"dir,omitempty"`
	// The user, by name or number, that it is to run as; Caddy must run as root then. HOME, USER and LOGNAME become that user's. Default: Caddy's.
	User string `json:"user,omitempty"`
	// The signal that asks it to stop, sent to its whole process group. Default: `SIGTERM`.
	Signal string `json:"signal,omitempty"`
	// How long it may take to stop before it is killed. Default: 10s.
	Grace caddy.Duration `json:"grace,omitempty"`
	// What is done when it ends by itself: `never`: the next request starts it; `on_failure`: if it failed (any exit
	// status but 0, or a signal), it is started again at once, and keeps its GPUs meanwhile. If it fails again within a
	// minute, that is done after 1, 2, 4 … 60 s, in which others may take its memory. Default: `never`.
	Restart string `json:"restart,omitempty"`
	// How often in a row it is started again; 0: never. Default: 3.
	Most *int `json:"max_restarts,omitempty"`
	// How it is probed, and loaded and unloaded while it runs: a lifecycle module, by default `http`. Without an
	// unload route it is stopped to free its memory.
	Server json.RawMessage `json:"server,omitempty" caddy:"namespace=gpu_broker.lifecycles inline_key=protocol"`

	plan   *plan // made by Provision
	routes lifecycle.Guest
}

const (
	restartNever     = "never"
	restartOnFailure = "on_failure"

	defaultSignal      = "SIGTERM"
	defaultGrace       = 10 * time.Second
	defaultMaxRestarts = 3
)

// CaddyModule returns the Caddy module information.
func (*Lifecycle) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "gpu_broker.lifecycles.process",
		New: func() caddy.Module { return new(Lifecycle) },
	}
}

// Provision checks the configuration, reads the placeholders in it and reports
// all faults at once. It starts nothing.
func (l *Lifecycle) Provision(ctx caddy.Context) error {
	p, err := compile(l)
	routes, routesErr := supervise.Routes(ctx, l, &l.Server)
	if err := errors.Join(err, routesErr); err != nil {
		return err
	}
	l.plan, l.routes = p, routes
	return nil
}

// Open makes the driver of one server. It starts nothing.
func (l *Lifecycle) Open(deps lifecycle.Deps) (lifecycle.Driver, error) {
	if l.plan == nil {
		return nil, errors.New("lifecycle process is opened before it was provisioned")
	}
	m, err := newMeans(l.plan, deps)
	if err != nil {
		return nil, fmt.Errorf("consumer %s: %w", deps.Consumer, err)
	}
	s, err := supervise.New(m, l.routes, deps)
	if err != nil {
		return nil, err
	}
	return &driver{s, l.plan.policy, m}, nil
}

// driver is a supervised server that knows whether it is to be started again.
type driver struct {
	supervise.Driver
	policy
	process starter
}

// starter is the means that starts and stops a process.
type starter interface {
	supervise.Means
	// Failed reports whether the latest process has ended, by anything but an exit status of 0.
	Failed() bool
}

// Failed reports whether the latest process has ended, by anything but an exit status of 0.
func (d *driver) Failed() bool { return d.process.Failed() }

// policy is what is to be done when the server ends by itself.
type policy struct {
	onFailure bool
	most      int
}

// RestartOnFailure reports whether the server is to be started again if it failed.
func (p policy) RestartOnFailure() bool { return p.onFailure }

// MaxRestarts is how often in a row it is started again.
func (p policy) MaxRestarts() int { return p.most }

// Fingerprint differs where the values of the placeholders do.
func (l *Lifecycle) Fingerprint() string {
	return l.plan.fingerprint + supervise.Fingerprint(l.routes)
}

// ModelNames returns how the server compares the names of models.
func (l *Lifecycle) ModelNames() lifecycle.Names { return supervise.ModelNames(l.routes) }

// String names the lifecycle and keeps its command, which may hold secrets, to itself.
func (l *Lifecycle) String() string { return "lifecycle process" }

// GoString is String, so that no verb of fmt shows a secret.
func (l *Lifecycle) GoString() string { return l.String() }

// Interface guards.
var (
	_ caddy.Provisioner       = (*Lifecycle)(nil)
	_ lifecycle.Cataloguer    = (*driver)(nil)
	_ lifecycle.Guest         = (*Lifecycle)(nil)
	_ lifecycle.Fingerprinter = (*Lifecycle)(nil)
	_ lifecycle.Restarter     = (*driver)(nil)
)
