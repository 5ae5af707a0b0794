package supervise

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// Routes loads the lifecycle in the field `Server` of a guest, which says how
// its server is spoken to while it runs. Without a protocol it is of http.
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
	module, err := ctx.LoadModule(guest, "Server")
	if err != nil {
		return nil, fmt.Errorf("server: %w", err)
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
