package process

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpu-broker/caddy-gpu-broker/internal/bootid"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/supervise"
)

const (
	logPatience = time.Second            // how long a slow log is waited for when all is over
	knockTime   = 200 * time.Millisecond // for a look at a port of this host
)

// means starts and stops the process of one consumer.
type means struct {
	plan *plan
	deps lifecycle.Deps
	turn chan struct{} // held by Start and Close

	mu       sync.Mutex
	closed   bool
	now      *child // the latest; nil: none yet
	starts   int
	lastExit string // of the one before now
}

func supported() error { return nil }

func newMeans(p *plan, deps lifecycle.Deps) (starter, error) {
	deps = deps.WithDefaults()
	switch {
	case deps.Upstream == "" && !p.usesPort:
		return nil, errors.New("nobody says where the server listens: write {gpu_broker.port} where its command takes the port, or give the consumer `upstream host:port`")
	case deps.Upstream != "" && p.ownPorts:
		return nil, errors.New("`upstream` and `ports` are both given: keep one")
	case p.user != nil && os.Geteuid() != 0 && int(p.user.uid) != os.Geteuid():
		return nil, fmt.Errorf("its process is to run as user %s, but Caddy does not run as root, who alone can do that: run Caddy as root, or remove `user`", p.user.name)
	}
	return &means{plan: p, deps: deps, turn: make(chan struct{}, 1)}, nil
}

// Start starts the process unless it runs.
func (m *means) Start(ctx context.Context, t lifecycle.Target) error {
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	m.mu.Lock()
	before, closed := m.now, m.closed
	m.mu.Unlock()
	switch {
	case closed:
		return supervise.ErrClosed
	case before != nil && before.running():
		return nil
	case before != nil:
		select {
		case <-before.gone:
		case <-ctx.Done():
			return fmt.Errorf("process group %d, which ran before, is not gone yet (%w)", before.record.Leader.PID, ctx.Err())
		}
	}
	if err := m.strangers(ctx); err != nil {
		return err
	}
	c, err := m.prepare(t)
	if err != nil {
		return err
	}
	if err := c.start(); err != nil {
		return m.explain(err)
	}
	m.mu.Lock()
	if before != nil {
		m.lastExit = before.why
	}
	m.now = c
	m.starts++
	m.mu.Unlock()
	m.deps.Logger.Info("server started", zap.String("program", m.plan.shown), zap.Int("pid", c.cmd.Process.Pid), zap.String("address", m.address(c)))
	return nil
}

// strangers looks for another who listens at the consumer's upstream: it would
// be taken for the server, which could not listen there.
func (m *means) strangers(ctx context.Context) error {
	if m.deps.Upstream == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, knockTime)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", m.deps.Upstream)
	if err != nil {
		return nil
	}
	return errors.Join(fmt.Errorf("another process listens at %s already: end it, or let the server listen elsewhere", m.deps.Upstream), conn.Close())
}

// prepare makes a run that is not started yet, and takes a port for it.
func (m *means) prepare(t lifecycle.Target) (*child, error) {
	values := valuesOf(t)
	port := 0
	switch {
	case !m.plan.usesPort:
	case m.deps.Upstream != "":
		_, text, err := net.SplitHostPort(m.deps.Upstream)
		if err != nil {
			return nil, fmt.Errorf("upstream %q is not host:port", m.deps.Upstream)
		}
		values[portItem] = text
	default:
		var err error
		if port, err = ports.take(m.plan.ports); err != nil {
			return nil, err
		}
		values[portItem] = strconv.Itoa(port)
	}
	mark := rand.Text()
	args := make([]string, len(m.plan.command))
	for i, word := range m.plan.command {
		args[i] = word.render(values)
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir = m.plan.dir.render(values)
	cmd.Env = m.plan.environment(os.Environ(), t, values, mark)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if u := m.plan.user; u != nil && os.Geteuid() == 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: u.uid, Gid: u.gid, Groups: u.groups}
	}
	r := &record{Mark: mark, Consumer: m.deps.Consumer, Boot: bootid.Get(), Owner: self()}
	return newChild(m.plan, m.deps.Dir, m.deps.Logger, cmd, r, port), nil
}

