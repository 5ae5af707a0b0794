// Command mutants checks the tests of the scheduler and of its driver: it plants
// faults into them, one at a time, and runs their tests with each. Every fault must make
// a test fail. The sources themselves are not touched: the go command is given
// the changed file as an overlay.
//
//	go run ./internal/mutants [-histories] [-only broker]
//
// The tests that a fault names run, or the table tests of its package until one fails, and the random histories where
// none does; with -histories these run on every fault, which tells how much they find by themselves.
//
// It exits with 1 if a fault survives, does not compile, or has no place in the
// sources any more.
//
//	go run ./internal/mutants -random 150 -seed 7 [-only routing] [-e2e=false]
//
// With -random it plants small faults at random instead: operators, conditions, bounds, lost statements, early
// returns. The same seed gives the same faults as long as their lines stay as they are. It prints what survives and
// how many were caught, and exits with 1 only if it could not try some.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"
)

// properties matches the tests of the scheduler that are random histories, which take the longest; the others are tables.
const properties = "^(TestRandomHistoriesKeepTheRules|TestHonestServersNeverRunOutOfMemory|TestAnOlderJobIsPassedByNone.*|TestALadderNeverLeadsToAColdFallback)$"

// limit bounds the tests of one mutant.
const limit = 2 * time.Minute

// buildLimit bounds one build, in which all of Caddy may have to be compiled, and end-to-end tests.
const buildLimit = 15 * time.Minute

var (
	histories = flag.Bool("histories", false, "try the random histories on every fault")
	only      = flag.String("only", "", "plant only the faults whose name or folder holds this; with -random, in the rooms whose name does")
	random    = flag.Int("random", 0, "instead of the planted faults, try so many random ones")
	seed      = flag.Uint64("seed", 1, "which random ones")
	withE2E   = flag.Bool("e2e", true, "try all other tests, end to end too, on random faults that those of their own package do not find")
)

// interrupted ends with the runner: what has a process group of its own gets no signal of the terminal.
var interrupted = context.Background()

func main() {
	flag.Parse()
	mutants = slices.DeleteFunc(mutants, func(m mutant) bool {
		return !strings.Contains(m.name, *only) && !strings.Contains(m.folder(), *only)
	})
	interrupted, _ = signal.NotifyContext(interrupted, os.Interrupt, syscall.SIGTERM)
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run() error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()

	if *random > 0 {
		return randomly(root, dir, *seed, *random, *only)
	}
	out := tabwriter.NewWriter(os.Stdout, 0, 8, 2, ' ', 0)
	_, _ = fmt.Fprintln(out, "fault\trandom histories\ttables")
	var survivors []string
	var broken error
	var caught int
	for i, v := range tryAll(root, dir) {
		m := mutants[i]
		if v.err != nil {
			broken = errors.Join(broken, fmt.Errorf("%q: %w", m.name, v.err))
			continue
		}
		if v.byHistories == "" && v.byTables == "" {
			survivors = append(survivors, m.name)
		}
		if v.byHistories != "" {
			caught++
		}
		_, _ = fmt.Fprintf(out, "%s\t%s\t%s\n", m.name, orDash(v.byHistories), orDash(v.byTables))
	}
	if err := out.Flush(); err != nil {
		return err
	}
	if *histories {
		fmt.Printf("%d were caught by random histories\n", caught)
	}
	fmt.Printf("%d faults; %d survived\n", len(mutants), len(survivors))
	if len(survivors) > 0 {
		broken = errors.Join(broken, fmt.Errorf("no test catches: %s", strings.Join(survivors, "; ")))
	}
	return broken
}

// moduleRoot is the folder of the module that the command is run in.
func moduleRoot() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	mod := strings.TrimSpace(string(out))
	if filepath.Base(mod) != "go.mod" {
		return "", errors.New("no module here: run it inside the repository")
	}
	return filepath.Dir(mod), nil
}

func (m mutant) folder() string { return cmp.Or(m.dir, "scheduler") }

func (m mutant) pkg() string { return "./" + m.folder() + "/" }

// verdict is which tests of each kind caught a fault; empty: none.
type verdict struct {
	byHistories, byTables string
	err                   error
}

// tryAll tries all mutants, as many at a time as there are processors.
func tryAll(root, dir string) []verdict {
	verdicts := make([]verdict, len(mutants))
	free := make(chan struct{}, runtime.GOMAXPROCS(0))
	var all sync.WaitGroup
	for i, m := range mutants {
		free <- struct{}{}
		all.Go(func() {
			defer func() { <-free }()
			began := time.Now()
			verdicts[i] = try(root, filepath.Join(dir, strconv.Itoa(i)), m)
			fmt.Fprintf(os.Stderr, "%4.0f s  %s: %s\n", time.Since(began).Seconds(), m.folder(), m.name)
		})
	}
	all.Wait()
	return verdicts
}

