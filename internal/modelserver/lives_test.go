package modelserver

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Under the race detector it also finds a restart that writes what URL reads.
func TestAServerThatIsSeenDeadHasClosedItsPort(t *testing.T) {
	for _, kind := range []Manner{Plain, KoboldCpp, TGI} {
		s := start(t, Options{Manner: kind, VRAM: gpu.GiB, Preloaded: true})
		addr := s.Addr()
		for range 20 {
			dialled := make(chan error, 1)
			go func() {
				if err := s.WaitFor(bound(t), func(st Stats) bool { return !st.Alive }); err != nil {
					dialled <- nil
					return
				}
				conn, err := net.Dial("tcp", s.Addr())
				if err == nil {
					_ = conn.Close()
				}
				dialled <- err
			}()
			s.Kill()
			require.Error(t, <-dialled, "%s: its port is still open", kind)
			reads := make(chan string, 1)
			go func() { reads <- s.URL() }()
			require.NoError(t, s.Restart())
			require.Equal(t, "http://"+addr, <-reads)
		}
		require.Equal(t, 20, s.Stats().Deaths)
	}
}

func TestASecondKillWaitsForTheFirst(t *testing.T) {
	s := start(t, Options{VRAM: gpu.GiB, Preloaded: true})
	for range 20 {
		done := make(chan struct{})
		go func() { defer close(done); s.Kill() }()
		s.Kill()
		require.Zero(t, s.Stats().Held, "its memory is free when Kill returns")
		<-done
		require.NoError(t, s.Restart())
	}
}

func TestAServerThatIsHeldStartsAnewOnceItMay(t *testing.T) {
	s := start(t, Options{VRAM: gpu.GiB, Faults: Faults{HoldStart: true}})
	want(t, 200, call(bound(t), "POST", s.URL()+"/control", `{"restart_after":"1ms"}`))
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return !st.Alive }))
	s.SetFaults(func(f *Faults) { f.HoldStart = false })
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Alive }))

	s.SetFaults(func(f *Faults) { f.HoldStart = true })
	want(t, 200, call(bound(t), "POST", s.URL()+"/control", `{"restart_after":"1ms"}`))
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return !st.Alive }))
	require.NoError(t, s.Close(), "a held start does not keep it from closing")
}

func TestAnUnloadBeforeTheFirstPartOfAWorkBreaksIt(t *testing.T) {
	s := start(t, Options{VRAM: gpu.GiB, Preloaded: true})
	l := s.current()
	m := l.models[s.Name()]
	release, err := l.acquire(bound(t), m, false)
	require.NoError(t, err)
	defer release()
	req := request{id: 1, work: new(work)}
	end := l.beginWork(req, m)
	defer end(false)
	require.NoError(t, s.Unload(bound(t)))
	require.ErrorIs(t, l.run(context.WithValue(bound(t), requestKey{}, req), m, time.Minute), errBroken)
}
