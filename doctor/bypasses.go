package doctor

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"regexp"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// UpstreamPlaceholder is what reverse_proxy is given behind a gpu_broker.
const UpstreamPlaceholder = "{http.gpu_broker.upstream}"

// Bypasses finds the routes of a site, given as Caddy's whole JSON, on which
// requests reach a model server unseen by the broker, or seen with another path than the server sees, and
// placeholders of the broker that are misspelt. b is the resolved configuration of the broker, and
// placeholders are the names of those that gpu_broker sets. Where is `file:line` of a directive, or the place in the JSON.
func Bypasses(doc []byte, b *config.Broker, placeholders []string) (out []Finding) {
	var site struct {
		Apps struct {
			HTTP struct {
				Servers map[string]json.RawMessage `json:"servers"`
			} `json:"http"`
		} `json:"apps"`
	}
	if b == nil || json.Unmarshal(doc, &site) != nil {
		return nil
	}
	c := &check{b: b, servers: map[string]*config.Consumer{}, byName: map[string]*config.Consumer{}, seen: map[string]bool{}}
	for _, consumer := range b.Consumers {
		if consumer == nil {
			continue
		}
		c.byName[consumer.Name] = consumer
		if at := config.ServerAddress(consumer.Upstream); consumer.Upstream != "" && consumer.IsEnabled() && !consumer.Cloud && c.servers[at] == nil {
			c.servers[at] = consumer
		}
	}
	for _, name := range slices.Sorted(maps.Keys(site.Apps.HTTP.Servers)) {
		raw := site.Apps.HTTP.Servers[name]
		at := "apps.http.servers." + name
		c.spelling(raw, at, placeholders)
		c.w = &walker{at: at, vars: map[string][]value{}, known: map[string]*matcher{}, visit: c.proxy, again: c.again}
		if json.Unmarshal(raw, &c.w.server) != nil {
			continue
		}
		c.w.walk(c.w.server.Routes, at+".routes", []passage{{broker: -1}})
		c.w.walk(c.w.server.Errors.Routes, at+".errors.routes", []passage{{broker: -1, errored: true}})
	}
	return c.findings
}

// check judges what the walk comes to.
type check struct {
	b        *config.Broker
	w        *walker
	servers  map[string]*config.Consumer // by the address of the server, see config.ServerAddress
	byName   map[string]*config.Consumer
	findings []Finding
	seen     map[string]bool
}

// add tells of something once: a named route may be gone through several times.
func (c *check) add(f Finding) {
	f.Check = "routes"
	if key := f.Where + f.Consumer + f.What; !c.seen[key] {
		c.seen[key] = true
		c.findings = append(c.findings, f)
	}
}

// proxy judges a reverse_proxy, to which these ways lead. late: a gpu_broker stands behind it.
func (c *check) proxy(h *walkHandler, at string, ways []passage, late bool) {
	var errored bool
	var seen, unseen []passage
	for _, p := range ways {
		if p.broker >= 0 {
			seen = append(seen, p)
		} else {
			unseen, errored = append(unseen, p), errored || p.errored
		}
	}
	if len(unseen) > 0 {
		c.unseen(c.destinations(h, unseen), at, len(seen) > 0, errored, late)
	}
	for _, p := range seen {
		c.seenBy(p, c.destinations(h, []passage{p}), h, at)
	}
}

// words is what stands in the Caddyfile, and where.
func (b *brokerFields) words() string {
	text := "gpu_broker"
	if b.Source != "" {
		text += " (" + b.Source + ")"
	}
	return text
}

// again judges a gpu_broker to which these ways lead: a request that holds a place must not ask for another.
func (c *check) again(second *brokerFields, at string, ways []passage) {
	for _, p := range ways {
		if p.broker >= 0 && !p.perhaps && c.b.Scheduler != config.Passthrough {
			c.add(Finding{Severity: Error, Where: cmp.Or(second.Source, at), What: fmt.Sprintf(
				"requests come to %s after %s has admitted them: those that need the GPU get 500 misrouted", second.words(), c.w.brokers[p.broker].words()),
				Mend: "leave one of them out, or give each a handle of its own, whose matchers exclude each other"})
			return
		}
	}
}

