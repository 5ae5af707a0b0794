package docker

import (
	"fmt"
	"syscall"
	"time"

	"github.com/moby/moby/api/types/container"

	"github.com/gpu-broker/caddy-gpu-broker/internal/supervised"
)

// view is what Docker says of a container at one moment.
type view struct {
	id    string // the long one
	state container.State
}

// alive reports whether something of the container may have memory: a paused one
// has, one that waits to be started again has not.
func (v *view) alive() bool { return v.state.Running && !v.state.Restarting }

// seen is the view as a record takes it.
func (v *view) seen() supervised.View {
	started, _ := time.Parse(time.RFC3339Nano, v.state.StartedAt)
	out := supervised.View{Runs: v.alive(), Run: v.id + " " + v.state.StartedAt, PID: v.state.Pid, Started: started}
	if !out.Runs {
		out.End = v.end()
	}
	return out
}

// end says how the container's server ended, for people.
func (v *view) end() string {
	how := "exit " + status(v.state.ExitCode)
	switch {
	case v.state.OOMKilled:
		// Not the GPU's memory, so not in the words by which that is known.
		how += "; the kernel killed it for lack of RAM (OOMKilled): raise the container's memory limit"
	case v.state.Error != "":
		how += "; Docker says: " + supervised.Line(v.state.Error)
	case v.state.ExitCode == 0:
		how += "; it ended by itself, or somebody stopped it"
	}
	return how
}

// status is an exit status; those above 128 are a signal's.
func status(code int) string {
	text := fmt.Sprintf("status %d", code)
	if code > 128 && code < 128+65 {
		text += fmt.Sprintf(" (signal %d, %v)", code-128, syscall.Signal(code-128))
	}
	return text
}
