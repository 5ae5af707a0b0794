package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// answerWithin is when a request of the soak has had its answer at the latest:
// its budget, the longest upload, the longest run, and the longest fault.
var answerWithin = slowly(25 * time.Second)

// consequences is how long after a fault's end its traces may show: until the next probes have told the truth.
var consequences = slowly(2 * time.Second)

// oldConnections is how long after a reload a server of the old configuration
// may serve and close connections: those on which no request has come yet it keeps for 5 seconds.
const oldConnections = 7 * time.Second

// judge decides whether an answer is right, an honest refusal, or wrong, and
// counts it. It reports whether the answer is the one that was asked for.
func (k *soak) judge(a *asked, wrong func(body []byte) string) bool {
	outcome := k.outcome(a, wrong)
	k.rec.count("outcome", outcome)
	k.rec.count("kind", a.kind)
	k.log.expect(a, outcome)
	if len(a.may) > 0 {
		k.rec.count("ladder", outcome+" "+a.by)
	}
	return outcome == served
}

// The outcomes.
const (
	served    = "served"
	refused   = "refused"
	left      = "left"
	brokenOff = "broken off with its server"
	ownError  = "server's own error"
	keepAlive = "keep-alive race"
	notThere  = "not configured"

	// A request that needs no GPU does not keep the server running that it is passed to.
	stoppedUnder = "server stopped or starting"
	bad          = "WRONG"
)

func (k *soak) outcome(a *asked, wrong func(body []byte) string) string {
	got := a.got
	a.by = a.consumer
	disturbed := k.disturbedAny(a)
	switch {
	case got.err != nil && a.leaves && errors.Is(got.err, context.DeadlineExceeded) && got.took < answerWithin:
		k.spells.begin(spellLeft, a.consumer, a.id)()
		return left
	case got.err == nil && a.gone && got.status == 499: // what is said to one that leaves came through just before it was gone
		return left
	case got.err != nil && k.hard.Err() != nil:
		return left
	case got.err != nil && got.status == 0:
		if k.spells.between(a.began, got.at, oldConnections, spellReload, "") && closedIdle(got.err) {
			return keepAlive
		}
		return k.wrong(a, "no answer: %v", got.err)
	case got.err != nil:
		if a.cheap && isProcess(a.consumer) {
			return stoppedUnder
		}
		if disturbed && (!isProcess(a.consumer) || k.died(a)) {
			return brokenOff
		}
		return k.wrong(a, "cut after %d bytes: %v", len(got.body), got.err)
	}
	if strings.HasPrefix(string(got.body), ": ") && got.header.Get("Content-Type") == "text/event-stream" {
		return k.afterComments(a, wrong)
	}
	if doc, ok := refusalOf(got.body); ok {
		return k.refusal(a, doc)
	}
	if a.own && got.status == 200 && wrong(got.body) == "" {
		return served
	}
	if got.status == 404 && (string(got.body) == noRoute || a.method == "HEAD") {
		if k.maybeGone(a) {
			return notThere
		}
		return k.wrong(a, "no route; it was configured for %s", k.spells.since(spellGone, got.at))
	}
	by, _, _ := splitServer(a.server())
	switch {
	case by != "" && !k.mayAnswer(a, by):
		return k.wrong(a, "the answer is %s's", by)
	case got.status == 502 && a.cheap && isProcess(a.consumer):
		return stoppedUnder
	case got.status >= 400 && (disturbed || k.scarce(a.began, got.at) || k.ranOut(a, got.body)) && (by != "" || a.cheap):
		return ownError
	case got.status >= 400 || got.status < 200 || by == "":
		return k.wrong(a, "status %d from %q: %.200q", got.status, by, got.body)
	}
	if told := got.header.Get("X-Gpu-Broker-Consumer"); !a.cheap {
		if serverOf(told) != by || isProcess(by) && told != a.consumer {
			return k.wrong(a, "X-GPU-Broker-Consumer is %q, the answer is %s's", told, by)
		}
		a.by = told
	}
	if isProcess(by) {
		if why := k.byStart(a); why != "" {
			return k.wrong(a, "%s", why)
		}
	}
	if why := wrong(got.body); why != "" {
		return k.wrong(a, "%s", why)
	}
	if a.cheap && got.took > slowly(3*time.Second) && !disturbed {
		return k.wrong(a, "needs no GPU and took %s", got.took)
	}
	if !a.cheap {
		k.rec.waited(waitOf(got.header.Get("Server-Timing")))
		k.rec.count("served by", a.by)
	}
	return served
}

