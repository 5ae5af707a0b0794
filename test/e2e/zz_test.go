package e2e

import (
	"io"
	"testing"
)

func TestZZ(t *testing.T) {
	s := start(t, layout{Consumers: []consumer{mvoice()}, Routes: "handle /r {\nrespond 413\n}"})
	conn := s.dial()
	_, err := io.WriteString(conn, "POST /r HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 20000\r\n\r\n")
	t.Log(err)
	b := make([]byte, 1000)
	n, err := conn.Read(b)
	t.Log(string(b[:n]), err)
}
