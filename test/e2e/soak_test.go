package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime/pprof"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

// soak is a storm over one site: dozens of clients, reloads, dying servers, and
// looks at whether all goes right meanwhile.
type soak struct {
	*site
	seed   int64
	hard   context.Context // ends when all must be over
	rec    *record
	log    *expected
	spells *spells
	acts   map[string]func(k *soak, ctx context.Context, dice *rand.Rand)

	base      string       // the Caddyfile with soakSettings
	taken     net.Listener // on the port that a bad configuration wants
	adminTurn sync.RWMutex // a reload starts the admin endpoint anew
	gone      func()       // ends the spell in which guest isn't there; guarded by adminTurn

	mu      sync.Mutex
	confs   []ruling   // that Caddy took, oldest first
	answers []answered // of servers that the broker has started

	pending  sync.WaitGroup // what chaos does in the background
	subjects sync.Map       // that have trouble

	status0   atomic.Pointer[broker.Status] // the last seen
	depth     atomic.Int64                  // the largest
	seen      map[string]modelserver.Stats  // by the watch
	seenEvent map[string]int
	worked    map[string]bool

	scripts string               // the folder of what the broker starts
	killed  map[string]time.Time // when each of these was killed last
}

// ruling is a configuration and when it may have ruled.
type ruling struct {
	settings
	from, to time.Time // to is zero while it rules
}

// slowly stretches a bound on time for a binary with the race detector.
func slowly(d time.Duration) time.Duration {
	if os.Getenv("GPU_BROKER_RACE") != "" {
		return 3 * d
	}
	return d
}

// The soak's times beside that of the storm, which $SOAK gives.
const (
	shortStorm = 10 * time.Second // without $SOAK
	settling   = 100 * time.Second
	grace      = time.Minute
)

func TestSoak(t *testing.T) {
	lasts, seed := shortStorm, time.Now().UnixNano()
	if text := os.Getenv("SOAK"); text != "" {
		d, err := time.ParseDuration(text)
		require.NoError(t, err, "SOAK is how long it storms: 3m, for example")
		lasts = d
	}
	if text := os.Getenv("SOAK_SEED"); text != "" {
		_, err := fmt.Sscan(text, &seed)
		require.NoError(t, err, "SOAK_SEED is a number")
	}
	t.Logf("it storms for %s; SOAK_SEED=%d", lasts, seed)
	warmUp := min(lasts/2, 15*time.Second)
	all := lasts + warmUp + 2*slowly(settling) + grace
	hard, cancel := context.WithTimeout(t.Context(), all)
	defer cancel()

	k := newSoak(t, seed, hard)
	defer k.report(lasts)
	alarm := time.AfterFunc(all+grace, k.hangs)
	defer alarm.Stop()

	k.storm(warmUp, 1)
	first := k.settle()
	t.Logf("quiet before the storm: %s", first)
	k.storm(lasts, 2)
	last := k.settle()
	t.Logf("quiet after the storm:  %s", last)
	k.requestLog()
	k.compare(first, last)
	k.starts()
	k.left()
}

func newSoak(t *testing.T, seed int64, hard context.Context) *soak {
	sky, err := modelserver.Start(modelserver.Options{Name: "sky", SimDir: t.TempDir(), Total: gib(1), VRAM: gib(0.5), Preloaded: true, RunTime: 20 * time.Millisecond})
	require.NoError(t, err)
	t.Cleanup(func() { _ = sky.Close() })
	bin, err := caddytest.Modelserver()
	require.NoError(t, err)
	scripts := t.TempDir()
	require.NoError(t, soakScripts(scripts, bin))
	started, routes := soakStarted(scripts, func() string { return portRange(t) })
	k := &soak{site: start(t, soakLayout(sky.Addr(), started, routes)), scripts: scripts, killed: map[string]time.Time{}, seed: seed, hard: hard, rec: newRecord(), log: newExpected(), spells: &spells{}, acts: soakActs(),
		seen: map[string]modelserver.Stats{}, seenEvent: map[string]int{}, worked: map[string]bool{},
		confs: []ruling{{settings: soakSettings}}}
	k.servers["sky"] = sky
	text, err := os.ReadFile(filepath.Join(k.dir, "Caddyfile"))
	require.NoError(t, err)
	k.base = string(text)
	k.taken, err = net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = k.taken.Close() })
	return k
}

