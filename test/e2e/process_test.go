package e2e

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

// started is a consumer whose server the broker starts: the pretending one, loaded when it listens.
type started struct {
	name  string
	vram  string
	args  string // more of its command
	wrap  string // a program before it, with its arguments; %s stands for the command as one word
	block string // lines of the block of process
	lines string // of the consumer
	route string
}

// supervised is a site with such consumers, and with others.
func supervised(t *testing.T, global string, others []consumer, all ...started) *site {
	t.Helper()
	bin, err := caddytest.Modelserver()
	require.NoError(t, err)
	var consumers, routes strings.Builder
	for _, p := range all {
		command := fmt.Sprintf("%s -name %s -preloaded=true -vram %s -addr 127.0.0.1:{gpu_broker.port} -sim-dir {$SIM_DIR} %s", bin, p.name, p.vram, p.args)
		if p.wrap != "" {
			command = strings.ReplaceAll(p.wrap, "%s", command)
		}
		fmt.Fprintf(&consumers, "consumer %s {\nvram %s\nhealth /health\nprocess %s {\nports %s\ngrace 2s\n%s\n}\n%s\n}\n", p.name, p.vram, command, portRange(t), p.block, p.lines)
		fmt.Fprintf(&routes, "handle_path /%s/* {\ngpu_broker %s {\n%s\n}\nreverse_proxy {http.gpu_broker.upstream}\n}\n", p.name, p.name, p.route)
	}
	s := start(t, layout{Total: "12GiB", Global: global + "\n" + consumers.String(), Consumers: others, Routes: routes.String()})
	return s
}

func (s *site) process(name string) lifecycle.State {
	s.t.Helper()
	state := s.status().Consumers[name].Process
	require.NotNil(s.t, state, name)
	return *state
}

// alive lists the processes whose command line holds a text, which stands for the site's own servers.
func alive(t testing.TB, text string) (pids []int) {
	t.Helper()
	dirs, err := os.ReadDir("/proc")
	require.NoError(t, err)
	for _, d := range dirs {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		line, err := os.ReadFile("/proc/" + d.Name() + "/cmdline")
		if err != nil || !strings.Contains(string(line), text) {
			continue
		}
		if stat, err := os.ReadFile("/proc/" + d.Name() + "/stat"); err == nil && strings.Contains(string(stat), ") Z ") {
			continue // dead, and not yet waited for
		}
		pids = append(pids, pid)
	}
	return pids
}

func (s *site) children() []int {
	return slices.DeleteFunc(alive(s.t, s.sim), func(pid int) bool { return pid == s.cmd.Process.Pid || pid == os.Getpid() })
}

func TestProcessesAreStartedOnDemandAndStoppedForOthers(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "7GiB"}, started{name: "two", vram: "8GiB", lines: "start_on /ui"})
	require.Empty(t, s.children(), "nobody has asked yet")
	a := s.get("/one/health")
	require.Equal(t, 200, a.status, "its health is GPU work to a consumer without gpu_routes")
	one := s.process("one")
	require.True(t, one.Running)
	require.Equal(t, 1, one.Starts)
	s.serve("one")
	require.Equal(t, one.PID, s.process("one").PID, "it is warm")

	s.serve("two")
	require.False(t, s.process("one").Running)
	require.True(t, s.process("two").Running)
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
	s.serve("one")
	require.Equal(t, 2, s.process("one").Starts)
	require.NotEqual(t, one.PID, s.process("one").PID)
	require.NotEmpty(t, s.process("one").Output, "it says where it listens")
	s.halt()
	require.Empty(t, s.children(), "Caddy has stopped what it had started")
}

func TestRequestsThatNeedNoGPUDoNotStartAServer(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "7GiB", lines: "gpu_routes POST /synthesize\nstart_on GET /health"})
	a := s.get("/one/other")
	require.Equal(t, 503, a.status)
	require.Equal(t, "not_running", a.code())
	require.Empty(t, s.children())
	require.Equal(t, 200, s.get("/one/health").status, "it is in start_on")
	require.True(t, s.process("one").Running)
	require.Equal(t, 200, s.get("/one/other").status, "it runs now, and answers itself")
}

// forking is a shell that starts the server and a worker, both its children.
const forking = "/bin/sh -c \"sleep 1000000 & %s & wait\""

