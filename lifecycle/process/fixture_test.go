//go:build linux

package process_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-broker/caddy-gpu-broker/internal/lifecycletest"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/process"
)

// patience is far longer than anything here takes; prompt is what counts as at once.
const (
	patience = 30 * time.Second
	prompt   = 3 * time.Second
)

var whole = lifecycle.Target{}

func provision(t *testing.T, config string) (*process.Lifecycle, error) {
	t.Helper()
	return lifecycletest.Provision(t, new(process.Lifecycle), config)
}

// settings are a configuration of the lifecycle in JSON: the test's server
// with these arguments, and what else is to be said.
func settings(args []string, more ...string) string {
	raw, err := json.Marshal(append([]string{me}, args...))
	if err != nil {
		panic(err)
	}
	env := `"env": {"` + roleVariable + `": "server"}`
	if len(more) > 0 && strings.HasPrefix(more[0], `"env"`) {
		env = strings.Replace(more[0], "{", `{"`+roleVariable+`": "server", `, 1)
		more = more[1:]
	}
	return fmt.Sprintf(`{%s}`, strings.Join(append([]string{`"command": ` + string(raw), env, `"server": {"health": {"path": "/health"}}`}, more...), ", "))
}

// onPort are the arguments of a server that listens where it is told to.
func onPort(more ...string) []string { return append([]string{"-port", "{gpu_broker.port}"}, more...) }

// opened is a driver and what it tells.
type opened struct {
	lifecycle.Supervisor
	died chan string
	logs *observer.ObservedLogs
	dir  string
}

func open(t *testing.T, config string, adjust ...func(*lifecycle.Deps)) *opened {
	t.Helper()
	l, err := provision(t, config)
	require.NoError(t, err)
	core, logs := observer.New(zapcore.InfoLevel)
	o := &opened{died: make(chan string, 10), logs: logs, dir: t.TempDir()}
	deps := lifecycle.Deps{
		Consumer: "qwen", Limits: lifecycle.NewLimits(patience, patience), Dir: o.dir,
		Logger: zap.New(core), Died: func(how string) { o.died <- how },
	}
	for _, f := range adjust {
		f(&deps)
	}
	d, err := l.Open(deps)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	o.Supervisor = d.(lifecycle.Supervisor)
	return o
}

// load starts the server and returns its PID.
func (o *opened) load(t *testing.T, targets ...lifecycle.Target) int {
	t.Helper()
	require.NoError(t, o.Load(within(t), append(targets, whole)[0]))
	return o.State().PID
}

func (o *opened) unload(t *testing.T) {
	t.Helper()
	confirmed, err := o.Unload(within(t), whole)
	require.NoError(t, err)
	require.True(t, confirmed)
}

// ask reads what the server says at path.
func (o *opened) ask(t *testing.T, path string, into any) {
	t.Helper()
	askAt(t, o.Upstream(), path, into)
}

func askAt(t *testing.T, address, path string, into any) {
	t.Helper()
	request, err := http.NewRequestWithContext(within(t), http.MethodGet, "http://"+address+path, nil)
	require.NoError(t, err)
	request.Close = true
	response, err := http.DefaultClient.Do(request)
	if into == nil {
		if err == nil {
			response.Body.Close()
		}
		return
	}
	require.NoError(t, err)
	defer response.Body.Close()
	require.NoError(t, json.NewDecoder(response.Body).Decode(into))
}

// output waits until the server has written a line that begins so, and returns all that do.
func (o *opened) output(t *testing.T, prefix string, want int) []string {
	t.Helper()
	var found []string
	require.Eventually(t, func() bool {
		found = nil
		for _, l := range o.State().Output {
			if strings.HasPrefix(l, prefix) {
				found = append(found, l)
			}
		}
		return len(found) >= want
	}, patience, time.Millisecond)
	return found
}

// workers waits until this many workers have told their PIDs.
func (o *opened) workers(t *testing.T, want int) []int {
	t.Helper()
	var pids []int
	for _, l := range o.output(t, "worker ", want) {
		var pid int
		_, err := fmt.Sscanf(l, "worker %d", &pid)
		require.NoError(t, err)
		require.NotZero(t, process.StartOf(pid))
		pids = append(pids, pid)
	}
	return pids
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// gone asserts that none of them lives.
func gone(t *testing.T, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		require.Zero(t, process.StartOf(pid), "process %d lives", pid)
	}
}

// soonGone asserts that none of them lives for long.
func soonGone(t *testing.T, pids ...int) {
	t.Helper()
	require.Eventually(t, func() bool {
		for _, pid := range pids {
			if process.StartOf(pid) != 0 {
				return false
			}
		}
		return true
	}, prompt, time.Millisecond, "of %v some live", pids)
}
