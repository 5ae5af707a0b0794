package modelserver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// phase is where a model is in its circle of life.
type phase int

const (
	idle phase = iota
	loading
	loaded
	unloading
)

// model is one model of a life. All fields but name are guarded by Server.mu.
type model struct {
	name string
	size gpu.Bytes

	phase    phase
	resident gpu.Bytes // on the GPU, in its own words
	users    int       // pieces of work that use it
	waiters  int       // that wait for its load
	epoch    int       // raised by each unload: work that began before it is broken
	load     *loadRun
	lied     bool // it said that it was unloaded and kept its memory

	// ollama only
	expired   bool // to be unloaded as soon as nobody uses it
	expiring  bool // a task sees to that
	keepAlive time.Duration
	expires   time.Time
	timer     *time.Timer
}

// loadRun is one load; err is set before done is closed.
type loadRun struct {
	ctx  context.Context
	kill context.CancelFunc // makes it fail with errKilled
	done chan struct{}
	err  error
}

var (
	errDead      = errors.New("the server has died")
	errNotLoaded = errors.New("not loaded")
	errRefused   = errors.New("load refused: the model could not be loaded")
	errOOM       = errors.New("CUDA out of memory")
	errKilled    = errors.New("the load was killed")
)

// outOfMemory words the failure as torch does; it wraps errOOM.
func outOfMemory(size, total, used gpu.Bytes) error {
	return fmt.Errorf("%w. Tried to allocate %.2f GiB. GPU 0 has a total capacity of %.2f GiB of which %.2f GiB is free",
		errOOM, gib(size), gib(total), gib(max(0, total-used)))
}

func gib(b gpu.Bytes) float64 { return float64(b) / float64(gpu.GiB) }

func (m *model) saysLoaded() bool { return m.phase == loaded || m.phase == unloading }

func (m *model) stopTimer() {
	if m.timer != nil {
		m.timer.Stop()
		m.timer = nil
	}
}

// acquire makes sure that m is loaded and in use until release is called. It
// joins a load that runs, waits for an unload that runs, and with lazy starts
// a load; else it fails with errNotLoaded.
func (l *life) acquire(ctx context.Context, m *model, lazy bool) (release func(), err error) {
	s := l.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.phase == loading || m.phase == loaded {
		// A bad habit of ollama's: a request that comes after the mark to
		// unload wipes it out.
		m.expired = false
	}
	for {
		var wait <-chan struct{}
		var run *loadRun
		switch {
		case l.dead:
			return nil, errDead
		case m.phase == loaded:
			m.users++
			m.stopTimer()
			return func() { l.release(m) }, nil
		case m.phase == idle && !lazy:
			return nil, errNotLoaded
		case m.phase == unloading:
			wait = s.changed()
		default:
			if m.phase == idle {
				l.startLoad(m)
			}
			run = m.load
			wait = run.done
			m.waiters++
		}
		s.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			err = ctx.Err()
		case <-l.ctx.Done():
			err = errDead
		}
		s.mu.Lock()
		if run != nil {
			m.waiters--
			s.notify()
			if err == nil {
				err = run.err
			}
		}
		if err != nil {
			return nil, err
		}
	}
}

func (l *life) release(m *model) {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	m.users--
	l.s.notify()
}

// startLoad is for holders of mu who found m idle and the life alive.
func (l *life) startLoad(m *model) {
	m.phase = loading
	m.resident = 0
	m.load = &loadRun{done: make(chan struct{})}
	m.load.ctx, m.load.kill = context.WithCancel(l.ctx)
	l.s.stats.LoadsStarted++
	l.s.note(Event{Kind: EventLoadStart, Model: m.name})
	l.tasks.Add(1) // the life is not dead: mu is held since that was checked
	run := m.load
	go func() {
		defer l.tasks.Done()
		defer run.kill()
		got, err := l.doLoad(run.ctx, m)
		l.s.mu.Lock()
		defer l.s.mu.Unlock()
		if err != nil && run.ctx.Err() != nil && !l.dead {
			err = errKilled
		}
		run.err = err
		if err != nil {
			m.phase = idle
			l.s.stats.LoadsFailed++
			if errors.Is(err, errOOM) && !errors.Is(err, errInjected) {
				l.s.stats.OOMs++
			}
			l.s.note(Event{Kind: EventLoadFail, Model: m.name, Detail: err.Error()})
		} else {
			m.phase, m.resident, m.lied = loaded, got, false
			l.s.stats.Loads++
			if got < m.size && !l.s.opts.OnCPU {
				l.s.stats.Spills++
			}
			l.s.note(Event{Kind: EventLoadEnd, Model: m.name})
		}
		close(run.done)
	}()
}

// errInjected marks an out-of-memory that a fault has made up.
var errInjected = errors.New("as told by a fault")

func (l *life) doLoad(ctx context.Context, m *model) (gpu.Bytes, error) {
	opts := l.s.options()
	if l.faults().RefuseLoad {
		return 0, errRefused
	}
	oom := l.takeFault(func(f *Faults) bool { f.OOMLoads--; return f.OOMLoads >= 0 })
	if oom {
		return 0, fmt.Errorf("%w (%w)", outOfMemory(m.size, opts.Total, opts.Total), errInjected)
	}
	fatal := l.takeFault(func(f *Faults) bool { was := f.DieOnLoad; f.DieOnLoad = false; return was })

	var got gpu.Bytes
	var err error
	for step := 1; step <= opts.LoadSteps && err == nil; step++ {
		size := m.size * gpu.Bytes(step) / gpu.Bytes(opts.LoadSteps)
		if got, err = l.memory.take(m.name, size); err != nil {
			break
		}
		if fatal {
			l.dieOf("die_on_load")
			return 0, errDead
		}
		err = l.sleep(ctx, opts.LoadTime/time.Duration(opts.LoadSteps))
	}
	if err == nil {
		err = l.hangWhile(ctx, func(f Faults) bool { return f.HangLoad })
	}
	if err != nil {
		l.memory.free(m.name, l.memory.generation(m.name))
		return 0, err
	}
	return got, nil
}

