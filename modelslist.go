package gpubroker

import (
	"mime"
	"net/http"
	"slices"
	"strconv"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
)

// asksForList reports whether a request asks for a list of models, or for one of a list, on a route with one consumer that has several.
func (h *Handler) asksForList(r *http.Request) bool {
	return h.fixed != nil && h.byModel != nil && (routing.IsList(r) || routing.IsShortList(r))
}

// passList passes a request for a list of models to the server, and changes the list that comes back to what the route serves: with the
// aliases of the models that are in it, and without those that are unlisted, or that the route refuses.
func (j *job) passList(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if body := j.ownEntry(r); body != nil {
		return j.answerOwn(w, r, body)
	}
	l := &listWriter{ResponseWriter: w, head: r.Method == http.MethodHead}
	if err := next.ServeHTTP(l, whole(r)); err != nil || !l.held {
		return err // of a list that is held nothing has been sent
	}
	body := routing.AmendList(l.body, j.handler.shows, j.handler.aliasesOf)
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(l.status)
	_, err := w.Write(body)
	return err
}

// whole is r without what asks for a part of the answer, for one only if it has changed, or for one that is encoded.
func whole(r *http.Request) *http.Request {
	plain := r.WithContext(r.Context())
	plain.Header = r.Header.Clone()
	for _, name := range []string{"Range", "If-Range", "If-None-Match", "If-Modified-Since"} {
		plain.Header.Del(name)
	}
	return identity(plain)
}

// ofTheServers are the headers that are true of the server's own list only.
var ofTheServers = []string{"Content-Length", "Etag", "Last-Modified", "Accept-Ranges", "Content-Md5", "Digest", "Content-Digest", "Repr-Digest"}

// ownEntry is the entry of a model that is asked for by a configured name that its server does not know; nil: there is none.
func (j *job) ownEntry(r *http.Request) []byte {
	m := j.handler.byModel
	body, name := m.answer(m.lists, r)
	who, ok := m.names.Lookup(name)
	if !ok {
		who, ok = j.matches(r, name)
	}
	if name == "" || !ok || j.handler.app.modelNames[who.Consumer].Same(name, who.Model) {
		return nil
	}
	return body
}

// shows reports whether a list shows a model of the server's on a route with one consumer.
func (h *Handler) shows(name string) bool {
	c := h.byModel.only
	if who, ok := h.byModel.names.Lookup(name); ok {
		return !c.IsUnlisted(who.Model)
	}
	if c.Unlisted {
		return false
	}
	if c.ServesUnnamed() && !c.LeavesToDouble(name, h.app.modelNames[c.Name].Same) {
		return true
	}
	holder, _ := h.pool.broker.Holder(c.Name, name)
	return holder != ""
}

// aliasesOf are the aliases of a model of the server's on a route with one consumer; patterns are not among them.
func (h *Handler) aliasesOf(name string) []string {
	c := h.byModel.only
	i := slices.IndexFunc(c.Models, func(m *config.Model) bool { return h.app.modelNames[c.Name].Same(m.Name, name) })
	if i < 0 {
		return nil
	}
	return plainNames(c.Models[i].Alias)
}

// listWriter holds a list of models back, if it is one that can be changed. What is not, or is too large, it passes on as it comes.
type listWriter struct {
	http.ResponseWriter
	head   bool // no body follows
	status int
	held   bool
	body   []byte
}

// WriteHeader holds back the header of what may be a list.
func (l *listWriter) WriteHeader(status int) {
	if l.held {
		return // it is settled
	}
	if l.status != 0 || status < 200 {
		l.ResponseWriter.WriteHeader(status)
		return
	}
	l.status = status
	kind, _, _ := mime.ParseMediaType(l.Header().Get("Content-Type"))
	coding := l.Header().Get("Content-Encoding")
	list := status == http.StatusOK && kind == "application/json" && (coding == "" || coding == "identity")
	if list {
		for _, name := range ofTheServers {
			l.Header().Del(name)
		}
	}
	if l.held = list && !l.head; !l.held {
		l.ResponseWriter.WriteHeader(status)
	}
}

// Write holds back what may be a list.
func (l *listWriter) Write(p []byte) (int, error) {
	if l.status == 0 {
		l.WriteHeader(http.StatusOK)
	}
	switch {
	case !l.held:
		return l.ResponseWriter.Write(p)
	case len(l.body)+len(p) <= routing.MaxServerList:
		l.body = append(l.body, p...)
		return len(p), nil
	}
	l.held = false
	l.ResponseWriter.WriteHeader(l.status)
	if _, err := l.ResponseWriter.Write(l.body); err != nil {
		return 0, err
	}
	l.body = nil
	return l.ResponseWriter.Write(p)
}

// FlushError sends what was written, unless it is held back.
func (l *listWriter) FlushError() error {
	if l.held || l.status == 0 {
		return nil
	}
	return http.NewResponseController(l.ResponseWriter).Flush()
}
