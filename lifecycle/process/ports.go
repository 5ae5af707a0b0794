package process

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
)

// span is a range of ports, both ends included.
type span struct{ first, last int }

var defaultPorts = span{9100, 9199}

func (s span) String() string { return fmt.Sprintf("%d-%d", s.first, s.last) }

// parseSpan reads `9100-9199` or a single port.
func parseSpan(in string) (span, error) {
	a, b, ranged := strings.Cut(in, "-")
	if !ranged {
		b = a
	}
	first, errA := strconv.ParseUint(strings.TrimSpace(a), 10, 16)
	last, errB := strconv.ParseUint(strings.TrimSpace(b), 10, 16)
	if errA != nil || errB != nil || first == 0 || first > last {
		return span{}, fmt.Errorf("%q is not a range of ports: write it as %s", in, defaultPorts)
	}
	return span{int(first), int(last)}, nil
}

// portSet are the ports that servers of this Caddy were given and that are not free yet.
type portSet struct {
	mu   sync.Mutex
	held map[int]io.Closer // what keeps other Caddys of this host from them
}

var ports = portSet{held: map[int]io.Closer{}}

// take gives the first port of s that no Caddy holds and nobody listens at.
// Of these it prefers one without the remains of closed connections, as not
// every server can listen at such a port.
func (p *portSet) take(s span) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var last error
	for _, look := range []func(int) error{untouched, silent} {
		for port := s.first; port <= s.last; port++ {
			// First: even a short look at a port is in the way of a server that is about to listen there.
			hold, err := reserve(port)
			if err != nil {
				last = err
				continue
			}
			if last = look(port); last == nil {
				p.held[port] = hold
				return port, nil
			}
			_ = hold.Close()
		}
	}
	return 0, fmt.Errorf("no port of %s is free: widen `ports`, or end what listens there: %w", s, last)
}

// give gives a port back; 0 is none.
func (p *portSet) give(port int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if hold := p.held[port]; hold != nil {
		_ = hold.Close()
		delete(p.held, port)
	}
}

// silent fails where somebody listens at a port.
func silent(port int) error { return listen(net.ListenConfig{}, port) }

// listen listens at a port for a moment.
func listen(config net.ListenConfig, port int) error {
	l, err := config.Listen(context.Background(), "tcp4", net.JoinHostPort(localhost, strconv.Itoa(port)))
	if err == nil {
		_ = l.Close() // it has told what it had to
	}
	return err
}

const localhost = "127.0.0.1"
