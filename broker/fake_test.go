package broker

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pass lets time go by on the clock of a synctest bubble, which waits for nothing
// but that everything else in the bubble has come to rest.
func pass(d time.Duration) { time.Sleep(d) } // of the bubble's clock: no time is spent

// fakeGPU is a GPU whose memory the fake servers move.
type fakeGPU struct {
	mu    sync.Mutex
	total gpu.Bytes
	used  gpu.Bytes
	lost  error // telemetry
	looks int
	more  int               // further GPUs, which nobody's memory is on
	tells func(*gpu.Device) // what it tells beside its memory
}

func (g *fakeGPU) move(by gpu.Bytes) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.used += by
}

// fail makes its looks fail; nil ends that.
func (g *fakeGPU) fail(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.lost = err
}

// looked is how often anybody looked at it.
func (g *fakeGPU) looked() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.looks
}

func (g *fakeGPU) Open(context.Context, *zap.Logger) (gpu.Sampler, error) { return g, nil }
func (g *fakeGPU) Name() string                                           { return "fake" }
func (g *fakeGPU) Why() string                                            { return "a test" }
func (g *fakeGPU) MinInterval() time.Duration                             { return 0 }
func (g *fakeGPU) Close() error                                           { return nil }
func (g *fakeGPU) Sample(context.Context, gpu.Detail) (gpu.Sample, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.looks++
	if g.lost != nil {
		return gpu.Sample{}, g.lost
	}
	d := gpu.Device{UUID: "GPU-1", Health: gpu.Healthy, Total: g.total, Free: g.total - g.used, MemoryKnown: true, Utilisation: -1, Temperature: -1, Power: -1}
	if g.tells != nil {
		g.tells(&d)
	}
	devices := []gpu.Device{d}
	for i := range g.more {
		devices = append(devices, gpu.Device{Index: i + 1, UUID: fmt.Sprintf("GPU-%d", i+2), Health: gpu.Healthy, Total: g.total, Free: g.total, MemoryKnown: true, Utilisation: -1, Temperature: -1, Power: -1})
	}
	return gpu.Sample{At: time.Now(), Devices: devices}, nil
}

// fakeServer is a model server that takes and gives memory of a fakeGPU.
type fakeServer struct {
	gpu    *fakeGPU
	size   gpu.Bytes
	traits lifecycle.Traits
	asked  time.Duration // how long its busy route takes
	load   time.Duration
	unload time.Duration
	late   time.Duration // how long after an unload its memory comes back

	mu      sync.Mutex
	loaded  bool
	loads   int
	unloads int
	probes  int
	opened  int
	closed  int
	busy    bool
	fail    error // of the next load
	refuse  error // of every unload

	running   int // jobs
	unloading bool
	cut       int // jobs under which it was unloaded
}

// begin is a job that comes to the server, and end the end of it.
func (f *fakeServer) begin() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running++
	if f.unloading || !f.loaded {
		f.cut++
	}
}

func (f *fakeServer) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running--
}

// setUnloading is the begin or the end of an unload call.
func (f *fakeServer) setUnloading(yes bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unloading = yes
	f.cut += f.running
}

func (f *fakeServer) Open(lifecycle.Deps) (lifecycle.Driver, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.opened++
	return f, nil
}
func (f *fakeServer) Traits() lifecycle.Traits { return f.traits }
func (f *fakeServer) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed++
	return nil
}

func (f *fakeServer) Probe(context.Context) lifecycle.Report {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.probes++
	return lifecycle.Report{Loaded: lifecycle.TriOf(f.loaded), Resident: -1}
}

func (f *fakeServer) Load(ctx context.Context, _ lifecycle.Target) error {
	if !sleep(ctx, f.load) {
		return ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.loads++
	if err := f.fail; err != nil {
		f.fail = nil
		return err
	}
	f.loaded = true
	f.gpu.move(f.size)
	return nil
}

func (f *fakeServer) Unload(ctx context.Context, _ lifecycle.Target) (bool, error) {
	f.setUnloading(true)
	defer f.setUnloading(false)
	if !sleep(ctx, f.unload) {
		return false, ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unloads++
	if f.refuse != nil {
		return false, f.refuse
	}
	f.loaded = false
	if f.late > 0 {
		time.AfterFunc(f.late, func() { f.gpu.move(-f.size) })
		return true, nil
	}
	f.gpu.move(-f.size)
	return true, nil
}

func (f *fakeServer) Busy(ctx context.Context, _ lifecycle.Target) (bool, error) {
	if !sleep(ctx, f.asked) {
		return false, ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.busy, nil
}

// count reads a counter of the server.
func (f *fakeServer) count(n *int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return *n
}

var everything = lifecycle.Traits{Load: true, Unload: true, Health: true, Residency: true}

// world is a broker with fake servers on one fake GPU.
type world struct {
	*Broker
	gpu     *fakeGPU
	servers map[string]*fakeServer
	gen     *Generation
}

func newServer(g *fakeGPU, size gpu.Bytes) *fakeServer {
	return &fakeServer{gpu: g, size: size, traits: everything, load: time.Second, unload: time.Second}
}

// generation makes a configuration of consumers with servers of the given sizes.
func (w *world) generation(t testing.TB, edit func(*config.Broker), consumers ...*config.Consumer) *Generation {
	t.Helper()
	zero := 0.0
	cfg := &config.Broker{Hold: &zero, Consumers: consumers}
	if edit != nil {
		edit(cfg)
	}
	require.NoError(t, config.Resolve(cfg, nil))
	g := &Generation{Config: cfg, Sampler: w.gpu, SamplerKey: "fake", Lifecycles: map[string]lifecycle.Guest{}, Keys: map[string]string{}, Logger: zap.NewNop()}
	for _, c := range consumers {
		if w.servers[c.Name] == nil {
			w.servers[c.Name] = newServer(w.gpu, c.VRAM)
		}
		g.Lifecycles[c.Name], g.Keys[c.Name] = w.servers[c.Name], "fake"
	}
	return g
}

// newWorld starts a broker. Close it.
func newWorld(t testing.TB, edit func(*config.Broker), consumers ...*config.Consumer) *world {
	w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
	w.gen = w.generation(t, edit, consumers...)
	require.NoError(t, w.Push(w.gen))
	return w
}

func server(name string, size gpu.Bytes) *config.Consumer {
	return &config.Consumer{Name: name, VRAM: size, Upstream: name + ".test:1", Concurrency: 1, Budget: caddy.Duration(time.Hour)}
}
