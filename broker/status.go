package broker

import (
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// APIVersion is that of the status document. It changes when a field goes or changes its meaning.
const APIVersion = 1

// Status is the broker as people and programs see it. Amounts of memory are in
// bytes unless a name says otherwise.
type Status struct {
	APIVersion int      `json:"api_version"`
	Sampler    string   `json:"sampler"`
	SamplerWhy string   `json:"sampler_why,omitempty"`
	Degraded   string   `json:"degraded,omitempty"` // why there is no telemetry
	GPUCount   int      `json:"gpu_count"`
	GPUs       []GPU    `json:"gpus"`
	Total      int64    `json:"total_memory"`
	Free       int64    `json:"free_memory"`
	Used       int64    `json:"used_memory"`
	Scheduler  Totals   `json:"scheduler"`
	Queue      []Waiter `json:"queue"`

	Consumers map[string]Consumer `json:"consumers"`
	Clients   []Client            `json:"clients"` // the one that was seen last first; at most 256
}

// GPU is one card.
type GPU struct {
	Index         int      `json:"index"`
	UUID          string   `json:"uuid"`
	Name          string   `json:"name"`
	Total         int64    `json:"total_memory"`
	Free          int64    `json:"free_memory"`
	Used          int64    `json:"used_memory"`
	Booked        int64    `json:"booked_memory"`
	Outsiders     int64    `json:"outsiders_memory"`
	Programs      []string `json:"outsiders,omitempty"`
	Utilisation   *int     `json:"utilisation,omitempty"` // percent
	Temperature   *int     `json:"temperature,omitempty"` // degrees Celsius
	Power         *float64 `json:"power,omitempty"`       // watts
	Health        string   `json:"health"`                // healthy, lost
	Reason        string   `json:"reason,omitempty"`
	Lock          string   `json:"lock,omitempty"` // the consumer that computes
	Overcommitted bool     `json:"overcommitted,omitempty"`
	SampledAt     string   `json:"sampled_at,omitempty"`
	LentUntil     string   `json:"lent_until,omitempty"` // jobs wait until then
}

// Totals are the scheduler's counters since the start, and what it does now.
type Totals struct {
	Evictions      uint64  `json:"evictions"`
	ManualUnloads  uint64  `json:"manual_unloads"`
	IdleUnloads    uint64  `json:"idle_unloads"`
	UnloadFailures uint64  `json:"unload_failures"`
	Loads          uint64  `json:"loads"`
	LoadFailures   uint64  `json:"load_failures"`
	Refused        uint64  `json:"refused"`
	Cancelled      uint64  `json:"cancelled"`
	QueueDepth     int     `json:"queue_depth"`
	InFlight       int     `json:"in_flight"`
	TotalJobs      uint64  `json:"total_jobs"`
	LastWaitMS     float64 `json:"last_wait_ms"`
	LastRunMS      float64 `json:"last_run_ms"`
	OldestQueued   string  `json:"oldest_queued,omitempty"`
	Draining       bool    `json:"draining,omitempty"` // no more requests are taken
}

// Waiter is one waiting request.
type Waiter struct {
	Position  int      `json:"position"` // 1 is next, by priority and age
	Consumer  string   `json:"consumer"`
	Client    string   `json:"client,omitempty"`
	Priority  int      `json:"priority"`
	WaitedMS  float64  `json:"waited_ms"`
	EstimateS *float64 `json:"estimate_s,omitempty"` // until it runs, as far as can be told
	Reason    string   `json:"reason"`
}

// Consumer is one model server.
type Consumer struct {
	Enabled       bool    `json:"enabled"`
	Health        string  `json:"health"` // unknown, healthy, unhealthy
	Reason        string  `json:"reason,omitempty"`
	Loaded        bool    `json:"loaded"`
	ResidentMiB   int64   `json:"gpu_resident_mib"`
	Active        int     `json:"active"`
	Waiting       int     `json:"waiting"`
	TotalRequests uint64  `json:"total_requests"`
	LastUsed      string  `json:"last_used,omitempty"`
	LastPriority  *int    `json:"last_priority,omitempty"` // nil: nothing has run yet
	StayWarmS     float64 `json:"stay_warm_s"`
	Pinned        bool    `json:"pinned"`
	Cloud         bool    `json:"cloud,omitempty"` // runs elsewhere: nothing of it is on a GPU
	Removed       bool    `json:"removed,omitempty"`
	Draining      bool    `json:"draining,omitempty"` // no more requests for it are taken
	UnloadAt      string  `json:"unload_at,omitempty"`
	Shares        string  `json:"shares,omitempty"` // the consumer whose process it shares; what runs and waits is told of both together
	Slots         []Slot  `json:"slots"`

	Process *lifecycle.State `json:"process,omitempty"` // of a server that the broker starts
}

// Slot is one resident instance of a consumer.
type Slot struct {
	Model       string  `json:"model,omitempty"`   // of a consumer with several
	Adopted     bool    `json:"adopted,omitempty"` // nobody named it in the configuration
	State       string  `json:"state"`             // UNKNOWN, IDLE, LOADING, READY, STOPPING
	Gate        string  `json:"gate"`              // open, closed
	DrainsFor   string  `json:"drains_for,omitempty"`
	Booking     int64   `json:"booking"`
	Seen        int64   `json:"seen"`
	Residue     int64   `json:"residue"`
	Claim       int64   `json:"claim"`
	Measured    int64   `json:"measured,omitempty"` // 95th percentile of what its loads took
	ClaimSource string  `json:"claim_source"`
	GPUIndex    int     `json:"gpu_index"`
	GPUIndices  []int   `json:"gpu_indices"`
	Held        int     `json:"held"` // jobs whose work goes on at the server after their answer
	SwitchCostS float64 `json:"switch_cost_s"`
	Why         string  `json:"why,omitempty"` // why its requests wait
	CoolsUntil  string  `json:"cools_until,omitempty"`
}

// Status looks at everything. It changes nothing and counts as no use.
func (b *Broker) Status() Status {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	snap := b.state.Snapshot(now)
	out := Status{APIVersion: APIVersion, Degraded: snap.Degraded, GPUCount: len(snap.GPUs), GPUs: []GPU{}, Queue: []Waiter{}, Consumers: map[string]Consumer{}, Clients: b.clients.list()}
	if b.sampler != nil {
		out.Sampler, out.SamplerWhy = b.sampler.name, b.sampler.why
	}
	for _, g := range snap.GPUs {
		out.GPUs = append(out.GPUs, b.gpu(g))
		out.Total, out.Free, out.Used = out.Total+int64(g.Total), out.Free+int64(g.Free), out.Used+int64(g.Used)
	}
	c := snap.Counts
	out.Scheduler = Totals{Evictions: c.Evictions, ManualUnloads: c.ManualUnloads, IdleUnloads: c.IdleUnloads, Draining: snap.Draining, UnloadFailures: c.UnloadFailures, Loads: c.Loads, LoadFailures: c.LoadFailures,
		Refused: c.Refused + b.refused, Cancelled: c.Cancelled, QueueDepth: snap.Waiting, InFlight: snap.Running, TotalJobs: c.Jobs, LastWaitMS: ms(c.LastWait), LastRunMS: ms(b.lastRun), OldestQueued: stamp(snap.Oldest)}
	for _, w := range snap.Queue {
		waiter := Waiter{Position: w.Position, Consumer: shown(w.Slot), Client: w.Client, Priority: w.Priority, WaitedMS: ms(now.Sub(w.Submitted)), Reason: w.Why}
		if w.Estimate >= 0 {
			waiter.EstimateS = new(w.Estimate.Seconds())
		}
		out.Queue = append(out.Queue, waiter)
	}
	of := map[string][]scheduler.SlotView{}
	for _, v := range snap.Slots {
		name := ConsumerOf(v.Name)
		of[name] = append(of[name], v)
	}
	for name, slots := range of {
		out.Consumers[name] = b.consumerStatus(name, slots)
	}
	for name, c := range b.consumers {
		if c.partner != nil {
			out.Consumers[name] = b.partnerStatus(c, out.Consumers[c.partner.name])
		}
	}
	for name, c := range out.Consumers { // not before: the others take their part of the whole
		b.splitWith(name, &c)
		out.Consumers[name] = c
	}
	return out
}

func (b *Broker) gpu(g scheduler.GPUView) GPU {
	out := GPU{Index: g.Index, UUID: g.UUID, Name: g.Name, Total: int64(g.Total), Free: int64(g.Free), Used: int64(g.Used), Booked: int64(g.Booked),
		Outsiders: int64(g.Outsiders), Programs: g.Device.Outsiders, Health: string(gpu.Healthy), Reason: g.Reason, Lock: shown(g.Owner), Overcommitted: g.Overcommitted, SampledAt: stamp(g.SeenAt), LentUntil: stamp(g.LentUntil)}
	if g.Lost {
		out.Health = string(gpu.Lost)
	}
	if d, ok := b.devices[g.UUID]; ok && !g.Lost {
		if d.Utilisation >= 0 {
			out.Utilisation = &d.Utilisation
		}
		if d.Temperature >= 0 {
			out.Temperature = &d.Temperature
		}
		if d.Power >= 0 {
			out.Power = &d.Power
		}
	}
	return out
}

// consumerStatus puts the slots of a consumer together. It holds mu.
func (b *Broker) consumerStatus(name string, slots []scheduler.SlotView) Consumer {
	out := Consumer{Pinned: true, Draining: true, Removed: true, Slots: []Slot{}}
	var used, ran time.Time // the last use; that of the slot whose priority is told
	var turns scheduler.SlotView
	for _, v := range slots {
		if v.TurnOnly { // it is not resident, and nobody's to unload
			out.Active, out.Waiting, turns = out.Active+v.Active, out.Waiting+v.Waiting, v
			continue
		}
		one := b.slotStatus(v)
		out.Slots = append(out.Slots, one)
		out.Enabled, out.Health, out.Reason = !v.Disabled, v.Health, v.Detail
		out.Loaded = out.Loaded || v.State == scheduler.Ready
		out.ResidentMiB += gpu.Bytes(one.Booking).MiB()
		out.Active, out.Waiting = out.Active+v.Active+v.Held, out.Waiting+v.Waiting
		out.Pinned, out.Draining, out.Removed = out.Pinned && v.Pinned, out.Draining && v.Draining, out.Removed && v.Gone
		if v.HasPrio && (out.LastPriority == nil || v.LastUse.After(ran)) {
			ran, out.LastPriority = v.LastUse, &v.LastPrio
		}
		if v.LastUse.After(used) {
			used = v.LastUse
		}
		if at := stamp(v.UnloadAt); at != "" && (out.UnloadAt == "" || at < out.UnloadAt) {
			out.UnloadAt = at
		}
	}
	if len(out.Slots) == 0 { // of models auto, before the first request
		out.Enabled, out.Health, out.Reason = !turns.Disabled, turns.Health, turns.Detail
		out.Pinned, out.Draining, out.Removed = turns.Pinned, turns.Draining, turns.Gone
	}
	out.LastUsed = stamp(used)
	if c := b.consumers[name]; c != nil {
		b.configured(c, &out)
		out.Loaded = out.Loaded && !out.Cloud
		if sup, ok := c.driver.(lifecycle.Supervisor); ok {
			state := sup.State()
			out.Process = &state
		}
	}
	return out
}

// configured adds what is known beside the scheduler. It holds mu.
func (b *Broker) configured(c *consumer, out *Consumer) {
	out.TotalRequests = c.requests
	out.StayWarmS = b.stayWarm(c.cfg).Seconds()
	out.Cloud = c.cfg.Cloud
}

// stayWarm returns for how long a consumer stays loaded when nobody uses it: its own or its
// category's idle time, and keep_alive where that is longer or where nothing is unloaded as idle.
func (b *Broker) stayWarm(c *config.Consumer) time.Duration {
	keep := time.Duration(c.KeepAlive)
	if c.Cloud || b.current.Load().Config.IdleUnload != config.On || c.VRAMManaged && !c.OwnIdleTimeout() {
		return keep
	}
	return max(keep, c.Idle())
}

// partnerStatus is that of a consumer that shares the process of another. It holds mu.
func (b *Broker) partnerStatus(c *consumer, of Consumer) Consumer {
	out := of
	b.configured(c, &out)
	out.Enabled, out.Shares = c.cfg.IsEnabled(), c.partner.name
	out.Slots, out.Process = []Slot{}, nil // they are the other's
	return out
}

// splitWith leaves to a consumer that shares a process its part of what is resident, by what each claims. It holds mu.
func (b *Broker) splitWith(name string, out *Consumer) {
	c := b.consumers[name]
	if c == nil {
		return
	}
	mine, all := c.cfg.VRAM, b.current.Load().Config.SharedVRAM(c.real().cfg)
	if mine != all {
		out.ResidentMiB = int64(float64(out.ResidentMiB) * float64(mine) / float64(all))
	}
}

func (b *Broker) slotStatus(v scheduler.SlotView) Slot {
	s := Slot{State: v.State.String(), Gate: "open", DrainsFor: v.DrainFor, Claim: int64(v.Claim), Measured: int64(v.Measured), ClaimSource: "config", GPUIndices: []int{},
		Held: v.Held, SwitchCostS: v.Switch.Seconds(), Why: v.Why, CoolsUntil: stamp(v.CoolUntil)}
	if !v.GateOpen {
		s.Gate = "closed"
	}
	for i, h := range v.Holds {
		if i == 0 {
			s.GPUIndex = h.GPU
		}
		s.GPUIndices = append(s.GPUIndices, h.GPU)
		s.Booking, s.Seen, s.Residue = s.Booking+int64(h.Booking), s.Seen+int64(h.Seen), s.Residue+int64(h.Residue)
	}
	if sl := b.slots[v.Name]; sl != nil {
		s.Model, s.Adopted = sl.model, sl.adopted
		if sl.adopted && sl.size > 0 {
			s.ClaimSource = "server"
		}
	}
	if v.ClaimSeen {
		s.ClaimSource = "measured"
	}
	return s
}

// Names lists the consumers of the ruling configuration, in its order.
func (b *Broker) Names() []string {
	var out []string
	if g := b.current.Load(); g != nil {
		for _, c := range g.Config.Consumers {
			out = append(out, c.Name)
		}
	}
	return out
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}
