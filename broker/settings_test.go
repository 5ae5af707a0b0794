package broker

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddytext "github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// written reads the global option from the text of a Caddyfile.
func written(t testing.TB, text string) *config.Broker {
	t.Helper()
	b, err := caddyfile.ParseGlobal(caddytext.NewTestDispenser("gpu_broker {\n"+text+"\n}"), nil)
	require.NoError(t, err)
	return b
}

// Every value differs from every other and from the defaults, so that no two settings can stand in each other's place.
func TestEverySettingOfACaddyfileReachesTheSchedulerAsItself(t *testing.T) {
	b := written(t, `
		scheduler locked
		lock global
		cushion 300MiB
		reserve 2GiB
		max_queue 77
		max_evictions 3
		evict_wait 11s
		drain_timeout 12m
		idle_unload observe
		eviction observe
		abandon_after 13s
		outsider_wait 14s
		overtake 7
		hold 0.5
		overtake_min 21s
		overtake_max 122s
		lock_overtake 23s
		credit 24s
		client_cooldown 15s
		victim_priority lower
		reserved_interactive 16 below 50
		restore a after 25s
		consumer a {
			upstream 127.0.0.1:1
			vram 1GiB
		}`)
	require.NoError(t, config.Resolve(b, nil))
	require.Equal(t, scheduler.Config{
		Mode: scheduler.Locked, LockGlobal: true, Cushion: new(300 * gpu.MiB), Reserve: 2 * gpu.GiB, MaxQueue: 77, MaxEvictions: 3,
		EvictWait: 11 * time.Second, DrainTimeout: 12 * time.Minute, AbandonAfter: 13 * time.Second, OutsiderWait: 14 * time.Second,
		IdleUnload: scheduler.IdleObserve, ObserveEvictions: true,
		Overtake: 7, Hold: 0.5, OvertakeMin: 21 * time.Second, OvertakeMax: 122 * time.Second, LockOvertake: 23 * time.Second,
		Credit: new(24 * time.Second), VictimLower: true, ClientCooldown: 15 * time.Second, ReservedPlaces: 16, ReservedBelow: 50,
		Restore: []scheduler.Restore{{Slot: "a", After: 25 * time.Second}},
	}, SchedulerConfig(b))
}

func TestWhatACaddyfileDoesNotSetHasItsDefault(t *testing.T) {
	b := written(t, "idle_unload off")
	require.NoError(t, config.Resolve(b, nil))
	require.Equal(t, scheduler.Config{
		Mode: scheduler.Evicting, MaxQueue: 512, MaxEvictions: 5,
		EvictWait: 10 * time.Second, DrainTimeout: 10 * time.Minute, AbandonAfter: 10 * time.Second, OutsiderWait: 10 * time.Second,
		IdleUnload: scheduler.IdleOff,
		Overtake:   15, Hold: 0.25, OvertakeMin: 30 * time.Second, OvertakeMax: 10 * time.Minute, LockOvertake: 20 * time.Second,
	}, SchedulerConfig(b))
	for text, mode := range map[string]scheduler.Mode{"scheduler evicting": scheduler.Evicting, "scheduler passthrough": scheduler.Passthrough} {
		require.Equal(t, mode, SchedulerConfig(written(t, text)).Mode, text)
	}
}

func TestEverySettingOfAConsumerReachesTheSchedulerAsItself(t *testing.T) {
	b := written(t, `
		max_queue 77
		reserved_interactive 16 below 50
		consumer a {
			upstream 127.0.0.1:7001
			vram 9GiB
			residual 300MiB
			gpu 2
			concurrency 6
			reserved_interactive 4
			lock none
			can_coexist_with b
			conflicts_with c
			no_evict
			keep_alive 31s
			idle_timeout 32m
			switch_cost 33s
			budget 34s
			max_run 35s
		}
		consumer b {
			upstream 127.0.0.1:7002
			vram 8GiB
			pin
			async
			vram_managed
		}
		consumer c {
			upstream 127.0.0.1:7003
			vram 7GiB
			enabled off
		}`)
	require.NoError(t, config.Resolve(b, nil))
	all := lifecycle.Traits{Load: true, Unload: true, Health: true, Residency: true, Busy: true}
	require.Equal(t, scheduler.SlotConfig{
		Name: "a", Server: "127.0.0.1:7001", GPUs: []int{2}, Claim: 9 * gpu.GiB, Residual: 300 * gpu.MiB, Concurrency: 6, Reserved: 4,
		LockNone: true, Coexist: []string{"b"}, Conflicts: []string{"c"}, NoEvict: true,
		KeepAlive: 31 * time.Second, IdleTimeout: 32 * time.Minute, OwnIdle: true, SwitchCost: 33 * time.Second, Budget: 34 * time.Second, MaxRun: 35 * time.Second,
		CanLoad: true, CanUnload: true, CanProbe: true, CanTell: true, CanBusy: true,
	}, SlotConfig(b.Consumers[0], all))
	require.Equal(t, scheduler.SlotConfig{
		Name: "b", Server: "127.0.0.1:7002", GPUs: []int{0}, Claim: 8 * gpu.GiB, Concurrency: 1, Pin: true, Async: true, VRAMManaged: true,
		IdleTimeout: 15 * time.Minute, SwitchCost: 20 * time.Second, Budget: 10 * time.Minute,
	}, SlotConfig(b.Consumers[1], lifecycle.Traits{}))
	require.True(t, SlotConfig(b.Consumers[2], all).Disabled)
	for field, only := range map[string]lifecycle.Traits{
		"CanLoad": {Load: true}, "CanUnload": {Unload: true}, "CanProbe": {Health: true}, "CanTell": {Residency: true}, "CanBusy": {Busy: true}, "Starts": {Starts: true},
	} {
		c := SlotConfig(b.Consumers[0], only)
		require.Equal(t, map[string]bool{field: true}, trues(map[string]bool{
			"CanLoad": c.CanLoad, "CanUnload": c.CanUnload, "CanProbe": c.CanProbe, "CanTell": c.CanTell, "CanBusy": c.CanBusy, "Starts": c.Starts,
		}))
	}
}

