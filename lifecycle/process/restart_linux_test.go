package process

import (
	"context"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// What a server has started may outlive it for a moment, and hold memory of the GPU: the next one must not start beside it.
func TestAServerThatHasEndedIsStartedAgainOnceAllThatItStartedIsGone(t *testing.T) {
	p := &plan{command: []text{}, shown: "server"}
	before := newChild(p, "", zap.NewNop(), exec.Command("server"), &record{Leader: identity{PID: 1 << 30}}, 0)
	close(before.down)
	close(before.ended)
	m := &means{plan: p, deps: lifecycle.Deps{}.WithDefaults(), turn: make(chan struct{}, 1), now: before}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorContains(t, m.Start(ctx, lifecycle.Target{}), "process group 1073741824, which ran before, is not gone yet")
	require.Zero(t, m.starts)
}
