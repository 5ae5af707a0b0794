package doctor

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// A passage is one way by which requests come to a place in the site's
// routes: what they have passed before, as far as it matters there.
type passage struct {
	broker  int    // index of the last gpu_broker that admitted them; -1: none has
	changed string // the path or method has changed since, by this; empty: it has not
	at      string // … which stands there
	errored bool   // they are in error routes, after their turn has ended
	perhaps bool   // of the matchers that they have met since one may exclude another: perhaps there are no such requests

	// Matchers that they are known to meet, and not to meet.
	met, unmet []*matcher
}

// matcher is the matchers of a route: what meets one of its sets comes in. There is one of each text.
type matcher struct {
	sets []map[string]json.RawMessage // nil: it stands for a group of routes, of which a request enters one
}

// same reports whether two passages are alike but for the matchers.
func (p *passage) same(q *passage) bool {
	return p.broker == q.broker && p.changed == q.changed && p.at == q.at && p.errored == q.errored && p.perhaps == q.perhaps
}

// maxPassages bounds the ways to one place. Past it the matchers are forgotten, and what then looks alike is one; of
// what is left only the first are followed.
const maxPassages = 64

// The parts of Caddy's JSON that decide where requests go.
type (
	walkRoute struct {
		Group    string                       `json:"group"`
		Match    []map[string]json.RawMessage `json:"match"`
		Handle   []json.RawMessage            `json:"handle"`
		Terminal bool                         `json:"terminal"`
	}
	walkServer struct {
		Routes []walkRoute `json:"routes"`
		Errors struct {
			Routes []walkRoute `json:"routes"`
		} `json:"errors"`
		NamedRoutes map[string]walkRoute `json:"named_routes"`
	}
	walkHandler struct {
		Handler string      `json:"handler"`
		Routes  []walkRoute `json:"routes"`
		Errors  struct {
			Routes []walkRoute `json:"routes"`
		} `json:"errors"`
		Name           string `json:"name"` // of invoke
		HandleResponse []struct {
			Routes []walkRoute `json:"routes"`
		} `json:"handle_response"`
		PassThru bool `json:"pass_thru"`

		rewriting           // of rewrite
		Rewrite   rewriting `json:"rewrite"` // of reverse_proxy
		Upstreams []struct {
			Dial string `json:"dial"`
		} `json:"upstreams"`
		Dynamic json.RawMessage `json:"dynamic_upstreams"`

		brokerFields
	}
	rewriting struct {
		Method    string            `json:"method"`
		URI       string            `json:"uri"`
		Prefix    string            `json:"strip_path_prefix"`
		Suffix    string            `json:"strip_path_suffix"`
		Substring []json.RawMessage `json:"uri_substring"`
		Regexp    []json.RawMessage `json:"path_regexp"`
	}
	brokerFields struct {
		Consumer string   `json:"consumer"`
		Default  string   `json:"default"`
		Fallback []string `json:"fallback"`
		Bypass   []string `json:"bypass"`
		Touch    []string `json:"touch"`
		Source   string   `json:"source"`
	}
)

// walker goes through the routes of a site in the order in which Caddy does.
type walker struct {
	at      string // of the server
	server  walkServer
	brokers []brokerFields
	vars    map[string][]value // what handlers have set placeholders to
	known   map[string]*matcher
	invoked []string                                                    // the named routes that it is in
	visit   func(h *walkHandler, at string, ways []passage, later bool) // a reverse_proxy
	again   func(second *brokerFields, at string, ways []passage)       // a gpu_broker, to which these ways lead
}

// walk goes through a list of routes; it returns the ways that lead past its end.
func (w *walker) walk(list []walkRoute, at string, ways []passage) []passage {
	for i := range list {
		ways = w.route(&list[i], fmt.Sprintf("%s[%d]", at, i), ways)
	}
	return ways
}

func (w *walker) route(r *walkRoute, at string, ways []passage) []passage {
	match := w.matcher(r.Match)
	var group *matcher
	if r.Group != "" {
		group = w.intern("group "+r.Group, nil)
	}
	var entering, passing []passage
	for _, p := range ways {
		if group != nil && slices.Contains(p.met, group) {
			passing = append(passing, p)
			continue
		}
		if in, ok := p.enter(match); ok {
			if group != nil {
				in.met = append(slices.Clip(in.met), group)
			}
			entering = append(entering, in)
		}
		if past, ok := p.skip(match); ok {
			passing = append(passing, past)
		}
	}
	if len(entering) == 0 {
		return ways
	}
	left := w.handlers(r.Handle, at+".handle", entering)
	if r.Terminal {
		return passing
	}
	if group == nil && len(passing) > 0 && unchanged(ways, left) { // nothing depends on which way they went
		return ways
	}
	return merged(append(left, passing...))
}