// destination is where a reverse_proxy sends requests.
type destination struct {
	text      string             // as it stands there
	brokered  bool               // where gpu_broker says
	consumers []*config.Consumer // whose servers it may be; empty: no consumer's
}

// destinations are where a reverse_proxy sends the requests that come in one of these ways.
func (c *check) destinations(h *walkHandler, ways []passage) (out []destination) {
	add := func(text string) {
		d := destination{text: text, brokered: strings.Contains(text, UpstreamPlaceholder)}
		for _, one := range c.w.texts(text, ways) {
			to := c.servers[config.ServerAddress(address(one))]
			if to != nil && !slices.Contains(d.consumers, to) {
				d.consumers = append(d.consumers, to)
			}
		}
		out = append(out, d)
	}
	for _, u := range h.Upstreams {
		add(u.Dial)
	}
	for _, source := range dynamics(h.Dynamic) {
		switch source.Source {
		case "gpu_broker":
			out = append(out, destination{text: "dynamic gpu_broker", brokered: true})
		case "a":
			add(net.JoinHostPort(source.Name, source.Port))
		}
	}
	return out
}

type dynamic struct {
	Source  string            `json:"source"`
	Name    string            `json:"name"`
	Port    string            `json:"port"`
	Sources []json.RawMessage `json:"sources"` // of multi
}

func dynamics(raw json.RawMessage) (out []dynamic) {
	var d dynamic
	if len(raw) == 0 || json.Unmarshal(raw, &d) != nil {
		return nil
	}
	out = append(out, d)
	for _, one := range d.Sources {
		out = append(out, dynamics(one)...)
	}
	return out
}

// address is what an upstream of reverse_proxy dials, as host:port, as far as that can be known before a request.
func address(dial string) string {
	dial = caddy.NewReplacer().ReplaceKnown(dial, "")
	if _, rest, ok := strings.Cut(dial, "://"); ok {
		dial = rest
	}
	if network, rest, ok := strings.Cut(dial, "/"); ok && strings.HasPrefix(network, "tcp") {
		dial = rest
	}
	return dial
}

// unseen tells of requests that come to a server without having been admitted.
func (c *check) unseen(to []destination, at string, some, errored, late bool) {
	who := "requests"
	if some {
		who = "some requests"
	}
	fix := "write gpu_broker %s before it, inside the same block"
	switch {
	case late:
		fix = "move gpu_broker %s, which stands after it, before it: inside route the lines are run in their order"
	case errored:
		fix = "write gpu_broker %s before it, inside the same block: in error routes a request has lost the place that it had"
	case some:
		fix = "give gpu_broker %s and this reverse_proxy the same matcher"
	}
	for _, d := range to {
		words := []string{proxyWords, d.text}
		if d.brokered {
			c.add(Finding{Severity: Error, Where: at, words: words,
				What: "reverse_proxy " + d.text + " is reached by " + who + " that no gpu_broker has admitted: " +
					"it has no address then, and they get 502 or 503",
				Mend: fmt.Sprintf(fix, "CONSUMER")})
			continue
		}
		for _, consumer := range d.consumers {
			if c.b.Scheduler != config.Passthrough {
				c.add(Finding{Severity: Warning, Where: at, words: words, Consumer: consumer.Name,
					What: "a reverse_proxy of this site leads to " + d.text + " with no gpu_broker before it: " + who + " bypass the broker",
					Mend: fmt.Sprintf(fix, consumer.Name)})
			}
		}
	}
}

