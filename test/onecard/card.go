// Package onecard drives a real Caddy with one simulated card, for which two
// servers compete: `one`, which systemd or Docker runs, and a plain rival.
package onecard

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// patience bounds every wait: past it something hangs.
const patience = 20 * time.Second

// The card holds one of the servers, not both.
const (
	cardSize  = 12 * gpu.GiB
	oneSize   = 7 * gpu.GiB
	rivalSize = 8 * gpu.GiB
)

// Card is a site: Caddy, the card's folder and the rival.
type Card struct {
	// Sim is the folder in which servers say what they hold; share it with whoever runs `one`.
	Sim string
	// Address is where `one` has to listen.
	Address string

	t      testing.TB
	dir    string // Caddy's
	admin  string
	url    string
	rival  *modelserver.Server
	user   *syscall.Credential // nil: the test's own
	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd has ended
	client *http.Client
}

// New prepares a site whose Caddy runs as a user; nil: the test's own.
func New(t testing.TB, user *syscall.Credential) *Card {
	t.Helper()
	// That of t is closed to others.
	dir, err := os.MkdirTemp("", "onecard")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755))
	c := &Card{t: t, dir: dir, user: user, Address: freeAddress(t), admin: freeAddress(t), url: "http://" + freeAddress(t)}
	c.Sim = filepath.Join(c.dir, "gpu")
	require.NoError(t, os.Mkdir(c.Sim, 0o755))
	if user != nil {
		for _, dir := range []string{c.dir, c.Sim} {
			require.NoError(t, os.Chown(dir, int(user.Uid), int(user.Gid)))
		}
	}
	c.client = &http.Client{Timeout: 2 * patience, Transport: &http.Transport{DisableKeepAlives: true}}
	return c
}

// Command is the command line of `one`, after the program modelserver. It holds its memory from its start.
func (c *Card) Command() []string {
	return []string{"-name", "one", "-preloaded=true", "-vram", oneSize.String(), "-addr", c.Address, "-sim-dir", c.Sim}
}

// Run starts the rival, and Caddy with lines of the consumer `one`, until the test ends.
func (c *Card) Run(global, lines string) {
	c.t.Helper()
	rival, err := modelserver.Start(modelserver.Options{Name: "rival", VRAM: rivalSize, Total: cardSize, SimDir: c.Sim})
	require.NoError(c.t, err)
	c.rival = rival
	c.t.Cleanup(func() { require.NoError(c.t, rival.Close()) })
	c.write(fmt.Sprintf(`{
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
	c.Again()
	c.t.Cleanup(c.atEnd)
}

func (c *Card) file() string { return filepath.Join(c.dir, "Caddyfile") }

func (c *Card) write(caddyfile string) {
	require.NoError(c.t, os.WriteFile(c.file(), []byte(caddyfile), 0o644))
}

// caddy is a command of the Caddy that is tested.
func (c *Card) caddy(args ...string) *exec.Cmd {
	c.t.Helper()
	path := os.Getenv("GPU_BROKER_CADDY")
	require.NotEmpty(c.t, path, "GPU_BROKER_CADDY names the Caddy that is to be tested: use make real")
	if c.user != nil { // who may not look into the folder where it was built
		own := filepath.Join(c.dir, "caddy")
		if _, err := os.Stat(own); err != nil {
			require.NoError(c.t, exec.Command("cp", path, own).Run())
		}
		path = own
	}
	cmd := exec.Command(path, args...)
	cmd.Dir = c.dir
	cmd.Env = append(os.Environ(), "HOME="+c.dir, "XDG_DATA_HOME="+filepath.Join(c.dir, "data"), "XDG_CONFIG_HOME="+filepath.Join(c.dir, "config"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.user}
	return cmd
}

// Again starts Caddy, also after Halt or Kill, and waits for its first probes.
func (c *Card) Again() {
	c.t.Helper()
	log, err := os.OpenFile(c.logFile(), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	require.NoError(c.t, err)
	defer func() { require.NoError(c.t, log.Close()) }()
	c.cmd = c.caddy("run", "--config", c.file(), "--adapter", "caddyfile")
	c.cmd.Stdout, c.cmd.Stderr = log, log
	require.NoError(c.t, c.cmd.Start())
	exited := make(chan struct{})
	c.exited = exited
	go func(cmd *exec.Cmd) {
		_ = cmd.Wait() // Halt looks at how it ended
		close(exited)
	}(c.cmd)
	c.Until("Caddy has asked every server and seen the card", func() bool {
		a := c.do("GET", "/gpu/status", "")
		if a.Status != http.StatusOK {
			return false
		}
		var st broker.Status
		require.NoError(c.t, json.Unmarshal(a.Body, &st))
		for _, consumer := range st.Consumers {
			if consumer.Health == "unknown" {
				return false
			}
		}
		return len(st.GPUs) > 0
	})
}

func (c *Card) logFile() string { return filepath.Join(c.dir, "caddy.log") }

// Halt stops Caddy as its service does, and returns when it has ended well.
func (c *Card) Halt() {
	c.t.Helper()
	c.end(syscall.SIGTERM)
	require.Zero(c.t, c.cmd.ProcessState.ExitCode())
}

// Kill ends Caddy without a last word.
func (c *Card) Kill() {
	c.t.Helper()
	c.end(syscall.SIGKILL)
}

func (c *Card) end(signal os.Signal) {
	c.t.Helper()
	require.NoError(c.t, c.cmd.Process.Signal(signal))
	select {
	case <-c.exited:
	case <-time.After(patience):
		_ = c.cmd.Process.Kill()
		<-c.exited
		require.FailNow(c.t, "Caddy did not stop")
	}
}

// atEnd stops Caddy and looks through its log.
func (c *Card) atEnd() {
	select {
	case <-c.exited:
	default:
		c.Halt()
	}
	log, err := os.ReadFile(c.logFile())
	require.NoError(c.t, err)
	for _, bad := range []string{"panic:", `"msg":"bug"`, "DATA RACE"} {
		if bytes.Contains(log, []byte(bad)) {
			c.t.Errorf("Caddy's log says %s", bad)
		}
	}
	if c.t.Failed() {
		c.t.Logf("Caddy's log ends with:\n%s", log[max(0, len(log)-20_000):])
	}
}

// Reload gives Caddy its file anew, changed by edit, with `caddy reload`.
func (c *Card) Reload(edit func(caddyfile string) string) {
	c.t.Helper()
	old, err := os.ReadFile(c.file())
	require.NoError(c.t, err)
	changed := edit(string(old))
	require.NotEqual(c.t, string(old), changed, "the edit changed nothing")
	c.write(changed)
	out, err := c.caddy("reload", "--config", c.file(), "--adapter", "caddyfile", "--address", c.admin).CombinedOutput()
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
	resp, err := c.client.Do(req)
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

// Status is what Caddy says.
func (c *Card) Status() broker.Status {
	c.t.Helper()
	a := c.do("GET", "/gpu/status", "")
	require.Equal(c.t, http.StatusOK, a.Status)
	var st broker.Status
	require.NoError(c.t, json.Unmarshal(a.Body, &st))
	return st
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

// Until polls what no signal tells.
func (c *Card) Until(what string, is func() bool) {
	c.t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			require.FailNow(c.t, "waited in vain until "+what)
		}
	}
}

func freeAddress(t testing.TB) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	return listener.Addr().String()
}
