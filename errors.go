package gpubroker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"golang.org/x/net/http/httpguts"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// statusClientLeft is what Caddy writes for a client that left, and codeLeft is what metrics and the request log call it.
const (
	statusClientLeft = 499
	codeLeft         = "client_left"
)

// statuses are those of the codes that are not 503.
var statuses = map[scheduler.Code]int{
	scheduler.UnknownConsumer: http.StatusNotFound,
	scheduler.NeverFits:       http.StatusUnprocessableEntity,
	scheduler.BudgetExceeded:  http.StatusGatewayTimeout,
}

// failure is a request that was not served, in the words of the error document.
type failure struct {
	status     int
	code       string
	message    string
	retryAfter time.Duration
	detail     *scheduler.Detail
	told       bool // the broker knows of it, since it has refused the request itself; or it is no refusal: the server failed
}

func (f *failure) Error() string { return f.message }

func unhealthy(consumer string, err error) error {
	var caddys caddyhttp.HandlerError
	if errors.As(err, &caddys) && caddys.Err != nil {
		err = caddys.Err // without Caddy's own trace
	}
	return &failure{status: http.StatusServiceUnavailable, code: string(scheduler.Unhealthy), retryAfter: 5 * time.Second,
		message: fmt.Sprintf("the server of consumer %q can't be reached: %v", consumer, err)}
}

func uploadStalled(after time.Duration) error {
	return &failure{status: http.StatusRequestTimeout, code: "upload_stalled",
		message: fmt.Sprintf("the request body made no progress for %s (upload_idle): send it again", after)}
}

// storageFull is the error for a body that can't be kept, or read back: a fault of this machine, which may pass. Clients get
// its cause without the name of any file.
func storageFull(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		err = fmt.Errorf("%w: %w", routing.ErrSpill, path.Err)
	}
	return &failure{status: http.StatusServiceUnavailable, code: "storage_full", retryAfter: 30 * time.Second,
		message: err.Error() + ": make room in Caddy's data folder, or use stream_body on this route"}
}

// trailerFault refuses a body whose trailers frame or route messages, or describe their content: they come too late for
// that, and no server may get them (RFC 9110, 6.5.1).
func trailerFault(r *http.Request) error {
	for name := range r.Trailer {
		if !httpguts.ValidTrailerHeader(name) {
			return &failure{status: http.StatusBadRequest, code: "bad_request", message: fmt.Sprintf("the request body ends with a trailer %.64q: a header of this name can't be a trailer", name)}
		}
	}
	return nil
}

// notTheServers returns what a request failed of, where proxies blame the server for what it never got.
func (j *job) notTheServers(r *http.Request, err error) error {
	if fault := trailerFault(r); fault != nil { // of a body that was passed on as it came
		return fault
	}
	if j.body != nil && j.body.Fault() != nil {
		return storageFull(j.body.Fault())
	}
	if noUpstream(err) && !j.answered() {
		return unhealthy(j.target.name, errHeldDown)
	}
	return err
}

var errHeldDown = errors.New("reverse_proxy has no upstream for it, or holds it for down by its health checks (fail_duration, health_uri)")

// noUpstream reports whether reverse_proxy asked no server at all. It does not export that error.
func noUpstream(err error) bool {
	var caddys caddyhttp.HandlerError
	if !errors.As(err, &caddys) || caddys.StatusCode != http.StatusServiceUnavailable || caddys.Err == nil {
		return false
	}
	return caddys.Err.Error() == "no upstreams available"
}

// errorDocument is OpenAI's error form, so that every SDK shows it.
type errorDocument struct {
	Error errorBody `json:"error"`
}

type errorBody struct {
	Message    string       `json:"message"`
	Type       string       `json:"type"`
	Code       string       `json:"code"`
	Consumer   string       `json:"consumer"`
	RetryAfter int          `json:"retry_after,omitempty"` // seconds
	Detail     *errorDetail `json:"detail,omitempty"`
}

// errorDetail is about memory, in bytes.
type errorDetail struct {
	Need    int64            `json:"need"`
	Free    map[string]int64 `json:"free"` // by GPU
	Holders []errorHolder    `json:"holders"`
	Unloads []string         `json:"unloads,omitempty"` // those that didn't bring their memory back
}

type errorHolder struct {
	Name      string `json:"name"`
	State     string `json:"state,omitempty"`
	Bytes     int64  `json:"bytes"`
	Protected string `json:"protected,omitempty"`
}

