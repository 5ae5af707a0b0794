package supervised

import (
	"bufio"
	"io"
	"os"
	"path"
	"strconv"
	"strings"
)

// maxCgroups bounds how much of a process's list of control groups is read, in bytes.
const maxCgroups = 64 << 10

// Cgroups returns the control groups that a process is in, one for each
// hierarchy (one in all with cgroup v2); none if there is no such process.
func Cgroups(pid int) []string {
	if pid <= 0 {
		return nil
	}
	file, err := os.Open("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		return nil
	}
	defer func() { _ = file.Close() }() // it was only read
	return parse(io.LimitReader(file, maxCgroups))
}

// parse reads lines of HIERARCHY:CONTROLLERS:PATH. A path may hold colons.
func parse(r io.Reader) (groups []string) {
	for lines := bufio.NewScanner(r); lines.Scan(); {
		parts := strings.SplitN(lines.Text(), ":", 3)
		if len(parts) == 3 {
			groups = append(groups, parts[2])
		}
	}
	return groups
}

// InGroup reports whether a process is in a control group or in one below it.
func InGroup(pid int, group string) bool {
	if group == "" || group == "/" {
		return false
	}
	for _, g := range Cgroups(pid) {
		if g == group || strings.HasPrefix(g, group+"/") {
			return true
		}
	}
	return false
}

// Members returns the processes in a control group that is named as systemd
// names it, be it in cgroup v2, in v1 or in both; none if it is gone.
func Members(group string) (pids []int) {
	if group == "" || group == "/" {
		return nil
	}
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"} {
		text, err := os.ReadFile(path.Join(root, group, "cgroup.procs"))
		if err != nil {
			continue
		}
		for field := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(field); err == nil {
				pids = append(pids, pid)
			}
		}
		if pids != nil {
			return pids
		}
	}
	return nil
}