// handlers goes through the handlers of a route.
func (w *walker) handlers(list []json.RawMessage, at string, ways []passage) []passage {
	for i, raw := range list {
		var h walkHandler
		if json.Unmarshal(raw, &h) != nil {
			continue
		}
		here := fmt.Sprintf("%s[%d]", at, i)
		switch h.Handler {
		case "subroute":
			before := ways
			ways = w.walk(h.Routes, here+".routes", ways)
			w.walk(h.Errors.Routes, here+".errors.routes", after(before))
		case "invoke":
			ways = w.invoke(h.Name, ways)
		case "vars", "map":
			w.remember(raw, ways)
		case "rewrite":
			ways = changedBy(ways, h.rewriting.String(), here)
		case "gpu_broker":
			w.again(&h.brokerFields, here, ways)
			w.brokers = append(w.brokers, h.brokerFields)
			ways = admitted(ways, len(w.brokers)-1)
		case "reverse_proxy":
			w.visit(&h, here, ways, w.admitsLater(list[i+1:]))
			ways = w.responses(&h, here, ways)
		case "intercept":
			w.responses(&h, here, ways)
		case "static_response", "error", "gpu_broker_status":
			ways = nil
		case "file_server":
			if !h.PassThru {
				ways = nil
			}
		default: // another's, which may have routes of its own
			ways = merged(append(w.walk(h.Routes, here+".routes", ways), ways...))
		}
	}
	return ways
}

// responses goes through the routes that a handler runs when its answer is there, and returns the ways that lead on from them.
func (w *walker) responses(h *walkHandler, at string, ways []passage) (on []passage) {
	for i, r := range h.HandleResponse {
		on = append(on, w.walk(r.Routes, fmt.Sprintf("%s.handle_response[%d].routes", at, i), ways)...)
	}
	return merged(on)
}

func (w *walker) invoke(name string, ways []passage) []passage {
	r, ok := w.server.NamedRoutes[name]
	if !ok || slices.Contains(w.invoked, name) {
		return ways
	}
	w.invoked = append(w.invoked, name)
	ways = w.route(&r, w.at+".named_routes."+name, ways)
	w.invoked = w.invoked[:len(w.invoked)-1]
	return ways
}

// admitsLater reports whether one of these handlers is a gpu_broker: it stands too late.
func (w *walker) admitsLater(list []json.RawMessage) bool {
	return slices.ContainsFunc(list, func(raw json.RawMessage) bool {
		var h walkHandler
		return json.Unmarshal(raw, &h) == nil && h.Handler == "gpu_broker"
	})
}

// changedBy is ways after a handler that changes the path or the method.
func changedBy(ways []passage, what, at string) []passage {
	if what == "" {
		return ways
	}
	out := slices.Clone(ways)
	for i := range out {
		if out[i].broker >= 0 && out[i].changed == "" {
			out[i].changed, out[i].at = what, at
		}
		// What matched the request as it was says nothing of what it is now.
		out[i].met = slices.DeleteFunc(slices.Clone(out[i].met), func(m *matcher) bool { return m.sets != nil })
		out[i].perhaps = out[i].perhaps || len(out[i].met) < len(ways[i].met)
		out[i].unmet = nil
	}
	return merged(out)
}

func admitted(ways []passage, broker int) []passage {
	out := slices.Clone(ways)
	for i := range out {
		out[i].broker, out[i].changed, out[i].at, out[i].errored, out[i].perhaps = broker, "", "", false, false
	}
	return merged(out)
}

// after is ways once their turn has ended with an error.
func after(ways []passage) []passage {
	out := slices.Clone(ways)
	for i := range out {
		out[i].broker, out[i].changed, out[i].at, out[i].errored, out[i].perhaps = -1, "", "", true, false
	}
	return merged(out)
}

// unchanged reports whether both have the same passages but for their matchers.
func unchanged(before, left []passage) bool {
	in := func(p passage, list []passage) bool {
		return slices.ContainsFunc(list, func(q passage) bool { return p.same(&q) })
	}
	for _, p := range left {
		if !in(p, before) {
			return false
		}
	}
	for _, p := range before {
		if !in(p, left) {
			return false
		}
	}
	return true
}

