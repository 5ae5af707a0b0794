package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

// Values of Broker.Scheduler.
const (
	Evicting    = "evicting"
	Locked      = "locked"
	Passthrough = "passthrough"
)

// Values of Broker.Lock, and the one of Consumer.Lock.
const (
	LockExclusive = "exclusive"
	LockGlobal    = "global"
	LockNone      = "none"
)

// Values of Broker.VictimPriority.
const (
	VictimAny   = "any"
	VictimLower = "lower"
)

// Values of Consumer.UnlistedRequests.
const (
	UnlistedGPU  = "gpu"
	UnlistedFree = "free"
)

// Values of settings that switch something.
const (
	On  = "on"
	Off = "off"

	Observe = "observe" // it is said, and not done
)

// Namespaces of the guest modules.
const (
	SamplerNamespace   = "gpu_broker.samplers"
	LifecycleNamespace = "gpu_broker.lifecycles"
)

// The words that a setting allows.
var (
	Schedulers    = []string{Evicting, Locked, Passthrough}
	Locks         = []string{LockExclusive, LockGlobal}
	ConsumerLocks = []string{LockNone}
	Switches      = []string{On, Off}
	IdleUnloads   = []string{On, Off, Observe}
	Evictions     = []string{On, Observe}
	UnlistedWords = []string{UnlistedGPU, UnlistedFree}

	VictimPriorities = []string{VictimAny, VictimLower}
)

// GuestNames lists the modules of a namespace that are compiled in, by name.
func GuestNames(namespace string) []string {
	var names []string
	for _, m := range caddy.GetModules(namespace) {
		names = append(names, m.ID.Name())
	}
	slices.Sort(names)
	return names
}

// Unknown is the error for a word that is not among the allowed ones: it lists
// them, and names the nearest if one is near. what says what the word is, such as "scheduler".
func Unknown(what, found string, allowed []string) error {
	if len(allowed) == 0 {
		return fmt.Errorf("unknown %s %q: there is none", what, found)
	}
	list := strings.Join(slices.Compact(slices.Sorted(slices.Values(allowed))), ", ")
	if near := Nearest(found, allowed); near != "" {
		return fmt.Errorf("unknown %s %q: did you mean %s? allowed: %s", what, found, near, list)
	}
	return fmt.Errorf("unknown %s %q: allowed: %s", what, found, list)
}

// Nearest is the word of allowed that found was probably meant to be, or ""
// if none is near: letters left out, added, changed or swapped, or a word that found begins.
func Nearest(found string, allowed []string) string {
	lower := strings.ToLower(found)
	best, least := "", 0
	for _, word := range allowed {
		other := strings.ToLower(word)
		far := max(1, min(len(lower), len(word))/2)
		d := max(len(lower)-len(other), len(other)-len(lower)) // at least so many letters are to be added or left out
		switch {
		case len(lower) >= 3 && strings.HasPrefix(other, lower):
			d = 1
		case d <= far: // else there is no need to look, and found may be long
			d = distance(lower, other)
		}
		if d > far {
			continue
		}
		if best == "" || d < least || d == least && word < best {
			best, least = word, d
		}
	}
	return best
}

// oneOf is nil if found is among the allowed words.
func oneOf(what, found string, allowed []string) error {
	if slices.Contains(allowed, found) {
		return nil
	}
	return Unknown(what, found, allowed)
}

// distance counts the letters to insert, delete, change or swap with their
// neighbour to make b of a (optimal string alignment).
func distance(a, b string) int {
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
