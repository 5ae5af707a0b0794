package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// soakProcesses are the consumers whose servers the broker starts: one is
// started again when it has died, and is a process with a worker; the other is
// a shell, whose children are the server and a worker. twin shares the first.
var soakProcesses = []string{"child", "fork"}

// soakRestarts is how often in a row child is started again by itself.
const soakRestarts = 3

// serverOf is the consumer whose server a consumer has.
func serverOf(consumer string) string {
	if consumer == "twin" {
		return "child"
	}
	return consumer
}

func isProcess(consumer string) bool { return slices.Contains(soakProcesses, serverOf(consumer)) }

// splitServer takes the name apart that a started server gives itself: whose it is, its leader's PID, and the edition of its command.
func splitServer(name string) (consumer string, pid, edition int) {
	parts := strings.Split(name, ".")
	if len(parts) == 3 {
		pid, _ = strconv.Atoi(parts[1])
		edition, _ = strconv.Atoi(parts[2])
	}
	return parts[0], pid, edition
}

// soakScripts writes what the broker starts. Its arguments are the edition, the port and the folder of the simulated GPU.
func soakScripts(dir, bin string) error {
	const begin = `if [ -e "$0.slow" ]; then sleep 1; fi
if [ "$1" = bad ]; then echo "no such model" >&2; exit 3; fi
sleep 1000000 &
`
	server := func(name, vram string) string {
		return fmt.Sprintf("%s -name %s.$$.$1 -preloaded=true -vram %s -total 24GiB -addr 127.0.0.1:$2 -sim-dir $3 -load 100ms -load-steps 2 -run 20ms", bin, name, vram)
	}
	for name, text := range map[string]string{
		"child": begin + "exec " + server("child", "3584MiB") + "\n",
		"fork":  begin + server("fork", "2GiB") + " &\nwait\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name+".sh"), []byte(text), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// soakStarted are their lines, and those of the consumer that shares one.
func soakStarted(scripts string, ports func() string) (global, routes string) {
	block := func(name, vram, restart string) string {
		return fmt.Sprintf(`consumer %s {
vram %s
health /health
concurrency 2
load_timeout 10s
bypass GET /audio/*
process /bin/sh %s/%s.sh 0 {gpu_broker.port} {$SIM_DIR} {
ports %s
grace 1s
%s
}
}
`, name, vram, scripts, name, ports(), restart)
	}
	global = block("child", "3GiB", fmt.Sprintf("restart on_failure\nmax_restarts %d", soakRestarts)) + block("fork", "2GiB", "") + "consumer twin {\nshares child\nvram 512MiB\nbypass GET /audio/*\n}\n"
	for _, name := range []string{"child", "fork", "twin"} {
		routes += fmt.Sprintf("handle_path /%s/* {\ngpu_broker %s {\n%s\n}\nreverse_proxy {http.gpu_broker.upstream}\n}\n", name, name, soakClient)
	}
	return global, routes
}

// command is the edition of a consumer's command in the settings.
func (c *settings) command(name string) *int {
	if name == "fork" {
		return &c.fork
	}
	return &c.child
}

// commands writes them.
func (c settings) commands(replace func(old, changed string)) {
	for _, name := range soakProcesses {
		edition := strconv.Itoa(*c.command(name))
		if c.broken == name {
			edition = "bad"
		}
		replace(name+".sh 0 ", name+".sh "+edition+" ")
	}
}

// ofProcess asks one whose server the broker starts.
func (c *soaker) ofProcess(context.Context) {
	consumer := []string{"child", "child", "twin", "fork", "fork"}[c.rng.IntN(5)]
	switch c.rng.IntN(6) {
	case 0, 1:
		events := c.about(12)
		a := c.ask(consumer, "GET", "/proof/stream", "ms", c.about(12), "events", events)
		c.send(c.k.hard, a)
		c.k.judge(a, func(got []byte) string { return exactly(modelserver.ProofStream(a.server(), a.id, events))(got) })
	case 2: // it is passed to it while it runs
		size := c.about(60_000)
		a := c.ask(consumer, "GET", "/audio/big", "bytes", size)
		a.cheap = true
		c.send(c.k.hard, a)
		c.k.judge(a, exactly(modelserver.AudioBytes(int64(size))))
	default:
		c.prove(consumer, c.about(2000))
	}
}

// prove asks one of them for an answer that shows whose it is.
func (c *soaker) prove(consumer string, size int) {
	body := fmt.Sprintf("hello %d", c.rng.Int())
	a := c.ask(consumer, "POST", "/proof", "ms", c.about(25), "bytes", size)
	a.body, a.size = strings.NewReader(body), int64(len(body))
	c.send(c.k.hard, a)
	c.k.judge(a, func(got []byte) string {
		return exactly(modelserver.ProofBytes(a.server(), a.id, []byte(body), size))(got)
	})
}

// server is the name of the server that has answered.
func (a *asked) server() string { return a.got.header.Get("X-Modelserver") }

// answered is one answer of a started server.
type answered struct {
	consumer, id string
	pid          int
	began, at    time.Time
}

// byStart judges who has answered for a consumer whose server the broker starts.
func (k *soak) byStart(a *asked) string {
	consumer, pid, edition := splitServer(a.server())
	if pid == 0 {
		return fmt.Sprintf("the answer of %q has no PID", a.server())
	}
	k.mu.Lock()
	k.answers = append(k.answers, answered{consumer, a.id, pid, a.began, a.got.at})
	k.mu.Unlock()
	// What needs no GPU is passed to the old one until that is stopped.
	if !a.cheap && !slices.ContainsFunc(k.ruled(a.began), func(s settings) bool { return *s.command(consumer) == edition }) {
		return fmt.Sprintf("the answer comes from edition %d of the command, which did not rule any more when it was asked", edition)
	}
	return ""
}

// running is what the status says of such a consumer now.
func (k *soak) running(ctx context.Context, name string) (c broker.Consumer, pid int, err error) {
	st, err := k.statusBy(ctx, k.client)
	if err != nil {
		return c, 0, err
	}
	if c = st.Consumers[name]; c.Process != nil {
		pid = c.Process.PID
	}
	return c, pid, nil
}

// killProcess kills a started server with SIGKILL: the process that the broker knows, or one that that has started.
func (k *soak) killProcess(ctx context.Context, dice *rand.Rand) {
	name := soakProcesses[dice.IntN(len(soakProcesses))]
	worker := dice.IntN(3) == 0
	if time.Since(k.killed[name]) < slowly(4*time.Second) {
		return // they cool down longer and longer, and then nothing could be seen
	}
	_, pid, err := k.running(ctx, name)
	if err == nil && pid == 0 {
		k.adminPost("/gpu_broker/consumers/" + name + "/load?wait=1s")
		_, pid, err = k.running(ctx, name)
	}
	if err != nil || pid == 0 {
		return
	}
	victim, what := pid, "leader killed"
	if worker {
		if victim, what = k.workerOf(name, pid); victim == 0 {
			return
		}
	}
	k.lasting(ctx, name, time.Millisecond, func() func() {
		k.killed[name] = time.Now()
		k.rec.count("chaos", "kill process")
		k.rec.count("killed", name+": "+what)
		if what == "helper killed" { // which is nobody's business
			_ = syscall.Kill(victim, syscall.SIGKILL)
			return func() {}
		}
		server, killed := k.spells.begin(spellServer, name, what), k.spells.begin(spellKilled, name, what)
		at := time.Now()
		_ = syscall.Kill(victim, syscall.SIGKILL)
		return func() {
			k.freed(name, pid, at, worker)
			killed()
			server()
		}
	})
}

// workerOf finds another process of a server's group.
func (k *soak) workerOf(name string, leader int) (pid int, what string) {
	for _, p := range groupOf(k.t, leader) {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p))
		if err != nil || p == leader {
			continue
		}
		if strings.Contains(string(line), fmt.Sprintf("%s.%d.", name, leader)) {
			return p, "worker killed"
		}
		if strings.HasPrefix(string(line), "sleep\x00") {
			pid, what = p, "helper killed"
		}
	}
	return pid, what
}

