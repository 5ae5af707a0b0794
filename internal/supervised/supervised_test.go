package supervised

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func over(ended <-chan struct{}) bool {
	select {
	case <-ended:
		return true
	default:
		return false
	}
}

func TestRecordTellsOneRunFromTheNext(t *testing.T) {
	var r Record
	require.Nil(t, r.Ended())
	r.See(View{End: "long ago"})
	require.Nil(t, r.Ended())
	require.False(t, r.Runs())

	r.See(View{Runs: true, Run: "a", PID: 1})
	first := r.Ended()
	require.False(t, over(first))
	r.See(View{Runs: true, Run: "a", PID: 2})
	require.Equal(t, first, r.Ended(), "the same run")
	require.Equal(t, 2, r.State().PID)

	r.See(View{Runs: true, Run: "b", PID: 3})
	require.True(t, over(first), "its end was not seen, but the next one runs")
	require.Equal(t, again, r.Why())
	second := r.Ended()
	require.False(t, over(second))

	r.See(View{End: "exit status 1"})
	require.True(t, over(second))
	require.Equal(t, "exit status 1", r.Why())
	r.See(View{End: "something else"})
	require.Equal(t, "exit status 1", r.Why(), "told once")
	require.False(t, r.State().Running)
	require.Zero(t, r.State().PID)
}

func TestRecordKnowsWhoStartedIt(t *testing.T) {
	var r Record
	r.See(View{Runs: true, Run: "a"})
	require.False(t, r.Ours(), "adopted")
	r.See(View{})

	r.Asking()
	require.True(t, r.Ours(), "it may start at any time")
	r.See(View{Runs: true, Run: "b"})
	r.Answered()
	require.True(t, r.Ours())
	require.Equal(t, 1, r.State().Starts)

	r.See(View{Runs: true, Run: "c"})
	require.False(t, r.Ours(), "somebody else has started it again")
	require.Equal(t, 1, r.State().Starts)
}

func TestRecordSaysThatTheBrokerStoppedIt(t *testing.T) {
	var r Record
	r.See(View{Runs: true, Run: "a"})
	r.Stopping()
	r.See(View{End: "killed by signal 15"})
	require.Equal(t, stopped, r.Why())
	r.See(View{Runs: true, Run: "b"})
	r.See(View{End: "killed by signal 15"})
	require.Equal(t, "killed by signal 15", r.Why(), "that time it was somebody else")
}

func TestCgroupsOfBothVersions(t *testing.T) {
	require.Equal(t, []string{"/system.slice/llama.service"}, parse(strings.NewReader("0::/system.slice/llama.service\n")))
	require.Equal(t, []string{"/docker/abc", "/docker/abc", "/"},
		parse(strings.NewReader("4:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/\nnonsense\n")))
	require.Equal(t, []string{"/a:b"}, parse(strings.NewReader("0::/a:b\n")))
}

func TestAProcessIsInItsOwnGroupOnly(t *testing.T) {
	require.NotEmpty(t, Cgroups(os.Getpid()))
	require.Empty(t, Cgroups(0))
	require.Empty(t, Cgroups(-1))
	require.False(t, InGroup(os.Getpid(), ""), "a unit without a group owns nothing")
	require.False(t, InGroup(os.Getpid(), "/"), "the root is everybody's")
	require.False(t, InGroup(os.Getpid(), "/nobody.slice"))
	for _, group := range Cgroups(os.Getpid()) {
		if group != "/" {
			require.True(t, InGroup(os.Getpid(), group))
			require.False(t, InGroup(os.Getpid(), group[:len(group)-1]), "part of a name is another group")
		}
	}
	require.Empty(t, Members(""))
	require.Empty(t, Members("/"))
	require.Empty(t, Members("/nobody.slice"))
}

func TestCgroupsOfAProcessThatIsGone(t *testing.T) {
	cmd := exec.Command("true")
	require.NoError(t, cmd.Run())
	require.Empty(t, Cgroups(cmd.Process.Pid))
}

func TestLineIsOneShortLine(t *testing.T) {
	require.Equal(t, "a b c", Line(" a\n\tb\x00 c "))
	require.LessOrEqual(t, len(Line(strings.Repeat("ä", 1000))), maxLine+len("…"))
}

func TestStateTellsTheStart(t *testing.T) {
	var r Record
	begun := time.Now()
	r.See(View{Runs: true, Run: "a", Started: begun})
	require.Equal(t, begun, r.State().StartedAt)
}
