//go:build linux

package process_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/process"
)

func TestAHundredStartsLeaveNothing(t *testing.T) {
	o := open(t, settings(onPort("-workers", "1")))
	o.load(t)
	o.unload(t) // what is made once is made now
	goroutines, files, threads := runtime.NumGoroutine(), count(t, "fd"), count(t, "task")
	starts := 100
	if testing.Short() {
		starts = 25
	}
	var pids []int
	for range starts {
		pids = append(pids, o.load(t))
		o.unload(t)
	}
	for _, pid := range pids {
		require.Empty(t, process.GroupOf(pid))
	}
	require.Empty(t, process.Records(o.dir))
	require.Eventually(t, func() bool {
		return runtime.NumGoroutine() <= goroutines+1 && count(t, "fd") <= files // one asks this
	}, prompt, time.Millisecond, "%d goroutines were, %d files", goroutines, files)
	require.Less(t, count(t, "task"), threads+20, "threads")
	children, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", os.Getpid()))
	if err == nil {
		require.Empty(t, strings.TrimSpace(string(children)))
	}
}

func TestAStartThatLacksFilesLeavesNothing(t *testing.T) {
	o := open(t, settings(onPort()))
	o.load(t)
	o.unload(t) // what is made once is made now
	files := count(t, "fd")
	var all unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &all))
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &all)) }()
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	lowest := uint64(null.Fd())
	require.NoError(t, null.Close())
	var faults []string
	for room := uint64(0); ; room++ {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: lowest + room, Max: all.Max}))
		err := o.Load(ctx, whole)
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &all))
		cancel()
		if err == nil || errors.Is(err, context.DeadlineExceeded) { // it started, and perhaps nobody could ask it
			break
		}
		faults = append(faults, err.Error())
		require.Less(t, room, uint64(50), "%q", faults)
		require.Empty(t, process.Records(o.dir), "%q", faults)
		require.Eventually(t, func() bool { return count(t, "fd") <= files }, prompt, time.Millisecond, "%d files were: %q", files, faults)
	}
	require.NotEmpty(t, faults)
	for _, fault := range faults {
		require.Contains(t, fault, "too many open files")
	}
	o.unload(t)
}

func count(t *testing.T, of string) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/" + of)
	require.NoError(t, err)
	return len(entries)
}