// merged is ways without those that are there twice.
func merged(ways []passage) []passage {
	out := ways[:0:0]
	add := func(p passage, alike func(q passage) bool) {
		if len(out) <= maxPassages && !slices.ContainsFunc(out, alike) {
			out = append(out, p)
		}
	}
	for _, p := range ways {
		add(p, func(q passage) bool {
			return p.same(&q) && slices.Equal(p.met, q.met) && slices.Equal(p.unmet, q.unmet)
		})
	}
	if len(out) <= maxPassages {
		return out
	}
	out = nil
	for _, p := range ways {
		p.met, p.unmet = nil, nil
		add(p, func(q passage) bool { return p.same(&q) })
	}
	return out[:min(len(out), maxPassages)]
}

// enter is p inside a route with this matcher, nil being none; ok is false if it can't get there.
func (p passage) enter(m *matcher) (passage, bool) {
	if m == nil {
		return p, true
	}
	if slices.ContainsFunc(p.unmet, func(u *matcher) bool { return implies(m.sets, u.sets) }) {
		return p, false
	}
	p.perhaps = p.perhaps || slices.ContainsFunc(p.met, func(q *matcher) bool {
		return q.sets != nil && !implies(q.sets, m.sets) && !implies(m.sets, q.sets)
	})
	if !slices.Contains(p.met, m) {
		p.met = append(slices.Clip(p.met), m)
	}
	return p, true
}

// meets reports whether all of p surely meet a matcher.
func (p *passage) meets(m *matcher) bool {
	return slices.ContainsFunc(p.met, func(q *matcher) bool { return q.sets != nil && implies(q.sets, m.sets) })
}

// skip is p past a route with this matcher.
func (p passage) skip(m *matcher) (passage, bool) {
	if m == nil || p.meets(m) {
		return p, false
	}
	if !slices.Contains(p.unmet, m) {
		p.unmet = append(slices.Clip(p.unmet), m)
	}
	return p, true
}

// matcher is what a route's JSON asks for; nil: nothing.
func (w *walker) matcher(sets []map[string]json.RawMessage) *matcher {
	if len(sets) == 0 {
		return nil
	}
	text, _ := json.Marshal(sets) // it was read from JSON; the keys of maps are sorted
	return w.intern(string(text), sets)
}

func (w *walker) intern(text string, sets []map[string]json.RawMessage) *matcher {
	m := w.known[text]
	if m == nil {
		m = &matcher{sets}
		w.known[text] = m
	}
	return m
}

// implies reports whether whatever meets a surely meets b: each of a's sets of matchers has all that some set of b asks for.
func implies(a, b []map[string]json.RawMessage) bool {
	for _, set := range a {
		if !slices.ContainsFunc(b, func(wider map[string]json.RawMessage) bool { return narrower(set, wider) }) {
			return false
		}
	}
	return true
}

func narrower(set, wider map[string]json.RawMessage) bool {
	for name, asked := range wider {
		has, ok := set[name]
		if !ok || string(has) != string(asked) && !(name == "path" && within(has, asked)) {
			return false
		}
	}
	return true
}

// within reports whether every path that one list of patterns matches is matched by the other.
func within(list, wider json.RawMessage) bool {
	var narrow, wide []string
	if json.Unmarshal(list, &narrow) != nil || json.Unmarshal(wider, &wide) != nil {
		return false
	}
	for _, n := range narrow {
		if !slices.ContainsFunc(wide, func(w string) bool {
			prefix, open := strings.CutSuffix(strings.ToLower(w), "*")
			return strings.EqualFold(n, w) || open && !strings.Contains(prefix, "*") && strings.HasPrefix(strings.ToLower(n), prefix)
		}) {
			return false
		}
	}
	return true
}

// String is what it changes of the path or the method, in the Caddyfile's words; empty: nothing.
func (r rewriting) String() string {
	uri := r.URI
	for _, whole := range []string{"{http.request.uri.path}", "{http.request.uri}"} {
		uri = strings.TrimPrefix(uri, whole)
	}
	switch {
	case r.Prefix != "":
		return "uri strip_prefix " + r.Prefix
	case r.Suffix != "":
		return "uri strip_suffix " + r.Suffix
	case len(r.Substring) > 0:
		return "uri replace"
	case len(r.Regexp) > 0:
		return "uri path_regexp"
	case uri != "" && !strings.HasPrefix(uri, "?"):
		return "rewrite " + r.URI
	case r.Method != "":
		return "method " + r.Method
	default:
		return ""
	}
}
