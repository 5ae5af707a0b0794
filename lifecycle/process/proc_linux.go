package process

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// proc is a process as /proc tells of it.
type proc struct {
	pid, parent, group int
	state              byte
	start              uint64 // in ticks since the host was booted: with the PID it names the process for good
}

// identity names a process for good, within one boot of the host.
type identity struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
}

func (p proc) identity() identity { return identity{p.pid, p.start} }

// lives is false for one that has ended and only waits for its parent to notice: it holds nothing.
func (p proc) lives() bool { return p.state != 'Z' && p.state != 'X' }

// readProc reads /proc/PID/stat. Its second field, the name, may hold anything, so the last bracket ends it.
func readProc(pid int) (proc, error) {
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return proc{}, err
	}
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	const startField = 19 // the 22nd of all
	if len(fields) <= startField {
		return proc{}, fmt.Errorf("/proc/%d/stat has %d fields after the name, wanted more than %d", pid, len(fields), startField)
	}
	parent, errParent := strconv.Atoi(fields[1])
	group, errGroup := strconv.Atoi(fields[2])
	start, errStart := strconv.ParseUint(fields[startField], 10, 64)
	return proc{pid: pid, parent: parent, group: group, state: fields[0][0], start: start}, errors.Join(errParent, errGroup, errStart)
}

// processes are all that live on the host, as far as can be seen.
func processes() ([]proc, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var all []proc
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if p, err := readProc(pid); err == nil && p.lives() { // else it has just ended
			all = append(all, p)
		}
	}
	return all, nil
}

// alive reports whether the very process lives.
func (i identity) alive() bool {
	p, err := readProc(i.PID)
	return err == nil && p.start == i.Start && p.lives()
}

// signal sends a signal to the very process. One that is gone is no error.
func (i identity) signal(s syscall.Signal) error {
	// What FindProcess returns is tied to the process, not to its number, so the look after it settles whose that is.
	p, err := os.FindProcess(i.PID)
	if err != nil {
		return err
	}
	defer func() { _ = p.Release() }()
	if !i.alive() {
		return nil
	}
	if err := p.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("process %d: %w", i.PID, err)
	}
	return nil
}

// mark is the value of the marker in a process's environment; empty: it has none, or can't be read.
func mark(pid int) string {
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return ""
	}
	for entry := range bytes.SplitSeq(raw, []byte{0}) {
		if value, ok := bytes.CutPrefix(entry, []byte(marker+"=")); ok {
			return string(value)
		}
	}
	return ""
}

// self is this Caddy.
var self = sync.OnceValue(func() identity {
	p, err := readProc(os.Getpid())
	if err != nil {
		return identity{PID: os.Getpid()}
	}
	return p.identity()
})
