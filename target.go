package gpubroker

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// target is what a route knows of a consumer that may serve its requests. It
// is made once, so that a warm request doesn't have to.
type target struct {
	*config.Routes
	name        string // empty: no consumer is known, see nobody
	upstream    string
	loadTimeout time.Duration
	maxRun      time.Duration // 0: no bound
	starts      bool          // the broker starts and stops its server
	priority    int           // of requests that name none
	unloads     []unloadRule  // requests that give memory back
	candidates  []string      // the ladder, this one being the first; nil: there is no other
	known       []string      // names that its server knows, beside the consumer's; no patterns
	sent        sent
	foldKeys    bool // its server takes fields of JSON in any case

	placeholders caddy.ReplacerFunc // as they are for a request that did not wait
	waited, ran  prometheus.Observer
}

// nobody stands for the consumer of a request that has none.
var nobody = &target{Routes: new(config.Routes), placeholders: placeholders("", "")}

// newTarget makes the target of a consumer for the requests of a route.
func (h *Handler) newTarget(c *config.Consumer) (*target, error) {
	t := &target{
		name:         c.Name,
		upstream:     c.Upstream,
		loadTimeout:  time.Duration(c.LoadTimeout),
		maxRun:       c.LongestRun(),
		priority:     c.EffectivePriority(),
		placeholders: placeholders(c.Name, c.Upstream),
		waited:       metrics.wait.WithLabelValues(c.Name),
		ran:          metrics.run.WithLabelValues(c.Name),
	}
	var err error
	if t.Routes, err = config.NewRoutes(c, h.Bypass, h.Touch); err != nil {
		return nil, fmt.Errorf("consumer %q: %w", c.Name, err)
	}
	if t.unloads, err = unloadRules(c, &h.app.Broker); err != nil {
		return nil, fmt.Errorf("consumer %q: %w", c.Name, err)
	}
	t.starts, t.foldKeys, t.known = h.app.starts[c.Name], c.FoldKeys, plainNames(c.Alias)
	if h.MaxRun != nil {
		t.maxRun = time.Duration(*h.MaxRun)
	}
	if n, ok := h.Priority.Number(); ok {
		t.priority = n
	}
	t.priority = h.PriorityRange.Clamp(t.priority)
	t.sent = newSent(c)
	ladder := c.Fallback
	if len(h.Fallback) > 0 {
		t.sent.fallbackAs = h.FallbackAs
		ladder = slices.DeleteFunc(slices.Clone(h.Fallback), func(name string) bool { return name == c.Name })
	}
	if len(ladder) > 0 {
		t.candidates = append([]string{c.Name}, ladder...)
		for _, to := range ladder {
			metrics.fallbacks.WithLabelValues(c.Name, to) // the series is there from the start
		}
	}
	return t, nil
}

// plainNames are the aliases that are no patterns.
func plainNames(aliases []string) []string {
	return slices.DeleteFunc(slices.Clone(aliases), func(alias string) bool {
		_, pattern := config.ParseNamePattern(alias)
		return pattern
	})
}

// stopped reports whether a request that needs no GPU is for a server that does not run, and if not, where that listens.
func (h *Handler) stopped(t *target, repl *caddy.Replacer) bool {
	if !t.starts {
		return false
	}
	upstream, runs := h.pool.broker.Address(t.name)
	if runs {
		repl.Set("http.gpu_broker.upstream", upstream)
	}
	return !runs
}

// pass serves a request of which it is known that it needs no GPU, unless it is not to be served at all.
func (j *job) pass(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler, need config.Need) error {
	t, h := j.target, j.handler
	switch {
	case need == config.NeedsLeave:
		return j.fail(w, r, &failure{status: http.StatusForbidden, code: "blocked",
			message: fmt.Sprintf("%s %s of consumer %q is not for clients: its configuration blocks it", r.Method, r.URL.Path, t.name)})
	case h.stopped(t, j.repl):
		if isPreflight(r) && j.preflight(w, r) {
			return nil
		}
		if t.Starts(r) {
			return j.serve(w, r, next)
		}
		return j.notRunning(w, r)
	case need == config.NeedsTouch:
		h.pool.broker.Touch(t.name)
	}
	err := j.readName(r)
	if err != nil {
		return j.fail(w, r, err)
	}
	j.translate(r, false)
	switch {
	case isPreflight(r):
		err = j.passPreflight(w, r, next)
	case h.asksForList(r):
		err = j.passList(w, r, next)
	default:
		err = next.ServeHTTP(w, r)
	}
	if !refusedDial(err) {
		return err
	}
	upstream, _ := j.repl.GetString("http.gpu_broker.upstream")
	if f := misrouted(j.repl, t.name, upstream); f != nil {
		return j.fail(w, r, f)
	}
	if t.starts { // it has just been started, or is being stopped
		return j.notRunning(w, r)
	}
	return err
}

