package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
)

// startLine is one of Caddy's log lines that tells of a started server.
type startLine struct {
	at       time.Time
	consumer string
	kind     string // started, died, loaded, out of memory
	pid      int
}

// startLines reads Caddy's log.
func (k *soak) startLines() (out []startLine) {
	f, err := os.Open(filepath.Join(k.dir, "caddy.log"))
	if err != nil {
		k.rec.violation("the soak itself: %v", err)
		return nil
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 8<<20)
	for lines.Scan() {
		var d struct {
			TS                               float64
			Msg, Consumer, Reason, Line, For string
			PID                              int
		}
		if json.Unmarshal(lines.Bytes(), &d) != nil || !slices.Contains(soakProcesses, d.Consumer) {
			continue
		}
		l := startLine{at: time.Unix(0, int64(d.TS*1e9)), consumer: d.Consumer, pid: d.PID}
		switch {
		case d.Msg == "server started":
			l.kind = "started"
		case d.Msg == "loaded":
			l.kind = "loaded"
		case d.Msg == "gone" && (strings.Contains(d.Reason, "its server died")):
			l.kind = "died"
		case d.Msg == "output of the server" && strings.Contains(d.Line, "out of memory"):
			l.kind = "out of memory"
		default:
			continue
		}
		out = append(out, l)
	}
	if err := lines.Err(); err != nil {
		k.rec.violation("the soak itself: reading Caddy's log: %v", err)
	}
	return out
}

// starts judges by Caddy's log who has answered, and whether one ran out of memory.
func (k *soak) starts() {
	lines := k.startLines()
	began := map[string][]startLine{}
	for _, l := range lines {
		switch l.kind {
		case "started":
			began[l.consumer] = append(began[l.consumer], l)
			k.rec.count("starts", l.consumer)
		case "died":
			k.rec.count("starts", l.consumer+" died")
		case "out of memory":
			k.rec.count("starts", l.consumer+" out of memory")
			if !k.mayRunOut(l.at, l.at) {
				k.rec.violation("%s ran out of memory as it was loaded; going on: %s", l.consumer, k.spells.around(l.at.Add(-3*time.Second), l.at))
			}
		}
	}
	k.mu.Lock()
	answers := k.answers
	k.answers = nil
	k.mu.Unlock()
	for _, a := range answers {
		all := began[a.consumer]
		i := slices.IndexFunc(all, func(l startLine) bool { return l.pid == a.pid })
		switch {
		case i < 0:
			k.rec.violation("%s was answered by process %d, which the broker has not started", a.id, a.pid)
		case a.at.Before(all[i].at.Add(-50 * time.Millisecond)):
			k.rec.violation("%s was answered by process %d before it was started", a.id, a.pid)
		case i+1 < len(all) && a.began.After(all[i+1].at.Add(50*time.Millisecond)): // the log's times are when a line was written
			k.rec.violation("%s was asked %s after %s was started anew, and answered by the process before", a.id, a.began.Sub(all[i+1].at), a.consumer)
		}
	}
	k.rec.mu.Lock()
	if k.rec.counts["starts"] == nil {
		k.rec.counts["starts"] = map[string]int{}
	}
	k.rec.counts["starts"]["answers looked at"] += len(answers)
	k.rec.mu.Unlock()
}

// lookAtProcesses checks that no consumer has two servers.
func (k *soak) lookAtProcesses() {
	for _, name := range soakProcesses {
		leaders := map[int][]int{}
		for _, pid := range alive(k.t, "-name\x00"+name+".") {
			if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil && strings.Contains(string(line), k.sim) {
				_, leader, _ := splitServer(nameIn(string(line)))
				leaders[leader] = append(leaders[leader], pid)
			}
		}
		if len(leaders) < 2 {
			continue
		}
		lived := 0 // the look took a while: do they still live?
		for _, pids := range leaders {
			if slices.ContainsFunc(pids, lives) {
				lived++
			}
		}
		if lived > 1 {
			at := time.Now()
			k.rec.violation("%s has %d servers at once: %v; going on: %s\n%s", name, lived, leaders, k.spells.around(at.Add(-2*time.Second), at), k.lately())
		}
	}
}

// nameIn is the name in the command line of a started server.
func nameIn(line string) string {
	_, rest, _ := strings.Cut(line, "-name\x00")
	name, _, _ := strings.Cut(rest, "\x00")
	return name
}

