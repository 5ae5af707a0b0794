package docker_test

import (
	"errors"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/lifecycletest"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

func TestLoadStartsAndUnloadStops(t *testing.T) {
	e := newEngine(t)
	d, died := e.open(t, `, "grace": "7s"`)
	require.Equal(t, lifecycle.No, d.Probe(t.Context()).Loaded)
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	state := d.State()
	require.Equal(t, name, state.Container)
	require.Equal(t, 4711, state.PID)
	require.Equal(t, 1, state.Starts)

	confirmed, err := d.Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	require.True(t, confirmed)
	require.Equal(t, []string{"t=7"}, e.called("POST /containers/"+name+"/stop"), "without a signal it is the container's own")
	require.Empty(t, died)
	require.Equal(t, "the broker stopped it", d.State().LastExit)
}

func TestSignalIsSent(t *testing.T) {
	e := newEngine(t)
	d, _ := e.open(t, `, "signal": "SIGINT"`)
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	_, err := d.Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	require.Equal(t, []string{"signal=SIGINT&t=10"}, e.called("POST /containers/"+name+"/stop"))
}

func TestSignalIsRefusedByAnOldDocker(t *testing.T) {
	e := newEngine(t)
	e.version = "1.41"
	d, _ := e.open(t, `, "signal": "SIGINT"`)
	require.ErrorContains(t, d.Load(t.Context(), lifecycle.Target{}), "--stop-signal SIGINT")
	require.Empty(t, e.called("POST /containers/"+name+"/start"))
}

func TestTheVersionIsNegotiated(t *testing.T) {
	e := newEngine(t)
	e.version = "1.41"
	var paths []string
	e.on("GET /containers/"+name+"/json", func(w http.ResponseWriter, r *http.Request) {
		paths = append(paths, r.URL.Path)
		fail(http.StatusNotFound, "No such container: "+name)(w, r)
	})
	d, _ := e.open(t, "")
	report := d.Probe(t.Context())
	require.Equal(t, lifecycle.Wrong, report.Outcome)
	require.Equal(t, []string{"/v1.41/containers/" + name + "/json"}, paths)
}

func TestDeathsAreToldWithTheirReason(t *testing.T) {
	for what, c := range map[string]struct {
		code int
		with map[string]any
		want string
	}{
		"status":  {3, nil, "exit status 3"},
		"signal":  {139, nil, "exit status 139 (signal 11, segmentation fault)"},
		"success": {0, nil, "exit status 0; it ended by itself, or somebody stopped it"},
		"RAM":     {137, map[string]any{"OOMKilled": true}, "exit status 137 (signal 9, killed); the kernel killed it for lack of RAM (OOMKilled): raise the container's memory limit"},
		"error":   {127, map[string]any{"Error": "exec:\n no such file"}, "exit status 127; Docker says: exec: no such file"},
	} {
		t.Run(what, func(t *testing.T) {
			e := newEngine(t)
			d, died := e.open(t, "")
			require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
			e.heard(t)
			e.die(c.code, c.with)
			require.Equal(t, c.want, lifecycletest.Death(t, died))
			require.False(t, d.Running())
			require.Empty(t, died, "told once")
		})
	}
}

// RAM is not the GPU's memory: nothing needs to be evicted for it.
func TestLackOfRAMIsNotOutOfMemory(t *testing.T) {
	e := newEngine(t)
	e.on("POST /containers/"+name+"/start", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(e.start())
		e.die(137, map[string]any{"OOMKilled": true})
	})
	d, _ := e.open(t, "")
	err := d.Load(t.Context(), lifecycle.Target{})
	require.ErrorContains(t, err, "OOMKilled")
	require.NotErrorIs(t, err, lifecycle.ErrOutOfMemory)
}

func TestServerThatIsStartedAgainBySomebodyElseHasDied(t *testing.T) {
	e := newEngine(t)
	d, died := e.open(t, "")
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	e.heard(t)
	e.mu.Lock()
	e.state["StartedAt"] = time.Now().UTC().Format(time.RFC3339Nano)
	e.tell("restart")
	e.mu.Unlock()
	require.Contains(t, lifecycletest.Death(t, died), "started again")
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	require.Equal(t, 1, d.State().Starts)
}

func TestRunningContainerIsAdoptedAndLeftAlone(t *testing.T) {
	e := newEngine(t)
	e.start()
	d, died := e.open(t, "")
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	require.True(t, d.Running())
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	require.Equal(t, 1, e.starts)
	require.NoError(t, d.Close())
	require.Empty(t, e.called("POST /containers/"+name+"/stop"))
	require.Empty(t, died)
}

func TestCloseStopsWhatWasStarted(t *testing.T) {
	e := newEngine(t)
	d, _ := e.open(t, "")
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	require.NoError(t, d.Close())
	require.Len(t, e.called("POST /containers/"+name+"/stop"), 1)
}

func TestPausedContainerIsToldOf(t *testing.T) {
	e := newEngine(t)
	d, died := e.open(t, "")
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	e.pause()
	report := d.Probe(t.Context())
	require.Equal(t, lifecycle.Wrong, report.Outcome)
	require.Contains(t, report.Detail, "docker unpause "+name)
	require.ErrorContains(t, d.Load(t.Context(), lifecycle.Target{}), "keeps its GPU memory")
	require.Empty(t, died, "it has not ended")
}

