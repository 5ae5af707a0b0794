//go:build unix

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// stopGrace is how long a child may take to stop by itself: Caddy lets running requests end.
const stopGrace = 40 * time.Second

// process is a child of the demo.
type process struct {
	name string
	log  string // the file of its output
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

// start runs a program with its output in a file of dir.
func start(dir, name string, env []string, program string, args ...string) (*process, error) {
	p := &process{name: name, log: filepath.Join(dir, name+".log"), done: make(chan struct{})}
	log, err := os.Create(p.log)
	if err != nil {
		return nil, fmt.Errorf("making %s's log: %w", name, err)
	}
	defer func() { _ = log.Close() }() // the child has its own copy
	p.cmd = exec.Command(program, args...)
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = apart()
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w: `make build` makes the programs", name, err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in its log
		close(p.done)
	}()
	return p, nil
}

// stop ends the process: politely, and by force after stopGrace or at once when kill is closed.
func (p *process) stop(kill <-chan struct{}) error {
	select {
	case <-p.done:
		return nil
	default:
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // fails only if it has just ended
	grace := time.NewTimer(stopGrace)
	defer grace.Stop()
	select {
	case <-p.done:
		return nil
	case <-grace.C:
	case <-kill:
	}
	_ = p.cmd.Process.Kill()
	<-p.done
	return fmt.Errorf("%s did not stop by itself and was killed", p.name)
}

// died is the error of a process that ended unasked.
func (p *process) died() error {
	text, _ := os.ReadFile(p.log) // without it the error says less
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	last := strings.Join(lines[max(0, len(lines)-5):], "\n")
	return fmt.Errorf("%s ended unasked (%s); the end of its log %s:\n%s", p.name, p.cmd.ProcessState, p.log, last)
}

// stopAll ends processes one by one, the latest first.
func stopAll(processes []*process, kill <-chan struct{}) error {
	var faults []error
	for i := len(processes) - 1; i >= 0; i-- {
		faults = append(faults, processes[i].stop(kill))
	}
	return errors.Join(faults...)
}
