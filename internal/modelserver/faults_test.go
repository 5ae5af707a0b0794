package modelserver

import (
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
)

const (
	loadPath   = "/api/admin/load"
	unloadPath = "/api/admin/unload"
)

func TestLoadThatWouldOverfillTheGPUFails(t *testing.T) {
	dir := t.TempDir()
	big := start(t, Options{Name: "big", SimDir: dir, Total: 16 * gpu.GiB, VRAM: 13 * gpu.GiB, Preloaded: true})
	small := start(t, Options{Name: "small", SimDir: dir, Total: 16 * gpu.GiB, VRAM: 4 * gpu.GiB})
	ctx := bound(t)
	failed := want(t, 500, call(ctx, "POST", small.URL()+loadPath, ""))
	require.Contains(t, string(failed.body), "CUDA out of memory")
	require.Equal(t, 1, small.Stats().OOMs)
	require.Equal(t, 1, small.Stats().LoadsFailed)
	require.Equal(t, 13*gpu.GiB, used(t, dir), "a failed load leaves nothing behind")

	want(t, 200, call(ctx, "POST", big.URL()+unloadPath, ""))
	want(t, 200, call(ctx, "POST", small.URL()+loadPath, ""))
	require.Equal(t, 4*gpu.GiB, used(t, dir))
}

func TestOutsidersAndLostTelemetryCountAsTheyShould(t *testing.T) {
	dir := t.TempDir()
	outsider, err := simulated.NewOutsider(dir, "game")
	require.NoError(t, err)
	require.NoError(t, outsider.Set(0, 3*gpu.GiB))
	s := start(t, Options{SimDir: dir, Total: 8 * gpu.GiB, VRAM: 6 * gpu.GiB})
	want(t, 500, call(bound(t), "POST", s.URL()+loadPath, ""))
	require.Equal(t, 1, s.Stats().OOMs)
	require.NoError(t, outsider.Close())

	other := start(t, Options{Name: "other", SimDir: dir, Total: 8 * gpu.GiB, VRAM: 4 * gpu.GiB, Preloaded: true})
	require.NoError(t, simulated.WriteState(dir, "telemetry lost"))
	want(t, 500, call(bound(t), "POST", s.URL()+loadPath, ""))
	require.Equal(t, 2, s.Stats().OOMs, "the card is as full as before, though nobody can see it")
	other.Kill()
	want(t, 200, call(bound(t), "POST", s.URL()+loadPath, ""))

	want(t, 200, call(bound(t), "POST", s.URL()+unloadPath, ""))
	require.NoError(t, simulated.WriteState(dir, "lost 0"))
	lost := want(t, 500, call(bound(t), "POST", s.URL()+loadPath, ""))
	require.Contains(t, string(lost.body), "GPU 0 is lost")
	require.Equal(t, 2, s.Stats().OOMs)
}

func TestTwoLoadsAtOnceNeverOverfill(t *testing.T) {
	dir := t.TempDir()
	var servers []*Server
	for _, name := range []string{"a", "b", "c", "d"} {
		servers = append(servers, start(t, Options{Name: name, SimDir: dir, Total: 10 * gpu.GiB, VRAM: 4 * gpu.GiB}))
	}
	var wg sync.WaitGroup
	ctx := bound(t)
	for _, s := range servers {
		wg.Go(func() { _ = s.Load(ctx) })
	}
	wg.Wait()
	loads, ooms := 0, 0
	for _, s := range servers {
		loads += s.Stats().Loads
		ooms += s.Stats().OOMs
	}
	require.Equal(t, 2, loads)
	require.Equal(t, 2, ooms)
	require.Equal(t, 8*gpu.GiB, used(t, dir))
}

