//go:build !linux

package process

import (
	"errors"
	"io"
	"syscall"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

var errLinux = errors.New("lifecycle process needs Linux: start the server by other means here, and use the lifecycle http")

func supported() error { return errLinux }

func newMeans(*plan, lifecycle.Deps) (starter, error) { return nil, errLinux }

func signalOf(string) (syscall.Signal, bool) { return syscall.SIGTERM, true }

func untouched(port int) error { return silent(port) }

func reserve(int) (io.Closer, error) { return nil, errLinux }

// Reap does nothing: nothing can have been started.
func Reap(string, *zap.Logger) (int, error) { return 0, nil }
