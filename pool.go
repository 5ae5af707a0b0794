package gpubroker

import (
	"context"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
)

// pooled is what outlives every configuration of a process.
type pooled struct {
	broker  *broker.Broker
	buffers *routing.Buffers
	running runs
	origins origins
	watcher *watcher

	requests *requestLog
	grace    graceTimer
	lived    atomic.Bool // a configuration was in force: Caddy started it whole
}

var pool = caddy.NewUsagePool()

// poolKey is one constant: there is one broker in a process, whatever its configuration.
const poolKey = "gpu_broker"

// retiring is the broker that no configuration has any more, while it serves
// those that wait and unloads what is loaded. A configuration that comes meanwhile takes it up again.
var retiring struct {
	mu     sync.Mutex
	pooled *pooled // nil: there is none
	cancel context.CancelFunc
	done   chan struct{} // closed when it has ended, or was taken up again
}

// retireTime bounds that.
const retireTime = 10 * time.Minute

func newPooled() (caddy.Destructor, error) {
	retiring.mu.Lock()
	defer retiring.mu.Unlock()
	if p := retiring.pooled; p != nil {
		retiring.cancel()
		retiring.pooled = nil
		return p, nil
	}
	dir := filepath.Join(caddy.AppDataDir(), "gpu_broker", "bodies")
	p := &pooled{broker: broker.New(), buffers: routing.NewBuffers(dir), requests: newRequestLog(), watcher: newWatcher()}
	go p.watch()
	return p, nil
}

// Destruct is called when the last configuration that has the app goes.
func (p *pooled) Destruct() error {
	active.CompareAndSwap(p, nil)
	if caddy.Exiting() || !p.lived.Load() { // what never was in force must leave everything as it was
		p.close()
		return nil
	}
	retiring.mu.Lock()
	defer retiring.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), retireTime)
	retiring.pooled, retiring.cancel, retiring.done = p, cancel, make(chan struct{})
	go p.retire(ctx, retiring.done)
	return nil
}

// retire ends the broker once it has nothing left to do, unless it is taken up again.
func (p *pooled) retire(ctx context.Context, done chan struct{}) {
	defer close(done)
	p.broker.Retire(ctx)
	retiring.mu.Lock()
	defer retiring.mu.Unlock()
	if retiring.pooled == p && retiring.done == done { // not taken up again, nor that and retired anew
		retiring.cancel()
		retiring.pooled = nil
		p.close()
	}
}

func (p *pooled) close() {
	p.grace.stop()
	p.watcher.close()
	p.broker.Close()
	p.requests.close()
}

var _ caddy.Destructor = (*pooled)(nil)
