//go:build unix

package main

import (
	"fmt"
	"net"
	"strconv"
)

// ports gives each its wished port of host, or where something else listens
// there - a real ollama, say - any free one. An empty host means all addresses.
type ports struct{ taken map[int]bool }

func (p *ports) choose(host string, wished int) (int, error) {
	for _, port := range []int{wished, 0} {
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil {
			continue
		}
		port = l.Addr().(*net.TCPAddr).Port
		if err := l.Close(); err != nil {
			return 0, err
		}
		if p.taken[port] {
			continue
		}
		p.taken[port] = true
		return port, nil
	}
	return 0, fmt.Errorf("port %d is taken, and there is no other", wished)
}
