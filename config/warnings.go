package config

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
)

// Warning is something in a configuration that does not keep it from being
// used, but that its author can't have meant. Caddy logs it when it adapts,
// validates or loads the configuration.
type Warning struct {
	// Err reads as a fault does: what it is about, with its place, then what is wrong and what to do.
	Err error
	// Advice marks what stays a warning. Everything else was accepted by earlier
	// releases, is an error of `caddy gpu-broker doctor` today, and keeps Caddy from starting in the next release.
	Advice bool
}

// Warnings returns what Resolve found doubtful, in the order of the configuration.
func (b *Broker) Warnings() []Warning { return b.warnings }

// NewWarning returns a warning about what title names.
func NewWarning(title string, err error) Warning {
	return Warning{Err: faultlines.Prefix(title, err)}
}

func (f *faults) warn(who, format string, args ...any) {
	f.warnings = append(f.warnings, NewWarning(who, fmt.Errorf(format, args...)))
}

func (f *faults) advise(who, format string, args ...any) {
	f.warnings = append(f.warnings, Warning{Err: faultlines.Prefix(who, fmt.Errorf(format, args...)), Advice: true})
}

func (f *faults) unit(who, field string, n, least gpu.Bytes) {
	if err := gpu.CheckUnit(field, n, least); err != nil {
		f.warn(who, "%w", err)
	}
}

// doubtSizes warns of sizes without a unit.
func (f *faults) doubtSizes(b *Broker) {
	if b.Cushion != nil {
		f.unit(b.title("cushion"), "cushion", *b.Cushion, gpu.LeastMemory)
	}
	f.unit(b.title("reserve"), "reserve", b.Reserve, gpu.LeastMemory)
	f.unit(b.title("max_body"), "max_body", b.MaxBody, gpu.LeastBody)
	f.unit(b.title("max_buffered"), "max_buffered", b.MaxBuffered, gpu.LeastBody)
	for i, c := range b.Consumers {
		if c == nil {
			continue
		}
		who := c.title(i)
		f.unit(who, "vram", c.VRAM, gpu.LeastMemory)
		f.unit(who, "residual", c.Residual, gpu.LeastMemory)
		for _, m := range c.Models {
			if m != nil {
				f.unit(m.title(who), "vram", m.VRAM, gpu.LeastMemory)
			}
		}
	}
}

// doubtSettings warns of settings that contradict each other, or that do nothing where they stand.
func (f *faults) doubtSettings(b *Broker) {
	if log := b.RequestLog; log != "" && !filepath.IsAbs(log) {
		f.advise(b.title("request_log"), "request_log %q is relative, so it is written to the folder that Caddy was started in, which for a service is often /: write the whole path", log)
	}
	if b.MaxBody > 0 && b.MaxBuffered > 0 && b.MaxBody > b.MaxBuffered {
		f.warn(b.title("max_body", "max_buffered"), "max_body %s is above max_buffered %s, which bounds all bodies together: a body of that size is never taken. Lower the one or raise the other", b.MaxBody, b.MaxBuffered)
	}
	byName := map[string]*Consumer{}
	for _, c := range b.Consumers {
		if c != nil {
			byName[c.Name] = c
		}
	}
	for _, r := range b.Restore {
		if c := byName[r.Consumer]; c != nil && c.Pin {
			f.advise(faultlines.Title("gpu_broker", r.Source), "restore names %s, which is pinned and so never makes way for others: there is nothing to restore", r.Consumer)
		}
	}
	for i, c := range b.Consumers {
		if c == nil || !c.IsEnabled() || c.Cloud {
			continue
		}
		f.doubtConsumer(c.title(i), c, byName)
	}
}

