package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// occupied puts an outsider on the GPU and waits until the broker has seen it.
func (s *site) occupied(name string, amount float64) *simulated.Holder {
	s.t.Helper()
	h, err := simulated.NewOutsider(s.sim, name)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = h.Close() })
	require.NoError(s.t, h.Set(0, gib(amount)))
	s.until("the outsider is seen", func() bool { return s.status().GPUs[0].Outsiders >= int64(gib(amount)) })
	return h
}

// noOOM says that no load of the site's servers ran out of memory.
func (s *site) noOOM() {
	s.t.Helper()
	for name, srv := range s.servers {
		require.Zero(s.t, srv.Stats().OOMs, "%s ran out of memory", name)
	}
}

// first is when a server's log first has an event of a kind at or after since.
func (s *site) first(name, kind string, since time.Time) modelserver.Event {
	s.t.Helper()
	for _, e := range s.servers[name].Events() {
		if e.Kind == kind && !e.At.Before(since) {
			return e
		}
	}
	s.t.Fatalf("%s has no %s", name, kind)
	return modelserver.Event{}
}

func TestWhatCanNeverFitIsRefusedAtOnceAndNothingIsUnloaded(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 4), plainModel("giant", 15.9)}})
	s.serve("a")
	s.serve("b")
	a := s.post("/giant/synthesize", "x")
	require.Equal(t, 422, a.status)
	doc := s.refusal(a)
	require.Equal(t, "never_fits", doc.Code)
	require.Contains(t, doc.Message, "cushion")
	require.Empty(t, a.header.Get("Retry-After"))
	require.Zero(t, s.unloadCalls())
	require.Zero(t, s.servers["giant"].Stats().LoadsStarted)
}

func TestFC03_ModelThatCanNeverFitIsAPermanentErrorWithoutUnloads(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("pinned", 8, "pin"), plainModel("other", 4), plainModel("big", 9)}})
	s.serve("pinned")
	s.serve("other")
	for range 3 {
		a := s.post("/big/synthesize", "x")
		require.Equal(t, 422, a.status)
		doc := s.refusal(a)
		require.Equal(t, "never_fits", doc.Code)
		require.Contains(t, doc.Message, "pinned")
		require.Equal(t, "pin", doc.protected("pinned"))
		require.Empty(t, doc.protected("other"))
	}
	require.Zero(t, s.unloadCalls())
}

func TestWhatFitsOnceOthersAreDoneWaits(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "outsider_wait 100ms", Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("a")
	runs, end := s.works("a")
	waits := s.send("POST", "/b/synthesize", "x")
	s.waitQueued("b", 1)
	require.Contains(t, s.status().Queue[0].Reason, "a", "it says whose memory it waits for")
	end()
	first := s.ok(runs)
	second := s.ok(waits)
	require.True(t, second.at.After(first.at))
	require.Zero(t, s.servers["a"].Stats().UnloadsWhileBusy)
	s.noOOM()
}

func TestOutsidersAreWaitedForAndThenNamed(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "outsider_wait 500ms", Consumers: []consumer{plainModel("a", 4, "processes a"), plainModel("b", 9, "processes b")}})
	s.serve("a")
	s.occupied("trainer", 8)
	a := s.post("/b/synthesize", "x")
	require.Equal(t, 503, a.status)
	doc := s.refusal(a)
	require.Equal(t, "vram_exhausted", doc.Code)
	require.Contains(t, doc.Message, "trainer")
	require.NotRegexp(t, `PID \d+ a\b`, doc.Message, "a's process is ours")
	require.Contains(t, doc.protected("outsiders"), "trainer")
	require.GreaterOrEqual(t, a.took, 490*time.Millisecond)
	require.Zero(t, s.unloadCalls(), "all permitted victims together are not enough: none goes")
	require.Zero(t, s.servers["b"].Stats().LoadsStarted)
}