func TestRemovedContainerHasDied(t *testing.T) {
	e := newEngine(t)
	d, died := e.open(t, "")
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	e.heard(t)
	e.on("GET /containers/"+name+"/json", fail(http.StatusNotFound, "No such container: "+name))
	e.mu.Lock()
	e.tell("destroy")
	e.mu.Unlock()
	require.Equal(t, "the container was removed", lifecycletest.Death(t, died))
	require.ErrorContains(t, d.Load(t.Context(), lifecycle.Target{}), "docker create --name "+name)
}

func TestErrorsSayWhatToDo(t *testing.T) {
	t.Run("GPU", func(t *testing.T) {
		e := newEngine(t)
		e.on("POST /containers/"+name+"/start", fail(http.StatusInternalServerError, `could not select device driver "nvidia" with capabilities: [[gpu]]`))
		d, _ := e.open(t, "")
		require.ErrorContains(t, d.Load(t.Context(), lifecycle.Target{}), "could not select device driver")
		require.NoError(t, d.Close())
		require.Empty(t, e.called("POST /containers/"+name+"/stop"), "it was refused: there is nothing to stop")
	})
	t.Run("proxy", func(t *testing.T) {
		e := newEngine(t)
		e.on("POST /containers/"+name+"/start", fail(http.StatusForbidden, "forbidden"))
		d, _ := e.open(t, "")
		require.ErrorContains(t, d.Load(t.Context(), lifecycle.Target{}), "POST /containers/"+name+"/start and /stop")
	})
	t.Run("none", func(t *testing.T) {
		d, _ := open(t, `{"container": "llama", "host": "unix:///nowhere/docker.sock"}`, "127.0.0.1:1")
		require.ErrorContains(t, d.Load(t.Context(), lifecycle.Target{}), "no Docker at unix:///nowhere/docker.sock")
	})
}

// Nothing is forbidden to root, so the test runs itself again as nobody.
func TestForbiddenSocketSaysWhatToDo(t *testing.T) {
	if host := os.Getenv("GPU_BROKER_TEST_HOST"); host != "" {
		d, _ := open(t, `{"container": "llama", "host": "`+host+`"}`, "127.0.0.1:1")
		err := d.Load(t.Context(), lifecycle.Target{})
		require.ErrorContains(t, err, "usermod -aG docker")
		require.ErrorContains(t, err, "may not speak to Docker at "+host)
		return
	}
	e := newEngine(t)
	require.NoError(t, os.Chmod(strings.TrimPrefix(e.host, "unix://"), 0))
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
	if os.Geteuid() == 0 {
		dir, err := os.MkdirTemp("", "nobody") // the test's own folder is closed to others
		require.NoError(t, err)
		defer os.RemoveAll(dir)
		require.NoError(t, os.Chmod(dir, 0o755))
		e.Close()
		e.serve(t, filepath.Join(dir, "docker.sock"))
		require.NoError(t, os.Chmod(filepath.Join(dir, "docker.sock"), 0o600))
		program, err := os.ReadFile(os.Args[0])
		require.NoError(t, err)
		cmd.Path = filepath.Join(dir, "test")
		require.NoError(t, os.WriteFile(cmd.Path, program, 0o755))
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		cmd.Dir = dir
	}
	cmd.Env = append(os.Environ(), "GPU_BROKER_TEST_HOST="+e.host)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// Docker that is away says nothing of the server; what happened meanwhile is learnt when it is back.
func TestDeathIsNoticedOverARestartOfDocker(t *testing.T) {
	e := newEngine(t)
	d, died := e.open(t, "")
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	e.heard(t)
	e.CloseClientConnections()
	e.Close()
	require.Equal(t, lifecycle.Wrong, d.Probe(t.Context()).Outcome)
	require.True(t, d.Running())
	e.die(9, nil)
	require.Empty(t, died)
	e.version = "1.52" // it was updated, too
	e.serve(t, strings.TrimPrefix(e.host, "unix://"))
	require.Equal(t, "exit status 9", lifecycletest.Death(t, died))
	e.mu.Lock()
	spoken := e.spoken
	e.mu.Unlock()
	require.Equal(t, "/v1.52", spoken)
}

// What happens before the stream stands is asked for, too.
func TestEventsAreAskedForWithoutAGap(t *testing.T) {
	e := newEngine(t)
	begun := time.Now()
	d, _ := e.open(t, "")
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	e.heard(t)
	asked, err := url.ParseQuery(e.called("GET /events")[0])
	require.NoError(t, err)
	since, err := strconv.ParseInt(asked.Get("since"), 10, 64)
	require.NoError(t, err)
	require.Less(t, since, begun.Unix())
	require.JSONEq(t, `{"type": {"container": true}, "container": {"`+id+`": true, "`+name+`": true}}`, asked.Get("filters"))
}

func TestDockerThatHangsIsNotWaitedForForEver(t *testing.T) {
	e := newEngine(t)
	hung := make(chan struct{})
	e.on("POST /containers/"+name+"/start", func(_ http.ResponseWriter, r *http.Request) {
		close(hung)
		<-r.Context().Done()
	})
	d, _ := e.open(t, "")
	failed := make(chan error, 1)
	go func() { failed <- d.Load(t.Context(), lifecycle.Target{}) }()
	<-hung
	require.NoError(t, d.Close())
	select {
	case err := <-failed:
		require.Error(t, err)
		require.False(t, errors.Is(err, lifecycle.ErrOutOfMemory))
	case <-time.After(lifecycletest.Patience):
		require.FailNow(t, "it waits still")
	}
}
