package main

import (
	"cmp"
	"errors"
	"fmt"
	"go/build"
	"hash/fnv"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// room is a part of the product whose tests random faults are tried on.
type room struct {
	name, dir string
	files     []string // empty: all
	// e2e are the files of end-to-end tests that are tried first on what the package's own tests do not find.
	e2e []string
	// apart: a fault may end every process that it sees, which without a PID namespace of its own would be all of the machine's.
	apart bool
}

var rooms = []room{
	{name: "scheduler", dir: "scheduler"},
	{
		name: "broker", dir: "broker",
		e2e: []string{"admin_test.go", "claim_test.go", "cloud_test.go", "drain_test.go", "fallback_test.go", "handover_test.go", "health_test.go", "holdup_test.go", "idle_test.go", "learnt_test.go", "models_test.go", "modelsauto_test.go", "process_test.go", "reload_test.go", "removal_test.go", "slots_test.go", "told_test.go", "truth_test.go", "unloads_test.go"},
	},
	{
		name: "routing", dir: "routing",
		e2e: []string{"bodies_test.go", "lists_test.go", "models_test.go", "patterns_test.go", "sent_test.go", "translate_test.go", "unknown_test.go"},
	},
	{
		name: "request path", dir: ".", files: []string{"handler.go", "job.go", "run.go", "readahead.go", "sent.go", "target.go", "models.go", "errors.go", "stop.go", "heartbeat.go"},
		e2e: []string{"bodies_test.go", "heartbeat_test.go", "fallback_test.go", "health_test.go", "holdup_test.go", "leaving_test.go", "models_test.go", "refusals_test.go", "routes_test.go", "sent_test.go", "stop_test.go", "translate_test.go"},
	},
	{
		name: "lifecycle/http", dir: "lifecycle/http",
		e2e: []string{"comfyui_test.go", "flush_test.go", "health_test.go", "learnt_test.go", "lists_test.go", "loads_test.go", "modelsauto_test.go", "slots_test.go", "unknown_test.go", "unloads_test.go"},
	},
	{
		name: "lifecycle/process", dir: "lifecycle/process", apart: true,
		e2e: []string{"crash_test.go", "idle_test.go", "orphans_test.go", "process_test.go"},
	},
}

// outcome is what became of a random fault.
type outcome string

const (
	caught    outcome = "caught"
	survived  outcome = "SURVIVED"
	noCompile outcome = "does not compile"
	undone    outcome = "could not be tried"
)

// tried is a change and what became of it.
type tried struct {
	room   room
	change change
	out    outcome
	by     string // the test, or the error
}

// randomly plants n faults, chosen by seed, in the rooms whose name holds where: as many in each. It prints what no
// test finds, and fails only where it could not try.
func randomly(root, dir string, seed uint64, n int, where string) error {
	var queues [][]tried
	for _, r := range rooms {
		if !strings.Contains(r.name, where) {
			continue
		}
		q, err := candidates(root, r, seed)
		if err != nil {
			return err
		}
		queues = append(queues, q)
	}
	if len(queues) == 0 {
		return fmt.Errorf("no room is called %s", where)
	}
	for _, q := range queues {
		if by, err := unharmed(root, dir, q[0].room); err != nil || by != "" {
			return fmt.Errorf("%s: its tests do not pass without a fault: %s %w", q[0].room.name, by, err)
		}
	}
	began := time.Now()
	done := tryRandom(root, dir, queues, n)
	return report(done, seed, time.Since(began))
}

// candidates are all changes of a room but those that were found to change nothing, in the order of the seed.
func candidates(root string, r room, seed uint64) ([]tried, error) {
	pkg, err := build.ImportDir(filepath.Join(root, r.dir), 0)
	if err != nil {
		return nil, err
	}
	files := r.files
	if files == nil {
		files = slices.Concat(pkg.GoFiles, pkg.CgoFiles)
	}
	var out []tried
	rank := map[string]uint64{}
	for _, file := range files {
		source, err := os.ReadFile(filepath.Join(root, r.dir, file))
		if err != nil {
			return nil, err
		}
		all, err := changes(file, source)
		if err != nil {
			return nil, err
		}
		for _, c := range all {
			if _, same := equivalent[r.name+"/"+c.id()]; same {
				continue
			}
			h := fnv.New64a()
			_, _ = fmt.Fprintf(h, "%d %s/%s", seed, r.name, c.id())
			rank[c.id()] = h.Sum64()
			out = append(out, tried{room: r, change: c})
		}
	}
	slices.SortStableFunc(out, func(a, b tried) int { return cmp.Compare(rank[a.change.id()], rank[b.change.id()]) })
	return out, nil
}

// unharmed runs the tests of a room without a fault, and reports which fails.
func unharmed(root, dir string, r room) (by string, err error) {
	m := mutant{dir: r.dir, apart: r.apart}
	tests := filepath.Join(dir, "unharmed")
	if out, err := output(root, "go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-o", tests, m.pkg()); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	defer func() { _ = os.Remove(tests) }()
	return test(root, tests, m, quick...)
}

// quick are the arguments for the tests of a room that take little time.
var quick = []string{"-test.short", "-test.failfast", "-test.skip", properties + "|^TestAlone|^TestSoak"}

// tryRandom takes changes from the queues in turn until n have compiled, or none is left.
func tryRandom(root, dir string, queues [][]tried, n int) []tried {
	var mu sync.Mutex
	var done []tried
	var counted, number atomic.Int32
	next := func() (t tried, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		for i := range queues {
			if len(queues[i]) > 0 {
				t, queues[i] = queues[i][0], queues[i][1:]
				queues = append(append(slices.Clone(queues[:i]), queues[i+1:]...), queues[i])
				return t, true
			}
		}
		return t, false
	}
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for int(counted.Add(1)) <= n {
				t, ok := next()
				if !ok {
					return
				}
				t.out, t.by = tryOne(root, filepath.Join(dir, fmt.Sprint("random", number.Add(1))), t)
				if t.out == noCompile || t.out == undone {
					counted.Add(-1)
				}
				fmt.Fprintf(os.Stderr, "%s: %s/%s:%d: %s %s\n", t.out, t.room.dir, t.change.file, t.change.line, t.change.kind, t.by)
				mu.Lock()
				done = append(done, t)
				mu.Unlock()
			}
		})
	}
	workers.Wait()
	return done
}

