package gpubroker

import (
	"net/http"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// serveTurn serves a request that no list names and that is not to pass without a turn. It never starts a server that
// is stopped for a consumer with models, of which it may name none.
func (j *job) serveTurn(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if c := j.handler.app.consumer(j.target.name); c != nil && c.HasModels() {
		j.turn = true
		if j.handler.stopped(j.target, j.repl) {
			return j.fail(w, r, notRunning(j.target.name))
		}
	}
	return j.serve(w, r, next)
}

// unlistedAsks returns what a request needs that no list names, and keeps record of it.
func (h *Handler) unlistedAsks(t *target, r *http.Request, need config.Need) config.Need {
	if need == config.NeedsLoaded {
		need = config.NeedsTurn
		if h.pool.broker.Loaded(t.name) {
			need = config.NeedsNothing
			countPassed(t.name)
		}
	}
	h.pool.broker.Unlisted(t.name, r.Method, r.URL.Path, need == config.NeedsNothing)
	return need
}
