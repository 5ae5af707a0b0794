//go:build real

// Package systemd_test tests the lifecycle systemd with a real systemd.
package systemd_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

func TestRealSystemdLoadStartsAndUnloadStops(t *testing.T) { loadsAndUnloads(t, system) }

func loadsAndUnloads(t *testing.T, in manager) {
	s := newSite(t, in, "", "TimeoutStopSec=1") // which its child needs
	report := s.Probe(t.Context())
	require.Equal(t, lifecycle.No, report.Loaded, report.Detail)
	s.load()

	require.Equal(t, "active", s.property("ActiveState"))
	require.True(t, s.Running())
	told := s.State()
	require.Equal(t, s.unit, told.Unit)
	require.Equal(t, s.property("MainPID"), strconv.Itoa(told.PID))
	require.Equal(t, s.address, told.Address)
	require.Equal(t, 1, told.Starts)
	require.WithinDuration(t, time.Now(), told.StartedAt, patience)
	child, err := strconv.Atoi(s.get("/fork"))
	require.NoError(t, err)
	require.True(t, s.Owns(told.PID))
	require.True(t, s.Owns(child), "its children are its own")
	require.False(t, s.Owns(os.Getpid()))
	require.False(t, s.Owns(1))
	require.Equal(t, lifecycle.Yes, s.Probe(t.Context()).Loaded)

	confirmed, err := s.Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	require.True(t, confirmed)
	require.NotEqual(t, "active", s.property("ActiveState"))
	require.ErrorIs(t, syscall.Kill(child, 0), syscall.ESRCH, "the whole group is gone")
	require.False(t, s.Running())
	require.Empty(t, s.died, "it was told to end")
	require.Equal(t, "the broker stopped it", s.State().LastExit)
}

func TestRealSystemdDeathIsNoticed(t *testing.T) {
	s := newSite(t, system, "")
	s.load()
	s.get("/exit?code=3")
	require.Equal(t, "exit status 3", s.death())
	require.False(t, s.Running())

	s.load()
	require.NoError(t, syscall.Kill(s.State().PID, syscall.SIGKILL))
	require.Equal(t, "killed by signal 9 (killed)", s.death())

	// A unit that ended well is forgotten by systemd at once.
	s.load()
	s.get("/exit?code=0")
	require.Equal(t, "exit status 0; it ended by itself, or somebody stopped it", s.death())
	require.Equal(t, 3, s.State().Starts)
}

func TestRealSystemdServerThatEndsAtOnceFailsTheLoad(t *testing.T) {
	for _, kind := range []string{"simple", "exec", "notify"} {
		t.Run(kind, func(t *testing.T) {
			s := newSite(t, system, "-exit 5", "Type="+kind)
			begun := time.Now()
			err := s.Load(t.Context(), lifecycle.Target{})
			if kind == "notify" { // that it ends without a word is against the protocol, says systemd
				require.ErrorContains(t, err, "journalctl -u "+s.unit)
			}
			require.ErrorContains(t, err, "exit status 5")
			require.Less(t, time.Since(begun), patience/2)
		})
	}
}

func TestRealSystemdAlwaysRestartDoesNotFightAStop(t *testing.T) {
	s := newSite(t, system, "", "Restart=always", "RestartSec=0")
	s.load()
	_, err := s.Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	require.Equal(t, "inactive", s.property("ActiveState"))

	s.load()
	s.get("/exit?code=6")
	require.Contains(t, s.death(), "exit status 6", "though it runs again at once")
	require.Eventually(t, func() bool { return s.Probe(t.Context()).Loaded == lifecycle.Yes && s.Running() }, patience, 20*time.Millisecond)
	require.Equal(t, 2, s.State().Starts, "that start was not ours")
	require.NoError(t, s.Close())
	require.Equal(t, "active", s.property("ActiveState"), "who did not start it does not stop it")
}