// freed sees that what a dead server had is free again in time. That of a
// shell whose child has died is found by probes, once nobody works there.
func (k *soak) freed(name string, pid int, at time.Time, worker bool) {
	within := slowly(time.Second)
	if worker {
		within = slowly(8 * time.Second)
	}
	var late time.Duration // of this machine, which may have more to do
	for {
		c, now, err := k.running(k.hard, name)
		over := time.Now().After(at.Add(within + late))
		if err == nil && len(c.Slots) > 0 && now != pid && (now != 0 || c.Slots[0].State == "LOADING" || c.Slots[0].Booking == 0) {
			k.rec.count("killed", name+": freed")
			return
		}
		if over && (k.scarce(at, time.Now()) || k.hard.Err() != nil) {
			return
		}
		if over {
			k.rec.violation("%s: its process %d was killed %s ago, and is not taken for gone: PID %d; going on: %s\n%s%s", name, pid, time.Since(at).Round(time.Millisecond), now, k.spells.around(at, time.Now()), k.glance(), k.lately())
			return
		}
		const pause = 20 * time.Millisecond
		slept := time.Now()
		time.Sleep(pause)
		late += time.Since(slept) - pause
	}
}

// processFaults are the ways in which a started server misbehaves, told to it as it runs.
var processFaults = []struct {
	name, set string
	kills     bool
}{
	{"die on request", `{"die_on_request":true}`, true},
	{"die mid body", `{"die_mid_body":true}`, true},
	{"hang health", `{"hang_health":true}`, false},
	{"health 500", `{"health_status":500}`, false},
}