// fail answers a request that was not served. What next itself has decided
// (an error with a status of the user's own handlers) is passed on.
func (j *job) fail(w http.ResponseWriter, r *http.Request, err error) error {
	begun := j.heart != nil && j.heart.stop()
	if r.Context().Err() != nil && j.stalled == "" { // HTTP/1 takes an upload that we cut for a client that left
		metrics.errors.WithLabelValues(j.target.name, codeLeft).Inc()
		j.leaves(codeLeft)
		if j.target.name != "" {
			logFields(r, zap.String("gpu_consumer", j.target.name))
		}
		w.WriteHeader(statusClientLeft)
		return nil
	}
	var f *failure
	var refused *broker.Refused
	var caddys caddyhttp.HandlerError
	switch {
	case errors.As(err, &f):
	case errors.As(err, &refused):
		j.servedBy(refused.Consumer)
		f = &failure{status: statuses[refused.Code], code: string(refused.Code), message: refused.Message, retryAfter: refused.RetryAfter, detail: refused.Detail, told: true}
		if f.status == 0 {
			f.status = http.StatusServiceUnavailable
			f.retryAfter = max(f.retryAfter, time.Second)
		}
	case errors.Is(err, errNotStarted):
		f = &failure{status: http.StatusServiceUnavailable, code: "not_running", message: err.Error(), retryAfter: time.Second}
	case errors.As(err, &caddys) && caddys.StatusCode == http.StatusBadGateway:
		message := fmt.Sprintf("%s gave no answer: %v", j.whoDied(), caddys.Err)
		f = &failure{status: http.StatusBadGateway, code: "server_died", told: true, message: message}
	case errors.Is(err, context.Canceled):
		metrics.errors.WithLabelValues(j.target.name, codeLeft).Inc()
		j.leaves(codeLeft)
		w.WriteHeader(statusClientLeft)
		return nil
	case begun:
		f = failureOf(err)
	default:
		return err
	}
	return j.answer(w, r, f)
}

// whoDied names the server that reverse_proxy got no answer from.
func (j *job) whoDied() string {
	if j.wentToServer() || j.mayBeNamed() {
		return fmt.Sprintf("the server of consumer %q", j.target.name)
	}
	dialled, _ := j.repl.GetString("http.reverse_proxy.upstream.hostport")
	return fmt.Sprintf("%s, which this site's configuration asks too for consumer %q and is not its upstream,", dialled, j.target.name)
}

// answer writes the error document, unless the site has error routes: those win.
func (j *job) answer(w http.ResponseWriter, r *http.Request, f *failure) error {
	consumer := j.target.name
	metrics.errors.WithLabelValues(consumer, f.code).Inc()
	j.repl.Set("http.gpu_broker.reason", f.code)
	if !f.told {
		f.told = true // a handler around this one may get it too
		j.handler.pool.broker.TurnAway(consumer, scheduler.Code(f.code), keptReason(f.message))
	}
	j.leaves(f.code)
	doc := errorDocument{errorBody{Message: f.message, Type: "gpu_broker_error", Code: f.code, Consumer: consumer, Detail: detailOf(f.detail)}}
	header := w.Header()
	if f.retryAfter > 0 {
		doc.Error.RetryAfter = min(60, max(1, int(math.Ceil(f.retryAfter.Seconds()))))
		header.Set("Retry-After", strconv.Itoa(doc.Error.RetryAfter))
	}
	if j.handler.headers && consumer != "" {
		header.Set("X-Gpu-Broker-Consumer", consumer)
	}
	header.Del("Server-Timing")
	if j.body == nil && r.ProtoMajor == 1 && (r.Header.Get("Expect") != "" || j.unread) {
		header.Set("Connection", "close") // the client holds its body back, or may: the answer must not wait for it
	}
	allowOrigin(header, r)
	logFields(r, zap.String("gpu_consumer", consumer), zap.String("gpu_reason", f.code))
	if f.status >= 500 { // overload and the like are expected states: no error in the access log
		caddyhttp.SetVar(r.Context(), caddyhttp.LogLevelVar, "WARN")
	}
	if j.heart != nil && j.heart.stop() {
		j.heart.fail(doc)
		return nil
	}
	if srv, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); ok && srv != nil && srv.Errors != nil && len(srv.Errors.Routes) > 0 {
		return caddyhttp.Error(f.status, f)
	}
	body, err := json.Marshal(inFormOf(r.URL.Path, doc))
	if err != nil {
		return err
	}
	header.Set("Content-Type", "application/json")
	header.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(f.status)
	_, err = w.Write(body)
	return err
}

// maxReason bounds what is kept of a message: it may quote the request.
const maxReason = 1000

func keptReason(message string) string {
	if len(message) <= maxReason {
		return message
	}
	return message[:cutAt(message, maxReason)] + "…" // a new text: the message is not kept with it
}

// allowOrigin lets a page of another origin read an answer of the broker, as the model server would let it read its own.
func allowOrigin(header http.Header, r *http.Request) {
	origin := r.Header.Get("Origin")
	if origin == "" || header.Get("Access-Control-Allow-Origin") != "" {
		return
	}
	header.Set("Access-Control-Allow-Origin", origin)
	header.Set("Access-Control-Expose-Headers", "Retry-After, X-GPU-Broker-Consumer")
	header.Add("Vary", "Origin")
}

func detailOf(d *scheduler.Detail) *errorDetail {
	if d == nil {
		return nil
	}
	out := &errorDetail{Need: int64(d.Need), Free: map[string]int64{}, Holders: []errorHolder{}, Unloads: d.Unloads}
	for i, free := range d.Free {
		out.Free[strconv.Itoa(i)] = int64(max(free, gpu.Bytes(0)))
	}
	for _, h := range d.Holders {
		out.Holders = append(out.Holders, errorHolder{Name: h.Name, State: h.State, Bytes: int64(h.Bytes), Protected: h.Protected})
	}
	return out
}
