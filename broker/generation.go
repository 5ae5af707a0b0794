package broker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Generation is one configuration, parsed and checked. Its guests only hold
// configuration; what they open belongs to the broker.
type Generation struct {
	Config     *config.Broker
	Sampler    gpu.Guest
	SamplerKey string // equal keys mean equal configuration: an unchanged sampler lives on
	Lifecycles map[string]lifecycle.Guest
	Keys       map[string]string // of the lifecycles, by consumer
	Logger     *zap.Logger
	Observer   Observer
	Store      Store  // where what was learnt is kept; nil: nowhere
	FlagStore  Store  // where the flags are kept; nil: nowhere
	CloudSeed  *bool  // what the environment says of cloud fallbacks; nil: nothing
	Dir        string // where drivers may keep what must outlive a crash; empty: nowhere

	once   sync.Once
	ruled  chan struct{}     // see Ruled
	undone chan struct{}     // see Undone
	opened map[string]opened // of the consumers that are new or changed, until it rules
}

// Ruled is closed once the generation rules.
func (g *Generation) Ruled() <-chan struct{} {
	g.once.Do(g.init)
	return g.ruled
}

// Undone is closed once it is clear that the generation never will rule.
func (g *Generation) Undone() <-chan struct{} {
	g.once.Do(g.init)
	return g.undone
}

func (g *Generation) init() { g.ruled, g.undone = make(chan struct{}), make(chan struct{}) }

// Push takes in a generation. The first starts the broker. A later one rules
// as soon as those before it are popped, which is when Caddy stops them: until
// then something else of its configuration may fail, and it must not have had any effect.
func (b *Broker) Push(g *Generation) error {
	b.recallFlags(g)
	if learnt, first := b.recall(g); first {
		b.step(scheduler.Recall{Learnt: learnt})
	}
	g.once.Do(g.init)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return errors.New("the broker is stopping")
	}
	opened, err := b.open(g)
	if err != nil {
		return err
	}
	g.opened = opened
	b.gens = append(b.gens, g)
	if len(b.gens) == 1 {
		b.rule(g)
	}
	return nil
}

// Pop takes a generation away. If it ruled, the next rules; the last one goes on ruling until Close.
func (b *Broker) Pop(g *Generation) {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.Index(b.gens, g)
	if i < 0 {
		select {
		case <-g.Ruled():
		default: // it was never pushed
			g.discard()
		}
		return
	}
	b.gens = slices.Delete(b.gens, i, i+1)
	if i > 0 { // it never ruled
		g.discard()
	} else if len(b.gens) > 0 && !b.closed {
		b.rule(b.gens[0])
	}
}

// Retire takes all consumers out of the configuration, which nobody has any
// more: they serve those that wait, are unloaded, and go. It returns when none
// is left, or ctx ends. A Push takes those up again that are still there.
func (b *Broker) Retire(ctx context.Context) {
	b.save()
	b.mu.Lock()
	unused := ctx.Err() == nil && len(b.gens) == 0 && !b.closed && b.current.Load() != nil
	if unused {
		for name, c := range b.consumers {
			if c.partner != nil {
				delete(b.consumers, name)
			}
		}
		cfg := SchedulerConfig(b.current.Load().Config)
		now := time.Now()
		b.apply(now, scheduler.Configure{Config: cfg})
		b.forgetSlotless()
	}
	b.mu.Unlock()
	if unused {
		_ = b.until(ctx, func() bool { return len(b.consumers)+len(b.slots) == 0 }) // either way it is over
	}
}

// discard closes the drivers of a generation that does not rule after all. It holds mu.
func (g *Generation) discard() {
	for _, o := range g.opened {
		_ = o.driver.Close()
	}
	g.opened = nil
	select {
	case <-g.Undone():
	default:
		close(g.undone)
	}
}

// Knows reports whether there is a consumer of this name.
func (b *Broker) Knows(consumer string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.consumers[consumer] != nil
}

// open opens the drivers of the consumers that are new or changed. It holds mu:
// opening starts nothing and connects to nothing.
func (b *Broker) open(g *Generation) (map[string]opened, error) {
	all := map[string]opened{}
	for _, cc := range g.Config.Consumers {
		if cc.Shares != "" { // its partner's driver is its own
			continue
		}
		var d lifecycle.Driver
		var err error
		// Behind another that is to rule first nobody knows what will be there.
		if c := b.consumers[cc.Name]; len(b.gens) <= 1 && c != nil && !b.leaves(c) {
			d = c.keeps(g.Keys[cc.Name])
		}
		if d == nil {
			o := opened{limits: new(lifecycle.Limits)}
			o.driver, err = b.openOne(g, cc, o.limits)
			if err == nil {
				d, all[cc.Name] = o.driver, o
			}
		}
		if err == nil {
			err = checkTraits(g.Config, cc, d.Traits())
		}
		if err != nil {
			for _, o := range all {
				_ = o.driver.Close()
			}
			return nil, titled(cc, err)
		}
	}
	return all, nil
}