func TestOutsiderThatGoesInTimeLetsTheWaiterIn(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "outsider_wait 20s", Consumers: []consumer{plainModel("b", 9)}})
	h := s.occupied("game", 10)
	waits := s.send("POST", "/b/synthesize", "x")
	s.waitQueued("b", 1)
	require.Contains(t, s.status().Queue[0].Reason, "game")
	require.NoError(t, h.Set(0, 0))
	s.ok(waits)
	s.noOOM()
}

func TestFC18_MemoryOfForeignProcessesIsNotPlacedUpon(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Total: "80GiB", Global: "outsider_wait 300ms", Consumers: []consumer{plainModel("a", 4)}})
	s.occupied("other", 78)
	require.Equal(t, "vram_exhausted", s.refusal(s.post("/a/synthesize", "x")).Code)
	require.Zero(t, s.servers["a"].Stats().LoadsStarted)
	require.Zero(t, s.status().Scheduler.Loads)
}

func TestWhoIsProtectedIsNamedWithWhatProtectsHim(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		a, b string // lines of the one that stays, and of the one that wants its room
		want string
	}{
		"can_coexist_with": {"", "can_coexist_with a", "can_coexist_with of b"},
		"vram_managed":     {"vram_managed", "", "vram_managed"},
		"no_evict":         {"no_evict", "", "no_evict"},
		"no unload route":  {"lifecycle_by_hand\nhealth /health {\nloaded $.loaded\n}\nload POST /api/admin/load", "", "no unload route"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Global: "outsider_wait 300ms", Consumers: []consumer{plainModel("a", 9, c.a), plainModel("b", 9, c.b)}})
			s.serve("a")
			a := s.post("/b/synthesize", "x")
			require.Equal(t, 503, a.status)
			doc := s.refusal(a)
			require.Equal(t, "vram_exhausted", doc.Code)
			require.Contains(t, doc.Message, "a holds 9GiB and is protected by "+c.want)
			require.Equal(t, c.want, doc.protected("a"))
			require.GreaterOrEqual(t, a.took, 290*time.Millisecond)
			require.Zero(t, s.unloadCalls())
			s.serve("a")
		})
	}
}

func TestUnloadsThatBringNothingBackEndInARefusalThatTellsWhatEachGave(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "evict_wait 400ms\noutsider_wait 300ms", Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("a")
	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.NeverRelease = true })
	a := s.post("/b/synthesize", "x")
	require.Equal(t, 503, a.status)
	doc := s.refusal(a)
	require.Equal(t, "vram_exhausted", doc.Code)
	require.Equal(t, []string{"a: gave back 0B of 9GiB"}, doc.Detail.Unloads)
	st := s.status()
	require.EqualValues(t, gib(9), st.Consumers["a"].Slots[0].Residue, "it stays booked to the victim")
	require.Zero(t, st.GPUs[0].Outsiders, "and is nobody else's")
	require.Zero(t, s.servers["b"].Stats().LoadsStarted)

	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.NeverRelease = false })
	s.until("the memory is back after all", func() bool { return s.status().Consumers["a"].Slots[0].Residue == 0 })
	s.serve("b")
}

func TestNoMoreThanMaxEvictionsUnloadsAreTriedBeyondThePlan(t *testing.T) {
	t.Parallel()
	l := layout{Total: "18GiB", Global: "evict_wait 200ms\noutsider_wait 200ms\nmax_evictions 2", Consumers: []consumer{plainModel("big", 8)}}
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		l.Consumers = append(l.Consumers, plainModel(name, 3))
	}
	s := start(t, l)
	for _, c := range l.Consumers[1:] {
		s.serve(c.Name)
		s.servers[c.Name].SetFaults(func(f *modelserver.Faults) { f.NeverRelease = true })
	}
	doc := s.refusal(s.post("/big/synthesize", "x")) // the plan has two: 18 − 15 + 2·3 ≥ 8.25
	require.Equal(t, "vram_exhausted", doc.Code)
	require.Len(t, doc.Detail.Unloads, 4)
	require.Equal(t, 4, s.unloadCalls())
	require.Zero(t, s.servers["e"].Stats().UnloadCalls, "the most recently used one stays")
}

