// Package onecard drives a real Caddy with one simulated card, for which two
// servers compete: `one`, which systemd or Docker runs, and a plain rival.
package onecard

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

// The card holds one of the servers, not both.
const (
	cardSize  = 12 * gpu.GiB
	oneSize   = 7 * gpu.GiB
	rivalSize = 8 * gpu.GiB
)

// Card is a site: Caddy, the card and the rival. Share the folder Sim with whoever runs `one`.
type Card struct {
	*caddytest.Caddy
	// Address is where `one` has to listen.
	Address string

	t     testing.TB
	admin string
	url   string
}

// New prepares a site whose Caddy runs as a user; nil: the test's own.
func New(t testing.TB, user *syscall.Credential) *Card {
	t.Helper()
	require.NotEmpty(t, os.Getenv("GPU_BROKER_CADDY"), "GPU_BROKER_CADDY names the Caddy that is to be tested: use make real")
	// That of t is closed to others.
	dir, err := os.MkdirTemp("", "onecard")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755))
	c := &Card{Caddy: caddytest.New(t, dir), t: t, Address: caddytest.FreeAddr(t), admin: caddytest.FreeAddr(t), url: "http://" + caddytest.FreeAddr(t)}
	c.Broker, c.User = c.url+"/gpu", user
	c.Client.Transport = &http.Transport{DisableKeepAlives: true}
	if user != nil {
		for _, dir := range []string{c.Dir, c.Sim} {
			require.NoError(t, os.Chown(dir, int(user.Uid), int(user.Gid)))
		}
	}
	return c
}

// Args is the command line of `one`, after the program modelserver. It holds its memory from its start.
func (c *Card) Args() []string {
	return []string{"-name", "one", "-preloaded=true", "-vram", oneSize.String(), "-addr", c.Address, "-sim-dir", c.Sim}
}

// Run starts the rival, and Caddy with lines of the consumer `one`, until the test ends.
func (c *Card) Run(global, lines string) {
	c.t.Helper()
	rival := c.Pretend(modelserver.Options{Name: "rival", VRAM: rivalSize, Total: cardSize})
	c.Caddy.Run("Caddyfile", fmt.Sprintf(`{
	admin %s
	gpu_broker {
		gpu simulated %s {
			dir %s
		}
		hold 0
		%s
		consumer one {
			upstream %s
			vram %s
			health /health
			%s
		}
		consumer rival {
			upstream %s
			vram %s
			health /health {
				loaded $.loaded
			}
			load POST /api/admin/load
			unload POST /api/admin/unload
		}
	}
}
%s {
	handle_path /one/* {
		gpu_broker one
		reverse_proxy {http.gpu_broker.upstream}
	}
	handle_path /rival/* {
		gpu_broker rival
		reverse_proxy {http.gpu_broker.upstream}
	}
	handle /gpu/* {
		gpu_broker_status
	}
}
`, c.admin, cardSize, c.Sim, global, c.Address, oneSize, lines, rival.Addr(), rivalSize, c.url))
}

// Reload gives Caddy its file anew, changed by edit, with `caddy reload`.
func (c *Card) Reload(edit func(caddyfile string) string) {
	c.t.Helper()
	old, err := os.ReadFile(c.Config)
	require.NoError(c.t, err)
	changed := edit(string(old))
	require.NotEqual(c.t, string(old), changed, "the edit changed nothing")
	require.NoError(c.t, os.WriteFile(c.Config, []byte(changed), 0o644))
	out, err := c.Command("reload", "--config", c.Config, "--address", c.admin).CombinedOutput()
	require.NoError(c.t, err, "%s", out)
}

// Answer is what a request got.
type Answer struct {
	Status  int // 0: no answer, or half of one
	Body    []byte
	Code    string // of the broker's error document; empty: it is none
	Message string
}

func (c *Card) do(method, path, body string) Answer {
	c.t.Helper()
	req, err := http.NewRequestWithContext(c.t.Context(), method, c.url+path, strings.NewReader(body))
	require.NoError(c.t, err)
	resp, err := c.Client.Do(req)
	if err != nil {
		return Answer{}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return Answer{}
	}
	a := Answer{Status: resp.StatusCode, Body: data}
	var doc struct {
		Error struct{ Code, Message string }
	}
	if json.Unmarshal(data, &doc) == nil {
		a.Code, a.Message = doc.Error.Code, doc.Error.Message
	}
	return a
}

// Post sends GPU work to a consumer.
func (c *Card) Post(consumer, path string) Answer {
	c.t.Helper()
	return c.do("POST", "/"+consumer+path, "hello")
}

// Serve sends a consumer GPU work, which must be done.
func (c *Card) Serve(consumer string) {
	c.t.Helper()
	a := c.Post(consumer, "/synthesize")
	require.Equal(c.t, http.StatusOK, a.Status, "%s", a.Body)
}

// Fails sends `one` work that must be refused since it can't be loaded, and returns what is said.
func (c *Card) Fails() string {
	c.t.Helper()
	a := c.Post("one", "/synthesize")
	require.Equal(c.t, http.StatusServiceUnavailable, a.Status, "%s", a.Body)
	require.Equal(c.t, "load_failed", a.Code, "%s", a.Body)
	return a.Message
}

// State is what Caddy says of the server `one`.
func (c *Card) State() lifecycle.State {
	c.t.Helper()
	state := c.Status().Consumers["one"].Process
	require.NotNil(c.t, state)
	return *state
}

// slot is the state of a consumer's slot.
func (c *Card) slot(consumer string) string {
	c.t.Helper()
	return c.Status().Consumers[consumer].Slots[0].State
}
