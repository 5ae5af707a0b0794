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
		for _, told := range []struct {
			utilisation, temperature int
			power                    float64
		}{{0, 61, 287.5}, {100, 0, 0}} { // nought is something, too
			w.gpu.mu.Lock()
			w.gpu.tells = func(d *gpu.Device) {
				d.Utilisation, d.Temperature, d.Power = told.utilisation, told.temperature, told.power
			}
			w.gpu.mu.Unlock()
			pass(time.Minute)
			text, err := json.Marshal(w.Status().GPUs[0])
			require.NoError(t, err)
			var doc map[string]any
			require.NoError(t, json.Unmarshal(text, &doc))
			require.EqualValues(t, told.utilisation, doc["utilisation"])
			require.EqualValues(t, told.temperature, doc["temperature"])
			require.EqualValues(t, told.power, doc["power"])
		}
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

// shown reads the status of a consumer as a program gets it.
func (w *world) shown(t testing.TB, name string) map[string]any {
	t.Helper()
	text, err := json.Marshal(w.Status().Consumers[name])
	require.NoError(t, err)
	var doc map[string]any
	require.NoError(t, json.Unmarshal(text, &doc))
	return doc
}

func TestStatusTellsOfAServerOnTheSecondGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := server("a", 4*gpu.GiB)
		a.GPU = 1
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB, more: 1}, servers: map[string]*fakeServer{}}
		w.gen = w.generation(t, nil, a, server("b", 2*gpu.GiB))
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		pass(10 * time.Second)
		st := w.Status()
		require.Len(t, st.Consumers, 2, "nobody else")
		require.EqualValues(t, 32*gpu.GiB, st.Total)
		require.EqualValues(t, 32*gpu.GiB, st.Free)
		require.Zero(t, st.Used)
		w.serves(t, "b")
		l, err := w.Acquire(t.Context(), Request{Consumer: "a", Priority: 7})
		require.NoError(t, err)
		synctest.Wait()
		st = w.Status()
		require.Equal(t, 1, st.Scheduler.InFlight)
		require.EqualValues(t, 32*gpu.GiB, st.Free+st.Used)
		require.Equal(t, st.GPUs[0].Used+st.GPUs[1].Used, st.Used)
		doc := w.shown(t, "a")
		require.EqualValues(t, 1, doc["active"])
		require.EqualValues(t, 4096, doc["gpu_resident_mib"])
		slots := doc["slots"].([]any)
		require.Len(t, slots, 1)
		slot := slots[0].(map[string]any)
		require.EqualValues(t, 1, slot["gpu_index"])
		require.Equal(t, []any{1.0}, slot["gpu_indices"])
		require.Equal(t, "READY", slot["state"])
		require.Equal(t, "open", slot["gate"])
		require.Equal(t, "config", slot["claim_source"])
		require.EqualValues(t, 4*gpu.GiB, slot["claim"])
		require.EqualValues(t, 4*gpu.GiB, slot["booking"])
		require.NotContains(t, slot, "adopted")
		require.NotContains(t, slot, "model")
		require.NotContains(t, doc, "process", "nobody but its owner starts it")
		l.Release(scheduler.Served)
		require.EqualValues(t, 0, w.shown(t, "a")["active"])
	})
}

func TestConsumersThatShareAProcessHaveTheirPartsOfItsMemoryInTheStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		part := server("part", gpu.GiB)
		part.Shares = "whole"
		w := newWorld(t, nil, server("whole", 3*gpu.GiB), part)
		defer w.Close()
		pass(10 * time.Second)
		require.Zero(t, w.Status().Consumers["part"].ResidentMiB)
		w.serves(t, "part")
		synctest.Wait()
		st := w.Status().Consumers
		require.EqualValues(t, 3*1024, st["whole"].ResidentMiB)
		require.EqualValues(t, 1024, st["part"].ResidentMiB)
		require.Equal(t, "whole", st["part"].Shares)
		require.True(t, st["part"].Loaded)
		require.Empty(t, st["part"].Slots)
		require.Empty(t, st["whole"].Shares)
		require.EqualValues(t, 1, st["part"].TotalRequests)
		require.Zero(t, st["whole"].TotalRequests)
	})
}

func TestStatusCountsRequestsThatRunAndWaitForAllModelsOfAConsumer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		defer w.Close()
		m.tells(lifecycle.Model{Name: "a", Resident: gpu.GiB}, lifecycle.Model{Name: "b", Resident: gpu.GiB})
		pass(10 * time.Second)
		synctest.Wait()
		require.EqualValues(t, 4*1024, w.Status().Consumers["m"].ResidentMiB, "of both models")
		turn, err := w.Acquire(context.Background(), Request{Consumer: "m", Turn: true})
		require.NoError(t, err)
		require.Equal(t, 1, w.Status().Consumers["m"].Active, "what takes a turn only")
		turn.Release(scheduler.Served)
		ends := make(chan struct{})
		for _, r := range []Request{{Model: "a"}, {Model: "a"}, {Model: "b"}, {Turn: true}, {Turn: true}} {
			r.Consumer = "m"
			go func() {
				l, err := w.Acquire(context.Background(), r)
				if err != nil {
					t.Error(err)
				}
				<-ends
				l.Release(scheduler.Served)
			}()
			synctest.Wait()
		}
		st := w.Status()
		require.Equal(t, 1, st.Consumers["m"].Active)
		require.Equal(t, 4, st.Consumers["m"].Waiting)
		require.Equal(t, 4, st.Scheduler.QueueDepth)
		require.EqualValues(t, 6, st.Consumers["m"].TotalRequests)
		require.Len(t, st.Consumers["m"].Slots, 2, "what takes turns only is no slot to people")
		for _, q := range st.Queue {
			require.NotContains(t, q.Consumer+"|", "/|", "nor has it a name")
		}
		close(ends)
		synctest.Wait()
		pass(time.Second)
		require.Zero(t, w.Status().Consumers["m"].Waiting)
		require.Zero(t, w.Status().Consumers["m"].Active)
	})
}
