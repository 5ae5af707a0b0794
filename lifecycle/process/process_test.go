//go:build linux

package process_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/process"
)

func TestAServerIsStartedServesAndIsStopped(t *testing.T) {
	o := open(t, settings(onPort()))
	require.Equal(t, lifecycle.No, o.Probe(within(t)).Loaded)
	pid := o.load(t)
	require.NotZero(t, process.StartOf(pid))
	require.True(t, o.Running())
	require.True(t, o.Owns(pid))
	require.False(t, o.Owns(os.Getpid()))
	require.False(t, o.Owns(os.Getppid()))
	s := o.State()
	require.True(t, s.Running)
	require.Equal(t, 1, s.Starts)
	require.Equal(t, o.Upstream(), s.Address)
	require.WithinDuration(t, time.Now(), s.StartedAt, patience)
	require.Equal(t, lifecycle.Yes, o.Probe(within(t)).Loaded)
	require.Len(t, process.Records(o.dir), 1)
	require.Eventually(t, func() bool { return process.Leaders(o.dir)[pid] == process.StartOf(pid) }, patience, time.Millisecond, "its number alone may be another's by the next start")

	o.unload(t)
	gone(t, pid)
	require.Empty(t, process.GroupOf(pid))
	require.Empty(t, process.Records(o.dir))
	require.False(t, o.Owns(pid))
	s = o.State()
	require.False(t, s.Running)
	require.Zero(t, s.PID)
	require.Equal(t, "killed by signal 15", s.LastExit)
	require.Empty(t, o.died)

	again := o.load(t)
	require.NotEqual(t, pid, again)
	require.Equal(t, 2, o.State().Starts)
	require.Equal(t, "killed by signal 15", o.State().LastExit)
}

func TestTheLeaderOfTheGroupIsTheCommandAndItsGuardIsInIt(t *testing.T) {
	o := open(t, settings(onPort()))
	pid := o.load(t)
	require.Eventually(t, func() bool { return len(process.GroupOf(pid)) == 2 }, prompt, time.Millisecond)
	for _, member := range process.GroupOf(pid) {
		require.True(t, o.Owns(member))
		if member == pid {
			continue
		}
		// The signals of a group do not end the guard.
		require.NoError(t, syscall.Kill(member, syscall.SIGTERM))
	}
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	<-o.died
	o.unload(t)
	require.Empty(t, process.GroupOf(pid))
}

// Else each load would leave an open file behind.
func TestWhatKeepsAServersGuardIsClosedWithIt(t *testing.T) {
	o := open(t, settings(onPort()))
	pid := o.load(t)
	require.Eventually(t, func() bool { return len(process.GroupOf(pid)) == 2 }, prompt, time.Millisecond)
	var pipe string
	for _, member := range process.GroupOf(pid) {
		if member != pid {
			pipe = filesOf(t, member)["0"]
		}
	}
	require.Contains(t, pipe, "pipe:")
	mine := func() []string { return slices.Collect(maps.Values(filesOf(t, os.Getpid()))) }
	require.Contains(t, mine(), pipe)
	o.unload(t)
	require.NotContains(t, mine(), pipe)
}

func TestFC29WorkersEndWithTheirServer(t *testing.T) {
	for name, args := range map[string][]string{
		"that heed the signal": {"-workers", "3"},
		"that are deaf":        {"-workers", "3", "-deafworkers"},
		"that left the group":  {"-workers", "2", "-setsid"},
	} {
		t.Run(name, func(t *testing.T) {
			o := open(t, settings(onPort(args...), `"grace": "300ms"`))
			n, err := strconv.Atoi(args[1])
			require.NoError(t, err)
			pid := o.load(t)
			workers := o.workers(t, n)
			for _, w := range workers {
				require.True(t, o.Owns(w))
			}
			o.unload(t)
			gone(t, append(workers, pid)...)
		})
		t.Run(name+" if it is killed", func(t *testing.T) {
			o := open(t, settings(onPort(args...)))
			n, err := strconv.Atoi(args[1])
			require.NoError(t, err)
			pid := o.load(t)
			workers := o.workers(t, n)
			require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
			require.Equal(t, "killed by signal 9", <-o.died)
			soonGone(t, workers...)
			require.False(t, o.Running())
			require.NotEqual(t, pid, o.load(t), "it can be started again")
		})
	}
}