// trues are those of a set that are true.
func trues(set map[string]bool) map[string]bool {
	out := map[string]bool{}
	for name, yes := range set {
		if yes {
			out[name] = true
		}
	}
	return out
}

// ruled is a world under the global option as a Caddyfile writes it, with servers a, which runs two at a time, and b of these sizes.
func ruled(t *testing.T, text string, a, b gpu.Bytes) *world {
	t.Helper()
	said := written(t, text)
	one, two := server("a", a), server("b", b)
	one.Concurrency = 2
	w := newWorld(t, func(cfg *config.Broker) {
		said.Consumers, said.Hold = cfg.Consumers, cfg.Hold
		*cfg = *said
	}, one, two)
	return w
}

// asks asks for a slot and tells when it was admitted; what is admitted runs for as long as lasts.
func (w *world) asks(t *testing.T, r Request, lasts time.Duration) <-chan time.Time {
	admitted := make(chan time.Time, 1)
	go func() {
		l, err := w.Acquire(context.Background(), r)
		if err != nil {
			t.Errorf("%s: %v", r.Consumer, err)
			close(admitted)
			return
		}
		admitted <- time.Now()
		pass(lasts)
		l.Release(scheduler.Served)
	}()
	synctest.Wait()
	return admitted
}

func TestLockOvertakeIsHowMuchLaterARequestOfTheRunningModelMayBe(t *testing.T) {
	for _, c := range []struct {
		later time.Duration
		first string
	}{{3 * time.Second, "a"}, {7 * time.Second, "b"}} {
		synctest.Test(t, func(t *testing.T) {
			w := ruled(t, "lock_overtake 5s\novertake_min 60s\novertake_max 61s", 4*gpu.GiB, 4*gpu.GiB)
			defer w.Close()
			w.serves(t, "a")
			w.serves(t, "b")
			<-w.asks(t, Request{Consumer: "a"}, 20*time.Second)
			b := w.asks(t, Request{Consumer: "b"}, time.Second)
			pass(c.later)
			a := w.asks(t, Request{Consumer: "a"}, time.Second)
			first := "b"
			if (<-a).Before(<-b) {
				first = "a"
			}
			require.Equal(t, c.first, first, "one that came %s later", c.later)
			pass(time.Second) // so that both have ended
			synctest.Wait()
		})
	}
}

func TestOvertakeMaxBoundsHowLongALoadedModelIsServedBeforeAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := ruled(t, "overtake 1000\novertake_min 1s\novertake_max 20s\nlock_overtake 90s", 10*gpu.GiB, 10*gpu.GiB)
		defer w.Close()
		w.serves(t, "a")
		ctx, stop := context.WithCancel(context.Background())
		done := make(chan struct{})
		for range 3 { // there is always one that waits
			go func() {
				defer func() { done <- struct{}{} }()
				for {
					l, err := w.Acquire(ctx, Request{Consumer: "a"})
					if err != nil {
						return
					}
					pass(time.Second)
					l.Release(scheduler.Served)
				}
			}()
		}
		synctest.Wait()
		began := time.Now()
		admitted := <-w.asks(t, Request{Consumer: "b"}, time.Second)
		require.InDelta(t, 20+3, admitted.Sub(began).Seconds(), 3, "the bound, what still runs, an unload and a load")
		stop()
		for range 3 {
			<-done
		}
		pass(time.Second)
		synctest.Wait()
	})
}

func TestReservedPlacesOfTheQueueAreForRequestsBelowTheirPriority(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := ruled(t, "max_queue 3\nreserved_interactive 1 below 50", 4*gpu.GiB, 4*gpu.GiB)
		defer w.Close()
		for range 2 {
			<-w.asks(t, Request{Consumer: "a", Priority: 100}, time.Minute)
		}
		waits := []<-chan time.Time{
			w.asks(t, Request{Consumer: "a", Priority: 100}, time.Second), w.asks(t, Request{Consumer: "a", Priority: 50}, time.Second),
		}
		_, err := w.Acquire(context.Background(), Request{Consumer: "a", Priority: 50})
		var r *Refused
		require.ErrorAs(t, err, &r)
		require.Equal(t, scheduler.QueueFull, r.Code, "the last place is kept")
		waits = append(waits, w.asks(t, Request{Consumer: "a", Priority: 49}, time.Second))
		for _, one := range waits {
			<-one
		}
		pass(time.Second)
		synctest.Wait()
	})
}

