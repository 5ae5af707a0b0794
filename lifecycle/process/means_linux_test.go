package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/supervise"
)

func TestAServerIsStartedByOneAtATime(t *testing.T) {
	s, err := newMeans(&plan{usesPort: true}, lifecycle.Deps{Consumer: "a", Logger: zap.NewNop()})
	require.NoError(t, err)
	m := s.(*means)
	m.closed = true
	require.ErrorIs(t, m.Start(t.Context(), lifecycle.Target{}), supervise.ErrClosed)
	require.ErrorIs(t, m.Start(t.Context(), lifecycle.Target{}), supervise.ErrClosed, "the turn is given back")
	m.turn <- struct{}{} // another is at it
	gone, leave := context.WithCancel(t.Context())
	leave()
	for range 20 {
		require.ErrorIs(t, m.Start(gone, lifecycle.Target{}), context.Canceled)
	}
}

// idle is a run of a server of which a test says when it ends.
func idle(grace time.Duration) (*means, *child) {
	p := &plan{grace: grace, shown: "server", redact: func(s string) string { return strings.ReplaceAll(s, "secret", "[redacted]") }}
	c := newChild(p, "", zap.NewNop(), &exec.Cmd{Process: &os.Process{Pid: 7}}, &record{Mark: "MARK"}, 9100)
	return &means{plan: p, deps: lifecycle.Deps{Consumer: "a", Upstream: "127.0.0.1:1"}, turn: make(chan struct{}, 1), now: c}, c
}