// seenBy judges a reverse_proxy for requests that a gpu_broker has admitted.
func (c *check) seenBy(p passage, to []destination, h *walkHandler, at string) {
	b := &c.w.brokers[p.broker]
	broker := b.words()
	served := c.served(b)
	reaches := false
	for _, d := range to {
		reaches = reaches || d.brokered || len(d.consumers) > 0
		if d.brokered || len(d.consumers) == 0 || c.b.Scheduler == config.Passthrough {
			continue
		}
		for _, s := range served {
			if !slices.ContainsFunc(d.consumers, func(to *config.Consumer) bool { return sameServer(s, to) }) {
				to := d.consumers[0]
				c.add(Finding{Severity: Warning, Where: at, words: []string{proxyWords, d.text}, Consumer: to.Name,
					What: fmt.Sprintf("requests that %s admits for consumer %s go to %s, the server of %s: the wrong one is loaded for them",
						broker, s.Name, d.text, to.Name),
					Mend: "write reverse_proxy " + UpstreamPlaceholder})
				break
			}
		}
	}
	what, place, words := p.changed, p.at, rewriteWords
	fix := "write " + what + " before gpu_broker: inside route the lines are run in their order. Outside of it, and in handle and handle_path, Caddy sorts them so"
	if what == "" {
		if what = h.Rewrite.String(); what != "" {
			what, place, words = "the "+what+" of reverse_proxy", at, "(?:rewrite|method)"
			fix = "write it as a line of its own before gpu_broker"
		}
	}
	if what == "" || !reaches || c.b.Scheduler == config.Passthrough {
		return
	}
	for _, s := range served {
		if !judgesPaths(s, b) || madeFor(s, b, strings.TrimPrefix(what, "uri strip_prefix ")) {
			continue
		}
		c.add(Finding{Severity: Error, Where: place, words: []string{words, what[strings.LastIndexByte(what, ' ')+1:]}, after: b.Source, Consumer: s.Name,
			What: fmt.Sprintf("%s sees another request than the server of %s: %s comes after it, so the routes that need the GPU aren't recognised and requests pass unseen", broker, s.Name, what),
			Mend: fix})
		return
	}
}

// sameServer reports whether two consumers stand for one server.
func sameServer(a, b *config.Consumer) bool {
	return a == b || a.Shares == b.Name || b.Shares == a.Name || config.ServerAddress(a.Upstream) == config.ServerAddress(b.Upstream)
}

// The directives of a Caddyfile that become a reverse_proxy with an upstream, and those that change a request's path or method.
const (
	proxyWords   = "(?:reverse_proxy|forward_auth|php_fastcgi|to|dynamic)"
	rewriteWords = "(?:uri|rewrite|handle_path|method|try_files|route|handle)"
)

// served are the consumers that a route's requests may be admitted for.
func (c *check) served(b *brokerFields) (out []*config.Consumer) {
	names := slices.Concat([]string{b.Consumer, b.Default}, b.Fallback)
	if own := c.byName[b.Consumer]; own != nil && len(b.Fallback) == 0 {
		names = append(names, own.Fallback...)
	}
	for _, consumer := range c.b.Consumers {
		if consumer != nil && (b.Consumer == "" || slices.Contains(names, consumer.Name)) {
			out = append(out, consumer)
		}
	}
	return out
}

// pathLists are the lists of a consumer and of its route that the path of a request is held against.
func pathLists(s *config.Consumer, b *brokerFields) [][]string {
	return [][]string{s.GPURoutes, s.Bypass, s.Touch, s.AsyncRoutes, s.StartOn, s.Blocked, b.Bypass, b.Touch}
}

// judgesPaths reports whether the broker decides by the path of a request for a consumer.
func judgesPaths(s *config.Consumer, b *brokerFields) bool {
	return slices.ContainsFunc(pathLists(s, b), func(list []string) bool { return len(list) > 0 }) ||
		slices.ContainsFunc(s.ModelFrom, func(m config.ModelFrom) bool { return m.Source == config.FromPath })
}

// madeFor reports whether all lists were written for paths with this prefix, which is taken away later.
func madeFor(s *config.Consumer, b *brokerFields, prefix string) bool {
	if !strings.HasPrefix(prefix, "/") {
		return false
	}
	for _, list := range pathLists(s, b) {
		for _, pattern := range list {
			if _, path, _ := strings.Cut(pattern, "/"); !strings.HasPrefix("/"+path, prefix) {
				return false
			}
		}
	}
	return true
}

