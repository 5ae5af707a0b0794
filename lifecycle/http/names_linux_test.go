package httplife

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// resolve makes gpubox.test. a name of these addresses until the test ends. No other name is known.
func resolve(t *testing.T, addrs ...netip.Addr) {
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := server.ReadFrom(buf)
			if err != nil {
				return
			}
			if answer, err := nameAnswer(buf[:n], addrs); err == nil {
				_, _ = server.WriteTo(answer, from)
			}
		}
	}()
	was := net.DefaultResolver
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", server.LocalAddr().String())
	}}
	t.Cleanup(func() {
		net.DefaultResolver = was
		_ = server.Close()
	})
}

func nameAnswer(question []byte, addrs []netip.Addr) ([]byte, error) {
	var m dnsmessage.Message
	if err := m.Unpack(question); err != nil {
		return nil, err
	}
	q := m.Questions[0]
	m.Response, m.Authoritative, m.RecursionAvailable, m.Additionals = true, true, true, nil
	if q.Name.String() != "gpubox.test." {
		m.RCode = dnsmessage.RCodeNameError
		return m.Pack()
	}
	for _, a := range addrs {
		r := dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: dnsmessage.ClassINET, TTL: 60}}
		switch {
		case a.Is4() && q.Type == dnsmessage.TypeA:
			r.Body = &dnsmessage.AResource{A: a.As4()}
		case a.Is6() && q.Type == dnsmessage.TypeAAAA:
			r.Body = &dnsmessage.AAAAResource{AAAA: a.As16()}
		default:
			continue
		}
		m.Answers = append(m.Answers, r)
	}
	return m.Pack()
}

// hangs returns a port of 127.0.0.1 at which a server hangs: it takes no connection, and refuses none.
func hangs(t *testing.T) uint16 {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = syscall.Close(fd) })
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(t, syscall.Listen(fd, 0))
	name, err := syscall.Getsockname(fd)
	require.NoError(t, err)
	port := uint16(name.(*syscall.SockaddrInet4).Port)
	for range 8 { // nobody accepts them: the kernel takes few
		conn, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), 200*time.Millisecond)
		if err != nil {
			return port
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
	t.Fatal("the kernel takes all connections")
	return 0
}

func TestAServerThatHangsBehindAnAddressThatRefusesHasTimedOut(t *testing.T) {
	port := hangs(t)
	hanging := netip.MustParseAddr("127.0.0.1")
	for name, first := range map[string]string{"of the same kind": "127.0.0.2", "of the other": "::1"} {
		t.Run(name, func(t *testing.T) {
			resolve(t, netip.MustParseAddr(first), hanging)
			d := newDriver(&plan{secrets: new(secretSet).redactor()}, lifecycle.Deps{Upstream: "gpubox.test:" + strconv.Itoa(int(port))})
			for range 30 { // which of two timers is first is chance
				require.Equal(t, lifecycle.TimedOut, outcomeOf(d.connect(t.Context(), time.Now().Add(25*time.Millisecond))))
			}
		})
	}
}

// A name server's word is none of the server's.
func TestANameThatIsNotFoundIsUnreachableAndNotRefused(t *testing.T) {
	resolve(t)
	d := newDriver(&plan{secrets: new(secretSet).redactor()}, lifecycle.Deps{Upstream: "other.test:80"})
	err := d.connect(t.Context(), time.Now().Add(time.Minute))
	require.Equal(t, lifecycle.Unreachable, outcomeOf(err))
	require.ErrorIs(t, err, lifecycle.ErrUnreachable)
	require.NotErrorIs(t, err, lifecycle.ErrRefused)
}

// Of a container that was stopped the name is gone, too. When it runs again it has loaded, as a1111 does at its start.
func TestARememberedUnloadIsForgottenOnceItsServerIsGone(t *testing.T) {
	resolve(t)
	for upstream, want := range map[string]lifecycle.Outcome{"other.test:80": lifecycle.Unreachable, "127.0.0.1:1": lifecycle.Refused} {
		d := newDriver(&plan{remember: true, secrets: new(secretSet).redactor()},
			lifecycle.Deps{Upstream: upstream, Consumer: "a", Logger: zap.NewNop(), Limits: lifecycle.NewLimits(0, 0)})
		d.last.note()
		require.Equal(t, want, d.Probe(t.Context()).Outcome)
		require.False(t, d.last.unloaded(), want)
	}
}
