//go:build real

// Package docker_test tests the lifecycle docker with a real Docker.
package docker_test

import (
	"context"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

func TestRealDockerLoadStartsAndUnloadStops(t *testing.T) {
	s := newSite(t, nil)
	report := s.Probe(t.Context())
	require.Equal(t, lifecycle.No, report.Loaded, report.Detail)
	s.load()

	state := s.state()
	require.True(t, state.Running)
	require.True(t, s.Running())
	require.True(t, s.Owns(state.Pid), "of its own control group")
	require.False(t, s.Owns(os.Getpid()))
	told := s.State()
	require.Equal(t, s.name, told.Container)
	require.Equal(t, state.Pid, told.PID)
	require.Equal(t, s.address, told.Address)
	require.Equal(t, 1, told.Starts)
	require.WithinDuration(t, time.Now(), told.StartedAt, patience)
	require.Equal(t, lifecycle.Yes, s.Probe(t.Context()).Loaded)

	confirmed, err := s.Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	require.True(t, confirmed)
	require.False(t, s.state().Running)
	require.False(t, s.Running())
	require.Empty(t, s.died, "it was told to end")
	require.Equal(t, "the broker stopped it", s.State().LastExit)
}

func TestRealDockerDeathIsNoticed(t *testing.T) {
	s := newSite(t, nil)
	s.load()
	s.exit(3)
	require.Equal(t, "exit status 3", s.death())
	require.False(t, s.Running())

	s.load()
	_, err := engine.api.ContainerKill(t.Context(), s.name, client.ContainerKillOptions{Signal: "SIGKILL"})
	require.NoError(t, err)
	require.Equal(t, "exit status 137 (signal 9, killed)", s.death())
	require.Equal(t, 2, s.State().Starts)
}

func TestRealDockerServerThatEndsAtOnceFailsTheLoad(t *testing.T) {
	s := newSite(t, []string{"-exit", "5"})
	begun := time.Now()
	err := s.Load(t.Context(), lifecycle.Target{})
	require.ErrorContains(t, err, "status 5")
	require.Less(t, time.Since(begun), patience/2)
}

func TestRealDockerRestartPolicyDoesNotFightAStop(t *testing.T) {
	s := newSite(t, nil, func(_ *container.Config, h *container.HostConfig) {
		h.RestartPolicy.Name = container.RestartPolicyAlways
	})
	s.load()
	_, err := s.Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	require.False(t, s.state().Running)

	s.load()
	first := s.state().Pid
	s.exit(1)
	require.Contains(t, s.death(), "exit status 1")
	require.Eventually(t, func() bool { return s.Probe(t.Context()).Loaded == lifecycle.Yes && s.Running() }, patience, 20*time.Millisecond, "it came back by itself")
	require.NotEqual(t, first, s.State().PID)
	require.Equal(t, 1, s.State().Starts-1, "that start was not ours")
}

func TestRealDockerRunningContainerIsAdoptedAndLeftAlone(t *testing.T) {
	s := newSite(t, nil)
	_, err := engine.api.ContainerStart(t.Context(), s.name, client.ContainerStartOptions{})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return s.Probe(t.Context()).Loaded == lifecycle.Yes }, patience, 20*time.Millisecond)
	require.True(t, s.Owns(s.state().Pid))
	s.load()
	require.Zero(t, s.State().Starts)
	require.NoError(t, s.Close())
	require.True(t, s.state().Running, "who did not start it does not stop it")

	s.reopen("")
	require.Equal(t, lifecycle.Yes, s.Probe(t.Context()).Loaded)
	s.exit(0)
	require.Contains(t, s.death(), "exit status 0")
}

func TestRealDockerCloseStopsWhatWasStarted(t *testing.T) {
	s := newSite(t, nil)
	s.load()
	require.NoError(t, s.Close())
	require.False(t, s.state().Running)
	require.Empty(t, s.died)
}

func TestRealDockerStubbornServerIsKilledAfterItsGrace(t *testing.T) {
	s := newSite(t, []string{"-stubborn"})
	s.reopen(`, "grace": "1s"`)
	s.load()
	begun := time.Now()
	_, err := s.Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(begun), time.Second)
	require.Equal(t, 137, s.state().ExitCode)
}

func TestRealDockerPausedContainerIsToldOfAndCanBeStopped(t *testing.T) {
	s := newSite(t, nil)
	s.load()
	_, err := engine.api.ContainerPause(t.Context(), s.name, client.ContainerPauseOptions{})
	require.NoError(t, err)
	report := s.Probe(t.Context())
	require.Equal(t, lifecycle.Wrong, report.Outcome)
	require.Contains(t, report.Detail, "docker unpause "+s.name)
	require.ErrorContains(t, s.Load(t.Context(), lifecycle.Target{}), "paused")
	require.True(t, s.Owns(s.state().Pid), "it keeps its memory")
	require.NoError(t, s.Close())
	require.Equal(t, container.StateExited, s.state().Status)
}

func TestRealDockerSignalNeedsANewerDocker(t *testing.T) {
	s := newSite(t, nil)
	s.reopen(`, "signal": "SIGINT"`)
	major, minor := apiVersion(t)
	err := s.Load(t.Context(), lifecycle.Target{})
	if major > 1 || minor >= 42 {
		require.NoError(t, err)
		_, err = s.Unload(t.Context(), lifecycle.Target{})
		require.NoError(t, err)
		require.Equal(t, 7, s.state().ExitCode)
		return
	}
	require.ErrorContains(t, err, "--stop-signal SIGINT")
	require.False(t, s.state().Running)
}

func apiVersion(t *testing.T) (major, minor int) {
	t.Helper()
	version := engine.api.ClientVersion()
	var err error
	for i, c := range version {
		if c == '.' {
			major, err = strconv.Atoi(version[:i])
			require.NoError(t, err)
			minor, err = strconv.Atoi(version[i+1:])
			require.NoError(t, err)
		}
	}
	return major, minor
}

func TestRealDockerMissingContainerIsNamed(t *testing.T) {
	s := newSite(t, nil)
	s.load()
	_, err := engine.api.ContainerRemove(t.Context(), s.name, client.ContainerRemoveOptions{Force: true})
	require.NoError(t, err)
	s.death()
	require.ErrorContains(t, s.Load(t.Context(), lifecycle.Target{}), "docker create --name "+s.name)
}

func TestRealDockerStartThatIsCalledOffLeavesNothing(t *testing.T) {
	s := newSite(t, []string{"-delay", "1h"})
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	require.Error(t, s.Load(ctx, lifecycle.Target{}))
	require.False(t, s.state().Running, "half a start keeps no memory")
}

// A new daemon finds the containers of the one before.
func TestRealDockerDeathIsNoticedOverARestartOfDocker(t *testing.T) {
	s := newSite(t, nil)
	s.load()
	engine.stop()
	report := s.Probe(t.Context())
	require.Equal(t, lifecycle.Wrong, report.Outcome)
	require.Contains(t, report.Detail, "is it running")
	require.True(t, s.Owns(s.State().PID), "nobody needs to be asked for that")
	require.Empty(t, s.died, "that Docker is away says nothing of the server")
	require.NoError(t, engine.start())
	s.exit(4)
	require.Contains(t, s.death(), "exit status 4")
}