// explain says why the process could not be started, without a secret.
func (m *means) explain(err error) error {
	text := m.plan.redact(err.Error())
	switch {
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s can't be started: %s: is it installed, and does its `dir` exist?", m.plan.shown, text)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s can't be started: %s: may the user that it is to run as execute it, and enter its `dir`?", m.plan.shown, text)
	default:
		return fmt.Errorf("%s can't be started: %s", m.plan.shown, text)
	}
}

func (m *means) address(c *child) string {
	if c.port == 0 {
		return m.deps.Upstream
	}
	return net.JoinHostPort(localhost, strconv.Itoa(c.port))
}

func (m *means) latest() *child {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.now
}

// Stop ends the process and all that it has started.
func (m *means) Stop(ctx context.Context) error {
	c := m.latest()
	if c == nil {
		return nil
	}
	return c.stop(ctx)
}

// Running reports whether the process runs.
func (m *means) Running(context.Context) (bool, error) {
	c := m.latest()
	return c != nil && c.running(), nil
}

// Latest tells the end of the latest process, and where it listens.
func (m *means) Latest() (ended <-chan struct{}, upstream string) {
	if c := m.latest(); c != nil {
		return c.ended, m.address(c)
	}
	return nil, ""
}

// Why says how the latest process ended.
func (m *means) Why() string {
	c := m.latest()
	if c == nil {
		return "it was not started"
	}
	select {
	case <-c.ended:
		return c.why
	default:
		return "it runs"
	}
}

// Failed reports whether the latest process has ended, by anything but an exit status of 0.
func (m *means) Failed() bool {
	c := m.latest()
	if c == nil {
		return false
	}
	select {
	case <-c.down:
		return c.failed
	default:
		return false
	}
}

// Owns reports whether pid is the process or comes from it.
func (m *means) Owns(pid int) bool {
	c := m.latest()
	if c == nil {
		return false
	}
	select {
	case <-c.gone:
		return false
	default:
	}
	leader := c.cmd.Process.Pid
	const deepest = 32 // a bound on its ancestors
	for at, i := pid, 0; at > 1 && i < deepest; i++ {
		p, err := readProc(at)
		if err != nil {
			break
		}
		if at == leader || p.group == leader {
			return true
		}
		at = p.parent
	}
	return mark(pid) == c.record.Mark
}

// State tells of the latest process.
func (m *means) State() lifecycle.State {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := lifecycle.State{Starts: m.starts, LastExit: m.lastExit}
	c := m.now
	if c == nil {
		return s
	}
	s.Output, s.StartedAt, s.Address = c.out.tail(), c.began, m.address(c)
	if s.Running = c.running(); s.Running {
		s.PID = c.cmd.Process.Pid
	}
	select {
	case <-c.ended:
		s.LastExit = c.why
	default:
	}
	return s
}

// Close stops the process, within its grace, and keeps it from being started again.
func (m *means) Close() error {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.turn <- struct{}{} // a start that is under way is short, or waits for one that ends
	defer func() { <-m.turn }()
	c := m.latest()
	if c == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), m.plan.grace+time.Second)
	defer cancel()
	err := c.stop(ctx)
	if err == nil {
		within(c.out.written, logPatience)
	}
	return err
}

// signalOf finds a signal by its name, with or without SIG.
func signalOf(name string) (syscall.Signal, bool) {
	s := cmp.Or(unix.SignalNum(name), unix.SignalNum("SIG"+name))
	return s, s != 0
}

// untouched fails where somebody listens at a port, or did a moment ago.
func untouched(port int) error {
	return listen(net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) error {
		var set error
		err := conn.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 0) })
		return errors.Join(err, set)
	}}, port)
}

// reserve keeps other Caddys of this host, or rather of this network
// namespace, from giving a port away until it is closed or Caddy ends.
func reserve(port int) (io.Closer, error) {
	return net.Listen("unix", "@gpu_broker.port."+strconv.Itoa(port))
}