// storm runs clients, chaos and the watch for so long, and returns when all of them have ended.
func (k *soak) storm(lasts time.Duration, stream uint64) {
	ctx, cancel := context.WithTimeout(k.hard, lasts)
	defer cancel()
	watched, unwatch := context.WithCancel(k.hard)
	defer unwatch()
	var clients, rest sync.WaitGroup
	n := 0
	for _, kind := range kindsOfClient {
		for range kind.n {
			n++
			c := k.newSoaker(kind.name, int(stream)<<16+n)
			clients.Go(func() { c.loop(ctx, slowly(kind.pause), kind.act) })
		}
	}
	rest.Go(func() { k.watch(watched) })
	k.chaos(ctx, rand.New(rand.NewPCG(uint64(k.seed), stream)))
	clients.Wait()
	unwatch()
	rest.Wait()
}

// settle ends all trouble, sees that every consumer serves, and looks at the process once it is quiet.
func (k *soak) settle() sample {
	k.mustWrite(simulated.WriteState(k.sim))
	k.reloadTo(soakSettings)
	k.returned()
	probes := map[string]int{}
	for name, srv := range k.servers {
		srv.SetFaults(func(f *modelserver.Faults) { *f = modelserver.Faults{} })
		k.revive(srv)
		if name != "sky" { // which nobody looks after
			probes[name] = srv.Stats().HealthProbes
		}
	}
	k.lookAtServers()
	deadline := time.Now().Add(slowly(settling) * 3 / 4) // a slot cools down for a minute at most
	for {
		why := k.unquiet(probes)
		if why == "" {
			break
		}
		if time.Now().After(deadline) {
			k.rec.violation("the storm is over and %s\n%s", why, k.glance())
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	k.freshRequests()
	k.comesBack()
	k.client.CloseIdleConnections()
	return k.calmest()
}

// unquiet says what goes on yet; probes are how many each server had had when it was started anew.
func (k *soak) unquiet(probes map[string]int) string {
	for name, before := range probes {
		if k.servers[name].Stats().HealthProbes < before+2 {
			return name + " was not probed"
		}
	}
	st, err := k.statusBy(k.hard, k.client)
	if err != nil {
		return err.Error()
	}
	k.status0.Store(&st)
	if st.Scheduler.QueueDepth > 0 || st.Scheduler.InFlight > 0 {
		return fmt.Sprintf("%d requests wait, %d run", st.Scheduler.QueueDepth, st.Scheduler.InFlight)
	}
	for _, g := range st.GPUs { // it is looked at every few seconds only
		if g.Health != "healthy" || st.Degraded != "" || g.Outsiders > 0 {
			return fmt.Sprintf("GPU %d is %s, outsiders hold %d, telemetry: %q", g.Index, g.Health, g.Outsiders, st.Degraded)
		}
	}
	for name, c := range st.Consumers {
		if why := k.unquietConsumer(name, c); why != "" {
			return why
		}
	}
	return ""
}

func (k *soak) unquietConsumer(name string, c broker.Consumer) string {
	for _, s := range c.Slots {
		switch {
		case c.Removed:
			return name + " is not gone yet"
		case c.Health != "healthy" && !c.Cloud:
			return name + " is " + c.Health + ": " + c.Reason
		case s.State == "LOADING" || s.State == "STOPPING" || s.State == "UNKNOWN":
			return name + " is " + s.State
		case s.CoolsUntil != "":
			if at, err := time.Parse(time.RFC3339Nano, s.CoolsUntil); err == nil && at.After(time.Now()) {
				return name + " cools down"
			}
		}
	}
	return ""
}

// freshRequests asks every consumer once: each must serve within its load time, that of the unloads before it, and a bound.
func (k *soak) freshRequests() {
	for i, name := range soakServers {
		c := k.newSoaker("fresh", i)
		began := time.Now()
		switch name {
		case "llm":
			c.chat(k.hard)
		case "image":
			c.image(k.hard)
		case "library":
			c.ofLibrary(k.hard)
		case "child", "fork", "twin":
			c.prove(name, 10)
		default:
			a := c.ask(name, "POST", "/proof", "ms", 10)
			c.send(k.hard, a)
			k.judge(a, exactly(modelserver.ProofBytes(name, a.id, nil, 0)))
		}
		c.http.CloseIdleConnections()
		took, got := time.Since(began), c.last
		if got.err != nil || got.status != 200 {
			k.rec.violation("after the storm %s does not serve: %d %s %v\n%s%s", name, got.status, got.body, got.err, k.glance(), k.lately())
		} else if most := k.loadTime(name) + slowly(3*time.Second); took > most {
			k.rec.violation("after the storm %s took %s, wanted %s at most", name, took, most)
		}
	}
}

func (k *soak) loadTime(name string) time.Duration {
	for _, c := range k.layout.Consumers {
		if c.Name == name {
			return c.LoadTime
		}
	}
	return 0
}

// calmest is the least that the process has over a few seconds: connections and servers of old configurations end meanwhile.
func (k *soak) calmest() sample {
	var least sample
	for range 10 {
		time.Sleep(500 * time.Millisecond)
		s, err := k.sampleProcess()
		if err != nil {
			k.rec.violation("looking at the process: %v", err)
			return least
		}
		if least.goroutines == 0 || s.goroutines < least.goroutines {
			least.goroutines, least.stacks = s.goroutines, s.stacks
		}
		if least.files == 0 || s.files < least.files {
			least.files = s.files
		}
		if least.heap == 0 || s.heap < least.heap {
			least.heap = s.heap
		}
		if least.rss == 0 || s.rss < least.rss {
			least.rss = s.rss
		}
	}
	return least
}

// compare says what has grown.
func (k *soak) compare(first, last sample) {
	if last.goroutines > first.goroutines+20 {
		k.rec.violation("goroutines grew from %d to %d:\n%s", first.goroutines, last.goroutines, grown(first.stacks, last.stacks))
	}
	if last.files > first.files+15 {
		k.rec.violation("open files grew from %d to %d", first.files, last.files)
	}
	if last.heap > first.heap*3/2+gib(8.0/1024) {
		k.rec.violation("the heap grew from %s to %s", first.heap, last.heap)
	}
	// The race detector's own memory grows with what it has seen.
	if os.Getenv("GPU_BROKER_RACE") == "" && last.rss > first.rss*3/2+gib(48.0/1024) {
		k.rec.violation("the resident memory grew from %s to %s", first.rss, last.rss)
	}
}

// rule says that Caddy is about to take a configuration; done, that it has.
func (k *soak) rule(next settings) (done func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.confs = append(k.confs, ruling{settings: next, from: time.Now()})
	last := len(k.confs) - 1
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.confs[last-1].to = time.Now()
	}
}

// ruled are the configurations that ruled at some time since.
func (k *soak) ruled(since time.Time) (out []settings) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.confs {
		if c.to.IsZero() || c.to.After(since) {
			out = append(out, c.settings)
		}
	}
	return out
}