func TestRealSystemdUnitThatWaitsForItsRestartDoesNotRunAndIsStopped(t *testing.T) {
	s := newSite(t, system, "", "Restart=always", "RestartSec=1h")
	s.load()
	s.get("/exit?code=1")
	require.Contains(t, s.death(), "exit status 1")
	require.Equal(t, "auto-restart", s.property("SubState"))
	require.False(t, s.Running())
	require.Equal(t, lifecycle.No, s.Probe(t.Context()).Loaded)
	s.load()
	s.get("/exit?code=1")
	require.Contains(t, s.death(), "exit status 1")
	_, err := s.Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	require.NotEqual(t, "activating", s.property("ActiveState"))
}

func TestRealSystemdRunningUnitIsAdoptedAndLeftAlone(t *testing.T) {
	s := newSite(t, system, "")
	system.systemctl(t, "start", s.unit)
	require.Eventually(t, func() bool { return s.Probe(t.Context()).Loaded == lifecycle.Yes }, patience, 20*time.Millisecond)
	s.load()
	require.Zero(t, s.State().Starts)
	require.True(t, s.Owns(s.State().PID))
	require.NoError(t, s.Close())
	require.Equal(t, "active", s.property("ActiveState"))

	s.reopen()
	require.Equal(t, lifecycle.Yes, s.Probe(t.Context()).Loaded)
	system.systemctl(t, "stop", s.unit)
	require.Contains(t, s.death(), "somebody stopped it")
}

func TestRealSystemdCloseStopsWhatWasStarted(t *testing.T) {
	s := newSite(t, system, "")
	s.load()
	require.NoError(t, s.Close())
	require.Equal(t, "inactive", s.property("ActiveState"))
	require.Empty(t, s.died)
}

func TestRealSystemdStartThatIsCalledOffLeavesNothing(t *testing.T) {
	s := newSite(t, system, "-delay 1h", "Type=notify", "TimeoutStartSec=infinity")
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	require.ErrorContains(t, s.Load(ctx, lifecycle.Target{}), "systemd is still at it")
	require.NotContains(t, []string{"active", "activating"}, s.property("ActiveState"), "half a start keeps no memory")
	require.Equal(t, "0", s.property("MainPID"))
}

func TestRealSystemdSlowStartIsWaitedFor(t *testing.T) {
	s := newSite(t, system, "-delay 300ms", "Type=notify")
	s.load()
	require.Equal(t, "active", s.property("ActiveState"))
	require.Equal(t, 1, s.State().Starts)
}

func TestRealSystemdStubbornServerIsKilled(t *testing.T) {
	s := newSite(t, system, "-stubborn", "TimeoutStopSec=1")
	s.load()
	_, err := s.Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	require.Equal(t, "timeout", s.property("Result"))
}

func TestRealSystemdProcessesThatOutliveAStopAreToldOf(t *testing.T) {
	s := newSite(t, system, "", "KillMode=process")
	s.load()
	child, err := strconv.Atoi(s.get("/fork"))
	require.NoError(t, err)
	_, err = s.Unload(t.Context(), lifecycle.Target{})
	require.ErrorContains(t, err, strconv.Itoa(child))
	require.ErrorContains(t, err, "KillMode=control-group")
	require.True(t, s.Owns(child), "what was left is still the unit's")
	require.NoError(t, syscall.Kill(child, syscall.SIGKILL))
	require.Eventually(t, func() bool {
		_, err := s.Unload(t.Context(), lifecycle.Target{})
		return err == nil
	}, patience, 20*time.Millisecond)
}

