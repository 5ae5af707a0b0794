package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

// Times of the tests in this file: what a probe can show must be seen within one interval, and a margin for a busy machine.
const (
	crashProbe  = 3 * time.Second // more than the margin: a second probe would come too late
	crashMargin = 2500 * time.Millisecond
)

// process is a model server that is a process of its own: kill -9 ends it without a word.
type process struct {
	s    *site
	name string
	addr string
	args []string
	cmd  *exec.Cmd
}

// withProcess is a site whose consumer p, of 9 GiB, is a process. It runs, and the broker has seen that.
// options are flags of the process; lines are more lines of its consumer block.
func withProcess(t *testing.T, l layout, lines string, options ...string) (*site, *process) {
	t.Helper()
	p := &process{name: "p", addr: freeAddr(t), args: append([]string{"-name=p", "-vram=9GiB"}, options...)}
	manner := manners[""]
	if strings.Contains(strings.Join(options, " "), "-manner=comfyui") {
		manner = manners[modelserver.ComfyUI]
	}
	l.Global += fmt.Sprintf("\nprobe_interval %s\nconsumer p {\nupstream %s\nvram 9GiB\n%s\n%s\n}", crashProbe, p.addr, manner, lines)
	// Without connections that are kept: a request must not find out on an old one that its server is gone.
	l.Routes += "\nhandle_path /p/* {\ngpu_broker p\nreverse_proxy {http.gpu_broker.upstream} {\ntransport http {\nkeepalive off\n}\n}\n}"
	p.s = start(t, l)
	require.Equal(t, "unhealthy", p.s.status().Consumers["p"].Health, "it does not run yet")
	t.Cleanup(p.kill)
	p.start()
	p.seen()
	return p.s, p
}

func (p *process) start() {
	p.s.t.Helper()
	bin, err := caddytest.Modelserver()
	require.NoError(p.s.t, err)
	p.cmd = exec.Command(bin, append([]string{"-addr=" + p.addr, "-sim-dir=" + p.s.sim}, p.args...)...)
	p.cmd.Stderr = os.Stderr
	require.NoError(p.s.t, p.cmd.Start())
}

// kill ends it as kill -9 does, and returns when it is gone.
func (p *process) kill() {
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait() // it says that it was killed
	p.cmd = nil
}

// seen waits until the broker has seen by itself that the process is there.
func (p *process) seen() {
	p.s.t.Helper()
	p.s.until("p is seen", func() bool { return p.s.status().Consumers["p"].Health == "healthy" })
}

// stats are those of the life that runs now.
func (p *process) stats() modelserver.Stats {
	p.s.t.Helper()
	return statsAt(p.s.t, p.addr)
}

// statsAt are those of the model server at an address.
func statsAt(t testing.TB, addr string) modelserver.Stats {
	t.Helper()
	resp, err := http.Get("http://" + addr + "/control")
	require.NoError(t, err)
	defer resp.Body.Close()
	var r modelserver.Report
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&r))
	return r.Stats
}

// goneWithin checks that all is right about p, which was killed at that time, within one probe interval.
func (p *process) goneWithin(killed time.Time) {
	p.s.t.Helper()
	p.s.until("all is right about p", func() bool {
		c := p.s.status().Consumers["p"]
		return c.Health == "unhealthy" && c.Slots[0].State == "IDLE" && c.Slots[0].Booking == 0 && !c.Loaded && c.ResidentMiB == 0 && c.Active == 0 && c.Waiting == 0
	})
	require.Less(p.s.t, time.Since(killed), crashProbe+crashMargin)
	require.Zero(p.s.t, p.s.status().GPUs[0].Booked-p.s.bookedOfOthers(), "its booking is free")
}

func (s *site) bookedOfOthers() (sum int64) {
	for name, c := range s.status().Consumers {
		if name != "p" {
			sum += c.Slots[0].Booking
		}
	}
	return sum
}

// honest checks that a request which could not be served was told so, and when to come back.
func (s *site) honest(a answer) {
	s.t.Helper()
	require.NoError(s.t, a.err)
	require.Equal(s.t, 503, a.status, "%s", a.body)
	require.Contains(s.t, []string{"unhealthy", "load_failed"}, s.refusal(a).Code)
}

// comesBack starts p again: that is seen without any request, and it is served as before.
func (p *process) comesBack() {
	p.s.t.Helper()
	p.start()
	p.s.until("p listens", func() bool {
		resp, err := http.Get("http://" + p.addr + "/control")
		if err == nil {
			_ = resp.Body.Close()
		}
		return err == nil
	})
	began := time.Now()
	p.seen()
	require.Less(p.s.t, time.Since(began), crashProbe+crashMargin)
	p.s.serve("p")
	st := p.stats()
	require.Equal(p.s.t, 1, st.LoadsStarted)
	require.Equal(p.s.t, 1, st.Worked)
}

