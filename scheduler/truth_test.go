package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// What messages say is what was seen (N2).

func TestN2_WhatAnUnloadGaveBackIsTheRiseThatWasSeen(t *testing.T) {
	for _, c := range []struct {
		name                string
		claim, takes, gives gpu.Bytes
		want                string
	}{
		{"booked for more than it could give", 12892, 12083, 12083, "gave back 11.8GiB of 11.8GiB"},
		{"it kept a part", 10240, 10240, 8192, "gave back 8GiB of 10GiB"},
		{"it gave nothing", 10240, 10240, 0, "gave back 0B of 10GiB"},
		{"it held more than it was booked for", 4096, 9216, 9216, "gave back 9GiB of 9GiB"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := given(t, 16384, server("a", c.claim))
			f.warm("a", c.takes)
			f.step(Unload{Slot: "a"})
			f.answered("a")
			f.use(-c.gives)
			f.look(10 * time.Second)
			require.Equal(t, c.want, f.decided("unloaded", "a").Reason)
		})
	}
}

func TestN2_NothingGivesBackMoreThanTheCardHas(t *testing.T) {
	f := given(t, 24576, server("a", 20000), server("b", 20000))
	f.free(1000)
	f.probe("a", Yes)
	f.probe("b", Yes) // overcommitted by adoption
	f.step(Unload{Slot: "a"})
	f.unloaded("a")
	f.free(24000)
	f.look(time.Second)
	require.Equal(t, "gave back 19.53GiB of 19.53GiB", f.decided("unloaded", "a").Reason)
	f.step(Unload{Slot: "b"})
	f.unloaded("b")
	f.look(10 * time.Second)
	require.Equal(t, "gave back 0B of 576MiB", f.decided("unloaded", "b").Reason)
}

func TestN2_WithoutTelemetryNobodyKnowsWhatCameBack(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	f.blind = "nvidia-smi: not found"
	f.sample()
	f.submit("a")
	f.loaded("a")
	f.release(f.lastJob("a"))
	f.step(Unload{Slot: "a"})
	f.unloaded("a")
	f.advance(time.Second)
	require.Contains(t, f.decided("unloaded", "a").Reason, "no telemetry")
}

func TestN2_MemoryThatWasGoneAlreadyIsNotWaitedFor(t *testing.T) {
	for name, driver := range map[string]gpu.Bytes{"an empty card": 0, "a card with a desktop": 700} {
		t.Run(name, func(t *testing.T) {
			f := given(t, 16384, server("a", 10000), server("b", 12000))
			f.use(driver)
			f.warm("a", 10000)
			f.advance(time.Minute)
			f.use(-10000 + 100) // it unloaded by itself, but for a bit, and no probe has said so yet
			f.step(Unload{Slot: "a"})
			f.unloaded("a")
			f.advance(50 * time.Millisecond)
			f.sample()
			f.requireState("a", Idle)
			require.Equal(t, "its memory was gone already: its server had been unloaded before", f.decided("unloaded", "a").Reason)
			f.submit("b")
			f.requireState("b", Loading)
		})
	}
}

func TestN2_MemoryCountsAsGoneUpToTheCushion(t *testing.T) {
	for left, state := range map[gpu.Bytes]SlotState{256: Idle, 257: Stopping} {
		f := given(t, 16384, server("a", 10000))
		f.warm("a", 10000)
		f.advance(time.Minute)
		f.use(-10000 + left)
		f.step(Unload{Slot: "a"})
		f.unloaded("a")
		f.advance(50 * time.Millisecond)
		f.sample()
		f.requireState("a", state)
	}
}

func TestN2_MeasuredMemoryThatWasGoneAlreadyIsSaidToBe(t *testing.T) {
	f := given(t, 16384, server("a", 10000))
	f.warm("a", 10000)
	f.cards[0].Measured = map[string]gpu.Bytes{"a": 0}
	f.free(16384)
	f.step(Unload{Slot: "a"})
	f.unloaded("a")
	f.sample()
	require.Contains(t, f.decided("unloaded", "a").Reason, "gone already")
}

func TestN2_MemoryThatIsStillThereIsWaitedForThoughTheServerSaysThatItIsUnloaded(t *testing.T) {
	f := given(t, 16384, server("a", 13312))
	f.warm("a", 5000) // less than it is booked for
	f.advance(time.Minute)
	f.step(Unload{Slot: "a"})
	f.unloaded("a")
	f.look(3 * time.Second)
	f.requireState("a", Stopping)
	f.use(-5000)
	f.look(750 * time.Millisecond)
	f.requireState("a", Idle)
	require.Equal(t, "gave back 4.88GiB of 4.88GiB", f.decided("unloaded", "a").Reason)
}

func TestN2_AnOutsiderThatCameDuringALoadIsNoResidueWhereProcessesTell(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 12000))
	f.submit("a")
	f.cards[0].Measured, f.cards[0].Outsiders = map[string]gpu.Bytes{"a": 0}, []string{"PID 7 game"}
	f.use(9000) // a game
	f.loadFails("a", "it crashed")
	require.Zero(t, f.booking("a"))
	require.EqualValues(t, 9000, f.outsiders())
	h := f.submit("b")
	f.advance(10 * time.Second)
	r := f.requireRefused(h, VRAMExhausted)
	require.Contains(t, r.Message, "PID 7 game")
	require.NotContains(t, r.Message, "has not given back")
}

func TestN2_WhereNoProcessTellsBothAreNamed(t *testing.T) {
	f := given(t, 16384, server("a", 10000), server("b", 12000))
	f.submit("a")
	f.cards[0].Outsiders = []string{"PID 7 game"}
	f.use(9000)
	f.loadFails("a", "it crashed")
	h := f.submit("b")
	f.advance(10 * time.Second)
	r := f.requireRefused(h, VRAMExhausted)
	require.Contains(t, r.Message, "a has not given back 8.79GiB since a load of it failed, unless a program holds that which was started meanwhile (on the GPU run: PID 7 game)")
}

func TestN5_DurationsAreRoundedForPeople(t *testing.T) {
	for d, want := range map[time.Duration]string{
		60235826940 * time.Nanosecond:   "1m0s",
		90 * time.Second:                "1m30s",
		12345678 * time.Microsecond:     "12.3s",
		1234567 * time.Nanosecond:       "1ms",
		999600 * time.Microsecond:       "1s",
		321 * time.Microsecond:          "321µs",
		0:                               "0s",
		-1500 * time.Millisecond:        "-1.5s",
		2*time.Hour + 3*time.Nanosecond: "2h0m0s",
	} {
		require.Equal(t, want, Rounded(d))
	}
	f := given(t, 16384, server("a", 10000), server("b", 10000))
	h := f.submit("a")
	f.advance(4015721796 * time.Nanosecond)
	f.loaded("a")
	f.use(10000)
	f.release(h)
	h = f.submit("a")
	f.submit("b")
	f.step(Unload{Slot: "a"})
	f.release(h)
	f.evicted("a", 10000)
	f.loaded("b")
	f.use(10000)
	f.submit("b")
	require.NotRegexp(t, `\d\.\d{2,}m?s`, f.s.Explain(f.now, "a", 100).Reason)
}
