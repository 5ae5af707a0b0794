package modelserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Server is a pretending model server. Its counters and faults outlive its
// deaths; everything else belongs to one life, from a (re)start to a death.
// All methods are safe for concurrent use.
type Server struct {
	name string
	dir  string
	addr string // host:port; the first life sets it before anything else can read it

	// starting makes restarts exclude each other.
	starting sync.Mutex

	mu     sync.Mutex // guards everything below and all models
	opts   Options
	faults Faults
	stats  Stats
	events []Event
	seq    int
	nextID int
	change chan struct{} // closed at the next change; nil while nobody waits
	life   *life
	closed bool
	later  sync.WaitGroup // restarts that /control has put off
	ended  chan struct{}  // closed by Close
}

// life is one process: what is gone when it is killed.
type life struct {
	s      *Server
	ctx    context.Context
	cancel context.CancelFunc
	http   *http.Server
	memory *memory
	tasks  sync.WaitGroup // handlers and background tasks
	turns  chan struct{}  // one token per unit of Concurrency; nil if unbounded

	// dead says that the end has begun: no task starts. gone says that the port
	// is closed, too, so that others may see the death. port is what it listens
	// on, nil before and after. All three are guarded by Server.mu.
	dead, gone bool
	port       net.Listener
	over       chan struct{} // closed once die is done

	models map[string]*model
	queue  *queue // nil in a manner without jobs
	renews bool   // its manner's
	worker func() // what a manner runs beside its handler, until the life ends; nil: nothing
}

// inUse holds the names of the servers of this process by folder: two of the
// same name would write to the same file.
var inUse sync.Map

// Start makes a server and returns once it listens and, with Preloaded, has
// loaded. The caller must Close it.
func Start(opts Options) (*Server, error) {
	opts, err := opts.complete()
	if err != nil {
		return nil, err
	}
	key := opts.SimDir + "\x00" + opts.Name
	if _, taken := inUse.LoadOrStore(key, true); taken {
		return nil, fmt.Errorf("server %s: this process already has one of that name in %s: choose another name", opts.Name, opts.SimDir)
	}
	s := &Server{
		name: opts.Name, dir: opts.SimDir, addr: opts.Addr,
		opts: opts, faults: opts.Faults.clone(), ended: make(chan struct{}),
		stats: Stats{Requests: map[string]int{}},
	}
	if err := s.begin(opts.Preloaded); err != nil {
		inUse.Delete(key)
		return nil, err
	}
	return s, nil
}

// Name is its name.
func (s *Server) Name() string { return s.name }

// Addr is its host and port; it stays the same over restarts.
func (s *Server) Addr() string { return s.addr }

// URL is its address as http://host:port.
func (s *Server) URL() string { return "http://" + s.addr }

// Faults is how it misbehaves now.
func (s *Server) Faults() Faults {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.faults.clone()
}

// SetFaults changes how it misbehaves, at once.
func (s *Server) SetFaults(change func(*Faults)) {
	s.mu.Lock()
	f := s.faults.clone()
	change(&f)
	s.faults = f
	l := s.life
	s.notify()
	s.mu.Unlock()
	l.memory.refresh()
}

// SetOptions changes times, sizes and laziness from now on. Name, Manner,
// Addr, SimDir, GPU, Models, Concurrency and Faults stay as they were.
func (s *Server) SetOptions(change func(*Options)) {
	s.setOptions(change).memory.refresh()
}

func (s *Server) setOptions(change func(*Options)) *life {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.opts
	change(&o)
	o.Name, o.Manner, o.Addr, o.SimDir, o.GPU = s.opts.Name, s.opts.Manner, s.opts.Addr, s.opts.SimDir, s.opts.GPU
	o.Models, o.Concurrency, o.Faults = s.opts.Models, s.opts.Concurrency, s.opts.Faults
	o.LoadSteps = max(o.LoadSteps, 1)
	if o.VRAM != s.opts.VRAM {
		for _, m := range s.life.models {
			m.size = o.VRAM
		}
	}
	s.opts = o
	s.notify()
	return s.life
}

// Kill ends it as SIGKILL would: listener and connections drop, its memory is
// free, everything it did is over when Kill returns. Restart revives it.
func (s *Server) Kill() {
	l := s.current()
	l.die("killed")
	l.tasks.Wait()
}

