//go:build real

package docker_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/test/onecard"
)

// onCard is a container as a consumer of a real Caddy.
type onCard struct {
	t      *testing.T
	name   string
	config *container.Config
	host   *container.HostConfig
}

// newContainer makes a container that runs the pretending server of a card; alter may change it.
func newContainer(t *testing.T, c *onecard.Card, alter ...func(*container.Config, *container.HostConfig)) onCard {
	t.Helper()
	o := onCard{
		t: t, name: fmt.Sprintf("card-%d", time.Now().UnixNano()),
		config: &container.Config{Image: "modelserver", Cmd: append([]string{"/modelserver"}, c.Args()...)},
		// What it holds is told by its PID; a driver of a real card knows that of the host as well.
		host: &container.HostConfig{NetworkMode: "host", PidMode: "host", Binds: []string{c.Sim + ":" + c.Sim}},
	}
	for _, f := range alter {
		f(o.config, o.host)
	}
	create(t, o.name, o.config, o.host)
	return o
}

// mortal makes a container's server the one that can be told to do odd things.
func mortal(c *onecard.Card, args ...string) func(*container.Config, *container.HostConfig) {
	return func(config *container.Config, _ *container.HostConfig) {
		config.Image, config.Cmd = "mortal", append([]string{"/mortal", "-listen", c.Address}, args...)
	}
}

func (o onCard) Line() string { return line(o.name, "2s") }

func line(name, grace string) string {
	return fmt.Sprintf("docker %s {\nhost %s\ngrace %s\n}", name, os.Getenv("DOCKER_HOST"), grace)
}

func (o onCard) Start() {
	_, err := engine.api.ContainerStart(o.t.Context(), o.name, client.ContainerStartOptions{})
	require.NoError(o.t, err)
}

// PID also looks that Docker's words fit each other.
func (o onCard) PID() int {
	o.t.Helper()
	state := inspect(o.t, o.name)
	require.Equal(o.t, state.Running, state.Pid != 0)
	if !state.Running {
		require.Contains(o.t, []container.ContainerState{container.StateCreated, container.StateExited}, state.Status)
	}
	return state.Pid
}

func (o onCard) Kill() {
	_, err := engine.api.ContainerKill(o.t.Context(), o.name, client.ContainerKillOptions{Signal: "SIGKILL"})
	require.NoError(o.t, err)
}

func (o onCard) remove() {
	_, err := engine.api.ContainerRemove(o.t.Context(), o.name, client.ContainerRemoveOptions{Force: true})
	require.NoError(o.t, err)
}

func TestRealDockerContainerTakesTurnsWithItsRival(t *testing.T) {
	t.Parallel()
	c := onecard.New(t, nil)
	c.TakesTurns(newContainer(t, c))
}

func TestRealDockerContainerThatDiesIsNoticedAtOnce(t *testing.T) {
	c := onecard.New(t, nil)
	c.DeathIsNoticed(newContainer(t, c), "exit status 137 (signal 9, killed)")
}

func TestRealDockerContainerThatDiesAtWorkIsToldOf(t *testing.T) {
	t.Parallel()
	c := onecard.New(t, nil)
	c.DeathAtWorkIsTold(newContainer(t, c))
}

func TestRealDockerReloadLeavesAContainerAlone(t *testing.T) {
	t.Parallel()
	c := onecard.New(t, nil)
	c.ReloadLeavesItAlone(newContainer(t, c))
}

func TestRealDockerContainerThatRanBeforeStays(t *testing.T) {
	t.Parallel()
	c := onecard.New(t, nil)
	c.FoundRunningStays(newContainer(t, c))
}

func TestRealDockerContainerOutlivesAKilledCaddy(t *testing.T) {
	t.Parallel()
	c := onecard.New(t, nil)
	c.OutlivesAKilledCaddy(newContainer(t, c))
}

func TestRealDockerClientIsToldWhyAContainerCannotStart(t *testing.T) {
	t.Parallel()
	c := onecard.New(t, nil)
	o := newContainer(t, c, mortal(c, "-exit", "5"))
	c.Run("", o.Line())
	said := c.Fails()
	require.Contains(t, said, "exit status 5")
	require.NotEmpty(t, c.Status().Consumers["one"].Slots[0].CoolsUntil)
	require.Zero(t, c.Status().GPUs[0].Booked, "it keeps nothing from others")
	c.Serve("rival")
}

func TestRealDockerRivalWaitsForAContainersGrace(t *testing.T) {
	t.Parallel()
	c := onecard.New(t, nil)
	o := newContainer(t, c, mortal(c, "-stubborn"))
	c.Run("", line(o.name, "1s"))
	c.Serve("one")
	begun := time.Now()
	c.Serve("rival")
	require.GreaterOrEqual(t, time.Since(begun), time.Second)
	require.Zero(t, o.PID())
	require.Equal(t, 137, inspect(t, o.name).ExitCode, "it was killed")
	require.Equal(t, "the broker stopped it", c.State().LastExit)
}

func TestRealDockerContainerThatLacksRAMSaysSo(t *testing.T) {
	t.Parallel()
	info, err := engine.api.Info(t.Context(), client.InfoOptions{})
	require.NoError(t, err)
	if !info.Info.MemoryLimit {
		t.Skip("this kernel gives Docker no memory controller")
	}
	c := onecard.New(t, nil)
	o := newContainer(t, c, mortal(c), func(_ *container.Config, h *container.HostConfig) {
		h.Memory, h.MemorySwap = 32<<20, 32<<20
	})
	c.Run("probe_interval 1h", o.Line())
	c.Serve("one")
	a := c.Post("one", "/eat")
	require.Equal(t, 502, a.Status, "%s", a.Body)
	require.Equal(t, "server_died", a.Code)
	c.Until("its death is known", func() bool { return !c.State().Running })
	require.Contains(t, c.State().LastExit, "for lack of RAM (OOMKilled): raise the container's memory limit")
	c.Serve("one")
}

func TestRealDockerContainerThatIsRemovedIsToldOf(t *testing.T) {
	t.Parallel()
	c := onecard.New(t, nil)
	o := newContainer(t, c)
	c.Run("probe_interval 1h", o.Line())
	c.Serve("one")
	o.remove()
	c.Until("its booking is free", func() bool { return c.Status().GPUs[0].Booked == 0 })
	said := c.Fails()
	require.Contains(t, said, "knows no such container: make it with `docker create --name "+o.name)

	create(t, o.name, o.config, o.host)
	c.Serve("one") // once it has cooled down
	require.NotZero(t, o.PID())
}
