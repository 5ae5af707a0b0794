//go:build real

package systemd_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	_ "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/systemd"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
	"github.com/gpu-broker/caddy-gpu-broker/test/onecard"
)

// patience is far longer than anything here takes.
const patience = 20 * time.Second

// program is the server that the units run, and pretending is one with GPU memory.
var program, pretending string

const module = "github.com/gpu-broker/caddy-gpu-broker"

func TestRealDaemonRuns(t *testing.T) { onecard.Runs(t) }

func TestMain(m *testing.M) {
	if as := os.Getenv("GPU_BROKER_TEST_AS_USER"); as != "" {
		os.Exit(m.Run()) // a test that was started again as another user
	}
	if onecard.Cannot() != "" {
		os.Exit(m.Run())
	}
	if os.Getenv("GPU_BROKER_SYSTEMD_UNITS") == "" {
		fmt.Fprintln(os.Stderr, `systemd: these tests run with a systemd of their own: GPU_BROKER_CADDY=$PWD/bin/caddy go test -exec "$PWD/test/systemd/inside.sh" -tags real ./test/systemd/...`)
		os.Exit(1)
	}
	dir, err := os.MkdirTemp("", "mortal")
	if err == nil {
		program, pretending = filepath.Join(dir, "mortal"), filepath.Join(dir, "modelserver")
		err = os.Chmod(dir, 0o755)
	}
	if err == nil {
		var out []byte
		if out, err = exec.Command("go", "build", "-o", dir+"/", module+"/test/mortal", module+"/cmd/modelserver").CombinedOutput(); err != nil {
			err = fmt.Errorf("building the servers: %w: %s", err, out)
		}
	}
	code := 1
	if err == nil {
		code = m.Run()
		if code == 0 {
			err = goleak.Find()
		}
	}
	_ = os.RemoveAll(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, "systemd:", err)
		code = 1
	}
	os.Exit(code)
}

// manager is a systemd: the system's, or a user's.
type manager struct {
	units string   // the folder of its units
	flags []string // of systemctl
}

var system = manager{units: os.Getenv("GPU_BROKER_SYSTEMD_UNITS")}

func (m manager) systemctl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("systemctl", append(m.flags, args...)...).CombinedOutput()
	require.NoError(t, err, "systemctl %v: %s", args, out)
	return strings.TrimSpace(string(out))
}

// site is one unit and a driver of it.
type site struct {
	t       *testing.T
	in      manager
	unit    string
	address string
	died    chan string
	lifecycle.Supervisor
}

var counted atomic.Int64

// newSite writes a unit whose server gets args, with further lines in its section [Service].
func newSite(t *testing.T, in manager, args string, lines ...string) *site {
	t.Helper()
	s := &site{t: t, in: in, unit: fmt.Sprintf("mortal-%d.service", counted.Add(1)), address: caddytest.FreeAddr(t)}
	text := fmt.Sprintf("[Unit]\nDefaultDependencies=no\nStartLimitIntervalSec=0\n[Service]\nTimeoutStopSec=10\nExecStart=%s -listen %s %s\n%s\n",
		program, s.address, args, strings.Join(lines, "\n"))
	require.NoError(t, os.WriteFile(filepath.Join(in.units, s.unit), []byte(text), 0o644))
	in.systemctl(t, "daemon-reload")
	t.Cleanup(func() {
		_ = exec.Command("systemctl", append(in.flags, "stop", s.unit)...).Run() // it may be gone
	})
	s.reopen()
	return s
}

// reopen makes a driver; the test closes it at its end.
func (s *site) reopen() {
	s.t.Helper()
	config := fmt.Sprintf(`{"unit": %q, "user": %t}`, s.unit, s.in.flags != nil)
	s.Supervisor, s.died = open(s.t, config, s.address)
	s.t.Cleanup(func() { require.NoError(s.t, s.Close()) })
}

func open(t *testing.T, config, address string) (lifecycle.Supervisor, chan string) {
	t.Helper()
	l := new(systemd.Lifecycle)
	require.NoError(t, caddy.StrictUnmarshalJSON([]byte(config), l))
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	require.NoError(t, l.Provision(ctx))
	died := make(chan string, 16)
	d, err := l.Open(lifecycle.Deps{Consumer: "mvoice", Upstream: address, Limits: lifecycle.NewLimits(patience, patience), Died: func(detail string) { died <- detail }})
	require.NoError(t, err)
	return d.(lifecycle.Supervisor), died
}

func (s *site) load() {
	s.t.Helper()
	require.NoError(s.t, s.Load(s.t.Context(), lifecycle.Target{}))
}

// property is what systemd says.
func (s *site) property(name string) string {
	s.t.Helper()
	return s.in.systemctl(s.t, "show", "--value", "--property="+name, s.unit)
}

// get asks the server for something; one that ends does not answer.
func (s *site) get(path string) string {
	resp, err := http.Get("http://" + s.address + path)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	buffer := make([]byte, 64)
	n, _ := resp.Body.Read(buffer)
	return string(buffer[:n])
}

// death waits for the word that the server has died.
func (s *site) death() string {
	s.t.Helper()
	select {
	case detail := <-s.died:
		return detail
	case <-time.After(patience):
		require.FailNow(s.t, "its death was not noticed")
		return ""
	}
}
