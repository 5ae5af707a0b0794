package routing

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// Named is a consumer and what requests may call it.
type Named struct {
	Consumer string
	Aliases  []string
	Hidden   bool // it is found, but not proposed
}

// Names finds the consumer that a request means. It is made once for a configuration, and safe for use by many requests at once.
type Names struct {
	consumers map[string]string // by name and alias
	shown     []string          // names and aliases that may be proposed
}

// NewNames makes Names. Its error holds every name that stands for two consumers.
func NewNames(list []Named) (*Names, error) {
	n := &Names{consumers: map[string]string{}}
	var faults []error
	for _, c := range list {
		for _, name := range append([]string{c.Consumer}, c.Aliases...) {
			if other, taken := n.consumers[name]; taken {
				if other != c.Consumer {
					faults = append(faults, fmt.Errorf("requests for %q could mean consumer %q or %q: give it to one of them", name, other, c.Consumer))
				}
				continue
			}
			n.consumers[name] = c.Consumer
			if !c.Hidden {
				n.shown = append(n.shown, name)
			}
		}
	}
	return n, errors.Join(faults...)
}

// latest is the tag that ollama adds to a name without one.
const latest = ":latest"

// sameModel is the other name by which ollama knows a model, for which a name without a tag is the one with the tag latest; or "".
func sameModel(name string) string {
	if untagged, tagged := strings.CutSuffix(name, latest); tagged {
		return untagged
	}
	if !strings.Contains(name[strings.LastIndexByte(name, '/')+1:], ":") {
		return name + latest
	}
	return ""
}

// Lookup finds the consumer of a name: by the name itself first, then by the other that ollama has for it.
func (n *Names) Lookup(name string) (consumer string, ok bool) {
	if consumer, ok = n.consumers[name]; !ok {
		consumer, ok = n.consumers[sameModel(name)]
	}
	return consumer, ok
}

// Near are up to three names that a name may have been meant to be, the nearest first.
func (n *Names) Near(name string) (near []string) {
	if len(name) > MaxName {
		return nil
	}
	left := slices.Clone(n.shown)
	for range 3 {
		word := config.Nearest(name, left)
		if word == "" {
			break
		}
		near = append(near, word)
		left = slices.DeleteFunc(left, func(s string) bool { return s == word })
	}
	return near
}