func TestServerKilledWhileIdleIsSeenAndItsMemoryIsFree(t *testing.T) {
	t.Parallel()
	for _, processes := range []string{"on", "off"} {
		t.Run("memory told by process "+processes, func(t *testing.T) {
			t.Parallel()
			s, p := withProcess(t, layout{GPU: "processes " + processes, Consumers: []consumer{plainModel("other", 9)}}, "")
			s.serve("p")
			p.kill()
			killed := time.Now()
			p.goneWithin(killed)
			s.serve("other")
			require.Zero(t, s.status().Scheduler.Evictions, "its memory was free: nobody had to make way")
			s.honest(s.post("/p/synthesize", "nobody there"))
			p.comesBack()
			require.EqualValues(t, 1, s.status().Scheduler.Evictions)
			s.noOOM()
		})
	}
}

func TestRequestThatComesBeforeTheDeathIsNoticedIsRefusedHonestly(t *testing.T) {
	t.Parallel()
	s, p := withProcess(t, layout{Consumers: []consumer{plainModel("other", 9)}}, "")
	s.serve("p")
	p.kill()
	killed := time.Now()
	s.honest(s.post("/p/synthesize", "nobody there"))
	p.goneWithin(killed)
	s.serve("other")
	p.comesBack()
}

func TestServerKilledWhileItLoadsIsSeenAndWhoWaitsIsTold(t *testing.T) {
	t.Parallel()
	s, p := withProcess(t, layout{Consumers: []consumer{plainModel("other", 9)}}, "", "-load=25s", "-load-steps=5")
	var waits []<-chan answer
	for range 3 {
		waits = append(waits, s.send("POST", "/p/synthesize", "x"))
	}
	s.waitState("p", "LOADING")
	s.waitQueued("p", 3)
	other := s.send("POST", "/other/synthesize", "x")
	s.waitQueued("other", 1)
	p.kill()
	killed := time.Now()
	for _, ch := range waits {
		s.honest(s.await(ch))
	}
	require.Less(t, time.Since(killed), crashProbe+crashMargin)
	p.goneWithin(killed)
	s.ok(other)
	require.EqualValues(t, 1, s.status().Scheduler.LoadFailures)
	s.honest(s.post("/p/synthesize", "nobody there"))
	p.args = append(p.args, "-load=20ms")
	p.comesBack()
}

func TestServerKilledWhileItWorksGivesItsRequestOneAnswerAndWhoWaitsAnother(t *testing.T) {
	t.Parallel()
	s, p := withProcess(t, layout{Consumers: []consumer{plainModel("other", 9)}}, "")
	s.serve("p")
	runs := s.send("POST", "/p/synthesize?ms=60000", "x")
	s.until("p works", func() bool { return p.stats().Working == 1 })
	waits := s.send("POST", "/p/synthesize", "x")
	s.waitQueued("p", 1)
	other := s.send("POST", "/other/synthesize", "x")
	s.waitQueued("other", 1)
	p.kill()
	killed := time.Now()
	one := s.await(runs)
	require.NoError(t, one.err)
	require.Equal(t, 502, one.status)
	require.Equal(t, "server_died", s.refusal(one).Code)
	if two := s.await(waits); two.status == 502 { // the system took its connection while the process was being ended
		require.Equal(t, "server_died", s.refusal(two).Code)
	} else {
		s.honest(two)
	}
	require.Less(t, time.Since(killed), crashProbe+crashMargin)
	p.goneWithin(killed)
	s.ok(other)
	s.nothingRuns()
	p.comesBack()
}

func TestServerKilledInTheMiddleOfAStreamCutsItOnceAndFreesItsPlace(t *testing.T) {
	t.Parallel()
	s, p := withProcess(t, layout{Consumers: []consumer{plainModel("other", 9)}}, "")
	stream := s.open("GET", "/p/stream?events=100000&ms=10")
	_, err := io.ReadFull(stream.Body, make([]byte, 100))
	require.NoError(t, err)
	other := s.send("POST", "/other/synthesize", "x")
	s.waitQueued("other", 1)
	p.kill()
	killed := time.Now()
	_, err = io.Copy(io.Discard, stream.Body)
	require.Error(t, err, "the client must see that its answer isn't whole")
	p.goneWithin(killed)
	s.ok(other)
	require.EqualValues(t, 2, s.status().Scheduler.TotalJobs)
	s.nothingRuns()
	p.comesBack()
}

