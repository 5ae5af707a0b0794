package scheduler

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func cloud(c *SlotConfig) {
	c.Cloud, c.Claim, c.GPUs, c.CanLoad, c.CanUnload, c.CanProbe, c.CanTell = true, 0, nil, false, false, false, false
}

// chooses asks whom a ladder leads to, and that asking changes nothing.
func (f *fixture) chooses(want string, candidates ...string) {
	f.t.Helper()
	before := f.dump()
	require.Equal(f.t, want, f.s.Choose(f.now, candidates, false), "%v", candidates)
	require.Equal(f.t, candidates[0], f.s.Choose(f.now, candidates, true), "pin_primary")
	require.Equal(f.t, before, f.dump(), "it has changed something")
}

// dump writes down all that the state knows of slots and GPUs.
func (f *fixture) dump() string {
	var b strings.Builder
	s := *f.s
	s.spare = spare{}
	fmt.Fprintf(&b, "%+v\n", s)
	for _, sl := range f.s.slots {
		fmt.Fprintf(&b, "%+v\n", *sl)
		for _, h := range sl.on {
			fmt.Fprintf(&b, "%+v\n", *h)
		}
	}
	for _, c := range f.s.gpus {
		fmt.Fprintf(&b, "%+v\n", *c)
	}
	return b.String()
}

func TestALadderLeadsToAWarmPrimaryThoughOthersAreWarmToo(t *testing.T) {
	f := given(t, 16384, server("a", 4000), server("b", 4000), server("c", 0, cloud))
	f.warm("a", 4000)
	f.warm("b", 4000)
	f.chooses("a", "a", "b", "c")
	f.chooses("b", "b", "a")
	f.submit("a")
	f.chooses("a", "a", "b") // that it works makes it no less warm
	f.chooses("a", "a")
	f.chooses("", "", "nobody")
	require.Empty(t, f.s.Choose(f.now, nil, false))
}

func TestALadderLeadsToAColdPrimaryThatNothingMustMakeRoomFor(t *testing.T) {
	f := given(t, 16384, server("a", 4000), server("b", 4000), server("big", 14000))
	f.warm("b", 4000)
	f.chooses("a", "a", "b")
	f.chooses("b", "big", "b")

	h := f.submit("a")
	f.requireState("a", Loading)
	f.chooses("a", "a", "b") // who comes while it loads goes there too
	f.loaded("a")
	f.release(h)
	f.chooses("a", "a", "b")

	blind := givenConfig(t, f.cfg, 16384) // no probe has answered: nothing is known of any
	blind.chooses("a", "a", "b")
	blind.probe("b", Yes)
	blind.chooses("b", "a", "b")
	blind.probe("big", No)
	blind.chooses("b", "a", "b") // its memory would fit, but its server has not answered
	blind.probe("a", No)
	blind.chooses("a", "a", "b")
}

// No unload of ours brings back what other programs hold.
func TestALadderLeadsPastAPrimaryForWhichOnlyOutsidersLeaveNoRoom(t *testing.T) {
	f := given(t, 16384, server("a", 4000), server("b", 2000))
	f.warm("b", 2000)
	f.use(11000)
	f.chooses("b", "a", "b")
	f.use(-1000)
	f.chooses("a", "a", "b")
}

func TestALadderLeadsToTheFirstWarmFallbackAndElseToThePrimary(t *testing.T) {
	f := given(t, 16384, server("a", 11000), server("b", 4000), server("c", 4000), server("d", 4000))
	f.chooses("a", "a", "b", "c")
	f.warm("c", 4000)
	f.warm("d", 4000)
	f.chooses("c", "a", "b", "c", "d") // b would fit, but a fallback must be warm
	f.chooses("d", "a", "d", "c")
	f.chooses("a", "a", "b")

	f.submit("a")
	f.advance(10 * time.Second) // past their hold
	f.requireUnloads("c")
	f.chooses("d", "a", "c", "d")
	f.evicted("c", 4000)
	f.chooses("a", "a", "c", "d") // the room was made already, and it loads
}

