package gpubroker

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// unsent returns how many bytes of a TCP connection the client has not yet acknowledged; 0 if that can't be told. While a write
// waits for room, it shows whether a slow client takes anything at all: the system lets the write go on only once
// about a third of its buffer, which may be megabytes, is free.
func unsent(c net.Conn) (n int) {
	for {
		inner, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		c = inner.NetConn()
	}
	sc, ok := c.(syscall.Conn)
	if !ok {
		return 0
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }) // 0 after a failure
	return n
}