// tryOne plants one change and runs the tests of its room, the quick ones first, then all others.
func tryOne(root, dir string, t tried) (outcome, string) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return undone, err.Error()
	}
	defer func() { _ = os.RemoveAll(dir) }()
	m := mutant{name: t.change.kind, dir: t.room.dir, file: t.change.file, apart: t.room.apart}
	source, err := os.ReadFile(filepath.Join(root, t.room.dir, t.change.file))
	if err != nil {
		return undone, err.Error()
	}
	overlay, err := overlaid(root, dir, m, t.change.apply(source))
	if err != nil {
		return undone, err.Error()
	}
	tests := filepath.Join(dir, "tests")
	if out, err := output(root, "go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-overlay", overlay, "-o", tests, m.pkg()); err != nil {
		if _, err := output(root, "go", "build", "-overlay", overlay, "-o", os.DevNull, m.pkg()); err != nil {
			return noCompile, ""
		}
		return undone, out
	}
	by, err := test(root, tests, m, quick...)
	if err == nil && by == "" && t.room.dir == "scheduler" {
		by, err = test(root, tests, m, "-test.run", properties)
	}
	if err == nil && by == "" && *withE2E {
		by, err = endToEnd(root, dir, overlay, t.room)
	}
	if err == nil && by == "" && *withE2E {
		by, err = everywhere(root, dir, overlay, t.room)
	}
	if err == nil && by == "" && *withE2E {
		by, err = everywhere(root, dir, overlay, t.room)
	}
	switch {
	case err != nil:
		return undone, err.Error()
	case by == "":
		return survived, ""
	}
	return caught, by
}

// endToEnd builds a Caddy that has the fault, as caddy in dir, and runs a room's end-to-end tests on it.
func endToEnd(root, dir, overlay string, r room) (by string, err error) {
	var names []string
	for _, file := range r.e2e {
		source, err := os.ReadFile(filepath.Join(root, "test/e2e", file))
		if err != nil {
			return "", err
		}
		for _, found := range testName.FindAllSubmatch(source, -1) {
			names = append(names, string(found[1]))
		}
	}
	caddy, tests := filepath.Join(dir, "caddy"), filepath.Join(dir, "e2e")
	if out, err := output(root, "go", "build", "-overlay", overlay, "-o", caddy, "./cmd/caddy"); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	if len(names) == 0 {
		return "", nil
	}
	if out, err := output(root, "go", "test", "-c", "-vet=off", "-o", tests, "./test/e2e"); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	which := "^(" + strings.Join(names, "|") + ")$"
	by, err = test(root, "env", mutant{dir: "test/e2e", apart: r.apart}, "GPU_BROKER_CADDY="+caddy, tests, "-test.failfast", "-test.parallel", "4", "-test.run", which, "-test.skip", "^(TestAlone|TestSoak|TestReal)", "-test.timeout", "10m")
	return by, err
}

var testName = regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)

// report prints the survivors, and how many of what compiled was caught, by room and in all.
func report(done []tried, seed uint64, took time.Duration) error {
	counts := map[string]map[outcome]int{}
	var broken error
	for _, t := range done {
		for _, name := range []string{t.room.name, "all"} {
			if counts[name] == nil {
				counts[name] = map[outcome]int{}
			}
			counts[name][t.out]++
		}
		switch t.out {
		case survived:
			c := t.change
			fmt.Printf("\n%s/%s:%d (%s): %s\n- %s\n+ %s\n", t.room.dir, c.file, c.line, c.function, c.kind,
				strings.ReplaceAll(c.old, "\n", "\n- "), strings.ReplaceAll(c.new, "\n", "\n+ "))
		case undone:
			broken = errors.Join(broken, fmt.Errorf("%s/%s:%d: %s: %s", t.room.dir, t.change.file, t.change.line, t.change.kind, t.by))
		}
	}
	fmt.Printf("\nseed %d, %s\n", seed, took.Round(time.Second))
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		c := counts[name]
		fmt.Printf("%s: %d of %d caught (%d more did not compile)\n", name, c[caught], c[caught]+c[survived], c[noCompile])
	}
	return broken
}