func TestKilledCaddyLeavesNoChild(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "7GiB"}, started{name: "two", vram: "3GiB", wrap: forking})
	s.serve("one")
	s.serve("two")
	two := s.process("two").PID
	group := groupOf(t, two)
	require.GreaterOrEqual(t, len(group), 3, "a shell, a worker and the server")
	s.kill()
	s.until("no child is left", func() bool { return len(s.children()) == 0 && len(groupOf(t, two)) == 0 })

	s.again()
	s.serve("one")
	s.serve("two")
}

// escaping is a shell that starts a worker which leaves its group and holds 4 GiB of the GPU, and becomes the server.
const escaping = "/bin/sh -c \"setsid sleep 1000000 & echo 0 4GiB > {$SIM_DIR}/$!; exec %s\""

// The next start reaps what the kernel did not end with Caddy, and counts its memory as free once it is.
func TestFC28_TheMemoryOfAKilledCaddysWorkersIsFreeAtTheNextStart(t *testing.T) {
	t.Parallel()
	for name, ask := range map[string]func(s *site){
		"its own server is asked for": func(s *site) { s.serve("one") },
		"another is asked for":        func(s *site) { s.serve("two") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := supervised(t, "", nil, started{name: "one", vram: "11GiB", args: "-vram 7GiB", wrap: escaping}, started{name: "two", vram: "10GiB"})
			s.serve("one")
			one := s.process("one").PID
			s.until("the server and its worker hold 11 of 12 GiB", func() bool { return s.status().GPUs[0].Free == int64(gib(1)) })
			worker := workersHolding(t, s.sim, one)
			require.Len(t, worker, 1)
			s.kill()
			s.until("the server is gone", func() bool { return len(groupOf(t, one)) == 0 })
			require.Equal(t, worker, workersHolding(t, s.sim, one), "its worker has survived Caddy")
			require.NoError(t, syscall.Kill(worker[0], 0))

			s.again()
			ask(s)
			require.Zero(t, s.metric(`errors_total{code="vram_exhausted",consumer="one"}`)+s.metric(`errors_total{code="vram_exhausted",consumer="two"}`))
			s.until("nobody else holds any", func() bool { return s.status().GPUs[0].Outsiders == 0 })
			require.NotContains(t, workersHolding(t, s.sim, 0), worker[0], "it is reaped")
		})
	}
}

// workersHolding lists the processes that hold memory of the simulated GPU, but for one.
func workersHolding(t *testing.T, dir string, but int) (pids []int) {
	t.Helper()
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, f := range files {
		number, _, _ := strings.Cut(f.Name(), "-")
		if pid, err := strconv.Atoi(number); err == nil && pid != but {
			pids = append(pids, pid)
		}
	}
	return pids
}

// groupOf lists the live processes of a process group.
func groupOf(t testing.TB, group int) (pids []int) {
	t.Helper()
	dirs, err := os.ReadDir("/proc")
	require.NoError(t, err)
	for _, d := range dirs {
		stat, err := os.ReadFile("/proc/" + d.Name() + "/stat")
		if err != nil {
			continue
		}
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if len(fields) > 2 && fields[0] != "Z" && fields[2] == strconv.Itoa(group) {
			pid, _ := strconv.Atoi(d.Name())
			pids = append(pids, pid)
		}
	}
	return pids
}

func TestFC29ServersThatForkAreStoppedAsAGroup(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "7GiB", wrap: forking}, started{name: "two", vram: "8GiB"})
	s.serve("one")
	one := s.process("one").PID
	require.GreaterOrEqual(t, len(groupOf(t, one)), 3)
	s.serve("two")
	require.Empty(t, groupOf(t, one))
}

func TestAlone_DeadServerIsNoticedAtOnceAndStartedForTheNextRequest(t *testing.T) {
	s := supervised(t, "probe_interval 1h", nil, started{name: "one", vram: "7GiB"})
	s.serve("one")
	pid := s.process("one").PID
	killed := time.Now()
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	s.until("its booking is free", func() bool { return s.status().GPUs[0].Booked == 0 })
	require.Less(t, time.Since(killed), 200*time.Millisecond+50*time.Millisecond) // the way of the question included
	s.serve("one")
	require.NotEqual(t, pid, s.process("one").PID)
	require.Contains(t, s.process("one").LastExit, "killed")
}

