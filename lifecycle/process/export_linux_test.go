package process

import "sync"

// SetShell makes the guard be run by another shell, and the lack of one be told anew.
func SetShell(path string) (restore func()) {
	before := shell
	shell, noShell = path, sync.Once{}
	return func() { shell, noShell = before, sync.Once{} }
}

// Records are the names of the files of the records in dir.
func Records(dir string) []string {
	all, err := records(dir)
	if err != nil {
		panic(err)
	}
	var marks []string
	for _, r := range all {
		marks = append(marks, r.Mark)
	}
	return marks
}

// Forge keeps a record of a process that owner is said to have started.
func Forge(dir, mark, boot string, owner, leader int, ownerStart, leaderStart uint64) error {
	r := &record{Mark: mark, Consumer: "forged", Boot: boot, Owner: identity{owner, ownerStart}, Leader: identity{leader, leaderStart}}
	return r.save(dir)
}

// StartOf is the start time of a process; 0 if it does not live.
func StartOf(pid int) uint64 {
	p, err := readProc(pid)
	if err != nil || !p.lives() {
		return 0
	}
	return p.start
}

// GroupOf are the processes that live in a process group.
func GroupOf(group int) []int {
	living, err := processes()
	if err != nil {
		panic(err)
	}
	var pids []int
	for _, p := range living {
		if p.group == group {
			pids = append(pids, p.pid)
		}
	}
	return pids
}