func (k *soak) faultOfProcess(ctx context.Context, dice *rand.Rand) {
	name, fault := soakProcesses[dice.IntN(len(soakProcesses))], processFaults[dice.IntN(len(processFaults))]
	c, pid, err := k.running(ctx, name)
	if err != nil || pid == 0 || fault.kills && time.Since(k.killed[name]) < slowly(4*time.Second) {
		return
	}
	k.lasting(ctx, name, someTime(dice, 300*time.Millisecond, 2*time.Second), func() func() {
		ends := []func(){k.spells.begin(spellServer, name, fault.name)}
		if fault.kills {
			k.killed[name] = time.Now()
			ends = append(ends, k.spells.begin(spellKilled, name, fault.name))
		}
		k.rec.count("chaos", "fault of a process")
		k.rec.count("fault", name+" "+fault.name)
		k.control(c.Process.Address, fault.set)
		return func() {
			k.control(c.Process.Address, `{"die_on_request":false,"die_mid_body":false,"hang_health":false,"health_status":0}`)
			for _, end := range ends {
				end()
			}
		}
	})
}

// control tells a started server how to misbehave. It may have ended.
func (k *soak) control(address, faults string) {
	ctx, cancel := context.WithTimeout(k.hard, slowly(time.Second))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", "http://"+address+"/control", strings.NewReader(`{"faults":`+faults+`}`))
	if err != nil {
		k.rec.violation("the soak itself: %v", err)
		return
	}
	req.Close = true
	if resp, err := http.DefaultClient.Do(req); err == nil {
		_ = resp.Body.Close()
	}
}

// slowStart makes those that are started meanwhile slow.
func (k *soak) slowStart(ctx context.Context, dice *rand.Rand) {
	name := soakProcesses[dice.IntN(len(soakProcesses))]
	path := filepath.Join(k.scripts, name+".sh.slow")
	k.lasting(ctx, "start of "+name, someTime(dice, time.Second, 3*time.Second), func() func() {
		end := k.spells.begin(spellSlow, name, "slow start")
		k.rec.count("chaos", "slow start")
		k.mustWrite(os.WriteFile(path, nil, 0o600))
		return func() {
			k.mustWrite(os.Remove(path))
			end()
		}
	})
}

// badCommand reloads to a command that can't start, and to the good one again.
func (k *soak) badCommand(ctx context.Context, dice *rand.Rand) {
	name := soakProcesses[dice.IntN(len(soakProcesses))]
	k.lasting(ctx, "command", someTime(dice, 500*time.Millisecond, 2*time.Second), func() func() {
		end := k.spells.begin(spellServer, name, "bad command")
		k.rec.count("chaos", "bad command")
		k.changed(func(s *settings) { s.broken = name })
		return func() {
			k.changed(func(s *settings) { s.broken = "" })
			end()
		}
	})
}
