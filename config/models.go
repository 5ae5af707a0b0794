package config

import (
	"fmt"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
)

// MaxModelName is the greatest length of a model's name, in bytes.
const MaxModelName = 256

// HasModels reports whether the consumer's models are loaded and unloaded each by itself.
func (c *Consumer) HasModels() bool { return len(c.Models) > 0 || c.AutoModels }

// ServesUnnamed reports whether a consumer with models also serves those that the configuration does not name. It takes them to need its vram,
// which schedulers other than evicting do without.
func (c *Consumer) ServesUnnamed() bool { return c.VRAM > 0 || c.AutoModels }

// IsUnlisted reports whether lists of models leave out the one of this name; of a consumer without models the name is empty.
func (c *Consumer) IsUnlisted(model string) bool {
	return c.Unlisted || slices.ContainsFunc(c.Models, func(m *Model) bool { return m.Unlisted && m.Name == model })
}

// SharedVRAM is how much the process of c takes when loaded: for itself and for all that share it.
func (b *Broker) SharedVRAM(c *Consumer) gpu.Bytes {
	sum := c.VRAM
	for _, other := range b.Consumers {
		if other.Shares == c.Name {
			sum += other.VRAM
		}
	}
	return sum
}

// CheckModelName says what is wrong with the name by which a server knows a model.
func CheckModelName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("a model has no name: write model NAME, with the name by which the server knows it")
	case len(name) > MaxModelName:
		return fmt.Errorf("a model's name has %d bytes: at most %d are allowed", len(name), MaxModelName)
	case !utf8.ValidString(name):
		return fmt.Errorf("model %q: its name is no text", name)
	case name == "." || name == "..":
		return fmt.Errorf("a model can't be called %q: in a path that is a folder", name)
	}
	if err := checkSeen(name); err != nil {
		return fmt.Errorf("model %q %w", name, err)
	}
	return nil
}

// title names a model in errors, after its consumer's.
func (m *Model) title(consumer string) string {
	return consumer + ": " + faultlines.Title("model "+strconv.Quote(m.Name), m.Source)
}

// checkModels checks the models of c.
func (f *faults) checkModels(who string, c *Consumer, b *Broker) {
	if c.HasModels() && c.Cloud {
		f.add(who, "models have no meaning for a cloud consumer: leave them out, and give it their names as alias")
	}
	if c.AutoModels && c.VRAM == 0 && b.Scheduler == Evicting && !c.Cloud {
		f.add(who, "models auto needs vram: say how much GPU memory a model takes that was not measured yet, as in vram 6GiB")
	}
	if c.SendAs != "" {
		if err := CheckSendAs(c.SendAs); err != nil {
			f.add(who, "%w", err)
		}
		if c.HasModels() {
			f.add(who, "send_as is for consumers without models: write it in the block of the model that it is for")
		}
	}
	seen := map[string]bool{}
	for i, m := range c.Models {
		if m == nil {
			f.add(who, "model number %d is null: leave it out", i+1)
			continue
		}
		at := m.title(who)
		if err := CheckModelName(m.Name); err != nil {
			f.add(at, "%w", err)
		}
		for _, name := range append([]string{m.Name}, m.Alias...) {
			if seen[name] {
				f.add(at, "the name %q is given twice: leave one of them out", name)
			}
			seen[name] = true
		}
		for _, alias := range m.Alias {
			if err := CheckAlias(alias); err != nil {
				f.add(at, "%w", err)
			}
		}
		f.checkSent(at, c, m)
		f.size(at, "vram", m.VRAM)
		if m.VRAM == 0 && c.VRAM == 0 && b.Scheduler == Evicting {
			f.add(at, "vram is missing: say how much GPU memory it takes, as in vram 6GiB, here or at its consumer")
		}
		f.duration(at, "keep_alive", &m.KeepAlive)
		f.duration(at, "idle_timeout", m.IdleTimeout)
		f.notNegative(at, "concurrency", m.Concurrency)
	}
	for _, from := range c.ModelFrom {
		if err := from.Check(); err != nil {
			f.add(who, "model_from: %w", err)
		}
	}
}

// checkShares checks what consumers that share a server say of each other.
func (f *faults) checkShares(who string, c *Consumer, byName map[string]*Consumer, others []string) {
	if c.Shares == "" {
		return
	}
	partner := byName[c.Shares]
	switch {
	case c.Shares == c.Name:
		f.add(who, "shares names the consumer itself: name the other that is in the same process")
		return
	case partner == nil:
		f.word(who, "consumer in shares", c.Shares, others)
		return
	case partner.Shares != "":
		f.add(who, "shares names %s, which itself shares %s: name that one", c.Shares, partner.Shares)
	case partner.HasModels() || c.HasModels():
		f.add(who, "shares is for consumers without models: what has models has one process already")
	case partner.Cloud || c.Cloud:
		f.add(who, "shares has no meaning for a cloud consumer, which holds no memory here: leave it out")
	case partner.GPU != c.GPU:
		f.add(who, "it is on GPU %d, and %s, with which it shares a process, on GPU %d", c.GPU, c.Shares, partner.GPU)
	}
	if c.Upstream == "" {
		c.Upstream = partner.Upstream
	}
	for _, given := range []struct {
		field string
		is    bool
	}{
		{"lifecycle", !isBareLifecycle(c.LifecycleRaw)},
		{"pin", c.Pin},
		{"no_evict", c.NoEvict},
		{"vram_managed", c.VRAMManaged},
		{"residual", c.Residual != 0},
		{"conflicts_with", len(c.ConflictsWith) > 0},
		{"can_coexist_with", len(c.CanCoexistWith) > 0},
	} {
		if given.is {
			f.add(who, "%s stands at %s, whose process it shares: leave it out here", given.field, c.Shares)
		}
	}
}