func (k *soak) settings() settings {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.confs[len(k.confs)-1].settings
}

func (k *soak) deepest(depth int) {
	if int64(depth) > k.depth.Load() {
		k.depth.Store(int64(depth))
	}
}

// glance tells the last status, for people.
func (k *soak) glance() string {
	if st := k.status0.Load(); st != nil {
		return brief(*st)
	}
	return "none"
}

// hangs ends a soak that does not end by itself.
func (k *soak) hangs() {
	_ = k.cmd.Process.Kill()
	_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 2)
	panic(fmt.Sprintf("the soak with SOAK_SEED=%d hangs", k.seed))
}

func (k *soak) report(lasts time.Duration) {
	st := broker.Status{}
	if last := k.status0.Load(); last != nil {
		st = *last
	}
	t := st.Scheduler
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "  %-18s %s\n", name, fmt.Sprintf(format, args...))
	}
	line("storm", "%s, SOAK_SEED=%d", lasts, k.seed)
	for _, group := range []string{"outcome", "code", "excused", "kind", "served by", "ladder", "listening", "image work", "websocket", "models", "library holds", "chaos", "bad reload", "fault", "killed", "starts", "comes back", "by hand", "server", "request log", "looks"} {
		line(group, "%s", k.rec.line(group))
	}
	for _, name := range soakServers {
		if codes := k.rec.line("code of " + name); codes != "none" {
			line("  refused "+name, "%s", codes)
		}
	}
	line("scheduler", "jobs %d, loads %d, load failures %d, evictions %d, by hand %d, unload failures %d, refused %d, cancelled %d",
		t.TotalJobs, t.Loads, t.LoadFailures, t.Evictions, t.ManualUnloads, t.UnloadFailures, t.Refused, t.Cancelled)
	line("deepest queue", "%d", k.depth.Load())
	line("wait of the served", "p50 %s, p90 %s, p99 %s", k.rec.percentile(50), k.rec.percentile(90), k.rec.percentile(99))
	k.t.Logf("the soak's figures\n%s", b.String())
	if n, rules := k.rec.violations(); n > 0 {
		k.t.Errorf("SOAK_SEED=%d: %d violations:\n%sthe first:\n%s", k.seed, n, rules, strings.Join(k.rec.first, "\n"))
	}
}
