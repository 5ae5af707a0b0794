// Package doctor_test drives the commands doctor and init of a real Caddy
// binary on a machine that the tests set up, with pretending model servers at
// the ports where real ones listen by default.
package doctor_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/doctor"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// patience bounds every wait of these tests: past it something hangs.
const patience = 30 * time.Second

// The default ports of ollama and ComfyUI.
const ollamaPort, comfyPort = 11434, 8188

// nobody is the user that has no rights.
const nobody = 65534

// place is a folder that every user may enter, for the binary.
var place = filepath.Join(os.TempDir(), fmt.Sprintf("gpu-broker-doctor-%d", os.Getpid()))

// caddy is a binary that every user may run: a copy of $GPU_BROKER_CADDY, or built for this.
var caddy = sync.OnceValues(func() (string, error) {
	path := filepath.Join(place, "caddy")
	if err := errors.Join(os.MkdirAll(place, 0o755), os.Chmod(place, 0o755)); err != nil {
		return "", err
	}
	built := os.Getenv("GPU_BROKER_CADDY")
	if built == "" {
		out, err := exec.Command("go", "build", "-o", path, "github.com/gpu-broker/caddy-gpu-broker/cmd/caddy").CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("building caddy: %w\n%s", err, out)
		}
		return path, nil
	}
	from, err := os.Open(built)
	if err != nil {
		return "", err
	}
	defer from.Close()
	to, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err != nil {
		return "", err
	}
	_, err = io.Copy(to, from)
	return path, errors.Join(err, to.Close())
})

func TestMain(m *testing.M) {
	code := m.Run()
	_ = os.RemoveAll(place)
	os.Exit(code)
}

// machine is what the tests set up.
type machine struct {
	t    *testing.T
	dir  string // every user may enter it
	user int    // who runs Caddy; 0: who runs the test
	env  []string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	dir, err := os.MkdirTemp("", "gpu-broker-doctor-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	for _, sub := range []string{"data", "config", "gpu"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, sub), 0o755))
	}
	return &machine{t: t, dir: dir}
}

func (m *machine) path(name string) string { return filepath.Join(m.dir, name) }

// write writes a file and says where it is.
func (m *machine) write(name, text string) string {
	m.t.Helper()
	require.NoError(m.t, os.WriteFile(m.path(name), []byte(text), 0o644))
	return m.path(name)
}

// lineOf is the place of the only line with this text in a file.
func (m *machine) lineOf(file, text string) string {
	m.t.Helper()
	doc, err := os.ReadFile(file)
	require.NoError(m.t, err)
	require.Equal(m.t, 1, strings.Count(string(doc), text), "%q in\n%s", text, doc)
	before, _, _ := strings.Cut(string(doc), text)
	return file + ":" + strconv.Itoa(strings.Count(before, "\n")+1)
}

// command is a run of the binary, as the machine's user.
func (m *machine) command(ctx context.Context, args ...string) *exec.Cmd {
	m.t.Helper()
	bin, err := caddy()
	require.NoError(m.t, err)
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Dir = m.dir
	cmd.Env = append(os.Environ(), "HOME="+m.dir, "XDG_DATA_HOME="+m.path("data"), "XDG_CONFIG_HOME="+m.path("config"))
	cmd.Env = append(cmd.Env, m.env...)
	if m.user != 0 && os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(m.user), Gid: uint32(m.user)}}
	}
	return cmd
}

// run runs the binary to its end.
func (m *machine) run(args ...string) (stdout, stderr string, status int) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), patience)
	defer cancel()
	cmd := m.command(ctx, args...)
	var out, failed bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &failed
	err := cmd.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		require.NoError(m.t, err)
	}
	return out.String(), failed.String(), cmd.ProcessState.ExitCode()
}

// doctor runs the command doctor on a configuration.
func (m *machine) doctor(config string, args ...string) (doctor.Report, int) {
	m.t.Helper()
	out, errs, status := m.run(append([]string{"gpu-broker", "doctor", "--json", "--config", config}, args...)...)
	var r doctor.Report
	require.NoError(m.t, json.Unmarshal([]byte(out), &r), "%s%s", out, errs)
	return r, status
}

// serve starts a pretending server that holds no memory, so that its folder needs no rights.
func serve(t *testing.T, opts modelserver.Options) *modelserver.Server {
	t.Helper()
	if opts.SimDir == "" {
		opts.SimDir, opts.OnCPU = t.TempDir(), true
	}
	opts.VRAM = gpu.GiB
	s, err := modelserver.Start(opts)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// mustBeFree fails the test where a port that it needs is taken.
func mustBeFree(t *testing.T, ports ...int) {
	t.Helper()
	for _, port := range ports {
		l, err := net.Listen("tcp", fmt.Sprintf(":%d", port))
		require.NoError(t, err, "this test needs the port %d, the default one of a model server: end what listens there", port)
		require.NoError(t, l.Close())
	}
}

// freePort is a port at which nobody listens.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}