func lives(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ") && !strings.Contains(string(stat), ") X ")
}

// comesBack kills the started servers while nobody asks for them: one of them
// is to be started again by itself, unless it has died too often in a row.
func (k *soak) comesBack() {
	const stable = time.Minute // as the broker has it
	for i, name := range soakProcesses {
		c := k.newSoaker("fresh", i)
		c.prove(name, 10)
		c.http.CloseIdleConnections()
		_, pid, err := k.running(k.hard, name)
		if err != nil || pid == 0 {
			k.rec.violation("%s does not run, though it has just answered: %v", name, err)
			continue
		}
		deaths, lived := 1, time.Duration(0)
		var loaded time.Time
		for _, l := range k.startLines() {
			switch {
			case l.consumer != name:
			case l.kind == "loaded":
				loaded = l.at
			case l.kind == "died":
				if deaths++; l.at.Sub(loaded) >= stable {
					deaths = 2
				}
			}
		}
		if lived = time.Since(loaded); lived >= stable {
			deaths = 1
		}
		k.killed[name] = time.Now()
		server, killed := k.spells.begin(spellServer, name, "killed in the quiet"), k.spells.begin(spellKilled, name, "killed in the quiet")
		at := time.Now()
		_ = syscall.Kill(pid, syscall.SIGKILL)
		k.freed(name, pid, at, false)
		may := name == "child" && deaths <= soakRestarts
		within := slowly(1500 * time.Millisecond)
		if may {
			within = slowly(8 * time.Second) // it cools down for 2 seconds at most
		}
		back := false
		for !back && time.Since(at) < within {
			_, now, err := k.running(k.hard, name)
			back = err == nil && now != 0 && now != pid
			time.Sleep(20 * time.Millisecond)
		}
		k.rec.count("comes back", fmt.Sprintf("%s after %d deaths: %t", name, deaths, back))
		if back != may {
			k.rec.violation("%s has died %d times in a row and comes back: %t, wanted %t\n%s%s", name, deaths, back, may, k.glance(), k.lately())
		}
		killed()
		server()
	}
}

// left checks that nothing is left of the started servers once Caddy has stopped.
func (k *soak) left() {
	k.halt()
	for _, l := range k.startLines() {
		if l.kind == "started" {
			for _, pid := range groupOf(k.t, l.pid) {
				line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
				if !strings.Contains(string(line), k.sim) && string(line) != "sleep\x001000000\x00" {
					continue // a stranger, who has its number by now
				}
				k.rec.violation("Caddy has stopped, and of %s process %d is left in group %d: %q", l.consumer, pid, l.pid, line)
			}
		}
	}
	for _, pid := range k.children() {
		k.rec.violation("Caddy has stopped, and process %d is left", pid)
	}
	k.records(0)
	k.memoryOfTheLiving()
}

// records checks how many of them the broker keeps of servers that run.
func (k *soak) records(want int) {
	var found []string
	err := filepath.WalkDir(filepath.Join(k.dir, "data"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && filepath.Base(filepath.Dir(path)) == "processes" {
			found = append(found, path)
		}
		return err
	})
	if err != nil || len(found) != want {
		k.rec.violation("the broker keeps %d records of servers, wanted %d: %v %v", len(found), want, found, err)
	}
}

// memoryOfTheLiving checks that nothing counts on the simulated GPU but what those hold that live.
func (k *soak) memoryOfTheLiving() {
	sampler, err := (&simulated.Simulated{Totals: []gpu.Bytes{gib(24)}, Dir: k.sim}).Open(context.Background(), zap.NewNop())
	if err != nil {
		k.rec.violation("the soak itself: %v", err)
		return
	}
	defer sampler.Close()
	var held gpu.Bytes
	for name, srv := range k.servers {
		if name != "sky" { // which is elsewhere
			held += srv.Stats().Held
		}
	}
	s, err := sampler.Sample(context.Background(), gpu.Memory)
	if err != nil || s.Devices[0].Total-s.Devices[0].Free != held {
		k.rec.violation("%s are in use on the GPU, those that live hold %s (%v): %v", s.Devices[0].Total-s.Devices[0].Free, held, err, s.Devices[0].Processes)
	}
}
