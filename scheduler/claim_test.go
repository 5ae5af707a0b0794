package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// A claim that was proved too small is not made again (K9).

// outgrown is a world in which a, whose vram is 4096 MiB, has taken 9000 and is unloaded, and b (8000) is loaded.
func outgrown(t *testing.T, how func(f *fixture)) *fixture {
	f := given(t, 16384, server("a", 4096), server("b", 8000))
	h := f.submit("a")
	f.loaded("a")
	f.use(9000)
	how(f)
	f.release(h)
	f.advance(time.Minute)
	f.sample()
	hb := f.submit("b") // it needs what a takes
	if f.slot("a").State == Ready {
		f.step(Unload{Slot: "a"})
	}
	f.cards[0].Measured = nil
	f.evicted("a", 9000)
	f.loaded("b")
	f.use(8000)
	f.release(hb)
	f.advance(time.Minute)
	f.sample()
	return f
}

// A server's word is about all of its GPUs together.
func TestWhatAServerReportsIsSharedAmongItsGPUs(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("both", 4000, on(0, 1))}
	f := givenConfig(t, cfg, 16384, 16384)
	f.probe("both", Yes)
	f.step(Probed{Slot: "both", Sent: f.now, Outcome: ProbeAnswered, Loaded: Yes, Resident: 9000 * gpu.MiB})
	for i, h := range f.slot("both").Holds {
		require.Equal(t, 4500*gpu.MiB, h.Booking, "GPU %d", i)
	}
	require.Equal(t, 9000*gpu.MiB, f.slot("both").Measured)
}

func TestK9_TheNextClaimIsWhatWasSeenLately(t *testing.T) {
	for name, how := range map[string]func(f *fixture){
		"in the free memory": func(*fixture) {},
		"by process": func(f *fixture) {
			f.cards[0].Measured = map[string]gpu.Bytes{"a": 9000 * gpu.MiB}
			f.sample()
		},
		"by the server's word": func(f *fixture) {
			f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeAnswered, Loaded: Yes, Resident: 9000 * gpu.MiB})
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := outgrown(t, how)
			f.unloads = nil
			v := f.slot("a")
			require.Equal(t, 9000*gpu.MiB, v.Claim)
			require.True(t, v.ClaimSeen)
			f.submit("a")
			f.requireUnloads("b") // 8384 MiB are free: 4096 would fit
			d := f.decided("claim_raised", "a")
			require.Contains(t, d.Reason, "its vram is 4GiB, and 8.79GiB was seen of it lately")
			f.evicted("b", 8000)
			require.EqualValues(t, 9000, f.booking("a"))

			learnt := f.s.Learnt()
			f = restarted(t, learnt, server("a", 4096), server("b", 8000))
			f.probe("a", No)
			f.probe("b", No)
			f.submit("a")
			require.EqualValues(t, 9000, f.booking("a"), "after a restart, too")
			require.Equal(t, "a", f.decided("claim_raised", "a").Slot)
		})
	}
}

func TestK9_WhatALoadedServerTakesIsKnownAfterARestart(t *testing.T) {
	f := given(t, 16384, server("a", 4096))
	h := f.submit("a")
	f.loaded("a")
	f.cards[0].Measured = map[string]gpu.Bytes{"a": 9000 * gpu.MiB}
	f.use(9000)
	f.release(h)
	f = restarted(t, f.s.Learnt(), server("a", 4096))
	f.probe("a", No)
	f.submit("a")
	require.EqualValues(t, 9000, f.booking("a"))
}

func TestK9_WhatADeadServerTookIsRemembered(t *testing.T) {
	f := given(t, 16384, server("a", 4096))
	h := f.submit("a")
	f.loaded("a")
	f.cards[0].Measured = map[string]gpu.Bytes{"a": 9000 * gpu.MiB}
	f.use(9000)
	f.release(h)
	f.cards[0].Measured = map[string]gpu.Bytes{}
	f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeRefused, Detail: "connection refused"})
	require.Equal(t, 9000*gpu.MiB, f.slot("a").Claim)
}

func TestK9_ALoadThatFailsTeachesWhatItTook(t *testing.T) {
	f := given(t, 16384, server("a", 4096))
	f.submit("a")
	f.cards[0].Measured = map[string]gpu.Bytes{"a": 9000 * gpu.MiB}
	f.use(9000)
	f.loadRunsOut("a")
	require.Equal(t, 9000*gpu.MiB, f.slot("a").Claim)
}

func TestK9_TheRaisedClaimIsSaidOnceForEachFigure(t *testing.T) {
	f := outgrown(t, func(*fixture) {})
	count := func() (n int) {
		for _, d := range f.decisions {
			if d.Kind == "claim_raised" {
				n++
			}
		}
		return n
	}
	for range 3 {
		h := f.submit("a")
		if f.slot("b").State == Stopping {
			f.evicted("b", 8000)
		}
		f.loaded("a")
		f.use(9000)
		f.release(h)
		f.step(Unload{Slot: "a"})
		f.evicted("a", 9000)
		require.Equal(t, 1, count())
	}
}

