package process

import (
	"sync"

	"go.uber.org/zap"
)

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

// Leaders are the leaders that the records in dir name, with when each has started.
func Leaders(dir string) map[int]uint64 {
	all, err := records(dir)
	if err != nil {
		panic(err)
	}
	leaders := map[int]uint64{}
	for _, r := range all {
		leaders[r.Leader.PID] = r.Leader.Start
	}
	return leaders
}

// Forge keeps a record of a process that owner is said to have started.
func Forge(dir, mark, boot string, owner, leader int, ownerStart, leaderStart uint64) error {
	r := &record{Mark: mark, Consumer: "forged", Boot: boot, Owner: identity{owner, ownerStart}, Leader: identity{leader, leaderStart}}
	return r.save(dir)
}

// Kill looks once for what is left of a server that left no process, beside those of earlier looks.
func Kill(earlier ...int) (found bool) {
	const nobody = 1<<22 + 1 // above the greatest PID that Linux gives away
	c := &child{record: &record{Mark: "NOBODY", Leader: identity{PID: nobody}}, log: zap.NewNop()}
	seen := map[identity]bool{}
	for _, pid := range earlier {
		seen[identity{pid, StartOf(pid)}] = true
	}
	return c.kill(seen)
}

// StartOf is the start time of a process; 0 if it does not live.
func StartOf(pid int) uint64 {
	p, err := readProc(pid)
	if err != nil || !p.lives() {
		return 0
	}
	return p.start
}

// ParentOf is the PID of the parent of a process.
func ParentOf(pid int) int {
	p, err := readProc(pid)
	if err != nil {
		panic(err)
	}
	return p.parent
}

// UnmarkedChildrenOf are the children of a process that live and carry no mark.
func UnmarkedChildrenOf(pid int) (pids []int) {
	living, err := processes()
	if err != nil {
		panic(err)
	}
	for _, p := range living {
		if p.parent == pid && mark(p.pid) == "" {
			pids = append(pids, p.pid)
		}
	}
	return pids
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
