package e2e

import (
	"context"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

func TestFC01_WarmRequestsCannotUndoAnEvictionThatIsUnderWay(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "overtake 0\novertake_min 50ms", Consumers: []consumer{plainModel("m1", 9), plainModel("m2", 9)}})
	s.serve("m1")
	runs, end := s.works("m1")
	wants := s.send("POST", "/m2/synthesize", "x")
	s.until("m1 drains for m2", func() bool {
		slot := s.status().Consumers["m1"].Slots[0]
		return slot.Gate == "closed" && slot.DrainsFor == "m2"
	})
	var more []<-chan answer
	for range 3 {
		more = append(more, s.send("POST", "/m1/synthesize", "x"))
	}
	s.waitQueued("m1", 3)
	hang := func(on bool) { s.servers["m1"].SetFaults(func(f *modelserver.Faults) { f.HangUnload = on }) }
	hang(true)
	t.Cleanup(func() { hang(false) })
	end()
	s.ok(runs)
	s.waitState("m1", "STOPPING")
	for range 3 { // and none while it is being unloaded
		more = append(more, s.send("POST", "/m1/synthesize", "x"))
	}
	s.waitQueued("m1", 6)
	hang(false)
	second := s.ok(wants)
	for _, ch := range more {
		require.True(t, s.ok(ch).at.After(second.at), "they queue behind it")
	}
	require.Equal(t, 2, s.servers["m1"].Stats().Loads)
	require.Equal(t, 1, s.servers["m1"].Stats().UnloadCalls)
	require.Zero(t, s.servers["m1"].Stats().UnloadsWhileBusy)
	require.Zero(t, s.servers["m1"].Stats().Aborted)
	s.noOOM()
}

func TestFC02_BusyModelMakesWayWithinTheBound(t *testing.T) {
	t.Parallel()
	const bound = 600 * time.Millisecond
	s := start(t, layout{Global: "overtake 0\novertake_min " + bound.String(), Consumers: []consumer{plainModel("m1", 9), plainModel("m2", 9)}})
	s.serve("m1")
	stop := make(chan struct{})
	var served atomic.Int64
	var loops sync.WaitGroup
	for range 8 {
		loops.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if s.post("/m1/synthesize?ms=10", "x").status == 200 {
					served.Add(1)
				}
			}
		})
	}
	s.until("m1 is under load", func() bool { return served.Load() > 20 })
	before := served.Load()
	wants := s.send("POST", "/m2/synthesize", "x")
	a := s.await(wants)
	overtook := served.Load() - before
	close(stop)
	loops.Wait()
	require.Equal(t, 200, a.status, "%s", a.body)
	require.GreaterOrEqual(t, a.took, bound, "warm jobs may overtake it for so long")
	require.Less(t, a.took, bound+5*time.Second, "and then it is served after one drain and one load")
	require.Greater(t, overtook, int64(8))
	require.Zero(t, s.servers["m1"].Stats().UnloadsWhileBusy)
	require.Zero(t, s.servers["m1"].Stats().Aborted)
}

func TestFC04_LeavingWaiterDoesNotAbortTheLoadOfTheOthers(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("m", 9)}})
	loaded := s.holdLoad("m")
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	first := s.goCtx(ctx, "POST", "/m/synthesize", "x")
	s.waitState("m", "LOADING")
	var rest []<-chan answer
	for range 4 {
		rest = append(rest, s.send("POST", "/m/synthesize", "x"))
	}
	s.waitQueued("m", 5)
	leave()
	require.ErrorIs(t, s.await(first).err, context.Canceled)
	s.waitQueued("m", 4)
	require.Equal(t, "LOADING", s.state("m"))
	loaded()
	for _, ch := range rest {
		s.ok(ch)
	}
	require.Equal(t, 1, s.servers["m"].Stats().LoadsStarted)
	require.Equal(t, 4, s.servers["m"].Stats().Worked)
}

