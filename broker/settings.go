package broker

import (
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// SchedulerConfig is what a configuration, with its defaults filled in, tells the scheduler, but for the slots.
func SchedulerConfig(c *config.Broker) scheduler.Config {
	sc := scheduler.Config{
		Mode:       map[string]scheduler.Mode{config.Locked: scheduler.Locked, config.Passthrough: scheduler.Passthrough}[c.Scheduler],
		LockGlobal: c.Lock == config.LockGlobal, Cushion: c.Cushion, Reserve: c.Reserve, MaxQueue: c.MaxQueue, MaxEvictions: c.MaxEvictions,
		EvictWait: time.Duration(c.EvictWait), DrainTimeout: time.Duration(c.DrainTimeout),
		IdleUnload:       map[string]scheduler.IdleUnload{config.Off: scheduler.IdleOff, config.Observe: scheduler.IdleObserve}[c.IdleUnload],
		ObserveEvictions: c.Eviction == config.Observe,
		AbandonAfter:     time.Duration(c.AbandonAfter), OutsiderWait: time.Duration(c.OutsiderWait),
		Overtake: c.EffectiveOvertake(), Hold: c.EffectiveHold(),
		OvertakeMin: c.EffectiveOvertakeMin(), OvertakeMax: c.EffectiveOvertakeMax(), LockOvertake: c.EffectiveLockOvertake(),
		Credit: (*time.Duration)(c.Credit), ClientCooldown: time.Duration(c.ClientCooldown), VictimLower: c.OnlyLowerVictims(),
	}
	if r := c.ReservedInteractive; r != nil {
		sc.ReservedPlaces, sc.ReservedBelow = r.Places, r.Below
	}
	for _, r := range c.Restore {
		sc.Restore = append(sc.Restore, scheduler.Restore{Slot: r.Consumer, After: time.Duration(r.After)})
	}
	return sc
}

// SlotConfig is what a consumer tells the scheduler; its driver says what it can do.
func SlotConfig(c *config.Consumer, t lifecycle.Traits) scheduler.SlotConfig {
	idle, longest := c.Idle(), c.LongestRun()
	if c.Cloud {
		// Elsewhere it is another server, though it may have the same address: nothing that was known of it holds.
		return scheduler.SlotConfig{Name: c.Name, Server: "cloud " + c.Upstream, Disabled: !c.IsEnabled(), Cloud: true, LockNone: true, Concurrency: 1, MaxRun: longest, Budget: time.Duration(c.Budget)}
	}
	return scheduler.SlotConfig{
		Name: c.Name, Server: c.Upstream, Disabled: !c.IsEnabled(), GPUs: []int{c.GPU}, Claim: c.VRAM, Residual: c.Residual, Concurrency: c.Concurrency,
		LockNone: !c.NeedsLock(), Coexist: c.CanCoexistWith, Pin: c.Pin, NoEvict: c.NoEvict, VRAMManaged: c.VRAMManaged,
		KeepAlive: time.Duration(c.KeepAlive), IdleTimeout: idle, OwnIdle: c.OwnIdleTimeout(), MaxRun: longest, SwitchCost: time.Duration(c.SwitchCost), Budget: time.Duration(c.Budget), Async: c.Async, WorksOn: c.WorksOn(),
		Starts: t.Starts, Conflicts: c.ConflictsWith, Reserved: c.ReservedInteractive,
		CanLoad: t.Load, CanUnload: t.Unload, CanProbe: t.Health, CanTell: t.Residency, CanBusy: t.Busy,
	}
}

// ModelConfig is what a model of a consumer tells the scheduler, on the basis of what the consumer tells it.
func ModelConfig(of scheduler.SlotConfig, c *config.Consumer, m *config.Model, t lifecycle.Traits) scheduler.SlotConfig {
	of.Name, of.Consumer = SlotName(c.Name, m.Name), c.Name
	if of.Claim = m.VRAM; m.VRAM == 0 {
		of.Claim = c.VRAM
	}
	of.Residual = 0 // the process is the consumer's
	of.Pin = of.Pin || m.Pin
	if m.KeepAlive > 0 {
		of.KeepAlive = time.Duration(m.KeepAlive)
	}
	if m.IdleTimeout != nil {
		of.IdleTimeout, of.OwnIdle = time.Duration(*m.IdleTimeout), true
	}
	if m.Concurrency > 0 {
		of.Concurrency = m.Concurrency
	}
	of.CanLoad = t.LoadModel || t.Starts // its server may have to be started for it
	of.CanUnload, of.CanTell = t.UnloadModel, t.Models
	return of
}
