// Package caddytest runs a real Caddy in tests, in a folder of its own, with pretending servers on a simulated card.
package caddytest

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// Caddy is a Caddy that a test runs.
type Caddy struct {
	Dir    string              // its home, with its configuration, data and log
	Sim    string              // the folder of its simulated card; share it with servers
	Config string              // the file of its configuration, once it runs
	Env    []string            // variables beside the test's own
	Broker string              // the URL below which the broker tells its status
	Client *http.Client        // of its sites; trusts its authority if Broker begins with https
	User   *syscall.Credential // whom it runs as; nil: the test's own

	t      testing.TB
	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd has ended
}

// New prepares a Caddy in a folder.
func New(t testing.TB, dir string) *Caddy {
	t.Helper()
	c := &Caddy{t: t, Dir: dir, Sim: filepath.Join(dir, "gpu"), Client: &http.Client{Transport: &http.Transport{}, Timeout: Patience}}
	require.NoError(t, os.Mkdir(c.Sim, 0o755))
	t.Cleanup(func() { c.Client.CloseIdleConnections() })
	return c
}

// Pretend runs a pretending server on the card until the test ends.
func (c *Caddy) Pretend(o modelserver.Options) *modelserver.Server {
	c.t.Helper()
	o.SimDir = c.Sim
	server, err := modelserver.Start(o)
	require.NoError(c.t, err)
	c.t.Cleanup(func() { require.NoError(c.t, server.Close()) })
	return server
}

// Environ is the environment of its commands.
func (c *Caddy) Environ() []string {
	own := append(os.Environ(), "HOME="+c.Dir, "XDG_DATA_HOME="+filepath.Join(c.Dir, "data"), "XDG_CONFIG_HOME="+filepath.Join(c.Dir, "config"))
	return append(own, c.Env...)
}

// Command is one of its commands.
func (c *Caddy) Command(args ...string) *exec.Cmd {
	c.t.Helper()
	path, err := Binary()
	require.NoError(c.t, err)
	cmd := exec.Command(path, args...)
	if c.User != nil { // who may look into no folder of the test but this
		cmd.Dir, cmd.Path = c.Dir, filepath.Join(c.Dir, "caddy")
		if _, err := os.Stat(cmd.Path); err != nil {
			require.NoError(c.t, exec.Command("cp", path, cmd.Path).Run())
		}
	}
	cmd.Env, cmd.SysProcAttr = c.Environ(), &syscall.SysProcAttr{Credential: c.User}
	return cmd
}

// Run starts Caddy with a configuration until the test ends; file is its name in the folder. It returns when Caddy has
// asked every server and seen the card.
func (c *Caddy) Run(file, config string) {
	c.t.Helper()
	c.Config = filepath.Join(c.Dir, file)
	require.NoError(c.t, os.WriteFile(c.Config, []byte(config), 0o644))
	c.start()
	c.t.Cleanup(c.atEnd)
	if strings.HasPrefix(c.Broker, "https:") {
		c.Client.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: CA(c.t, c.Dir)}
	}
	c.ready()
}

// Again is Run with the same configuration, after Halt or Kill.
func (c *Caddy) Again() {
	c.t.Helper()
	c.start()
	c.ready()
}

func (c *Caddy) log() string { return filepath.Join(c.Dir, "caddy.log") }

func (c *Caddy) start() {
	c.t.Helper()
	log, err := os.OpenFile(c.log(), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	require.NoError(c.t, err)
	defer func() { require.NoError(c.t, log.Close()) }()
	cmd, exited := c.Command("run", "--config", c.Config), make(chan struct{})
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(c.t, cmd.Start())
	go func() {
		_ = cmd.Wait() // Halt looks at how it ended
		close(exited)
	}()
	c.cmd, c.exited = cmd, exited
}

func (c *Caddy) ready() {
	c.t.Helper()
	c.Until("Caddy has asked every server and seen the card", func() bool {
		status, err := c.look()
		for _, consumer := range status.Consumers {
			if consumer.Health == "unknown" {
				return false
			}
		}
		return err == nil && len(status.GPUs) > 0
	})
}

// Halt stops Caddy as its service does, and returns when it has ended well.
func (c *Caddy) Halt() {
	c.t.Helper()
	c.end(syscall.SIGTERM)
	assert.Zero(c.t, c.cmd.ProcessState.ExitCode(), "Caddy did not end well")
}

// Kill ends Caddy without a last word.
func (c *Caddy) Kill() {
	c.t.Helper()
	c.end(syscall.SIGKILL)
}

func (c *Caddy) end(signal os.Signal) {
	c.t.Helper()
	assert.NoError(c.t, c.cmd.Process.Signal(signal))
	select {
	case <-c.exited:
	case <-time.After(Patience):
		_ = c.cmd.Process.Kill()
		<-c.exited
		c.t.Error("Caddy did not stop")
	}
}

func (c *Caddy) atEnd() {
	select {
	case <-c.exited:
	default:
		c.Halt()
	}
	CheckLog(c.t, c.log())
}

// Until polls a condition that has no signal of its own.
func (c *Caddy) Until(what string, cond func() bool) {
	c.t.Helper()
	Until(c.t, what, cond)
}

// Status is what the broker tells.
func (c *Caddy) Status() broker.Status {
	c.t.Helper()
	status, err := c.look()
	require.NoError(c.t, err)
	return status
}

func (c *Caddy) look() (status broker.Status, err error) {
	resp, err := c.Client.Get(c.Broker + "/status")
	if err != nil {
		return status, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return status, fmt.Errorf("GET %s/status: want 200, got %s", c.Broker, resp.Status)
	}
	return status, json.NewDecoder(resp.Body).Decode(&status)
}
