package config

import (
	"encoding/json"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Defaults of the settings of the same name.
const (
	DefaultDriver    = "auto"
	DefaultProtocol  = "http"
	DefaultScheduler = Evicting
	DefaultLock      = LockExclusive
	DefaultHeaders   = On

	DefaultCushion        = 256 * gpu.MiB
	DefaultUnifiedCushion = 4 * gpu.GiB // on a GPU that shares its memory with the CPU

	DefaultMaxQueue    = 512
	DefaultBudget      = 10 * time.Minute
	DefaultMaxBody     = 256 * gpu.MiB
	DefaultMaxBuffered = 2 * gpu.GiB

	DefaultUploadIdle   = 30 * time.Second
	DefaultStallTimeout = 30 * time.Second
	DefaultTunnelIdle   = 5 * time.Minute

	DefaultProbeInterval = 5 * time.Second
	DefaultProbeTimeout  = 2 * time.Second
	DefaultLoadTimeout   = 5 * time.Minute
	DefaultUnloadTimeout = 30 * time.Second
	DefaultEvictWait     = 10 * time.Second
	DefaultDrainTimeout  = 10 * time.Minute
	DefaultAbandonAfter  = 10 * time.Second
	DefaultOutsiderWait  = 10 * time.Second
	DefaultMaxEvictions  = 5
	DefaultStopGrace     = 30 * time.Second

	DefaultIdleUnload  = On
	DefaultIdleTimeout = 15 * time.Minute
	DefaultEviction    = On

	DefaultOvertake     = 15.0
	DefaultOvertakeMin  = 30 * time.Second
	DefaultOvertakeMax  = 10 * time.Minute
	DefaultHold         = 0.25
	DefaultLockOvertake = 20 * time.Second

	DefaultVictimPriority = VictimAny
	DefaultPriority       = 100
	MaxPriority           = 1_000_000 // the least urgent; 0 is the most urgent

	DefaultEnabled = On

	DefaultStopsWhenLeft = On
	DefaultConcurrency   = 1
	DefaultSwitchCost    = 20 * time.Second
)

// stayWarm is after how long without use consumers of a category are unloaded.
var stayWarm = map[string]time.Duration{
	"diffusion": 900 * time.Second,
	"llm":       300 * time.Second,
	"vision":    60 * time.Second,
}

// categories lists those that have such a time of their own.
func categories() []string { return sortedKeys(stayWarm) }

// CushionFor is the memory that a load must find free beyond its claim on a
// GPU, whose memory is or is not shared with the CPU.
func (b *Broker) CushionFor(unified bool) gpu.Bytes {
	switch {
	case b.Cushion != nil:
		return *b.Cushion
	case unified:
		return DefaultUnifiedCushion
	default:
		return DefaultCushion
	}
}

// EffectiveOvertake is Overtake or its default.
func (b *Broker) EffectiveOvertake() float64 { return valueOr(b.Overtake, DefaultOvertake) }

// EffectiveHold is Hold or its default.
func (b *Broker) EffectiveHold() float64 { return valueOr(b.Hold, DefaultHold) }

// EffectiveOvertakeMin is OvertakeMin, or its default, which gives way to a smaller OvertakeMax.
func (b *Broker) EffectiveOvertakeMin() time.Duration {
	most := valueOr(b.OvertakeMax, caddy.Duration(DefaultOvertakeMax))
	return time.Duration(valueOr(b.OvertakeMin, min(caddy.Duration(DefaultOvertakeMin), most)))
}

// EffectiveOvertakeMax is OvertakeMax, or its default, which gives way to a larger OvertakeMin.
func (b *Broker) EffectiveOvertakeMax() time.Duration {
	least := valueOr(b.OvertakeMin, caddy.Duration(DefaultOvertakeMin))
	return time.Duration(valueOr(b.OvertakeMax, max(caddy.Duration(DefaultOvertakeMax), least)))
}

// EffectiveLockOvertake is LockOvertake or its default.
func (b *Broker) EffectiveLockOvertake() time.Duration {
	return time.Duration(valueOr(b.LockOvertake, caddy.Duration(DefaultLockOvertake)))
}

// StayWarmOf is after how long without use consumers of a category are unloaded (0: never), unless they have a
// time of their own: StayWarm's, else a built-in one, else IdleTimeout.
func (b *Broker) StayWarmOf(category string) time.Duration {
	if d, ok := b.StayWarm[category]; ok {
		return time.Duration(d)
	}
	if d, ok := stayWarm[category]; ok {
		return d
	}
	return time.Duration(valueOr(b.IdleTimeout, caddy.Duration(DefaultIdleTimeout)))
}

// OnlyLowerVictims reports whether only models last used at a lower priority than a request's are unloaded for it.
func (b *Broker) OnlyLowerVictims() bool { return b.VictimPriority == VictimLower }

// HeadersOn reports whether responses tell of waiting times and the consumer.
func (b *Broker) HeadersOn() bool { return b.Headers != Off }

// IsEnabled reports whether the consumer is served.
func (c *Consumer) IsEnabled() bool { return c.Enabled != Off }

// WorksOn reports whether the consumer's server goes on working on a request whose client has left.
func (c *Consumer) WorksOn() bool { return c.StopsWhenLeft == Off }

// NeedsLock reports whether the consumer's requests compute under the GPU's lock.
func (c *Consumer) NeedsLock() bool { return c.Lock != LockNone }

// fillDefaults gives a value to every setting of the broker that has none,
// but for Cushion, whose default depends on the GPU.
func (b *Broker) fillDefaults() {
	if len(b.GPURaw) == 0 {
		b.GPURaw = json.RawMessage(`{"driver":"` + DefaultDriver + `"}`)
	}
	fill(&b.Scheduler, DefaultScheduler)
	fill(&b.Lock, DefaultLock)
	fill(&b.Headers, DefaultHeaders)
	fill(&b.IdleUnload, DefaultIdleUnload)
	fill(&b.Eviction, DefaultEviction)
	fill(&b.VictimPriority, DefaultVictimPriority)
	fill(&b.MaxQueue, DefaultMaxQueue)
	fill(&b.MaxBody, DefaultMaxBody)
	fill(&b.MaxBuffered, DefaultMaxBuffered)
	fill(&b.UploadIdle, new(caddy.Duration(DefaultUploadIdle)))
	fill(&b.StallTimeout, new(caddy.Duration(DefaultStallTimeout)))
	fill(&b.TunnelIdle, new(caddy.Duration(DefaultTunnelIdle)))
	fill(&b.MaxEvictions, DefaultMaxEvictions)
	fill(&b.Budget, caddy.Duration(DefaultBudget))
	fill(&b.ProbeInterval, caddy.Duration(DefaultProbeInterval))
	fill(&b.ProbeTimeout, caddy.Duration(DefaultProbeTimeout))
	fill(&b.LoadTimeout, caddy.Duration(DefaultLoadTimeout))
	fill(&b.UnloadTimeout, caddy.Duration(DefaultUnloadTimeout))
	fill(&b.EvictWait, caddy.Duration(DefaultEvictWait))
	fill(&b.DrainTimeout, caddy.Duration(DefaultDrainTimeout))
	fill(&b.AbandonAfter, caddy.Duration(DefaultAbandonAfter))
	fill(&b.OutsiderWait, caddy.Duration(DefaultOutsiderWait))
	fill(&b.IdleTimeout, new(caddy.Duration(DefaultIdleTimeout)))
	fill(&b.StopGrace, new(caddy.Duration(DefaultStopGrace)))

	least, most := caddy.Duration(b.EffectiveOvertakeMin()), caddy.Duration(b.EffectiveOvertakeMax())
	fill(&b.OvertakeMin, &least)
	fill(&b.OvertakeMax, &most)
	fill(&b.Overtake, new(DefaultOvertake))
	fill(&b.Hold, new(DefaultHold))
	fill(&b.LockOvertake, new(caddy.Duration(DefaultLockOvertake)))
}

// fillDefaults gives a value to every setting of c that has none; some are b's.
func (c *Consumer) fillDefaults(b *Broker) {
	fill(&c.Enabled, DefaultEnabled)
	fill(&c.StopsWhenLeft, DefaultStopsWhenLeft)
	fill(&c.Concurrency, DefaultConcurrency)
	fill(&c.SwitchCost, caddy.Duration(DefaultSwitchCost))
	fill(&c.Priority, new(DefaultPriority))
	// a negative one is the broker's fault, not each consumer's
	fill(&c.Budget, max(0, b.Budget))
	fill(&c.LoadTimeout, max(0, b.LoadTimeout))
	fill(&c.UnloadTimeout, max(0, b.UnloadTimeout))
	fill(&c.MaxRun, new(max(0, b.MaxRun)))
	if c.IdleTimeout == nil {
		c.sharedIdle = true
		c.IdleTimeout = new(max(0, caddy.Duration(b.StayWarmOf(c.Category))))
	}
}

// EffectivePriority is Priority or its default.
func (c *Consumer) EffectivePriority() int { return valueOr(c.Priority, DefaultPriority) }

// Idle is after how long without use it is unloaded (0: never): once resolved its own idle_timeout, else its
// category's stay_warm, else the broker's idle_timeout.
func (c *Consumer) Idle() time.Duration { return time.Duration(valueOr(c.IdleTimeout, 0)) }

// LongestRun is MaxRun; 0: no bound.
func (c *Consumer) LongestRun() time.Duration { return time.Duration(valueOr(c.MaxRun, 0)) }

// OwnIdleTimeout reports whether its IdleTimeout is its own, not its category's or the broker's.
func (c *Consumer) OwnIdleTimeout() bool { return !c.sharedIdle }

func fill[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func valueOr[T any](p *T, value T) T {
	if p == nil {
		return value
	}
	return *p
}