func TestFC05_LoadGoesOnWithoutItsClientSoThatTheRetryIsWarm(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("m", 9)}})
	loaded := s.holdLoad("m")
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	first := s.goCtx(ctx, "POST", "/m/synthesize", "x")
	s.waitState("m", "LOADING")
	leave()
	require.ErrorIs(t, s.await(first).err, context.Canceled)
	s.waitQueued("m", 0)
	loaded()
	s.waitState("m", "READY")
	a := s.serve("m")
	require.Contains(t, a.header.Get("Server-Timing"), "gpu-load;dur=0")
	require.Equal(t, 1, s.servers["m"].Stats().LoadsStarted)
	require.Equal(t, 1, s.servers["m"].Stats().Worked)
}

func TestFC08_ModelThatIsStillLoadingIsNoVictim(t *testing.T) {
	t.Parallel()
	c := plainModel("a", 9)
	c.LoadTime, c.LoadSteps = 900*time.Millisecond, 9
	s := start(t, layout{Global: "overtake 0\novertake_min 0\nabandon_after 50ms", Consumers: []consumer{c, plainModel("b", 9)}})
	first := s.send("POST", "/a/synthesize", "x")
	s.waitState("a", "LOADING")
	second := s.send("POST", "/b/synthesize", "x")
	s.waitQueued("b", 1)
	one, two := s.ok(first), s.ok(second)
	require.True(t, two.at.After(one.at))
	st := s.servers["a"].Stats()
	require.Equal(t, 1, st.LoadsStarted)
	require.Equal(t, 1, st.Unloads)
	require.Equal(t, 1, st.Worked)
	s.noOOM()
}

func TestLoadThatNobodyWaitsForAnyMoreMakesWay(t *testing.T) {
	t.Parallel()
	c := plainModel("a", 9)
	c.LoadTime = 20 * time.Second
	s := start(t, layout{Global: "abandon_after 200ms\nunload_timeout 5s", Consumers: []consumer{c, plainModel("b", 9)}})
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	first := s.goCtx(ctx, "POST", "/a/synthesize", "x")
	s.waitState("a", "LOADING")
	leave()
	require.ErrorIs(t, s.await(first).err, context.Canceled)
	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.FailPaths = map[string]int{"/api/admin/unload": 200} })
	wants := s.send("POST", "/b/synthesize", "x")
	s.waitState("a", "STOPPING")
	s.servers["a"].Kill() // the pretending server can't break off a load by itself
	s.ok(wants)
	s.noOOM()
}

func TestFC09_RequestThatCausedALoadReachesTheLoadedModel(t *testing.T) {
	t.Parallel()
	l := layout{Global: "overtake 0\novertake_min 20ms\nlock_overtake 0"}
	for i := range 3 {
		c := plainModel("m"+strconv.Itoa(i), 9)
		c.LoadTime, c.UnloadTime, c.RunTime = 5*time.Millisecond, 2*time.Millisecond, 5*time.Millisecond
		l.Consumers = append(l.Consumers, c)
	}
	s := start(t, l)
	var clients sync.WaitGroup
	var bad atomic.Int64
	for i := range 12 {
		clients.Go(func() {
			for k := range 10 { // a plain server that is not loaded answers 503
				if s.post("/m"+strconv.Itoa((i+k)%3)+"/synthesize", "x").status != 200 {
					bad.Add(1)
				}
			}
		})
	}
	clients.Wait()
	require.Zero(t, bad.Load())
	loads := 0
	for _, srv := range s.servers {
		st := srv.Stats()
		loads += st.Loads
		require.Zero(t, st.UnloadsWhileBusy)
		require.Zero(t, st.Aborted)
		require.Zero(t, st.LoadsFailed)
	}
	require.Greater(t, loads, 6, "there was contention")
	require.EqualValues(t, loads-1, s.status().Scheduler.Evictions)
	require.Empty(t, modelserver.Overlap(s.servers["m0"], s.servers["m1"], s.servers["m2"]))
	s.noOOM()
}