func TestACloudCandidateIsAlwaysWarm(t *testing.T) {
	f := given(t, 16384, server("a", 14000), server("b", 4000), server("sky", 0, cloud))
	f.chooses("a", "a", "sky") // it can be loaded
	f.warm("b", 4000)
	f.chooses("sky", "a", "sky", "b")
	f.chooses("b", "a", "b", "sky")
	f.chooses("sky", "sky", "b")
	f.requireRunning(f.submit("sky"), f.submit("sky"), f.submit("sky"))
	f.chooses("sky", "a", "sky")
}

func TestALadderLeadsToNobodyWhoTakesNoRequests(t *testing.T) {
	for name, spoil := range map[string]func(f *fixture, name string){
		"drained":  func(f *fixture, name string) { f.step(Drain{Slot: name}) },
		"disabled": func(f *fixture, name string) { f.change(name, func(c *SlotConfig) { c.Disabled = true }) },
		"unhealthy": func(f *fixture, name string) {
			f.step(Probed{Slot: name, Sent: f.now, Outcome: ProbeWrong, Detail: "500"})
		},
		"removed": func(f *fixture, name string) {
			f.submit(name) // it stays until that is done
			f.reconfigure(func(c *Config) {
				for i := range c.Slots {
					if c.Slots[i].Name == name {
						c.Slots = append(c.Slots[:i], c.Slots[i+1:]...)
						return
					}
				}
			})
		},
		"being unloaded": func(f *fixture, name string) { f.step(Unload{Slot: name}) },
		"on a lost GPU": func(f *fixture, name string) {
			c := &f.cards[map[string]int{"a": 0, "b": 1}[name]]
			c.Lost, c.Reason = true, "XID 79"
			f.sample()
		},
		"on a lent GPU": func(f *fixture, name string) {
			f.step(Lend{GPU: map[string]int{"a": 0, "b": 1}[name], Until: f.now.Add(time.Minute)})
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := defaults()
			cfg.Slots = []SlotConfig{server("a", 4000), server("b", 4000, on(1)), server("c", 4000, on(2))}
			f := givenConfig(t, cfg, 16384, 16384, 16384)
			for _, sl := range cfg.Slots {
				f.probe(sl.Name, Yes)
			}
			f.chooses("a", "a", "b", "c")
			f.chooses("b", "b", "c")
			spoil(f, "b")
			f.chooses("c", "b", "c")
			f.chooses("a", "a", "b", "c")
			spoil(f, "a")
			f.chooses("c", "a", "b", "c")
			f.chooses("a", "a", "b", "nobody")
		})
	}
	f := given(t, 16384, server("a", 14000), server("b", 4000), server("sky", 0, cloud))
	f.warm("b", 4000)
	f.step(Drain{Slot: "sky"})
	f.chooses("b", "a", "sky", "b")
	f.step(Drain{Slot: "sky", Off: true})
	f.chooses("sky", "a", "sky", "b")
	f.step(Drain{})
	f.chooses("a", "a", "sky", "b")
}

// change changes the settings of one slot.
func (f *fixture) change(name string, set func(c *SlotConfig)) {
	f.t.Helper()
	f.reconfigure(func(c *Config) {
		for i := range c.Slots {
			if c.Slots[i].Name == name {
				set(&c.Slots[i])
			}
		}
	})
}

func TestAPrimaryThatCoolsDownIsNotWaitedForWhereAFallbackIsWarm(t *testing.T) {
	f := given(t, 16384, server("a", 4000), server("b", 4000))
	f.warm("b", 4000)
	f.submit("a")
	f.loadFails("a", "no such model")
	f.chooses("b", "a", "b")
	f.advance(time.Second - 1)
	f.chooses("b", "a", "b")
	f.advance(1)
	f.chooses("a", "a", "b")
}

