package modelserver

import (
	"maps"
	"net/http"
	"slices"
)

// manner is how one kind of server is imitated.
type manner struct {
	// serve makes the handler of one life.
	serve func(*life) http.Handler
	// many says that it has Options.Models; others have one model of Options.VRAM.
	many bool
}

// manners holds every kind. The files of the kinds add to it.
var manners = map[Manner]manner{
	Plain:  {serve: func(l *life) http.Handler { return newPlain(l) }},
	Ollama: {serve: func(l *life) http.Handler { return newOllama(l) }, many: true},
	ComfyUI: {serve: func(l *life) http.Handler {
		l.comfy = newComfy(l)
		l.worker = l.comfy.work
		return l.comfy
	}},
}

// Manners lists every kind of server that can be imitated.
func Manners() []Manner { return slices.Sorted(maps.Keys(manners)) }
