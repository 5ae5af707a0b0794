package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

const (
	// drainTime is how long the last output of a server that has ended is waited for, if something still holds its pipe.
	drainTime = 20 * time.Millisecond
	// killPatience is how long those that were killed may take to be gone, before that is told as an error.
	killPatience = 2 * time.Second
	// slowLook is the greatest distance between looks for what is left of a server.
	slowLook = 250 * time.Millisecond
)

// child is one run of the server. Two goroutines own it: hold starts it, stays
// its parent and tidies up; sweep asks it to end and ends what it leaves.
type child struct {
	plan   *plan
	log    *zap.Logger
	dir    string // of the records; empty: none are kept
	cmd    *exec.Cmd
	out    *output
	pipes  []*os.File // where its output is read
	port   int        // to give back when it is gone; 0: none
	began  time.Time
	record *record // written by hold until guarded is closed
	guard  *guard  // likewise; nil: there is none

	guarded chan struct{} // closed when record and guard are complete
	down    chan struct{} // closed when the leader has ended, and failed is written; its number stays its own until swept
	ended   chan struct{} // closed right after, when why is written
	swept   chan struct{} // closed when nothing of the server lives
	gone    chan struct{} // closed when that is tidied up
	why     string
	failed  bool

	askOnce, hurryOnce sync.Once
	ask                chan struct{} // closed: it is to end
	hurry              chan struct{} // closed: at once
}

func newChild(p *plan, dir string, log *zap.Logger, cmd *exec.Cmd, r *record, port int) *child {
	c := &child{plan: p, log: log, dir: dir, cmd: cmd, record: r, port: port, out: newOutput(p, log)}
	for _, ch := range []*chan struct{}{&c.guarded, &c.down, &c.ended, &c.swept, &c.gone, &c.ask, &c.hurry} {
		*ch = make(chan struct{})
	}
	return c
}

// start starts the server. After an error nothing is left of it.
func (c *child) start() error {
	c.save() // before, so that whatever starts will be found
	err := c.launch()
	if err != nil {
		for _, p := range c.pipes {
			_ = p.Close()
		}
		c.forget()
	}
	return err
}

func (c *child) launch() error {
	stdout, err := c.pipe()
	if err != nil {
		return err
	}
	defer func() { _ = stdout.Close() }() // these ends are the server's
	stderr, err := c.pipe()
	if err != nil {
		return err
	}
	defer func() { _ = stderr.Close() }()
	c.cmd.Stdout, c.cmd.Stderr = stdout, stderr
	started := make(chan error, 1)
	go c.hold(started)
	return <-started
}

// pipe makes one of the server's outputs, and returns the end that it gets.
func (c *child) pipe() (*os.File, error) {
	r, w, err := os.Pipe()
	if err == nil {
		c.pipes = append(c.pipes, r)
	}
	return w, err
}

// hold starts the server and stays until it has ended, on a thread of its own:
// to the kernel the end of the thread that has started it is the end of its parent.
func (c *child) hold(started chan<- error) {
	// It is not unlocked: the thread, which has lost rights of Caddy's, ends with the goroutine.
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		c.run(started)
		return
	}
	// The main thread is not to be changed. While it is held the other goroutine gets another.
	locked := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		close(locked)
		c.run(started)
	}()
	<-locked
	runtime.UnlockOSThread()
}

func (c *child) run(started chan<- error) {
	if err := c.fork(); err != nil {
		started <- err
		return
	}
	c.began = time.Now()
	c.record.Leader.PID = c.cmd.Process.Pid
	drained := c.out.read(map[string]io.Reader{"stdout": c.pipes[0], "stderr": c.pipes[1]})
	go c.sweep()
	started <- nil

	c.guarding()
	how := waitEnd(c.cmd.Process.Pid)
	c.failed = how != (exit{})
	close(c.down)
	within(drained, drainTime)
	c.why = how.text(c.out.lastLine())
	close(c.ended)
	<-c.swept
	c.tidy(drained)
}

// fork starts the server. The thread's ambient capabilities, such as the one to
// listen at port 80, are Caddy's alone, and so are all files but the server's standard ones. Go opens files so that they
// end with an exec; those that Caddy inherits, or that C libraries open, may not.
func (c *child) fork() error {
	err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
	if err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: the kernel knows none
		return fmt.Errorf("the capabilities of Caddy can't be kept from the server: %w", err)
	}
	if err := unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil && !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EPERM) { // Linux before 5.11, or a sandbox that does not know it
		return fmt.Errorf("the files of Caddy can't be kept from the server: %w", err)
	}
	return c.cmd.Start()
}

