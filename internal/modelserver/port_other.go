//go:build !linux

package modelserver

import "net"

// StopListening closes a listener.
func StopListening(l net.Listener) error { return l.Close() }