func (f *faults) doubtConsumer(who string, c *Consumer, byName map[string]*Consumer) {
	ownIdle := time.Duration(0) // its own idle_timeout
	if c.OwnIdleTimeout() {
		ownIdle = c.Idle()
	}
	if c.Pin && c.VRAMManaged {
		f.warn(who, "it has pin and vram_managed: pin keeps it loaded, vram_managed leaves that to its server: leave one of them out")
	}
	if c.Pin && ownIdle > 0 {
		f.warn(who, "it has pin and idle_timeout %s, but what is pinned is never unloaded when idle: leave one of them out", ownIdle)
	}
	if !c.Pin && ownIdle > 0 && ownIdle < time.Duration(c.KeepAlive) {
		f.advise(who, "its idle_timeout %s is shorter than its keep_alive %s, which wins", ownIdle, time.Duration(c.KeepAlive))
	}
	if c.HasModels() && len(c.Alias) > 0 {
		f.warn(who, "its alias %s stands for none of its models, so requests for it get 404: write alias in the block of the model that is meant", strings.Join(c.Alias, ", "))
	}
	if c.PinPrimary && len(c.Fallback) > 0 {
		f.warn(who, "it has fallback and pin_primary, which never takes a fallback: leave one of them out")
	}
	for _, name := range c.ConflictsWith {
		if other := byName[name]; other != nil && other.Pin && other.IsEnabled() {
			f.warn(who, "conflicts_with names %s, which is pinned: once that is loaded, this consumer is refused for good. Leave one of them out", name)
		}
	}
	for _, m := range c.Models {
		if m == nil {
			continue
		}
		at := m.title(who)
		if m.Pin && c.VRAMManaged {
			f.warn(at, "it has pin, and its consumer vram_managed, which leaves it to the server what stays loaded: leave one of them out")
		}
		if (m.Pin || c.Pin) && m.IdleTimeout != nil && *m.IdleTimeout > 0 {
			f.warn(at, "it is pinned and has idle_timeout %s, but what is pinned is never unloaded when idle: leave one of them out", durationText(*m.IdleTimeout))
		}
	}
}

// doubles warns of servers that several consumers stand for, and limits what
// that does. Each of them would take what it sees loaded for its own, and unload it for others, though another
// pins it.
func (f *faults) doubles(b *Broker) {
	groups, rivals := servers(b)
	for _, pair := range rivals {
		f.warn(pair[1].title(0), "%s, though each has a server of its own: only one of them can listen there. Give each its own port",
			pair[1].doublesText(pair[0]))
	}
	for _, group := range groups {
		f.oneServer(b, group)
	}
}

// servers groups the enabled consumers by the server that they stand for, in
// the order of the configuration. Those that share another's server by their own word are left out: they stand for what that one
// does. Consumers of one address of which the broker starts one but not the other are rivals: each of these pairs has two servers.
func servers(b *Broker) (groups [][]*Consumer, rivals [][2]*Consumer) {
	own := map[string]string{} // of the address of one that shares: that of the other, whose server it is
	for _, c := range b.Consumers {
		if first := b.consumer(c.Shares); first != nil && c.IsEnabled() {
			own[ServerAddress(c.Upstream)] = ServerAddress(first.Upstream)
		}
	}
	byAddress := map[string]*Consumer{}
	byServer := map[string]int{}
	for _, c := range b.Consumers {
		if !c.IsEnabled() || c.Cloud || c.Shares != "" || c.Upstream == "" {
			continue
		}
		address := ServerAddress(c.Upstream)
		address = cmp.Or(own[address], address)
		server := address
		if starts(c) {
			server += " " + string(c.LifecycleRaw)
		}
		i, known := byServer[server]
		if known {
			groups[i] = append(groups[i], c)
			continue
		}
		byServer[server] = len(groups)
		groups = append(groups, []*Consumer{c})
		if first := byAddress[address]; first != nil {
			rivals = append(rivals, [2]*Consumer{first, c})
		} else {
			byAddress[address] = c
		}
	}
	return groups, rivals
}

// oneServer sorts out consumers that stand for one server. If any has models,
// those without, which would unload all of them, are switched off, and the others keep each to its own models.
// Otherwise all share the server of the first.
func (f *faults) oneServer(b *Broker, group []*Consumer) {
	var with, without []*Consumer
	for _, c := range group {
		if c.HasModels() {
			with = append(with, c)
		} else {
			without = append(without, c)
		}
	}
	if len(with) == 0 {
		for _, c := range without[1:] {
			first := without[0]
			f.warn(c.title(0), "%s: one server is one consumer. Write shares %s instead, or, if the server loads several models, "+
				"one consumer with a model line for each. Until then it is taken as shares %s", c.doublesText(first), first.Name, first.Name)
			c.share(first, b)
		}
		return
	}
	first := with[0]
	for _, c := range without {
		off := strings.Join(b.switchOff(c), " and ")
		f.warn(c.title(0), "%s: one server is one consumer. Write a model line at %s for what %s stands for. "+
			"Until then requests for %s are refused", c.doublesText(first), first.Name, c.Name, off)
	}
	for i, c := range with[1:] {
		until := "each serves only the models that it names"
		if left := c.leaveModels(with[:i+1]); len(left) > 0 {
			until += ", and of those that both name the first does: requests here for " + strings.Join(left, ", ") + " are refused"
		}
		f.warn(c.title(0), "%s: one server is one consumer. Move its models there. Until then %s", c.doublesText(first), until)
		if !c.HasModels() {
			b.switchOff(c)
		}
	}
	rest := first // it has the models that none of them names
	if i := slices.IndexFunc(with, func(c *Consumer) bool { return c.AutoModels }); i >= 0 {
		rest = with[i]
	}
	for i, c := range with {
		c.doubles, c.onlyNamed = slices.Concat(with[:i], with[i+1:]), c != rest
	}
}

