package gpubroker

import (
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	zaptest "go.uber.org/zap/zaptest/observer"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
)

func TestAStopRefusesWhatIsNewAndCutsWhatRunsAfterItsGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &pooled{broker: broker.New()}
		defer p.broker.Close()
		runs := new(job)
		runs.ResponseWriter = httptest.NewRecorder()
		var ended atomic.Int32
		runs.abort = func() { ended.Add(1) }
		p.running.add(runs, answering)
		core, logs := zaptest.New(zap.WarnLevel)
		p.stop(time.Second, zap.New(core))
		require.Error(t, p.broker.Ending("a"), "nothing is read for it any more")
		pass(time.Second - 1)
		require.Zero(t, ended.Load())
		pass(1 + 400*time.Millisecond) // five times a second
		synctest.Wait()
		require.EqualValues(t, 3, ended.Load(), "it is cut until it is gone")
		require.True(t, runs.isCut.Load())
		require.Equal(t, 1, logs.Len(), "which is said once")
		require.EqualValues(t, 1, logs.All()[0].ContextMap()["requests"])
		p.running.remove(runs)
		pass(time.Minute)
		synctest.Wait()
		p.running.add(runs, answering)
		pass(time.Minute)
		synctest.Wait()
		require.EqualValues(t, 3, ended.Load(), "once nothing runs it is over")
		p.grace.stop()
	})
}

func TestAStopThatFindsNothingRunningSaysNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &pooled{broker: broker.New()}
		defer p.broker.Close()
		core, logs := zaptest.New(zap.DebugLevel)
		p.stop(time.Second, zap.New(core))
		pass(time.Minute)
		synctest.Wait()
		require.Zero(t, logs.Len())
		p.grace.stop()
	})
}

func TestABodyIsNotReadForAProcessThatEnds(t *testing.T) {
	for name, route := range map[string]gpucaddyfile.Route{"of a consumer": {Consumer: "a"}, "by model": {ModelFrom: inBody}} {
		t.Run(name, func(t *testing.T) {
			h := newHandlerOf(t, route)
			h.pool.broker.StopAdmitting()
			w, r := post("POST", "/work", `{"model":"a"}`)
			r.Body = bodyFunc(func() error {
				t.Error("it is read")
				return nil
			})
			require.NoError(t, h.ServeHTTP(w, r, nothing))
			require.Equal(t, "draining", document(t, w).Code)
		})
	}
}

// Once no configuration has the broker nobody tells it that the process ends.
func TestABrokerThatHasLeftTheConfigurationStopsWithTheProcess(t *testing.T) {
	endRetiring() // of another test
	for name, c := range map[string]struct {
		retires, ended bool // it is the one that retires; it has ended before the process does
		stops          bool
	}{"it goes on": {true, false, true}, "it has ended": {true, true, false}, "it was taken up again": {false, false, false}} {
		synctest.Test(t, func(t *testing.T) {
			p := &pooled{broker: broker.New()}
			defer p.broker.Close()
			done := make(chan struct{})
			retiring.mu.Lock()
			if retiring.done = done; c.retires {
				retiring.pooled = p
			}
			retiring.mu.Unlock()
			defer func() {
				retiring.mu.Lock()
				retiring.pooled = nil
				retiring.mu.Unlock()
			}()
			var exits atomic.Bool
			p.stopWithProcess(time.Second, zap.NewNop(), exits.Load)
			pass(time.Minute)
			synctest.Wait()
			require.NoError(t, p.broker.Ending("a"), name)
			if c.ended {
				close(done)
				synctest.Wait()
			}
			exits.Store(true)
			pass(100 * time.Millisecond)
			synctest.Wait()
			require.Equal(t, c.stops, p.broker.Ending("a") != nil, name)
			p.grace.stop()
		})
	}
}