func (b *Broker) openOne(g *Generation, cc *config.Consumer, limits *lifecycle.Limits) (lifecycle.Driver, error) {
	var opened atomic.Pointer[lifecycle.Driver]
	d, err := g.Lifecycles[cc.Name].Open(lifecycle.Deps{
		Consumer: cc.Name, Upstream: cc.Upstream, Logger: g.Logger.With(zap.String("consumer", cc.Name)),
		Limits: limits, Dir: g.Dir, Died: func(detail string) {
			if d := opened.Load(); d != nil { // else it rules nothing yet
				b.died(cc.Name, *d, detail)
			}
		},
	})
	opened.Store(&d)
	return d, err
}

// titled is err with the consumer's place before each of its faults.
func titled(cc *config.Consumer, err error) error {
	return faultlines.Prefix(faultlines.Title(fmt.Sprintf("consumer %q", cc.Name), cc.Source), err)
}

// Check returns what the configuration wants of consumers that their lifecycles can't do, all of it. It starts nothing and connects to
// nothing, so that it can be called for a configuration that is never used. It passes over lifecycles that can't be opened here: the one who
// checks a configuration may have fewer rights than Caddy.
func (g *Generation) Check() error {
	var faults []error
	for _, cc := range g.Config.Consumers {
		guest := g.Lifecycles[cc.Name]
		if cc.Shares != "" || guest == nil {
			continue
		}
		d, err := guest.Open(lifecycle.Deps{Consumer: cc.Name, Upstream: cc.Upstream}.WithDefaults())
		if err != nil {
			continue
		}
		if err := checkTraits(g.Config, cc, d.Traits()); err != nil {
			faults = append(faults, titled(cc, err))
		}
		_ = d.Close()
	}
	return errors.Join(faults...)
}

// checkTraits says what a consumer's driver would have to be able to do.
func checkTraits(cfg *config.Broker, cc *config.Consumer, t lifecycle.Traits) error {
	if cc.AutoModels && !t.Catalog {
		return errors.New("it has models auto, but its lifecycle has no catalog, which lists what the server has: add one, or name its models")
	}
	if cc.HasModels() && !t.UnloadModel {
		return errors.New("it has models, but its unload route can't unload one by its name: write {model} where the name goes, or leave the models out and give the consumer their vram")
	}
	if judged := !cc.HasModels() && t.FullGPU || cc.HasModels() && t.FullGPUModel; (t.FullGPU || t.FullGPUModel) && !judged {
		if cc.HasModels() {
			return errors.New("it has require_full_gpu and models, but its load route can't load one by its name: write {model} where the name goes, or take require_full_gpu away")
		}
		return errors.New("it has require_full_gpu, but its load route can't load it as a whole: give it `model` lines, or take require_full_gpu away")
	}
	if !t.Load && slices.ContainsFunc(cfg.Restore, func(r config.Restore) bool { return r.Consumer == cc.Name }) {
		return errors.New("restore names it, but it has no load route and loads inside its first request: leave it out of restore, or give it a load route")
	}
	return nil
}

// leaves reports whether a consumer was removed, and may be gone at any moment. The caller holds mu.
func (b *Broker) leaves(c *consumer) bool {
	if b.slotless(c) {
		return false
	}
	return !slices.ContainsFunc(c.slots, func(sl *slot) bool {
		v, known := b.state.Slot(sl.name)
		return known && !v.Gone
	})
}

// slotless reports whether a consumer is in the configuration though it may have no slot, since its server says what models it has. The caller holds mu.
func (b *Broker) slotless(c *consumer) bool {
	g := b.current.Load()
	return g != nil && len(b.gens) > 0 && b.consumers[c.name] == c && slices.ContainsFunc(g.Config.Consumers, func(cc *config.Consumer) bool {
		return cc.Name == c.name && cc.AutoModels && cc.Shares == ""
	})
}

// forgetSlotless forgets the consumers that are not in the configuration and have no slot whose end would do that. It holds mu.
func (b *Broker) forgetSlotless() {
	for _, c := range b.consumers {
		if c.partner == nil && len(b.allSlots(c)) == 0 && b.leaves(c) {
			b.forgetConsumer(c)
		}
	}
}

// rule puts a generation into force. It holds mu.
func (b *Broker) rule(g *Generation) {
	b.current.Store(g)
	brought := g.opened
	g.opened = nil
	defer close(g.ruled)
	for _, cc := range g.Config.Consumers {
		if cc.Shares != "" {
			continue
		}
		c := b.consumers[cc.Name]
		if c != nil && c.partner != nil {
			c = b.withServer(cc.Name)
		}
		if c == nil {
			c = &consumer{name: cc.Name, probeNow: make(chan struct{}, 1), stopProbes: func() {}}
		}
		b.consumers[cc.Name] = c
		b.equip(c, cc, g, brought[cc.Name])
	}
	b.share(g)
	b.configure(time.Now())
	b.forgetSlotless()
	for _, c := range b.consumers {
		if c.partner == nil {
			b.startProbes(c)
		}
	}
	b.startSampler(g)
	b.keepLearnt(g)
}