// refusal checks an error document of the broker's, and that something explains its code.
func (k *soak) refusal(a *asked, doc refusalDocument) string {
	k.rec.count("code", doc.Code)
	k.rec.count("code of "+doc.Consumer, doc.Code)
	got := a.got
	a.by = doc.Consumer
	after, _ := strconv.Atoi(got.header.Get("Retry-After"))
	switch {
	case refusalStatus[doc.Code] == 0 || refusalStatus[doc.Code] != got.status && a.heard == "":
		return k.wrong(a, "code %q with status %d", doc.Code, got.status)
	case a.wants != "" && (doc.Code != a.wants || got.took > slowly(3*time.Second)):
		return k.wrong(a, "wanted %s at once, got %s after %s: %s", a.wants, doc.Code, got.took, doc.Message)
	case !k.mayAnswer(a, doc.Consumer) && !(doc.Consumer == "" && a.byModel && slices.Contains(beforeTheQueue, doc.Code)) || doc.Message == "" || a.heard == "" && !strings.HasPrefix(got.header.Get("Content-Type"), "application/json"):
		return k.wrong(a, "an error document that is none: %s", got.body)
	case refusalStatus[doc.Code] == 503 && (after < 1 && a.heard == "" || doc.RetryAfter < 1 || doc.RetryAfter > 60):
		return k.wrong(a, "%s with Retry-After %q and retry_after %d", doc.Code, got.header.Get("Retry-After"), doc.RetryAfter)
	case got.status == 503 && (after < 1 || after > 60 || after != doc.RetryAfter):
		return k.wrong(a, "%s with Retry-After %q and retry_after %d", doc.Code, got.header.Get("Retry-After"), doc.RetryAfter)
	case got.at.Sub(a.sent) > soakBudget+slowly(3*time.Second) && doc.Code != "server_died":
		return k.wrong(a, "%s came %s after the request, with a budget of %s: %s", doc.Code, got.at.Sub(a.sent), soakBudget, doc.Message)
	case !k.explained(a, doc.Code):
		return k.wrong(a, "nothing explains %s: %s", doc.Code, doc.Message)
	}
	if a.wants == "" && !slices.Contains([]string{"budget_exceeded", "queue_full", "body_too_large"}, doc.Code) {
		k.rec.count("excused", doc.Code) // by a fault of its server or of the card
	}
	return refused
}

// explained reports whether the storm accounts for a refusal.
func (k *soak) explained(a *asked, code string) bool {
	lay := func(slack time.Duration, kind, on string) bool {
		return k.spells.between(a.began, a.got.at, slowly(slack), kind, on)
	}
	switch code {
	case a.wants:
		return true
	case "body_too_large":
		return a.kind == "too large"
	case "budget_exceeded", "queue_full": // there is more to do than can be done
		return true
	case "unhealthy": // a ComfyUI that has lost its GPU is
		return !isProcess(a.by) && lay(2*time.Second, spellServer, a.by) || lay(5*time.Second, spellGPU, "")
	case "unknown_model": // by the handler of an old configuration
		return k.maybeGone(a) || a.alias == sometimes && k.maybeRuled(a, func(s settings) bool { return !s.alias })
	case "server_died":
		if isProcess(a.by) {
			return k.died(a)
		}
		return lay(2*time.Second, spellServer, a.by)
	case "not_running":
		return lay(2*time.Second, spellReload, "") || k.maybeGone(a) || a.cheap && isProcess(a.consumer)
	case "draining":
		return lay(time.Second, spellDrain, serverOf(a.by))
	case "gpu_lost": // while nobody can look at it, nobody sees that it is back
		return lay(5*time.Second, spellGPU, "") || lay(5*time.Second, spellTelemetry, "") && lay(10*time.Second, spellGPU, "")
	case "load_failed": // and a while after: it cools down
		return lay(65*time.Second, spellServer, serverOf(a.by)) || k.loadFailedOfTheCard(a, slowly(65*time.Second))
	case "vram_exhausted": // memory that outsiders or lying servers keep
		return lay(15*time.Second, spellServer, "") || lay(15*time.Second, spellMemory, "") || lay(15*time.Second, spellTelemetry, "") || lay(15*time.Second, spellGPU, "")
	}
	return false
}