func TestLoadInStepsTakesItsMemoryBitByBit(t *testing.T) {
	s := start(t, Options{VRAM: 4 * gpu.GiB, LoadSteps: 4, LoadTime: 40 * time.Millisecond})
	want(t, 200, call(bound(t), "POST", s.URL()+loadPath, ""))
	var seen []gpu.Bytes
	for _, e := range s.Events() {
		if e.Kind == EventMemory {
			seen = append(seen, e.Held)
		}
	}
	require.Equal(t, []gpu.Bytes{gpu.GiB, 2 * gpu.GiB, 3 * gpu.GiB, 4 * gpu.GiB}, seen)
}

func TestLoadFaults(t *testing.T) {
	ctx := bound(t)
	s := start(t, Options{VRAM: gpu.GiB, Faults: Faults{RefuseLoad: true}})
	want(t, 500, call(ctx, "POST", s.URL()+loadPath, ""))
	require.Zero(t, used(t, s.dir))

	s.SetFaults(func(f *Faults) { *f = Faults{OOMLoads: 1} })
	first := want(t, 500, call(ctx, "POST", s.URL()+loadPath, ""))
	require.Contains(t, string(first.body), "CUDA out of memory")
	require.Zero(t, s.Stats().OOMs, "made up, so no proof against the broker")
	want(t, 200, call(ctx, "POST", s.URL()+loadPath, ""))
	want(t, 200, call(ctx, "POST", s.URL()+unloadPath, ""))

	s.SetFaults(func(f *Faults) { *f = Faults{HangLoad: true} })
	hanging := send(ctx, "POST", s.URL()+loadPath, "")
	require.NoError(t, s.WaitFor(ctx, holds(gpu.GiB)))
	require.False(t, health(t, s).Loaded)
	s.SetFaults(func(f *Faults) { *f = Faults{} })
	want(t, 200, <-hanging)
	require.True(t, health(t, s).Loaded)
}

func TestServerThatDiesOnLoadCanBeRestarted(t *testing.T) {
	s := start(t, Options{VRAM: gpu.GiB, Faults: Faults{DieOnLoad: true}})
	ctx := bound(t)
	require.Error(t, call(ctx, "POST", s.URL()+loadPath, "").err)
	require.NoError(t, s.WaitFor(ctx, func(st Stats) bool { return !st.Alive && st.Held == 0 }))
	require.Zero(t, used(t, s.dir))
	require.Error(t, call(ctx, "GET", s.URL()+"/health", "").err)

	addr := s.Addr()
	require.NoError(t, s.Restart())
	require.Equal(t, addr, s.Addr())
	want(t, 200, call(ctx, "POST", s.URL()+loadPath, ""))
	require.Equal(t, 1, s.Stats().Deaths)
}

func TestKillDropsConnectionsAndMemoryAtOnce(t *testing.T) {
	s := start(t, Options{VRAM: gpu.GiB, Preloaded: true})
	ctx := bound(t)
	work := send(ctx, "POST", s.URL()+"/echo?ms=60000", "x")
	require.NoError(t, s.WaitFor(ctx, func(st Stats) bool { return st.Working == 1 }))
	s.Kill()
	require.Error(t, (<-work).err)
	require.Zero(t, used(t, s.dir))
	stats := s.Stats()
	require.Equal(t, 1, stats.Aborted)
	require.Zero(t, stats.Working)
	require.False(t, stats.Alive)

	require.NoError(t, s.Restart())
	require.True(t, health(t, s).Loaded, "preloaded means at each start")
	require.NoError(t, s.Restart(), "a living server is killed first")
	require.Equal(t, gpu.GiB, used(t, s.dir))
}

