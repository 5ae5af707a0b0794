package gpubroker

import (
	"cmp"
	"encoding/json"
	"maps"
	"net/http"
	"slices"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
)

// sent is what a server gets instead of what its clients send.
type sent struct {
	byModel    map[string]*sentModel // the empty name stands for a consumer without models; nil: all goes by default
	fallbackAs map[string]string     // the model's name that a fallback gets
	pinned     []routing.Field       // what fields get at a pinned model, where the client sent them
}

type sentModel struct {
	as     string          // the name that the server gets, or config.SendClient; empty: the default
	change *routing.Change // nil: none
}

func newSent(c *config.Consumer) sent {
	s := sent{fallbackAs: c.FallbackAs, pinned: fieldList(c.PinnedSet)}
	add := func(model string, m *sentModel) {
		if m.as == "" && m.change == nil {
			return
		}
		if s.byModel == nil {
			s.byModel = map[string]*sentModel{}
		}
		s.byModel[model] = m
	}
	add("", &sentModel{as: c.SendAs})
	for _, m := range c.Models {
		add(m.Name, &sentModel{as: m.SendAs, change: newChange(m, c.FoldKeys)})
	}
	return s
}

// newChange is what a model changes in JSON bodies; nil: nothing.
func newChange(m *config.Model, foldKeys bool) *routing.Change {
	if len(m.Set)+len(m.Default)+len(m.Strip) == 0 {
		return nil
	}
	return &routing.Change{Set: fieldList(m.Set), Default: fieldList(m.Default), Strip: m.Strip, FoldKeys: foldKeys}
}

// fieldList returns the fields with their values, sorted by name.
func fieldList(values map[string]json.RawMessage) (out []routing.Field) {
	for _, name := range slices.Sorted(maps.Keys(values)) {
		out = append(out, routing.Field{Name: name, Value: string(values[name])})
	}
	return out
}

// fields are those of JSON that are changed for any model.
func (s *sent) fields() (all []string) {
	for _, m := range s.byModel {
		if m.change != nil {
			all = append(all, m.change.Fields()...)
		}
	}
	return all
}

// renames reports whether the server of a consumer without models gets a name of the configuration's.
func (s *sent) renames() bool {
	m := s.byModel[""]
	return m != nil && m.as != "" && m.as != config.SendClient
}

// translate puts the name that the server knows in place of the one by which the client asked, and, where the request
// computes, changes the fields of its body that the model's configuration changes. A fallback gets a name also where the client gave
// none. Nothing else of the request changes. It does so once.
func (j *job) translate(r *http.Request, computes bool) {
	if j.translated {
		return
	}
	h, t := j.handler, j.target
	asked, sources := j.asked, h.sources
	if h.byModel != nil {
		sources = h.byModel.sources
	} else if sources != nil {
		var err error
		if asked, err = sources.Find(r, j.facts); err != nil && j.facts != nil { // it has two, and its server, which has no models, may take either
			asked = cmp.Or(j.facts.Names...)
		}
		j.askedOf = h.fixed.name
	}
	var change *routing.Change
	if m := t.sent.byModel[j.model]; m != nil && computes {
		change = m.change
	}
	if h.pinnedOnly && computes && j.facts == nil && j.body != nil && j.looksInside() { // it was pinned while it waited
		_ = j.peek(r) // what can't be read is its server's to judge
	}
	if len(t.sent.pinned) > 0 && computes && j.facts != nil && h.pool.broker.Pinned(t.name, j.model) {
		change = change.WithInstead(t.sent.pinned, t.foldKeys)
	}
	fallback := sources != nil && j.askedOf != "" && j.askedOf != t.name
	name := "" // that the server gets; empty: the client's
	if fallback || asked != "" {
		name = j.sendAs(asked)
	}
	if name == "" && change == nil {
		return
	}
	j.translated = true
	alone := sources != nil && asked != "" && sources.InPath(r) == asked && !fallback // what else its body holds means something else
	if name != "" {
		sources.Rename(r, asked, name)
	}
	if j.body == nil || j.facts == nil {
		return
	}
	if fallback && name != "" && len(sources.Fields()) > 0 && cmp.Or(j.facts.Names...) == "" {
		change = change.WithName(name)
	}
	if !slices.ContainsFunc(j.facts.Names, func(in string) bool { return in != "" && in != name && (!alone || in == asked) }) {
		name = ""
	}
	if name != "" || change != nil {
		j.body.Change(h.plan, name, change)
		j.body.Rewind(r)
	}
}

// maxNamedBody is the most that is read of a body for the name of a model alone, in bytes.
const maxNamedBody = 64 << 10

// looksForName reports whether a request that needs no GPU, of a route with one consumer, is read for the name of a model.
func (h *Handler) looksForName(t *target, r *http.Request) bool {
	return h.plan != nil && !h.pinnedOnly && h.fixed == t && !h.StreamBody && 0 < r.ContentLength && r.ContentLength <= min(maxNamedBody, h.maxBody) && hasBody(r) && t.NamesModel(r)
}

// readName reads which model a request names that needs no GPU, so that translate can put the name in its place by which the server knows it.
func (j *job) readName(r *http.Request) error {
	h := j.handler
	if j.body != nil || !h.looksForName(j.target, r) {
		return nil
	}
	switch err := j.readAhead(r); {
	case err != nil && j.body != nil && r.Context().Err() == nil: // it is there, and its server may make more of it
		j.body.Rewind(r)
		return nil
	case err != nil || h.byModel == nil:
		return err
	}
	if name, err := h.byModel.sources.Find(r, j.facts); err == nil { // else its server refuses it
		_, _ = j.mayName(r, name)
		_ = j.checkOther(r, j.target, name) // it needs no GPU: two models are its server's to judge
	}
	return nil
}

// sendAs is the name that the server of j's target gets for the one by which the client asked: a model's own for its alias, and the
// first alias of a consumer that serves as a fallback, unless the client's name is one of that consumer's; the configuration can say otherwise.
// Empty: what the client wrote stays.
func (j *job) sendAs(asked string) string {
	t, as := j.target, ""
	if m := t.sent.byModel[j.model]; m != nil {
		as = m.as
	}
	fallback := t.name != j.askedOf
	if fallback {
		if from := j.handler.targets[j.askedOf]; from != nil && from.sent.fallbackAs[t.name] != "" {
			as = from.sent.fallbackAs[t.name]
		}
	}
	switch {
	case as == config.SendClient:
		return ""
	case as != "":
		return as
	case !fallback:
		return j.own
	case asked != t.name && !slices.Contains(t.known, asked):
		return cmp.Or(t.first(), asked)
	}
	return asked
}

// first is the first name that the server of t's consumer knows; empty: none is configured.
func (t *target) first() string {
	if len(t.known) == 0 {
		return ""
	}
	return t.known[0]
}