// Restart starts it anew on the same port, killing it first if it lives.
func (s *Server) Restart() error { return s.restart("restarted", s.options().Preloaded) }

// restart is Restart that loads or not, whatever Preloaded says. No cause means
// that the old life's end is no death.
func (s *Server) restart(cause string, load bool) error {
	s.starting.Lock()
	defer s.starting.Unlock()
	l := s.current()
	l.die(cause)
	l.tasks.Wait()
	return s.begin(load)
}

// Close ends it for good and waits for everything that it started.
func (s *Server) Close() error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.ended)
		inUse.Delete(s.dir + "\x00" + s.name)
	}
	s.mu.Unlock()
	s.current().die("") // so that a restart that hangs in its preloading ends
	s.starting.Lock()
	l := s.current()
	l.die("")
	l.tasks.Wait()
	s.starting.Unlock()
	s.later.Wait()
	return nil
}

// Load loads everything as if somebody else had asked for it, and waits.
func (s *Server) Load(ctx context.Context) error {
	l := s.current()
	for _, m := range l.models {
		release, err := l.acquire(ctx, m, true)
		if err != nil {
			return err
		}
		release()
	}
	return nil
}

// Unload unloads everything as if the server did so by itself, and waits.
func (s *Server) Unload(ctx context.Context) error {
	l := s.current()
	for _, m := range l.models {
		if err := l.unload(ctx, m); err != nil {
			return err
		}
	}
	return nil
}

func (s *Server) current() *life {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.life
}

func (s *Server) options() Options {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opts
}

// begin starts a life, with everything loaded if load says so. The caller owns
// starting, or nobody else knows s yet.
func (s *Server) begin(load bool) error {
	listener, err := listen(s.addr)
	if err != nil {
		return fmt.Errorf("server %s: listening: %w", s.name, err)
	}
	opts := s.options()
	kind := manners[opts.Manner]
	l := &life{s: s, port: listener, over: make(chan struct{}), models: map[string]*model{}, renews: kind.renews}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.memory, err = newMemory(l)
	if err != nil {
		l.cancel()
		return errors.Join(fmt.Errorf("server %s: %w", s.name, err), listener.Close())
	}
	if opts.Concurrency > 0 {
		l.turns = make(chan struct{}, opts.Concurrency)
	}
	for name, size := range opts.Models {
		m := &model{name: name, size: size}
		if !kind.many {
			m.size = opts.VRAM
		}
		l.models[name] = m
	}
	l.http = &http.Server{
		Handler:           l.wrap(kind.serve(l)),
		ReadHeaderTimeout: time.Minute,
		BaseContext:       func(net.Listener) context.Context { return l.ctx },
	}

	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		l.cancel()
		l.memory.drop()
		return errors.Join(fmt.Errorf("server %s is closed: start a new one", s.name), listener.Close())
	}
	if s.life == nil {
		s.addr = listener.Addr().String()
	}
	s.life = l
	s.note(Event{Kind: EventStart})
	s.mu.Unlock()

	if l.worker != nil {
		l.spawn(l.worker)
	}
	if kind.early && (load || kind.atStart) {
		l.loadAll()
	} else if load || kind.atStart {
		if kind.late {
			_ = listener.Close() // the address is known now; it is listened on again below
		}
		if err := s.Load(l.ctx); err != nil {
			l.die("could not preload")
			l.tasks.Wait()
			return fmt.Errorf("server %s: preloading: %w", s.name, err)
		}
		if kind.late {
			if listener, err = listen(s.addr); err != nil {
				l.die("could not listen")
				l.tasks.Wait()
				return fmt.Errorf("server %s: listening again: %w", s.name, err)
			}
			if !l.listensOn(listener) {
				return errors.Join(fmt.Errorf("server %s died before it listened", s.name), listener.Close())
			}
		}
	}
	serving := l.spawn(func() {
		// It ends with ErrServerClosed: die closes the listener.
		_ = l.http.Serve(listener)
	})
	if !serving && kind.early && !load {
		return nil // it has started, and ended by a load that failed at once
	}
	if !serving {
		return fmt.Errorf("server %s died before it listened", s.name)
	}
	if kind.early && load {
		if err := s.Load(l.ctx); err != nil {
			l.die("could not preload")
			l.tasks.Wait()
			return fmt.Errorf("server %s: preloading: %w", s.name, err)
		}
	}
	return nil
}

