package systemd_test

import (
	"context"
	"os/user"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/lifecycletest"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

func TestLoadStartsAndUnloadStops(t *testing.T) {
	newBus(t)
	p := newPretender(t)
	d, died := p.open()
	require.Equal(t, lifecycle.No, d.Probe(t.Context()).Loaded)
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	require.Equal(t, 1, p.called("StartUnit llama.service replace"))
	state := d.State()
	require.Equal(t, unit, state.Unit)
	require.Equal(t, 4711, state.PID)
	require.Equal(t, 1, state.Starts)
	require.WithinDuration(t, time.Now(), state.StartedAt, lifecycletest.Patience)

	confirmed, err := d.Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	require.True(t, confirmed)
	require.Equal(t, 1, p.called("StopUnit llama.service replace"))
	require.Empty(t, died)
	require.Equal(t, "the broker stopped it", d.State().LastExit)
}

func TestDeathsAreToldWithTheirReason(t *testing.T) {
	for what, c := range map[string]struct {
		state, result string
		code, status  int32
		want          string
	}{
		"status":   {"failed", "exit-code", 1, 3, "exit status 3"},
		"signal":   {"failed", "signal", 2, 9, "killed by signal 9 (killed)"},
		"core":     {"failed", "core-dump", 3, 11, "killed by signal 11 (segmentation fault), core dumped"},
		"success":  {"inactive", "success", 1, 0, "exit status 0; it ended by itself, or somebody stopped it"},
		"RAM":      {"failed", "oom-kill", 2, 9, "killed by signal 9 (killed); the kernel killed it for lack of RAM: systemd says oom-kill"},
		"watchdog": {"failed", "watchdog", 2, 6, "killed by signal 6 (aborted); its watchdog heard nothing from it"},
		"new word": {"failed", "moon-phase", 1, 1, "exit status 1; systemd says moon-phase"},
	} {
		t.Run(what, func(t *testing.T) {
			newBus(t)
			p := newPretender(t)
			d, died := p.open()
			require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
			p.end(c.state, c.result, c.code, c.status)
			require.Equal(t, c.want, lifecycletest.Death(t, died))
			require.False(t, d.Running())
			require.Empty(t, died, "told once")
		})
	}
}

// systemd forgets a unit that ended well as soon as nobody needs it; what its last signal said counts.
func TestReasonOutlivesTheUnit(t *testing.T) {
	newBus(t)
	p := newPretender(t)
	d, died := p.open()
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	p.mu.Lock()
	p.server.Close()
	p.server = nil
	p.unit["ActiveState"] = dbus.MakeVariant("inactive")
	p.unit["InvocationID"] = dbus.MakeVariant([]byte{})
	p.service = variants(map[string]any{"Result": "success", "ExecMainCode": int32(0), "ExecMainStatus": int32(0), "MainPID": uint32(0)})
	p.mu.Unlock()
	p.emit(unitPath, "org.freedesktop.DBus.Properties.PropertiesChanged", iface+".Service",
		variants(map[string]any{"ExecMainCode": int32(1), "ExecMainStatus": int32(7), "Result": "exit-code"}), []string{})
	require.Equal(t, "exit status 7", lifecycletest.Death(t, died))
}

// With Restart=always and no pause the unit may never be seen dead.
func TestServerThatIsStartedAgainAtOnceHasDied(t *testing.T) {
	newBus(t)
	p := newPretender(t)
	d, died := p.open()
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	p.run()
	require.Contains(t, lifecycletest.Death(t, died), "started again")
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	require.Equal(t, 1, d.State().Starts)
	require.NoError(t, d.Close())
	require.Zero(t, p.called("StopUnit"), "that start was not ours")
}

// A start would wait for RestartSec=, with the unit.
func TestUnitThatWaitsForItsRestartIsStoppedBeforeItIsStarted(t *testing.T) {
	newBus(t)
	p := newPretender(t)
	p.set(map[string]any{"ActiveState": "activating", "SubState": "auto-restart", "InvocationID": make([]byte, 16)}, map[string]any{"Result": "exit-code"})
	p.will(&p.stop, func() (string, *dbus.Error) {
		p.set(map[string]any{"ActiveState": "inactive", "SubState": "dead"}, nil)
		return "done", nil
	})
	d, _ := p.open()
	require.Equal(t, lifecycle.No, d.Probe(t.Context()).Loaded)
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	require.Equal(t, 1, p.called("StopUnit"))
	require.Equal(t, 1, p.called("StartUnit"))
}

func TestRunningUnitIsAdoptedAndLeftAlone(t *testing.T) {
	newBus(t)
	p := newPretender(t)
	p.run()
	d, died := p.open()
	require.Equal(t, lifecycle.Yes, d.Probe(t.Context()).Loaded)
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	require.Zero(t, p.called("StartUnit"))
	require.NoError(t, d.Close())
	require.Zero(t, p.called("StopUnit"))
	require.Empty(t, died)
}

func TestCloseStopsWhatWasStarted(t *testing.T) {
	newBus(t)
	p := newPretender(t)
	d, _ := p.open()
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	require.NoError(t, d.Close())
	require.Equal(t, 1, p.called("StopUnit"))
}

func TestJobResultsSayWhatTheyMean(t *testing.T) {
	for result, want := range map[string]string{
		"timeout":    "JobTimeoutSec=",
		"canceled":   "somebody else",
		"dependency": "a unit that it requires has failed",
		"skipped":    "conditions",
		"assert":     "does not allow it",
		"new-word":   `"new-word"`,
	} {
		t.Run(result, func(t *testing.T) {
			newBus(t)
			p := newPretender(t)
			p.will(&p.start, func() (string, *dbus.Error) { return result, nil })
			d, _ := p.open()
			err := d.Load(t.Context(), lifecycle.Target{})
			require.ErrorContains(t, err, want)
			require.ErrorContains(t, err, "journalctl -u llama.service")
		})
	}
}

func TestRefusalsSayWhatToDo(t *testing.T) {
	me, err := user.Current()
	require.NoError(t, err)
	for name, wants := range map[string][]string{
		"org.freedesktop.DBus.Error.InteractiveAuthorizationRequired": {"org.freedesktop.systemd1.manage-units", "packaging/polkit/50-gpu-broker.rules", "user " + me.Username},
		"org.freedesktop.DBus.Error.AccessDenied":                     {"org.freedesktop.systemd1.manage-units"},
		"org.freedesktop.systemd1.NoSuchUnit":                         {"systemctl cat llama.service"},
		"org.freedesktop.systemd1.UnitMasked":                         {"systemctl unmask llama.service"},
		"org.freedesktop.DBus.Error.Moon":                             {"org.freedesktop.DBus.Error.Moon", "the moon is full"},
	} {
		t.Run(name, func(t *testing.T) {
			newBus(t)
			p := newPretender(t)
			p.will(&p.start, func() (string, *dbus.Error) { return "", dbus.NewError(name, []any{"the moon\nis full"}) })
			d, _ := p.open()
			err := d.Load(t.Context(), lifecycle.Target{})
			for _, want := range wants {
				require.ErrorContains(t, err, want)
			}
			require.NoError(t, d.Close())
			require.Zero(t, p.called("StopUnit"), "it was refused: there is nothing to stop")
		})
	}
}

func TestUnitThatCannotBeLoadedSaysWhy(t *testing.T) {
	for state, want := range map[string]string{
		"not-found":   "knows no unit llama.service",
		"masked":      "systemctl unmask llama.service",
		"bad-setting": "can't be read: no ExecStart",
	} {
		newBus(t)
		p := newPretender(t)
		p.set(map[string]any{"LoadState": state, "LoadError": []any{"org.freedesktop.systemd1.BadUnitSetting", "no ExecStart"}}, nil)
		d, _ := p.open()
		require.ErrorContains(t, d.Load(t.Context(), lifecycle.Target{}), want)
		require.Zero(t, p.called("StartUnit"))
	}
}

func TestBusWithoutSystemdIsToldOf(t *testing.T) {
	newBus(t)
	p := newPretender(t)
	p.conn.Close()
	d, _ := p.open()
	report := d.Probe(t.Context())
	require.Equal(t, lifecycle.Wrong, report.Outcome)
	require.Contains(t, report.Detail, "systemd is not on this bus")
	require.ErrorContains(t, d.Load(t.Context(), lifecycle.Target{}), "systemd is not on this bus")
}

func TestNoBusIsToldOf(t *testing.T) {
	newBus(t).stop()
	l, err := provision(t, `{"unit": "llama"}`)
	require.NoError(t, err)
	d, err := l.Open(lifecycle.Deps{Consumer: "mvoice", Upstream: "127.0.0.1:1"})
	require.NoError(t, err)
	require.ErrorContains(t, d.Load(t.Context(), lifecycle.Target{}), "connecting to D-Bus")
	require.NoError(t, d.Close())
}

func TestDeathIsNoticedOverARestartOfDBus(t *testing.T) {
	b := newBus(t)
	p := newPretender(t)
	d, died := p.open()
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	b.stop()
	require.Equal(t, lifecycle.Wrong, d.Probe(t.Context()).Outcome)
	require.True(t, d.Running(), "that D-Bus is away says nothing of the server")
	p.end("failed", "exit-code", 1, 4)
	require.Empty(t, died)
	b.start(t)
	p.join()
	require.Equal(t, "exit status 4", lifecycletest.Death(t, died))
}

// A systemd that was started anew knows nothing of who has subscribed.
func TestDeathIsNoticedOverARestartOfSystemd(t *testing.T) {
	newBus(t)
	p := newPretender(t)
	d, died := p.open()
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	require.Equal(t, 1, p.called("Subscribe"))
	p.conn.Close()
	p.join()
	require.Eventually(t, func() bool { return p.called("Subscribe") >= 2 }, lifecycletest.Patience, time.Millisecond)
	p.end("failed", "exit-code", 1, 4)
	require.Equal(t, "exit status 4", lifecycletest.Death(t, died))
}

func TestStartThatTakesTooLongIsStopped(t *testing.T) {
	newBus(t)
	p := newPretender(t)
	asked := make(chan struct{})
	p.will(&p.start, func() (string, *dbus.Error) {
		p.set(map[string]any{"ActiveState": "activating", "SubState": "start", "InvocationID": []byte{1}}, map[string]any{"MainPID": uint32(4711)})
		close(asked)
		return "", nil
	})
	p.will(&p.stop, func() (string, *dbus.Error) {
		p.set(map[string]any{"ActiveState": "inactive", "SubState": "dead"}, map[string]any{"MainPID": uint32(0)})
		return "done", nil
	})
	d, died := p.open()
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() { failed <- d.Load(ctx, lifecycle.Target{}) }()
	<-asked
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled)
	require.Equal(t, 1, p.called("StopUnit"), "half a start keeps no memory")
	require.Empty(t, died)
}

// A job may wait for another unit; meanwhile ours is as dead as before.
func TestStartThatStillWaitsInSystemdIsCalledOff(t *testing.T) {
	newBus(t)
	p := newPretender(t)
	asked := make(chan struct{})
	p.will(&p.start, func() (string, *dbus.Error) { close(asked); return "", nil })
	d, _ := p.open()
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() { failed <- d.Load(ctx, lifecycle.Target{}) }()
	<-asked
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled)
	require.Equal(t, 1, p.called("StopUnit"))
}

func TestUnitThatComesBackAfterAStopIsToldOf(t *testing.T) {
	newBus(t)
	p := newPretender(t)
	d, _ := p.open()
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	p.will(&p.stop, func() (string, *dbus.Error) { p.run(); return "done", nil })
	_, err := d.Unload(t.Context(), lifecycle.Target{})
	require.ErrorContains(t, err, "a socket or a timer")
}