// A process that left the group and whose parent has ended has no ancestor that tells whose it is: its mark does.
func TestAnOrphanOfTheServerIsItsOwnByItsMark(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	raw, err := json.Marshal([]string{"/bin/sh", "-c", `"$0" -workers 1 -setsid -exit 0; exec "$0" -port {gpu_broker.port}`, self})
	require.NoError(t, err)
	o := open(t, `{"command": `+string(raw)+`, "env": {"`+roleVariable+`": "server"}, "server": {"health": {"path": "/health"}}}`)
	pid := o.load(t)
	orphan := o.workers(t, 1)[0]
	require.NotContains(t, process.GroupOf(pid), orphan)
	require.True(t, o.Owns(orphan))
	o.unload(t)
	gone(t, orphan, pid)
	require.False(t, o.Owns(orphan))
}

// What clears its environment has no mark: its group or its parent tells whose it is.
func TestAChildOfTheServerIsItsOwnThoughItCarriesNoMark(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	raw, err := json.Marshal([]string{"/bin/sh", "-c", `env -i sleep 60 & env -i setsid sleep 60 & exec "$0" -port {gpu_broker.port}`, self})
	require.NoError(t, err)
	o := open(t, `{"command": `+string(raw)+`, "env": {"`+roleVariable+`": "server"}, "server": {"health": {"path": "/health"}}}`)
	pid := o.load(t)
	var within, beside []int
	require.Eventually(t, func() bool {
		within, beside = nil, nil
		for _, child := range process.UnmarkedChildrenOf(pid) {
			if slices.Contains(process.GroupOf(pid), child) {
				within = append(within, child)
			} else {
				beside = append(beside, child)
			}
		}
		return len(within) == 1 && len(beside) == 1
	}, patience, time.Millisecond)
	t.Cleanup(func() { _ = syscall.Kill(beside[0], syscall.SIGKILL) }) // nothing else tells that it was the server's, once that is gone
	require.True(t, o.Owns(within[0]))
	require.True(t, o.Owns(beside[0]))
	o.unload(t)
	gone(t, within[0], pid)
}

func TestAWorkerThatOutlivesItsServerIsGivenTheGrace(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	raw, err := json.Marshal([]string{"/bin/sh", "-c", `(trap 'sleep 0.2; echo bye; exit' TERM; echo ready; while :; do sleep 0.05; done) & exec "$0" -port {gpu_broker.port}`, self})
	require.NoError(t, err)
	o := open(t, `{"command": `+string(raw)+`, "env": {"`+roleVariable+`": "server"}, "server": {"health": {"path": "/health"}}, "grace": "10m"}`)
	o.load(t)
	o.output(t, "ready", 1)
	ctx := within(t)
	_, err = o.Unload(ctx, whole)
	require.NoError(t, errors.Join(err, ctx.Err()), "it ends with the last worker")
	require.Contains(t, o.State().Output, "bye")
	require.Equal(t, "killed by signal 15", o.State().LastExit)
}

// Where Caddy is the first process of a container, whoever loses its parent becomes its child.
func TestOrphansOfAServerThatBecomeCaddysAreWaitedFor(t *testing.T) {
	require.NoError(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	defer func() { require.NoError(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)) }()
	o := open(t, settings(onPort("-workers", "3")))
	pid := o.load(t)
	workers := o.workers(t, 3)
	o.unload(t)
	for _, w := range append(workers, pid) {
		require.NoDirExists(t, fmt.Sprintf("/proc/%d", w), "nobody has waited for it")
	}
}