// aPlaceholder is one of Caddy's, but for those whose names are the user's.
var aPlaceholder = regexp.MustCompile(`\{[A-Za-z_$][\w.\-]*\}`)

// bare is the placeholder's name where its braces were forgotten.
var bare = regexp.MustCompile(`^(?:https?://)?\$?(http\.gpu_broker\.\w+)`)

// spelling finds misspelt placeholders of the broker anywhere in a server's routes.
func (c *check) spelling(raw json.RawMessage, at string, placeholders []string) {
	var known []string
	for _, name := range placeholders {
		known = append(known, "{"+name+"}")
	}
	var value any
	_ = json.Unmarshal(raw, &value) // what can't be read holds none
	each(value, at, func(text, at string) {
		if m := bare.FindStringSubmatch(text); m != nil && strings.HasSuffix(at, ".dial") {
			c.add(Finding{Severity: Error, Where: at, words: []string{".*", m[1]}, What: "the upstream " + text + " is the name of a placeholder without its braces", Mend: "write {" + nearestOr(m[1], placeholders) + "}"})
			return
		}
		for _, found := range aPlaceholder.FindAllString(text, -1) {
			if slices.Contains(known, found) {
				if strings.HasSuffix(at, ".dial") && text == found && found != UpstreamPlaceholder {
					c.add(Finding{Severity: Error, Where: at, words: []string{".*", found}, What: found + " is no address", Mend: "write " + UpstreamPlaceholder})
				}
				continue
			}
			if near := misspelt(found, known); near != "" {
				c.add(Finding{Severity: Error, Where: at, words: []string{".*", found}, What: "unknown placeholder " + found + ": did you mean " + near + "? Nothing takes its place", Mend: "write " + near})
			}
		}
	})
}

func nearestOr(name string, known []string) string {
	if near := config.Nearest(name, known); near != "" {
		return near
	}
	return name
}

// others are the beginnings of placeholders that are not the broker's, however much they look like them.
var others = []string{"{env.", "{$", "{file.", "{system.", "{time.", "{http.request.", "{http.vars.", "{vars.", "{http.regexp.", "{http.error.", "{http.reverse_proxy.", "{gpu_broker.port}"}

// misspelt is the placeholder of the broker that found was meant to be; empty: it is another's.
func misspelt(found string, known []string) string {
	lower := strings.ToLower(found)
	if slices.ContainsFunc(others, func(prefix string) bool { return strings.HasPrefix(lower, prefix) }) {
		return ""
	}
	letters := strings.NewReplacer("_", "", "-", "", ".", "").Replace(lower)
	near := config.Nearest(lower, known)
	if strings.Contains(letters, "gpubroker") {
		last := lower[strings.LastIndexByte(lower, '.')+1:]
		if i := slices.IndexFunc(known, func(k string) bool { return strings.HasSuffix(k, "."+last) }); i >= 0 {
			return known[i]
		}
		if near == "" {
			return UpstreamPlaceholder
		}
		return near
	}
	if near != "" && strings.Contains(lower, "gpu") {
		return near
	}
	if near != "" && far(lower, near) <= 3 {
		return near
	}
	return ""
}

// far is in how many places two texts of nearly the same length differ, at most: what stands alike at both ends is left out.
func far(a, b string) int {
	for a != "" && b != "" && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for a != "" && b != "" && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return max(len(a), len(b))
}

// each calls f with every text in a JSON document, and with its place.
func each(v any, at string, f func(text, at string)) {
	switch v := v.(type) {
	case string:
		f(v, at)
	case []any:
		for i, item := range v {
			each(item, fmt.Sprintf("%s[%d]", at, i), f)
		}
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			each(v[key], at+"."+key, f)
		}
	}
}

// judgeBypasses tells of requests that pass the broker unseen, by the lines of the Caddyfile where these can be found.
func judgeBypasses(f *facts) (out []Finding) {
	for _, found := range Bypasses(f.site.Config, f.site.Broker, f.site.Placeholders) {
		if line := f.lines.find(f.site.File, found.after, found.words); line != "" {
			found.Where = line
		}
		out = append(out, found)
	}
	return out
}