func TestServerThatDiesWithWorkIsGoneOnceAndTheNextIsServed(t *testing.T) {
	t.Parallel()
	s := supervised(t, "probe_interval 1h", nil, started{name: "one", vram: "7GiB", args: "-run 30s"})
	works := s.send("POST", "/one/synthesize", "x")
	s.until("it works", func() bool {
		return s.status().Consumers["one"].Active == 1 && statsAt(t, s.process("one").Address).Working == 1 // before that, the request goes to the next one
	})
	require.NoError(t, syscall.Kill(s.process("one").PID, syscall.SIGKILL))
	a := s.await(works)
	require.Equal(t, 502, a.status, "%s", a.body)
	require.Equal(t, "server_died", a.code())
	require.Equal(t, 200, s.post("/one/synthesize?ms=1", "x").status)
	require.Equal(t, 2, s.process("one").Starts)
}

func TestReloadsDoNotTouchAServerThatIsBeingLoaded(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "7GiB", args: "-faults `{\"hang_health\":true}`"})
	waits := s.send("POST", "/one/synthesize", "x")
	s.until("it is being loaded", func() bool { return s.slotOf("one") == "LOADING" && len(s.children()) == 1 })
	pid := s.children()[0]
	for i := range 10 {
		s.reloaded(func(text string) string { return text + fmt.Sprintf("# edit %d\n", i) })
		require.Equal(t, "LOADING", s.slotOf("one"), "it loads yet, at reload %d", i)
	}
	resp, err := http.Post("http://"+s.process("one").Address+"/control", "application/json", strings.NewReader(`{"faults":{"hang_health":false}}`))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	s.ok(waits)
	require.Equal(t, pid, s.process("one").PID)
	require.Equal(t, 1, s.process("one").Starts)
	s.reloaded(func(text string) string {
		return strings.NewReplacer("\nvram 7GiB\n", "\nvram 8GiB\nunload_timeout 9s\n", "gpu simulated", "probe_timeout 3s\ngpu simulated").Replace(text)
	})
	s.serve("one")
	require.Equal(t, pid, s.process("one").PID, "its command has not changed")
	require.EqualValues(t, gib(8), s.status().Consumers["one"].Slots[0].Claim)
}

func (s *site) slotOf(name string) string { return s.status().Consumers[name].Slots[0].State }

func TestFC16ChangedCommandRestartsItsServerAfterItsDrain(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "7GiB"}, started{name: "two", vram: "2GiB"})
	s.serve("one")
	s.serve("two")
	one, two := s.process("one").PID, s.process("two").PID
	runs := s.send("POST", "/one/synthesize?ms=700", "x")
	s.until("it works", func() bool { return s.status().Consumers["one"].Active == 1 })
	s.reloaded(func(text string) string { return strings.Replace(text, "-name one", "-quiet=true -name one", 1) })
	next := s.send("POST", "/one/synthesize", "y")
	require.Equal(t, one, s.process("one").PID, "what runs there ends first")
	s.ok(runs)
	s.ok(next)
	require.NotEqual(t, one, s.process("one").PID)
	require.Equal(t, two, s.process("two").PID, "its command has not changed")
	require.Len(t, s.children(), 2)

	s.reloaded(func(text string) string { // nobody asks for it: it is stopped all the same, since it is not what is configured
		return strings.Replace(text, "-name two", "-quiet=true -name two", 1)
	})
	s.until("the old one is stopped", func() bool { return len(groupOf(t, two)) == 0 })
	s.serve("two")
}

func TestRemovedServerIsStopped(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "7GiB"})
	s.serve("one")
	s.reloaded(func(text string) string {
		before, _, _ := strings.Cut(text, "consumer one {")
		_, rest, _ := strings.Cut(text, "handle /gpu/*")
		return before + "}\n}\nhttp://localhost" + s.url[strings.LastIndexByte(s.url, ':'):] + " {\nhandle /gpu/*" + rest
	})
	s.until("it is gone", func() bool { return len(s.children()) == 0 })
}

func TestServerThatCannotStartSaysWhyAndBacksOff(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "7GiB", wrap: `/bin/sh -c "echo no such model >&2; exit 3; %s"`})
	for i := range 3 {
		a := s.post("/one/synthesize", "x")
		require.Equal(t, 503, a.status, "%s", a.body)
		require.Equal(t, "load_failed", a.code())
		require.Contains(t, string(a.body), "exit status 3")
		require.Contains(t, string(a.body), "no such model")
		require.Equal(t, strconv.Itoa(1<<i), a.header.Get("Retry-After"), "it backs off")
		require.NotEmpty(t, s.status().Consumers["one"].Slots[0].CoolsUntil)
	}
	require.Empty(t, s.children())
}