func TestAServerThatIsDeafIsKilledAfterItsGrace(t *testing.T) {
	const grace = 300 * time.Millisecond
	o := open(t, settings(onPort("-deaf"), `"grace": "300ms"`))
	pid := o.load(t)
	began := time.Now()
	o.unload(t)
	took := time.Since(began)
	gone(t, pid)
	require.GreaterOrEqual(t, took, grace)
	require.Less(t, took, grace+prompt)
	require.Equal(t, "killed by signal 9", o.State().LastExit)
	require.Zero(t, o.logs.FilterLevelExact(zapcore.ErrorLevel).Len(), "that is no error")
}

func TestAStopHurriesWhenItIsCalledOff(t *testing.T) {
	o := open(t, settings(onPort("-deaf"), `"grace": "10m"`))
	pid := o.load(t)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	began := time.Now()
	_, err := o.Unload(ctx, whole)
	require.NoError(t, err)
	require.Less(t, time.Since(began), prompt)
	gone(t, pid)
}

func TestTheSignalIsTheConfiguredOneAndTheGraceIsGiven(t *testing.T) {
	o := open(t, settings(onPort("-farewell", "100ms"), `"signal": "USR1"`))
	o.load(t)
	o.unload(t)
	require.Equal(t, "exit status 0: bye", o.State().LastExit)
	require.Contains(t, o.State().Output, fmt.Sprintf("asked by %d", syscall.SIGUSR1))
}

func TestCloseStopsTheServer(t *testing.T) {
	o := open(t, settings(onPort("-workers", "1")))
	pid := o.load(t)
	workers := o.workers(t, 1)
	require.NoError(t, o.Close())
	gone(t, append(workers, pid)...)
	require.Error(t, o.Load(within(t), whole))
	require.Empty(t, o.died)
}

func TestAnExitIsToldAtOnceWithItsLastLine(t *testing.T) {
	o := open(t, settings(onPort()))
	o.load(t)
	var asked time.Time
	go func() {
		asked = time.Now()
		askAt(t, o.Upstream(), "/exit?status=3&say=no+such+file", nil)
	}()
	require.Equal(t, "exit status 3: no such file", <-o.died)
	require.Less(t, time.Since(asked), prompt)
	require.Equal(t, "exit status 3: no such file", o.State().LastExit)
	require.Equal(t, lifecycle.No, o.Probe(within(t)).Loaded)
	failed := o.Supervisor.(lifecycle.Restarter).Failed
	require.True(t, failed())

	o.load(t)
	require.False(t, failed(), "it runs")
	go askAt(t, o.Upstream(), "/exit?status=0", nil)
	<-o.died
	require.False(t, failed(), "it has ended well")
}

func TestAServerThatEndsInItsLoadSaysWhy(t *testing.T) {
	o := open(t, settings(onPort("-warn", "bad flag\n\n", "-exit", "2")))
	err := o.Load(within(t), whole)
	require.ErrorContains(t, err, "exit status 2: bad flag")
	require.NotErrorIs(t, err, lifecycle.ErrOutOfMemory)
	require.Equal(t, "exit status 2: bad flag", <-o.died)

	o = open(t, settings(onPort("-warn", "torch.OutOfMemoryError: CUDA out of memory.\nbye\n", "-exit", "1")))
	require.ErrorIs(t, o.Load(within(t), whole), lifecycle.ErrOutOfMemory)
}

func TestAProgramThatCantBeStartedIsNamed(t *testing.T) {
	o := open(t, `{"command": ["no-such-program-here", "{gpu_broker.port}"]}`)
	err := o.Load(within(t), whole)
	require.ErrorContains(t, err, "no-such-program-here can't be started")
	require.ErrorContains(t, err, "is it installed")
	require.Empty(t, process.Records(o.dir))

	o = open(t, settings(onPort(), `"dir": "/no/such/folder"`))
	require.ErrorContains(t, o.Load(within(t), whole), "does its `dir` exist?")
	require.Empty(t, process.Records(o.dir))
}

