package systemd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
)

// Names on the bus.
const (
	systemdName      = "org.freedesktop.systemd1"
	managerPath      = "/org/freedesktop/systemd1"
	managerInterface = systemdName + ".Manager"
	unitInterface    = systemdName + ".Unit"
	serviceInterface = systemdName + ".Service"
	propertiesName   = "org.freedesktop.DBus.Properties"
	propertyChanged  = propertiesName + ".PropertiesChanged"
	jobRemoved       = managerInterface + ".JobRemoved"
	ownerChanged     = "org.freedesktop.DBus.NameOwnerChanged"
)

// session is one connection to the bus, which hears of one unit.
type session struct {
	conn    *dbus.Conn
	manager dbus.BusObject
	object  dbus.BusObject // the unit
	signals chan *dbus.Signal

	// mu guards jobs, and is held while a job is asked for, so that its end is not missed.
	mu   sync.Mutex
	jobs map[dbus.ObjectPath]chan string // by their path; gets the result
}

// busAddress is where the bus listens.
func busAddress(user bool) string {
	if !user {
		return cmp.Or(os.Getenv("DBUS_SYSTEM_BUS_ADDRESS"), "unix:path=/run/dbus/system_bus_socket")
	}
	runtime := cmp.Or(os.Getenv("XDG_RUNTIME_DIR"), "/run/user/"+strconv.Itoa(os.Geteuid()))
	return cmp.Or(os.Getenv("DBUS_SESSION_BUS_ADDRESS"), "unix:path="+runtime+"/bus")
}

// dial connects to the bus and asks to hear of the unit.
func dial(ctx context.Context, unit ref) (*session, error) {
	conn, err := dbus.Dial(busAddress(unit.user), dbus.WithSignalHandler(dbus.NewSequentialSignalHandler()))
	if err != nil {
		return nil, fmt.Errorf("connecting to D-Bus: %w", err)
	}
	// What follows knows no context: a bus that hangs is left by closing the connection.
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	s, err := greet(ctx, conn, unit)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = conn.Close()
		if ctx.Err() != nil {
			err = fmt.Errorf("no answer in time: %w", ctx.Err())
		}
		return nil, err
	}
	return s, nil
}

func greet(ctx context.Context, conn *dbus.Conn, unit ref) (*session, error) {
	if err := conn.Auth(nil); err != nil {
		return nil, fmt.Errorf("D-Bus does not let us in: %w", err)
	}
	if err := conn.Hello(); err != nil {
		return nil, fmt.Errorf("D-Bus does not let us in: %w", err)
	}
	s := &session{
		conn:    conn,
		manager: conn.Object(systemdName, managerPath),
		signals: make(chan *dbus.Signal, 16),
		jobs:    map[dbus.ObjectPath]chan string{},
	}
	var path dbus.ObjectPath
	if err := s.manager.CallWithContext(ctx, managerInterface+".LoadUnit", 0, unit.name).Store(&path); err != nil {
		return nil, explained(err, "looking for", unit)
	}
	s.object = conn.Object(systemdName, path)
	conn.Signal(s.signals)
	for _, match := range [][]dbus.MatchOption{
		{dbus.WithMatchSender(systemdName), dbus.WithMatchObjectPath(managerPath), dbus.WithMatchInterface(managerInterface), dbus.WithMatchMember("JobRemoved")},
		{dbus.WithMatchSender(systemdName), dbus.WithMatchObjectPath(path), dbus.WithMatchInterface(propertiesName), dbus.WithMatchMember("PropertiesChanged")},
		// systemd that was started anew knows nothing of who has subscribed.
		{dbus.WithMatchSender("org.freedesktop.DBus"), dbus.WithMatchInterface("org.freedesktop.DBus"), dbus.WithMatchMember("NameOwnerChanged"), dbus.WithMatchArg(0, systemdName)},
	} {
		if err := conn.AddMatchSignalContext(ctx, match...); err != nil {
			return nil, explained(err, "subscribing to", unit)
		}
	}
	return s, s.subscribe(ctx, unit)
}

// subscribe asks systemd to send signals.
func (s *session) subscribe(ctx context.Context, unit ref) error {
	err := s.manager.CallWithContext(ctx, managerInterface+".Subscribe", 0).Err
	var fault dbus.Error
	if errors.As(err, &fault) && fault.Name == systemdName+".AlreadySubscribed" {
		return nil
	}
	if err != nil {
		return explained(err, "subscribing to", unit)
	}
	return nil
}

// get asks for all properties of an interface of the unit.
func (s *session) get(ctx context.Context, iface string) (properties, error) {
	var p properties
	err := s.object.CallWithContext(ctx, propertiesName+".GetAll", 0, iface).Store(&p)
	return p, err
}

// job asks for StartUnit or StopUnit, and returns the job's result.
func (s *session) job(ctx context.Context, method, unit string) (string, error) {
	var path dbus.ObjectPath
	result := make(chan string, 1)
	s.mu.Lock()
	err := s.manager.CallWithContext(ctx, managerInterface+"."+method, 0, unit, "replace").Store(&path)
	if err == nil {
		s.jobs[path] = result
	}
	s.mu.Unlock()
	if err != nil {
		return "", err
	}
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.jobs, path)
	}()
	select {
	case r := <-result:
		return r, nil
	case <-s.conn.Context().Done():
		return "", errors.New("the connection to D-Bus broke before systemd said what came of it")
	case <-ctx.Done():
		return "", fmt.Errorf("systemd is still at it (%w)", ctx.Err())
	}
}

// finished tells whoever waits for a job what came of it. body is that of JobRemoved: id, path, unit, result.
func (s *session) finished(body []any) {
	if len(body) != 4 {
		return
	}
	path, _ := body[1].(dbus.ObjectPath)
	result, _ := body[3].(string)
	s.mu.Lock()
	defer s.mu.Unlock()
	if waits := s.jobs[path]; waits != nil {
		select {
		case waits <- result:
		default: // it has been told
		}
	}
}

// alive reports whether the connection stands.
func (s *session) alive() bool { return s.conn.Context().Err() == nil }

// callTime bounds one question to systemd.
const callTime = 5 * time.Second
