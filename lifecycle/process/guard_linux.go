package process

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"sync"
	"syscall"

	"go.uber.org/zap"
)

// shell runs the guard. A variable for tests.
var shell = "/bin/sh"

// watchScript is what the guard runs in the server's process group: it sits out the
// signals that ask the group to stop, and kills it when its standard input
// ends, which is when Caddy does, however that dies.
const watchScript = `trap '' HUP INT QUIT TERM USR1 USR2 ALRM PIPE; read x || kill -KILL 0`

// noShell is told once.
var noShell sync.Once

// guard is a companion in a server's process group.
type guard struct {
	cmd  *exec.Cmd
	open *os.File // its standard input
}

// newGuard starts the guard of the process group that group leads. It dies with
// the group. Without one, only the server itself dies with Caddy: see Reap.
func newGuard(group int, mark string, log *zap.Logger) *guard {
	g, err := startGuard(group, mark)
	switch {
	case err == nil:
		return g
	case errors.Is(err, fs.ErrNotExist):
		noShell.Do(func() {
			log.Warn("there is no " + shell + ": if Caddy is killed, a server that it has started dies with it, but what that server has started is ended only when Caddy starts again")
		})
	default:
		log.Warn("the server's guard can't be started: if Caddy is killed, what the server has started is ended only when Caddy starts again", zap.Error(err))
	}
	return nil
}

func startGuard(group int, mark string) (*guard, error) {
	in, open, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = in.Close() }()
	cmd := exec.Command(shell, "-c", watchScript)
	cmd.Stdin, cmd.Dir, cmd.Env = in, "/", []string{marker + "=" + mark}
	// The group is that of the server, or this fails: it never is Caddy's own.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pgid: group}
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, open.Close())
	}
	return &guard{cmd, open}, nil
}

func (g *guard) identity() identity {
	if g == nil {
		return identity{}
	}
	p, err := readProc(g.cmd.Process.Pid)
	if err != nil {
		return identity{}
	}
	return p.identity()
}

// wait returns once the guard, whose group has been killed, is gone.
func (g *guard) wait() {
	if g == nil {
		return
	}
	_ = g.cmd.Wait() // how it ended is no news: it was killed
	_ = g.open.Close()
}