func TestPlaceholdersAreReplacedAndOtherBracesStay(t *testing.T) {
	t.Setenv("TEST_MODEL", "/models/qwen.gguf")
	dir := t.TempDir()
	o := open(t, settings(onPort("--", "{env.TEST_MODEL}", `{"a": {"b": "{x}"}}`, `\{env.TEST_MODEL}`, "{{ .Prompt }}",
		"{gpu_broker.gpus} {gpu_broker.gpu_indices} {gpu_broker.gpu_count} {gpu_broker.tensor_parallel} {gpu_broker.utilisation}"),
		`"env": {"WHERE": "at {gpu_broker.port}, {env.TEST_MODEL}"}`, `"dir": "`+dir+`"`))
	o.load(t, lifecycle.Target{GPUs: []lifecycle.Placed{
		{Index: 2, UUID: "GPU-b", Total: 24 * gpu.GiB, Claim: 13 * gpu.GiB},
		{Index: 3, UUID: "GPU-c", Total: 24 * gpu.GiB, Claim: 12 * gpu.GiB},
	}})
	_, port, err := net.SplitHostPort(o.Upstream())
	require.NoError(t, err)
	var args, env []string
	o.ask(t, "/args", &args)
	require.Equal(t, []string{"-port", port, "--", "/models/qwen.gguf", `{"a": {"b": "{x}"}}`, "{env.TEST_MODEL}", "{{ .Prompt }}",
		"GPU-b,GPU-c 2,3 2 2 0.5"}, args)
	o.ask(t, "/env", &env)
	require.Contains(t, env, "WHERE=at "+port+", /models/qwen.gguf")
	require.Contains(t, env, "PATH="+os.Getenv("PATH"), "Caddy's own is inherited")
	var where string
	o.ask(t, "/dir", &where)
	require.Equal(t, dir, where)
}

func TestUtilisation(t *testing.T) {
	for _, c := range []struct {
		total, claim gpu.Bytes
		want         string
	}{
		{0, 0, "0.9"},
		{24 * gpu.GiB, 13 * gpu.GiB, "0.5416"}, // never more than is booked
		{24 * gpu.GiB, 24 * gpu.GiB, "0.99"},
		{24 * gpu.GiB, gpu.MiB, "0.01"},
		{100, 29, "0.29"},
	} {
		o := open(t, settings(onPort("--", "{gpu_broker.utilisation}")))
		o.load(t, lifecycle.Target{GPUs: []lifecycle.Placed{{UUID: "GPU-a", Total: c.total, Claim: c.claim}}})
		var args []string
		o.ask(t, "/args", &args)
		require.Equal(t, c.want, args[3])
	}
}

func TestFC20GPUsAreNamedByUUIDAndInTheOrderOfTheBus(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "/run/systemd/notify")
	placed := lifecycle.Target{GPUs: []lifecycle.Placed{{Index: 1, UUID: "GPU-b"}, {Index: 0, UUID: "GPU-a"}}}
	read := func(config string, target lifecycle.Target) []string {
		o := open(t, config)
		o.load(t, target)
		var env []string
		o.ask(t, "/env", &env)
		return env
	}
	env := read(settings(onPort()), placed)
	require.Contains(t, env, "CUDA_VISIBLE_DEVICES=GPU-b,GPU-a")
	require.Contains(t, env, "CUDA_DEVICE_ORDER=PCI_BUS_ID")
	require.NotContains(t, strings.Join(env, " "), "NOTIFY_SOCKET", "what systemd tells Caddy is not for its children")

	env = read(settings(onPort()), whole)
	require.NotContains(t, strings.Join(env, " "), "CUDA_")
	env = read(settings(onPort()), lifecycle.Target{GPUs: []lifecycle.Placed{{Index: 4}}})
	require.Contains(t, env, "CUDA_VISIBLE_DEVICES=4")

	env = read(settings(onPort(), `"env": {"CUDA_VISIBLE_DEVICES": "7", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}`), placed)
	require.Contains(t, env, "CUDA_VISIBLE_DEVICES=7")
	require.Contains(t, env, "CUDA_DEVICE_ORDER=FASTEST_FIRST")
}

