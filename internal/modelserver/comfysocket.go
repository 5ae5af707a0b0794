package modelserver

import (
	"context"
	"net/http"
	"time"

	"github.com/coder/websocket"
	"github.com/google/uuid"
)

// socket is one open websocket of a ComfyUI.
type socket struct {
	out    chan []byte // to be written; bounded: a reader that is too slow is dropped
	cancel context.CancelFunc
}

// socket serves /ws?clientId=ID. A client id that is used again displaces the
// socket that had it.
func (c *comfy) socket(w http.ResponseWriter, r *http.Request) {
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
	if err != nil {
		return // Accept has answered
	}
	id := r.URL.Query().Get("clientId")
	if id == "" {
		id = uuid.NewString()
	}
	ctx, cancel := context.WithCancel(c.l.ctx)
	defer cancel()
	me := &socket{out: make(chan []byte, 256), cancel: cancel}
	s := c.l.s
	s.mu.Lock()
	if old := c.sockets[id]; old != nil {
		old.cancel()
	}
	c.sockets[id] = me
	s.stats.Sockets++
	me.out <- statusMessage(c.remaining(), id)
	s.notify()
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if c.sockets[id] == me {
			delete(c.sockets, id)
		}
		s.stats.Sockets--
		s.notify()
	}()
	defer func() { _ = conn.CloseNow() }() // it may be closed already

	// CloseRead answers pings and ends the context when the client closes.
	ctx = conn.CloseRead(ctx)
	for {
		select {
		case text := <-me.out:
			if err := write(ctx, conn, text); err != nil {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

func write(ctx context.Context, conn *websocket.Conn, text []byte) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return conn.Write(ctx, websocket.MessageText, text)
}

// send is for holders of mu.
func (me *socket) send(text []byte) {
	select {
	case me.out <- text:
	default:
		me.cancel()
	}
}

// broadcast is for holders of mu.
func (c *comfy) broadcast(text []byte) {
	for _, socket := range c.sockets {
		socket.send(text)
	}
}

// tell sends to the socket of the client that submitted p.
func (c *comfy) tell(p *queued, kind string, data map[string]any) {
	if data == nil {
		data = map[string]any{}
	}
	data["prompt_id"] = p.id
	c.l.s.mu.Lock()
	defer c.l.s.mu.Unlock()
	if socket := c.sockets[p.client]; socket != nil {
		socket.send(event(kind, data))
	}
}
