// Package lifecycletest is what the tests of the lifecycles share.
package lifecycletest

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// Patience is far longer than anything in these tests takes.
const Patience = 20 * time.Second

// Module is a lifecycle as Caddy knows it.
type Module interface {
	caddy.Provisioner
	lifecycle.Guest
}

// Provision reads a configuration as Caddy does.
func Provision[M Module](t *testing.T, module M, config string) (M, error) {
	t.Helper()
	require.NoError(t, caddy.StrictUnmarshalJSON([]byte(config), module))
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	return module, module.Provision(ctx)
}

// Open makes a driver that starts a server, which listens at upstream. died gets what is told of the server's deaths.
func Open[M Module](t *testing.T, module M, config, upstream string) (d lifecycle.Supervisor, died chan string) {
	t.Helper()
	l, err := Provision(t, module, config)
	require.NoError(t, err)
	died = make(chan string, 16)
	driver, err := l.Open(lifecycle.Deps{
		Consumer: "mvoice", Upstream: upstream, Limits: lifecycle.NewLimits(Patience, Patience), Died: func(how string) { died <- how },
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, driver.Close()) })
	return driver.(lifecycle.Supervisor), died
}

// Death waits until a death is told.
func Death(t *testing.T, died <-chan string) string {
	t.Helper()
	select {
	case how := <-died:
		return how
	case <-time.After(Patience):
		require.FailNow(t, "its death was not noticed")
		return ""
	}
}

// FreeAddress is an address of this host at which nobody listens.
func FreeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return l.Addr().String()
}