func TestRealSystemdUnitsThatCannotStartSayWhy(t *testing.T) {
	t.Run("unknown", func(t *testing.T) {
		d, _ := open(t, `{"unit": "nobody-wrote-it"}`, "127.0.0.1:1")
		defer d.Close()
		require.Equal(t, lifecycle.No, d.Probe(t.Context()).Loaded)
		require.ErrorContains(t, d.Load(t.Context(), lifecycle.Target{}), "knows no unit nobody-wrote-it.service")
	})
	t.Run("masked", func(t *testing.T) {
		s := newSite(t, system, "")
		require.NoError(t, os.Remove(filepath.Join(system.units, s.unit)))
		require.NoError(t, os.Symlink("/dev/null", filepath.Join(system.units, s.unit)))
		system.systemctl(t, "daemon-reload")
		require.ErrorContains(t, s.Load(t.Context(), lifecycle.Target{}), "systemctl unmask "+s.unit)
	})
	t.Run("faulty", func(t *testing.T) {
		s := newSite(t, system, "", "ExecStart=relative")
		err := s.Load(t.Context(), lifecycle.Target{})
		require.ErrorContains(t, err, "can't be read")
	})
	t.Run("dependency", func(t *testing.T) {
		needed := newSite(t, system, "-exit 1", "Type=oneshot")
		s := newSite(t, system, "", "[Unit]", "Requires="+needed.unit, "After="+needed.unit)
		require.ErrorContains(t, s.Load(t.Context(), lifecycle.Target{}), "a unit that it requires has failed")
	})
	t.Run("condition", func(t *testing.T) {
		s := newSite(t, system, "", "[Unit]", "ConditionPathExists=/nowhere")
		require.ErrorContains(t, s.Load(t.Context(), lifecycle.Target{}), "a Condition…= in the unit is not met")
	})
	t.Run("start limit", func(t *testing.T) {
		s := newSite(t, system, "-exit 1", "[Unit]", "StartLimitIntervalSec=1h", "StartLimitBurst=1")
		require.Error(t, s.Load(t.Context(), lifecycle.Target{}))
		require.ErrorContains(t, s.Load(t.Context(), lifecycle.Target{}), "StartLimitIntervalSec=0")
	})
	t.Run("program", func(t *testing.T) {
		s := newSite(t, system, "", "ExecStartPre=/nowhere")
		require.ErrorContains(t, s.Load(t.Context(), lifecycle.Target{}), "a command of the unit other than the server itself failed")
	})
}

func TestRealSystemdDeathIsNoticedOverARestartOfDBus(t *testing.T) {
	s := newSite(t, system, "")
	s.load()
	system.systemctl(t, "stop", "dbus.socket", "dbus.service")
	report := s.Probe(t.Context())
	require.Equal(t, lifecycle.Wrong, report.Outcome, report.Detail)
	require.True(t, s.Owns(s.State().PID), "nobody needs to be asked for that")
	require.Empty(t, s.died, "that D-Bus is away says nothing of the server")
	s.get("/exit?code=4")
	system.systemctl(t, "start", "dbus.service")
	require.Equal(t, "exit status 4", s.death())
	s.load()
}

func TestRealSystemdDeathIsNoticedOverARestartOfSystemd(t *testing.T) {
	s := newSite(t, system, "")
	s.load()
	system.systemctl(t, "daemon-reexec")
	system.systemctl(t, "daemon-reload")
	s.get("/exit?code=4")
	require.Equal(t, "exit status 4", s.death())
	s.load()
	require.NoError(t, s.Close())
	require.NotEqual(t, "active", s.property("ActiveState"))
}

func executable(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	require.NoError(t, err)
	return path
}

// nobody is the user of that name.
const nobody = 65534

