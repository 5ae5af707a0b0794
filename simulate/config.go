package simulate

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Assumptions are what a configuration doesn't tell.
type Assumptions struct {
	GPUs   []gpu.Bytes                 // total memory of each; none: what the config declares
	Load   map[string]time.Duration    // by consumer; default: nine tenths of its switch_cost
	Unload map[string]time.Duration    // likewise; default: a tenth of it
	Traits map[string]lifecycle.Traits // what each consumer's lifecycle can do
}

// FromConfig is the world of a resolved configuration.
func FromConfig(b *config.Broker, a Assumptions) (*World, error) {
	w := &World{GPUs: a.GPUs, Settings: broker.SchedulerConfig(b)}
	if len(w.GPUs) == 0 {
		declared, err := declaredGPUs(b.GPURaw)
		if err != nil {
			return nil, err
		}
		w.GPUs = declared
	}
	var faults []error
	names := map[string]bool{}
	for _, c := range b.Consumers {
		names[c.Name] = true
		cost := time.Duration(c.SwitchCost)
		load, unload := cost-cost/10, cost/10
		if d, ok := a.Load[c.Name]; ok {
			load = d
		}
		if d, ok := a.Unload[c.Name]; ok {
			unload = d
		}
		w.Consumers = append(w.Consumers, Consumer{Slot: slot(c, a.Traits[c.Name]), Load: Constant(load), Unload: Constant(unload)})
		if !c.Cloud && c.GPU >= len(w.GPUs) {
			faults = append(faults, fmt.Errorf("consumer %q is on GPU %d, and the simulation has %d: give --gpu once for each", c.Name, c.GPU, len(w.GPUs)))
		}
	}
	for _, given := range []struct {
		flag  string
		times map[string]time.Duration
	}{{"--load", a.Load}, {"--unload", a.Unload}} {
		for name := range given.times {
			if !names[name] {
				faults = append(faults, fmt.Errorf("%s: %w", given.flag, config.Unknown("consumer", name, consumerNames(b))))
			}
		}
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	return w, w.Check()
}

// declaredGPUs are the GPUs of a configuration that declares them itself.
func declaredGPUs(raw json.RawMessage) ([]gpu.Bytes, error) {
	var sampler struct {
		Driver string      `json:"driver"`
		Totals []gpu.Bytes `json:"totals"`
	}
	if err := json.Unmarshal(raw, &sampler); err != nil {
		return nil, fmt.Errorf("gpu: %w", err)
	}
	if len(sampler.Totals) == 0 {
		return nil, fmt.Errorf("the configuration says gpu %s, which does not tell how much memory there is: give --gpu 24GiB, once for each GPU", sampler.Driver)
	}
	return sampler.Totals, nil
}

func consumerNames(b *config.Broker) []string {
	var names []string
	for _, c := range b.Consumers {
		names = append(names, c.Name)
	}
	return names
}

// Names finds the consumers of a configuration by their names and aliases, as routes do.
func Names(b *config.Broker) Lookup {
	byName := map[string]*config.Consumer{}
	var all []string
	for _, c := range b.Consumers {
		for _, n := range append([]string{c.Name}, c.Alias...) {
			if byName[n] == nil {
				byName[n] = c
			}
			all = append(all, n)
		}
	}
	return func(name string) (string, int, error) {
		c := byName[name]
		if c == nil {
			return "", 0, config.Unknown("consumer", name, all)
		}
		return c.Name, c.EffectivePriority(), nil
	}
}

// slot is a consumer's, as package broker gives it to the scheduler, but for
// what the simulator leaves out: residues, probes, and work that outlives its answer.
func slot(c *config.Consumer, t lifecycle.Traits) scheduler.SlotConfig {
	sc := broker.SlotConfig(c, lifecycle.Traits{Load: t.Load, Unload: t.Unload})
	sc.Residual, sc.Async = 0, false
	return sc
}