func TestTheFirstPortThatIsFreeIsTaken(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	first := busy.Addr().(*net.TCPAddr).Port
	require.LessOrEqual(t, first, 65535-20, "the system gives ports from below 61000, unless ip_local_port_range says otherwise")
	span := fmt.Sprintf(`"ports": "%d-%d"`, first, first+20)
	a, b := open(t, settings(onPort(), span)), open(t, settings(onPort(), span))
	a.load(t)
	b.load(t)
	require.NotEqual(t, busy.Addr().String(), a.Upstream())
	require.NotEqual(t, a.Upstream(), b.Upstream())
	for _, o := range []*opened{a, b} {
		host, port, err := net.SplitHostPort(o.Upstream())
		require.NoError(t, err)
		require.Equal(t, "127.0.0.1", host)
		n, err := strconv.Atoi(port)
		require.NoError(t, err)
		require.Greater(t, n, first)
		require.LessOrEqual(t, n, first+20)
	}

	one := open(t, settings(onPort(), fmt.Sprintf(`"ports": "%d"`, first)))
	require.ErrorContains(t, one.Load(within(t), whole), "no port of")
	require.NoError(t, busy.Close())
	one.load(t)
	one.unload(t)
	one.load(t) // though connections to it were closed a moment ago
}

func TestAPortThatIsHeldIsNotGivenToAnotherThatDoesNotListenYet(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := free.Addr().(*net.TCPAddr).Port
	require.NoError(t, free.Close())
	span := fmt.Sprintf(`"ports": "%d"`, port)
	slow := open(t, settings([]string{"-port", "0", "--", "{gpu_broker.port}"}, span))
	ctx, cancel := context.WithCancel(t.Context())
	loaded := make(chan error, 1)
	go func() { loaded <- slow.Load(ctx, whole) }()
	require.Eventually(t, slow.Running, patience, time.Millisecond)
	other := open(t, settings(onPort(), span))
	require.ErrorContains(t, other.Load(within(t), whole), "no port of")
	cancel()
	require.Error(t, <-loaded)
	other.load(t)
}

func TestTheConsumersUpstreamIsThePort(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := free.Addr().String()
	require.NoError(t, free.Close())
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	at := func(deps *lifecycle.Deps) { deps.Upstream = address }
	for _, args := range [][]string{onPort(), {"-port", port}} {
		o := open(t, settings(args), at)
		o.load(t)
		require.Equal(t, address, o.Upstream())
		o.unload(t)
	}
}

func TestAStrangerAtTheUpstreamIsNotTakenForTheServer(t *testing.T) {
	stranger, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer stranger.Close()
	o := open(t, settings(onPort()), func(deps *lifecycle.Deps) { deps.Upstream = stranger.Addr().String() })
	require.ErrorContains(t, o.Load(within(t), whole), "another process listens at "+stranger.Addr().String()+" already")
	require.Zero(t, o.State().Starts)
}

func TestTheServerGetsNoneOfCaddysCapabilities(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to give a capability")
	}
	const bindService = 10 // CAP_NET_BIND_SERVICE
	nobody := &syscall.Credential{Uid: 65534, Gid: 65534}
	c := startCaddy(t, settings(onPort()), "", func(cmd *exec.Cmd) {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: nobody, AmbientCaps: []uintptr{bindService}}
	})
	require.NotZero(t, c.server, c.told)
	mine, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.cmd.Process.Pid))
	require.NoError(t, err)
	require.Contains(t, string(mine), "CapAmb:\t0000000000000400", "the Caddy of this test has it, and keeps it")
	var its string
	askAt(t, c.address, "/proc", &its)
	require.Contains(t, its, "CapAmb:\t0000000000000000")
	require.Contains(t, its, "CapEff:\t0000000000000000")
	require.Contains(t, its, "CapPrm:\t0000000000000000")
}