func TestFC10_TwoWaitersForTheSameVictimBothFinish(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9), plainModel("c", 9)}})
	s.serve("a")
	b, c := s.send("POST", "/b/synthesize", "x"), s.send("POST", "/c/synthesize", "x")
	s.ok(b)
	s.ok(c)
	require.Equal(t, 1, s.servers["a"].Stats().UnloadCalls)
	require.EqualValues(t, 2, s.status().Scheduler.Evictions)
	s.noOOM()
}

func TestFC15_LoadThatTookTooLongOnceIsTriedAgainAfterACoolDown(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "load_timeout 400ms", Consumers: []consumer{plainModel("m", 9)}})
	s.servers["m"].SetFaults(func(f *modelserver.Faults) { f.HangLoad = true })
	a := s.post("/m/synthesize", "x")
	require.Equal(t, 503, a.status)
	require.Equal(t, "load_failed", s.refusal(a).Code)
	require.GreaterOrEqual(t, a.took, 390*time.Millisecond)
	slot := s.status().Consumers["m"].Slots[0]
	require.Equal(t, "IDLE", slot.State)
	require.NotEmpty(t, slot.CoolsUntil)
	require.EqualValues(t, 1, s.status().Scheduler.LoadFailures)

	s.servers["m"].SetFaults(func(f *modelserver.Faults) { f.HangLoad = false })
	require.NoError(t, s.servers["m"].Restart()) // what hung is gone
	s.until("it is healthy", func() bool { return s.status().Consumers["m"].Health == "healthy" })
	s.serve("m")
	require.EqualValues(t, 2, s.status().Scheduler.Loads)
}

func TestRefusedLoadIsToldWithRetryAfterAndDoesNotLast(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("m", 9)}})
	s.servers["m"].SetFaults(func(f *modelserver.Faults) { f.RefuseLoad = true })
	doc := s.refusal(s.post("/m/synthesize", "x"))
	require.Equal(t, "load_failed", doc.Code)
	require.Equal(t, 1, doc.RetryAfter)
	s.servers["m"].SetFaults(func(f *modelserver.Faults) { f.RefuseLoad = false })
	a := s.serve("m") // waits for the end of the cool-down
	require.Greater(t, a.took, 500*time.Millisecond)
}

func TestFC25_QueueCapCountsAllWaitersAndThoseWhoLeaveMakeRoomAtOnce(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "max_queue 4", Consumers: []consumer{plainModel("warm", 9), plainModel("cold", 9)}})
	s.serve("warm")
	runs, end := s.works("warm")
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	var stay []<-chan answer
	stay = append(stay, s.send("POST", "/warm/synthesize", "1"), s.send("POST", "/cold/synthesize", "2"))
	gone := []<-chan answer{s.goCtx(ctx, "POST", "/warm/synthesize", "3"), s.goCtx(ctx, "POST", "/cold/synthesize", "4")}
	s.until("four wait", func() bool { return s.status().Scheduler.QueueDepth == 4 })
	for _, name := range []string{"warm", "cold"} {
		a := s.post("/"+name+"/synthesize", "5")
		require.Equal(t, 503, a.status)
		doc := s.refusal(a)
		require.Equal(t, "queue_full", doc.Code)
		require.Equal(t, name, doc.Consumer)
	}
	leave()
	for _, ch := range gone {
		require.ErrorIs(t, s.await(ch).err, context.Canceled)
	}
	s.until("two wait", func() bool { return s.status().Scheduler.QueueDepth == 2 })
	stay = append(stay, s.send("POST", "/warm/synthesize", "6"), s.send("POST", "/cold/synthesize", "7"))
	s.until("four wait", func() bool { return s.status().Scheduler.QueueDepth == 4 })
	require.Equal(t, "queue_full", s.refusal(s.post("/cold/synthesize", "8")).Code)
	end()
	s.ok(runs)
	for _, ch := range stay {
		s.ok(ch)
	}
	require.EqualValues(t, 2, s.status().Scheduler.Cancelled)
	require.EqualValues(t, 3, s.status().Scheduler.Refused)
}
