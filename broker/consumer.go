package broker

import (
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// consumer is a model server as the broker knows it. Its fields are guarded by the broker's mutex.
type consumer struct {
	name string
	settings
	traits   lifecycle.Traits
	upstream string    // where it listens; of a server that the driver starts: since its latest start
	next     *settings // take the place of the present ones once the server that the driver has started is stopped; nil: nothing does
	listed   time.Time // when a probe was sent whose answer listed the models that are loaded; zero: none was, or the latest did not
	catalog  catalog
	closing  bool      // the present driver stops what is left of its server; then next takes its place
	partner  *consumer // whose server it shares; then it has nothing of its own but its name and configuration
	turns    *slot     // takes the GPU lock for requests that load nothing; nil: it has none
	slots    []*slot   // in the order of the configuration, then those that were adopted

	probeNow   chan struct{} // cap 1
	stopProbes func()        // never nil; does nothing where none run
	requests   uint64
	drained    bool // by its name: a model that it gets is drained, too
}

// settings is what a configuration says of a consumer.
type settings struct {
	opened
	key string
	cfg *config.Consumer

	probeTimeout, loadTimeout, unloadTimeout, interval time.Duration
}

// opened is a driver and what it was given.
type opened struct {
	driver lifecycle.Driver
	limits *lifecycle.Limits
}

// slot is what is loaded and unloaded by itself: a consumer, or one of its models. The broker's mutex guards it.
type slot struct {
	name     string // as the scheduler knows it
	model    string // empty: the consumer as a whole
	consumer *consumer
	turnOnly bool      // it is never loaded: see consumer.turns
	adopted  bool      // nobody named it: the server did, or a request
	size     gpu.Bytes // of an adopted one, as the server says; 0: it does not

	cancelLoad func()    // ends the load under way; nil: none
	loadBegan  time.Time // of the last load
	loadEnded  time.Time
}

// loadedSince is how much of the time since then the last load took.
func (sl *slot) loadedSince(since time.Time) time.Duration {
	began := sl.loadBegan
	if began.Before(since) {
		began = since
	}
	return max(0, sl.loadEnded.Sub(began))
}

// has reports whether the consumer has a driver of this key, or is to have it next.
func (c *consumer) has(key string) bool {
	return c.driver != nil && c.key == key && !c.closing || c.next != nil && c.next.key == key
}

// keeps is the driver of this key that it will have, whatever happens meanwhile; nil: it will have none.
func (c *consumer) keeps(key string) lifecycle.Driver {
	switch {
	case !c.has(key), c.next != nil && c.next.key != key:
		return nil
	case c.next != nil:
		return c.next.driver
	default:
		return c.driver
	}
}

// take puts settings into force.
func (c *consumer) take(s settings) {
	if s.driver != c.driver {
		c.traits, c.catalog = s.driver.Traits(), catalog{}
	}
	c.settings, c.upstream = s, s.cfg.Upstream
	c.findUpstream()
}

// findUpstream asks a driver that starts its server where that listens.
func (c *consumer) findUpstream() {
	if sup, ok := c.driver.(lifecycle.Supervisor); ok {
		if address := sup.Upstream(); address != "" {
			c.upstream = address
		}
	}
}

// runs reports whether the driver has a server running that it would have to stop.
func (c *consumer) runs() bool {
	sup, ok := c.driver.(lifecycle.Supervisor)
	return ok && sup.Running()
}

// endedWell reports whether the driver's server, which has ended, has not failed.
func (c *consumer) endedWell() bool {
	r, ok := c.driver.(lifecycle.Restarter)
	return ok && !r.Failed()
}

// moves reports whether the driver is about to start its server or to stop it: in a start it may not run yet. It holds mu.
func (b *Broker) moves(c *consumer) bool {
	return c.traits.Starts && slices.ContainsFunc(b.allSlots(c), func(sl *slot) bool {
		v, known := b.state.Slot(sl.name)
		return known && (v.State == scheduler.Loading || v.State == scheduler.Stopping)
	})
}

// real is the consumer whose server it is.
func (c *consumer) real() *consumer {
	if c.partner != nil {
		return c.partner
	}
	return c
}

// SlotName is the name by which the scheduler, the record and the admin API know a model of a consumer; without a model the consumer's.
func SlotName(consumer, model string) string {
	if model == "" {
		return consumer
	}
	return consumer + "/" + model
}

// ConsumerOf is the name of the consumer whose slot has this name.
func ConsumerOf(slot string) string {
	consumer, _, _ := strings.Cut(slot, "/") // which no consumer's name has
	return consumer
}

// slotsOf brings the slots of a consumer up to date with its settings, and is what the scheduler is to know of them. It holds mu.
func (b *Broker) slotsOf(c *consumer) []scheduler.SlotConfig {
	before := c.slots
	c.slots = nil
	keep := func(model string, adopted bool, size gpu.Bytes) {
		sl := b.slots[SlotName(c.name, model)]
		if sl == nil {
			sl = &slot{name: SlotName(c.name, model), model: model}
			b.slots[sl.name] = sl
		}
		sl.consumer, sl.adopted, sl.size = c, adopted, size
		c.slots = append(c.slots, sl)
	}
	if !c.cfg.HasModels() {
		keep("", false, 0)
	} else {
		for _, m := range c.cfg.Models {
			keep(m.Name, false, 0)
		}
		for _, sl := range before {
			if sl.adopted && c.named(sl.model) == nil {
				keep(sl.model, true, sl.size)
			}
		}
	}
	out := make([]scheduler.SlotConfig, 0, len(c.slots)+1)
	for _, sl := range c.slots {
		out = append(out, b.slotConfig(sl))
	}
	return append(out, b.turnsOf(c)...)
}

// turnsName is the name of the slot that takes turns for a consumer with models. No model's slot can have it: a name is never empty.
func turnsName(consumer string) string { return consumer + "/" }

// shown is the name by which people know a slot: one that only takes turns goes by its consumer's.
func shown(slot string) string {
	if consumer, model, _ := strings.Cut(slot, "/"); model == "" {
		return consumer
	}
	return slot
}

// turnsOf is what the scheduler is to know of the slot by which requests that load nothing take the GPU lock: one for a consumer
// with models, at which a request may name none. It holds mu.
func (b *Broker) turnsOf(c *consumer) []scheduler.SlotConfig {
	if !c.cfg.HasModels() || c.cfg.Cloud {
		c.turns = nil
		return nil
	}
	name := turnsName(c.name)
	sl := b.slots[name]
	if sl == nil {
		sl = &slot{name: name}
		b.slots[name] = sl
	}
	sl.consumer, sl.turnOnly = c, true
	c.turns = sl
	of := SlotConfig(c.cfg, c.traits)
	return []scheduler.SlotConfig{{
		Name: name, Consumer: c.name, Server: of.Server, Disabled: of.Disabled, GPUs: of.GPUs, Concurrency: of.Concurrency, LockNone: of.LockNone,
		MaxRun: of.MaxRun, SwitchCost: of.SwitchCost, Budget: of.Budget, Reserved: of.Reserved, TurnOnly: true,
		CanLoad: true, CanProbe: of.CanProbe && !of.Starts, // one that the broker starts is asked for before its turn
	}}
}

// slotConfig is what the scheduler is to know of a slot. It holds mu.
func (b *Broker) slotConfig(sl *slot) scheduler.SlotConfig {
	c := sl.consumer
	cfg := c.cfg
	out := SlotConfig(cfg, c.traits)
	out.Stale = c.next != nil
	if r, ok := c.driver.(lifecycle.Restarter); ok {
		out.Restart, out.MaxRestarts = r.RestartOnFailure(), r.MaxRestarts()
	}
	out.Claim = b.current.Load().Config.SharedVRAM(cfg)
	if sl.model == "" {
		return out
	}
	m := c.named(sl.model)
	if m == nil {
		m = &config.Model{Name: sl.model, VRAM: sl.size} // 0: as its consumer
		if v, known := b.state.Slot(sl.name); cfg.AutoModels && known && v.Measured > 0 {
			m.VRAM = v.Measured
		}
	}
	return ModelConfig(out, cfg, m, c.traits)
}

// find is the consumer of this name, and its slot that serves a request for a model. A model that nobody has named is adopted, if the
// consumer says how much memory such a model takes. nil: there is none. It holds mu.
func (b *Broker) find(now time.Time, name, model string) (*consumer, *slot) {
	face := b.consumers[name]
	if face == nil {
		return nil, nil
	}
	c := face.real()
	switch {
	case !c.cfg.HasModels():
		if len(c.slots) == 0 {
			return face, nil
		}
		return face, c.slots[0]
	case model == "":
		return face, nil
	}
	sl := c.known(model)
	if sl == nil && c.cfg.ServesUnnamed() && config.CheckModelName(model) == nil && !b.leaves(c) && !c.leavesToDouble(model) {
		sl = b.adopt(now, c, lifecycle.Model{Name: model, Resident: -1}, true)
	}
	return face, sl
}

// passes are the ways in which a name is looked for: first as it is written, then as the server compares names.
var passes = [...]bool{true, false}

// isName reports whether other is name, written the same way or, unless exactly, to the server.
func (c *consumer) isName(other, name string, exactly bool) bool {
	return other == name || !exactly && c.traits.Names.Same(other, name)
}

// named is the configuration of the model that goes by this name, or by this alias; nil: there is none. It does not allocate.
func (c *consumer) named(name string) *config.Model {
	for _, exactly := range passes {
		for _, m := range c.cfg.Models {
			if c.isName(m.Name, name, exactly) {
				return m
			}
			for _, alias := range m.Alias {
				if c.isName(alias, name, exactly) {
					return m
				}
			}
		}
	}
	return nil
}

// leavesToDouble reports whether a model belongs to another consumer that stands for the same server.
func (c *consumer) leavesToDouble(model string) bool {
	return c.cfg.LeavesToDouble(model, c.traits.Names.Same)
}

// known is the slot of a model, by any of its names; nil: it has none. It does not allocate.
func (c *consumer) known(model string) *slot {
	if m := c.named(model); m != nil {
		model = m.Name
	}
	for _, exactly := range passes {
		for _, sl := range c.slots {
			if c.isName(sl.model, model, exactly) {
				return sl
			}
		}
	}
	return nil
}

// maxAdopted bounds the models of one consumer that nobody has named.
const maxAdopted = 64

// adopted is how many of its slots nobody has named.
func (c *consumer) adopted() (n int) {
	for _, sl := range c.slots {
		if sl.adopted {
			n++
		}
	}
	return n
}

// adopt makes a slot of a model that nobody has named, but a request, if it was asked for, or the server; nil: there are too many. It holds mu.
func (b *Broker) adopt(now time.Time, c *consumer, m lifecycle.Model, asked bool) *slot {
	if c.adopted() >= maxAdopted && asked && b.disown(c, nil) { // those that came to nothing make way, also where the server lists none
		b.configure(now)
	}
	if c.adopted() >= maxAdopted {
		return nil
	}
	sl := &slot{name: SlotName(c.name, m.Name), model: m.Name, consumer: c, adopted: true, size: max(0, m.Resident)}
	if old := b.slots[sl.name]; old != nil { // it is leaving
		old.adopted, old.size = true, sl.size
		sl = old
	}
	b.slots[sl.name] = sl
	c.slots = append(c.slots, sl)
	b.configure(now)
	if v, _ := b.state.Slot(sl.name); c.cfg.AutoModels && v.Measured > 0 { // what was learnt of it before has come back with it
		b.configure(now)
	}
	if asked && now.Sub(c.listed) <= 2*c.interval { // asked for, and not among those that are loaded: what came since shows in the free memory
		b.apply(now, scheduler.Probed{Slot: sl.name, Sent: now, Loaded: scheduler.No, Resident: -1})
		return sl
	}
	select {
	case c.probeNow <- struct{}{}: // whether it is loaded is known once the server has said so
	default:
	}
	return sl
}

// disown drops the adopted slots that hold nothing, and that nobody asks for. It reports whether there were any. It holds mu.
func (b *Broker) disown(c *consumer, loaded []lifecycle.Model) (changed bool) {
	c.slots = slices.DeleteFunc(c.slots, func(sl *slot) bool {
		if !sl.adopted || slices.ContainsFunc(loaded, func(m lifecycle.Model) bool { return c.traits.Names.Same(m.Name, sl.model) || c.holds(m) == sl }) {
			return false
		}
		over := b.isUnused(sl)
		changed = changed || over
		return over
	})
	return changed
}

// isUnused reports whether a slot holds nothing, and nobody asks for it. It holds mu.
func (b *Broker) isUnused(sl *slot) bool {
	v, known := b.state.Slot(sl.name)
	return !known || v.State == scheduler.Idle && v.GateOpen && v.Active+v.Held+v.Waiting == 0
}

// learnOf takes in which models a server says that it holds: those that nobody has named get slots of their own. It holds mu.
func (b *Broker) learnOf(now time.Time, c *consumer, loaded []lifecycle.Model) {
	if !c.cfg.HasModels() || loaded == nil || c.next != nil || b.leaves(c) { // to one that leaves the scheduler gives no more slots
		return
	}
	changed := b.disown(c, loaded)
	for _, m := range loaded {
		sl := c.holds(m)
		switch {
		case sl == nil && c.leavesToDouble(m.Name):
		case sl == nil && config.CheckModelName(m.Name) == nil: // one that is no name would spoil what is kept over a restart
			b.adopt(now, c, m, false)
		case sl != nil && sl.adopted && m.Resident > sl.size:
			sl.size, changed = m.Resident, true
		}
	}
	if changed {
		b.configure(now)
	}
}

// Address is where the server of a consumer listens, and whether it runs as far as is known: one that the broker does not start is taken to.
func (b *Broker) Address(consumer string) (upstream string, runs bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.consumers[consumer]
	if c == nil {
		return "", false
	}
	c = c.real()
	if !c.traits.Starts {
		return c.upstream, true
	}
	c.findUpstream() // while it starts it listens elsewhere than before, where another may be by now
	return c.upstream, c.runs()
}

// Track hands an answer that names a job to the driver of the server that gave it: another may have its consumer's name by now.
func (l Lease) Track(answer []byte) {
	if jobs, ok := l.driver.(lifecycle.Jobs); ok {
		jobs.Track(answer)
	}
}

// Holder is the consumer, and its name for it, that holds a model which its configuration does not name; empty: there is none.
// With a consumer only that one is looked at.
func (b *Broker) Holder(consumer, model string) (name, as string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, cc := range b.current.Load().Config.Consumers {
		c := b.consumers[cc.Name]
		if c == nil || consumer != "" && cc.Name != consumer || !cc.IsEnabled() {
			continue
		}
		for _, sl := range c.slots {
			if sl.adopted && c.traits.Names.Same(sl.model, model) {
				return c.name, sl.model
			}
		}
	}
	return "", ""
}
