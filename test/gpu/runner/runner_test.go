package main

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var start = time.Unix(1_700_000_000, 0)

func after(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }

// readings are looks 10 ms apart, in GiB.
func readings(free ...int) (points []point) {
	for i, f := range free {
		points = append(points, point{after(10 * i), gpu.Bytes(f) * gpu.GiB})
	}
	return points
}

func TestReleaseIsTimedFromTheUnloadToTheLookThatShowsItWhole(t *testing.T) {
	r, seen := released(readings(4, 4, 4, 9, 12, 12, 3), after(15), after(55))
	require.True(t, seen)
	require.Equal(t, release{before: 4 * gpu.GiB, after: 12 * gpu.GiB, took: 25 * time.Millisecond}, r)
}

func TestMemoryThatIsFreeOnlyAfterTheNextLoadBeganIsNoRelease(t *testing.T) {
	_, seen := released(readings(4, 4, 4, 4, 12, 12), after(15), after(35))
	require.False(t, seen)
}

func TestNoLooksAreNoRelease(t *testing.T) {
	_, seen := released(nil, after(0), after(10))
	require.False(t, seen)
}

// good is the report of two swaps in which all went well.
func good() *report {
	r := &report{options: options{swaps: 2, size: 8 * gpu.GiB, claim: 9 * gpu.GiB, caddySampler: "nvml"}, caddySampler: "nvml", counted: true, controlled: true, control: true}
	for n := range 2 {
		r.swaps = append(r.swaps, swap{
			n: n + 1, target: beta, victim: alpha, evicted: 1, seen: true,
			request: served{took: time.Second, checksum: wantChecksum}, warm: served{checksum: wantChecksum},
			release: release{before: gpu.GiB, after: 9 * gpu.GiB, took: 20 * time.Millisecond},
		})
	}
	r.totals.Evictions, r.servers.Unloads, r.servers.Loads = 2, 2, 3
	return r
}

func TestEveryFaultFailsTheCheck(t *testing.T) {
	require.True(t, good().judge())
	for name, spoil := range map[string]func(*report){
		"broken off":                 func(r *report) { r.broke = errors.New("no answer") },
		"a swap is missing":          func(r *report) { r.swaps = r.swaps[:1] },
		"memory damaged":             func(r *report) { r.swaps[1].request.checksum = 2 },
		"evicted twice":              func(r *report) { r.swaps[0].evicted = 2 },
		"memory not seen free":       func(r *report) { r.swaps[0].seen = false },
		"half of it came back":       func(r *report) { r.swaps[0].release.after = 5 * gpu.GiB },
		"an eviction too many":       func(r *report) { r.totals.Evictions++ },
		"a load too many":            func(r *report) { r.servers.Loads++ },
		"out of memory":              func(r *report) { r.servers.OOMs = 1 },
		"work met an unloaded one":   func(r *report) { r.servers.ColdWorks = 1 },
		"an unload failed":           func(r *report) { r.totals.UnloadFailures = 1 },
		"a refusal":                  func(r *report) { r.totals.Refused = 1 },
		"another sampler":            func(r *report) { r.caddySampler = "static" },
		"no telemetry":               func(r *report) { r.degraded = "lost" },
		"both fit past the broker":   func(r *report) { r.control = false },
		"never came to the counts":   func(r *report) { r.counted = false },
		"the load itself went amiss": func(r *report) { r.totals.LoadFailures = 1 },
	} {
		t.Run(name, func(t *testing.T) {
			r := good()
			spoil(r)
			require.False(t, r.judge())
		})
	}
}

func TestReportSaysWhenTheClaimIsTooSmall(t *testing.T) {
	r := good()
	var b strings.Builder
	require.NoError(t, r.markdown(&b))
	require.NotContains(t, b.String(), "claim is too small")
	r.swaps[0].held.process = 10 * gpu.GiB
	b.Reset()
	require.NoError(t, r.markdown(&b))
	require.Contains(t, b.String(), "claim is too small")
}

// still is a sampler of a GPU whose memory never moves.
type still struct {
	gpu.Sampler
	err error
}

func (s still) Sample(context.Context, gpu.Detail) (gpu.Sample, error) {
	return gpu.Sample{At: time.Now(), Devices: []gpu.Device{{Health: gpu.Healthy, MemoryKnown: true, Free: gpu.GiB}}}, s.err
}

func TestWatchLooksAsLongAsTheWorkTakes(t *testing.T) {
	t.Run("the work's error comes back", func(t *testing.T) {
		failed := errors.New("refused")
		points, err := watch(t.Context(), still{}, time.Millisecond, func(context.Context) error { return failed })
		require.ErrorIs(t, err, failed)
		require.NotEmpty(t, points)
	})
	t.Run("telemetry that fails ends the work", func(t *testing.T) {
		lost := errors.New("telemetry lost")
		_, err := watch(t.Context(), still{err: lost}, time.Millisecond, func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		})
		require.ErrorIs(t, err, lost)
	})
}