// notRunning answers a request that needs no GPU in the place of a server that the broker starts and that does not listen now. It lists the
// models of the server, of which a request for one starts it, and refuses everything else.
func (j *job) notRunning(w http.ResponseWriter, r *http.Request) error {
	if h := j.handler; h.asksForList(r) {
		if body, _ := h.byModel.answerList(r, h); body != nil {
			return j.answerOwn(w, r, body)
		}
	}
	return j.fail(w, r, notRunning(j.target.name))
}

// notRunning is the error for a request that needs no GPU, and would not start the server that it is for.
func notRunning(consumer string) error {
	return &failure{status: http.StatusServiceUnavailable, code: string(scheduler.NotRunning), retryAfter: 5 * time.Second,
		message: fmt.Sprintf("the server of consumer %q is not running, or is still starting, and this request needs no GPU, so it does not start the server: send one that does, load it manually, or name this path in start_on", consumer)}
}

// request is what the broker is asked for.
func (j *job) request(r *http.Request) broker.Request {
	h, t := j.handler, j.target
	req := broker.Request{Consumer: t.name, Model: j.model, Priority: t.priority, Budget: time.Duration(h.Budget), KeepAlive: time.Duration(h.KeepAlive),
		PinPrimary: h.PinPrimary, Submitted: j.submitted, Client: h.client(r, j.repl)}
	if req.Turn = j.turn; j.submitted.IsZero() && !j.turn { // once it was admitted, its consumer is fixed
		req.Candidates = j.mayServe(r, t.candidates)
	}
	if h.priorityText != "" {
		if n, err := strconv.Atoi(strings.TrimSpace(j.repl.ReplaceAll(h.priorityText, ""))); err == nil {
			req.Priority = h.PriorityRange.Clamp(n)
		}
	}
	if f := j.facts; f != nil {
		if f.HasPriority {
			req.Priority = h.PriorityRange.Clamp(f.Priority)
		}
		if f.Client != "" {
			req.Client = f.Client
		}
		if f.KeepAlive > 0 {
			req.KeepAlive = atMost(f.KeepAlive, h.KeepAliveMax)
		}
		req.StayWarm, req.Cooldown = atMost(f.StayWarm, h.KeepAliveMax), atMost(f.Cooldown, h.CooldownMax)
	}
	return req
}

// mayServe is a ladder without the fallbacks that refuse such a request themselves, and without those that it would only free, which is
// not work they stand in for.
func (j *job) mayServe(r *http.Request, ladder []string) []string {
	if len(ladder) == 0 {
		return nil
	}
	leave := func(name string) bool {
		t := j.handler.targets[name]
		return name != ladder[0] && (t.Blocks(r) || slices.ContainsFunc(t.unloads, func(u unloadRule) bool {
			if !t.Asks(r, u.route) {
				return false
			}
			said, ok := j.body.Unloads(u.UnloadRequest)
			return ok && said.Only
		}))
	}
	if !slices.ContainsFunc(ladder, leave) {
		return ladder
	}
	return slices.DeleteFunc(slices.Clone(ladder), leave)
}

// atMost clamps d to a bound; 0: there is none.
func atMost(d time.Duration, bound caddy.Duration) time.Duration {
	if bound > 0 {
		return min(d, time.Duration(bound))
	}
	return d
}

// client is who asks, by the route's word or by the address that Caddy takes for the client's.
func (h *Handler) client(r *http.Request, repl *caddy.Replacer) string {
	if h.ClientID == "" {
		address, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
		return address
	}
	text := repl.ReplaceAll(h.ClientID, "")
	if len(text) > routing.MaxClient {
		text = strings.Clone(text[:routing.MaxClient]) // it may be kept for longer than the request
	}
	return strings.ToValidUTF8(text, "")
}

// servedBy notes which consumer a request of several came to.
func (j *job) servedBy(consumer string) {
	if consumer == j.target.name {
		return
	}
	if t := j.handler.targets[consumer]; t != nil {
		j.target, j.model = t, "" // a fallback has no models
		j.repl.Set("http.gpu_broker.consumer", t.name)
		j.repl.Set("http.gpu_broker.upstream", t.upstream)
	}
}

// placeholders are those of a handler before anything else is known; what is
// set for a request wins over them.
func placeholders(consumer, upstream string) caddy.ReplacerFunc {
	values := placeholderValues(consumer, upstream)
	return func(key string) (any, bool) {
		value, ok := values[key]
		return value, ok
	}
}

func placeholderValues(consumer, upstream string) map[string]any {
	return map[string]any{
		"http.gpu_broker.consumer": consumer,
		"http.gpu_broker.upstream": upstream,
		"http.gpu_broker.wait_ms":  "0",
		"http.gpu_broker.reason":   "",
	}
}
