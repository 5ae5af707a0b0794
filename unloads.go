package gpubroker

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
)

// unloadRule is an UnloadRequest, ready for use.
type unloadRule struct {
	config.UnloadRequest
	route config.RoutePatterns
}

// unloadRules prepares those of a consumer. Where the scheduler unloads nothing there are none.
func unloadRules(c *config.Consumer, b *config.Broker) (rules []unloadRule, err error) {
	if b.Scheduler != config.Evicting || c.Cloud {
		return nil, nil
	}
	match, err := config.ParsePathMatch(c.PathMatch)
	if err != nil {
		return nil, err
	}
	for _, u := range c.UnloadRequests {
		route, err := match.Patterns([]string{u.Route})
		if err != nil {
			return nil, err
		}
		rules = append(rules, unloadRule{u, route})
	}
	return rules, nil
}

// mayUnload reports whether a request may ask for an unload, by its route. What bypass or touch names is passed on all the same.
func (t *target) mayUnload(r *http.Request, need config.Need) bool {
	return need != config.NeedsLeave && r.Method != http.MethodOptions &&
		slices.ContainsFunc(t.unloads, func(u unloadRule) bool { return t.Asks(r, u.route) && !t.Passes(r, need, u.route) })
}

// unlessUnload serves a request that may ask for an unload, by what it needs if it does not only give memory back.
func (j *job) unlessUnload(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler, need config.Need) error {
	for i := range j.target.unloads {
		u := &j.target.unloads[i]
		if !j.target.Asks(r, u.route) {
			continue
		}
		said, ok, err := j.asksForUnload(r, u)
		switch {
		case err != nil:
			return j.fail(w, r, err)
		case ok && said.Only:
			return j.giveBack(w, r, next, u, said.Model)
		case ok: // the server unloads it once the work is done: that is looked for, not waited for
			defer j.handler.pool.broker.ProbeSoon(j.target.name)
		}
	}
	if need.Unlisted() {
		need = j.handler.unlistedAsks(j.target, r, need)
	}
	return j.byNeed(w, r, next, need)
}

// byNeed serves a request by what it needs.
func (j *job) byNeed(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler, need config.Need) error {
	switch {
	case need.Unlisted(), need == config.NeedsGPU && j.turn:
		return j.serveTurn(w, r, next)
	case need == config.NeedsGPU:
		return j.serve(w, r, next)
	}
	if j.body != nil {
		j.body.Rewind(r)
	}
	return j.pass(w, r, next, need)
}

// asksForUnload reads the body, if it may be small enough to ask for an unload.
func (j *job) asksForUnload(r *http.Request, u *unloadRule) (_ routing.Unload, ok bool, err error) {
	inBody := !u.Frees() || len(u.True) > 0
	if inBody && j.body == nil && !j.handler.StreamBody && hasBody(r) && r.ContentLength <= routing.MaxUnloadBody {
		if err := j.readAhead(r); err != nil {
			return routing.Unload{}, false, err
		}
	}
	said, ok := j.body.Unloads(u.UnloadRequest)
	return said, ok, nil
}

// giveBack unloads the model that a request is for, once its running work has ended. Nothing is loaded or unloaded for it otherwise.
func (j *job) giveBack(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler, u *unloadRule, asked string) error {
	h, t := j.handler, j.target
	if err := h.app.waitRuled(r.Context(), h.pool.broker, t.name); err != nil {
		return j.fail(w, r, err)
	}
	whole := !h.app.consumer(t.name).HasModels()
	held := h.pool.broker.Held(t.name, j.model)
	switch {
	case held.Refused != nil:
		return j.fail(w, r, held.Refused)
	case u.Frees() && j.model == "" && !whole: // its server may unload all models, those that are pinned, too
		return j.fail(w, r, badRequest(errors.New("this request names no model to unload: name it in "+h.byModel.sources.String())))
	case !held.Loaded && u.Frees() && whole && !held.Pinned && !h.stopped(t, j.repl): // a server that can't tell may hold one all the same
		return j.byNeed(w, r, next, config.NeedsNothing)
	case !held.Loaded:
		return j.answerOwn(w, r, u.answer(asked))
	case held.Pinned:
		return j.fail(w, r, pinned(held.Slot))
	case j.model == "" && !u.Frees(): // which of the consumer's models, only its server knows
		defer h.pool.broker.ProbeSoon(t.name)
		return j.serve(w, r, next)
	}
	err := h.pool.broker.UnloadByHand(r.Context(), held.Slot, false)
	switch {
	case err == nil:
		return j.answerOwn(w, r, u.answer(asked))
	case errors.Is(err, broker.ErrPinned): // since
		return j.fail(w, r, pinned(held.Slot))
	case errors.Is(err, broker.ErrCannot):
		return j.serve(w, r, next)
	case r.Context().Err() != nil:
		return j.fail(w, r, err)
	default:
		return j.fail(w, r, &failure{status: http.StatusServiceUnavailable, code: "unload_failed", message: err.Error(), retryAfter: 5 * time.Second})
	}
}

func pinned(slot string) error {
	return &failure{status: http.StatusForbidden, code: "blocked", message: fmt.Sprintf("%q is pinned, so clients can't unload it: remove its pin, in the configuration or through the admin API", slot)}
}

// answer is what the server would answer to the request.
func (u *unloadRule) answer(model string) []byte {
	if u.Answer == "" {
		return []byte("{}")
	}
	text := func(s string) string {
		out, _ := json.Marshal(s) // a text can always be written
		return string(out)
	}
	return []byte(strings.NewReplacer("{model}", text(model), "{time}", text(time.Now().UTC().Format(time.RFC3339Nano))).Replace(u.Answer))
}