func TestAPrimaryWhoseGateIsClosedForAnotherIsNotWarm(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("t", 10000), server("c", 0, cloud))
	f.warm("a", 10000)
	runs := f.submit("a")
	f.submit("t")
	f.advance(301 * time.Second) // t is overdue: a drains
	require.False(t, f.slot("a").GateOpen)
	f.chooses("c", "a", "c")
	f.release(runs)
	f.requireState("a", Stopping)
	f.chooses("c", "a", "c")
}

func TestAPrimaryThatIsAboutToGoForWantOfUseIsWarm(t *testing.T) {
	f := given(t, 16384, server("a", 4000, idles(time.Minute), asksBusy), server("b", 4000))
	f.warm("b", 4000)
	f.warm("a", 4000)
	f.slow["a"] = true
	f.advance(time.Minute)
	require.False(t, f.slot("a").GateOpen)
	f.requireState("a", Ready)
	f.chooses("a", "a", "b")
	f.requireRunning(f.submit("a"))
}

func TestAServerThatGoesByItselfWhileItIsAboutToGoForWantOfUseIsLoadedAnew(t *testing.T) {
	f := given(t, 16384, server("a", 4000, idles(time.Minute), asksBusy))
	f.warm("a", 4000)
	f.slow["a"] = true
	f.advance(time.Minute)
	require.False(t, f.slot("a").GateOpen)
	f.use(-4000)
	f.probe("a", No)
	f.requireState("a", Idle)
	require.True(t, f.slot("a").GateOpen)
	f.submit("a")
	f.requireState("a", Loading)
}

func TestWithoutEvictionsEveryServerThatAnswersIsWarm(t *testing.T) {
	for _, mode := range []Mode{Locked, Passthrough} {
		cfg := defaults()
		cfg.Mode, cfg.Slots = mode, []SlotConfig{server("a", 99999), server("b", 99999)}
		f := givenConfig(t, cfg, 16384)
		f.probe("a", No)
		f.probe("b", No)
		f.chooses("a", "a", "b")
		f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeRefused, Detail: "connection refused"})
		f.chooses("b", "a", "b")
	}
}

// Whom a ladder leads to is one of its candidates; if it is not the first, it
// runs as soon as its turn comes, without a load or an unload.
func TestALadderNeverLeadsToAColdFallback(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		names := []string{"a", "b", "c", "sky"}
		f := given(t, 16384, server("a", 9000), server("b", 6000), lazyServer("c", 5000), server("sky", 0, cloud))
		var runs []*handle
		for range rapid.IntRange(1, 25).Draw(r, "events") {
			name := rapid.SampledFrom(names).Draw(r, "name")
			switch rapid.IntRange(0, 5).Draw(r, "event") {
			case 0:
				if h := f.submit(name); h.refusal == nil {
					runs = append(runs, h)
				}
			case 1:
				for i, h := range runs {
					if h.running {
						f.release(h)
						runs = append(runs[:i], runs[i+1:]...)
						break
					}
				}
			case 2:
				if name != "sky" && f.slot(name).State == Loading {
					f.loaded(name)
				}
			case 3:
				if name != "sky" && f.slot(name).State == Stopping {
					f.unloaded(name)
				}
			case 4:
				f.advance(time.Duration(rapid.IntRange(1, 400).Draw(r, "seconds")) * time.Second)
			default:
				f.step(Drain{Slot: name, Off: rapid.Bool().Draw(r, "off")})
			}
			ladder := rapid.SliceOfN(rapid.SampledFrom(append(names, "nobody")), 1, 4).Draw(r, "ladder")
			before := f.dump()
			got := f.s.Choose(f.now, ladder, false)
			if before != f.dump() {
				r.Fatalf("choosing out of %v has changed something", ladder)
			}
			if got == ladder[0] {
				continue
			}
			v := f.slot(got)
			if v.Draining || got != "sky" && (v.State != Ready || v.Health != "healthy" || !v.GateOpen) {
				r.Fatalf("%v leads to %+v", ladder, v)
			}
		}
	})
}