func TestServerKilledWhileItUnloadsMakesWayAtOnce(t *testing.T) {
	t.Parallel()
	s, p := withProcess(t, layout{Global: "unload_timeout 60s\nevict_wait 60s", Consumers: []consumer{plainModel("other", 9)}}, "", "-unload=60s")
	s.serve("p")
	other := s.send("POST", "/other/synthesize", "x")
	s.waitState("p", "STOPPING")
	s.until("p unloads", func() bool { return p.stats().UnloadCalls == 1 })
	p.kill()
	killed := time.Now()
	s.ok(other)
	require.Less(t, time.Since(killed), crashProbe+crashMargin)
	p.goneWithin(killed)
	s.honest(s.post("/p/synthesize", "nobody there"))
	p.args = append(p.args, "-unload=10ms")
	p.comesBack()
	require.Equal(t, 1, s.servers["other"].Stats().Unloads)
	s.noOOM()
}

func TestAsyncServerKilledWithWorkAcceptedGivesItsPlaceBack(t *testing.T) {
	t.Parallel()
	s, p := withProcess(t, layout{Consumers: []consumer{plainModel("other", 9)}}, "", "-manner=comfyui", "-run=60s")
	require.Equal(t, 200, s.post("/p/prompt", prompt).status)
	require.Equal(t, 200, s.post("/p/prompt", prompt).status)
	s.until("p works", func() bool { return p.stats().Working == 1 })
	other := s.send("POST", "/other/synthesize", "x")
	s.waitQueued("other", 1)
	require.Equal(t, 2, s.status().Consumers["p"].Active)
	p.kill()
	killed := time.Now()
	s.ok(other)
	p.goneWithin(killed)
	s.honest(s.post("/p/prompt", prompt))
	p.args = append(p.args, "-run=10ms")
	p.start()
	p.seen()
	require.Equal(t, 200, s.post("/p/prompt", prompt).status)
	s.idle("p")
	require.Equal(t, 1, p.stats().Worked)
	s.nothingRuns()
}

func TestServerThatDiedAndCameBackBetweenTwoProbesIsLoadedAnew(t *testing.T) {
	t.Parallel()
	s, p := withProcess(t, layout{}, "")
	s.serve("p")
	p.kill()
	killed := time.Now()
	p.start()
	s.until("p is seen empty", func() bool {
		c := s.status().Consumers["p"]
		return c.Health == "healthy" && c.Slots[0].State == "IDLE" && c.Slots[0].Booking == 0
	})
	require.Less(t, time.Since(killed), crashProbe+crashMargin)
	s.serve("p")
	require.Equal(t, 1, p.stats().Loads)
}

func TestServerThatKeepsDyingInItsLoadIsTriedLessAndLess(t *testing.T) {
	t.Parallel()
	s, p := withProcess(t, layout{}, "", `-faults={"die_on_load":true}`)
	for range 3 {
		a := s.post("/p/synthesize", "x")
		s.honest(a)
		require.Equal(t, "load_failed", s.refusal(a).Code)
		p.kill() // it is dead by itself: this is for its remains
		p.start()
		p.seen()
	}
	require.EqualValues(t, 3, s.status().Scheduler.LoadFailures)
	loads, failed := s.decisions("load"), s.decisions("load_failed")
	require.Len(t, loads, 3)
	require.Len(t, failed, 3)
	for i, coolDown := range []time.Duration{time.Second, 2 * time.Second} {
		require.GreaterOrEqual(t, loads[i+1].At.Sub(failed[i].At), coolDown)
	}
	p.kill()
	p.args[len(p.args)-1] = "-faults={}"
	p.comesBack()
}

// hang halts the process: it listens, and never answers. The returned function lets it go on.
func (p *process) hang() (wake func()) {
	p.s.t.Helper()
	require.NoError(p.s.t, p.cmd.Process.Signal(syscall.SIGSTOP))
	var state syscall.WaitStatus
	_, err := syscall.Wait4(p.cmd.Process.Pid, &state, syscall.WUNTRACED, nil) // the signal takes a moment
	require.NoError(p.s.t, err)
	require.True(p.s.t, state.Stopped())
	return func() { _ = p.cmd.Process.Signal(syscall.SIGCONT) }
}

// small is a consumer that needs no lock.
func small() consumer {
	c := plainModel("small", 1, "lock none")
	c.Route = "bypass GET /audio/*"
	return c
}

