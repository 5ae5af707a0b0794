//go:build linux

package process_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-broker/caddy-gpu-broker/internal/bootid"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/process"
)

// workersOf waits until a server's group has its guard and so many workers, and returns them all.
func workersOf(t *testing.T, server, want int) []int {
	t.Helper()
	var members []int
	require.Eventually(t, func() bool {
		members = slices.DeleteFunc(process.GroupOf(server), func(pid int) bool { return pid == server })
		return len(members) == want+1
	}, patience, time.Millisecond)
	return members
}

// carriers are the processes that carry the mark of the only record in dir.
func carriers(t *testing.T, dir string) []int {
	t.Helper()
	marks := process.Records(dir)
	require.Len(t, marks, 1)
	entries, err := os.ReadDir("/proc")
	require.NoError(t, err)
	var pids []int
	for _, e := range entries {
		environ, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err != nil || !strings.Contains(string(environ), "GPU_BROKER_CHILD="+marks[0]) {
			continue
		}
		pids = append(pids, pidOf(t, e.Name()))
	}
	return pids
}

// isDeaf reports whether a process ignores SIGTERM.
func isDeaf(pid int) bool {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(raw), "\nSigIgn:\t")
	var ignored uint64
	_, err := fmt.Sscanf(rest, "%x", &ignored)
	return err == nil && ignored&(1<<(syscall.SIGTERM-1)) != 0
}

func pidOf(t *testing.T, text string) (pid int) {
	t.Helper()
	for _, c := range text {
		require.True(t, c >= '0' && c <= '9', text)
		pid = 10*pid + int(c-'0')
	}
	return pid
}

func reap(t *testing.T, dir string) int {
	t.Helper()
	n, err := process.Reap(dir, zap.NewNop())
	require.NoError(t, err)
	return n
}

func TestFC28AKilledCaddyLeavesNoServerAndNoWorkerAtOnce(t *testing.T) {
	for name, args := range map[string][]string{
		"a server":                   {"-workers", "0"},
		"with workers":               {"-workers", "3"},
		"with workers that are deaf": {"-workers", "3", "-deafworkers", "-deaf"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			c := startCaddy(t, settings(onPort(args...)), dir)
			require.NotZero(t, c.server, c.told)
			rest := workersOf(t, c.server, int(args[1][0]-'0'))
			guarded := append(carriers(t, dir), append(rest, c.server)...) // with its guard
			c.kill()
			began := time.Now()
			soonGone(t, guarded...)
			t.Logf("gone after %s", time.Since(began))
			require.Zero(t, reap(t, dir))
			require.Empty(t, process.Records(dir), "the record has served")
		})
	}
}

func TestFC28WhatLeftTheGroupOfAKilledCaddyIsReapedAtTheNextStart(t *testing.T) {
	for name, args := range map[string][]string{
		"it heeds the signal": {"-workers", "2", "-setsid"},
		"it is deaf":          {"-workers", "2", "-setsid", "-deafworkers"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			c := startCaddy(t, settings(onPort(args...)), dir)
			require.NotZero(t, c.server, c.told)
			var all []int
			require.Eventually(t, func() bool {
				all = carriers(t, dir)
				return len(all) == 4 // the server, its guard, and two
			}, patience, 10*time.Millisecond)

			require.Zero(t, reap(t, dir), "its Caddy lives")
			require.NotZero(t, process.StartOf(c.server))
			require.Len(t, process.Records(dir), 1)

			c.kill()
			soonGone(t, c.server)
			var left []int
			require.Eventually(t, func() bool { left = carriers(t, dir); return len(left) == 2 }, prompt, time.Millisecond, "they have survived")
			soonGone(t, slices.DeleteFunc(slices.Clone(all), func(pid int) bool { return slices.Contains(left, pid) })...) // the guard has lost its mark before that
			deaf := slices.Contains(args, "-deafworkers")
			require.Eventually(t, func() bool {
				return !deaf || !slices.ContainsFunc(carriers(t, dir), func(pid int) bool { return !isDeaf(pid) })
			}, patience, time.Millisecond, "they were asked before they could be deaf")
			began := time.Now()
			require.Equal(t, 2, reap(t, dir))
			gone(t, all...)
			if deaf {
				require.GreaterOrEqual(t, time.Since(began), 2*time.Second, "they get time to end by themselves")
			}
			require.Empty(t, process.Records(dir))
			require.Zero(t, reap(t, dir))
		})
	}
}

