package broker

import (
	"context"
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func TestTheOldestThatWaitsIsToldThoughAHundredMoreUrgentOnesAreListed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		pass(10 * time.Second)
		running, err := w.Acquire(t.Context(), Request{Consumer: "a", Priority: 100})
		require.NoError(t, err)
		require.Empty(t, w.Status().Scheduler.OldestQueued)
		waiting, leave := context.WithCancel(t.Context())
		done := make(chan struct{})
		wait := func(priority int) {
			go func() {
				_, err := w.Acquire(waiting, Request{Consumer: "a", Priority: priority})
				if err == nil {
					t.Error("it was admitted")
				}
				done <- struct{}{}
			}()
			synctest.Wait()
		}
		came := time.Now()
		wait(200)
		pass(time.Minute)
		for range 100 {
			wait(50)
		}
		st := w.Status()
		require.Equal(t, 101, st.Scheduler.QueueDepth)
		require.Len(t, st.Queue, 100)
		for _, q := range st.Queue {
			require.Equal(t, 50, q.Priority, "the bulk request is not listed")
		}
		require.Equal(t, stamp(came), st.Scheduler.OldestQueued)
		leave()
		for range 101 {
			<-done
		}
		require.Empty(t, w.Status().Scheduler.OldestQueued)
		running.Release(scheduler.Served)
	})
}

func TestTheMostUrgentPriorityIsToldApartFromNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		defer w.Close()
		m.tells(lifecycle.Model{Name: "b", Resident: gpu.GiB})
		pass(10 * time.Second)
		told := func() any {
			t.Helper()
			text, err := json.Marshal(w.Status().Consumers["m"])
			require.NoError(t, err)
			var doc map[string]any
			require.NoError(t, json.Unmarshal(text, &doc))
			return doc["last_priority"]
		}
		serve := func(model string, priority int) Lease {
			t.Helper()
			l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: model, Priority: priority})
			require.NoError(t, err)
			return l
		}
		require.Nil(t, told(), "nothing has run yet")
		require.Equal(t, "READY", w.stateOf(t, "m/b"))
		w.Touch("m")
		require.Nil(t, told(), "it was used, but by no request that runs")
		l := serve("b", 0)
		require.EqualValues(t, 0, told(), "it runs")
		l.Release(scheduler.Served)
		require.EqualValues(t, 0, told())
		pass(time.Second)
		serve("a", 7).Release(scheduler.Served)
		require.EqualValues(t, 7, told(), "of the model that was used last")
		pass(time.Second)
		serve("b", 0).Release(scheduler.Served)
		require.EqualValues(t, 0, told())
	})
}

func TestStatusTellsWhatADriverTellsOfItsGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB))
		defer w.Close()
		pass(10 * time.Second)
		g := w.Status().GPUs[0]
		require.Nil(t, g.Utilisation)
		require.Nil(t, g.Temperature)
		require.Nil(t, g.Power)
		w.gpu.mu.Lock()
		w.gpu.tells = func(d *gpu.Device) { d.Utilisation, d.Temperature, d.Power = 0, 61, 287.5 }
		w.gpu.mu.Unlock()
		pass(time.Minute)
		text, err := json.Marshal(w.Status().GPUs[0])
		require.NoError(t, err)
		var doc map[string]any
		require.NoError(t, json.Unmarshal(text, &doc))
		require.EqualValues(t, 0, doc["utilisation"], "it has nothing to do, which it does tell")
		require.EqualValues(t, 61, doc["temperature"])
		require.EqualValues(t, 287.5, doc["power"])
	})
}

func TestABudgetBelowTheLoadIsWarnedAbout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zapcore.WarnLevel)
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		defer w.Close()
		hasty := server("a", 4*gpu.GiB)
		hasty.Budget = caddy.Duration(800 * time.Millisecond)
		w.gen = w.generation(t, nil, hasty)
		w.gen.Logger = zap.New(core)
		require.NoError(t, w.Push(w.gen))
		pass(10 * time.Second)
		_, err := w.Acquire(t.Context(), Request{Consumer: "a"})
		require.ErrorContains(t, err, "budget of 800ms")
		pass(time.Second) // the load goes on
		said := logs.FilterMessage("short_budget").All()
		require.Len(t, said, 1)
		require.Equal(t, zapcore.WarnLevel, said[0].Level)
		require.Equal(t, "a", said[0].ContextMap()["consumer"])
		require.Contains(t, said[0].ContextMap()["reason"], "a load takes 1s and its budget is 800ms")
	})
}
