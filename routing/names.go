package routing

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// Named is a consumer, or one of its models, and what requests may call it.
type Named struct {
	Consumer string
	Model    string // empty: the consumer as a whole
	Aliases  []string
	Hidden   bool // it is found, but not proposed
	// Same reports whether two names are one to the server; nil: only equal ones are. It must not allocate.
	Same func(a, b string) bool
}

// Found is whom a name means.
type Found struct{ Consumer, Model string }

func (f Found) String() string {
	if f.Model == "" {
		return strconv.Quote(f.Consumer)
	}
	return fmt.Sprintf("%q of %q", f.Model, f.Consumer)
}

// names are all that it is called, the one first by which it is listed.
func (n Named) names() []string {
	if n.Model == "" {
		return append([]string{n.Consumer}, n.Aliases...)
	}
	return append([]string{n.Model, n.Consumer + "/" + n.Model}, n.Aliases...)
}

// Names finds the consumer that a request means. It is made once for a configuration, and safe for use by many requests at once.
type Names struct {
	found map[string]Found // by name and alias
	alike []alike          // names of servers that compare names in a way of their own
	shown []string         // names and aliases that may be proposed
}

// alike is a name that other spellings may stand for.
type alike struct {
	name string
	is   Found
	same func(a, b string) bool
}

// NewNames makes Names. Its error holds every name that stands for two consumers.
func NewNames(list []Named) (*Names, error) {
	n := &Names{found: map[string]Found{}}
	var faults []error
	for _, c := range list {
		is := Found{c.Consumer, c.Model}
		for _, name := range c.names() {
			if other, taken := n.found[name]; taken {
				if other != is {
					faults = append(faults, fmt.Errorf("requests for %q could mean consumer %v or %v: give it to one of them", name, other, is))
				}
				continue
			}
			n.found[name] = is
			if c.Same != nil && c.Model != "" {
				n.alike = append(n.alike, alike{name, is, c.Same})
			}
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

// Lookup finds who is meant by a name: by the name itself first, then by the other that ollama has for it, then by
// what the servers take for the same.
func (n *Names) Lookup(name string) (who Found, ok bool) {
	if who, ok = n.found[name]; !ok {
		who, ok = n.found[sameModel(name)]
	}
	if ok || len(name) > MaxName {
		return who, ok
	}
	for i := range n.alike {
		if a := &n.alike[i]; a.same(a.name, name) {
			return a.is, true
		}
	}
	return who, false
}

// Near are up to three names that a name may have been meant to be, the nearest first: of its own, and of others.
func (n *Names) Near(name string, others ...string) (near []string) {
	if len(name) > MaxName {
		return nil
	}
	left := slices.Concat(n.shown, others)
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
