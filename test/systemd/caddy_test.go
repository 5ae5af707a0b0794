//go:build real

package systemd_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/test/onecard"
)

// onCard is a unit as a consumer of a real Caddy.
type onCard struct {
	t    *testing.T
	unit string
}

// newUnit writes a unit that runs the pretending server of a card, with further lines in its section [Service].
func newUnit(t *testing.T, c *onecard.Card, lines ...string) onCard {
	t.Helper()
	u := onCard{t: t, unit: fmt.Sprintf("card-%d.service", counted.Add(1))}
	text := fmt.Sprintf("[Unit]\nDefaultDependencies=no\nStartLimitIntervalSec=0\n[Service]\nTimeoutStopSec=10\nExecStart=%s %s\n%s\n",
		pretending, strings.Join(c.Args(), " "), strings.Join(lines, "\n"))
	require.NoError(t, os.WriteFile(filepath.Join(system.units, u.unit), []byte(text), 0o644))
	system.systemctl(t, "daemon-reload")
	t.Cleanup(func() {
		_ = exec.Command("systemctl", "stop", u.unit).Run() // it may be gone
	})
	return u
}

func (u onCard) Line() string { return "systemd " + strings.TrimSuffix(u.unit, ".service") }

func (u onCard) Start() { system.systemctl(u.t, "start", u.unit) }

// PID also looks that systemd's words fit each other.
func (u onCard) PID() int {
	u.t.Helper()
	said := system.systemctl(u.t, "show", "--property=MainPID", "--property=ActiveState", u.unit)
	var pid int
	var state string
	_, err := fmt.Sscanf(said, "MainPID=%d\nActiveState=%s", &pid, &state)
	require.NoError(u.t, err, said)
	if pid == 0 {
		require.Contains(u.t, []string{"inactive", "failed"}, state)
	}
	return pid
}

func (u onCard) Kill() { require.NoError(u.t, syscall.Kill(u.PID(), syscall.SIGKILL)) }

func TestRealSystemdUnitTakesTurnsWithItsRival(t *testing.T) {
	t.Parallel()
	c := onecard.New(t, nil)
	c.TakesTurns(newUnit(t, c))
}

func TestRealSystemdUnitThatDiesIsNoticedAtOnce(t *testing.T) {
	c := onecard.New(t, nil)
	c.DeathIsNoticed(newUnit(t, c), "killed by signal 9 (killed)")
}

func TestRealSystemdUnitThatDiesAtWorkIsToldOf(t *testing.T) {
	t.Parallel()
	c := onecard.New(t, nil)
	c.DeathAtWorkIsTold(newUnit(t, c))
}

func TestRealSystemdReloadLeavesAUnitAlone(t *testing.T) {
	t.Parallel()
	c := onecard.New(t, nil)
	c.ReloadLeavesItAlone(newUnit(t, c))
}

func TestRealSystemdUnitThatRanBeforeStays(t *testing.T) {
	t.Parallel()
	c := onecard.New(t, nil)
	c.FoundRunningStays(newUnit(t, c))
}

func TestRealSystemdUnitOutlivesAKilledCaddy(t *testing.T) {
	t.Parallel()
	c := onecard.New(t, nil)
	c.OutlivesAKilledCaddy(newUnit(t, c))
}

func TestRealSystemdClientIsToldWhyAUnitCannotStart(t *testing.T) {
	t.Parallel()
	t.Run("its server fails", func(t *testing.T) {
		c := onecard.New(t, nil)
		c.Run("", newUnit(t, c, "ExecStart=", "ExecStart="+program+" -exit 5").Line())
		said := c.Fails()
		require.Contains(t, said, "exit status 5")
		require.NotEmpty(t, c.Status().Consumers["one"].Slots[0].CoolsUntil)
		require.Zero(t, c.Status().GPUs[0].Booked, "it keeps nothing from others")
		c.Serve("rival")
	})
	t.Run("nobody wrote it", func(t *testing.T) {
		c := onecard.New(t, nil)
		c.Run("", "systemd nobody-wrote-it")
		said := c.Fails()
		require.Contains(t, said, "knows no unit nobody-wrote-it.service")
		require.Contains(t, said, "systemctl daemon-reload")
	})
}

func TestRealSystemdClientIsToldWhatPolkitLacks(t *testing.T) {
	c := onecard.New(t, &syscall.Credential{Uid: nobody, Gid: nobody})
	u := newUnit(t, c, "User=nobody")
	c.Run("", u.Line())
	said := c.Fails()
	for _, want := range []string{"user nobody", "polkit", "org.freedesktop.systemd1.manage-units", "packaging/polkit/50-gpu-broker.rules"} {
		require.Contains(t, said, want)
	}
	require.Zero(t, u.PID())

	allow(t, u.unit)
	c.Serve("one") // once it has cooled down
	require.NotZero(t, u.PID())
	c.Halt()
	require.Zero(t, u.PID(), "it may stop it as well")
}