// loadFailedOfTheCard reports whether a load of the server that a request was for failed within cooling before its
// answer, while something was wrong with the card. Of a process of the broker's, whose loads leave no record here, it
// reports whether something was.
func (k *soak) loadFailedOfTheCard(a *asked, cooling time.Duration) bool {
	srv := k.servers[serverOf(a.by)]
	if srv == nil || isProcess(a.by) {
		return k.scarce(a.began.Add(-cooling), a.got.at)
	}
	return slices.ContainsFunc(srv.Events(), func(e modelserver.Event) bool {
		failed := e.Kind == modelserver.EventLoadFail || e.Kind == modelserver.EventDeath
		return failed && e.At.After(a.began.Add(-cooling)) && !e.At.After(a.got.at) && k.scarce(e.At.Add(-slowly(5*time.Second)), e.At)
	})
}

// maybeGone reports whether the configuration that answered may be one that lacks
// the consumer. An HTTP/2 connection whose handshake ends while its server is
// already shutting down is never told to go away, by net/http, and stays with its configuration for its whole life.
func (k *soak) maybeGone(a *asked) bool {
	return k.spells.between(a.since(), a.got.at, oldConnections, spellGone, a.consumer)
}

// maybeRuled reports whether the configuration that answered may be such a one.
func (k *soak) maybeRuled(a *asked, match func(settings) bool) bool {
	return slices.ContainsFunc(k.ruled(a.since().Add(-oldConnections)), match)
}

// since is when its connection was used first, or it began.
func (a *asked) since() time.Time {
	if a.connSince.Before(a.began) && !a.connSince.IsZero() {
		return a.connSince
	}
	return a.began
}

// mayAnswer reports whether a consumer may answer a request: the one that it was sent
// to, or one of its ladder, while there is a ladder. Past a guard that held for the whole request nothing goes to the cloud.
func (k *soak) mayAnswer(a *asked, by string) bool {
	switch {
	case by == a.consumer || by == serverOf(a.consumer):
		return true
	case !slices.Contains(a.may, by) || !k.maybeRuled(a, func(s settings) bool { return s.ladder }):
		return false
	}
	return by != "sky" || !k.spells.covers(a.began, a.got.at, spellGuard, "")
}

// disturbedAny reports whether a server that may answer a request was made to fail while it was asked.
func (k *soak) disturbedAny(a *asked) bool {
	return slices.ContainsFunc(append([]string{a.consumer}, a.may...), func(name string) bool { return k.disturbed(name, a.began, a.got.at) })
}

// disturbed reports whether a consumer's server was made to fail in a time.
func (k *soak) disturbed(consumer string, from, to time.Time) bool {
	return k.spells.between(from, to, consequences, spellServer, serverOf(consumer))
}

// died reports whether the server that the broker has started for a consumer was killed, or died, while a request ran.
func (k *soak) died(a *asked) bool {
	return k.spells.between(a.began, a.got.at, consequences, spellKilled, serverOf(a.consumer))
}

// scarce reports whether servers may have run out of memory in a time through no fault of the broker's.
func (k *soak) scarce(from, to time.Time) bool {
	for _, kind := range []string{spellMemory, spellTelemetry, spellGPU} {
		if k.spells.between(from, to, consequences, kind, "") {
			return true
		}
	}
	return false
}

// mayRunOut reports whether a server may have run out of memory in a time through no fault of the broker's: because of what
// scarce says, or as another server lied of its memory or kept it.
func (k *soak) mayRunOut(from, to time.Time) bool {
	return k.scarce(from.Add(-3*time.Second), to) || k.spells.between(from.Add(-5*time.Second), to, consequences, spellServer, "")
}

