package docker

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/client"
	"github.com/moby/moby/client/pkg/versions"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/internal/supervised"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/supervise"
)

const (
	// callTime bounds one question to Docker.
	callTime = 5 * time.Second
	// The pace at which a Docker that went away is looked for.
	firstRedial = 50 * time.Millisecond
	lastRedial  = 5 * time.Second
	// signalVersion is the first version of the API whose stop takes a signal.
	signalVersion = "1.42"
)

// means starts and stops one container.
type means struct {
	settings
	limits *lifecycle.Limits // that of an unload is for the stop at the end
	log    *zap.Logger

	// ctx ends the follower.
	ctx      context.Context
	cancel   context.CancelFunc
	follower sync.WaitGroup

	record supervised.Record

	// turn is held by whoever looks, so that views come in order.
	turn chan struct{}
	// These are of whoever has the turn.
	closed    bool
	following bool
	api       *client.Client // nil: the version is to be negotiated first

	mu sync.Mutex // guards id
	id string     // the container's, of the latest run
}

func newMeans(s settings, deps lifecycle.Deps) *means {
	m := &means{
		settings: s,
		limits:   deps.Limits,
		log:      deps.Logger.With(zap.String("container", s.container)),
		turn:     make(chan struct{}, 1),
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	return m
}

// Start asks Docker to start the container unless it runs. Which GPUs it has is
// decided when it is made, so those of the target are not its affair.
func (m *means) Start(ctx context.Context, _ lifecycle.Target) error {
	v, api, err := m.look(ctx)
	switch {
	case err != nil:
		return err
	case v.state.Paused:
		return m.paused()
	case v.alive():
		return nil
	case m.signal != "" && versions.LessThan(api.ClientVersion(), signalVersion):
		return fmt.Errorf("container %s: this Docker speaks version %s of its API, and `signal` needs %s (Docker 23): leave it out, "+
			"and make the container with --stop-signal %s", m.container, api.ClientVersion(), signalVersion, m.signal)
	}
	m.record.Asking()
	if _, err = api.ContainerStart(ctx, m.container, client.ContainerStartOptions{}); err != nil {
		if ctx.Err() == nil {
			m.record.Answered() // it was refused
		}
		return m.explained(err, "starting")
	}
	if v, _, err = m.look(ctx); err != nil {
		return err
	}
	m.record.Answered()
	if !v.alive() {
		return fmt.Errorf("container %s ended as soon as it was started: %s; see `docker logs %s`", m.container, v.end(), m.container)
	}
	return nil
}

// Stop asks Docker to stop the container, and returns once it did.
func (m *means) Stop(ctx context.Context) error {
	v, api, err := m.look(ctx)
	if err != nil {
		return err
	}
	if !v.alive() && !v.state.Restarting && !m.record.Asked() {
		return nil
	}
	m.record.Stopping()
	seconds := int(m.grace / time.Second)
	if _, err := api.ContainerStop(ctx, m.container, client.ContainerStopOptions{Signal: m.signal, Timeout: &seconds}); err != nil {
		return m.explained(err, "stopping")
	}
	m.record.Answered()
	if v, _, err = m.look(ctx); err != nil {
		return err
	}
	if v.alive() {
		return fmt.Errorf("container %s was stopped and runs again: does somebody else start it, compose or a restart policy?", m.container)
	}
	return nil
}

// Running asks Docker. A paused container is an error: it would not answer, and can't give its memory back.
func (m *means) Running(ctx context.Context) (bool, error) {
	v, _, err := m.look(ctx)
	if err != nil {
		return false, err
	}
	if v.state.Paused {
		return false, m.paused()
	}
	return m.record.Runs(), nil
}

// Latest does not tell where it listens: the consumer must.
func (m *means) Latest() (ended <-chan struct{}, upstream string) { return m.record.Ended(), "" }

func (m *means) Why() string { return m.record.Why() }

// Owns looks for the container's ID among the process's control groups:
// /docker/ID, /system.slice/docker-ID.scope, and Podman's /machine.slice/libpod-ID.scope.
func (m *means) Owns(pid int) bool {
	m.mu.Lock()
	id := m.id
	m.mu.Unlock()
	return id != "" && slices.ContainsFunc(supervised.Cgroups(pid), func(group string) bool { return strings.Contains(group, id) })
}

func (m *means) State() lifecycle.State {
	s := m.record.State()
	s.Container = m.container
	return s
}

// Close stops the container if it runs because of us, and ends all goroutines.
func (m *means) Close() error {
	var err error
	if m.record.Ours() {
		ctx, cancel := context.WithTimeout(context.Background(), max(m.limits.Unload(), m.settings.grace+callTime))
		err = m.Stop(ctx)
		cancel()
	}
	m.cancel()
	m.turn <- struct{}{} // who has it ends soon
	m.closed = true
	<-m.turn
	m.follower.Wait()
	return err
}

// connect returns a client that has agreed on a version with Docker. The caller has the turn.
func (m *means) connect(ctx context.Context) (*client.Client, error) {
	if m.closed {
		return nil, supervise.ErrClosed
	}
	if m.api != nil {
		return m.api, nil
	}
	// Connections are not kept: the one that listens is there anyway, and looks are rare.
	plain := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, CheckRedirect: client.CheckRedirect}
	api, err := client.New(client.WithHTTPClient(plain), client.WithHost(m.host), client.WithScheme("http"), client.WithUserAgent("caddy-gpu-broker"))
	if err != nil {
		return nil, fmt.Errorf("lifecycle docker: host %q: %w", m.host, err)
	}
	if _, err := api.Ping(ctx, client.PingOptions{NegotiateAPIVersion: true}); err != nil {
		return nil, m.explained(err, "looking at")
	}
	m.api = api
	return api, nil
}

