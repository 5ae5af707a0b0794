package gpubroker

import (
	"context"
	"sync"
	"time"
)

// detached lets a request go on though its client has left: one inside which
// its server loads, so that the client's next try finds it loaded. It goes on
// until its answer begins, which is when the load is over.
type detached struct {
	cancel func()
	stop   func() bool // takes the watch for the client's leaving back
	limit  time.Duration

	mu     sync.Mutex
	begun  bool        // the answer has
	left   *time.Timer // the client has; ends the request when the load takes too long
	closed bool
}

// detach makes the context of such a request out of its client's. limit is how long it may go on without its client.
func detach(client context.Context, limit time.Duration) (context.Context, *detached) {
	d := &detached{limit: limit}
	ctx, cancel := context.WithCancel(context.WithoutCancel(client))
	d.cancel = cancel
	d.stop = context.AfterFunc(client, d.leave)
	return ctx, d
}

// leave is called when the client has left.
func (d *detached) leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
	case d.begun:
		d.cancel()
	default:
		d.left = time.AfterFunc(d.limit, d.cancel)
	}
}

// answered is called when the answer begins.
func (d *detached) answered() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.begun = true
	if d.left != nil {
		d.cancel()
	}
}

// end frees what this took.
func (d *detached) end() {
	d.stop()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	if d.left != nil {
		d.left.Stop()
	}
	d.cancel()
}