func TestAStopEndsWithTheServerOrSoonAfterItsContext(t *testing.T) {
	const allowed = 3 * time.Second
	for _, c := range []struct {
		gone, want time.Duration // 0: never
		fails      bool
	}{{time.Second, time.Second, false}, {4 * time.Second, 4 * time.Second, false}, {0, allowed + 2*time.Second, true}} {
		synctest.Test(t, func(t *testing.T) {
			_, run := idle(0)
			if c.gone > 0 {
				time.AfterFunc(c.gone, func() { close(run.gone) })
			}
			ctx, cancel := context.WithTimeout(t.Context(), allowed)
			defer cancel()
			began := time.Now()
			err := run.stop(ctx)
			require.Equal(t, c.want, time.Since(began))
			require.Equal(t, c.fails, err != nil)
			if c.fails {
				require.ErrorContains(t, err, "process group 7 was killed but is not gone")
			}
			<-run.ask
			require.Equal(t, c.want > allowed, closed(run.hurry), "it is hurried when its time is over, and not before")
			require.Equal(t, c.fails, run.stop(ctx) != nil, "once more does no harm")
		})
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestAConfigurationThatGoesStopsItsServerAndWaitsForItsLog(t *testing.T) {
	for name, c := range map[string]struct {
		gone, logged bool
		want         time.Duration
	}{
		"it ends":             {true, true, 0},
		"its log is slow":     {true, false, time.Second},
		"it can not be ended": {false, false, 5*time.Second + time.Second + 2*time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			m, run := idle(5 * time.Second)
			if c.gone {
				close(run.gone)
			}
			if c.logged {
				close(run.out.written)
			}
			began := time.Now()
			err := m.Close()
			require.Equal(t, c.want, time.Since(began), name)
			require.Equal(t, c.gone, err == nil, name)
			require.ErrorIs(t, m.Start(t.Context(), lifecycle.Target{}), supervise.ErrClosed, name)
		})
	}
	m, _ := idle(0)
	m.now = nil
	require.NoError(t, m.Close())
}

func TestWhatIsToldOfAServerFollowsItsLife(t *testing.T) {
	m, c := idle(0)
	m.now, m.lastExit, m.starts = nil, "exit status 3", 2
	running, err := m.Running(t.Context())
	require.NoError(t, err)
	require.False(t, running)
	require.False(t, m.Failed())
	require.False(t, m.Owns(os.Getpid()))
	require.Equal(t, "it was not started", m.Why())
	ended, address := m.Latest()
	require.Nil(t, ended)
	require.Empty(t, address)
	require.NoError(t, m.Stop(t.Context()))
	require.Equal(t, lifecycle.State{Starts: 2, LastExit: "exit status 3"}, m.State())

	m.now = c
	running, _ = m.Running(t.Context())
	require.True(t, running)
	require.False(t, m.Failed())
	require.Equal(t, "it runs", m.Why())
	ended, address = m.Latest()
	require.False(t, closed(ended))
	require.Equal(t, "127.0.0.1:9100", address)
	require.Equal(t, lifecycle.State{Starts: 2, LastExit: "exit status 3", Output: []string{}, Running: true, PID: 7, Address: "127.0.0.1:9100"}, m.State())
	c.port = 0
	require.Equal(t, "127.0.0.1:1", m.address(c), "its consumer says where")

	c.failed = true
	close(c.down)
	running, _ = m.Running(t.Context())
	require.False(t, running)
	require.True(t, m.Failed(), "whoever sees that it does not run sees that it failed")
	c.why = "killed by signal 9"
	close(c.ended)
	running, _ = m.Running(t.Context())
	require.False(t, running)
	require.True(t, m.Failed())
	require.Equal(t, "killed by signal 9", m.Why())
	require.Equal(t, "killed by signal 9", m.State().LastExit)
	require.Zero(t, m.State().PID)
	c.failed = false
	require.False(t, m.Failed())
	close(c.gone)
	require.False(t, m.Owns(7), "the number may be another's by now")
}

func TestWhyAServerCantBeStartedIsToldWithWhatToDo(t *testing.T) {
	m, _ := idle(0)
	for _, c := range []struct {
		err  error
		want string
	}{
		{exec.ErrNotFound, "is it installed, and does its `dir` exist?"},
		{&fs.PathError{Op: "chdir", Path: "/secret", Err: fs.ErrNotExist}, "server can't be started: chdir /[redacted]: file does not exist: is it installed"},
		{fs.ErrPermission, "may the user that it is to run as execute it"},
		{errors.New("secret fault"), "server can't be started: [redacted] fault"},
	} {
		require.ErrorContains(t, m.explain(c.err), c.want)
	}
	require.EqualError(t, m.explain(errors.New("fault")), "server can't be started: fault")
	for want, e := range map[string]exit{
		"exit status 0":             {},
		"exit status 3: last":       {status: 3},
		"killed by signal 9":        {signal: 9},
		"it ended (no child there)": {unknown: errors.New("no child there")},
	} {
		last := ""
		if e.status != 0 {
			last = "last"
		}
		require.Equal(t, want, e.text(last))
	}
	require.Equal(t, "killed by signal 9", exit{signal: 9}.text("last"))
}

func TestAServerOwnsItsGroupAndWhoeverCarriesItsMark(t *testing.T) {
	r := &record{Mark: "MARK", Leader: identity{10, 100}, Guard: identity{11, 101}}
	living := []proc{
		{pid: os.Getpid(), group: 10}, {pid: 10, group: 10, start: 100}, {pid: 11, group: 10, start: 101}, {pid: 12, group: 10}, {pid: 13, group: 13}, {pid: 14, group: 14},
	}
	marks := func(pid int) string { return map[int]string{10: "MARK", 11: "MARK", 13: "MARK", 14: "OTHER"}[pid] }
	pids := func(all []proc) (out []int) {
		for _, p := range all {
			out = append(out, p.pid)
		}
		return out
	}
	require.Equal(t, []int{10, 11, 12, 13}, pids(r.owned(living, true, marks)))
	require.Equal(t, []int{10, 11, 13}, pids(r.owned(living, false, marks)), "the number of the group may be another's by now")
	require.Empty(t, r.owned(nil, true, marks))
	for _, c := range []struct {
		living []proc
		want   bool
	}{
		{nil, false},
		{[]proc{{pid: 10, group: 10, start: 100}}, true},
		{[]proc{{pid: 10, group: 10, start: 99}}, false},
		{[]proc{{pid: 11, group: 10, start: 101}}, true},
		{[]proc{{pid: 11, group: 11, start: 101}}, false},
		{[]proc{{pid: 11, group: 10, start: 99}}, false},
		{[]proc{{pid: 12, group: 10, start: 100}}, false},
	} {
		require.Equal(t, c.want, r.groupLives(c.living), "%+v", c.living)
	}
}

// Until the guard is on record it could be taken for what the server has left.
func TestAServerIsNotSweptBeforeItsRecordIsWhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const nobody = 1<<22 + 1 // above the greatest PID that Linux gives away
		c := newChild(&plan{}, "", zap.NewNop(), &exec.Cmd{}, &record{Mark: "OF-NOBODY-AT-ALL", Leader: identity{PID: nobody}}, 0)
		close(c.down)
		go c.sweep()
		synctest.Wait()
		require.False(t, closed(c.swept))
		close(c.guarded)
		<-c.swept
	})
}