func TestFC13_ServerThatHangsAtItsWorkHoldsUpOthersForMaxRunOnly(t *testing.T) {
	t.Parallel()
	const maxRun = 2 * time.Second
	s, p := withProcess(t, layout{Global: "max_run " + maxRun.String() + "\nprobe_timeout 1s", Consumers: []consumer{small(), plainModel("other", 2)}}, "")
	for _, name := range []string{"p", "small", "other"} {
		s.serve(name)
	}
	wake := p.hang()
	defer wake()
	began := time.Now()
	hangs := s.send("POST", "/p/synthesize", "x")
	s.until("p's job runs", func() bool { return s.status().Consumers["p"].Active == 1 })
	other := s.send("POST", "/other/synthesize", "x")
	s.waitQueued("other", 1)
	for range 20 {
		require.Less(t, s.serve("small").took, maxRun/2, "it needs no lock")
	}
	require.Equal(t, 200, s.get("/small/audio/big?bytes=1000").status)
	require.Equal(t, 200, s.adminDo("GET", "/gpu_broker/status", "", "").status)
	require.Zero(t, len(hangs), "all this while it hangs")
	require.Zero(t, len(other))

	a := s.await(hangs)
	require.Equal(t, 504, a.status, "%s", a.body)
	require.Equal(t, "budget_exceeded", s.refusal(a).Code)
	require.GreaterOrEqual(t, a.took, maxRun-50*time.Millisecond)
	s.ok(other)
	require.Less(t, time.Since(began), maxRun+5*time.Second)
	wake()
	p.seen()
	s.serve("p")
	s.nothingRuns()
	require.Zero(t, s.unloadCalls())
}

func TestFC13_ServerThatHangsWhileIdleIsUnhealthyAndComesBackByItself(t *testing.T) {
	t.Parallel()
	s, p := withProcess(t, layout{Global: "probe_timeout 400ms", Consumers: []consumer{plainModel("other", 2)}}, "")
	s.serve("p")
	s.serve("other")
	wake := p.hang()
	defer wake()
	began := time.Now()
	s.until("it is unhealthy", func() bool { return s.status().Consumers["p"].Health == "unhealthy" })
	require.Less(t, time.Since(began), 3*(400*time.Millisecond+crashProbe)+crashMargin, "three time-outs in a row")
	s.honest(s.post("/p/synthesize", "x"))
	s.serve("other")
	wake()
	began = time.Now()
	p.seen()
	require.Less(t, time.Since(began), crashProbe+400*time.Millisecond+crashMargin)
	s.serve("p")
	require.Equal(t, 1, p.stats().Loads, "it had kept its model")
}

func TestFC13_ServerThatHangsAtItsLoadHoldsUpOtherLoadsUntilItsTimeOutAndWarmOnesNever(t *testing.T) {
	t.Parallel()
	const timeout = 3 * time.Second
	s, p := withProcess(t, layout{Consumers: []consumer{plainModel("warm", 2), plainModel("cold", 2)}}, "load_timeout "+timeout.String(), `-faults={"hang_load":true}`)
	s.serve("warm")
	began := time.Now()
	hangs := s.send("POST", "/p/synthesize", "x")
	s.waitState("p", "LOADING")
	cold := s.send("POST", "/cold/synthesize", "x")
	s.waitQueued("cold", 1)
	for range 20 {
		s.serve("warm")
	}
	require.Zero(t, len(hangs), "all this while it hangs")
	require.Zero(t, len(cold))
	a := s.await(hangs)
	s.honest(a)
	require.Equal(t, "load_failed", s.refusal(a).Code)
	s.ok(cold)
	require.Less(t, time.Since(began), timeout+5*time.Second)
	p.kill()
	p.args[len(p.args)-1] = "-faults={}"
	p.comesBack()
}

func TestFC13_ServerThatHangsAtItsUnloadHoldsUpNobodyWhoIsWarm(t *testing.T) {
	t.Parallel()
	s, p := withProcess(t, layout{Global: "unload_timeout 3s\nmax_evictions 1", Consumers: []consumer{plainModel("warm", 2), plainModel("cold", 9)}}, "", `-faults={"hang_unload":true}`)
	s.serve("p")
	s.serve("warm")
	cold := s.send("POST", "/cold/synthesize", "x")
	s.waitState("p", "STOPPING")
	for range 20 {
		s.serve("warm")
	}
	require.Equal(t, "STOPPING", s.state("p"), "all this while it hangs")
	require.Zero(t, len(cold))
	p.kill() // as its owner would, in the end
	s.ok(cold)
	s.noOOM()
}