// try plants one fault and says which tests of each kind caught it.
func try(root, dir string, m mutant) (v verdict) {
	if v.err = os.Mkdir(dir, 0o700); v.err != nil {
		return v
	}
	var overlay string
	if overlay, v.err = plant(root, dir, m); v.err != nil {
		return v
	}
	tests := filepath.Join(dir, "tests")
	if out, err := output(root, "go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-overlay", overlay, "-o", tests, m.pkg()); err != nil {
		v.err = fmt.Errorf("it does not compile, which is no catch: %w\n%s", err, out)
		return v
	}
	defer func() { _ = os.Remove(tests) }()
	if *histories {
		if v.byHistories, v.err = test(root, tests, m, "-test.run", properties); v.err != nil {
			return v
		}
	}
	if m.tests != "" {
		v.byTables, v.err = test(root, tests, m, "-test.failfast", "-test.run", m.tests)
		return v
	}
	v.byTables, v.err = test(root, tests, m, "-test.failfast", "-test.skip", properties+"|^TestAlone")
	if v.err == nil && v.byTables == "" && !*histories {
		v.byHistories, v.err = test(root, tests, m, "-test.run", properties)
	}
	return v
}

// plant writes the changed file and the overlay that puts it in place of the true one.
func plant(root, dir string, m mutant) (overlay string, err error) {
	path := filepath.Join(root, m.folder(), m.file)
	source, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	if n := bytes.Count(source, []byte(m.old)); n != 1 {
		return "", fmt.Errorf("its place must occur exactly once in %s/%s, and does %d times: bring the fault up to date with the code", m.folder(), m.file, n)
	}
	return overlaid(root, dir, m, bytes.Replace(source, []byte(m.old), []byte(m.new), 1))
}

// overlaid writes a file of a fault and the overlay that puts it in place of the true one.
func overlaid(root, dir string, m mutant, source []byte) (overlay string, err error) {
	path, changed := filepath.Join(root, m.folder(), m.file), filepath.Join(dir, m.file)
	if err := os.WriteFile(changed, source, 0o600); err != nil {
		return "", err
	}
	text, err := json.Marshal(map[string]map[string]string{"Replace": {path: changed}})
	if err != nil {
		return "", err
	}
	overlay = filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, text, 0o600)
}

var failed = regexp.MustCompile(`(?m)^--- FAIL: (\S+)`)

// apart are the arguments of unshare that give a program a PID namespace of its own, with a shell as its first process, and a
// process group of its own, so that a signal to its group does not reach the runner.
var apart = []string{"--pid", "--fork", "--kill-child", "--mount-proc", "/bin/sh", "-c", `setsid -w "$0" "$@"; exit $?`}

// test runs tests with a fault and says which failed; empty: none.
func test(root, tests string, m mutant, which ...string) (string, error) {
	args := append([]string{"-test.timeout", limit.String()}, which...)
	if tests == "env" { // a variable and the program come first
		args = slices.Concat(which[:2], []string{"-test.timeout", limit.String()}, which[2:])
	}
	if m.folder() == "scheduler" {
		args = append(args, "-rapid.nofailfile", "-rapid.shrinktime=1ms")
	}
	return verdictOf(filepath.Join(root, m.folder()), m.apart, tests, args...)
}

// verdictOf runs a program of tests in a folder, alone in a PID namespace if need be, and reports which failed; empty: none.
func verdictOf(dir string, alone bool, program string, args ...string) (string, error) {
	if alone {
		program, args = "unshare", slices.Concat(apart, []string{program}, args)
	}
	out, err := output(dir, program, args...)
	if err == nil {
		return "", nil
	}
	found := failed.FindAllStringSubmatch(out, -1)
	var exit *exec.ExitError
	switch {
	case len(found) == 1:
		return found[0][1], nil
	case len(found) > 1:
		return fmt.Sprintf("%s and %d more", found[0][1], len(found)-1), nil
	case strings.Contains(out, "panic: test timed out"):
		return "a test that did not end", nil
	case strings.Contains(out, "\npanic: "), strings.HasPrefix(out, "panic: "), strings.Contains(out, "fatal error: "):
		return "a test that panicked", nil
	case alone && errors.As(err, &exit) && exit.ExitCode() > 128: // as the shell tells of a signal
		return "a test that got a signal", nil
	default:
		return "", fmt.Errorf("the tests could not be run: %w\n%s", err, out)
	}
}

func output(dir, name string, args ...string) (string, error) {
	bound := limit + time.Minute                                       // the tests' own time-out comes first
	if name == "go" || name == "env" || slices.Contains(args, "env") { // env, in a namespace of its own or not: end-to-end tests, with a bound of their own
		bound = buildLimit
	}
	ctx, cancel := context.WithTimeout(interrupted, bound)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
