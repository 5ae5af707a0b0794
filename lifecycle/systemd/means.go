package systemd

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/internal/supervised"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/supervise"
)

// The pace at which a bus that went away is looked for.
const (
	firstRedial = 50 * time.Millisecond
	lastRedial  = 5 * time.Second
)

// means starts and stops one unit.
type means struct {
	unit   ref
	limits *lifecycle.Limits // that of an unload is for the stop at the end
	log    *zap.Logger

	// ctx ends the followers.
	ctx       context.Context
	cancel    context.CancelFunc
	followers sync.WaitGroup

	record supervised.Record

	// turn is held by whoever connects or looks, so that views come in order.
	turn chan struct{}
	// These are of whoever has the turn.
	closed  bool
	session *session // the latest; nil: none yet
	last    view
	fresh   bool // last is of this session

	mu    sync.Mutex // guards group
	group string     // the control group of the latest run
}

func newMeans(unit ref, deps lifecycle.Deps) *means {
	m := &means{
		unit: unit, limits: deps.Limits,
		log:  deps.Logger.With(zap.Stringer("unit", unit)),
		turn: make(chan struct{}, 1),
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	return m
}

// Start asks systemd to start the unit unless it runs, and waits until it says
// that it did. The GPUs of the target are the unit's own affair.
func (m *means) Start(ctx context.Context, _ lifecycle.Target) error {
	s, v, err := m.look(ctx, true)
	if err != nil {
		return err
	}
	if v.active == "active" || v.active == "reloading" {
		return nil
	}
	if err := v.unloadable(m.unit); err != nil {
		return err
	}
	before := v.run
	if v.waits() { // a start would wait with it, until RestartSec= is over
		if _, err := s.job(ctx, "StopUnit", m.unit.name); err != nil {
			return explained(err, "stopping", m.unit)
		}
	}
	m.record.Asking()
	result, err := s.job(ctx, "StartUnit", m.unit.name)
	if err != nil {
		var refused dbus.Error
		if errors.As(err, &refused) {
			m.record.Answered()
		}
		return explained(err, "starting", m.unit)
	}
	_, v, err = m.look(ctx, true)
	if err != nil {
		return err
	}
	m.record.Answered()
	if result == "failed" && v.run == before {
		return fmt.Errorf("unit %s: systemd did not even try to start it: was it started too often of late? Write StartLimitIntervalSec=0 into the unit, and `%s`", m.unit, m.unit.systemctl("reset-failed"))
	}
	if err := came(result, "starting", m.unit, &v); err != nil {
		return err
	}
	if !m.record.Runs() {
		return fmt.Errorf("unit %s ended as soon as it was started: %s, or a Condition…= in the unit is not met; see `%s`", m.unit, v.end, m.unit.journal())
	}
	return nil
}

// Stop asks systemd to stop the unit, and returns once it did.
func (m *means) Stop(ctx context.Context) error {
	s, v, err := m.look(ctx, true)
	if err != nil {
		return err
	}
	// While it waits to be started again it does not live, and would.
	if v.alive() || v.waits() || m.record.Asked() {
		m.record.Stopping()
		result, err := s.job(ctx, "StopUnit", m.unit.name)
		if err != nil {
			return explained(err, "stopping", m.unit)
		}
		m.record.Answered()
		if _, v, err = m.look(ctx, true); err != nil {
			return err
		}
		if v.alive() || v.waits() {
			if err := came(result, "stopping", m.unit, &v); err != nil {
				return err
			}
			return fmt.Errorf("unit %s was stopped and is %s again: is it started by another unit, a socket or a timer?", m.unit, v.active)
		}
	}
	if left := supervised.Members(m.lastGroup()); len(left) > 0 && !v.alive() {
		return fmt.Errorf("unit %s is stopped, but its processes %v live on and may keep GPU memory: leave KillMode=control-group in the unit", m.unit, left)
	}
	return nil
}

// Running asks systemd.
func (m *means) Running(ctx context.Context) (bool, error) {
	if _, _, err := m.look(ctx, false); err != nil {
		return false, err
	}
	return m.record.Runs(), nil
}

// Latest does not tell where it listens: the consumer must.
func (m *means) Latest() (ended <-chan struct{}, upstream string) { return m.record.Ended(), "" }

func (m *means) Why() string { return m.record.Why() }

// Owns looks at the control group, also after the end: what was left is still the unit's.
func (m *means) Owns(pid int) bool { return supervised.InGroup(pid, m.lastGroup()) }

func (m *means) lastGroup() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.group
}

func (m *means) State() lifecycle.State {
	s := m.record.State()
	s.Unit = m.unit.name
	return s
}