func TestWithoutAShellTheServerStillDiesAndItsWorkersAreReaped(t *testing.T) {
	dir := t.TempDir()
	c := startCaddy(t, settings(onPort("-workers", "2")), dir, func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "TEST_SHELL=/no/such/sh") })
	require.NotZero(t, c.server, c.told)
	var all []int
	require.Eventually(t, func() bool {
		all = carriers(t, dir)
		return len(all) == 3
	}, patience, 10*time.Millisecond)
	c.kill()
	soonGone(t, c.server)
	require.Equal(t, 2, reap(t, dir))
	gone(t, all...)
}

func TestThatThereIsNoShellIsToldOnce(t *testing.T) {
	t.Cleanup(process.SetShell("/no/such/sh"))
	core, logs := observer.New(zapcore.WarnLevel)
	o := open(t, settings(onPort("-workers", "1")), func(deps *lifecycle.Deps) { deps.Logger = zap.New(core) })
	for range 2 {
		pid := o.load(t)
		workers := o.workers(t, 1)
		o.unload(t)
		gone(t, append(workers, pid)...)
	}
	require.Equal(t, 1, logs.FilterMessageSnippet("there is no /no/such/sh").Len())
}

// A number alone may be another process's by now; with the time of its start it names a process for good.
func TestAProcessIsKnownWithItsParentItsGroupAndTheTimeOfItsStart(t *testing.T) {
	uptime := func() (ticks float64) {
		raw, err := os.ReadFile("/proc/uptime")
		require.NoError(t, err)
		_, err = fmt.Sscan(string(raw), &ticks)
		require.NoError(t, err)
		return 100 * ticks
	}
	before := uptime()
	pid := stranger(t)
	start := float64(process.StartOf(pid))
	require.Equal(t, os.Getpid(), process.ParentOf(pid))
	require.Equal(t, []int{pid}, process.GroupOf(pid))
	require.GreaterOrEqual(t, start, before-1)
	require.LessOrEqual(t, start, uptime()+1)
}

// stranger is a process that nobody here may touch.
func stranger(t *testing.T) int {
	t.Helper()
	cmd := exec.Command(me)
	cmd.Env = append(os.Environ(), roleVariable+"=server")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}

func TestAStrangerWithAReusedNumberIsNotTouched(t *testing.T) {
	pid := stranger(t)
	start := process.StartOf(pid)
	deadOwner := func(dir, boot string, leaderStart uint64) {
		require.NoError(t, process.Forge(dir, "MARK", boot, os.Getpid(), pid, process.StartOf(os.Getpid())-1, leaderStart))
	}
	for name, forge := range map[string]func(dir string){
		"it started at another time": func(dir string) { deadOwner(dir, bootid.Get(), start-1) },
		"the host was booted since":  func(dir string) { deadOwner(dir, "another", start) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			forge(dir)
			require.Len(t, process.Records(dir), 1)
			require.Zero(t, reap(t, dir))
			require.Equal(t, start, process.StartOf(pid))
			require.Empty(t, process.Records(dir))
		})
	}
	t.Run("else it would be ended", func(t *testing.T) {
		dir := t.TempDir()
		deadOwner(dir, bootid.Get(), start)
		require.Equal(t, 1, reap(t, dir))
		gone(t, pid)
	})
}

// One that is about to end has lost its mark, and may hold memory of a GPU until it is gone.
func TestAServerHasEndedOnlyOnceAllThatWasSeenOfItHas(t *testing.T) {
	alive, gone := stranger(t), 1<<22+2
	require.True(t, process.Kill(alive))
	require.True(t, process.Kill(alive, gone))
	require.NotZero(t, process.StartOf(alive), "it carries no mark, so it is not touched")
	require.False(t, process.Kill(gone))
	require.False(t, process.Kill())
}