// look asks Docker for the container, and notes what it says.
func (m *means) look(ctx context.Context) (view, *client.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	defer context.AfterFunc(m.ctx, cancel)()
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	case <-ctx.Done():
		return view{}, nil, m.explained(ctx.Err(), "looking at")
	}
	api, err := m.connect(ctx)
	if err != nil {
		return view{}, nil, err
	}
	answer, err := api.ContainerInspect(ctx, m.container, client.ContainerInspectOptions{})
	if err != nil {
		switch {
		case client.IsErrConnectionFailed(err):
			m.api = nil // the next one negotiates anew: Docker may have been replaced
		case errdefs.IsNotFound(err):
			m.record.See(supervised.View{End: "the container was removed"})
		}
		return view{}, nil, m.explained(err, "looking at")
	}
	if answer.Container.State == nil {
		return view{}, nil, fmt.Errorf("looking at container %s: Docker at %s answers without its state", m.container, m.host)
	}
	v := view{id: answer.Container.ID, state: *answer.Container.State}
	if v.alive() {
		m.mu.Lock()
		m.id = v.id
		m.mu.Unlock()
	}
	m.record.See(v.seen())
	if !m.following {
		m.following = true
		m.follower.Go(m.follow)
	}
	return v, api, nil
}

// follow hears of the container until the means is closed.
func (m *means) follow() {
	wait := firstRedial
	for since := time.Now(); m.ctx.Err() == nil; {
		next := time.Now()
		if m.listen(since) {
			wait, since = firstRedial, next
		}
		select {
		case <-m.ctx.Done():
		case <-time.After(wait):
		}
		wait = min(2*wait, lastRedial)
	}
}

// listen looks at the container whenever Docker tells something of it that has
// happened since, and returns when the stream breaks. It returns whether Docker was there.
func (m *means) listen(since time.Time) bool {
	v, api, err := m.look(m.ctx)
	if err != nil {
		m.log.Debug("Docker can't be asked for the container", zap.Error(err))
		return false
	}
	ctx, cancel := context.WithCancel(m.ctx)
	defer cancel()
	stream := api.Events(ctx, client.EventsListOptions{
		// A second more than enough: what is told twice only leads to one more look.
		Since:   strconv.FormatInt(since.Add(-time.Second).Unix(), 10),
		Filters: make(client.Filters).Add("type", "container").Add("container", v.id, m.container),
	})
	for {
		select {
		case event := <-stream.Messages:
			if strings.HasPrefix(string(event.Action), "exec_") || strings.HasPrefix(string(event.Action), "health_status") {
				continue // the health check's own, every few seconds
			}
			if _, _, err := m.look(ctx); err != nil && ctx.Err() == nil {
				m.log.Debug("Docker can't be asked for the container", zap.Error(err))
			}
		case err := <-stream.Err:
			if m.ctx.Err() == nil {
				m.log.Debug("Docker's events broke off", zap.Error(err))
			}
			return true
		}
	}
}

var _ supervise.Means = (*means)(nil)
