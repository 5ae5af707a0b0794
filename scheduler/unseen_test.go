package scheduler

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// A container that was stopped has no name any more, and connections to its address end in a time-out.
func TestAServerThatAnswersNoProbeIsIdleOnceItsMemoryIsFree(t *testing.T) {
	fails := map[string]func(f *fixture){
		"no such host": func(f *fixture) {
			f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeUnreachable, Detail: "no such host"})
		},
		"status 502": func(f *fixture) { f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeWrong, Detail: "status 502"}) },
		"three time-outs": func(f *fixture) {
			for range healthTimeouts {
				f.probeTimesOut("a")
			}
		},
	}
	answers := func(f *fixture) {
		f.look(time.Second)
		f.probe("a", NotTold)
	}
	for name, c := range map[string]func(f *fixture, fail func(f *fixture)) (gone bool){
		"it was stopped": func(f *fixture, fail func(f *fixture)) bool {
			f.use(4000) // others
			f.warm("a", 10000)
			answers(f)
			f.use(-10000)
			f.look(time.Second)
			fail(f)
			return true
		},
		"it was stopped as another waited": func(f *fixture, fail func(f *fixture)) bool {
			f.warm("a", 10000)
			answers(f)
			f.submit("b")
			f.requireState("a", Stopping)
			f.step(UnloadDone{Slot: "a", Epoch: f.epochs["a"], Err: "no such host"})
			f.requireState("a", Ready)
			f.use(-10000)
			f.advance(time.Millisecond)
			fail(f)
			return true
		},
		"it was stopped, and had taken less than it claims": func(f *fixture, fail func(f *fixture)) bool {
			f.warm("large", 4000) // so has another
			f.look(time.Second)
			f.warm("a", 6000)
			answers(f)
			f.use(-6000)
			fail(f)
			return true
		},
		"it was stopped, and outsiders took half of that at once": func(f *fixture, fail func(f *fixture)) bool {
			f.warm("a", 10000)
			answers(f)
			f.use(-5000)
			fail(f)
			return false
		},
		"it lives, loaded": func(f *fixture, fail func(f *fixture)) bool {
			f.warm("a", 10000)
			answers(f)
			fail(f)
			return false
		},
		"outsiders have left before": func(f *fixture, fail func(f *fixture)) bool {
			f.use(6000)
			f.warm("a", 10000)
			f.look(time.Second)
			f.use(-6000)
			answers(f)
			fail(f)
			return false
		},
		"outsiders leave meanwhile": func(f *fixture, fail func(f *fixture)) bool {
			f.use(14000)
			f.warm("a", 10000)
			answers(f)
			fail(f)
			f.look(time.Second)
			f.use(-14000)
			return false
		},
		"it takes less than it claims": func(f *fixture, fail func(f *fixture)) bool {
			f.warm("a", 1000)
			answers(f)
			fail(f)
			return false
		},
		"another takes less than it claims": func(f *fixture, fail func(f *fixture)) bool {
			f.warm("large", 4000)
			f.warm("a", 10000)
			answers(f)
			fail(f)
			return false
		},
		"another is loaded meanwhile, and takes less than it claims": func(f *fixture, fail func(f *fixture)) bool {
			f.warm("a", 10000)
			answers(f)
			fail(f)
			f.warm("large", 4000)
			return false
		},
		"another gives its memory back just now": func(f *fixture, fail func(f *fixture)) bool {
			f.warm("a", 10000)
			f.warm("large", 14000)
			answers(f)
			fail(f)
			f.submit("c")
			f.requireState("large", Stopping)
			f.use(-10000)
			return false
		},
		"it has not answered since it was loaded": func(f *fixture, fail func(f *fixture)) bool {
			f.warm("a", 1000)
			fail(f)
			return false
		},
		"GPU memory can't be read": func(f *fixture, fail func(f *fixture)) bool {
			f.cards[0].Known, f.cards[0].Free, f.cards[0].Reason = false, 0, "not readable"
			f.sample()
			f.warm("a", 0)
			answers(f)
			fail(f)
			return false
		},
		"its process is measured": func(f *fixture, fail func(f *fixture)) bool {
			f.warm("a", 10000)
			answers(f)
			f.cards[0].Measured = map[string]gpu.Bytes{"a": 10000 * gpu.MiB}
			f.use(-10000) // others
			fail(f)
			return false
		},
	} {
		for how, fail := range fails {
			t.Run(name+", "+how, func(t *testing.T) {
				f := given(t, 28672, server("a", 10000, healthAlone), server("b", 20000), server("c", 18000), server("large", 14000))
				gone := c(f, fail)
				f.look(200 * time.Millisecond)
				require.Equal(t, gone, f.slot("a").State == Idle, f.slot("a").State)
				if !gone {
					f.probe("a", NotTold)
					require.NotEqual(t, Idle, f.slot("a").State)
				}
			})
		}
	}
}

