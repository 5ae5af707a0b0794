package process

import (
	"context"
	"testing"

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