// The listeners that systemd gives Caddy, and the files of C libraries, do not close at an exec by themselves.
func TestTheServerGetsNoneOfCaddysFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "inherited")
	inherited, err := syscall.Open(path, syscall.O_RDWR|syscall.O_CREAT, 0o600) // without O_CLOEXEC
	require.NoError(t, err)
	defer func() { _ = syscall.Close(inherited) }()
	o := open(t, settings(onPort()))
	pid := o.load(t)
	its := filesOf(t, pid)
	require.Equal(t, os.DevNull, its["0"])
	require.Contains(t, its["1"], "pipe:")
	require.Contains(t, its["2"], "pipe:")
	for fd, file := range its {
		if fd > "2" || len(fd) > 1 { // the test's server has opened these itself, to listen and to see its CPUs
			require.Regexp(t, `^(socket:|anon_inode:|/sys/fs/cgroup/)`, file, "file %s of %v", fd, its)
		}
	}
	group := process.GroupOf(pid)
	require.Len(t, group, 2, "it has a guard")
	for _, member := range group {
		require.NotContains(t, slices.Collect(maps.Values(filesOf(t, member))), path)
	}
}

// filesOf returns what the files of a process are, by descriptor.
func filesOf(t *testing.T, pid int) map[string]string {
	t.Helper()
	folder := fmt.Sprintf("/proc/%d/fd/", pid)
	entries, err := os.ReadDir(folder)
	require.NoError(t, err)
	files := map[string]string{}
	for _, e := range entries {
		if files[e.Name()], err = os.Readlink(folder + e.Name()); err != nil {
			delete(files, e.Name()) // it is closed by now
		}
	}
	return files
}

func TestTheServerRunsAsItsUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become somebody else")
	}
	for _, name := range []string{"nobody", "65534"} {
		o := open(t, settings(onPort("-workers", "1"), `"user": "`+name+`"`))
		pid := o.load(t)
		var its string
		var env []string
		o.ask(t, "/proc", &its)
		require.Contains(t, its, "Uid:\t65534\t65534\t65534\t65534")
		require.Contains(t, its, "Gid:\t65534\t65534\t65534\t65534")
		require.Contains(t, its, "Groups:\t65534")
		o.ask(t, "/env", &env)
		require.Contains(t, env, "USER=nobody")
		workers := o.workers(t, 1)
		o.unload(t)
		gone(t, append(workers, pid)...)
	}
	asNobody := func(cmd *exec.Cmd) {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	c := startCaddy(t, settings(onPort(), `"user": "root"`), "", asNobody)
	require.Contains(t, c.told, "run Caddy as root, or remove `user`")
	c = startCaddy(t, settings(onPort(), `"user": "nobody"`), "", asNobody)
	require.NotZero(t, c.server, "it is that user already: "+c.told)
}

func TestAlone_AColdStartTakesAtMost30MillisecondsBeyondTheServersOwn(t *testing.T) {
	const tries = 9
	median := func(of func() time.Duration) time.Duration {
		var took []time.Duration
		for range tries {
			took = append(took, of())
		}
		slices.Sort(took)
		return took[tries/2]
	}
	own := median(func() time.Duration { return ownStart(t) })
	o := open(t, settings(onPort()))
	ours := median(func() time.Duration {
		began := time.Now()
		o.load(t)
		took := time.Since(began)
		o.unload(t)
		return took
	})
	t.Logf("a start takes %s by itself, %s by the driver", own, ours)
	require.Less(t, ours-own, 30*time.Millisecond)
}

// ownStart is how long the server takes by itself until it answers.
func ownStart(t *testing.T) time.Duration {
	t.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := free.Addr().String()
	require.NoError(t, free.Close())
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	cmd := exec.Command(me, "-port", port)
	cmd.Env = append(os.Environ(), roleVariable+"=server")
	began := time.Now()
	require.NoError(t, cmd.Start())
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	for {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			took := time.Since(began)
			conn.Close()
			return took
		}
		require.Less(t, time.Since(began), patience)
		runtime.Gosched()
	}
}