func TestLazyServerLoadedBeforeTheBrokerCameIsUnloadedOnce(t *testing.T) {
	t.Parallel()
	c := comfyui()
	c.Preloaded = true
	s := start(t, layout{Global: "outsider_wait 8s", Consumers: []consumer{c, mvoice()}})
	require.Equal(t, "IDLE", s.state("comfyui"))
	s.until("its memory is taken for an outsider's", func() bool { return s.status().GPUs[0].Outsiders == int64(gib(13)) })
	s.serve("mvoice")
	require.Equal(t, 1, s.servers["comfyui"].Stats().UnloadCalls)
	require.NotEmpty(t, s.decisions("flushed"))
	require.Zero(t, s.status().Scheduler.Evictions, "that is no eviction")
	s.noOOM()
}

func TestFC23_MemoryThatComesBackLateIsWaitedFor(t *testing.T) {
	t.Parallel()
	for _, delay := range []time.Duration{0, 800 * time.Millisecond, 3 * time.Second} {
		t.Run(delay.String(), func(t *testing.T) {
			t.Parallel()
			a := plainModel("a", 9)
			a.ReleaseDelay = delay
			s := start(t, layout{Consumers: []consumer{a, plainModel("b", 9)}})
			s.serve("a")
			began := time.Now()
			got := s.serve("b")
			freed := s.first("a", modelserver.EventMemory, began)
			loads := s.first("b", modelserver.EventLoadStart, began)
			require.Zero(t, freed.Held)
			require.True(t, loads.At.After(freed.At), "it loads when the memory is there, not before")
			require.GreaterOrEqual(t, got.took, delay)
			require.Less(t, loads.At.Sub(freed.At), 2*time.Second, "and soon after: the memory is looked at often")
			require.EqualValues(t, 1, s.status().Scheduler.Evictions)
			s.noOOM()
		})
	}
}

func TestFC23_MemoryThatNeverComesBackIsGivenUpAndTheNextCandidateGoes(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Total: "20GiB", Global: "evict_wait 600ms", Consumers: []consumer{plainModel("a", 9), plainModel("b", 9), plainModel("c", 5)}})
	s.serve("a")
	s.serve("c")
	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.NeverRelease = true })
	got := s.serve("b")
	require.GreaterOrEqual(t, got.took, 590*time.Millisecond)
	require.Equal(t, 1, s.servers["a"].Stats().UnloadCalls)
	require.Equal(t, 1, s.servers["c"].Stats().UnloadCalls)
	s.until("what it kept is booked to it", func() bool { return s.status().Consumers["a"].Slots[0].Residue == int64(gib(9)) })
	require.Zero(t, s.status().GPUs[0].Outsiders)
	s.noOOM()
}

func TestFC23_WaitEndsEarlyWhereWhatIsBackIsBack(t *testing.T) {
	t.Parallel()
	a := plainModel("a", 9)
	a.Residue = gib(1) // a context that stays with the process
	s := start(t, layout{Total: "20GiB", Global: "evict_wait 20s\noutsider_wait 300ms", Consumers: []consumer{a, plainModel("b", 19.5)}})
	s.serve("a")
	got := s.post("/b/synthesize", "x")
	doc := s.refusal(got)
	require.Equal(t, "vram_exhausted", doc.Code)
	require.Contains(t, doc.Message, "a has not given back 1GiB")
	require.Less(t, got.took, 10*time.Second, "half was back and nothing more came: no need to wait for evict_wait")
	require.EqualValues(t, gib(1), s.status().Consumers["a"].Slots[0].Residue)
}