// cycle loads a slot once, takes so much, and unloads it.
func (f *fixture) cycle(name string, takes gpu.Bytes) {
	f.t.Helper()
	h := f.submit(name)
	f.requireState(name, Loading)
	f.loaded(name)
	f.use(takes)
	f.release(h)
	f.step(Unload{Slot: name})
	f.evicted(name, takes)
	f.look(time.Second)
	f.requireState(name, Idle)
}

// A card may be replaced by a smaller one, or lend a part of its memory to a virtual machine.
func TestWhatWasSeenOfASlotIsBoundedByTheCardAsItIsNow(t *testing.T) {
	f := given(t, 16384, server("a", 4096))
	f.cycle("a", 15000)
	require.Equal(t, 15000*gpu.MiB, f.slot("a").Claim)
	f.cards[0].Total, f.cards[0].Free = 8192*gpu.MiB, 8192*gpu.MiB
	f.sample()
	require.LessOrEqual(t, f.slot("a").Claim, 8192*gpu.MiB, "it could never be loaded again")
	h := f.submit("a")
	f.loaded("a")
	require.True(t, h.running)
}

func TestK9_OneSpikeNeitherShutsAConsumerOutNorLasts(t *testing.T) {
	f := given(t, 16384, server("a", 4096), server("pin", 2000, pinned))
	f.free(16084) // a desktop
	f.cycle("a", 16000)
	require.Equal(t, 16000*gpu.MiB, f.slot("a").Claim, "which can't be had beside the desktop")
	loads := 0
	for f.slot("a").ClaimSeen {
		f.cycle("a", 4000) // the desktop's memory is never free: it is loaded all the same
		loads++
		require.Less(t, loads, 12)
	}
	require.Greater(t, loads, 4)
	require.Equal(t, 4096*gpu.MiB, f.slot("a").Claim)
	require.Zero(t, f.s.Snapshot(f.now).Counts.Refused)

	f.cycle("a", 16000)
	f.warm("pin", 2000)
	f.cycle("a", 4000) // beside what is pinned
	require.Zero(t, f.s.Snapshot(f.now).Counts.Refused)
	f.requireState("pin", Ready)
}

func TestK9_NeverFitsIsAboutTheConfiguredClaimAlone(t *testing.T) {
	f := given(t, 16384, server("a", 4096))
	f.cycle("a", 16384)
	f.reconfigure(func(c *Config) { c.Reserve = 8 * gpu.GiB })
	require.Equal(t, (16384-8192-256)*gpu.MiB, f.slot("a").Claim)
	f.submit("a")
	f.requireState("a", Loading)
}

// What outsiders held before its load is none of a slot's, whenever it comes back.
func TestOutsidersThatLeaveBesideAnUnloadRaiseNoClaim(t *testing.T) {
	f := given(t, 24576, server("a", 7500))
	f.free(15576) // a game holds 9000
	f.warm("a", 7000)
	f.advance(time.Minute)
	f.sample()
	f.step(Unload{Slot: "a"})
	f.unloaded("a")
	f.use(-7000 - 9000)
	f.requireState("a", Idle)
	v := f.slot("a")
	require.Equal(t, 7500*gpu.MiB, v.Claim)
	require.False(t, v.ClaimSeen)
}

func TestK9_AFootprintIsForgottenAsNewOnesCome(t *testing.T) {
	var f footprint
	require.Zero(t, f.lately())
	f.add(9)
	require.EqualValues(t, 9, f.lately())
	for range 6 {
		f.add(4)
		require.EqualValues(t, 9, f.lately())
	}
	for range 5 {
		f.add(4)
	}
	require.EqualValues(t, 4, f.lately())
	f.add(6)
	require.EqualValues(t, 6, f.lately(), "growth counts at once")
}

func TestK9_MemoryOfOthersThatIsFreedMeanwhileIsNoPartOfAFootprint(t *testing.T) {
	f := given(t, 24576, server("a", 4096), server("other", 8000))
	f.warm("other", 8000)
	f.warm("a", 4000)
	f.step(Unload{Slot: "a"})
	f.unloaded("a")
	f.step(Probed{Slot: "other", Sent: f.now, Outcome: ProbeRefused, Detail: "connection refused"})
	f.use(-12000)
	f.requireState("a", Idle)
	require.Equal(t, 4096*gpu.MiB, f.slot("a").Claim)
	require.False(t, f.slot("a").ClaimSeen)
}

// keptBack is a world in which a, whose vram is 4096 MiB, has taken 9000 once, and v holds 8000 of which it gives back only so many.
func keptBack(t *testing.T, back gpu.Bytes) (*fixture, *handle) {
	cfg := defaults()
	cfg.MaxEvictions = 0
	cfg.Slots = []SlotConfig{server("a", 4096), server("v", 8000)}
	f := givenConfig(t, cfg, 16384)
	f.probe("a", No)
	f.probe("v", No)
	f.cycle("a", 9000)
	f.warm("v", 8000)
	f.advance(time.Minute)
	f.sample()
	h := f.submit("a")
	f.requireState("v", Stopping)
	f.unloaded("v")
	f.use(-back)
	for f.slot("v").State == Stopping {
		f.look(time.Second)
	}
	return f, h
}

