package gpubroker

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/routing"
)

// asks returns what the broker is asked for, for a request to a route whose body says this.
func asks(t *testing.T, ctx caddy.Context, route gpucaddyfile.Route, path string, facts *routing.Facts) broker.Request {
	t.Helper()
	h := &Handler{Route: route}
	require.NoError(t, h.Provision(ctx))
	_, r := request("POST", path)
	r.Header.Set("X-Text", route.Source)
	caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, "10.0.0.7")
	j := &job{handler: h, target: h.fixed, facts: facts, repl: r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)}
	return j.request(r)
}

func TestTheBrokerIsAskedForWhatTheRouteAndTheBodySay(t *testing.T) {
	_, ctx := newApp(t,
		map[string]any{"name": "a", "vram": "1GiB", "priority": 70, "fallback": []string{"b", "shut"}},
		map[string]any{"name": "b", "cloud": true, "upstream": "127.0.0.1:9"},
		map[string]any{"name": "shut", "cloud": true, "upstream": "127.0.0.1:9", "blocked": []string{"POST /private"}})
	minutes := func(n int) time.Duration { return time.Duration(n) * time.Minute }
	bounded := gpucaddyfile.Route{Consumer: "a", KeepAliveMax: caddy.Duration(minutes(10)), CooldownMax: caddy.Duration(minutes(5))}
	long := strings.Repeat("x", routing.MaxClient)
	for _, c := range []struct {
		name  string
		route gpucaddyfile.Route
		path  string
		facts *routing.Facts
		want  func(r *broker.Request)
	}{
		{"nothing", gpucaddyfile.Route{Consumer: "a"}, "/", nil, func(*broker.Request) {}},
		{"a body that says nothing", bounded, "/", &routing.Facts{}, func(*broker.Request) {}},
		{"the route's settings", gpucaddyfile.Route{Consumer: "a", Budget: caddy.Duration(minutes(1)), KeepAlive: caddy.Duration(minutes(2)), PinPrimary: true, Priority: "30"}, "/", nil, func(r *broker.Request) {
			r.Budget, r.KeepAlive, r.PinPrimary, r.Priority = minutes(1), minutes(2), true, 30
		}},
		{"the route's priority, out of its range", gpucaddyfile.Route{Consumer: "a", Priority: "30", PriorityRange: &gpucaddyfile.PriorityRange{Min: 40, Max: 50}}, "/", nil, func(r *broker.Request) { r.Priority = 40 }},
		{"the consumer's priority, out of the route's range", gpucaddyfile.Route{Consumer: "a", PriorityRange: &gpucaddyfile.PriorityRange{Min: 40, Max: 50}}, "/", nil, func(r *broker.Request) { r.Priority = 50 }},
		{"a priority in a header", gpucaddyfile.Route{Consumer: "a", Priority: "{http.request.header.X-Text}", Source: " 45 "}, "/", nil, func(r *broker.Request) { r.Priority = 45 }},
		{"out of its range", gpucaddyfile.Route{Consumer: "a", Priority: "{http.request.header.X-Text}", Source: "45", PriorityRange: &gpucaddyfile.PriorityRange{Min: 60, Max: 80}}, "/", nil, func(r *broker.Request) { r.Priority = 60 }},
		{"no number", gpucaddyfile.Route{Consumer: "a", Priority: "{http.request.header.X-Text}", Source: "soon"}, "/", nil, func(*broker.Request) {}},
		{"a priority in the body", gpucaddyfile.Route{Consumer: "a"}, "/", &routing.Facts{HasPriority: true, Priority: 7}, func(r *broker.Request) { r.Priority = 7 }},
		{"which is 0", gpucaddyfile.Route{Consumer: "a"}, "/", &routing.Facts{HasPriority: true}, func(r *broker.Request) { r.Priority = 0 }},
		{"out of its range", gpucaddyfile.Route{Consumer: "a", PriorityRange: &gpucaddyfile.PriorityRange{Min: 60, Max: 80}}, "/", &routing.Facts{HasPriority: true, Priority: 7}, func(r *broker.Request) { r.Priority = 60 }},
		{"a client in a header", gpucaddyfile.Route{Consumer: "a", ClientID: "{http.request.header.X-Text}", Source: "me"}, "/", nil, func(r *broker.Request) { r.Client = "me" }},
		{"as long as may be", gpucaddyfile.Route{Consumer: "a", ClientID: "{http.request.header.X-Text}", Source: long}, "/", nil, func(r *broker.Request) { r.Client = long }},
		{"too long", gpucaddyfile.Route{Consumer: "a", ClientID: "{http.request.header.X-Text}", Source: long + "y"}, "/", nil, func(r *broker.Request) { r.Client = long }},
		{"a client in the body", gpucaddyfile.Route{Consumer: "a"}, "/", &routing.Facts{Client: "me"}, func(r *broker.Request) { r.Client = "me" }},
		{"times in the body", bounded, "/", &routing.Facts{KeepAlive: minutes(9), StayWarm: minutes(8), Cooldown: minutes(4)}, func(r *broker.Request) {
			r.KeepAlive, r.StayWarm, r.Cooldown = minutes(9), minutes(8), minutes(4)
		}},
		{"longer ones than may be", bounded, "/", &routing.Facts{KeepAlive: minutes(11), StayWarm: minutes(12), Cooldown: minutes(6)}, func(r *broker.Request) {
			r.KeepAlive, r.StayWarm, r.Cooldown = minutes(10), minutes(10), minutes(5)
		}},
		{"without a bound", gpucaddyfile.Route{Consumer: "a"}, "/", &routing.Facts{KeepAlive: minutes(99)}, func(r *broker.Request) { r.KeepAlive = minutes(99) }},
		{"the route's keep_alive, and none in the body", gpucaddyfile.Route{Consumer: "a", KeepAlive: caddy.Duration(minutes(2))}, "/", &routing.Facts{Cooldown: minutes(1)}, func(r *broker.Request) {
			r.KeepAlive, r.Cooldown = minutes(2), minutes(1)
		}},
		{"a fallback that refuses it", gpucaddyfile.Route{Consumer: "a"}, "/private", nil, func(r *broker.Request) { r.Candidates = []string{"a", "b"} }},
		{"the route's own fallbacks", gpucaddyfile.Route{Consumer: "a", Fallback: []string{"shut"}}, "/", nil, func(r *broker.Request) { r.Candidates = []string{"a", "shut"} }},
		{"no fallback", gpucaddyfile.Route{Consumer: "b"}, "/", nil, func(r *broker.Request) { r.Consumer, r.Priority, r.Candidates = "b", config.DefaultPriority, nil }},
	} {
		want := broker.Request{Consumer: "a", Priority: 70, Client: "10.0.0.7", Candidates: []string{"a", "b", "shut"}}
		c.want(&want)
		require.Equal(t, fmt.Sprintf("%+v", want), fmt.Sprintf("%+v", asks(t, ctx, c.route, c.path, c.facts)), c.name)
	}
}