// unload unloads m and waits until it says that it is unloaded. It doesn't wait
// for work that runs: that work is broken once the memory goes, as with the
// servers whose unload takes no lock.
func (l *life) unload(ctx context.Context, m *model) error { return l.unloadUnder(ctx, m, false) }

// cut is unload as servers do it that end running work at once.
func (l *life) cut(ctx context.Context, m *model) error { return l.unloadUnder(ctx, m, true) }

func (l *life) unloadUnder(ctx context.Context, m *model, atOnce bool) error {
	if err := l.waitUntil(ctx, func() bool { return l.dead || m.phase == idle || m.phase == loaded }); err != nil {
		return err
	}
	done := make(chan struct{})
	l.s.mu.Lock()
	switch {
	case l.dead:
		l.s.mu.Unlock()
		return errDead
	case m.phase != loaded: // somebody else has just unloaded it, or loads it anew
		l.s.mu.Unlock()
		l.makeGood(m)
		return nil
	}
	if m.users > 0 {
		l.s.stats.UnloadsWhileBusy++
	}
	if atOnce {
		m.epoch++
	}
	l.beginUnload(m, func() { close(done) })
	l.s.mu.Unlock()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// unloadFree unloads m as soon as nobody uses it, and reports whether there was
// something to unload. ctx bounds that waiting; once begun, the unload is waited
// for as long as the life lasts.
func (l *life) unloadFree(ctx context.Context, m *model) (begun bool, err error) {
	done := make(chan struct{})
	err = l.waitUntil(ctx, func() bool {
		free := m.phase == loaded && m.users == 0 && m.waiters == 0
		if begun = free && !l.dead; begun {
			l.beginUnload(m, func() { close(done) })
		}
		return begun || l.dead || m.phase == idle
	})
	switch {
	case err != nil:
		return false, err
	case begun:
		<-done // it ends with the life
	default:
		l.makeGood(m)
	}
	return begun, nil
}

// killLoad ends a load of m that runs and waits for its end; it reports whether there was one.
func (l *life) killLoad(m *model) bool {
	l.s.mu.Lock()
	run := m.load
	runs := m.phase == loading
	l.s.mu.Unlock()
	if runs {
		run.kill()
		<-run.done
	}
	return runs
}

// beginUnload starts to unload m. For holders of mu who found m loaded and the
// life alive. done, if not nil, is called at the end.
func (l *life) beginUnload(m *model, done func()) {
	m.phase = unloading
	m.expired = false
	m.stopTimer()
	l.s.note(Event{Kind: EventUnloadStart, Model: m.name})
	l.tasks.Add(1)
	go func() {
		defer l.tasks.Done()
		l.doUnload(m)
		if done != nil {
			done()
		}
	}()
}

func (l *life) doUnload(m *model) {
	s := l.s
	opts := s.options()
	if l.hangWhile(l.ctx, func(f Faults) bool { return f.HangUnload }) != nil {
		return
	}
	if l.sleep(l.ctx, opts.UnloadTime) != nil {
		return
	}
	faults := l.faults()
	gen := l.memory.generation(m.name)
	released := false
	if l.renews && !faults.LieStillLoaded {
		l.memory.renew()
		released = true
	} else if !faults.LieStillLoaded {
		l.memory.leak(faults.LeakPerCycle)
		if opts.ReleaseDelay <= 0 && !faults.NeverRelease && !faults.LieUnloaded {
			l.memory.free(m.name, gen)
			released = true
		}
	}
	s.mu.Lock()
	if faults.LieStillLoaded {
		m.phase = loaded
		s.note(Event{Kind: EventUnloadEnd, Model: m.name, Detail: "lies: still loaded"})
	} else {
		m.phase = idle
		m.resident = 0
		m.epoch++
		m.lied = faults.LieUnloaded
		s.stats.Unloads++
		s.note(Event{Kind: EventUnloadEnd, Model: m.name})
	}
	s.mu.Unlock()
	if released || faults.LieStillLoaded || faults.LieUnloaded {
		return
	}
	l.spawn(func() {
		if l.sleep(l.ctx, opts.ReleaseDelay) != nil {
			return
		}
		if l.hangWhile(l.ctx, func(f Faults) bool { return f.NeverRelease }) != nil {
			return
		}
		l.memory.free(m.name, gen)
	})
}

// unloadCalled counts a request to unload m (nil: everything).
func (l *life) unloadCalled(m *model) {
	event := Event{Kind: EventUnloadCall}
	if m != nil {
		event.Model = m.name
	}
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	l.s.stats.UnloadCalls++
	l.s.note(event)
}

// makeGood frees what an earlier unload only claimed to have freed, once the
// server doesn't lie any more.
func (l *life) makeGood(m *model) {
	l.s.mu.Lock()
	due := m.lied && m.phase == idle && !l.s.faults.LieUnloaded
	if due {
		m.lied = false
	}
	l.s.mu.Unlock()
	if due {
		l.memory.free(m.name, l.memory.generation(m.name))
	}
}