func TestK9_ARaisedClaimSettlesForWhatUnloadsBringBack(t *testing.T) {
	f, h := keptBack(t, 100)
	f.requireState("a", Loading)
	require.EqualValues(t, 16384-8000+100-256, f.booking("a"), "all that there is but the cushion")
	f.loaded("a")
	f.requireRunning(h)
	require.Equal(t, 9000*gpu.MiB, f.slot("a").Claim, "what was seen of it is not forgotten for that")
}

// What it left behind itself, and will use again, is part of what it can have.
func TestK9_ARaisedClaimSettlesForWhatIsThereAndWhatItHoldsItself(t *testing.T) {
	f := given(t, 16384, server("a", 4096, func(c *SlotConfig) { c.Residual = 500 * gpu.MiB }), server("v", 7000, pinned))
	h := f.submit("a")
	f.loaded("a")
	measured := func(mib gpu.Bytes) { f.cards[0].Measured = map[string]gpu.Bytes{"a": mib * gpu.MiB} }
	measured(9200)
	f.use(9200)
	f.release(h)
	f.step(Unload{Slot: "a"})
	measured(500)
	f.evicted("a", 8700)
	f.look(time.Second)
	f.requireState("a", Idle)
	f.warm("v", 7000)
	f.advance(time.Minute)
	f.sample()
	f.submit("a")
	f.requireState("a", Loading)
	require.EqualValues(t, 16384-7000-256, f.booking("a"))
}

func TestK9_ARaisedClaimIsNotWhatConflictsAreAbout(t *testing.T) {
	f := given(t, 16384, server("a", 4096, func(c *SlotConfig) { c.Conflicts = []string{"v"} }), server("v", 1000, pinned))
	f.cycle("a", 9000)
	f.warm("v", 1000)
	f.advance(time.Minute)
	f.sample()
	h := f.submit("a") // there is room for all of 9000
	f.requireWaiting(h)
	f.requireState("a", Idle)
	f.look(9 * time.Second)
	f.requireWaiting(h)
	f.look(2 * time.Second)
	require.Contains(t, f.requireRefused(h, VRAMExhausted).Message, "v conflicts with it and is protected by pin")
	require.Equal(t, 9000*gpu.MiB, f.slot("a").Claim)
}

func TestK9_ARaisedClaimSettlesForTheFullerOfItsGPUs(t *testing.T) {
	cfg := defaults()
	cfg.Slots = []SlotConfig{server("a", 8000, on(0, 1))}
	f := givenConfig(t, cfg, 16384, 16384)
	f.probe("a", No)
	h := f.submit("a")
	f.loaded("a")
	take := func(mib gpu.Bytes) {
		for i := range f.cards {
			f.cards[i].Free -= mib * gpu.MiB
		}
		f.sample()
	}
	take(9000)
	f.release(h)
	f.step(Unload{Slot: "a"})
	f.unloaded("a")
	take(-9000)
	f.look(time.Second)
	f.requireState("a", Idle)
	require.Equal(t, 18000*gpu.MiB, f.slot("a").Claim)
	f.cards[1].Free -= 8000 * gpu.MiB // a desktop
	f.sample()
	f.submit("a")
	f.requireState("a", Loading)
	require.EqualValues(t, 16384-8000-256, f.booking("a"))
}

func TestK9_ARaisedClaimIsSaidAgainOnceItHasGrownByMoreThanATwentieth(t *testing.T) {
	f := given(t, 16384, server("a", 4096))
	said := func() (needs []gpu.Bytes) {
		for _, d := range f.decisions {
			if d.Kind == "claim_raised" {
				needs = append(needs, d.Need/gpu.MiB)
			}
		}
		return needs
	}
	for _, c := range []struct {
		takes gpu.Bytes
		said  []gpu.Bytes // before this load, by what the one before it took
	}{{9000, nil}, {9450, []gpu.Bytes{9000}}, {9500, []gpu.Bytes{9000}}, {9500, []gpu.Bytes{9000, 9500}}, {9500, []gpu.Bytes{9000, 9500}}} {
		f.cycle("a", c.takes)
		require.Equal(t, c.said, said())
	}
}

func TestK9_AClaimThatWhatWasSeenExceedsIsToldWithBoth(t *testing.T) {
	f := restarted(t, map[string]Learnt{"a": {Footprints: []gpu.Bytes{20000 * gpu.MiB}}}, server("a", 4096))
	f.probe("a", No)
	f.submit("a")
	require.Contains(t, f.decided("claim_raised", "a").Reason, "its vram is 4GiB, and 19.53GiB was seen of it lately: its next load claims 15.")
}
