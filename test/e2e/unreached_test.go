package e2e

import (
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// full is an address that takes no connection and refuses none, as that of a server that hangs, until it is closed.
func full(t *testing.T) (address string, closed func()) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	open := true
	closed = func() {
		if open {
			require.NoError(t, syscall.Close(fd))
		}
		open = false
	}
	t.Cleanup(closed)
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(t, syscall.Listen(fd, 0))
	name, err := syscall.Getsockname(fd)
	require.NoError(t, err)
	address = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(name.(*syscall.SockaddrInet4).Port)).String()
	for range 8 { // nobody accepts them: the kernel takes few
		conn, err := net.DialTimeout("tcp", address, 200*time.Millisecond)
		if err != nil {
			return address, closed
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
	t.Fatal("the kernel takes all connections")
	return "", nil
}

func TestAServerThatTakesNoConnectionInTimeKeepsItsMemoryAndOneThatRefusesItDoesNot(t *testing.T) {
	t.Parallel()
	address, closed := full(t)
	a := plainModel("a", 9)
	a.Proxy = "reverse_proxy " + address + " {\ntransport http {\ndial_timeout 200ms\n}\n}"
	s := start(t, layout{Consumers: []consumer{a}})
	s.get("/a/synthesize").refused(t, 503, "unhealthy")
	require.Empty(t, s.decisions("gone"), "it may hang, loaded as it is")
	closed()
	s.get("/a/synthesize").refused(t, 503, "unhealthy")
	require.NotEmpty(t, s.decisions("gone"))
}