// It may carry no mark and have lost its parent, so that its group alone tells.
func TestAServerOwnsWhoIsInItsGroupWhateverItsParent(t *testing.T) {
	start := func(group int) int {
		cmd := exec.Command("sleep", "60")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pgid: group}
		require.NoError(t, cmd.Start())
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		return cmd.Process.Pid
	}
	leader, stranger := start(0), start(0)
	member := start(leader)
	m, run := idle(0)
	run.cmd.Process.Pid = leader
	require.True(t, m.Owns(leader))
	require.True(t, m.Owns(member))
	require.False(t, m.Owns(stranger))
}

func TestAPortWithTheRemainsOfAConnectionIsNotUntouched(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.Error(t, untouched(port))
	require.Error(t, silent(port))
	client, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	server, err := l.Accept()
	require.NoError(t, err)
	require.NoError(t, server.Close()) // whoever closes first keeps what remains
	_, err = client.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	require.NoError(t, client.Close())
	require.NoError(t, l.Close())
	require.Error(t, untouched(port))
	require.NoError(t, silent(port), "most servers can listen there")
}

func TestARecordIsKeptForNobodyElseAndWholeOrNotAtAll(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "broker")
	r := &record{Mark: "MARK", Consumer: "a", Boot: "b", Owner: identity{1, 2}, Leader: identity{3, 4}, Guard: identity{5, 6}}
	require.NoError(t, r.save(""))
	require.NoError(t, r.remove(""))
	require.NoError(t, r.remove(dir), "there is none")
	require.NoError(t, r.save(dir))
	all, err := records(dir)
	require.NoError(t, err)
	require.Equal(t, []*record{r}, all)
	for path, want := range map[string]fs.FileMode{filepath.Join(dir, folder): 0o700, r.path(dir): 0o600} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, want, info.Mode().Perm(), path)
	}
	entries, err := os.ReadDir(filepath.Join(dir, folder))
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing is left of the writing")
	require.NoError(t, os.Rename(r.path(dir), filepath.Join(dir, folder, "OTHER.json")))
	_, err = records(dir)
	require.ErrorContains(t, err, `it is the record of "MARK": remove it`)
	require.NoError(t, os.Remove(filepath.Join(dir, folder, "OTHER.json")))
	require.NoError(t, r.save(dir))
	require.NoError(t, r.remove(dir))
	all, err = records(dir)
	require.NoError(t, err)
	require.Empty(t, all)

	require.NoError(t, os.Mkdir(r.path(dir)+".new", 0o700))
	require.Error(t, r.save(dir), "it can't be written")

	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	_, err = records(file)
	require.Error(t, err, "it is no folder")
	require.Error(t, r.save(file))
	require.Error(t, r.remove(file))
}

func TestAServerIsToldWhatItMayUseOfItsGPUs(t *testing.T) {
	for _, c := range []struct {
		gpus                               []lifecycle.Placed
		uuids, indices, count, utilisation string
	}{
		{nil, "", "", "0", "0.9"},
		{[]lifecycle.Placed{{Index: 1, UUID: "GPU-b", Total: 1000, Claim: 500}}, "GPU-b", "1", "1", "0.5"},
		{[]lifecycle.Placed{{Index: 0, UUID: "GPU-a", Total: 1000, Claim: 500}, {Index: 2, UUID: "GPU-c", Total: 1000, Claim: 250}}, "GPU-a,GPU-c", "0,2", "2", "0.25"},
		{[]lifecycle.Placed{{Index: 0, UUID: "GPU-a"}, {Index: 2}}, "0,2", "0,2", "2", "0.9"},
		{[]lifecycle.Placed{{Index: 0, Total: 30000, Claim: 19999}}, "0", "0", "1", "0.6666"}, // no more than is booked
		{[]lifecycle.Placed{{Index: 0, Total: 1000, Claim: 1000}}, "0", "0", "1", "0.99"},
		{[]lifecycle.Placed{{Index: 0, Total: 100000, Claim: 1}}, "0", "0", "1", "0.01"},
		{[]lifecycle.Placed{{Index: 0, Total: 1000}}, "0", "0", "1", "0.9"},
		{[]lifecycle.Placed{{Index: 0, Claim: 10}}, "0", "0", "1", "0.9"},
	} {
		require.Equal(t, map[string]string{gpusItem: c.uuids, indicesItem: c.indices, countItem: c.count, parallelItem: c.count, utilisationItem: c.utilisation},
			valuesOf(lifecycle.Target{GPUs: c.gpus}), fmt.Sprint(c.gpus))
	}
}