func TestUnloadFaults(t *testing.T) {
	ctx := bound(t)
	load := func(s *Server) { want(t, 200, call(ctx, "POST", s.URL()+loadPath, "")) }
	unload := func(s *Server) { want(t, 200, call(ctx, "POST", s.URL()+unloadPath, "")) }

	t.Run("answers 500 and does nothing", func(t *testing.T) {
		s := start(t, Options{VRAM: gpu.GiB, Preloaded: true, Faults: Faults{FailUnload: true}})
		want(t, 500, call(ctx, "POST", s.URL()+unloadPath, ""))
		require.True(t, health(t, s).Loaded)
		require.Equal(t, gpu.GiB, used(t, s.dir))
		require.Equal(t, 1, s.Stats().UnloadCalls)
		require.Zero(t, s.Stats().Unloads)
	})
	t.Run("hangs until told to go on", func(t *testing.T) {
		s := start(t, Options{VRAM: gpu.GiB, Preloaded: true, Faults: Faults{HangUnload: true}})
		hanging := send(ctx, "POST", s.URL()+unloadPath, "")
		_, err := s.WaitForEvent(ctx, func(e Event) bool { return e.Kind == EventUnloadStart })
		require.NoError(t, err)
		require.True(t, health(t, s).Loaded)
		s.SetFaults(func(f *Faults) { f.HangUnload = false })
		want(t, 200, <-hanging)
		require.Zero(t, used(t, s.dir))
	})
	t.Run("says unloaded and keeps the memory", func(t *testing.T) {
		s := start(t, Options{VRAM: gpu.GiB, Preloaded: true, Faults: Faults{LieUnloaded: true}})
		unload(s)
		require.False(t, health(t, s).Loaded)
		require.Equal(t, gpu.GiB, used(t, s.dir))
		load(s)
		require.Equal(t, gpu.GiB, used(t, s.dir), "a pool is used again")
		unload(s)
		s.SetFaults(func(f *Faults) { f.LieUnloaded = false })
		unload(s)
		require.Zero(t, used(t, s.dir), "an honest unload frees what a lie had kept")
	})
	t.Run("answers 200 and goes on saying loaded", func(t *testing.T) {
		s := start(t, Options{VRAM: gpu.GiB, Preloaded: true, Faults: Faults{LieStillLoaded: true}})
		unload(s)
		require.True(t, health(t, s).Loaded)
		require.Equal(t, gpu.GiB, used(t, s.dir))
		require.Zero(t, s.Stats().Unloads)
	})
	t.Run("never releases while told so", func(t *testing.T) {
		s := start(t, Options{VRAM: gpu.GiB, Preloaded: true, Faults: Faults{NeverRelease: true}})
		unload(s)
		require.False(t, health(t, s).Loaded)
		require.Equal(t, gpu.GiB, used(t, s.dir))
		s.SetFaults(func(f *Faults) { f.NeverRelease = false })
		require.NoError(t, s.WaitFor(ctx, holds(0)))
	})
	t.Run("releases late", func(t *testing.T) {
		s := start(t, Options{VRAM: gpu.GiB, Preloaded: true, ReleaseDelay: 50 * time.Millisecond})
		unload(s)
		require.NoError(t, s.WaitFor(ctx, holds(0)))
		var unloaded, freed time.Time
		for _, e := range s.Events() {
			switch {
			case e.Kind == EventUnloadEnd:
				unloaded = e.At
			case e.Kind == EventMemory && e.Held == 0:
				freed = e.At
			}
		}
		require.GreaterOrEqual(t, freed.Sub(unloaded), 50*time.Millisecond)
	})
	t.Run("a load during a late release is not undone by it", func(t *testing.T) {
		s := start(t, Options{VRAM: gpu.GiB, Preloaded: true, Faults: Faults{NeverRelease: true}})
		unload(s)
		load(s)
		s.SetFaults(func(f *Faults) { f.NeverRelease = false })
		unload(s)
		load(s)
		require.Equal(t, gpu.GiB, used(t, s.dir))
	})
	t.Run("leaks a little more each time", func(t *testing.T) {
		s := start(t, Options{VRAM: gpu.GiB, Faults: Faults{LeakPerCycle: 100 * gpu.MiB}})
		for i := range 3 {
			load(s)
			unload(s)
			require.Equal(t, gpu.Bytes(i+1)*100*gpu.MiB, used(t, s.dir))
		}
	})
	t.Run("uses more than declared", func(t *testing.T) {
		s := start(t, Options{VRAM: gpu.GiB, Preloaded: true})
		s.SetFaults(func(f *Faults) { f.Extra = gpu.GiB })
		require.Equal(t, 2*gpu.GiB, used(t, s.dir))
		unload(s)
		require.Zero(t, used(t, s.dir))
	})
}