// ranOut reports whether an error is a server's that ran out of memory, and may have.
func (k *soak) ranOut(a *asked, said []byte) bool {
	return bytes.Contains(said, []byte("CUDA out of memory")) && k.mayRunOut(a.began, a.got.at)
}

func (k *soak) wrong(a *asked, format string, args ...any) string {
	since := func(t time.Time) float64 { return t.Sub(k.rec.began).Seconds() }
	k.rec.breach(a.kind+": "+format, fmt.Sprintf("%s: %s %s, began %.3fs, sent %.3fs, HTTP/%d: %s\n            %s\n            going on: %s\n%s", a.kind, a.method, a.path,
		since(a.began), since(a.sent), a.major, fmt.Sprintf(format, args...), a.conn, k.spells.around(a.began, time.Now()), k.glance()))
	return bad
}

// closedIdle reports whether an error may come of a server that closes an idle
// connection in the moment in which it is used again.
func closedIdle(err error) bool {
	text := err.Error()
	for _, sign := range []string{"EOF", "connection reset", "broken pipe", "server closed idle connection", "GOAWAY", "connection refused", "client connection lost", "REFUSED_STREAM", "cannot rewind body", "cannot retry err", "use of closed network connection"} {
		if strings.Contains(text, sign) {
			return true
		}
	}
	return false
}

// waitOf is how long a request waited, by the answer's own word.
func waitOf(timing string) time.Duration {
	var queued, loading float64
	_, _ = fmt.Sscanf(timing, "gpu-queue;dur=%f, gpu-load;dur=%f", &queued, &loading)
	return time.Duration((queued + loading) * float64(time.Millisecond))
}

// servers looks at what the servers counted and did since the last look.
func (k *soak) lookAtServers() {
	for name, srv := range k.servers {
		now := srv.Stats()
		was := k.seen[name]
		k.seen[name] = now
		at := time.Now()
		if n := now.UnloadsWhileBusy - was.UnloadsWhileBusy; n > 0 {
			k.rec.count("server", "unloads under running work")
			// A plain server has no busy route: what a client that left has begun may still be ending.
			if !k.disturbed(name, at.Add(-2*time.Second), at) && !k.spells.between(at.Add(-2*time.Second), at, 0, spellLeft, name) {
				k.rec.violation("%s was unloaded under running work; going on: %s", name, k.spells.around(at.Add(-2*time.Second), at))
			}
		}
		if n := now.OOMs - was.OOMs; n > 0 {
			k.rec.count("server", "out of memory")
			if !k.mayRunOut(at, at) {
				k.rec.violation("%s ran out of memory; going on: %s", name, k.spells.around(at.Add(-3*time.Second), at))
			}
		}
		k.lookAtWork(name, srv)
	}
}

// lookAtWork checks that no request was worked on twice or by another's server.
func (k *soak) lookAtWork(name string, srv *modelserver.Server) {
	last := k.seenEvent[name]
	for _, e := range srv.Events() {
		if e.Seq <= last {
			continue
		}
		k.seenEvent[name] = e.Seq
		if e.Kind == modelserver.EventWorkStart && e.Tag != "" && name != "sky" && name != "image" &&
			k.spells.covers(e.At.Add(-slowly(600*time.Millisecond)), e.At, spellLent, "") && !k.disturbed(name, e.At.Add(-2*time.Second), e.At) {
			k.rec.violation("%s began to work on %s while its GPU was lent", name, e.Tag)
		}
		if e.Kind != modelserver.EventWorkEnd || e.Tag == "" {
			continue
		}
		if whose, _, _ := strings.Cut(e.Tag, "-"); !slices.Contains(strings.Split(whose, ladderSign), name) {
			k.rec.violation("%s worked on %s, which is another's", name, e.Tag)
		}
		if k.worked[e.Tag] {
			k.rec.violation("%s worked twice on %s", name, e.Tag)
		}
		k.worked[e.Tag] = true
		if name == "library" && !strings.HasPrefix(e.Tag, "library-"+e.Model+"-") {
			k.rec.violation("library worked on %s with its model %s", e.Tag, e.Model)
		}
	}
}
