package supervise_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/supervise"
)

// starter is a guest whose server has routes.
type starter struct {
	Server json.RawMessage `json:"server,omitempty" caddy:"namespace=gpu_broker.lifecycles inline_key=protocol"`
}

func routes(t *testing.T, server string) (lifecycle.Guest, error) {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	g := &starter{Server: json.RawMessage(server)}
	return supervise.Routes(ctx, g, &g.Server)
}

func TestRoutesAreOfHTTPUnlessTheySayOtherwise(t *testing.T) {
	for _, server := range []string{"", "{}", `{"health": {"path": "/health"}}`, `{"protocol": "http"}`} {
		guest, err := routes(t, server)
		require.NoError(t, err, server)
		require.NotNil(t, guest, server)
	}
}

func TestRoutesThatAreNoneAreRefused(t *testing.T) {
	for server, want := range map[string]string{
		`7`:                         "server: it must be a JSON object",
		`{"protocol": 7}`:           "protocol must be the name of a lifecycle",
		`{"protocol": "telepathy"}`: "telepathy",
		`{"protocol": "process", "command": "x"}`:  "protocol process: its lifecycle starts a server itself",
		`{"protocol": "systemd", "unit": "x"}`:     "protocol systemd: its lifecycle starts a server itself",
		`{"protocol": "docker", "container": "x"}`: "protocol docker: its lifecycle starts a server itself",
	} {
		_, err := routes(t, server)
		require.ErrorContains(t, err, want, server)
	}
}

// unheardOf is a lifecycle that starts a server and whose name is not known.
type unheardOf struct{ t *testing.T }

func (u unheardOf) Open(deps lifecycle.Deps) (lifecycle.Driver, error) {
	guest, err := routes(u.t, "")
	require.NoError(u.t, err)
	return supervise.New(newServer(u.t), guest, deps)
}

func TestAServerInsideAServerIsRefusedWhoeverStartsIt(t *testing.T) {
	_, err := supervise.New(newServer(t), unheardOf{t}, lifecycle.Deps{Consumer: "qwen", Upstream: "127.0.0.1:1"})
	require.ErrorContains(t, err, "consumer qwen: server: its lifecycle starts a server itself")
}

// slow are routes that take long to be opened for a server that runs, as on a disk that hangs.
type slow struct {
	lifecycle.Guest
	opening, resume chan struct{}
}

func (s slow) Open(deps lifecycle.Deps) (lifecycle.Driver, error) {
	if deps.Upstream != "localhost:0" {
		close(s.opening)
		<-s.resume
	}
	return s.Guest.Open(deps)
}

func TestRequestsDoNotWaitForRoutesThatAreOpened(t *testing.T) {
	guest, err := routes(t, "")
	require.NoError(t, err)
	s := slow{guest, make(chan struct{}), make(chan struct{})}
	d, err := supervise.New(newServer(t), s, lifecycle.Deps{Consumer: "qwen"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	loaded := make(chan error, 1)
	go func() { loaded <- d.Load(within(t, patience), whole) }()
	<-s.opening
	asked := make(chan string, 1)
	go func() { asked <- d.Upstream() }()
	select {
	case <-asked:
	case <-time.After(prompt):
		t.Error("it waits for the routes")
	}
	close(s.resume)
	require.NoError(t, <-loaded)
}