// withServer is the consumer of this name that has a server of its own: one that shares another's may have had one before,
// which is leaving. nil: there is none. It holds mu.
func (b *Broker) withServer(name string) *consumer {
	c := b.consumers[name]
	if c == nil || c.partner == nil {
		return c
	}
	for _, sl := range b.slots {
		if sl.consumer.name == name {
			return sl.consumer
		}
	}
	return nil
}

// equip gives a consumer its settings and, where it is another, its driver o. A driver that has its
// server running is replaced once that is stopped. It holds mu.
func (b *Broker) equip(c *consumer, cc *config.Consumer, g *Generation, o opened) {
	key := g.Keys[cc.Name]
	set := settings{key: key, opened: o, cfg: cc,
		probeTimeout: time.Duration(g.Config.ProbeTimeout), interval: time.Duration(g.Config.ProbeInterval),
		loadTimeout: time.Duration(cc.LoadTimeout), unloadTimeout: time.Duration(cc.UnloadTimeout)}
	if o.driver != nil && c.has(key) { // it was opened behind another generation, which has brought it already
		b.close(o.driver)
	}
	asItWas := c.driver != nil && c.key == key && !c.closing
	switch {
	case asItWas:
		set.opened = c.opened
	case c.next != nil && c.next.key == key:
		set.opened = c.next.opened
	}
	set.limits.Set(set.probeTimeout, set.unloadTimeout)
	switch {
	case asItWas:
		b.dropNext(c)
		c.take(set)
	case c.next != nil && c.next.key == key:
		c.next = &set
	case c.closing || c.runs() || b.moves(c):
		b.dropNext(c)
		c.next = &set
	default:
		b.dropNext(c)
		if c.driver != nil {
			if heir, ok := o.driver.(lifecycle.Heir); ok {
				heir.Inherit(c.driver)
			}
			b.close(c.driver)
		}
		c.take(set)
	}
}

// dropNext lets go of a driver that does not replace the present one after all. It holds mu.
func (b *Broker) dropNext(c *consumer) {
	if c.next != nil {
		b.close(c.next.driver)
		c.next = nil
	}
}

// close closes a driver; one that may have a server to stop, beside everything else. It holds mu.
func (b *Broker) close(d lifecycle.Driver) {
	if _, takesTime := d.(lifecycle.Supervisor); !takesTime {
		_ = d.Close()
		return
	}
	b.tasks.Go(func() { _ = d.Close() })
}

// share tells the partners of consumers that share a server. It holds mu.
func (b *Broker) share(g *Generation) {
	for name, c := range b.consumers {
		if c.partner != nil && !slices.ContainsFunc(g.Config.Consumers, func(cc *config.Consumer) bool { return cc.Name == name && cc.Shares != "" }) {
			delete(b.consumers, name)
		}
	}
	for _, cc := range g.Config.Consumers {
		if cc.Shares == "" {
			continue
		}
		c := b.consumers[cc.Name]
		if c == nil || c.partner == nil {
			c = &consumer{name: cc.Name, stopProbes: func() {}}
			b.consumers[cc.Name] = c
		}
		c.partner, c.cfg = b.consumers[cc.Shares], cc
	}
}

// configure tells the scheduler of everything that there is. It holds mu.
func (b *Broker) configure(now time.Time) {
	g := b.current.Load()
	sc := SchedulerConfig(g.Config)
	var drained []scheduler.Event // the new slots of drained consumers
	for _, cc := range g.Config.Consumers {
		if c := b.consumers[cc.Name]; c != nil && c.partner == nil {
			slots := b.slotsOf(c)
			sc.Slots = append(sc.Slots, slots...)
			for _, sl := range slots {
				if _, known := b.state.Slot(sl.Name); !known && c.drained {
					drained = append(drained, scheduler.Drain{Slot: sl.Name})
				}
			}
		}
	}
	b.apply(now, scheduler.Configure{Config: sc})
	for _, e := range drained {
		b.apply(now, e)
	}
}

// renew replaces the driver of a consumer of which nothing is loaded, once that has stopped what is left of its server. It holds mu.
func (b *Broker) renew(c *consumer) {
	if c.next == nil || c.closing {
		return
	}
	c.closing = true
	c.stopProbes()
	old := c.driver
	b.tasks.Go(func() {
		_ = old.Close()
		b.mu.Lock()
		defer b.mu.Unlock()
		c.closing = false
		if c.next == nil || b.closed {
			c.driver = nil // it is closed, and nobody asks for it any more
			return
		}
		next := *c.next
		c.next = nil
		c.take(next)
		b.startProbes(c)
		b.configure(time.Now())
		b.ended()
	})
}
