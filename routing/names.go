package routing

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
)

// Named is a consumer, or one of its models, and what requests may call it.
type Named struct {
	Consumer string
	Model    string // empty: the consumer as a whole
	Aliases  []string
	Hidden   bool // it is found, but not proposed
	// Same reports whether two names are one to the server; nil: only equal ones are. It must not allocate.
	Same func(a, b string) bool
	// Match reports whether before and after are the beginning and the end of a name, as the server compares names; nil: byte by byte.
	Match func(before, after, name string) bool
	At    string // where it is defined, for errors; empty: not known
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
	like  []like           // patterns, in the order in which they are asked
	shown []string         // names and aliases that may be proposed
}

// alike is a name that other spellings may stand for.
type alike struct {
	name string
	is   Found
	same func(a, b string) bool
}

// like is a pattern, and what it stands for.
type like struct {
	config.NamePattern
	is   Found
	of   *Named
	same func(a, b string) bool
}

// maxPatterns bounds the patterns of one route: each is tried for a name that nobody has.
const maxPatterns = 256

// title names n in errors.
func (n *Named) title() string {
	return faultlines.Title(Found{n.Consumer, n.Model}.String(), n.At)
}

// ambiguous is the error for a name that stands for two consumers.
func ambiguous(name string, one, other *Named) error {
	return fmt.Errorf("requests for %q could mean consumer %s or %s: give it to one of them", name, one.title(), other.title())
}

// NewNames makes Names. Its error holds every name that stands for two consumers.
func NewNames(list []Named) (*Names, error) {
	n := &Names{found: map[string]Found{}}
	var faults []error
	owner := map[string]*Named{}
	for i := range list {
		c := &list[i]
		is := Found{c.Consumer, c.Model}
		for _, name := range c.names() {
			if p, ok := config.ParseNamePattern(name); ok && slices.Contains(c.Aliases, name) {
				faults = append(faults, n.addPattern(like{p, is, c, c.Same}))
				continue
			}
			if other, taken := n.found[name]; taken {
				if other != is {
					faults = append(faults, ambiguous(name, owner[name], c))
				}
				continue
			}
			owner[name] = c
			n.found[name] = is
			if c.Same != nil && c.Model != "" {
				n.alike = append(n.alike, alike{name, is, c.Same})
			}
			if !c.Hidden {
				n.shown = append(n.shown, name)
			}
		}
	}
	if len(n.like) > maxPatterns {
		faults = append(faults, fmt.Errorf("there are %d aliases with a *: at most %d are allowed", len(n.like), maxPatterns))
	}
	slices.SortStableFunc(n.like, func(a, b like) int { return a.Compare(b.NamePattern) })
	return n, errors.Join(faults...)
}

// addPattern adds a pattern. Its error says that a name could mean this one and another.
func (n *Names) addPattern(p like) error {
	for i := range n.like {
		q := &n.like[i]
		one := p.NamePattern == q.NamePattern || p.same != nil && p.same(p.String(), q.String()) || q.same != nil && q.same(p.String(), q.String())
		switch {
		case !one:
		case p.is != q.is:
			return ambiguous(p.String(), q.of, p.of)
		case p.NamePattern == q.NamePattern:
			return nil
		}
	}
	n.like = append(n.like, p)
	return nil
}

// Find finds who is meant by a name: by Lookup, else by Match.
func (n *Names) Find(name string) (who Found, ok bool) {
	if who, ok = n.Lookup(name); ok {
		return who, true
	}
	return n.Match(name)
}

// Match finds who is meant by a name that Lookup does not find: by the pattern that fits it best, which is the one with the longest
// beginning, then the one with the longest end.
func (n *Names) Match(name string) (who Found, ok bool) {
	if len(name) > MaxName {
		return who, false
	}
	for i := range n.like {
		p := &n.like[i]
		if p.NamePattern.Match(name) || p.of.Match != nil && p.of.Match(p.Before, p.After, name) {
			return p.is, true
		}
	}
	return who, false
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
	left := slices.Clone(n.shown)
	for _, other := range others {
		if _, known := n.Lookup(other); !known { // else it is shown, or hidden
			left = append(left, other)
		}
	}
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
