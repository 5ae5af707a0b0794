package gpubroker

import (
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
)

// carried counts what a tunnel carries in one direction.
type carried struct {
	moved  *atomic.Int64 // nil: nothing is counted
	frames *frames       // of a WebSocket; nil: every byte is use
}

func (c carried) add(p []byte) {
	used := len(p)
	if c.frames != nil {
		used = c.frames.used(p)
	}
	if used > 0 && c.moved != nil {
		c.moved.Add(int64(used))
	}
}

// frames follows the frames of a WebSocket (RFC 6455, 5.2) in one direction. Servers ping, and browsers answer, though nobody uses it.
type frames struct {
	fromClient bool // such frames are masked

	mu      sync.Mutex // Caddy closes a tunnel with a frame of its own
	broken  bool       // these are no frames
	control bool       // the frame is a ping, a pong or a close
	at      int        // how many bytes of its header have come
	size    int        // how long its header is, once the second byte has told
	left    uint64     // how much of its payload is still to come
}

// used returns how many bytes of p belong to frames that are no control frames. Of what is no frame every byte counts.
func (f *frames) used(p []byte) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(p) > 0 && !f.broken {
		took := 1
		if f.at >= 2 && f.at == f.size {
			took = int(min(f.left, uint64(len(p))))
			f.left -= uint64(took)
		} else {
			f.header(p[0])
		}
		if !f.control || f.broken {
			n += took
		}
		p = p[took:]
		if f.at >= 2 && f.at == f.size && f.left == 0 {
			f.at, f.size = 0, 0
		}
	}
	return n + len(p)
}

// header takes the next byte of a header.
func (f *frames) header(c byte) {
	const mask = 4
	switch {
	case f.at == 0:
		opcode := c & 0xF
		f.control = opcode >= 8
		f.broken = opcode > 10 || opcode > 2 && opcode < 8 || f.control && c&0xF0 != 0x80 // control frames are whole, and no extension's
	case f.at == 1:
		f.left = uint64(c & 0x7F)
		f.broken = (c&0x80 != 0) != f.fromClient || f.control && f.left > 125
		f.size = 2
		switch f.left {
		case 126:
			f.size, f.left = 4, 0
		case 127:
			f.size, f.left = 10, 0
		}
		if f.fromClient {
			f.size += mask
		}
	case !f.fromClient || f.at < f.size-mask:
		f.left = f.left<<8 | uint64(c)
		f.broken = f.at == 2 && f.size >= 10 && c&0x80 != 0 // a length has 63 bits
	}
	f.at++
}

// isWebSocket reports whether a request opens a WebSocket over HTTP/2 or HTTP/3 (RFC 8441, RFC 9220): HTTP/2 tells it in a pseudo-header.
func isWebSocket(r *http.Request) bool {
	return r.Method == http.MethodConnect &&
		(strings.EqualFold(r.Proto, "websocket") || strings.EqualFold(r.Header.Get(":protocol"), "websocket"))
}
