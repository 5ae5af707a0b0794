package modelserver

import (
	"net"
	"syscall"
)

// StopListening closes a listener, so that connections are refused from now on. Close alone leaves the port open for as long as a
// process that is being started holds a copy of it, and resets what connects meanwhile.
func StopListening(l net.Listener) error {
	if c, ok := l.(syscall.Conn); ok {
		if raw, err := c.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { _ = syscall.Shutdown(int(fd), syscall.SHUT_RDWR) }) // Close tells if it is closed already
		}
	}
	return l.Close()
}