// guarding starts the guard and completes the record.
func (c *child) guarding() {
	defer close(c.guarded)
	if p, err := readProc(c.record.Leader.PID); err == nil {
		c.record.Leader = p.identity()
	}
	c.guard = newGuard(c.record.Leader.PID, c.record.Mark, c.log)
	c.record.Guard = c.guard.identity()
	c.save()
}

// sweep waits until the server ends or is to end, and ends all that it has started.
func (c *child) sweep() {
	defer close(c.swept)
	<-c.guarded
	select {
	case <-c.down:
	case <-c.ask:
		c.terminate()
	}
	seen := map[identity]bool{}
	for wait := firstLook; c.kill(seen); wait = min(wait*3/2, slowLook) {
		time.Sleep(wait) // nothing tells of the end of a process that is not a child
	}
}

// terminate asks the group to end, and returns when it has or its grace is over.
func (c *child) terminate() {
	select {
	case <-c.hurry:
		return
	default:
	}
	// The leader's number is not given to anybody else before it is waited for.
	if err := syscall.Kill(-c.record.Leader.PID, c.plan.signal); err != nil && !errors.Is(err, syscall.ESRCH) {
		c.log.Error("the server can't be asked to stop: it is killed", zap.Error(err))
		return
	}
	grace := time.NewTimer(c.plan.grace)
	defer grace.Stop()
	select {
	case <-c.down:
	case <-c.hurry:
		return
	case <-grace.C:
		return
	}
	for wait := firstLook; c.works(); wait = min(2*wait, lastLook) {
		select {
		case <-time.After(wait):
		case <-c.hurry:
			return
		case <-grace.C:
			return
		}
	}
}

// works reports whether something of the group but the guard still lives.
func (c *child) works() bool {
	living, err := processes()
	if err != nil {
		return false
	}
	for _, p := range living {
		if p.group == c.record.Leader.PID && p.identity() != c.record.Guard {
			return true
		}
	}
	return false
}

// kill kills all that lives of the server, and reports whether there was something. seen are those of earlier looks:
// one that is about to end has lost its mark already, and what it holds of a GPU not yet.
func (c *child) kill(seen map[identity]bool) (found bool) {
	if err := syscall.Kill(-c.record.Leader.PID, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		c.log.Error("the server can't be killed", zap.Error(err))
	}
	living, err := processes()
	if err != nil {
		c.log.Error("it can't be seen what is left of the server", zap.Error(err))
		return false
	}
	for _, p := range c.record.owned(living, true, mark) {
		found = true
		seen[p.identity()] = true
		if p.group == c.record.Leader.PID {
			continue
		}
		if err := p.identity().signal(syscall.SIGKILL); err != nil {
			c.log.Error("what the server has started can't be killed", zap.Error(err))
		}
	}
	for id := range seen {
		found = found || id.alive()
	}
	return found
}

// tidy frees what the run has taken, once nothing of it lives.
func (c *child) tidy(drained <-chan struct{}) {
	_ = c.cmd.Wait() // how it ended is known
	c.guard.wait()
	for { // where Caddy is the host's first process, or its subreaper, the orphans of the group are its to wait for
		if pid, err := syscall.Wait4(-c.record.Leader.PID, nil, syscall.WNOHANG, nil); err != nil || pid <= 0 {
			break
		}
	}
	within(drained, drainTime)
	for _, p := range c.pipes {
		_ = p.Close() // ends its reader, if somebody unknown holds the other end
	}
	<-drained
	c.forget()
	close(c.gone)
}

// save keeps the record. Without it the server would still die with Caddy, but less surely.
func (c *child) save() {
	if err := c.record.save(c.dir); err != nil {
		c.log.Warn("the server's record can't be kept: if Caddy is killed, what is left of the server may not be found", zap.Error(err))
	}
}

// forget undoes what was done for the run before it started.
func (c *child) forget() {
	if err := c.record.remove(c.dir); err != nil {
		c.log.Warn("the server's record can't be removed", zap.Error(err))
	}
	ports.give(c.port)
}

// running reports whether the leader lives.
func (c *child) running() bool {
	select {
	case <-c.down:
		return false
	default:
		return true
	}
}

// stop ends the server and all that it has started, within its grace, which
// ends early with ctx. It returns when that is done, soon after ctx at the latest.
func (c *child) stop(ctx context.Context) error {
	c.askOnce.Do(func() { close(c.ask) })
	select {
	case <-c.gone:
		return nil
	case <-ctx.Done():
	}
	c.hurryOnce.Do(func() { close(c.hurry) })
	if !within(c.gone, killPatience) {
		return fmt.Errorf("process group %d was killed but is not gone: a process may wait for the driver of the GPU", c.cmd.Process.Pid)
	}
	return nil
}

// within waits for done, but no longer than limit.
func within(done <-chan struct{}, limit time.Duration) bool {
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}
