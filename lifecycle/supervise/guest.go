package supervise

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// starters are the lifecycles of this module that start a server themselves.
var starters = []string{"process", "systemd", "docker"}

var errStarts = errors.New("its lifecycle starts a server itself: give one that speaks to a server, such as http")

// Routes loads the lifecycle in the field `Server` of a guest, which says how
// its server is spoken to while it runs. Without a protocol it is of http. One
// that would start a server inside the server is refused.
func Routes(ctx caddy.Context, guest any, server *json.RawMessage) (lifecycle.Guest, error) {
	var object map[string]json.RawMessage
	if len(*server) > 0 {
		if err := json.Unmarshal(*server, &object); err != nil {
			return nil, errors.New("server: it must be a JSON object")
		}
	}
	if object["protocol"] == nil {
		if object == nil {
			object = map[string]json.RawMessage{}
		}
		object["protocol"] = json.RawMessage(`"http"`)
		raw, err := json.Marshal(object)
		if err != nil {
			return nil, fmt.Errorf("server: %w", err)
		}
		*server = raw
	}
	var protocol string
	if err := json.Unmarshal(object["protocol"], &protocol); err != nil {
		return nil, errors.New("server: protocol must be the name of a lifecycle, such as http")
	}
	if slices.Contains(starters, protocol) { // New knows others by their traits, but only when they are opened
		return nil, fmt.Errorf("server: protocol %s: %w", protocol, errStarts)
	}
	module, err := ctx.LoadModule(guest, "Server")
	if err != nil {
		return nil, faultlines.OfModule("server: lifecycle "+protocol, "gpu_broker.lifecycles."+protocol, err)
	}
	routes, ok := module.(lifecycle.Guest)
	if !ok {
		return nil, fmt.Errorf("server: module %T is no lifecycle", module)
	}
	return routes, nil
}

// Fingerprint is that of the routes; empty if they have none.
func Fingerprint(routes lifecycle.Guest) string {
	if f, ok := routes.(lifecycle.Fingerprinter); ok {
		return f.Fingerprint()
	}
	return ""
}

// ModelNames is that of the routes.
func ModelNames(routes lifecycle.Guest) lifecycle.Names {
	if n, ok := routes.(lifecycle.Namer); ok {
		return n.ModelNames()
	}
	return lifecycle.Names{}
}
