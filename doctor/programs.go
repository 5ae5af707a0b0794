package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/internal/supervised"
)

// program is a process of this machine.
type program struct {
	pid    int
	name   string
	parent int
}

// readProgram reads what /proc tells of a process; the zero value's PID says that it tells nothing.
func readProgram(pid int) program {
	doc, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil || pid <= 0 {
		return program{}
	}
	// The name stands in brackets and may hold anything.
	text := string(doc)
	open, end := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if open < 0 || end < open {
		return program{}
	}
	p := program{pid: pid, name: text[open+1 : end]}
	if fields := strings.Fields(text[end+1:]); len(fields) > 1 {
		p.parent, _ = strconv.Atoi(fields[1]) // the kernel writes numbers
	}
	return p
}

// line is a process and those that it comes from, itself first.
func line(pid int) (out []program) {
	const deepest = 64 // a bound, should /proc change meanwhile
	for len(out) < deepest {
		p := readProgram(pid)
		if p.pid == 0 {
			return out
		}
		out = append(out, p)
		pid = p.parent
	}
	return out
}

// group is the control group of a process, if it is that of one service or container; else empty.
func group(pid int) string {
	for _, path := range supervised.Cgroups(pid) {
		base := filepath.Base(path)
		if strings.HasSuffix(base, ".service") && !strings.HasPrefix(base, "user@") {
			return path
		}
		for _, runtime := range []string{"docker", "libpod", "containerd"} {
			if strings.Contains(path, runtime) && !strings.HasSuffix(base, ".slice") {
				return path
			}
		}
	}
	return ""
}

// named is a process for people.
func (p program) String() string {
	if p.pid == 0 {
		return "a program of another user"
	}
	return fmt.Sprintf("%s (PID %d)", p.name, p.pid)
}

// whose are the programs that a listener belongs to.
func (s listener) whose() program {
	for _, pid := range s.pids {
		if p := readProgram(pid); p.pid != 0 {
			return p
		}
	}
	return program{}
}

// isCaddy reports whether a program is a Caddy: the one that runs this, or one of that name.
func isCaddy(p program) bool {
	if p.pid == 0 {
		return false
	}
	self, err := os.Executable()
	if err == nil {
		if target, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(p.pid), "exe")); err == nil && target == self {
			return true
		}
	}
	return p.name == "caddy"
}