func TestServerThatKeepsDyingBacksOff(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "7GiB", args: "-faults `{\"die_on_request\":true}`"})
	require.Equal(t, 502, s.post("/one/synthesize", "x").status)
	require.Equal(t, 502, s.post("/one/synthesize", "x").status, "it is started again at once after the first time")
	s.until("its death is known", func() bool { return s.slotOf("one") == "IDLE" })
	require.NotEmpty(t, s.status().Consumers["one"].Slots[0].CoolsUntil)
	began := time.Now()
	require.Equal(t, 502, s.post("/one/synthesize", "x").status)
	require.Greater(t, time.Since(began), 500*time.Millisecond, "it cools down")
	var said bool
	for _, d := range s.decisions("gone") {
		said = said || strings.Contains(d.Reason, "died")
	}
	require.True(t, said)
}

func TestServerThatHasFailedIsStartedAgainByItself(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "7GiB", block: "restart on_failure"})
	s.serve("one")
	require.NoError(t, syscall.Kill(s.process("one").PID, syscall.SIGKILL))
	s.until("it runs again", func() bool { return s.process("one").Starts == 2 && s.slotOf("one") == "READY" })
}

func TestServerThatHasEndedWellIsStartedByTheNextRequestAlone(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "7GiB", block: "restart on_failure"})
	s.serve("one")
	require.NoError(t, syscall.Kill(s.process("one").PID, syscall.SIGTERM))
	s.until("it has ended", func() bool { return len(s.decisions("gone")) == 1 }) // else it would be loading by now
	require.Equal(t, "exit status 0", strings.Split(s.process("one").LastExit, ":")[0])
	require.Equal(t, "IDLE", s.slotOf("one"))
	require.Equal(t, 1, s.process("one").Starts)
	s.serve("one")
	require.Equal(t, 2, s.process("one").Starts)
}

func TestServerDeafToItsSignalIsKilledAfterItsGrace(t *testing.T) {
	t.Parallel()
	s := supervised(t, "", nil, started{name: "one", vram: "7GiB", wrap: `/bin/sh -c "trap '' TERM; sleep 1000000 & %s & while :; do wait; done"`, block: ""},
		started{name: "two", vram: "8GiB"})
	s.serve("one")
	one := s.process("one").PID
	began := time.Now()
	s.serve("two")
	require.GreaterOrEqual(t, time.Since(began), 2*time.Second, "its grace")
	require.Empty(t, groupOf(t, one))
}

func TestServerThatStopsAnsweringIsStoppedAndStarted(t *testing.T) {
	t.Parallel()
	s := supervised(t, "probe_interval 100ms\nprobe_timeout 100ms", nil, started{name: "one", vram: "7GiB"})
	s.serve("one")
	pid := s.process("one").PID
	resp, err := http.Post("http://"+s.process("one").Address+"/control", "application/json", strings.NewReader(`{"faults":{"hang_health":true}}`))
	require.NoError(t, err)
	_ = resp.Body.Close()
	s.until("it was stopped", func() bool { return len(groupOf(t, pid)) == 0 })
	s.serve("one")
}

// TestAlone_ColdStart bounds what the broker adds to a server's own start (D4).
func TestAlone_ColdStart(t *testing.T) {
	const tries, bound = 11, 30 * time.Millisecond
	bin, err := caddytest.Modelserver()
	require.NoError(t, err)
	s := supervised(t, "", nil, started{name: "one", vram: "1GiB"})
	var own, all []time.Duration
	for range tries {
		own = append(own, ownStart(t, bin, s.sim))
		began := time.Now()
		s.serve("one")
		all = append(all, time.Since(began))
		s.doByHand("consumers/one/unload")
	}
	slices.Sort(own)
	slices.Sort(all)
	t.Logf("cold start: %s to the answer, the server's own start %s (medians of %d)", all[tries/2], own[tries/2], tries)
	require.LessOrEqual(t, all[tries/2], own[tries/2]+bound)
}

// ownStart is how long the server takes from its start to its first answer, with nothing in between.
func ownStart(t *testing.T, bin, sim string) time.Duration {
	t.Helper()
	addr := freeAddr(t)
	began := time.Now()
	cmd := exec.Command(bin, "-name", "alone", "-preloaded=true", "-vram", "1GiB", "-addr", addr, "-sim-dir", sim)
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	for {
		resp, err := http.Post("http://"+addr+"/synthesize", "", strings.NewReader("hello"))
		if err == nil {
			_ = resp.Body.Close()
			return time.Since(began)
		}
		require.Less(t, time.Since(began), patience)
		time.Sleep(time.Millisecond)
	}
}