// Close stops the unit if it runs because of us, and ends all goroutines.
func (m *means) Close() error {
	var err error
	if m.record.Ours() {
		ctx, cancel := context.WithTimeout(context.Background(), m.limits.Unload())
		err = m.Stop(ctx)
		cancel()
	}
	m.cancel()
	m.turn <- struct{}{} // who has it ends soon
	m.closed = true
	if m.session != nil {
		_ = m.session.conn.Close() // nothing is left to be sent
	}
	<-m.turn
	m.followers.Wait()
	return err
}

// take waits for the turn. Until done is called, what is asked is bounded.
func (m *means) take(ctx context.Context) (context.Context, func(), error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	stop := context.AfterFunc(m.ctx, cancel)
	select {
	case m.turn <- struct{}{}:
		return ctx, func() { stop(); cancel(); <-m.turn }, nil
	case <-ctx.Done():
		stop()
		cancel()
		return nil, nil, fmt.Errorf("unit %s: systemd does not answer (%w)", m.unit, ctx.Err())
	}
}

// connect dials unless the session stands. The caller has the turn.
func (m *means) connect(ctx context.Context) (*session, error) {
	if m.closed {
		return nil, supervise.ErrClosed
	}
	if m.session != nil && m.session.alive() {
		return m.session, nil
	}
	s, err := dial(ctx, m.unit)
	if err != nil {
		return nil, fmt.Errorf("unit %s: %w", m.unit, err)
	}
	m.session, m.fresh = s, false
	m.followers.Go(func() { m.follow(s) })
	return s, nil
}

// look asks systemd for the unit, and notes what it says. Without force it
// asks for no more than the state if that has not changed.
func (m *means) look(ctx context.Context, force bool) (*session, view, error) {
	ctx, done, err := m.take(ctx)
	if err != nil {
		return nil, view{}, err
	}
	defer done()
	s, err := m.connect(ctx)
	if err != nil {
		return nil, view{}, err
	}
	// First the unit, then the service: if the first says that it has ended, the second knows how.
	p, err := s.get(ctx, unitInterface)
	if err != nil {
		return nil, view{}, explained(err, "looking at", m.unit)
	}
	v := m.last
	v.readUnit(p)
	if force || !m.fresh || v.active != m.last.active || v.sub != m.last.sub || v.run != m.last.run {
		if v.alive() && v.run != m.last.run {
			v.end = exit{} // of the run before
		}
		if p, err = s.get(ctx, serviceInterface); err != nil {
			return nil, view{}, explained(err, "looking at", m.unit)
		}
		v.readService(p)
	}
	m.note(v)
	return s, v, nil
}

// note takes a view. The caller has the turn.
func (m *means) note(v view) {
	before := m.last.end
	m.last, m.fresh = v, true
	if v.alive() && v.group != "" {
		m.mu.Lock()
		m.group = v.group
		m.mu.Unlock()
	}
	seen := supervised.View{Runs: v.alive(), Run: v.run, PID: v.pid, Started: v.started}
	switch {
	case !seen.Runs:
		seen.End = v.end.String()
	case before != (exit{}) && before.code != 0: // only the next run is seen: what was heard in between tells
		seen.End = before.String()
	}
	m.record.See(seen)
}

// follow hears of the unit as long as the session stands, then looks for the bus until a new one does.
func (m *means) follow(s *session) {
	for signal := range s.signals { // closed with the connection
		switch {
		case signal.Name == jobRemoved:
			s.finished(signal.Body)
		case signal.Name == ownerChanged:
			ctx, cancel := context.WithTimeout(m.ctx, callTime)
			if err := s.subscribe(ctx, m.unit); err != nil {
				m.log.Debug("systemd is away", zap.Error(err))
			}
			cancel()
			m.relook()
		case signal.Name == propertyChanged && signal.Path == s.object.Path():
			m.heard(signal.Body)
			if len(s.signals) == 0 {
				m.relook()
			}
		}
	}
	for wait := firstRedial; ; wait = min(2*wait, lastRedial) {
		select {
		case <-m.ctx.Done():
			return
		case <-time.After(wait):
		}
		if m.relook() {
			return // the new session has a follower of its own
		}
	}
}

// relook looks again; true: systemd answered.
func (m *means) relook() bool {
	_, _, err := m.look(m.ctx, true)
	if err != nil && m.ctx.Err() == nil {
		m.log.Debug("systemd can't be asked for the unit", zap.Error(err))
	}
	return err == nil
}

// heard keeps how the service ended, which systemd may forget before it can be
// asked. body is that of PropertiesChanged: interface, values, names.
func (m *means) heard(body []any) {
	if len(body) < 2 || body[0] != serviceInterface {
		return
	}
	changed, _ := body[1].(map[string]dbus.Variant)
	if _, done, err := m.take(m.ctx); err == nil {
		m.last.end.read(changed)
		done()
	}
}

var _ supervise.Means = (*means)(nil)