func TestFC30_UnloadThatAnswersFirstAndFreesLaterIsWaitedFor(t *testing.T) {
	t.Parallel()
	c := comfyui()
	c.UnloadTime = 1500 * time.Millisecond // its worker takes the flag when it gets to it
	s := start(t, layout{Consumers: []consumer{mvoice(), c}})
	require.Equal(t, 200, s.post("/comfyui/prompt", prompt).status)
	s.idle("comfyui")
	began := time.Now()
	s.serve("mvoice")
	freed := s.first("comfyui", modelserver.EventMemory, began)
	require.Zero(t, freed.Held)
	require.True(t, s.first("mvoice", modelserver.EventLoadStart, began).At.After(freed.At))
	s.noOOM()
}

func TestFC31_FloorThatRisesWithEachUnloadIsBookedAndEndsInNoLoop(t *testing.T) {
	t.Parallel()
	a := plainModel("a", 9)
	a.Faults.LeakPerCycle = gib(0.25)
	s := start(t, layout{Global: "evict_wait 2s", Consumers: []consumer{a, plainModel("b", 9)}})
	const cycles = 4
	for range cycles {
		s.serve("a")
		s.serve("b")
	}
	st := s.status()
	require.EqualValues(t, 2*cycles-1, st.Scheduler.Evictions, "one for each swap")
	require.Equal(t, cycles, s.servers["a"].Stats().UnloadCalls)
	require.NotZero(t, st.Consumers["a"].Slots[0].Residue)
	leaked := func() bool {
		st := s.status()
		return st.Consumers["a"].Slots[0].Residue == int64(cycles*gib(0.25)) && st.GPUs[0].Outsiders == 0
	}
	s.until("all of it is booked to it, and none to outsiders", leaked)
	s.reloaded(func(c string) string { return strings.Replace(c, "evict_wait 2s", "evict_wait 3s", 1) })
	require.True(t, leaked(), "a reload changes nothing of that")
	s.noOOM()
}

func TestFC32_UseAboveTheDeclaredFigureRaisesTheBooking(t *testing.T) {
	t.Parallel()
	a := plainModel("a", 8, "processes a")
	a.Faults.Extra = gib(4)
	s := start(t, layout{Consumers: []consumer{a, plainModel("b", 6, "processes b")}})
	s.serve("a")
	s.until("its booking is what it was measured to take", func() bool {
		return s.status().Consumers["a"].Slots[0].Booking == int64(gib(12))
	})
	require.Zero(t, s.status().GPUs[0].Outsiders)
	s.serve("b") // 8 + 6 would fit; 12 + 6 does not
	require.Equal(t, 1, s.servers["a"].Stats().Unloads)
	s.noOOM()
}

func TestFC11_LoadThatRunsOutOfMemoryMakesRoomOnceMoreAndIsTriedOnceMore(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 6), plainModel("c", 2), plainModel("b", 6)}})
	s.serve("a")
	s.serve("c")
	s.servers["b"].SetFaults(func(f *modelserver.Faults) { f.OOMLoads = 1 })
	s.serve("b")
	require.Equal(t, 2, s.servers["b"].Stats().LoadsStarted)
	require.Equal(t, 1, s.servers["a"].Stats().Unloads)
	require.Zero(t, s.servers["c"].Stats().UnloadCalls, "one victim more, not all")
	st := s.status().Scheduler
	require.EqualValues(t, 1, st.Evictions)
	require.EqualValues(t, 1, st.LoadFailures)
}

func TestFC11_SecondFailureOfThatKindIsTold(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 6), plainModel("c", 2), plainModel("b", 6)}})
	s.serve("a")
	s.serve("c")
	s.servers["b"].SetFaults(func(f *modelserver.Faults) { f.OOMLoads = 5 })
	a := s.post("/b/synthesize", "x")
	require.Equal(t, 503, a.status)
	doc := s.refusal(a)
	require.Equal(t, "load_failed", doc.Code)
	require.Contains(t, strings.ToLower(doc.Message), "out of memory")
	require.Equal(t, 2, s.servers["b"].Stats().LoadsStarted)
	require.Equal(t, 1, s.unloadCalls())
}
