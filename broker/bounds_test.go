package broker

import (
	"context"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func TestAlone_WarmAcquireAndReleaseTakeAtMostAMicrosecond(t *testing.T) {
	r := testing.Benchmark(BenchmarkWarmAcquireRelease)
	t.Logf("%s %s", r, r.MemString())
	require.LessOrEqual(t, r.NsPerOp(), int64(1000))
	require.LessOrEqual(t, r.AllocsPerOp(), int64(1))
}

// crowd is a broker at which n requests wait for a busy server.
func crowd(t testing.TB, n int) (w *world, leave func()) {
	w = newWorld(t, func(b *config.Broker) { b.MaxQueue = n + 10 }, server("a", 4*gpu.GiB))
	w.servers["a"].load = 0
	l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var clients sync.WaitGroup
	for range n {
		lease, waits, err := w.submit(Request{Consumer: "a", Priority: DefaultPriority})
		require.NoError(t, err)
		require.NotNil(t, waits, "it queues")
		clients.Go(func() { _, _ = w.await(ctx, lease, waits) })
	}
	return w, func() {
		cancel()
		clients.Wait()
		l.Release(scheduler.Served)
		w.Close()
	}
}

// BenchmarkSubmitAndCancelAmong10000 is a client that comes and leaves while 10,000 others wait.
func BenchmarkSubmitAndCancelAmong10000(b *testing.B) {
	w, leave := crowd(b, 10_000)
	defer leave()
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	b.ReportAllocs()
	for b.Loop() {
		_, _ = w.Acquire(gone, Request{Consumer: "a", Priority: DefaultPriority})
	}
}

func TestAlone_SubmitAndCancelAmong10000WaitersTakeAtMost10Microseconds(t *testing.T) {
	r := testing.Benchmark(BenchmarkSubmitAndCancelAmong10000)
	t.Logf("%s %s", r, r.MemString())
	require.LessOrEqual(t, r.NsPerOp(), int64(10_000))
}

func TestAWaiterTakesAtMost4KiBOfOurs(t *testing.T) {
	const n = 10_000
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc // the stacks of the clients' goroutines are not ours
	}
	before := heap()
	_, leave := crowd(t, n)
	each := (int64(heap()) - int64(before)) / n
	leave()
	t.Logf("%d bytes a waiter", each)
	require.LessOrEqual(t, each, int64(4096))
	require.Positive(t, each)
}
