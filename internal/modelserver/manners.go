package modelserver

import (
	"maps"
	"net/http"
	"slices"
	"time"
)

// manner is how one kind of server is imitated.
type manner struct {
	// serve makes the handler of one life.
	serve func(*life) http.Handler
	// many says that it has Options.Models; others have one model of Options.VRAM.
	many bool
	// atStart says that its process loads whenever it starts, Preloaded or not.
	atStart bool
	// What happens to its port during a load at the start: early, it is open and
	// the server says that it loads; late, it is closed; neither, it takes
	// connections and answers once it has loaded.
	early, late bool
	// serial says that it works on one thing at a time, whatever Concurrency says.
	serial bool
	// renews says that it unloads by starting its process anew, while its port
	// stays open: that frees the Residue, too.
	renews bool
	// keepAlive and grace are what Options of that name are at first.
	keepAlive, grace time.Duration
}

// manners holds every kind. The files of the kinds add to it.
var manners = map[Manner]manner{
	Plain:   {serve: func(l *life) http.Handler { return newPlain(l) }},
	Ollama:  {serve: func(l *life) http.Handler { return newOllama(l) }, many: true, keepAlive: 5 * time.Minute},
	ComfyUI: {serve: func(l *life) http.Handler { return newComfy(l) }},
}

// Manners lists every kind of server that can be imitated.
func Manners() []Manner { return slices.Sorted(maps.Keys(manners)) }