func TestHealthFaults(t *testing.T) {
	s := start(t, Options{Preloaded: true, Faults: Faults{HealthStatus: 500}})
	want(t, 500, call(bound(t), "GET", s.URL()+"/health", ""))
	s.SetFaults(func(f *Faults) { *f = Faults{HangHealth: true} })
	ctx, leave := context.WithCancel(bound(t))
	hanging := send(ctx, "GET", s.URL()+"/health", "")
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.HealthProbes == 2 }))
	want(t, 200, call(bound(t), "POST", s.URL()+"/echo", "x"))
	leave()
	require.Error(t, (<-hanging).err)
	s.SetFaults(func(f *Faults) { *f = Faults{} })
	health(t, s)
}

func TestAnswersThatStopHalfWay(t *testing.T) {
	s := start(t, Options{Preloaded: true, Faults: Faults{AbortMidBody: true}})
	for _, route := range []string{"/synthesize", "/stream?events=4&ms=1", "/echo"} {
		got := call(bound(t), "POST", s.URL()+route, "some body")
		require.Equal(t, 200, got.status, route)
		require.Error(t, got.err, route)
		require.NotEmpty(t, got.body, route)
	}
	require.True(t, s.Stats().Alive)

	s.SetFaults(func(f *Faults) { *f = Faults{DieMidBody: true} })
	got := call(bound(t), "GET", s.URL()+"/audio/big?bytes=100000", "")
	require.Error(t, got.err)
	require.NotEmpty(t, got.body)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return !st.Alive }))
	require.NoError(t, s.Restart())
	require.Len(t, want(t, 200, call(bound(t), "GET", s.URL()+"/audio/big?bytes=100000", "")).body, 100000, "it dies once")

	s.SetFaults(func(f *Faults) { *f = Faults{DieOnRequest: true} })
	require.Error(t, call(bound(t), "POST", s.URL()+"/echo", "x").err)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return !st.Alive && st.Aborted == 4 }))
}

func TestAnyPathCanBeToldToFailOrHang(t *testing.T) {
	s := start(t, Options{Preloaded: true, Faults: Faults{
		FailPaths: map[string]int{"GET /x": 418}, HangPaths: []string{"/y"},
	}})
	want(t, 418, call(bound(t), "GET", s.URL()+"/x", ""))
	want(t, 200, call(bound(t), "POST", s.URL()+"/x", ""))
	hanging := send(bound(t), "GET", s.URL()+"/y", "")
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 1 }))
	s.SetFaults(func(f *Faults) { f.HangPaths = nil })
	want(t, 200, <-hanging)
}

