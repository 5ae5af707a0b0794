package simulate

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
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
		if c.Shares != "" { // it is loaded with the other
			continue
		}
		for _, sc := range slots(b, c, a.Traits[c.Name]) {
			names[sc.Name] = true
			cost := time.Duration(c.SwitchCost)
			load, unload := cost-cost/10, cost/10
			if d, ok := a.Load[sc.Name]; ok {
				load = d
			}
			if d, ok := a.Unload[sc.Name]; ok {
				unload = d
			}
			w.Consumers = append(w.Consumers, Consumer{Slot: sc, Load: Constant(load), Unload: Constant(unload)})
		}
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
		Driver   string      `json:"driver"`
		Totals   []gpu.Bytes `json:"totals"`
		Fallback []gpu.Bytes `json:"fallback"`
	}
	if err := json.Unmarshal(raw, &sampler); err != nil {
		return nil, fmt.Errorf("gpu: %w", err)
	}
	sampler.Totals = append(sampler.Totals, sampler.Fallback...)
	if len(sampler.Totals) == 0 {
		return nil, fmt.Errorf("the configuration says gpu %s, which does not tell how much memory there is: give --gpu 24GiB, once for each GPU", sampler.Driver)
	}
	return sampler.Totals, nil
}

func consumerNames(b *config.Broker) []string {
	var names []string
	for _, c := range b.Consumers {
		if !c.HasModels() {
			names = append(names, c.Name)
		}
		for _, m := range c.Models {
			names = append(names, broker.SlotName(c.Name, m.Name))
		}
	}
	return names
}

// Names finds the consumers of a configuration by their names and aliases, as routes do.
func Names(b *config.Broker) Lookup {
	type found struct {
		slot string
		of   *config.Consumer
	}
	type matching struct {
		config.NamePattern
		found
	}
	byName := map[string]found{}
	var patterns []matching
	var all []string
	add := func(c *config.Consumer, slot string, aliases []string, names ...string) {
		for _, n := range slices.Concat(names, aliases) {
			if p, ok := config.ParseNamePattern(n); ok && slices.Contains(aliases, n) {
				patterns = append(patterns, matching{p, found{slot, c}})
				continue
			}
			if byName[n].of == nil {
				byName[n] = found{slot, c}
			}
			all = append(all, n)
		}
	}
	for _, c := range b.Consumers {
		switch {
		case c.Shares != "":
			add(c, c.Shares, c.Alias, c.Name)
		case !c.HasModels():
			add(c, c.Name, c.Alias, c.Name)
		}
		for _, m := range c.Models {
			slot := broker.SlotName(c.Name, m.Name)
			add(c, slot, m.Alias, slot, m.Name)
		}
	}
	slices.SortStableFunc(patterns, func(a, b matching) int { return a.Compare(b.NamePattern) })
	return func(name string) (string, int, error) {
		f := byName[name]
		if i := slices.IndexFunc(patterns, func(p matching) bool { return p.Match(name) }); f.of == nil && i >= 0 {
			f = patterns[i].found
		}
		if f.of == nil {
			return "", 0, config.Unknown("consumer", name, all)
		}
		return f.slot, f.of.EffectivePriority(), nil
	}
}

// slots are a consumer's, as package broker gives them to the scheduler, but for
// what the simulator leaves out: residues, probes, and work that outlives its answer.
func slots(b *config.Broker, c *config.Consumer, t lifecycle.Traits) (out []scheduler.SlotConfig) {
	t = lifecycle.Traits{Load: t.Load, Unload: t.Unload, LoadModel: t.LoadModel, UnloadModel: t.UnloadModel}
	sc := broker.SlotConfig(c, t)
	sc.Residual, sc.Async = 0, false
	sc.Claim = b.SharedVRAM(c)
	if !c.HasModels() {
		return append(out, sc)
	}
	for _, m := range c.Models {
		out = append(out, broker.ModelConfig(sc, c, m, t))
	}
	return out
}
