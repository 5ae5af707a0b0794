package config

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
)

// Need is what a request wants of the GPU.
type Need uint8

// The needs.
const (
	NeedsGPU     Need = iota
	NeedsTurn         // no list names it, and it may compute: at a consumer with models it takes the lock and loads nothing
	NeedsLoaded       // no list names it, and it needs nothing while its server is loaded; else it is NeedsTurn
	NeedsNothing      // it is passed on at once
	NeedsTouch        // … and counts as use
	NeedsLeave        // it is refused
)

// Unlisted reports whether no list names the request, though it may compute.
func (n Need) Unlisted() bool { return n == NeedsTurn || n == NeedsLoaded }

// String is the need in words, as people read it.
func (n Need) String() string {
	return [...]string{"needs the GPU", "takes a turn", "takes a turn unless its server is loaded", "needs no GPU", "needs no GPU, and counts as use", "is refused"}[n]
}

// Routes are the lists of routes of one consumer, ready to be matched. Matching is safe for concurrent use.
type Routes struct {
	paths                                                  PathMatch
	gpu, bypass, free, named, touch, blocked, start, async RoutePatterns
	unlisted                                               string // UnlistedGPU, UnlistedFree; empty: every request needs the GPU that no list names
}

// NewRoutes returns the Routes of a consumer, with what a site's route adds to bypass and touch. Its error holds all faults.
func NewRoutes(c *Consumer, bypass, touch []string) (*Routes, error) {
	r := &Routes{unlisted: c.UnlistedRequests}
	var faults []error
	var err error
	if r.paths, err = ParsePathMatch(c.PathMatch); err != nil {
		faults = append(faults, fmt.Errorf("path_match: %w", err))
	}
	var freeing []string // what asks for no unload there, or of a broker that unloads nothing, needs no GPU
	for _, u := range c.UnloadRequests {
		if u.Frees() {
			freeing = append(freeing, u.Route)
		}
	}
	for _, p := range []struct {
		into  *RoutePatterns
		texts []string
	}{{&r.gpu, c.GPURoutes}, {&r.free, slices.Concat(c.FreeRoutes, freeing)}, {&r.named, c.NamedRoutes}, {&r.bypass, slices.Concat(c.Bypass, bypass)}, {&r.touch, slices.Concat(c.Touch, touch)},
		{&r.async, c.AsyncRoutes}, {&r.start, c.StartOn}, {&r.blocked, c.Blocked}} {
		if *p.into, err = r.paths.Patterns(p.texts); err != nil {
			faults = append(faults, err)
		}
	}
	if r.unlisted == "" && len(r.gpu) > 0 {
		r.unlisted = UnlistedFree
	}
	return r, errors.Join(faults...)
}

// Needs returns what a request wants, by its method and by its path in each form in which the server may take it.
func (r *Routes) Needs(req *http.Request) Need {
	path := r.paths.Read(req.Method, req.URL)
	switch {
	case r.blocked.Any(&path):
		return NeedsLeave
	case req.Method == http.MethodOptions:
		return NeedsNothing
	case req.Method == http.MethodHead && r.unlisted == "": // nobody has said that a GET computes
		return NeedsNothing
	case r.touch.All(&path) && !r.reaches(&path, r.touch):
		return NeedsTouch
	case r.bypasses(&path):
		return NeedsNothing
	case r.gpu.Any(&path):
		return NeedsGPU
	case r.free.All(&path):
		return NeedsNothing
	case r.unlisted == "":
		return NeedsGPU
	case (req.Method == http.MethodGet || req.Method == http.MethodHead) && !IsTunnel(req):
		return NeedsNothing
	case r.unlisted == UnlistedGPU:
		return NeedsTurn
	default:
		return NeedsLoaded
	}
}

// Passes reports whether bypass, or touch where that is its need, names a request that its server may take for one of some routes.
func (r *Routes) Passes(req *http.Request, need Need, routes RoutePatterns) bool {
	path, list := r.paths.Read(req.Method, req.URL), r.touch
	if need != NeedsTouch {
		if list = r.bypass; need != NeedsNothing || !r.bypasses(&path) {
			return false
		}
	}
	return !routes.BySuffix(&path, func(route *RequestPath) bool { return !list.All(route) })
}

func (r *Routes) bypasses(path *RequestPath) bool {
	return r.bypass.All(path) && !r.reaches(path, r.bypass)
}

// Blocks reports whether requests such as this one are refused.
func (r *Routes) Blocks(req *http.Request) bool { return r.Asks(req, r.blocked) }

// Computes reports whether a list says that a request needs the GPU.
func (r *Routes) Computes(req *http.Request) bool { return r.Asks(req, r.gpu) }

// Asks reports whether the server may take a request for one of some routes, whose patterns have the rules of its paths.
func (r *Routes) Asks(req *http.Request, routes RoutePatterns) bool {
	path := r.paths.Read(req.Method, req.URL)
	return routes.Any(&path)
}

// reaches reports whether a server that matches paths by their end would take a path, which a list names by its beginning,
// for a route that needs the GPU and that the list does not name.
func (r *Routes) reaches(path *RequestPath, list RoutePatterns) bool {
	return r.gpu.BySuffix(path, func(route *RequestPath) bool { return !list.All(route) })
}

// NamesModel reports whether the body of a request that needs no GPU names a model.
func (r *Routes) NamesModel(req *http.Request) bool {
	return len(r.named) > 0 && r.Asks(req, r.named)
}

// Starts reports whether a request that needs no GPU is to start a server that is stopped.
func (r *Routes) Starts(req *http.Request) bool {
	path := r.paths.Read(req.Method, req.URL)
	return r.start.All(&path)
}

// AfterAnswer reports whether the work of a request may outlive its answer, at a consumer of which some do.
func (r *Routes) AfterAnswer(req *http.Request) bool {
	if len(r.async) == 0 {
		return true
	}
	path := r.paths.Read(req.Method, req.URL)
	return r.async.Any(&path)
}