// leaveModels takes from c the models that one of others names, too, and returns their names. What pins one of the two pins the model.
func (c *Consumer) leaveModels(others []*Consumer) (left []string) {
	c.Models = slices.DeleteFunc(slices.Clone(c.Models), func(m *Model) bool {
		for _, other := range others {
			if i := slices.IndexFunc(other.Models, func(o *Model) bool { return o.Name == m.Name }); i >= 0 {
				other.Models[i].Pin = other.Models[i].Pin || m.Pin || c.Pin
				left = append(left, m.Name)
				return true
			}
		}
		return false
	})
	return left
}

// doublesText says whose server c stands for, too.
func (c *Consumer) doublesText(other *Consumer) string {
	text := "its upstream " + c.Upstream + " is that of consumer " + other.Name
	if other.Upstream != c.Upstream {
		text += ", which writes it " + other.Upstream
	}
	return text
}

// switchOff switches off c and all that share its server; it returns their names.
func (b *Broker) switchOff(c *Consumer) (names []string) {
	for _, one := range b.Consumers {
		if one == c || one.Shares == c.Name {
			one.Enabled = Off
			names = append(names, one.Name)
		}
	}
	return names
}

// consumer is the consumer of this name; nil: there is none.
func (b *Broker) consumer(name string) *Consumer {
	if i := slices.IndexFunc(b.Consumers, func(c *Consumer) bool { return c.Name == name }); i >= 0 {
		return b.Consumers[i]
	}
	return nil
}

// starts reports whether the broker starts the server of c.
func starts(c *Consumer) bool {
	_, protocol, err := withProtocol(c.LifecycleRaw)
	return err == nil && protocol != DefaultProtocol
}

// share makes c share the server of first, which it doubles: what protects one of them protects both.
func (c *Consumer) share(first *Consumer, b *Broker) {
	c.Shares, c.GPU = first.Name, first.GPU
	first.Pin = first.Pin || c.Pin
	first.NoEvict = first.NoEvict || c.NoEvict
	first.VRAMManaged = first.VRAMManaged || c.VRAMManaged
	first.KeepAlive = max(first.KeepAlive, c.KeepAlive)
	first.VRAM = max(first.VRAM, c.VRAM) // it is one server's memory, told twice
	first.Residual = max(first.Residual, c.Residual)
	first.CanCoexistWith = slices.Concat(first.CanCoexistWith, c.CanCoexistWith)
	first.ConflictsWith = slices.DeleteFunc(slices.Concat(first.ConflictsWith, c.ConflictsWith), func(name string) bool { return name == first.Name || name == c.Name })
	c.Pin, c.NoEvict, c.VRAMManaged, c.VRAM, c.Residual, c.CanCoexistWith, c.ConflictsWith = false, false, false, 0, 0, nil, nil
	c.LifecycleRaw = json.RawMessage(`{"protocol":"` + DefaultProtocol + `"}`)
	for _, other := range b.Consumers {
		if other.Shares == c.Name {
			other.Shares, other.GPU = first.Name, first.GPU
		}
	}
	for i, r := range b.Restore {
		if r.Consumer == c.Name {
			b.Restore[i].Consumer = first.Name
		}
	}
}

// LeavesToDouble reports whether a model of its server is not this consumer's
// business, because other consumers stand for the same server: a model that one of them names, and, of all but one of
// them, any model that it doesn't name itself. same compares names as the server does.
func (c *Consumer) LeavesToDouble(model string, same func(a, b string) bool) bool {
	return c.onlyNamed || slices.ContainsFunc(c.doubles, func(other *Consumer) bool { return other.names(model, same) })
}

func (c *Consumer) names(model string, same func(a, b string) bool) bool {
	return slices.ContainsFunc(c.Models, func(m *Model) bool {
		return same(m.Name, model) || slices.ContainsFunc(m.Alias, func(a string) bool { return same(a, model) })
	})
}