func TestLockGlobalLetsOneComputeOnAllGPUs(t *testing.T) {
	for text, wait := range map[string]time.Duration{"lock exclusive": 0, "lock global": 30 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			said := written(t, text)
			two := server("b", 2*gpu.GiB)
			two.GPU = 1
			w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB, more: 1}, servers: map[string]*fakeServer{}}
			w.gen = w.generation(t, func(b *config.Broker) { b.Lock = said.Lock }, server("a", 2*gpu.GiB), two)
			require.NoError(t, w.Push(w.gen))
			defer w.Close()
			w.serves(t, "a")
			w.serves(t, "b")
			<-w.asks(t, Request{Consumer: "a"}, 30*time.Second)
			began := time.Now()
			require.Equal(t, wait, (<-w.asks(t, Request{Consumer: "b"}, time.Second)).Sub(began), text)
			pass(time.Minute) // so that both have ended
			synctest.Wait()
		})
	}
}

func TestVictimPriorityLowerSparesWhatWasUsedForSomethingAsUrgent(t *testing.T) {
	for text, spared := range map[string]bool{"victim_priority any": false, "victim_priority lower": true} {
		synctest.Test(t, func(t *testing.T) {
			w := ruled(t, text+"\noutsider_wait 1s", 10*gpu.GiB, 10*gpu.GiB)
			defer w.Close()
			<-w.asks(t, Request{Consumer: "a", Priority: 10}, time.Second)
			pass(time.Minute)
			synctest.Wait()
			l, err := w.Acquire(context.Background(), Request{Consumer: "b", Priority: 100, Budget: 30 * time.Second})
			if !spared {
				require.NoError(t, err)
				l.Release(scheduler.Served)
				return
			}
			var r *Refused
			require.ErrorAs(t, err, &r)
			require.Equal(t, scheduler.VRAMExhausted, r.Code)
			require.Equal(t, "READY", w.stateOf(t, "a"))
			l, err = w.Acquire(context.Background(), Request{Consumer: "b", Priority: 9})
			require.NoError(t, err, "a more urgent one")
			l.Release(scheduler.Served)
		})
	}
}

func TestAHandOverLooksAtTheMemoryEvery50Milliseconds(t *testing.T) {
	for _, late := range []time.Duration{120 * time.Millisecond, 700 * time.Millisecond, 1900 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, nil, server("a", 10*gpu.GiB), server("b", 10*gpu.GiB))
			defer w.Close()
			w.servers["a"].late = late
			w.serves(t, "a")
			began := time.Now()
			w.serves(t, "b")
			took := time.Since(began)
			require.GreaterOrEqual(t, took, 2*time.Second+late)
			require.LessOrEqual(t, took, 2*time.Second+late+2*fastInterval, "the load begins soon after its memory is there")
		})
	}
}

func TestAModelSaysWhatItHasOfItsOwnAndHasTheRestOfItsConsumer(t *testing.T) {
	c := &config.Consumer{Name: "m", VRAM: 8 * gpu.GiB}
	of := scheduler.SlotConfig{Name: "m", Claim: 9 * gpu.GiB, Residual: gpu.GiB, KeepAlive: time.Minute, IdleTimeout: time.Hour, Concurrency: 3, CanLoad: true, CanUnload: true, CanTell: true}
	require.Equal(t, scheduler.SlotConfig{Name: "m/x", Consumer: "m", Claim: 8 * gpu.GiB, KeepAlive: time.Minute, IdleTimeout: time.Hour, Concurrency: 3},
		ModelConfig(of, c, &config.Model{Name: "x"}, lifecycle.Traits{Load: true, Unload: true, Residency: true}))
	require.Equal(t, scheduler.SlotConfig{Name: "m/x", Consumer: "m", Claim: 2 * gpu.GiB, Pin: true, KeepAlive: time.Second, OwnIdle: true, Concurrency: 1, CanLoad: true, CanUnload: true, CanTell: true},
		ModelConfig(of, c, &config.Model{Name: "x", VRAM: 2 * gpu.GiB, Pin: true, KeepAlive: caddy.Duration(time.Second), IdleTimeout: new(caddy.Duration), Concurrency: 1}, lifecycle.Traits{LoadModel: true, UnloadModel: true, Models: true}))
	require.True(t, ModelConfig(of, c, &config.Model{Name: "x"}, lifecycle.Traits{Starts: true}).CanLoad, "its server is started for it")
	of.Pin = true
	require.True(t, ModelConfig(of, c, &config.Model{Name: "x"}, lifecycle.Traits{}).Pin)
}
