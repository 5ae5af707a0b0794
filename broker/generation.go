package broker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
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
	Store      Store // where what was learnt is kept; nil: nowhere
	FlagStore  Store // where the flags are kept; nil: nowhere
	CloudSeed  *bool // what the environment says of cloud fallbacks; nil: nothing

	once   sync.Once
	ruled  chan struct{}               // see Ruled
	undone chan struct{}               // see Undone
	opened map[string]lifecycle.Driver // of the consumers that are new or changed, until it rules
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

// consumer is a model server as the broker knows it. Its fields are guarded by the broker's mutex.
type consumer struct {
	name     string
	key      string
	driver   lifecycle.Driver
	traits   lifecycle.Traits
	upstream string
	async    bool
	budget   time.Duration
	cfg      *config.Consumer

	probeTimeout, loadTimeout, unloadTimeout, interval time.Duration

	cancelLoad func()    // ends the load under way; nil: none
	loadBegan  time.Time // of the last load
	loadEnded  time.Time
	probeNow   chan struct{} // cap 1
	stopProbes func()        // nil: none run
	requests   uint64
}

// loadedSince is how much of the time since then the last load took.
func (c *consumer) loadedSince(since time.Time) time.Duration {
	began := c.loadBegan
	if began.Before(since) {
		began = since
	}
	return max(0, c.loadEnded.Sub(began))
}

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
	unused := len(b.gens) == 0 && !b.closed && b.current.Load() != nil
	if unused {
		cfg := SchedulerConfig(b.current.Load().Config)
		now := time.Now()
		effects, wake := b.state.Step(now, scheduler.Configure{Config: cfg})
		b.act(now, effects, wake)
	}
	b.mu.Unlock()
	if unused {
		_ = b.until(ctx, func() bool { return len(b.consumers) == 0 }) // either way it is over
	}
}

// discard closes the drivers of a generation that does not rule after all. It holds mu.
func (g *Generation) discard() {
	for _, d := range g.opened {
		_ = d.Close()
	}
	g.opened = nil
	select {
	case <-g.Undone():
	default:
		close(g.undone)
	}
}

// Knows says whether there is a consumer of this name.
func (b *Broker) Knows(consumer string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.consumers[consumer] != nil
}

// open opens the drivers of the consumers that are new or changed. It holds mu:
// opening starts nothing and connects to nothing.
func (b *Broker) open(g *Generation) (map[string]lifecycle.Driver, error) {
	opened := map[string]lifecycle.Driver{}
	for _, cc := range g.Config.Consumers {
		// Behind another that is to rule first nobody knows what will be there.
		if c := b.consumers[cc.Name]; len(b.gens) <= 1 && c != nil && c.key == g.Keys[cc.Name] && !b.leaves(cc.Name) {
			continue
		}
		d, err := g.Lifecycles[cc.Name].Open(lifecycle.Deps{
			Consumer: cc.Name, Upstream: cc.Upstream, Logger: g.Logger.With(zap.String("consumer", cc.Name)),
			ProbeTimeout: time.Duration(g.Config.ProbeTimeout), UnloadTimeout: time.Duration(cc.UnloadTimeout),
		})
		if err != nil {
			for _, d := range opened {
				_ = d.Close()
			}
			return nil, fmt.Errorf("consumer %q: %w", cc.Name, err)
		}
		opened[cc.Name] = d
	}
	return opened, nil
}

// leaves says whether a consumer was removed, and may be gone at any moment. The caller holds mu.
func (b *Broker) leaves(name string) bool {
	v, _ := b.state.Slot(name)
	return v.Gone
}

// rule puts a generation into force. It holds mu.
func (b *Broker) rule(g *Generation) {
	b.current.Store(g)
	opened := g.opened
	g.opened = nil
	defer close(g.ruled)
	sc := SchedulerConfig(g.Config)
	for _, cc := range g.Config.Consumers {
		c := b.consumers[cc.Name]
		if c == nil {
			c = &consumer{name: cc.Name, probeNow: make(chan struct{}, 1)}
			b.consumers[cc.Name] = c
		}
		if d := opened[cc.Name]; d != nil {
			if c.driver != nil {
				_ = c.driver.Close()
			}
			c.driver, c.key, c.traits = d, g.Keys[cc.Name], d.Traits()
		}
		c.cfg, c.upstream, c.async, c.budget = cc, cc.Upstream, cc.Async, time.Duration(cc.Budget)
		c.probeTimeout, c.interval = time.Duration(g.Config.ProbeTimeout), time.Duration(g.Config.ProbeInterval)
		c.loadTimeout, c.unloadTimeout = time.Duration(cc.LoadTimeout), time.Duration(cc.UnloadTimeout)
		sc.Slots = append(sc.Slots, SlotConfig(cc, c.traits))
	}
	now := time.Now()
	effects, wake := b.state.Step(now, scheduler.Configure{Config: sc})
	b.act(now, effects, wake)
	for _, cc := range g.Config.Consumers {
		b.startProbes(b.consumers[cc.Name])
	}
	b.startSampler(g)
	b.keepLearnt(g)
}
