package scheduler

import (
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// What was learnt: spec §10.5.

// restarted is a new world that recalls what the state of another had learnt.
func restarted(t *testing.T, learnt map[string]Learnt, slots ...SlotConfig) *fixture {
	f := &fixture{t: t, s: New(), now: time.Unix(2_000_000, 0), works: map[string]bool{}, deaf: map[string]bool{}, slow: map[string]bool{}, jobs: map[JobID]*handle{}, epochs: map[string]uint64{}}
	f.cards = []Device{{UUID: "GPU-0", Total: 16384 * gpu.MiB, Free: 16384 * gpu.MiB, Known: true}}
	f.step(Recall{Learnt: learnt})
	cfg := defaults()
	cfg.Slots = slots
	f.configure(cfg)
	f.sample()
	return f
}

func TestWhatWasLearntComesBackAfterARestart(t *testing.T) {
	f := given(t, 16384, server("a", 8000), server("b", 9000))
	h := f.submitJob(Submit{Slot: "a", Priority: 7})
	f.advance(12 * time.Second)
	f.loaded("a")
	f.use(8000)
	f.release(h)
	used := f.now
	f.advance(time.Minute)
	f.submit("b")
	f.advance(3 * time.Second)
	f.evicted("a", 8000)

	learnt := f.s.Learnt()
	require.Equal(t, map[string]Learnt{"a": {LoadCost: 12 * time.Second, UnloadCost: 3 * time.Second, LastUse: used, LastPriority: 7, Footprints: []gpu.Bytes{8000 * gpu.MiB}}}, learnt)
	f = restarted(t, learnt, server("a", 8000), server("b", 9000))
	v := f.slot("a")
	require.Equal(t, 15*time.Second, v.Switch)
	require.Equal(t, used, v.LastUse)
	require.Equal(t, 7, v.LastPrio)
	require.Equal(t, 8000*gpu.MiB, v.Measured)
	require.Equal(t, learnt, f.s.Learnt(), "and is kept for the next time")
	require.Equal(t, defaultSwitch, f.slot("b").Switch)
}

func TestACostThatWasNotLearntIsNotNothing(t *testing.T) {
	f := restarted(t, map[string]Learnt{"a": {LoadCost: 12 * time.Second}, "b": {UnloadCost: 3 * time.Second}}, server("a", 9000), server("b", 9000))
	f.probe("a", No)
	f.probe("b", No)
	require.Equal(t, defaultSwitch, f.slot("b").Switch, "its load was never seen")
	f.warm("a", 9000)
	f.advance(time.Minute)
	f.submit("b")
	f.advance(8 * time.Second)
	f.evicted("a", 9000)
	require.Equal(t, 8*time.Second, f.s.Learnt()["a"].UnloadCost, "it is the first that was seen")
	f.advance(20 * time.Second)
	f.loaded("b")
	require.Equal(t, 20*time.Second, f.s.Learnt()["b"].LoadCost)
}

func TestTheLeastRecentlyUsedFromBeforeARestartGoesFirst(t *testing.T) {
	long := time.Unix(1_900_000, 0)
	f := restarted(t, map[string]Learnt{
		"a": {LastUse: long.Add(time.Hour), LastPriority: 100}, "b": {LastUse: long, LastPriority: 100},
	}, server("a", 7000), server("b", 7000), server("c", 7000))
	f.probe("a", Yes)
	f.probe("b", Yes)
	f.probe("c", No)
	f.free(2000)
	f.advance(time.Minute)
	f.submit("c")
	f.requireUnloads("b")
}

func TestWhatWasLearntOfARemovedSlotComesBackWithIt(t *testing.T) {
	f := given(t, 16384, server("a", 8000), server("b", 9000))
	h := f.submit("a")
	f.advance(12 * time.Second)
	f.loaded("a")
	f.use(8000)
	f.release(h)
	used := f.now
	all := f.cfg
	f.reconfigure(func(c *Config) { c.Slots = c.Slots[1:] })
	f.evicted("a", 8000)
	require.Equal(t, []string{"a"}, f.dropped)
	require.Equal(t, used, f.s.Learnt()["a"].LastUse)
	f.configure(all)
	v := f.slot("a")
	require.Equal(t, used, v.LastUse)
	require.Equal(t, 12*time.Second, v.Switch)
	require.Equal(t, 8000*gpu.MiB, v.Measured)
	require.Len(t, f.s.Learnt(), 1, "it is not there twice")
}

func TestWhatWasLearntOfSlotsThatAreNotThereIsKept(t *testing.T) {
	old := map[string]Learnt{"gone": {LoadCost: time.Second, LastUse: time.Unix(1_000, 0)}}
	f := restarted(t, old, server("a", 8000))
	require.Equal(t, old, f.s.Learnt())
	old["gone"] = Learnt{}
	require.Equal(t, time.Second, f.s.Learnt()["gone"].LoadCost, "it is a copy")
}

func TestNothingLearntIsNothingToKeep(t *testing.T) {
	f := given(t, 16384, server("a", 8000))
	require.Empty(t, f.s.Learnt())
	f.submit("a")
	f.loadFails("a", "it crashed")
	require.Empty(t, f.s.Learnt())
}

func TestAClockThatWasSetBackDoesNotPutTheLastUseIntoTheFuture(t *testing.T) {
	f := restarted(t, map[string]Learnt{"a": {LastUse: time.Unix(3_000_000, 0)}}, server("a", 8000))
	require.Equal(t, f.now, f.slot("a").LastUse)
	f.probe("a", Yes)
	f.advance(time.Second)
	f.probe("a", No) // would be older than its last use
	f.requireState("a", Idle)
}

func TestTheSlotsThatAreRememberedAreBounded(t *testing.T) {
	long := time.Unix(1_900_000, 0)
	many := map[string]Learnt{}
	for i := range 3 * maxPast {
		many[fmt.Sprintf("old%d", i)] = Learnt{LoadCost: time.Second, LastUse: long.Add(time.Duration(i) * time.Second)}
	}
	many["a"] = Learnt{LoadCost: time.Minute, LastUse: long.Add(-time.Hour)} // the oldest, but in use
	f := restarted(t, many, server("a", 8000), server("b", 8000))
	knows := func(name string) bool { _, known := f.s.Learnt()[name]; return known }
	require.Equal(t, maxPast+1, len(f.s.Learnt()))
	require.Equal(t, time.Minute, f.s.Learnt()["a"].LoadCost)
	require.True(t, knows(fmt.Sprintf("old%d", 3*maxPast-1)), "the latest stay")
	require.True(t, knows(fmt.Sprintf("old%d", 2*maxPast)))

	f.probe("b", No)
	f.warm("b", 8000)
	f.reconfigure(func(c *Config) { c.Slots = c.Slots[:1] })
	f.evicted("b", 8000)
	require.Equal(t, maxPast+1, len(f.s.Learnt()))
	require.True(t, knows("b"))
	require.False(t, knows(fmt.Sprintf("old%d", 2*maxPast)))
}

func TestWhichOfEquallyOldSlotsAreForgottenIsNoMatterOfChance(t *testing.T) {
	many := map[string]Learnt{}
	for i := range maxPast + 40 {
		many[fmt.Sprintf("old%03d", i)] = Learnt{LoadCost: time.Second}
	}
	first := restarted(t, many, server("a", 8000)).s.Learnt()
	require.True(t, maps.EqualFunc(first, restarted(t, many, server("a", 8000)).s.Learnt(), func(a, b Learnt) bool { return a.LoadCost == b.LoadCost }))
	_, kept := first["old039"]
	require.False(t, kept)
	_, kept = first["old040"]
	require.True(t, kept)
}

func TestTheFootprintsThatAreKeptAreBounded(t *testing.T) {
	var many []gpu.Bytes
	for i := range 2 * maxFootprints {
		many = append(many, gpu.Bytes(i+1)*gpu.MiB)
	}
	f := restarted(t, map[string]Learnt{"a": {Footprints: many}}, server("a", 8000))
	require.Equal(t, many[maxFootprints:], f.s.Learnt()["a"].Footprints, "the latest")
	require.Equal(t, gpu.Bytes(2*maxFootprints-1)*gpu.MiB, f.slot("a").Measured, "the 95th percentile: the second of 32")
	f.probe("a", No)
	f.warm("a", 8000)
	f.step(Unload{Slot: "a"})
	f.evicted("a", 8000)
	after := f.s.Learnt()["a"].Footprints
	require.Len(t, after, maxFootprints)
	require.Equal(t, 8000*gpu.MiB, after[maxFootprints-1])
	require.Equal(t, many[maxFootprints+1], after[0])
	after[0] = 0
	require.NotZero(t, f.s.Learnt()["a"].Footprints[0], "it is a copy")
}

func TestASlotThatComesFromAnotherKindOfSchedulerKeepsWhatWasLearnt(t *testing.T) {
	f := given(t, 16384, server("a", 8000))
	f.warm("a", 8000)
	before := f.s.Learnt()
	f.reconfigure(func(c *Config) { c.Mode = Locked })
	f.reconfigure(func(c *Config) { c.Mode = Evicting })
	require.Equal(t, before, f.s.Learnt())
}

func TestAnythingThatWasLearntOfASlotIsWorthKeeping(t *testing.T) {
	for name, learn := range map[string]func(sl *slot){
		"what a load costs":    func(sl *slot) { sl.loadCost.add(1) },
		"what an unload costs": func(sl *slot) { sl.stopCost.add(1) },
		"when it was used":     func(sl *slot) { sl.lastUse = time.Unix(1, 0) },
		"what a load took":     func(sl *slot) { sl.took.add(1) },
	} {
		sl := &slot{}
		_, known := sl.learnt()
		require.False(t, known, name)
		learn(sl)
		_, known = sl.learnt()
		require.True(t, known, name)
		sl.cfg.TurnOnly = true // it is never loaded
		_, known = sl.learnt()
		require.False(t, known, name)
	}
}

func TestASwitchCostsWhatWasMeasuredElseWhatIsConfiguredElse20Seconds(t *testing.T) {
	sl := &slot{}
	require.Equal(t, 20*time.Second, sl.switchCost())
	sl.stopCost.add(3 * time.Second)
	require.Equal(t, 20*time.Second, sl.switchCost(), "an unload alone is not a switch")
	sl.cfg.SwitchCost = 1
	require.EqualValues(t, 1, sl.switchCost(), "however little it is")
	sl.loadCost.add(5 * time.Second)
	require.Equal(t, 8*time.Second, sl.switchCost())
}

func TestWhatWasMeasuredIsTheNinetyFifthPercentileOfTheLastLoads(t *testing.T) {
	for loads, want := range map[int]gpu.Bytes{0: 0, 1: 1, 10: 10, 19: 19, 20: 19, 21: 20, 32: 31, 33: 32, 40: 39} {
		var f footprint
		for i := range loads {
			f.add(gpu.Bytes(i + 1))
			f.add(0)
			f.add(-1)
		}
		require.Equal(t, want, f.measured(), "after %d loads", loads)
	}
}

func TestALoadThatTakesLessThanOthersIsLearntAtItsEnd(t *testing.T) {
	f := given(t, 16384, server("a", 9000))
	load := func(takes gpu.Bytes) {
		h := f.submit("a")
		f.loaded("a")
		f.cards[0].Measured = map[string]gpu.Bytes{"a": takes * gpu.MiB}
		f.use(takes)
		f.release(h)
		f.sample()
	}
	load(9000)
	require.Equal(t, []gpu.Bytes{9000 * gpu.MiB}, f.s.Learnt()["a"].Footprints, "the most that any took is known at once")
	f.step(Unload{Slot: "a"})
	f.cards[0].Measured = map[string]gpu.Bytes{"a": 0}
	f.evicted("a", 9000)
	f.requireState("a", Idle)
	load(5000)
	require.Equal(t, []gpu.Bytes{9000 * gpu.MiB}, f.s.Learnt()["a"].Footprints)
	f.step(Unload{Slot: "a"})
	f.cards[0].Measured = map[string]gpu.Bytes{"a": 0}
	f.evicted("a", 5000)
	require.Equal(t, []gpu.Bytes{9000 * gpu.MiB, 5000 * gpu.MiB}, f.s.Learnt()["a"].Footprints)
}

func TestWhatALoadLeftIsNotItsServersAtAnotherAddress(t *testing.T) {
	f := given(t, 16384, server("a", 9000))
	f.warm("a", 9000)
	f.step(Unload{Slot: "a"})
	f.evicted("a", 9000-400)
	f.look(10 * time.Second)
	f.requireState("a", Idle)
	require.EqualValues(t, 400, f.booking("a"))
	f.reconfigure(func(c *Config) { c.Slots[0].Server = "elsewhere:1" })
	f.probe("a", No)
	f.sample()
	f.requireState("a", Idle)
	require.Zero(t, f.booking("a"))
	require.EqualValues(t, 400, f.outsiders())
}