func TestServersThatEndTogetherAreGoneTogether(t *testing.T) {
	for name, c := range map[string]struct {
		a, b, freed gpu.Bytes
		want        []string // those that are gone
	}{
		"both":                         {8000, 3000, 11000, []string{"a", "b"}},
		"as much as each":              {8000, 8000, 16000, []string{"a", "b"}},
		"the first":                    {8000, 3000, 8000, []string{"a"}},
		"the second":                   {8000, 3000, 3000, []string{"b"}},
		"one of two that are as large": {8000, 8000, 8000, nil},
		"neither":                      {8000, 3000, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 24576, server("a", c.a, healthAlone), server("b", c.b, healthAlone), server("left", 4000, func(c *SlotConfig) { c.Residual = 400 * gpu.MiB }))
			f.warm("left", 4000)
			f.look(time.Second)
			f.step(Unload{Slot: "left"})
			f.evicted("left", 3600)
			f.look(5 * time.Second)
			f.requireState("left", Idle)
			f.warm("a", c.a)
			f.look(time.Second)
			f.warm("b", c.b)
			f.look(time.Second)
			f.probe("a", NotTold)
			f.probe("b", NotTold)
			f.use(-c.freed)
			for _, slot := range []string{"a", "b"} {
				f.step(Probed{Slot: slot, Sent: f.now, Outcome: ProbeUnreachable, Detail: "no such host"})
			}
			f.look(time.Second)
			for _, slot := range []string{"a", "b"} {
				require.Equal(t, slices.Contains(c.want, slot), f.slot(slot).State == Idle, slot)
			}
		})
	}
}

func TestAServerThatWorksOnIsNotGoneThoughItCanNotBeReached(t *testing.T) {
	f := given(t, 24576, server("a", 10000, worksOn), server("next", 4000))
	f.warm("next", 4000)
	f.warm("a", 10000)
	f.look(time.Second)
	f.probe("a", Yes)
	f.leaves(f.submit("a"), NoAnswer)
	n := f.submit("next")
	f.use(-10000) // it may take that anew
	f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeUnreachable, Detail: "no such host"})
	f.look(time.Second)
	f.requireState("a", Ready)
	f.requireWaiting(n)
}

// A container that was stopped before we came. One that starts has a name, and may load.
func TestAServerThatIsNotKnownIsGoneOnceItCanNotBeReachedIfItsMemoryIsFree(t *testing.T) {
	for _, c := range []struct {
		outcome ProbeOutcome
		used    gpu.Bytes
		want    SlotState
	}{{ProbeUnreachable, 0, Idle}, {ProbeUnreachable, 10000, Unknown}, {ProbeWrong, 0, Unknown}, {ProbeTimedOut, 0, Unknown}} {
		cfg := defaults()
		cfg.Slots = []SlotConfig{server("a", 10000, healthAlone), server("b", 10000)}
		f := givenConfig(t, cfg, 16384)
		f.use(c.used)
		for range healthTimeouts {
			f.step(Probed{Slot: "a", Sent: f.now, Outcome: c.outcome, Detail: "no such host"})
		}
		f.look(time.Second)
		f.requireState("a", c.want)
	}
}

func TestALoadThatWasGivenUpMayGoOnAtAServerThatCanNotBeReached(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	a := f.submit("a")
	f.use(2000)
	f.cancel(a)
	f.submit("b")
	for range 20 {
		f.look(time.Second)
		if f.slot("a").State == Stopping {
			f.step(UnloadDone{Slot: "a", Epoch: f.epochs["a"], Err: "no such host"})
			f.advance(time.Millisecond)
			f.step(Probed{Slot: "a", Sent: f.now, Outcome: ProbeUnreachable, Detail: "no such host"})
		}
	}
	f.requireState("b", Idle)
}