// asUser runs a test of this program as the user nobody.
func asUser(t *testing.T, test string, env ...string) string {
	t.Helper()
	// The go command keeps its own to itself.
	self := filepath.Join(filepath.Dir(program), "test")
	require.NoError(t, exec.Command("cp", executable(t), self).Run())
	cmd := exec.Command(self, "-test.v", "-test.run", "^"+test+"$")
	cmd.Env = append(append(os.Environ(), "GPU_BROKER_TEST_AS_USER=nobody"), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	cmd.Dir = "/"
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

// allow installs the polkit rule that is shipped, for the user nobody and a unit, until the test ends.
func allow(t *testing.T, unit string) {
	t.Helper()
	shipped, err := os.ReadFile("../../packaging/polkit/50-gpu-broker.rules")
	require.NoError(t, err)
	rule := strings.NewReplacer(`"caddy"`, `"nobody"`, `"whisper.service"`, `"`+unit+`"`).Replace(string(shipped))
	require.Contains(t, rule, unit)
	require.Contains(t, rule, `"nobody"`)
	const path = "/etc/polkit-1/rules.d/50-gpu-broker.rules"
	require.NoError(t, os.WriteFile(path, []byte(rule), 0o644))
	t.Cleanup(func() { require.NoError(t, os.Remove(path)) })
	system.systemctl(t, "restart", "polkit.service")
}

func TestRealSystemdPolkitDecides(t *testing.T) {
	if address := os.Getenv("GPU_BROKER_TEST_ADDRESS"); address != "" { // as nobody
		d, _ := open(t, `{"unit": "`+os.Getenv("GPU_BROKER_TEST_UNIT")+`"}`, address)
		defer d.Close()
		require.NotEqual(t, lifecycle.Wrong, d.Probe(t.Context()).Outcome, "to look is allowed to all")
		err := d.Load(t.Context(), lifecycle.Target{})
		if os.Getenv("GPU_BROKER_TEST_ALLOWED") != "" {
			require.NoError(t, err)
			_, err = d.Unload(t.Context(), lifecycle.Target{})
			require.NoError(t, err)
			return
		}
		require.ErrorContains(t, err, "org.freedesktop.systemd1.manage-units")
		require.ErrorContains(t, err, "user nobody")
		return
	}
	s := newSite(t, system, "")
	env := []string{"GPU_BROKER_TEST_UNIT=" + s.unit, "GPU_BROKER_TEST_ADDRESS=" + s.address}
	asUser(t, t.Name(), env...)
	require.NotEqual(t, "active", s.property("ActiveState"))

	allow(t, s.unit)
	out := asUser(t, t.Name(), append(env, "GPU_BROKER_TEST_ALLOWED=1")...)
	require.Contains(t, out, "--- PASS")
	require.Equal(t, "success", s.property("Result"))
}

// A manager of a user's own needs no polkit. It is a service of the system here, as user@.service is.
func TestRealSystemdUserUnits(t *testing.T) {
	runtime := t.TempDir()
	require.NoError(t, os.Chmod(runtime, 0o700))
	units := filepath.Join(runtime, "units")
	require.NoError(t, os.Mkdir(units, 0o755))
	bus := filepath.Join(runtime, "bus")
	for path, text := range map[string]string{
		filepath.Join(units, "default.target"): "[Unit]\nRequires=dbus.service\n",
		filepath.Join(units, "dbus.socket"):    "[Unit]\nDefaultDependencies=no\n[Socket]\nListenStream=" + bus + "\n",
		filepath.Join(units, "dbus.service"): "[Unit]\nDefaultDependencies=no\nRequires=dbus.socket\nAfter=dbus.socket\n[Service]\nType=notify\n" +
			"ExecStart=/usr/bin/dbus-daemon --session --address=systemd: --nofork --nopidfile --systemd-activation\n",
		filepath.Join(system.units, "manager.service"): "[Unit]\nDefaultDependencies=no\n[Service]\nType=notify\nKillSignal=SIGKILL\nDelegate=yes\nExecStart=/lib/systemd/systemd --user\n" +
			"Environment=HOME=/root XDG_RUNTIME_DIR=" + runtime + " DBUS_SESSION_BUS_ADDRESS=unix:path=" + bus + " SYSTEMD_UNIT_PATH=" + units +
			" SYSTEMD_GENERATOR_PATH=/run/none SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/run/none\n",
	} {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	system.systemctl(t, "daemon-reload")
	system.systemctl(t, "start", "manager.service")
	t.Cleanup(func() { system.systemctl(t, "stop", "manager.service") })
	t.Setenv("XDG_RUNTIME_DIR", runtime)
	t.Setenv("DBUS_SESSION_BUS_ADDRESS", "")
	loadsAndUnloads(t, manager{units: units, flags: []string{"--user"}})
}
