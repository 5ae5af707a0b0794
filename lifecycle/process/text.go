package process

import (
	"regexp"
	"slices"
	"strings"
)

// text is a configured text whose Caddy placeholders are replaced and whose items wait for a start.
type text []piece

type piece struct {
	literal string
	item    string // not empty: the name of one of items
}

// The items: values that are known only when the server is started.
const (
	portItem        = "{gpu_broker.port}"
	gpusItem        = "{gpu_broker.gpus}"
	indicesItem     = "{gpu_broker.gpu_indices}"
	countItem       = "{gpu_broker.gpu_count}"
	parallelItem    = "{gpu_broker.tensor_parallel}"
	utilisationItem = "{gpu_broker.utilisation}"
)

var items = []string{portItem, gpusItem, indicesItem, countItem, parallelItem, utilisationItem}

// placeholder is deliberately narrower than Caddy's, to which every pair of
// braces is one: arguments hold JSON and templates, which stay as they are.
var placeholder = regexp.MustCompile(`\\?\{(?:gpu_broker|env|file|system)\.[^{}"\s]+\}`)

// text reads in. What it can't read it reports as a fault of where.
func (c *compiler) text(where, in string) text {
	if strings.ContainsRune(in, 0) {
		c.fault("%s holds a zero byte", where)
		return nil
	}
	var out text
	end := 0
	for _, at := range placeholder.FindAllStringIndex(in, -1) {
		key := in[at[0]:at[1]]
		out = append(out, piece{literal: in[end:at[0]]})
		end = at[1]
		switch {
		case key[0] == '\\':
			out = append(out, piece{literal: key[1:]})
		case slices.Contains(items, key):
			out = append(out, piece{item: key})
		case strings.HasPrefix(key, "{gpu_broker."):
			c.fault("%s: %s is unknown: there are %s", where, key, strings.Join(items, ", "))
		default:
			value, err := c.values.Read(where, key)
			if err != nil {
				c.faults = append(c.faults, err)
				continue
			}
			out = append(out, piece{literal: value})
		}
	}
	return append(out, piece{literal: in[end:]})
}

func (t text) has(item string) bool {
	return slices.ContainsFunc(t, func(p piece) bool { return p.item == item })
}

func (t text) render(values map[string]string) string {
	var b strings.Builder
	for _, p := range t {
		if p.item != "" {
			b.WriteString(values[p.item])
		} else {
			b.WriteString(p.literal)
		}
	}
	return b.String()
}