func TestControlSteersFromOutside(t *testing.T) {
	s := start(t, Options{VRAM: gpu.GiB, Preloaded: true, Faults: Faults{FailUnload: true}})
	ctx := bound(t)
	control := s.URL() + "/control"
	got := decode[Report](t, want(t, 200, call(ctx, "POST", control,
		`{"faults":{"health_status":503},"set":{"vram":"3GiB","load":"5ms"}}`)).body)
	require.True(t, got.Faults.FailUnload, "faults that aren't named stay")
	require.Equal(t, 503, got.Faults.HealthStatus)
	require.Equal(t, "loaded", got.Models[0].State)
	require.Equal(t, 3*gpu.GiB, got.Models[0].Size)

	for _, bad := range []string{`{"fault":{}}`, `{"faults":{"nope":1}}`, `{"set":{"addr":":1"}}`, `{"set":{"vram":"x"}}`, `{} {}`, `{"restart_after":"soon"}`, ``} {
		want(t, 400, call(ctx, "POST", control, bad))
	}
	want(t, 405, call(ctx, "DELETE", control, ""))

	got = decode[Report](t, want(t, 200, call(ctx, "POST", control, `{"reset_stats":true,"faults":{"health_status":0}}`)).body)
	require.Zero(t, got.Stats.Loads)
	require.Empty(t, got.Stats.Requests, "control counts as no request")

	want(t, 200, call(ctx, "POST", control, `{"restart_after":"1ms"}`))
	require.NoError(t, s.WaitFor(ctx, func(st Stats) bool { return st.Deaths == 1 && st.Alive && st.Loads == 1 }))
	require.NoError(t, s.Restart()) // waits for the one above to listen
	events := decode[Report](t, want(t, 200, call(ctx, "GET", control+"?events=1", "")).body).Events
	require.NotEmpty(t, events)

	want(t, 200, call(ctx, "POST", control, `{"kill":true}`))
	require.NoError(t, s.WaitFor(ctx, func(st Stats) bool { return !st.Alive }))
}

func TestWaitForSaysWhatItSawWhenItGivesUp(t *testing.T) {
	s := start(t, Options{})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err := s.WaitFor(ctx, func(st Stats) bool { return st.Loads > 0 })
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "Loads:0")
	_, err = s.WaitForEvent(ctx, func(Event) bool { return false })
	require.ErrorIs(t, err, context.Canceled)
}

func TestStartRefusesWhatCannotWork(t *testing.T) {
	dir := t.TempDir()
	first := start(t, Options{Name: "a", SimDir: dir})
	for name, opts := range map[string]Options{
		"no name":           {},
		"a name twice":      {Name: "a", SimDir: dir},
		"an unknown manner": {Name: "b", Manner: "nope"},
		"models of a plain": {Name: "b", Models: map[string]gpu.Bytes{"x": 1}},
		"a port in use":     {Name: "b", SimDir: dir, Addr: first.Addr() + "0000"},
		"too big":           {Name: "b", SimDir: dir, VRAM: 2, Total: 1, Preloaded: true},
		"a gpu too far":     {Name: "b", GPU: maxGPUs},
	} {
		_, err := Start(opts)
		require.Error(t, err, name)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	require.Empty(t, files)

	require.NoError(t, first.Close())
	require.NoError(t, first.Close(), "closing twice does nothing")
	require.Error(t, first.Restart())
	start(t, Options{Name: "a", SimDir: dir})
}

func TestServerHoldsItsMemoryUnderItsOwnPID(t *testing.T) {
	s := start(t, Options{VRAM: gpu.GiB, Preloaded: true, GPU: 1})
	require.Zero(t, usedOn(t, s.dir, 0))
	require.Equal(t, gpu.GiB, usedOn(t, s.dir, 1))
	files, err := os.ReadDir(s.dir)
	require.NoError(t, err)
	require.Len(t, files, 1)
	require.NoError(t, s.Close())
	require.Zero(t, usedOn(t, s.dir, 1))
}

func TestBodyOfALeavingClientIsNoWork(t *testing.T) {
	s := start(t, Options{Preloaded: true})
	ctx, leave := context.WithCancel(bound(t))
	reader, writer := io.Pipe()
	r, err := http.NewRequestWithContext(ctx, "POST", s.URL()+"/echo", reader)
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() {
		response, err := http.DefaultClient.Do(r)
		if err == nil {
			_ = response.Body.Close()
		}
		done <- err
	}()
	_, err = writer.Write([]byte("half"))
	require.NoError(t, err)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 1 }))
	leave()
	// The client's transport returns only once its reader of the body ends.
	require.NoError(t, writer.CloseWithError(context.Canceled))
	require.Error(t, <-done)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 0 && st.Worked == 0 }))
}
