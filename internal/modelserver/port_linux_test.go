package modelserver

import (
	"errors"
	"net"
	"os/exec"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// A process that is being started has copies of all descriptors for a moment.
func TestAPortThatListensNoMoreRefusesAtOnceThoughProcessesAreStarted(t *testing.T) {
	var over atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		for !over.Load() {
			_ = exec.Command("true").Run()
		}
	}()
	for range 300 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		require.NoError(t, StopListening(l))
		c, err := net.Dial("tcp", l.Addr().String())
		if err == nil {
			_ = c.Close()
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%v", err)
		}
	}
	over.Store(true)
	<-done
}