// loadAll starts to load everything, and a task that ends the process if that fails.
func (l *life) loadAll() {
	var runs []*loadRun
	l.s.mu.Lock()
	for _, m := range l.models {
		if m.phase == idle && !l.dead {
			l.startLoad(m)
			runs = append(runs, m.load)
		}
	}
	l.s.mu.Unlock()
	l.spawn(func() {
		for _, run := range runs {
			<-run.done
			if run.err != nil {
				l.dieOf("the model could not be loaded at the start")
			}
		}
	})
}

// listensOn hands the life a port that its end closes. It reports false in a
// dead life, which leaves the port to the caller.
func (l *life) listensOn(port net.Listener) bool {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	if l.dead {
		return false
	}
	l.port = port
	return true
}

// listen waits a moment for a port that was just left: another socket of this
// machine may have got it as its own port meanwhile.
func listen(addr string) (net.Listener, error) {
	for end := time.Now().Add(3 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		listener, err := net.Listen("tcp", addr)
		if err == nil || !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(end) {
			return listener, err
		}
	}
}

// die ends the life without waiting for its tasks, so that they can call it.
// No cause means an orderly end, which is no death. The port is closed before
// anybody can see that the server is dead, and connections drop after that: who
// sees either can rely on the rest. When die returns, also to a second caller,
// all of it is done.
func (l *life) die(cause string) {
	s := l.s
	s.mu.Lock()
	if l.dead {
		s.mu.Unlock()
		<-l.over
		return
	}
	l.dead = true
	port := l.port
	l.port = nil
	for _, m := range l.models {
		m.stopTimer()
	}
	s.mu.Unlock()
	defer close(l.over)
	_ = StopListening(port) // of a late one that still loads it is closed already

	s.mu.Lock()
	l.gone = true
	if cause != "" {
		s.stats.Deaths++
		s.note(Event{Kind: EventDeath, Detail: cause})
	} else {
		s.notify()
	}
	s.mu.Unlock()
	l.cancel()
	_ = l.http.Close() // its errors say that a connection is already gone
	l.memory.drop()
}

// dieOf is die by a fault.
func (l *life) dieOf(fault string) {
	l.die(fault)
	if f := l.s.options().OnDeath; f != nil {
		f()
	}
}

// spawn runs f as a task of this life; f must end when l.ctx does. In a dead
// life nothing starts.
func (l *life) spawn(f func()) bool {
	if !l.enter() {
		return false
	}
	go func() {
		defer l.tasks.Done()
		f()
	}()
	return true
}

// enter counts a task that runs in the caller's goroutine; the caller must call
// tasks.Done. The lock makes sure that no task begins once die has been there.
func (l *life) enter() bool {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	if l.dead {
		return false
	}
	l.tasks.Add(1)
	return true
}

// faults is how the server misbehaves now.
func (l *life) faults() Faults { return l.s.Faults() }

// takeFault clears a one-time fault and reports whether it was set.
func (l *life) takeFault(take func(*Faults) bool) bool {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	f := l.s.faults.clone()
	if !take(&f) {
		return false
	}
	l.s.faults = f
	l.s.notify()
	return true
}

// hangWhile waits until the fault is cleared, or ctx or the life ends.
func (l *life) hangWhile(ctx context.Context, fault func(Faults) bool) error {
	return l.waitUntil(ctx, func() bool { return !fault(l.s.faults) })
}

// waitUntil waits until cond, which is called with mu held, is true.
func (l *life) waitUntil(ctx context.Context, cond func() bool) error {
	for {
		l.s.mu.Lock()
		ok := cond()
		var changed <-chan struct{}
		if !ok {
			changed = l.s.changed()
		}
		l.s.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-l.ctx.Done():
			return errDead
		}
	}
}

// sleep returns early with an error when ctx or the life ends.
func (l *life) sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-l.ctx.Done():
		return errDead
	}
}

// note logs an event.
func (l *life) note(e Event) {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	l.s.note(e)
}

// held reports a change of what the life holds.
func (l *life) held(b gpu.Bytes) {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	if l.s.stats.Held != b {
		l.s.stats.Held = b
		l.s.note(Event{Kind: EventMemory, Held: b})
	}
}
