// Package supervise is what the lifecycles process, systemd and docker share: a
// model server that is started and stopped, and spoken to by routes in between.
package supervise

import (
	"context"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// Means starts and stops one server. Its methods are safe for concurrent use
// and return soon after ctx ends.
type Means interface {
	// Start starts the server unless it runs, and returns once it is started, though hardly ready: readiness is
	// for the routes to tell.
	Start(ctx context.Context, t lifecycle.Target) error
	// Stop ends the server and all that it has started, and returns once nothing of it is left. One that does not run is no error.
	Stop(ctx context.Context) error
	// Running reports whether it runs. Where systemd or Docker runs it, they are asked; the error is that they did not answer.
	Running(ctx context.Context) (bool, error)
	// Latest is the server of the latest Start, or the one that Running found. ended is closed when it has ended; nil:
	// none runs, or nobody could tell. upstream is where it listens, host:port; empty: where the consumer says.
	Latest() (ended <-chan struct{}, upstream string)
	// Why says how the server of the latest start ended, for people: "exit status 1: last line of its output".
	Why() string
	// Owns and State are as in lifecycle.Supervisor.
	Owns(pid int) bool
	State() lifecycle.State
	// Close stops what Start has started, and returns when it is gone; the server of a means that outlives Caddy
	// (systemd, Docker) is stopped only if this driver has started it.
	Close() error
}
