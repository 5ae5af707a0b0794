package lifecycle

import (
	"strings"
	"unicode"
)

// Names is how a server compares the names of models. The zero value compares them byte by byte.
//
// A name is read as [registry/][namespace/]model[:tag]; only what Prefix and Tag have defaults for is read at all.
type Names struct {
	// Fold ignores case.
	Fold bool
	// Prefix is what a name without a registry or namespace means, as in "registry.ollama.ai/library/". It ends with a slash.
	Prefix string
	// Tag is what a name without a tag means, as in "latest".
	Tag string
}

// Same reports whether a and b name one model. It does not allocate: warm requests come here.
func (n Names) Same(a, b string) bool {
	switch {
	case a == b:
		return true
	case n == Names{}:
		return false
	}
	pathA, tagA := n.split(a)
	pathB, tagB := n.split(b)
	if n.Fold {
		return strings.EqualFold(pathA, pathB) && strings.EqualFold(tagA, tagB)
	}
	return pathA == pathB && tagA == tagB
}

// Key returns the same text for all names of one model, and different texts for different models. It is no name itself.
func (n Names) Key(name string) string {
	if n == (Names{}) {
		return name
	}
	path, tag := n.split(name)
	if n.Fold {
		path, tag = strings.Map(folded, path), strings.Map(folded, tag)
	}
	if n.Tag == "" {
		return path
	}
	return path + ":" + tag
}

// folded is the one of a letter's cases that stands for all that strings.EqualFold takes for the same.
func folded(r rune) rune {
	least := r
	for other := unicode.SimpleFold(r); other != r; other = unicode.SimpleFold(other) {
		least = min(least, other)
	}
	return least
}

// Match reports whether before and after are the beginning and the end of a name, as it is written or as another name that the server
// takes for it: without the default prefix, and with or without the default tag. It allocates only if no plain comparison fits.
func (n Names) Match(before, after, name string) bool {
	fits := func(name string) bool {
		if len(name) < len(before)+len(after) {
			return false
		}
		head, tail := name[:len(before)], name[len(name)-len(after):]
		return head == before && tail == after || n.Fold && strings.EqualFold(head, before) && strings.EqualFold(tail, after)
	}
	switch {
	case fits(name):
		return true
	case n == Names{}:
		return false
	}
	path, tag := n.split(name)
	if n.Tag == "" {
		return fits(path)
	}
	byDefault := tag == n.Tag || n.Fold && strings.EqualFold(tag, n.Tag)
	return byDefault && fits(path) || fits(path+":"+tag)
}

// split returns name without its default prefix and its tag, and its tag, or the default one.
func (n Names) split(name string) (path, tag string) {
	path = name
	if n.Tag != "" {
		tag = n.Tag
		if at := strings.LastIndexByte(name, ':'); at > strings.LastIndexByte(name, '/') {
			path, tag = name[:at], name[at+1:]
		}
	}
	if n.Prefix == "" {
		return path, tag
	}
	if _, rest, ok := strings.Cut(path, "://"); ok {
		path = rest
	}
	// A registry is a default only in front of a namespace, and a namespace only in front of a model.
	prefix := n.Prefix
	for parts := strings.Count(prefix, "/"); parts > 0; parts-- {
		first, rest, _ := strings.Cut(prefix, "/")
		prefix = rest
		if strings.Count(path, "/") != parts {
			continue
		}
		head, tail, _ := strings.Cut(path, "/")
		if head != first && !(n.Fold && strings.EqualFold(head, first)) {
			break
		}
		path = tail
	}
	return path, tag
}
