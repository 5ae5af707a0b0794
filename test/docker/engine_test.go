//go:build real

package docker_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/docker"
	_ "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
	"github.com/gpu-broker/caddy-gpu-broker/test/onecard"
)

// patience is far longer than anything here takes.
const patience = 20 * time.Second

// engine is the daemon that all tests use.
var engine daemon

type daemon struct {
	cmd *exec.Cmd
	log bytes.Buffer
	api *client.Client
}

func TestRealDaemonRuns(t *testing.T) { onecard.Runs(t) }

func TestMain(m *testing.M) {
	if onecard.Cannot() != "" {
		os.Exit(m.Run())
	}
	if os.Getenv("GPU_BROKER_DOCKERD") == "" {
		fmt.Fprintln(os.Stderr, `docker: these tests run with a Docker of their own: GPU_BROKER_CADDY=$PWD/bin/caddy go test -exec "$PWD/test/docker/inside.sh" -tags real ./test/docker/...`)
		os.Exit(1)
	}
	if err := engine.prepare(); err != nil {
		fmt.Fprintf(os.Stderr, "docker: %v\n%s", err, engine.log.String())
		os.Exit(1)
	}
	code := m.Run()
	engine.stop()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func (d *daemon) prepare() error {
	var err error
	if d.api, err = client.New(client.WithHTTPClient(&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}), client.WithHostFromEnv(), client.WithScheme("http")); err != nil {
		return err
	}
	if err := d.start(); err != nil {
		return err
	}
	return d.images()
}

// start starts the daemon and waits until it answers.
func (d *daemon) start() error {
	d.cmd = exec.Command(os.Getenv("GPU_BROKER_DOCKERD"))
	d.cmd.Stdout, d.cmd.Stderr = &d.log, &d.log
	if err := d.cmd.Start(); err != nil {
		return err
	}
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) { // it tells nobody that it is ready: it is asked until it answers
		_, err := d.api.Ping(context.Background(), client.PingOptions{NegotiateAPIVersion: true})
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("it does not answer: %w", err)
		}
	}
}

// stop ends the daemon; containers go on.
func (d *daemon) stop() {
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	_ = d.cmd.Wait() // how it ends is its own affair
}

// images makes an image of each of the servers, out of its program alone.
func (d *daemon) images() error {
	dir, err := os.MkdirTemp("", "images")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	const module = "github.com/gpu-broker/caddy-gpu-broker"
	build := exec.Command("go", "build", "-o", dir+"/", module+"/test/mortal", module+"/cmd/modelserver")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("building the servers: %w: %s", err, out)
	}
	for _, name := range []string{"mortal", "modelserver"} {
		if err := d.image(name, filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("image %s: %w", name, err)
		}
	}
	return nil
}

// image makes an image of one program, with its name.
func (d *daemon) image(name, path string) error {
	program, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(program))}); err != nil {
		return err
	}
	if _, err := w.Write(program); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	answer, err := d.api.ImageImport(context.Background(), client.ImageImportSource{Source: &layer, SourceName: "-"}, name, client.ImageImportOptions{})
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, answer)
	return err
}

// site is one container and a driver of it.
type site struct {
	t       *testing.T
	name    string
	address string
	died    chan string
	lifecycle.Supervisor
}

// newSite makes a container whose server gets args; alter may change it.
func newSite(t *testing.T, args []string, alter ...func(*container.Config, *container.HostConfig)) *site {
	t.Helper()
	s := &site{t: t, name: fmt.Sprintf("mortal-%d", time.Now().UnixNano()), address: caddytest.FreeAddr(t)}
	config := &container.Config{Image: "mortal", Cmd: append([]string{"/mortal", "-listen", s.address}, args...)}
	host := &container.HostConfig{NetworkMode: "host"}
	for _, f := range alter {
		f(config, host)
	}
	create(t, s.name, config, host)
	s.reopen("")
	return s
}

// create makes a container, until the test ends.
func create(t *testing.T, name string, config *container.Config, host *container.HostConfig) {
	t.Helper()
	_, err := engine.api.ContainerCreate(t.Context(), client.ContainerCreateOptions{Config: config, HostConfig: host, Name: name})
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := engine.api.ContainerRemove(context.Background(), name, client.ContainerRemoveOptions{Force: true})
		if t.Failed() && err != nil {
			t.Log(err)
		}
	})
}

// reopen makes a driver with further fields of JSON; the test closes it at its end.
func (s *site) reopen(fields string) {
	s.t.Helper()
	config := fmt.Sprintf(`{"container": %q, "host": %q%s}`, s.name, os.Getenv("DOCKER_HOST"), fields)
	l := new(docker.Lifecycle)
	require.NoError(s.t, caddy.StrictUnmarshalJSON([]byte(config), l))
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	s.t.Cleanup(cancel)
	require.NoError(s.t, l.Provision(ctx))
	died := make(chan string, 16)
	d, err := l.Open(lifecycle.Deps{Consumer: "mvoice", Upstream: s.address, Limits: lifecycle.NewLimits(patience, patience), Died: func(detail string) { died <- detail }})
	require.NoError(s.t, err)
	s.died = died
	s.Supervisor = d.(lifecycle.Supervisor)
	s.t.Cleanup(func() { require.NoError(s.t, d.Close()) })
}

func (s *site) load() {
	s.t.Helper()
	require.NoError(s.t, s.Load(s.t.Context(), lifecycle.Target{}))
}

// state is what Docker says.
func (s *site) state() *container.State {
	s.t.Helper()
	return inspect(s.t, s.name)
}

func inspect(t *testing.T, name string) *container.State {
	t.Helper()
	answer, err := engine.api.ContainerInspect(context.Background(), name, client.ContainerInspectOptions{})
	require.NoError(t, err)
	return answer.Container.State
}

// exit lets the server end itself.
func (s *site) exit(code int) {
	resp, err := http.Get(fmt.Sprintf("http://%s/exit?code=%d", s.address, code))
	if err == nil {
		resp.Body.Close()
	}
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
