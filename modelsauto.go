package gpubroker

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// automatic finds a model among those that servers with `models auto` list. Without a target and an error there is none: then
// it returns the names that they list. With sure, or if another consumer of the route holds the model, it counts only if its server lists it.
func (j *job) automatic(r *http.Request, name string, sure bool) (t *target, listed []string, err error) {
	h, m := j.handler, j.handler.byModel
	silent, why, starts, elsewhere := "", "", "", ""
	var failed time.Time // when the load of the one that starts has failed last
	for i, offer := range h.pool.broker.Offers(r.Context(), m.auto, name) {
		switch consumer := m.auto[i]; offer.Known {
		case lifecycle.Yes:
			return j.takes(name, h.targets[consumer], offer.As, ""), nil, nil
		case lifecycle.No:
			if !h.app.consumer(consumer).Unlisted {
				listed = append(listed, offer.Listed...)
			}
		case lifecycle.Unknown:
			switch {
			case offer.Elsewhere:
				elsewhere = cmp.Or(elsewhere, consumer)
			case offer.Starts:
				if starts == "" || offer.Failed.Before(failed) { // one that can't be started must not keep requests from the others
					starts, failed = consumer, offer.Failed
				}
			default:
				silent, why = consumer, offer.Silent
			}
		}
	}
	switch {
	case sure, h.holdsBesides(m.auto, name):
		return nil, listed, nil
	case starts != "": // else no request would ever start it
		return j.takes(name, h.targets[starts], strings.Clone(name), ""), nil, nil
	case silent != "":
		return nil, nil, untold(silent, name, why)
	case elsewhere != "":
		j.turn = true
		return h.targets[elsewhere], nil, nil
	}
	return nil, listed, nil
}

// holdsBesides reports whether a consumer other than these holds a model that the configuration does not name.
func (h *Handler) holdsBesides(consumers []string, name string) bool {
	holder, _ := h.pool.broker.Holder("", name)
	return h.targets[holder] != nil && !slices.Contains(consumers, holder)
}

// untold is the error for a name that may be a model of a server that does not tell its list: to try it would unload others, perhaps for nothing.
func untold(consumer, name, why string) error {
	message := fmt.Sprintf("consumer %q may have the model %.512q, but its server does not list its models now", consumer, name)
	if why != "" {
		message += ": " + why
	}
	return &failure{status: http.StatusServiceUnavailable, code: string(scheduler.Unhealthy), retryAfter: 5 * time.Second, message: message}
}

// answerList is the answer to a request for a list of models, or for one of a list; nil: there is no model of that name.
func (m *byModel) answerList(r *http.Request, h *Handler) (body []byte, name string) {
	if len(m.auto) == 0 {
		return m.answer(m.lists, r)
	}
	all, seen := slices.Clone(m.listed), map[string]bool{}
	for i := range all {
		seen[all[i].Name] = true
	}
	for i, models := range h.pool.broker.Catalogs(r.Context(), m.auto) {
		c := h.app.consumer(m.auto[i])
		for _, model := range models {
			if _, named := m.names.Lookup(model.Name); !named && !seen[model.Name] {
				seen[model.Name] = true
				all = append(all, routing.Listed{Name: strings.Clone(model.Name), Size: int64(c.VRAM), Since: began, Unlisted: c.Unlisted})
			}
		}
	}
	return m.answer(routing.NewLists(all), r)
}

// answer is lists' answer to a request. A model is shown by any name by which it would be served, however that is spelled.
func (m *byModel) answer(lists *routing.Lists, r *http.Request) (body []byte, name string) {
	body, name = lists.Answer(r)
	if body == nil {
		if who, ok := m.names.Find(name); ok {
			body = lists.Entry(cmp.Or(who.Model, who.Consumer))
		}
	}
	return body, name
}
