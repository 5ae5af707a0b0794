package broker

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// logging is a world whose log is read, through a core that hook may hold up.
func logging(t *testing.T, hook func(zapcore.Entry) error) (*world, *observer.ObservedLogs) {
	t.Helper()
	w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
	core, logs := observer.New(zapcore.WarnLevel)
	w.gen = w.generation(t, nil, server("a", 4*gpu.GiB))
	w.gen.Logger = zap.New(zapcore.RegisterHooks(core, hook))
	require.NoError(t, w.Push(w.gen))
	return w, logs
}

// refusals are the consumers and codes of the refusals that are kept.
func (w *world) refusals() (out []string) {
	for _, d := range w.Decisions() {
		if d.Kind == "refuse" {
			out = append(out, d.Slot+" "+string(d.Code))
		}
	}
	return out
}

func TestARefusalOutsideIsToldAsOneOfTheBrokersOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, logs := logging(t, func(zapcore.Entry) error { return nil })
		defer w.Close()
		w.TurnAway("a", "blocked", "it is not for clients")
		w.TurnAway("", "bad_request", "it names no model")
		_, err := w.Acquire(context.Background(), Request{Consumer: "nobody"})
		require.Error(t, err)
		synctest.Wait()
		want := []string{"a blocked", " bad_request", "nobody unknown_model"}
		require.Equal(t, want, w.refusals())
		require.EqualValues(t, len(want), w.Status().Scheduler.Refused)
		require.Zero(t, w.Status().Scheduler.TotalJobs, "none of them came to the scheduler")
		var told []string
		for _, e := range logs.FilterMessage("refuse").All() {
			told = append(told, e.ContextMap()["consumer"].(string)+" "+e.ContextMap()["code"].(string))
		}
		require.Equal(t, want, told)
		w.StopAdmitting()
		require.Error(t, w.Ending("a"))
		require.Equal(t, append(want, "a draining"), w.refusals(), "what Ending says is a refusal too")
		require.EqualValues(t, len(want)+1, w.Status().Scheduler.Refused)
	})
}

// A log that can't keep up holds nobody up, and says what it lacks.
func TestAFloodOfRefusalsIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		held := make(chan struct{})
		w, logs := logging(t, func(zapcore.Entry) error { <-held; return nil })
		defer w.Close()
		const flood = 5000
		for range flood {
			w.TurnAway("a", "blocked", "it is not for clients")
		}
		require.Len(t, w.refusals(), ringSize)
		require.EqualValues(t, flood, w.Status().Scheduler.Refused)
		close(held)
		synctest.Wait()
		lines := logs.FilterMessage("refuse").Len()
		require.LessOrEqual(t, lines, cap(w.posts)+1)
		lacking := 0
		for _, e := range logs.FilterMessage("decisions not logged").All() {
			lacking += int(e.ContextMap()["count"].(int64))
		}
		require.Equal(t, flood, lines+lacking)
	})
}

func TestThoseWhoWaitWhenTheBrokerEndsAreToldOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, logs := logging(t, func(zapcore.Entry) error { return nil })
		l, err := w.Acquire(context.Background(), Request{Consumer: "a"})
		require.NoError(t, err)
		got := make(chan error)
		go func() {
			_, err := w.Acquire(context.Background(), Request{Consumer: "a"})
			got <- err
		}()
		synctest.Wait()
		go w.Close()
		var refused *Refused
		require.ErrorAs(t, <-got, &refused)
		synctest.Wait()
		_, err = w.Acquire(context.Background(), Request{Consumer: "a"})
		require.ErrorAs(t, err, &refused)
		l.Release(scheduler.Served)
		require.Equal(t, []string{"a draining", "a draining"}, w.refusals())
		require.Equal(t, 2, logs.FilterMessage("refuse").Len())
		require.EqualValues(t, 2, w.Status().Scheduler.Refused)
	})
}