// Servers that are asked twice, as with Ctrl+C, drop their work.
func TestWhatAKilledCaddyLeftIsAskedToEndOnce(t *testing.T) {
	dir, told := t.TempDir(), filepath.Join(t.TempDir(), "told")
	cmd := exec.Command("/bin/sh", "-c", `trap 'echo asked >> "$0"; asked=1' TERM; echo ready >> "$0"; i=0; while [ $i -lt 4 ]; do sleep 0.05; [ -z "$asked" ] || i=$((i+1)); done`, told)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
	text := func() string {
		raw, _ := os.ReadFile(told)
		return string(raw)
	}
	require.Eventually(t, func() bool { return text() == "ready\n" }, patience, time.Millisecond)
	pid := cmd.Process.Pid
	require.NoError(t, process.Forge(dir, "MARK", bootid.Get(), os.Getpid(), pid, process.StartOf(os.Getpid())-1, process.StartOf(pid)))
	core, logs := observer.New(zapcore.WarnLevel)
	n, err := process.Reap(dir, zap.New(core))
	require.NoError(t, err)
	require.NotZero(t, n)
	once := map[int64]bool{}
	for _, l := range logs.FilterMessageSnippet("an earlier Caddy has left is ended").All() {
		ofPID := l.ContextMap()["pid"].(int64)
		require.False(t, once[ofPID], "of each once")
		once[ofPID] = true
	}
	require.Len(t, once, n)
	require.NoError(t, <-ended)
	require.Equal(t, "ready\nasked\n", text())
}

// One that is about to end may show no mark any more.
func TestWhatHasLostItsMarkIsWaitedFor(t *testing.T) {
	dir, ready := t.TempDir(), filepath.Join(t.TempDir(), "ready")
	cmd := exec.Command("/bin/sh", "-c", `trap 'exec env -i sleep 0.3' TERM; echo > "$0"; while :; do sleep 0.05; done`, ready)
	cmd.Env = append(os.Environ(), "GPU_BROKER_CHILD=A-MARK-TO-LOSE")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
	})
	require.Eventually(t, func() bool {
		_, err := os.Stat(ready)
		return err == nil
	}, patience, time.Millisecond)
	const nobody = 1<<22 + 1 // above the greatest PID that Linux gives away
	require.NoError(t, process.Forge(dir, "A-MARK-TO-LOSE", bootid.Get(), os.Getpid(), nobody, process.StartOf(os.Getpid())-1, 1))
	require.NotZero(t, reap(t, dir))
	gone(t, cmd.Process.Pid)
}

func TestTwoCaddysDoNotGiveAwayTheSamePort(t *testing.T) {
	config := settings([]string{"-port", "{gpu_broker.port}"})
	addresses := make(chan string, 2)
	for range cap(addresses) {
		go func() { addresses <- startCaddy(t, config, t.TempDir()).address }()
	}
	first, second := <-addresses, <-addresses
	require.NotEmpty(t, first)
	require.NotEmpty(t, second)
	require.NotEqual(t, first, second)
}

func TestReapWithoutRecordsIsNoError(t *testing.T) {
	require.Zero(t, reap(t, ""))
	require.Zero(t, reap(t, filepath.Join(t.TempDir(), "not there")))
}

func TestARecordThatCantBeReadIsToldAndDoesNotKeepTheOthersFromBeingReaped(t *testing.T) {
	dir, pid := t.TempDir(), stranger(t)
	require.NoError(t, process.Forge(dir, "MARK", bootid.Get(), os.Getpid(), pid, 1, process.StartOf(pid)))
	broken := filepath.Join(dir, "processes", "BROKEN.json") // which is read before the other
	require.NoError(t, os.WriteFile(broken, []byte("{"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "processes", "A.note"), nil, 0o600)) // which is no record
	require.NoError(t, os.Symlink("nowhere", filepath.Join(dir, "processes", "B.json")))    // as if its owner had just removed it
	n, err := process.Reap(dir, zap.NewNop())
	require.ErrorContains(t, err, broken)
	require.NotContains(t, err.Error(), "B.json")
	require.Equal(t, 1, n)
	gone(t, pid)
}

func TestAServerIsStartedThoughItsRecordCantBeKept(t *testing.T) {
	notAFolder := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(notAFolder, nil, 0o600))
	o := open(t, settings(onPort()), func(deps *lifecycle.Deps) { deps.Dir = notAFolder })
	o.load(t)
	require.NotZero(t, o.logs.FilterMessageSnippet("record can't be kept").Len())
	require.Zero(t, o.logs.FilterMessageSnippet("record can't be removed").Len())
	o.unload(t)
	require.Equal(t, 1, o.logs.FilterMessageSnippet("record can't be removed").Len())

	o = open(t, settings(onPort()))
	o.load(t)
	o.unload(t)
	require.Zero(t, o.logs.FilterMessageSnippet("record can't").Len())
}
