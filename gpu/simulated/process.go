package simulated

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"syscall"
)

// alive reports whether a process still holds memory. One that has ended and
// only waits for its parent (a zombie) holds none, as with a real driver.
func alive(pid int) bool {
	if state, _, ok := procStat(pid); ok {
		return state != 'Z' && state != 'X'
	}
	process, err := os.FindProcess(pid)
	if err != nil {
		return false
	}
	defer func() { _ = process.Release() }()
	return !errors.Is(process.Signal(syscall.Signal(0)), os.ErrProcessDone)
}

// startTime tells two processes apart that had the same PID; empty where the
// system has no /proc.
func startTime(pid int) string {
	_, start, _ := procStat(pid)
	return start
}

// comm is the name of a process; empty where the system has no /proc.
func comm(pid int) string {
	name, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	if err != nil {
		return ""
	}
	return string(bytes.TrimSpace(name))
}

// procStat reads the state and the start time from /proc/PID/stat. The second
// field is the program's name in parentheses and may hold anything, so the
// fields are counted from the last parenthesis.
func procStat(pid int) (state byte, start string, ok bool) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, "", false
	}
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	const startField = 22 - 3 // field 3, the state, is the first after the name
	if len(fields) <= startField {
		return 0, "", false
	}
	return fields[0][0], string(fields[startField]), true
}
