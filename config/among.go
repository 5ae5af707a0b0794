package config

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
)

// maxAlias is the greatest length of an alias: names of models are longer than those of consumers.
const maxAlias = 256

// CheckAlias says what is wrong with a name by which requests may ask for a consumer.
func CheckAlias(alias string) error {
	switch {
	case alias == "":
		return fmt.Errorf("alias %q is empty", alias)
	case len(alias) > maxAlias:
		return fmt.Errorf("an alias has %d bytes: at most %d are allowed", len(alias), maxAlias)
	}
	if err := checkSeen(alias); err != nil {
		return fmt.Errorf("alias %q %w", alias, err)
	}
	return checkPattern(alias)
}

// checkSeen reports what in a name people can't see. Spaces inside it are allowed.
func checkSeen(name string) error {
	for _, r := range name {
		if !unicode.IsPrint(r) {
			return fmt.Errorf("holds %q: only spaces and characters that can be seen are allowed", r)
		}
	}
	if strings.Trim(name, " ") != name {
		return errors.New("begins or ends with a space: leave that out")
	}
	return nil
}

// checkAmong checks what consumers say of each other.
func (f *faults) checkAmong(b *Broker) {
	byName := map[string]*Consumer{}
	var names []string
	for _, c := range b.Consumers {
		if c != nil && c.Name != "" && byName[c.Name] == nil {
			byName[c.Name] = c
			names = append(names, c.Name)
		}
	}
	titles := map[string]string{} // of names and aliases
	for i, c := range b.Consumers {
		if c != nil && c.Name != "" && titles[c.Name] == "" {
			titles[c.Name] = c.title(i)
		}
	}
	aliases := map[string]string{} // whose they are, by title
	for i, c := range b.Consumers {
		if c == nil {
			continue
		}
		who := c.title(i)
		others := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name == c.Name })
		f.checkAliases(who, c, titles, aliases)
		f.checkShares(who, c, byName, others)
		for _, name := range c.CanCoexistWith {
			if name != c.Name {
				f.word(who, "consumer in can_coexist_with", name, others)
			}
		}
		for _, name := range c.ConflictsWith {
			other := byName[name]
			switch {
			case name == c.Name:
				f.add(who, "conflicts_with names the consumer itself: leave that out")
			case other == nil:
				f.word(who, "consumer in conflicts_with", name, others)
			case other.Cloud:
				f.add(who, "conflicts_with names %s, which is a cloud consumer and takes no memory: leave that out", name)
			case slices.Contains(c.CanCoexistWith, name) || slices.Contains(other.CanCoexistWith, c.Name):
				f.add(who, "conflicts_with names %s, though can_coexist_with keeps the two together: leave one of them out", name)
			}
		}
		if err := CheckFallbackAs(c.FallbackAs, c.Fallback); err != nil {
			f.add(who, "%w", err)
		}
		for _, name := range c.Fallback {
			if name == c.Name {
				f.add(who, "fallback names the consumer itself: it is always asked first; leave that out")
				continue
			}
			f.word(who, "consumer in fallback", name, others)
			if other := byName[name]; other != nil && other.HasModels() {
				f.add(who, "fallback names %s, which has models: its requests would not name one of them; leave that out", name)
			}
		}
	}
	f.checkRestore(b, byName, names)
}

// checkAliases checks that nothing that c is called is another consumer's. aliases is added to.
func (f *faults) checkAliases(who string, c *Consumer, titles, aliases map[string]string) {
	for _, alias := range c.Alias {
		if err := CheckAlias(alias); err != nil {
			f.add(who, "%w", err)
			continue
		}
		if other := titles[alias]; other != "" && alias != c.Name {
			f.add(who, "alias %q is the name of %s: a request that asks for it could mean either", alias, other)
			continue
		}
		if other := aliases[alias]; other != "" && other != who {
			f.add(who, "alias %q is an alias of %s, too: a request that asks for it could mean either", alias, other)
			continue
		}
		aliases[alias] = who
	}
}

// checkRestore checks what is to be loaded again.
func (f *faults) checkRestore(b *Broker, byName map[string]*Consumer, names []string) {
	seen := map[string]bool{}
	for _, r := range b.Restore {
		who := faultlines.Title("gpu_broker", r.Source)
		c := byName[r.Consumer]
		switch {
		case c == nil:
			f.word(who, "consumer in restore", r.Consumer, names)
		case c.Shares != "":
			f.add(who, "restore names %s, which shares the process of %s: name that one", r.Consumer, c.Shares)
		case c.HasModels():
			f.add(who, "restore names %s, which has models: it is not known which to load; leave that out", r.Consumer)
		case c.Cloud:
			f.add(who, "restore names %s, which is a cloud consumer and is never loaded: leave that out", r.Consumer)
		case !c.IsEnabled():
			f.add(who, "restore names %s, which has enabled off: switch it on or leave that out", r.Consumer)
		case seen[r.Consumer]:
			f.add(who, "restore names %s twice: leave one of them out", r.Consumer)
		}
		seen[r.Consumer] = true
		if r.After <= 0 {
			f.add(who, "restore of %s: after is %s: it must be above 0, as in restore %s after 2m", strconv.Quote(r.Consumer), durationText(r.After), r.Consumer)
		}
	}
}

// checkCloud checks that c, which runs elsewhere, has no word of those that are of a place on this host.
func (f *faults) checkCloud(who string, c *Consumer) {
	for _, given := range []struct {
		field string
		is    bool
	}{
		{"vram", c.VRAM != 0},
		{"gpu", c.GPU != 0},
		{"lock", c.Lock != ""},
		{"can_coexist_with", len(c.CanCoexistWith) > 0},
		{"conflicts_with", len(c.ConflictsWith) > 0},
		{"reserved_interactive", c.ReservedInteractive != 0},
		{"pin", c.Pin},
		{"no_evict", c.NoEvict},
		{"vram_managed", c.VRAMManaged},
		{"keep_alive", c.KeepAlive != 0},
		{"residual", c.Residual != 0},
		{"async", c.Async},
		{"processes", len(c.Processes) > 0},
		{"lifecycle", !isBareLifecycle(c.LifecycleRaw)},
	} {
		if !given.is {
			continue
		}
		if c.Preset != "" {
			f.add(who, "%s has no meaning for a cloud consumer, which holds no memory here: leave it, or the preset that brings it, out", given.field)
			continue
		}
		f.add(who, "%s has no meaning for a cloud consumer, which holds no memory here: leave it out", given.field)
	}
}
