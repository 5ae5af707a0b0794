package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Work that outlives its client (K8).

func worksOn(c *SlotConfig) { c.WorksOn = true }

// leaves ends a running job whose client has left.
func (f *fixture) leaves(h *handle, o Outcome) {
	f.t.Helper()
	f.step(Release{Job: h.id, Outcome: o, Left: true})
	h.running = false
}

// besideNext is a world in which a server and another, next, are both loaded.
func besideNext(t *testing.T, name string, set ...func(*SlotConfig)) *fixture {
	t.Helper()
	f := given(t, 24576, server(name, 8000, set...), server("next", 8000))
	f.warm(name, 8000)
	f.warm("next", 8000)
	return f
}

func TestK8_TheLockStaysUntilTheBusyRouteSaysIdle(t *testing.T) {
	for name, o := range map[string]Outcome{"before the answer": NoAnswer, "in its middle": Served} {
		t.Run(name, func(t *testing.T) {
			f := besideNext(t, "swama", asksBusy)
			f.works["swama"] = true
			f.leaves(f.submit("swama"), o)
			h := f.submit("next")
			f.advance(time.Minute)
			f.requireWaiting(h)
			require.Equal(t, 1, f.slot("swama").Held)
			require.Zero(t, f.slot("swama").Active, "its place is free")
			f.works["swama"] = false
			f.advance(busyPoll)
			f.requireRunning(h)
			require.Zero(t, f.slot("swama").Held)
		})
	}
}

func TestK8_TheNextJobOfTheSameSlotEntersAtOnce(t *testing.T) {
	f := given(t, 24576, server("swama", 8000, asksBusy))
	f.warm("swama", 8000)
	f.works["swama"] = true
	f.leaves(f.submit("swama"), NoAnswer)
	f.requireRunning(f.submit("swama"))
}

func TestK8_AServerThatStopsIsLeftWithOneQuestion(t *testing.T) {
	f := besideNext(t, "llama", asksBusy)
	f.leaves(f.submit("llama"), NoAnswer)
	f.requireRunning(f.submit("next"))
}

func TestK8_ItIsNotUnloadedWhileItWorksForOneWhoLeft(t *testing.T) {
	f := given(t, 16384, server("swama", 8000, asksBusy), server("next", 12000))
	f.warm("swama", 8000)
	f.works["swama"] = true
	f.leaves(f.submit("swama"), NoAnswer)
	f.advance(time.Minute)
	f.submit("next")
	f.advance(6 * time.Minute)
	f.requireUnloads()
	f.works["swama"] = false
	f.advance(busyPoll)
	f.requireUnloads("swama")
}

func TestK8_TheHoldIsBoundedByDrainTimeout(t *testing.T) {
	for name, set := range map[string]func(*SlotConfig){"with a busy route": asksBusy, "without": worksOn} {
		t.Run(name, func(t *testing.T) {
			f := besideNext(t, "swama", set)
			f.works["swama"] = true
			f.leaves(f.submit("swama"), NoAnswer)
			h := f.submit("next")
			f.advance(defaults().DrainTimeout - 1)
			f.requireWaiting(h)
			f.advance(1)
			f.requireRunning(h)
			require.Contains(t, f.decided("busy_unknown", "swama").Reason, "clients that left")
			f.works["swama"] = false
			f.advance(time.Second)
			require.Zero(t, f.slot("swama").Held)
			require.EqualValues(t, 3, f.s.Snapshot(f.now).Counts.Ended)
		})
	}
}

func TestK8_WorkThatWasAcceptedIsNotBounded(t *testing.T) {
	f := given(t, 24576, lazyServer("comfyui", 8000, async), server("next", 8000))
	f.works["comfyui"] = true
	f.releaseAs(f.submit("comfyui"), Accepted)
	f.leaves(f.submit("comfyui"), NoAnswer)
	h := f.submit("next")
	f.advance(defaults().DrainTimeout)
	require.Equal(t, 1, f.slot("comfyui").Held)
	f.advance(time.Hour)
	f.requireWaiting(h)
}

// Nobody knows whether a load is over that happens inside accepted work, however long ago others left.
func TestK8_OneWhoLeavesDoesNotEndTheLoadInsideAnEarlierJob(t *testing.T) {
	f := given(t, 24576, lazyServer("comfyui", 8000, async), server("next", 8000))
	f.works["comfyui"] = true
	f.releaseAs(f.submit("comfyui"), Accepted)
	f.leaves(f.submit("comfyui"), NoAnswer)
	f.advance(defaults().DrainTimeout)
	h := f.submit("next")
	f.sample()
	f.requireState("next", Idle)
	require.Equal(t, "waits for the first job of comfyui, inside which it loads", f.slot("next").Why)
	f.works["comfyui"] = false
	f.advance(busyPoll)
	f.use(8000)
	f.requireState("next", Loading)
	f.requireWaiting(h)
}

func TestK8_WithoutABusyRouteAServerIsTakenToStop(t *testing.T) {
	f := besideNext(t, "kokoro")
	f.leaves(f.submit("kokoro"), NoAnswer)
	f.requireRunning(f.submit("next"))
}

func TestK8_ABusyRouteThatTellsNothingHoldsNothing(t *testing.T) {
	f := besideNext(t, "tgi", asksBusy)
	f.slow["tgi"] = true
	f.leaves(f.submit("tgi"), NoAnswer)
	h := f.submit("next")
	f.step(BusyAnswer{Slot: "tgi", Sent: f.now, Busy: true, Failed: true}) // no answer in time: it may compute
	f.requireWaiting(h)
	f.step(BusyAnswer{Slot: "tgi", Sent: f.now, Busy: true, Failed: true, Mute: true})
	f.requireRunning(h)
}

func TestK8_WhatNeverReachedTheServerHoldsNothing(t *testing.T) {
	for name, o := range map[string]Outcome{"refused": DialRefused, "died": ServerDied} {
		t.Run(name, func(t *testing.T) {
			f := besideNext(t, "swama", worksOn)
			f.leaves(f.submit("swama"), o)
			require.Zero(t, f.slot("swama").Held)
			f.requireRunning(f.submit("next"))
		})
	}
}

func TestK8_ADeadServerWorksForNobody(t *testing.T) {
	f := besideNext(t, "swama", worksOn)
	f.leaves(f.submit("swama"), NoAnswer)
	h := f.submit("next")
	f.step(Probed{Slot: "swama", Sent: f.now, Outcome: ProbeRefused, Detail: "connection refused"})
	f.requireRunning(h)
	require.Zero(t, f.slot("swama").Held)
}

func TestAcceptedWorkThatEndsCountsAsAFirstJob(t *testing.T) {
	f := given(t, 24576, lazyServer("comfyui", 8000, async))
	f.use(2000)
	f.works["comfyui"] = true
	f.releaseAs(f.submit("comfyui"), Accepted)
	f.use(3000)
	require.EqualValues(t, 2000, f.outsiders())
	f.works["comfyui"] = false
	f.advance(10 * time.Second)
	f.sample()
	require.Zero(t, f.outsiders(), "from its first job on a slot is taken to hold its booking")
}
