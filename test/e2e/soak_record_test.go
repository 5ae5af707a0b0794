package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// record is what a soak counts, and the first things that it finds wrong.
type record struct {
	mu     sync.Mutex
	began  time.Time
	counts map[string]map[string]int // by group: "kind", "outcome", "code" …
	first  []string                  // violations
	alike  map[string]int            // violations by the rule that they break
	waits  []time.Duration           // of served requests, the newest
	served int
}

// What a record keeps.
const (
	maxViolations = 20
	maxAlike      = 4 // of one rule
	maxWaits      = 200_000
)

func newRecord() *record {
	return &record{began: time.Now(), counts: map[string]map[string]int{}, alike: map[string]int{}}
}

func (r *record) count(group, what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.counts[group] == nil {
		r.counts[group] = map[string]int{}
	}
	r.counts[group][what]++
}

// violation notes that something is wrong; the format stands for the rule that is broken.
func (r *record) violation(format string, args ...any) {
	r.breach(format, fmt.Sprintf(format, args...))
}

func (r *record) breach(rule, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.alike[rule]++; r.alike[rule] <= maxAlike && len(r.first) < maxViolations {
		r.first = append(r.first, fmt.Sprintf("%7.3fs  %s", time.Since(r.began).Seconds(), text))
	}
}

// violations says how many there are, by rule.
func (r *record) violations() (n int, rules string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rule := range slices.Sorted(maps.Keys(r.alike)) {
		n += r.alike[rule]
		rules += fmt.Sprintf("    %d of: %s\n", r.alike[rule], rule)
	}
	return n, rules
}

func (r *record) waited(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.served++; len(r.waits) < maxWaits {
		r.waits = append(r.waits, d)
	} else {
		r.waits[r.served%maxWaits] = d
	}
}

// percentile is the wait that so many percent of the served requests did not exceed.
func (r *record) percentile(percent int) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.waits) == 0 {
		return 0
	}
	slices.Sort(r.waits)
	return r.waits[(len(r.waits)-1)*percent/100]
}

// line tells a group's counts, the largest first.
func (r *record) line(group string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	counts := r.counts[group]
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		if counts[a] != counts[b] {
			return counts[b] - counts[a]
		}
		return strings.Compare(a, b)
	})
	var out []string
	for _, n := range names {
		out = append(out, fmt.Sprintf("%s %d", n, counts[n]))
	}
	if len(out) == 0 {
		return "none"
	}
	return strings.Join(out, ", ")
}

// number is one count.
func (r *record) number(group, what string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.counts[group][what]
}

// The kinds of spell.
const (
	spellServer    = "server"    // a server dies, hangs, refuses or lies
	spellMemory    = "memory"    // an outsider holds memory
	spellTelemetry = "telemetry" // nobody can look at the memory
	spellGPU       = "gpu"       // the GPU is lost
	spellReload    = "reload"    // Caddy takes a configuration
	spellDrain     = "drain"     // on a consumer, or on all ("")
	spellGone      = "gone"      // a consumer is not configured
	spellLeft      = "left"      // a client of a consumer has left
	spellLent      = "lent"      // the GPU is, for certain
	spellGuard     = "guard"     // nothing may go to the cloud by a ladder
	spellPin       = "pin"       // somebody pins a consumer, or it is pinned
	spellPinned    = "pinned"    // … is pinned for certain
	spellKilled    = "killed"    // a server that the broker has started is killed, or dies
	spellSlow      = "slow"      // such a server starts slowly
)

// spell is a time in which something is wrong on purpose.
type spell struct {
	kind, on, what string
	from, to       time.Time // to is zero while it lasts
}

// spells say what may excuse an answer that is no good one.
type spells struct {
	mu  sync.Mutex
	all []*spell
}

// begin starts a spell; end must be called once.
func (w *spells) begin(kind, on, what string) (end func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := &spell{kind: kind, on: on, what: what, from: time.Now()}
	w.all = append(w.all, s)
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		s.to = time.Now()
	}
}

// between reports whether a spell of a kind lay in a time, or ended at most slack
// before it. An empty on means any.
func (w *spells) between(from, to time.Time, slack time.Duration, kind, on string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.all {
		if s.kind == kind && (on == "" || s.on == "" || s.on == on) && !s.from.After(to) && (s.to.IsZero() || s.to.Add(slack).After(from)) {
			return true
		}
	}
	return false
}

// covers reports whether a spell of a kind lasted for a whole time.
func (w *spells) covers(from, to time.Time, kind, on string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.all {
		if s.kind == kind && s.on == on && s.from.Before(from) && (s.to.IsZero() || s.to.After(to)) {
			return true
		}
	}
	return false
}

// since says how long before a time the last spell of a kind ended.
func (w *spells) since(kind string, at time.Time) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	var last time.Time
	for _, s := range w.all {
		if s.kind == kind && s.to.After(last) {
			last = s.to
		}
	}
	return at.Sub(last)
}

// around tells the spells of a time, for people.
func (w *spells) around(from, to time.Time) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for _, s := range w.all {
		if s.from.After(to) || !s.to.IsZero() && s.to.Add(3*time.Second).Before(from) || s.kind == spellLeft {
			continue
		}
		end := "now"
		if !s.to.IsZero() {
			end = fmt.Sprintf("%+.2fs", s.to.Sub(from).Seconds())
		}
		out = append(out, fmt.Sprintf("%s %s %s %+.2fs..%s", s.kind, s.on, s.what, s.from.Sub(from).Seconds(), end))
	}
	return strings.Join(out, "; ")
}

// refusal is the error document of an answer that is one.
type refusalDocument struct {
	Message    string `json:"message"`
	Type       string `json:"type"`
	Code       string `json:"code"`
	Consumer   string `json:"consumer"`
	RetryAfter int    `json:"retry_after"`
}

func refusalOf(body []byte) (refusalDocument, bool) {
	var doc struct {
		Error json.RawMessage `json:"error"`
	}
	if json.Unmarshal(body, &doc) != nil {
		return refusalDocument{}, false
	}
	var refusal refusalDocument
	err := json.Unmarshal(doc.Error, &refusal)
	if bytes.HasPrefix(doc.Error, []byte(`"`)) { // Ollama's form: the error is a text, and all else stands beside it
		err = json.Unmarshal(body, &refusal)
	}
	return refusal, err == nil && refusal.Type == "gpu_broker_error"
}

// refusalStatus is the status of each code of spec §8 that a site can see.
var refusalStatus = map[string]int{
	"bad_request": 400, "unknown_model": 404, "body_too_large": 413, "never_fits": 422, "server_died": 502,
	"unhealthy": 503, "not_running": 503, "queue_full": 503, "vram_exhausted": 503, "load_failed": 503, "gpu_lost": 503, "draining": 503,
	"budget_exceeded": 504,
}
